"""A bit flips in what is stored: every query answers, and none with a number nobody wrote."""

import json
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from sqlalchemy import (
    Column,
    ColumnElement,
    LargeBinary,
    Table,
    func,
    literal,
    select,
    type_coerce,
    update,
)
from typer.testing import CliRunner

from tests.collector.rows import RUN, Writer
from tests.collector.test_query import At, rolled_back_run
from tests.collector.test_quota import LATER, SMALL
from tests.collector.volume_runs import all_read, ranks, steps_left, values_of, write_steps
from trainvitals.cli.main import build_app
from trainvitals.records import (
    BatchNoted,
    ChangeExpected,
    Finding,
    FindingRaised,
    NamesDefined,
    Note,
    RunEnded,
)
from trainvitals.views import (
    AnnotationsQuestion,
    CellsQuestion,
    CurveQuestion,
    DecisionsQuestion,
    EventsQuestion,
    FindingsQuestion,
    IncidentsQuestion,
    ManySeriesQuestion,
    MoversQuestion,
    RunQuestion,
    RunsQuestion,
    SeriesQuestion,
    SeriesRequest,
    StepQuestion,
    TableQuestion,
)
from vitals_collector.ingest.ingest import ingest
from vitals_collector.queries.query import Query
from vitals_collector.report.replay import replay
from vitals_collector.retention.fsck import check
from vitals_collector.retention.quota import Volumes
from vitals_collector.storage import compaction
from vitals_collector.storage.read_rows import read_pages
from vitals_collector.storage.schema import (
    batch_columns,
    batches,
    decisions,
    events,
    findings,
    row_schemas,
    runs,
)
from vitals_collector.storage.store import Store, open_data_store, open_store

METRICS = ("steps.rank_loss", "steps.step_duration_seconds", "scalars.reward")
SOURCES = ("rank:0", "rank:1")
NUM_STEPS = 400
NUM_FLIPS = 2
BLOBS = [
    *((batches, name) for name in ("row_bytes",)),
    *((batch_columns, name) for name in ("summary", "marks", "valid", "body")),
    (row_schemas, "body"),
]


def value(metric: str, source: str, step: int) -> float | None:
    """Return what was written: each number names its metric, source and step."""
    if metric == "steps.rank_loss" and step == 250:
        return math.nan
    if metric == "steps.step_duration_seconds" and step % 5 == 2:
        return None
    return METRICS.index(metric) * 1e6 + SOURCES.index(source) * 1e5 + step * (-1) ** step + 0.1


def fill(store: Store) -> None:
    for source in SOURCES:
        writer = Writer(source)
        ingest(store, writer.events(NamesDefined(stream="scalars", names={3: "reward"})))
        for first in range(0, NUM_STEPS, 100):
            steps = range(first, first + 100)
            loss, seconds, reward = (
                [value(metric, source, step) for step in steps] for metric in METRICS
            )
            raw = writer.steps(steps, rank_loss=loss, step_duration_seconds=seconds)
            ingest(store, raw)
            rewards = {s: float(v) for s, v in zip(steps, reward, strict=True) if v is not None}
            ingest(store, writer.scalars(3, rewards))


def as_columns(store: Store) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compaction, "FULL_ROWS", 150)
        compaction.compact(store)


def stored(column: Column[bytes]) -> ColumnElement[bytes]:
    """Return the column as it lies there, with its checksum where it has one inside."""
    return type_coerce(column, LargeBinary)


