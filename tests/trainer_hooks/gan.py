"""A small GAN in the shape of torch's DCGAN example: one batch, two updates that share a graph."""

import copy

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import trainvitals

BATCHES = 48
NAN = float("nan")


class Generator(nn.Sequential):
    """Four numbers of noise to a point of the plane."""


class Discriminator(nn.Sequential):
    """A point of the plane to a logit."""


class Gan:
    """The two players; ``bad`` are updates (two a batch) whose loss is NaN."""

    def __init__(self, *, fused=True, bad=(), ddp=False, data_seed=1, scaler=None, batches=BATCHES):
        torch.manual_seed(0)
        g = Generator(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
        d = Discriminator(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(16, 1))
        self.g, self.d = (DistributedDataParallel(g), DistributedDataParallel(d)) if ddp else (g, d)
        adam = {"lr": 2e-3, "betas": (0.5, 0.999), "fused": fused}
        self.of_g = torch.optim.Adam(g.parameters(), **adam)
        self.of_d = torch.optim.Adam(d.parameters(), **adam)
        self.schedules = [torch.optim.lr_scheduler.StepLR(self.of_g, 20, 0.5)]
        generator = torch.Generator().manual_seed(data_seed)
        self.data = list(torch.randn(batches, 16, 2, generator=generator) + 2)
        self.bad, self.scaler = bad, scaler
        self.updates = 0

    def both(self):
        return {"g": self.g, "d": self.d, "of_g": self.of_g, "of_d": self.of_d}

    def state(self):
        """All that training changes."""
        parts = {name: part.state_dict() for name, part in self.both().items()}
        parts["schedules"] = [schedule.state_dict() for schedule in self.schedules]
        return copy.deepcopy(parts | {"rng": torch.get_rng_state()})

    def _backward(self, loss, backward=None):
        loss = loss * NAN if self.updates in self.bad else loss
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        return loss.detach()

    def play(self, real, step):
        """Train both players on one batch; ``step(optimizer, loss)`` makes an update."""
        bce = nn.functional.binary_cross_entropy_with_logits
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        on_real = self._backward(bce(self.d(real), ones))
        fake = self.g(torch.randn(len(real), 4))
        on_fake = self._backward(bce(self.d(fake.detach()), zeros))
        self.updates += 1
        step(self.of_d, on_real + on_fake)
        loss = self._backward(bce(self.d(fake), ones))
        self.updates += 1
        step(self.of_g, loss)

    def bare(self, *, dropped=()):
        """Train without a watch, and without the updates that are to be dropped."""
        kept = self._buffers()

        def step(optimizer, loss):
            nonlocal kept
            if self.updates - 1 in dropped:
                for buffer, before in zip(self.g.buffers(), kept, strict=True):
                    buffer.data.copy_(before)
            else:
                optimizer.step()
            if optimizer is self.of_g:
                self.schedules[0].step()
            for one in (self.of_g, self.of_d):
                one.zero_grad()
            kept = self._buffers()

        for real in self.data:
            self.play(real, step)
        return self.state()

    def _buffers(self):
        return [buffer.clone() for buffer in self.g.buffers()]


def watched(gan, *, each=lambda monitor, outcome: None, weight=None, **watch):
    """Train under watch; return the state at the end and the monitor."""
    models, optimizers = [gan.g, gan.d], [gan.of_g, gan.of_d]
    with trainvitals.watch(models, optimizers, gan.schedules, **watch) as monitor:
        for real in monitor.batches(gan.data):
            gan.play(
                real,
                lambda o, loss: each(monitor, monitor.step(loss, optimizer=o, weight=weight)),
            )
    assert monitor.swallowed_errors == {}
    return gan.state(), monitor
