"""Layers that leave their own course: gradients, updates, activations.

Each layer's trend is a running mean of logarithms with bounded steps (Huber's M-estimator of
location, 1964, as a stochastic approximation): two numbers per layer, which no single value can
move far.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar

from msgspec import Meta

from trainvitals.config import AtLeastOne, Settings
from trainvitals.detect.fleet.base import (
    INFINITY,
    ConditionEpisode,
    LastingWatcher,
    MergedStep,
    Watcher,
    clamped_exp,
    upper_median,
)
from trainvitals.records import Finding
from trainvitals.stateful import StatefulRow, state_table

MOST_LAYERS = 4096
"""Maximum layers followed; further layers are not judged."""
_SIGMA_PER_MEAN_DEVIATION = 1.2533
"""Standard deviations per mean absolute deviation for normal samples."""
_LEAST_SPREAD = 0.05


class LayerTrend(StatefulRow):
    """A layer's trend: center and mean deviation of the logarithm of a number."""

    __slots__ = ("center", "count", "level", "spread", "streak")
    STATE = ("count", "center", "spread", "streak", "level")

    def __init__(self) -> None:
        self.count = 0
        self.center = 0.0
        self.spread = 0.0
        self.streak = 0
        """Samples in a row that were outside."""
        self.level = 0.0
        """The center that growth is counted from."""

    def push(self, common: float, deviation: float, rate: float) -> None:
        """Move the layer's trend by ``common``, shared by all layers, and by ``deviation``."""
        self.count += 1
        weight = 1.0 / self.count
        if weight < rate:
            weight = rate
        spread = self.spread
        if self.count > 8:
            bound = 3.0 * (spread if spread > _LEAST_SPREAD else _LEAST_SPREAD)
            deviation = bound if deviation > bound else -bound if deviation < -bound else deviation
        self.center += weight * (common + deviation)
        self.spread = spread + weight * (abs(deviation) - spread)

    def restart_at(self, value: float) -> None:
        """Start the layer's trend at a value, without earlier samples."""
        self.count, self.center, self.spread, self.streak = 1, value, 0.0, 0


class LayerConfig(Settings, frozen=True, kw_only=True):
    """When a layer stands out among the others. Rows of layers come every 10th step by default."""

    section = "layers"
    ascending: ClassVar[tuple[tuple[str, ...], ...]] = (
        ("weak_ratio", "strong_ratio"),
        ("persistence", "accept_after"),
    )

    strong_ratio: Annotated[float, Meta(le=1e9)] = 30.0
    """Multiple of the layer's own trend, after dividing out what all layers share, that is reported
    at once. The total norm of clean GPT-2 runs shows single steps at 5 to 15 times."""
    weak_ratio: Annotated[float, Meta(ge=1.5, le=1e6)] = 6.0
    """The same, reported after ``persistence`` samples in a row."""
    persistence: AtLeastOne = 3
    """Samples in a row above ``weak_ratio`` that are reported."""
    sigmas: Annotated[float, Meta(ge=1.0, le=1e3)] = 8.0
    """The layer must also deviate by this many of its own standard deviations."""
    least_share: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.1
    """Share of the total norm that the layer must have; smaller layers are not reported."""
    warm_up: Annotated[int, Meta(ge=4)] = 20
    """Samples of a layer before it is judged."""
    rate: Annotated[float, Meta(ge=1e-4, le=0.5)] = 1 / 16
    """Weight of a new sample in the trend."""
    accept_after: int = 30
    """Samples in a row that stand out, after which they become the layer's new trend."""
    clear_after: AtLeastOne = 3
    """Samples in which no layer stands out, after which the problem is over and can be reported
    again."""


LEAST_LAYERS = 4
"""With fewer layers, there are no others to compare one with."""


