"""Everything that reads bytes of others, each with valid samples: what the fuzzers are run over.

``read`` gets the bytes that are to be read and a folder of its own. It may raise an error of ours
and no other, and it returns in bounded time and memory.
"""

import contextlib
import hashlib
import io
import shutil
import struct
import tempfile
import zlib
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec

from tests.agent.builders import identity
from tests.collector.alerting import Place
from tests.collector.rows import OTHER_RUN, RUN, START, STEPS, Writer, seqs_stored
from tests.fuzz.mutation import sealed
from tests.fuzz.target import Target
from trainer_hooks.recovery.checkpoints import manifest as manifests
from trainer_hooks.run_paths import read_earlier_plan
from trainvitals.cli.main import main
from trainvitals.errors import FormatError
from trainvitals.identity import new_run_id
from trainvitals.io import segments
from trainvitals.io.client import collector_on, read_tokens
from trainvitals.io.completions import Completion, StoredCompletions, completions_of
from trainvitals.io.heartbeat import HEARTBEAT_FILE, HeartbeatWriter, read_heartbeat
from trainvitals.io.journal import JournalWriter
from trainvitals.io.journal_reader import JournalReader
from trainvitals.io.mailbox import Mailbox
from trainvitals.io.rundir import HaltMarker, RunDir
from trainvitals.io.sample_ids import samples_of
from trainvitals.io.spool import Spool, SpoolPosition, read_batches
from trainvitals.io.spool_files import STATE_FILE, load_state
from trainvitals.policy import load_judge_config
from trainvitals.policy.plan import BatchWindow, PlanLine
from trainvitals.policy.state import DurablePolicyState
from trainvitals.records import (
    EVENT_SCHEMA,
    Command,
    Decision,
    DecisionMade,
    Finding,
    FindingRaised,
    Heartbeat,
    NamesDefined,
    Note,
    RankStarted,
    RunEnded,
    RunInfo,
    RunStarted,
    decode_events,
)
from trainvitals.views import RunsQuestion
from trainvitals.wire import decode_batch, split_batches
from vitals_agent.collector_endpoint import make_collector_finder
from vitals_agent.state_dir import AgentStateDir
from vitals_collector.alerts.receivers import load_notifier_settings
from vitals_collector.ingest.ingest import store_bodies
from vitals_collector.queries.open import open_folder
from vitals_collector.storage.store import open_store

NODE = "node-XY"


# ------------------------------------------------------------------------------ wire and events


def batches() -> list[bytes]:
    writer = Writer("rank:1", node=NODE)
    return [
        writer.steps(range(3), loss=1.0, grad_norm=[0.5, float("nan"), float("inf")]),
        writer.events(*events()),
        writer.scalars(1, {0: 0.5, 1: 2.0}),
        writer.steps([3]) + writer.scalars(1, {2: 1.0}),
        Writer(f"node:{NODE}", node=NODE).node_rows([1, 2]),
        Writer(f"node:{NODE}", node=NODE).process_rows(1, {0: (100, 1)}),
    ]


def events() -> list:
    finding = Finding(kind="spike", level="actionable", step=1, detector="x", reason="words")
    decision = Decision(
        ledger_seq=1, action="skip_step", step=1, decided_at_step=2, attempt=1, reason="why",
        rule="nonfinite", cause="data",
    )  # fmt: skip
    started = RankStarted(rank=1, local_rank=1, world_size=2, pid=100, node=NODE)
    return [
        RunStarted(info=RunInfo(name="first", config={"lr": 0.1, "a.b": "c"}, tags=("x",))),
        started,
        NamesDefined(stream="scalars", names={1: "eval/loss"}),
        FindingRaised(finding=finding),
        DecisionMade(decision=decision),
        Note(code="x", text="hello" * 400),
        RunEnded(state="failed", reason="Error: x"),
    ]


def read_wire(_: Path, raw: bytes) -> None:
    for part in split_batches(raw):
        batch = decode_batch(part)
        if batch.header.stream == "events":
            list(decode_events(batch.header.stream_schema, batch.rows))


class Collector:
    """A store with the engine that watches it; a fresh one now and then, for it only grows."""

    num_examples = 100

    def __init__(self) -> None:
        self._place: Place | None = None
        self._num = 0

    def store_beside_others(self, _: Path, raw: bytes) -> str:
        """Store the batch in one body with two sound ones; return its error's code, if any.

        The sound ones are stored, and no part of the collector fails.
        """
        if self._place is None or self._num % self.num_examples == 0:
            self.close()
            self._place = Place(open_store("sqlite://"))
        self._num += 1
        store = self._place.store
        runs = [new_run_id(START + self._num * 2_000_000 + i * 1_000_000) for i in range(2)]
        first, last = (Writer("rank:0", run=run) for run in runs)
        body = [first.steps([0, 1], loss=1.0), raw, last.events(Note(code="n", text="t"))]
        ((one, made_up, other),) = store_bodies(store, [body], START)
        assert (2, 1) == (one.reply.num_new, other.reply.num_new)
        assert [0, 1] == seqs_stored(store, run=runs[0])
        self._place.clock.advance(5)
        self._place.look()
        failures = dict(store.counters.failures)
        store.counters.failures.clear()
        assert {} == failures
        return made_up.reply.code

    def close(self) -> None:
        if self._place is not None:
            self._place.store.close()


