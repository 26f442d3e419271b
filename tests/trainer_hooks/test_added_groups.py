"""Parameter groups added during training: measured, guarded and kept from the next step on."""

import logging

import pytest
import torch
from torch import nn

import trainer_hooks
from tests.support.inside import device_of, events_of, refs_of, run_of
from tests.support.watched import own_place  # noqa: F401
from tests.trainer_hooks.thawing import OPTIMIZERS, STEPS, THAW, Thawing, alike
from trainvitals.errors import CheckpointError, UsageError
from trainvitals.records import NamesDefined, Note


def checkpoints(folder, **settings):
    chosen = {"healthy_after": 2, "snapshot_every": 2, "save_every": 4} | settings
    return trainer_hooks.CheckpointSettings(directory=folder / "checkpoints", **chosen)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_skips_are_exact_before_at_and_after_a_thaw(optimizer):
    expected = Thawing(optimizer).run_bare()
    training = Thawing(optimizer)
    with trainer_hooks.watch(training.model, training.optimizer) as monitor:
        state, _ = training.run(monitor)
    assert alike(expected, state)
    assert monitor.swallowed_errors == {}


def test_the_norm_covers_the_thawed_layer_from_the_next_step_on():
    training = Thawing()
    with trainer_hooks.watch(training.model, training.optimizer) as monitor:
        training.run(monitor, bad=(), steps=THAW)
        frozen = device_of(monitor).norms.names
        training.thaw()
        loss = training.backward(THAW)
        params = [p for g in training.optimizer.param_groups for p in g["params"]]
        norm = nn.utils.get_total_norm([p.grad for p in params])
        monitor.step(loss)
        squares = device_of(monitor).packer.squares
        assert squares.sum().sqrt().item() == pytest.approx(norm.item())
        assert {"0.weight", "0.bias"} == {*device_of(monitor).norms.names} - {*frozen}


def test_one_message_names_the_added_parameters(caplog):
    training = Thawing()
    with (
        trainer_hooks.watch(training.model, training.optimizer) as monitor,
        caplog.at_level(logging.WARNING, "trainvitals"),
    ):
        events = events_of(monitor)
        training.run(monitor, bad=())
    (logged,) = [r.getMessage() for r in caplog.records if "parameters changed" in r.getMessage()]
    assert f"before step {THAW}: added 0.weight, 0.bias; 8 parameters" in logged
    assert 1 == len([e for e in events if isinstance(e, Note) and e.code == "groups_changed"])


def test_layers_keep_their_ids_in_the_rows():
    training = Thawing()
    with trainer_hooks.watch(training.model, training.optimizer) as monitor:
        events = events_of(monitor)
        training.run(monitor, bad=())
    before, after = [e.names for e in events if isinstance(e, NamesDefined)]
    assert before.items() < after.items()
    assert ["0"] == [name for number, name in after.items() if number not in before]


def test_two_groups_at_different_steps_and_a_parameter_in_an_old_group():
    training = Thawing()
    extra = nn.Parameter(torch.zeros(16))
    training.inner.register_parameter("extra", extra)
    with trainer_hooks.watch(training.model, training.optimizer) as monitor:
        training.run(monitor, bad=(), steps=4)
        training.optimizer.param_groups[0]["params"].append(extra)
        training.run(monitor, bad=())
        assert {"extra", "0.weight"} <= {*device_of(monitor).norms.names}
    assert monitor.swallowed_errors == {}


def test_a_group_may_be_removed_again():
    training = Thawing()
    with trainer_hooks.watch(training.model, training.optimizer) as monitor:
        training.run(monitor, bad=(), steps=THAW + 2)
        del training.optimizer.param_groups[1]
        for step in range(THAW + 2, STEPS):
            monitor.step(training.backward(step))
        assert "0.weight" not in device_of(monitor).norms.names
    assert monitor.swallowed_errors == {}


