"""What a curve shows is what is stored: whatever came, was rolled back, merged or thinned."""

import contextlib
import logging
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from tests.collector.rows import RUN, SECOND, START, Writer
from tests.support.examples import one_in
from tests.support.exposition import Page
from tests.trainvitals.policy_run import STORM, Run
from trainer_hooks.terminal import Terminal
from trainvitals.catalog import GPU_SCHEMA
from trainvitals.detect.registry import ACTED_CAUSES
from trainvitals.records import AttemptStarted, DecisionMade, RunInfo
from trainvitals.testing import ManualClock
from trainvitals.views import (
    Branch,
    ManySeriesQuestion,
    RunsQuestion,
    SeriesReply,
    SeriesRequest,
)
from trainvitals.wire import decode_batch
from vitals_agent.tailer import JournalSummary
from vitals_collector.ingest.ingest import ingest, ingest_all
from vitals_collector.numbers import lake_maintenance
from vitals_collector.numbers.interface import RowSpan, StepWindow
from vitals_collector.queries.query import Query
from vitals_collector.storage.store import Store, open_data_store, open_store

GPU = "gpu:GPU-1"
WIDTHS = (2, 7, 60, 250, 1_000, 20_000)
"""Points asked for: a sparkline's, half a page's, a page's, and more than there are."""
LEVEL_STEPS = 512


class Row(NamedTuple):
    """A measured value, and where it lies."""

    at: int
    attempt: int
    value: float


