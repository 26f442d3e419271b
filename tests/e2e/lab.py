"""Real programs and real torchrun ranks on this machine; all of them end with the test."""

import contextlib
import math
import os
import secrets
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import duckdb
import httpx
import msgspec
import pytest

from tests.support.forked import COMMANDS, NAME, TRAINING
from tests.trainer_hooks.short_demo import PACE, SMALL
from trainvitals.io.client import CollectorClient, read_tokens
from trainvitals.rows import STREAMS
from trainvitals.testing.faults import FaultPlan
from vitals_collector.numbers.lake_catalogue import KEYS, decode_column_name
from vitals_collector.numbers.lake_engine import find_duckdb_extension

DEADLINE_SECONDS = 120.0
PROGRAM = """
import sys
import torch
import trainer_hooks
from trainvitals.errors import VitalsError
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
try:
    with trainer_hooks.watch(model, optimizer, run="unlucky", tags="a tag") as monitor:
        for _ in range(30):
            model(torch.ones(2, 4)).square().mean().backward()
            monitor.step()
    print("trained", monitor.run_id, sorted(monitor.swallowed_errors))
except VitalsError as error:
    sys.exit(str(error))
"""
"""A short training, for where what is around it goes wrong."""
ENDLESS = 100_000
"""Steps of a training that a test ends."""
RowKey = tuple[str, str, str, int]
"""Source, incarnation, stream, sequence number; of an event that of its last row."""
_CHECKSUM_BYTES = 4
"""Before the body of an event."""


def until(condition: Callable[[], object], what: str, seconds: float = DEADLINE_SECONDS) -> None:
    """Look again and again until the condition holds, and rest longer than a look takes."""
    deadline = time.monotonic() + seconds
    began = time.monotonic()
    while not condition():
        assert time.monotonic() < deadline, f"did not happen within {seconds} s: {what}"
        took = time.monotonic() - began
        time.sleep(max(0.02, took, min(1.0, 4 * took)))
        began = time.monotonic()


