"""Each run has one owner among collectors on one PostgreSQL, and what another commits is no row."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import Connection, select, update

from tests.collector.rows import OTHER_RUN, RUN, Writer, seqs_stored
from tests.e2e.lab import until
from tests.support.storing import die_after_the_rows
from trainvitals.errors import NotOwnerError, StorageError
from trainvitals.identity import new_run_id
from trainvitals.testing import ManualClock
from trainvitals.wire import decode_batch
from vitals_collector.cluster import leases, owners
from vitals_collector.cluster.owners import RunOwners
from vitals_collector.ingest.ingest import ingest, ingest_all, ingest_bodies
from vitals_collector.numbers.interface import RowSpan
from vitals_collector.numbers.lake import Lake
from vitals_collector.numbers.lake_catalogue import choose_run_number
from vitals_collector.storage.store import Store, open_data_store

pytestmark = [
    pytest.mark.servers,
    pytest.mark.parametrize("lake_store", ["postgresql"], indirect=True),
]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    """The collectors' clock; by the database's clock leases last, however slow the machine is."""
    for module in (leases, owners):
        monkeypatch.setattr(module, "LEASE_SECONDS", 3_600.0)
    monkeypatch.setattr(leases, "IDLE_SECONDS", 60)
    return ManualClock()


@pytest.fixture
def first(lake_store: Store, clock: ManualClock) -> Store:
    """Return the store of a collector that owns what it is sent."""
    lake_store.claims = RunOwners(lake_store, clock=clock, url="http://first:1")
    return lake_store


@pytest.fixture
def second(first: Store, clock: ManualClock, postgres: str, tmp_path: Path) -> Iterator[Store]:
    """Give the store of another one, on the same database and lake."""
    with contextlib.closing(open_data_store(tmp_path / "second", postgres)) as store:
        store.claims = RunOwners(store, clock=clock, url="http://second:1")
        yield store


def end_leases(store: Store) -> None:
    """Have all leases end now by the database's clock, of which no holder knows yet."""
    with store.write() as connection:
        ended = leases.NOW - 1_000_000_000
        connection.execute(update(leases.leases).values(expires_unix_ns=ended))


def test_rows_of_a_run_are_taken_by_one_and_the_other_says_by_whom(first: Store, second: Store):
    mine, other = Writer(), Writer(run=OTHER_RUN)
    assert 5 == ingest(first, mine.steps(range(5))).num_new
    refused, stored = ingest_bodies(second, [[mine.steps([5])], [other.steps([0])]], 0)
    assert isinstance(refused, NotOwnerError)
    assert "http://first:1" == refused.owner
    assert RUN in refused.text
    assert isinstance(stored, tuple)
    assert [1] == [reply.num_new for reply in stored], "another body is no less welcome"
    with pytest.raises(NotOwnerError):
        ingest(first, other.steps([1]))


@pytest.mark.nightly
def test_owners_that_take_turns_at_a_stream_store_each_row_once(
    first: Store, second: Store, monkeypatch: pytest.MonkeyPatch
):
    writer = Writer()
    raws = [writer.steps(range(begin, begin + 4), loss=0.5) for begin in range(0, 24, 4)]
    for number in range(0, 6, 2):
        ingest(first, raws[number])
        first.claims.close()
        with monkeypatch.context() as patch:
            die_after_the_rows(second, patch)
            with pytest.raises(MemoryError):
                ingest(second, raws[number + 1])
        second.claims.close()
        assert [0, 4] == [ingest(first, raw).num_new for raw in raws[number : number + 2]]
    assert [*range(24)] == seqs_stored(first)


def test_what_an_owner_that_was_paused_commits_is_refused(first: Store, second: Store):
    writer = Writer()
    ingest(first, writer.steps(range(5)))
    more = writer.steps(range(5, 10))
    end_leases(second)
    assert 5 == ingest(second, more).num_new
    last = writer.steps(range(10, 15))
    # Its own clock has stood still: it takes the run for its own.
    with pytest.raises(StorageError, match=f"another collector has taken run {RUN}"):
        ingest(first, last)
    assert [*range(10)] == seqs_stored(second)
    assert 5 == ingest(second, last).num_new
    assert [*range(15)] == seqs_stored(second)


