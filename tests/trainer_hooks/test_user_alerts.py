"""A person's own alerts in a real loop: what a rank says of them, and what it never does."""

import inspect
from contextlib import contextmanager

import pytest
import torch

from tests.support.inside import events_of, feature_of, run_of
from tests.support.watched import Loop, Own, assert_same, own_place, send_command  # noqa: F401
from trainer_hooks.failopen import FaultCounter
from trainer_hooks.features import user_alerts
from trainer_hooks.features.user_alerts import MISSING_AFTER, RankAlerts, UserAlertsFeature
from trainer_hooks.lifecycle.loop import MonitorBase as WatchedLoop
from trainer_hooks.noop import NullMonitor
from trainvitals.detect.user_alerts import RENEW_STEPS, Rule
from trainvitals.errors import ConfigError, UsageError
from trainvitals.records import FindingRaised, Note

NAN = float("nan")


@pytest.fixture
def rules(tmp_path, monkeypatch):
    """Write rules into the settings file of the runs to come."""

    def write(*tables):
        path = tmp_path / "vitals.toml"
        path.write_text("".join(f"[[rules]]\n{table}\n" for table in tables))
        monkeypatch.setenv("VITALS_CONFIG", str(path))

    return write


def own(events):
    findings = (e.finding for e in events if isinstance(e, FindingRaised))
    return [finding for finding in findings if finding.kind == "user_alert"]


def alerts_in(events):
    return [(finding.cause, finding.step) for finding in own(events)]


def run(steps, each, **watch):
    """Train; ``each(monitor, step)`` is called before each step. Return what was said."""
    loop = Loop(mode=watch.pop("mode", "guard"), **watch)
    with loop.monitor as monitor:
        events = events_of(monitor)
        for step in range(steps):
            each(monitor, step)
            monitor.step(loop.forward())
    return events, monitor


# ------------------------------------------------------------------------------ the loop's calls


def test_a_condition_is_told_at_its_beginning_and_its_end():
    def each(monitor, step):
        monitor.alert("hot", when=10 <= step < 40, level="page", value=step)

    events, monitor = run(60, each)
    assert [("hot", 10), ("hot", 39)] == alerts_in(events)
    first, last = own(events)
    assert ("page", "hot: value 10", 10.0, -1) == (
        first.severity, first.reason, first.value, first.rank,
    )  # fmt: skip
    assert ("hot: value 39", 10) == (last.reason, last.onset_step)
    assert {} == monitor.swallowed_errors


def test_a_condition_that_was_said_once_holds_until_it_is_said_to_be_over():
    def each(monitor, step):
        if step in (0, 110):
            monitor.alert("val", when=step == 0)

    events, _ = run(200, each)
    assert [("val", 0), ("val", 50), ("val", 100)] == alerts_in(events)


def test_an_event_without_a_condition_is_told_once():
    def each(monitor, step):
        if step == 7:
            monitor.alert("new data", message="shard 12 begins")

    events, _ = run(120, each)
    assert [("new data", 7)] == alerts_in(events)
    (finding,) = own(events)
    assert "new data: shard 12 begins" == finding.reason


@pytest.mark.parametrize("when", [torch.tensor(True), torch.ones(1, 1), torch.tensor(3), 1, True])
def test_a_condition_may_be_whatever_is_one_number(when):
    events, monitor = run(3, lambda monitor, _: monitor.alert("a", when=when, value=torch.ones(())))
    assert [("a", 0)] == alerts_in(events)
    assert {} == monitor.swallowed_errors


@pytest.mark.parametrize(
    "call",
    [
        {"name": 3},
        {"name": "a", "level": "info"},
        {"name": "a", "when": torch.zeros(2)},
        {"name": "a", "when": "often"},
        {"name": "a", "value": [1.0]},
        {"name": "a", "value": torch.zeros(2)},
    ],
)
def test_what_cannot_work_is_an_error_before_the_first_update_and_never_after(call, caplog):
    loop = Loop(mode="guard")
    with loop.monitor as monitor:
        with pytest.raises(UsageError):
            monitor.alert(**call)
        for step in range(8):
            monitor.step(loop.forward())
            monitor.alert(**call)
            assert step + 1 == monitor.swallowed_errors["alert"]
    assert "must be" in caplog.text


def test_a_call_of_a_level_that_is_none_is_told_all_the_same_once_the_run_goes_on():
    def each(monitor, step):
        if step == 5:
            monitor.alert("rare", when=True, level="critical")

    events, _ = run(8, each)
    assert [("rare", 5), "notify"] == [
        *alerts_in(events),
        *(finding.severity for finding in own(events)),
    ]