class Lab:
    """Starts programs with one mark in their environment, by which all they started is found."""

    def __init__(self, folder: Path, shared: Path) -> None:
        self.folder = folder
        self.shared = shared
        self.runs = folder / "runs"
        self.data = folder / "collector"
        self.mark = f"VITALS_E2E_MARK={secrets.token_hex(6)}"
        self.processes: list[subprocess.Popen[bytes]] = []

    def environ(self, **more: str) -> dict[str, str]:
        """Return a clean environment: the developer's own settings are not in it."""
        name, _, value = self.mark.partition("=")
        clean = {key: v for key, v in os.environ.items() if not key.startswith("VITALS_")}
        return {
            **clean,
            name: value,
            NAME: value,
            "VITALS_DIR": str(self.runs),
            "VITALS_SHM": str(self.shared),
            "XDG_DATA_HOME": str(self.folder / "data"),
            "XDG_CACHE_HOME": str(self.folder / "cache"),
            "OMP_NUM_THREADS": "1",
            **more,
        }

    def start(self, name: str, *command: str, **environ: str) -> subprocess.Popen[bytes]:
        """Start a command in a session of its own, as a terminal would; its output is a file."""
        with self.log(name).open("ab") as output:
            forks = COMMANDS if "trainvitals" in command else TRAINING
            process = forks.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self.environ(**environ),
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def log(self, name: str) -> Path:
        """Return the file with a program's output."""
        return self.folder / f"{name}.log"

    def vitals(self, *arguments: object, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        return COMMANDS.run(
            [sys.executable, "-m", "trainvitals", *map(str, arguments)],
            env=self.environ(**environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DEADLINE_SECONDS,
        )

    def start_vitals(self, *arguments: object, **environ: str) -> subprocess.Popen[bytes]:
        """Start a program; its log has the command's name."""
        words = [str(a) for a in arguments]
        return self.start(words[0], sys.executable, "-m", "trainvitals", *words, **environ)

    def collector(self, port: int, *options: object, **environ: str) -> subprocess.Popen[bytes]:
        """Start the collector and wait until it answers."""
        listen = ("--data", self.data, "--listen", f"127.0.0.1:{port}")
        process = self.start_vitals("collector", *listen, *options, **environ)
        until(lambda: _answers(port) or process.poll() is not None, "the collector answers")
        assert process.poll() is None, self.log("collector").read_text()
        return process

    def agent(self, port: int, *options: object) -> subprocess.Popen[bytes]:
        """Start an agent that ships to the collector on ``port``."""
        where = ("--collector", f"https://127.0.0.1:{port}", "--token-file", self.tokens)
        return self.start_vitals("agent", "--dir", self.runs, *where, *options)

    def train(
        self,
        *torchrun: str,
        steps: int,
        mode: str = "guard",
        faults: FaultPlan | None = None,
        name: str = "training",
        **environ: str,
    ) -> subprocess.Popen[bytes]:
        """Start the demo's training under torchrun; one of very many steps takes its time."""
        if steps >= ENDLESS:
            environ = {PACE: "0.02", SMALL: "1", **environ}
        return self.start(
            name,
            *(sys.executable, "-m", "torch.distributed.run", *torchrun),
            *("-m", "tests.trainer_hooks.short_demo", "--steps", str(steps), "--mode", mode),
            VITALS_DEMO_FAULTS=(faults or FaultPlan()).to_json(),
            **environ,
        )

    @property
    def tokens(self) -> Path:
        """The collector's tokens."""
        return self.data / "tokens.json"

    def client(self, port: int) -> CollectorClient:
        """Return a client that may read."""
        tokens = read_tokens(self.tokens)
        return CollectorClient(f"https://127.0.0.1:{port}", tokens.read, tls=tokens.tls)

    def run_id(self) -> str:
        """Return the only run's id, once there is one."""
        until(lambda: list(self.runs.glob("[0-9A-Z]*/run.json")), "the run begins")
        (path,) = self.runs.glob("[0-9A-Z]*/run.json")
        return path.parent.name

    def alive(self) -> dict[int, str]:
        """Return every process with our mark and its command line, whoever its parent is now."""
        found = {}
        name = self.mark.partition("=")[2]
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                environ = (path / "environ").read_bytes().split(b"\0")
                if self.mark.encode() in environ or name == (path / "comm").read_text().strip():
                    command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    found[int(path.name)] = command.strip()
        return found

    def close(self) -> None:
        """Kill what is left, and wait for it."""
        while left := self.alive():
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for process in self.processes:
                process.wait()
        for process in self.processes:
            process.wait()


@contextlib.contextmanager
def open_lab(folder: Path) -> Iterator[Lab]:
    """Give a lab whose journals lie in real shared memory: on a disk a SIGKILL may lose rows."""
    if not Path("/dev/shm").is_dir():
        pytest.skip("no /dev/shm")
    shared = Path(tempfile.mkdtemp(prefix="vitals-e2e-", dir="/dev/shm"))
    lab = Lab(folder, shared)
    try:
        yield lab
    finally:
        lab.close()
        shutil.rmtree(shared)


def free_port() -> int:
    """Return a port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def as_bytes(values: Mapping[str, object]) -> bytes:
    """Return a row's values as bytes that are equal where they are, NaN or not."""
    # Parquet files that are merged may give a NaN another sign.
    one_nan = {name: math.nan if value != value else value for name, value in values.items()}
    return msgspec.msgpack.encode(sorted(one_nan.items()))


def stored_rows(data: Path) -> Counter[tuple[RowKey, bytes]]:
    """Return how often each row and each event is in a collector's data, past its own reading."""
    found: Counter[tuple[RowKey, bytes]] = Counter()
    with duckdb.connect(config={"allow_unsigned_extensions": True}) as engine:
        for name in ("ducklake", "sqlite_scanner"):
            engine.execute(f"LOAD '{find_duckdb_extension(name)}'")
        engine.execute(
            f"ATTACH 'ducklake:sqlite:{data / 'lake' / 'catalogue.sqlite'}' AS lake"
            f" (READ_ONLY, OVERRIDE_DATA_PATH true, DATA_PATH '{data / 'lake' / 'data'}/',"
            " META_BUSY_TIMEOUT 10000)"
        )
        tables = {name for (name,) in engine.execute("SHOW TABLES FROM lake").fetchall()}
        for stream in tables & set(STREAMS):
            asked = engine.execute(f"SELECT * FROM lake.{stream}")
            names = [column[0] for column in asked.description]
            for row in asked.fetchall():
                values = dict(zip(names, row, strict=True))
                key = (values["source"], values["incarnation"], stream, values["seq"])
                written = {
                    decode_column_name(place): value
                    for place, value in values.items()
                    if place not in KEYS and value is not None
                }
                found[key, as_bytes(written)] += 1
    query = "SELECT source, incarnation, seq, step, attempt, time_unix_ns, body FROM events"
    address = f"file:{data / 'vitals.db'}?mode=ro"
    with contextlib.closing(sqlite3.connect(address, uri=True, timeout=30)) as database:
        for source, incarnation, seq, *values, body in database.execute(query):
            key = (source, incarnation, "events", seq)
            found[key, as_event(*values, body[_CHECKSUM_BYTES:])] += 1
    return found


def as_event(step: int, attempt: int, time_unix_ns: int, body: bytes) -> bytes:
    """Return an event as bytes."""
    return msgspec.msgpack.encode((step, attempt, time_unix_ns, body))


def _answers(port: int) -> bool:
    for scheme in ("https", "http"):
        address = f"{scheme}://127.0.0.1:{port}/healthz"
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(address, timeout=2.0, trust_env=False, verify=False).is_success
    return False
