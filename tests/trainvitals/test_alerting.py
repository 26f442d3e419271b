import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainvitals.alerting import (
    ALERTED_KINDS,
    ALERTS,
    AlertState,
    AlertStatus,
    advance,
    alerts_for_decision,
    alerts_for_finding,
    alerts_for_run_state,
    fingerprint,
    is_answered,
    point_is_over,
)
from trainvitals.detect.fleet import FleetDetectors
from trainvitals.errors import ConfigError
from trainvitals.records import Decision, Finding

RUN = "01ARZ3NDEKTSV4RRFFQ69G5FAV"


def course(breaches: str, *, hold_seconds: float) -> str:
    """Return one letter per second: inactive, pending, firing, resolved."""
    status, letters = AlertStatus(), ""
    for now, breach in enumerate(breaches):
        status = advance(status, breached=breach == "!", now=now, hold_seconds=hold_seconds)
        letters += status.state[0]
    return letters


@pytest.mark.parametrize(
    ("breaches", "hold_seconds", "states"),
    [
        ("..!!!!..", 2, "iippffri"),
        ("!.", 0, "fr"),
        (".!!.!!!.", 2, "ippippfr"),
        ("!!!.!!!", 1, "pffrpff"),
        ("....", 0, "iiii"),
    ],
)
def test_an_alert_lives_by_the_clock_it_is_given(
    breaches: str, hold_seconds: float, states: str
) -> None:
    assert states == course(breaches, hold_seconds=hold_seconds)


def test_a_clock_that_goes_back_neither_fires_nor_unfires() -> None:
    status = advance(AlertStatus(), breached=True, now=100.0, hold_seconds=5)
    status = advance(status, breached=True, now=50.0, hold_seconds=5)
    assert AlertState.PENDING is status.state
    status = advance(status, breached=True, now=55.0, hold_seconds=5)
    assert AlertState.FIRING is status.state, "the hold began anew, and is no longer than it was"
    status = advance(status, breached=True, now=105.0, hold_seconds=5)
    assert AlertState.FIRING is status.state
    status = advance(status, breached=True, now=50.0, hold_seconds=5)
    assert AlertState.FIRING is status.state


labels = st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=4)


@given(st.text(max_size=5), labels)
def test_a_fingerprint_does_not_depend_on_the_order_of_labels(
    name: str, some: dict[str, str]
) -> None:
    backwards = dict(reversed(some.items()))
    assert fingerprint(name, some) == fingerprint(name, backwards)
    assert re.fullmatch(r"[0-9a-f]{16}", fingerprint(name, some))


def test_labels_cannot_be_pushed_together_to_another_alerts_fingerprint() -> None:
    assert fingerprint("A", {"b": "c,d"}) != fingerprint("A", {"b": "c", "d": ""})
    assert fingerprint("A", {}) != fingerprint("", {"A": ""})


def test_a_fingerprint_stays_what_it_was() -> None:
    assert "5d875b843871283d" == fingerprint("RunLost", {"run": RUN})


