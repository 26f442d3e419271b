"""Leases: one of several collectors on one PostgreSQL holds a name, and another one follows it.

The database's clock decides when a lease expires, so no machine's clock needs to be right. A holder
that could not renew stops some seconds before that, by its own monotonic clock, counted from before
its request. One that was paused in the middle of a transaction is stopped by
``install_lake_fence``. On SQLite there is one collector per store: it holds everything, and no row
is written.

A collector that takes over the lease of a killed process waits until it expires, unless both have
the same location: the lock of a data directory, which one process holds at a time. Then the former
one has ended.
"""

import logging
import os
import socket
import threading
import uuid
from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager

from sqlalchemy import BigInteger, ColumnElement, Connection, case, cast, func, select, text, update

from trainvitals.clock import Clock
from trainvitals.errors import StorageError
from vitals_collector.numbers.interface import TAKEN
from vitals_collector.storage.migrate import lock_migrations
from vitals_collector.storage.schema import leases
from vitals_collector.storage.store import LOCKED, Store, insert

PAGER = "pager"
"""The lease of the collector that delivers alerts, of all runs."""
UPKEEP = "upkeep"
"""The lease of the collector that maintains the store."""
RUN = "run/"
"""Prefix of the name of a run's lease."""
_FENCE = "fence/"
"""Prefix of the name of the row that has only a run's epoch: it changes with the owner, and not
with a renewal, which would conflict with commits."""
LEASE_SECONDS = 9.0
"""Maximum time for which a dead holder blocks others."""
MARGIN_SECONDS = 2.0
"""A holder that could not renew stops so long before its lease ends."""
_LOOK_SECONDS = 2.0
IDLE_SECONDS = 3
"""After which the database ends a fenced transaction whose process was paused: before the lease
expires, so that no one waits for it."""
_LOG = logging.getLogger("vitals.collector.leases")

NOW = cast(func.extract("epoch", func.clock_timestamp()) * 1_000_000_000, BigInteger)
"""The database's time."""


