"""A run ends while its collector is away: its end arrives all the same, and nobody is paged."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.lab import Lab, free_port, open_lab, until
from trainvitals.io.client import CollectorClient
from trainvitals.views import AlertsQuestion, RunQuestion, RunsQuestion

pytestmark = [pytest.mark.dist, pytest.mark.slow]

LOST_AFTER_SECONDS = 40
"""More than an agent waits before it asks again (20 s), on a busy machine."""


class Job:
    """One training after the other in one folder, each with its own agent, and a collector."""

    def __init__(self, lab: Lab) -> None:
        self.lab, self.port = lab, free_port()
        self.collector = self.start_collector()

    def start_collector(self) -> subprocess.Popen[bytes]:
        return self.lab.collector(self.port, "--lost-after", LOST_AFTER_SECONDS)

    def train(self, name: str, steps: int) -> subprocess.Popen[bytes]:
        return self.lab.train(
            *("--standalone", "--nproc-per-node", "1"),
            steps=steps,
            name=name,
            VITALS_COLLECTOR_URL=f"https://127.0.0.1:{self.port}",
            VITALS_TOKEN_FILE=str(self.lab.tokens),
        )

    def client(self) -> CollectorClient:
        return self.lab.client(self.port)

    def has_steps(self) -> bool:
        with self.client() as client:
            return any(run.last_step > 0 for run in client.ask(RunsQuestion()))

    def state(self, run_id: str) -> str:
        with self.client() as client:
            return client.ask(RunQuestion(run_id=run_id)).summary.state

    def alerts(self, run_id: str) -> list[str]:
        with self.client() as client:
            return [alert.name for alert in client.ask(AlertsQuestion(run_id=run_id))]

    def agents(self) -> list[int]:
        return [pid for pid, line in self.lab.alive().items() if "vitals_agent" in line]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with open_lab(tmp_path) as lab:
        yield Job(lab)


def end_without_a_collector(job: Job) -> tuple[str, int]:
    """Train to the end with the collector away; return the run and the agent that lingers."""
    training = job.train("first", 300)
    until(job.has_steps, "the collector knows the run")
    job.collector.kill()
    job.collector.wait()
    assert 0 == training.wait(120)
    run_id = job.lab.run_id()
    (folder,) = (job.lab.runs / run_id / "agents").iterdir()
    log = folder / "agent.log"
    until(lambda: f"rows of run {run_id} wait in" in log.read_text(), "the agent lingers")
    (agent,) = job.agents()
    assert f"`kill {agent}` ends that" in log.read_text()
    assert not (folder / "agent.json").exists()  # it holds nothing while it waits
    said = job.lab.log("first").read_text()
    assert f"https://127.0.0.1:{job.port} does not answer" in said
    assert f"`kill {agent}` ends it" in said
    return run_id, agent


def test_the_agent_lingers_and_delivers_the_end_once_the_collector_is_back(job: Job):
    run_id, agent = end_without_a_collector(job)
    job.collector = job.start_collector()
    until(lambda: job.state(run_id) == "finished", "the end arrives")
    until(lambda: agent not in job.lab.alive(), "the agent ends")
    silent_until = time.monotonic() + LOST_AFTER_SECONDS + 5
    until(lambda: time.monotonic() > silent_until, "a silent run would be lost by now")
    assert "finished" == job.state(run_id)
    assert "RunLost" not in job.alerts(run_id)


def test_where_that_was_killed_the_next_trainings_agent_delivers_it(job: Job):
    run_id, agent = end_without_a_collector(job)
    os.kill(agent, signal.SIGKILL)
    job.collector = job.start_collector()
    job.train("second", 100_000)
    until(lambda: job.state(run_id) == "finished", "the end arrives")
    with job.client() as client:
        assert ["running", "finished"] == [run.state for run in client.ask(RunsQuestion())]
    assert "RunLost" not in job.alerts(run_id)
