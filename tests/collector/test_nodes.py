"""Samples of a node's GPUs: joined, looked at, and told of."""

import msgspec
import pytest

from tests.collector.alerting import Agent, Asked, Job
from tests.collector.rows import SECOND, Writer
from trainvitals.catalog import GPU_SCHEMA, NODE_SCHEMA
from trainvitals.detect.fleet import FleetDetectors
from trainvitals.detect.fleet.base import NodeSample
from trainvitals.detect.fleet.node import HARDWARE_HEAT
from trainvitals.rows import rows_of
from trainvitals.wire import decode_batch
from vitals_collector.live.step_join import GPU_COLUMNS, HostRow, NodeMerger, host_rows
from vitals_collector.storage.store import Store


@pytest.fixture
def job(store: Store) -> Job:
    return Job(store)


def test_a_memory_error_of_a_gpu_is_told(job: Job):
    agent = Agent()
    job.train(range(10))
    for num in (0, 0, 1, 1, 1):
        for raw in agent.round(ecc_uncorrected_errors=num):
            job.place.send(raw)
            job.look()
    assert [("gpu_ecc", 9)] * 2 == job.found()
    assert ["GpuFault firing"] == job.look()


def test_gpus_whose_rows_come_a_look_later_are_not_lost_and_those_that_vanish_are(job: Job):
    agent = Agent()
    job.train(range(10))
    for _ in range(30):
        node, *gpus = agent.round()
        job.place.send(node)
        job.look()
        for raw in gpus:
            job.place.send(raw)
            job.look()
        job.place.restart()
    assert [] == job.found()
    for _ in range(30):
        node, first, _ = agent.round()
        job.place.send(node)
        job.place.send(first)
    assert ["GpuLost firing"] == job.look()
    assert [("gpu_lost", 9)] == job.found()


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_late_rank_whose_gpu_is_throttled_is_told_with_it(job: Job, is_restarted: bool):
    """Which GPU is whose is read of the ranks' own rows, or of the store."""
    agent = Agent()
    for writer, uuid in zip(job.ranks, ["GPU-a", "GPU-b", "GPU-c"], strict=True):
        writer.identity = msgspec.structs.replace(writer.identity, gpu_uuid=uuid)
    job.train(range(10))
    job.look()
    for _ in range(8):
        for raw in agent.round(throttle_reasons=HARDWARE_HEAT):
            job.place.send(raw)
    job.look()
    if is_restarted:
        job.place.restart()
    job.train(range(10, 40), slow=True)
    job.look()
    (alert,) = (a for a in job.place.heard.alerts if a.name == "StragglerRank")
    assert "straggler_gpu" == alert.labels["cause"]
    assert "its GPU GPU-b is throttled for heat or power" in alert.summary


def test_what_a_node_wrote_between_two_of_its_own_rows_is_one_sample():
    merger = NodeMerger()

    def row(seq: int, at: int, **values: float) -> HostRow:
        return HostRow(seq, at, at * 10, values)

    merger.add(("a", "node"), "n", "", [row(0, 100), row(1, 200)])
    merger.add(("b", "gpu"), "n", "G", [row(0, 101, x=1.0), row(1, 201, x=2.0)])
    assert [] == merger.take_ready({"n": 150})
    (found,) = merger.take_ready({})
    assert ("n", 1_000, {"G": {"x": 1.0}}) == found
    assert {("a", "node"): 0, ("b", "gpu"): 0} == merger.done()
    merger.add(("a", "node"), "n", "", [row(2, 5)])  # the node was started again
    assert [{"G": {"x": 2.0}}] == [found.gpus for found in merger.take_ready({})]


def test_of_a_gpu_that_is_decoded_which_the_watchers_look_at():
    asked: set[str] = set()
    watchers = FleetDetectors()
    for second in range(200):
        # Its clocks are capped, then slowed; errors of all kinds come up.
        gpu = Asked(dict.fromkeys(GPU_COLUMNS, second // 3) | {"throttle_reasons": 0x4C})
        gpu.asked = asked
        when = second * SECOND
        watchers.update_node(NodeSample(node="a", time_unix_ns=when, step=0, gpus={"G": gpu}))
    assert asked == set(GPU_COLUMNS)


def test_a_row_of_a_gpu_keeps_its_times_and_gaps_and_one_of_a_node_only_its_times():
    values = {"sm_clock_hertz": 1.5e9, "last_xid": 79, "utilization_ratio": 0.9}
    row = [-1, 0, 7, 3, *(values.get(c.name) for c in GPU_SCHEMA.columns[4:])]
    found = rows_of(GPU_SCHEMA, decode_batch(Writer("gpu:G").batch(GPU_SCHEMA, [row])).rows)
    measured = {"sm_clock_hertz": 1.5e9, "last_xid": 79}
    assert [HostRow(0, 3, 7, dict.fromkeys(GPU_COLUMNS) | measured)] == host_rows(GPU_SCHEMA, found)
    row = [-1, 0, 7, 3, *([1] * (len(NODE_SCHEMA.columns) - 4))]
    found = rows_of(NODE_SCHEMA, decode_batch(Writer("node:a").batch(NODE_SCHEMA, [row])).rows)
    assert [HostRow(0, 3, 7, {})] == host_rows(NODE_SCHEMA, found)
