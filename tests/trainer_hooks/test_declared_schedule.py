"""Learning rates beside the schedule that the run declared: told where they leave it, and once."""

import copy
import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import trainer_hooks
from tests.support.examples import one_in
from tests.support.inside import run_of
from tests.support.watched import own_place  # noqa: F401
from tests.trainer_hooks.measures.journal import Journal
from trainer_hooks import CheckpointSettings, LRSchedule
from trainvitals.errors import UsageError
from trainvitals.records import RATE_DECLARED, DecisionMade, Finding, FindingRaised

STEPS = 60
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]] = {
    "step": lambda o: lr_scheduler.StepLR(o, 10),
    "multi_step": lambda o: lr_scheduler.MultiStepLR(o, [5, 20]),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 50),
    "warm_restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 7, 2),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 5),
    "one_cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=STEPS + 1),
    "linear": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=10),
    "constant": lambda o: lr_scheduler.ConstantLR(o, 0.5, 10),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, 50, 2.0),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.95),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, 0.1, total_iters=10), lr_scheduler.CosineAnnealingLR(o, 40)],
        [10],
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 10), lr_scheduler.ExponentialLR(o, 0.9)], optimizer=o
    ),
}


class Loop:
    """A regression with two groups of parameters, each with a rate of its own."""

    def __init__(self, schedule=lambda o: lr_scheduler.CosineAnnealingLR(o, 50), *, lr=0.01):
        torch.manual_seed(0)
        self.model = nn.Linear(4, 1)
        groups = [
            {"params": [self.model.weight], "lr": lr},
            {"params": [self.model.bias], "lr": lr / 2},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=lr, fused=True)
        self.scheduler = schedule(self.optimizer)

    def watch(self, schedule=None, *, owned=True, **keywords):
        declared = self.scheduler if schedule is None else schedule
        own = self.scheduler if owned else None
        return trainer_hooks.watch(self.model, self.optimizer, own, schedule=declared, **keywords)

    def step(self, monitor, scale=1.0):
        loss = (self.model(torch.ones(2, 4)) - 1).square().mean() * scale
        loss.backward()
        return monitor.step(loss)

    def train(self, steps=STEPS, *, at=None, **how):
        """Train, and call ``at[step]`` before each of these steps."""
        with self.watch(**how) as monitor:
            for _ in range(steps):
                if at and monitor.step_index in at:
                    at[monitor.step_index](monitor)
                self.step(monitor)
        assert monitor.swallowed_errors == {}
        return told()


def journal() -> Journal:
    """Return what was written so far."""
    return Journal(Path(os.environ["VITALS_SHM"]))


def told(*, kinds: tuple[str, ...] = ("schedule",)) -> list[Finding]:
    """Return what was said of the schedule."""
    raised = [event for event in journal().events if isinstance(event, FindingRaised)]
    return [e.finding for e in raised if e.finding.kind in kinds]


# --------------------------------------------------------------------------------- healthy runs


@pytest.mark.parametrize("name", one_in(2, SCHEDULERS))
def test_no_scheduler_that_does_as_it_does_is_told(name):
    assert Loop(SCHEDULERS[name]).train() == []


@pytest.mark.parametrize("name", one_in(4, reversed(SCHEDULERS)))
def test_what_is_declared_is_copied_and_nothing_of_it_touched(name):
    """The trained model is the same to the bit, and so is all of the scheduler's state."""
    plain, declared = Loop(SCHEDULERS[name]), Loop(SCHEDULERS[name])
    for loop, schedule in ((plain, None), (declared, declared.scheduler)):
        monitor = trainer_hooks.watch(loop.model, loop.optimizer, loop.scheduler, schedule=schedule)
        with monitor:
            for _ in range(STEPS):
                loop.step(monitor)
    for kept, other in zip(plain.model.parameters(), declared.model.parameters(), strict=True):
        assert torch.equal(kept, other)
    assert _numbers(plain.scheduler) == _numbers(declared.scheduler)


def _numbers(scheduler) -> str:
    state = copy.deepcopy(scheduler.state_dict())
    return repr({key: value for key, value in sorted(state.items()) if "<" not in repr(value)})


def from_a_third(step: int) -> float:
    """A warm-up that begins at a third of the peak, and a cosine to a tenth of it."""
    if step < 10:
        return 1 / 3 + 2 / 3 * step / 10
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, (step - 10) / (STEPS - 10))))


