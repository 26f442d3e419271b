"""An agent whose disk is full: it goes on in memory, says so, and goes back when there is room."""

import os
import stat
from pathlib import Path

import pytest

from tests.agent.builders import NODE, OTHER_RUN, RUN, STEPS, rows_in
from tests.agent.stub_collector import StubCollector
from tests.support.agent_processes import Node, until
from tests.support.small_disks import empty, fill, small_file_system
from trainvitals.errors import StorageError, UsageError
from trainvitals.io.client import CollectorClient
from trainvitals.io.discovery import NOTICE_FILE
from trainvitals.records import decode_events
from trainvitals.wire import decode_batch


@pytest.fixture(params=["1m", "1m,nr_inodes=24"], ids=["no bytes", "no files"])
def small(request, tmp_path):
    with small_file_system(tmp_path / "small", request.param) as folder:
        yield folder


@pytest.fixture
def node(world, small):
    """A node whose runs lie on a small disk."""
    world.vitals_dir = small / "runs"
    return world


@pytest.fixture
def stub():
    made = StubCollector()
    yield made
    made.close()


@pytest.fixture
def client(stub):
    with CollectorClient(stub.url, "token", timeout=60.0) as made:
        yield made


def shipped(stub: StubCollector) -> list[int]:
    """Each step that came new to the collector, as often as it did."""
    rows = rows_in(stub.batches)
    steps = [STEPS.unpack(row)["step"] for _, stream, _, row in rows if stream == "steps"]
    return sorted(steps)


def notes(stub: StubCollector) -> list[str]:
    batches = [decode_batch(raw) for raw in stub.batches]
    events = [each for each in batches if each.header.stream == "events"]
    rows = [row for each in events for row in decode_events(each.header.stream_schema, each.rows)]
    codes = ("spool_in_memory", "journal_lost")
    return [row.event.code for row in rows if row.event.code in codes]


def num_in_memory(agent) -> float:
    (value,) = [r.value for r in agent.readings() if r.name == "agent_memory_spools"]
    return value


def left_in(base: Path) -> list[Path]:
    return list(base.glob("agent-*/spool/*.tvs"))


def test_where_there_is_room_nothing_lies_in_memory(node, stub, client):
    rank = node.rank()
    agent = node.agent(client=client)
    rank.step(0, 1)
    agent.cycle(0.0)
    agent.cycle(20.0)
    assert (0, [0, 1]) == (num_in_memory(agent), node.steps())
    assert ([], []) == (notes(stub), left_in(node.base))


def test_on_a_full_disk_it_starts_forwards_and_says_so_once(node, small, stub, client, caplog):
    rank = node.rank()
    fill(small)
    agent = node.agent(client=client, sample_seconds=1e9)
    for number in range(6):
        rank.step(number)
        agent.cycle(10.0 * number)
    assert list(range(6)) == shipped(stub)
    assert (1, ["spool_in_memory"]) == (num_in_memory(agent), notes(stub))
    (said,) = [record.message for record in caplog.records if "is full: node" in record.message]
    assert "restored from a backup will lack them" in said
    assert (node.base / RUN / NOTICE_FILE).read_text() in said, "for the terminal of the rank"
    assert agent.shipper.drained(RUN)


def test_it_goes_back_to_the_disk_when_there_is_room_with_what_still_waits(node, small, stub):
    rank = node.rank()
    fill(small)
    agent = node.agent(sample_seconds=1e9)
    rank.step(0, 1, 2)
    agent.cycle(0.0)
    assert [] == node.steps()
    empty(small)
    agent.cycle(20.0)
    rank.step(3)
    agent.cycle(21.0)
    assert [0, 1, 2, 3] == node.steps()
    assert (0, []) == (num_in_memory(agent), left_in(node.base))
    state = node.vitals_dir / "agents" / NODE
    assert {"agent.json", "read.token"} <= {path.name for path in state.iterdir()}
    assert str(state / "read.token") == agent.info.token_file


def test_the_writer_key_survives_a_full_disk_and_later_agents(node, small):
    node.rank().step(0)
    fill(small)
    agent = node.agent(sample_seconds=1e9)
    agent.cycle(0.0)
    path, key = node.vitals_dir / RUN / "agents" / NODE / "writer.key", agent.runs[RUN].writer_key
    assert (64, False) == (len(key), path.exists())
    empty(small)
    agent.cycle(20.0)
    assert (key, 0o600) == (path.read_text().strip(), stat.S_IMODE(path.stat().st_mode))
    agent.stop()
    later = node.agent(sample_seconds=1e9)
    later.cycle(30.0)
    assert key == later.runs[RUN].writer_key
    others = node.rank(run_id=OTHER_RUN)
    others.step(0)
    later.cycle(31.0)
    assert key != later.runs[OTHER_RUN].writer_key


