"""The gradient noise scale, where the answer is known."""

import pytest
import torch

from trainer_hooks.measures.noise import NoiseScale

RANKS = 4
PER_RANK = 8
DIMENSION = 200


def estimate(signal: float, noise: float, *, steps: int = 100) -> float | None:
    """Return the estimate where one example's gradient is of N(G, noise^2 I), |G| = signal."""
    random = torch.Generator().manual_seed(0)
    true = torch.randn(DIMENSION, generator=random, dtype=torch.float64)
    true *= signal / true.norm()
    scale = NoiseScale(RANKS)
    for _ in range(steps):
        shape = (RANKS, PER_RANK, DIMENSION)
        each = true + noise * torch.randn(shape, generator=random, dtype=torch.float64)
        of_ranks = each.mean(dim=1)
        scale.add(
            small_square=of_ranks.square().sum(dim=1).mean().item(),
            big_square=of_ranks.mean(dim=0).square().sum().item(),
        )
    return scale.ratio()


@pytest.mark.parametrize("noise", [0.05, 0.2, 0.5])
def test_it_is_the_trace_of_the_covariance_over_the_square_of_the_gradient(noise):
    examples = DIMENSION * noise**2 / 1.0**2
    assert estimate(1.0, noise) == pytest.approx(examples / (RANKS * PER_RANK), rel=0.05)


def test_without_noise_the_smallest_batch_is_large_enough():
    assert estimate(1.0, 0.0) == pytest.approx(0.0, abs=1e-12)


def test_it_is_unknown_before_ten_samples():
    assert estimate(1.0, 0.2, steps=9) is None
    assert estimate(1.0, 0.2, steps=10) is not None


def test_it_is_unknown_where_the_noise_hides_the_gradient():
    scale = NoiseScale(2)
    for _ in range(20):
        scale.add(small_square=2.0, big_square=1.0)  # exactly what pure noise gives
    assert scale.ratio() is None


def test_a_sample_that_is_not_finite_changes_nothing():
    scale, other = NoiseScale(2), NoiseScale(2)
    for _ in range(20):
        for one in (scale, other):
            one.add(small_square=3.0, big_square=2.0)
        scale.add(small_square=float("nan"), big_square=2.0)
        scale.add(small_square=3.0, big_square=float("inf"))
    assert scale.ratio() == other.ratio() == pytest.approx(1.0)