@pytest.mark.parametrize(
    ("declared", "of"),
    [
        ("cosine", lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS)),
        ("linear", lambda o: lr_scheduler.LinearLR(o, 1.0, 0.0, total_iters=STEPS)),
        ("constant", lambda o: lr_scheduler.ConstantLR(o, 1.0)),
        (
            LRSchedule(kind="wsd", warmup_steps=5, decay_steps=20),
            lambda o: lr_scheduler.LambdaLR(
                o, lambda s: min(1.0, (s + 1) / 5, max(0.0, (STEPS - s) / 20))
            ),
        ),
        (
            LRSchedule(kind="wsd", decay_steps=20),
            lambda o: lr_scheduler.LambdaLR(
                o, lambda s: 1 - (max(0, s - (STEPS - 20)) / 20) ** 0.5
            ),
        ),
        (
            LRSchedule(kind="cosine", warmup_steps=10, min_ratio=0.1),
            lambda o: lr_scheduler.LambdaLR(o, from_a_third),
        ),
    ],
)
def test_a_declared_shape_leaves_open_what_conventions_differ_in(declared, of):
    loop = Loop(of, lr=0.01)
    assert loop.train(schedule=declared, total_steps=STEPS) == []


def test_a_loop_that_steps_its_scheduler_itself_may_leave_out_skipped_updates():
    loop = Loop(SCHEDULERS["linear"])
    with loop.watch(owned=False) as monitor:
        for step in range(STEPS):
            bad = step in (2, 3, 4)
            loop.step(monitor, float("nan") if bad else 1.0)
            if not bad:
                loop.scheduler.step()
    assert told() == []


def test_skipped_updates_count_as_attempted_where_the_monitor_steps_the_scheduler():
    loop = Loop(SCHEDULERS["linear"])
    with loop.watch() as monitor:
        for step in range(STEPS):
            loop.step(monitor, float("nan") if step in (2, 3, 4) else 1.0)
    assert told() == []


def test_a_scheduler_of_epochs_is_held_against_epochs():
    loop = Loop(lambda o: lr_scheduler.StepLR(o, 1, 0.5))
    loader = torch.utils.data.DataLoader(torch.ones(20, 4), batch_size=2)
    with loop.watch(scheduler_every="epoch") as monitor:
        for _ in monitor.batches(loader, epochs=4):
            loop.step(monitor)
    assert told() == []


def test_a_run_that_is_resumed_goes_on_in_the_schedule(tmp_path, monkeypatch):
    """With a new scheduler, which counts from 0 until the checkpoint is loaded."""
    monkeypatch.setenv("VITALS_RUN_ID", "01JD0000000000000000000000")
    kept = CheckpointSettings(directory=tmp_path / "kept", save_every=20)
    Loop(SCHEDULERS["cosine"]).train(checkpoints=kept)
    again = Loop(SCHEDULERS["cosine"])
    with again.watch(checkpoints=kept) as monitor:
        assert monitor.step_index >= 20
        for _ in range(20):
            again.step(monitor)
    assert told() == []


def test_a_resume_without_the_schedule_s_state_is_told(tmp_path, monkeypatch):
    """A scheduler that the monitor was not given begins anew."""
    monkeypatch.setenv("VITALS_RUN_ID", "01JD0000000000000000000000")
    kept = CheckpointSettings(directory=tmp_path / "kept", save_every=20)
    for _ in range(2):
        loop = Loop(SCHEDULERS["lambda"])
        with loop.watch(owned=False, checkpoints=kept) as monitor:
            for _ in range(STEPS):
                loop.step(monitor)
                loop.scheduler.step()
    (finding,) = told()
    assert finding.onset_step >= 20


def test_a_rate_that_the_policy_lowered_is_no_departure():
    loop = Loop()
    with loop.watch() as monitor:
        for step in range(STEPS):
            if step == 20:
                run_of(monitor).judge.lr_factor_at = lambda *_: 0.5
            loop.step(monitor)
    assert told() == []


# --------------------------------------------------------------------------------- departures


def scaled(loop, factor, group=0):
    def change(_monitor):
        loop.scheduler.base_lrs[group] *= factor
        loop.optimizer.param_groups[group]["lr"] *= factor

    return change


