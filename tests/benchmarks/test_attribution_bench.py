"""The bench of attribution: a small slice of it, and what it counts."""

import pytest

from trainvitals.detect.fleet.origin.onsets import Onset
from vitals_bench.attribution.measure import Named, named
from vitals_bench.attribution.rank import Work
from vitals_bench.attribution.runs import Recorded, record
from vitals_bench.attribution.trainings import FAULTS, LOUD, MILD, Fault, make, plan

pytestmark = pytest.mark.nightly

SLICE = ("weights_x10", "nan_grad", "rank_garbage5", "clip_off")


@pytest.fixture(scope="module")
def recorded() -> Recorded:
    return record(Work(model="cnn", seed=1, faults=SLICE, between=(226, 232)))


@pytest.mark.slow
def test_faults_in_a_real_training_are_named_from_what_the_library_recorded(recorded: Recorded):
    told = {one.fault.name: one for one in named([recorded])}
    assert set(SLICE) == set(told)
    for one in told.values():
        assert one.is_right, (one.fault, one.onset)
        assert one.fault.step == one.onset.step


@pytest.mark.slow
def test_without_signals_no_wrong_cause_is_named(recorded: Recorded):
    for one in named([recorded], by_default=True):
        assert one.is_right or one.onset is None or not one.onset.is_cause, one


def test_a_name_is_right_only_with_its_place():
    fault = Fault("rank_garbage5", 300, "0", 2, 1, 310)
    onset = Onset(
        attempt=1, step=300, last_step=300, subject="data", where="rank:2", series="rank_loss"
    )
    assert Named(fault, onset).is_right
    assert not Named(fault._replace(rank=1), onset).is_right
    assert not Named(fault, None).is_right


@pytest.mark.parametrize("model", ["gpt", "cnn"])
def test_every_fault_strikes_a_layer_that_is_there_and_is_asked_about_later(model: str):
    training = make(model, 3)
    drawn = plan(3, (*FAULTS, *MILD), training, (270, 430))
    assert {*FAULTS, *MILD} == {fault.name for fault in drawn}
    assert set(LOUD) < set(FAULTS)
    for fault in drawn:
        assert fault.layer in training.layers
        assert 270 <= fault.step < 430 and 5 <= fault.asked_at - fault.step <= 80
