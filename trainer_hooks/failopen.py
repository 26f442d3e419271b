"""The only place that swallows exceptions of Vitals, and counts them.

It never encloses a collective, a decision or a checkpoint (docs/ARCHITECTURE.md).
"""

from __future__ import annotations

import logging
from collections import Counter
from types import TracebackType

from trainvitals.errors import UsageError

_LOG = logging.getLogger("trainvitals")


class FaultCounter:
    """Counts swallowed exceptions by place; logs the 1st, 2nd, 4th, 8th... of them."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.last: dict[str, str] = {}
        """Latest error per place, in one line."""

    def fail_open(self, where: str) -> FailOpen:
        """Run the body; swallow its ``Exception``, so training continues; count it in ``where``."""
        return FailOpen(self, where)

    def count(self, where: str, error: Exception) -> None:
        """Count an error that the monitor hides from the loop, and log the 1st, 2nd, 4th..."""
        self.counts[where] += 1
        self.last[where] = f"{type(error).__name__}: {error}".partition("\n")[0][:300]
        count = self.counts[where]
        if count & (count - 1):
            return
        if isinstance(error, UsageError):  # the user can fix it: the message includes how
            text = f"{error.text}; {error.hint}" if error.hint else error.text
            _LOG.warning("vitals: %s (%s, %d so far)", text, where, count)
        else:
            _LOG.warning(
                "vitals: %s failed (%d so far), training continues: %s: %s",
                where,
                count,
                type(error).__name__,
                error,
                exc_info=error if _LOG.isEnabledFor(logging.DEBUG) else None,
            )

    @property
    def total(self) -> int:
        """Return the number of all exceptions that the monitor swallowed in this process."""
        return self.counts.total()


class FailOpen:
    """Context manager of ``fail_open``; a generator would cost each step three times as much."""

    __slots__ = ("_faults", "_where")

    def __init__(self, faults: FaultCounter, where: str) -> None:
        self._faults = faults
        self._where = where

    def __enter__(self) -> None:
        """Enter the body."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        """Swallow an ``Exception``; let ``KeyboardInterrupt`` and ``SystemExit`` through."""
        if error is None or not isinstance(error, Exception):
            return False
        self._faults.count(self._where, error)
        return True
