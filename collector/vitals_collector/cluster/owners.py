"""Run owners: each run has one owner among several collectors on one store.

A run without an owner is acquired by the first collector that receives its rows; agents of a run
with another owner are redirected. A dead owner is replaced once its lease has expired; a later
commit by a paused owner is refused by the database with leases and catalogue.
"""

import logging
import socket
import threading
import uuid
from collections.abc import Collection

from sqlalchemy import Connection

from trainvitals.clock import Clock
from trainvitals.errors import NotOwnerError, StorageError
from vitals_collector.cluster.leases import (
    LEASE_SECONDS,
    MARGIN_SECONDS,
    RUN,
    acquire_leases,
    fence_runs,
    holders_of,
    install_lake_fence,
    load_expired_leases,
    lock_held_leases,
    release_leases,
    renew_leases,
)
from vitals_collector.cluster.reports import load_runs_elsewhere
from vitals_collector.numbers.lake import Lake
from vitals_collector.storage.store import OwnedElsewhere, RunClaims, Store

_RENEW_SECONDS = 2.0
_IDLE_SECONDS = 600.0
"""Release a run after this time without rows."""
_NAMES_AT_ONCE = 1_000
_ENDED_SECONDS = 60.0
"""Time after its lease in which a run is taken over together with another: older ones stay."""
_ELSEWHERE_SECONDS = 1.0
"""How long a run counts as another collector's; agents ask often in the meantime."""
_LOG = logging.getLogger("vitals.collector.owners")


class _OwnedRun:
    __slots__ = ("epoch", "until_ns", "used_ns")

    def __init__(self, epoch: int, until_ns: int, used_ns: int) -> None:
        self.epoch, self.until_ns, self.used_ns = epoch, until_ns, used_ns


