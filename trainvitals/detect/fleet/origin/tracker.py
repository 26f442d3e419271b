"""Origin of a bad step: the series that left its own quiet range first.

Every series is compared with its own last 200 quiet steps: it is out if it leaves the median of its
last 20 values by more than 8 robust sigmas *and* by 1.5 times its largest deviation in the
reference. A series that is out opens an episode, and during an episode nothing enters the
reference: a problem must not become the reference. The first step of an episode is its onset. If
several series leave in one step, the cause comes before its effect: settings, data wait, external
writes to weights and optimizer state, non-finite values in the order of forward, losses,
activations, gradients, updates.

Onsets are recorded when the steps arrive. A later search, on request, got half of the names wrong:
by then most series that are out are a consequence.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from trainvitals.detect.fleet.base import MergedStep, finite, number, step_seconds
from trainvitals.detect.fleet.origin.high_loss import (
    HIGH_STEPS,
    HighLoss,
    HighLossStep,
    find_second_data,
)
from trainvitals.detect.fleet.origin.onsets import (
    DAMAGED_WEIGHT,
    INFERRED_WEIGHTS,
    Onset,
    OnsetEpisode,
    SeriesOutlier,
    Subject,
    build_onset,
)
from trainvitals.detect.fleet.origin.reference import (
    FEW_RANKS,
    LAG,
    REFERENCE,
    SIGMAS,
    Floats,
    SeriesArrayReference,
    SeriesReference,
    WriteRatioPeaks,
    logarithm,
    logarithms,
    medians_of_others,
    sorted_median,
)
from trainvitals.records import HUGE_WEIGHT, RATE_DECLARED

GUARD = 3
"""A series that is out within this many judged steps may have moved before it was observed."""
LEAST_LAYERS = 4
"""With fewer layers, there are no others to compare one with."""
MOST_LAYERS = 4096
MOST_RANKS = 1024
"""Layers and ranks above these numbers are not followed: this bounds the memory."""
MOST_ONSETS = 128
"""Number of latest episodes kept."""
_SETTING = 1.5
"""Ratio from which a change of a setting is deliberate, not scheduled."""
_WARM = 50
"""Steps before a learning rate is judged: warm-up multiplies it."""
_SHIFT = math.log(3.0)
"""Least change of a layer's gradient norm relative to the other layers, as a logarithm: the shares
of healthy layers drift."""
_JUMP = math.log(5.0)
"""Least rise of gradient norms in one step, as a logarithm, that shows a second problem."""
_NORMS_IN = 3
"""Gradient norms in range after which an earlier one out of it is no longer the same change."""
_LOGARITHM = 1e-3
"""Smallest sigma of a logarithm: a tenth of a percent."""
_FLOORS = {
    "grad_norm": _LOGARITHM, "activation_rms": _LOGARITHM, "update_norm": _LOGARITHM,
    "weight_norm": 1e-7, "rank_loss": 1e-4, "loss": 1e-4, "others": 1e-4, "data_wait_seconds": 0.05,
    "rank_grad_norm": _LOGARITHM, "total": _LOGARITHM, "grad_share": _LOGARITHM,
}  # fmt: skip
_SETTINGS = ("max_norm", "weight_decay")
_WRITES: tuple[tuple[str, float, Subject], ...] = (
    ("weight_written_ratio", 2, "layer"),
    ("moment_written_ratio", 3, "optimizer"),
)

_Looked = tuple[SeriesReference, float, bool] | tuple[SeriesArrayReference, Floats, bool]
"""Checked series, its values, and whether it concerns speed; added at the end of the step."""


class _LowShare(NamedTuple):
    """A layer whose share of the gradients is too low, in each step that has rows of layers."""

    layer: int
    since: int
    """First step with it, or before it, in which the total gradient norm was out."""
    is_second: bool
    """Whether the gradients jumped then, while the loss had been high before."""


class _LayerColumns:
    """The layers of one step: each column as an array, in the order of forward."""

    def __init__(self, names: Sequence[str], layers: Mapping[str, Mapping[str, float]]) -> None:
        self._rows = [layers.get(name, {}) for name in names]

    def __len__(self) -> int:
        return len(self._rows)

    def column(self, name: str) -> Floats | None:
        """Return a column of the step's layers, NaN if missing in one; None if missing in all."""
        values = [row.get(name) for row in self._rows]
        if all(value is None for value in values):
            return None
        return np.array([math.nan if v is None else v for v in values], dtype=np.float64)

    def has(self, name: str) -> npt.NDArray[np.bool_]:
        """Return which layers of the step have the column."""
        return np.array([name in row for row in self._rows], dtype=np.bool_)