class LayerOutlierWatcher(LastingWatcher):
    """Names the layer that deviates from its own trend while the others follow theirs.

    What all layers share, such as the effect of a heavy batch or a new learning rate, is removed
    first: the median deviation from their trends.
    """

    label = ""
    STATE = (state_table("_courses", lambda _: LayerTrend()), "_episode")

    def __init__(self, config: LayerConfig | None = None) -> None:
        self._config = config or LayerConfig()
        super().__init__(self._config.clear_after)
        self._weak = math.log(self._config.weak_ratio)
        self._courses: dict[str, LayerTrend] = {}

    def _layer_values(self, layers: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
        """Return the judged number of every layer that has one above zero."""
        raise NotImplementedError

    def _judge(self, merged: MergedStep) -> tuple[Finding, ...]:
        """Judge a merged step's layers: find the one that leaves its own trend."""
        if not merged.layers:
            return ()
        numbers = self._layer_values(merged.layers)
        courses, warm_up = self._courses, self._config.warm_up
        departures: list[tuple[str, LayerTrend, float]] = []
        moved: list[float] = []
        for layer, value in numbers.items():
            course = courses.get(layer)
            if course is None:
                if len(courses) < MOST_LAYERS:
                    courses[layer] = course = LayerTrend()
                    course.restart_at(math.log(value))
                continue
            away = math.log(value) - course.center
            departures.append((layer, course, away))
            if course.count >= warm_up:
                moved.append(away)
        enough = len(moved) >= LEAST_LAYERS
        common = upper_median(moved) if enough else 0.0
        outliers, weak, rate = [], self._weak, self._config.rate
        for layer, course, away in departures:
            relative = away - common
            if (
                relative > weak
                and enough
                and course.count >= warm_up
                and self._stands_out(course, relative)
            ):
                outliers.append((relative, layer))
                course.center += rate * common
                self._extend_streak(course, away)
            else:
                course.streak = 0
                course.push(common, relative, rate)
        return self._report_outliers(merged.step, numbers, outliers) if enough else ()

    def _stands_out(self, course: LayerTrend, deviation: float) -> bool:
        """Return whether a value above the weak ratio also exceeds this layer's own noise."""
        sigma = _SIGMA_PER_MEAN_DEVIATION * max(course.spread, _LEAST_SPREAD)
        return deviation > self._config.sigmas * sigma

    def _extend_streak(self, course: LayerTrend, away: float) -> None:
        """Count a layer's outlier; accept a long streak as its new trend."""
        course.streak += 1
        if course.streak > self._config.accept_after:
            course.restart_at(course.center + away)

    def _report_outliers(
        self, step: int, numbers: Mapping[str, float], outliers: list[tuple[float, str]]
    ) -> tuple[Finding, ...]:
        """Return the finding about the layer that stands out most, once."""
        total = math.hypot(*numbers.values())
        strong = math.log(self._config.strong_ratio)
        confirmed = [
            (excess, layer)
            for excess, layer in outliers
            if (excess > strong or self._courses[layer].streak >= self._config.persistence)
            and numbers[layer] >= self._min_value(total)
        ]
        if not self._episode.begins(bool(confirmed)):
            return ()
        excess, layer = max(confirmed)
        course = self._courses[layer]
        others = f"; {len(confirmed) - 1} more layers are unusual" if len(confirmed) > 1 else ""
        usual = clamped_exp(course.center)
        value, limit = numbers[layer], usual * self._config.weak_ratio
        reason = (
            f"{self.label} of layer {layer} is {value:.4g}: {clamped_exp(excess):.3g}x its usual "
            f"{usual:.4g}, after dividing out what all {len(numbers)} layers share{others}"
        )
        return self._report(step, reason, value=value, limit=limit)

    def _min_value(self, total: float) -> float:
        """Return the smallest value of a layer that is reported."""
        return self._config.least_share * total


_HAS_RETURNED = -1.0
"""Level of a layer whose gradient was 0 for a while: an expert without tokens, a skipped block."""


_LEAST_SAMPLES = 4
"""Gradients above 0 without which a layer that stays at 0 is not reported."""


class LayerGradientWatcher(LayerOutlierWatcher):
    """Finds the layer whose gradients alone explode, or become exactly 0 and stay so."""

    name = "layer_gradient"
    label = "the gradient norm"

    @property
    def goes_on(self) -> bool:
        """Return whether a reported layer's gradients still explode, or are still 0."""
        courses = self._courses.values()
        return super().goes_on or any(-c.streak >= self._zeros_needed(c) for c in courses)

    def _judge(self, merged: MergedStep) -> tuple[Finding, ...]:
        """Judge the gradients of a merged step's layers: exploded, or 0 for long."""
        zeros = [
            (layer, course)
            for layer, columns in merged.layers.items()
            if (course := self._courses.get(layer)) is not None
            and self._stays_zero(course, columns.get("grad_norm"), merged.step)
        ]
        findings = super()._judge(merged)
        # If all are 0, the loss does not depend on the model: the ranks report that themselves.
        if not zeros or len(zeros) > len(merged.layers) // 2:
            return findings
        layer, course = zeros[0]
        others = f"; so are {len(zeros) - 1} more layers" if len(zeros) > 1 else ""
        first = int(course.level)
        reason = (
            f"the gradient of layer {layer} is exactly 0 since step {first}, usually "
            f"{clamped_exp(course.center):.4g}: the layer no longer learns{others}"
        )
        zero = self._report(merged.step, reason, value=0.0, onset_step=first)
        return findings + zero

    def _stays_zero(self, course: LayerTrend, value: float | None, step: int) -> bool:
        """Add a layer's gradient norm; return whether its streak of zeros is now reported."""
        if value is None or course.level == _HAS_RETURNED:
            return False
        if value != 0.0:
            if 0 < -course.streak < self._zeros_needed(course):
                course.level = _HAS_RETURNED
            return False
        if course.count < _LEAST_SAMPLES:
            return False
        if course.streak >= 0:
            course.streak, course.level = 0, float(step)
        course.streak -= 1
        return -course.streak == self._zeros_needed(course)

    def _zeros_needed(self, course: LayerTrend) -> int:
        """Return the zeros in a row that are reported: one more for each sample before warm-up."""
        return self._config.persistence + max(0, self._config.warm_up - course.count)

    def _layer_values(self, layers: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
        """Return the gradient norm of every layer with a positive, finite one."""
        return {
            layer: value
            for layer, columns in layers.items()
            if (value := columns.get("grad_norm")) is not None and 0.0 < value < INFINITY
        }


class UpdateRatioWatcher(LayerOutlierWatcher):
    """Finds the layer whose updates become too large for its weights.

    The usual ratio is about 1e-3 per step (Karpathy's rule of thumb), but each layer is compared
    with its own trend: norms, biases and new heads differ. marin saw updates spike before the loss,
    lower layers first.
    """

    name = "update_ratio"
    label = "the ratio of update norm to weight norm"

    def _layer_values(self, layers: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
        """Return the ratio of update to weights of every layer with a finite one."""
        return {layer: ratio for layer, ratio in _update_ratios(layers) if ratio < INFINITY}

    def _min_value(self, total: float) -> float:
        """Return 0 as a layer's smallest value: a ratio is not a share of a total."""
        return 0.0  # a ratio is not a share of a total


def _update_ratios(layers: Mapping[str, Mapping[str, float]]) -> Iterator[tuple[str, float]]:
    """Yield each layer and its ratio of update norm to weight norm."""
    for layer, columns in layers.items():
        update, weight = columns.get("update_norm"), columns.get("weight_norm")
        if update is None or weight is None:
            continue
        if 0.0 < update < INFINITY and 0.0 < weight < INFINITY and (ratio := update / weight) > 0.0:
            yield layer, ratio


COLLAPSE = "activation_collapse"
"""Kind of the findings about activations that collapse."""
_GATED = 2
"""Times that a module was dead and came back, from which on it counts as switched: an expert
without any token of the batch, or a randomly omitted block (stochastic depth). The size of its
output then depends on the number of tokens, and an output of 0 has no meaning."""


class DeadFeatureTrend(StatefulRow):
    """A module's share of dead features over time."""

    __slots__ = ("count", "level", "returns", "streak")
    STATE = ("count", "level", "streak", "returns")

    def __init__(self) -> None:
        self.count = 0
        self.level = 0.0
        """The share after warm-up."""
        self.streak = 0
        """Samples in a row in which it is dead."""
        self.returns = 0

    @property
    def is_gated(self) -> bool:
        """Return whether a layer's dead features come and go, as those of an expert."""
        return self.returns >= _GATED


class ActivationConfig(Settings, frozen=True, kw_only=True):
    """How far a module's output may grow or fall. Rows of layers come every 10th step."""

    section = "activations"

    rms_ratio: Annotated[float, Meta(ge=1.5, le=1e9)] = 10.0
    """Reported growth, or fall, of the root mean square: one order of magnitude."""
    max_ratio: Annotated[float, Meta(ge=1.5, le=1e9)] = 100.0
    """The same for the largest absolute value: two orders, as single features of healthy language
    models grow that much (Sun et al., Massive Activations in Large Language Models, 2024)."""
    warm_up: Annotated[int, Meta(ge=4)] = 50
    """Samples after which a module's level becomes the baseline for growth."""
    persistence: AtLeastOne = 3
    """Samples in a row above the ratio; a single batch is not enough."""
    dead_ratio: Annotated[float, Meta(ge=0.5, le=1.0)] = 0.9
    """Reported share of dead features, of a module in which at most half as many were dead."""
    rate: Annotated[float, Meta(ge=1e-4, le=0.5)] = 1 / 16
    """Weight of a new sample in the trend."""
    clear_after: AtLeastOne = 50
    """Samples with no module above the ratio, after which growth can be reported again."""


class ActivationWatcher(Watcher):
    """Finds activations that grow by orders of magnitude over their own baseline, or collapse.

    They collapse where the root mean square falls as far as it may grow, or nearly all features
    become dead: 0 for every element of the batch. Once reported, the level reached becomes the new
    baseline. Of a module that is dead in some batches and not in others (an expert, stochastic
    depth) only the largest magnitude is judged.
    """

    name = "activation"
    STATE = (
        state_table("_courses", lambda _: LayerTrend()),
        state_table("_dead", lambda _: DeadFeatureTrend()),
        "_episode",
        "_collapse",
    )
    MAY_LACK = True
    """States of an earlier version contain no collapse."""

    def __init__(self, config: ActivationConfig | None = None) -> None:
        super().__init__()
        self._config = config or ActivationConfig()
        self._columns = (
            ("activation_rms", "root mean square", math.log(self._config.rms_ratio)),
            ("activation_max", "largest magnitude", math.log(self._config.max_ratio)),
        )
        self._courses: dict[str, LayerTrend] = {}
        """By layer and column, separated by a colon."""
        self._dead: dict[str, DeadFeatureTrend] = {}
        """By layer."""
        self._episode = ConditionEpisode(self._config.clear_after)
        self._collapse = ConditionEpisode(self._config.clear_after)

    def _judge(self, merged: MergedStep) -> tuple[Finding, ...]:
        """Judge the activations of a merged step's layers: growth, collapse, dead features."""
        if not merged.layers:
            return ()
        is_judged, grown, fallen, dead = False, [], [], []
        for layer, values in merged.layers.items():
            share = values.get("activation_dead_ratio")
            if share is not None and 0.0 <= share <= 1.0:
                before = self._add_dead_share(layer, share)
                is_judged = is_judged or before is not None
                if before is not None and before >= 0.0:
                    dead.append((share, layer, before))
            course = self._dead.get(layer)
            is_gated = course is not None and course.is_gated
            for column, label, limit in self._columns:
                value, falls = values.get(column), column == "activation_rms"
                if value is None or not 0.0 < value < INFINITY or (falls and is_gated):
                    continue
                key = f"{layer}:{column}"
                growth = self._add_layer_value(key, math.log(value), limit, falls=falls)
                is_judged = is_judged or growth is not None
                if growth and growth > 0:
                    grown.append((growth, label, layer, value))
                elif growth:
                    fallen.append((-growth, layer, value))
        if not is_judged:
            return ()
        growth_findings = self._growth_findings(merged.step, grown)
        return growth_findings + self._collapse_findings(merged.step, fallen, dead)

    def _growth_findings(
        self, step: int, grown: list[tuple[float, str, str, float]]
    ) -> tuple[Finding, ...]:
        """Report the layer whose activations grew most over their own baseline."""
        if not self._episode.begins(bool(grown)):
            return ()
        growth, label, layer, value = max(grown)
        limits = {named: limit for _, named, limit in self._columns}
        others = f"; {len(grown) - 1} more grew as much" if len(grown) > 1 else ""
        reason = (
            f"the output of {layer} has a {label} of {value:.4g}, {clamped_exp(growth):.3g}x the "
            f"{value / clamped_exp(growth):.4g} after warm-up{others}"
        )
        limit = value * clamped_exp(limits[label] - growth)
        return self._report(step, reason, value=value, limit=limit)

    def _collapse_findings(
        self,
        step: int,
        fallen: list[tuple[float, str, float]],
        dead: list[tuple[float, str, float]],
    ) -> tuple[Finding, ...]:
        """Report the layer whose activations collapsed, or whose features are dead."""
        if not self._collapse.begins(bool(fallen or dead)):
            return ()
        num_more = len({layer for _, layer, _ in (*fallen, *dead)}) - 1
        others = f"; {num_more} more collapsed" if num_more else ""
        if dead:
            share, layer, before = max(dead)
            reason = (
                f"{100 * share:.0f} % of the features of {layer} are dead (0 for the whole batch), "
                f"{100 * before:.0f} % after warm-up{others}"
            )
            limit = self._config.dead_ratio
            return self._report(step, reason, kind=COLLAPSE, value=share, limit=limit)
        fall, layer, value = max(fallen)
        level = value * clamped_exp(fall)
        reason = (
            f"the output of {layer} has a root mean square of {value:.4g}, a "
            f"{clamped_exp(fall):.3g}th of the {level:.4g} after warm-up{others}"
        )
        limit = level / self._config.rms_ratio
        return self._report(step, reason, kind=COLLAPSE, value=value, limit=limit)

    def _get_or_create_trend(self, key: str, value: float) -> LayerTrend | None:
        """Return the trend of a layer's activations; None if it only starts, or at the maximum."""
        course = self._courses.get(key)
        if course is None and len(self._courses) < len(self._columns) * MOST_LAYERS:
            self._courses[key] = begun = LayerTrend()
            begun.restart_at(value)
        return course

    def _add_dead_share(self, layer: str, share: float) -> float | None:
        """Add a layer's share of dead features; return the earlier share if reported, or -1.

        None while the earlier share is unknown.
        """
        course = self._dead.get(layer)
        if course is None:
            if len(self._dead) >= MOST_LAYERS:
                return None
            course = self._dead[layer] = DeadFeatureTrend()
        config = self._config
        is_dead = share >= config.dead_ratio
        is_warm = course.count >= config.warm_up
        if course.streak and not is_dead:
            # In a new run no feature has died yet, so a single return is sufficient.
            course.returns = min(course.returns + 1, _GATED) if is_warm else _GATED
        course.streak = course.streak + 1 if is_dead else 0
        if not is_warm:
            course.count += 1
            course.level += max(1.0 / course.count, config.rate) * (share - course.level)
            if is_dead and course.count == config.warm_up:
                course.level = share  # already dead
            return None
        is_told = course.streak >= config.persistence and not course.is_gated
        if not is_told or course.level > config.dead_ratio / 2:
            return -1.0
        before, course.level, course.streak = course.level, share, 0
        return before

    def _add_layer_value(
        self, key: str, value: float, limit: float, *, falls: bool
    ) -> float | None:
        """Add a layer's activation; return its growth if reported, 0 if not, None if unknown."""
        course = self._get_or_create_trend(key, value)
        if course is None:
            return None
        course.push(0.0, value - course.center, self._config.rate)
        if course.count <= self._config.warm_up:
            course.level = course.center
            return None
        growth = value - course.level
        if growth > limit:
            course.streak = max(course.streak, 0) + 1
        elif falls and growth < -limit:
            course.streak = min(course.streak, 0) - 1  # below 0: rows in a row below the limit
        else:
            course.streak = 0
        if abs(course.streak) < self._config.persistence:
            return 0.0
        course.restart_at(value)
        course.count, course.level = self._config.warm_up, value
        return growth
