import contextlib
import errno
import os

import pytest

from tests.agent.builders import NODE, OTHER_RUN, RUN
from tests.agent.fake_nvml import LOST, gpus
from trainvitals.catalog import PROCESS_SCHEMA
from trainvitals.errors import StorageError, UsageError
from trainvitals.io.discovery import NOTICE_FILE
from trainvitals.records import FindingRaised, Note, RunEnded


def test_every_row_of_a_rank_is_in_the_spool_once(world):
    rank = world.rank()
    agent = world.agent()
    rank.step(0, 1, 2)
    agent.cycle(0.0)
    rank.step(3, 4)
    agent.cycle(0.5)
    agent.cycle(1.0)
    assert [0, 1, 2, 3, 4] == world.steps()


def test_an_agent_started_before_any_run_serves_the_runs_that_come(world):
    agent = world.agent()
    agent.cycle(0.0)
    world.rank().step(0)
    world.rank(1, run_id=OTHER_RUN).step(7)
    agent.cycle(0.5)
    assert [0] == world.steps()
    assert [7] == world.steps(1, run_id=OTHER_RUN)


def test_an_agent_for_one_run_leaves_other_runs_alone(world):
    world.rank().step(0)
    world.rank(run_id=OTHER_RUN).step(0)
    agent = world.agent(run_id=RUN)
    agent.cycle(0.0)
    assert {RUN} == set(agent.runs)


def test_a_run_of_another_folder_is_left_alone(world, tmp_path):
    world.rank().step(0)
    agent = world.agent(vitals_dir=tmp_path / "other")
    agent.cycle(0.0)
    assert {} == agent.runs


def test_a_journal_of_another_node_is_left_to_that_nodes_agent(world):
    world.rank(node="node-b").step(0)
    world.rank().step(5)
    agent = world.agent()
    agent.cycle(0.0)
    assert [5] == world.steps()
    other = world.agent(node="node-b")
    other.cycle(0.0)
    assert [0] == world.steps(node="node-b")


def test_rows_written_before_the_agent_came_are_there_when_it_starts(world):
    rank = world.rank()
    rank.step(*range(50))
    rank.close()
    world.agent().cycle(0.0)
    assert list(range(50)) == world.steps()


def test_a_finished_journal_is_removed_from_shared_memory_once_it_is_spooled(world):
    rank = world.rank()
    rank.step(0)
    rank.say(RunEnded(state="finished"))
    rank.close()
    agent = world.agent()
    agent.cycle(0.0)
    assert not rank.directory.exists()
    assert 0 == agent.num_living_ranks
    assert agent.drained
    assert [] == [note for note in world.notes() if note == "rank_gone"]


def test_a_restarted_agent_goes_on_where_the_spool_ends(world):
    rank = world.rank()
    agent = world.agent()
    rank.step(0, 1)
    agent.cycle(0.0)
    agent.stop()
    rank.step(2, 3)
    world.agent().cycle(10.0)
    assert [0, 1, 2, 3] == world.steps()


def test_samples_of_the_node_the_ranks_and_the_gpus_are_rows_of_the_run(world):
    world.rank().step(0)
    agent = world.agent(nvml=gpus("GPU-1", "GPU-2"))
    agent.cycle(0.0)
    agent.cycle(1.0)
    agent.cycle(2.0)
    agent.cycle(4.0)
    counts: dict[tuple[str, str], int] = {}
    for source, stream, _, _ in world.spooled():
        counts[(source, stream)] = counts.get((source, stream), 0) + 1
    expected = {
        ("rank:0", "steps"): 1,
        (f"node:{NODE}", "node"): 3,
        (f"node:{NODE}", "process"): 3,
        ("gpu:GPU-1", "gpu"): 3,
        ("gpu:GPU-2", "gpu"): 3,
    }
    assert expected == counts


def test_a_machine_without_a_gpu_is_said_once_in_each_run(world):
    world.rank().step(0)
    agent = world.agent()
    for second in range(10):
        agent.cycle(float(second))
    assert ["no_gpu"] == world.notes()


def test_a_gpu_that_falls_off_the_bus_is_an_event_of_the_run(world):
    world.rank().step(0)
    nvml = gpus("GPU-1", "GPU-2")
    agent = world.agent(nvml=nvml)
    agent.cycle(0.0)
    agent.cycle(2.0)
    nvml.change("GPU-2", LOST)
    agent.cycle(4.0)
    agent.cycle(6.0)
    assert ["gpu_lost"] == world.notes()
    sources = [source for source, stream, _, _ in world.spooled() if stream == "gpu"]
    assert (4, 2) == (sources.count("gpu:GPU-1"), sources.count("gpu:GPU-2"))


