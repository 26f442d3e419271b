"""Schedulers are stepped by the monitor alone: once an update, or once an epoch of the data."""

import copy
import os
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

import trainer_hooks
from tests.support.inside import feature_of
from tests.support.watched import assert_same, own_place  # noqa: F401
from tests.trainer_hooks.measures.journal import Journal
from trainer_hooks.features.sigterm import SigtermFeature
from trainer_hooks.guard.schedules import schedule_end_count
from trainvitals.errors import UsageError

EPOCHS, BATCHES = 4, 30


class Loop:
    """A regression over a loader that is shuffled, with a schedule of epochs."""

    def __init__(self, schedule=lambda o: lr_scheduler.StepLR(o, 1, 0.5), *, fused=True):
        torch.manual_seed(0)
        self.model = nn.Linear(4, 1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, fused=fused)
        self.scheduler = schedule(self.optimizer)
        self.loader = DataLoader(torch.randn(BATCHES * 2, 4), batch_size=2, shuffle=True)

    def watch(self, **keywords):
        return trainer_hooks.watch(self.model, self.optimizer, self.scheduler, **keywords)

    def forward(self, batch, scale=1.0):
        loss = (self.model(batch) - 1).square().mean() * scale
        loss.backward()
        return loss

    def bare(self, *, epochs=EPOCHS, dropped=()):
        """Train as without us, but for the updates that are dropped."""
        step = 0
        for _ in range(epochs):
            for batch in self.loader:
                self.forward(batch)
                if step not in dropped:
                    self.optimizer.step()
                self.optimizer.zero_grad()
                step += 1
            self.scheduler.step()
        return self.state()

    def state(self):
        return copy.deepcopy(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "scheduler": self.scheduler.state_dict(),
                "rng": torch.get_rng_state(),
            }
        )


def steps(monitor, loop, count, after=lambda: None):
    for _ in range(count):
        monitor.step(loop.forward(torch.ones(2, 4)))
        after()


def notes(code):
    return Journal(Path(os.environ["VITALS_SHM"])).notes(code)


# ------------------------------------------------------------------------------ once an epoch


@pytest.mark.parametrize("mode", ["guard", "heal", "off"])
def test_schedulers_of_epochs_are_stepped_as_a_bare_loop_steps_them(mode):
    plain = Loop().bare()
    loop = Loop()
    with loop.watch(mode=mode, checkpoints=True, scheduler_every="epoch") as monitor:
        for batch in monitor.batches(loop.loader, epochs=EPOCHS):
            monitor.step(loop.forward(batch))
    assert_same(plain, loop.state())


@pytest.mark.parametrize("mode", ["guard", "off"])
def test_a_loop_that_owns_its_epochs_and_validates_steps_them_once_an_epoch(mode):
    loop, rates = Loop(), []
    with loop.watch(mode=mode, scheduler_every="epoch") as monitor:
        for _ in range(EPOCHS):
            for batch in monitor.batches(loop.loader):
                monitor.step(loop.forward(batch))
            for _batch in monitor.batches(loop.loader):
                pass
            rates.append(loop.optimizer.param_groups[0]["lr"])
    assert rates == [0.005, 0.0025, 0.00125, 0.000625]


@pytest.mark.parametrize("mode", ["guard", "off"])
def test_a_loop_without_batches_ends_its_epochs_by_a_call(mode):
    plain, loop = Loop().bare(), Loop()
    with loop.watch(mode=mode, scheduler_every="epoch") as monitor:
        for _ in range(EPOCHS):
            for batch in loop.loader:
                monitor.step(loop.forward(batch))
            monitor.end_epoch()
    assert_same(plain, loop.state())


def test_an_epoch_that_batches_ends_is_not_ended_twice(caplog):
    loop = Loop()
    with loop.watch(scheduler_every="epoch") as monitor:
        for _ in range(2):
            for batch in monitor.batches(loop.loader):
                monitor.step(loop.forward(batch))
            monitor.end_epoch()
    assert loop.scheduler.last_epoch == 2
    assert caplog.text.count("monitor.end_epoch() does nothing here") == 1


@pytest.mark.parametrize("mode", ["guard", "off"])
def test_an_epoch_cannot_be_ended_where_schedulers_count_updates(mode):
    loop = Loop()
    with (
        loop.watch(mode=mode) as monitor,
        pytest.raises(UsageError, match="stepped at every update"),
    ):
        monitor.end_epoch()


