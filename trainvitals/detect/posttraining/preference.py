"""Problems of a loss that compares a chosen with a rejected completion."""

from __future__ import annotations

from collections import deque

from trainvitals.detect.fleet.base import MergedStep, advisory_finding, upper_median
from trainvitals.detect.posttraining import names
from trainvitals.detect.posttraining.base import PostTrainingWatcher, quantity
from trainvitals.detect.posttraining.names import TaskSpec
from trainvitals.detect.posttraining.settings import PostTrainingConfig
from trainvitals.records import Finding

_LEAST_EARLY = 3


class PreferenceWatcher(PostTrainingWatcher):
    """Reports chosen completions that become improbable, and pairs that need no training.

    In DPO both log-probabilities usually fall somewhat. Reported is a chosen one whose negative
    doubled while the rejected one fell too. An accuracy of at least 98% within the first 50 steps
    means that the pairs differ in something trivial, such as a template or the length.
    """

    name = "preference"
    STATE = ("_chosen", "_rejected", "_first", "_early", "_first_step")

    def __init__(self, config: PostTrainingConfig | None = None) -> None:
        super().__init__(config)
        window = self._config.window
        self._chosen: deque[float] = deque(maxlen=window)
        self._rejected: deque[float] = deque(maxlen=window)
        self._first: list[float] = []
        """First levels of both log-probabilities."""
        self._early: list[float] = []
        """Accuracies of the first steps."""
        self._first_step = -1

    @staticmethod
    def is_for(spec: TaskSpec) -> bool:
        """Return whether the loss of such a run compares two completions."""
        return spec.compares

    def _restarted(self, merged: MergedStep) -> None:
        self._chosen.clear()
        self._rejected.clear()

    def rebaseline(self) -> None:
        """Compare with the log-probabilities at the announced change."""
        self._chosen.clear()
        self._rejected.clear()
        self._first.clear()

    def _judge(self, merged: MergedStep) -> tuple[Finding, ...]:
        return (*self._leak(merged), *self._displacement(merged))

    def _leak(self, merged: MergedStep) -> tuple[Finding, ...]:
        accuracy, config = quantity(merged, names.ACCURACY), self._config
        if accuracy is None:
            return ()
        if self._first_step < 0:
            self._first_step = merged.step
        # The first value is from before any update, or contains such steps.
        if not self._first_step < merged.step <= self._first_step + config.leak_steps:
            return ()
        if len(self._early) >= _LEAST_EARLY:
            return ()  # already judged
        self._early.append(accuracy)
        if len(self._early) < _LEAST_EARLY or min(self._early) < config.leak_accuracy:
            return ()
        return (
            advisory_finding(
                self.name,
                merged.step,
                f"{min(self._early):.0%} of the pairs are ranked correctly from the start, so "
                "there is nothing to learn. Likely causes: chosen and rejected differ in the "
                "template, the length or a mark; or pairs that the model was trained on. Compare "
                "some pairs as tokens",
                cause="preference_leak",
                value=min(self._early),
                limit=config.leak_accuracy,
            ),
        )

    def _displacement(self, merged: MergedStep) -> tuple[Finding, ...]:
        chosen, rejected = quantity(merged, names.CHOSEN), quantity(merged, names.REJECTED)
        if chosen is None or rejected is None or chosen >= 0.0:
            return ()
        self._chosen.append(chosen)
        self._rejected.append(rejected)
        if len(self._chosen) < self._config.window:
            return ()
        level, other = upper_median(self._chosen), upper_median(self._rejected)
        if not self._first:
            self._first = [level, other]
        first, limit = self._first[0], self._config.chosen_times * self._first[0]
        if level > limit or other > self._first[1]:
            return self._report(None)
        return self._report(
            advisory_finding(
                self.name,
                merged.step,
                f"the chosen completions become improbable: their log-probability fell from "
                f"{first:.4g} to {level:.4g}, that of the rejected ones from {self._first[1]:.4g} "
                f"to {other:.4g}. Likely causes: a learning rate that is too high, a beta that is "
                "too low, or pairs that are nearly equal. Lower the learning rate, raise beta, or "
                "add an SFT term (rpo_alpha)",
                value=level,
                limit=limit,
            )
        )
