"""Custom alerts in one rank: the loop's calls, and rules over the series that the rank records.

They exist only if the settings have rules or the loop calls ``monitor.alert``. Findings go through
the rank's journal, like those of the detectors. A number on a device is copied without waiting and
checked once it has arrived, within the next steps.
"""

from __future__ import annotations

import difflib
import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from trainer_hooks.exchange.emit import Emitter
from trainer_hooks.failopen import FaultCounter
from trainer_hooks.step.context import RunContext
from trainer_hooks.step.feature import StepFeature
from trainer_hooks.tensors.events import record_event
from trainvitals.detect.user_alerts import KIND, Rule, RuleSet, UserAlerts, WatchedRule
from trainvitals.metrics import STEP_METRICS
from trainvitals.records import AttemptStarted, Finding, FindingRaised, Severity
from trainvitals.rows import Value

MISSING_AFTER = 1_000
"""Steps after which a rule whose series never came is reported."""
_OF_EACH_RANK = frozenset(metric.column for metric in STEP_METRICS if metric.scope == "rank")


class _Call(NamedTuple):
    """A call of the loop, with values on the host."""

    name: str
    is_event: bool
    level: Severity
    message: str
    step: int
    attempt: int


class _PendingAlertCall(NamedTuple):
    """A call whose numbers are being copied to the host."""

    call: _Call
    numbers: Tensor
    """Whether it holds, and its value: NaN without a value."""
    event: torch.cuda.Event

    @property
    def has_arrived(self) -> bool:
        """Return whether the numbers of a custom alert's call have reached the host."""
        has_happened: bool = self.event.query()
        return has_happened


class RankAlerts:
    """Judges this rank's custom alerts; the emitter passes it everything that it writes."""

    def __init__(
        self,
        rules: Sequence[Rule],
        *,
        emitter: Emitter,
        faults: FaultCounter,
        rank: int,
        world_size: int,
    ) -> None:
        self._emitter = emitter
        self._faults = faults
        self._rank = rank if world_size > 1 else -1
        self._alerts = UserAlerts()
        self._rules = RuleSet(rules)
        self._attempt = 0
        self._first_step: int | None = None
        self._late: deque[_PendingAlertCall] = deque()
        by_series = self._rules.by_series
        self._columns = [
            (index, by_series[name], self._rank if name in _OF_EACH_RANK else -1)
            for index, name in enumerate(emitter.columns)
            if name in by_series
        ]
        self._unseen = set(by_series)
        self._scalar_names: set[str] = set()

    def call(
        self,
        name: str,
        when: Tensor | float | None,
        *,
        level: Severity,
        value: Tensor | float | None,
        message: str,
        step: int,
        attempt: int,
    ) -> None:
        """Add a call of ``monitor.alert`` for the feature; tensors are numbers on a device.

        Raises:
            UsageError: there are too many names.
        """
        call = _Call(name, when is None, level, message, step, attempt)
        if not isinstance(when, Tensor) and (when == 0 or not isinstance(value, Tensor)):
            self._apply_alert_call(call, when is None or bool(when), value)
            return
        like = when if isinstance(when, Tensor) else value
        assert isinstance(like, Tensor), "one of the two is on a device"
        numbers = torch.stack(
            [
                _number_on_device(True if when is None else when, like),
                _number_on_device(value, like),
            ]
        )
        # Pinned by torch because it does not wait; the numbers are valid once the event happened.
        numbers = numbers.to("cpu", non_blocking=True)
        self._late.append(_PendingAlertCall(call, numbers, record_event(like.device)))

    def _apply_alert_call(self, call: _Call, holds: bool, value: Tensor | float | None) -> None:
        """Raise or end the custom alert of a ``monitor.alert`` call."""
        if call.attempt != self._attempt:
            return  # from a discarded attempt
        if not holds:
            self._emit_finding(self._alerts.end(call.name))
            return
        value = None if value is None else float(value)
        words = call.message or ("raised by the loop" if value is None else f"value {value:.6g}")
        finding = Finding(
            kind=KIND,
            level="advisory",
            step=call.step,
            detector="loop",
            reason=f"{call.name}: {words}",
            rank=self._rank,
            value=value if value is not None and math.isfinite(value) else None,
            onset_step=call.step,
            cause=call.name,
            severity=call.level,
        )
        self._emit_finding(self._alerts.record_breach(finding, holds=not call.is_event))

    def _apply_arrived_calls(self) -> None:
        """Raise or end the custom alerts whose numbers have reached the host."""
        while self._late and self._late[0].has_arrived:
            call, numbers, _ = self._late.popleft()
            holds, value = numbers.tolist()
            self._apply_alert_call(call, bool(holds), None if math.isnan(value) else value)

    def observe_row(self, step: int, attempt: int, row: Sequence[Value]) -> None:
        """Judge a row for custom alerts, in the emitter's order of columns; renew active ones."""
        with self._faults.fail_open("alerts"):
            if attempt != self._attempt:
                return
            self._apply_arrived_calls()
            for index, rules, rank in self._columns:
                value = row[index]
                if isinstance(value, int | float):
                    self._update_rules(rules, step, float(value), rank)
            for finding in self._alerts.due(step):
                self._emit_finding(finding)
            if self._unseen:
                self._look_for_series(step)

    def observe_scalar(self, name: str, value: float, *, step: int, attempt: int) -> None:
        """Evaluate the custom alert rules about a scalar that the loop recorded."""
        if self._unseen and len(self._scalar_names) < MISSING_AFTER:
            self._scalar_names.add(name)
        rules = self._rules.by_series.get(name)
        if rules is not None and attempt == self._attempt:
            with self._faults.fail_open("alerts"):
                self._update_rules(rules, step, value, self._rank)

    def _update_rules(
        self, rules: Sequence[WatchedRule], step: int, value: float, rank: int
    ) -> None:
        """Judge a value by the custom alert rules about its series."""
        for rule in rules:
            if self._unseen:
                self._unseen.discard(rule.condition.series)
            if rule.update(step, value):
                self._emit_finding(self._alerts.record_breach(rule.finding(step, rank), holds=True))
            elif rule.rule.name in self._alerts.held:
                self._emit_finding(self._alerts.end(rule.rule.name))

    def _look_for_series(self, step: int) -> None:
        """Note custom alert rules whose series was never recorded."""
        if self._first_step is None:
            self._first_step = step
        if step - self._first_step < MISSING_AFTER:
            return
        recorded = [*self._scalar_names, *self._emitter.columns]
        for series in sorted(self._unseen):
            names = [rule.rule.name for rule in self._rules.by_series[series]]
            near = difflib.get_close_matches(series, recorded, n=1)
            way_out = f"did you mean {near[0]}?" if near else "monitor.observe() records scalars"
            if series in self._emitter.columns:
                way_out = "this run does not measure it"
            text = (
                f"rule {', '.join(map(repr, names))} has nothing to judge: in {MISSING_AFTER:,} "
                f"steps no value of {series} was recorded on rank 0; {way_out}"
            )
            self._emitter.note("rule_without_series", text, step=step, attempt=self._attempt)
        self._unseen.clear()

    def _emit_finding(self, finding: Finding | None) -> None:
        """Write the event of a custom alert that this rank raised, if there is one."""
        if finding is not None:
            event = FindingRaised(finding=finding)
            self._emitter.event(event, step=finding.step, attempt=self._attempt)

    def state_dict(self) -> dict[str, Any]:
        """Return the windows of the custom alert rules.

        Alerts that the loop raises by calls are not saved: it repeats a call as long as its
        condition holds.
        """
        return self._rules.state_dict()

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restore the alert rules' windows from a restored state; None: they start empty."""
        with self._faults.fail_open("alerts"):
            for rules in self._rules.by_series.values():
                for rule in rules:
                    rule.reset()
            if state is not None:
                self._rules.load_state_dict(state)

    def begin(self, attempt: int, step: int) -> None:
        """Continue custom alerts as an attempt from ``step``; calls of a discarded one are void."""
        self._attempt = attempt
        self._alerts.roll_back(step)

    def close(self) -> None:
        """Process numbers of custom alerts that have reached the host since the last step."""
        with self._faults.fail_open("alerts"):
            self._apply_arrived_calls()


