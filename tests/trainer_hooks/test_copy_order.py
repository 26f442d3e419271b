"""A snapshot holds the state of its step, whoever writes next and whenever a device copies."""

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

import trainer_hooks
from tests.support.examples import each_once
from tests.support.inside import snapshots_of
from tests.support.watched import Loop, own_place  # noqa: F401
from tests.trainer_hooks.side_streams import Earliest, Latest
from tests.trainer_hooks.training import Training
from trainer_hooks import EMA, CheckpointSettings
from trainer_hooks.guard.averages import GuardedAverages
from trainer_hooks.recovery.manager import SnapshotRing
from trainer_hooks.recovery.state import TrainingState
from trainer_hooks.tensors.copying import wait_for_copies

SIDES = [Earliest, Latest]


def ring_of(training, side, *, overlap):
    return SnapshotRing(
        training.state, num_slots=3, interval=4, healthy_after=3, overlap=overlap, side=side()
    )


def taken(ring, training, step):
    """Take a snapshot; return it, and what it has to hold."""
    expected = {k: t.clone() for k, t in training.state.tensors().items()}
    ring.capture(step, 1)
    ring.commit(step, True)
    return ring.newest_committed(), expected


def assert_holds(snapshot, expected):
    copied = snapshot.tensors()
    assert expected.keys() == copied.keys()
    for key, tensor in expected.items():
        assert torch.equal(tensor, copied[key]), key


def swap(training, ema):
    with ema.swap():
        pass


def swap_within(training, ema):
    ema.swap().__enter__()


def update(training, ema):
    ema.is_watched = False
    ema.update()


def copy_to(training, ema):
    ema.copy_to(training.model)


def load(training, ema):
    ema.load_state_dict({k: torch.ones_like(t) for k, t in ema.state_dict().items()})


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("write", [swap, swap_within, update, copy_to, load])
def test_an_average_that_writes_waits_for_a_copy_that_overlaps(side, write):
    training = Training(extra=lambda model: {"ema": EMA(model[:5])})
    training.run(3)
    ema = training.extra["ema"]
    ema.load_state_dict({k: 2 * t for k, t in ema.state_dict().items()})
    ring = ring_of(training, side, overlap=True)
    snapshot, expected = taken(ring, training, 3)
    write(training, training.extra["ema"])
    assert_holds(snapshot, expected)


@pytest.mark.parametrize("side", SIDES)
def test_leaving_a_swap_waits_for_a_copy_of_the_averages(side):
    training = Training(extra=lambda model: {"ema": EMA(model[:5])})
    training.run(3)
    ring = ring_of(training, side, overlap=True)
    with training.extra["ema"].swap():
        snapshot, expected = taken(ring, training, 3)
    assert_holds(snapshot, expected)


@pytest.mark.parametrize("side", SIDES)
def test_who_reads_a_snapshot_waits_for_its_copy(side):
    training = Training()
    training.run(3)
    assert_holds(*taken(ring_of(training, side, overlap=True), training, 3))


@pytest.mark.parametrize("side", SIDES)
def test_torch_s_average_waits_as_well(side):
    training = Training(extra=lambda model: {"swa": AveragedModel(model)})
    averages = GuardedAverages(training.extra, [training.optimizer])
    training.run(3)
    ring = ring_of(training, side, overlap=True)
    snapshot, expected = taken(ring, training, 3)
    training.extra["swa"].update_parameters(training.model)
    assert_holds(snapshot, expected)
    averages.release()


@pytest.mark.parametrize("side", SIDES)
def test_a_restore_waits_and_the_next_copy_too(side):
    training = Training()
    ring = ring_of(training, side, overlap=True)
    first, expected_first = taken(ring, training, 0)
    wait_for_copies()
    ring.commit(0, True)
    training.run(3)
    second, expected = taken(ring, training, 4)
    ring.restore(first.id)
    assert_holds(second, expected)
    assert_holds(first, expected_first)
    assert all(
        torch.equal(t, expected_first[k])
        for k, t in training.state.tensors().items()
        if k in expected_first
    )


@pytest.mark.parametrize("side", SIDES)
def test_what_the_loop_writes_behind_a_step_is_in_no_snapshot_of_it(side):
    training = Training()
    training.run(3)
    ring = ring_of(training, side, overlap=False)
    snapshot, expected = taken(ring, training, 3)
    with torch.no_grad():
        for param in training.model.parameters():
            param.data.zero_()
    training.run(2)
    assert_holds(snapshot, expected)


@pytest.mark.parametrize("side", SIDES)
def test_what_is_counted_is_what_was_copied(side):
    """A weight that is broken before the copy is counted, however late that runs."""
    training = Training()
    training.run(3)
    ring = ring_of(training, side, overlap=True)
    training.state.tensors()["model.0.weight"][0, 0] = float("inf")
    wrong = ring.capture(3, 1)
    ring.before_update()
    assert 1.0 == wrong.item()
    ring.commit(3, False)
    assert ["model.0.weight"] == ring.nonfinite_names()


@pytest.mark.parametrize(("side", "overlap"), each_once(SIDES, (False, True)))
def test_a_run_ends_bit_for_bit_as_on_the_cpu_whenever_the_side_runs(tmp_path, side, overlap):
    """With a rollback in it, for a moment that was broken, and validations of an average."""

    def trained(where, change):
        checkpoints = CheckpointSettings(directory=tmp_path / where, save_every=10**6)
        loop = Loop()
        ema = EMA(loop.model)
        monitor = trainer_hooks.watch(
            loop.model, loop.optimizer, loop.scheduler, mode="heal", checkpoints=checkpoints,
            state={"ema": ema},
        )  # fmt: skip
        change(snapshots_of(monitor))
        back, breaks = [], 1
        with monitor:
            while monitor.step_index < 80:
                if monitor.step_index == 40 and breaks:
                    breaks = 0
                    moment = loop.optimizer.state[loop.model[3].weight]["exp_avg_sq"]
                    with torch.no_grad():
                        moment[0, 3] = float("inf")
                outcome = monitor.step(loop.forward())
                back += [] if outcome.rolled_back_to is None else [outcome.rolled_back_to]
                if monitor.step_index % 10 == 0:
                    with ema.swap():
                        pass
            assert {} == monitor.swallowed_errors
        extra = {"ema": ema}
        live = TrainingState(loop.model, [loop.optimizer], [loop.scheduler], extra=extra)
        state = {k: t.clone() for k, t in live.tensors().items()}
        return back, state

    def beside(ring):
        ring.side, ring.overlap = side(), overlap

    back, expected = trained("plain", lambda ring: None)
    assert [31] == back
    back, state = trained("beside", beside)
    assert [31] == back
    assert all(torch.equal(t, expected[k]) for k, t in state.items())