def test_no_reader_sees_rows_of_an_owner_whose_run_is_taken_while_it_commits(
    first: Store, second: Store, monkeypatch: pytest.MonkeyPatch
):
    writer = Writer()
    ingest(first, writer.steps(range(5)))
    raw = writer.steps(range(5, 10))
    stored = list[int]()

    def taken() -> None:
        let_go(first)
        assert {} == second.claims.claim([RUN])
        stored.extend(second.numbers.append([decode_batch(raw)]))

    commits_behind(first, taken, monkeypatch)
    with pytest.raises(StorageError, match=f"another collector has taken run {RUN}"):
        ingest(first, raw)
    assert [5] == stored
    assert [*range(10)] == seqs_stored(first) == seqs_stored(second)


@pytest.mark.nightly
def test_an_owner_that_has_its_run_anew_commits_nothing_under_the_lease_before(
    first: Store, second: Store, monkeypatch: pytest.MonkeyPatch
):
    writer = Writer()
    ingest(first, writer.steps(range(5)))
    raw = writer.steps(range(5, 10))

    def taken_and_given_back() -> None:
        let_go(first)
        assert {} == second.claims.claim([RUN])
        second.numbers.append([decode_batch(raw)])
        second.claims.close()
        assert {} == first.claims._acquire([RUN])

    commits_behind(first, taken_and_given_back, monkeypatch)
    with pytest.raises(StorageError, match=f"another collector has taken run {RUN}"):
        ingest(first, raw)
    assert [*range(10)] == seqs_stored(first)


def test_a_lease_that_is_renewed_while_rows_are_committed_refuses_none(
    first: Store, monkeypatch: pytest.MonkeyPatch
):
    writer = Writer()
    ingest(first, writer.steps(range(5)))
    commits_behind(first, first.claims.renew, monkeypatch)
    assert 5 == ingest(first, writer.steps(range(5, 10))).num_new
    assert [*range(10)] == seqs_stored(first)


@pytest.mark.nightly
def test_runs_that_are_taken_at_once_never_get_one_number(
    first: Store, second: Store, monkeypatch: pytest.MonkeyPatch
):
    """Begun in one millisecond, two runs may have the same bits of which a number is made."""
    runs = [RUN, OTHER_RUN]
    assert choose_run_number(runs[0], ()) == choose_run_number(runs[1], ())
    commits_behind(second, lambda: first.claims.claim(runs[:1]), monkeypatch)
    second.claims.claim(runs[1:])
    for store, run, num in zip((first, second), runs, (3, 4), strict=True):
        ingest(store, Writer(run=run).steps(range(num)))
    for store in (first, second):
        assert isinstance(store.numbers, Lake)
        store.numbers.catalogue.forget()
        assert [3, 4] == [store.numbers.num_rows(RowSpan(run, "steps")) for run in runs]


