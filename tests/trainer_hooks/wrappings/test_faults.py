"""Every wrapping: what one rank's fault leaves behind (nothing), and whose norms are measured.

One file, since its ranks are launched once for each number of them; all wrappings have all faults.
"""

import pytest

from tests.trainer_hooks.wrappings.cases import KINDS, PLACES, SHARDED
from tests.trainer_hooks.wrappings.models import DAILY, QUICK, WRAPPINGS
from trainvitals.records import (
    BAD_GRADIENTS,
    BAD_LOSS,
    LOSS_OUTLIER,
    NORM_OUTLIER,
    OVERFLOW,
    RANK_FAILED,
    WITHHELD,
)

pytestmark = pytest.mark.dist

ALL = [(world, name) for world, wrappings in WRAPPINGS.items() for name in wrappings]
CASES = [f"{kind} in {place}" for place in PLACES for kind in KINDS]
NONFINITE = [case for case in CASES if case.startswith(("nan", "inf"))]
FINITE = [case for case in CASES if case not in NONFINITE]


def wrapped(keys):
    """Return the parameters; those that are not daily are nightly, or slow."""
    return [
        pytest.param(
            *key,
            marks=()
            if key in DAILY
            else pytest.mark.nightly
            if key[1] in QUICK
            else pytest.mark.slow,
            id=f"{key[0]}-{key[1]}",
        )
        for key in keys
    ]


EVERY = wrapped(ALL)
SCALED = wrapped(key for key in ALL if WRAPPINGS[key[0]][key[1]].scaled)
UNSCALED = wrapped(key for key in ALL if not WRAPPINGS[key[0]][key[1]].scaled)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("world", "name"), EVERY)
def test_a_step_with_a_fault_on_one_rank_leaves_no_trace_on_any(found, world, name, case):
    for rank in found(world, name):
        result = rank["faults"]["cases"][case]
        assert {"kept": True, "same_rng": True} == {k: result[k] for k in ("kept", "same_rng")}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("world", "name"), EVERY)
def test_the_step_after_a_fault_trains(found, world, name, case):
    for rank in found(world, name):
        result = rank["faults"]["cases"][case]
        words = ("trained", "finite", "clean_bits")
        assert {"trained": True, "finite": True, "clean_bits": 0} == {k: result[k] for k in words}


@pytest.mark.parametrize(("world", "name"), EVERY)
def test_all_ranks_take_the_same_decisions(found, world, name):
    cases = [rank["faults"]["cases"] for rank in found(world, name)]
    for case in CASES:
        told = [
            (each[case]["bits"], each[case]["decisions"], each[case]["scale"]) for each in cases
        ]
        assert [told[0]] * world == told


@pytest.mark.parametrize(("world", "name"), UNSCALED)
def test_what_is_not_finite_is_skipped_at_once_and_said(found, world, name):
    cases = found(world, name)[0]["faults"]["cases"]
    for case in NONFINITE:
        expected = BAD_LOSS | BAD_GRADIENTS if case.endswith("loss") else BAD_GRADIENTS
        assert (expected, ["skip_step"]) == _verdict(cases[case])


@pytest.mark.parametrize(("world", "name"), UNSCALED)
def test_a_finite_spike_is_an_outlier_even_at_1e30(found, world, name):
    cases = found(world, name)[0]["faults"]["cases"]
    for case in FINITE:
        expected = LOSS_OUTLIER | NORM_OUTLIER if case.endswith("loss") else NORM_OUTLIER
        assert (expected | WITHHELD, ["skip_step"]) == _verdict(cases[case])


@pytest.mark.parametrize(("world", "name"), SCALED)
def test_an_overflow_lowers_the_scale_once_and_is_no_finding(found, world, name):
    cases = found(world, name)[0]["faults"]["cases"]
    for case in ("nan in element", "inf in element", "nan in all", "inf in all"):
        before, after = cases[case]["scale"]
        assert (OVERFLOW, []) == _verdict(cases[case])
        assert before / 2 == after


@pytest.mark.parametrize(("world", "name"), SCALED)
def test_a_scaled_loss_that_is_not_finite_is_said_all_the_same(found, world, name):
    cases = found(world, name)[0]["faults"]["cases"]
    for case in ("nan in loss", "inf in loss"):
        assert (BAD_LOSS | OVERFLOW, ["skip_step"]) == _verdict(cases[case])


@pytest.mark.parametrize(("world", "name"), SCALED)
def test_a_spike_that_is_no_overflow_leaves_the_scale(found, world, name):
    cases = found(world, name)[0]["faults"]["cases"]
    for case in ("1e30 in element", "x300 in element", "x300 in all"):
        before, after = cases[case]["scale"]
        assert (NORM_OUTLIER | WITHHELD, ["skip_step"]) == _verdict(cases[case])
        assert before == after


def _verdict(result):
    return result["bits"], [action for _, action, *_ in result["decisions"]]


@pytest.mark.parametrize(("world", "name"), EVERY)
def test_the_gradient_at_fault_is_named(found, world, name):
    ranks = found(world, name)
    for case in ("nan in element", "inf in element"):
        poisoned = ranks[1]["faults"]["cases"][case]["poisoned"]
        assert [[poisoned]] * world == [r["faults"]["cases"][case]["bad_names"] for r in ranks]


@pytest.mark.parametrize(("world", "name"), EVERY)
def test_the_rank_at_fault_is_named_and_a_finite_outlier_names_nobody(found, world, name):
    for rank in found(world, name):
        for case in CASES:
            expected = [1] if case in NONFINITE else []
            if name == "sequence parallel" and case in ("nan in all", "inf in all"):
                expected = []  # what rank 1 holds of a sum is in everybody's sum
            assert expected == rank["faults"]["cases"][case]["culprits"], case


@pytest.mark.parametrize(("world", "name"), EVERY)
def test_a_fused_optimizer_never_makes_the_host_wait(found, world, name):
    wrapping = WRAPPINGS[world][name]
    expected = 1 if wrapping.fused and not wrapping.sparse else 0
    assert expected == found(world, name)[0]["faults"]["lag"]


# ----------------------------------------------------------------------------------------- norms


PARTED = wrapped(key for key in ALL if key[1] in SHARDED)


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
    copies = 2 if name in ("hsdp", "experts in ddp") else 1
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
