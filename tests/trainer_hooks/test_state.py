"""The live state: complete, put back in place, bit for bit."""

import copy

import pytest
import torch
from torch import nn

from tests.trainer_hooks.training import FROM_ZEROS, OPTIMIZERS, Training
from trainer_hooks.recovery.state import TensorSpec, TrainingState
from trainer_hooks.tensors.optimizer_state import nonfinite_count, starts_from_zeros
from trainvitals.errors import CheckpointError

SCHEDULES = {
    "onecycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=40),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "multistep": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 4, 6]),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [
            torch.optim.lr_scheduler.LinearLR(o, total_iters=3),
            torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
        ],
        [4],
    ),
}


def kept(training):
    tensors = {k: t.clone() for k, t in training.state.tensors().items()}
    return tensors, training.state.host_state()


def put_back(training, saved):
    tensors, host = saved
    training.state.conform({k: TensorSpec.of(t) for k, t in tensors.items()}, host)
    training.state.write(tensors)
    training.state.load_host_state(host)


def assert_repeats(training, saved, expected_bits, num_steps=5):
    """Train on, restore, and train on again: twice the same, bit for bit."""
    losses, end = training.run(num_steps), training.bits()
    put_back(training, saved)
    assert expected_bits == training.bits()
    assert losses == training.run(num_steps)
    assert end == training.bits()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_restore_after_further_training_is_exact_and_so_is_the_run_after_it(name):
    training = Training(name)
    training.run(3)
    assert_repeats(training, kept(training), training.bits())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_after_a_restore_to_before_the_first_step_training_equals_a_fresh_run(name):
    training = Training(name)
    saved = kept(training)
    training.run(4)
    fresh = Training(name)
    losses, end = fresh.run(5), fresh.bits()
    put_back(training, saved)
    assert losses == training.run(5)
    assert end == training.bits()


@pytest.mark.parametrize("name", FROM_ZEROS)
def test_a_restore_moves_no_tensor(name):
    training = Training(name)
    saved = kept(training)
    training.run(3)
    before = {k: t.data_ptr() for k, t in training.state.tensors().items()}
    put_back(training, saved)
    assert before == {k: t.data_ptr() for k, t in training.state.tensors().items()}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_new_process_takes_over_the_state_of_an_old_one(name):
    old, new = Training(name), Training(name, seed=1)
    old.run(3)
    put_back(new, kept(old))
    assert old.bits() == new.bits()
    saved = kept(old)
    losses, end = old.run(4), old.bits()
    put_back(new, saved)
    assert losses == new.run(4)
    assert end == new.bits()


def test_a_saved_state_is_not_touched_by_the_training_that_took_it():
    training = Training()
    training.run(2)
    saved = kept(training)
    again = copy.deepcopy(saved)
    put_back(training, saved)
    training.run(3)
    assert repr(again) == repr(saved)


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedulers_come_back(name):
    training = Training("sgd-momentum", schedule=SCHEDULES[name])
    training.run(3)
    assert_repeats(training, kept(training), training.bits(), num_steps=6)


@pytest.mark.parametrize("first_steps", [0, 3])
def test_a_gradient_scaler_comes_back_even_from_before_its_first_use(first_steps):
    training = Training("sgd-momentum", scaler=torch.amp.GradScaler("cpu", growth_interval=2))
    training.run(first_steps)
    saved = kept(training)
    scale = training.scaler.get_scale()
    training.step()
    for _ in range(2):
        training.step(loss_factor=float("inf"))
    assert scale != training.scaler.get_scale()
    put_back(training, saved)
    assert scale == training.scaler.get_scale()
    assert_repeats(training, kept(training), training.bits())


def test_a_moving_average_registered_as_state_comes_back_in_place():
    average = torch.optim.swa_utils.AveragedModel
    training = Training(extra=lambda model: {"ema": average(model)})
    training.run(1)
    training.extra["ema"].update_parameters(training.model)
    saved = kept(training)
    before = training.bits()
    training.run(2)
    training.extra["ema"].update_parameters(training.model)
    put_back(training, saved)
    assert before == training.bits()
    assert any(key.startswith("extra.ema.") for key in training.state.tensors())


