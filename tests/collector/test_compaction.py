import math
import random
from pathlib import Path

import numpy as np
import pytest
import sqlalchemy
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.collector.rows import RUN, SECOND, START, STEPS, Writer
from trainvitals.catalog import GPU_SCHEMA, LAYERS_SCHEMA, ROW_COLUMNS
from trainvitals.clock import SystemClock
from trainvitals.records import AttemptStarted, NamesDefined
from trainvitals.rows import Column, Schema, Value
from trainvitals.views import (
    Branch,
    ManySeriesQuestion,
    RunDetail,
    RunQuestion,
    SeriesQuestion,
    SeriesReply,
    SeriesRequest,
    StepQuestion,
    StepView,
)
from vitals_collector.ingest.ingest import ingest
from vitals_collector.queries import query as query_module
from vitals_collector.queries.query import Query
from vitals_collector.storage import columns, compaction
from vitals_collector.storage.compaction import Piece, compact, plan, rewrite
from vitals_collector.storage.read_rows import Page, read_pages
from vitals_collector.storage.schema import batch_columns, batches
from vitals_collector.storage.store import DATABASE_FILE, Store, open_data_store, open_store

MANY = 20_000
BRANCHES: tuple[Branch, ...] = ("lineage", "discarded", "all")
RANKS = ("rank:0", "rank:1")


def piece(first: int, num: int, **how: object) -> Piece:
    """Return a batch of steps whose numbers are its sequence numbers."""
    known: dict[str, object] = {
        "id": first,
        "schema_digest": "a",
        "first_seq": first,
        "num_rows": num,
        "is_columnar": False,
        "min_attempt": 1,
        "max_attempt": 1,
        "min_step": first,
        "max_step": first + num - 1,
    }
    return Piece(**(known | how))  # type: ignore[arg-type]


def planned(*pieces: Piece, is_over: bool = False) -> list[list[int]]:
    """Return the ids that become one each."""
    return [[one.id for one in group] for group in plan(pieces, is_over=is_over)]


# ----------------------------------------------------------------------------------- planning


def test_rows_wait_until_there_are_enough_of_them():
    few = [piece(i * 100, 100) for i in range(5)]
    assert [] == planned(*few)
    assert [[0, 100, 200, 300, 400, 500]] == planned(*few, piece(500, 100))


def test_a_silent_writer_is_compacted_with_what_it_has_but_not_for_a_handful_of_rows():
    assert [[0, 100]] == planned(piece(0, 100), piece(100, 10), is_over=True)
    assert [] == planned(piece(0, 10), piece(10, 10), is_over=True)


def test_small_chunks_become_a_full_one_and_a_full_one_is_left_alone():
    small = [piece(i * 512, 512, is_columnar=True) for i in range(16)]
    assert [] == planned(*small[:15])
    assert [[one.id for one in small]] == planned(*small)
    full = piece(0, 8_192, is_columnar=True)
    assert [[8_192]] == planned(full, piece(8_192, 600))
    assert [] == planned(full, is_over=True)


def test_at_the_end_all_small_chunks_become_one():
    chunks = [piece(i * 512, 512, is_columnar=True) for i in range(3)]
    assert [[0, 512, 1024]] == planned(*chunks, is_over=True)
    assert [] == planned(chunks[0], is_over=True)


@pytest.mark.parametrize(
    "second",
    [
        pytest.param(piece(301, 300), id="a-gap"),
        pytest.param(piece(300, 300, schema_digest="b"), id="other-columns"),
        pytest.param(piece(300, 300, min_attempt=2, max_attempt=2), id="another-attempt"),
        pytest.param(piece(300, 300, min_step=200, max_step=499), id="steps-go-back"),
        pytest.param(piece(300, 300, is_thinned=True), id="thinned"),
    ],
)
def test_a_chunk_ends_where_the_next_rows_are_of_another_kind(second: Piece):
    assert [[0]] == planned(piece(0, 300), second)
    assert [[0], [second.id]] == planned(piece(0, 300), second, is_over=True)