def test_a_rate_that_jumps_is_told_once_with_what_was_expected():
    loop = Loop(SCHEDULERS["constant"])
    (finding,) = loop.train(at={30: scaled(loop, 3.0)})
    assert (finding.onset_step, finding.step) == (30, 32)
    assert (finding.value, finding.limit) == (pytest.approx(0.03), pytest.approx(0.01))
    assert finding.reason == (
        "the learning rate left the declared ConstantLR(total_iters=10): 0.03 instead of 0.01 "
        "(since step 30)"
    )


def test_a_rate_that_is_smooth_and_wrong_is_told():
    """The cosine ends after 80 steps where 60 were declared: no step of it looks odd."""
    loop = Loop(lambda o: lr_scheduler.CosineAnnealingLR(o, 80))
    (finding,) = loop.train(schedule="cosine", total_steps=STEPS)
    assert finding.onset_step < 25


def test_a_schedule_that_a_resume_forgot_is_told():
    loop = Loop(SCHEDULERS["exponential"])
    other = SCHEDULERS["exponential"](Loop().optimizer)
    fresh = copy.deepcopy(other.state_dict())

    def forget(_monitor):
        loop.scheduler.load_state_dict(fresh)
        for group, rate in zip(loop.optimizer.param_groups, (0.01, 0.005), strict=True):
            group["lr"] = rate

    (finding,) = loop.train(at={30: forget})
    assert finding.onset_step == 30


# ------------------------------------------------------------------------------------- jumps


