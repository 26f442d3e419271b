"""Optimizers from elsewhere: a skipped step is exact, or they are refused, as declared."""

import importlib

import numpy as np
import pytest
import torch

import trainer_hooks
from tests.integrations.optimizers import OPTIMIZERS, Declared
from tests.support.watched import own_place  # noqa: F401
from tests.trainer_hooks.every_optimizer import Small, backward, one_thread  # noqa: F401
from trainvitals.errors import UsageError

NAN, INF = float("nan"), float("inf")
FAULTS = {0: (NAN, "loss"), 6: (INF, "element"), 9: (NAN, "all"), 10: (NAN, "loss")}
NUM_STEPS = 16
EACH = pytest.mark.parametrize("declared", OPTIMIZERS, ids=lambda d: f"{d.module}.{d.name}")


def make(declared: Declared):
    """Return the model, the optimizer, and all optimizers to watch."""
    kind = getattr(pytest.importorskip(declared.module), declared.name)
    torch.manual_seed(0)
    model = Small()
    params = list(model.parameters())
    options = dict(declared.options)
    if options.pop("model", None):
        params = model
    rest = []
    if declared.matrices_only:
        rest = [p for p in params if p.dim() != 2]
        params = [{"params": [p for p in params if p.dim() == 2], "use_muon": True}]
    if declared.wraps:
        options[declared.wraps] = torch.optim.SGD
    optimizer = kind(params, **options)
    if hasattr(optimizer, "train"):
        optimizer.train()
    torch.manual_seed(0)
    others = [torch.optim.AdamW(rest, fused=True)] if rest else []
    return model, optimizer, [optimizer, *others]


def seed():
    torch.manual_seed(1)
    np.random.seed(1)


def step_as_usual(declared, model, optimizer, step, fault):
    """Train one step by the optimizer's own calls; return the loss."""
    loss = backward(model, step, fault)
    if declared.wraps:
        optimizer.first_step(zero_grad=True)
        backward(model, step, fault)
        optimizer.second_step(zero_grad=True)
    return loss


def numbers(value, found, name=""):
    """Add all tensors and numbers of a state to ``found``, within lists and objects too."""
    if isinstance(value, torch.Tensor):
        found[name] = value.detach().clone()
    elif isinstance(value, dict):
        for key, part in value.items():
            numbers(part, found, f"{name}.{key}")
    elif isinstance(value, list | tuple | set):
        for i, part in enumerate(value):
            numbers(part, found, f"{name}.{i}")
    elif isinstance(value, int | float | str | bool | None):
        found[name] = value
    elif hasattr(value, "__dict__"):
        numbers(vars(value), found, name)
    return found


def state_of(model, optimizers):
    found = numbers(dict(model.state_dict()), {}, "model")
    for i, optimizer in enumerate(optimizers):
        numbers(list(optimizer.state.values()), found, f"state{i}")
    return found


def differing(one, other):
    def alike(left, right):
        if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
            return torch.equal(left, right)
        return left == right

    names = one.keys() ^ other.keys()
    return sorted(names | {n for n in one.keys() & other.keys() if not alike(one[n], other[n])})


@EACH
def test_a_skipped_step_is_as_declared(declared):
    if declared.outcome == "refused":
        model, _, watched = make(declared)
        with (
            pytest.raises(Exception, match="closure") as raised,
            trainer_hooks.watch(model, watched) as monitor,
        ):
            monitor.step(backward(model, 0))
        assert declared.note.endswith("is its own") is not isinstance(raised.value, UsageError)
        return
    model, optimizer, watched = make(declared)
    twin, plain, steppers = make(declared)
    seed()  # some draw numbers in each step
    for step in range(NUM_STEPS):
        if step not in FAULTS:
            step_as_usual(declared, twin, plain, step, None)
            for each in () if declared.wraps else steppers:
                each.step()
                each.zero_grad()
    seed()
    if declared.wraps:
        guard = trainer_hooks.attach(model, getattr(optimizer, declared.wraps))
    else:
        guard = trainer_hooks.watch(model, watched)
    with guard as monitor:
        for step in range(NUM_STEPS):
            before = state_of(model, watched)
            loss = step_as_usual(declared, model, optimizer, step, FAULTS.get(step))
            if not declared.wraps:
                monitor.step(loss)
            if step in FAULTS:
                after = state_of(model, watched)
                kept = {name: after.get(name) for name in before}
                assert [] == differing(before, kept if step == 0 else after), f"step {step}"
        assert {} == monitor.swallowed_errors
    assert [] == differing(state_of(twin, steppers), state_of(model, watched))


def test_every_module_is_installed_by_the_pins():
    missing = []
    for module in {declared.module.partition(".")[0] for declared in OPTIMIZERS}:
        try:
            importlib.import_module(module)
        except ImportError:
            missing.append(module)
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}; `make test-integrations` has them")
    assert len({(d.module, d.name) for d in OPTIMIZERS}) == len(OPTIMIZERS)
