"""Early stopping through the monitor, in one process: the loop ends, and the best is back."""

import copy
import math

import pytest
import torch

import trainer_hooks
from tests.support.inside import events_of, patience_of, store_of
from tests.support.watched import Loop, assert_same, own_place  # noqa: F401
from tests.trainer_hooks.saving import Run
from trainer_hooks import EMA, CheckpointSettings, EarlyStopping
from trainvitals.errors import FormatError, UsageError
from trainvitals.records import Note

NAN = math.nan


def a_loop(tmp_path, *, patience=2, seed=0, **watch):
    """Return a loop that keeps checkpoints and stops early."""
    checkpoints = CheckpointSettings(directory=tmp_path / "checkpoints", healthy_after=3)
    stopping = EarlyStopping(patience=patience)
    return Loop(seed=seed, **{"checkpoints": checkpoints, "early_stopping": stopping, **watch})


def step(loop, scale=1.0):
    return loop.monitor.step(loop.forward(scale))


def evaluate(loop, value):
    """Evaluate, once the disk has taken what was evaluated before."""
    store_of(loop.monitor).wait()
    loop.monitor.evaluate(loss=value)
    return loop.state()


def test_the_batches_end_by_themselves_in_all_epochs_and_the_best_state_is_back(tmp_path):
    loop, values, states, seen = a_loop(tmp_path), [3.0, 1.0, 2.0, 2.0, 0.5], {}, 0
    with loop.monitor as monitor:
        for _ in monitor.batches(range(6), epochs=9):
            step(loop)
            seen += 1
            if not monitor.step_index % 3:
                states[monitor.step_index] = evaluate(loop, values.pop(0))
        assert (14, True, [0.5]) == (seen, monitor.should_stop, values)
        best = monitor.restore_best()
        assert ("loss", 1.0, 6) == (best.metric, best.value, best.step)
        assert_same(states[6], loop.state())
        with pytest.raises(UsageError, match="restored the state of step 6, so no step can follow"):
            step(loop)
    assert {} == monitor.swallowed_errors


def test_a_loop_of_its_own_is_told_to_stop_one_step_after_the_evaluation(tmp_path):
    loop = a_loop(tmp_path, patience=1, checkpoints=None)
    with loop.monitor as monitor:
        told = []
        for at in range(8):
            if at in (2, 4):
                monitor.evaluate(loss=float(at))
            step(loop)
            told.append(monitor.should_stop)
        assert [False] * 5 + [True] * 3 == told


def test_a_validation_after_the_stop_still_has_its_batches(tmp_path):
    loop = a_loop(tmp_path, patience=1)
    with loop.monitor as monitor:
        for _ in monitor.batches(range(20)):
            step(loop)
            evaluate(loop, NAN)
        assert monitor.should_stop
        assert [0, 1, 2] == list(monitor.batches(range(3)))


def test_a_rollback_sets_the_patience_back_to_what_it_was_with_the_snapshot(tmp_path):
    loop = a_loop(tmp_path, mode="heal", checkpoints=True)
    with loop.monitor as monitor:
        for _ in range(30):
            step(loop)
        evaluate(loop, 1.0)
        step(loop)
        evaluate(loop, 2.0)
        for _ in range(2):
            step(loop)
        assert 1 == patience_of(monitor)["num_without"]
        loop.model[0].weight.data.fill_(NAN)
        back = None
        while back is None:
            back = step(loop).rolled_back_to
        assert 0 == back  # the margin of 20 steps
        fresh = {"best": None, "best_step": -1, "num_without": 0}
        assert fresh.items() <= patience_of(monitor).items()


def test_a_relaunch_goes_on_with_the_patience_that_was_left(tmp_path, monkeypatch):
    monkeypatch.setenv("VITALS_RUN_ID", "01ARZ3NDEKTSV4RRFFQ69G5FAV")
    loop = a_loop(tmp_path)
    with loop.monitor as monitor:
        step(loop)
        evaluate(loop, 1.0)
        for _ in range(3):
            step(loop)
        evaluate(loop, 0.5)
        for _ in range(2):
            step(loop)
    again = a_loop(tmp_path, seed=1)
    with again.monitor as monitor:
        assert 4 == monitor.step_index  # the best that was kept last
        assert 1.0 == patience_of(monitor)["best"]
        assert 0.5 == monitor.restore_best().value


