"""Lightning's Trainer, beside the fault matrix: resuming, ends, what is put back and refused."""

import os
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("lightning", reason="not installed: lightning")
pytestmark = [
    pytest.mark.filterwarnings("default"),
    pytest.mark.usefixtures("own_place"),
]

from lightning.pytorch import Callback, LightningModule, Trainer  # noqa: E402
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint  # noqa: E402
from lightning.pytorch.loggers import CSVLogger  # noqa: E402
from lightning.pytorch.plugins import MixedPrecision  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from tests.trainer_hooks.measures.journal import Journal  # noqa: E402
from tests.trainer_hooks.test_monitor import own_place  # noqa: E402, F401
from trainer_hooks.integrations.lightning import VitalsCallback, _max_norm  # noqa: E402
from trainvitals.errors import TrainingHalted, UsageError  # noqa: E402
from trainvitals.records import AttemptStarted, RunEnded  # noqa: E402

NAN = float("nan")


class Lit(LightningModule):
    """A regression whose gradients can be spoiled, and which can do something in a step."""

    def __init__(self, *, bad=(), acts=None, fused=True):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        self.bad, self.acts, self.fused = bad, acts or {}, fused
        self.losses, self.seen = [], []

    def training_step(self, batch, batch_idx):
        if batch_idx in self.acts:
            self.acts[batch_idx](self)
        loss = self.net(batch).square().mean()
        self.losses.append(loss.item())
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.net(batch).square().mean())

    def on_after_backward(self):
        if self.trainer.global_step in self.bad:
            self.net[0].weight.grad[0, 0] = NAN

    def on_train_batch_end(self, *_):
        self.seen.append(self.net[0].weight.detach().clone())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01, fused=self.fused)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Looks(Callback):
    """Looks for what a guard replaces."""

    def on_train_batch_end(self, trainer, *_):
        self.optimizer = trainer.optimizers[0]
        step = self.optimizer.step
        self.found = {
            "log_metrics" in vars(trainer._logger_connector),
            hasattr(getattr(step, "__func__", step), "stands_in_for"),
        }


class Gan(LightningModule):
    """Two networks, updated in turns."""

    def __init__(self, bad=None):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)
        self.automatic_optimization = False
        self.bad = bad
        self.seen = []

    def training_step(self, batch, batch_idx):
        ours = (self.first, self.second)
        for index, optimizer in enumerate(self.optimizers()):
            optimizer.zero_grad()
            self.manual_backward(self.second(self.first(batch)).square().mean())
            if self.bad == (batch_idx, index):
                ours[index].weight.grad[0, 0] = NAN
            optimizer.step()
        self.seen.append([net.weight.detach().clone() for net in ours])

    def configure_optimizers(self):
        return [torch.optim.AdamW(n.parameters(), fused=True) for n in (self.first, self.second)]


def loader(batches=8):
    generator = torch.Generator().manual_seed(1)
    return DataLoader(torch.randn(4 * batches, 4, generator=generator), batch_size=4)


def trainer(folder, *callbacks, **options):
    quiet = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "logger"), False)
    quiet |= {"enable_checkpointing": any(isinstance(c, ModelCheckpoint) for c in callbacks)}
    given = {"max_epochs": 1, "accelerator": "cpu", "devices": 1} | quiet | options
    return Trainer(callbacks=list(callbacks), default_root_dir=folder, **given)


def fit(folder, module=None, *, batches=8, vitals=None, **options):
    """Train under guard; return the module, the callback and the trainer."""
    vitals = vitals or VitalsCallback()
    module = module or Lit()
    made = trainer(folder, vitals, **options)
    made.fit(module, loader(batches))
    return module, vitals, made


def first_norm():
    """Return the norm of the first step's gradients, unclipped and in float32."""
    module = Lit()
    module.net(next(iter(loader()))).square().mean().backward()
    return nn.utils.get_total_norm([p.grad for p in module.parameters()]).item()


def journal(folder):
    return Journal(folder / "shm")


def ends(folder):
    return [(e.state, e.reason) for e in journal(folder).events if isinstance(e, RunEnded)]


