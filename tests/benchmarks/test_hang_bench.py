"""A slice of the bench of hangs: real torchrun ranks, a real fault, a real agent."""

import pytest

from vitals_bench.hang.measure import FAULTS, Fault, Trial, run_trial

pytestmark = [pytest.mark.nightly, pytest.mark.dist]


def trial_of(title: str) -> Trial:
    (fault,) = [fault for fault in FAULTS if fault.title == title]
    return run_trial(fault, ranks=2, watch_seconds=fault.watched_seconds)


def test_a_real_job_that_hangs_is_named():
    trial = trial_of("sleeps in the loader")
    assert trial.is_right, trial.texts
    assert [trial.fault.reason] == trial.reasons
    assert trial.shown is not None and trial.paged is not None and trial.stacks is not None
    assert trial.shown < trial.paged


def test_the_stage_that_the_others_wait_for_is_named():
    """Of four stages: the last one has received fewer messages than the one that stands still."""
    (fault,) = [fault for fault in FAULTS if fault.training == "pipeline"]
    trial = run_trial(fault, ranks=4, watch_seconds=fault.watched_seconds)
    assert trial.is_right, trial.texts
    assert [fault.reason] == trial.reasons
    assert any("stage 1 of the pipeline; ranks 0, 2, 3 wait" in text for text in trial.texts)


@pytest.mark.slow
@pytest.mark.parametrize("title", [f.title for f in FAULTS if f.title != "sleeps in the loader"])
def test_every_other_fault_of_the_bench_is_named(title: str):
    trial = trial_of(title)
    assert trial.is_right, trial.texts
    if trial.fault.reason not in ("", "gone"):
        assert [trial.fault.reason] == trial.reasons


@pytest.mark.slow
def test_a_job_that_is_stopped_and_continued_pages_nobody():
    fault = Fault(title="all", name="stop all", seconds=6.0)
    trial = run_trial(fault, ranks=2, watch_seconds=4.0)
    assert trial.paged is None, trial.texts
