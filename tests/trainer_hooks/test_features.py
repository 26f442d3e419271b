"""A feature is a class and one line of registration: its numbers are summed over real ranks."""

import pytest

from tests.trainer_hooks.ranks_with_feature import STEPS, main
from tests.trainer_hooks.spawned import spawned
from trainer_hooks.exchange.reduce_vector import CORE_SLOTS, Slots, VectorFields
from trainer_hooks.features import FEATURES, vector_fields


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Run two starts of a training in one launch and return what each rank found."""
    return spawned(main, tmp_path_factory.mktemp("feature"))


@pytest.mark.dist
def test_a_feature_s_numbers_are_summed_over_the_ranks_and_come_back_at_the_same_step(found):
    expected = [
        [step, 100.0 + step, total, [float(step), float(step + 1)], total]
        for step in range(STEPS)
        for total in [24.0 * (step + 1)]
    ]
    for rank in found:
        assert expected == rank["first"]
        assert {} == rank["first faults"]
        assert rank["first restored"] is None


@pytest.mark.dist
def test_a_feature_s_state_comes_back_with_the_checkpoint(found):
    for rank in found:
        step, state = rank["second restored"]
        assert 0 < step <= STEPS
        # The newest step may still be on the device when the state is copied.
        assert state["total"] in (24.0 * (step - 1), 24.0 * step)
        assert [step, 100.0 + step, state["total"] + 24.0] == rank["second"][0][:3]
        assert {} == rank["second faults"]


def test_the_vector_keeps_its_order():
    """Ranks of one job have the same version, but recorded vectors and benchmarks use it."""
    fields = vector_fields()
    assert (
        "loss_limit", "grad_norm_limit", "max_row", "clips", "command_number", "command_action",
        "command_argument", "next_attempt", "expect_steps", "change_expected", "saved_step",
        "saved_attempt", "save_due", "saving", "evaluated", "evaluation", "evaluation_ratio",
        "stepped_twice", "rate_declared", "auto_max_norm", "collapse", "weights_written",
    ) == fields.rank0  # fmt: skip
    assert (
        "weighted_loss", "weight", "overflow", "failed", "bad_squares", "num_gradients",
        "nonfinite_params", "norm_before_clip", "groups", "nonfinite_state", "snapshot_missed",
        "digest", "terminating", "holds_evaluated", "probe_ready", "replicas",
    ) == fields.rank  # fmt: skip
    assert ("loss", "groups", "digest", "replicas") == fields.exact


def test_two_features_cannot_have_the_same_slot():
    with pytest.raises(AssertionError, match="two features have the slot 'spare'"):
        VectorFields.of([Slots(rank=("spare",)), Slots(rank=("spare",))])
    assert CORE_SLOTS.rank == VectorFields().rank


def test_state_keys_are_unique():
    keys = [feature.state_key for feature in FEATURES if feature.state_key]
    assert sorted(set(keys)) == sorted(keys)
