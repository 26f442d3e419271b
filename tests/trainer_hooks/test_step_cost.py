"""A guarded step adds few operations, however many buffers there are. Counts, no times."""

import pytest
import torch
from torch import nn

import trainer_hooks
from tests.support.watched import own_place  # noqa: F401
from tests.trainer_hooks.counting import Counted

MOST = 45


def plain():
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(20)), nn.Linear(8, 1))


def with_100_batch_norms():
    layers = (layer for _ in range(100) for layer in (nn.Linear(8, 8), nn.BatchNorm1d(8)))
    return nn.Sequential(*layers, nn.Linear(8, 1))


def operations(model, step, *, num_steps=4):
    """Return the names of the operations of the last of so many steps."""
    torch.manual_seed(0)
    for _ in range(num_steps):
        loss = model(torch.randn(16, 8)).square().mean()
        loss.backward()
        with Counted() as counted:
            step(loss)
    return counted.names


def added(make, **options):
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with trainer_hooks.watch(model, optimizer) as monitor:
        guarded = operations(model, lambda loss: monitor.step(loss, **options))

    def bare(loss):
        optimizer.step()
        optimizer.zero_grad()

    return len(guarded) - len(operations(model, bare))


@pytest.mark.parametrize("options", [{}, {"max_norm": 1e-3}, {"max_norm": 1e9}], ids=str)
@pytest.mark.parametrize("make", [plain, with_100_batch_norms])
def test_a_guarded_step_adds_few_operations(make, options):
    assert 0 < added(make, **options) <= MOST


@pytest.mark.usefixtures("no_read_is_free")
@pytest.mark.parametrize("options", [{}, {"max_norm": 1.0}], ids=str)
@pytest.mark.parametrize("make", [plain, with_100_batch_norms])
def test_a_guarded_step_adds_few_operations_where_a_read_would_wait(make, options):
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with trainer_hooks.watch(model, optimizer) as monitor:
        names = operations(model, lambda loss: monitor.step(loss, **options))
    assert "_local_scalar_dense" not in names
    assert 0 < added(make, **options) <= MOST


@pytest.mark.usefixtures("no_read_is_free")
def test_a_hundred_batch_norms_cost_four_operations_more_where_a_read_would_wait():
    assert 4 == added(with_100_batch_norms) - added(plain)


def test_a_hundred_batch_norms_cost_two_operations_more_where_a_read_is_free():
    assert 2 >= added(with_100_batch_norms) - added(plain)
