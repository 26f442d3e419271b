"""One node of two falls silent in mid-run: the pager hears its name, and hears when it is back."""

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.e2e.lab import Lab, free_port, open_lab, until
from tests.support.receivers import Receiver, receiver
from trainvitals.alerting import ABSENCE_ALERTS
from trainvitals.views import RunQuestion, RunsQuestion, RunSummary

pytestmark = [pytest.mark.dist, pytest.mark.slow]

NODES = ("node-a", "node-b")
LOST_AFTER_SECONDS = 15


class Job:
    """Two nodes of one rank, each with its agent and with processes that get signals."""

    def __init__(self, lab: Lab, pager: Receiver, *options: object) -> None:
        self.lab = lab
        self.pager = pager
        self.port = free_port()
        lab.collector(self.port, *options, VITALS_COLLECTOR_WEBHOOK=pager.url)
        rendezvous = free_port()
        self.processes: dict[str, list[int]] = {}
        for number, name in enumerate(NODES):
            shared = lab.shared / name
            shared.mkdir()
            here = {"VITALS_NODE": name, "VITALS_SHM": str(shared)}
            training = lab.train(
                *("--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(number)),
                *("--master-addr", "127.0.0.1", "--master-port", str(rendezvous)),
                steps=1_000_000,
                name=name,
                **here,
                VITALS_AGENT="off",
            )
            where = ("--collector", f"https://127.0.0.1:{self.port}", "--token-file", lab.tokens)
            agent = lab.start_vitals("agent", "--dir", lab.runs, "--node", name, *where, **here)
            self.processes[name] = [training.pid, agent.pid]

    def is_seen(self) -> bool:
        with self.lab.client(self.port) as client:
            return bool(client.ask(RunsQuestion()))

    def summary(self) -> RunSummary:
        with self.lab.client(self.port) as client:
            return client.ask(RunQuestion(run_id=self.lab.run_id())).summary

    def told(self) -> list[tuple[str, str, str]]:
        """Return what the pager was told of parts that are gone: name, part, state."""
        alerts = [a for _, _, body in self.pager.posted for a in json.loads(body)["alerts"]]
        return [
            (a["name"], a["labels"]["cause"], a["state"])
            for a in alerts
            if a["name"] in ABSENCE_ALERTS
        ]

    def signal_node(self, name: str, number: signal.Signals) -> None:
        """Send a signal to every process of a node: to its peers a frozen one is a dead machine."""
        left = [*self.processes[name]]
        while left:
            pid = left.pop()
            for task in Path(f"/proc/{pid}/task").glob("*/children"):
                left += map(int, task.read_text().split())
            with suppress(ProcessLookupError):  # it ended with its parent
                os.kill(pid, number)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with open_lab(tmp_path) as lab, receiver() as pager:
        yield Job(lab, pager, "--lost-after", LOST_AFTER_SECONDS)


@pytest.fixture
def default_job(tmp_path: Path) -> Iterator[Job]:
    with open_lab(tmp_path) as lab, receiver() as pager:
        yield Job(lab, pager)


def test_a_node_that_falls_silent_pages_by_its_name_and_comes_back(job: Job):
    until(job.is_seen, "the run is seen")
    until(lambda: job.summary().last_step > 20, "steps of both arrive")
    healthy_until = time.monotonic() + LOST_AFTER_SECONDS + 5
    until(lambda: time.monotonic() > healthy_until, "a healthy while passes")
    assert [] == job.told()
    assert ("running", ()) == (job.summary().state, job.summary().missing)

    job.signal_node("node-b", signal.SIGSTOP)
    began = time.monotonic()
    until(job.told, "the pager hears of it")
    seconds = time.monotonic() - began
    assert [("NodeLost", "node-b", "firing")] == job.told()
    assert seconds >= LOST_AFTER_SECONDS - 5
    assert ("running", "critical", ("node-b",)) == (
        job.summary().state,
        job.summary().health,
        job.summary().missing,
    )

    job.signal_node("node-b", signal.SIGCONT)
    until(lambda: ("NodeLost", "node-b", "resolved") in job.told(), "the pager hears it is back")
    until(lambda: () == job.summary().missing, "nothing is missing")


def test_a_node_that_is_killed_pages_by_its_name_within_75_seconds(default_job: Job):
    """In default settings. Its peers see its connections break, and end with an error."""
    job = default_job
    until(job.is_seen, "the run is seen")
    until(lambda: job.summary().last_step > 20, "steps of both arrive")
    job.signal_node("node-b", signal.SIGKILL)
    began = time.monotonic()
    until(job.told, "the pager hears of it", 75.0)
    seconds = time.monotonic() - began
    print(f"the page came {seconds:.1f} s after the kill")
    assert [("NodeLost", "node-b", "firing")] == job.told()
