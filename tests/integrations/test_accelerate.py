"""Accelerate, beside the fault matrix: the clip in all its ways, checkpoints, ends, refusals."""

import json
import math
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest
import torch
from torch import nn

pytest.importorskip("accelerate", reason="not installed: accelerate")
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.usefixtures("own_place", "bare")]

from accelerate import Accelerator  # noqa: E402
from accelerate.state import AcceleratorState  # noqa: E402
from accelerate.utils import DistributedType  # noqa: E402

from tests.trainer_hooks.measures.journal import Journal  # noqa: E402
from tests.trainer_hooks.test_monitor import own_place  # noqa: E402, F401
from trainer_hooks.integrations import framework  # noqa: E402
from trainer_hooks.integrations.accelerate import attach, refuse  # noqa: E402
from trainvitals.errors import MissingDependencyError, UsageError  # noqa: E402
from trainvitals.records import AttemptStarted, ChangeExpected, RunEnded  # noqa: E402

NAN, INF = float("nan"), float("inf")


@pytest.fixture
def bare():
    """Each test makes the state that Accelerate keeps for the process anew."""
    AcceleratorState._reset_state(reset_partial_state=False)


class Own:
    """A loop as people write it with Accelerate."""

    def __init__(self, *, fused=True, scaler=None, micro_batches=1):
        torch.manual_seed(0)
        self.accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=micro_batches,
            mixed_precision="no" if scaler is None else "fp16",
        )
        if scaler is not None:  # as it is made where there is a GPU
            self.accelerator.scaler, self.accelerator.native_amp = scaler, True
        net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, fused=fused)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.9)
        found = self.accelerator.prepare(net, optimizer, schedule)
        self.model, self.optimizer, self.scheduler = found
        self.data = torch.Generator().manual_seed(1)
        self.losses = []

    def attach(self, **options):
        self.attached = attach(self.accelerator, self.model, self.optimizer, **options)
        return self.attached

    def backward(self, gradient=None):
        x = torch.randn(8, 4, generator=self.data)
        loss = (self.model(x) - x[:, :1]).square().mean()
        self.losses.append(loss.item())
        self.accelerator.backward(loss)
        if gradient is not None:
            self.model[0].weight.grad[0, 0] = gradient

    def update(self):
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def clip(self, max_norm=0.1, **options):
        return self.accelerator.clip_grad_norm_(self.model.parameters(), max_norm, **options)

    def step(self, gradient=None):
        self.backward(gradient)
        self.clip()
        self.update()

    def run(self, steps):
        for _ in range(steps):
            self.step()
        return self

    def parameters(self):
        return [p.detach().clone() for p in self.model.parameters()]

    def state(self):
        moments = [t for s in self.optimizer.state.values() for t in s.values()]
        everything = [*self.model.parameters(), *self.model.buffers(), *moments]
        return [t.detach().clone() for t in everything]


