"""What rank 0's row of a step has beside the record: derived here, by host arithmetic alone."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainer_hooks.measures.sampled import Sampler, Samples
from trainer_hooks.step.decode_step import Derived
from trainer_hooks.step.signals import HostMeasurements, Utilization
from trainvitals.records import StepRecord
from trainvitals.rows import Value

if TYPE_CHECKING:
    from trainer_hooks.measures.noise import NoiseScale

_OVERFLOW_WINDOW = 100
_LARGEST_LOSS = 700.0
"""Beyond it e^loss is no float64 any more."""


class RootColumns:
    """Keeps what spans several steps: overflows, utilization, the noise scale."""

    def __init__(self, utilization: Utilization, sampler: Sampler, world_size: int) -> None:
        self._utilization = utilization
        self._overflows = 0
        self._recent: deque[bool] = deque(maxlen=_OVERFLOW_WINDOW)
        self._noise: NoiseScale | None = None
        if sampler.settings.noise_scale:
            from trainer_hooks.measures.noise import NoiseScale

            self._noise = NoiseScale(world_size)

    def of(
        self,
        measured: HostMeasurements,
        record: StepRecord,
        derived: Derived,
        losses: list[float | None],
        samples: Samples,
        tokens: int | None,
    ) -> dict[str, Value]:
        """Return the columns of one step; call once for each, in order."""
        if measured.flops is not None:
            self._utilization.counted(measured.flops, tokens)
        ranks, seconds = record.nonfinite_ranks, measured.duration_seconds
        columns: dict[str, Value] = {
            "verdict": derived.column(clips=record.clips),
            "culprit_rank": ranks[0] if len(ranks) == 1 else -1,
            "nonfinite_params": record.nonfinite_params,
            "tokens_per_second": tokens / seconds if tokens is not None and seconds else None,
            "mfu_ratio": self._utilization.ratio(tokens, seconds),
            "loss_spread": _spread(losses),
        }
        if tokens is not None and record.loss is not None:
            columns["perplexity"] = math.exp(min(record.loss, _LARGEST_LOSS))
        if derived.loss_scale == derived.loss_scale:
            columns |= self._scaling(derived.loss_scale, record.overflow)
        if samples.weight_squares is not None:
            columns |= _updates(samples)
        if self._noise is not None and samples.local_square is not None:
            columns |= self._noise_columns(self._noise, record, samples.local_square, tokens)
        return columns

    def _scaling(self, loss_scale: float, overflow: bool) -> dict[str, Value]:
        self._overflows += overflow
        self._recent.append(overflow)
        return {
            "loss_scale": loss_scale,
            "overflow_steps": self._overflows,
            "overflow_ratio": sum(self._recent) / len(self._recent),
        }

    def _noise_columns(
        self, noise: NoiseScale, record: StepRecord, local_square: float, tokens: int | None
    ) -> dict[str, Value]:
        if record.grad_norm is not None and not record.failed_ranks and not record.overflow:
            noise.add(small_square=local_square, big_square=record.grad_norm**2)
        ratio = noise.ratio()
        is_known = ratio is not None and tokens is not None
        return {
            "noise_scale_ratio": ratio,
            "critical_batch_tokens": ratio * tokens if is_known else None,  # type: ignore[operator]
        }


def _spread(losses: list[float | None]) -> float | None:
    """Return the largest less the smallest loss; of one rank, or with one that is NaN, none."""
    finite = [loss for loss in losses if loss is not None and math.isfinite(loss)]
    return max(finite) - min(finite) if len(finite) == len(losses) > 1 else None


def _updates(samples: Samples) -> dict[str, Value]:
    assert samples.weight_squares is not None, "asked for where it was measured"
    weight = _norm(samples.weight_squares)
    if samples.update_squares is None:
        return {"weight_norm": weight}
    update = _norm(samples.update_squares)
    ratio = update / weight if weight else None
    return {"weight_norm": weight, "update_norm": update, "update_ratio": ratio}


def _norm(squares: Sequence[float]) -> float:
    total = sum(squares)
    return math.sqrt(total) if total >= 0 else math.nan
