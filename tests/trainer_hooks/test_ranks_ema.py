"""Two real ranks, wrapped in four ways: each averages, swaps and restores what it holds."""

import pytest

from tests.trainer_hooks.ranks_ema import BAD, WRAPPINGS, main
from tests.trainer_hooks.spawned import spawned

pytestmark = [pytest.mark.dist, pytest.mark.slow]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Run all cases in one launch and return what each rank found."""
    return spawned(main, tmp_path_factory.mktemp("ema"))


@pytest.mark.parametrize("name", WRAPPINGS)
def test_each_rank_averages_and_swaps_what_it_holds_as_if_the_bad_steps_had_not_been(found, name):
    for one in found:
        assert one[name] == {
            "stood": list(BAD),
            "as_twin": True,
            "weights": True,
            "swapped": True,
            "back": True,
            "differ": True,
            "told": "UsageError",
            "faults": {},
            "seen": True,
        }


@pytest.mark.parametrize("name", WRAPPINGS)
def test_its_tensors_are_laid_out_and_named_as_the_parameters(found, name):
    for one in found:
        layout = one[f"{name} layout"]
        assert layout["alike"]
        assert layout["dtypes"] == ["torch.float64", "torch.int64"]
        assert (
            layout["names"]
            == found[0]["fsdp1 flat layout" if "flat" in name else "ddp layout"]["names"]
        )


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "fsdp1"])
def test_weights_that_became_nan_bring_each_rank_s_average_back(found, name):
    for one in found:
        assert one[f"{name} heals"] == {"back": 1, "exact": [True], "finite": True}


def test_a_shard_fits_no_whole_model(found):
    for one in found:
        assert one["shapes"] == {"copy": "UsageError", "load": "CheckpointError"}