def decision(action: str, **fields: object) -> Decision:
    values: dict[str, object] = {
        "ledger_seq": 1, "action": action, "step": 7, "decided_at_step": 8, "attempt": 1,
        "reason": "it went wrong", "rule": "test", "cause": "nonfinite_loss", "budget_left": 2,
    }  # fmt: skip
    return Decision(**(values | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (decision("continue"), []),
        (decision("skip_step"), [("log", "StepSkipped")]),
        (decision("accept_level"), [("notify", "LevelShiftAccepted")]),
        (decision("rollback"), [("notify", "TrainingRolledBack")]),
        (
            decision("rollback", budget_left=0),
            [("notify", "TrainingRolledBack"), ("page", "RollbackBudgetLow")],
        ),
        (
            decision("rollback", rule="lr_jump"),
            [("notify", "TrainingRolledBack"), ("page", "LearningRateHeld")],
        ),
        (decision("halt"), [("page", "TrainingHalted")]),
        (decision("skip_step", mode="observe", acted=False), []),
        (decision("rollback", mode="observe", acted=False), [("notify", "TroubleObserved")]),
        (decision("halt", mode="observe", acted=False), [("notify", "TroubleObserved")]),
    ],
    ids=lambda value: value.action if isinstance(value, Decision) else "",
)
def test_a_decision_raises_alerts_by_who_must_act(
    entry: Decision, expected: list[tuple[str, str]]
) -> None:
    raised = alerts_for_decision(entry, run_id=RUN)
    assert expected == [(alert.severity, alert.name) for alert in raised]
    assert all(RUN == alert.labels["run"] and 7 == alert.step for alert in raised)
    assert all("it went wrong" in alert.summary for alert in raised)


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("running", []),
        ("finished", []),
        ("interrupted", []),
        ("failed", [("notify", "RunFailed")]),
        ("halted", [("page", "TrainingHalted")]),
        ("lost", [("page", "RunLost")]),
    ],
)
def test_only_a_lost_or_halted_run_pages(state: str, expected: list[tuple[str, str]]) -> None:
    raised = alerts_for_run_state(state, run_id=RUN)  # type: ignore[arg-type]
    assert expected == [(alert.severity, alert.name) for alert in raised]


def finding(kind: str, cause: str = "", step: int = 7) -> Finding:
    return Finding(
        kind=kind, level="advisory", step=step, detector="x", reason="it looks bad", cause=cause
    )


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (finding("divergence", "loss_divergence"), ("notify", "LossDiverged")),
        (finding("stalled"), ("page", "TrainingStalled")),
        (finding("state_damaged"), ("page", "StateDamaged")),
        (finding("nonfinite_streak"), ("page", "NonFiniteStreak")),
        (finding("lost_progress"), ("page", "ProgressLost")),
        (finding("collapse"), ("notify", "LossCollapsed")),
        (finding("plateau", "never_learned"), ("notify", "LossPlateau")),
        (finding("lr_jump"), ("notify", "LearningRateAnomaly")),
        (finding("gpu_xid", "xid_fatal"), ("notify", "GpuFault")),
        (finding("gpu_xid", "xid"), ("log", "GpuErrors")),
        (finding("gpu_ecc", "ecc_uncorrected"), ("notify", "GpuFault")),
        (finding("gpu_ecc", "ecc_corrected"), ("log", "GpuErrors")),
        (finding("gpu_throttle", "gpu_thermal"), ("notify", "GpuThrottled")),
        (finding("gpu_throttle", "gpu_power_cap"), ("log", "GpuPowerCapped")),
        (finding("loss_scale", "loss_scale_collapse"), ("notify", "LossScaleCollapsed")),
        (finding("loss_scale", "overflow_rate"), ("log", "LossScaleOverflows")),
        (finding("layer_gradient"), ("log", "LayerOutlier")),
    ],
    ids=lambda value: value.cause or value.kind if isinstance(value, Finding) else "",
)
def test_a_finding_that_no_decision_follows_raises_an_alert_of_its_own(
    told: Finding, expected: tuple[str, str]
) -> None:
    (alert,) = alerts_for_finding(told, run_id=RUN)
    assert expected == (alert.severity, alert.name)
    assert (told.cause or told.kind, 7) == (alert.labels["cause"], alert.step)
    assert "it looks bad" == alert.summary


@pytest.mark.parametrize("kind", ["nonfinite", "level_shift", "what nobody knows", ""])
def test_a_finding_that_a_decision_tells_raises_none(kind: str) -> None:
    assert () == alerts_for_finding(finding(kind), run_id=RUN)
    assert kind not in ALERTED_KINDS


