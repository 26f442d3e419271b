"""Small watched trainings, and what several folders of tests do with them."""

import copy
import os
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import trainer_hooks
from tests.support.inside import events_of, facts_of
from trainvitals.io.mailbox import Mailbox, sign_command
from trainvitals.io.private import private_base
from trainvitals.io.rundir import RunDir
from trainvitals.records import Command

NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def own_place(tmp_path, monkeypatch):
    """Journals and runs under the test's folder, and no agent unless a test wants one."""
    (tmp_path / "shm").mkdir()
    monkeypatch.setenv("VITALS_SHM", str(tmp_path / "shm"))
    monkeypatch.setenv("VITALS_DIR", str(tmp_path / "runs"))
    monkeypatch.setenv("VITALS_AGENT", "off")


class Loop:
    """A small regression with all that has state: moments, batch norm, dropout, schedule."""

    def __init__(self, *, fused=True, seed=0, **watch):
        torch.manual_seed(seed)
        self.model = nn.Sequential(
            nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 1)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, fused=fused)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 10, 0.9)
        self.data = torch.Generator().manual_seed(1)
        self.monitor = None
        if watch:
            self.monitor = trainer_hooks.watch(self.model, self.optimizer, self.scheduler, **watch)

    def forward(self, scale=1.0):
        x = torch.randn(32, 4, generator=self.data)
        loss = (self.model(x) - x.sum(1, keepdim=True)).square().mean() * scale
        loss.backward()
        return loss

    def bare_step(self):
        loss = self.forward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return loss

    def state(self):
        return copy.deepcopy(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict()["state"],
                "scheduler": self.scheduler.state_dict(),
                "rng": torch.get_rng_state(),
            }
        )


class Own(Loop):
    """A loop as people write it: backward, clip, step, schedule, zero."""

    attached = None

    def attach(self, **options):
        """Add the one line."""
        self.attached = trainer_hooks.attach(self.model, self.optimizer, **options)
        self.said = events_of(self.attached)
        return self.attached

    def step(self, *, gradient=None, scale=1.0, clip=0.5, give=False, before=False):
        loss = self.forward(scale)
        if gradient is not None:
            self.model[0].weight.grad[0, 0] = gradient
        if before:
            self.attached.before_clip(clip)
        if clip is not None:
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), clip)
            if give:
                self.attached.grad_norm(norm)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return loss

    def run(self, steps, **how):
        for _ in range(steps):
            self.step(**how)
        self.rng = torch.get_rng_state()
        return self

    def state(self):
        """Return the state; the generator of all loops here as it was at the end of ``run``."""
        return {**super().state(), "rng": getattr(self, "rng", None)}

    def parameters(self):
        return [p.detach().clone() for p in self.model.parameters()]

    def skips(self):
        return facts_of(self.attached).num_skips


def assert_same(left, right, path=""):
    assert type(left) is type(right), path
    if isinstance(left, dict):
        assert left.keys() == right.keys(), path
        for key in left:
            assert_same(left[key], right[key], f"{path}/{key}")
    elif isinstance(left, torch.Tensor):
        assert torch.equal(left, right), path
    else:
        assert left == right, path


def until(condition, seconds=60.0):
    """Wait for a condition, which costs nothing once it holds."""
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, "it did not happen"
        time.sleep(0.005)


def run_directory(monitor):
    """Return the directory of the monitor's run."""
    return Path(os.environ["VITALS_DIR"]) / monitor.run_id


def send_command(monitor, **fields):
    """Put an operator's command into the run's mailbox, signed; return it."""
    now = time.time_ns()
    command = Command(
        number=now // 1000,
        run_id=monitor.run_id,
        reason="test",
        issued_by="operator",
        issued_unix_ns=now,
        expires_unix_ns=now + 60_000_000_000,
        **fields,
    )
    key = RunDir.open(run_directory(monitor)).command_key()
    with Mailbox.open(private_base(os.environ) / monitor.run_id / "mailbox") as mailbox:
        mailbox.put(sign_command(command, key))
    return command


class Reads(TorchDispatchMode):
    """Counts what makes the host wait for a value on the device."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "item"):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))
