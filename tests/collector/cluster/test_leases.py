"""Of several collectors one holds a lease; a holder that cannot renew stops before it ends."""

from collections.abc import Callable

import pytest
from sqlalchemy import select, update

from trainvitals.errors import StorageError
from trainvitals.testing import ManualClock
from vitals_collector.cluster.leases import LEASE_SECONDS, PAGER, UPKEEP, Lease
from vitals_collector.storage.schema import engine_state, leases
from vitals_collector.storage.store import Store, insert

pytestmark = [
    pytest.mark.servers,
    pytest.mark.parametrize("store", ["postgresql"], indirect=True),
]


class Collector:
    """A lease of one collector, with the clock of its own machine."""

    def __init__(self, store: Store, place: str = "", name: str = PAGER) -> None:
        self.clock = ManualClock()
        self.lease = Lease(store, name, clock=self.clock, is_shared=True, process_place=place)

    def renew_or_acquire(self) -> int | None:
        self.lease.renew_or_acquire()
        return self.lease.epoch()


@pytest.fixture
def start(store: Store) -> Callable[..., Collector]:
    """Start one more collector on the store."""
    return lambda *place: Collector(store, *place)


def end_all(store: Store) -> None:
    """Let the time of every lease be over, by the database's clock."""
    with store.write() as connection:
        connection.execute(update(leases).values(expires_unix_ns=1))


def put(store: Store) -> None:
    """Write something that only the holder may write."""
    with store.write() as connection:
        connection.execute(insert(connection, engine_state).values(name="x", body=b"x"))


def test_one_of_two_holds_it_until_its_time_is_over(store: Store, start) -> None:
    first, second = start(), start()
    assert (first.renew_or_acquire(), second.renew_or_acquire()) == (1, None)
    assert (first.renew_or_acquire(), second.renew_or_acquire()) == (1, None)
    end_all(store)
    assert (second.renew_or_acquire(), first.renew_or_acquire()) == (2, None)
    assert second.lease.epoch() == 2


def test_a_holder_that_cannot_renew_stops_before_the_lease_ends(store: Store, start) -> None:
    holder = start()
    holder.renew_or_acquire()
    holder.clock.advance(LEASE_SECONDS - 2.5)
    assert holder.lease.epoch() == 1
    holder.clock.advance(1.0)
    assert holder.lease.epoch() is None


def test_who_stopped_in_between_has_a_new_number(store: Store, start) -> None:
    holder = start()
    holder.renew_or_acquire()
    holder.clock.advance(LEASE_SECONDS)
    assert holder.renew_or_acquire() == 2


def test_a_lease_that_was_let_go_is_free_at_once(store: Store, start) -> None:
    first, second = start(), start()
    first.lease.start()
    assert first.lease.epoch() == 1
    first.lease.close()
    assert (first.lease.epoch(), second.renew_or_acquire()) == (None, 2)


def test_what_a_former_holder_writes_is_refused(store: Store, start) -> None:
    paused, holder = start(), start()
    paused.renew_or_acquire()
    end_all(store)
    holder.renew_or_acquire()
    with pytest.raises(StorageError, match="another collector holds"), paused.lease.fence_writes(1):
        put(store)
    with store.read_transaction() as connection:
        assert connection.execute(select(engine_state.c.name)).all() == []
    with holder.lease.fence_writes(2):
        put(store)
    with store.read_transaction() as connection:
        assert connection.execute(select(engine_state.c.name)).all() == [("x",)]


def test_an_old_time_of_the_same_holder_is_refused(store: Store, start) -> None:
    holder = start()
    holder.renew_or_acquire()
    holder.clock.advance(LEASE_SECONDS)
    holder.renew_or_acquire()
    with pytest.raises(StorageError, match="number 1"), holder.lease.fence_writes(1):
        put(store)


def test_who_comes_back_to_the_same_place_has_the_lease_at_once_and_what_was_before_is_refused(
    store: Store, start
) -> None:
    killed = start("a")
    killed.renew_or_acquire()
    with store.read_transaction() as connection:
        expires = connection.execute(select(leases.c.expires_unix_ns)).scalar_one()
    back = start("a")
    assert back.renew_or_acquire() == back.renew_or_acquire() == 2
    with store.read_transaction() as connection:
        assert connection.execute(select(leases.c.expires_unix_ns)).scalar_one() > expires
    with pytest.raises(StorageError, match="number 1"), killed.lease.fence_writes(1):
        put(store)
    with back.lease.fence_writes(2):
        put(store)


@pytest.mark.parametrize("place", ["b", "", "aa", "_", "%"])
def test_who_comes_from_another_place_waits_until_the_lease_ends(
    store: Store, start, place: str
) -> None:
    holder, other = start("a"), start(place)
    assert (holder.renew_or_acquire(), other.renew_or_acquire()) == (1, None)
    end_all(store)
    assert other.renew_or_acquire() == 2


def test_two_names_are_held_apart(store: Store, start) -> None:
    pager, upkeep = start("a", PAGER), start("b", UPKEEP)
    assert (pager.renew_or_acquire(), upkeep.renew_or_acquire()) == (1, 1)
    assert (pager.lease.is_held(), upkeep.lease.is_held()) == (True, True)
    assert not start("b", PAGER).renew_or_acquire()