class Written:
    """A run that grows, is rolled back and thinned; it remembers what ought to be there."""

    def __init__(self, store: Store, seed: int) -> None:
        self.store = store
        self.rng = np.random.default_rng(seed)
        self.ranks = [Writer(f"rank:{rank}") for rank in range(2)]
        self.gpu = Writer(GPU)
        self.attempt, self.step, self.second, self.loss = 1, 0, 0, 4.0
        self.lineage: list[dict[int, Row]] = [{}, {}]
        """By rank, what counts of each step."""
        self.discarded: list[list[Row]] = [[], []]
        self.samples: list[Row] = []
        started = AttemptStarted(id=1, parent=None, fork_step=0, reason="start")
        ingest(store, self.ranks[0].events(started))

    def grow(self, num: int) -> None:
        """Append steps of both ranks: a few lost, a few without a value, a few not finite."""
        is_there = self.rng.random(num) > self.rng.choice([0.0, 0.02, 0.6])
        steps = (self.step + np.flatnonzero(is_there)).tolist()
        self.step += num
        for rank, writer in enumerate(self.ranks):
            values = [self._value() for _ in steps]
            for step, value in zip(steps, values, strict=True):
                if value is not None:
                    self.lineage[rank][step] = Row(step, self.attempt, value)
            if steps:
                raw = writer.steps(steps, attempt=self.attempt, loss=values, rank_loss=values)
                ingest(self.store, raw)
        self._sample(num // 2)

    def _value(self) -> float | None:
        self.loss += self.rng.normal() / 10
        chance = self.rng.random()
        if chance < 0.02:
            return None
        if chance < 0.023:
            return float(self.rng.choice([math.nan, math.inf, -math.inf]))
        return self.loss + 50.0 * (chance > 0.999)

    def _sample(self, num: int) -> None:
        column = next(i for i, c in enumerate(GPU_SCHEMA.columns) if c.name == "power_watts")
        rows: list[list[float | int | None]] = []
        for _ in range(num):
            self.second += int(self.rng.choice([1, 1, 1, 40]))
            value = float(self.rng.integers(0, 700))
            row: list[float | int | None] = [None] * len(GPU_SCHEMA.columns)
            row[:4] = [-1, 0, START + self.second * SECOND, 0]
            row[column] = value
            rows.append(row)
            self.samples.append(Row(START + self.second * SECOND, 0, value))
        ingest_all(self.store, [self.gpu.batch(GPU_SCHEMA, rows)] if rows else [], 0)

    def roll_back(self) -> None:
        """Go back some steps on a new attempt."""
        fork = max(0, self.step - int(self.rng.choice([1, 30, 700])))
        for lineage, discarded in zip(self.lineage, self.discarded, strict=True):
            discarded += [lineage.pop(step) for step in list(lineage) if step >= fork]
        self.attempt += 1
        self.step = fork
        started = AttemptStarted(
            id=self.attempt, parent=self.attempt - 1, fork_step=fork, reason="rollback"
        )
        ingest(self.store, self.ranks[0].events(started))

    def thin(self) -> None:
        """Have numbers over the ranks take the place of rank 1's oldest rows."""
        for attempt in range(1, self.attempt + 1):
            due = self.store.numbers.next_window(RUN, attempt, LEVEL_STEPS)
            if due is None or due.window.end_step > self.step:
                continue
            self.store.numbers.roll_up(RUN, due.window, 0)
            self._forget(due.window)

    def _forget(self, window: StepWindow) -> None:
        def is_left(row: Row) -> bool:
            is_in = window.first_step <= row.at < window.end_step
            return not (is_in and row.attempt == window.attempt)

        self.lineage[1] = {s: row for s, row in self.lineage[1].items() if is_left(row)}
        self.discarded[1] = [row for row in self.discarded[1] if is_left(row)]

    def rows(self, rank: int, branch: Branch) -> list[Row]:
        """Return what ought to be drawn of a rank, in order."""
        if branch == "lineage":
            return [self.lineage[rank][step] for step in sorted(self.lineage[rank])]
        return sorted(self.discarded[rank], key=lambda row: (row.attempt, row.at))

    def live(self, num_steps: int) -> None:
        """Let all of it happen, in any order, until there are so many steps."""
        while self.step < num_steps:
            self.grow(int(self.rng.choice([3, 200, 1_500])))
            if self.rng.random() < 0.5:
                self.store.numbers.merge()
            if self.rng.random() < 0.3:
                self.roll_back()
            if self.rng.random() < 0.3:
                self.thin()


@pytest.fixture(scope="module", params=one_in(2, range(2)))
def written(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Written]:
    """A run with a past, in the store of a collector."""
    with (
        pytest.MonkeyPatch.context() as patched,
        contextlib.closing(open_data_store(tmp_path_factory.mktemp("data"))) as store,
    ):
        patched.setattr(lake_maintenance, "FEWEST_ROWS", 1)
        run = Written(store, request.param)
        run.live(4_000)
        yield run


def ask(store: Store, *requests: SeriesRequest) -> tuple[SeriesReply, ...]:
    query = Query(store, clock=ManualClock())
    return query.ask(ManySeriesQuestion(run_id=RUN, series=requests))


def columns(rows: Sequence[Row], width: int, *, is_lineage: bool) -> dict[tuple[int, int], list]:
    """Return the rows by the columns they are drawn in, which are as wide as they may be."""
    ats = [row.at for row in rows] or [0]
    # In any that is wider, too, all rows are one column.
    for power in range((min(ats) ^ max(ats)).bit_length(), -1, -1):
        by_column = defaultdict(list)
        for row in rows:
            by_column[0 if is_lineage else row.attempt, row.at >> power].append(row)
        drawn = 0
        for of_column in by_column.values():
            num_finite = sum(math.isfinite(row.value) for row in of_column)
            drawn += min(2, num_finite) + (num_finite < len(of_column))
        if drawn >= min(width, len(rows)):
            break
    return by_column


def envelope(by_column: Mapping[tuple[int, int], Sequence[Row]]) -> dict[tuple[int, int], tuple]:
    """Return the least and greatest value of each column, and whether it has others."""
    shape = {}
    for column, rows in by_column.items():
        finite = [row.value for row in rows if math.isfinite(row.value)]
        ends = (min(finite), max(finite)) if finite else ()
        shape[column] = (*ends, len(finite) < len(rows))
    return shape


def means(by_column: Mapping[tuple[int, int], Sequence[Row]]) -> list[tuple[int, float]]:
    """Return the mean of each column, at its last finite value; NaN if it has none."""
    drawn = []
    for rows in by_column.values():
        finite = [row for row in rows if math.isfinite(row.value)]
        mean = math.fsum(row.value for row in finite) / len(finite) if finite else math.nan
        drawn.append((finite[-1].at if finite else rows[0].at, mean))
    return sorted(drawn)


def check(reply: SeriesReply, rows: Sequence[Row], width: int) -> None:
    """Assert that what is drawn is what is stored."""
    along = reply.time_unix_ns if reply.metric.startswith("gpu.") else reply.step
    kinds = {(mark.step, mark.attempt): float(mark.kind) for mark in reply.nonfinite}
    drawn = [
        Row(at, attempt, kinds[at, attempt] if value is None else value)
        for at, attempt, value in zip(along, reply.attempt, reply.value, strict=True)
    ]
    key = [(row.attempt, row.at) if reply.branch != "lineage" else row.at for row in drawn]
    assert sorted(key) == key
    assert set(map(repr, drawn)) <= set(map(repr, rows)), "a point that nobody measured"
    assert len(drawn) >= min(width, len(rows))
    assert reply.num_total == len(rows)
    by_column = columns(rows, width, is_lineage=reply.branch == "lineage")
    places = {(row.at, row.attempt): column for column, of in by_column.items() for row in of}
    drawn_by_column = defaultdict(list)
    for row in drawn:
        drawn_by_column[places[row.at, row.attempt]].append(row)
    assert envelope(by_column) == envelope(drawn_by_column)
    assert sorted(kinds) == sorted((r.at, r.attempt) for r in rows if not math.isfinite(r.value))
    assert [drawn[i] for i in (0, -1) if rows and math.isfinite(rows[i].value)] == [
        rows[i] for i in (0, -1) if rows and math.isfinite(rows[i].value)
    ]


def test_every_column_of_a_curve_has_the_extremes_of_its_rows(written: Written):
    for width in WIDTHS:
        branches: tuple[Branch, ...] = ("lineage", "discarded")
        asked = [
            (SeriesRequest(metric=metric, source=source, branch=branch, points=width), rank, branch)
            for rank, (metric, source) in enumerate(
                [("steps.loss", "rank:0"), ("steps.rank_loss", "rank:1")]
            )
            for branch in branches
        ]
        replies = ask(written.store, *[request for request, _, _ in asked])
        for reply, (_, rank, branch) in zip(replies, asked, strict=True):
            check(reply, written.rows(rank, branch), width)


def test_every_column_of_a_gpu_s_curve_has_the_extremes_of_its_samples(written: Written):
    for width in WIDTHS:
        (reply,) = ask(
            written.store, SeriesRequest(metric="gpu.power_watts", source=GPU, points=width)
        )
        check(reply, written.samples, width)


def test_a_part_of_a_curve_is_as_true_as_the_whole(written: Written):
    rows = written.rows(0, "lineage")
    for _ in range(8):
        first, last = sorted(written.rng.integers(0, written.step, 2).tolist())
        for width in WIDTHS:
            request = SeriesRequest(
                metric="steps.loss", points=width, from_step=first, to_step=last
            )
            (reply,) = ask(written.store, request)
            check(reply, [row for row in rows if first <= row.at <= last], width)


def test_a_smoothed_curve_is_the_mean_over_every_row(written: Written):
    for weight in (0.1, 0.9, 0.99):
        rows, total, norm = [], 0.0, 0.0
        for row in written.rows(0, "lineage"):
            if math.isfinite(row.value):
                total = weight * total + (1 - weight) * row.value
                norm = weight * norm + (1 - weight)
            value = total / norm if math.isfinite(row.value) else row.value
            rows.append(row._replace(value=value))
        for first in (None, written.step // 2):
            request = SeriesRequest(
                metric="steps.loss", points=250, smoothing=weight, from_step=first
            )
            (reply,) = ask(written.store, request)
            asked = [row for row in rows if row.at >= (first or 0)]
            expected = means(columns(asked, 250, is_lineage=True))
            assert [step for step, _ in expected] == list(reply.step)
            drawn = [math.nan if value is None else value for value in reply.value]
            np.testing.assert_allclose(drawn, [value for _, value in expected], rtol=1e-9)
            assert reply.num_total == len(asked)


def test_a_live_run_is_drawn_as_finely_where_it_was_merged_as_where_it_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(lake_maintenance, "FEWEST_ROWS", 1)
    with contextlib.closing(open_data_store(tmp_path)) as store:
        writer, rng = Writer(), np.random.default_rng(1)
        losses = rng.normal(size=3_072).tolist()
        for first, end in ((0, 1_024), (1_024, 3_072)):
            ingest(store, writer.steps(range(first, end), loss=losses[first:end]))
            if first == 0:
                store.numbers.merge()
        (reply,) = ask(store, SeriesRequest(metric="steps.loss", points=1_000))
    assert 512 <= sum(step < 1_024 for step in reply.step), "two of each four steps"


def test_an_update_that_was_not_applied_is_counted_wherever_skips_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO, logger="trainvitals")
    ladder, terminal = Run(), Terminal.open(RunInfo(name="tiny"), RUN, ManualClock(), {})
    assert terminal is not None
    flags = {}
    for word in ("nan", "ok", *STORM):
        flags[ladder.step] = int(word != "ok")
        made = ladder.feed(word)
        terminal.judged(made[0] if made else None)
    terminal.ended("finished", len(flags))
    steps = [*flags]
    writer, seen = Writer(), JournalSummary()
    with contextlib.closing(open_store(f"sqlite:///{tmp_path / 'store.db'}")) as store:
        page = Page(store)
        for body in (
            writer.steps(steps, loss=1.0, skipped=[flags[step] for step in steps]),
            writer.events(*[DecisionMade(decision=decision) for decision in ladder.ledger]),
        ):
            page.send(body)
            seen.observe(decode_batch(body))
        (summary,) = Query(store, clock=page.clock).ask(RunsQuestion())
        rows = store.numbers.scan(RowSpan(RUN, "steps"), ["skipped"])["skipped"].values
        lost = [
            page.value(f"train_{name}_total", run=RUN) for name in ("lost_steps", "dropped_batches")
        ]
        metrics = {
            name: sum(page.value(name, run=RUN, reason=cause) or 0.0 for cause in ACTED_CAUSES)
            for name in ("train_skipped_steps_total", "train_rollbacks_total")
        }
    (words,) = [text for text in caplog.messages if " finished after " in text]
    skips, rollbacks = re.findall(r"(\d+) (?:update|rollback)", words)
    assert {"skip_step": 3, "rollback": 1} == Counter(d.action for d in ladder.ledger)
    assert 4 == int(rows.sum()), "the update at the step of the rollback was not applied either"
    num = 3
    assert (num, 1) == (summary.num_skips, summary.num_rollbacks)
    assert (num, 1) == (sum(seen.skips.values()), sum(seen.rollbacks.values()))
    assert {"train_skipped_steps_total": num, "train_rollbacks_total": 1} == metrics
    assert (num, 1) == (int(skips), int(rollbacks))
    back = ladder.ledger[-1]
    # The first skip lies before the step it went back to or is among what was discarded: once.
    discarded = {*range(back.rollback_to_step, back.decided_at_step + 1)}
    assert [len({200} | discarded), back.skip_batches] == lost
    assert back.skip_batches > 0