@pytest.mark.parametrize("broken", ["record_breach", "end", "due"])
def test_a_fault_of_ours_never_reaches_the_loop(broken, monkeypatch, rules):
    rules('name = "a"\nwhen = "loss > 1e9"')

    def fail(*_, **__):
        raise RuntimeError("ours")

    monkeypatch.setattr(user_alerts.UserAlerts, broken, fail)
    _, monitor = run(5, lambda monitor, step: monitor.alert("a", when=step % 2 == 1))
    assert set(monitor.swallowed_errors) <= {"alert", "alerts"}
    assert monitor.swallowed_errors


def test_a_run_with_alerts_is_bit_for_bit_what_it_was_without(rules):
    bare = Loop()
    for _ in range(50):
        bare.bare_step()
    plain = bare.state()
    rules('name = "a"\nwhen = "mean(loss, 5) > 0"', 'name = "b"\nwhen = "reward > 2"')
    loop = Loop(mode="guard")
    with loop.monitor as monitor:
        for step in range(50):
            loss = loop.forward()
            monitor.observe(reward=step)
            monitor.alert("c", when=loss > 1, value=loss)
            monitor.step(loss)
    assert_same(plain, loop.state())
    assert {} == monitor.swallowed_errors


def test_what_is_off_takes_the_call_and_every_loop_has_it():
    loop = Loop(mode="off")
    loop.monitor.alert("a", when=True, level="page", value=1.0, message="x")
    assert inspect.signature(NullMonitor.alert) == inspect.signature(WatchedLoop.alert)
    own = Own()
    with own.attach() as attached:
        events = events_of(attached)
        attached.alert("a", when=True)
    assert [("a", 0)] == alerts_in(events)


# ------------------------------------------------------------------------------------- the rules


def test_a_wrong_rule_stops_watch_and_is_named(rules):
    rules('name = "reward hacked"\nwhen = "mean(reward) > 0.9"')
    with pytest.raises(ConfigError, match="rule 'reward hacked': when is 'mean"):
        Loop(mode="guard")


def test_a_rule_judges_columns_and_the_loop_s_own_scalars(rules):
    rules(
        'name = "hacked"\nwhen = "mean(reward, 5) > 0.9"\nfor = 3\nlevel = "page"',
        'name = "nan"\nwhen = "nonfinite(loss, 10) > 0"\nlevel = "log"',
        'name = "low"\nwhen = "steps.learning_rate < 1"',
        'name = "never"\nwhen = "eval/accuracy < 0.5"',
    )
    loop = Loop(mode="guard")
    with loop.monitor as monitor:
        events = events_of(monitor)
        for step in range(45):
            monitor.observe(reward=1.0 if 10 <= step < 30 else 0.0)
            monitor.evaluate(accuracy=0.75)
            monitor.step(loop.forward(NAN if step == 20 else 1.0))
    told = alerts_in(events)
    # The window of five is above 0.9 from step 14 to step 29, and three steps later it is an alert.
    assert [("hacked", 17), ("hacked", 29)] == [pair for pair in told if pair[0] == "hacked"]
    assert [("nan", 20)] == [pair for pair in told if pair[0] == "nan"][:1]
    assert [("low", 0)] == [pair for pair in told if pair[0] == "low"]
    assert {"hacked", "nan", "low"} == {name for name, _ in told}
    reasons = {finding.cause: finding for finding in own(events)}
    assert "hacked: mean(reward, 5) is 1, above 0.9 since step 14" == reasons["hacked"].reason
    assert ("page", "log", "notify") == tuple(reasons[n].severity for n in ("hacked", "nan", "low"))


def test_a_series_that_never_comes_is_told_once(rules):
    rules('name = "hacked"\nwhen = "rewrad > 0.9"', 'name = "fine"\nwhen = "loss > 1e9"')
    with alone() as (alerts, said):
        for step in range(3 * MISSING_AFTER):
            alerts.observe_scalar("reward", 0.1, step=step, attempt=1)
            alerts.observe_row(step, 1, alerts.row(loss=1.0))
        (note,) = said
        assert isinstance(note, Note)
        assert ("rule_without_series", "info") == (note.code, note.severity)
        assert "rule 'hacked' has nothing to judge" in note.text
        assert "did you mean reward?" in note.text