class Position:
    def __init__(self):
        self.batch = 0

    def state_dict(self):
        return {"batch": self.batch}

    def load_state_dict(self, state_dict):
        self.batch = state_dict["batch"]


def test_state_registered_by_the_user_comes_back():
    position = Position()
    training = Training(extra=lambda model: {"data": position})
    saved = kept(training)
    position.batch = 17
    put_back(training, saved)
    assert 0 == position.batch


def test_the_live_choice_of_implementation_survives_a_restore():
    training = Training("adamw-foreach")
    training.run(1)
    saved = kept(training)
    training.optimizer.param_groups[0].update(foreach=False, fused=True)
    put_back(training, saved)
    group = training.optimizer.param_groups[0]
    assert (False, True) == (group["foreach"], group["fused"])


def test_names_do_not_depend_on_what_wraps_the_model():
    plain, wrapped = Training(), Training()
    wrapped.state = type(wrapped.state)(torch.compile(wrapped.model), [wrapped.optimizer])
    names = [k for k in plain.state.tensors() if k.startswith(("model.", "buffer."))]
    assert names == [k for k in wrapped.state.tensors() if k.startswith(("model.", "buffer."))]


def spoilt(state):
    return [key for key in state.nonfinite() if state.must_be_finite(key)]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", ["model.0.weight", "optim.0.0.weight.exp_avg"])
def test_a_parameter_or_moment_that_is_not_finite_is_named(where, bad):
    training = Training()
    training.run(1)
    assert [] == spoilt(training.state)
    training.state.tensors()[where].view(-1)[3] = bad
    assert [where] == spoilt(training.state)


def test_a_mask_of_minus_infinity_is_sound_and_a_spoilt_buffer_is_not():
    training = Training()
    assert ["buffer.0.mask"] == training.state.nonfinite()
    assert [] == spoilt(training.state)
    training.model[1].running_var[2] = float("nan")
    assert ["buffer.1.running_var"] == spoilt(training.state)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.float8_e4m3fn]
)
def test_one_nan_is_seen_in_every_floating_type(dtype):
    sound = torch.ones(33).to(dtype)
    spoilt = torch.ones(33).index_fill_(0, torch.tensor(20), float("nan")).to(dtype)
    count = nonfinite_count([sound, spoilt, torch.ones(0), torch.ones(3, dtype=torch.int32)], CPU)
    assert 1.0 == count.item()


CPU = torch.device("cpu")


def test_another_model_is_refused_before_anything_changes():
    training, other = Training(), Training()
    training.run(2)
    before = training.bits()
    other.model[1].register_buffer("more", torch.zeros(2))
    with pytest.raises(CheckpointError, match=r"buffer\.1\.more is in the checkpoint and nowhere"):
        put_back(training, kept(other))
    assert before == training.bits()


def test_another_shape_is_refused():
    training = Training()
    tensors, host = kept(training)
    tensors["model.0.bias"] = torch.zeros(9)
    with pytest.raises(CheckpointError, match=r"model\.0\.bias was saved as .*\(9,\)"):
        put_back(training, (tensors, host))


def test_a_sparse_buffer_is_refused_with_its_name():
    model = nn.Linear(2, 2)
    model.register_buffer("graph", torch.eye(2).to_sparse())
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(CheckpointError, match=r"buffer\.graph is torch\.sparse_coo"):
        type(Training().state)(model, [optimizer])


def test_an_optimizer_from_elsewhere_is_not_assumed_to_start_from_zeros():
    class Elsewhere(torch.optim.Adam):
        pass

    assert not starts_from_zeros(Elsewhere([nn.Parameter(torch.ones(1))]))


@pytest.mark.parametrize(
    ("kind", "buffer"),
    [
        ("meta", torch.empty(3, device="meta")),
        ("nested", torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged)),
        ("torch.sparse_coo", torch.eye(3).to_sparse()),
    ],
)
def test_a_buffer_that_cannot_be_put_back_is_refused_by_name(kind, buffer):
    model = nn.Linear(2, 2)
    model.register_buffer("adjacency", buffer)
    with pytest.raises(CheckpointError, match=f"buffer.adjacency is {kind}; only dense") as refusal:
        TrainingState(model, [torch.optim.SGD(model.parameters())])
    assert "guard" in refusal.value.hint
