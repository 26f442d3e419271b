"""Weights that something else than the optimizer changed are found; updates are not."""

import itertools
import math
import struct
from types import SimpleNamespace

import pytest
import torch

from trainer_hooks.measures.weight_norms import WeightCheck, WeightWrite, date_write
from trainvitals.records import FindingRaised

LAYERS = 5


def stack(layers=LAYERS, width=8):
    torch.manual_seed(1)
    return torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))


class Loop:
    """Trains; by its clock, readings cost as much time as makes them due every ``every`` steps."""

    def __init__(self, model, optimizer, *, every=1, width=8):
        self.model, self.optimizer, self.every, self.width = model, optimizer, every, width
        named = dict(model.named_parameters())
        norms = SimpleNamespace(
            local_names=list(named),
            params=list(named.values()),
            device=torch.device("cpu"),
            replicated=True,
        )
        self.step, self.writes, self._time = 0, [], 0.0
        self.check = WeightCheck(norms, [optimizer], clock=self._read_clock)

    def _read_clock(self):
        self._time += 0.0019 * self.every
        return self._time

    def train(self, steps, change=lambda model, step: None):
        generator = torch.Generator().manual_seed(2)
        for _ in range(steps):
            self._time += 1.0
            change(self.model, self.step)
            x = torch.randn(16, self.width, generator=generator)
            (self.model(x) - x).square().mean().backward()
            rates = [group["lr"] for group in self.optimizer.param_groups]
            if not self.check.counts(self.step, rates):
                self.check.read(self.step, rates)
            self.writes += self.check.find_writes(self.step)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1
        return self.writes


def adam(model, **settings):
    return torch.optim.AdamW(model.parameters(), **{"lr": 3e-3, **settings})


def at(when, write):
    def change(model, step):
        if step == when:
            with torch.no_grad():
                write(model)

    return change


def flip(model):
    flat = model[2].weight.view(-1)
    (word,) = struct.unpack("I", struct.pack("f", flat[7].item()))
    flat[7] = struct.unpack("f", struct.pack("I", word ^ (1 << 30)))[0]


@pytest.mark.parametrize(
    ("write", "is_inf"),
    [
        (lambda model: model[2].weight.zero_(), False),
        (lambda model: model[2].weight.mul_(10.0), False),
        (flip, True),
    ],
    ids=["zeroed", "scaled", "bit flipped"],
)
def test_a_layer_that_is_written_to_is_found_at_the_step(write, is_inf):
    model = stack()
    (found,) = Loop(model, adam(model)).train(60, at(41, write))
    assert ("2", 41, 41) == (found.layer, found.first_step, found.last_step)
    assert is_inf == math.isinf(found.now)
    assert 0.0 < found.most < 0.5 * found.before


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"lr": 0.1},
        {"lr": 0.1, "amsgrad": True},
        {"lr": 0.03, "weight_decay": 10.0},
        {"lr": 0.03, "betas": (0.5, 0.9)},
        {"lr": 0.03, "betas": (0.0, 0.999)},
    ],
    ids=str,
)
def test_updates_are_not_reported_however_large_they_are(settings):
    model = stack()
    loop = Loop(model, adam(model, **settings))
    before = [param.norm().item() for param in model.parameters()]
    assert [] == loop.train(400)
    assert loop.check.is_possible
    assert before != [param.norm().item() for param in model.parameters()]


@pytest.mark.parametrize("factors", [(4.0,) * 5, (1.4, 1.03, 0.97, 1.02, 1.03)])
def test_a_state_that_the_loop_replaced_is_not_reported(factors):
    model, other = stack(), stack()
    with torch.no_grad():
        for layer, factor in zip(other, factors, strict=True):
            layer.weight.mul_(factor)
    loaded = at(30, lambda model: model.load_state_dict(other.state_dict()))
    assert [] == Loop(model, adam(model, lr=1e-3)).train(60, loaded)


def test_weights_that_grow_in_each_step_are_found_by_their_sum():
    def grow(model, step):
        if step >= 60:
            with torch.no_grad():
                model[4].weight.mul_(1.05)

    model = stack()
    found = Loop(model, adam(model, lr=1e-3)).train(200, grow)
    assert {"4"} == {write.layer for write in found}
    assert found[0].last_step < 200


@pytest.mark.parametrize("every", [1, 10, 50])
@pytest.mark.parametrize("growth", [0.0, 1.05])
def test_gradients_that_begin_late_or_grow_are_not_reported(every, growth):
    """A layer without gradients for 600 steps is then moved by many learning rates per step."""
    model = stack(width=16)
    optimizer = adam(model, lr=1e-3, weight_decay=0.0)

    loop = Loop(model, optimizer, every=every, width=16)
    handles = []

    def change(model, step):
        for handle in handles:
            handle.remove()
        scale = 0.0 if step < 600 else growth ** (step - 600) if growth else 1.0
        sign = model[2].weight.detach().sign()  # straight along the weights: the worst case
        handles[:] = [model[2].weight.register_hook(lambda grad: -sign * scale)]

    assert [] == loop.train(700, change)
    assert 0.0 < model[2].weight.norm().item()


