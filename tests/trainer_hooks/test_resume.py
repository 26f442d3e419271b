"""A run resumed from the loop's own checkpoint is protected from its first step."""

import contextlib
import copy
import io
import json

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn

import trainer_hooks
from tests.support.examples import examples
from tests.support.inside import events_of, facts_of, refs_of, snapshots_of, tokens_of
from tests.support.watched import Loop, Own, assert_same, own_place  # noqa: F401
from trainvitals.errors import FormatError, NewerVersionError, UsageError
from trainvitals.records import AttemptStarted

NAN = float("nan")


def trained(steps=30, **watch):
    """Return a loop that was trained under guard, and the state it would have kept."""
    loop = Loop(mode="guard", **watch)
    loop.optimizer.param_groups[0]["lr"] = 1e-4  # in calm waters
    with loop.monitor as monitor:
        for _ in range(steps):
            monitor.step(loop.forward(), weight=torch.tensor(3), max_norm=0.5)
        return loop, monitor.state_dict()


def again(state, loop=None, **watch):
    """Return a loop of a new process, as far as one can be had here, with the state loaded."""
    new = Loop(seed=1, **watch)
    if loop is not None:
        new.model.load_state_dict(loop.model.state_dict())
        new.optimizer.load_state_dict(loop.optimizer.state_dict())
    new.monitor = trainer_hooks.watch(new.model, new.optimizer, mode="guard")
    new.monitor.load_state_dict(state)
    return new


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kept", ["json", "torch"])
def test_a_spike_at_the_very_first_step_is_skipped(kept, fused):
    loop, state = trained(60, fused=fused)
    if kept == "json":
        state = json.loads(json.dumps(state, allow_nan=False))
    else:
        torch.save(state, file := io.BytesIO())
        file.seek(0)
        state = torch.load(file, weights_only=True)
    new = again(state, loop, fused=fused)
    with new.monitor as monitor:
        before = new.state()
        monitor.step(new.forward(100.0))
        after = new.state()
        assert_same(before["model"], after["model"])
        assert_same(before["optimizer"], after["optimizer"])
        monitor.step(new.forward())
        assert not torch.equal(after["model"]["0.weight"], new.model[0].weight)
    assert facts_of(monitor).num_skips == 1


def test_the_same_holds_where_the_loop_steps_by_itself():
    loop = Own()
    with loop.attach() as attached:
        loop.run(60, give=True)
        state = attached.state_dict()
    with loop.attach() as attached:
        attached.load_state_dict(state)
        before = loop.parameters()
        loop.step(gradient=1e6, give=True)
        assert all(map(torch.equal, before, loop.parameters()))
    assert attached.step_index == 61


def test_the_curve_and_the_tokens_go_on_in_a_branch_of_their_own():
    loop, state = trained()
    assert state["tokens_seen"] == 29 * 3  # the newest step is on its way still
    new = again(state, loop)
    monitor = new.monitor
    assert monitor.step_index == 30
    monitor.step(new.forward(), weight=torch.tensor(3))
    monitor.close()
    assert tokens_of(monitor) == 30 * 3
    assert monitor.attempt > state["attempt"]


@pytest.mark.parametrize("same_run", [True, False])
def test_the_branch_is_said_and_hangs_on_the_run_it_came_from(monkeypatch, same_run):
    if same_run:
        monkeypatch.setenv("VITALS_RUN_ID", "01ARZ3NDEKTSV4RRFFQ69G5FAV")
    loop, state = trained()
    with trainer_hooks.watch(loop.model, loop.optimizer) as monitor:
        said, started = events_of(monitor), monitor.attempt
        monitor.load_state_dict(state)
        (event,) = [e for e in said if isinstance(e, AttemptStarted)]
    assert event.fork_step == 30
    assert event.id == monitor.attempt
    assert event.parent == (state["attempt"] if same_run else started)