def test_a_skipped_update_keeps_the_schedule_of_epochs():
    plain = Loop().bare(dropped=[35])
    loop = Loop()
    with loop.watch(scheduler_every="epoch") as monitor:
        for batch in monitor.batches(loop.loader, epochs=EPOCHS):
            bad = monitor.step_index == 35
            monitor.step(loop.forward(batch, float("nan") if bad else 1.0))
    assert_same(plain, loop.state())


@pytest.mark.parametrize("after_rollback", ["replay", "move_on"])
@pytest.mark.parametrize("broken_at", [62, 89, 95])
def test_a_rollback_over_the_end_of_an_epoch_keeps_the_rate_of_the_datas_epoch(
    after_rollback, broken_at
):
    loop, rates, backs = Loop(), {}, []
    with loop.watch(mode="heal", checkpoints=True, scheduler_every="epoch") as monitor:
        batches = monitor.batches(loop.loader, epochs=6, after_rollback=after_rollback)
        for batch in batches:
            rates.setdefault(monitor.batch_position.epoch, set()).add(
                loop.optimizer.param_groups[0]["lr"]
            )
            if monitor.step_index == broken_at and not backs:
                with torch.no_grad():
                    loop.model.weight.fill_(float("nan"))
            outcome = monitor.step(loop.forward(batch))
            if outcome.rolled_back_to is not None:
                backs.append(outcome.rolled_back_to)
    assert len(backs) == 1
    assert rates == {epoch: {0.01 * 0.5**epoch} for epoch in rates}
    assert loop.scheduler.last_epoch == 6


@pytest.mark.parametrize("saved_at", [45, 60])
def test_a_relaunch_goes_on_with_the_epochs_schedule(saved_at, monkeypatch):
    plain = Loop().bare()
    monkeypatch.setenv("VITALS_RUN_ID", "01ARZ3NDEKTSV4RRFFQ69G5FAV")
    loop = Loop()
    with loop.watch(checkpoints=True, scheduler_every="epoch") as monitor:
        for batch in monitor.batches(loop.loader, epochs=EPOCHS):
            if monitor.step_index == saved_at - 1:
                feature_of(monitor, SigtermFeature).is_received = True
            try:
                monitor.step(loop.forward(batch))
            except SystemExit:
                break
    again = Loop()
    with again.watch(checkpoints=True, scheduler_every="epoch") as monitor:
        assert 0 < monitor.step_index < EPOCHS * BATCHES
        for batch in monitor.batches(again.loader, epochs=EPOCHS):
            monitor.step(again.forward(batch))
    after = again.state()
    assert_same({**plain, "rng": 0}, {**after, "rng": 0})


# ------------------------------------------------------------------- stepped by the loop as well


@pytest.mark.parametrize("every", ["step", "epoch"])
@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: lr_scheduler.StepLR(o, 1, 0.5),
        lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.ExponentialLR(o, 0.9)]),
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [5]
        ),
    ],
)
def test_a_scheduler_that_the_loop_steps_too_is_refused_at_the_second_step(schedule, every):
    loop = Loop(schedule)
    with loop.watch(scheduler_every=every) as monitor:
        steps(monitor, loop, 1)
        loop.scheduler.step()
        with pytest.raises(UsageError, match="was called by the loop before step 1"):
            steps(monitor, loop, 1)


@pytest.mark.parametrize("every", ["step", "epoch"])
def test_a_scheduler_that_the_loop_steps_later_is_told_once(every, caplog):
    loop = Loop(lambda o: lr_scheduler.StepLR(o, 1, 0.99))
    with loop.watch(scheduler_every=every) as monitor:
        for _ in range(3):
            for batch in monitor.batches(loop.loader):
                monitor.step(loop.forward(batch))
            loop.scheduler.step()
    assert len(notes("scheduler_stepped")) == 1
    assert caplog.text.count("StepLR.step() was called by the loop before step 30") == 1


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_scheduler_may_be_brought_to_its_place_before_the_first_step_and_loaded_later(caplog):
    loop = Loop(lambda o: lr_scheduler.StepLR(o, 10, 0.9))
    with loop.watch() as monitor:
        for _ in range(7):
            loop.scheduler.step()
        steps(monitor, loop, 5)
        state = copy.deepcopy(loop.scheduler.state_dict())
        steps(monitor, loop, 5)
        loop.scheduler.load_state_dict(state)
        steps(monitor, loop, 5)
    assert loop.scheduler.last_epoch == 17
    assert not caplog.text
    assert monitor.swallowed_errors == {}


def test_a_scheduler_that_watch_was_not_given_is_the_loops_own(caplog):
    loop = Loop()
    with trainer_hooks.watch(loop.model, loop.optimizer) as monitor:
        steps(monitor, loop, 5, after=loop.scheduler.step)
    assert loop.scheduler.last_epoch == 5
    assert not caplog.text


