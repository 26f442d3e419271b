"""Early stopping: whether a value of a metric is a new best, and how long to wait for the next."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta

from trainvitals.config import AtLeastOne, Settings
from trainvitals.stateful import Stateful


class EarlyStopping(Settings, frozen=True, kw_only=True):
    """End a run that no longer improves: ``watch(..., early_stopping=EarlyStopping(...))``.

    ``monitor.evaluate(loss=...)`` provides the values. Rank 0's value counts, for all ranks.
    """

    section = "early_stopping"

    metric: Annotated[str, Meta(min_length=1)] = "loss"
    """Name of the value in ``monitor.evaluate``."""
    patience: AtLeastOne = 5
    """Number of evaluations in a row without improvement after which the run ends."""
    min_delta: Annotated[float, Meta(ge=0.0, le=1e300)] = 0.0
    """Minimum difference from the best value that counts as an improvement."""
    mode: Literal["min", "max"] = "min"
    """Whether lower or higher is better."""
    keep_best: bool = True
    """Whether the best evaluated state is written to disk, if the run has checkpoints."""


class Stopper(Stateful):
    """Decides when to stop. Equal on all ranks, because all of them pass it the same values."""

    STATE = ("best", "best_step", "num_without")

    def __init__(self, config: EarlyStopping) -> None:
        self._config = config
        self._reset_best()

    def _reset_best(self) -> None:
        """Discard the best value of the metric, and the evaluations since then."""
        self.best: float | None = None
        """Best value so far; None before the first finite value."""
        self.best_step = -1
        """Step trained next from the state with the best value."""
        self.num_without = 0
        """Number of evaluations without improvement since then."""

    @property
    def should_stop(self) -> bool:
        """Return whether the evaluations without improvement have reached the patience setting."""
        return self.num_without >= self._config.patience

    def update(self, value: float, *, step: int) -> bool:
        """Add a value of the metric in the settings, and return whether it is a new best.

        A non-finite value does not count as an improvement, in either mode.

        Args:
            value: the metric.
            step: the step that is trained next from the state that was evaluated.
        """
        if not self._improves(value):
            self.num_without += 1
            return False
        self.best, self.best_step, self.num_without = value, step, 0
        return True

    def _improves(self, value: float) -> bool:
        """Return whether a value of the metric is better than the best so far."""
        if not math.isfinite(value):
            return False
        if self.best is None:
            return True
        gain = self.best - value if self._config.mode == "min" else value - self.best
        # The second test is for a delta of 0, and for a delta lost in rounding at a large value.
        return gain >= self._config.min_delta and gain > 0.0

    def why(self, value: float, *, step: int) -> str:
        """Return the sentence on why the early-stopping settings end the run at this value."""
        config = self._config
        best = "had no finite value"
        if self.best is not None:
            by = f" by {config.min_delta:g}" if config.min_delta else ""
            best = f"was best at step {self.best_step} ({self.best:g}) and has not improved{by}"
        return (
            f"{config.metric} {best} in {self.num_without} evaluations (patience "
            f"{config.patience}, mode {config.mode}); it is {value:g} at step {step}: the run ends"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values, with metric and mode from the settings."""
        return {"metric": self._config.metric, "mode": self._config.mode, **super().state_dict()}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Continue from a state; start over without one, or if its metric or mode differs.

        Patience and delta are the current settings: a higher patience continues the training.
        """
        self._reset_best()
        ours = {"metric": self._config.metric, "mode": self._config.mode}
        if not state or {key: state.get(key) for key in ours} != ours:
            return
        super().load_state_dict(state)
