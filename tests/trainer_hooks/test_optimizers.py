"""Every optimizer x every fault: a skip leaves no trace, and training goes on as if it never was.

Each training is compared with a twin that has no monitor and never saw the bad steps.
"""

import pytest
import torch

import trainer_hooks
from tests.trainer_hooks.every_optimizer import (
    CLASSES,
    COMPLEX,
    MAKERS,
    VARIANTS,
    bits,
    differing,
)
from tests.trainer_hooks.test_monitor import own_place  # noqa: F401
from trainer_hooks.guard import OptimizerGuard, takes_found_inf

NAN, INF = float("nan"), float("inf")
HONOURS = {"Adam", "AdamW", "SGD", "Adagrad"}

NONFINITE = [(value, site) for value in (NAN, INF) for site in ("loss", "element", "all")]
OUTLIERS = [(1e30, "element"), (1e30, "all"), ("spike", "loss"), ("spike", "all")]
WARM = 18
FAULTS = {0: (NAN, "loss")} | {
    WARM + 2 * i: fault for i, fault in enumerate([*NONFINITE, *OUTLIERS])
}
"""The first step ever, each way of being non-finite, and finite outliers once the rule is warm."""


def backward(model, step, fault=None, scaler=None):
    """Train up to the gradients, with the fault in the place it says."""
    value, site = fault or (None, None)
    factor = 100.0 if value == "spike" else value
    loss = model.loss(step) * (factor if site == "loss" else 1.0)
    (scaler.scale(loss) if scaler else loss).backward()
    for param in model.parameters() if site in ("element", "all") else ():
        grad = param.grad._values() if param.grad.is_sparse else param.grad
        if site == "all":
            grad.mul_(factor) if value == "spike" else grad.fill_(factor)
        else:
            grad.view(-1)[:1].fill_(factor)
            break
    return loss.detach()


def train(monitor, model, optimizers, faults, steps, scaler=None):
    """Return the losses of the good steps, and what each bad step changed."""
    losses, traces, lags = [], {}, {monitor._device.readback.lag}
    for step in range(steps):
        before = bits(model, optimizers)
        loss = backward(model, step, faults.get(step), scaler)
        monitor.step(loss)
        if step in faults:
            after = bits(model, optimizers)
            # State that a skipped first step made is judged by the twin.
            traces[step] = [k for k in differing(before, after) if step or k in before]
        else:
            losses.append(loss.item())
    return losses, traces, lags


def train_twin(make, faults, steps, **keywords):
    """Train without us and without the bad steps."""
    model, optimizers = make(**keywords)
    losses = []
    for step in range(steps):
        if step in faults:
            continue
        losses.append(backward(model, step).item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return losses, bits(model, optimizers)


def assert_like_twin(make, faults, *, scaler=None, **keywords):
    steps = max(faults) + 4
    model, optimizers = make(**keywords)
    with trainer_hooks.watch(model, optimizers, scaler=scaler) as monitor:
        losses, traces, _ = train(monitor, model, optimizers, faults, steps, scaler)
        skips = monitor._host.judge.facts.num_skips
    twin_losses, twin_bits = train_twin(make, faults, steps, **keywords)
    assert {step: [] for step in faults} == traces
    assert twin_losses == losses
    after = bits(model, optimizers)
    assert [] == [k for k in differing(twin_bits, after) if k in twin_bits]
    assert {k for k in monitor.swallowed_errors if "journal" not in k} == set()
    return skips


def test_no_optimizer_class_of_torch_is_forgotten():
    assert set(CLASSES) <= set(VARIANTS), "a new class: say in VARIANTS how it is made"


@pytest.mark.parametrize("name", MAKERS)
def test_no_fault_leaves_a_trace(name):
    skips = assert_like_twin(MAKERS[name], FAULTS)
    assert len(FAULTS) == skips


@pytest.mark.parametrize("name", MAKERS)
def test_no_fault_leaves_a_trace_under_a_scaler(name):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=1000)
    faults = {0: (INF, "element"), WARM: (NAN, "loss"), WARM + 2: ("spike", "all")}
    assert_like_twin(MAKERS[name], faults, scaler=scaler)
    assert scaler.get_scale() == 2.0**6


@pytest.mark.parametrize("name", COMPLEX)
def test_no_fault_leaves_a_trace_in_complex_parameters(name):
    assert_like_twin(MAKERS[name], {0: (NAN, "element"), 5: (INF, "all")}, wave=True)


@pytest.mark.parametrize(("value", "site"), NONFINITE)
@pytest.mark.parametrize("name", [n for n in MAKERS if "fused" in n])
def test_the_first_step_ever_may_be_any_fault(name, value, site):
    assert_like_twin(MAKERS[name], {0: (value, site), 1: (value, site)})