def test_a_loop_s_own_checkpoint_keeps_the_patience_too(tmp_path):
    loop = a_loop(tmp_path)
    with loop.monitor as monitor:
        step(loop)
        monitor.evaluate(loss=1.0)
        for _ in range(2):
            step(loop)
        state = monitor.state_dict()
    again = a_loop(tmp_path, seed=1)
    with again.monitor as monitor:
        monitor.load_state_dict(copy.deepcopy(state))
        assert 1.0 == patience_of(monitor)["best"]
    for damage in ({"best": "x"}, {"metric": 3}, 7):
        broken = {**state, "stopping": damage if damage == 7 else {**state["stopping"], **damage}}
        with a_loop(tmp_path).monitor as monitor, pytest.raises(FormatError, match="damaged"):
            monitor.load_state_dict(broken)


def test_the_average_in_the_weights_place_is_not_kept_as_a_state_of_the_training(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    ema = EMA(model, decay=0.9)
    with trainer_hooks.watch(
        model, optimizer, checkpoints=tmp_path / "kept", state={"ema": ema},
        early_stopping=EarlyStopping(),
    ) as monitor:  # fmt: skip
        said = events_of(monitor)
        with ema.swap():
            monitor.evaluate(loss=1.0)
        for _ in range(2):
            monitor.step(_backward(model))
        (text,) = [e.text for e in said if isinstance(e, Note) and e.code == "best_not_kept"]
        assert text.endswith("leave `with ema.swap():` before evaluate()")
        with pytest.raises(UsageError, match="no state was kept"):
            monitor.restore_best()


def _backward(model):
    loss = model(torch.ones(2, 4)).square().mean()
    loss.backward()
    return loss


def test_nothing_is_asked_of_a_run_that_is_off(tmp_path):
    with a_loop(tmp_path, mode="off").monitor as monitor:
        monitor.evaluate(loss=1.0)
        assert (False, None) == (monitor.should_stop, monitor.restore_best())


@pytest.mark.parametrize(
    ("watch", "text"),
    [
        ({"early_stopping": None}, "the run has no early stopping"),
        ({"checkpoints": None}, "this run keeps no best state"),
        ({"early_stopping": EarlyStopping(keep_best=False)}, "this run keeps no best state"),
    ],
)
def test_what_cannot_be_restored_is_refused_with_the_way_out(tmp_path, watch, text):
    loop = a_loop(tmp_path, **watch)
    with loop.monitor as monitor:
        monitor.evaluate(loss=1.0)
        step(loop)
        assert not monitor.should_stop
        with pytest.raises(UsageError, match=text) as caught:
            monitor.restore_best()
        assert "early_stopping=EarlyStopping(" in caught.value.hint
    with pytest.raises(UsageError):
        monitor.restore_best()


def test_something_else_than_settings_is_refused():
    with pytest.raises(UsageError, match="early_stopping is an int; it must be an EarlyStopping"):
        Loop(early_stopping=5)


def test_a_state_that_is_saved_as_the_best_and_then_as_healthy_has_both_marks(tmp_path):
    run = Run(tmp_path)
    run.training.run(2)
    run.ring.capture(2, 7, {}, trusted=True)
    run.ring.commit(2, True)
    snapshot = run.ring.newest_committed()
    snapshot.state, snapshot.best = "verified", ("loss", 0.5)
    name = run.store.save(snapshot)
    assert run.store.wait()
    assert ["verified"] == [ref.state for ref in run.store.folder.refs()]
    snapshot.state, snapshot.best = "healthy", None
    run.store.save(snapshot)
    assert run.store.wait()
    assert ["healthy"] == [ref.state for ref in run.store.folder.refs()]
    best, mark = run.store.folder.best()
    assert (name, "loss", 0.5) == (best, mark.metric, mark.value)
