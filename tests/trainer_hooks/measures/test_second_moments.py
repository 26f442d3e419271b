"""Second moments are what the gradients add up to; a reset is found, with its step."""

import math

import pytest
import torch

from trainvitals.records import FindingRaised

LAYERS = 5


def stack():
    return torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(LAYERS)))


def train(make_loop, change=lambda loop, step: None, *, steps=160, factors=None, **arguments):
    """Train, call ``change`` before each update, and return the findings about the moments."""
    max_norm = arguments.pop("max_norm", 1.0)
    torch.manual_seed(1)
    loop = make_loop(model=stack(), **arguments)
    for step in range(steps):
        x = torch.randn(8, 4, generator=loop.data)
        loss = (loop.model(x) - x).square().mean() * (factors or {}).get(step, 1.0)
        loss.backward()
        change(loop, step)
        loop.monitor.step(loss, max_norm=max_norm)
    raised = [e.finding for e in loop.journal().events if isinstance(e, FindingRaised)]
    return [each for each in raised if each.detector == "optimizer_state"]


def moments(loop, *layers):
    return [
        loop.optimizer.state[p]["exp_avg_sq"] for i in layers for p in loop.model[i].parameters()
    ]


def reset_at(reset, *layers, factor=0.0):
    def change(loop, step):
        if step == reset:
            torch._foreach_mul_(moments(loop, *layers), factor)

    return change


@pytest.mark.parametrize(
    ("reset", "found_at"), [(51, 100), (62, 100), (99, 100), (100, 100), (101, 150), (149, 150)]
)
@pytest.mark.parametrize("fused", [True, False])
def test_the_step_of_a_reset_is_exact(make_loop, reset, found_at, fused):
    (finding,) = train(make_loop, reset_at(reset, 2), fused=fused)
    assert ("2", reset, found_at) == (finding.layer, finding.onset_step, finding.step)
    assert ("update_ratio", "advisory") == (finding.kind, finding.level)


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_norm": None},
        {"max_norm": 1e-3},
        {"max_norm": "auto"},
        {"factors": {105: math.nan, 116: 1e6}},
        {"optimizer": lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.9, 0.95), amsgrad=True)},
        {"optimizer": lambda p: torch.optim.NAdam(p, lr=0.01)},
    ],
    ids=["no clip", "small clip", "auto clip", "a skip and an outlier", "short memory", "NAdam"],
)
def test_a_reset_is_dated_with_every_clip_and_optimizer(make_loop, arguments):
    (finding,) = train(make_loop, reset_at(142, 2), **arguments)
    assert ("2", 142) == (finding.layer, finding.onset_step)


def test_a_finding_starts_a_reading_soon_after(make_loop):
    (finding,) = train(make_loop, reset_at(128, 2), factors={130: 1e4})
    assert (128, 132) == (finding.onset_step, finding.step)


def test_each_of_two_resets_is_found(make_loop):
    def change(loop, step):
        reset_at(70, 1)(loop, step)
        reset_at(120, 3)(loop, step)

    found = train(make_loop, change)
    assert [("1", 70), ("3", 120)] == [(each.layer, each.onset_step) for each in found]


def set_betas(loop, step):
    if step == 110:
        loop.optimizer.param_groups[0]["betas"] = (0.9, 0.5)


def freeze(loop, step):
    if 70 <= step < 120:
        for param in loop.model[2].parameters():
            param.grad = None


def stop_gradient(loop, step):
    if step >= 70:
        for param in loop.model[2].parameters():
            param.grad.zero_()


def write_other_gradients(loop, step):
    """Change gradients between the measurement and the update."""

    def shrink(*_):
        torch._foreach_mul_([param.grad for param in loop.model[2].parameters()], 0.01)

    if not step:
        loop.optimizer.register_step_pre_hook(shrink)


@pytest.mark.parametrize(
    ("change", "arguments"),
    [
        pytest.param(lambda *_: None, {}, id="healthy"),
        pytest.param(lambda *_: None, {"factors": {70: math.nan, 102: 1e8}}, id="skipped steps"),
        pytest.param(reset_at(110, *range(LAYERS)), {}, id="all were reset on purpose"),
        pytest.param(reset_at(110, 2, factor=0.1), {}, id="not 0"),
        pytest.param(set_betas, {}, id="other betas"),
        pytest.param(freeze, {}, id="a layer without gradients for some steps"),
        pytest.param(stop_gradient, {}, id="gradients that become 0"),
        pytest.param(write_other_gradients, {"fused": False}, id="gradients changed by a hook"),
        pytest.param(
            reset_at(110, 2),
            {"optimizer": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=1.0)},
            id="weight decay that is part of the gradient",
        ),
        pytest.param(
            lambda *_: None, {"optimizer": lambda p: torch.optim.SGD(p, lr=0.1)}, id="SGD"
        ),
    ],
)
def test_nothing_else_is_taken_for_a_reset(make_loop, change, arguments):
    assert [] == train(make_loop, change, **arguments)