def test_an_adapter_with_its_own_batch_norm_is_guarded_from_the_step_after_it():
    class Adapter(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer, self.low, self.norm = layer, nn.Linear(8, 16), nn.BatchNorm1d(16)

        def forward(self, x):
            return self.layer(x) + self.norm(self.low(x))

    def adapt(training):
        torch.manual_seed(1)
        training.inner[0] = Adapter(training.inner[0])
        new = [*training.inner[0].low.parameters(), *training.inner[0].norm.parameters()]
        training.optimizer.add_param_group({"params": new})

    states = []
    for watched in (False, True):
        training = Thawing()
        monitor = trainer_hooks.watch(training.model, training.optimizer) if watched else None
        for step in range(10):
            if step == 4:
                adapt(training)
            if monitor is not None:
                monitor.step(training.backward(step, float("nan") if step == 7 else 1.0))
            elif step != 7:
                training.backward(step)
                training.optimizer.step()
                training.optimizer.zero_grad()
        states.append(training.bits())
    monitor.close()
    assert alike(*states)
    assert monitor.swallowed_errors == {}


def test_an_ema_follows_the_thawed_layer():
    training = Thawing()
    ema = trainer_hooks.EMA(training.model, decay=0.5)
    with trainer_hooks.watch(training.model, training.optimizer, state={"ema": ema}) as monitor:
        training.run(monitor, bad=(), steps=THAW)
        before = training.inner[0].weight.detach().clone()
        training.run(monitor, bad=())
    with ema.swap():
        assert not torch.equal(before, training.inner[0].weight)


def test_signals_are_measured_with_the_added_parameters():
    training = Thawing()
    signals = trainer_hooks.SignalSettings(
        every=2, weight_norm=True, update_norm=True, activations=("*",)
    )
    with trainer_hooks.watch(training.model, training.optimizer, signals=signals) as monitor:
        training.run(monitor, bad=())
    assert monitor.swallowed_errors == {}


def test_a_group_of_another_kind_of_step_is_refused_and_the_optimizer_is_free_again():
    training = Thawing("adamw")
    with (
        pytest.raises(UsageError, match="fused"),
        trainer_hooks.watch(training.model, training.optimizer) as monitor,
    ):
        training.run(monitor, bad=(), steps=2)
        training.optimizer.param_groups[0]["fused"] = True
        training.thaw(fused=True)
        training.run(monitor, bad=())
    assert "add_param_group" not in vars(training.optimizer)


# ------------------------------------------------------------------------ snapshots, checkpoints


def spoiled_once(training, step):
    """Return a function that makes a weight NaN before a step, once."""
    done = []

    def spoil(now):
        if now == step and not done:
            done.append(now)
            training.inner[3].weight.data[0, 0] = float("nan")

    return spoil


@pytest.mark.parametrize("spoiled_at", [10, 13])
def test_a_rollback_after_a_thaw_is_exact(tmp_path, monkeypatch, spoiled_at):
    monkeypatch.setenv("VITALS_LADDER_MARGIN", "2")
    expected = Thawing().run_bare(without=())
    training = Thawing()
    with trainer_hooks.watch(
        training.model, training.optimizer, mode="heal", checkpoints=checkpoints(tmp_path)
    ) as monitor:
        state, back = training.run(monitor, bad=(), before=spoiled_once(training, spoiled_at))
    assert len(back) == 1
    assert THAW < back[0] <= spoiled_at
    assert alike(expected, state)
    assert monitor.swallowed_errors == {}


def test_no_state_from_before_a_thaw_is_a_target(tmp_path):
    training = Thawing()
    with trainer_hooks.watch(
        training.model, training.optimizer, mode="heal", checkpoints=checkpoints(tmp_path)
    ) as monitor:
        training.run(monitor, bad=(), steps=THAW)
        assert refs_of(monitor)
        training.run(monitor, bad=(), steps=THAW + 1)
        assert [THAW + 1] == [ref.step for ref in refs_of(monitor)]
        training.run(monitor, bad=(), steps=THAW + 3)
        run_of(monitor).recovery.store.wait()
        training.run(monitor, bad=(), steps=THAW + 5)
        assert min(ref.step for ref in refs_of(monitor)) == THAW + 1
        healthy = [ref.step for ref in refs_of(monitor) if ref.state == "healthy"]
        assert healthy[0] == THAW + 1  # the steps before were healthy


def test_a_checkpoint_of_more_groups_says_what_the_program_has_to_add(tmp_path, monkeypatch):
    monkeypatch.setenv("VITALS_RUN_ID", "01ARZ3NDEKTSV4RRFFQ69G5FAV")
    where = checkpoints(tmp_path)

    def watch(training):
        return trainer_hooks.watch(
            training.model, training.optimizer, mode="heal", checkpoints=where
        )

    first = Thawing()
    with watch(first) as monitor:
        first.run(monitor, bad=())
    again = Thawing()
    with pytest.raises(CheckpointError, match=r"has 2 parameter groups.* have 1") as refused:
        watch(again)
    assert "before watch()" in refused.value.hint
    again.thaw()
    with watch(again) as monitor:
        assert THAW < monitor.step_index < STEPS
        state, _ = again.run(monitor, bad=())
    assert alike(Thawing().run_bare(without=()), state)