def same(one, other):
    return all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


class TestAStep:
    def test_a_bad_one_is_skipped_and_the_clean_ones_train(self, tmp_path):
        module, _, _ = fit(tmp_path, Lit(bad=(3,)), gradient_clip_val=0.1)
        changed = [not torch.equal(a, b) for a, b in pairwise(module.seen)]
        assert [True, True, False, True, True, True, True] == changed
        assert {3} == {s for s, skipped in journal(tmp_path).steps("skipped").items() if skipped}

    def test_clean_training_is_what_it_is_without_a_guard(self, tmp_path):
        module, _, _ = fit(tmp_path, gradient_clip_val=0.1)
        bare = Lit()
        trainer(tmp_path, gradient_clip_val=0.1).fit(bare, loader())
        assert same(bare, module)

    def test_the_loss_of_accumulated_batches_is_their_mean_and_undivided(self, tmp_path):
        module, _, made = fit(tmp_path, batches=8, accumulate_grad_batches=3)
        assert 3 == made.global_step
        means = [sum(part) / len(part) for part in (module.losses[i : i + 3] for i in (0, 3, 6))]
        losses = journal(tmp_path).steps("loss")
        assert {i: pytest.approx(mean) for i, mean in enumerate(means)} == losses

    @pytest.mark.parametrize("fused", [False, True])
    def test_the_loss_and_the_norm_are_unscaled_where_a_scaler_scales(self, tmp_path, fused):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        plugins = [MixedPrecision("16-mixed", "cpu", scaler)]
        # Of a fused optimizer Lightning itself cannot clip scaled gradients.
        clip = {} if fused else {"gradient_clip_val": 0.1}
        module, _, _ = fit(tmp_path, Lit(fused=fused, bad=(3,)), plugins=plugins, **clip)
        found = journal(tmp_path)
        assert pytest.approx(module.losses[0], rel=1e-3) == found.steps("loss")[0]
        assert pytest.approx(first_norm(), rel=2e-2) == found.steps("grad_norm")[0]
        assert [1024.0, 512.0] == [found.steps("loss_scale")[step] for step in (3, 4)]
        assert torch.equal(module.seen[2], module.seen[3])

    def test_one_without_a_loss_is_passed_over(self, tmp_path):
        class Sometimes(Lit):
            def training_step(self, batch, batch_idx):
                return None if batch_idx == 3 else super().training_step(batch, batch_idx)

        module, vitals, _ = fit(tmp_path, Sometimes())
        assert 8 == vitals.attached.step_index
        assert torch.equal(module.seen[2], module.seen[3])

    @pytest.mark.parametrize("fused", [False, True])
    def test_one_without_a_loss_is_none_where_a_scaler_scales(self, tmp_path, fused):
        class Sometimes(Lit):
            def training_step(self, batch, batch_idx):
                return None if batch_idx in (2, 5) else super().training_step(batch, batch_idx)

        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        plugins = [MixedPrecision("16-mixed", "cpu", scaler)]
        module, vitals, _ = fit(
            tmp_path, Sometimes(fused=fused), plugins=plugins, accumulate_grad_batches=2
        )
        bare = Sometimes(fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        plugins = [MixedPrecision("16-mixed", "cpu", scaler)]
        trainer(tmp_path, plugins=plugins, accumulate_grad_batches=2).fit(bare, loader())
        assert 3 == vitals.attached.step_index
        assert same(bare, module)

    def test_the_time_of_a_validation_is_left_out(self, tmp_path):
        vitals = VitalsCallback()
        made = trainer(tmp_path, vitals, val_check_interval=4)
        made.fit(Lit(), loader(), loader(1))
        assert {1, 2, 3, 5, 6, 7} == set(journal(tmp_path).steps("step_duration_seconds"))


class TestTheClip:
    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            ({}, float("inf")),
            ({"gradient_clip_val": 0}, float("inf")),
            ({"gradient_clip_val": 0.5}, 0.5),
            ({"gradient_clip_val": 0.5, "gradient_clip_algorithm": "norm"}, 0.5),
            ({"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"}, None),
        ],
    )
    def test_is_read_from_the_trainer(self, tmp_path, options, expected):
        assert expected == _max_norm(trainer(tmp_path, **options), Lit())

    def test_is_unknown_where_the_module_clips(self, tmp_path):
        class Own(Lit):
            def configure_gradient_clipping(self, *_, **__):
                pass

        assert _max_norm(trainer(tmp_path, gradient_clip_val=0.5), Own()) is None


