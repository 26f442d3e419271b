import math

import pytest
import torch

from trainer_hooks.tensors.gradients import BLOCK, SMALL, GradientSquares

CPU = torch.device("cpu")
SIZES = (0, 1, SMALL, SMALL + 1, 2 * BLOCK, 2 * BLOCK + 1, 3 * BLOCK + 5, 1 << 20)


def squares_of(*grads):
    return GradientSquares().of(list(grads), CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_squares_of_every_size_are_those_of_float64(dtype):
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(n, generator=generator).to(dtype) for n in SIZES]
    expected = torch.stack([grad.double().square().sum() for grad in grads])
    torch.testing.assert_close(squares_of(*grads), expected, rtol=1e-6, atol=0.0)


def test_a_sum_of_millions_does_not_drift():
    grad = torch.randn(5_000_000, generator=torch.Generator().manual_seed(1))
    expected = float(grad.double().square().sum())
    assert math.isclose(expected, float(squares_of(grad)), rel_tol=1e-6)


@pytest.mark.parametrize("size", [SMALL, 2 * BLOCK + 1])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_element_that_is_not_finite_makes_its_gradient_so_and_no_other(size, value):
    grads = [torch.ones(size) for _ in range(3)]
    grads[1][size - 1] = value
    assert [True, False, True] == torch.isfinite(squares_of(*grads)).tolist()


@pytest.mark.parametrize("size", [SMALL, 2 * BLOCK + 1])
def test_a_lone_1e30_has_its_own_square_in_any_size(size):
    grad = torch.ones(size)
    grad[7] = -1e30
    assert math.isclose(1e60, float(squares_of(grad)), rel_tol=1e-5)


def test_opposite_outliers_that_cancel_are_still_beyond_float32():
    grad = torch.zeros(2 * BLOCK)
    grad[0], grad[1] = 1e30, -1e30
    assert math.isclose(2e60, float(squares_of(grad)), rel_tol=1e-5)


def test_views_that_are_not_contiguous_are_squared_whole():
    grad = torch.randn(300, 200, generator=torch.Generator().manual_seed(2)).T
    expected = float(grad.double().square().sum())
    assert math.isclose(expected, float(squares_of(grad)), rel_tol=1e-6)


def test_shapes_may_change_from_step_to_step():
    squares = GradientSquares()
    for size in (SMALL + 1, 3, 2 * BLOCK + 1, 3):
        assert math.isclose(size, float(squares.of([torch.ones(size)], CPU)), rel_tol=1e-12)


def test_gradients_of_optimizers_that_take_turns_do_not_change_earlier_results():
    squares = GradientSquares()
    turns = [[torch.full((3,), 2.0), torch.ones(SMALL + 1)], [torch.full((2, 2), 3.0)]] * 2
    found = [squares.of(grads, CPU) for grads in turns]
    expected = [[12.0, SMALL + 1.0], [36.0]] * 2
    assert [pytest.approx(each) for each in expected] == [each.tolist() for each in found]
