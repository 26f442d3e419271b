"""A node's memory may go while a journal was being copied: the next agent says so."""

import shutil

from tests.agent.builders import NODE, RUN
from vitals_agent.run import OpenJournal, OpenJournals


def test_a_journal_that_went_with_the_nodes_memory_is_said_to_be_lost_once(world):
    rank = world.rank(pid=0)
    rank.step(0, 1, 2)
    agent = world.agent()
    agent.cycle(0.0)
    again = world.rank(rank=1)
    again.step(0)
    agent.cycle(1.0)
    agent.stop()
    shutil.rmtree(again.directory)
    for _ in range(2):
        after = world.agent()
        world.rank(rank=2).step(0)
        after.cycle(0.0)
        after.stop()
    (note,) = [row.event for row in world.events() if row.event.code == "journal_lost"]
    expected = f"the journal of rank:1 was lost with the memory of node {NODE}"
    assert note.text.startswith(expected)
    assert "after row 0 of its steps" in note.text


def test_what_was_copied_whole_is_not_said_to_be_lost(world):
    rank = world.rank()
    rank.step(0)
    agent = world.agent()
    agent.cycle(0.0)
    rank.close()
    agent.cycle(1.0)
    agent.stop()
    assert not rank.directory.exists()
    after = world.agent()
    world.rank(rank=1).step(0)
    after.cycle(0.0)
    assert "journal_lost" not in world.notes()


def test_a_list_that_cannot_be_read_is_empty(tmp_path):
    path = tmp_path / "journals.json"
    OpenJournals(path).add(OpenJournal("rank-0-a", "rank:0", "a"))
    assert 1 == len(OpenJournals(path).take_missing(tmp_path))
    path.write_text("[{")
    assert [] == OpenJournals(path).take_missing(tmp_path)


def overflow_notes(world):
    return [row.event.text for row in world.events() if row.event.code == "journal_overflowed"]


def test_a_journal_that_overflows_is_told_with_the_next_read_and_again_when_it_has_doubled(world):
    rank = world.rank()
    agent = world.agent()
    rank.step(0)
    agent.cycle(0.0)
    assert ([], 0) == (overflow_notes(world), agent.runs[RUN].num_dropped)
    rank.step(*range(1, 10_000))
    agent.cycle(1.0)
    (text,) = overflow_notes(world)
    num_dropped = agent.runs[RUN].num_dropped
    assert 0 < num_dropped == 10_000 - len(world.steps())
    assert f"the journal of rank:0 on {NODE} overflowed: {num_dropped:,} rows lost" in text
    rank.step(10_000)
    agent.cycle(2.0)
    assert 1 == len(overflow_notes(world))
    rank.step(*range(10_001, 40_000))
    agent.cycle(3.0)
    assert 2 == len(overflow_notes(world))
    values = {reading.name: reading.value for reading in agent.readings()}
    assert agent.runs[RUN].num_dropped == values["agent_dropped_rows_total"] > 2 * num_dropped
