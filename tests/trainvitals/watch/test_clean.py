"""Runs in which nothing is wrong: not one word may be said."""

import math
import random
from collections.abc import Callable, Iterable, Iterator

import pytest
from msgspec.structs import replace

from tests.support.examples import one_in
from tests.trainvitals.watch.worlds import (
    GIB,
    cosine,
    healthy_run,
    healthy_samples,
    slower,
    with_run,
)
from trainvitals.detect.fleet import FleetDetectors
from trainvitals.detect.fleet.base import MergedStep
from trainvitals.detect.fleet.optimizer import LearningRateWatcher
from trainvitals.records import Finding


def told(rows: Iterable[MergedStep]) -> list[Finding]:
    watchers = FleetDetectors()
    for sample in healthy_samples(3):
        watchers.update_node(sample)
    return [finding for row in rows for finding in watchers.update(row)]


def linear(step: int) -> float:
    return 3e-4 * min(1.0, (step + 1) / 200) * max(0.0, 1.0 - step / 3000)


def stable_decay(step: int) -> float:
    """WSD: warm-up, a long stable part, a fast decay."""
    return 3e-4 * min(1.0, step / 50, max(0.01, (3000 - step) / 600))


def step_decay(step: int) -> float:
    return 0.1 * 0.1 ** (step // 1000)


def triangular(step: int) -> float:
    return 1e-4 + 9e-4 * abs((step / 200) % 2 - 1)


def warm_restarts(step: int) -> float:
    """SGDR: cosine to nearly nothing, then back to the top in one step."""
    return 1e-5 + 1e-3 * (1 + math.cos(math.pi * (step % 500) / 500)) / 2


def inverse_root(step: int) -> float:
    return 0.01 * min((step + 1) ** -0.5, (step + 1) * 400**-1.5)


def rewarmed(step: int) -> float:
    """A second stage: down to nothing, up again in 100 steps."""
    return cosine(step, steps=1500) if step < 1500 else 1e-3 * min(1.0, (step - 1499) / 100)


def one_cycle(step: int) -> float:
    return 4e-5 + 1e-3 * (step / 900 if step < 900 else max(0.0, (3000 - step) / 2100))


def constant(step: int) -> float:
    return 1e-4


SCHEDULES = [
    cosine, linear, stable_decay, step_decay, triangular, warm_restarts, inverse_root, rewarmed,
    one_cycle, constant,
]  # fmt: skip


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("every", one_in(3, [10, 1, 50]))
def test_no_schedule_is_an_anomaly(schedule: Callable[[int], float], every: int) -> None:
    watcher = LearningRateWatcher()
    rows = [
        MergedStep(step=s, attempt=1, time_unix_ns=s, run={"learning_rate": schedule(s)})
        for s in range(0, 3000, every)
    ]
    assert [] == [finding for row in rows for finding in watcher.update(row)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_rollback_that_restores_the_schedule_is_no_anomaly(
    schedule: Callable[[int], float],
) -> None:
    watcher, found = LearningRateWatcher(), []
    steps = [(1, s) for s in range(1300)] + [(2, s) for s in range(700, 2010)]
    for attempt, step in [*steps, *((3, s) for s in range(2010, 2900))]:
        row = MergedStep(
            step=step, attempt=attempt, time_unix_ns=0, run={"learning_rate": schedule(step)}
        )
        found += watcher.update(row)
    assert [] == found


@pytest.mark.parametrize("seed", one_in(4, range(4)))
def test_a_noisy_run_with_evaluations_and_checkpoints(seed: int) -> None:
    assert [] == told(healthy_run(4000, seed=seed))


def test_a_restart_with_slow_first_steps() -> None:
    def rows() -> Iterator[MergedStep]:
        yield from healthy_run(1500)
        for i, row in enumerate(healthy_run(1500, first=1200, attempt=2, seed=9)):
            yield slower(row, 20.0) if i < 3 else row

    assert [] == told(rows())


def test_a_restart_on_other_ranks() -> None:
    def rows() -> Iterator[MergedStep]:
        yield from healthy_run(1000)
        for row in healthy_run(1500, first=1000, attempt=2, seed=9, ranks=4):
            yield slower(row, 2.0)

    assert [] == told(rows())


def test_step_times_that_scatter_by_a_quarter() -> None:
    rng = random.Random(5)
    assert [] == told(slower(row, rng.lognormvariate(0.0, 0.25)) for row in healthy_run(3000))


def test_steps_of_two_kinds() -> None:
    assert [] == told(slower(row, 1.0 + row.step % 2) for row in healthy_run(2000))


def test_a_run_that_gets_faster() -> None:
    assert [] == told(slower(row, 2.0 - row.step / 3000) for row in healthy_run(3000))


def test_a_scaler_that_searches_its_first_scale() -> None:
    """From 2**32, as DeepSpeed does: 20 overflows, and a schedule that waits for the first step."""

    def rows() -> Iterator[MergedStep]:
        for row in healthy_run(600):
            early = row.step < 20
            columns = {"learning_rate": 0.0} if early else {}
            scale = 2.0 ** max(12, 32 - row.step)
            yield with_run(row, verdict=16 if early else 0, loss_scale=scale, **columns)

    assert [] == told(rows())


def test_ranks_whose_losses_have_heavy_tails() -> None:
    def rows() -> Iterator[MergedStep]:
        rng = random.Random(6)
        for row in healthy_run(3000):
            losses = [2.0 + rng.paretovariate(2.0) for _ in range(8)]
            yield replace(row, ranks={**row.ranks, "rank_loss": losses})

    assert [] == told(rows())


def test_ranks_of_a_reward_model_around_zero() -> None:
    def rows() -> Iterator[MergedStep]:
        rng = random.Random(7)
        for row in healthy_run(2000):
            losses = [rng.gauss(0.0, 0.1) for _ in range(8)]
            yield replace(row, ranks={**row.ranks, "rank_loss": losses})

    assert [] == told(rows())


def test_memory_that_grows_once() -> None:
    def rows() -> Iterator[MergedStep]:
        for row in healthy_run(4000):
            extra = 5.0 * GIB * (row.step > 1700) + 3.0 * GIB * (row.step > 2900)
            held = [b + extra for b in row.ranks["memory_allocated_bytes"] if b is not None]
            yield replace(row, ranks={**row.ranks, "memory_allocated_bytes": held})

    assert [] == told(rows())


def test_gradients_of_all_layers_that_spike_together() -> None:
    def rows() -> Iterator[MergedStep]:
        for row in healthy_run(2000):
            factor = 300.0 if row.step % 170 == 0 else 1.0
            layers = {
                name: {**columns, "grad_norm": columns["grad_norm"] * factor}
                for name, columns in row.layers.items()
            }
            yield replace(row, layers=layers)

    assert [] == told(rows())


def test_a_learning_rate_cut_by_ten_moves_all_updates_together() -> None:
    def rows() -> Iterator[MergedStep]:
        for row in healthy_run(2000):
            factor = 0.1 if row.step > 1000 else 1.0
            layers = {
                name: {**columns, "update_norm": columns["update_norm"] * factor}
                for name, columns in row.layers.items()
            }
            yield replace(row, layers=layers)

    assert [] == told(rows())


def test_healthy_nodes_are_told_nothing_about() -> None:
    watchers = FleetDetectors()
    assert [] == [f for sample in healthy_samples(3000) for f in watchers.update_node(sample)]
