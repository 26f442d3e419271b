"""Hundreds of agents and one collector on a simulated clock: nobody sleeps, nothing is sent."""

import heapq
import math
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from vitals_agent.backoff import BacklogRateLimit, Backoff

NUM_AGENTS = 300
OUTAGE = 200
LONG_BYTES = 1e8
CYCLE = 0.5
REQUEST_BYTES = 1_000_000
LIVE_BYTES_PER_SECOND = 20_000
"""What 8 ranks and 8 GPUs write."""
CAPACITY = 24_000_000
"""Bytes a second that the collector takes; the agents live on a quarter of it."""
QUEUE_SECONDS = 4.0
"""Requests that would wait longer are answered 503 at once, with Retry-After."""
RETRY_AFTER = 5.0


@dataclass
class Collector:
    """Works off one request after the other; is away until ``back_at``."""

    back_at: float
    busy_until: float = 0.0
    asked: Counter[int] = field(default_factory=Counter)
    num_refused: int = 0

    def answer(self, num_bytes: int, now: float) -> float | None:
        """Return after how many seconds it is stored; None: refused."""
        self.asked[int(now)] += 1
        wait = max(0.0, self.busy_until - now)
        if now < self.back_at or wait > QUEUE_SECONDS:
            self.num_refused += 1
            return None
        self.busy_until = now + wait + num_bytes / CAPACITY
        return self.busy_until - now


class SimulatedAgent:
    """The shipper's policy over a spool that is a number of bytes."""

    def __init__(self, rng: random.Random, backlog: float) -> None:
        self.backoff = Backoff(rng=rng)
        self.pace = BacklogRateLimit()
        self.backlog = backlog
        self.caught_up_at: float | None = None

    def turn(self, collector: Collector, now: float) -> float:
        """Do what one cycle does; return when the next begins."""
        self.backlog += LIVE_BYTES_PER_SECOND * CYCLE
        began = now
        while self.backlog and self.backoff.due(now) and self.pace.due(now) and now - began < 1.0:
            limit = min(REQUEST_BYTES, int(self.pace.bytes_per_second))
            num_bytes = int(min(self.backlog, limit))
            seconds = collector.answer(num_bytes, now)
            if seconds is None:
                asked = RETRY_AFTER if now >= collector.back_at else 0.0
                self.backoff.record_failure(now, retry_after=asked)
                self.pace.failed()
                break
            now += seconds
            self.backlog -= num_bytes
            self.backoff.record_success()
            self.pace.sent(num_bytes, seconds, now)
            if num_bytes < limit:
                self.caught_up_at = self.caught_up_at or now
                break
        return now + CYCLE


def simulate(
    *, seconds: float, outage: float, backlogs: list[float], rng: random.Random
) -> tuple[Collector, list[SimulatedAgent]]:
    collector = Collector(back_at=outage)
    agents = [SimulatedAgent(rng, backlog) for backlog in backlogs]
    events = [(rng.uniform(0.0, CYCLE), i) for i in range(len(agents))]
    heapq.heapify(events)
    while events[0][0] < seconds:
        now, i = events[0]
        heapq.heapreplace(events, (agents[i].turn(collector, now), i))
    return collector, agents


@pytest.fixture(scope="module")
def after_an_outage() -> tuple[Collector, list[SimulatedAgent]]:
    """An outage is worked off; each 20th agent was away for much longer."""
    weeks = [LONG_BYTES if i % 20 == 0 else 0.0 for i in range(NUM_AGENTS)]
    return simulate(seconds=500.0, outage=OUTAGE, backlogs=weeks, rng=random.Random(1))


def test_agents_that_find_the_collector_again_do_not_come_all_at_once(after_an_outage):
    collector, _ = after_an_outage
    away = [collector.asked[second] for second in range(60, OUTAGE)]
    back = [collector.asked[second] for second in range(OUTAGE, OUTAGE + 30)]
    # Each asks once in 15 seconds on average while it is away, and twice a second in peace.
    assert max(away) < 2 * NUM_AGENTS / 15
    assert max(back) < NUM_AGENTS / 2
    assert sum(away) / len(away) == pytest.approx(NUM_AGENTS / 15, rel=0.1)


def test_a_backlog_drains_at_nearly_what_the_collector_can_take(after_an_outage):
    _, agents = after_an_outage
    in_all = OUTAGE * NUM_AGENTS * LIVE_BYTES_PER_SECOND + NUM_AGENTS / 20 * LONG_BYTES
    spare = CAPACITY - NUM_AGENTS * LIVE_BYTES_PER_SECOND
    drained = max(agent.caught_up_at or math.inf for agent in agents) - OUTAGE
    assert drained < 1.5 * in_all / spare


def test_who_was_away_for_long_does_not_starve_the_others(after_an_outage):
    _, agents = after_an_outage
    short = [a.caught_up_at or math.inf for i, a in enumerate(agents) if i % 20]
    long = [a.caught_up_at or math.inf for i, a in enumerate(agents) if i % 20 == 0]
    assert max(short) < min(long)


def test_what_a_refusing_collector_asks_for_spreads_the_agents(monkeypatch):
    # One that can take next to nothing: all agents are refused again and again.
    monkeypatch.setattr("tests.agent.test_stampede.CAPACITY", 1e5)
    collector, _ = simulate(
        seconds=200.0, outage=0.0, backlogs=[1e6] * NUM_AGENTS, rng=random.Random(2)
    )
    late = [collector.asked[second] for second in range(100, 200)]
    # Behind 5 seconds a delay of up to 30 by chance: 15 of 300 in a second.
    assert max(late) < 3 * NUM_AGENTS / 20