def test_windows_go_back_with_the_run(rules):
    rules('name = "hacked"\nwhen = "mean(reward, 20) > 0.9"')
    loop = Loop(mode="heal", checkpoints=True)
    rewards, events = {}, []
    with loop.monitor as monitor:
        events = events_of(monitor)
        back = None
        while monitor.step_index < 75:
            if monitor.step_index == 60 and back is None:
                send_command(monitor, action="rollback")
            # The branch that is left has twenty good ones; the one that counts has them later.
            good = monitor.step_index >= 35 if back is None else monitor.step_index >= 50
            rewards.setdefault(monitor.attempt, {})[monitor.step_index] = float(good)
            monitor.observe(reward=float(good))
            outcome = monitor.step(loop.forward())
            back = outcome.rolled_back_to if outcome.rolled_back_to is not None else back
    assert back is not None
    left, stays = (steps for _, steps in sorted(rewards.items()))
    told = [step for name, step in alerts_in(events) if name == "hacked"]
    counts = {step: value for step, value in left.items() if step < back} | stays
    assert sorted(counts) == list(range(75))
    expected = next(i for i in range(19, 75) if sum(counts[s] for s in range(i - 19, i + 1)) > 18)
    assert 53 == told[0], "in the branch that was left: 19 of 20"
    assert expected in told
    assert {} == monitor.swallowed_errors


def test_in_a_job_of_several_ranks_each_names_itself_but_not_for_what_all_share():
    with alone() as (alerts, said):
        of_rank_1 = RankAlerts(
            [Rule(name="shared", when="loss > 0"), Rule(name="its own", when="rank_loss > 0")],
            emitter=alerts.emitter,
            faults=FaultCounter(),
            rank=1,
            world_size=2,
        )
        of_rank_1.begin(1, 0)
        of_rank_1.observe_row(3, 1, alerts.row(loss=1.0, rank_loss=2.0))
        of_rank_1.call("said", 1.0, level="page", value=None, message="", step=3, attempt=1)
    assert {"shared": -1, "its own": 1, "said": 1} == {f.cause: f.rank for f in own(said)}


@contextmanager
def alone():
    """Give a rank's alerts without a training, and what it says."""
    loop = Loop(mode="guard")
    said = events_of(loop.monitor)
    alerts = feature_of(loop.monitor, UserAlertsFeature).alerts()
    said.clear()
    alerts.emitter = run_of(loop.monitor).emitter
    columns = alerts.emitter.columns
    alerts.row = lambda **values: tuple(values.get(name) for name in columns)
    alerts.begin(1, 0)
    with loop.monitor:
        yield alerts, said


# ---------------------------------------------------------------------------------- on a device


class Event:
    """A CUDA event that happens when it is told to."""

    def __init__(self):
        self.has_happened = False

    def record(self, stream):
        """Come after what the stream has to do, which ends when ``has_happened`` is set."""

    def query(self):
        return self.has_happened


@pytest.fixture
def event(monkeypatch):
    """Return the event of each copy from the device, for which the CPU stands."""
    event = Event()
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    return event


def hot(alerts, step, holds=True):
    value = torch.tensor(float(step))
    when = torch.tensor(holds)
    alerts.call("hot", when, level="page", value=value, message="", step=step, attempt=1)


def test_numbers_of_a_device_are_looked_at_once_they_are_there_and_never_waited_for(event):
    with alone() as (alerts, said):
        for step, holds in ((4, True), (5, True), (6, False)):
            hot(alerts, step, holds)
        for step in (4, 5, 6):
            alerts.observe_row(step, 1, alerts.row(loss=1.0))
        assert [] == said
        event.has_happened = True
        alerts.observe_row(7, 1, alerts.row(loss=1.0))
        assert [("hot", 4)] == alerts_in(said)
        alerts.observe_row(4 + RENEW_STEPS, 1, alerts.row(loss=1.0))
        assert [("hot", 4)] == alerts_in(said), "it has ended, so it is not renewed"


def test_what_was_on_its_way_as_the_run_went_back_is_of_the_branch_that_was_left(event):
    with alone() as (alerts, said):
        hot(alerts, 4)
        alerts.begin(2, 2)
        event.has_happened = True
        alerts.observe_row(2, 2, alerts.row(loss=1.0))
        assert [] == said


def test_a_loop_that_asks_for_nothing_has_nothing_of_it():
    loop = Loop(mode="guard")
    with loop.monitor as monitor:
        monitor.step(loop.forward())
        assert not feature_of(monitor, UserAlertsFeature).is_used
    assert isinstance(feature_of(loop.monitor, UserAlertsFeature).alerts(), RankAlerts)