def restarts(optimizer) -> lr_scheduler.LRScheduler:
    """Cosines of 25 steps, each with ten times the peak of the one before."""
    return lr_scheduler.LambdaLR(
        optimizer,
        lambda s: 1e-3 * 10.0 ** (s // 25) * (0.505 + 0.495 * math.cos(math.pi * (s % 25) / 25)),
    )


JUMPS = [25, 50]


def classified(declared: bool) -> tuple[list[Finding], list[DecisionMade]]:
    """Learn to classify with warm restarts at growing peaks; return all that was said and done."""
    torch.manual_seed(0)
    model, teacher = (
        nn.Sequential(nn.Linear(32, 64), between, nn.Linear(64, 10))
        for between in (nn.ReLU(), nn.Tanh())
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scheduler = lr_scheduler.LambdaLR(
        optimizer,
        lambda s: 4.0 ** (s // 100) * (0.5025 + 0.4975 * math.cos(math.pi * (s % 100) / 100)),
    )
    given = (scheduler,) if declared else ()
    schedule = scheduler if declared else None
    with trainer_hooks.watch(model, optimizer, *given, schedule=schedule) as monitor:
        for _ in range(299):
            inputs = torch.randn(64, 32)
            labels = torch.multinomial((3.0 * teacher(inputs)).softmax(-1), 1)[:, 0]
            loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            monitor.step(loss, max_norm=1.0)
            if not declared:
                scheduler.step()
    events = journal().events
    found = [event.finding for event in events if isinstance(event, FindingRaised)]
    return found, [event for event in events if isinstance(event, DecisionMade)]


def test_a_healthy_run_with_declared_warm_restarts_names_nothing_and_acts_on_nothing():
    found, decisions = classified(declared=True)
    assert ([], []) == (found, decisions)


def test_the_same_run_stepped_by_the_loop_and_undeclared_is_told_of_each_jump():
    found, decisions = classified(declared=False)
    assert [100, 200] == [finding.step for finding in found if finding.kind == "lr_jump"]
    assert not decisions


@pytest.mark.parametrize("owned", [True, False], ids=["stepped by us", "stepped by the loop"])
def test_a_jump_that_is_declared_or_of_a_given_scheduler_is_no_finding_any_other_is(owned):
    def of(loop: Loop, schedule) -> list[int]:
        own = loop.scheduler if owned else None
        monitor = trainer_hooks.watch(loop.model, loop.optimizer, own, schedule=schedule)
        with monitor:
            for _ in range(74):
                loop.step(monitor)
                if not owned:
                    loop.scheduler.step()
        assert monitor.swallowed_errors == {}
        return [finding.step for finding in told(kinds=("lr_jump", "schedule"))]

    declared = Loop(restarts)
    assert of(declared, declared.scheduler) == []
    verdicts = journal().steps("verdict")
    assert all(verdicts[step] & RATE_DECLARED for step in JUMPS)
    assert not any(verdicts[step] & RATE_DECLARED for step in range(1, 25))
    assert of(Loop(restarts), None) == ([] if owned else JUMPS)


def test_a_jump_beside_the_declared_schedule_is_told():
    def too_high(monitor):
        loop.optimizer.param_groups[0]["lr"] = 0.5

    loop = Loop(lambda o: lr_scheduler.ConstantLR(o, 1.0))
    loop.train(40, at=dict.fromkeys(range(25, 40), too_high))
    assert [(f.step, f.kind) for f in told(kinds=("lr_jump", "schedule"))] == [
        (25, "lr_jump"),
        (27, "schedule"),
    ]


def test_a_jump_to_a_declared_rate_of_epochs_is_no_finding():
    loop = Loop(lambda o: lr_scheduler.LambdaLR(o, lambda epoch: (0.1, 0.01, 1.0, 1.0)[epoch]))
    loader = torch.utils.data.DataLoader(torch.ones(60, 4), batch_size=4)
    with loop.watch(scheduler_every="epoch") as monitor:
        for _ in monitor.batches(loader, epochs=3):
            loop.step(monitor)
    assert told(kinds=("lr_jump", "schedule")) == []
    assert journal().steps("verdict")[30] & RATE_DECLARED


def test_a_single_group_that_leaves_it_is_named():
    loop = Loop(SCHEDULERS["constant"])
    (finding,) = loop.train(at={30: scaled(loop, 0.5, group=1)})
    assert "group 1: 0.0025 instead of 0.005" in finding.reason


def test_what_is_back_for_a_while_and_leaves_again_is_told_again():
    loop = Loop(SCHEDULERS["constant"])
    changes = {30: 3.0, 40: 1 / 3, 160: 3.0}
    at = {step: scaled(loop, factor) for step, factor in changes.items()}
    assert [finding.onset_step for finding in loop.train(180, at=at)] == [30, 160]


def test_one_or_two_odd_steps_are_not_told():
    loop = Loop(SCHEDULERS["constant"])
    assert loop.train(at={30: scaled(loop, 3.0), 32: scaled(loop, 1 / 3)}) == []


def test_an_announced_change_is_as_declared_from_then_on():
    loop = Loop(SCHEDULERS["constant"])

    def change(monitor):
        monitor.expect("a lower rate", steps=5)
        scaled(loop, 0.5)(monitor)

    assert loop.train(at={30: change}) == []


def test_nothing_is_done_about_it():
    loop, other = Loop(SCHEDULERS["constant"]), Loop(SCHEDULERS["constant"])
    loop.train(at={30: scaled(loop, 3.0)})
    with trainer_hooks.watch(other.model, other.optimizer, other.scheduler) as monitor:
        for step in range(STEPS):
            if step == 30:
                scaled(other, 3.0)(monitor)
            other.step(monitor)
    assert torch.equal(loop.model.weight, other.model.weight)


# --------------------------------------------------------------------------------- what is refused


def refused(*, optimizer=None, **how) -> UsageError:
    loop = Loop()
    with pytest.raises(UsageError) as error:
        trainer_hooks.watch(loop.model, optimizer or loop.optimizer, **how)
    return error.value


def test_what_depends_on_the_training_cannot_be_declared_ahead():
    loop = Loop()
    plateau = lr_scheduler.ReduceLROnPlateau(loop.optimizer)
    with pytest.raises(UsageError, match="depends on the training: it cannot be declared ahead"):
        loop.watch(plateau, owned=False)


def test_what_is_no_schedule_is_refused_in_words():
    assert "it must be one of constant, linear, cosine, wsd" in refused(schedule="exponential").text
    assert "schedule is an int; it must be a scheduler of torch" in refused(schedule=3).text
    assert "total_steps is not given" in refused(schedule="cosine").text
    assert "total_steps is 0" in refused(total_steps=0).text
    assert "whose optimizer was not given" in refused(schedule=Loop().scheduler).text


def test_what_cannot_be_copied_is_refused_with_the_way_out():
    class Stubborn(lr_scheduler.ConstantLR):
        def __deepcopy__(self, memo):
            raise RuntimeError("not this one")

    loop = Loop(Stubborn)
    with pytest.raises(UsageError, match="cannot be copied: RuntimeError: not this one") as error:
        loop.watch()
    assert "LRSchedule(" in error.value.hint