def test_what_the_ladder_has_spent_is_not_in_the_state():
    loop = Loop(mode="guard")
    with loop.monitor as monitor:
        for step in range(30):
            monitor.step(loop.forward(NAN if step == 20 else 1.0))
        assert facts_of(monitor).num_skips == 1
        state = monitor.state_dict()
    words = json.dumps(state)
    assert "num_skips" not in words
    assert "ladder" not in words
    new = again(state)
    assert facts_of(new.monitor).num_skips == 0
    new.monitor.close()


def test_a_rollback_after_it_goes_to_what_was_loaded_and_not_behind_it():
    _, state = trained()
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    with trainer_hooks.watch(model, optimizer, mode="heal", checkpoints=True) as monitor:
        with torch.no_grad():
            model.weight.fill_(3.0)  # loaded after watch()
        monitor.load_state_dict(state)
        refs = refs_of(monitor)
        assert [(30, monitor.attempt, "healthy")] == [(r.step, r.attempt, r.state) for r in refs]
        model(torch.ones(2, 4)).sum().backward()
        monitor.step()
        snapshots_of(monitor).restore(refs[0].id)
        assert torch.equal(model.weight, torch.full((1, 4), 3.0))


@pytest.mark.parametrize(
    ("state", "error", "words"),
    [
        ({"model": {}, "optimizer": {}}, FormatError, "'model', 'optimizer'"),
        (None, FormatError, "NoneType"),
        ([1], FormatError, "list"),
        ({"trainvitals_loop": 2}, NewerVersionError, "version 2"),
        ({"trainvitals_loop": 1}, FormatError, "damaged: KeyError"),
    ],
)
def test_what_is_no_state_is_refused_in_words(state, error, words):
    loop = Loop(mode="guard")
    with loop.monitor as monitor, pytest.raises(error, match=words):
        monitor.load_state_dict(state)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("detectors", None),
        ("detectors", {"outlier": {}}),
        ("step", "x"),
        ("step", -1),
        ("step", 2**63),
        ("step", float("inf")),
        ("tokens_seen", None),
    ],
)
def test_a_damaged_state_changes_nothing(key, value):
    _, state = trained()
    loop = Loop(mode="guard")
    with loop.monitor as monitor:
        fresh = monitor.state_dict()
        with pytest.raises(FormatError, match="damaged"):
            monitor.load_state_dict({**state, key: value})
        assert monitor.state_dict() == fresh


JUNK = [float("nan"), float("inf"), -5, None, "x", [], {}, [None], [float("nan")] * 20]


@pytest.mark.parametrize("junk", JUNK, ids=repr)
def test_a_detector_s_damaged_number_is_refused_or_does_no_harm(junk):
    _, state = trained()
    for key in state["detectors"]["outlier"]["loss"]:
        damaged = json.loads(json.dumps(state))
        damaged["detectors"]["outlier"]["loss"][key] = junk
        loop = Loop(mode="guard")
        with loop.monitor as monitor:
            with contextlib.suppress(FormatError):
                monitor.load_state_dict(damaged)
            for _ in range(3):
                monitor.step(loop.forward())
        assert monitor.swallowed_errors == {}


def test_it_is_refused_once_steps_were_made():
    loop = Loop(mode="guard")
    with loop.monitor as monitor:
        monitor.step(loop.forward())
        with pytest.raises(UsageError, match="at step 1"):
            monitor.load_state_dict(monitor.state_dict())


def test_a_run_that_is_not_watched_hands_the_state_on(monkeypatch):
    loop, state = trained()
    monkeypatch.setenv("VITALS_MODE", "off")
    off = again(state, loop)
    assert off.monitor.state_dict() == state
    assert trainer_hooks.watch(loop.model, loop.optimizer).state_dict() == {}
    monkeypatch.delenv("VITALS_MODE")
    new = again({}, loop)
    assert new.monitor.step_index == 0
    new.monitor.close()


