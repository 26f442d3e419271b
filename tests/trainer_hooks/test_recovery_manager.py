"""The ways back that the ladder sees, against what is on disk by the time it goes there."""

import os
import shutil
import time
from pathlib import Path

import pytest
import torch

from tests.support.inside import store_of
from tests.support.watched import Loop, own_place  # noqa: F401
from tests.trainer_hooks.measures.journal import Journal
from trainer_hooks import CheckpointSettings, EarlyStopping
from trainer_hooks.recovery.manager import SnapshotRing
from trainvitals.clock import SystemClock
from trainvitals.errors import TrainingHalted
from trainvitals.testing.clock import ManualClock

BROKEN_AT, STEPS = 30, 50


@pytest.fixture
def loop(tmp_path, monkeypatch):
    monkeypatch.setenv("VITALS_LADDER_MARGIN", "2")
    checkpoints = CheckpointSettings(
        directory=tmp_path / "checkpoints",
        healthy_after=3,
        snapshot_every=4,
        save_every=4,
        keep=2,
    )
    stopping = EarlyStopping(patience=STEPS)
    return Loop(mode="heal", checkpoints=checkpoints, early_stopping=stopping)


def train(loop, breaks=3, before_break=lambda store: None):
    """Train, break the weights so often at one step; return where each rollback went."""
    store, back = store_of(loop.monitor), []
    while loop.monitor.step_index < STEPS:
        step = loop.monitor.step_index
        store.wait()
        if step % 3 == 0:  # each is a new best, and is saved
            loop.monitor.evaluate(loss=-float(step))
        if step == BROKEN_AT and breaks:
            breaks -= 1
            before_break(store)
            with torch.no_grad():
                loop.model[0].weight.fill_(float("nan"))
        outcome = loop.monitor.step(loop.forward())
        back += [] if outcome.rolled_back_to is None else [outcome.rolled_back_to]
    return back


def test_what_was_evaluated_takes_no_place_of_what_the_ladder_goes_back_to(loop):
    healthy = []

    def look(store):
        healthy.append([ref.step for ref in store.folder.refs() if ref.state == "healthy"])

    with loop.monitor:
        back = train(loop, before_break=look)
    assert [2, 2, 2] == [len(steps) for steps in healthy]
    assert back[1] < back[0]


def test_where_all_older_ones_are_gone_the_oldest_that_is_left_is_taken_again(loop):
    def lose(store):
        for ref in store.folder.refs():
            shutil.rmtree(store.folder.path / ref.id)

    with loop.monitor:
        back = train(loop, before_break=lose)
    assert 3 == len(back)
    assert {} == loop.monitor.swallowed_errors


def test_a_fourth_break_of_the_same_cause_still_halts(loop):
    with (
        loop.monitor,
        pytest.raises(TrainingHalted, match=r"3 rollbacks \(the limit\) did not fix it"),
    ):
        train(loop, breaks=4)


def test_a_checkpoint_is_written_once_each_time_its_seconds_are_over_whatever_the_steps(
    tmp_path, monkeypatch
):
    checkpoints = CheckpointSettings(
        directory=tmp_path / "checkpoints",
        healthy_after=3,
        snapshot_every=2,
        save_every=10**6,
        save_seconds=60,
    )
    clock, counts = ManualClock(), []
    monkeypatch.setattr(SystemClock, "monotonic_ns", lambda _: clock.monotonic_ns())
    loop = Loop(mode="heal", checkpoints=checkpoints)
    store = store_of(loop.monitor)
    with loop.monitor:
        for seconds in (59.0, 1.0, 0.0, 60.0):
            clock.advance(seconds)
            for _ in range(12):
                loop.monitor.step(loop.forward())
                assert store.wait()
            counts.append(len(store.folder.refs()))
    assert [0, 1, 1, 2] == counts


def test_what_a_snapshot_takes_from_the_loop_is_its_own_part_of_the_next_step(loop, monkeypatch):
    """The parts still add up to the step."""
    take, seconds, num_steps = SnapshotRing.capture, 0.05, 14

    def slow(self, *args, **options):
        time.sleep(seconds)
        return take(self, *args, **options)

    with loop.monitor:
        monkeypatch.setattr(SnapshotRing, "capture", slow)
        for _ in range(num_steps):
            loop.monitor.step(loop.forward())
    rows = Journal(Path(os.environ["VITALS_SHM"]))
    parts = ("forward_backward", "checkpoint", "optimizer", "monitor")
    times = {name: rows.steps(f"{name}_seconds") for name in ("step_duration", *parts)}
    assert set(range(1, num_steps)) == set(times["checkpoint"]), "a rank's first step has no length"
    for step, whole in times["step_duration"].items():
        assert sum(times[part][step] for part in parts) == pytest.approx(whole, abs=1e-6)
    due = {step for step, took in times["checkpoint"].items() if took >= seconds}
    assert {4, 8, 12} <= due


def test_without_checkpoints_their_part_of_a_step_is_missing_not_zero():
    loop = Loop(mode="guard")
    with loop.monitor:
        for _ in range(5):
            loop.monitor.step(loop.forward())
    rows = Journal(Path(os.environ["VITALS_SHM"]))
    assert {} == rows.steps("checkpoint_seconds")
    assert 4 == len(rows.steps("forward_backward_seconds"))
