"""All detectors over the scalars of a post-training run, as collector and rank 0 run them."""

from collections.abc import Mapping

from trainvitals.detect.fleet.base import MergedStep
from trainvitals.detect.posttraining.adapters import AdapterWatcher
from trainvitals.detect.posttraining.base import PostTrainingWatcher
from trainvitals.detect.posttraining.names import TASKS, read_quantities
from trainvitals.detect.posttraining.policy import (
    DeadRewardWatcher,
    KlRunawayWatcher,
    PolicyCollapseWatcher,
    RewardHackingWatcher,
    RewardJumpWatcher,
    TruncationWatcher,
)
from trainvitals.detect.posttraining.preference import OverconfidenceWatcher, PreferenceWatcher
from trainvitals.detect.posttraining.sampling import PolicyRatioWatcher, SamplerGapWatcher
from trainvitals.detect.posttraining.settings import PostTrainingConfig
from trainvitals.detect.posttraining.supervised import (
    ForgettingWatcher,
    LabelsWatcher,
    MemorizedWatcher,
)
from trainvitals.records import Finding
from trainvitals.stateful import Stateful

WATCHERS: tuple[type[PostTrainingWatcher], ...] = (
    PolicyCollapseWatcher,
    DeadRewardWatcher,
    KlRunawayWatcher,
    TruncationWatcher,
    RewardHackingWatcher,
    RewardJumpWatcher,
    PolicyRatioWatcher,
    SamplerGapWatcher,
    PreferenceWatcher,
    OverconfidenceWatcher,
    MemorizedWatcher,
    ForgettingWatcher,
    LabelsWatcher,
    AdapterWatcher,
)
"""Every detector, in the order in which they run."""


class PostTrainingDetectors(Stateful):
    """Runs the detectors of one kind of run over its scalars. Reads no clock, raises on no data.

    Call ``update`` with each logged step, in order, and ``expect_change`` before the first one
    after an announced change.

    Args:
        task: kind of the run; none of ``TASKS``: nothing is judged.
        config: limits.
    """

    STATE = ("_watchers",)
    FLAGS_ARE_NUMBERS = True

    def __init__(self, task: str, config: PostTrainingConfig | None = None) -> None:
        self._watchers: dict[str, PostTrainingWatcher] = {}
        if (spec := TASKS.get(task)) is None:
            return
        for watcher_class in WATCHERS:
            if watcher_class.is_for(spec):
                watcher = self._watchers[watcher_class.name] = watcher_class(config)
                watcher.set_kind(spec)

    @property
    def is_empty(self) -> bool:
        """Return whether no detector judges this kind of post-training run."""
        return not self._watchers

    def update(
        self, values: Mapping[str, float], *, step: int, attempt: int, time_unix_ns: int
    ) -> tuple[Finding, ...]:
        """Add the scalars of one logged step, by the names of their library.

        Returns:
            All findings about it.
        """
        quantities = read_quantities(values)
        if not quantities:
            return ()
        merged = MergedStep(step=step, attempt=attempt, time_unix_ns=time_unix_ns, run=quantities)
        return tuple(f for watcher in self._watchers.values() for f in watcher.update(merged))

    def expect_change(self) -> None:
        """Note that a change was announced: what follows is not compared with levels before it."""
        for watcher in self._watchers.values():
            watcher.rebaseline()

    def holds(self, finding: Finding) -> bool:
        """Return whether the condition of an earlier finding still holds."""
        watcher = self._watchers.get(finding.detector)
        return watcher is not None and watcher.holds(finding.cause)