class TestScalars:
    def test_what_is_logged_is_of_the_step_that_logged_it(self, tmp_path):
        module, _, _ = fit(tmp_path, logger=CSVLogger(tmp_path), log_every_n_steps=2)
        found = [(s, v) for s, name, v in journal(tmp_path).scalars() if name == "train/loss"]
        expected = [(step, pytest.approx(module.losses[step])) for step in (1, 3, 5, 7)]
        assert expected == found

    def test_a_validation_s_metrics_are_those_of_its_end(self, tmp_path):
        made = trainer(tmp_path, VitalsCallback(), val_check_interval=4)
        made.fit(Lit(), loader(), loader(2))
        found = [(step, name) for step, name, _ in journal(tmp_path).scalars()]
        assert [(3, "eval/val_loss"), (7, "eval/val_loss")] == found


class TestTheEnd:
    def test_is_finished(self, tmp_path):
        fit(tmp_path)
        assert [("finished", "")] == ends(tmp_path)

    def test_is_failed_where_training_raises(self, tmp_path):
        def fail(_):
            raise RuntimeError("no more")

        with pytest.raises(RuntimeError, match="no more"):
            fit(tmp_path, Lit(acts={3: fail}))
        assert [("failed", "RuntimeError: no more")] == ends(tmp_path)

    def test_is_interrupted_by_a_key(self, tmp_path):
        def interrupt(_):
            raise KeyboardInterrupt

        before = signal.getsignal(signal.SIGINT)
        try:
            with pytest.raises(SystemExit):
                fit(tmp_path, Lit(acts={3: interrupt}))
        finally:
            signal.signal(signal.SIGINT, before)  # Lightning leaves it ignored
        assert "interrupted" == ends(tmp_path)[0][0]

    def test_is_interrupted_by_sigterm(self, tmp_path):
        before = signal.getsignal(signal.SIGTERM)
        with pytest.raises(SystemExit):
            fit(tmp_path, Lit(acts={3: lambda _: os.kill(os.getpid(), signal.SIGTERM)}))
        assert [("interrupted", "SIGTERM")] == ends(tmp_path)
        assert before == signal.getsignal(signal.SIGTERM)

    @pytest.mark.parametrize("step", [3, 5])
    def test_is_a_halt_where_the_ladder_stops_the_run(self, tmp_path, step):
        def ruin(module):
            nn.init.constant_(module.net[0].weight, NAN)

        with pytest.raises(TrainingHalted):
            fit(tmp_path, Lit(acts={step: ruin}))
        assert ["halted"] == [state for state, _ in ends(tmp_path)]

    def test_puts_everything_back(self, tmp_path):
        looks = Looks()
        made = trainer(tmp_path, VitalsCallback(), looks)
        made.fit(Lit(), loader())
        assert {True} == looks.found
        looks.on_train_batch_end(made)
        assert {False} == looks.found
        assert "add_param_group" not in vars(looks.optimizer)

    def test_a_second_fit_is_a_run_of_its_own(self, tmp_path):
        vitals = VitalsCallback()
        runs = []
        for _ in range(2):
            _, vitals, made = fit(tmp_path, vitals=vitals)
            runs.append(vitals.attached.run_id)
            assert 8 == vitals.attached.step_index
        made.validate(Lit(), loader())
        assert 2 == len(set(runs))
        assert [("finished", "")] * 2 == ends(tmp_path)


