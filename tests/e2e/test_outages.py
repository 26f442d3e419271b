"""Collector, agent and a rank are killed in mid-run, and stopped: training goes on, no row is lost.

One training of two ranks goes through all of it; what the ranks wrote is compared with the store.
"""

import os
import signal
import time
from collections import Counter
from dataclasses import dataclass, field

import pytest

from tests.e2e.lab import Lab, free_port, open_lab, stored_rows, until
from tests.e2e.mirror import Mirror
from trainvitals.io.client import CollectorClient
from trainvitals.views import EventsQuestion, EventView, RunDetail, RunQuestion

pytestmark = pytest.mark.dist

STEPS_OF_AN_OUTAGE = 20
GONE = "ended without a clean exit"


@dataclass
class Story:
    """What was seen of a training that went through everything."""

    outages: dict[str, tuple[int, int]] = field(default_factory=dict)
    mirror: Mirror | None = None
    stored: Counter = field(default_factory=Counter)
    detail: RunDetail | None = None
    events: tuple[EventView, ...] = ()
    exit_code: int = 0


def outage(story: Story, name: str, mirror: Mirror) -> None:
    """Note the time that rank 0 needs for some more steps."""
    began = time.monotonic_ns()

    def trained() -> bool:
        # A step's row is written in the step after, so rows that appear now may be older.
        mirror.look()
        return sum(began <= at for at in mirror.times[0].values()) >= STEPS_OF_AN_OUTAGE

    until(trained, f"training goes on while {name}")
    story.outages[name] = (began, time.monotonic_ns())


def newest_stored(lab: Lab) -> int:
    """Return how many rows of steps of rank 0 are stored."""
    keys = (key for key, _ in stored_rows(lab.data))
    return sum(source == "rank:0" and stream == "steps" for source, _, stream, _ in keys)


def tell(lab: Lab) -> Story:
    """Train; kill the collector and the agent; stop both and kill rank 1; wait for the store."""
    port, story = free_port(), Story()
    mirror = story.mirror = Mirror(lab.shared)
    collector, agent = lab.collector(port), lab.agent(port)
    training = lab.train("--standalone", "--nproc-per-node", "2", steps=100_000, VITALS_AGENT="off")
    until(lambda: mirror.num_steps() > 20 and newest_stored(lab) > 0, "steps arrive in the store")

    collector.kill()
    outage(story, "the collector is dead", mirror)
    before = newest_stored(lab)
    collector = lab.collector(port)
    agent.kill()
    agent.wait()
    outage(story, "the agent is dead", mirror)
    agent = lab.agent(port)
    until(lambda: newest_stored(lab) > before + STEPS_OF_AN_OUTAGE, "the store catches up")
    for process in (agent, collector):
        process.send_signal(signal.SIGSTOP)
    outage(story, "agent and collector are stopped", mirror)
    # The agent frees what it has read of a dead rank: the copy is complete before it goes on.
    os.kill(mirror.pids[1], signal.SIGKILL)
    story.exit_code = training.wait(60)
    mirror.look()
    for process in (agent, collector):
        process.send_signal(signal.SIGCONT)

    with lab.client(port) as client:
        story.stored, story.events = wait_for_all(lab, mirror, client)
        story.detail = client.ask(RunQuestion(run_id=lab.run_id()))
    return story


def wait_for_all(
    lab: Lab, mirror: Mirror, client: CollectorClient
) -> tuple[Counter, tuple[EventView, ...]]:
    """Return rows and events, once the store has what both ranks wrote and the word of their end.

    Rank 0 says goodbye (its collective failed) or is ended by torchrun before it can.
    """
    run_id = lab.run_id()

    def complete() -> bool:
        mirror.look()
        ends = [
            e
            for e in client.ask(EventsQuestion(run_id=run_id))
            if GONE in e.text or e.kind == "RunEnded"
        ]
        return len(ends) >= 2 and mirror.rows.keys() <= {key for key, _ in stored_rows(lab.data)}

    until(complete, "the ranks' rows and ends are stored")
    until(lambda: not list(lab.shared.glob("trainvitals-*/*/rank-*")), "the journals are freed")
    return stored_rows(lab.data), client.ask(EventsQuestion(run_id=run_id))


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    with open_lab(tmp_path_factory.mktemp("outages")) as lab:
        yield tell(lab)


def test_the_store_holds_every_row_that_the_ranks_wrote_once_byte_for_byte(story):
    assert 0 == story.mirror.num_lost
    written = Counter(dict.fromkeys(story.mirror.rows.items(), 1))
    of_ranks = Counter({i: n for i, n in story.stored.items() if i[0][0].startswith("rank:")})
    assert written == of_ranks


def test_no_source_lost_a_row_and_none_was_stored_twice(story):
    lost = {source.source: source.num_lost_rows for source in story.detail.sources}
    assert {"rank:0", "rank:1"} < set(lost)
    assert {0} == set(lost.values())
    keys = Counter(key for key, _ in story.stored)
    assert [] == [key for key, count in keys.items() if count > 1]


def test_every_step_up_to_a_ranks_sigkill_is_there(story):
    times = story.mirror.times
    for rank in (0, 1):
        assert list(range(len(times[rank]))) == sorted(times[rank])
    # A step's row is written in the step after, where rank 1 may die right behind the exchange;
    # rank 0 goes on to the next backward, fails there, and still writes what was on its way.
    assert abs(max(times[0]) - max(times[1])) <= 2
    assert 0 != story.exit_code


def test_training_goes_on_while_agent_and_collector_are_away(story):
    times = story.mirror.times[0].values()
    assert 3 == len(story.outages)
    for name, (began, ended) in story.outages.items():
        assert STEPS_OF_AN_OUTAGE <= sum(began <= at <= ended for at in times), name


def test_the_agent_says_once_of_the_killed_rank_that_it_is_gone_and_where_it_was(story):
    said = [e for e in story.events if GONE in e.text and e.text.startswith("rank 1 ")]
    last = max(story.mirror.times[1])
    assert [last] == [event.step for event in said]
    assert said[0].text.endswith(f"its last step is {last} [rank_gone]")


def test_the_run_does_not_pass_for_finished(story):
    # torchrun may end rank 0 with SIGTERM before it fails by itself; silence is lost in a minute.
    assert story.detail.summary.state in ("failed", "interrupted", "running")
