"""Real ranks: the probe leaves no trace, reads the same everywhere, and ends on all or on none."""

import os

import pytest

from tests.trainer_hooks.ranks_probing import CHANGES, FEW_STEPS, WRAPPINGS, main
from tests.trainer_hooks.spawned import spawned

pytestmark = pytest.mark.dist


def launched(folder, ranks):
    os.environ["PROBING_RANKS"] = str(ranks)
    try:
        return spawned(main, folder, ranks=ranks)
    finally:
        del os.environ["PROBING_RANKS"]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Run all cases on two ranks in one launch and return what each rank found."""
    return launched(tmp_path_factory.mktemp("probe"), 2)


def assert_untouched(each):
    for one in each:
        assert (one["differs"], one["is_on"], one["faults"]) == ([], True, {})
        assert one["readings"] == each[0]["readings"]
        assert max(one["num_batches"]) >= 8


@pytest.mark.parametrize("kind", WRAPPINGS)
def test_a_training_is_bit_for_bit_the_same_with_and_without_probing(found, kind):
    assert_untouched([one[kind] for one in found])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [4])
def test_so_it_is_on_four_ranks(tmp_path, ranks):
    found = launched(tmp_path, ranks)
    for kind in ("ddp", "fsdp2"):
        assert_untouched([one[kind] for one in found])


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
@pytest.mark.parametrize("case", CHANGES)
def test_a_loss_of_that_fails_on_one_rank_ends_on_all_and_is_told_once(found, kind, case):
    for rank, one in enumerate(found):
        result = one[f"{kind} {case}"]
        assert (result["is_on"], result["readings"], result["steps"]) == (False, [0, 0], FEW_STEPS)
        assert len(result["off"]) == (rank == 0)
    (text,) = found[0][f"{kind} {case}"]["off"]
    if case in ("before", "behind", "swallowed"):
        assert "ValueError: no such key on rank 1" in text


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_failed_probe_leaves_no_trace_either(found, kind):
    for one in found:
        assert one[f"{kind} goes on"] == {"differs": [], "is_on": False}


def test_a_rehearsal_that_one_rank_fails_switches_off_all(found):
    for one in found:
        assert (one["wrong on one"]["is_on"], one["wrong on one"]["readings"]) == (False, [0, 0])
    (text,) = found[0]["wrong on one"]["off"]
    assert text.startswith("the probe is off: loss_of gave ")
    assert text.endswith("on rank 1")
