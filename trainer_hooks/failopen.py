"""The one place where an exception of ours is swallowed, and counted.

It never lies around a collective, a decision or a checkpoint (docs/ARCHITECTURE.md).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

_LOG = logging.getLogger("trainvitals")


class FaultCounter:
    """Counts swallowed exceptions by place; logs the 1st, 2nd, 4th, 8th... of each."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    @contextmanager
    def fail_open(self, where: str) -> Iterator[None]:
        """Run the body; an ``Exception`` in it is counted under ``where`` and goes no further."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the single fail-open boundary
            self.counts[where] += 1
            count = self.counts[where]
            if count & (count - 1) == 0:
                _LOG.warning(
                    "vitals: %s failed (%d times so far), training goes on: %s: %s",
                    where,
                    count,
                    type(error).__name__,
                    error,
                    exc_info=_LOG.isEnabledFor(logging.DEBUG),
                )

    @property
    def total(self) -> int:
        """All swallowed exceptions."""
        return self.counts.total()
