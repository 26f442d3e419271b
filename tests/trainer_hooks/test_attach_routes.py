"""One process: whichever way a loop's step comes, attach sees it, or says that it does not."""

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import trainer_hooks
from tests.support.examples import each_once, one_in
from tests.support.watched import INF, NAN, Own, assert_same, own_place  # noqa: F401
from trainvitals.errors import UsageError

# ------------------------------------------------------------------------------- compiled steps


@pytest.fixture
def compiled(monkeypatch):
    """Return torch.compile without a C++ compiler and its workers; forget what was compiled."""
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")  # read when inductor is imported
    torch._dynamo.reset()
    yield lambda function: torch.compile(function, backend="aot_eager")
    torch._dynamo.reset()


def gradients(model, *, bad=False):
    model.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    if bad:
        model.weight.grad[0, 0] = NAN


def linear(fused, make=torch.optim.AdamW):
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    return model, make(model.parameters(), lr=0.1, fused=fused)


BOTH = (True, False)


def assert_guards(model, step):
    for bad in (False, True, False):
        gradients(model, bad=bad)
        before = model.weight.detach().clone()
        step()
        assert torch.equal(before, model.weight) == bad


@pytest.mark.parametrize(
    ("when", "called", "fused"), each_once(("after", "within", "assigned"), BOTH, BOTH)
)
def test_a_compiled_step_is_guarded(compiled, when, called, fused):
    model, optimizer = linear(fused)
    step = None
    if when == "within":  # a function of the loop's own, compiled before
        step = compiled(lambda: optimizer.step())
    if when == "assigned":
        optimizer.step = compiled(optimizer.step)
    if called:
        gradients(model)
        (step or optimizer.step)()
    with trainer_hooks.attach(model, optimizer) as attached:
        if when == "after":
            step = compiled(optimizer.step)
        assert_guards(model, step or optimizer.step)
    assert attached.step_index == 3
    assert attached.swallowed_errors == {}


@pytest.mark.parametrize(
    ("called", "fused"),
    one_in(3, [(True, True), (True, False), (False, True), (False, False)]),
)
def test_a_step_that_was_compiled_before_is_refused_at_the_first_step(compiled, called, fused):
    model, optimizer = linear(fused)
    step = compiled(optimizer.step)
    if called:
        gradients(model)
        step()
    with trainer_hooks.attach(model, optimizer):
        gradients(model)
        with pytest.raises(UsageError, match="before attach"):
            step()


def test_a_step_that_passes_us_by_later_is_counted_and_the_loop_goes_on():
    model, optimizer = linear(True)
    around = optimizer.step
    with trainer_hooks.attach(model, optimizer) as attached:
        gradients(model)
        optimizer.step()
        around()
    assert attached.swallowed_errors == {"unguarded_step": 1}


# --------------------------------------------------------------------------------- the scaler


