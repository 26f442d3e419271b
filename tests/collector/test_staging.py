"""What is acknowledged before it is placed: durable at once, read at once, and stored once."""

import contextlib
import random
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import func, select

from tests.collector.conftest import Served
from tests.collector.rows import OTHER_RUN, RUN, START, STEPS, Writer
from tests.collector.test_folder import spool_of
from tests.collector.test_grouping import told_by
from tests.collector.test_ingest import spoil_processes, stored_rows, torn
from trainvitals.catalog import steps_schema
from trainvitals.errors import StorageError
from trainvitals.identity import new_run_id
from trainvitals.records import Note
from trainvitals.rows import Column, Schema
from trainvitals.testing.clock import ManualClock
from trainvitals.views import RunsQuestion
from trainvitals.wire import Batch, IngestReply, decode_batch
from vitals_collector.alerts import commands
from vitals_collector.alerts.inbox import Inbox, listed
from vitals_collector.ingest import staging as arriving
from vitals_collector.ingest.folder import FolderIngest
from vitals_collector.ingest.ingest import ingest, store_batches
from vitals_collector.ingest.staging import (
    WriteAheadBuffer,
    WriteAheadConfig,
    join_batches,
    recover,
)
from vitals_collector.ingest.validate import check_batches
from vitals_collector.live.run_status import Liveness
from vitals_collector.retention.removal import delete_run
from vitals_collector.storage import schema as tables
from vitals_collector.storage.read_rows import read_pages
from vitals_collector.storage.store import Store, open_store


@pytest.fixture
def memory() -> Iterator[Store]:
    store = open_store("sqlite://")
    yield store
    store.close()


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Store, Store]]:
    """Two stores for all examples: migrating takes longer than an example."""
    opened = open_store("sqlite://"), open_store("sqlite://")
    yield opened
    for store in opened:
        store.close()


def take_in(arrivals: WriteAheadBuffer, raws: Sequence[bytes]) -> list[IngestReply]:
    """Let one body of some batches arrive; return the replies."""
    (answer,) = arrivals.ingest_bodies([raws], 5)
    assert isinstance(answer, tuple), answer
    return list(answer)


def num_waiting(store: Store) -> int:
    with store.read(settled=False) as connection:
        return connection.execute(select(func.count()).select_from(tables.arrivals)).scalar_one()


def rows_of_run(store: Store, run: str) -> dict[tuple[str, str, int], bytes]:
    """Return each stored row of a run; no row may be there twice."""
    found: dict[tuple[str, str, int], bytes] = {}
    with store.read() as connection:
        for page in read_pages(connection, tables.batches.c.run_id == run):
            for i, row in enumerate(page.rows):
                key = page.incarnation, page.schema.stream, page.first_seq + i
                assert key not in found, "stored twice"
                found[key] = row.tobytes()
    return found


def beside_rows(store: Store, run: str) -> list[list[tuple[object, ...]]]:
    """Return what other tables say of a run: marks, losses, columns, events and processes."""
    source = tables.sources.c
    queries = (
        select(tables.streams).where(tables.streams.c.run_id == run),
        select(tables.measured_columns).where(tables.measured_columns.c.run_id == run),
        select(tables.events.c.incarnation, tables.events.c.seq, tables.events.c.body).where(
            tables.events.c.run_id == run
        ),
        select(source.incarnation, source.last_seen_unix_ns, source.last_step, source.alive).where(
            source.run_id == run
        ),
    )
    with store.read() as connection:
        return [sorted(map(tuple, connection.execute(query)), key=repr) for query in queries]


