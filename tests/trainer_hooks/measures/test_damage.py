"""State that explains a problem: read when it is found, and named only if it was damaged."""

import math

import pytest
import torch

from trainer_hooks.measures.second_moments import find_reset_layers
from trainer_hooks.ranks import Ranks
from trainer_hooks.tensors.gradients import GradNorms
from trainvitals import CheckpointSettings

LAYERS = 5
SQUARES = [1.0, 4.0] * LAYERS
"""Squared gradient norms of the weight and the bias of each layer."""


def stack():
    return torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(LAYERS)))


@pytest.mark.parametrize(
    ("huge", "factor", "written"),
    [(3e37, math.nan, [41]), (3.0, math.nan, []), (3e12, 1.0, [40, 43])],
)
def test_a_huge_weight_is_read_at_the_second_nan_or_at_a_huge_gradient(
    make_loop, huge, factor, written
):
    loop = make_loop(model=stack())
    for step in range(45):
        x = torch.randn(8, 4, generator=loop.data)
        loss = loop.model(x).square().mean()
        if step >= 40:
            loop.model[2].weight.data[0, 0] = huge
            loss = loss * factor
        loss.backward()
        loop.monitor.step(loss, max_norm=1.0)
    found = loop.journal().layers("weight_norm")
    assert {(step, "2"): pytest.approx(huge) for step in written} == found


@pytest.mark.parametrize(("is_reset", "layers"), [(True, {"2"}), (False, set())])
def test_optimizer_state_is_read_once_a_loss_is_reported(make_loop, is_reset, layers):
    loop = make_loop(model=stack())
    for step in range(110):
        x = torch.randn(8, 4, generator=loop.data)
        loss = (loop.model(x) - x).square().mean()
        loss.backward()
        if step == 105 and is_reset:
            for param in loop.model[2].parameters():
                loop.optimizer.state[param]["exp_avg_sq"].zero_()
        loop.monitor.step(loss * 1e4 if step >= 105 else loss, max_norm=1.0)
    found = loop.journal().layers("moment_written_ratio")
    assert layers == {layer for _, layer in found}
    assert all(step >= 105 and 0.9 < share <= 1.0 for (step, _), share in found.items())


@pytest.fixture
def adam():
    """Return a model, norms and an optimizer after 100 steps with these gradients."""
    model = stack()
    optimizer = torch.optim.AdamW(model.parameters())
    norms = GradNorms(dict(model.named_parameters()), Ranks(0, 1, 0, None))
    for _ in range(100):
        for param, square in zip(model.parameters(), SQUARES, strict=True):
            draws = torch.randn_like(param)
            param.grad = draws * math.sqrt(square) / draws.norm()
        optimizer.step()
    return model, norms, optimizer


def test_second_moments_of_zero_are_found_for_some_steps_after(adam):
    model, norms, optimizer = adam
    for param in model[2].parameters():
        optimizer.state[param]["exp_avg_sq"].zero_()
    for _ in range(3):
        optimizer.step()
    found = find_reset_layers(norms, [optimizer], [SQUARES] * 5)
    assert {"2"} == set(found) and 0.9 < found["2"] < 1.0


@pytest.mark.parametrize(
    ("factors", "rows"),
    [
        pytest.param([1.0] * LAYERS, 5, id="healthy"),
        pytest.param([0.0] * LAYERS, 5, id="all of it was reset, as after a restart"),
        pytest.param([1e-3] * LAYERS, 5, id="a clip lowered all gradients"),
        pytest.param([30.0, 30.0, 1.0, 30.0, 30.0], 5, id="the others had large gradients"),
        pytest.param([1.0, 1.0, 0.0, 1.0, 1.0], 4, id="too few rows before"),
    ],
)
def test_other_second_moments_are_not_taken_for_a_reset(adam, factors, rows):
    model, norms, optimizer = adam
    for layer, factor in zip(model, factors, strict=True):
        for param in layer.parameters():
            optimizer.state[param]["exp_avg_sq"].mul_(factor)
    assert {} == find_reset_layers(norms, [optimizer], [SQUARES] * rows)


def test_a_gradient_that_grew_and_stays_so_is_not_taken_for_a_reset(adam):
    model, norms, optimizer = adam
    rows = [[100.0 * s if i in (4, 5) else s for i, s in enumerate(SQUARES)]] * 8
    for param in model[2].parameters():  # 45 of the rows' 80 steps have the larger gradient
        optimizer.state[param]["exp_avg_sq"].mul_(1.0 + 99.0 * 0.045 / 0.095)
    assert {} == find_reset_layers(norms, [optimizer], rows)


def test_rows_from_before_parameters_were_added_are_left_out(adam):
    model, norms, optimizer = adam
    for param in model[2].parameters():
        optimizer.state[param]["exp_avg_sq"].zero_()
    optimizer.step()
    rows = [*[SQUARES[:4]] * 4, *[SQUARES] * 4]
    assert {} == find_reset_layers(norms, [optimizer], rows)
    assert {"2"} == set(find_reset_layers(norms, [optimizer], [*rows, SQUARES]))


def test_a_layer_with_gradients_in_few_steps_is_not_taken_for_a_reset(adam):
    model, norms, optimizer = adam
    for step in range(100):
        for i, param in enumerate(model.parameters()):
            param.grad.fill_(0.0 if i in (4, 5) and step % 10 else SQUARES[i] ** 0.5)
        optimizer.step()
    quiet = [0.0 if i in (4, 5) else 16 * square for i, square in enumerate(SQUARES)]
    rows = [[16 * square for square in SQUARES], *[quiet] * 4]
    assert {} == find_reset_layers(norms, [optimizer], rows)


def test_an_optimizer_without_second_moments_has_none_to_reset(adam):
    model, norms, _ = adam
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    sgd.step()
    assert {} == find_reset_layers(norms, [sgd], [SQUARES] * 5)


def test_a_problem_after_a_rollback_is_explained_at_its_first_step(make_loop, tmp_path):
    where = CheckpointSettings(directory=tmp_path / "kept", snapshot_every=5)
    loop = make_loop(model=stack(), mode="heal", checkpoints=where)
    weight, factors, restored = loop.model[2].weight.data, {40: math.nan, 41: math.nan}, None
    for attempted in range(45):
        if attempted == 42:
            weight[0, 0] = math.nan
        if restored is not None:
            weight[0, 0] = 3e12
        x = torch.randn(8, 4, generator=loop.data)
        loss = loop.model(x).square().mean() * factors.get(attempted, 1.0)
        loss.backward()
        outcome = loop.monitor.step(loss, max_norm=1.0)
        if outcome.rolled_back_to is not None:
            restored = outcome.next_step
    assert restored < 40
    # The weights were read at 41, too, and so not before 44 had there been no rollback.
    assert pytest.approx(3e12) == loop.journal().layers("weight_norm")[restored, "2"]
