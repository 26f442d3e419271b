"""Problems of supervised fine-tuning (SFT): memorized rows, a lost base model, wrong labels.

A low training loss is also that of an easy task, so it is compared with an evaluation.
"""

import math
from collections import deque
from itertools import pairwise

from trainvitals.detect.fleet.base import MergedStep, upper_median
from trainvitals.detect.posttraining import names
from trainvitals.detect.posttraining.base import CountWatcher, PostTrainingWatcher, quantity
from trainvitals.detect.posttraining.names import TaskSpec
from trainvitals.detect.posttraining.settings import PostTrainingConfig
from trainvitals.records import Finding
from trainvitals.stateful import Stateful

_PART = 5
"""Losses at the start and at the end of an epoch that are compared."""
_NUM_DROPS = 2
"""Consecutive epochs whose start must show a drop."""
_SIGMAS = 2.0
"""Smallest drop in standard deviations of a loss: 2.5 of the difference of two medians of five."""
_NUM_BEFORE = 2
"""Evaluations with which a training loss far ahead is compared."""
_HALVED = 0.5
"""Largest part of its level at the first one to which it fell."""
_FALLEN = 0.75
"""The same between both: of a smaller fall the evaluation shows nothing."""
_SLOW = 1.0 / 3.0
"""Largest fall of the logarithm of the evaluation loss meanwhile, as a part of its own."""
_MOST_RISE = 0.5
"""Largest rise of the loss within an epoch, as a part of the drop at the start of the next one."""
_STALLED = 0.95
"""Part of the evaluation loss before it that the latest one is at least: it hardly improves."""
_SHARP = 0.6
"""Part of the loss after the start of an epoch that only rows from memory explain."""
_START = 5
"""Losses that show the level at the start."""
_RISE_SIGMAS = 4.0
"""Smallest rise above the first loss in standard deviations of a loss."""
_TO_SIGMA = 1.05
"""Standard deviation of a Gaussian value, divided by the median absolute change of two values."""