def die_while_placing(store: Store, arrivals: WriteAheadBuffer, after: int) -> None:
    """Place some of what waits, each batch in a transaction of its own, and stop in between."""
    left = iter(range(after))

    def store_some(*args: object) -> object:
        if next(left, None) is None:
            raise StorageError("killed")
        return store_batches(*args)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arriving, "_AT_ONCE", 1)
        patch.setattr(arriving, "_PAUSE_SECONDS", 0)
        patch.setattr(arriving, "store_batches", store_some)
        # What is not placed still waits, unless another has placed it: the end shows all of it.
        with contextlib.suppress(StorageError):
            arrivals.flush()


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4)), min_size=1, max_size=14),
    st.lists(
        st.tuples(
            st.integers(1, 5),
            st.sampled_from(["go on", "flush", "kill", "fail", "other"]),
            st.integers(0, 3),
        ),
        max_size=6,
    ),
)
def test_whoever_dies_while_rows_wait_the_same_is_stored_as_one_by_one(
    pair: tuple[Store, Store],
    choices: list[tuple[int, int]],
    plan: list[tuple[int, str, int]],
):
    run = new_run_id(random.getrandbits(60))
    raws = told_by([Writer(name, run=run) for name in ("rank:0", "rank:1", "node:a")], choices)
    one_by_one, waits = pair
    alone = [ingest(one_by_one, raw, received_unix_ns=5) for raw in raws]
    together: list[IngestReply] = []
    arrivals = WriteAheadBuffer(waits)
    for num, what, after in [*plan, (len(raws), "kill", 0)]:
        if some := raws[len(together) : len(together) + num]:
            together += take_in(arrivals, some)
        if what == "flush":
            arrivals.flush()
        elif what == "other":
            recover(waits)  # as a command does that opens the store beside the collector
        elif what in ("fail", "kill"):
            die_while_placing(waits, arrivals, after)
            if what == "kill":
                recover(waits)
                arrivals = WriteAheadBuffer(waits)
    assert [(one.durable_seq, one.num_new, one.num_duplicate) for one in alone] == [
        (one.durable_seq, one.num_new, one.num_duplicate) for one in together
    ]
    assert 0 == num_waiting(waits)
    assert rows_of_run(one_by_one, run) == rows_of_run(waits, run)
    assert beside_rows(one_by_one, run) == beside_rows(waits, run)


def test_what_was_acknowledged_is_read_at_once_and_lies_as_one_batch(memory: Store):
    arrivals, writer = WriteAheadBuffer(memory), Writer()
    for step in range(6):
        take_in(arrivals, [writer.steps([step])])
    assert 5 == num_waiting(memory), "the first of a stream is placed at once, for its mark"
    assert [("steps", seq) for seq in range(6)] == stored_rows(memory)
    assert 0 == num_waiting(memory)
    with memory.read() as connection:
        assert [1, 5] == [page.num_rows for page in read_pages(connection)]


def test_who_asks_for_commands_or_alerts_has_no_row_placed(memory: Store):
    arrivals, writer = WriteAheadBuffer(memory), Writer()
    for step in range(2):
        take_in(arrivals, [writer.steps([step])])
    assert 1 == num_waiting(memory)
    inbox = Inbox(memory, clock=ManualClock())
    assert () == commands.listed(memory, RUN, now_unix_ns=START), "each agent asks every second"
    assert ((), ([], [])) == (listed(memory, now_unix_ns=START), inbox.untold())
    inbox.update([])
    assert 0 == commands.expire(memory, START)
    assert 1 == num_waiting(memory)


def test_events_never_wait(memory: Store):
    arrivals, writer = WriteAheadBuffer(memory), Writer()
    take_in(arrivals, [writer.steps([0])])
    take_in(arrivals, [writer.steps([1]), writer.events(Note(code="N1", text="now"))])
    with memory.read(settled=False) as connection:
        assert 1 == len(connection.execute(select(tables.events)).all())
    assert 1 == num_waiting(memory)


def test_rows_with_other_columns_come_after_those_that_wait(memory: Store):
    arrivals, writer = WriteAheadBuffer(memory), Writer()
    wider = Schema(STEPS.stream, (*STEPS.columns, Column("more", "f8")))
    row = [1, 1, writer.time_of(1), 0, *[None] * (len(wider.columns) - 5), 1.0]
    take_in(arrivals, [writer.steps([0])])
    replies = take_in(arrivals, [writer.steps([1]), writer.batch(wider, [row])])
    replies += take_in(arrivals, [writer.batch(wider, [row]), writer.steps([4], lose=1)])
    assert [1] * 4 == [reply.num_new for reply in replies]
    assert [("steps", seq) for seq in (0, 1, 2, 3, 5)] == stored_rows(memory)
    assert 1 == memory.counters.num_lost