@settings(
    max_examples=examples(12),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@example(before=[1.0], after=[1.0])  # the newest step's learning rate must not be forgotten
@given(
    before=st.lists(st.sampled_from([1.0, 1.0, 1.1, 3.0, 100.0]), max_size=30),
    after=st.lists(st.sampled_from([1.0, 1.0, 100.0]), max_size=10),
)
def test_restoring_the_state_mid_stream_changes_nothing(before, after):
    def run(monitor, loop, factors):
        for factor in factors:
            monitor.step(loop.forward(factor), weight=2)

    kept = Loop(fused=False, mode="guard")
    with kept.monitor as monitor:
        run(monitor, kept, before)
        held = monitor.state_dict()
        model, optimizer = copy.deepcopy((kept.model.state_dict(), kept.optimizer.state_dict()))
        rng, data = torch.get_rng_state(), kept.data.get_state()
        schedule = kept.scheduler.state_dict()
        run(monitor, kept, after)
        expected = monitor.state_dict()
    restored = Loop(fused=False, mode="guard")
    with restored.monitor as monitor:
        restored.model.load_state_dict(model)
        restored.optimizer.load_state_dict(optimizer)
        restored.scheduler.load_state_dict(schedule)
        torch.set_rng_state(rng)
        restored.data.set_state(data)
        monitor.load_state_dict(json.loads(json.dumps(held, allow_nan=False)))
        run(monitor, restored, after)
        found = monitor.state_dict()
    own = ("run_id", "attempt")
    assert {k: v for k, v in expected.items() if k not in own} == {
        k: v for k, v in found.items() if k not in own
    }


# ------------------------------------------------------------- what a skip after it puts back


def buffers(loop):
    return copy.deepcopy(dict(loop.model.named_buffers()))


def write_buffers(loop):
    """Bring other running statistics without load_state_dict, as some checkpoints' readers do."""
    with torch.no_grad():
        for buffer in loop.model.buffers():
            buffer.add_(7)


@pytest.mark.parametrize("guard", ["watch", "attach"])
def test_a_skip_at_once_does_not_undo_what_was_loaded(guard):
    """An fp16 run's first steps overflow as a rule: its statistics must not start anew."""
    earlier, _ = trained()
    state = copy.deepcopy(earlier.model.state_dict())
    loop = Own(mode="guard") if guard == "watch" else Own()
    monitor = loop.monitor if guard == "watch" else loop.attach()
    with monitor:
        loop.model.load_state_dict(state)
        loaded = buffers(loop)
        loss = loop.forward(NAN)
        monitor.step(loss) if guard == "watch" else loop.optimizer.step()
    assert_same(loaded, buffers(loop))


def test_a_skip_at_once_does_not_undo_what_was_read_before_the_monitor_s_state():
    _, state = trained()
    loop = Loop(mode="guard")
    with loop.monitor as monitor:
        write_buffers(loop)
        monitor.load_state_dict(state)
        read = buffers(loop)
        monitor.step(loop.forward(NAN))
    assert_same(read, buffers(loop))


def test_a_skip_just_after_a_rollback_puts_back_what_that_restored():
    loop = Loop(mode="heal", checkpoints=True)
    kept, back = {}, None
    with loop.monitor as monitor:
        for step in range(80):
            kept[monitor.step_index] = buffers(loop)
            back = monitor.step(loop.forward(NAN if step >= 40 else 1.0)).rolled_back_to
            if back is not None:
                monitor.step(loop.forward(NAN))
                break
    assert back is not None
    assert_same(kept[back], buffers(loop))


def test_a_watched_model_is_copied_and_pickled_without_us():
    loop = Loop(mode="guard")
    with loop.monitor:
        data = io.BytesIO()
        torch.save(loop.model, data)
        assert b"trainer_hooks" not in data.getvalue()
        data.seek(0)
        for other in (copy.deepcopy(loop.model), torch.load(data, weights_only=False)):
            other.load_state_dict(loop.model.state_dict())
            assert_same(dict(loop.model.state_dict()), dict(other.state_dict()))
    assert not loop.model._load_state_dict_post_hooks