def test_rows_of_two_attempts_in_one_batch_stay_apart():
    mixed = piece(100, 100, max_attempt=2)
    after = piece(200, 600, min_attempt=2, max_attempt=2)
    assert [[0], [100], [200]] == planned(piece(0, 100), mixed, after)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 3_000), st.booleans()), max_size=40), st.booleans())
def test_planning_ends_and_never_plans_a_batch_twice(sizes: list[tuple[int, bool]], is_over: bool):
    pieces, first = [], 0
    for num, is_columnar in sizes:
        pieces.append(piece(first, num, is_columnar=is_columnar))
        first += num
    for _ in range(12):
        groups = plan(pieces, is_over=is_over)
        if not groups:
            break
        gone = [one.id for group in groups for one in group]
        assert len(set(gone)) == len(gone)
        for group in groups:
            num = sum(one.num_rows for one in group)
            assert [one.first_seq for one in group] == [one.first_seq for one in group]
            pieces = [one for one in pieces if one not in group]
            pieces.append(piece(group[0].first_seq, num, is_columnar=True))
        pieces.sort(key=lambda one: one.first_seq)
    assert [] == plan(pieces, is_over=is_over)
    assert sum(num for num, _ in sizes) == sum(one.num_rows for one in pieces)


# ------------------------------------------------------------------------ equal before and after


class Story:
    """Makes up a run: rows of ranks and a GPU, gaps, rollbacks, relaunches, resent batches."""

    def __init__(self, store: Store, seed: int) -> None:
        self.store = store
        self.rng = random.Random(seed)
        self.ranks = [Writer(source) for source in RANKS]
        self.gpu = Writer("gpu:GPU-1")
        self.step, self.attempt, self.now = 0, 1, START
        self.sent: list[bytes] = []
        self._send(self.ranks[0].events(AttemptStarted(id=1, parent=None, fork_step=0, reason="")))
        names = NamesDefined(stream="layers", names={0: "a", 1: "b"})
        self._send(self.ranks[0].events(names))

    def go_on(self) -> None:
        """Let one thing happen."""
        self.rng.choice([self.train, self.train, self.train, self.roll_back, self.relaunch,
                         self.send_again])()  # fmt: skip

    def train(self) -> None:
        num = self.rng.choice([1, 5, 30, 90])
        lose = self.rng.choice([0, 0, 0, 2])
        steps = range(self.step, self.step + num)
        for writer in self.ranks:
            writer.started = self.now
            own: dict[str, Value | list[Value]] = {
                "loss": [self._value() for _ in steps],
                "grad_norm": 1.5,
                "rank_loss": [self._value() for _ in steps],
                "skipped": 0,
            }
            self._send(writer.steps(steps, attempt=self.attempt, lose=lose, **own))
        rest: list[Value] = [None] * (len(GPU_SCHEMA.columns) - 5)
        self.gpu.started = self.now
        gpu_rows = [[-1, 0, self.gpu.time_of(s), s, self._value(), *rest] for s in steps]
        self._send(self.gpu.batch(GPU_SCHEMA, gpu_rows))
        rest = [None] * (len(LAYERS_SCHEMA.columns) - 6)
        layer_rows = [
            [s, self.attempt, self.gpu.time_of(s), s, layer, self._value(), *rest]
            for s in steps
            for layer in range(2)
        ]
        self._send(self.ranks[0].batch(LAYERS_SCHEMA, layer_rows))
        self.step += num
        self.now += 1_000 * SECOND

    def roll_back(self) -> None:
        fork = max(0, self.step - self.rng.choice([1, 20, 120]))
        parent, self.attempt, self.step = self.attempt, self.attempt + 1, fork
        started = AttemptStarted(id=self.attempt, parent=parent, fork_step=fork, reason="rollback")
        self._send(self.ranks[0].events(started))

    def relaunch(self) -> None:
        self.ranks = [Writer(source, started=self.now) for source in RANKS]
        self._send(self.ranks[0].events(NamesDefined(stream="layers", names={0: "b", 1: "a"})))
        self.step = max(0, self.step - self.rng.choice([0, 10, 70]))

    def send_again(self) -> None:
        ingest(self.store, self.rng.choice(self.sent))

    def _value(self) -> Value:
        kind = self.rng.random()
        if kind < 0.02:
            return self.rng.choice([math.nan, math.inf, -math.inf])
        return None if kind < 0.05 else self.rng.choice([0.25, -0.0, self.rng.gauss(0, 1)])

    def _send(self, raw: bytes) -> None:
        self.sent.append(raw)
        ingest(self.store, raw)


