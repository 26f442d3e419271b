"""Bytes of others are read or refused with an error of ours, never with another one.

Whoever reads them does so for everybody: one batch must not fail the requests of all agents, one
file not the listing of all runs. tests/fuzz makes bytes up; these are the cases that were met.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.collector.rows import OTHER_RUN, RUN, Writer
from tests.fuzz.mutation import NO_UTF8, sealed
from tests.fuzz.targets import read_wire
from trainvitals.errors import VitalsError
from trainvitals.io.rundir import HaltMarker, RunDir
from trainvitals.io.spool import Spool
from trainvitals.records import RunInfo
from trainvitals.views import RunsQuestion
from vitals_collector.queries.open import open_folder


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
    assert refused_in_our_words(
        partial(read_wire, Path()), sealed(raw.replace(word, word[:-1] + NO_UTF8))
    )


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