def test_a_stranger_with_a_known_incarnation_is_refused_as_ever(memory: Store):
    arrivals, first, stranger = WriteAheadBuffer(memory), Writer("rank:1"), Writer("rank:0")
    stranger.identity = first.identity.__class__(
        **{
            **{
                name: getattr(stranger.identity, name)
                for name in stranger.identity.__struct_fields__
            },
            "incarnation": first.identity.incarnation,
        }
    )
    take_in(arrivals, [first.steps([0])])
    replies = take_in(arrivals, [first.steps([1]), stranger.steps([2])])
    assert ["", "V200"] == [reply.code for reply in replies]
    assert 2 == len(stored_rows(memory))


def test_what_the_disk_refuses_is_not_acknowledged_and_comes_again(
    memory: Store, monkeypatch: pytest.MonkeyPatch
):
    arrivals, writer = WriteAheadBuffer(memory), Writer()
    take_in(arrivals, [writer.steps([0])])
    take_in(arrivals, [writer.steps([1])])
    raw = writer.steps([2])

    def full() -> None:
        raise StorageError("no room left")

    with monkeypatch.context() as patch:
        patch.setattr(memory, "write", full)
        with pytest.raises(StorageError, match="no room"):
            take_in(arrivals, [raw])
        with pytest.raises(StorageError, match="no room"):
            stored_rows(memory)  # an answer without them would be wrong
    assert [1] == [reply.num_new for reply in take_in(arrivals, [raw])]
    assert [("steps", seq) for seq in range(3)] == stored_rows(memory)
    assert 0 == memory.counters.num_lost


@pytest.mark.parametrize("is_restarted", [False, True], ids=["running", "restarted"])
def test_an_acknowledged_batch_at_which_we_fail_goes_alone_and_keeps_no_row_back(
    memory: Store,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_restarted: bool,
):
    spoil_processes(monkeypatch)
    arrivals, agent, rank = WriteAheadBuffer(memory), Writer("node:a"), Writer()
    take_in(arrivals, [agent.process_rows(0, {0: (7, 1)}), rank.steps([0])])
    for second in range(1, 5):
        process = agent.process_rows(second, {0: (666 if second == 2 else 7, 1)})
        take_in(arrivals, [process, rank.steps([second])])
    recover(memory) if is_restarted else arrivals.flush()
    assert 0 == num_waiting(memory)
    expected = [("process", seq) for seq in (0, 1, 3, 4)] + [("steps", seq) for seq in range(5)]
    assert expected == stored_rows(memory)
    assert {"V200": 1} == memory.counters.rejected
    assert "acknowledged_rows_refused" in caplog.text


def test_what_was_acknowledged_and_is_fit_no_longer_is_counted_and_told(
    memory: Store, caplog: pytest.LogCaptureFixture
):
    raws = [Writer().steps([0]), torn(Writer().steps([0])), Writer().steps([0])]
    with memory.write() as connection:
        connection.execute(tables.arrivals.insert(), [{"body": raw} for raw in raws])
    recover(memory)
    assert 0 == num_waiting(memory)
    assert 2 == len(stored_rows(memory))
    assert {"V200": 1} == memory.counters.rejected
    assert "acknowledged_rows_refused: batch claims" in caplog.text


def test_rows_of_a_folder_go_behind_those_that_wait(memory: Store):
    arrivals, writer = WriteAheadBuffer(memory), Writer()
    first, second, third, fourth = (writer.steps([step]) for step in range(4))
    take_in(arrivals, [first])
    take_in(arrivals, [second])
    is_in = threading.Event()

    def later() -> None:
        is_in.set()
        take_in(arrivals, [fourth])

    thread = threading.Thread(target=later)
    with memory.exclusive(), memory.write() as connection:
        thread.start()
        assert is_in.wait(30)
        store_batches(connection, check_batches([second, third]))
    thread.join()
    assert [("steps", seq) for seq in range(4)] == stored_rows(memory)
    with memory.read() as connection:
        lost = connection.execute(select(func.sum(tables.streams.c.num_lost))).scalar_one()
    assert 0 == lost


