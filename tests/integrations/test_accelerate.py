"""Accelerate, beside the fault matrix: the clip in all its ways, several optimizers, scalers."""

import pytest
import torch
from torch import nn

pytest.importorskip("accelerate", reason="not installed: accelerate")
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.usefixtures("own_place", "bare")]

from accelerate import Accelerator  # noqa: E402
from accelerate.utils import DistributedType  # noqa: E402

from tests.integrations.accelerate_loop import Own, bare, ends, journal, same  # noqa: E402, F401
from tests.support.inside import probe_of  # noqa: E402
from tests.support.watched import own_place  # noqa: E402, F401
from tests.trainer_hooks.probing import ask  # noqa: E402
from trainer_hooks.integrations.accelerate import attach  # noqa: E402
from trainvitals.errors import UsageError  # noqa: E402

NAN, INF = float("nan"), float("inf")


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


# ----------------------------------------------------------------------------------- the probe


def test_a_loop_that_gives_its_batches_has_the_state_asked_and_trains_as_before(tmp_path):
    def train(own, attached=None):
        for _ in range(25):
            x = torch.randn(8, 4, generator=own.data)
            if attached is not None:
                attached.keep_batch(x, loss_of(own.model))
            own.accelerator.backward(loss_of(own.model)(x))
            own.clip()
            own.update()
        return own

    theirs, ours = train(Own()), Own()
    attached = ours.attach()
    train(ours, attached)
    reading = probe_of(attached).evaluate(ask(30))
    assert probe_of(attached).is_on
    assert 0 < reading.num_batches
    assert same(theirs.state(), ours.state())
    attached.close()
    assert [] == journal(tmp_path).notes("no_probe")


def loss_of(model):
    return lambda x: (model(x) - x[:, :1]).square().mean()


@pytest.mark.parametrize("clips", [True, False])
@pytest.mark.parametrize(
    ("fused", "scales"), [(True, False), (False, False), (False, True), (True, True)]
)
def test_a_group_that_is_added_in_mid_run_is_guarded(fused, scales, clips):

    def trained(is_guarded):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if scales else None
        own = Own(fused=fused, scaler=scaler)
        if is_guarded:
            own.attach()
        for step in range(8):
            if step == 3:
                torch.manual_seed(2)
                own.model.append(nn.Linear(1, 1))
                own.optimizer.add_param_group({"params": [*own.model[3].parameters()]})
            own.backward()
            if clips:
                own.clip()
            own.update()
        return own

    theirs, ours = trained(False), trained(True)
    ours.attached.close()
    assert same(theirs.state(), ours.state())
    assert {} == ours.attached.swallowed_errors
