"""In every wrapping the norms are those of the whole gradients, whoever holds which part."""

import pytest

from tests.trainer_hooks.wrappings.cases import SHARDED
from tests.trainer_hooks.wrappings.models import WRAPPINGS
from trainvitals.records import RANK_FAILED

pytestmark = pytest.mark.dist

EVERY = [(world, name) for world, wrappings in WRAPPINGS.items() for name in wrappings]
PARTED = [(world, name) for world, name in EVERY if name in SHARDED]


def near(squares):
    """Norms to 1e-5, so squares to twice that; where all is rounding, what is left of it."""
    return pytest.approx(squares, rel=2e-5, abs=1e-13)


@pytest.mark.parametrize(("world", "name"), EVERY)
def test_each_parameter_s_norm_is_that_of_a_single_process(found, world, name):
    for rank in found(world, name):
        assert near(rank["norms"]["expected"]) == rank["norms"]["ours"]


@pytest.mark.parametrize(("world", "name"), EVERY)
def test_each_parameter_s_norm_is_that_of_the_gathered_gradient(found, world, name):
    for rank in found(world, name):
        whole = rank["norms"]["full"]
        assert near(whole) == {key: rank["norms"]["ours"][key] for key in whole}


@pytest.mark.parametrize(("world", "name"), EVERY)
def test_the_total_norm_is_that_of_a_single_process(found, world, name):
    for rank in found(world, name):
        assert near(sum(rank["norms"]["expected"].values())) == rank["norms"]["total"]


@pytest.mark.parametrize(("world", "name"), EVERY)
def test_the_optimizer_gets_gradients_clipped_by_the_total_norm(found, world, name):
    assert all(rank["norms"]["clipped"] for rank in found(world, name))


@pytest.mark.parametrize(("world", "name"), EVERY)
def test_parameters_have_the_names_and_the_number_that_the_user_knows(found, world, name):
    for rank in found(world, name):
        norms = rank["norms"]
        flat = [f"{module}_flat_param" for module in ("", "mix.", "blocks.0.", "blocks.1.")]
        assert (flat if "flat" in name else norms["names"]) == list(norms["ours"])
        assert norms["true_num_parameters"] == norms["num_parameters"]


@pytest.mark.parametrize(("world", "name"), EVERY)
def test_nothing_of_ours_failed_on_the_way(found, world, name):
    for rank in found(world, name):
        assert {} == rank["norms"]["faults"]
        assert {} == rank["faults"]["faults"]


@pytest.mark.parametrize(("world", "name"), PARTED)
def test_a_part_without_a_gradient_adds_nothing(found, world, name):
    ranks = [rank["short"] for rank in found(world, name)]
    copies = 2 if name == "hsdp" else 1
    for rank in ranks:
        assert near(sum(rank["own"] for rank in ranks) / copies) == rank["ours"]


@pytest.mark.parametrize(("world", "name"), PARTED)
def test_a_rank_that_cannot_measure_trains_as_the_others_do(found, world, name):
    for rank in found(world, name):
        assert [0, RANK_FAILED, RANK_FAILED, 0] == rank["unmeasured"]["bits"]


@pytest.mark.parametrize(("world", "name"), PARTED)
def test_what_ranks_hold_alike_stays_alike_where_none_could_measure(found, world, name):
    values: dict[str, set[float]] = {}
    for rank in found(world, name):
        for shard, value in rank["unmeasured"]["held"]:
            values.setdefault(str(shard), set()).add(value)
    assert {} == {shard: each for shard, each in values.items() if len(each) > 1}