METRICS = (("steps.loss", ""), ("steps.rank_loss", "rank:1"), ("steps.grad_norm", ""),
           ("layers.a", ""), ("gpu.utilization_ratio", ""))  # fmt: skip


def whole_answers(store: Store, last: int) -> list[RunDetail | StepView | SeriesReply]:
    """Return all that is asked of rows, nothing of it downsampled."""
    query = Query(store, clock=SystemClock())
    steps = sorted({0, last // 3, last // 2, last - 1})
    detail = query.ask(RunQuestion(run_id=RUN))
    detail = replace(detail, volume=replace(detail.volume, num_bytes=0))  # what compaction is for
    answers: list[RunDetail | StepView | SeriesReply] = [detail]
    answers += [query.ask(StepQuestion(run_id=RUN, step=step)) for step in steps]
    for metric, source in METRICS:
        for branch in BRANCHES:
            answers.append(
                query.ask(
                    SeriesQuestion(
                        run_id=RUN, metric=metric, source=source, branch=branch, points=MANY
                    )
                )
            )
        cut = {"from_step": last // 3, "to_step": last // 2}
        answers.append(
            query.ask(SeriesQuestion(run_id=RUN, metric=metric, source=source, points=MANY, **cut))
        )
        times = sorted(
            query.ask(
                SeriesQuestion(run_id=RUN, metric=metric, source=source, points=MANY)
            ).time_unix_ns
        )
        part = SeriesRequest(
            metric=metric,
            source=source,
            points=MANY,
            from_time_unix_ns=times[len(times) // 3],
            to_time_unix_ns=times[len(times) // 2],
        )
        answers += query.ask(ManySeriesQuestion(run_id=RUN, series=(part,)))
    return answers


def check_outline(whole: SeriesReply, drawn: SeriesReply) -> None:
    """What is drawn of a curve has its ends, its extremes and all its non-finite values."""
    assert (whole.num_total, whole.num_nonfinite) == (drawn.num_total, drawn.num_nonfinite)
    assert whole.nonfinite == drawn.nonfinite
    rows = [list(zip(r.step, r.attempt, r.time_unix_ns, r.value, strict=True))
            for r in (whole, drawn)]  # fmt: skip
    assert set(rows[1]) <= set(rows[0])
    finite = [[row for row in some if row[3] is not None] for some in rows]
    if finite[0]:
        assert (finite[0][0], finite[0][-1]) == (finite[1][0], finite[1][-1])
        for best in (min, max):
            assert best(row[3] for row in finite[0]) == best(row[3] for row in finite[1])


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make summaries of few values, so that short runs have many."""
    monkeypatch.setattr(columns, "SUMMED_ROWS", 8)
    monkeypatch.setattr(compaction, "MIN_ROWS", 4)
    monkeypatch.setattr(compaction, "FULL_ROWS", 64)


def check_story(store: Store, seed: int, num: int) -> None:
    """Tell a story; ask everything before, after, and once more has come."""
    story = Story(store, seed)
    story.train()
    for _ in range(num):
        story.go_on()
    for _ in range(2):
        before = whole_answers(store, story.step)
        assert compact(store).num_rows > 0
        assert before == whole_answers(store, story.step)
        query = Query(store, clock=SystemClock())
        for whole in before:
            if isinstance(whole, SeriesReply) and whole.num_total == len(whole.step):
                asked = SeriesQuestion(
                    run_id=RUN,
                    metric=whole.metric,
                    source=whole.source,
                    branch=whole.branch,
                    points=6,
                )
                drawn = query.ask(asked)
                if drawn.num_total == whole.num_total:  # the whole one was not cut to steps
                    check_outline(whole, drawn)
        story.step += 5
        story.train()


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("seed", range(5))
def test_no_answer_changes_by_compaction_whatever_happened(seed: int):
    store = open_store("sqlite://")
    check_story(store, seed, num=14)
    store.close()


@pytest.mark.usefixtures("small_chunks")
def test_no_answer_changes_by_compaction_in_any_database(store: Store):
    check_story(store, seed=99, num=10)


# ----------------------------------------------------------------------------------- the store


def pages_of(store: Store) -> list[Page]:
    with store.read() as connection:
        return list(read_pages(connection))


def count(store: Store, table: sqlalchemy.Table) -> int:
    query = sqlalchemy.select(sqlalchemy.func.count()).select_from(table)
    with store.read() as connection:
        return int(connection.execute(query).scalar_one())


def test_a_batch_takes_its_columns_with_it(store: Store):
    ingest(store, Writer().steps(range(100), loss=1.0))
    compact(store)
    assert count(store, batch_columns) > 0
    with store.write() as connection:
        connection.execute(sqlalchemy.delete(batches))
    assert 0 == count(store, batch_columns)


def test_rows_that_changed_meanwhile_are_not_written_over(store: Store):
    writer = Writer()
    for start in (0, 100):
        ingest(store, writer.steps(range(start, start + 100), loss=1.0))
    pages = pages_of(store)
    rows = np.concatenate([page.rows for page in pages])
    with store.write() as connection:
        connection.execute(sqlalchemy.delete(batches).where(batches.c.id == pages[0].id))
    with store.write() as connection:
        assert not rewrite(connection, pages, rows)
    assert [100] == [page.first_seq for page in pages_of(store)]


def test_some_rows_can_take_the_place_of_all(store: Store):
    ingest(store, Writer().steps(range(100), loss=[float(i) for i in range(100)]))
    (page,) = pages_of(store)
    with store.write() as connection:
        assert rewrite(connection, [page], page.rows[::10])
    (page,) = pages_of(store)
    assert (0, 10, list(range(0, 100, 10))) == (page.first_seq, page.num_rows,
                                                page.rows["seq"].tolist())  # fmt: skip
    found = Query(store, clock=SystemClock()).ask(SeriesQuestion(run_id=RUN, metric="steps.loss"))
    assert list(range(0, 100, 10)) == list(found.step)


def test_without_rows_the_batches_are_removed(store: Store):
    ingest(store, Writer().steps(range(100), loss=1.0))
    pages = pages_of(store)
    with store.write() as connection:
        assert rewrite(connection, pages, pages[0].rows[:0])
    assert 0 == count(store, batches)


def test_columns_whose_names_no_database_keeps_stay_as_they_came(store: Store):
    schema = Schema("steps", (*ROW_COLUMNS, Column("odd\0name", "f8")))
    rows: list[list[Value]] = [[i, 1, i, i, 0.5] for i in range(100)]
    ingest(store, Writer().batch(schema, rows))
    assert 0 == compact(store).num_after
    assert 100 == pages_of(store)[0].num_rows


def test_compaction_makes_the_file_small(tmp_path: Path):
    store = open_data_store(tmp_path / "data")
    writer = Writer()
    for start in range(0, 4_000, 100):
        ingest(store, writer.steps(range(start, start + 100), loss=1.5, grad_norm=0.1))
    compact(store)
    store.close()
    raw = 4_000 * STEPS.row_size
    assert (tmp_path / "data" / DATABASE_FILE).stat().st_size < raw / 2


def test_a_run_of_which_nothing_is_stored_has_nothing_to_compact(store: Store):
    assert 0 == compact(store, run_id=RUN).num_after


def test_marks_of_values_that_are_not_finite_have_a_bound_and_their_number_is_said(store: Store):
    ingest(store, Writer().steps(range(200), loss=math.nan))
    compact(store)
    query = Query(store, clock=SystemClock())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(query_module, "MAX_MARKS", 50)
        found = query.ask(SeriesQuestion(run_id=RUN, metric="steps.loss"))
    assert (50, 200) == (len(found.nonfinite), found.num_nonfinite)
    assert (0, 199) == (found.nonfinite[0].step, found.nonfinite[-1].step)
