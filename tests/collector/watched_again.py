"""What the watchers tell of a stored run that they look at once more."""

from typing import NamedTuple

from trainvitals.detect.fleet import FleetConfig, FleetDetectors
from vitals_collector.live.live_monitor import FollowedRun, RunWatchState, TimedFinding
from vitals_collector.live.step_join import MergeConfig, StepMerger
from vitals_collector.storage.store import ReadSnapshot


class Again(NamedTuple):
    told: list[TimedFinding]
    num_missing: int
    """Rows of ranks that they had to do without: they never came, or were thinned."""


def watch_again(moment: ReadSnapshot, run_id: str, *, watch: FleetConfig | None = None) -> Again:
    """Return what is told of the run from its beginning, but for what needs the clock."""
    steps = StepMerger(MergeConfig())
    followed = FollowedRun(run_id, RunWatchState(), FleetDetectors(watch), steps)
    now_ns, told = 0, list[TimedFinding]()
    while not followed.is_drained or not now_ns:
        followed.read_stored(moment, 50_000, now_ns)
        told += followed.advance(now_ns, is_running=False)
        if followed.is_read:  # nobody is waited for any more
            now_ns += int(steps.config.patience_seconds * 1e9)
    return Again(told, steps.num_missing)
