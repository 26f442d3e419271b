"""What a rank's side thread says of its training thread; and that it harms neither."""

import faulthandler
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.support.examples import one_in
from tests.support.forked import TRAINING
from tests.support.inside import journal_directory
from tests.support.watched import Loop, own_place
from trainer_hooks.failopen import FaultCounter
from trainer_hooks.lifecycle import heartbeat
from trainer_hooks.measures.host import StepClock
from trainvitals.clock import SystemClock
from trainvitals.errors import FormatError, UsageError
from trainvitals.io.heartbeat import STACKS_FILE, read_heartbeat
from trainvitals.records import Heartbeat

__all__ = ["own_place"]  # a fixture


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(heartbeat, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(heartbeat, "PLACE_AFTER_SECONDS", 0.05)


def wait_for(loop: Loop, is_so, seconds: float = 60.0) -> Heartbeat:
    """Return the first word of which it is so."""
    return wait_in(journal_directory(loop.monitor), is_so, seconds)


def wait_in(directory: Path, is_so, seconds: float = 60.0) -> Heartbeat:
    """Return the first word in a rank's folder of which it is so."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            word = read_heartbeat(directory)
        except (FileNotFoundError, FormatError):
            continue
        if is_so(word):
            return word
        time.sleep(0.005)
    raise AssertionError(f"not so within {seconds} s; the last word is {word}")


def test_it_tells_step_phase_and_cpu_time():
    loop = Loop(mode="guard")
    first = wait_for(loop, lambda word: word.step == 0)
    for _ in range(3):
        loop.monitor.step(loop.forward())
    word = wait_for(loop, lambda word: word.step == 3)
    assert "forward_backward" == word.phase and not word.is_announced
    assert word.cpu_seconds >= first.cpu_seconds > 0
    with loop.monitor.phase("evaluate"):
        assert wait_for(loop, lambda word: word.phase == "evaluate").is_announced
    wait_for(loop, lambda word: word.phase == "forward_backward" and not word.is_announced)
    loop.monitor.close()


def test_the_wait_for_a_batch_is_told_as_data():
    loop = Loop(mode="guard")

    def slow():
        yield 0
        wait_for(loop, lambda word: word.phase == "data")
        yield 1

    for _ in loop.monitor.batches(slow()):
        loop.monitor.step(loop.forward())
    loop.monitor.close()


def test_a_standstill_has_its_place_in_the_users_code():
    loop = Loop(mode="guard")
    word = wait_for(loop, lambda word: word.where)
    assert "test_heartbeat.py" in word.where and "(wait_in)" in word.where
    loop.monitor.close()


def test_a_standstill_in_a_pipeline_has_its_stage_and_no_wait_for_other_ranks(tmp_path: Path):
    place = "stage 1 of the pipeline"
    thread = heartbeat.HeartbeatThread(
        tmp_path, StepClock(SystemClock()), left_out=None, faults=FaultCounter(), place=place
    )
    word = wait_in(tmp_path, lambda word: word.where)
    thread.close()
    assert word.where.endswith(f", {place}") and "works" == word.pipeline


def test_a_phase_that_is_none_is_refused():
    loop = Loop(mode="guard")
    with pytest.raises(UsageError, match="evaluate, other"):
        loop.monitor.phase("lunch")
    loop.monitor.close()


def test_its_signal_writes_the_stacks_and_training_goes_on():
    loop = Loop(mode="guard")
    word = wait_for(loop, lambda word: word.stack_signal)
    os.kill(os.getpid(), word.stack_signal)
    stacks = journal_directory(loop.monitor) / STACKS_FILE
    assert "in test_its_signal_writes" in stacks.read_text()
    loop.monitor.step(loop.forward())
    loop.monitor.close()
    os.kill(os.getpid(), word.stack_signal)  # one that was under way ends nobody


def test_a_signal_that_the_user_takes_is_theirs_and_not_told_any_more():
    loop = Loop(mode="guard")
    number = wait_for(loop, lambda word: word.stack_signal).stack_signal
    got = []
    before = signal.signal(number, lambda *_: got.append(1))
    try:
        wait_for(loop, lambda word: word.stack_signal == 0)
        os.kill(os.getpid(), number)
        assert [1] == got
    finally:
        signal.signal(number, before)
        faulthandler.unregister(number)  # the next heartbeat of this process takes it anew
    loop.monitor.close()


def test_signals_that_somebody_handles_are_never_taken():
    last = int(signal.SIGRTMAX) - 3
    before = signal.signal(last, lambda *_: None)
    try:
        assert heartbeat.free_signal() not in (0, last, signal.SIGUSR1, signal.SIGUSR2)
    finally:
        signal.signal(last, before)


def test_a_backend_without_a_recorder_is_said(tmp_path: Path):
    recorder = heartbeat.FlightRecorder()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heartbeat.dist, "get_backend", lambda: "gloo")
        patch.delattr(heartbeat.torch._C._distributed_c10d, "_dump_fr_trace_json")
        recorder.dump_collectives(tmp_path, {"0": 3})
    assert "has no flight recorder" in recorder.why_not
    assert {} == recorder.newest


def trace(started: int) -> bytes:
    """Return what NCCL's recorder dumps, as far as it is read; its numbers are strings."""
    entry = {"pg_id": 7, "process_group": ["0", "default_pg"], "collective_seq_id": 3}
    status = {"last_enqueued_collective": "3", "last_started_collective": str(started)}
    return json.dumps({"entries": [entry], "pg_status": {"7": status}}).encode()


def test_the_recorder_says_what_the_device_has_begun(tmp_path: Path):
    recorder = heartbeat.FlightRecorder()
    recorder.read(trace(1), tmp_path, {"0": 3})
    assert {"0": 1} == recorder.started
    recorder.read(trace(2), tmp_path, {"0": 3})
    assert {"0": 2} == recorder.started  # a device goes on while its host waits
    recorder.read(trace(-1), tmp_path, {"0": 3})
    assert {} == recorder.started  # it keeps no times
    recorder.read(trace(2), tmp_path, {"other": 3})
    assert {} == recorder.started


def test_nothing_is_asked_of_a_device_while_a_graph_is_captured(tmp_path: Path, monkeypatch):
    recorder = heartbeat.FlightRecorder()
    current = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda.graph, "default_capture_stream", "captured")
    monkeypatch.setattr(torch.cuda, "set_stream", current.append)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current == ["captured"])
    monkeypatch.setattr(heartbeat.dist, "get_backend", lambda: pytest.fail("it was asked"))
    recorder.dump_collectives(tmp_path, {"0": 3})


