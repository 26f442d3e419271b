"""Many steps that nobody watches: poisoned data, a broken moment, and what has no cure."""

import math

import pytest
import torch
from msgspec.structs import replace
from torch import nn
from torch.utils.data import DataLoader, Dataset

import trainer_hooks
from trainvitals.alerting import alerts_for_decision
from trainvitals.errors import TrainingHalted
from trainvitals.io.rundir import RunDir
from trainvitals.policy import PolicyConfig

STEPS, BATCH, WINDOW, BROKEN_AT = 1000, 16, range(300, 330), 600
SAMPLES = BATCH * (STEPS + 200)


@pytest.fixture(autouse=True)
def own_place(tmp_path, monkeypatch):
    (tmp_path / "shm").mkdir()
    monkeypatch.setenv("VITALS_SHM", str(tmp_path / "shm"))
    monkeypatch.setenv("VITALS_DIR", str(tmp_path / "runs"))
    monkeypatch.setenv("VITALS_AGENT", "off")


class Samples(Dataset):
    """A noisy function; samples of poisoned batches say a thousand times as much."""

    def __init__(self, poisoned=()):
        generator = torch.Generator().manual_seed(3)
        self._x = torch.randn(SAMPLES, 8, generator=generator)
        noise = 0.3 * torch.randn(SAMPLES, generator=generator)
        self._y = self._x[:, 0].sin() + self._x[:, 2] + noise
        for batch in poisoned:
            self._y[batch * BATCH : (batch + 1) * BATCH] *= -1000.0

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return self._x[index], self._y[index]


class Loop:
    """A training of STEPS steps; ``run`` returns the loss on clean data at its end."""

    def __init__(self, poisoned=(), broken_at=None, *, steps=STEPS):
        self.steps = steps
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, fused=True)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, steps)
        self.data, self.broken_at = Samples(poisoned), broken_at
        self.decisions = []

    def loss(self, x, y):
        return (self.model(x).squeeze(1) - y).square().mean()

    def break_moments(self, step):
        """Do once what a flipped bit in an exponent does: the next update is enormous."""
        if step == self.broken_at:
            self.broken_at = None
            for state in self.optimizer.state.values():
                state["exp_avg"].mul_(1e6)

    def final(self):
        clean = Samples()
        with torch.no_grad():
            return float(self.loss(clean._x[-3000:], clean._y[-3000:]))

    def unguarded(self):
        loader = iter(DataLoader(self.data, BATCH))
        for step in range(self.steps):
            self.break_moments(step)
            self.loss(*next(loader)).backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        return self.final()

    def guarded(self, *, probe=True):
        with trainer_hooks.watch(
            self.model, self.optimizer, self.scheduler, mode="heal", checkpoints=True
        ) as monitor:
            loader = DataLoader(self.data, BATCH)
            loss_of = (lambda batch: self.loss(*batch)) if probe else None
            for x, y in monitor.batches(loader, probe=loss_of):
                self.break_moments(monitor.step_index)
                loss = self.loss(x, y)
                loss.backward()
                outcome = monitor.step(loss, max_norm=1.0)
                self.decisions += [outcome.decision] if outcome.decision else []
                if monitor.step_index >= self.steps:
                    break
        return self.final()


@pytest.fixture(scope="module")
def clean():
    return Loop().unguarded()


@pytest.mark.slow
def test_a_run_with_a_poisoned_window_ends_no_worse_than_without_us():
    loop = Loop(poisoned=WINDOW)
    assert loop.guarded() <= Loop(poisoned=WINDOW).unguarded()
    assert {"skip_step"} == {d.action for d in loop.decisions}  # the state is sound


@pytest.mark.slow
def test_a_run_with_a_broken_moment_ends_within_one_percent_of_the_clean_one(clean):
    loop = Loop(broken_at=BROKEN_AT)
    assert abs(loop.guarded() / clean - 1) < 0.01
    assert 1 == sum(d.action == "rollback" for d in loop.decisions)


@pytest.mark.slow
def test_without_us_the_same_faults_ruin_the_training(clean):
    ruined = Loop(poisoned=WINDOW, broken_at=BROKEN_AT).unguarded()
    assert not math.isfinite(ruined) or ruined > 1.05 * clean


def test_data_that_is_nan_for_good_is_skipped_and_told_where_the_probe_reads_a_sound_state():
    loop = Loop(steps=260)
    loop.data._y[100 * BATCH : 200 * BATCH] = float("nan")
    loop.guarded()
    assert {"skip_step"} == {d.action for d in loop.decisions}
    assert set(range(101, 200)) == {d.step for d in loop.decisions} - {100}
    assert all(parameter.isfinite().all() for parameter in loop.model.parameters())


def test_what_no_rollback_cures_stops_after_exactly_the_budget_and_pages(tmp_path):
    loop = Loop()
    loop.data._y[100 * BATCH :] = float("nan")
    with pytest.raises(TrainingHalted) as halted:
        loop.guarded(probe=False)
    rollbacks = [d for d in loop.decisions if d.action == "rollback"]
    assert PolicyConfig().max_tries == len(rollbacks)
    (run,) = (tmp_path / "runs").glob("[0-9A-Z]*")
    assert RunDir.open(run).halted().reason in str(halted.value)
    (alert,) = alerts_for_decision(replace(rollbacks[-1], action="halt"), run_id=run.name)
    assert "page" == alert.severity
