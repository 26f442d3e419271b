"""A poisoned window, parameters that turn NaN, and a second window soon after the rollback.

Independent faults: each is treated separately. Poison near chance level is trained on, as without
a monitor; the rollback of the parameters replays every batch. So the training ends exactly where a
bare one ends that has the two windows only.
"""

from dataclasses import dataclass
from functools import partial

import pytest
import torch

from vitals_bench.judgement.faults import Fault
from vitals_bench.judgement.patterns import PatternsTask
from vitals_bench.judgement.regression import RegressionTask
from vitals_bench.judgement.run import run_world
from vitals_bench.judgement.worlds import World

FIRST, BROKEN, AFTER, LENGTH = 250, 330, 37, 10
TASKS = {"regression": partial(RegressionTask, steps=700), "patterns": partial(PatternsTask)}


@dataclass(frozen=True, kw_only=True)
class TwoWindows(Fault):
    """Two poisoned windows of batches."""

    def poisons(self, index: int) -> bool:
        return any(0 <= index - begin < LENGTH for begin in (FIRST, BROKEN + AFTER))


@dataclass(frozen=True, kw_only=True)
class ThreeFaults(TwoWindows):
    """And one parameter that is NaN after an update between them."""

    def damages(self, attempted: int) -> bool:
        return attempted == BROKEN

    def damage(self, model, optimizer, attempted: int) -> None:
        if attempted == BROKEN:
            with torch.no_grad():
                next(model.parameters()).view(-1)[0] = float("nan")


def world(name: str, fault: Fault) -> World:
    return World(name=name, label="poisoned", family="", make=TASKS[name], base=name, fault=fault)


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("seed", [10, 11, 12])
def test_independent_faults_are_treated_each_for_itself(name, seed):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    windows = world(name, TwoWindows(kind="poison", poison="shuffle"))
    faulty = world(name, ThreeFaults(kind="poison", poison="shuffle"))
    try:
        bare = run_world(windows, clip=1.0, policy="none", seed=seed)
        watched = run_world(faulty, clip=1.0, policy="heal+probe", seed=seed)
    finally:
        torch.set_num_threads(before)
    assert "" == watched.halted and {} == watched.errors
    assert ["nonfinite_params"] == [rule for _, _, rule in watched.rollbacks]
    assert bare.digest == watched.digest, (watched.final, bare.final)
