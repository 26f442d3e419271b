"""What of a growing run's curves a page asks for again: rows that are new, counted as stored."""

import math
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.collector.rows import RUN, Writer
from trainvitals.records import RunInfo, RunStarted
from trainvitals.testing import ManualClock
from trainvitals.views import RunDetail, RunQuestion, SeriesRequest
from vitals_collector.ingest.ingest import ingest_all
from vitals_collector.queries.query import Query
from vitals_collector.storage.store import Store, open_store
from vitals_dashboard.charts import ChartLine
from vitals_dashboard.feed import ChartFeed
from vitals_dashboard.source import DataSource

POINTS = 100
ASKED = (("loss", SeriesRequest(metric="steps.loss", points=POINTS), "main"),)


class Growing:
    """A run in a store, and a page that follows it."""

    def __init__(self, store: Store) -> None:
        self._store, self._feed, self._writer = store, ChartFeed(), Writer(world_size=1)
        query = Query(store, clock=ManualClock())
        client = SimpleNamespace(ask=query.ask, url=f"test:{id(self)}")
        self._source = cast("DataSource", SimpleNamespace(client=client))
        self.num_steps = 0
        self._ingest(self._writer.events(RunStarted(info=RunInfo(name="long"))))

    def train(self, losses: list[float]) -> None:
        """Store so many more steps."""
        steps = range(self.num_steps, self.num_steps + len(losses))
        self._ingest(self._writer.steps(steps, loss=[*losses]))
        self.num_steps = steps.stop

    def look(self) -> ChartLine:
        """Return what the next refresh sends of the loss."""
        detail: RunDetail = self._source.client.ask(RunQuestion(run_id=RUN))
        (line,) = self._feed.query_lines(self._source, detail, cast("Any", ASKED))
        assert line is not None
        return line

    def _ingest(self, raw: bytes) -> None:
        ingest_all(self._store, [raw], time.time_ns())


@pytest.fixture
def growing(tmp_path: Path) -> Iterator[Growing]:
    store = open_store(f"sqlite:///{tmp_path / 'store.db'}")
    yield Growing(store)
    store.close()


def losses(first: int, num: int) -> list[float]:
    return [2.0 + math.sin(step) for step in range(first, first + num)]


@pytest.mark.parametrize("num", [50, 6_000], ids=["whole", "thinned"])
def test_a_refresh_sends_the_rows_behind_the_last_one_and_counts_all(
    growing: Growing, num: int
) -> None:
    growing.train(losses(0, num))
    first = growing.look().reply
    assert min(num, POINTS) <= len(first.step) <= 3 * POINTS
    for _ in range(12):
        last = growing.num_steps
        growing.train(losses(last, 10))
        line = growing.look()
        assert (0, tuple(range(last, last + 10))) == (line.num_replaced, line.reply.step)
        assert growing.num_steps == line.reply.num_total


def test_a_thinned_run_that_ends_in_nan_is_counted_right_as_it_goes_on(growing: Growing) -> None:
    growing.train([*losses(0, 6_000), math.nan, math.nan, math.nan])
    assert (6_003, 3) == (growing.look().reply.num_total, 3)
    growing.train([math.nan, *losses(0, 4)])
    reply = growing.look().reply
    assert (6_008, 4) == (reply.num_total, reply.num_nonfinite)


def test_a_page_that_could_not_ask_for_long_gets_a_thinned_part_and_goes_on(
    growing: Growing,
) -> None:
    growing.train(losses(0, 6_000))
    growing.look()
    growing.train(losses(6_000, 3_000))
    late = growing.look().reply
    assert POINTS <= len(late.step) <= 3 * POINTS and late.num_total == 9_000
    growing.train(losses(9_000, 1))
    line = growing.look()
    assert (0, (9_000,), 9_001) == (line.num_replaced, line.reply.step, line.reply.num_total)
