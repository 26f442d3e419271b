"""The limit of ``max_norm="auto"``: a multiple of the median of the recent gradient norms.

AutoClip clips to a quantile of the norms so far and ZClip to a z-score over their moving average.
Both move with the training, and a fixed ``max_norm`` does not. A median is not moved by the
outliers that the limit is for, so no rule has to decide which norms may enter it. As in AutoClip,
the limit is never below a quantile: otherwise a task with large gradients, one of several that a
loop trains on in turn, would be clipped at each of its steps.
"""

import math
from collections import deque
from collections.abc import Mapping
from itertools import islice
from numbers import Real
from typing import Annotated, Any, Literal

from msgspec import Meta

from trainvitals.config import AboveOne, Settings
from trainvitals.errors import UsageError

MaxNorm = float | Literal["auto"]
"""Gradient norm to which a loop clips: a number, or a multiple of the recent median."""
MIN_NORMS = 16
"""Norms without which there is no limit yet."""
DELAY = 2
"""Steps between a limit and the latest norm in it. The host knows a step's norm one step later, and
sometimes at once: with a fixed delay the limits are the same in both cases."""
MAX_NORMS = 4_096
"""Norms kept, so that a rollback by at most as many steps finds every norm before its target."""


def refuse_max_norm(max_norm: object) -> None:
    """Refuse an invalid setting ``max_norm``: a clip to NaN or 0 would ruin the gradients.

    Raises:
        UsageError: ``max_norm`` is neither a number above 0 nor "auto".
    """
    is_number = isinstance(max_norm, Real) and float(max_norm) > 0
    if max_norm is not None and not is_number and max_norm != "auto":
        raise UsageError(
            f'max_norm is {max_norm!r}; it must be a number above 0, or "auto"',
            hint="leave it out to not clip; inf measures and never clips; "
            '"auto" clips to a multiple of the recent median norm',
        )


class AutoClipConfig(Settings, frozen=True, kw_only=True):
    """Limit to which `max_norm="auto"` clips the gradient norm."""

    section = "auto_clip"

    multiple: AboveOne = 2.0
    """The limit is this multiple of the median gradient norm."""
    window: Annotated[int, Meta(ge=MIN_NORMS, le=MAX_NORMS // 2)] = 256
    """Applied steps whose gradient norms the median is of. There is no limit in the first 16."""
    free_share: Annotated[float, Meta(ge=0.0, le=0.5)] = 0.1
    """Share of the steps in the window whose norm may be above the multiple without being clipped.
    With more of them the limit rises to the norm that this share of the steps exceeds."""


class AutoClip:
    """Gradient norms of applied steps, and the limit that follows from them.

    Norms of 0 are left out: a median of 0 would stop the training.
    """

    def __init__(self, config: AutoClipConfig | None = None) -> None:
        self._config = config or AutoClipConfig()
        self._norms: deque[tuple[int, float]] = deque(maxlen=MAX_NORMS)
        """Step and norm, in the order of the steps."""

    def add(self, step: int, norm: float) -> None:
        """Add the norm of an applied step, a plain number from before the clip."""
        if math.isfinite(norm) and norm > 0.0:
            self._norms.append((step, norm))

    def limit(self, step: int) -> float | None:
        """Compute the clip limit of ``step`` from recent norms; None while too few are known."""
        window, latest = self._config.window, step - DELAY
        recent = islice(reversed(self._norms), window + DELAY)
        norms = sorted([norm for at, norm in recent if at <= latest][:window])
        if len(norms) < MIN_NORMS:
            return None
        highest = norms[min(int(len(norms) * (1.0 - self._config.free_share)), len(norms) - 1)]
        return max(self._config.multiple * norms[len(norms) // 2], highest)

    def roll_back(self, step: int, state: Mapping[str, Any] | None) -> None:
        """Discard the norms from ``step`` onward, or take those in the record of a snapshot.

        The norms kept here include those that arrived on the host after the snapshot. The
        snapshot's own ``state`` serves if it has more of them: after a relaunch, or if the rollback
        goes further back than the norms that are kept.
        """
        while self._norms and self._norms[-1][0] >= step:
            self._norms.pop()
        if state is not None and len(state["norms"]) > len(self._norms):
            self.load_state_dict(state)

    def state_dict(self) -> dict[str, Any]:
        """Return the norms that later limits need, as JSON types."""
        first = max(0, len(self._norms) - self._config.window - DELAY)
        return {"norms": [list(pair) for pair in islice(self._norms, first, None)]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``."""
        pairs = [(int(step), float(norm)) for step, norm in state["norms"]]
        self._norms = deque(pairs, MAX_NORMS)
