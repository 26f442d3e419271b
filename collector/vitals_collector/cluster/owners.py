"""Which collector takes which run's rows: of several on one store, each run has one owner.

A run that nobody owns belongs to the first collector that is sent rows of it; agents of a run that
another one owns are told where to go. An owner that dies is replaced once its lease has ended; one
that was paused answers nobody for what it commits afterwards, and the lake takes that out again.
"""

import logging
import socket
import threading
import uuid
from collections.abc import Collection, Iterable

from trainvitals.clock import Clock
from trainvitals.errors import NotOwnerError, StorageError
from vitals_collector.cluster.leases import (
    LEASE_SECONDS,
    MARGIN_SECONDS,
    holder_of,
    release,
    renew,
    take,
)
from vitals_collector.numbers.lake import Lake
from vitals_collector.storage.store import LOCKED, Store

_RENEW_SECONDS = 2.0
_IDLE_SECONDS = 600.0
"""After which a run that no rows come of is let go."""
_PREFIX = "run/"
_NAMES_AT_ONCE = 1_000
_LOG = logging.getLogger("vitals.collector.owners")


class _Owned:
    __slots__ = ("epoch", "until_ns", "used_ns")

    def __init__(self, epoch: int, until_ns: int, used_ns: int) -> None:
        self.epoch, self.until_ns, self.used_ns = epoch, until_ns, used_ns


class RunOwners:
    """The runs that this collector owns. Thread-safe; ``start`` renews its leases in a thread.

    Args:
        store: with a lake, and the database that the collectors share.
        clock: its monotonic clock says when a lease is over.
        url: this collector's address, as agents know it; "" if it is not known.
        place: names what this process alone holds while it lives; "" where nothing does.
    """

    def __init__(self, store: Store, *, clock: Clock, url: str = "", place: str = "") -> None:
        assert isinstance(store.numbers, Lake), "collectors share a lake, or nothing"
        self._store, self._lake, self._clock = store, store.numbers, clock
        self._holder = f"{url or socket.gethostname()} /{place or uuid.uuid4().hex[:16]}"
        self._lock = threading.Lock()
        self._owned: dict[str, _Owned] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="vitals-owners", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop the thread and let all runs go: their next owners need not wait."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        with self._lock:
            self._release(list(self._owned))

    def claim(self, run_ids: Collection[str]) -> dict[str, NotOwnerError]:
        """Own the runs that nobody else does; return for each of the others where it belongs."""
        with self._lock:
            now_ns = self._clock.monotonic_ns()
            unowned = []
            for run_id in run_ids:
                owned = self._owned.get(run_id)
                if owned is None or owned.until_ns <= now_ns:
                    unowned.append(run_id)
                else:
                    owned.used_ns = now_ns
            return self._take(unowned, now_ns) if unowned else {}

    def _take(self, run_ids: Collection[str], now_ns: int) -> dict[str, NotOwnerError]:
        epochs: dict[str, int] = {}
        elsewhere: dict[str, NotOwnerError] = {}
        with self._store.write() as connection:
            for run_id in sorted(run_ids):  # in order, so that two do not wait for each other
                name = _PREFIX + run_id
                epoch = take(connection, name, self._holder, is_held=False)
                if epoch is not None:
                    epochs[run_id] = epoch
                    continue
                url = holder_of(connection, name).partition(" ")[0]
                elsewhere[run_id] = _elsewhere(run_id, url)
        if epochs:
            # Before rows of it are stored: what an owner before commits from here on is known.
            self._lake.own(epochs)
            asked_ns = self._clock.monotonic_ns()  # for many runs that took a while
            names = {_PREFIX + run_id: run_id for run_id in epochs}
            with self._store.write() as connection:
                renewed = renew(connection, self._holder, names.keys())
            for name, epoch in renewed.items():
                if epoch == epochs[names[name]]:
                    self._owned[names[name]] = _Owned(epoch, _until(asked_ns), now_ns)
            _LOG.info("runs_owned num=%d first=%s", len(epochs), min(epochs))
        return elsewhere

    def confirm(self, run_ids: Iterable[str]) -> None:
        """Raise if one of the runs is not owned any more: what was stored of it may not count."""
        now_ns = self._clock.monotonic_ns()
        for run_id in run_ids:
            owned = self._owned.get(run_id)
            if owned is None or owned.until_ns <= now_ns:
                raise StorageError(
                    f"the lease of run {run_id} ended while its rows were stored",
                    hint="nothing to do: agents send them again, here or to the next owner",
                    code=LOCKED,
                )

    def _run(self) -> None:
        while not self._stopping.wait(_RENEW_SECONDS):
            try:
                self.renew()
            except Exception as error:  # noqa: BLE001 - without this thread all leases would end
                self._store.counters.fail("leases")
                _LOG.warning("leases_not_renewed num=%d: %s", len(self._owned), error)

    def renew(self) -> None:
        """Renew what is owned, and let go what no rows came of for long.

        Raises:
            StorageError: the database refused; what is owned is until its lease ends.
        """
        with self._lock:
            now_ns = self._clock.monotonic_ns()
            idle_ns = now_ns - int(_IDLE_SECONDS * 1e9)
            self._release([run for run, owned in self._owned.items() if owned.used_ns < idle_ns])
            held = [run for run, owned in self._owned.items() if owned.until_ns > now_ns]
        renewed: dict[str, int] = {}
        for start in range(0, len(held), _NAMES_AT_ONCE):
            names = [_PREFIX + run_id for run_id in held[start : start + _NAMES_AT_ONCE]]
            with self._store.write() as connection:
                renewed |= renew(connection, self._holder, names)
        with self._lock:
            later_ns = self._clock.monotonic_ns()
            for run_id in held:
                owned = self._owned.get(run_id)
                if owned is None:
                    continue
                # What ended while the database was slow is taken anew, with a new number.
                if renewed.get(_PREFIX + run_id) == owned.epoch and owned.until_ns > later_ns:
                    owned.until_ns = _until(now_ns)
                else:
                    del self._owned[run_id]

    def _release(self, run_ids: Collection[str]) -> None:
        for run_id in run_ids:
            self._owned.pop(run_id, None)
        try:
            if run_ids:
                with self._store.write() as connection:
                    for run_id in run_ids:
                        release(connection, _PREFIX + run_id, self._holder)
        except StorageError as error:
            _LOG.warning("runs_not_released: %s; others have them in %g s", error, LEASE_SECONDS)


def _until(asked_ns: int) -> int:
    return asked_ns + int((LEASE_SECONDS - MARGIN_SECONDS) * 1e9)


def _elsewhere(run_id: str, url: str) -> NotOwnerError:
    is_url = url.startswith(("http://", "https://"))
    where = url if is_url else f"the one on {url}"
    return NotOwnerError(
        f"another collector takes the rows of run {run_id}: {where}",
        hint="name all collectors: --collector URL,URL; the agent finds the one of its run",
        owner=url if is_url else "",
    )


__all__ = ["RunOwners"]
