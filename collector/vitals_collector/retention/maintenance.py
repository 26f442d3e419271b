"""What a collector does in the background beside compaction: thin runs, and remove old ones."""

import logging
import threading

from trainvitals.clock import Clock
from vitals_collector.live.run_status import Liveness
from vitals_collector.retention.quota import Volumes
from vitals_collector.retention.removal import delete_old
from vitals_collector.retention.rollup import VolumeSettings
from vitals_collector.storage.store import Store

INTERVAL_SECONDS = 60.0
"""How often runs are looked at."""
_PAUSE = 1.0
"""How long to rest after a piece of work, in times of what it took: writers go first."""
_LOG = logging.getLogger("vitals.collector.upkeep")


class Upkeep:
    """Called again and again by the compactor's thread; works when it is time to."""

    def __init__(
        self,
        store: Store,
        settings: VolumeSettings,
        *,
        clock: Clock,
        lost_after_seconds: float = 60.0,
    ) -> None:
        self.volumes = Volumes(store, settings)
        self._store = store
        self._clock = clock
        self._lost_after_seconds = lost_after_seconds
        self._up_since_unix_ns = clock.time_ns()
        self._next_ns = clock.monotonic_ns()

    def __call__(self, stop: threading.Event) -> None:
        """Do what is due, until ``stop``; an error is logged, counted, and ends the round."""
        if self._clock.monotonic_ns() < self._next_ns:
            return
        try:
            now = self._clock.time_ns()
            self.volumes.maintain(now, stop, pause=_PAUSE)
            when = Liveness(
                now_unix_ns=now,
                up_since_unix_ns=self._up_since_unix_ns,
                lost_after_seconds=self._lost_after_seconds,
            )
            delete_old(self._store, self.volumes.settings.keep_days, when)
        except Exception:  # noqa: BLE001 - the thread compacts as well; it must not end
            self._store.counters.fail("upkeep")
            _LOG.exception("upkeep_failed again_in=%gs", INTERVAL_SECONDS)
        self._next_ns = self._clock.monotonic_ns() + int(INTERVAL_SECONDS * 1e9)


__all__ = ["INTERVAL_SECONDS", "Upkeep"]
