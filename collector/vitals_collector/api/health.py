"""Whether the store responds, within a bounded time: for load balancers and people."""

import asyncio
import logging
import threading

from trainvitals.errors import VitalsError
from vitals_collector.storage.store import Store

TIMEOUT_SECONDS = 3.0
_LOG = logging.getLogger("vitals.collector.health")


class HealthCheck:
    """Checks the store for all requests that arrive at the same time, in one event loop.

    It has its own thread: if a database accepts connections and does not respond, the threads that
    serve requests all wait for it.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._running: asyncio.Future[str] | None = None

    async def status(self) -> str:
        """Return why the store does not work, for the health route; empty if it does."""
        if self._running is None or self._running.done():
            loop = asyncio.get_running_loop()
            self._running = loop.create_future()
            arguments = loop, self._running
            # A daemon, because a check that hangs must not delay the end of the process.
            threading.Thread(
                target=self._run, args=arguments, name="vitals-health", daemon=True
            ).start()
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                return await asyncio.shield(self._running)
        except TimeoutError:
            return f"the database has not responded for {TIMEOUT_SECONDS:g} s"

    def _run(self, loop: asyncio.AbstractEventLoop, future: "asyncio.Future[str]") -> None:
        """Check the store on a thread; hand the status to the event loop."""
        status = self._check_store()
        try:
            loop.call_soon_threadsafe(_set_status, future, status)
        except RuntimeError:  # the loop was closed in the meantime
            _LOG.debug("health_not_reported status=%s", status)

    def _check_store(self) -> str:
        """Query the store for the health route; return what does not work, or ""."""
        try:
            with self._store.read_transaction() as connection:
                connection.exec_driver_sql("SELECT 1")
            self._store.numbers.check_place()
        except VitalsError as error:
            return error.text
        except Exception as error:  # noqa: BLE001 - reported to the caller
            _LOG.exception("health_check_failed")
            return f"{type(error).__name__}: {error}"
        if self._store.no_room is not None:
            return "the store has no disk space left; reading still works"
        return ""


def _set_status(future: "asyncio.Future[str]", status: str) -> None:
    """Deliver the result of a health check, unless the request was canceled."""
    if not future.done():
        future.set_result(status)
