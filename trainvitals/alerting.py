"""The life of an alert, and what becomes one. Reads no clock, sends nothing.

Severity says who must act: *page* a human, now; *notify* nobody, Vitals acted; *log* nobody, it was
one step. Point events (a decision) fire at once and resolve after the run stayed healthy for some
steps; conditions (a lost run) resolve when the condition ends.
"""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from trainvitals.errors import ConfigError
from trainvitals.records import Decision
from trainvitals.views import RunState, Severity


class AlertState(enum.StrEnum):
    """Where an alert is in its life."""

    INACTIVE = "inactive"
    PENDING = "pending"
    FIRING = "firing"
    RESOLVED = "resolved"


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertStatus:
    """An alert's state, and since when its condition holds."""

    state: AlertState = AlertState.INACTIVE
    active_since: float | None = None


def advance(status: AlertStatus, *, breached: bool, now: float, hold_seconds: float) -> AlertStatus:
    """Return the alert's next status.

    A condition must hold for ``hold_seconds`` before it fires (0: at once); one that ends while
    pending leaves no trace; one that fired is resolved. A clock that went back delays, never fires.
    """
    if not breached:
        was_firing = status.state is AlertState.FIRING
        return AlertStatus(state=AlertState.RESOLVED if was_firing else AlertState.INACTIVE)
    since = now if status.active_since is None else status.active_since
    held = status.state is AlertState.FIRING or now - since >= hold_seconds
    return AlertStatus(state=AlertState.FIRING if held else AlertState.PENDING, active_since=since)


def fingerprint(name: str, labels: Mapping[str, str]) -> str:
    """Return 16 hexadecimal characters that name the alert: equal for equal name and labels."""
    text = json.dumps([name, sorted(labels.items())], ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertSpec:
    """One alert Vitals can raise."""

    name: str
    severity: Severity
    help: str
    """What it means and what to do."""
    point: bool
    """A point event: resolves after healthy steps. Otherwise when the run's state changes."""


ALERTS: tuple[AlertSpec, ...] = (
    AlertSpec(
        name="TrainingHalted",
        severity="page",
        point=False,
        help="The ladder gave up and the run stopped. Read the reason, then `vitals resume RUN`.",
    ),
    AlertSpec(
        name="RunLost",
        severity="page",
        point=False,
        help="A running run said nothing more and did not say goodbye. Look at its node.",
    ),
    AlertSpec(
        name="RollbackBudgetLow",
        severity="page",
        point=True,
        help="The last rollback of the budget was spent: the next trouble halts the run.",
    ),
    AlertSpec(
        name="TrainingRolledBack",
        severity="notify",
        point=True,
        help="Vitals went back to a healthy checkpoint and moved past the data. Nothing to do.",
    ),
    AlertSpec(
        name="LevelShiftAccepted",
        severity="notify",
        point=True,
        help="A lasting change of loss or gradient norm is the new normal. Check the data.",
    ),
    AlertSpec(
        name="TroubleObserved",
        severity="notify",
        point=True,
        help="Mode is observe: Vitals would have rolled back or halted, and did nothing.",
    ),
    AlertSpec(
        name="RunFailed",
        severity="notify",
        point=False,
        help="The training program ended with an error of its own.",
    ),
    AlertSpec(
        name="StepSkipped",
        severity="log",
        point=True,
        help="One update was not applied, because it would have harmed the model.",
    ),
)
"""Every alert; docs and rules are derived from it."""

_BY_NAME = {spec.name: spec for spec in ALERTS}


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    """An alert as it is raised: what is known at that moment."""

    name: str
    severity: Severity
    labels: dict[str, str]
    summary: str
    step: int = -1
    point: bool = False

    @property
    def fingerprint(self) -> str:
        """The alert's identity: raised again, it is the same alert."""
        return fingerprint(self.name, self.labels)


def alerts_for_decision(decision: Decision, *, run_id: str) -> tuple[Alert, ...]:
    """Return the alerts that a ledger entry raises; in ``observe`` only the grave ones."""
    step, reason = decision.step, decision.reason
    if decision.action == "continue":
        return ()
    if decision.mode == "observe":
        if decision.action not in ("rollback", "halt"):
            return ()
        return (_raise("TroubleObserved", run_id, f"would {decision.action}: {reason}", step),)
    if decision.action == "halt":
        return (_raise("TrainingHalted", run_id, reason, step),)
    if decision.action == "accept_level":
        return (_raise("LevelShiftAccepted", run_id, reason, step, decision.cause),)
    if decision.action == "skip_step":
        return (_raise("StepSkipped", run_id, reason, step, decision.cause),)
    done = _raise("TrainingRolledBack", run_id, reason, step, decision.cause)
    if decision.budget_left != 0:
        return (done,)
    low = f"no rollback is left; the last one: {reason}"
    return (done, _raise("RollbackBudgetLow", run_id, low, step))


def alerts_for_run_state(
    state: RunState, *, run_id: str, step: int = -1, reason: str = ""
) -> tuple[Alert, ...]:
    """Return the alerts that hold while a run is in ``state``; the others of the run's are over."""
    if state == "lost":
        return (_raise("RunLost", run_id, reason or "the run went silent", step),)
    if state == "halted":
        return (_raise("TrainingHalted", run_id, reason or "the run halted", step),)
    if state == "failed":
        return (_raise("RunFailed", run_id, reason or "the run ended with an error", step),)
    return ()


def point_is_over(
    *, raised_step: int, last_step: int, last_unhealthy_step: int, healthy_steps: int = 100
) -> bool:
    """Say whether a point event resolves: the run was healthy for ``healthy_steps`` since.

    After a rollback steps count again from an earlier one, so the event stays until the run has
    come past the trouble.
    """
    if healthy_steps < 1:
        raise ConfigError(f"healthy_steps is {healthy_steps}; it must be at least 1")
    return last_step >= max(raised_step, last_unhealthy_step) + healthy_steps


def _raise(name: str, run_id: str, summary: str, step: int, cause: str = "") -> Alert:
    spec = _BY_NAME[name]
    labels = {"run": run_id} | ({"cause": cause} if cause else {})
    return Alert(
        name=name,
        severity=spec.severity,
        labels=labels,
        summary=summary,
        step=step,
        point=spec.point,
    )
