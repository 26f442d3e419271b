"""The norm of all weights: it moves slowly, regardless of the loss."""

import math
from collections import deque
from typing import Annotated

from msgspec import Meta

from trainvitals.config import AboveZero, AtLeastOne, Settings
from trainvitals.detect.fleet.base import LastingWatcher, MergedStep, number, upper_median
from trainvitals.records import Finding

_MAX_SAMPLES = 64
"""Samples that define the usual change: 640 steps by default."""


class WeightNormConfig(Settings, frozen=True, kw_only=True):
    """When the weight norm changes faster than it does in this run. Samples are every 10th step."""

    section = "weight_norm"

    change: AboveZero = 0.18
    """Smallest reported change (natural logarithm: 0.18 is 20%). Of 43 kinds of small healthy
    training, one (noisy labels of a small fixed set) reaches 0.23, the others 0.13; a weight decay
    300 times too strong reaches at least 0.21, logits that grow by 2% per step at least 0.79."""
    multiple: AboveZero = 3.0
    """The change must also be this multiple of the run's usual one."""
    span: AtLeastOne = 5
    """Samples over which the change is taken."""
    warm_up: Annotated[int, Meta(ge=2, le=_MAX_SAMPLES)] = 20
    """Samples before anything is reported: weights grow fast from where they begin."""
    clear_after: AtLeastOne = 20
    """Samples within the limit after which it can be reported again."""


class WeightNormWatcher(LastingWatcher):
    """Reports a weight norm that grows or shrinks much faster than it usually does.

    It sees slow ruin before the loss does: weight decay that is far too strong, and weights that
    something other than the gradient scales. Without ``weight_norm`` it abstains.
    """

    name = "weight_norm"
    STATE = ("_logarithms", "_episode")

    def __init__(self, config: WeightNormConfig | None = None) -> None:
        self._config = config or WeightNormConfig()
        super().__init__(self._config.clear_after)
        self._logarithms: deque[float] = deque(maxlen=_MAX_SAMPLES + 2 * self._config.span)

    def _restarted(self, merged: MergedStep) -> None:
        """Discard the merged steps' weight norms: another attempt starts with other weights."""
        self._logarithms.clear()

    def _judge(self, merged: MergedStep) -> tuple[Finding, ...]:
        """Judge the weight norm of a merged step: report a change faster than usual."""
        norm = number(merged.run.get("weight_norm"))
        if norm is None or norm <= 0.0:
            return ()
        logarithms, config = self._logarithms, self._config
        logarithms.append(math.log(norm))
        span, warm_up = config.span, config.warm_up
        if len(logarithms) <= max(warm_up, 2 * span):
            return ()
        samples = list(logarithms)
        change = samples[-1] - samples[-1 - span]
        # Changes that overlap with the latest one would hide it.
        earlier = samples[: -span or None]
        usual = upper_median(
            [abs(later - before) for before, later in zip(earlier, earlier[span:], strict=False)]
        )
        limit = max(config.change, config.multiple * usual)
        if not self._episode.begins(abs(change) > limit):
            return ()
        before = math.exp(samples[-1 - span])
        direction = "grew" if change > 0.0 else "shrank"
        reason = (
            f"the weight norm {direction} from {before:.4g} to {norm:.4g} within {span} samples; "
            f"its usual change is {100.0 * math.expm1(usual):.2g} %"
        )
        return self._report(merged.step, reason, value=abs(change), limit=limit)