class OnsetTracker:
    """Follows one run's merged steps, in order, and keeps the onsets of its episodes.

    Memory: 220 values of each series that the run has, at most ``MOST_LAYERS`` layers and
    ``MOST_RANKS`` ranks, and ``MOST_ONSETS`` onsets.
    """

    def __init__(self, onsets: Iterable[Onset] = ()) -> None:
        self._onsets = {(onset.attempt, onset.step, onset.is_of_speed): onset for onset in onsets}
        self._series: dict[str, SeriesReference] = {}
        self._courses: dict[str, SeriesArrayReference] = {}
        self._of_layers: dict[str, SeriesArrayReference] = {}
        self._peaks: dict[str, WriteRatioPeaks] = {}
        self._names: list[str] = []
        self._known: set[str] = set()
        self._numbers, self._speed = OnsetEpisode(), OnsetEpisode()
        self._num_judged = 0
        self._judged_from = (2**63 - 1, 0)
        self._num_steps = 0
        self._rate: float | None = None
        self._peak_rate = 0.0
        self._applied: float | None = None
        self._settings: dict[str, float | None] = {}
        self._changed_at: dict[str, int] = {}
        self._layers_at: tuple[int, int] = (0, -2)
        self._weights: Floats = np.empty(0)
        self._had_gradient = np.empty(0, dtype=np.bool_)
        self._gradients: Floats = np.empty(0)
        """Logarithms of the layers' gradient norms in the last step that had them."""
        self._total = math.nan
        """Logarithm of the gradient norm in the step before."""
        self._gradients_moved = self._has_share_moved = False
        self._norm_out: tuple[int, float] | None = None
        """Step, since the last normal rows of layers, from which the gradient norm is out, and its
        distance from the middle: a much larger distance is a change of its own."""
        self._num_norms_in = 0
        """Steps in a row whose gradient norm is in range."""
        self._low_share: _LowShare | None = None
        self._high = HighLoss()
        self._key = (0, -1)
        self._lost_since: int | None = None
        """First of the skipped steps in a row whose loss or gradient was non-finite or huge."""
        self._durations: deque[float] = deque(maxlen=LAG)
        self._out: list[SeriesOutlier] = []
        """Series that are out in the current step, except those of speed."""
        self._looked: list[_Looked] = []

    @property
    def is_judging(self) -> bool:
        """Return whether any series has a normal range yet, so that a first change is found."""
        return self._num_judged > 0

    @property
    def judged_from(self) -> tuple[int, int]:
        """Return attempt and step from which first changes are found; the maximum before."""
        return self._judged_from

    @property
    def onsets(self) -> tuple[Onset, ...]:
        """Return the first changes of the latest episodes, in the order of their detection."""
        return tuple(self._onsets.values())

    def update(self, merged: MergedStep) -> bool:
        """Add one step; return whether a first change was found, or replaced by an earlier one."""
        before, self._key = self._key, (merged.attempt, merged.step)
        follows = (merged.attempt, merged.step - 1) == before
        if not follows and before[1] >= 0:  # a rollback or restart: no difference to the last step
            self._applied, self._total = None, math.nan
            self._norm_out = self._low_share = None
            # A loss that is normal again after a rollback does not show that data were bad.
            self._high = HighLoss()
        self._out, self._looked = [], []
        out, looked = self._out, self._looked
        self._find_setting_changes(merged)
        self._high.start_step()
        lossy, zeds = self._judge_losses(merged)
        self._track_norm(merged.step, is_out=zeds != 0.0)
        self._track_lost_steps(merged, follows=follows)
        speed = self._judge_data_waits(merged)
        if merged.layers:
            self._judge_layer_rows(merged, lossy=lossy, follows=follows)
        elif not lossy and zeds > SIGMAS:
            total = number(merged.run.get("grad_norm"))
            self._add_outlier(13.5, "gradients", "", "grad_norm", total, None, zeds)
        self._applied = number(merged.run.get("learning_rate"))
        self._total = logarithm(number(merged.run.get("grad_norm")))
        self._num_steps += 1
        if self._num_judged <= GUARD and any(course.is_judged for course, _, _ in looked):
            self._num_judged += 1
            if self._num_judged == GUARD + 1:
                self._judged_from = self._key
        is_guarded = self._num_judged <= GUARD
        is_old = is_guarded and not any(each.sigmas is None for each in out)
        changed = False
        for part in self._parts_of(out):
            changed |= self._update_episode(self._numbers, merged.attempt, part, is_old=is_old)
        self._attribute_loss_to_data(merged)
        changed |= self._update_episode(self._speed, merged.attempt, speed, is_old=is_guarded)
        for course, values, is_of_speed in looked:
            is_quiet = (self._speed if is_of_speed else self._numbers).is_quiet
            if course is self._of_layers.get("grad_share"):
                is_quiet = is_quiet and not self._has_share_moved
            course.add(values, merged.step, is_quiet=is_quiet)  # type: ignore[arg-type]
        return changed

    def _track_norm(self, step: int, *, is_out: bool) -> None:
        """Track since when the gradient norm is out."""
        norms = self._series["total"]
        if is_out and (self._norm_out is None or norms.distance > self._norm_out[1] + _JUMP):
            self._norm_out = step, norms.distance
        if not abs(norms.sigmas) <= SIGMAS:
            self._num_norms_in = 0
            return
        self._num_norms_in += 1
        if self._num_norms_in >= _NORMS_IN:
            self._norm_out = None

    def _track_lost_steps(self, merged: MergedStep, *, follows: bool) -> None:
        """Track since when each step is skipped because its loss or its gradients are lost."""
        norm = merged.run.get("grad_norm")
        is_lost = any(each.series == "loss" and each.value is None for each in self._out)
        is_lost |= norm is not None and not norm <= HUGE_WEIGHT
        if not is_lost or not number(merged.run.get("skipped")):
            self._lost_since = None
        elif self._lost_since is None or not follows:
            self._lost_since = merged.step

    def _parts_of(self, out: Sequence[SeriesOutlier]) -> tuple[Sequence[SeriesOutlier], ...]:
        """Return the series that are out, in two parts if they may be two problems.

        A loss may be known to be high only now; what changes in this step may be another problem.
        """
        early = [each for each in out if each.step < self._key[1]]
        late = [each for each in out if each not in early]
        is_late_loss = any(each.series == "loss" for each in early)
        is_split = self._numbers.onset is None and is_late_loss and late
        return (early, late) if is_split else (out,)

    def _add_outlier(
        self,
        order: float,
        subject: Subject,
        where: str,
        series: str,
        value: float | None = None,
        usual: float | None = None,
        sigmas: float | None = None,
        *,
        steps_back: int = 0,
        is_apart: bool = False,
    ) -> None:
        """Note a series that is out in the current step, or ``steps_back`` steps before it."""
        step = self._key[1] - steps_back
        numbers = (value, usual, sigmas)
        self._out.append(SeriesOutlier(step, order, subject, where, series, *numbers, is_apart))

    def _attribute_loss_to_data(self, merged: MergedStep) -> None:
        """Name the data as the first change once a loss outlier is over within one step.

        Damaged weights and optimizer states do not heal in a step, so the batches were bad. Without
        this, only a measurement of the weights tells the two apart.
        """
        onset = self._numbers.onset
        explained = self._high.follow(onset, merged.attempt)
        if explained is not None:
            is_of_one = len(merged.ranks.get("rank_loss", ())) == 1
            self._name_data(onset, explained, "rank:0" if is_of_one else "")

    def _name_data(self, onset: Onset | None, high: Onset, where: str) -> None:
        """Name the data of these ranks as the first change of a high loss, and second problems."""
        if high.subject == "losses":
            from_data = msgspec.structs.replace(high, subject="data", where=where)
            self._onsets[from_data.attempt, from_data.step, False] = from_data
            if onset is not None and (onset.attempt, onset.step) == (high.attempt, high.step):
                self._numbers.onset = from_data
        second = find_second_data(self._high.steps, where)
        if second is None or second.step < high.step:
            return
        key = (high.attempt, second.step, False)
        if key in self._onsets and self._onsets[key].subject not in ("data", "losses"):
            return
        last = max(high.last_step, self._high.steps[-1].step)
        self._onsets[key] = build_onset(high.attempt, second, [], last, is_old=False)

    def _update_episode(
        self, episode: OnsetEpisode, attempt: int, out: Sequence[SeriesOutlier], *, is_old: bool
    ) -> bool:
        """Add a step to an episode and record its first change; return whether it is new."""
        was = episode.onset
        if not episode.advance(attempt, out, is_old=is_old) or episode.onset is None:
            return False
        onset = episode.onset
        is_new = was is None or (was.attempt, was.step) != (onset.attempt, onset.step)
        if is_new and was is not None and (was.attempt, was.step) > (onset.attempt, onset.step):
            self._onsets.pop((was.attempt, was.step, was.is_of_speed), None)
        self._onsets[onset.attempt, onset.step, episode is self._speed] = onset
        while len(self._onsets) > MOST_ONSETS:
            del self._onsets[next(iter(self._onsets))]
        return is_new

    def _sigmas_beyond_limit(
        self, name: str, values: Floats, *, of_layers: bool = True
    ) -> tuple[Floats, Floats]:
        """Return by how many sigmas a column's series left their ranges, and their usual values."""
        courses = self._of_layers if of_layers else self._courses
        course = courses.get(name)
        if course is None:
            course = courses[name] = SeriesArrayReference(_FLOORS[name])
        course.grow_to(len(values))
        if len(values) < course.num:
            values = np.pad(values, (0, course.num - len(values)), constant_values=np.nan)
        self._looked.append((course, values, False))
        return course.sigmas_beyond_limit(values)

    # ------------------------------------------------------------------------------- settings

    def _find_setting_changes(self, merged: MergedStep) -> None:
        """Return deliberate jumps of the learning rate and other settings as first changes."""
        rate = number(merged.run.get("learning_rate"))
        if rate is not None:
            factor = number(merged.run.get("lr_factor")) or 1.0
            before, requested_rate = self._rate, rate / factor
            self._rate, peak = requested_rate, self._peak_rate
            # A schedule may return to an earlier rate, may fall in one step, and may be declared.
            is_declared = int(number(merged.run.get("verdict")) or 0) & RATE_DECLARED
            is_jump = before is not None and requested_rate > max(_SETTING * before, 1.02 * peak)
            is_warm = self._num_steps >= _WARM
            if is_jump and not is_declared and is_warm and self._is_rare("learning_rate"):
                self._add_outlier(0, "lr", "", "learning_rate", rate, before)
            self._peak_rate = max(peak, requested_rate)
        for name in _SETTINGS:
            if name not in merged.run:
                continue
            value = number(merged.run[name])
            is_known = name in self._settings
            before, self._settings[name] = self._settings.get(name), value
            if is_known and _is_deliberate_change(before, value) and self._is_rare(name):
                self._add_outlier(0, "config", "", name, value, before)

    def _is_rare(self, name: str) -> bool:
        """Return whether a setting's jump is its first in the reference; record the jump."""
        last, self._changed_at[name] = self._changed_at.get(name), self._num_steps
        return last is None or self._num_steps - last > REFERENCE

    # ------------------------------------------------------------------------- losses and waits

    def _judge_losses(self, merged: MergedStep) -> tuple[bool, float]:
        """Check the losses for a first change; return whether they moved, and the norm's sigmas."""
        finite_losses = [v for v in merged.ranks.get("rank_loss", ()) if v is not None]
        if not finite_losses and (loss := merged.run.get("loss")) is not None:
            finite_losses = [loss]
        losses, ranks = finite(finite_losses)
        lossy = len(ranks) < len(finite_losses)
        if lossy:
            bad = [rank for rank, value in enumerate(finite_losses) if number(value) is None]
            where = f"rank:{bad[0]}" if len(bad) == 1 < len(finite_losses) else ""
            # A non-finite output comes first; without activations its origin would be unknown.
            has_activations = "activation_rms" in self._of_layers
            self._add_outlier(7, "loss" if has_activations else "losses", where, "loss")
        elif losses:
            lossy = self._judge_finite_losses(losses, number(merged.run.get("grad_norm")) or 0.0)
        self._judge_rank_norms(merged, lossy=lossy)
        sigmas, _ = self._check_series("total", logarithm(number(merged.run.get("grad_norm"))))
        return lossy, sigmas

    def _judge_finite_losses(self, losses: Sequence[float], norm: float) -> bool:
        """Check the ranks' finite losses for a first change; return whether one left its range."""
        mean = math.fsum(losses) / len(losses)
        sigmas, middle = self._check_series("loss", mean)
        self._high.measure(mean - middle, self._series["loss"].peak, is_out=sigmas > 0.0)
        num_above = self._high.num_above
        bad = HighLossStep(self._key[1], norm, (mean, middle, self._series["loss"].sigmas))
        if sigmas > SIGMAS or num_above >= HIGH_STEPS:
            # Damaged weights raise every rank's loss, as bad data do.
            subject: Subject = "data" if "weight_written_ratio" in self._peaks else "losses"
            where = "rank:0" if subject == "data" and len(losses) == 1 else ""
            back = HIGH_STEPS - 1 if sigmas <= SIGMAS and num_above == HIGH_STEPS else 0
            numbers = (mean, middle, sigmas or self._series["loss"].sigmas)
            self._add_outlier(10, subject, where, "loss", *numbers, steps_back=back)
        lossy = sigmas > SIGMAS / 2 or num_above >= HIGH_STEPS
        if 1 < len(losses) <= MOST_RANKS:
            others = medians_of_others(losses)
            zeds = self._check_rank_series("rank_loss", losses, others)
            top = max(range(len(zeds)), key=zeds.__getitem__)
            second = max((z for rank, z in enumerate(zeds) if rank != top), default=0.0)
            # If the others' loss is out as well, the data of one rank are not the problem.
            common, usual = self._check_series("others", others[top])
            numbers = (losses[top], others[top], zeds[top])
            is_of_one = zeds[top] > 0.0 and second < zeds[top] / 2
            if is_of_one and zeds[top] > SIGMAS and common <= SIGMAS / 2:
                self._add_outlier(9, "data", f"rank:{top}", "rank_loss", *numbers)
            rank, of_others = top if is_of_one else -1, (others[top], usual, common)
            bad = bad._replace(rank=rank, of_rank=numbers, of_others=of_others)
            lossy |= zeds[top] > SIGMAS / 2
        self._high.take_step(bad)
        return lossy

    def _judge_rank_norms(self, merged: MergedStep, *, lossy: bool) -> None:
        """Check whether one rank's gradient norm is the first change."""
        norms, ranks = finite(merged.ranks.get("rank_grad_norm"))
        if not 1 < len(norms) <= MOST_RANKS or len(norms) < len(merged.ranks["rank_grad_norm"]):
            return
        if min(norms) <= 0.0:
            return
        logs = [math.log(norm) for norm in norms]
        others = medians_of_others(logs)
        zeds = self._check_rank_series("rank_grad_norm", logs, others)
        top = max(range(len(zeds)), key=zeds.__getitem__)
        if zeds[top] > SIGMAS and not lossy:
            numbers = (norms[top], math.exp(others[top]), zeds[top])
            self._add_outlier(12.5, "rank", f"rank:{ranks[top]}", "rank_grad_norm", *numbers)

    def _check_series(self, name: str, value: float) -> tuple[float, float]:
        """Return by how many sigmas a series left its range, to find the first change, or 0."""
        course = self._series.get(name)
        if course is None:
            course = self._series[name] = SeriesReference(_FLOORS[name.partition("/")[0]])
        sigmas = course.sigmas_beyond_limit(value)
        self._looked.append((course, value, name == "data_wait_seconds"))
        return sigmas, course.middle

    def _check_rank_series(
        self, name: str, values: Sequence[float], others: Sequence[float]
    ) -> Sequence[float]:
        """Return by how many sigmas each rank left its distance from the others, or 0."""
        relative = [value - other for value, other in zip(values, others, strict=True)]
        if len(values) > FEW_RANKS:
            zeds, _ = self._sigmas_beyond_limit(name, np.array(relative), of_layers=False)
            return [float(z) for z in zeds[: len(values)]]
        return [self._check_series(f"{name}/{i}", value)[0] for i, value in enumerate(relative)]

    def _judge_data_waits(self, merged: MergedStep) -> list[SeriesOutlier]:
        """Check whether the longest wait of a rank for the data loader is the first change."""
        waits, ranks = finite(merged.ranks.get("data_wait_seconds"))
        if not waits:
            return []
        wait = max(waits)
        sigmas, middle = self._check_series("data_wait_seconds", logarithm(wait))
        longest = step_seconds(merged)
        # A wait shorter than a step delays no rank.
        if sigmas > SIGMAS and self._durations and wait > sorted_median(sorted(self._durations)):
            late = [rank for rank, each in zip(ranks, waits, strict=True) if each > wait / 2]
            num = len(merged.ranks["data_wait_seconds"])
            where = f"rank:{late[0]}" if len(late) == 1 < num else ""
            numbers = (wait, math.exp(middle), sigmas)
            return [SeriesOutlier(merged.step, 1, "loader", where, "data_wait_seconds", *numbers)]
        if longest:
            self._durations.append(longest)
        return []

    # ------------------------------------------------------------------------------- layers

    def _judge_layer_rows(self, merged: MergedStep, *, lossy: bool, follows: bool) -> None:
        """Check the numbers of the step's layers for a first change, in causal order."""
        for name in merged.layers:
            if name not in self._known and len(self._names) < MOST_LAYERS:
                self._known.add(name)
                self._names.append(name)
        rows, step = _LayerColumns(self._names, merged.layers), merged.step
        is_next = self._layers_at == (merged.attempt, step - 1) and follows
        self._layers_at = (merged.attempt, step)
        self._judge_tensor_writes(rows)
        self._find_nonfinite_weights(rows, merged)
        self._judge_weight_norms(rows, is_next=is_next)
        self._judge_activations(rows)
        was_calm = is_next and not self._gradients_moved
        self._gradients_moved = self._judge_layer_gradients(rows, lossy=lossy, is_next=is_next)
        self._judge_update_norms(rows, calm=was_calm)

    def _add_layer(
        self,
        order: float,
        at: int,
        series: str,
        *numbers: float | None,
        steps_back: int = 0,
        is_apart: bool = False,
    ) -> None:
        """Note a layer's series that is out in this step, or ``steps_back`` steps before it."""
        where = self._names[at]
        self._add_outlier(
            order, "layer", where, series, *numbers, steps_back=steps_back, is_apart=is_apart
        )

    def _judge_tensor_writes(self, rows: _LayerColumns) -> None:
        """Check weights and optimizer states for writes outside the step, as first changes."""
        for name, order, subject in _WRITES:
            written = rows.column(name)
            if written is None:
                continue
            # A missing value counts as 0; a NaN was caused by writing a NaN.
            written = np.where(rows.has(name), np.where(np.isnan(written), np.inf, written), 0.0)
            peaks = self._peaks.setdefault(name, WriteRatioPeaks())
            is_out = peaks.find_outliers(written)
            if is_out.any():
                at = int(np.argmax(written))
                is_of_all = order == 3 and int(is_out.sum()) > max(1, len(written) // 2)
                value = float(written[at]) if np.isfinite(written[at]) else None
                where = "" if is_of_all else self._names[at]
                self._add_outlier(order, subject, where, name, value, 0.0)
            elif self._numbers.is_quiet:
                peaks.add(written)

    def _find_nonfinite_weights(self, rows: _LayerColumns, merged: MergedStep) -> None:
        """Name the layer whose non-finite weights, found after a bad step, came first.

        A skipped update changes nothing: the weights were so before the first bad loss of the row.
        """
        weights = rows.column("weight_norm")
        if weights is None:
            return
        back = 0 if self._lost_since is None else merged.step - self._lost_since
        bad = np.flatnonzero(~np.isfinite(weights) & rows.has("weight_norm"))
        if len(bad) and number(merged.run.get("nonfinite_params")):
            where = self._names[int(bad[0])] if len(bad) == 1 else ""
            self._add_outlier(4.4, "layer", where, "weight_norm", steps_back=back)
        huge = np.flatnonzero(np.where(np.isfinite(weights), weights, 0.0) > HUGE_WEIGHT)
        if len(huge) == 1 and self._lost_since is not None:
            at = int(huge[0])
            numbers = (self._names[at], DAMAGED_WEIGHT, float(weights[at]))
            # No update makes such a weight, so it does not follow from a high loss before it.
            self._add_outlier(4.4, "layer", *numbers, steps_back=back, is_apart=True)

    def _judge_weight_norms(self, rows: _LayerColumns, *, is_next: bool) -> None:
        """Check whether the norm of a layer's weights is the first change."""
        weights = rows.column("weight_norm")
        if weights is None:
            return
        before, self._weights = self._weights, weights
        num_both = min(len(before), len(weights))
        turned = ~np.isfinite(weights[:num_both]) & np.isfinite(before[:num_both])
        turned &= rows.has("weight_norm")[:num_both]
        if turned.any():
            self._add_layer(5, int(np.argmax(turned)), "weight_norm")
        if not is_next:
            return
        moved = np.full(len(weights), np.nan)
        moved[:num_both] = logarithms(weights[:num_both]) - logarithms(before[:num_both])
        z, _ = self._sigmas_beyond_limit("weight_norm", moved)
        at = int(np.argmax(np.abs(z)))
        if abs(z[at]) > SIGMAS:
            numbers = (float(weights[at]), float(before[at]), float(abs(z[at])))
            self._add_layer(4, at, "weight_norm", *numbers)

    def _judge_activations(self, rows: _LayerColumns) -> None:
        """Check whether a layer's activations are the first change."""
        rms = rows.column("activation_rms")
        if rms is None:
            return
        bad = ~np.isfinite(rms) & rows.has("activation_rms")
        if bad.any():
            self._add_layer(6, int(np.argmax(bad)), "activation_rms")
        z, middle = self._sigmas_beyond_limit("activation_rms", logarithms(rms))
        far = np.abs(z)
        if far.max() <= SIGMAS:
            return
        at = int(np.argmax(far > SIGMAS / 2))
        # If the first module's output is already out, its input was.
        first = int(np.argmax(rows.has("activation_rms")))
        subject: Subject = "data" if at == first else "layer"
        where = "" if at == first else self._names[at]
        numbers = (float(rms[at]), float(math.exp(middle[at])), float(far[at]))
        self._add_outlier(11, subject, where, "activation_rms", *numbers)

    def _judge_layer_gradients(self, rows: _LayerColumns, *, lossy: bool, is_next: bool) -> bool:
        """Check the layers' gradient norms for a first change; return whether any moved."""
        norms = rows.column("grad_norm")
        if norms is None:
            return False
        has_row = rows.has("grad_norm")
        bad = ~np.isfinite(norms) & has_row
        if bad.any():
            # Backward starts at the last layer, so the last of the bad layers was the first. A
            # single finite layer between bad ones has the weights that made the others overflow.
            finite_at = np.flatnonzero(has_row & ~bad)
            is_between = len(finite_at) == 1 and bad[finite_at[0] + 1 :].any()
            if is_between and bad.sum() >= LEAST_LAYERS - 1:
                self._add_layer(4.5, int(finite_at[0]), INFERRED_WEIGHTS)
            else:
                self._add_layer(8, int(np.flatnonzero(bad)[-1]), "grad_norm")
        before = np.zeros(len(norms), dtype=np.bool_)
        before[: len(self._had_gradient)] = self._had_gradient
        is_zero = (norms == 0.0) & before
        if is_zero.any() and not (norms[np.isfinite(norms)] == 0.0).all():
            self._add_layer(12, int(np.argmax(is_zero)), "grad_norm", 0.0)
        self._had_gradient = norms > 0.0
        z, middle = self._sigmas_beyond_limit("grad_norm", logarithms(norms))
        at = int(np.argmax(z))
        logs = logarithms(norms)
        # Without rows of the step before, its total norm is the most that a layer can have had.
        earlier = np.full(len(norms), self._total)
        if is_next:
            num_both = min(len(norms), len(self._gradients))
            earlier[:num_both] = self._gradients[:num_both]
        self._gradients = np.where(np.isfinite(logs), logs, math.nan)
        rises = self._gradients - earlier
        away = logs - middle[: len(norms)]
        self._judge_gradient_shares(norms, away, rises, lossy=lossy, is_next=is_next)
        if z[at] > SIGMAS and not lossy:
            numbers = (float(norms[at]), float(math.exp(middle[at])), float(z[at]))
            if int((z > SIGMAS / 2).sum()) <= max(1, len(norms) // 3):
                self._add_layer(13, at, "grad_norm", *numbers)
            else:
                self._add_outlier(13, "gradients", "", "grad_norm", *numbers)
        return bool(z.max() >= SIGMAS / 2)

    def _judge_gradient_shares(
        self, norms: Floats, away: Floats, rises: Floats, *, lossy: bool, is_next: bool
    ) -> None:
        """Check whether a layer's gradient norm, relative to the others', changed first.

        Args:
            norms: gradient norm of each layer.
            away: logarithm of each norm, less its usual value.
            rises: logarithm of each norm, less that of the step before, or less its total.
            lossy: whether the loss is out, so that a larger gradient is an effect.
            is_next: whether the step before has the norms of its layers.
        """
        at = np.flatnonzero(np.isfinite(norms) & (norms > 0.0))
        if len(at) < LEAST_LAYERS:
            return
        logs = np.log(norms[at])
        shares = np.full(len(norms), np.nan)
        shares[at] = logs - np.array(medians_of_others(logs.tolist()))
        z, middle = self._sigmas_beyond_limit("grad_share", shares)
        moved = (z[: len(norms)] != 0.0) & (np.abs(shares - middle[: len(norms)]) > _SHIFT)
        is_first = not self._has_share_moved
        self._has_share_moved = bool(moved.any())
        if not moved.any():
            self._norm_out = self._low_share = None
            return
        shift = np.where(moved, shares - middle[: len(norms)], 0.0)
        low, high = int(np.argmin(shift)), int(np.argmax(shift))
        rest = np.delete(away, low)[np.isfinite(np.delete(away, low))]
        common = float(np.median(rest)) if len(rest) else 0.0
        is_alone = common > _SHIFT and rest.min() > common / 2 > abs(away[low])
        is_apart = is_first and (is_next or is_alone) and self._is_apart(low, rises)
        since, is_second = self._key[1], False
        if moved[low]:
            since, is_second = self._date_low_share(low, norms)
        if moved[low] and (is_alone or is_apart):
            back, is_apart = self._key[1] - since, is_apart or is_second
            numbers = (math.exp(common), 1.0, float(abs(z[low])))
            self._add_layer(
                4.5, low, INFERRED_WEIGHTS, *numbers, steps_back=back, is_apart=is_apart
            )
            return
        is_apart = is_first and is_next and self._is_apart(high, rises)
        has_risen = moved.sum() == 1 and z[high] > SIGMAS and away[high] > _SHIFT
        if has_risen and (is_apart or not lossy):
            usual = float(math.exp(math.log(norms[high]) - away[high]))
            numbers = (float(norms[high]), usual, float(z[high]))
            self._add_layer(13, high, "grad_norm", *numbers, is_apart=is_apart)

    def _date_low_share(self, layer: int, norms: Floats) -> tuple[int, bool]:
        """Return the first step of a layer's low share, and whether a high loss came before it.

        Layers are written every 10th step; the total gradient norm shows the steps between.
        """
        if self._low_share is None or self._low_share.layer != layer:
            step, since = self._key[1], None if self._norm_out is None else self._norm_out[0]
            rise = logarithm(math.hypot(*norms[np.isfinite(norms)])) - self._total
            is_second = self._high.was_out and since in (None, step) and rise > _JUMP
            self._low_share = _LowShare(layer, step if since is None else since, is_second)
        return self._low_share.since, self._low_share.is_second

    def _is_apart(self, at: int, rises: Floats) -> bool:
        """Return whether a layer's gradient shows a second problem during a high loss.

        Bad data raise the gradients of all layers: either only this one jumped in the step, or all
        others did.
        """
        onset, others = self._numbers.onset, np.delete(rises, at)
        others = others[np.isfinite(others)]
        is_high = self._high.was_out  # so far, its onset may need one more step
        if onset is not None:
            is_high = onset.subject in ("data", "losses") and not onset.is_nonfinite
        if not is_high:
            return False
        if len(others) < LEAST_LAYERS - 1:
            return False
        has_jumped = rises[at] > 2 * _JUMP and np.abs(others).max() < _SHIFT
        return bool(has_jumped or (others.min() > _JUMP and rises[at] < others.min() / 3))

    def _judge_update_norms(self, rows: _LayerColumns, *, calm: bool) -> None:
        """Check whether the update that led to this step was the first change.

        ``calm``: the gradients of that step were normal, so they did not cause it.
        """
        updates = rows.column("update_norm")
        if updates is None or not self._applied:
            return
        logs = logarithms(updates) - math.log(abs(self._applied))
        z, middle = self._sigmas_beyond_limit("update_norm", logs)
        at = int(np.argmax(z))
        if z[at] <= SIGMAS or not calm:
            return
        usual = float(math.exp(middle[at]) * abs(self._applied))
        numbers = (float(updates[at]), usual, float(z[at]))
        is_of_few = int((z > SIGMAS / 2).sum()) <= max(1, int(np.isfinite(logs).sum()) // 3)
        subject: Subject = "optimizer" if is_of_few else "lr"
        where = self._names[at] if is_of_few else ""
        self._add_outlier(14, subject, where, "update_norm", *numbers, steps_back=1)


def _is_deliberate_change(before: float | None, value: float | None) -> bool:
    """Return whether a setting was changed deliberately, which counts as a first change."""
    if before is None or value is None:
        return before is not value
    low, high = sorted((abs(before), abs(value)))
    return high > _SETTING * low