@contextmanager
def flipped(
    store: Store, table: Table, name: str, chance: random.Random
) -> Iterator[dict[str, object]]:
    """Have one bit of one blob be the other for a while."""
    blob: Column[bytes] = table.c[name]
    keys = list(table.primary_key.columns)
    with store.read() as connection:
        found = connection.execute(select(*keys, stored(blob)).order_by(*keys)).all()
    *key, body = chance.choice([row for row in found if row[-1]])
    raw = bytearray(body)
    raw[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
    where = [column == part for column, part in zip(keys, key, strict=True)]
    with store.write() as connection:
        changed = literal(bytes(raw), LargeBinary)
        connection.execute(update(table).where(*where).values({name: changed}))
    yield {column.name: part for column, part in zip(keys, key, strict=True)}
    with store.write() as connection:
        connection.execute(update(table).where(*where).values({name: literal(body, LargeBinary)}))


def check_answers(store: Store) -> int:
    """Ask everything, hold each number against what was written; return how many there were."""
    query = Query(store, clock=At(NUM_STEPS))
    num = 0
    wanted = [(metric, source) for metric in METRICS for source in SOURCES]
    for points in (60, 5_000):
        requests = [SeriesRequest(metric=m, source=s, points=points) for m, s in wanted]
        for (metric, source), found in zip(
            wanted, query.ask(ManySeriesQuestion(run_id=RUN, series=tuple(requests))), strict=True
        ):
            for step, attempt, number in zip(found.step, found.attempt, found.value, strict=True):
                true = value(metric, source, step)
                assert 1 == attempt
                assert true is not None
                assert (None if math.isnan(true) else true) == number
                num += 1
    for metric, source in wanted:
        curve = query.ask(CurveQuestion(run_id=RUN, metric=metric, source=source))
        steps, numbers = np.frombuffer(curve.step, "<i8"), np.frombuffer(curve.value, "<f8")
        expected = [value(metric, source, int(step)) for step in steps]
        np.testing.assert_array_equal(np.array(expected, dtype=float), numbers)
        cells = (
            query.ask(CellsQuestion(run_id=RUN, metric=metric, points=50))
            if metric != "scalars.reward"
            else None
        )
        for row, source_of_row in enumerate(cells.rows if cells else ()):
            there = {value(metric, source_of_row, step) for step in range(NUM_STEPS)}
            assert {one for one in cells.value[row] if one is not None} <= there
    for step in (5, 250, NUM_STEPS - 1):
        for row in query.ask(StepQuestion(run_id=RUN, step=step)).rows:
            for metric in METRICS[:2]:
                true = value(metric, row.source, step)
                told = row.values.get(metric.removeprefix("steps."))
                assert (None if true is None or math.isnan(true) else true) == told
        query.ask(MoversQuestion(run_id=RUN, step=step))
    table = query.ask(TableQuestion(table="ranks", run_id=RUN, limit=5_000))
    by_name = dict(zip(table.columns, table.data, strict=True))
    for step, rank, number in zip(
        *(by_name[name] for name in ("step", "rank", "rank_loss")), strict=True
    ):
        if number is not None and number != "nan":
            assert value("steps.rank_loss", f"rank:{rank}", int(step)) == number
    query.ask(RunQuestion(run_id=RUN))
    query.ask(IncidentsQuestion(run_id=RUN))
    return num


@pytest.mark.parametrize("arrange", [lambda store: None, as_columns], ids=["rows", "columns"])
def test_a_flipped_bit_costs_its_rows_and_gives_out_no_wrong_one(
    arrange: Callable[[Store], None],
):
    store = open_store("sqlite://")
    fill(store)
    arrange(store)
    whole = check_answers(store)
    assert 0 == store.damage.num
    chance = random.Random(7)
    num_fewer = 0
    for table, name in BLOBS:
        with store.read() as connection:
            if not any(connection.execute(select(table.c[name])).scalars()):
                continue
        for _ in range(NUM_FLIPS):
            with flipped(store, table, name, chance):
                is_fewer = check_answers(store) < whole
                num_fewer += is_fewer
                (first, *_) = check(store).damaged
                assert RUN == first.run_id
                if name == "row_bytes" and first.stream != "events":
                    assert is_fewer, "rows are whole, or not given out"
    assert num_fewer > 0
    assert store.damage.num > 0
    assert whole == check_answers(store)
    assert () == check(store).damaged
    store.close()


def test_a_damaged_overview_is_made_of_the_rows(store: Store):
    fill(store)
    as_columns(store)
    before = Query(store, clock=At(NUM_STEPS)).ask(
        SeriesQuestion(run_id=RUN, metric="steps.rank_loss", points=5_000)
    )
    with flipped(store, batch_columns, "summary", random.Random(1)):
        found = Query(store, clock=At(NUM_STEPS)).ask(
            SeriesQuestion(run_id=RUN, metric="steps.rank_loss", points=5_000)
        )
        assert before == found
        assert [True] == ["overview of" in one.what for one in check(store).damaged]


def test_compaction_leaves_a_damaged_batch_and_goes_on_behind_it(store: Store):
    fill(store)
    with flipped(store, batches, "row_bytes", random.Random(3)) as key:
        as_columns(store)
        with store.read() as connection:
            ids = connection.execute(select(batches.c.id)).scalars().all()
            assert key["id"] in ids
            pages = list(read_pages(connection))
        assert len(ids) == len(pages) + 1
        assert 1 == store.damage.num, "told once"
        check_answers(store)
    assert () == check(store).damaged


def test_a_flipped_bit_in_a_record_costs_that_record(store: Store):
    rolled_back_run(store)
    finding = Finding(kind="spike", level="actionable", step=4, detector="d", reason="r", rank=0)
    said = (
        FindingRaised(finding=finding),
        ChangeExpected(steps=5, reason="new data"),
        Note(code="V101", text="look", severity="error"),
        BatchNoted(epoch=0, first_batch=1, num_batches=2),
        RunEnded(state="failed", reason="why"),
    )
    ingest(store, Writer("rank:2").events(*said, step=4))
    query = Query(store, clock=At(100))

    def ask() -> list[set[str]]:
        query.ask(IncidentsQuestion(run_id=RUN))
        query.ask(EventsQuestion(run_id=RUN))
        replay(store, RUN)
        (info,) = (query.ask(RunQuestion(run_id=RUN)).info,)
        answers = (
            query.ask(DecisionsQuestion(run_id=RUN)),
            query.ask(FindingsQuestion(run_id=RUN)),
            query.ask(AnnotationsQuestion(run_id=RUN)),
            query.ask(StepQuestion(run_id=RUN, step=4)).data,
            [info] if info.name else [],
            [one.last_decision for one in query.ask(RunsQuestion()) if one.last_decision],
        )
        return [{repr(one) for one in answer} for answer in answers]

    whole = ask()
    assert all(whole)
    for table, name in ((runs, "info"), *((t, "body") for t in (events, findings, decisions))):
        for seed in range(2):
            with flipped(store, table, name, random.Random(seed)):
                for told, true in zip(ask(), whole, strict=True):
                    assert told <= true
                assert ["record"] == [one.what for one in check(store).damaged]
    assert whole == ask()


def test_the_command_lists_what_is_damaged(tmp_path: Path):
    store = open_data_store(tmp_path / "data")
    fill(store)
    ingest(store, Writer("rank:2").events(RunEnded(state="finished"), step=1))

    def ask(*words: str):
        return CliRunner().invoke(
            build_app()[0], ["store", "check", "--data", str(tmp_path / "data"), *words]
        )

    assert 0 == ask().exit_code
    with flipped(store, batches, "row_bytes", random.Random(5)):
        told = ask("--format", "json")
        assert 1 == told.exit_code
        (one,) = json.loads(told.stdout)["damaged"]
        assert "rows" == one["what"]
        assert RUN in ask().output
    store.close()


def test_a_damaged_batch_keeps_no_other_from_being_thinned(store: Store):
    write_steps(store, ranks(6), range(40))
    node = Writer("node:a")
    for first in (0, 50):
        ingest(store, node.node_rows(range(first, first + 50)))
    all_read(store)
    with store.write() as connection:
        of_rank = select(func.min(batches.c.id)).where(batches.c.source == "rank:3")
        of_node = select(func.min(batches.c.id)).where(batches.c.stream == "node")
        for one in (of_rank, of_node):
            damaged = batches.c.id == connection.execute(one).scalar_one()
            connection.execute(update(batches).where(damaged).values(row_crc=0))
    volumes = Volumes(store, SMALL)
    assert volumes.maintain(LATER) > 40
    assert 10 == len(values_of(store, "node", "cpu_ratio")), "those behind it are thinned"
    assert list(range(20, 40)) == steps_left(store, "rank:2")
    assert 0 == volumes.maintain(LATER)
    assert ["rows", "rows"] == [one.what for one in check(store).damaged]