# -------------------------------------------------------------------- epochs taken for updates


@pytest.mark.parametrize(
    ("schedule", "epochs", "words"),
    [
        (lambda o: lr_scheduler.CosineAnnealingLR(o, 4), 4, "planned for 4 epochs"),
        (lambda o: lr_scheduler.MultiStepLR(o, [2, 3]), 4, "planned for 4 epochs"),
        (lambda o: lr_scheduler.CosineAnnealingLR(o, 10), 1, "at its end after 10 updates"),
        (lambda o: lr_scheduler.StepLR(o, 3, 0.1), 2, "at its end after 9 updates"),
        (lambda o: lr_scheduler.MultiStepLR(o, [5, 9]), 1, "at its end after 9 updates"),
    ],
)
def test_a_schedule_of_epochs_that_is_stepped_at_every_update_is_told(
    schedule, epochs, words, caplog
):
    loop = Loop(schedule)
    with loop.watch() as monitor:
        for batch in monitor.batches(loop.loader, epochs=epochs):
            monitor.step(loop.forward(batch))
    (text,) = notes("epoch_scheduler")
    assert words in text
    assert "scheduler_every='epoch'" in text
    assert caplog.text.count("scheduler_every='epoch'") == 1


@pytest.mark.parametrize(
    ("schedule", "epochs"),
    [
        (lambda o: lr_scheduler.CosineAnnealingLR(o, EPOCHS * BATCHES), EPOCHS),
        (lambda o: lr_scheduler.CosineAnnealingLR(o, BATCHES), 1),
        (lambda o: lr_scheduler.MultiStepLR(o, [20, 25]), 1),
        (lambda o: lr_scheduler.StepLR(o, 3, 0.9), 2),
        (lambda o: lr_scheduler.LinearLR(o, total_iters=3), 2),
        (lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=61), 2),
        (lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step), 2),
    ],
)
def test_a_schedule_of_updates_is_left_in_peace(schedule, epochs, caplog):
    loop = Loop(schedule)
    with loop.watch() as monitor:
        for batch in monitor.batches(loop.loader, epochs=epochs):
            monitor.step(loop.forward(batch))
    assert not caplog.text


def test_a_run_that_ends_with_its_schedule_in_the_first_epoch_is_left_in_peace(caplog):
    loop = Loop(lambda o: lr_scheduler.CosineAnnealingLR(o, 10))
    with loop.watch() as monitor:
        for batch in monitor.batches(loop.loader):
            monitor.step(loop.forward(batch))
            if monitor.step_index == 10:
                break
    assert not caplog.text


def test_steps_of_several_batches_make_an_epoch_shorter(caplog):
    loop = Loop(lambda o: lr_scheduler.CosineAnnealingLR(o, 5))
    with loop.watch() as monitor:
        for i, batch in enumerate(monitor.batches(loop.loader), start=1):
            monitor.micro(loop.forward(batch))
            if i % 6 == 0:
                monitor.step()
    assert loop.scheduler.last_epoch == 5
    assert not caplog.text


def test_the_end_of_a_schedule_is_known_where_torch_says_it():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    warmup = lr_scheduler.LinearLR(optimizer, total_iters=5)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, 20)
    assert schedule_end_count(lr_scheduler.SequentialLR(optimizer, [warmup, cosine], [5])) == 25
    assert schedule_end_count(lr_scheduler.ExponentialLR(optimizer, 0.5)) == 10
    assert schedule_end_count(warmup) is None


def test_a_monitor_with_a_schedule_ends_when_it_is_dropped():
    loop = Loop()
    monitor = loop.watch(scheduler_every="epoch")
    steps(monitor, loop, 3)
    del monitor
    assert "add_param_group" not in vars(loop.optimizer)


@pytest.mark.parametrize(
    ("schedule", "is_told"),
    [
        (lambda o: lr_scheduler.CosineAnnealingLR(o, 30), True),
        (lambda o: lr_scheduler.MultiStepLR(o, [10, 20]), True),
        (lambda o: lr_scheduler.CosineAnnealingLR(o, 150), False),
        (lambda o: lr_scheduler.LambdaLR(o, lambda n: 1.0), False),
    ],
)
def test_a_schedule_of_epochs_is_found_without_a_loader_of_ours(schedule, is_told, caplog):
    loop = Loop(schedule)
    with loop.watch() as monitor:
        for _ in range(100):
            monitor.step(loop.forward(torch.randn(2, 4)))
    told = [text for text in caplog.messages if "if it counts epochs" in text]
    assert int(is_told) == len(told)
