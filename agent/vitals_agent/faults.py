"""The one place of the agent where an error is swallowed: counted, and logged ever more rarely."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from trainvitals.errors import VitalsError

log = logging.getLogger("vitals_agent")


class Faults:
    """Keeps one part's failure from the other parts and counts it by part. Thread-safe."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self._lock = threading.Lock()

    @contextmanager
    def contained(self, part: str) -> Iterator[None]:
        """Swallow any Exception of the block; log the 1st, 2nd, 4th, 8th ... of each part."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the boundary between parts that fail separately
            self.record(part, error)

    def record(self, part: str, error: Exception) -> None:
        """Count an error that was dealt with; log the 1st, 2nd, 4th ... of each part.

        Errors of ours say all there is to say; any other one is a bug and comes with its traceback.
        """
        with self._lock:
            count = self.counts.get(part, 0) + 1
            self.counts = {**self.counts, part: count}
        if count & (count - 1) == 0:
            trace = None if isinstance(error, VitalsError | OSError) else error
            log.warning(
                "part failed part=%s count=%d error=%s: %s",
                part,
                count,
                type(error).__name__,
                error,
                exc_info=trace,
            )
