"""The only place of the agent that swallows errors: counts them, and logs the 1st, 2nd, 4th..."""

import logging
import threading
from types import TracebackType
from typing import Literal, get_args

from trainvitals.errors import VitalsError

log = logging.getLogger("vitals_agent")

Part = Literal[
    "discover",
    "hang",
    "journal",
    "journals",
    "mirror",
    "relay",
    "relay.refused",
    "release",
    "restart",
    "sampler.gpu",
    "sampler.node",
    "sampler.process",
    "shipper",
    "shipper.events",
    "shipper.refused",
    "spool",
    "tailer",
]
"""A part of the agent whose errors do not affect the others."""
PARTS: tuple[str, ...] = get_args(Part)


class Faults:
    """Isolates errors of the agent's parts, and counts them by part. Thread-safe."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self._lock = threading.Lock()

    def contained(self, part: Part) -> "_FaultContext":
        """Contain errors of one part of the agent: count them, and log the 1st, 2nd, 4th ..."""
        return _FaultContext(self, part)

    def record(self, part: Part, error: Exception) -> None:
        """Count an error that the agent survived; log the 1st, 2nd, 4th ... per part.

        Errors of Vitals need no traceback; any other one is a bug and is logged with it.
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


class _FaultContext:
    """Context manager of ``contained``; a generator would cost more, dozens of times per second."""

    __slots__ = ("_faults", "_part")

    def __init__(self, faults: Faults, part: Part) -> None:
        self._faults = faults
        self._part = part

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self._faults.record(self._part, error)
        return True