def test_a_large_layer_is_read_as_a_small_one_is():
    model = stack(width=96)
    (found,) = Loop(model, adam(model), width=96).train(
        40, at(30, lambda model: model[2].weight.zero_())
    )
    assert ("2", 30) == (found.layer, found.last_step)


def test_a_rate_schedule_that_moves_the_betas_too_is_known():
    model = stack()
    optimizer = adam(model, betas=(0.95, 0.999))

    def cycle(model, step):
        optimizer.param_groups[0]["betas"] = (0.95 - 0.1 * step / 100, 0.999)
        at(80, flip)(model, step)

    (found,) = Loop(model, optimizer).train(100, cycle)
    assert ("2", 80) == (found.layer, found.last_step)


def test_a_check_abstains_without_known_updates():
    model = stack()
    assert not Loop(model, torch.optim.SGD(model.parameters(), lr=0.1)).check.is_possible
    assert not Loop(model, adam(model, betas=(0.99, 0.9))).check.is_possible
    few = stack(layers=2)
    assert not Loop(few, adam(few)).check.is_possible


def test_an_unknown_rate_discards_the_readings():
    model = stack()
    loop = Loop(model, adam(model))
    loop.train(10)
    loop.check.read(10, [None])
    with torch.no_grad():
        model[2].weight.zero_()
    assert [] == loop.train(10)


def test_parameters_that_moved_to_other_memory_are_read_there():
    model = stack()
    loop = Loop(model, adam(model))
    loop.train(10)
    for param in model.parameters():
        param.data = param.data.clone()
    assert ["2"] == [w.layer for w in loop.train(20, at(15, lambda m: m[2].weight.mul_(10.0)))]


def test_the_bound_of_an_update_is_reached_and_not_passed():
    beta1, beta2 = 0.9, 0.99
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.Adam([weight], lr=1.0, betas=(beta1, beta2), eps=0.0)
    moved = 0.0
    for step in range(400):  # the gradients for which Cauchy-Schwarz is an equality
        weight.grad = torch.tensor([(beta2 / beta1) ** step], dtype=torch.float64)
        before = weight.item()
        optimizer.step()
        moved = max(moved, abs(weight.item() - before))
    bound = (1 - beta1) / math.sqrt((1 - beta2) * (1 - beta1**2 / beta2))
    assert 0.95 * bound < moved <= bound


def test_a_write_is_dated_by_the_gradients_it_changed():
    write = WeightWrite("2", 41, 50, 1.0, 10.0, 0.1)
    usual = {step: [1.0 + 0.1 * (step % 3), 2.0] for step in range(20, 60)}
    assert 41 == date_write(write, usual)  # nothing stands out: the first possible step
    assert 49 == date_write(write._replace(first_step=48), usual)  # off by at most one step
    changed = {step: [v * (100.0 if step >= 47 else 1.0) for v in usual[step]] for step in usual}
    assert 47 == date_write(write, changed)
    nonfinite = usual | {43: [math.nan, 2.0]}
    assert 43 == date_write(write, nonfinite)
    assert 41 == date_write(write, {})
    assert 44 == date_write(write, usual, onsets=[12, 46, 44])
    unused = {step: [*values, 0.0] for step, values in changed.items()}
    assert 47 == date_write(write, unused)


def train(make_loop, change, steps=160, **arguments):
    loop = make_loop(model=stack(width=4), **arguments)
    for step in range(steps):
        x = torch.randn(8, 4, generator=loop.data)
        loss = (loop.model(x) - x).square().mean()
        loss.backward()
        change(loop, step)
        loop.monitor.step(loss, max_norm=1.0)
    raised = [e.finding for e in loop.journal().events if isinstance(e, FindingRaised)]
    return [each for each in raised if each.detector == "weights"]


def test_a_loop_reports_the_layer_with_an_alert(make_loop):
    def scale(loop, step):
        if step == 80:
            with torch.no_grad():
                loop.model[2].weight.mul_(100.0)

    (finding,) = train(make_loop, scale)
    assert ("weight_norm", "advisory", "2") == (finding.kind, finding.level, finding.layer)
    assert 30 < finding.onset_step <= 131
    assert "were changed by something else than the optimizer" in finding.reason


def test_a_layer_that_is_written_to_in_each_step_is_reported_every_50_steps(make_loop):
    def scale(loop, step):
        if step >= 80:
            with torch.no_grad():
                loop.model[2].weight.mul_(3.0)

    steps = [finding.step for finding in train(make_loop, scale)]
    assert 1 <= len(steps) <= 2
    assert all(later - step >= 50 for step, later in itertools.pairwise(steps))


def test_a_healthy_loop_reports_nothing(make_loop):
    assert [] == train(make_loop, lambda loop, step: None)


def test_an_announced_change_is_not_reported(make_loop):
    def scale(loop, step):
        if step == 80:
            loop.monitor.expect("a new layer", steps=60)
            with torch.no_grad():
                loop.model[2].weight.mul_(100.0)

    assert [] == train(make_loop, scale)