@pytest.mark.parametrize("kind", ["lost_progress", "plateau", "collapse", "divergence"])
def test_the_level_of_a_loss_that_is_not_minimized_is_only_logged(kind: str) -> None:
    for loss_kind in ("rl", "adversarial"):
        (alert,) = alerts_for_finding(finding(kind), run_id=RUN, loss_kind=loss_kind)
        assert "log" == alert.severity
    (damaged,) = alerts_for_finding(finding("state_damaged"), run_id=RUN, loss_kind="rl")
    assert "page" == damaged.severity


def test_a_damaged_state_is_answered_by_going_back_and_not_by_a_skip() -> None:
    damaged = msgspec.structs.replace(finding("state_damaged"), level="actionable")
    spike = msgspec.structs.replace(finding("spike"), level="actionable")
    assert not is_answered(damaged, {"skip_step"}) and is_answered(spike, {"skip_step"})
    assert is_answered(damaged, {"skip_step", "rollback"}) and is_answered(damaged, {"halt"})
    assert not is_answered(spike, ()) and not is_answered(finding("plateau"), {"rollback"})


def test_a_jump_of_the_rate_is_one_alert_whether_job_or_collector_saw_it() -> None:
    (in_job,) = alerts_for_finding(finding("lr_jump"), run_id=RUN)
    (watched,) = alerts_for_finding(finding("learning_rate", "lr_jump"), run_id=RUN)
    assert in_job.fingerprint == watched.fingerprint


def test_every_kind_that_watchers_tell_raises_an_alert() -> None:
    watchers = FleetDetectors().state_dict()["watchers"]
    kinds = {"gpu_error": ("gpu_ecc", "gpu_xid")}
    told = {kind for name in watchers for kind in kinds.get(name, (name,))}
    assert told | {"stalled", "checkpoint_overdue"} <= ALERTED_KINDS


def test_findings_of_one_cause_are_one_alert() -> None:
    (first,) = alerts_for_finding(finding("straggler", step=7), run_id=RUN)
    (second,) = alerts_for_finding(finding("straggler", step=9), run_id=RUN)
    assert first.fingerprint == second.fingerprint


def test_a_halt_pages_once_whether_the_decision_or_the_state_says_it() -> None:
    (by_decision,) = alerts_for_decision(decision("halt"), run_id=RUN)
    (by_state,) = alerts_for_run_state("halted", run_id=RUN)
    assert by_decision.fingerprint == by_state.fingerprint


def test_skips_of_one_cause_are_one_alert() -> None:
    (first,) = alerts_for_decision(decision("skip_step"), run_id=RUN)
    (second,) = alerts_for_decision(decision("skip_step", step=9, ledger_seq=2), run_id=RUN)
    assert first.fingerprint == second.fingerprint


@pytest.mark.parametrize(
    ("last_step", "last_unhealthy_step", "over"),
    [(150, -1, False), (199, 100, False), (200, 100, True), (200, 130, False), (230, 130, True)],
)
def test_a_point_event_is_over_after_healthy_steps(
    last_step: int, last_unhealthy_step: int, over: bool
) -> None:
    assert over == point_is_over(
        raised_step=100,
        last_step=last_step,
        last_unhealthy_step=last_unhealthy_step,
        healthy_steps=100,
    )


def test_a_point_event_needs_at_least_one_healthy_step() -> None:
    with pytest.raises(ConfigError, match="healthy_steps is 0"):
        point_is_over(raised_step=1, last_step=2, last_unhealthy_step=0, healthy_steps=0)


def test_every_alert_has_one_name_and_says_what_it_means() -> None:
    names = [spec.name for spec in ALERTS]
    assert sorted(set(names)) == sorted(names)
    assert all(re.fullmatch(r"([A-Z][a-z]+)+", name) for name in names)
    for spec in ALERTS:
        for text in (spec.help, spec.did, spec.to_do, spec.ends):
            assert text.endswith("."), (spec.name, text)


def test_a_condition_says_itself_when_it_is_over() -> None:
    assert all(spec.point == ("100 healthy steps" in spec.ends) for spec in ALERTS)