@pytest.mark.parametrize("stuck", ["the agent's folder", "the first run"])
def test_what_cannot_go_back_to_the_disk_keeps_no_run_in_memory(
    node, small, stub, monkeypatch, stuck
):
    ranks = [node.rank(run_id=run) for run in (RUN, OTHER_RUN)]
    fill(small)
    agent = node.agent(sample_seconds=1e9)
    for rank in ranks:
        rank.step(0)
    agent.cycle(0.0)
    assert 2 == num_in_memory(agent)
    empty(small)
    first, _ = agent.runs.values()

    def refuse() -> None:
        raise StorageError("its folder cannot be written")

    if stuck == "the first run":
        monkeypatch.setattr(first, "last_seqs", refuse)
    else:
        monkeypatch.setattr(agent._state_dir, "return_to_disk", refuse)
    agent.cycle(20.0)
    assert 0 == num_in_memory(agent)


def test_a_disk_that_becomes_full_under_it_costs_no_row(node, small, stub, client):
    rank = node.rank()
    agent = node.agent(client=client, sample_seconds=1e9)
    rank.step(0)
    agent.cycle(0.0)
    fill(small)
    for number in range(1, 100):
        rank.step(number)
        agent.cycle(float(number))
    assert (1, list(range(100))) == (num_in_memory(agent), shipped(stub))
    empty(small)
    agent.cycle(420.0)
    rank.step(100)
    agent.cycle(421.0)
    assert (0, list(range(101))) == (num_in_memory(agent), shipped(stub))


def test_it_moves_to_memory_before_the_next_look_at_all_disks_and_reports_no_lost_journal(
    node, small, stub, client
):
    rank = node.rank()
    agent = node.agent(client=client, sample_seconds=1e9)
    rank.step(0)
    agent.cycle(0.0)
    fill(small)
    for number in range(1, 100):
        rank.step(number)
        agent.cycle(0.01 * number)
    assert 1 == num_in_memory(agent)
    rank.close()
    agent.cycle(1.0)
    agent.stop()
    empty(small)
    later = node.agent(client=client, sample_seconds=1e9)
    later.cycle(30.0)
    assert (list(range(100)), ["spool_in_memory"]) == (shipped(stub), notes(stub))


@pytest.mark.parametrize("has_room", [False, True])
def test_what_a_killed_agent_held_in_memory_is_taken_up_by_the_next(
    node, small, stub, client, has_room
):
    rank = node.rank()
    fill(small)
    first = node.agent(sample_seconds=1e9)
    rank.step(0, 1, 2)
    first.cycle(0.0)
    rank.close()
    first.cycle(1.0)
    assert left_in(node.base)
    first.stop()
    if has_room:
        empty(small)
    second = node.agent(client=client, sample_seconds=1e9)
    second.cycle(0.0)
    second.cycle(20.0)
    assert [0, 1, 2] == shipped(stub)
    assert ([0, 1, 2] if has_room else []) == node.steps()


def test_a_second_agent_is_kept_out_also_when_the_disk_has_room_again(node, small):
    node.rank()
    fill(small)
    first = node.agent()
    empty(small)
    with pytest.raises(UsageError, match="serves this folder"):
        node.agent()
    first.cycle(0.0)
    first.cycle(20.0)
    with pytest.raises(UsageError, match=f"an agent .pid {os.getpid()}"):
        node.agent()


@pytest.mark.nightly
def test_a_process_on_a_full_disk_forwards_and_the_next_one_goes_on_after_a_kill(
    node, small, stub, client
):
    processes = Node(node)
    rank = processes.rank(0)
    fill(small)
    try:
        for _ in range(2):
            num_before = len(shipped(stub))
            agent = processes.agent("--collector", stub.url)
            until(lambda num=num_before: len(shipped(stub)) > num + 50, "it forwards")
            agent.kill()
        rank.communicate("stop\n")
        last = processes.agent("--collector", stub.url, "--once")
        assert "the next agent takes them up" not in last.communicate()[1]
        assert 0 == last.returncode
    finally:
        processes.close()
    assert list(range(processes.num_steps(0))) == shipped(stub)