def read_folder(folder: Path, raw: bytes) -> None:
    """Have the commands read a folder in which one run has the batch; the sound run is shown."""
    shutil.rmtree(folder)
    sound = Writer(run=OTHER_RUN, node=NODE)
    for run, parts in ((RUN, [raw]), (OTHER_RUN, [sound.events(*events()), sound.steps([0, 1])])):
        spool = RunDir.create(folder, run).agent_dir(NODE) / "spool"
        spool.mkdir()
        (spool / "000000.tvs").write_bytes(b"".join(parts))
    with open_folder(folder) as opened:
        listed = {run.run_id: run.last_step for run in opened.reader.ask(RunsQuestion())}
    assert 1 == listed[OTHER_RUN]
    for command in (
        ("runs", folder),
        ("show", RUN, "--dir", folder),
        ("why", folder / RUN, 0),
        ("tail", folder / RUN),
        ("query", "steps", folder / RUN),
    ):
        shown = printed(*command)
        assert not unprintable(shown), (command, unprintable(shown))


def printed(*arguments: object) -> str:
    """Return what a command writes to both; one that ends by an exception of ours has 1 or 2."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as stop:
            code = int(stop.code or 0)
    assert code in (0, 1, 2), code
    assert "Traceback" not in out.getvalue(), out.getvalue()
    return out.getvalue()


def unprintable(text: str) -> set[str]:
    return {c for c in text if not c.isprintable() and c != "\n"}


# ------------------------------------------------------------------------------ journal and spool


@cache
def _segments() -> list[bytes]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "journal"
        writer = JournalWriter(folder, identity(rank=1), segment_bytes=1 << 14)
        steps, said = writer.open_stream(STEPS), writer.open_stream(EVENT_SCHEMA)
        for step in range(5):
            steps.append([step, 1, 1, 1, *[None] * (len(STEPS.columns) - 4)])
        for event in events():
            said.append_event(event, step=1, attempt=1, time_unix_ns=1, monotonic_ns=1)
        writer.close()
        return [path.read_bytes().rstrip(b"\0") for path in sorted(folder.glob("*.seg"))]


def resealed_segment(raw: bytes) -> bytes:
    size = int.from_bytes(raw[8:12], "little")
    head = raw[16 : 16 + size]
    return raw[:12] + zlib.crc32(head).to_bytes(4, "little") + raw[16:]


def read_journal(folder: Path, raw: bytes) -> None:
    folder.chmod(0o700)
    for index, part in enumerate((raw, *_segments())):
        path = folder / segments.segment_name("steps", index)
        path.write_bytes(part)
        path.chmod(0o600)
    reader = JournalReader(folder)
    for _ in range(3):
        with contextlib.suppress(FormatError):
            reader.read()
    assert reader.identity is not None
    reader.release("steps", 1)
    reader.take_end()


def read_closed(folder: Path, raw: bytes) -> None:
    folder.chmod(0o700)
    (folder / segments.CLOSED).write_bytes(raw)
    (folder / segments.CLOSED).chmod(0o600)
    JournalReader(folder).take_end()


@cache
def _spool(name: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        spool = Spool(Path(folder) / "spool", max_bytes=1 << 20, keep=True)
        writer = Writer("rank:1", node=NODE)
        for step in range(6):
            spool.append(writer.steps([step]))
        spool.close()
        (path,) = (Path(folder) / "spool").glob(name)
        return path.read_bytes()


def read_spool(folder: Path, raw: bytes) -> None:
    whole = Writer("rank:0").steps([1])
    (folder / "000000.tvs").write_bytes(raw)
    (folder / "000001.tvs").write_bytes(whole)
    found = list(read_batches(folder))
    assert found[-1] == (SpoolPosition(1, len(whole)), whole)


def read_spool_state(folder: Path, raw: bytes) -> None:
    (folder / STATE_FILE).write_bytes(raw)
    load_state(folder / STATE_FILE)


def resealed_state(raw: bytes) -> bytes:
    state = raw.partition(b'"state":')[2][:-1]
    return b'{"crc":%d,"state":%s}' % (zlib.crc32(state), state)


def read_mailbox(folder: Path, raw: bytes) -> None:
    folder.chmod(0o700)
    path = folder / "mailbox"
    path.write_bytes(raw[:4096].ljust(4096, b"\0"))
    path.chmod(0o600)
    with Mailbox.open(path) as box:
        box.number()
        box.read()


def resealed_mailbox(raw: bytes) -> bytes:
    size = int.from_bytes(raw[16:20], "little")
    covered = raw[8:16] + raw[16:20]
    return (
        raw[:20]
        + zlib.crc32(raw[24 : 24 + size], zlib.crc32(covered)).to_bytes(4, "little")
        + (raw[24:])
    )


def read_beat(folder: Path, raw: bytes) -> None:
    """What a rank says of itself, as the agent reads it."""
    path = folder / HEARTBEAT_FILE
    path.write_bytes(raw)
    path.chmod(0o600)
    read_heartbeat(folder)


def resealed_beat(raw: bytes) -> bytes:
    """Return the page with a checksum that is right: the word itself is then decoded."""
    if len(raw) < 24:
        return raw
    beat, size = struct.unpack_from("<QI", raw, 8)
    body = raw[24 : 24 + size]
    crc = zlib.crc32(body, zlib.crc32(struct.pack("<QI", beat, size)))
    return raw[:20] + struct.pack("<I", crc) + raw[24:]


@cache
def _beat() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        writer = HeartbeatWriter(Path(folder))
        calls = {"0": {9: "all_reduce(4)"}}
        word = Heartbeat(beat=1, monotonic_ns=5, sequences={"0": 9}, last_collectives=calls)
        writer.write(word)
        writer.close()
        return (Path(folder) / HEARTBEAT_FILE).read_bytes()


@cache
def _mailbox() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o700)
        with Mailbox.create(Path(folder) / "box") as box:
            box.put(_command())
        return (Path(folder) / "box").read_bytes()


def _command() -> Command:
    return Command(
        number=5, run_id=RUN, action="halt", reason="XY", issued_by="me", issued_unix_ns=1,
        expires_unix_ns=2,
    )  # fmt: skip


# ------------------------------------------------------------------------------ the run directory


def read_in_run_dir(name: str, read: Callable[[RunDir], object], folder: Path, raw: bytes) -> None:
    run_dir = RunDir.create(folder, RUN)
    path = run_dir.path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(raw)
    path.chmod(0o600)
    read(run_dir)


def _manifest(folder: Path) -> Path:
    return folder / "step-00000120-1763712486000123"


def manifest_bytes() -> bytes:
    body = msgspec.to_builtins(
        manifests.Manifest(
            id="step-00000120-1763712486000123",
            run_id=RUN,
            step=120,
            attempt=1763712486000123,
            state="verified",
            world_size=1,
            torch_version="2",
            num_bytes=3,
            files={".metadata": manifests.FileEntry(3, "0" * 64)},
        )
    )
    return with_checksum(body)


def with_checksum(body: dict[str, Any]) -> bytes:
    """Return a manifest with the SHA-256 of itself without one."""
    checksum = hashlib.sha256(msgspec.json.encode(body | {"checksum": ""})).hexdigest()
    return msgspec.json.encode(body | {"checksum": checksum})


def resealed_manifest(raw: bytes) -> bytes:
    with contextlib.suppress(ValueError, RecursionError):
        body = msgspec.json.decode(raw)
        if isinstance(body, dict):
            return with_checksum(body)
    return raw


def read_manifest(folder: Path, raw: bytes) -> None:
    checkpoint = _manifest(folder)
    checkpoint.mkdir(exist_ok=True)
    (checkpoint / manifests.MANIFEST).write_bytes(raw)
    manifests.peek(checkpoint)
    manifests.check(checkpoint)


# ------------------------------------------------------------------------------ settings, addresses


def read_toml(folder: Path, raw: bytes) -> None:
    path = folder / "settings.toml"
    path.write_bytes(raw)
    path.chmod(0o600)
    load_judge_config({"VITALS_CONFIG": str(path)})


def read_receivers(folder: Path, raw: bytes) -> None:
    path = folder / "receivers.toml"
    path.write_bytes(raw)
    path.chmod(0o600)
    load_notifier_settings(path)


def read_addresses(folder: Path, raw: bytes) -> None:
    (folder / "collector.json").touch(0o600)
    (folder / "collector.json").write_bytes(raw)
    collector_on(folder)
    make_collector_finder(str(folder), None, {})()


def read_agent_file(folder: Path, raw: bytes) -> None:
    """Start an agent where one runs already; the error names that one as its file tells."""
    first, second = AgentStateDir(folder, folder), AgentStateDir(folder, folder)
    first.acquire()
    try:
        (folder / "agent.json").write_bytes(raw)
        second.acquire()
    finally:
        first.release()


def read_token_file(folder: Path, raw: bytes) -> None:
    path = folder / "tokens.json"
    path.write_bytes(raw)
    path.chmod(0o600)
    read_tokens(path)


COLLECTOR = Collector()

RECEIVERS = b"""
public_url = "https://example.com"
[[receivers]]
name = "hook"
kind = "webhook"
url = "https://example.com/hook"
secret = "x"
"""
SETTINGS = b"""
[ladder]
margin = 3
[outlier]
window = 128
[[rules]]
name = "loss is high"
when = "loss > 3"
"""
TOKENS = b'{"ingest":"aaaa","read":"bbbb","control":"cccc"}'
ADDRESS = b'{"url":"http://127.0.0.1:8470","pid":1,"node":""}'
AGENT = b'{"pid":1,"node":"a","url":"http://127.0.0.1:1","token_file":""}'
SAMPLES = (
    b'{"step":3,"attempt":1,"epoch":0,"first_batch":1,"num_batches":1,"sample_ids":[1,2]}\n' * 3
)
COMPLETIONS = msgspec.json.encode(
    StoredCompletions(
        step=3,
        attempt=1,
        finding="policy_collapse",
        onset_step=3,
        reported_step=9,
        samples=(Completion(prompt="2 + 2 =", completion="4", reward=0.5),),
    )
)
MARKER = HaltMarker(reason="XY", step=1, time_unix_ns=1)
PLAN = b"".join(
    msgspec.json.encode(
        msgspec.to_builtins(
            PlanLine(DurablePolicyState(attempt=number), window=BatchWindow(0, number, 2))
        )
    )
    + b"\n"
    for number in range(3)
)


def of_run(name: str, sample: bytes, read: Callable[[RunDir], object]) -> Target:
    """Return the target that is one file of a run directory."""
    return Target(name=name, samples=lambda: [sample], read=partial(read_in_run_dir, name, read))


try:
    from tests.plugins.fuzz_targets import TARGETS as OF_PLUGINS
except ModuleNotFoundError as missing:
    if missing.name != "tests.plugins":
        raise
    OF_PLUGINS = []  # plugins and their tests were removed

TARGETS = [
    Target(name="wire", samples=batches, read=read_wire, reseal=sealed, weight=200),
    Target(
        name="ingest",
        samples=lambda: batches()[:3],
        read=COLLECTOR.store_beside_others,
        reseal=sealed,
        weight=40,
        is_traced=False,
    ),
    Target(
        name="folder",
        samples=lambda: batches()[:3],
        read=read_folder,
        reseal=sealed,
        weight=4,
        is_traced=False,
    ),
    Target(name="journal", samples=_segments, read=read_journal, reseal=resealed_segment),
    Target(name="closed", samples=lambda: [b'{"next_seq":{"steps":5}}'], read=read_closed),
    Target(name="spool", samples=lambda: [_spool("*.tvs")], read=read_spool),
    Target(
        name="spool-state",
        samples=lambda: [_spool(STATE_FILE)],
        read=read_spool_state,
        reseal=resealed_state,
    ),
    Target(name="heartbeat", samples=lambda: [_beat()], read=read_beat, reseal=resealed_beat),
    Target(
        name="mailbox", samples=lambda: [_mailbox()], read=read_mailbox, reseal=resealed_mailbox
    ),
    Target(
        name="manifest",
        samples=lambda: [manifest_bytes()],
        read=read_manifest,
        reseal=resealed_manifest,
        is_partial=True,
    ),
    of_run("run.json", msgspec.json.encode(RunInfo(name="first", project="XY")), RunDir.info),
    of_run("HALTED", msgspec.json.encode(MARKER), RunDir.halted),
    of_run("plan.jsonl", PLAN, read_earlier_plan),
    of_run("command.key", b"0123456789abcdef" * 4, RunDir.command_key),
    of_run("commands/5.json", msgspec.json.encode(_command()), RunDir.take_commands),
    of_run("data/rank-0.jsonl", SAMPLES, lambda run_dir: list(samples_of(run_dir.path, 3))),
    of_run(
        "completions/step-00000003-1.json",
        COMPLETIONS,
        lambda run_dir: list(completions_of([run_dir.path], 3)),
    ),
    Target(name="settings", samples=lambda: [SETTINGS], read=read_toml),
    Target(name="receivers", samples=lambda: [RECEIVERS], read=read_receivers),
    Target(name="address", samples=lambda: [ADDRESS], read=read_addresses),
    Target(
        name="agent.json",
        samples=lambda: [AGENT],
        read=read_agent_file,
        is_partial=True,
    ),
    Target(name="tokens", samples=lambda: [TOKENS], read=read_token_file),
    *OF_PLUGINS,
]
