"""What did not happen in time: a step, a checkpoint. Pure functions of the time they are given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from trainvitals.detect.fleet.base import INFINITY, require, tell, upper_median
from trainvitals.records import Finding
from trainvitals.units import humanize_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class StallConfig:
    """How long a step may take."""

    least_seconds: float = 300.0
    """Silence that is never a stall: the first evaluation comes without notice."""
    typical_ratio: float = 20.0
    """Multiple of the usual step. Our own choice."""
    longest_ratio: float = 3.0
    """Multiple of the longest step that was seen twice, evaluations and checkpoints included.
    nvidia-resiliency-ext takes 5 times the longest and restarts the job; this one only tells."""

    def __post_init__(self) -> None:
        require("stall", "least_seconds", self.least_seconds, least=0.0, most=1e9)
        require("stall", "typical_ratio", self.typical_ratio, least=1.0, most=1e6)
        require("stall", "longest_ratio", self.longest_ratio, least=1.0, most=1e6)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """How old the newest checkpoint may be."""

    ratio: float = 2.0
    """Multiple of the usual interval: one save may fail, or be late, without a word."""

    def __post_init__(self) -> None:
        require("checkpoint", "ratio", self.ratio, least=1.0, most=INFINITY)


_STALL = StallConfig()
_CHECKPOINT = CheckpointConfig()


def stalled(
    now_ns: int,
    *,
    last_step: int,
    last_time_ns: int,
    typical_seconds: float | None,
    longest_seconds: float = 0.0,
    config: StallConfig = _STALL,
) -> Finding | None:
    """Say whether the step after ``last_step`` takes too long; None while that is not known.

    Both times must be of one clock. A clock that went back is no stall.
    """
    if typical_seconds is None:
        return None
    silent = (now_ns - last_time_ns) / 1e9
    limit = max(
        config.least_seconds,
        config.typical_ratio * typical_seconds,
        config.longest_ratio * longest_seconds,
    )
    if silent <= limit:
        return None
    return tell(
        "stalled",
        last_step,
        f"no step for {humanize_seconds(silent)} after step {last_step}; a step usually takes "
        f"{humanize_seconds(typical_seconds)}, and {humanize_seconds(limit)} is the limit",
        value=silent,
        limit=limit,
    )


def usual_interval(checkpoint_steps: Sequence[int]) -> int | None:
    """Return the median distance of checkpoints, in steps; None for less than two."""
    steps = sorted(set(checkpoint_steps))
    gaps = [after - before for before, after in pairwise(steps)]
    return int(upper_median(gaps)) if gaps else None


def checkpoint_overdue(
    step: int,
    *,
    newest_checkpoint_step: int,
    interval: int | None,
    config: CheckpointConfig = _CHECKPOINT,
) -> Finding | None:
    """Say whether a checkpoint is missing at a step; None where the interval is not known."""
    if interval is None or interval < 1:
        return None
    age, limit = step - newest_checkpoint_step, config.ratio * interval
    if age <= limit:
        return None
    return tell(
        "checkpoint_overdue",
        step,
        f"the newest checkpoint is of step {newest_checkpoint_step}, {age} steps ago; one comes "
        f"every {interval} steps",
        value=float(age),
        limit=limit,
        onset_step=newest_checkpoint_step + interval,
    )
