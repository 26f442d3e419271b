"""A gradient norm that rises for several steps: weak evidence that persists.

Clean runs show single steps of 5 to 15 times the usual norm while the loss does not move. What
ends in a spike rises for some steps before: BLOOM-176B's norm went .242 .947 2.39 15.9 145 960.
Neither .947 nor 2.39 is an outlier by itself; one after the other they are. So evidence is added
up, as in a cumulative sum chart (Page, 1954), each step's share bounded: one step alone is never
enough.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any

from trainvitals.detect.protocol import Detector, is_clean
from trainvitals.errors import ConfigError
from trainvitals.records import Finding, StepRecord
from trainvitals.windows import RobustWindow

_SIGMA_ABOVE = 0.16
"""Normal samples are above one deviation this often."""
_RARE = 0.02
_RARE_SIGMAS = 4.0
"""Where one step in 50 lies far off, this run's steps do: a quarter of that is a deviation."""
_COURSE = 9
_FALLS = 0.02
_HIGHER = math.log(1.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class BurstConfig:
    """When steps in a row are evidence enough together."""

    window: int = 64
    """Steps kept as the reference."""
    warm_up: int = 20
    """Steps needed before anything is said."""
    deviation: float = 0.3
    """Smallest standard deviation assumed of the logarithm of the norm: 35 %."""
    allowance: float = 3.0
    """Deviations a step may be above the median without being evidence."""
    most: float = 8.0
    """Deviations that one step counts for at most, however far it is."""
    enough: float = 6.0
    """Sum of what is beyond the allowance at which it is told; above ``most - allowance``, so that
    it takes two steps."""
    accept_after: int = 40
    """Steps in a row beyond the allowance after which they enter the reference."""

    recurs: int = 5
    """Bursts within ``recurs_within`` steps after which they are told no more, up to 1.5 times the
    highest: hard batches that come one after the other."""
    recurs_within: int = 3000
    """See ``recurs``."""

    def __post_init__(self) -> None:
        if not 8 <= self.warm_up <= self.window:
            raise ConfigError(
                f"burst.warm_up is {self.warm_up}; it must be 8 to burst.window ({self.window})"
            )
        if self.deviation <= 0.0 or self.allowance <= 0.0 or self.accept_after < 1:
            raise ConfigError(
                f"burst.deviation is {self.deviation}, burst.allowance {self.allowance}, "
                f"burst.accept_after {self.accept_after}; they must be above 0"
            )
        if self.recurs < 1 or self.recurs_within < 1:
            raise ConfigError(
                f"burst.recurs is {self.recurs}, burst.recurs_within {self.recurs_within}; they "
                "must be at least 1"
            )
        if not self.allowance < self.most < self.allowance + self.enough:
            raise ConfigError(
                f"burst.most is {self.most}; it must be above burst.allowance ({self.allowance}) "
                f"and by less than burst.enough ({self.enough}): one step alone is not enough"
            )


BURST_DEFAULTS = BurstConfig()


class BurstDetector(Detector):
    """Tells, once per burst, of a gradient norm that rises over several steps.

    Loss and norm are judged together: while the loss falls, a growing norm is a run that begins to
    learn, and enters the reference.
    """

    name = "grad_norm_burst"

    def __init__(self, config: BurstConfig | None = None) -> None:
        self._config = config or BURST_DEFAULTS
        self._window = RobustWindow(self._config.window)
        self._deviations = RobustWindow(self._config.window)
        self._course = RobustWindow(_COURSE)
        self._bursts: deque[list[float]] = deque(maxlen=self._config.recurs + 1)
        """When the last bursts were told, by the clock, and how high above the median."""
        self._clock = 0
        self._held: list[float] = []
        self._sum = 0.0
        self._onset = -1
        self._told = False

    def update(self, record: StepRecord, clean: bool | None = None) -> tuple[Finding, ...]:
        """Take one step in and return what is to be said about it.

        ``clean`` says whether it may enter the reference; None: by the record itself.
        """
        if clean is None:
            clean = is_clean(record)
        falls = self._loss_falls(record)
        norm = record.grad_norm
        if norm is None or not math.isfinite(norm) or norm <= 0.0:
            return ()
        self._clock += 1
        if falls or len(self._window) < self._config.warm_up:
            self._end()
            if clean:
                self._push(norm)
            return ()
        beyond = self._distance(norm) - self._config.allowance
        if beyond <= 0.0:
            self._end()  # two spikes with a usual step between them are two spikes
            if clean:
                self._push(norm)
            return ()
        return self._evidence(record, norm, beyond, clean)

    def _loss_falls(self, record: StepRecord) -> bool:
        loss = record.loss
        if loss is None or not math.isfinite(loss):
            return False
        is_full = len(self._course) == _COURSE
        falls = is_full and loss < self._course.median() - _FALLS * abs(self._course.median())
        if not record.skipped:
            self._course.push(loss)
        return falls

    def _distance(self, norm: float) -> float:
        """Return how far the norm is above the median, in deviations of its logarithm."""
        middle = self._deviations.median()
        deviation = max(
            self._config.deviation,
            self._deviations.upper(_SIGMA_ABOVE) - middle,
            self._deviations.upper(_RARE) / _RARE_SIGMAS,
        )
        return (math.log(norm) - math.log(self._window.median()) - middle) / deviation

    def _evidence(
        self, record: StepRecord, norm: float, beyond: float, clean: bool
    ) -> tuple[Finding, ...]:
        config = self._config
        if self._onset < 0:
            self._onset = record.step
        share = min(beyond, config.most - config.allowance)
        self._sum = min(self._sum + share, 2.0 * config.enough)
        if clean:
            self._held.append(norm)
        usual = self._window.median()
        if len(self._held) >= config.accept_after:
            for held in self._held:
                self._push(held)
            self._end()
        if self._sum < config.enough or self._told:
            return ()
        self._told = True
        if self._recurs(math.log(norm / usual)):
            return ()
        finding = Finding(
            kind="grad_explosion",
            level="advisory",
            step=record.step,
            detector=self.name,
            reason=f"the gradient norm rises since step {self._onset}: {norm:.4g} is "
            f"{norm / usual:.3g} times its median {usual:.4g}, and the steps before were high too",
            value=norm,
            limit=usual,
            onset_step=self._onset,
            cause="grad_norm_burst",
        )
        return (finding,)

    def _recurs(self, distance: float) -> bool:
        """Note a burst; say whether bursts like it come back again and again."""
        config, clock = self._config, self._clock
        earlier = [
            height for begin, height in self._bursts if clock - begin <= config.recurs_within
        ]
        self._bursts.append([clock, distance])
        return len(earlier) >= config.recurs and distance <= max(earlier) + _HIGHER

    def _end(self) -> None:
        self._held.clear()
        self._sum, self._onset, self._told = 0.0, -1, False

    def _push(self, norm: float) -> None:
        if len(self._window):
            self._deviations.push(math.log(norm) - math.log(self._window.median()))
        else:
            self._deviations.push(0.0)
        self._window.push(norm)

    def accept(self, norms: list[float]) -> None:
        """Begin anew from the norms of a level that the policy accepted."""
        self._end()
        for norm in norms:
            if math.isfinite(norm) and norm > 0.0:
                self._window.push(norm)

    def rebaseline(self) -> None:
        """Forget the reference: a planned or accepted change."""
        self._window.clear()
        self._deviations.clear()
        self._course.clear()
        self._bursts.clear()
        self._end()

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON types."""
        return {
            "window": self._window.values(),
            "deviations": self._deviations.values(),
            "course": self._course.values(),
            "bursts": [list(burst) for burst in self._bursts],
            "clock": self._clock,
            "held": list(self._held),
            "sum": self._sum,
            "onset": self._onset,
            "told": self._told,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on as the detector that gave ``state``."""
        self._window.restore(state["window"])
        self._deviations.restore(state["deviations"])
        self._course.restore(state["course"])
        self._bursts.clear()
        self._bursts.extend([float(number) for number in burst] for burst in state["bursts"])
        self._clock = int(state["clock"])
        self._held = [float(norm) for norm in state["held"]]
        self._sum, self._onset = float(state["sum"]), int(state["onset"])
        self._told = bool(state["told"])