class Lease:
    """One name, held by one collector at a time. Thread-safe.

    The clock's monotonic time decides when to stop as the holder. If the store is not shared with
    other collectors, the lease is always held. ``process_place`` names a resource that this process
    holds exclusively; "" without one.
    """

    def __init__(
        self, store: Store, name: str, *, clock: Clock, is_shared: bool, process_place: str = ""
    ) -> None:
        self.name = name
        self.holder = (
            f"{socket.gethostname()}/{os.getpid()}/{process_place or uuid.uuid4().hex[:16]}"
        )
        self.is_shared = is_shared
        self._store = store
        self._clock = clock
        self._epoch = 0
        self._until_ns = 0
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def epoch(self) -> int | None:
        """Return the epoch of this collector's lease; None if it does not hold it."""
        if not self.is_shared:
            return 1
        until_ns, epoch = self._until_ns, self._epoch  # they are set the other way round
        return epoch if self._clock.monotonic_ns() < until_ns else None

    def is_held(self) -> bool:
        """Return whether this collector is the holder now."""
        return self.epoch() is not None

    def renew_or_acquire(self) -> None:
        """Renew this collector's lease, or acquire it if it is free.

        Raises:
            StorageError: the database refused; a held lease stays until it expires.
        """
        if not self.is_shared:
            return
        asked_ns = self._clock.monotonic_ns()
        is_held = self.epoch() is not None
        with self._store.write() as connection:
            taken = acquire_leases(connection, [self.name], self.holder, is_held=is_held)
            epoch = taken.get(self.name)
        # If it expired while the database was slow, a part of this process may have noticed: it is
        # acquired again next time, with a new number.
        if epoch is None or (is_held and self.epoch() is None):
            self._until_ns = 0
            return
        self._epoch = epoch  # before the time is set, because that of an earlier epoch has passed
        self._until_ns = asked_ns + int((LEASE_SECONDS - MARGIN_SECONDS) * 1e9)

    def fence_writes(self, epoch: int) -> AbstractContextManager[None]:
        """Make what this thread writes in the context fail once another collector is the holder.

        ``epoch`` is that of the lease under which it writes.
        """

        def check(connection: Connection) -> None:
            if self.is_shared:
                lock_lease(connection, self.name, self.holder, epoch)

        return self._store.check_writes(check)

    def start(self) -> None:
        """Try to acquire the lease once, then renew it in a thread."""
        if not self.is_shared:
            return
        self._renew_and_log()
        self._thread = threading.Thread(target=self._run, name="vitals-lease", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread and release the lease, so that the next collector need not wait."""
        self._stopping.set()
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        self._until_ns = 0
        try:
            with self._store.write() as connection:
                release_leases(connection, [self.name], self.holder)
        except StorageError as error:
            _LOG.warning("lease_not_released: %s; others have it in %g s", error, LEASE_SECONDS)

    def _run(self) -> None:
        """Renew a collector's lease at intervals, in a thread."""
        while not self._stopping.wait(_LOOK_SECONDS):
            self._renew_and_log()

    def _renew_and_log(self) -> None:
        """Renew the collector's lease; log it when the lease was acquired or lost."""
        before = self.epoch()
        try:
            self.renew_or_acquire()
        except Exception as error:  # noqa: BLE001 - without this thread nobody might page
            self._store.counters.fail("leases")
            _LOG.warning("lease_not_renewed name=%s: %s", self.name, error)
        epoch = self.epoch()
        if epoch != before:
            is_held = "lost" if epoch is None else f"taken epoch={epoch}"
            _LOG.info("lease name=%s is %s", self.name, is_held)


def acquire_leases(
    connection: Connection, names: Iterable[str], holder: str, *, is_held: bool
) -> dict[str, int]:
    """Renew the collector's leases, or acquire expired ones, or those of ended processes.

    Call it in a transaction. Return the epoch of each held lease, none of another collector's. An
    epoch stays if the holder never stopped to act as one (``is_held``).
    """
    _limit_lock_time(connection)
    rows = [
        {"name": name, "holder": holder, "epoch": 1, "expires_unix_ns": _lease_expiry()}
        for name in sorted(names)  # in order, to avoid deadlocks
    ]
    statement = insert(connection, leases).values(rows)
    is_mine = leases.c.holder == holder
    is_of_my_place = leases.c.holder.endswith("/" + holder.rpartition("/")[2], autoescape=True)
    statement = statement.on_conflict_do_update(
        index_elements=["name"],
        set_={
            "holder": holder,
            "epoch": leases.c.epoch + case((is_mine, 0 if is_held else 1), else_=1),
            "expires_unix_ns": _lease_expiry(),
        },
        where=is_of_my_place | (leases.c.expires_unix_ns < NOW),
    )
    taken_rows = connection.execute(statement.returning(leases.c.name, leases.c.epoch))
    return {row.name: row.epoch for row in taken_rows}


def load_expired_leases(connection: Connection, prefix: str, seconds: float) -> list[str]:
    """Return leases that expired in the last seconds: their collector died, or was offline.

    Not all, but this collector's share among all current holders.
    """
    names = select(leases.c.name).where(
        leases.c.name.startswith(prefix, autoescape=True),
        leases.c.expires_unix_ns.between(NOW - int(seconds * 1e9), NOW),
    )
    ended_names = connection.execute(names.order_by(leases.c.name)).scalars().all()
    if not ended_names:
        return []
    holders = select(func.count(leases.c.holder.distinct())).where(leases.c.expires_unix_ns > NOW)
    num_holders = connection.execute(holders).scalar() or 1
    return list(ended_names[: -(-len(ended_names) // num_holders)])


def renew_leases(connection: Connection, holder: str, names: Collection[str]) -> dict[str, int]:
    """Renew those of the names whose lease the collector still has; return their epochs."""
    _limit_lock_time(connection)
    condition = (leases.c.holder == holder) & leases.c.name.in_(names)
    # In the order of ``acquire_leases``: it locks those as well that it does not get.
    connection.execute(
        select(leases.c.name).where(condition).order_by(leases.c.name).with_for_update()
    )
    statement = update(leases).where(condition).values(expires_unix_ns=_lease_expiry())
    renewed = connection.execute(statement.returning(leases.c.name, leases.c.epoch))
    return {row.name: row.epoch for row in renewed}


def holders_of(connection: Connection, names: Collection[str]) -> dict[str, str]:
    """Return the last collector that held each of the leases."""
    query = select(leases.c.name, leases.c.holder).where(leases.c.name.in_(names))
    return {row.name: row.holder for row in connection.execute(query)}


def release_leases(connection: Connection, names: Collection[str], holder: str) -> None:
    """End the holder's leases now; their epochs stay, so that the next ones are above them."""
    _limit_lock_time(connection)
    condition = leases.c.name.in_(names) & (leases.c.holder == holder)
    connection.execute(
        select(leases.c.name).where(condition).order_by(leases.c.name).with_for_update()
    )
    connection.execute(update(leases).where(condition).values(expires_unix_ns=0))


def lock_lease(connection: Connection, name: str, holder: str, epoch: int) -> None:
    """Lock a collector's lease until the end of this transaction."""
    if not lock_held_leases(connection, {name: epoch}, holder):
        raise StorageError(
            f"another collector holds the lease {name}; this one held it as number {epoch}",
            hint="nothing to do: the other one continues from the stored data",
            code=LOCKED,
        )


def lock_held_leases(connection: Connection, epochs: Mapping[str, int], holder: str) -> set[str]:
    """Return the leases that the holder has with these epochs, locked against other holders.

    That is until this transaction ends.
    """
    _limit_lock_time(connection)
    query = select(leases.c.name, leases.c.epoch).where(
        leases.c.name.in_(epochs), leases.c.holder == holder
    )
    # In the order of ``acquire_leases``, to avoid deadlocks.
    rows = connection.execute(query.order_by(leases.c.name).with_for_update(read=True))
    return {row.name for row in rows if row.epoch == epochs[row.name]}


def _limit_lock_time(connection: Connection) -> None:
    """Limit how long a paused collector can block leases in this transaction."""
    connection.execute(text(f"SET LOCAL idle_in_transaction_session_timeout = '{IDLE_SECONDS}s'"))


# A commit of the lake names the epochs of its runs' leases (``numbers.lake_engine.LakeEngine``). It
# locks those rows for its duration, so that another owner acquires a run either before the commit,
# which then fails, or after it, and reads its marks. A process that is paused in between loses the
# transaction, so it blocks no one. The names of a commit are not stored.
_REFUSE = f"""
CREATE OR REPLACE FUNCTION vitals_fence() RETURNS trigger
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
  taken text;
BEGIN
  PERFORM set_config('idle_in_transaction_session_timeout', '{IDLE_SECONDS}s', true);
  PERFORM 1 FROM leases
  WHERE name IN (SELECT '{_FENCE}' || key FROM json_each(NEW.commit_extra_info::json))
  ORDER BY name FOR SHARE;
  SELECT min(key) INTO taken FROM json_each_text(NEW.commit_extra_info::json)
  LEFT JOIN leases ON name = '{_FENCE}' || key
  WHERE epoch IS DISTINCT FROM value::bigint;
  IF taken IS NOT NULL THEN
    RAISE EXCEPTION '{TAKEN}%', taken;
  END IF;
  NEW.commit_extra_info := NULL;
  RETURN NEW;
END $$
"""
_FENCED = text(
    "SELECT FROM pg_trigger WHERE tgname = 'vitals_fence'"
    " AND tgrelid = 'ducklake_snapshot_changes'::regclass"
)
_TRIGGER = """
CREATE TRIGGER vitals_fence BEFORE INSERT ON ducklake_snapshot_changes
FOR EACH ROW WHEN (NEW.commit_extra_info IS NOT NULL) EXECUTE FUNCTION vitals_fence()
"""


def install_lake_fence(connection: Connection) -> None:
    """Make the lake's catalog refuse commits of former run owners, from now on.

    Leases and catalog are in the database of this connection, which is in a transaction.
    """
    lock_migrations(connection)
    connection.execute(text(_REFUSE))
    if connection.execute(_FENCED).first() is None:
        connection.execute(text(_TRIGGER))


def fence_runs(connection: Connection, holder: str, epochs: Mapping[str, int]) -> None:
    """Refuse former owners' commits: other epochs of the runs, once this transaction has ended."""
    rows = [
        {"name": _FENCE + run_id, "holder": holder, "epoch": epoch, "expires_unix_ns": 0}
        for run_id, epoch in sorted(epochs.items())  # in order, as in ``acquire_leases``
    ]
    statement = insert(connection, leases).values(rows)
    changed = {name: statement.excluded[name] for name in ("holder", "epoch")}
    connection.execute(statement.on_conflict_do_update(index_elements=["name"], set_=changed))


def _lease_expiry() -> ColumnElement[int]:
    """Return the SQL expression of when a lease that starts now expires."""
    return NOW + int(LEASE_SECONDS * 1e9)
