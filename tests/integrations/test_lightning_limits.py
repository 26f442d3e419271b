"""Lightning's Trainer: what is refused, what abstains, and the packages that it comes in."""

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("lightning", reason="not installed: lightning")
pytestmark = [
    pytest.mark.filterwarnings("default"),
    pytest.mark.usefixtures("own_place"),
]

from lightning.pytorch.callbacks import BaseFinetuning  # noqa: E402

from tests.integrations.lit import Gan, Lit, ends, fit, journal, loader, same, trainer  # noqa: E402
from tests.support.watched import own_place  # noqa: E402, F401
from trainer_hooks.integrations.lightning import VitalsCallback  # noqa: E402
from trainvitals.errors import UsageError  # noqa: E402


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


class Unfreezes(BaseFinetuning):
    """Trains the first layer from the second epoch on."""

    def freeze_before_training(self, module):
        self.freeze(module.net[0])

    def finetune_function(self, module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.net[0], optimizer, lr=0.001)


class Frozen(Lit):
    def __init__(self, left_out=(), **options):
        super().__init__(**options)
        self.left_out = left_out

    def configure_optimizers(self):
        trained = [param for param in self.parameters() if param.requires_grad]
        return torch.optim.AdamW(trained, lr=0.01, fused=self.fused)

    def training_step(self, batch, batch_idx):
        self.kept = [buffer.clone() for buffer in self.buffers()]
        return super().training_step(batch, batch_idx)

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        left_out = self.trainer.global_step in self.left_out
        if left_out:  # the skip of a bare program
            optimizer_closure()
            for buffer, kept in zip(self.buffers(), self.kept, strict=True):
                buffer.copy_(kept)
            optimizer.zero_grad()
            self.left_out = ()
        else:
            optimizer.step(closure=optimizer_closure)


@pytest.mark.parametrize("fused", [True, False])
def test_a_layer_that_a_callback_unfreezes_is_guarded_from_its_first_step_on(tmp_path, fused):
    bad = 11
    bare = Frozen(fused=fused, left_out=(bad,))
    trainer(tmp_path, Unfreezes(), max_epochs=2).fit(bare, loader())
    guarded, vitals = Frozen(fused=fused, bad=(bad,)), VitalsCallback()
    trainer(tmp_path, vitals, Unfreezes(), max_epochs=2).fit(guarded, loader())
    assert torch.equal(guarded.seen[bad - 1], guarded.seen[bad])
    assert all(map(torch.equal, bare.seen, guarded.seen))
    assert same(bare, guarded)
    (text,) = journal(tmp_path).notes("groups_changed")
    assert "before step 8: added net.0.weight, net.0.bias" in text
    assert {} == vitals.attached.swallowed_errors


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
    class DeepSpeedStrategy:
        pass

    mine = type("Mine", (DeepSpeedStrategy,), {})()
    with pytest.raises(UsageError, match="its own engine"):
        VitalsCallback().on_train_start(SimpleNamespace(strategy=mine), Lit())


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
