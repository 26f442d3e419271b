"""Real ranks: the probe leaves no trace, reads the same everywhere, and ends on all or on none."""

import functools
import json
import os

import pytest

from tests.trainer_hooks.ranks_probing import CHANGES, FEW_STEPS, WRAPPINGS, main
from tests.trainer_hooks.spawned import spawned

pytestmark = pytest.mark.dist


CASES = [
    *WRAPPINGS,
    *(f"ddp, {change}" for change in CHANGES),
    *(f"fsdp2, {change}" for change in CHANGES),
    "ddp, goes on",
    "fsdp2, goes on",
    "ddp, wrong on one",
    "ddp, while saving",
]
NIGHTLY = [
    "fsdp1",
    "fsdp1 flat",
    *(f"fsdp2, {change}" for change in CHANGES if change != "behind"),
    "fsdp2, goes on",
]
"""Cases whose wrapping and change are each tried in another case, and FSDP1, the older of the two.

A third of a launch is for FSDP1, which ``wrappings/test_faults`` wraps every day.
"""


def params(cases):
    """Return the cases for ``found``, which is launched once for all that are daily."""
    return [
        pytest.param(case, case in NIGHTLY, marks=pytest.mark.nightly if case in NIGHTLY else ())
        for case in cases
    ]


def launched(folder, ranks, cases):
    os.environ |= {"PROBING_RANKS": str(ranks), "PROBING_CASES": json.dumps(cases)}
    try:
        return spawned(main, folder, ranks=ranks)
    finally:
        del os.environ["PROBING_RANKS"], os.environ["PROBING_CASES"]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Return a function that returns what each rank found; it runs all daily or all other cases."""

    @functools.cache
    def run(is_nightly):
        cases = NIGHTLY if is_nightly else [case for case in CASES if case not in NIGHTLY]
        return launched(tmp_path_factory.mktemp("probe"), 2, cases)

    return run


def test_a_probe_does_not_wait_for_a_save_in_the_background(found):
    for one in found(False):
        case = one["ddp, while saving"]
        assert case["num_batches"] >= 2
        assert case["num_saved"] > 0


def assert_untouched(each):
    for one in each:
        assert (one["differs"], one["is_on"], one["faults"]) == ([], True, {})
        assert one["readings"] == each[0]["readings"]
        assert max(one["num_batches"]) >= 8


@pytest.mark.parametrize(("kind", "is_nightly"), params(WRAPPINGS))
def test_a_training_is_bit_for_bit_the_same_with_and_without_probing(found, kind, is_nightly):
    assert_untouched([one[kind] for one in found(is_nightly)])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [4])
def test_so_it_is_on_four_ranks(tmp_path, ranks):
    kinds = ["ddp", "fsdp2"]
    found = launched(tmp_path, ranks, kinds)
    for kind in kinds:
        assert_untouched([one[kind] for one in found])


@pytest.mark.parametrize(
    ("case", "is_nightly"), params(f"{kind}, {c}" for kind in ("ddp", "fsdp2") for c in CHANGES)
)
def test_a_loss_of_that_fails_on_one_rank_ends_on_all_and_is_told_once(found, case, is_nightly):
    found = found(is_nightly)
    for rank, one in enumerate(found):
        result = one[case]
        assert (result["is_on"], result["readings"], result["steps"]) == (False, [0, 0], FEW_STEPS)
        assert len(result["off"]) == (rank == 0)
    (text,) = found[0][case]["off"]
    if case.partition(", ")[2] in ("before", "behind", "swallowed"):
        assert "ValueError: no such key on rank 1" in text


@pytest.mark.parametrize(("case", "is_nightly"), params(["ddp, goes on", "fsdp2, goes on"]))
def test_a_failed_probe_leaves_no_trace_either(found, case, is_nightly):
    for one in found(is_nightly):
        assert one[case] == {"differs": [], "is_on": False}


def test_a_rehearsal_that_one_rank_fails_switches_off_all(found):
    results = [one["ddp, wrong on one"] for one in found(False)]
    for result in results:
        assert (result["is_on"], result["readings"]) == (False, [0, 0])
    (text,) = results[0]["off"]
    assert text.startswith("the probe is off: loss_of gave ")
    assert text.endswith("on rank 1")
