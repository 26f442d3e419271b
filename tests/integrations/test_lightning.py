"""Lightning's Trainer, beside the fault matrix: steps, metrics, ends, resuming, what goes back."""

import os
import signal
from itertools import pairwise

import pytest
import torch
from torch import nn

pytest.importorskip("lightning", reason="not installed: lightning")
pytestmark = [
    pytest.mark.filterwarnings("default"),
    pytest.mark.usefixtures("own_place"),
]

from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from lightning.pytorch.loggers import CSVLogger  # noqa: E402
from lightning.pytorch.plugins import MixedPrecision  # noqa: E402

from tests.integrations.lit import (  # noqa: E402
    NAN,
    Gan,
    Lit,
    Looks,
    ends,
    first_norm,
    fit,
    journal,
    loader,
    same,
    trainer,
)
from tests.support.inside import probe_of  # noqa: E402
from tests.support.watched import own_place  # noqa: E402, F401
from tests.trainer_hooks.probing import ask  # noqa: E402
from trainer_hooks.integrations.lightning import VitalsCallback  # noqa: E402
from trainvitals.errors import TrainingHalted, UsageError  # noqa: E402
from trainvitals.records import AttemptStarted  # noqa: E402


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
        fit(tmp_path, batches=1, **options)
        assert expected == journal(tmp_path).steps("max_norm").get(0)

    def test_is_unknown_where_the_module_clips(self, tmp_path):
        class Own(Lit):
            def configure_gradient_clipping(self, *_, **__):
                pass

        fit(tmp_path, Own(), batches=1, gradient_clip_val=0.5)
        assert {} == journal(tmp_path).steps("max_norm")


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


class Gives(Lit):
    """Gives its batches, where it is guarded."""

    def training_step(self, batch, batch_idx):
        guard = next((c for c in self.trainer.callbacks if isinstance(c, VitalsCallback)), None)
        if guard is not None:
            guard.attached.keep_batch(batch, lambda x: self.net(x).square().mean())
            self.probe = probe_of(guard.attached)
        if guard is not None and batch_idx == 24:
            self.reading = self.probe.evaluate(ask(30))
            self.is_on = self.probe.is_on
        return super().training_step(batch, batch_idx)


def test_a_module_that_gives_its_batches_has_the_state_asked_and_trains_as_before(tmp_path):
    module, _, _ = fit(tmp_path, Gives(), batches=25, gradient_clip_val=0.1)
    bare = Gives()
    trainer(tmp_path, gradient_clip_val=0.1).fit(bare, loader(25))
    assert module.is_on
    assert 0 < module.reading.num_batches
    assert same(bare, module)
    assert [] == journal(tmp_path).notes("no_probe")


class TestHeal:
    def test_is_refused_in_manual_optimization(self, tmp_path):
        with pytest.raises(UsageError, match="manual optimization"):
            fit(tmp_path, Gan(), vitals=VitalsCallback(mode="heal", optimizer=0))

    def test_a_damaged_module_goes_back_with_the_step_and_the_rate(self, tmp_path):
        class Damaged(Lit):
            def __init__(self):
                super().__init__()
                self.steps, self.rates = [], []

            def training_step(self, batch, batch_idx):
                if batch_idx == 62:
                    with torch.no_grad():
                        next(self.parameters()).view(-1)[0] = NAN
                return super().training_step(batch, batch_idx)

            def on_train_batch_end(self, *_):
                self.steps.append((self.trainer.global_step, vitals.attached.step_index))
                self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

        vitals = VitalsCallback(mode="heal")
        module, _, made = fit(tmp_path, Damaged(), batches=96, vitals=vitals)
        assert all(step == ours for step, ours in module.steps)
        fall = next(i for i in range(1, 96) if module.steps[i] < module.steps[i - 1])
        back = module.steps[fall][0]
        assert (fall in range(62, 66), 0 < back < 62) == (True, True)
        assert module.rates[back - 1] == module.rates[fall]
        assert made.global_step == 96 - (module.steps[fall - 1][0] + 1 - back)
        assert all(bool(p.isfinite().all()) for p in module.parameters())
        assert [0, back] == [
            e.fork_step for e in journal(tmp_path).events if isinstance(e, AttemptStarted)
        ]
