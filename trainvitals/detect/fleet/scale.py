"""The gradient scaler of float16: a scale that collapses, and overflows that are too many."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainvitals.detect.fleet.base import INFINITY, Episode, Watcher, number, require, tell
from trainvitals.detect.merged import MergedStep
from trainvitals.records import OVERFLOW, Finding

_WINDOW = 100
_ALL = (1 << _WINDOW) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScaleConfig:
    """What a gradient scaler does in order: one overflow in about 2000 steps."""

    min_scale: float = 1.0
    """Below this the gradients are made smaller, and float16's range is used up from the wrong
    side. ``torch.amp.GradScaler`` begins at 65536 and is 16 halvings away."""
    overflows_in_row: int = 5
    """Overflows one after the other that are too many. The scaler tries a doubled scale every 2000
    steps (its ``growth_interval``), and one halving answers that."""
    overflow_ratio: float = 0.2
    """Share of the last 100 steps that may overflow."""
    warmup_rows: int = 50
    """Steps in a row without overflow that show that the scaler has found its scale. Overflows
    before are its search: 2**32 takes some 20 halvings."""
    clear_after: int = 100
    """Steps without the anomaly after which it would be told again."""

    def __post_init__(self) -> None:
        require("loss_scale", "min_scale", self.min_scale, least=0.0, most=INFINITY)
        require("loss_scale", "overflows_in_row", self.overflows_in_row, least=2, most=_WINDOW)
        require("loss_scale", "overflow_ratio", self.overflow_ratio, least=0.01, most=1.0)
        require("loss_scale", "warmup_rows", self.warmup_rows, least=1, most=INFINITY)
        require("loss_scale", "clear_after", self.clear_after, least=1, most=INFINITY)


class LossScaleWatcher(Watcher):
    """Finds a collapsing loss scale and a rate of overflows that costs training.

    An overflow is a bit of ``verdict``, or a growing ``overflow_steps``, or a halved scale where
    neither is there. Without a loss scale it abstains.
    """

    name = "loss_scale"

    def __init__(self, config: LossScaleConfig | None = None) -> None:
        super().__init__()
        self._config = config or LossScaleConfig()
        self._scale: float | None = None
        self._count: float | None = None
        self._bits = 0
        self._rows = 0
        self._in_row = 0
        self._calm = 0
        self._is_settled = False
        self._before = 0.0
        clear = self._config.clear_after
        self._low, self._collapse, self._rate = Episode(clear), Episode(clear), Episode(clear)

    @property
    def goes_on(self) -> bool:
        """Whether what was told as it began still holds."""
        return self._low.on or self._collapse.on or self._rate.on

    def _restarted(self, merged: MergedStep) -> None:
        """Forget the search's state: a new process begins with the scaler's first scale."""
        self._scale = self._count = None
        self._bits = self._rows = self._in_row = self._calm = 0
        self._is_settled = False

    def _judge(self, merged: MergedStep) -> tuple[Finding, ...]:
        scale = number(merged.run.get("loss_scale"))
        if scale is None:
            return ()
        overflowed = self._overflowed(merged, scale)
        if overflowed and not self._in_row:
            self._before = scale if self._scale is None else max(scale, self._scale)
        self._scale = scale
        self._in_row = min(self._in_row + 1, _WINDOW) if overflowed else 0
        self._calm = 0 if overflowed else self._calm + 1
        if not self._is_settled and self._calm >= self._config.warmup_rows:
            self._is_settled, self._rows, self._bits = True, 0, 0
        self._bits = (self._bits << 1 | overflowed) & _ALL
        self._rows = min(self._rows + 1, _WINDOW)
        return self._found(merged.step, scale)

    def _overflowed(self, merged: MergedStep, scale: float) -> bool:
        verdict = merged.run.get("verdict")
        if isinstance(verdict, int):
            return bool(verdict & OVERFLOW)
        count = number(merged.run.get("overflow_steps"))
        if count is not None:
            before, self._count = self._count, count
            return before is not None and count > before
        return self._scale is not None and scale < 0.6 * self._scale

    def _found(self, step: int, scale: float) -> tuple[Finding, ...]:
        config, findings = self._config, []
        if self._low.begins(scale < config.min_scale):
            findings.append(
                tell(
                    self.name,
                    step,
                    f"the loss scale is {scale:.4g}, below {config.min_scale:g}: gradients are "
                    "too large for float16 even unscaled",
                    cause="loss_scale_collapse",
                    value=scale,
                    limit=config.min_scale,
                )
            )
        collapses = self._is_settled and self._in_row >= config.overflows_in_row
        if self._collapse.begins(collapses) and not findings:
            findings.append(
                tell(
                    self.name,
                    step,
                    f"{self._in_row} overflows in a row: the loss scale fell from "
                    f"{self._before:.4g} to {scale:.4g}; one at a time, every 2000 steps or so, "
                    "is normal",
                    cause="loss_scale_collapse",
                    value=float(self._in_row),
                    limit=float(config.overflows_in_row),
                    onset_step=step - self._in_row + 1,
                )
            )
        findings.extend(self._too_often(step))
        return tuple(findings)

    def _too_often(self, step: int) -> tuple[Finding, ...]:
        """Judge the share of the last 100 steps; before there are so many, that of those few."""
        num = self._bits.bit_count()
        ratio, limit = num / _WINDOW, self._config.overflow_ratio
        if self._rows < _WINDOW and not (self._is_settled and ratio > limit):
            return ()
        if not self._rate.begins(ratio > limit):
            return ()
        return (
            tell(
                self.name,
                step,
                f"{num} of the last {_WINDOW} steps overflowed and were not applied; "
                f"{limit:.0%} is the limit, 1 in 2000 is normal",
                cause="overflow_rate",
                value=ratio,
                limit=limit,
                onset_step=max(0, step - self._bits.bit_length() + 1),
            ),
        )

    def _state(self) -> dict[str, Any]:
        return {
            "scale": self._scale,
            "count": self._count,
            "bits": f"{self._bits:x}",
            "rows": [self._rows, self._in_row, self._calm, int(self._is_settled)],
            "before": self._before,
            "episodes": [e.state() for e in (self._low, self._collapse, self._rate)],
        }

    def _restore(self, state: dict[str, Any]) -> None:
        self._scale, self._count = state["scale"], state["count"]
        self._bits, self._before = int(state["bits"], 16), float(state["before"])
        self._rows, self._in_row, self._calm, settled = (int(n) for n in state["rows"])
        self._is_settled = bool(settled)
        for episode, kept in zip(
            (self._low, self._collapse, self._rate), state["episodes"], strict=True
        ):
            episode.restore(kept)
