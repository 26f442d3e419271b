"""Problems of a loss that compares a chosen with a rejected completion."""

import math
from collections import deque
from fractions import Fraction

from trainvitals.detect.fleet.base import MergedStep, upper_median
from trainvitals.detect.posttraining import names
from trainvitals.detect.posttraining.base import PostTrainingWatcher, quantity
from trainvitals.detect.posttraining.names import TaskSpec
from trainvitals.detect.posttraining.settings import PostTrainingConfig
from trainvitals.records import Finding

_LEAST_EARLY = 8
"""Accuracies from the start that are needed."""
_MAX_PAIRS = 64
"""Pairs that one accuracy may count for. An average has a finer resolution than its pairs."""
_Z = 2.33
"""Standard errors of a certainty of 99%."""
_LEAST_CERTAIN = 0.94
"""Accuracy that must be certain. After 85 pairs without a mistake it is."""
_PER_TOKEN = -5.0
"""Log-probability above which it is the mean of the tokens: sums of whole completions are lower."""
_FIRST_VALUES = 3
"""Values whose medians are the first levels: with a high learning rate the fall begins at once."""
_UNDECIDED = 0.6
"""Accuracy below which nothing distinguishes the pairs."""
_TIMES_UNDECIDED = 1.5
"""Factor to which the negative log-probability may then grow: nothing is learned in return."""
_LEAST_BETA = 0.05
"""Beta with which the fall of the chosen reward must explain that of a sum of log-probabilities.
The scalars do not contain beta; in healthy runs with 0.1 the reward falls by less than a third."""

_MAX_EVALUATIONS = 64
_WORSE = 2
"""Consecutive evaluations that must be worse, and the least number of bends for the noise."""
_BENDS = 2.0
"""Smallest loss of accuracy, compared with the median second difference of evaluations: three
standard deviations."""
_LEAST_MARGIN = 2.0
"""Margin of the pairs below which nobody is too certain: 88%."""