class RunOwners(RunClaims):
    """The runs that this collector owns. Thread-safe; ``start`` renews its leases in a thread.

    The store has a lake, and the database that the collectors share. The clock's monotonic time
    decides when a lease has expired. ``url`` is this collector's URL for agents, "" if unknown;
    ``process_place`` is as in ``Lease``.

    Raises:
        StorageError: the database does not support refusing former owners.
    """

    def __init__(
        self, store: Store, *, clock: Clock, url: str = "", process_place: str = ""
    ) -> None:
        assert isinstance(store.numbers, Lake), "collectors share a lake, or nothing"
        self._store, self._lake, self._clock = store, store.numbers, clock
        self._holder = f"{url or socket.gethostname()} /{process_place or uuid.uuid4().hex[:16]}"
        self._taking = threading.Lock()
        """Guards changes of the held leases; may be held for seconds."""
        self._lock = threading.Lock()
        """Guards the two dicts below; renewals do not wait for ``_taking``."""
        self._owned: dict[str, _OwnedRun] = {}
        self._elsewhere: dict[str, tuple[NotOwnerError, int]] = {}
        """Runs of others, and until when they are thought to be."""
        with store.write() as connection:
            install_lake_fence(connection)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="vitals-owners", daemon=True)

    def start(self) -> None:
        """Start the thread that renews the leases of this collector's runs."""
        self._thread.start()

    def close(self) -> None:
        """Stop the thread and release all runs: their next owners need not wait."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        with self._taking:
            self._release(list(self._owned))

    def claim(self, run_ids: Collection[str]) -> dict[str, NotOwnerError]:
        """Acquire the runs without an owner; return the owners of the others."""
        unowned, elsewhere = self._split_by_owner(run_ids)
        if unowned:
            with self._taking:
                # Another thread may have acquired some.
                unowned, elsewhere = self._split_by_owner(run_ids)
                if unowned:
                    elsewhere |= self._acquire(unowned)
        return elsewhere

    def _split_by_owner(
        self, run_ids: Collection[str]
    ) -> tuple[list[str], dict[str, NotOwnerError]]:
        """Return which of the runs are to be acquired, and the owners of the others."""
        unowned, elsewhere = list[str](), dict[str, NotOwnerError]()
        with self._lock:
            now_ns = self._clock.monotonic_ns()
            for run_id in run_ids:
                owned, other = self._owned.get(run_id), self._elsewhere.get(run_id)
                if owned is not None and owned.until_ns > now_ns:
                    owned.used_ns = now_ns
                elif other is not None and other[1] > now_ns:
                    elsewhere[run_id] = other[0]
                else:
                    unowned.append(run_id)
        return unowned, elsewhere

    def _acquire(self, run_ids: Collection[str]) -> dict[str, NotOwnerError]:
        """Acquire runs and take them over in the lake; return the owners of the others."""
        now_ns = self._clock.monotonic_ns()
        with self._store.write() as connection:
            # Rows of a dead owner's other runs arrive soon too, and each takeover costs time.
            more = load_expired_leases(connection, RUN, _ENDED_SECONDS)
            lease_names = {RUN + run_id for run_id in run_ids}
            names = {name: name.removeprefix(RUN) for name in (*lease_names, *more)}
            taken = acquire_leases(connection, names, self._holder, is_held=False)
            epochs = {names[name]: epoch for name, epoch in taken.items()}
            if epochs:
                fence_runs(connection, self._holder, epochs)
            others = lease_names - taken.keys()
            holders = holders_of(connection, others) if others else {}
        elsewhere = {
            names[name]: _not_owner_error(names[name], holders.get(name, "").partition(" ")[0])
            for name in others
        }
        owned: dict[str, _OwnedRun] = {}
        if taken:
            self._lake.become_owner(epochs)
            asked_ns = self._clock.monotonic_ns()  # for many runs that took a while
            with self._store.write() as connection:
                renewed = renew_leases(connection, self._holder, taken)
            for name, epoch in renewed.items():
                if epoch == taken[name]:
                    owned[names[name]] = _OwnedRun(epoch, _lease_end_ns(asked_ns), now_ns)
            _LOG.info("runs_owned num=%d first=%s", len(epochs), min(epochs))
        with self._lock:
            # Runs that ended elsewhere are not requested again, and would stay.
            current = {run: other for run, other in self._elsewhere.items() if other[1] > now_ns}
            until_ns = now_ns + int(_ELSEWHERE_SECONDS * 1e9)
            self._elsewhere = current | {run: (e, until_ns) for run, e in elsewhere.items()}
            self._owned |= owned
        return elsewhere

    def owned(self) -> dict[str, int]:
        """Return the runs that this collector owns now, and the number of each lease."""
        now_ns = self._clock.monotonic_ns()
        with self._lock:
            return {
                run: owned_run.epoch
                for run, owned_run in self._owned.items()
                if owned_run.until_ns > now_ns
            }

    def hold(self, connection: Connection, run_ids: Collection[str]) -> set[str]:
        """Lock the leases of owned runs until the transaction ends; return these runs."""
        epochs = {RUN + run: epoch for run, epoch in self.owned().items() if run in run_ids}
        return {
            name.removeprefix(RUN) for name in lock_held_leases(connection, epochs, self._holder)
        }

    def elsewhere(self, connection: Connection) -> list[OwnedElsewhere]:
        """Return the runs of other collectors, with their last reports."""
        return load_runs_elsewhere(connection, self._holder)

    def _run(self) -> None:
        """Renew the leases of owned runs at intervals, in a thread."""
        while not self._stopping.wait(_RENEW_SECONDS):
            try:
                self.renew()
            except Exception as error:  # noqa: BLE001 - without this thread all leases would end
                self._store.counters.fail("leases")
                _LOG.warning("leases_not_renewed num=%d: %s", len(self._owned), error)

    def renew(self) -> None:
        """Renew the leases of owned runs, and release runs without rows for long.

        Raises:
            StorageError: the database refused; owned runs stay owned until their leases expire.
        """
        now_ns = self._clock.monotonic_ns()
        if self._taking.acquire(blocking=False):  # otherwise the next time
            try:
                self._release_idle(now_ns - int(_IDLE_SECONDS * 1e9))
            finally:
                self._taking.release()
        with self._lock:
            current_runs = [run for run, owned in self._owned.items() if owned.until_ns > now_ns]
        renewed: dict[str, int] = {}
        for start in range(0, len(current_runs), _NAMES_AT_ONCE):
            names = [RUN + run_id for run_id in current_runs[start : start + _NAMES_AT_ONCE]]
            with self._store.write() as connection:
                renewed |= renew_leases(connection, self._holder, names)
        with self._lock:
            later_ns = self._clock.monotonic_ns()
            for run_id in current_runs:
                owned = self._owned.get(run_id)
                if owned is None:
                    continue
                # A lease that expired while the database was slow is acquired again, with a new
                # number.
                if renewed.get(RUN + run_id) == owned.epoch and owned.until_ns > later_ns:
                    owned.until_ns = _lease_end_ns(now_ns)
                else:
                    del self._owned[run_id]

    def _release_idle(self, before_ns: int) -> None:
        """Release runs that have sent no rows for long."""
        with self._lock:
            idle = [run for run, owned in self._owned.items() if owned.used_ns < before_ns]
            # at once: rows that arrive now belong to a run that has to be acquired again
            for run_id in idle:
                del self._owned[run_id]
        self._release(idle)

    def _release(self, run_ids: Collection[str]) -> None:
        """Release the leases of runs, so that another collector can own them."""
        with self._lock:
            for run_id in run_ids:
                self._owned.pop(run_id, None)
        try:
            if run_ids:
                names = [RUN + run_id for run_id in run_ids]
                with self._store.write() as connection:
                    release_leases(connection, names, self._holder)
        except StorageError as error:
            _LOG.warning("runs_not_released: %s; others have them in %g s", error, LEASE_SECONDS)


def _lease_end_ns(asked_ns: int) -> int:
    """Return when this collector must stop using a run's lease, by its own clock."""
    return asked_ns + int((LEASE_SECONDS - MARGIN_SECONDS) * 1e9)


def _not_owner_error(run_id: str, url: str) -> NotOwnerError:
    """Return the error that another collector owns the run, with its URL if it has one."""
    is_url = url.startswith(("http://", "https://"))
    where = url if is_url else f"the one on {url}"
    return NotOwnerError(
        f"another collector takes the rows of run {run_id}: {where}",
        hint="name all collectors: --collector URL,URL; the agent finds the one of its run",
        owner=url if is_url else "",
    )