def test_a_rank_that_is_gone_without_a_goodbye_is_said_once_with_its_last_step(world):
    rank = world.rank(1, pid=0)  # no process has this pid: as dead as can be
    rank.step(0, 1, 41)
    agent = world.agent()
    agent.cycle(0.0)
    agent.cycle(1.0)
    agent.stop()
    again = world.agent()
    again.cycle(2.0)
    (gone,) = [row for row in world.events() if row.event.code == "rank_gone"]
    expected = Note(
        code="rank_gone",
        text=f"rank 1 (pid 0 on {NODE}) ended without a clean exit; its last step is 41",
        severity="error",
    )
    assert (expected, 41, 1) == (gone.event, gone.step, gone.attempt)
    assert [0, 1, 41] == world.steps(1)
    assert not rank.directory.exists()
    processes = [raw for _, stream, _, raw in world.spooled() if stream == "process"]
    assert {0} == {PROCESS_SCHEMA.unpack(raw)["alive"] for raw in processes}


def test_a_rank_that_said_goodbye_and_was_then_killed_is_not_reported(world):
    rank = world.rank(1, pid=0)
    rank.step(0)
    rank.say(RunEnded(state="interrupted"))
    world.agent().cycle(0.0)
    assert "rank_gone" not in world.notes()


def test_one_broken_part_is_counted_and_does_not_keep_the_others_from_working(world):
    rank = world.rank()
    agent = world.agent()
    agent.sampling._host.sample = lambda: 1 / 0
    rank.step(0)
    for second in range(5):
        agent.cycle(2.0 * second)
    assert 5 == agent.faults.counts["sampler.node"]
    assert [0] == world.steps()
    assert any(stream == "process" for _, stream, _, _ in world.spooled())


def test_two_agents_for_one_folder_are_a_clear_error(world):
    agent = world.agent()
    with pytest.raises(UsageError) as caught:
        world.agent()
    assert f"an agent (pid {os.getpid()}, {agent.info.url}) serves this folder" in str(caught.value)
    assert "stop it first" in caught.value.hint


def test_the_folder_is_free_again_once_the_agent_has_stopped(world):
    world.agent().stop()
    world.agent()


def test_a_run_that_another_agent_serves_is_left_to_it_and_taken_up_when_it_leaves(world):
    rank = world.rank()
    rank.step(0)
    only = world.agent(run_id=RUN)
    only.cycle(0.0)
    everything = world.agent()
    everything.cycle(0.0)
    assert {} == everything.runs
    assert {} == everything.faults.counts
    only.stop()
    rank.step(1)
    everything.cycle(1.0)
    assert [0, 1] == world.steps()


def test_a_run_without_ranks_is_let_go_and_taken_up_again_when_one_comes(world):
    first = world.rank()
    first.step(0)
    first.close()
    agent = world.agent()
    agent.cycle(0.0)
    agent.cycle(59.0)
    assert {RUN} == set(agent.runs)
    agent.cycle(61.0)
    assert {} == agent.runs
    world.rank().step(1)
    agent.cycle(62.0)
    assert [0, 1] == world.steps()


def test_a_journal_that_someone_removed_is_not_waited_for(world):
    rank = world.rank()
    rank.step(0)
    agent = world.agent()
    agent.cycle(0.0)
    for path in rank.directory.iterdir():
        path.unlink()
    rank.directory.rmdir()
    agent.cycle(1.0)
    assert 0 == agent.num_living_ranks
    assert "tailer" not in agent.faults.counts


