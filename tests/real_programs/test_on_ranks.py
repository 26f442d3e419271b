"""Two real ranks: well-known training scripts with the guide's lines, bad on rank 1 alone."""

import itertools
from functools import partial

import pytest

from tests.real_programs.on_ranks import CASES, LEFT_OUT, MICRO_STEPS, NIGHTLY, bad_updates, main
from tests.support.examples import has_nightly
from tests.trainer_hooks.spawned import spawned

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    """Play all cases in one launch and return what each rank saw."""
    cases = partial(main, has_nightly=has_nightly(request.config))
    return spawned(cases, tmp_path_factory.mktemp("programs"))


@pytest.mark.parametrize(
    ("name", "case"),
    [
        pytest.param(*pair, marks=pytest.mark.nightly if pair in NIGHTLY else ())
        for pair in itertools.product(MICRO_STEPS, CASES)
    ],
)
def test_a_program_is_what_it_was_but_for_the_updates_left_out(results, name, case):
    for result in results:
        played = result[f"{name} {case}"]
        assert played["plain"] == played["watched"]
    assert sorted(LEFT_OUT.get((name, case), ())) == results[0][f"{name} {case}"]["skipped"]


def test_nan_images_of_a_rank_leave_no_trace_in_batch_norm_either(results):
    for result in results:
        assert result["imagenet poisoned"]["plain"] == result["imagenet poisoned"]["watched"]
    assert sorted(bad_updates()) == results[0]["imagenet poisoned"]["skipped"]
