"""The best published skip, and why ours is another: one NaN, the same script, two ends."""

import math

import pytest
import torch
from torch import nn

from vitals_bench.guard.rules import skipped_by_peer, train
from vitals_bench.peers.olmo_rule import SkipStepAdamW
from vitals_bench.training import watched

pytestmark = pytest.mark.nightly

STEPS, BAD_STEP = 120, 90


def forward(model, step):
    torch.manual_seed(step)
    loss = nn.functional.mse_loss(model(torch.randn(32, 8)), torch.randn(32, 4))
    loss.backward()
    if step == BAD_STEP:
        model.weight.grad[0, 0] = math.nan
    return loss


def linear():
    torch.manual_seed(0)
    return nn.Linear(8, 4)


def test_an_update_times_zero_is_nan_where_the_gradient_is():
    model = linear()
    optimizer = SkipStepAdamW(model.parameters(), lr=1e-3)
    for step in range(BAD_STEP + 1):
        loss = forward(model, step)
        optimizer.latest_loss = loss.item()
        optimizer.latest_norm = nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
        assert bool(torch.isfinite(model.weight).all())
        optimizer.step()
        optimizer.zero_grad()
    assert 1 == optimizer.num_skipped
    assert math.isnan(model.weight[0, 0].item())


def test_ours_skips_the_same_step_and_leaves_no_trace():
    model = linear()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    skipped = []
    with watched(model, optimizer) as monitor:
        for step in range(STEPS):
            before = model.weight.detach().clone()
            decision = monitor.step(forward(model, step)).decision
            if decision is not None and decision.action == "skip_step":
                skipped.append(decision.step)
            assert torch.equal(before, model.weight) == (step == BAD_STEP)
    assert [BAD_STEP] == skipped
    assert bool(torch.isfinite(model.weight).all())


def test_the_rule_skips_128_healthy_steps_after_one_nan():
    losses, norms = [3.0 + i % 7 / 50 for i in range(400)], [1.0 + i % 5 / 50 for i in range(400)]
    norms[200] = math.nan
    assert list(range(200, 329)) == skipped_by_peer(losses, norms)


@pytest.mark.parametrize("spikes", [{80: 20.0, 110: 10.0}])
def test_the_second_of_two_spikes_is_seen_by_ours_alone(spikes):
    found = train(steps=130, spikes=spikes)
    assert {80, 110} == set(found.skipped)
    assert 110 not in skipped_by_peer(found.losses, found.norms)
    assert found.is_finite