def commits_behind(
    store: Store, happens: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let something happen when the store's next transaction of the lake is about to be made."""
    assert isinstance(store.numbers, Lake)
    engine = store.numbers.engine
    commit = engine._commit

    def commit_behind() -> None:
        monkeypatch.setattr(engine, "_commit", commit)
        happens()
        commit()

    monkeypatch.setattr(engine, "_commit", commit_behind)


def let_go(store: Store) -> None:
    """End the lease of the run, as if it had not been renewed."""
    with store.engine.begin() as connection:
        leases.release_leases(connection, [f"run/{RUN}"], store.claims._holder)


def test_a_lease_is_renewed_while_rows_come_and_let_go_when_none_do(
    lake_store: Store, postgres: str, tmp_path: Path
):
    clock = ManualClock()
    mine = RunOwners(lake_store, clock=clock)
    assert {} == mine.claim([RUN])
    for _ in range(3):
        clock.advance(5.0)
        mine.renew()
        assert {RUN: 1} == mine.owned()
    clock.advance(owners.LEASE_SECONDS)
    assert {} == mine.owned()
    assert {} == mine.claim([RUN])
    clock.advance(1.0)
    mine.renew()
    for _ in range(125):
        clock.advance(5.0)
        mine.renew()
    with contextlib.closing(open_data_store(tmp_path / "second", postgres)) as store:
        assert {} == RunOwners(store, clock=clock).claim([RUN]), "it was let go"


@pytest.mark.nightly
def test_who_takes_over_many_runs_asks_the_lake_no_more_often_than_for_one(
    first: Store, second: Store, monkeypatch: pytest.MonkeyPatch
):
    writers = [Writer(run=new_run_id(time.time_ns() + i)) for i in range(40)]
    assert isinstance(second.numbers, Lake)
    engine, asked = second.numbers.engine, list[str]()
    for name in ("ask", "query_in_transaction", "execute"):
        told = getattr(engine, name)
        monkeypatch.setattr(
            engine,
            name,
            lambda sql, *args, told=told, **rows: (asked.append(sql), told(sql, *args, **rows))[1],
        )

    def questions_for(some: list[Writer]) -> int:
        ingest_all(first, [writer.steps(range(3)) for writer in some], 0)
        first.claims.close()
        asked.clear()
        ingest_all(second, [writer.steps(range(3, 6)) for writer in some], 0)
        return len(asked)

    of_one = questions_for(writers[:1])
    assert questions_for(writers[1:]) <= of_one + 3


@pytest.mark.nightly
def test_leases_are_renewed_while_others_are_taken_and_the_lake_is_busy(first: Store):
    owners_of = first.claims
    assert isinstance(owners_of, RunOwners)
    ingest(first, Writer().steps(range(5)))
    (before,) = _ends_of(first, [RUN])
    with first.numbers.write_lock():
        taking = threading.Thread(target=owners_of.claim, args=([OTHER_RUN],))
        taking.start()
        until(lambda: _ends_of(first, [OTHER_RUN]), "it asks for the other run")
        owners_of.renew()
        assert taking.is_alive()
        assert _ends_of(first, [RUN]) > [before]
    taking.join()
    assert {RUN, OTHER_RUN} == owners_of.owned().keys()


def test_a_run_of_another_collector_is_looked_for_once_a_second(
    first: Store, second: Store, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
):
    writer, num_writes = Writer(), 0
    ingest(first, writer.steps(range(5)))
    write = second.write

    def counted() -> contextlib.AbstractContextManager[Connection]:
        nonlocal num_writes
        num_writes += 1
        return write()

    monkeypatch.setattr(second, "write", counted)
    for _ in range(20):
        assert second.claims.claim([RUN])[RUN].owner == "http://first:1"
    assert num_writes == 1
    end_leases(first)
    assert [RUN] == list(second.claims.claim([RUN])), "not yet"
    clock.advance(1.1)
    assert {} == second.claims.claim([RUN])


def _ends_of(store: Store, run_ids: list[str]) -> list[int]:
    names = [f"run/{run_id}" for run_id in run_ids]
    with store.read_transaction() as connection:
        table = leases.leases.c
        query = select(table.expires_unix_ns).where(table.name.in_(names))
        return list(connection.execute(query).scalars())


def test_who_takes_one_run_of_an_owner_that_died_takes_its_share_of_all(
    first: Store, second: Store
):
    runs = [new_run_id(time.time_ns() + i) for i in range(6)]
    first.claims.claim(runs)
    end_leases(second)
    assert {} == second.claims.claim(runs[:1])
    names = [f"run/{run_id}" for run_id in runs]
    with second.read_transaction() as connection:
        holders = leases.holders_of(connection, names).values()
    assert {"http://second:1"} == {holder.partition(" ")[0] for holder in holders}
    assert set(runs) <= second.claims.owned().keys()
