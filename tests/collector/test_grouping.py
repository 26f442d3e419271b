"""What comes together: stored as if it had come alone, each row once, whoever else writes."""

import math
import random
import threading
from collections.abc import Iterator, Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import select

from tests.collector.rows import OTHER_RUN, RUN, Writer
from tests.support.examples import examples
from tests.support.storing import stored_rows
from trainvitals.errors import FormatError
from trainvitals.identity import new_run_id
from trainvitals.records import AttemptStarted, Note
from vitals_collector.ingest.ingest import ingest, ingest_all, ingest_bodies
from vitals_collector.storage import schema as tables
from vitals_collector.storage.store import Store, open_store


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Store, Store]]:
    """Two stores for all examples: migrating takes longer than an example."""
    opened = open_store("sqlite://"), open_store("sqlite://")
    yield opened
    for store in opened:
        store.close()


def tables_of(store: Store, run: str) -> dict[str, list[tuple[object, ...]]]:
    """Return what is stored of a run, in an order of its own, without the ids of rows."""
    with store.read_transaction() as connection:
        return {
            table.name: sorted(
                (
                    tuple(value for name, value in row._mapping.items() if name != "id")
                    for row in connection.execute(select(table).where(table.c.run_id == run))
                ),
                key=repr,
            )
            for table in (
                *(tables.runs, tables.sources, tables.streams, tables.events),
                tables.measured_columns,
            )
        }


def told_by(writers: Sequence[Writer], choices: Sequence[tuple[int, int]]) -> list[bytes]:
    """Return batches of some writers in the order chosen; some are sent again, some are lost."""
    # A process is only noted of a rank that was heard of, so all are.
    raws = [writer.steps([0]) for writer in writers]
    step = 1
    for which, kind in choices:
        writer = writers[which]
        if kind == 4:
            raws.append(raws[len(raws) // 2])
        elif kind == 3:
            raws.append(writer.events(Note(code="N1", text=f"at {step}"), step=step))
        elif kind == 2:
            # By the node's agent alone: of two streams either may be placed first.
            raws.append(writers[-1].process_rows(step, {0: (100, step % 2), 1: (100, 1)}))
        else:
            loss = [math.nan, 1.0, None][: kind + 1]
            raws.append(writer.steps(range(step, step + kind + 1), lose=kind, loss=loss))
        step += 3
    return raws


@settings(max_examples=examples(25), deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4)), min_size=1, max_size=14),
    st.lists(st.integers(0, 14), max_size=4),
)
def test_however_batches_are_grouped_the_same_is_stored(
    pair: tuple[Store, Store], choices: list[tuple[int, int]], cuts: list[int]
):
    run = new_run_id(random.getrandbits(60))
    raws = told_by([Writer(name, run=run) for name in ("rank:0", "rank:1", "node:a")], choices)
    one_by_one, grouped = pair
    alone = [ingest(one_by_one, raw, received_unix_ns=5) for raw in raws]
    together = []
    ends = sorted({*cuts, len(raws)})
    for first, last in zip([0, *ends], ends, strict=False):
        if raws[first:last]:
            together += ingest_all(grouped, raws[first:last], 5)
    assert alone == together
    assert tables_of(one_by_one, run) == tables_of(grouped, run)


def test_a_batch_twice_in_a_body_and_in_two_bodies_of_a_group_is_stored_once(store: Store):
    raw, later = (writer := Writer()).steps(range(4)), writer.steps(range(4, 6))
    first, second = ingest_bodies(store, [[raw, raw, later], [later, raw]], 1)
    assert not isinstance(first, FormatError)
    assert not isinstance(second, FormatError)
    assert [(4, 0), (0, 4), (2, 0)] == [(one.num_new, one.num_duplicate) for one in first]
    assert [(0, 2), (0, 4)] == [(one.num_new, one.num_duplicate) for one in second]
    assert [("steps", i) for i in range(6)] == stored_rows(store)


def test_a_gap_in_the_middle_of_a_group_is_counted_once(store: Store):
    writer = Writer()
    raws = [writer.steps([0]), writer.steps([4], lose=3), writer.steps([5])]
    assert [1, 1, 1] == [reply.num_new for reply in ingest_all(store, raws, 1)]
    assert 3 == store.counters.num_lost


def test_of_two_sources_with_one_incarnation_in_a_group_the_first_is_believed(store: Store):
    first, stranger = Writer("rank:1"), Writer("rank:0")
    stranger.identity = msgspec.structs.replace(
        stranger.identity, incarnation=first.identity.incarnation
    )
    raws = [first.steps([0]), stranger.steps([1]), stranger.scalars(1, {0: 1.0})]
    replies = ingest_all(store, raws, 1)
    assert [1, 0, 0] == [reply.num_new for reply in replies]
    assert ["", "V200", "V200"] == [reply.code for reply in replies]
    assert "is known as rank:1, not rank:0" in replies[1].text


def test_one_value_that_no_database_takes_keeps_none_of_its_group_back(store: Store):
    writers = [Writer(f"rank:{i}") for i in range(7)]
    bad = AttemptStarted(id=2**63, parent=None, fork_step=0, reason="")
    raws = [writer.steps([0]) for writer in writers]
    raws.insert(3, writers[0].events(bad))
    replies = ingest_all(store, raws, 1)
    assert [1, 1, 1, 0, 1, 1, 1, 1] == [reply.num_new for reply in replies]
    assert "no database stores" in replies[3].text
    assert {"V200": 1} == store.counters.rejected
    assert 7 == len(stored_rows(store))


def send_at_once(stores: Sequence[Store], raws: Sequence[bytes], *, num_threads: int) -> int:
    """Send the batches from many threads, each in an order of its own; return the new rows."""
    gate = threading.Barrier(num_threads)
    new: list[int] = []
    failed: list[BaseException] = []

    def send(number: int) -> None:
        mine = list(raws)
        random.Random(number).shuffle(mine)
        gate.wait()
        try:
            for start in range(0, len(mine), 8):
                replies = ingest_all(stores[number % len(stores)], mine[start : start + 8], 1)
                new.extend(reply.num_new for reply in replies)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=send, args=(i,)) for i in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [] == failed
    return sum(new)


def test_two_collectors_on_one_database_store_each_row_once(store: Store):
    others = [Writer(f"rank:{i}", run=run) for i in range(12) for run in (RUN, OTHER_RUN)]
    raws = [writer.steps(range(3)) for writer in others]
    raws += [writer.process_rows(1, dict.fromkeys(range(12), (100, 0))) for writer in others[:6]]
    url = store.engine.url.render_as_string(hide_password=False)
    second = open_store(url, store.numbers, busy_seconds=60)
    try:
        total = send_at_once([store, second], raws, num_threads=4)
    finally:
        second.close()
    assert 24 * 3 + 6 * 12 == total == len(stored_rows(store))