def same(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


def journal(tmp_path):
    return Journal(tmp_path / "shm")


def ends(tmp_path):
    return [e.state for e in journal(tmp_path).events if isinstance(e, RunEnded)]


@pytest.mark.parametrize("fused", [True, False])
def test_a_healthy_loop_is_bit_for_bit_what_it_was_without_us(fused):
    theirs, ours = Own(fused=fused).run(25), Own(fused=fused)
    ours.attach()
    ours.run(25).attached.close()
    assert same(theirs.state(), ours.state())
    assert {} == ours.attached.swallowed_errors


def test_all_is_put_back_and_a_healthy_loop_goes_on():
    own = Own()
    before = {**vars(own.accelerator)}
    inner = dict(vars(own.optimizer.optimizer))
    own.attach()
    own.run(2).attached.close()
    after = vars(own.accelerator)
    assert {n: v for n, v in before.items() if n != "step"} == {
        n: v for n, v in after.items() if n != "step"
    }
    left = vars(own.optimizer.optimizer)
    assert {"step", "add_param_group"} & inner.keys() == {"step", "add_param_group"} & left.keys()
    own.step(NAN)
    assert not torch.isfinite(own.model[0].weight).all()


def test_off_leaves_all_as_it_was_and_refuses_nothing(monkeypatch):
    own = Own()
    before = dict(vars(own.accelerator))
    monkeypatch.setattr(Accelerator, "distributed_type", DistributedType.DEEPSPEED)
    attached = own.attach(mode="off")
    assert before == vars(own.accelerator)
    assert "step" not in vars(own.optimizer.optimizer) or attached.step_index == 0
    attached.close()


# ------------------------------------------------------------------------------ the clip


def test_the_clip_returns_what_it_returned_and_the_norms_are_those_around_it(tmp_path):
    theirs, ours = Own(), Own()
    ours.attach()
    for own in (theirs, ours):
        own.backward()
    expected = theirs.clip()
    assert torch.equal(expected, ours.clip())
    ours.update()
    ours.attached.close()
    found = journal(tmp_path)
    assert pytest.approx(expected.item()) == found.steps("grad_norm")[0]
    assert 0.1 == found.steps("grad_norm_clipped")[0]
    assert pytest.approx(ours.losses[0]) == found.steps("loss")[0]


def test_a_second_clip_is_no_second_exchange_and_the_tighter_one_is_known(tmp_path):
    own = Own()
    own.attach()
    own.backward()
    norm = own.clip(INF)  # only measures
    own.clip(0.05)
    own.update()
    own.step()
    own.attached.close()
    found = journal(tmp_path)
    assert pytest.approx(norm.item()) == found.steps("grad_norm")[0]
    assert {0: 0.05, 1: 0.1} == found.steps("grad_norm_clipped")
    assert pytest.approx(own.losses) == list(found.steps("loss").values())


def test_a_step_that_the_loop_drops_by_itself_leaves_no_verdict_to_the_next():
    own = Own()
    own.attach()
    own.run(3)
    own.backward(NAN)
    if not torch.isfinite(own.clip()):
        own.optimizer.zero_grad()
    kept = own.parameters()
    own.step()
    assert not same(kept, own.parameters())
    kept = own.parameters()
    own.backward()
    own.clip()
    own.optimizer.zero_grad()
    own.step(NAN)
    assert same(kept, own.parameters())
    own.attached.close()


@pytest.mark.parametrize("value", [NAN, INF])
def test_a_clip_by_value_does_not_make_an_inf_a_number_like_others(value, tmp_path):
    own = Own()
    own.attach()
    own.run(2)
    kept = own.state()
    own.backward(value)
    own.accelerator.clip_grad_value_(own.model.parameters(), 0.1)
    own.update()
    assert same(kept, own.state())
    own.attached.close()
    assert 2 not in journal(tmp_path).steps("grad_norm_clipped")


def test_another_norm_than_the_second_is_not_taken_for_what_is_clipped_to(tmp_path):
    own = Own()
    own.attach()
    own.backward()
    own.clip(0.1, norm_type=INF)
    own.update()
    own.attached.close()
    assert {} == journal(tmp_path).steps("grad_norm_clipped")
    assert [0] == list(journal(tmp_path).steps("grad_norm"))


def test_a_clip_of_some_parameters_tells_no_norm_and_what_is_not_finite_is_skipped(tmp_path):
    own = Own()
    own.attach()
    for gradient in (None, NAN):
        kept = own.state()
        own.backward(gradient)
        for layer in (own.model[0], own.model[2]):
            own.accelerator.clip_grad_norm_(layer.parameters(), 0.1)
        own.update()
    assert same(kept[:-1], own.state()[: len(kept) - 1])
    own.attached.close()
    found = journal(tmp_path)
    assert 0 not in found.steps("grad_norm")
    assert 1 == len(found.notes("norm_unknown"))


def test_a_loop_without_a_clip_is_guarded_in_its_step_and_its_norm_is_not_known(tmp_path):
    own = Own()
    own.attach()
    for gradient in (None, NAN, None):
        kept = own.state()
        own.backward(gradient)
        own.update()
        assert same(kept, own.state()) == (gradient is not None)
    own.attached.close()
    assert {0, 2}.isdisjoint(journal(tmp_path).steps("grad_norm"))


def test_a_loop_that_says_it_does_not_clip_may_not():
    own = Own()
    own.attach(max_norm=INF)
    own.backward()
    with pytest.raises(UsageError, match="the loop clips through the accelerator"):
        own.clip()
    own.attached.close()


def test_accumulated_losses_are_averaged_and_judged_once(tmp_path):
    own = Own(micro_batches=2)
    own.attach()
    for _ in range(4):
        with own.accelerator.accumulate(own.model):
            own.backward()
            if own.accelerator.sync_gradients:
                own.clip()
            own.update()
    assert 2 == own.attached.step_index
    own.attached.close()
    pairs = zip(own.losses[::2], own.losses[1::2], strict=True)
    expected = [pytest.approx(sum(pair) / 2) for pair in pairs]
    assert expected == list(journal(tmp_path).steps("loss").values())


# ------------------------------------------------------------------------ several, and scalers


def test_several_models_and_optimizers_are_one_step(tmp_path):
    accelerator = Accelerator(cpu=True)
    nets = [nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 1), nn.BatchNorm1d(1))]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    models, optimizers = accelerator.prepare(*nets), accelerator.prepare(*optimizers)
    attached = attach(accelerator, models, optimizers)
    parameters = [p for model in models for p in model.parameters()]

    def step(gradient=None):
        accelerator.backward(models[1](models[0](torch.ones(3, 4))).sum())
        if gradient is not None:
            parameters[0].grad[0] = gradient
        accelerator.clip_grad_norm_(parameters, 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    step()
    kept = [p.detach().clone() for p in parameters]
    step(NAN)
    assert same(kept, [p.detach() for p in parameters])
    loaded = {**models[1].state_dict(), "1.running_mean": torch.full((1,), 7.0)}
    models[1].load_state_dict(loaded)
    step(NAN)
    assert 7.0 == models[1].state_dict()["1.running_mean"].item()
    assert 3 == attached.step_index
    attached.close()


def test_two_guards_on_one_accelerator_guess_no_loss(tmp_path):
    accelerator = Accelerator(cpu=True)
    nets = [nn.Linear(4, 1), nn.Linear(4, 1)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    pairs = list(zip(accelerator.prepare(*nets), accelerator.prepare(*optimizers), strict=True))
    guards = [attach(accelerator, *pair) for pair in pairs]
    for gradient in (None, NAN):
        for model, optimizer in pairs:
            accelerator.backward(model(torch.ones(3, 4)).mean())
            if gradient is not None:
                model.weight.grad[0, 0] = gradient
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert [2, 2] == [guard.step_index for guard in guards]
    assert all(torch.isfinite(net.weight).all() for net in nets)
    accelerator.save_state(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "vitals.json").exists()
    assert (tmp_path / "saved" / "vitals_1.json").exists()
    for guard in guards:
        guard.close()
    assert {} == journal(tmp_path).steps("loss")


@pytest.mark.parametrize("fused", [True, False])
def test_a_scaler_s_gradients_are_unscaled_once_and_every_later_step_is_guarded(fused):
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
    theirs = Own(fused=fused, scaler=torch.amp.GradScaler("cpu", init_scale=8.0)).run(4)
    own = Own(fused=fused, scaler=scaler)
    own.attach()
    own.run(4)
    assert same(theirs.state(), own.state())
    for _ in range(2):
        kept = own.state()
        own.backward(NAN)
        own.accelerator.unscale_gradients()
        own.clip()
        own.update()
        assert same(kept, own.state())
        assert own.accelerator.optimizer_step_was_skipped is not fused
        own.step()
        assert not own.accelerator.optimizer_step_was_skipped
        assert not same(kept, own.state())
    assert 2.0 == scaler.get_scale()
    own.attached.close()
    own.run(2)


def test_a_scaler_that_is_off_does_not_take_the_guard_away():
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    own = Own(scaler=scaler)
    own.attach()
    own.run(2)
    kept = own.state()
    own.step(NAN)
    assert same(kept, own.state())
    own.attached.close()
    assert own.optimizer.scaler is scaler


# -------------------------------------------------------------------- scalars, checkpoints, ends


def test_what_the_loop_logs_is_kept_whether_or_not_there_is_a_tracker(tmp_path):
    own = Own()
    own.attach()
    own.step()
    own.accelerator.log({"accuracy": 0.5, "phase": "warm", "on": True, "t": torch.tensor(2.0)})
    own.accelerator.init_trackers("project")
    own.accelerator.log({"accuracy": 0.75}, step=1)
    own.attached.close()
    expected = [(1, "accuracy", 0.5), (1, "t", 2.0), (1, "accuracy", 0.75)]
    assert expected == journal(tmp_path).scalars()


def test_a_loaded_run_goes_on_with_its_step_and_its_limits(tmp_path):
    own = Own()
    own.attach()
    own.run(20)
    own.accelerator.save_state(str(tmp_path / "saved"))
    expected = own.attached.state_dict()
    own.attached.close()
    again = Own()
    again.attach()
    again.accelerator.load_state(str(tmp_path / "saved"))
    assert 20 == again.attached.step_index
    assert json.loads(json.dumps(expected))["detectors"] == again.attached.state_dict()["detectors"]
    kept = again.state()
    again.step(1e4)
    assert same(kept, again.state())
    again.attached.close()
    branches = [e for e in journal(tmp_path).events if isinstance(e, AttemptStarted)]
    assert [0, 0, 20] == sorted(branch.fork_step for branch in branches)


def test_a_folder_that_was_saved_without_us_is_loaded_and_a_late_load_begins_a_new_baseline(
    tmp_path,
):
    own = Own()
    own.run(2).accelerator.save_state(str(tmp_path / "saved"))
    own.attach()
    own.accelerator.load_state(str(tmp_path / "saved"))
    assert 0 == own.attached.step_index
    own.step()
    own.accelerator.load_state(str(tmp_path / "saved"))
    own.step()
    own.attached.close()
    said = [e.reason for e in journal(tmp_path).events if isinstance(e, ChangeExpected)]
    assert ["accelerator.load_state() was called"] == said


def test_the_end_of_the_training_is_the_end_of_the_run(tmp_path):
    own = Own()
    own.attach()
    own.step()
    own.accelerator.end_training()
    assert ["finished"] == ends(tmp_path)


# ----------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("kind", ["XLA", "MEGATRON_LM"])
def test_an_update_that_accelerate_does_not_make_is_refused(kind, monkeypatch):
    own = Own()
    monkeypatch.setattr(Accelerator, "distributed_type", getattr(DistributedType, kind))
    with pytest.raises(UsageError, match=f"Accelerate trains with {kind}"):
        own.attach()


def test_an_optimizer_that_was_not_prepared_is_refused():
    own = Own()
    with pytest.raises(UsageError, match=r"that accelerator.prepare\(\) has not returned"):
        attach(own.accelerator, own.model, own.optimizer.optimizer)


def test_several_optimizers_with_a_scaler_and_updates_within_backward_are_refused():
    own = Own(scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(UsageError, match="2 optimizers with one gradient scaler"):
        attach(own.accelerator, own.model, [own.optimizer, own.optimizer])
    lomo = type("Lomo", (), {})()
    prepared = SimpleNamespace(accelerator_state=None, optimizer=lomo)
    with pytest.raises(UsageError, match="Lomo updates parameters within backward"):
        refuse(DistributedType.NO, [prepared])


def test_without_accelerate_the_extra_is_named(monkeypatch):
    def missing(_name):
        raise PackageNotFoundError

    own = Own()
    monkeypatch.setattr(framework, "version", missing)
    with pytest.raises(MissingDependencyError, match=r"trainvitals\[accelerate\]"):
        own.attach()


def test_the_losses_of_a_step_that_failed_in_backward_are_not_counted(tmp_path):
    own = Own()
    own.attach()
    with pytest.raises(RuntimeError):
        own.accelerator.backward(torch.tensor(math.pi))
    own.step()
    own.attached.close()
    assert {0: pytest.approx(own.losses[-1])} == journal(tmp_path).steps("loss")