class PreferenceWatcher(PostTrainingWatcher):
    """Reports chosen completions that become improbable, and pairs that need no training.

    In DPO both log-probabilities usually fall somewhat. Reported is a chosen one whose negative
    doubled while the rejected one fell too; 1.5 times is enough if the accuracy is below 0.6. A sum
    over the tokens also falls if completions get longer, so the chosen reward must have fallen as
    much, with a beta of at least 0.05; without that reward only a mean over the tokens (above -5)
    is judged. In DPO and reward models an accuracy of at least 98% from the start means that the
    pairs differ in something trivial, such as a template or the length. It needs the first steps,
    and about 85 pairs.
    """

    name = "preference"
    STATE = (
        "_chosen",
        "_rejected",
        "_rewards",
        "_accuracies",
        "_first",
        "_first_at",
        "_early",
        "_first_step",
        "_num_pairs",
        "_is_start_judged",
        "_is_leaked",
    )
    MAY_LACK = True  # states of older versions lack ``_is_leaked``

    def __init__(self, config: PostTrainingConfig | None = None) -> None:
        super().__init__(config)
        self._has_reference = False
        window = self._config.window
        self._chosen: deque[float] = deque(maxlen=window)
        self._rejected: deque[float] = deque(maxlen=window)
        self._rewards: deque[float] = deque(maxlen=window)
        self._accuracies: deque[float] = deque(maxlen=window)
        self._first: list[float] = []
        """First levels of both log-probabilities, and of the chosen reward if there is one."""
        self._first_at = -1
        """Step of these levels."""
        self._early: list[float] = []
        """Accuracies of the first steps."""
        self._first_step = -1
        self._num_pairs = 1
        """Smallest number of pairs that gives such accuracies."""
        self._is_start_judged = False
        self._is_leaked = False
        """Whether the pairs were reported as leaked: later steps do not change them."""

    def holds(self, cause: str) -> bool:
        """Return whether the pairs are still leaked ones, or chosen ones still improbable."""
        return self._is_leaked if cause == "preference_leak" else self.goes_on

    @staticmethod
    def is_for(spec: TaskSpec) -> bool:
        """Return whether the loss of such a run, as in DPO, compares two completions."""
        return spec.compares

    def set_kind(self, spec: TaskSpec) -> None:
        """Judge the accuracy at the start only if the pairs are undecided before training."""
        self._has_reference = spec.has_reference
        self._is_start_judged = not spec.starts_undecided

    def _restarted(self, merged: MergedStep) -> None:
        """Drop the log-probabilities of pairs that are trained again."""
        self._clear_recent()
        self._is_leaked = self._is_leaked and merged.step > self._first_step
        if merged.step <= self._first_at:
            self._first.clear()
        if merged.step <= self._step:
            self._is_start_judged = True  # the first steps are repeated

    def rebaseline(self) -> None:
        """Compare with the completions' log-probabilities at the announced change."""
        self._clear_recent()
        self._first.clear()
        self._is_leaked = False
        self._is_start_judged |= self._first_step >= 0

    def _clear_recent(self) -> None:
        """Discard the recent log-probabilities and rewards of the compared completions."""
        self._chosen.clear()
        self._rejected.clear()
        self._rewards.clear()
        self._accuracies.clear()

    def _judge(self, merged: MergedStep) -> tuple[Finding, ...]:
        """Judge the pairs of a logged step: accuracy at the start, then log-probabilities."""
        return self._leak(merged) + self._displacement(merged)

    def _leak(self, merged: MergedStep) -> tuple[Finding, ...]:
        """Report pairs with a high accuracy from the start: they differ in something trivial."""
        accuracy, config = quantity(merged, names.ACCURACY), self._config
        if accuracy is None or self._is_start_judged:
            return ()
        share = min(max(accuracy, 0.0), 1.0)
        num_pairs = Fraction(share).limit_denominator(8 * _MAX_PAIRS).denominator
        self._num_pairs = min(max(self._num_pairs, num_pairs), _MAX_PAIRS)
        if self._first_step < 0:
            self._first_step = merged.step
            # The first step is from before any update. The others of a mean must be right.
            least = config.leak_accuracy * (1.0 - 1.0 / max(merged.step, 1))
            self._is_start_judged = merged.step > config.leak_steps or share < least
            return ()
        if not self._early and self._first_step > merged.step - self._first_step:
            self._is_start_judged = True  # it was resumed: values before the first are missing
            return ()
        if merged.step > self._first_step + config.leak_steps:
            self._is_start_judged = True
            return ()
        self._early.append(share)
        mean = sum(self._early) / len(self._early)
        certain = _lower_bound(mean, len(self._early) * self._num_pairs)
        if (
            len(self._early) < _LEAST_EARLY
            or mean < config.leak_accuracy
            or certain < _LEAST_CERTAIN
        ):
            return ()
        self._is_start_judged = self._is_leaked = True
        reason = (
            f"{mean:.0%} of the pairs are ranked correctly from the start, so there is nothing to "
            "learn. Likely causes: chosen and rejected differ in the template, the length or a "
            "mark; or pairs that the model was trained on. Compare some pairs as tokens"
        )
        limit = config.leak_accuracy
        return self._report(
            merged.step, reason, cause="preference_leak", value=mean, limit=limit,
            onset_step=self._first_step,
        )  # fmt: skip

    def _displacement(self, merged: MergedStep) -> tuple[Finding, ...]:
        """Report chosen completions that become improbable together with the rejected ones."""
        chosen, rejected = quantity(merged, names.CHOSEN), quantity(merged, names.REJECTED)
        if chosen is None or rejected is None or chosen >= 0.0:
            return ()
        reward = quantity(merged, names.CHOSEN_REWARD) if self._has_reference else None
        if reward is not None:
            self._rewards.append(reward)
        accuracy = quantity(merged, names.ACCURACY)
        if accuracy is not None:
            self._accuracies.append(accuracy)
        self._chosen.append(chosen)
        self._rejected.append(rejected)
        num, has_rewards = len(self._chosen), len(self._rewards) == len(self._chosen)
        if not self._first and num < _FIRST_VALUES:
            return ()
        level, other = upper_median(self._chosen), upper_median(self._rejected)
        reward_level = upper_median(self._rewards) if has_rewards else None
        if not self._first:
            self._first = [level, other, *([] if reward_level is None else [reward_level])]
            self._first_at = merged.step
        if num < self._config.window:
            return ()
        is_mean = self._first[0] > _PER_TOKEN
        first_reward = self._first[2] if len(self._first) > 2 else None
        if not is_mean and (reward_level is None or first_reward is None):
            return ()  # unknown: longer completions have lower sums too
        first, limit = self._first[0], self._times() * self._first[0]
        is_improbable = level <= limit and other <= self._first[1]
        if reward_level is not None and first_reward is not None and not is_mean:
            is_improbable &= reward_level <= min(first_reward, 0.0) - _LEAST_BETA * (first - limit)
        if not is_improbable:
            return self._end_condition()
        reason = (
            f"the chosen completions become improbable: their log-probability fell from "
            f"{first:.4g} to {level:.4g}, that of the rejected ones from {self._first[1]:.4g} "
            f"to {other:.4g}. Likely causes: a learning rate that is too high, a beta that is "
            "too low, or pairs that are nearly equal. Lower the learning rate, raise beta, or "
            "add an SFT term (rpo_alpha). If the data changed, announce it with expect()"
        )
        return self._begin_condition(merged, reason, value=level, limit=limit)

    def _times(self) -> float:
        """Return the factor to which the chosen completions' negative log-probability may grow."""
        is_full = len(self._accuracies) == len(self._chosen)
        if is_full and upper_median(self._accuracies) < _UNDECIDED:
            return min(self._config.chosen_times, _TIMES_UNDECIDED)
        return self._config.chosen_times


