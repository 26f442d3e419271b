"""Everything that waits for a network or a shared disk: ships the spools, and delivers commands.

It runs on separate threads: a collector that does not respond, or a directory on a server that is
down, must not delay copying journals or detecting dead ranks.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from trainvitals.wire import is_of_events
from vitals_agent.command_delivery import CommandDelivery
from vitals_agent.faults import Faults
from vitals_agent.run import ServedRun
from vitals_agent.shipper import Shipper


class IoLoop:
    """Serves all runs in turn. One thread calls ``serve_runs``; any thread may call the rest.

    The mapping that ``runs`` returns is replaced, never changed. ``reachable`` may search for a
    collector.
    """

    def __init__(
        self,
        shipper: Shipper | None,
        relay: CommandDelivery,
        *,
        runs: Callable[[], Mapping[str, ServedRun]],
        faults: Faults,
        reachable: Callable[[float], bool],
    ) -> None:
        self.can_ship: bool | None = None
        """Whether a collector was known at the last turn; None before the first."""
        self._shipper = shipper
        self._relay = relay
        self._runs = runs
        self._faults = faults
        self._reachable = reachable
        self._lock = threading.Lock()
        self._serving = ""
        self._served: dict[str, ServedRun] = {}
        self._sent: dict[str, tuple[ServedRun, int]] = {}

    def find_collector(self, now: float) -> None:
        """Check whether a collector is available to the agent."""
        can_ship = False
        with self._faults.contained("shipper"):
            can_ship = self._shipper is not None and self._reachable(now)
        self.can_ship = can_ship

    def serve_runs(self, now: float) -> None:
        """Send each run's spooled rows and relay its commands once, as fast as the network."""
        self.find_collector(now)
        for run_id in list(self._runs()):
            run = self._start_serving(run_id)
            if run is None:
                continue
            try:
                if self.can_ship:
                    with self._faults.contained("shipper"):
                        self._ship_spool(run, now)
                with self._faults.contained("relay"):
                    self._relay.relay(run, now, reachable=bool(self.can_ship))
            finally:
                self._serving = ""
        for run_id in set(self._served) - set(self._runs()):
            self._drop_run(run_id)

    def leave(self, run_id: str, remove: Callable[[], None]) -> bool:
        """Stop serving a run in the agent's I/O loop; return False while it is being served."""
        with self._lock:
            if self._serving == run_id:
                return False
            remove()
            return True

    def drained(self, run: ServedRun) -> bool:
        """Return whether the agent has sent every spooled row of the run, or has no collector."""
        if self._shipper is None or self.can_ship is False:
            return True
        return self._sent.get(run.run_id) == (run, run.num_written)

    def _start_serving(self, run_id: str) -> ServedRun | None:
        """Mark a run as served by the agent's I/O loop; None if it was released."""
        with self._lock:
            run = self._runs().get(run_id)
            if run is not None:
                self._serving = run_id
                if self._served.get(run_id, run) is not run:
                    self._drop_run(run_id)  # it was released, and is served again
                self._served[run_id] = run
            return run

    def _ship_spool(self, run: ServedRun, now: float) -> None:
        """Send a run's spooled rows to the collector, and note if none is left."""
        assert self._shipper is not None
        written = run.num_written  # before: batches written in the meantime may not be sent
        self._shipper.ship(run.run_id, run.spool, now, run.writer_key)
        if self._shipper.drained(run.run_id):
            self._sent[run.run_id] = (run, written)

    def _drop_run(self, run_id: str) -> None:
        """Discard the I/O loop's state of a run that the agent released."""
        self._served.pop(run_id, None)
        self._sent.pop(run_id, None)
        self._relay.forget(run_id)
        if self._shipper is not None:
            self._shipper.forget(run_id)


SendAhead = Callable[[Sequence[bytes], str], object]
"""Sends batches of one run, and the run's writer key."""
MAX_AHEAD, MAX_AHEAD_BYTES = 64, 1 << 16
"""Maximum pending batches of events, and the size of each; the latest are kept."""


class EventsAhead:
    """Sends new events before the spool's earlier rows. Thread-safe.

    Operators may wait for events, while the spool waits for replies about rows, for a second or for
    the merge of files. Events that cannot be sent now are only sent by the spool.
    """

    def __init__(self, send: SendAhead, *, faults: Faults) -> None:
        self._send, self._faults = send, faults
        self._waiting: deque[tuple[bytes, str]] = deque(maxlen=MAX_AHEAD)
        self._came = threading.Event()

    def enqueue(self, raw: bytes, writer_key: str) -> None:
        """Queue a batch that the agent spooled to be sent early, if it contains events."""
        if len(raw) <= MAX_AHEAD_BYTES and is_of_events(raw):
            self._waiting.append((raw, writer_key))
            self._came.set()

    def start(self) -> None:
        """Start the thread that sends events early, for as long as the agent lives."""
        threading.Thread(target=self._run, name="vitals-agent-events", daemon=True).start()

    def send_pending(self) -> None:
        """Send the queued events to the collector, before older rows of the spool."""
        raws_by_key: dict[str, list[bytes]] = {}
        while self._waiting:
            raw, writer_key = self._waiting.popleft()
            raws_by_key.setdefault(writer_key, []).append(raw)
        for writer_key, raws in raws_by_key.items():
            with self._faults.contained("shipper.events"):
                self._send(raws, writer_key)

    def _run(self) -> None:
        """Send events to the collector as they come, on a thread of the agent."""
        while True:
            self._came.wait()
            self._came.clear()
            self.send_pending()


class IoThread:
    """Runs the loop until ``end``; a daemon thread, so the process does not wait for it."""

    def __init__(self, loop: IoLoop, *, interval_seconds: float) -> None:
        self._loop = loop
        self._interval = interval_seconds
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="vitals-agent-io", daemon=True)
        self._thread.start()

    def end(self, seconds: float) -> bool:
        """Serve the agent's runs a last time; return whether that ended within the time."""
        self._is_ending.set()
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        """Ship the spools and relay commands, once per interval, on the agent's second thread."""
        while True:
            is_ending = self._is_ending.wait(self._interval)
            self._loop.serve_runs(time.monotonic())
            if is_ending:
                return