class TestAResume:
    def test_goes_on_from_the_checkpoint_s_step_and_limits(self, tmp_path):
        keeps = ModelCheckpoint(tmp_path, save_last=True)
        trainer(tmp_path, first := VitalsCallback(), keeps).fit(Lit(), loader(24))
        again = trainer(tmp_path, second := VitalsCallback(), max_epochs=2)
        again.fit(Lit(), loader(24), ckpt_path=tmp_path / "last.ckpt")
        assert (24, 48) == (first.attached.step_index, second.attached.step_index)
        started = [e for e in journal(tmp_path).events if isinstance(e, AttemptStarted)]
        assert [0, 24] == sorted({event.fork_step for event in started})
        limits = journal(tmp_path).steps("grad_norm_limit")
        assert 24 in limits  # protected from its first step

    def test_in_the_same_object_does_not_carry_over_to_a_new_training(self, tmp_path):
        keeps = ModelCheckpoint(tmp_path, save_last=True)
        vitals = VitalsCallback()
        trainer(tmp_path, vitals, keeps).fit(Lit(), loader())
        trainer(tmp_path, vitals).validate(Lit(), loader(), ckpt_path=tmp_path / "last.ckpt")
        trainer(tmp_path, vitals).fit(Lit(), loader())
        assert 8 == vitals.attached.step_index

    def test_reads_a_checkpoint_that_was_made_without_a_guard(self, tmp_path):
        keeps = ModelCheckpoint(tmp_path, save_last=True)
        trainer(tmp_path, keeps).fit(Lit(), loader())
        again = trainer(tmp_path, vitals := VitalsCallback(), max_epochs=2)
        again.fit(Lit(), loader(), ckpt_path=tmp_path / "last.ckpt")
        assert 8 == vitals.attached.step_index

    def test_without_a_guard_in_between_keeps_the_state(self, tmp_path, monkeypatch):
        fit_and_keep = ModelCheckpoint(tmp_path / "one", save_last=True)
        trainer(tmp_path, VitalsCallback(), fit_and_keep).fit(Lit(), loader())
        monkeypatch.setenv("VITALS_MODE", "off")
        off = trainer(
            tmp_path,
            VitalsCallback(),
            ModelCheckpoint(tmp_path / "two", save_last=True),
            max_epochs=2,
        )
        off.fit(Lit(), loader(), ckpt_path=tmp_path / "one" / "last.ckpt")
        kept = [torch.load(tmp_path / n / "last.ckpt")["callbacks"] for n in ("one", "two")]
        assert kept[0]["VitalsCallback"] == kept[1]["VitalsCallback"]


class TestOff:
    def test_leaves_the_training_as_it_was(self, tmp_path):
        looks = Looks()
        trainer(tmp_path, VitalsCallback(mode="off"), looks).fit(module := Lit(), loader())
        trainer(tmp_path).fit(bare := Lit(), loader())
        assert {False} == looks.found
        assert same(bare, module)
        assert not (tmp_path / "runs").exists()


class TestSeveralOptimizers:
    def test_are_refused_in_one_callback_with_the_way_out(self, tmp_path):
        with pytest.raises(UsageError, match=r"2 optimizers") as raised:
            fit(tmp_path, Gan())
        assert "VitalsCallback(optimizer=0), VitalsCallback(optimizer=1)" in str(raised.value)

    def test_are_guarded_by_a_callback_each(self, tmp_path):
        module = Gan(bad=(3, 1))
        made = trainer(tmp_path, VitalsCallback(optimizer=0), VitalsCallback(optimizer=1))
        made.fit(module, loader())
        changed = [
            [not torch.equal(x, y) for x, y in zip(a, b, strict=True)]
            for a, b in pairwise(module.seen)
        ]
        assert [[True, True]] * 2 + [[True, False]] + [[True, True]] * 4 == changed
        assert [("finished", "")] * 2 == ends(tmp_path)

    @pytest.mark.parametrize("index", [2, -1])
    def test_are_counted_from_0(self, tmp_path, index):
        with pytest.raises(UsageError, match=r"2 optimizers"):
            fit(tmp_path, Gan(), vitals=VitalsCallback(optimizer=index))