class EpochDrops(Stateful):
    """Drops of the training loss from the end of an epoch to the start of the next one."""

    STATE = ("_epoch", "_first", "_last", "_end", "drops")

    def __init__(self) -> None:
        self._epoch: int | None = None
        self._first: list[float] = []
        """First losses of the epoch."""
        self._last: deque[float] = deque(maxlen=_PART)
        self._end: list[float] = []
        """Level at the end of the epoch before, its fall, and its noise."""
        self.drops: list[float] = []
        """Loss before and after each of the latest drops; empty after an epoch without one."""

    def clear(self) -> None:
        """Start again with the losses of another epoch."""
        self._epoch = None
        self._first.clear()
        self._last.clear()
        self._end.clear()
        self.drops.clear()

    def add(self, loss: float, epoch: float, least: float) -> None:
        """Add a training loss.

        Args:
            loss: loss of a logged step.
            epoch: epochs so far; at a whole number the epoch ends.
            least: smallest drop, as a part of the loss.
        """
        number = -int(-epoch // 1.0) - 1 if abs(epoch) < 1e9 else 0
        if self._epoch is not None and number != self._epoch:
            self._close(is_next=number == self._epoch + 1)
        self._epoch = number
        self._last.append(loss)
        if len(self._first) < _PART:
            self._first.append(loss)
            if len(self._first) == _PART and self._end:
                self._compare(least)

    def pairs(self) -> list[tuple[float, float]]:
        """Return the training loss before and after each of the latest drops."""
        return list(zip(self.drops[::2], self.drops[1::2], strict=True))

    def _close(self, *, is_next: bool) -> None:
        """Note how an epoch of the fine-tuning ended; a short one shows nothing."""
        self._end.clear()
        if is_next and len(self._first) == _PART:
            last = list(self._last)
            end = upper_median(last)
            noise = _TO_SIGMA * upper_median([abs(b - a) for a, b in pairwise(last)])
            self._end = [end, upper_median(self._first) - end, noise]
        else:
            self.drops.clear()
        self._first.clear()
        self._last.clear()

    def _compare(self, least: float) -> None:
        """Compare the start of an epoch of the fine-tuning with the end of the one before."""
        (end, fall, noise), start = self._end, upper_median(self._first)
        drop = end - start
        # Sorted rows have a loss that rises within the epoch.
        is_sorted = -fall > _MOST_RISE * drop
        if drop >= max(least * end, _SIGMAS * noise) and drop > 0.0 and not is_sorted:
            # In the first epoch the model learns; later ones must be flat between the drops.
            self.drops = [*self.drops[-2:], end, start] if drop >= fall else [end, start]
        else:
            self.drops.clear()


class MemorizedWatcher(PostTrainingWatcher):
    """Reports training rows that SFT memorizes, or that contain their answer.

    The evaluation loss is 5% above its best (at least 0.05 nats). And the training loss is at most
    0.4 of it while the evaluation is at least 0.5, or it falls in a step at the start of each epoch
    and not in between. Two signs are reported before that rise: a training loss at most 0.4 of the
    evaluation that was halved since the evaluation before it, while the evaluation fell by less
    than 5%; and a drop by 40% at the start of an epoch, with an evaluation 2.5% above its best.
    Without evaluations only a training loss of at most 0.05 from the first step on is reported:
    such a run has nothing to learn.
    """

    name = "memorized"
    STATE = ("_recent", "_evaluated", "_best", "_best_step", "_before", "_ahead_of", "_drops",
             "_last_epoch", "_start", "_start_at", "_is_start_judged", "_is_known")  # fmt: skip
    MAY_LACK = True  # states of older versions lack ``_is_known`` or ``_before``

    def __init__(self, config: PostTrainingConfig | None = None) -> None:
        super().__init__(config)
        self._recent: deque[float] = deque(maxlen=self._config.window)
        self._evaluated: float | None = None
        """The latest evaluation loss, and the best one."""
        self._best: float | None = None
        self._best_step = 0
        self._before: list[list[float]] = []
        """The latest evaluation losses, each with the level of the training loss at its step."""
        self._ahead_of: float | None = None
        """Evaluation loss that the training loss was reported to leave behind."""
        self._drops = EpochDrops()
        self._last_epoch = 0.0
        self._start: list[float] = []
        """Losses from the start."""
        self._start_at = -1
        self._is_start_judged = False
        self._is_known = False
        """Whether the rows were reported as known: later steps do not change them."""

    def holds(self, cause: str) -> bool:
        """Return whether the rows are still known ones, or still memorized."""
        return self._is_known if cause == "known_rows" else self.goes_on

    @staticmethod
    def is_for(spec: TaskSpec) -> bool:
        """Return whether the run is SFT."""
        return spec.supervised

    def _restarted(self, merged: MergedStep) -> None:
        """Drop the losses of another attempt or process of the fine-tuning."""
        super()._restarted(merged)
        self._recent.clear()
        self._before.clear()
        self._drops.clear()
        if merged.step <= self._best_step:
            self._evaluated = self._best = self._ahead_of = None
        self._is_known = self._is_known and merged.step > self._start_at
        self._is_start_judged = True

    def rebaseline(self) -> None:
        """Compare with the evaluations after the announced change of the fine-tuning data."""
        super().rebaseline()
        self._recent.clear()
        self._before.clear()
        self._ahead_of = None
        self._drops.clear()
        self._evaluated = self._best = None
        self._is_known = False
        self._is_start_judged |= self._start_at >= 0

    def _judge(self, merged: MergedStep) -> tuple[Finding, ...]:
        """Judge training loss and evaluation loss of a logged step of SFT."""
        loss, evaluated = quantity(merged, names.LOSS), quantity(merged, names.EVAL_LOSS)
        epoch = quantity(merged, names.EPOCH)
        if loss is not None:
            self._recent.append(loss)
        if evaluated is not None:
            self._evaluated = evaluated
            if self._best is None or evaluated < self._best:
                self._best, self._best_step = evaluated, merged.step
            if len(self._recent) == self._config.window:
                self._before = [*self._before[-1:], [evaluated, upper_median(self._recent)]]
        if loss is None:
            return () if evaluated is None else self._overfit(merged)
        if epoch is not None:
            self._last_epoch = epoch
            self._drops.add(loss, epoch, self._config.epoch_drop)
        return self._known(merged, loss) + self._overfit(merged)

    def _known(self, merged: MergedStep, loss: float) -> tuple[Finding, ...]:
        """Report a loss near 0 from the first step on: the model knows the answers already."""
        if self._is_start_judged:
            return ()
        if not self._start:
            self._start_at = merged.step
        elif len(self._start) == 1 and self._start_at > merged.step - self._start_at:
            self._is_start_judged = True  # it was resumed: losses before the first are missing
            return ()
        self._start.append(loss)
        if loss > self._config.known_loss or self._start_at > self._config.leak_steps:
            self._is_start_judged = True
            return ()
        if len(self._start) < _START:
            return ()
        self._is_start_judged = True
        # A first value may be the mean of many steps, in which an easy task was learned.
        every = max(merged.step - self._start_at, 1) / (_START - 1)
        if self._start[0] * every > self._config.known_loss or min(self._start) < 0.0:
            return ()
        self._is_known = True
        reason = (
            f"the training loss is {upper_median(self._start):.3g} from the start, so there is "
            "nothing to learn. Likely causes: the model was trained on these rows; the answer is "
            "in its own prompt; or nearly all labels are masked or trivial. Decode some labels"
        )
        return self._report(
            merged.step, reason, cause="known_rows", value=self._start[0],
            limit=self._config.known_loss, onset_step=self._start_at,
        )  # fmt: skip

    def _overfit(self, merged: MergedStep) -> tuple[Finding, ...]:
        """Report a training loss that falls while the evaluation loss rises."""
        evaluated, best, config = self._evaluated, self._best, self._config
        if evaluated is None or best is None or best <= 0.0:
            return ()
        is_worse = evaluated - best >= config.eval_rise * max(best, 1.0)
        self._note_beyond(is_worse)
        if len(self._recent) < config.window:
            return ()
        level, drops = upper_median(self._recent), self._drops.pairs()
        # An evaluation that is near 0 itself is that of an easy task.
        is_easy = evaluated < config.easy_loss
        is_far = level <= config.memorized_part * evaluated and not is_easy
        is_sharp = evaluated - best >= config.eval_rise / 2 * max(best, 1.0) and any(
            start <= _SHARP * end for end, start in drops
        )
        has_drops = is_sharp or (is_worse and len(drops) >= _NUM_DROPS)
        if not has_drops and not (is_worse and is_far):
            return self._ahead(merged, level, evaluated, is_far=is_far)
        rise = (
            f"the evaluation loss rose from {best:.4g} at step {self._best_step} to {evaluated:.4g}"
        )
        if has_drops:
            falls = ", then ".join(f"from {end:.3g} to {start:.3g}" for end, start in drops)
            reason = (
                f"the training loss drops at the start of an epoch ({falls}), and {rise}. The "
                "model memorizes the rows. Likely causes: too many epochs, rows that occur "
                "several times, or a learning rate that is too high. Use the checkpoint with the "
                "best evaluation, and train for fewer epochs or on more rows"
            )
            return self._begin_condition(
                merged, reason, value=evaluated, limit=best, cause="epochs_repeated"
            )
        return self._begin_memorized(merged, level, evaluated, f"while {rise}")

    def _ahead(
        self, merged: MergedStep, level: float, evaluated: float, *, is_far: bool
    ) -> tuple[Finding, ...]:
        """Report a training loss that falls while the evaluation loss stays.

        Args:
            merged: the logged step of SFT.
            level: level of the training loss.
            evaluated: latest evaluation loss.
            is_far: whether the training loss is far below the evaluation loss.
        """
        if is_far and self._is_ahead(level):
            self._ahead_of = evaluated if self._ahead_of is None else self._ahead_of
            (earlier, level_before), _ = self._before
            course = (
                f"and fell from {level_before:.3g} while the evaluation loss went from "
                f"{earlier:.4g} to {evaluated:.4g}"
            )
            return self._begin_memorized(merged, level, evaluated, course)
        improved = 1.0 - self._config.eval_rise
        if self._ahead_of is not None and evaluated > improved * self._ahead_of:
            return ()  # it holds until the evaluation improves
        self._ahead_of = None
        return self._end_condition()

    def _is_ahead(self, level: float) -> bool:
        """Return whether the training loss left the evaluation loss of SFT behind.

        The latest evaluation hardly improved, but may be many steps old: it is assumed to fall on
        as it fell, compared with the training loss.
        """
        if len(self._before) < _NUM_BEFORE or level > _HALVED * self._before[0][1]:
            return False
        (first, level_first), (second, level_second) = self._before
        if second < _STALLED * first or not 0.0 < level_second <= _FALLEN * level_first:
            return False
        part = max(math.log(first / second) / math.log(level_first / level_second), 0.0)
        expected = second * min(max(level, 0.0) / level_second, 1.0) ** part
        return part <= _SLOW and level <= self._config.memorized_part * expected

    def _begin_memorized(
        self, merged: MergedStep, level: float, evaluated: float, course: str
    ) -> tuple[Finding, ...]:
        """Return the finding about memorized rows of SFT if they start."""
        causes = [
            "rows that are memorized: too many epochs, too few or repeated rows",
            "training rows that contain their answer, unlike those of the evaluation",
        ]
        if 0.0 < self._last_epoch <= 1.0:
            causes.reverse()  # no row was seen twice
        reason = (
            f"the training loss is {level:.3g}, {level / evaluated:.0%} of the evaluation, "
            f"{course}. Likely causes: "
            f"{'; or '.join(causes)}. Use the checkpoint with the best evaluation; decode some "
            "training rows, and train for fewer epochs or on more rows"
        )
        limit = self._config.memorized_part * evaluated
        return self._begin_condition(merged, reason, value=level, limit=limit)


class ForgettingWatcher(PostTrainingWatcher):
    """Reports a fine-tuning whose first updates destroy the base model.

    Within 100 values the loss rises to twice the first one, by at least 1 nat and by four standard
    deviations, as a median of ten; or all of ten values are so high, whatever their noise; or five
    in a row rose by twice as much. A run that starts with random weights cannot rise so far.
    """

    name = "forgetting"
    STATE = ("_recent", "_first", "_first_step", "_num", "_is_judged")

    def __init__(self, config: PostTrainingConfig | None = None) -> None:
        super().__init__(config)
        self._recent: deque[float] = deque(maxlen=self._config.window)
        self._first: float | None = None
        """The first loss, usually that of the base model."""
        self._first_step = 0
        self._num = 0
        self._is_judged = False

    @staticmethod
    def is_for(spec: TaskSpec) -> bool:
        """Return whether the run is SFT: other losses do not compare with a base model's."""
        return spec.supervised

    def _restarted(self, merged: MergedStep) -> None:
        """Judge no later start: a resumed fine-tuning does not begin with the base model."""
        super()._restarted(merged)
        self._is_judged = True

    def rebaseline(self) -> None:
        """Judge no change that was announced during the fine-tuning."""
        super().rebaseline()
        self._is_judged |= self._num > 0

    def _judge(self, merged: MergedStep) -> tuple[Finding, ...]:
        """Judge the first losses of SFT."""
        loss, config = quantity(merged, names.LOSS), self._config
        if loss is None or self._is_judged:
            return ()
        self._num += 1
        if self._first is None:
            self._first, self._first_step = loss, merged.step
            return ()
        is_resumed = self._num == 2 and self._first_step > merged.step - self._first_step
        if is_resumed or self._num > config.leak_steps or self._first <= 0.0:
            self._is_judged = True
            return ()
        self._recent.append(loss)
        rise = max((config.forget_times - 1.0) * self._first, config.forget_rise)
        least, latest = self._first + rise, list(self._recent)[-_START:]
        is_certain = len(latest) == _START and min(latest) >= least + rise
        if len(self._recent) < config.window and not is_certain:
            return ()
        noise = _TO_SIGMA * upper_median([abs(b - a) for a, b in pairwise(self._recent)])
        limit = max(least, self._first + _RISE_SIGMAS * noise)
        level = upper_median(self._recent)
        if level < limit and min(self._recent) < least and not is_certain:
            return ()
        self._is_judged = True
        reason = (
            f"the first updates destroyed the base model: the loss was {self._first:.3g} before "
            f"them, and is {level:.3g}. Likely causes: a learning rate for pre-training or LoRA in "
            "a full fine-tuning, no warmup, or a base model whose weights were not loaded "
            "completely. Start again from the base model with a tenth of the learning rate"
        )
        return self._report(
            merged.step, reason, value=level, limit=least, onset_step=self._first_step
        )


class LabelsWatcher(CountWatcher):
    """Reports labels of SFT that train the wrong tokens.

    Padding has labels, or no row has an end-of-sequence token among its labels, or the tokens of
    prompts that the dataset marks have labels. Each is a count over the first batches, and reported
    once.
    """

    name = "labels"
    CAUSES = ("padding_labels", "no_end_label", "prompt_labels")

    @staticmethod
    def is_for(spec: TaskSpec) -> bool:
        """Return whether the run is SFT."""
        return spec.supervised

    def _judge(self, merged: MergedStep) -> tuple[Finding, ...]:
        """Judge the counts of labels that a step logged."""
        limit = self._config.label_share
        padding, prompt = (
            quantity(merged, names.PADDING_LABELS),
            quantity(merged, names.PROMPT_LABELS),
        )
        ends = quantity(merged, names.END_LABELS)
        prompt_limit = self._config.prompt_label_share
        findings: tuple[Finding, ...] = ()
        if padding is not None and padding < limit:
            self._clear("padding_labels")
        elif padding is not None:
            findings += self._report_once(
                merged, "padding_labels", padding, limit,
                f"{padding:.0%} of the labels are padding, so the model learns to repeat it. "
                "Likely cause: labels that are a copy of the padded input_ids. Set the labels of "
                "padding to -100",
            )  # fmt: skip
        if ends is not None and ends > 0.0:
            self._clear("no_end_label")
        elif ends is not None:
            findings += self._report_once(
                merged, "no_end_label", ends, 0.0,
                "no row of the first batches has an end-of-sequence token among its labels, so "
                "completions will not end. Likely causes: a chat template that ends with another "
                "token (set eos_token to it), text without the token, or a pad token that is the "
                "end-of-sequence token and masks it. Decode the end of some labels",
            )  # fmt: skip
        if prompt is not None and prompt < prompt_limit:
            self._clear("prompt_labels")
        elif prompt is not None:
            findings += self._report_once(
                merged, "prompt_labels", prompt, prompt_limit,
                f"{prompt:.0%} of the prompts' tokens have labels, so the model also learns to "
                "write prompts. Likely causes: completion_only_loss=False, or a collator that "
                "ignores the mask of the completions. Set the labels of prompts to -100, unless "
                "prompts are to be learned",
            )  # fmt: skip
        return findings
