"""Small modules for Lightning's Trainer, whose gradients can be spoiled, and how to fit them."""

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from tests.trainer_hooks.measures.journal import Journal
from trainer_hooks.integrations.lightning import VitalsCallback
from trainvitals.records import RunEnded

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