def test_a_link_where_the_lock_should_be_is_refused(world, tmp_path):
    home = world.vitals_dir / "agents" / NODE
    home.mkdir(parents=True)
    (home / "agent.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Exception, match="is a symbolic link"):
        world.agent()
    assert not (tmp_path / "elsewhere").exists()


def test_a_spool_that_is_full_refuses_and_counts_and_the_tailer_goes_on(world):
    rank = world.rank()
    agent = world.agent(spool_max_bytes=30_000, sample_seconds=1e9)
    for number in range(200):
        rank.step(number)
        agent.cycle(float(number))
    run = agent.runs[RUN]
    kept = world.steps()
    assert list(range(len(kept))) == kept
    assert 200 - len(kept) == run.num_dropped > 0
    assert run.spool.num_bytes <= 30_000
    assert "rows of run" in (world.base / RUN / NOTICE_FILE).read_text(), "for the terminal"


def test_rows_read_while_the_disk_refused_are_read_again(world):
    rank = world.rank()
    agent = world.agent()
    rank.step(0)
    agent.cycle(0.0)
    spool = agent.runs[RUN].spool
    append, sync = spool.append, spool.sync

    def refuse(*_):
        raise StorageError("no space left")

    spool.append = refuse
    rank.step(1, 2)
    agent.cycle(0.1)
    spool.append, spool.sync = append, refuse
    rank.step(3)
    agent.cycle(0.2)
    spool.sync = sync
    rank.step(4)
    agent.cycle(0.3)
    assert {0, 1, 2, 3, 4} == set(world.steps())
    assert (1, 1) == (agent.faults.counts["tailer"], agent.faults.counts["spool"])


@pytest.mark.parametrize("where", ["bury", "ack"])
def test_rows_that_the_disk_refused_in_another_call_are_read_again(world, monkeypatch, where):
    rank = world.rank(pid=0 if where == "bury" else os.getpid())
    agent = world.agent(sample_seconds=1e9)
    agent.run_once(0.0)
    rank.step(0, 1, 2)
    spool = agent.runs[RUN].spool
    append, fsync = spool.append, os.fsync

    def full(fd):
        raise OSError(errno.ENOSPC, "No space left on device")

    def append_and_ack(raw):
        """Between append and sync the I/O thread writes the spool's state."""
        kept = append(raw)
        with monkeypatch.context() as patch, contextlib.suppress(StorageError):
            patch.setattr(os, "fsync", full)
            spool._save_state()
        return kept

    if where == "ack":
        spool.append = append_and_ack
        agent.run_once(0.5)
        spool.append = append
    else:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            agent.run_once(0.5)
    assert os.fsync is fsync
    assert [] == world.steps()
    agent.run_once(1.0)
    agent.run_once(1.5)
    assert [0, 1, 2] == world.steps()


def test_a_journal_of_a_newer_version_is_said_once_and_the_others_are_served(world):
    newer, rank = world.rank(1), world.rank()
    newer.step(0)
    rank.step(0)
    (segment,) = newer.directory.glob("steps-*.seg")
    raw = bytearray(segment.read_bytes())
    raw[4:8] = (99).to_bytes(4, "little")
    segment.write_bytes(raw)
    agent = world.agent()
    for second in range(4):
        agent.cycle(float(second))
    assert [0] == world.steps()
    assert 1 == world.notes().count("newer_journal")
    assert 1 == agent.faults.counts["journal"]


def test_a_journal_with_a_torn_first_segment_is_waited_for_and_the_others_are_served(world):
    torn, rank = world.rank(1), world.rank()
    torn.step(0)
    rank.step(0)
    (segment,) = torn.directory.glob("steps-*.seg")
    segment.write_bytes(segment.read_bytes()[:20])
    agent = world.agent()
    agent.cycle(0.0)
    agent.cycle(1.0)
    assert [0] == world.steps()
    assert {} == agent.faults.counts


def test_an_agent_of_another_node_than_its_ranks_reports_it_where_people_look(world):
    rank = world.rank()
    rank.step(0)
    agent = world.agent(node="another")
    for second in (0, 10, 25, 50):
        agent.cycle(float(second))
    there = {"source": "node:another", "node": "another"}
    (note,) = [e.event for e in world.events(**there) if isinstance(e.event, Note)]
    assert ("foreign_node", "error") == (note.code, note.severity)
    assert "Start the agent with --node node-a" in note.text
    (raised,) = [e.event for e in world.events(**there) if isinstance(e.event, FindingRaised)]
    assert "stream_stopped" == raised.finding.kind
    assert note.text == (world.base / RUN / NOTICE_FILE).read_text()


def test_ranks_that_an_agent_of_their_own_serves_are_no_trouble_of_another_one(world):
    world.rank().step(0)
    own, other = world.agent(), world.agent(node="another")
    for second in (0, 10, 25, 50):
        own.cycle(float(second))
        other.cycle(float(second))
    assert [] == world.notes(source="node:another", node="another")
