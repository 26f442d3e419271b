"""Hugging Face's Trainer, beside the fault matrix: resuming, ends, its logs, what is refused."""

import gc
import importlib
import sys
from importlib.metadata import PackageNotFoundError
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

pytest.importorskip("transformers", reason="not installed: transformers")
pytest.importorskip("accelerate", reason="not installed: accelerate")
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.usefixtures("own_place")]

from transformers import (  # noqa: E402
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from tests.support.inside import limits_of, probe_of  # noqa: E402
from tests.support.watched import own_place  # noqa: E402, F401
from tests.trainer_hooks.measures.journal import Journal  # noqa: E402
from tests.trainer_hooks.probing import ask  # noqa: E402
from trainer_hooks.integrations import framework  # noqa: E402
from trainer_hooks.integrations.huggingface import VitalsCallback  # noqa: E402
from trainer_hooks.lifecycle import shutdown  # noqa: E402
from trainvitals.errors import MissingDependencyError, TrainingHalted, UsageError  # noqa: E402
from trainvitals.records import AttemptStarted, RunEnded, RunStarted  # noqa: E402

NAN = float("nan")
STEPS = 24


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))

    def forward(self, x, return_loss=True):
        return {"loss": (self.net(x) - x[:, :1]).square().mean()}


class Data(Dataset):
    def __len__(self):
        return 4 * STEPS

    def __getitem__(self, i):
        return {"x": torch.randn(4, generator=torch.Generator().manual_seed(i))}


class Spoiled(Trainer):
    """Spoils gradients or raises at the steps it is told, before the clip."""

    acts: ClassVar = {}

    def training_step(self, model, *args, **kwargs):
        loss = super().training_step(model, *args, **kwargs)
        act = self.acts.get(self.state.global_step)
        if isinstance(act, BaseException):
            raise act
        if act is not None:
            model.net[0].weight.grad[0, 0] = act
        return loss


class Seen(TrainerCallback):
    """Keeps the parameters after each step, and each thing that the trainer logs."""

    def __init__(self):
        self.parameters, self.logs, self.begins = [], [], []

    def on_train_begin(self, args, state, control, **kwargs):
        self.begins.append(state.global_step)

    def on_step_end(self, args, state, control, model, **kwargs):
        self.parameters.append([p.detach().clone() for p in model.parameters()])

    def on_log(self, args, state, control, logs, **kwargs):
        self.logs.append(dict(logs))


def make(
    folder,
    *,
    acts=None,
    model=None,
    guard=True,
    knows=True,
    options=None,
    kind=Spoiled,
    **arguments,
):
    """Return a trainer, what was seen, and the callback."""
    seen = Seen()
    defaults = {"max_grad_norm": 0.1, "save_strategy": "no", "logging_steps": 1}
    defaults |= {"optim": "adamw_torch_fused", "max_steps": STEPS}
    trainer = kind(
        model=Net() if model is None else model,
        args=TrainingArguments(
            output_dir=str(folder / "out"),
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            per_device_train_batch_size=4,
            **{**defaults, **arguments},
        ),
        train_dataset=Data(),
        eval_dataset=Data(),
        callbacks=[seen],
    )
    trainer.acts = acts or {}
    callback = VitalsCallback(trainer if knows else None, **(options or {}))
    if guard:
        trainer.add_callback(callback)
    return trainer, seen, callback


@pytest.fixture(autouse=True)
def ended():
    """Close what a training that raised has left open, as the process' exit would."""
    yield
    for monitor in list(shutdown.open_monitors):
        monitor.end(*monitor.left_open)