class OverconfidenceWatcher(PostTrainingWatcher):
    """Reports a reward model, or DPO, that grows more certain while it becomes worse.

    The margin of the pairs is at least 2, and twice as large as at the best evaluation. In two
    consecutive evaluations the accuracy was 0.05 below its best, and by more than its noise; or the
    loss of a reward model's evaluation was 5% above its best and above ln 2, that of guessing.
    """

    name = "overconfidence"
    STATE = ("_margins", "_accuracies", "_accuracy", "_loss", "_num_worse")

    def __init__(self, config: PostTrainingConfig | None = None) -> None:
        super().__init__(config)
        self._has_one_loss = False
        """Whether the loss of an evaluation is the logistic one of the pairs."""
        self._margins: deque[float] = deque(maxlen=self._config.window)
        self._accuracies: deque[float] = deque(maxlen=_MAX_EVALUATIONS)
        self._accuracy: list[float] = []
        """Highest accuracy of an evaluation, and the margin at that time."""
        self._loss: list[float] = []
        """Lowest loss of an evaluation, and the margin at that time."""
        self._num_worse = 0

    @staticmethod
    def is_for(spec: TaskSpec) -> bool:
        """Return whether a margin of 0 means that a pair of completions is undecided."""
        return spec.starts_undecided

    def set_kind(self, spec: TaskSpec) -> None:
        """Judge the evaluation's loss only if it is that of a reward model: DPO has several."""
        self._has_one_loss = not spec.has_reference

    def _restarted(self, merged: MergedStep) -> None:
        """Drop the evaluations of pairs that are trained again."""
        super()._restarted(merged)
        self._margins.clear()
        if merged.step <= self._step:
            self._clear_evaluations()

    def rebaseline(self) -> None:
        """Compare with the evaluations of pairs after the announced change."""
        super().rebaseline()
        self._margins.clear()
        self._clear_evaluations()

    def _clear_evaluations(self) -> None:
        """Discard the evaluations of the pairs."""
        self._accuracies.clear()
        self._accuracy.clear()
        self._loss.clear()
        self._num_worse = 0

    def _judge(self, merged: MergedStep) -> tuple[Finding, ...]:
        """Judge margins and evaluations of a logged step of pairs."""
        margin = quantity(merged, names.MARGIN)
        if margin is not None:
            self._margins.append(margin)
        accuracy, loss = quantity(merged, names.EVAL_ACCURACY), quantity(merged, names.EVAL_LOSS)
        if not self._margins or (accuracy is None and loss is None):
            return ()
        level = upper_median(self._margins)
        signs = [
            self._lost_accuracy(level, accuracy),
            self._lost_loss(level, loss, accuracy) if self._has_one_loss else "",
        ]
        sign = next((text for text in signs if text), "")
        self._note_beyond(bool(sign))
        self._num_worse = min(self._num_worse + 1, _WORSE) if sign else 0
        if self._num_worse < _WORSE or len(self._margins) < self._config.window:
            return self._end_condition()
        reason = (
            f"the margin of the pairs grew to {level:.3g}, while {sign}: it grows more certain and "
            "ranks worse. Likely causes: too many epochs on too few pairs, wrong labels that it "
            "memorizes, or a learning rate that is too high. Use the checkpoint with the best "
            "evaluation; train for fewer epochs, or keep rewards small "
            "(center_rewards_coefficient, label smoothing)"
        )
        return self._begin_condition(merged, reason, value=level, limit=_LEAST_MARGIN)

    def _has_grown(self, level: float, margin: float) -> bool:
        """Return whether the margin of the pairs grew since an evaluation."""
        return level >= max(_LEAST_MARGIN, self._config.margin_times * margin)

    def _lost_accuracy(self, level: float, accuracy: float | None) -> str:
        """Return the sign that an evaluation ranks fewer pairs correctly; empty without one."""
        if accuracy is None:
            return ""
        self._accuracies.append(accuracy)
        if not self._accuracy or accuracy > self._accuracy[0]:
            self._accuracy = [accuracy, level]
        best, margin = self._accuracy
        values = list(self._accuracies)
        bends = [
            abs(a - 2.0 * b + c) for a, b, c in zip(values, values[1:], values[2:], strict=False)
        ]
        if len(bends) < _WORSE or not self._has_grown(level, margin):
            return ""
        least = max(self._config.eval_accuracy_loss, _BENDS * upper_median(bends))
        if accuracy > best - least:
            return ""
        return f"the accuracy of the evaluation fell from {best:.3g} to {accuracy:.3g}"

    def _lost_loss(self, level: float, loss: float | None, accuracy: float | None) -> str:
        """Return the sign that an evaluation of pairs is worse than guessing; empty without one."""
        if loss is None:
            return ""
        if not self._loss or loss < self._loss[0]:
            self._loss = [loss, level]
        best, margin = self._loss
        limit = max((1.0 + self._config.eval_rise) * best, math.log(2.0))
        if loss < limit or not self._has_grown(level, margin):
            return ""
        ranks = "" if accuracy is None else f" at an accuracy of {accuracy:.3g}"
        return (
            f"the loss of the evaluation rose from {best:.3g} to {loss:.3g}{ranks}, above the "
            "0.693 of guessing"
        )


def _lower_bound(share: float, num: int) -> float:
    """Return Wilson's lower bound of the accuracy on pairs of completions."""
    square = _Z * _Z
    half = _Z * math.sqrt(share * (1.0 - share) / num + square / (4 * num * num))
    return (share + square / (2 * num) - half) / (1.0 + square / num)
