"""Two real ranks: the rank that made a step bad keeps it, and a replica's difference is played."""

from pathlib import Path

import pytest

from tests.plugins.lab.bad_steps import build
from tests.plugins.lab.ranks_playing import FLIP_STEP, FLIPPED, NAN_STEP, main
from tests.trainer_hooks.spawned import spawned
from trainer_hooks.repro.capsule import read
from trainvitals.io.capsules import find_capsules
from trainvitals.io.rundir import RunDir
from vitals_plugins.lab.repro.verdict import judge
from vitals_plugins.lab.repro.weights import load_step_weights

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """Return the run's folder, once both ranks have trained."""
    ranks = spawned(main, tmp_path_factory.mktemp("playing"))
    assert [{}, {}] == [rank["faults"] for rank in ranks]
    return Path(ranks[0]["run_dir"])


def played(run_dir, file):
    capsule = read(file)
    model, loss_of = build()
    return judge(
        capsule,
        model,
        loss_of,
        load_step_weights(capsule, RunDir.open(run_dir), model),
        capsule.batches,
    )


def test_the_rank_whose_loss_was_nan_alone_keeps_the_step(run_dir):
    (file,) = [file for file in find_capsules(run_dir) if file.step == NAN_STEP]
    assert 1 == file.rank
    verdict = played(run_dir, file)
    assert ("data", (3,)) == (verdict.verdict, verdict.rows)


def test_a_weight_unlike_a_replica_s_is_played_and_the_first_module_that_differs_is_named(run_dir):
    differing = [file for file in find_capsules(run_dir) if file.step >= FLIP_STEP]
    assert [0, 1] == [file.rank for file in differing]  # of two, nobody is known to be wrong
    assert 1 == len({file.step for file in differing})
    for file in differing:
        verdict = played(run_dir, file)
        assert ("optimizer_state", "last") == (verdict.verdict, verdict.module)
        assert f"model.last.weight was not as on a replica: element {FLIPPED}" in verdict.sentence