def test_what_a_folder_stores_is_known_before_it_can_come_again(tmp_path: Path):
    """The hooks run when the database is free again: here, while the same row comes by HTTP."""
    store, writer = open_store("sqlite://"), Writer()
    first, second = writer.steps([0]), writer.steps([1])
    replies: list[IngestReply] = []
    told: list[int] = []

    def bring_again(new: Sequence[tuple[Batch, object]]) -> None:
        told.extend(batch.header.last_seq for batch, _ in new)
        if told == [0, 1]:
            replies.extend(take_in(arrivals, [second]))

    store.after_ingest.append(bring_again)
    arrivals = WriteAheadBuffer(store)
    take_in(arrivals, [first])
    spool = spool_of(tmp_path)
    spool.append(second)
    spool.close()
    FolderIngest(store, [tmp_path]).poll()
    assert [(0, 1)] == [(reply.num_new, reply.num_duplicate) for reply in replies]
    assert [0, 1] == told
    assert (2, 1) == (store.counters.num_rows, store.counters.num_duplicate)
    store.close()


def test_rows_of_a_removed_run_count_as_forgotten_though_they_were_acknowledged(memory: Store):
    arrivals, writer, other = WriteAheadBuffer(memory), Writer(), Writer(run=OTHER_RUN)
    take_in(arrivals, [writer.steps([0, 1]), other.steps([0])])
    delete_run(memory, RUN, by="somebody", when=Liveness(now_unix_ns=START * 5))
    for step in range(2, 5):
        take_in(arrivals, [writer.steps([step]), other.steps([step])])
    arrivals.flush()
    assert 0 == num_waiting(memory)
    assert (3, 2 + 4) == (memory.counters.num_forgotten, memory.counters.num_rows)
    (reply,) = take_in(arrivals, [writer.steps([5])])
    assert (0, 5) == (reply.num_new, reply.durable_seq)
    assert 4 == memory.counters.num_forgotten, "the run is known no more"
    assert 4 == len(stored_rows(memory))


def test_large_batches_are_placed_at_once_and_what_waits_is_bounded(memory: Store):
    arrivals, writer = (
        WriteAheadBuffer(memory, WriteAheadConfig(max_bytes=1, max_streams=1)),
        Writer(),
    )
    take_in(arrivals, [writer.steps(range(100))])
    take_in(arrivals, [writer.steps(range(100, 200))])
    assert 0 == num_waiting(memory)
    for step in range(200, 203):
        take_in(arrivals, [writer.steps([step])])
        assert 1 == num_waiting(memory)
    other = Writer("rank:1")
    take_in(arrivals, [other.steps([0])])  # the only mark that is remembered now
    take_in(arrivals, [writer.steps([203]), other.steps([1])])
    assert 204 + 2 == len(stored_rows(memory))


def test_only_what_follows_on_one_another_is_joined():
    writer, schema = Writer(), steps_schema()
    raws = [writer.steps([0]), writer.steps([1, 2]), writer.steps([4], lose=1)]
    batches = [decode_batch(raw) for raw in raws]
    joined = list(join_batches(batches))
    assert [(0, 3), (4, 1)] == [(one.header.first_seq, one.header.num_rows) for one in joined]
    assert batches[0].rows + batches[1].rows == joined[0].rows
    assert schema.stream == joined[0].header.stream


def test_a_collector_that_ends_leaves_nothing_waiting(served: Served):
    writer = Writer()
    with served.client("ingest") as client:
        for step in range(3):
            client.ingest(writer.steps([step]))
    served.app.state.store.flush()
    assert 0 == num_waiting(served.store)
    with served.client() as client:
        (run,) = client.ask(RunsQuestion())
        assert 2 == run.last_step
