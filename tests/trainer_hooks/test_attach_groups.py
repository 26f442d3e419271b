"""Parameter groups that a loop under ``attach`` adds during training, as ``test_added_groups``."""

import dataclasses

import pytest
import torch
from torch import nn

import trainer_hooks
from tests.support.inside import device_of, events_of, run_of
from tests.support.watched import own_place  # noqa: F401
from tests.trainer_hooks.thawing import OPTIMIZERS, STEPS, THAW, Thawing, alike
from trainvitals.errors import UsageError
from trainvitals.records import Note


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_skips_are_exact_before_at_and_after_a_thaw(optimizer):
    expected = Thawing(optimizer).run_bare()
    training = Thawing(optimizer)
    with trainer_hooks.attach(training.model, training.optimizer) as attached:
        events = events_of(attached)
        state, _ = training.run_attached(attached)
    assert alike(expected, state)
    assert attached.swallowed_errors == {}
    notes = [e.text for e in events if isinstance(e, Note) and e.code == "groups_changed"]
    assert [f"before step {THAW}: added 0.weight, 0.bias"] == [
        text.partition("changed ")[2].partition(";")[0] for text in notes
    ]


@pytest.mark.parametrize("is_told", [True, False])
def test_the_norm_covers_the_thawed_layer_from_the_next_step_on(is_told):
    training = Thawing()
    with trainer_hooks.attach(training.model, training.optimizer) as attached:
        training.run_attached(attached, bad=(), steps=THAW)
        training.thaw()
        attached.loss(training.backward(THAW))
        params = [p for g in training.optimizer.param_groups for p in g["params"]]
        norm = nn.utils.get_total_norm([p.grad for p in params])
        if is_told:
            attached.before_clip(1.0)
            nn.utils.clip_grad_norm_(params, 1.0)
        training.optimizer.step()
        squares = device_of(attached).packer.squares
        assert squares.sum().sqrt().item() == pytest.approx(norm.item())


def test_a_scaler_s_step_takes_the_thawed_layer():
    training = Thawing()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with trainer_hooks.attach(training.model, training.optimizer, scaler=scaler) as attached:
        for step in range(STEPS):
            if step == THAW:
                training.thaw()
            x = torch.randn(12, 8, generator=torch.Generator().manual_seed(step))
            loss = (training.model(x) - x.sum(1, keepdim=True)).square().mean()
            scaler.scale(loss).backward()
            before = training.inner[0].weight.detach().clone()
            scaler.step(training.optimizer)
            scaler.update()
            training.optimizer.zero_grad()
            assert (step >= THAW) != torch.equal(before, training.inner[0].weight)
    assert attached.swallowed_errors == {}


def test_a_rollback_after_a_thaw_is_exact():
    training, expected, back = Thawing(), [], []
    with trainer_hooks.attach(training.model, training.optimizer, mode="heal") as attached:
        attached.when_rolled_back(back.append)
        for step in range(100):
            if step == THAW:
                training.thaw()
            expected.append(training.bits())
            if step == 80:
                training.inner[3].weight.data[0, 0] = float("nan")
            attached.loss(training.backward(step))
            training.optimizer.step()
            training.optimizer.zero_grad()
            if back:
                break
        at = attached.step_index
    assert THAW < at <= 80
    assert alike(expected[at], training.bits())
    assert attached.swallowed_errors == {}


def test_a_group_past_the_guard_of_an_engine_is_counted_and_left_alone():
    training = Thawing()
    with trainer_hooks.attach(training.model, training.optimizer) as attached:
        run = run_of(attached)
        run.given = dataclasses.replace(run.given, engine=device_of(attached).engine)
        training.run_attached(attached, bad=(), steps=2, thaw=-1)
        group = {**training.optimizer.param_groups[0], "params": [*training.inner[0].parameters()]}
        training.optimizer.param_groups.append(group)
        training.run_attached(attached, bad=(), steps=3, thaw=-1)
        assert "0.weight" not in device_of(attached).norms.names
    assert attached.swallowed_errors == {"param_groups": 3}


def test_a_step_that_a_framework_replaces_for_its_time_stays_fused():
    training = Thawing()
    optimizer, scaler = training.optimizer, torch.amp.GradScaler("cpu", init_scale=4.0)
    with trainer_hooks.attach(training.model, optimizer, scaler=scaler) as attached:
        ours = optimizer.step
        for step in range(THAW + 3):
            if step == THAW:
                training.thaw()
            loss = training.model(torch.randn(12, 8)).square().mean()
            scaler.scale(loss).backward()
            optimizer.step = lambda *args, **kwargs: ours(*args, **kwargs)  # as Accelerate does
            scaler.step(optimizer)
            optimizer.step = ours
            scaler.update()
            optimizer.zero_grad()
        assert {"0.weight", "0.bias"} <= {*device_of(attached).norms.names}
    assert attached.swallowed_errors == {}


def test_buffers_of_a_new_module_are_restored_also_if_its_first_verdict_was_discarded():
    training = Thawing()
    with trainer_hooks.attach(training.model, training.optimizer) as attached:
        for step in range(8):
            if step == 2:
                training.inner[0] = nn.Sequential(training.inner[0], nn.BatchNorm1d(16))
                training.optimizer.add_param_group({"params": training.inner[0][1].parameters()})
            mean = training.inner[0][1].running_mean.clone() if step > 2 else None
            attached.loss(training.backward(step, float("nan") if step == 6 else 1.0))
            attached.before_clip(1.0)
            if step == 2:
                attached.before_clip(1.0)
            training.optimizer.step()
            training.optimizer.zero_grad()
            if step > 2:
                assert (step == 6) == torch.equal(mean, training.inner[0][1].running_mean)
    assert attached.swallowed_errors == {}


def test_a_group_between_the_steps_of_two_optimizers_was_not_measured_and_is_refused():
    model, late = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 1)), nn.Linear(1, 1)
    first, second = (torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model)
    with trainer_hooks.attach(model, [first, second]):
        model(torch.randn(4, 8)).square().mean().backward()
        first.step()
        second.add_param_group({"params": late.parameters()})
        with pytest.raises(UsageError, match="not measured with the step"):
            second.step()
