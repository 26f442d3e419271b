"""One job on two nodes, each with an agent and shared memory of its own: read in every way alike.

Both nodes are this machine; they share only the folder of runs and the training's network.
"""

import json
import signal
from dataclasses import dataclass

import pytest

from tests.e2e.lab import Lab, free_port, open_lab, until
from trainvitals.io.client import CollectorClient
from trainvitals.io.spool import read_batches
from trainvitals.jsonable import to_json
from trainvitals.testing.faults import FaultPlan
from trainvitals.views import (
    CheckpointsQuestion,
    DecisionsQuestion,
    EventsQuestion,
    RunDetail,
    RunQuestion,
    RunsQuestion,
    SeriesQuestion,
)
from trainvitals.wire import decode_batch

pytestmark = [pytest.mark.dist, pytest.mark.slow]

STEPS = 120
NODES = ("node-a", "node-b")
PLAN = FaultPlan().nan_gradient_at(rank=1, step=40)
PLAN = PLAN.spike_gradient_at(rank=0, step=80).spike_gradient_at(rank=0, step=81)


@dataclass
class Answers:
    """What one way of reading says of the run."""

    shown: dict
    """As ``vitals show --format json`` writes it."""
    series: dict


def train_on_two_nodes(lab: Lab) -> None:
    """Train to the end without any server, and wait for both agents to end."""
    port = free_port()
    node = ("--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1")
    jobs = []
    for number, name in enumerate(NODES):
        shared = lab.shared / name
        shared.mkdir()
        jobs.append(
            lab.train(
                *(*node, "--master-port", str(port), "--node-rank", str(number)),
                steps=STEPS,
                faults=PLAN,
                name=name,
                VITALS_NODE=name,
                VITALS_SHM=str(shared),
            )
        )
    for name, job in zip(NODES, jobs, strict=True):
        assert 0 == job.wait(120), lab.log(name).read_text()[-3000:]
    until(lambda: not lab.alive(), "the ranks' agents drain and end")


def ask(client: CollectorClient, run_id: str) -> Answers:
    """Ask everything over HTTP."""
    detail = client.ask(RunQuestion(run_id=run_id))
    shown = {
        "run": detail,
        "decisions": client.ask(DecisionsQuestion(run_id=run_id)),
        "checkpoints": client.ask(CheckpointsQuestion(run_id=run_id)),
        "events": client.ask(EventsQuestion(run_id=run_id)),
    }
    series = {
        (metric, source): client.ask(
            SeriesQuestion(run_id=run_id, metric=metric, source=source, points=1_000)
        )
        for metric in detail.metrics
        for source in sources(detail, metric)
    }
    return Answers(json.loads(to_json(shown)), series)


def sources(detail: RunDetail, metric: str) -> list[str]:
    """Return who has the metric's stream."""
    stream = metric.partition(".")[0]
    found = {source.source for source in detail.sources if stream in source.streams}
    return sorted(found) if stream != "process" else ["rank:0", "rank:1"]  # written by nodes


def over_a_folder(lab: Lab, run_id: str) -> Answers:
    """Read with a collector that only follows the folder."""
    lab.data = lab.folder / "by-folder"
    port = free_port()
    collector = lab.collector(port, "--folder", lab.runs)
    with lab.client(port) as client:
        answers = settled(lab, client, run_id)
    collector.send_signal(signal.SIGINT)
    assert 130 == collector.wait(20), lab.log("collector").read_text()
    return answers


def over_http(lab: Lab, run_id: str) -> Answers:
    """Ship both nodes' spools with agents to a collector that knows no folder."""
    lab.data = lab.folder / "by-http"
    port = free_port()
    collector = lab.collector(port)
    agents = [lab.agent(port, "--node", name) for name in NODES]
    with lab.client(port) as client:
        answers = settled(lab, client, run_id)
    for process in (*agents, collector):
        process.send_signal(signal.SIGTERM)
    assert [0, 0, 0] == [process.wait(20) for process in (*agents, collector)]
    return answers


def settled(lab: Lab, client: CollectorClient, run_id: str) -> Answers:
    """Return the answers once the collector has every row that the nodes' spools hold."""
    spools = (lab.runs / run_id).glob("agents/*/spool")
    batches = [decode_batch(raw).header for spool in spools for _, raw in read_batches(spool)]
    num_rows = sum(header.num_rows for header in batches)

    def num_stored() -> int:
        if run_id not in {run.run_id for run in client.ask(RunsQuestion())}:
            return 0
        return sum(source.num_rows for source in client.ask(RunQuestion(run_id=run_id)).sources)

    until(lambda: num_stored() >= num_rows, "everything is there to be read")
    return ask(client, run_id)


@pytest.fixture(scope="module")
def three_ways(tmp_path_factory):
    with open_lab(tmp_path_factory.mktemp("nodes")) as lab:
        train_on_two_nodes(lab)
        run_id = lab.run_id()
        shown = lab.vitals("show", lab.runs, "--format", "json")
        assert (0, "") == (shown.returncode, shown.stderr)
        yield json.loads(shown.stdout), over_a_folder(lab, run_id), over_http(lab, run_id)


def test_the_folder_a_collector_over_it_and_one_that_is_shipped_to_say_the_same(three_ways):
    shown, by_folder, by_http = three_ways
    for facts in (shown, by_folder.shown, by_http.shown):
        del facts["run"]["summary"]["num_firing_alerts"]  # the engine looks a moment later
        del facts["run"]["volume"]["num_bytes"]  # of a store that was compacted, or not yet
    assert shown.pop("verdict")["action"].startswith("Skipped 2 updates")
    assert shown == by_folder.shown
    assert by_folder.series.keys() == by_http.series.keys()
    for key, series in by_folder.series.items():
        assert series == by_http.series[key], key
    assert by_folder.shown["decisions"] == by_http.shown["decisions"]
    assert by_folder.shown == by_http.shown


def test_both_nodes_ranks_are_there_with_every_step(three_ways):
    shown, by_folder, _ = three_ways
    found = {(s["source"], s["node"], s["num_lost_rows"]) for s in shown["run"]["sources"]}
    assert {
        ("rank:0", "node-a", 0),
        ("rank:1", "node-b", 0),
        ("node:node-a", "node-a", 0),
        ("node:node-b", "node-b", 0),
    } == found
    for rank in (0, 1):
        series = by_folder.series["steps.rank_loss", f"rank:{rank}"]
        assert list(range(STEPS)) == list(series.step)
    assert "finished" == shown["run"]["summary"]["state"]


def test_what_was_decided_names_the_rank_on_the_other_node(three_ways):
    shown, _, _ = three_ways
    ledger = [d["decision"] for d in shown["decisions"]]
    assert [(40, "skip_step", 1), (80, "skip_step", -1), (81, "skip_step", -1)] == [
        (d["step"], d["action"], d["rank"]) for d in ledger
    ]