STUCK = """
import time, sys
from tests.support.watched import Loop
loop = Loop(mode="guard")
monitor = loop.monitor
monitor.step(loop.forward())
{}
"""


@pytest.mark.parametrize(
    "end", one_in(3, ["pass", "monitor.close()", "raise RuntimeError('boom')"])
)
def test_the_thread_never_keeps_a_process_from_its_end(tmp_path: Path, end: str):
    (tmp_path / "shm").mkdir(exist_ok=True)
    environ = {**os.environ, "VITALS_SHM": str(tmp_path / "shm"), "VITALS_DIR": str(tmp_path)}
    environ |= {"VITALS_AGENT": "off"}
    # The thread stands in a call that never comes back.
    stuck = (
        "from trainer_hooks.lifecycle.heartbeat import HeartbeatThread as T\n"
        "T._beat_once = lambda self: time.sleep(1000)\n"
    )
    done = TRAINING.run(
        [sys.executable, "-c", stuck.join(["import time\n", STUCK.format(end)])],
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,  # the thread would sleep for longer
    )
    assert (1 if "boom" in end else 0) == done.returncode, done.stderr


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({"on_hang": "restart"}, "restart"),
        ({}, "alert"),
        ({"on_hang": "restart", "mode": "observe"}, "alert"),
    ],
    ids=str,
)
def test_what_shall_be_done_about_a_hang_is_said_to_the_agent_but_by_who_only_observes(
    how, expected
):
    loop = Loop(**{"mode": "guard"} | how)
    with loop.monitor:
        assert expected == wait_for(loop, lambda word: word.beat).on_hang


@pytest.mark.parametrize(("restarts", "num"), [("0", 1), ("3", 0)])
def test_a_launcher_that_would_not_start_it_again_is_warned_of(monkeypatch, caplog, restarts, num):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
    with Loop(mode="guard", on_hang="restart").monitor:
        assert num == caplog.text.count("torchrun --max-restarts 3 does")
