import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import delete, event

from tests.collector.rows import RUN, START, Writer
from tests.collector.test_compaction import BRANCHES, METRICS, Story
from tests.collector.volume_runs import HOUR, all_read
from trainvitals.catalog import ROW_COLUMNS
from trainvitals.clock import SystemClock
from trainvitals.errors import UsageError
from trainvitals.records import RunEnded
from trainvitals.rows import Column, Schema
from trainvitals.views import ManySeriesQuestion, RunQuestion, SeriesQuestion, SeriesRequest
from vitals_collector.ingest.ingest import ingest
from vitals_collector.live.run_status import Liveness
from vitals_collector.queries.chunk_summary_cache import ChunkSummaryCache
from vitals_collector.queries.query import Query
from vitals_collector.retention.quota import Volumes
from vitals_collector.retention.removal import delete_run
from vitals_collector.retention.rollup import RANKS, VolumeSettings
from vitals_collector.retention.rollup_rows import put_numbers
from vitals_collector.storage import columns, compaction
from vitals_collector.storage.compaction import compact
from vitals_collector.storage.schema import batches
from vitals_collector.storage.store import Store, open_store

LATER = START + 1_000 * HOUR
SMALL = VolumeSettings(
    window_steps=10, margin_steps=10, num_worst_ranks=0, max_run_bytes=0, host_samples=10
)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make summaries of few values, so that short runs have many."""
    monkeypatch.setattr(columns, "SUMMED_ROWS", 8)
    monkeypatch.setattr(compaction, "MIN_ROWS", 4)
    monkeypatch.setattr(compaction, "FULL_ROWS", 64)


def asked(last: int) -> list[SeriesRequest]:
    """Return curves of every kind, whole and cut, so coarse that outlines are enough for them."""
    cuts: tuple[dict[str, Any], ...] = (
        {},
        {"from_step": last // 3, "to_step": last // 2},
        {"from_time_unix_ns": START + last // 2 * 1_000_000_000},
    )
    every = (*METRICS, ("ranks.rank_loss:max", ""))
    return [
        SeriesRequest(metric=metric, source=source, branch=branch, points=4, **cut)
        for metric, source in every
        for branch in BRANCHES
        for cut in cuts
    ]


def answers(query: Query, last: int) -> str:
    """Return what is answered to all of it, or that there is no such run; NaN is written alike."""
    try:
        known = query.ask(RunQuestion(run_id=RUN)).metrics
    except UsageError as error:
        return error.text
    return repr(
        query.ask(
            ManySeriesQuestion(
                run_id=RUN, series=tuple(one for one in asked(last) if one.metric in known)
            )
        )
    )


def thin(store: Store) -> None:
    """Thin all that is old by now."""
    all_read(store)
    Volumes(store, SMALL).maintain(LATER)


def check(store: Store, remembering: Query, last: int) -> None:
    """What is remembered answers as what is read anew."""
    assert answers(Query(store, clock=SystemClock()), last) == answers(remembering, last)


def check_story(store: Store, seed: int, num: int) -> None:
    """Let anything happen to a run, remove it, and let another take its place and its name."""
    rng = random.Random(seed)
    remembering = Query(store, clock=SystemClock())
    for again in range(2):
        story = Story(store, seed + again)
        story.train()
        for _ in range(num):
            rng.choice([story.go_on, story.go_on, lambda: compact(store), lambda: thin(store)])()
            check(store, remembering, story.step)
        for writer in story.ranks:
            ingest(store, writer.events(RunEnded(state="finished")))
        # So that writers of the same start may come again.
        delete_run(store, RUN, by="ann", when=Liveness(now_unix_ns=START - 1))
        check(store, remembering, story.step)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_what_is_remembered_answers_as_the_rows_do_whatever_happened(seed: int):
    store = open_store("sqlite://")
    check_story(store, seed, num=10)
    store.close()


def test_what_is_remembered_answers_as_the_rows_do_in_any_database(store: Store):
    check_story(store, seed=99, num=6)


@contextmanager
def summaries_read(store: Store) -> Iterator[list[str]]:
    """Give the statements that read summaries meanwhile."""
    seen: list[str] = []

    def note(_c: Any, _k: Any, statement: str, *_: Any) -> None:
        if "batch_columns.summary" in statement:
            seen.append(statement)

    event.listen(store.engine, "before_cursor_execute", note)
    yield seen
    event.remove(store.engine, "before_cursor_execute", note)


def test_a_refresh_reads_of_compacted_rows_only_what_is_new(store: Store):
    writer = Writer()
    ingest(store, writer.steps(range(256), loss=[float(s % 7) for s in range(256)]))
    compact(store)
    query = Query(store, clock=SystemClock())
    (before,) = query.ask(
        ManySeriesQuestion(run_id=RUN, series=(SeriesRequest(metric="steps.loss", points=4),))
    )
    ingest(store, writer.steps(range(256, 260), loss=9.0))
    with summaries_read(store) as seen:
        (after,) = query.ask(
            ManySeriesQuestion(run_id=RUN, series=(SeriesRequest(metric="steps.loss", points=4),))
        )
        assert [] == seen
        query.ask(
            ManySeriesQuestion(
                run_id=RUN, series=(SeriesRequest(metric="steps.grad_norm", points=4),)
            )
        )
        assert 1 == len(seen), "another column was not read before"
    assert (256, 260) == (before.num_total, after.num_total)
    assert (6.0, 9.0) == (max(v or 0 for v in before.value), max(v or 0 for v in after.value))


def test_numbers_over_all_ranks_are_read_each_time_for_they_are_rewritten(store: Store):
    ingest(store, Writer().steps([0], loss=1.0))
    schema = Schema(RANKS, (*ROW_COLUMNS, Column("num_ranks", "f8"), Column("loss:max", "f8")))
    query = Query(store, clock=SystemClock())
    for value in (1.0, 2.0):
        rows = [
            {"step": s, "attempt": 1, "time_unix_ns": START, "monotonic_ns": 0, "loss:max": value}
            for s in range(64)
        ]
        with store.write() as connection:
            connection.execute(delete(batches).where(batches.c.stream == RANKS))
            put_numbers(connection, RUN, schema, rows, first_seq=0)
        found = query.ask(SeriesQuestion(run_id=RUN, metric="ranks.loss:max", points=4))
        assert ({value}, 64) == (set(found.value), found.num_total)


def test_what_is_remembered_has_a_bound_and_what_finds_no_room_is_read_again(store: Store):
    writers = [Writer(f"rank:{rank}") for rank in range(8)]
    for writer in writers:
        ingest(store, writer.steps(range(64), loss=[float(s % 5) for s in range(64)]))
    compact(store)
    few = ChunkSummaryCache(most_bytes=4_000)
    query = Query(store, clock=SystemClock(), outlines=few)
    unbound = Query(store, clock=SystemClock())
    requests = [
        SeriesRequest(metric="steps.loss", source=writer.identity.source, points=4)
        for writer in writers
    ]
    for _ in range(2):
        assert unbound.ask(ManySeriesQuestion(run_id=RUN, series=tuple(requests))) == query.ask(
            ManySeriesQuestion(run_id=RUN, series=tuple(requests))
        )
    assert 0 < few.num_bytes <= 4_000
