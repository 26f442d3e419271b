"""A small training that keeps its bad steps, and the entry it is played by.

``build`` is what a user writes: the model and the loss that the loop trains on.
"""

import math
import time

import torch
from torch import nn
from torch.utils.data import DataLoader

import trainer_hooks
from trainer_hooks.recovery.manager import CheckpointSettings

BAD, STEPS = 10, 22
ROWS = 8


class Net(nn.Module):
    """An MLP with dropout, whose middle takes the root of a column."""

    def __init__(self):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(64, 32), nn.Dropout(0.2), nn.Linear(32, 1)

    def forward(self, x):
        return self.last(self.drop(self.first(x).relu()) + x[:, :1].sqrt())


def build():
    """Return what ``vitals repro --entry`` asks for."""
    torch.manual_seed(0)
    model = Net()
    return model, lambda batch: model(batch["x"]).square().mean()


def build_with_loader():
    """The same with the loader of the run, for steps whose batch was not kept."""
    return *build(), DataLoader(dataset(), ROWS)


def dataset(spoil=None):
    """Return samples by index, whose first value is above 0; ``spoil`` changes one of them."""
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(ROWS * (STEPS + 2), 64, generator=generator) + 0.5
    if spoil is not None:
        row, value = spoil
        x[BAD * ROWS + row, 0] = value
    return [{"x": sample} for sample in x]


def train(*, spoil=(3, -1.0), before=None, checkpoints=None, steps=STEPS, max_norm=1.0, **batches):
    """Train with one spoilt sample; return the closed monitor.

    Args:
        spoil: sample of the bad batch, and its first value.
        before: called before each forward with model, optimizer and step.
        checkpoints: folder for them; None makes none.
        steps: of the loop.
        max_norm: to which gradients are clipped.
        batches: further arguments of ``monitor.batches``.
    """
    model, loss_of = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    settings = None
    if checkpoints is not None:
        settings = CheckpointSettings(
            directory=checkpoints, healthy_after=3, snapshot_every=5, save_every=5
        )
    loader = DataLoader(dataset(spoil), ROWS)
    monitor = trainer_hooks.watch(model, optimizer, mode="guard", checkpoints=settings)
    with monitor:
        for batch in monitor.batches(loader, **{"keep_batches": True} | batches):
            if before is not None:
                before(model, optimizer, monitor.step_index)
            loss = loss_of(batch)
            loss.backward()
            monitor.step(loss, max_norm=max_norm)
            if checkpoints is not None and monitor.step_index > BAD:
                time.sleep(0.03)  # for the disk: the loop is over at once
            if monitor.step_index >= steps:
                break
    return monitor


def once(name, value):
    """Return what spoils a value of a module's output in the bad step, as a machine might."""

    def before(model, optimizer, step):
        def spoil(module, inputs, output):
            handle.remove()
            return output.index_fill(0, torch.tensor([2]), value)

        if step == BAD:
            handle = model.get_submodule(name).register_forward_hook(spoil)

    return before


def corrupted(name, key=None, value=math.nan):
    """Return what spoils a weight, or with ``key`` a moment of it the step before."""

    def before(model, optimizer, step):
        parameter = model.get_parameter(name)
        if key is None and step == BAD:
            parameter.data.view(-1)[1] = value
        if key is not None and step == BAD - 1:
            optimizer.state[parameter][key].view(-1)[1] = value

    return before
