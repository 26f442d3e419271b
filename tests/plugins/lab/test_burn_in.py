"""``vitals doctor --burn-in``: what it says, how it ends, and that it disturbs no run unasked."""

import json
import os
import sys
import time
from pathlib import Path

import pytest

from trainvitals.cli import main
from trainvitals.cli.doctor import Check
from trainvitals.identity import new_run_id
from trainvitals.io.discovery import announce_run
from trainvitals.io.heartbeat import HeartbeatWriter
from trainvitals.io.private import ensure_private_dir, private_base
from trainvitals.records import Heartbeat
from vitals_plugins.lab.burn_in import runner as burn_in

RUN = new_run_id(1)
CHECK = {"name": "cpu 0", "status": "ok", "text": "gemm float32 3x"}
SAYS_ONE = f"import sys, os, time, signal; print({json.dumps([CHECK])!r}, flush=True)\n"
IS_READ = """
import array, fcntl, termios
unread = array.array("i", [1])
while unread[0]:
    fcntl.ioctl(1, termios.FIONREAD, unread)
time.sleep(0.5)
"""
"""Waits until what was printed has been read, and the reader had a moment to look at it."""


@pytest.fixture(autouse=True)
def _own_base(monkeypatch, tmp_path):
    monkeypatch.setenv("VITALS_SHM", str(tmp_path))


def vitals(*arguments: str) -> int:
    """Return the exit code of a command."""
    with pytest.raises(SystemExit) as exit_:
        raise SystemExit(main.main(["doctor", *arguments]))
    return int(exit_.value.code)


def stub(code: str, seconds: int = 60) -> tuple[list[Check], bool]:
    """Burn in by a stub of the program, which says one check and then runs the code."""
    return burn_in.burn_in(seconds, os.environ, program=(sys.executable, "-c", SAYS_ONE + code))


def train(monotonic_ns: int) -> None:
    """Leave the heartbeat of a rank that gave its last sign at that time."""
    folder = announce_run(private_base(os.environ), RUN, Path("vitals_runs"))
    journal = ensure_private_dir(folder / "rank-0-a")
    writer = HeartbeatWriter(journal)
    writer.write(Heartbeat(beat=1, monotonic_ns=monotonic_ns))
    writer.close()


def test_two_real_seconds_pass_on_this_machine_and_say_what_was_tried(monkeypatch, capsys):
    monkeypatch.setattr(burn_in, "GRACE_SECONDS", 200.0)  # it is nice, and other tests run
    monkeypatch.setattr(burn_in, "START_SECONDS", 200.0)
    code = vitals("--burn-in", "2", "--format", "json")
    captured = capsys.readouterr()
    assert 0 == code, captured
    checks = json.loads(captured.out)
    names = [f"cpu {core}" for core in sorted(os.sched_getaffinity(0))]
    assert names == [check["name"] for check in checks]
    assert all(check["text"].startswith("gemm float64 ") for check in checks)
    assert "gemm float64 0x" not in captured.out
    assert "Trying this node for 2 s" in captured.err


def test_ctrl_c_ends_it_and_keeps_what_was_found():
    checks, is_interrupted = stub(f"{IS_READ}os.kill(os.getppid(), 2); time.sleep(600)")
    assert is_interrupted
    assert ["cpu 0", "burn-in"] == [check.name for check in checks]
    assert "stopped by Ctrl-C" in checks[-1].text


def test_a_device_that_hangs_ends_it_soon_after_its_time(monkeypatch):
    monkeypatch.setattr(burn_in, "GRACE_SECONDS", 1.0)
    checks, _ = stub("time.sleep(6000)", seconds=1)
    assert ["ok", "fail"] == [check.status for check in checks]
    assert "no answer in time" in checks[-1].text


def test_a_crash_is_a_fault_and_named_by_its_signal():
    checks, _ = stub("os.kill(os.getpid(), signal.SIGSEGV)")
    assert ["ok", "fail"] == [check.status for check in checks]
    assert "by SIGSEGV" in checks[-1].text


def test_a_wrong_answer_exits_with_one(monkeypatch, capsys):
    wrong = Check(name="cpu 1", status="fail", text="WRONG 1x", hint="drain node a")
    monkeypatch.setattr(burn_in, "burn_in", lambda seconds, environ: ([wrong], False))
    assert 1 == vitals("--burn-in", "60")
    assert "-> drain node a" in capsys.readouterr().out


class TestARunTrainsHere:
    def test_it_is_named_and_left_alone_unless_asked_for(self, monkeypatch, capsys):
        monkeypatch.setattr(burn_in, "burn_in", lambda seconds, environ: ([Check(**CHECK)], False))
        train(time.monotonic_ns())
        assert 2 == vitals("--burn-in", "60")
        error = capsys.readouterr().err
        assert f"{RUN} trains on this node" in error
        assert "--yes" in error
        assert 0 == vitals("--burn-in", "60", "--yes")

    def test_one_that_ended_is_no_reason(self):
        train(time.monotonic_ns() - 60 * 10**9)
        assert [] == burn_in.running_here(os.environ)


def test_without_torch_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(burn_in, "find_spec", lambda name: None)
    assert 2 == vitals("--burn-in", "60")
    assert "pip install 'trainvitals[torch]'" in capsys.readouterr().err
