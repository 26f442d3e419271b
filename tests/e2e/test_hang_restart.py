"""A real torchrun job of two ranks hangs: it is ended and goes on from what it saved, or not."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.e2e.hanging import HANGS_AT, STEPS
from tests.e2e.lab import until
from tests.support.forked import TRAINING
from trainvitals.detect.hang import HangConfig
from trainvitals.views import DecisionsQuestion, RunsQuestion
from vitals_agent.agent import Agent, AgentConfig
from vitals_collector.queries.open import open_reader

pytestmark = pytest.mark.dist

NODE = "here"
HELD = 3.0
"""For so long a page must have held; a minute for users."""


class Job:
    """One launch that may be started again once, and the agent beside it."""

    def __init__(self, folder: Path, *, how: str, on_hang: str) -> None:
        self.folder = folder
        base = folder / "shm" / f"trainvitals-{os.getuid()}"
        base.mkdir(parents=True, mode=0o700)
        (folder / "keys").mkdir()
        self.agent = Agent(
            AgentConfig(
                vitals_dir=folder / "runs",
                base=base,
                keys=folder / "keys",
                node=NODE,
                hang=HangConfig(restart_seconds=HELD),
            )
        )
        self.agent.start()
        clean = {k: v for k, v in os.environ.items() if not k.startswith("VITALS_")}
        self._log = (folder / "log").open("wb")
        told = {"folder": str(folder), "how": how, "on_hang": on_hang}
        self.process = TRAINING.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                *("--nproc-per-node=2", "--max-restarts=1", "--monitor-interval=0.2"),
                *("-m", "tests.e2e.hanging", json.dumps(told)),
            ],
            env={
                **clean,
                "VITALS_DIR": str(folder / "runs"),
                "VITALS_SHM": str(folder / "shm"),
                "VITALS_NODE": NODE,
                "VITALS_AGENT": "off",
                "OMP_NUM_THREADS": "1",
                # Else the second start of gloo finds the addresses of the first.
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            },
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._turn)
        self._thread.start()

    def _turn(self) -> None:
        while not self._ending.wait(0.5):  # as the agent's own loop
            self.agent.cycle(time.monotonic())

    def output(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def starts(self) -> list[int]:
        path = self.folder / "starts"
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    def steps(self) -> list[int]:
        tails = [tail for run in self.agent.runs.values() for tail in run.tails.values()]
        return [tail.last.step for tail in tails if tail.identity.rank == 0]

    def agent_findings(self):
        verdicts = [watch._follower for watch in self.agent._hangs.values()]
        return [v.verdict for v in verdicts if v.verdict is not None and v.verdict.pages]

    def close(self) -> None:
        ranks = _children(self.process.pid)
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)  # first: it would start them again
        self.process.wait(60.0)
        for pid in ranks:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._ending.set()
        self._thread.join(60.0)
        self.agent.stop()
        self._log.close()


def _children(pid: int) -> list[int]:
    """Return the ranks of a launcher: each is a session of its own, and may be stopped."""
    if not (children := Path(f"/proc/{pid}/task/{pid}/children")).exists():
        return []
    return [int(child) for child in children.read_text().split()]


@contextmanager
def job(folder: Path, **how: str) -> Iterator[Job]:
    started = Job(folder, **how)
    try:
        yield started
    finally:
        started.close()


@pytest.mark.parametrize("how", ["stop", pytest.param("lock", marks=pytest.mark.slow)])
def test_a_job_that_hangs_is_ended_and_goes_on_from_its_newest_checkpoint(tmp_path, how):
    with job(tmp_path, how=how, on_hang="restart") as hung:
        assert 0 == hung.process.wait(150.0), hung.output()[-4000:]
        first, second = hung.starts()
        assert 0 == first
        assert 0 < second <= HANGS_AT
        assert STEPS - 1 == max(hung.steps())
    with open_reader(tmp_path / "runs") as opened:
        (run,) = opened.reader.ask(RunsQuestion())
        assert "finished" == run.state
        ledger = opened.reader.ask(DecisionsQuestion(run_id=run.run_id))
    (decision,) = [view.decision for view in ledger]
    assert ("restart", HANGS_AT, 1) == (decision.action, decision.step, decision.rank)
    word = {"stop": "stopped (SIGSTOP)", "lock": "blocked"}[how]
    assert f"Rank 1 is {word}" in decision.reason


def test_a_job_whose_loop_only_wants_to_be_told_is_left_as_it_is(tmp_path):
    with job(tmp_path, how="stop", on_hang="alert") as hung:
        until(hung.agent_findings, "it pages", 120.0)
        time.sleep(HELD + 3.0)
        assert hung.agent_findings(), "it still hangs"
        assert [0] == hung.starts()
        assert hung.process.poll() is None
