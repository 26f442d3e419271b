import pytest
from sqlalchemy import select

from tests.collector.rows import OTHER_RUN, RUN, SECOND, Writer
from trainvitals.alerting import Alert, alerts_for_run_state
from trainvitals.errors import UsageError
from trainvitals.testing import ManualClock
from trainvitals.views import (
    AckRequest,
    AlertView,
    EndSilenceRequest,
    RunState,
    SilenceRequest,
)
from vitals_collector.alerts.inbox import (
    AlertOccurrence,
    CurrentRunState,
    Inbox,
    InboxConfig,
    list_alerts,
    list_silences,
    settle_alert,
)
from vitals_collector.ingest.ingest import ingest
from vitals_collector.queries.series import UNKNOWN
from vitals_collector.storage.schema import audit
from vitals_collector.storage.store import Store


class Desk:
    """An inbox with a clock of its own, and what it told."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.clock = ManualClock()
        self.told: list[tuple[str, str]] = []
        self.hushed: list[str] = []
        self.seq = 0
        self.inbox = self.reopened()

    def reopened(self) -> Inbox:
        return Inbox(
            self.store,
            clock=self.clock,
            tell=lambda view: self.told.append((view.name, view.state)),
            hush=lambda fingerprint, *, keep_posting=False: self.hushed.append(fingerprint),
            config=InboxConfig(healthy_steps=10, lost_hold_seconds=15.0),
        )

    def skip(self, step: int, *, run: str = RUN, cause: str = "nonfinite_loss") -> Alert:
        alert = Alert(
            name="StepSkipped",
            severity="log",
            labels={"run": run, "cause": cause},
            summary=f"loss is nan at {step}",
            step=step,
            point=True,
        )
        self.seq += 1
        occurrence = AlertOccurrence(run, self.clock.time_ns(), alert)
        self.inbox.raise_alerts([occurrence], cursors={"decisions/x": self.seq})
        return alert

    def look(
        self,
        state: RunState = "running",
        *,
        step: int = 0,
        trouble: int = -1,
        seen_unix_ns: int | None = None,
        lasting: frozenset[str] = frozenset(),
    ) -> None:
        now = CurrentRunState(
            run_id=RUN,
            state=state,
            last_step=step,
            last_unhealthy_step=trouble,
            last_seen_unix_ns=self.clock.time_ns() if seen_unix_ns is None else seen_unix_ns,
            conditions=alerts_for_run_state(state, run_id=RUN, step=step),
            lasting=lasting,
        )
        self.inbox.update([now])

    def listed(self, **of: str) -> tuple[AlertView, ...]:
        return list_alerts(self.store, now_unix_ns=self.clock.time_ns(), **of)

    def only(self) -> AlertView:
        (view,) = self.listed()
        return view


def untold(inbox: Inbox) -> tuple[list[AlertView], list[AlertView]]:
    new, told = inbox.undelivered()
    return [entry.view for entry in new], told


@pytest.fixture
def desk(store: Store) -> Desk:
    for run in (RUN, OTHER_RUN):
        ingest(store, Writer(run=run).steps([0]))
    return Desk(store)


# --------------------------------------------------------------------------------- point alerts


def test_the_same_trouble_again_is_one_alert_told_once_that_moves_on(desk: Desk):
    desk.skip(5)
    desk.clock.advance(1)
    desk.skip(7)
    view = desk.only()
    assert (7, "loss is nan at 7", "firing") == (view.step, view.summary, view.state)
    assert 1 * SECOND == view.updated_unix_ns - view.started_unix_ns
    assert [("StepSkipped", "firing")] == desk.told


def test_another_cause_or_another_run_is_another_alert(desk: Desk):
    desk.skip(5)
    desk.skip(5, cause="loss_outlier")
    desk.skip(5, run=OTHER_RUN)
    assert 3 == len(desk.listed()) == len(desk.told)
    assert 2 == len(desk.listed(run_id=RUN))


def test_a_point_alert_resolves_after_healthy_steps_and_not_before(desk: Desk):
    desk.skip(5)
    for step, trouble, expected in ((14, 5, "firing"), (15, 6, "firing"), (16, 6, "resolved")):
        desk.look(step=step, trouble=trouble)
        assert expected == desk.only().state
    assert [("StepSkipped", "firing"), ("StepSkipped", "resolved")] == desk.told
    assert desk.only().ended_unix_ns == desk.clock.time_ns()


@pytest.mark.parametrize(("lasts", "ends"), [("hot", "slow"), ("slow", "hot")])
def test_an_alert_whose_problem_lasts_does_not_delay_the_end_of_another(
    desk: Desk, lasts: str, ends: str
):
    alerts = {cause: desk.skip(5, cause=cause) for cause in ("hot", "slow")}
    desk.look(step=30, trouble=5, lasting=frozenset({alerts[lasts].fingerprint}))
    states = {view.labels["cause"]: view.state for view in desk.listed()}
    assert {lasts: "firing", ends: "resolved"} == states


def test_the_alert_of_a_run_that_is_read_months_later_ended_with_the_run(desk: Desk):
    desk.skip(5)
    started = desk.only().started_unix_ns
    desk.clock.advance(90 * 24 * 3600.0)
    desk.look("finished", step=90, seen_unix_ns=started + 60 * SECOND)
    assert started + 60 * SECOND == desk.only().ended_unix_ns
    desk.skip(5, cause="loss_outlier")
    desk.look("finished", step=90, seen_unix_ns=1)
    ended = {view.ended_unix_ns for view in desk.listed()}
    assert {started + 60 * SECOND, desk.clock.time_ns()} == ended, "none ends before it began"


def test_after_a_rollback_the_steps_must_pass_the_trouble_again(desk: Desk):
    desk.skip(100)
    desk.look(step=85, trouble=100)
    assert "firing" == desk.only().state
    desk.look(step=110, trouble=100)
    assert "resolved" == desk.only().state


def test_a_finished_run_has_nothing_left_to_fire(desk: Desk):
    desk.skip(5)
    desk.look("finished", step=6, trouble=5)
    assert "resolved" == desk.only().state


def test_trouble_that_comes_back_fires_anew_and_is_nobodys_yet(desk: Desk):
    alert = desk.skip(5)
    desk.inbox.acknowledge(alert.fingerprint, AckRequest(by="alice"))
    desk.look(step=15, trouble=5)
    desk.clock.advance(60)
    desk.skip(90)
    view = desk.only()
    assert ("firing", "", None) == (view.state, view.acknowledged_by, view.ended_unix_ns)
    assert desk.clock.time_ns() == view.started_unix_ns
    assert ["firing", "resolved", "firing"] == [state for _, state in desk.told]
    assert {("StepSkipped", "log"): 2} == desk.inbox.fired()


def test_two_firings_of_one_moment_are_two_and_known_by_their_starts(desk: Desk):
    desk.skip(5)
    desk.look("finished")
    desk.skip(90)
    again = desk.only()
    assert ["firing", "resolved", "firing"] == [state for _, state in desk.told]
    assert desk.clock.time_ns() + 1 == again.started_unix_ns
    desk.look("finished")
    assert again.started_unix_ns == desk.only().started_unix_ns, "its end is of the same firing"


# ----------------------------------------------------------------------------------- conditions


def test_a_lost_run_is_pending_then_fires_and_resolves_when_it_speaks_again(desk: Desk):
    timeline = []
    for state, wait in (("lost", 10), ("lost", 4), ("lost", 1), ("lost", 60), ("running", 0)):
        desk.look(state)
        timeline.append(desk.only().state)
        desk.clock.advance(wait)
    assert ["pending", "pending", "pending", "firing", "resolved"] == timeline
    assert [("RunLost", "firing"), ("RunLost", "resolved")] == desk.told


def test_a_run_lost_for_a_moment_is_told_to_nobody(desk: Desk):
    desk.look("lost")
    desk.clock.advance(5)
    desk.look("running")
    assert ([], "resolved") == (desk.told, desk.only().state)


def test_a_halted_run_fires_at_once_until_it_is_resumed(desk: Desk):
    desk.look("halted", step=40)
    view = desk.only()
    assert ("TrainingHalted", "page", "firing", 40) == (
        view.name,
        view.severity,
        view.state,
        view.step,
    )
    desk.look("halted", step=40)
    desk.look("running", step=41)
    assert [("TrainingHalted", "firing"), ("TrainingHalted", "resolved")] == desk.told


@pytest.mark.parametrize("state", ["finished", "interrupted", "running"])
def test_an_end_that_was_meant_pages_nobody(desk: Desk, state: RunState):
    desk.look(state)
    assert () == desk.listed()


def test_what_is_told_is_what_is_stored_also_where_the_start_moved_while_it_was_pending(
    desk: Desk,
):
    told: list[AlertView] = []
    desk.inbox = Inbox(desk.store, clock=desk.clock, tell=told.append, hush=told.append)
    for seconds in (0, 20):
        desk.clock.advance(seconds)
        desk.look("lost")
    assert [desk.only()] == told


def test_a_lost_run_that_turns_out_to_have_halted_is_one_page_at_a_time(desk: Desk):
    for _ in range(2):
        desk.look("lost")
        desk.clock.advance(15)
    desk.look("halted")
    firing = [view.name for view in desk.listed(state="firing")]
    assert ["TrainingHalted"] == firing


# -------------------------------------------------------------------------- acknowledge, silence


def test_an_acknowledgement_stays_while_the_alert_fires(desk: Desk):
    alert = desk.skip(5)
    desk.inbox.acknowledge(alert.fingerprint, AckRequest(by="alice", reason="looking"))
    desk.skip(6)
    assert "alice" == desk.only().acknowledged_by


def test_a_silenced_alert_is_kept_and_told_to_nobody_until_the_silence_ends(desk: Desk):
    alert = desk.skip(5)
    request = AckRequest(by="alice", reason="known bug", silence_seconds=60)
    view = desk.inbox.acknowledge(alert.fingerprint, request)
    assert ("known bug", desk.clock.time_ns() + 60 * SECOND) == (
        view.silence_reason,
        view.silenced_until_unix_ns,
    )
    assert [alert.fingerprint] == desk.hushed
    desk.look(step=15, trouble=5)
    desk.skip(90)
    assert [("StepSkipped", "firing")] == desk.told
    assert ([], []) == untold(desk.inbox)
    desk.clock.advance(60)
    new, told = untold(desk.inbox)
    assert ([90], []) == ([v.step for v in new], told)
    assert "" == desk.only().silence_reason


@pytest.mark.parametrize(
    "request_",
    [
        AckRequest(by=""),
        AckRequest(by=" "),
        AckRequest(by="x" * 501),
        AckRequest(by="a\nb"),
        AckRequest(by="a", reason="\x1b[0m"),
        AckRequest(by="a", silence_seconds=-1.0, reason="x"),
        AckRequest(by="a", silence_seconds=float("nan"), reason="x"),
        AckRequest(by="a", silence_seconds=float("inf"), reason="x"),
        AckRequest(by="a", silence_seconds=31 * 86_400.0, reason="x"),
        AckRequest(by="a", silence_seconds=60.0),
    ],
)
def test_an_order_without_name_reason_or_end_is_refused(desk: Desk, request_: AckRequest):
    alert = desk.skip(5)
    with pytest.raises(UsageError):
        desk.inbox.acknowledge(alert.fingerprint, request_)
    assert ("", "") == (desk.only().acknowledged_by, desk.only().silence_reason)


def test_an_alert_that_is_not_there_cannot_be_acknowledged(desk: Desk):
    with pytest.raises(UsageError) as caught:
        desk.inbox.acknowledge("../x", AckRequest(by="alice"))
    assert caught.value.code == UNKNOWN


def test_every_order_is_in_the_audit(desk: Desk):
    alert = desk.skip(5)
    desk.inbox.acknowledge(alert.fingerprint, AckRequest(by="alice"))
    desk.inbox.acknowledge(
        alert.fingerprint, AckRequest(by="bob", reason="noise", silence_seconds=60)
    )
    with desk.store.read_transaction() as connection:
        query = select(audit.c.actor, audit.c.action).order_by(audit.c.id)
        rows = [tuple(row) for row in connection.execute(query)]
    assert [("alice", "acknowledge"), ("bob", "silence")] == rows


def test_an_acknowledged_alert_is_not_handed_out_again_but_goes_on_being_posted(desk: Desk):
    alert = desk.skip(5)
    desk.inbox.acknowledge(alert.fingerprint, AckRequest(by="alice"))
    assert ([alert.fingerprint], ([], [desk.only()])) == (desk.hushed, untold(desk.inbox))


def window(*matchers: str, seconds: float = 60.0, starts_unix_ns: int = 0) -> SilenceRequest:
    return SilenceRequest(
        matchers=matchers, by="bob", reason="drill", seconds=seconds, starts_unix_ns=starts_unix_ns
    )


@pytest.mark.parametrize(
    ("matchers", "is_silent"),
    [
        (("name=StepSkipped",), True),
        (("name=~Step.*", "severity=log"), True),
        (("name=~Step",), False),
        (("name=Step.*",), False),
        ((f"run={RUN}", "cause=nonfinite_loss"), True),
        ((f"run={OTHER_RUN}",), False),
        (("severity=page",), False),
        (("node=a",), False),
    ],
)
def test_a_silence_holds_for_what_fits_every_matcher(
    desk: Desk, matchers: tuple[str, ...], is_silent: bool
):
    desk.inbox.silence(window(*matchers))
    alert = desk.skip(5)
    assert is_silent == (desk.told == []) == (desk.only().silence_reason == "drill")
    desk.inbox.silence(window(*matchers))
    assert is_silent == (desk.hushed == [alert.fingerprint])


def silences(desk: Desk) -> list[tuple[tuple[str, ...], int]]:
    views = list_silences(desk.store, now_unix_ns=desk.clock.time_ns())
    return [(view.matchers or (view.fingerprint,), view.num_firing) for view in views]


def test_silences_are_listed_while_they_are_not_over_with_what_each_hides(desk: Desk):
    alert = desk.skip(5)
    desk.inbox.silence(window("name=~Step.*", seconds=300.0))
    desk.inbox.silence(window("name=~Gpu.*", seconds=200.0))
    later = desk.clock.time_ns() + 3_600 * SECOND
    desk.inbox.silence(window("severity=log", starts_unix_ns=later))
    ack = AckRequest(by="bob", reason="noise", silence_seconds=60)
    desk.inbox.acknowledge(alert.fingerprint, ack)
    of_one, gpus, steps = ((alert.fingerprint,), 1), (("name=~Gpu.*",), 0), (("name=~Step.*",), 1)
    window_to_come = (("severity=log",), 0)
    assert [of_one, gpus, steps, window_to_come] == silences(desk)
    desk.clock.advance(250)
    assert [steps, window_to_come] == silences(desk)


def test_a_silence_that_is_ended_early_hides_nothing_more_and_is_in_the_audit(desk: Desk):
    silence = desk.inbox.silence(window("name=~Step.*", seconds=3_600.0))
    alert = desk.skip(5)
    assert ([], "drill") == (desk.told, desk.only().silence_reason)
    desk.clock.advance(10)
    ended = desk.inbox.end_silence(silence.id, EndSilenceRequest(by="carol", reason="it is over"))
    assert (("name=~Step.*",), desk.clock.time_ns()) == (ended.matchers, ended.ends_unix_ns)
    assert ("", []) == (desk.only().silence_reason, silences(desk))
    new, _ = untold(desk.inbox)
    assert [alert.fingerprint] == [view.fingerprint for view in new]
    with desk.store.read_transaction() as connection:
        rows = connection.execute(select(audit.c.actor, audit.c.action, audit.c.detail)).all()
    assert ("carol", "end silence", "it is over") == tuple(rows[-1])


def test_a_window_to_come_is_called_off(desk: Desk):
    later = desk.clock.time_ns() + 60 * SECOND
    to_come = desk.inbox.silence(window("name=~Step.*", starts_unix_ns=later))
    desk.inbox.end_silence(to_come.id, EndSilenceRequest(by="carol"))
    desk.clock.advance(90)
    desk.skip(5)
    assert "" == desk.only().silence_reason


def test_a_silence_that_is_over_or_not_there_cannot_be_ended(desk: Desk):
    silence = desk.inbox.silence(window("name=~Step.*", seconds=60.0))
    with pytest.raises(UsageError, match="by has 0 characters"):
        desk.inbox.end_silence(silence.id, EndSilenceRequest(by=""))
    desk.clock.advance(61)
    for number in (silence.id, 999):
        with pytest.raises(UsageError, match=f"no silence {number} that still holds"):
            desk.inbox.end_silence(number, EndSilenceRequest(by="carol"))


def test_a_maintenance_window_begins_and_ends_by_itself(desk: Desk):
    start = desk.clock.time_ns() + 100 * SECOND
    desk.inbox.silence(window("severity=log", starts_unix_ns=start))
    seen = []
    for cause in ("before", "within", "after"):
        desk.skip(5, cause=cause)
        seen.append(len(desk.told))
        desk.clock.advance(100 if cause == "before" else 60)
    assert [1, 1, 2] == seen
    assert 3 == len(untold(desk.inbox)[0]), "what it hid is told afterwards"


@pytest.mark.parametrize(
    "request_",
    [
        window(),
        window("severity"),
        window("=x"),
        window("name=~("),
        window("a\nb=c"),
        window("name=x", seconds=0),
        window("name=x", seconds=31 * 86_400.0),
        window("name=x", starts_unix_ns=2**62),
    ],
)
def test_a_silence_without_matcher_or_end_is_refused(desk: Desk, request_: SilenceRequest):
    with pytest.raises(UsageError):
        desk.inbox.silence(request_)
    desk.skip(5)
    assert 1 == len(desk.told)


# --------------------------------------------------------------------------------------- restart


def test_what_was_not_settled_is_handed_out_again_after_a_restart(desk: Desk):
    desk.skip(5)
    view = desk.only()
    restarted = desk.reopened()
    assert ([view], []) == untold(restarted)
    settle_alert(desk.store, view)
    assert ([], [view]) == untold(restarted)


def test_a_resolution_that_nobody_heard_is_handed_out_again(desk: Desk):
    desk.skip(5)
    settle_alert(desk.store, desk.only())
    desk.look(step=15, trouble=5)
    assert ([desk.only()], []) == untold(desk.reopened())
    settle_alert(desk.store, desk.only())
    assert ([], []) == untold(desk.reopened())


def test_a_pending_alert_keeps_its_time_over_a_restart(desk: Desk):
    desk.look("lost")
    desk.clock.advance(15)
    desk.inbox = desk.reopened()
    desk.look("lost")
    assert "firing" == desk.only().state


def test_a_late_word_of_a_notifier_does_not_settle_a_newer_state(desk: Desk):
    desk.skip(5)
    fired = desk.only()
    desk.look(step=15, trouble=5)
    settle_alert(desk.store, fired)
    assert ([desk.only()], []) == untold(desk.inbox)


def test_hostile_words_are_kept_as_words(desk: Desk):
    alert = Alert(
        name="StepSkipped",
        severity="log",
        labels={"run": RUN, "cause": "a\0b\"'<script>"},
        summary="x\0" * 5_000,
        step=1,
        point=True,
    )
    desk.inbox.raise_alerts([AlertOccurrence(RUN, 0, alert)], cursors={"decisions/x": 1})
    view = desk.only()
    assert ("ab\"'<script>", "x" * 500) == (view.labels["cause"], view.summary)


def test_a_summary_is_one_line_that_steers_no_terminal(desk: Desk):
    forged = "loss is nan\r\n2026-11-25 ERROR all is well\x1b[2J\u202e"
    alert = Alert(
        name="StepSkipped",
        severity="log",
        labels={"run": RUN, "cause": "x"},
        summary=forged + "y" * 5_000,
        step=7,
        point=True,
    )
    desk.inbox.raise_alerts([AlertOccurrence(RUN, desk.clock.time_ns(), alert)], cursors={})
    summary = desk.only().summary
    assert summary.startswith("loss is nan 2026-11-25 ERROR all is well [2J y")
    assert 500 == len(summary) and summary.isprintable()