class Scaled(Own):
    """The loop under a gradient scaler on the CPU, which it steps and updates itself."""

    def __init__(self, *, fused=True, unscales=True):
        super().__init__(fused=fused)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
        self.unscales = unscales

    def forward(self, scale=1.0):
        x = torch.randn(32, 4, generator=self.data)
        loss = (self.model(x) - x.sum(1, keepdim=True)).square().mean() * scale
        self.scaler.scale(loss).backward()
        return loss

    def step(self, *, gradient=None, **_):
        loss = self.forward()
        if gradient is not None:
            self.model[0].weight.grad[0, 0] = gradient
        if self.unscales:
            self.scaler.unscale_(self.optimizer)
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            if self.attached is not None:
                self.attached.grad_norm(norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return loss


@pytest.mark.parametrize("unscales", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_under_a_scaler_a_healthy_loop_is_what_it_was(fused, unscales):
    bare = Scaled(fused=fused, unscales=unscales).run(20)
    ours = Scaled(fused=fused, unscales=unscales)
    with ours.attach(scaler=ours.scaler) as attached:
        ours.run(20)
    assert_same(bare.state(), ours.state())
    assert_same(bare.scaler.state_dict(), ours.scaler.state_dict())
    assert attached.step_index == 20
    assert "step" not in vars(ours.scaler)


@pytest.mark.parametrize("mode", ["observe", "guard"])
@pytest.mark.parametrize("unscales", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_an_overflow_halves_the_scale_is_seen_and_leaves_no_trace(fused, unscales, mode):
    loop = Scaled(fused=fused, unscales=unscales)
    with loop.attach(scaler=loop.scaler, mode=mode) as attached:
        loop.step()
        before = loop.state()
        loop.step(gradient=INF)
        assert_same(before["optimizer"], loop.state()["optimizer"])
        assert torch.equal(before["model"]["0.weight"], loop.model[0].weight)
        assert loop.scaler.get_scale() == 2.0**9
        loop.step()
        assert not torch.equal(before["model"]["0.weight"], loop.model[0].weight)
    assert attached.step_index == 3
    assert loop.skips() == 0


@pytest.mark.parametrize("fused", [True, False])
def test_an_outlier_under_a_scaler_is_skipped_and_its_scale_stays(fused):
    loop = Scaled(fused=fused)
    with loop.attach(scaler=loop.scaler) as attached:
        loop.run(60)
        before = loop.parameters()
        loop.step(gradient=1e9)
        assert all(map(torch.equal, before, loop.parameters()))
        loop.step()
        assert not all(map(torch.equal, before, loop.parameters()))
    assert loop.scaler.get_scale() == 2.0**10
    assert loop.skips() == 1
    assert attached.swallowed_errors == {}


def test_a_second_step_without_an_update_is_the_scaler_s_own_error():
    loop = Scaled()
    with loop.attach(scaler=loop.scaler):
        loop.forward()
        loop.scaler.step(loop.optimizer)
        with pytest.raises(RuntimeError, match="since the last update"):
            loop.scaler.step(loop.optimizer)


def test_a_scaler_that_we_were_not_told_of_is_refused_where_it_shows():
    loop = Scaled(unscales=False)
    with loop.attach(), pytest.raises(UsageError, match="scaler"):
        loop.step()


def test_off_clips_under_a_scaler_too(monkeypatch):
    monkeypatch.setenv("VITALS_MODE", "off")
    bare = Scaled().run(5)
    ours = Scaled(unscales=False)
    with trainer_hooks.attach(ours.model, ours.optimizer, scaler=ours.scaler, max_norm=0.5):
        ours.run(5)
    assert_same(bare.state(), ours.state())


# -------------------------------------------------------------------------- several optimizers


def two(fused):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    make = lambda part, f: torch.optim.AdamW(part.parameters(), lr=0.1, fused=f)  # noqa: E731
    return model, [make(model[0], True), make(model[1], fused)]


@pytest.mark.parametrize("fused", [True, False])
def test_several_optimizers_share_one_verdict_and_one_step(fused):
    model, optimizers = two(fused)
    with trainer_hooks.attach(model, optimizers) as attached:
        for bad in (False, True, False):
            before = [p.detach().clone() for p in model.parameters()]
            model(torch.ones(2, 4)).sum().backward()
            if bad:
                model[1].weight.grad[0, 0] = NAN
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            same = [torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
            assert [bad] * 4 == same
    assert attached.step_index == 3


def test_one_that_steps_less_often_has_the_round_s_verdict():
    model, (often, seldom) = two(True)
    with trainer_hooks.attach(model, [often, seldom]) as attached:
        for step in range(4):
            model(torch.ones(2, 4)).sum().backward()
            often.step()
            often.zero_grad()
            if step % 2:
                seldom.step()
                seldom.zero_grad()
    assert attached.step_index == 4


def alternate(model, optimizers, *, steps, bad_at=-1):
    for step in range(steps):
        for part, optimizer in zip(model, optimizers, strict=True):
            part(torch.ones(2, 4)).sum().backward()
            if step == bad_at:
                part.weight.grad[0, 0] = NAN
            optimizer.step()
            optimizer.zero_grad()


def test_alternating_updates_are_refused_as_one_round():
    model, optimizers = two(True)
    with (
        trainer_hooks.attach(model, optimizers),
        pytest.raises(UsageError, match="once per optimizer"),
    ):
        alternate(model, optimizers, steps=1)


def test_alternating_updates_are_guarded_by_a_call_each():
    model, optimizers = two(True)
    with (
        trainer_hooks.attach(model, optimizers[0], run="critic") as critic,
        trainer_hooks.attach(model, optimizers[1], run="actor") as actor,
    ):
        alternate(model, optimizers, steps=5, bad_at=3)
    assert [critic.step_index, actor.step_index] == [5, 5]
    assert critic.run_id != actor.run_id
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.parametrize("fused", [True, False])
def test_gradients_that_took_the_place_of_measured_ones_are_refused_too(fused):
    model, optimizers = two(fused)
    with (
        trainer_hooks.attach(model, optimizers),
        pytest.raises(UsageError, match="once per optimizer"),
    ):
        sum(part(torch.ones(2, 4)).sum() for part in model).backward()
        optimizers[0].step()
        optimizers[1].zero_grad()
        model[1](torch.ones(2, 4)).sum().backward()
        optimizers[1].step()


def test_gradients_that_are_clipped_between_the_steps_of_a_round_are_not():
    model, optimizers = two(True)
    with trainer_hooks.attach(model, optimizers) as attached:
        sum(part(torch.ones(2, 4)).sum() for part in model).backward()
        for part, optimizer in zip(model, optimizers, strict=True):
            nn.utils.clip_grad_norm_(part.parameters(), 1e-3)
            optimizer.step()
    assert attached.step_index == 1


# ------------------------------------------------------------------------ torch's own checkpoints


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD])
def test_a_checkpoint_that_fills_the_state_of_an_optimizer_is_no_step(make):
    model, optimizer = linear(fused=False, make=make)
    with trainer_hooks.attach(model, optimizer) as attached:
        get_optimizer_state_dict(model, optimizer)
        assert attached.step_index == 0
        assert_guards(model, optimizer.step)
        model.zero_grad()
        get_optimizer_state_dict(model, optimizer)
        assert (attached.step_index, attached.swallowed_errors) == (3, {})


def test_a_first_step_of_rate_zero_is_guarded_all_the_same():
    model, optimizer = linear(fused=False)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    with trainer_hooks.attach(model, optimizer) as attached:
        gradients(model, bad=True)
        optimizer.step()
        assert attached.step_index == 1
        assert not optimizer.state


def test_a_closure_is_run_once_before_the_step_where_an_adapter_says_so():
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    calls = []

    def closure():
        assert torch.is_grad_enabled()
        calls.append(len(calls))
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().mean() * (NAN if len(calls) == 2 else 1.0)
        loss.backward()
        return loss

    with trainer_hooks.attach(model, optimizer) as attached:
        attached.route.runs_closures = True
        with torch.no_grad():
            first = optimizer.step(closure)
        before = model.weight.detach().clone()
        optimizer.step(closure=closure)
    assert [0, 1] == calls
    assert first.item() > 0
    assert torch.equal(before, model.weight)