def test_a_skip_leaves_the_average_of_a_callback_alone(tmp_path):
    averaging = pytest.importorskip("lightning.pytorch.callbacks.weight_averaging")
    seen = []

    class Ema(averaging.EMAWeightAveraging):
        def on_train_batch_end(self, *given):
            super().on_train_batch_end(*given)
            average = self._average_model
            seen.append([average.n_averaged.item(), *(p.clone() for p in average.parameters())])

    made = trainer(tmp_path, VitalsCallback(), Ema(decay=0.5))
    made.fit(Lit(bad=(3,)), loader())
    same = [
        all(torch.equal(x, y) for x, y in zip(a[1:], b[1:], strict=True)) for a, b in pairwise(seen)
    ]
    assert [False, False, True, False, False, False, False] == same
    assert 7 == seen[-1][0]


def test_a_callback_that_unfreezes_parameters_is_refused_before_it_adds_them(tmp_path):
    class Unfreezes(BaseFinetuning):
        def freeze_before_training(self, module):
            self.freeze(module.net[0])

        def finetune_function(self, module, epoch, optimizer):
            self.unfreeze_and_add_param_group(module.net[0], optimizer)

    with pytest.raises(UsageError, match="Unfreezes adds parameter groups"):
        trainer(tmp_path, VitalsCallback(), Unfreezes()).fit(Lit(), loader())


def test_an_optimizer_that_was_replaced_is_said_to_be_unguarded(tmp_path):
    def replace(module):
        module.trainer.optimizers = [torch.optim.SGD(module.parameters(), lr=0.01)]

    module, vitals, _ = fit(tmp_path, Lit(acts={3: replace}))
    assert 0 < vitals.attached.swallowed_errors["unguarded_step"]
    assert 8 == len(module.seen)


def test_manual_optimization_says_which_rule_abstains_and_takes_what_it_is_told(tmp_path):
    vitals = VitalsCallback()

    class Manual(Lit):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            loss = self.net(batch).square().mean()
            self.manual_backward(loss)
            vitals.attached.loss(loss)
            vitals.attached.before_clip(0.1)
            self.clip_gradients(optimizer, 0.1)
            optimizer.step()

    fit(tmp_path, Manual(), vitals=vitals)
    found = journal(tmp_path)
    assert set(range(8)) == set(found.steps("loss")) == set(found.steps("grad_norm"))


def test_deepspeed_s_strategy_is_refused(tmp_path):
    from trainer_hooks.integrations.lightning import _refuse_strategy

    class DeepSpeedStrategy:
        pass

    with pytest.raises(UsageError, match="engine of its own"):
        _refuse_strategy(type("Mine", (DeepSpeedStrategy,), {})())


@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize("package", ["pytorch_lightning", "lightning.pytorch"])
def test_either_package_takes_the_callback(tmp_path, package, listed):
    program = f"""
import torch, {package} as pl
from trainer_hooks.integrations.lightning import VitalsCallback

class Lit(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)
    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), fused=True)

vitals = VitalsCallback()
trainer = pl.Trainer(
    callbacks={"[vitals]" if listed else "vitals"}, accelerator="cpu", max_epochs=1, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, gradient_clip_val=0.1,
)
trainer.fit(Lit(), torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=2))
assert isinstance(vitals, pl.Callback)
print(vitals.attached.step_index, vitals.attached.swallowed_errors)
"""
    done = run(program, tmp_path)
    assert "4 {}" == done.stdout.strip().splitlines()[-1], done.stderr


def test_without_lightning_the_extra_is_named(tmp_path):
    program = """
import importlib.util, importlib.metadata as metadata
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if "lightning" in name else find(name, *a)
def version(name):
    raise metadata.PackageNotFoundError(name)
metadata.version = version
import trainer_hooks.integrations.lightning
"""
    done = run(program, tmp_path)
    assert "MissingDependencyError: lightning is not installed" in done.stderr
    assert "pip install 'trainvitals[lightning]'" in done.stderr


def run(program, folder):
    (folder / "program.py").write_text(program)
    root = str(Path(__file__).resolve().parents[2])
    return subprocess.run(
        [sys.executable, "program.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=120,
    )
