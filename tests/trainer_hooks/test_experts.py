"""Experts on different ranks: one norm, one verdict, exact skips, rollbacks and restarts."""

import pytest

from tests.support.examples import one_in
from tests.trainer_hooks.ranks_experts import BAD, WIDTH, four, two
from tests.trainer_hooks.spawned import spawned

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def of_two(tmp_path_factory):
    return spawned(two, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def of_four(tmp_path_factory):
    return spawned(four, tmp_path_factory.mktemp("four"), ranks=4)


@pytest.fixture(params=one_in(2, ["of_two", "of_four"]))
def found(request):
    return request.getfixturevalue(request.param)


def test_skips_are_exact_and_the_norm_counts_each_expert_once(found):
    for rank in found:
        for name, case in rank["skips"].items():
            assert case["exact"], name
            assert case["skipped"] == list(BAD), name
            assert case["ranks"] == [[1]] * len(BAD), name
            assert case["recorded norms"] == pytest.approx(case["norms"], rel=1e-6), name
            assert case["faults"] == {}, name


def test_every_rank_names_and_counts_the_experts_of_all(found):
    layer = WIDTH * (WIDTH + 1)
    experts = [f"experts.{i}.{kind}" for i in range(2 * len(found)) for kind in ("weight", "bias")]
    for rank in found:
        for case in rank["skips"].values():
            assert [n for n in case["names"] if n.startswith("experts.")] == experts
            assert case["num_parameters"] == (2 + 2 * len(found)) * layer


def test_a_bad_gradient_of_one_expert_is_skipped_on_all_ranks_and_its_rank_named(found):
    for rank in found:
        cases = rank["gradients"]
        assert cases["nan"]["exact"] and cases["large"]["exact"]
        assert [20] == cases["nan"]["skipped"]
        assert [20] == cases["large"]["skipped"]
        assert [[1]] == cases["nan"]["ranks"]


def test_a_damaged_expert_is_rolled_back_on_all_ranks_and_a_restart_is_exact(found):
    for rank in found:
        for name, case in rank["heals"].items():
            assert case["exact"], name
            assert len(case["back"]) == 1, name
            assert 0 < case["resumed"], name
            assert case["exact after a restart"], name
            assert case["faults"] == {}, name
    for name in found[0]["heals"]:
        first, second = (rank["heals"][name] for rank in found[:2])
        assert "parameters are non-finite on 1 rank (rank 1)" in first["reasons"]
        assert "rank 1: NaN or infinite: experts.2.weight" in second["notes"]


def test_the_probe_sees_damage_of_one_rank_s_expert(found):
    for rank in found:
        case = rank["probes"]
        healthy, damaged = case["readings"]
        assert (True, [], {}) == (case["is_on"], case["off"], case["faults"])
        assert healthy < 1.2
        assert damaged > 3


def test_shared_parameters_are_compared_and_experts_are_not(of_four):
    case = of_four[0]["corrupted"]
    assert ["replica_corrupted"] == case["kinds"]
    assert all("enter" in reason for reason in case["reasons"])


def test_each_rank_may_add_its_own_experts_to_the_optimizer(of_two):
    for rank in of_two:
        case = rank["thaws"]
        assert (True, [8], {}) == (case["exact"], case["skipped"], case["faults"])
        assert 2 + 4 == len({name.rpartition(".")[0] for name in case["names"]})


def test_signals_have_the_values_of_all_ranks_experts(of_two):
    for rank in of_two:
        case = rank["signals"]
        assert case["faults"] == {}
        for step, weights in enumerate(case["weights"]):
            assert case["expected weights"][step] == pytest.approx(weights, rel=1e-6)
        assert case["names"] == case["updated"]
        assert ["experts.3.weight"] == case["written"]
        modules = ["enter", "leave", "experts", *(f"experts.{i}" for i in range(4))]
        assert sorted(modules) == sorted(case["modules"])
    here = of_two[0]["signals"]["measured"]
    assert ["enter", "experts.0", "experts.1", "leave"] == here


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("unmarked", "set allreduce = False on their parameters"),
        ("optimizer", "all optimizers step together"),
        ("no module", "no module is named 'nothing'"),
    ],
)
def test_what_is_not_supported_is_refused_on_every_rank(of_two, name, text):
    for rank in of_two:
        assert text in rank["refusals"][name]
