"""A bit flips in a record: it is left out and told, and every other answer stays as it was."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import (
    Column,
    ColumnElement,
    LargeBinary,
    Table,
    literal,
    select,
    type_coerce,
    update,
)

from tests.collector.rows import RUN, Writer
from tests.support.queries import query, rolled_back_run
from trainvitals.records import (
    BatchNoted,
    ChangeExpected,
    Finding,
    FindingRaised,
    Note,
    RunEnded,
)
from trainvitals.views import (
    AnnotationsQuestion,
    DecisionsQuestion,
    EventsQuestion,
    FindingsQuestion,
    IncidentsQuestion,
    RunQuestion,
    RunsQuestion,
    StepQuestion,
)
from vitals_collector.ingest.ingest import ingest
from vitals_collector.report.replay import replay
from vitals_collector.retention.checkup import check_store
from vitals_collector.storage.schema import DamageCounter, decisions, events, findings, runs
from vitals_collector.storage.store import Store


def stored(column: Column[bytes]) -> ColumnElement[bytes]:
    """Return the column as it lies there, with its checksum where it has one inside."""
    return type_coerce(column, LargeBinary)


@contextmanager
def flipped(store: Store, table: Table, name: str, chance: random.Random) -> Iterator[None]:
    """Have one bit of one blob be the other for a while."""
    blob: Column[bytes] = table.c[name]
    keys = list(table.primary_key.columns)
    with store.read_transaction() as connection:
        found = connection.execute(select(*keys, stored(blob)).order_by(*keys)).all()
    *key, body = chance.choice([row for row in found if row[-1]])
    raw = bytearray(body)
    raw[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
    where = [column == part for column, part in zip(keys, key, strict=True)]
    with store.write() as connection:
        changed = literal(bytes(raw), LargeBinary)
        connection.execute(update(table).where(*where).values({name: changed}))
    yield
    with store.write() as connection:
        connection.execute(update(table).where(*where).values({name: literal(body, LargeBinary)}))


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
    reader = query(store)

    def ask() -> list[set[str]]:
        reader.ask(IncidentsQuestion(run_id=RUN))
        reader.ask(EventsQuestion(run_id=RUN))
        replay(store, RUN)
        (info,) = (reader.ask(RunQuestion(run_id=RUN)).info,)
        answers = (
            reader.ask(DecisionsQuestion(run_id=RUN)),
            reader.ask(FindingsQuestion(run_id=RUN)),
            reader.ask(AnnotationsQuestion(run_id=RUN)),
            reader.ask(StepQuestion(run_id=RUN, step=4)).data,
            [info] if info.name else [],
            [one.last_decision for one in reader.ask(RunsQuestion()) if one.last_decision],
        )
        return [{repr(one) for one in answer} for answer in answers]

    whole = ask()
    assert all(whole)
    assert [] == check_store(store)
    for table, name in ((runs, "info"), *((t, "body") for t in (events, findings, decisions))):
        for seed in range(2):
            with flipped(store, table, name, random.Random(seed)):
                for told, true in zip(ask(), whole, strict=True):
                    assert told <= true
                store.damage = DamageCounter()  # which says each once
                store.damage.attach_to(store.engine.dialect)
                assert [f"records in {table.name}"] == [
                    damaged.what for damaged in check_store(store)
                ]
    assert whole == ask()
