"""Healthy trainings of every kind stay what they are: nobody who switches us on may regret it.

Small, but real: hyperparameters as people have them, Vitals in its default settings. Each is run
bare and watched; the same clip, so that what differs is ours.
"""

import math
import statistics
from functools import partial

import pytest
import torch

from vitals_bench.judgement.games import GanTask, PpoTask
from vitals_bench.judgement.patterns import PatternsTask
from vitals_bench.judgement.regression import RegressionTask
from vitals_bench.judgement.run import run_world
from vitals_bench.judgement.text import TextTask
from vitals_bench.judgement.worlds import World

MOST_WITHHELD, MOST_IN_A_ROW = 8, 2
"""Updates that may be withheld from a healthy run."""
MEMORISING = partial(TextTask, memorise=True)
"""Two batches learnt by heart: the loss falls fast, and spikes on its way."""
TASKS = {
    "GPT, lr 1e-3": partial(MEMORISING, lr=1e-3),
    "GPT, lr 4e-3": partial(MEMORISING, lr=4e-3),
    "GPT, lr 1.5e-2": partial(MEMORISING, lr=1.5e-2),
    "GPT with dropout, lr 1e-3": partial(MEMORISING, lr=1e-3, dropout=0.1),
    "GPT with dropout, lr 4e-3": partial(MEMORISING, lr=4e-3, dropout=0.1),
    "GPT with dropout, lr 1.5e-2": partial(MEMORISING, lr=1.5e-2, dropout=0.1),
    "GPT-2": partial(TextTask, lr=2e-3, dropout=0.1, tied=True),
    "ResNet, hard examples": partial(PatternsTask, residual=True, hard=0.03),
    "MLP, hard examples": partial(RegressionTask, hard=0.03),
    "GAN": GanTask,
    "PPO": PpoTask,
}
DAILY = ("GPT with dropout, lr 1e-3", "MLP, hard examples", "PPO")
"""Healed and guarded, with and without a clip."""
LENGTHS = {"GPT": 200, "ResNet": 320, "MLP": 300, "GAN": 320, "PPO": 200}
"""Steps of each here, where all of them have a minute; ``slow`` runs them to their end."""


LEAST_SAME = 0.95
"""Share of trainings that stay bit for bit."""


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def healthy_world(name, steps):
    settings = {} if steps is None else {"steps": steps}
    make = partial(TASKS[name], **settings)
    return World(name=name, label="healthy", family="healthy", make=make, base=name)


def train(name, *, clip, policy, seed=0, steps=None):
    return run_world(healthy_world(name, steps), clip=clip, policy=policy, seed=seed)


def assert_unharmed(bare, watched):
    """Nothing but a few updates may differ, and nothing is gone back on or stopped."""
    assert [] == watched.rollbacks
    assert "" == watched.halted
    assert {} == watched.errors
    assert watched.withheld <= MOST_WITHHELD, watched.withheld_steps
    assert watched.longest <= MOST_IN_A_ROW, watched.withheld_steps
    if not watched.withheld:
        assert bare.digest == watched.digest


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in DAILY else pytest.mark.nightly) for n in TASKS]
)
def test_a_healthy_training_is_what_it_is_without_us(name):
    """Guard where nothing is clipped, heal with a probe where it is: half of what slow runs do."""
    steps = LENGTHS[name.partition(" ")[0].rstrip(",").partition("-")[0]]
    clip, policy = (1.0, "heal+probe") if list(TASKS).index(name) % 2 else (None, "guard")
    bare = train(name, clip=clip, policy="none", steps=steps)
    watched = train(name, clip=clip, policy=policy, steps=steps)
    assert_unharmed(bare, watched)
    assert bare.digest == watched.digest


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("clip", [1.0, None])
@pytest.mark.parametrize("policy", ["guard", "heal+probe"])
def test_most_healthy_trainings_are_bit_for_bit_the_same(clip, policy):
    same = []
    for name in TASKS:
        bare = [train(name, clip=clip, policy="none", seed=seed) for seed in range(5)]
        watched = [train(name, clip=clip, policy=policy, seed=seed) for seed in range(5)]
        for one, other in zip(bare, watched, strict=True):
            assert_unharmed(one, other)
        same += [one.digest == other.digest for one, other in zip(bare, watched, strict=True)]
        if not all(same[-5:]):
            spread = spread_of_seeds(name, clip)
            for one, other in zip(bare, watched, strict=True):
                assert math.log(other.final / one.final) <= spread, (one, other, spread)
    assert sum(same) >= LEAST_SAME * len(same), f"{sum(same)} of {len(same)}"


def spread_of_seeds(name, clip):
    """Standard deviation of log final losses without us. A touched run is compared with its own
    seed: one that is the worst of all seeds would fail by chance, and one that is the best would
    hide any harm."""
    finals = [train(name, clip=clip, policy="none", seed=seed).final for seed in range(20)]
    return statistics.stdev(map(math.log, finals))