def same(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


def journal(tmp_path):
    return Journal(tmp_path / "shm")


def ends(tmp_path):
    return [(e.state, e.reason) for e in journal(tmp_path).events if isinstance(e, RunEnded)]


@pytest.mark.parametrize("fused", ["adamw_torch_fused", "adamw_torch"])
def test_a_healthy_training_is_bit_for_bit_what_it_was_without_us(tmp_path, fused):
    bare, theirs, _ = make(tmp_path, guard=False, optim=fused)
    bare.train()
    guarded, ours, _ = make(tmp_path, optim=fused)
    before = dict(vars(guarded.accelerator))
    guarded.train()
    assert all(map(same, theirs.parameters, ours.parameters))
    expected = [{n: v for n, v in log.items() if "_runtime" not in n} for log in theirs.logs[:-1]]
    assert expected == ours.logs[:-1]
    left = vars(guarded.accelerator)
    assert before.keys() == left.keys()
    assert "found_inf" not in vars(guarded.optimizer.optimizer)
    assert [("finished", "")] == ends(tmp_path)


def test_a_nan_is_skipped_and_the_trainer_s_own_filter_hides_nothing_from_us(tmp_path):
    model = Net()
    trainer, seen, _ = make(tmp_path, model=model, acts={5: NAN})
    trainer.add_callback(spoil_loss(at=9))
    trainer.train()
    unchanged = [i for i in range(1, STEPS) if same(seen.parameters[i - 1], seen.parameters[i])]
    assert [5, 9] == unchanged
    assert all(log["loss"] == log["loss"] for log in seen.logs[:-1])  # its log has no NaN
    losses = journal(tmp_path).steps("loss")
    assert [9] == [step for step, loss in losses.items() if loss != loss]


def spoil_loss(at):
    class Spoil(TrainerCallback):
        def on_step_begin(self, args, state, control, model, **kwargs):
            bias = model.net[2].bias
            if state.global_step == at:
                self.handle = model.net.register_forward_hook(lambda *a: a[2] * NAN)
            elif hasattr(self, "handle"):
                self.handle.remove()
            assert torch.isfinite(bias).all()

    return Spoil()


def test_a_trainer_of_trl_names_the_kind_of_run_and_logs_it(tmp_path, caplog):
    trainer, _, _ = make(tmp_path, max_steps=2)
    trainer.__class__ = type("GRPOTrainer", (Spoiled,), {"__module__": "trl.trainer.grpo_trainer"})
    with caplog.at_level("INFO", "trainvitals"):
        trainer.train()
    assert "task='grpo'" in caplog.text
    (started,) = [e for e in journal(tmp_path).events if isinstance(e, RunStarted)]
    assert "grpo" == started.info.task


def test_without_the_trainer_what_is_not_finite_is_skipped_and_the_rest_is_said(tmp_path, caplog):
    trainer, seen, _ = make(tmp_path, acts={5: NAN}, knows=False)
    trainer.train()
    assert same(seen.parameters[4], seen.parameters[5])
    found = journal(tmp_path)
    assert {} == found.steps("loss")
    assert 1 == len(found.notes("norm_unknown"))
    assert "does not know its trainer" in caplog.text


def test_a_trainer_that_does_not_clip_has_its_norm_known(tmp_path):
    trainer, seen, _ = make(tmp_path, max_grad_norm=0)
    trainer.train()
    found = journal(tmp_path)
    logged = [log["grad_norm"] for log in seen.logs if "grad_norm" in log]  # none in version 5.0
    assert [pytest.approx(norm) for norm in logged] == list(found.steps("grad_norm").values())
    if logged:
        assert found.steps("grad_norm_clipped") == found.steps("grad_norm")


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_the_parts_of_a_step_s_loss_add_up_to_what_the_trainer_says(tmp_path, micro_batches):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    trainer, seen, _ = make(
        tmp_path,
        model=LlamaForCausalLM(config),
        gradient_accumulation_steps=micro_batches,
    )
    trainer.train_dataset = Tokens()
    trainer.train()
    expected = [pytest.approx(log["loss"], abs=1e-4) for log in seen.logs[:-1]]
    assert expected == list(journal(tmp_path).steps("loss").values())


class Tokens(Dataset):
    """Sequences of which a varying part counts, so that micro-batches weigh differently."""

    def __len__(self):
        return 12 * STEPS

    def __getitem__(self, i):
        ids = torch.randint(0, 32, (12,), generator=torch.Generator().manual_seed(i))
        labels = ids.clone()
        labels[: 1 + i % 9] = -100
        return {"input_ids": ids, "labels": labels}


# --------------------------------------------------------------------------------- resuming


@pytest.mark.parametrize("knows", [True, False])
def test_a_resumed_training_goes_on_with_its_step_and_its_limits(tmp_path, monkeypatch, knows):
    monkeypatch.setenv("VITALS_OUTLIER_WARM_UP", "12")
    first, _, _ = make(tmp_path, knows=knows, save_strategy="steps", save_steps=20, acts=STOP)
    with pytest.raises(RuntimeError, match="stopped"):
        first.train()
    again, seen, callback = make(tmp_path, knows=knows, acts={20: 1e4, 21: 1e4})
    states = []
    again.add_callback(at_begin(lambda: states.append(callback.attached.state_dict())))
    again.train(resume_from_checkpoint=True)
    assert 20 == states[0]["step"]
    assert 4 == len(seen.parameters)
    unchanged = [i for i in range(1, 4) if same(seen.parameters[i - 1], seen.parameters[i])]
    assert ([1] if knows else []) == unchanged
    branches = [e for e in journal(tmp_path).events if isinstance(e, AttemptStarted)]
    assert 20 == max(branch.fork_step for branch in branches)


STOP = {21: RuntimeError("stopped")}


def at_begin(call):
    class AtBegin(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            call()

    return AtBegin()


def test_a_checkpoint_that_was_written_without_us_is_resumed_and_saved_again(tmp_path):
    first, _, _ = make(tmp_path, guard=False, save_strategy="steps", save_steps=10, acts=STOP)
    with pytest.raises(RuntimeError, match="stopped"):
        first.train()
    again, seen, _ = make(tmp_path, save_strategy="steps", save_steps=2)
    again.train(resume_from_checkpoint=True)
    assert [20] == seen.begins
    assert "VitalsCallback" in again.state.stateful_callbacks


def test_a_second_training_of_one_trainer_begins_a_run_of_its_own(tmp_path):
    trainer, _, callback = make(tmp_path)
    starts = []
    trainer.add_callback(at_begin(lambda: starts.append(callback.attached.step_index)))
    trainer.train()
    trainer.acts = {3: RuntimeError("out of something")}
    with pytest.raises(RuntimeError, match="out of something"):
        trainer.train()
    trainer.acts = {}
    trainer.train()
    assert [0, 0, 0] == starts
    assert ["failed", "finished", "finished"] == sorted(state for state, _ in ends(tmp_path))


# -------------------------------------------------------------------------------------- ends


def test_a_training_that_raised_is_not_said_to_have_finished(tmp_path):
    trainer, _, callback = make(tmp_path, acts={3: KeyError("gone")})
    with pytest.raises(KeyError):
        trainer.train()
    optimizer, accelerator = trainer.optimizer.optimizer, trainer.accelerator
    trainer.remove_callback(callback)
    callback.attached.end(*callback.attached.left_open)
    del trainer, callback
    gc.collect()
    (end,) = ends(tmp_path)
    assert "failed" == end[0]
    assert "backward" not in vars(accelerator)
    assert "add_param_group" not in vars(optimizer)


def test_a_halt_comes_out_of_train(tmp_path, monkeypatch):
    monkeypatch.setenv("VITALS_LADDER_MAX_SKIPS_IN_A_ROW", "2")
    acts = dict.fromkeys(range(3, STEPS), NAN)
    trainer, seen, callback = make(tmp_path, acts=acts)
    with pytest.raises(TrainingHalted):
        trainer.train()
    assert len(seen.parameters) < STEPS
    assert "halted" in [state for state, _ in ends(tmp_path)]
    callback.attached.end("failed", "")
    assert "failed" not in [state for state, _ in ends(tmp_path)]


def test_what_is_logged_and_evaluated_is_kept_each_once(tmp_path):
    trainer, _, _ = make(
        tmp_path,
        eval_strategy="steps",
        eval_steps=12,
        logging_steps=12,
        prediction_loss_only=True,
    )
    trainer.train()
    trainer.evaluate()  # after the run: nobody listens
    names = [(step, name) for step, name, _ in journal(tmp_path).scalars()]
    assert 2 == len([n for n in names if n[1] == "eval/loss"])
    assert (12, "eval/loss") in names
    assert (12, "learning_rate") in names
    assert not [n for n in names if n[1].startswith("eval_")]
    names = [n for n in names if n[1] != "epoch"]  # the trainer logs it twice at its end
    assert len(names) == len(set(names))


def test_the_trainer_s_settings_are_the_run_s(tmp_path):
    trainer, _, _ = make(tmp_path, run_name="first", learning_rate=0.003)
    trainer.train()
    (started,) = [e for e in journal(tmp_path).events if isinstance(e, RunStarted)]
    assert "first" == started.info.name
    assert 0.003 == started.info.config["learning_rate"]


def test_off_leaves_all_as_it_was(tmp_path):
    bare, theirs, _ = make(tmp_path, guard=False)
    bare.train()
    trainer, seen, _ = make(tmp_path, options={"mode": "off"})
    found = []
    trainer.add_callback(at_begin(lambda: found.append(dict(vars(trainer.accelerator)))))
    before = vars(trainer.accelerator).keys()
    trainer.train()
    assert before == found[0].keys()
    assert all(map(same, theirs.parameters, seen.parameters))
    assert not (tmp_path / "runs").exists()


# ----------------------------------------------------------------------------- what is refused


def test_another_trainer_s_callback_and_a_second_one_are_refused(tmp_path):
    other, _, _ = make(tmp_path)
    trainer, _, _ = make(tmp_path, guard=False)
    trainer.add_callback(VitalsCallback(other))
    with pytest.raises(UsageError, match="which is not the trainer"):
        trainer.train()
    twice, _, _ = make(tmp_path)
    twice.add_callback(VitalsCallback(twice))
    with pytest.raises(UsageError, match="already guarded"):
        twice.train()


def test_a_callback_that_the_trainer_made_anew_is_refused_and_not_left_without_its_trainer(
    tmp_path,
):
    first, _, _ = make(tmp_path, save_strategy="steps", save_steps=20, acts=STOP)
    with pytest.raises(RuntimeError, match="stopped"):
        first.train()
    again, _, _ = make(tmp_path, restore_callback_states_from_checkpoint=True)
    with pytest.raises(UsageError, match="created a new VitalsCallback"):
        again.train(resume_from_checkpoint=True)


def test_without_transformers_the_extra_is_named(monkeypatch):
    def missing(_name):
        raise PackageNotFoundError

    name = "trainer_hooks.integrations.huggingface"
    monkeypatch.setattr(framework, "version", missing)
    monkeypatch.delitem(sys.modules, name)
    with pytest.raises(MissingDependencyError, match=r"trainvitals\[huggingface\]"):
        importlib.import_module(name)


# ----------------------------------------------------------------------------------- the probe


@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_trainer_s_own_loss_is_the_probe_and_leaves_no_trace(tmp_path, accumulate):
    def model():
        torch.manual_seed(0)
        sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "attention_dropout": 0.1}
        return LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes, **heads))

    class Asking(TrainerCallback):
        readings: ClassVar = []

        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step in (18, 21):
                self.readings.append(
                    probe_of(callback.attached).evaluate(ask(state.global_step + 8))
                )
                self.is_on = probe_of(callback.attached).is_on

    arguments = {"gradient_accumulation_steps": accumulate, "model": model()}
    trainer, plain, _ = make(tmp_path, guard=False, **arguments)
    trainer.train_dataset = Tokens()
    trainer.train()
    trainer, probed, callback = make(tmp_path, **(arguments | {"model": model()}))
    trainer.train_dataset = Tokens()
    asking = Asking()
    trainer.add_callback(asking)
    trainer.train()
    assert asking.is_on
    assert [0] != [r.num_batches for r in asking.readings] != [0, 0]
    for before, after in zip(plain.parameters, probed.parameters, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert "compute_loss" not in vars(trainer)


def test_a_loss_of_somebody_else_s_is_not_called_by_us_and_that_is_said(tmp_path, monkeypatch):
    calls = []

    def compute_loss(self, *args, **kwargs):
        calls.append(self.state.global_step)
        return Trainer.compute_loss(self, *args, **kwargs)

    monkeypatch.setattr(Spoiled, "compute_loss", compute_loss, raising=False)
    trainer, _, _ = make(tmp_path)
    trainer.train()
    assert list(range(STEPS)) == calls
    assert 1 == len(journal(tmp_path).notes("no_probe"))


def test_the_loss_of_a_policy_keeps_nothing_back_where_the_callback_is_told_its_kind(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("VITALS_OUTLIER_WARM_UP", "12")
    trainer, _, callback = make(tmp_path, options={"loss_kind": "rl"})
    limits = []
    trainer.add_callback(at_end(lambda: limits.append(limits_of(callback.attached))))
    trainer.train()
    assert limits[-1].loss is None
    assert limits[-1].grad_norm is not None


def at_end(call):
    class AtEnd(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            call()

    return AtEnd()


def test_heal_without_the_trainer_is_refused(tmp_path):
    trainer, _, _ = make(tmp_path, knows=False, options={"mode": "heal"})
    with pytest.raises(UsageError, match="does not know its trainer"):
        trainer.train()


class Positions(TrainerCallback):
    """Keeps after each step its numbers, and the parameters by the trainer's own step."""

    def __init__(self, callback):
        self.callback, self.steps, self.rates, self.parameters = callback, [], [], {}
        self.same = []

    def on_step_end(self, args, state, control, model, lr_scheduler, **kwargs):
        now = [p.detach().clone() for p in model.parameters()]
        self.steps.append((state.global_step, self.callback.attached.step_index))
        self.rates.append(lr_scheduler.get_last_lr()[0])
        if state.global_step in self.parameters:
            self.same.append((state.global_step, same(now, self.parameters[state.global_step])))
        self.parameters[state.global_step] = now


class Damaged(Spoiled):
    """Makes a weight NaN before the forward of one batch."""

    calls = 0

    def training_step(self, model, *args, **kwargs):
        self.calls += 1
        if self.calls == 62:
            with torch.no_grad():
                model.net[0].weight[0, 0] = NAN
        return super().training_step(model, *args, **kwargs)


def test_in_heal_a_damaged_model_goes_back_with_the_trainer_s_step_and_rate(tmp_path):
    options = {"mode": "heal"}
    trainer, seen, callback = make(
        tmp_path, kind=Damaged, options=options, max_steps=96, logging_steps=5
    )
    positions = Positions(callback)
    trainer.add_callback(positions)
    trainer.train()
    assert all(step == ours for step, ours in positions.steps)
    fall = next(i for i in range(1, 96) if positions.steps[i] < positions.steps[i - 1])
    back, num = (
        positions.steps[fall][0],
        positions.steps[fall - 1][0] + 1 - positions.steps[fall][0],
    )
    assert fall in range(61, 66)
    assert 0 < back < 61
    assert (back, True) == positions.same[0]
    assert positions.rates[back - 1] == positions.rates[fall]
    assert 96 - num == trainer.state.global_step == len(set(positions.steps))
    losses = [log["loss"] for log in seen.logs if "loss" in log]
    assert all(0 < loss < 10 for loss in losses)
    assert all(bool(p.isfinite().all()) for p in trainer.model.parameters())
    assert [("finished", "")] == ends(tmp_path)
    assert [0, back] == [
        e.fork_step for e in journal(tmp_path).events if isinstance(e, AttemptStarted)
    ]
