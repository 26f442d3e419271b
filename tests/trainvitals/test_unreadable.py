"""Bytes of others are read or refused with an error of ours, never with another one.

Whoever reads them does so for everybody: one batch must not fail the requests of all agents, one
file not the listing of all runs.
"""

import random
import zlib
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from tests.collector.rows import OTHER_RUN, RUN, Writer
from trainvitals.errors import VitalsError
from trainvitals.io.client import read_tokens
from trainvitals.io.rundir import HaltMarker, RunDir
from trainvitals.io.spool import Spool
from trainvitals.io.spool_files import STATE_FILE, read_state
from trainvitals.records import Note, RunInfo, decode_events
from trainvitals.views import RunsQuestion
from trainvitals.wire import decode_batch, split_batches
from vitals_collector.queries.open import open_folder

NUM_MUTANTS = 1_500
NO_UTF8 = b"\xff"


def sealed(raw: bytes) -> bytes:
    """Return a batch whose checksum holds again, whatever was done to it."""
    return raw[:4] + zlib.crc32(raw[8:]).to_bytes(4, "little") + raw[8:]


def read_all(raw: bytes) -> None:
    for part in split_batches(raw):
        batch = decode_batch(part)
        if batch.header.stream == "events":
            list(decode_events(batch.header.stream_schema, batch.rows))


def mutated(raw: bytes, rng: random.Random) -> bytes:
    """Return the bytes with some changed, cut out or put in."""
    changed = bytearray(raw)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(len(changed))
        kind = rng.randrange(4)
        if kind == 0:
            changed[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            changed[at] = rng.choice((0, 0x7F, 0x80, 0xC1, 0xFF))
        elif kind == 2:
            del changed[at : at + rng.randrange(1, 8)]
        else:
            changed[at:at] = rng.randbytes(rng.randrange(1, 8))
        changed = changed or bytearray(b"\0")
    return bytes(changed)


def refused_in_our_words(read: Callable[[bytes], object], raw: bytes) -> bool:
    try:
        read(raw)
    except VitalsError:
        return True
    return False


@pytest.mark.parametrize("word", [b"node-XY", b"rank:1", b"steps"])
def test_a_batch_with_text_that_is_no_utf8_is_refused(word: bytes):
    raw = Writer("rank:1", node="node-XY").steps(range(3))
    assert word in raw
    assert refused_in_our_words(read_all, sealed(raw.replace(word, word[:-1] + NO_UTF8)))


def test_however_a_batch_is_changed_it_is_read_or_refused_in_our_words():
    rng = random.Random(7)
    writer = Writer("rank:1", node="node-XY")
    raws = [
        writer.steps(range(3)),
        writer.events(Note(code="x", text="hello", severity="info")),
        writer.scalars(1, {0: 0.5}),
    ]
    refused = sum(
        refused_in_our_words(read_all, sealed(mutated(rng.choice(raws), rng)))
        for _ in range(NUM_MUTANTS)
    )
    assert 0 < refused < NUM_MUTANTS


def test_run_files_that_are_no_utf8_are_refused_in_our_words(tmp_path: Path):
    run_dir = RunDir.create(tmp_path, RUN)
    run_dir.write_info(RunInfo(name="first", project="XY"))
    run_dir.write_halted(HaltMarker(reason="XY", step=1, time_unix_ns=1))
    run_dir.append_plan({"what": "XY"})
    run_dir.append_plan({"what": "last"})
    for path in run_dir.path.iterdir():
        if path.is_file() and b"XY" in (raw := path.read_bytes()):
            path.write_bytes(raw.replace(b"XY", b"X" + NO_UTF8))
    for read in (run_dir.info, run_dir.halted, run_dir.read_plan):
        refused_in_our_words(lambda _, read=read: read(), b"")
    assert refused_in_our_words(lambda _: run_dir.info(), b"")


def test_however_tokens_are_changed_they_are_read_or_refused_in_our_words(tmp_path: Path):
    path, rng, refused = tmp_path / "tokens.json", random.Random(3), 0
    body = msgspec.json.encode({"ingest": "a" * 43, "read": "b" * 43, "control": "c" * 43})
    for _ in range(300):
        path.write_bytes(mutated(body, rng))
        path.chmod(0o600)
        refused += refused_in_our_words(lambda _: read_tokens(path), b"")
    assert refused


def test_however_a_spools_state_is_changed_it_is_read_or_is_none(tmp_path: Path):
    spool = Spool(tmp_path / "spool", max_bytes=1 << 20, keep=True)
    spool.append(Writer().steps(range(3)))
    spool.close()
    path, rng = tmp_path / "spool" / STATE_FILE, random.Random(5)
    body = path.read_bytes()
    for _ in range(300):
        path.write_bytes(mutated(body, rng))
        refused_in_our_words(lambda _: read_state(path), b"")
    path.write_bytes(body)
    assert read_state(path) is not None


def test_a_folder_with_a_spool_of_noise_still_lists_its_other_runs(tmp_path: Path):
    for run, is_noise in ((RUN, False), (OTHER_RUN, True)):
        run_dir = RunDir.create(tmp_path, run)
        spool = Spool(run_dir.agent_dir("node-XY") / "spool", max_bytes=1 << 20, keep=True)
        raw = Writer(run=run, node="node-XY").steps(range(3))
        spool.append(raw)
        spool.close()
        noise = sealed(raw.replace(b"node-XY", b"node-X" + NO_UTF8)) if is_noise else raw
        (file,) = (run_dir.agent_dir("node-XY") / "spool").glob("*.tvs")
        stored = file.read_bytes()
        assert raw in stored
        file.write_bytes(stored.replace(raw, noise))
    with open_folder(tmp_path) as opened:
        listed = {run.run_id: run.last_step for run in opened.reader.ask(RunsQuestion())}
    assert 2 == listed[RUN]