class UserAlertsFeature(StepFeature):
    """Custom alerts of the run: created at the first rule or call, so others cost nothing.

    It adds no numbers to the vector: each rank judges its own rows, and the collector merges them.
    """

    state_key = "alerts"

    def __init__(self, run: RunContext) -> None:
        super().__init__(run)
        self._alerts: RankAlerts | None = None

    @classmethod
    def make(cls, run: RunContext) -> Self:
        """Return the feature, with the rules of the settings file."""
        feature = cls(run)
        if run.judge.config.rules:
            feature.alerts()
        return feature

    @property
    def is_used(self) -> bool:
        """Whether the run has a rule, or its loop has called ``monitor.alert``."""
        return self._alerts is not None

    def alerts(self) -> RankAlerts:
        """Return the judge of this rank's alerts, created at the first call."""
        if self._alerts is None:
            run = self._run
            self._alerts = RankAlerts(
                run.judge.config.rules,
                emitter=run.emitter,
                faults=run.faults,
                rank=run.ranks.rank,
                world_size=run.ranks.world_size,
            )
            run.emitter.observer = self._alerts
            self._alerts.begin(run.attempt, 0)
        return self._alerts

    def on_attempt(self, attempt: AttemptStarted) -> None:
        """Void the loop's calls that belong to a discarded attempt."""
        if self._alerts is not None:
            self._alerts.begin(attempt.id, attempt.fork_step)

    def state_dict(self) -> dict[str, Any] | None:
        """Return the rules' windows; None without alerts."""
        return None if self._alerts is None else self._alerts.state_dict()

    def load_state_dict(self, state: Mapping[str, Any] | None, *, step: int) -> None:
        """Restore the windows of the alert rules."""
        if self._alerts is not None:
            self._alerts.load_state_dict(state)

    def close(self) -> None:
        """Process the numbers that have reached the host since the last step."""
        if self._alerts is not None:
            self._alerts.close()


def _number_on_device(value: Tensor | float | None, like: Tensor) -> Tensor:
    """Return an alert's number on ``like``'s device; a kernel writes a plain one: no waiting."""
    if isinstance(value, Tensor):
        return value.to(like)
    return torch.full_like(like, math.nan if value is None else float(value))
