"""Applies Vitals' detectors and policy to the log of a run that it never watched.

Findings and decisions are those of ``judge_history``: the product's own detectors and policy. They
are grouped into alarms, and each alarm is compared with the rest of the log: whether the loss
recovered by itself, training was restarted from an earlier step, or neither.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import msgspec

from trainvitals.alerting import alerts_for_decision, alerts_for_finding
from trainvitals.detect.posttraining.charts import quantity_charts
from trainvitals.detect.posttraining.names import TASKS, is_of_policy, is_reward
from trainvitals.detect.posttraining.set import PostTrainingDetectors
from trainvitals.detect.registry import KINDS as FINDING_KINDS
from trainvitals.document.blocks import Block, Heading, Paragraph, TableBlock
from trainvitals.judged_log import Cadence, JudgedStep, LoggedStep
from trainvitals.records import SEVERITY_WORDS, Finding, Severity
from trainvitals.units import humanize_count, humanize_seconds
from vitals_collector.report.charts import CurvePlot
from vitals_collector.report.curves import CurveMark, PlottedCurve, decision_mark, log_curve
from vitals_plugins.bridges.importers import ImportedLog

NEAR_ROWS = 20
"""Findings of one kind at most this many records apart are one alarm."""
REFERENCE_ROWS, RECOVERY_ROWS = 50, 10
"""Records before an onset whose median is the reference loss, and consecutive ones that must reach
it again."""
TOLERANCE = 0.05
"""Share of that median by which it may be higher, at least."""
_SCALARS = "scalars"
"""Subject of findings on post-training scalars."""
_COLLAPSED = "collapse"
_SLOW = frozenset({"divergence", "lost_progress", "plateau"})
"""Kinds of findings about the level of the loss: the same rise is reported again while it lasts."""
PROMPT_ROWS = 100
"""Records within which a loss that came back by itself makes an action look unnecessary."""
MAX_LINES = 200
_GRAVITY = ("page", "notify", "log")
_ACTIONS = {
    "halt": "stop the run",
    "rollback": "roll back",
    "accept_level": "accept the new level",
    "skip_step": "skip",
}
"""Actions, the most severe first."""

Ending = Literal["recovered", "restarted", "not recovered", "log ends", "unknown"]


@dataclass(slots=True)
class LogAlarm:
    """Findings and decisions that are close together."""

    domain: str
    first_row: int
    last_row: int
    """Positions in the log."""
    first_step: int
    last_step: int
    onset_step: int
    kinds: dict[str, None] = field(default_factory=dict)
    reasons: dict[str, int] = field(default_factory=dict)
    """Reasons, each with its first step."""
    actions: dict[str, int] = field(default_factory=dict)
    """Actions and their number, up to the first rollback or halt: from then on it would have been
    another run."""
    further: dict[str, int] = field(default_factory=dict)
    """Actions after that, if it had changed nothing."""
    is_flat: bool = False
    """Whether it started as a loss that never falls: it ends differently."""
    severity: Severity = "log"
    acted_step: int | None = None
    """At which step it would have been rolled back or stopped, or paged for."""
    has_acted: bool = False
    """Whether it would have been rolled back or stopped: the first time counts."""
    rollback_to: int | None = None
    ending: Ending = "unknown"
    end_step: int = 0
    """Step at which it recovered, training was restarted, or the log ends."""
    end_rows: int = 0
    """Records from the onset to there."""
    back_to: int | None = None
    """Step from which training was restarted."""

    @property
    def action(self) -> str:
        """Return Vitals' most severe action in this part of the audited log; "" for none."""
        return next((name for name in _ACTIONS if name in self.actions), "")

    @property
    def is_false_alarm(self) -> bool:
        """Return whether it would have alerted, or undone work, for a passing problem."""
        disturbs = self.severity == "page" or self.action in ("rollback", "halt")
        return disturbs and self.ending == "recovered" and self.end_rows <= PROMPT_ROWS

    @property
    def lost_steps(self) -> int | None:
        """Return the steps that the actual run lost; None if the log does not show it."""
        if self.ending in ("unknown", "log ends"):
            return None
        begin = self.onset_step if self.back_to is None else min(self.back_to, self.onset_step)
        return max(0, self.end_step - begin)

    @property
    def cost_steps(self) -> int:
        """Return the steps that what Vitals would have done in the audited run costs."""
        if self.action == "rollback" and self.rollback_to is not None:
            return max(0, (self.acted_step or self.onset_step) - self.rollback_to)
        if self.action == "halt":
            return max(0, (self.acted_step or self.onset_step) - self.onset_step)
        return self.actions.get("skip_step", 0)

    @property
    def saved_steps(self) -> int:
        """Return the steps that Vitals' actions would have saved in the audited run."""
        if (
            self.action not in ("rollback", "halt")
            or self.is_false_alarm
            or self.lost_steps is None
        ):
            return 0
        return max(0, self.lost_steps - self.cost_steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """Result of the audit of a log."""

    history: ImportedLog
    cadence: Cadence
    task: str
    """Kind of a post-training run; empty: another run."""
    alarms: Sequence[LogAlarm]
    marks: Sequence[CurveMark]
    step_seconds: float | None
    """The usual duration of a step; None if the log does not show it."""
    gpus: int
    assumptions: Sequence[str]
    lacking: Sequence[str]
    """Checks for which the log is too short, and the required length."""


class AuditedAlarm(msgspec.Struct, frozen=True, kw_only=True):
    """One alarm of an audit in JSON."""

    onset_step: int
    first_step: int
    last_step: int
    kinds: tuple[str, ...]
    reasons: tuple[str, ...]
    actions: dict[str, int]
    """Actions and their number, up to the first rollback or halt."""
    severity: Severity
    acted_step: int | None
    """Step at which the run would have been rolled back, stopped or paged for."""
    rollback_to: int | None
    ending: Ending
    end_step: int


class AuditDocument(msgspec.Struct, frozen=True, kw_only=True):
    """Audit of a log in JSON."""

    log: str
    num_steps: int
    step_seconds: float | None
    alarms: tuple[AuditedAlarm, ...]
    assumptions: tuple[str, ...]
    lacking: tuple[str, ...]
    """Checks for which the log is too short, and the required length."""


def audit_document(result: Audit, log: str) -> AuditDocument:
    """Return an audit for JSON."""
    return AuditDocument(
        log=log,
        num_steps=len(result.history.steps),
        step_seconds=result.step_seconds,
        alarms=tuple(
            AuditedAlarm(
                onset_step=alarm.onset_step,
                first_step=alarm.first_step,
                last_step=alarm.last_step,
                kinds=tuple(alarm.kinds),
                reasons=tuple(alarm.reasons),
                actions=alarm.actions,
                severity=alarm.severity,
                acted_step=alarm.acted_step,
                rollback_to=alarm.rollback_to,
                ending=alarm.ending,
                end_step=alarm.end_step,
            )
            for alarm in result.alarms
        ),
        assumptions=tuple(result.assumptions),
        lacking=tuple(result.lacking),
    )


def audit(
    history: ImportedLog,
    judged_steps: Iterable[JudgedStep],
    cadence: Cadence,
    *,
    loss_kind: str,
    gpus: int,
    task: str = "",
    expected: Sequence[int] = (),
    assumptions: Sequence[str],
    lacking: Sequence[str] = (),
) -> Audit:
    """Group the alarms of an audited log, and compare each with the rest of the log.

    Args:
        history: the log.
        judged_steps: results of ``judge_history`` for each record.
        cadence: distance of its steps.
        loss_kind: kind of its loss.
        gpus: number of GPUs; 0: unknown.
        task: kind of a post-training run, whose scalars are judged too.
        expected: steps of planned changes.
        assumptions: the assumptions that were needed, as sentences.
        lacking: what the log is too short for, as sentences.
    """
    alarms: list[LogAlarm] = []
    marks: list[CurveMark] = []
    places = {logged.row: index for index, logged in enumerate(history.steps)}
    of_scalars = _judge_scalars(history.steps, task, cadence, expected)
    for judged in judged_steps:
        index = places[judged.row]
        _add_alarms(judged, of_scalars.get(index, ()), index, alarms, marks, loss_kind)
    restarts = sorted(cadence.restarts)
    before: _Trouble | None = None
    for alarm in alarms:
        before = _judge_ending(alarm, history.steps, restarts, before) or before
    return Audit(
        history=history,
        cadence=cadence,
        task=task,
        alarms=alarms,
        marks=marks,
        step_seconds=_step_seconds(history.steps),
        gpus=gpus,
        assumptions=assumptions,
        lacking=lacking,
    )


def _judge_scalars(
    log: Sequence[LoggedStep], task: str, cadence: Cadence, expected: Sequence[int]
) -> dict[int, tuple[Finding, ...]]:
    """Return the findings on an audited log's post-training scalars, by position."""
    detectors = PostTrainingDetectors(task)
    announced = sorted(expected, reverse=True)
    findings: dict[int, tuple[Finding, ...]] = {}
    attempt = 1
    for index, logged in enumerate(log):
        attempt += index in cadence.restarts
        if announced and announced[-1] <= logged.step:
            detectors.expect_change()
        while announced and announced[-1] <= logged.step:
            announced.pop()
        if logged.scalars:
            findings[index] = detectors.update(
                logged.scalars, step=logged.step, attempt=attempt, time_unix_ns=0
            )
    return findings


def _add_alarms(
    judged: JudgedStep,
    of_scalars: Sequence[Finding],
    index: int,
    alarms: list[LogAlarm],
    marks: list[CurveMark],
    loss_kind: str,
) -> None:
    """Add the findings and decisions on an audited record to the alarms."""
    decision = judged.judgement.decision
    for finding in (*judged.judgement.findings, *of_scalars):
        kind = FINDING_KINDS.get(finding.kind)
        domain: str = "numbers" if kind is None else kind.domain
        if finding in of_scalars:
            domain = _SCALARS  # the loss does not show how it ended
        alarm = _alarm_at(index, domain, alarms, finding.step, finding.onset_step)
        if not alarm.kinds:
            alarm.is_flat = (finding.kind, finding.detector) == ("plateau", "loss_progress")
        alarm.kinds[finding.kind] = None
        alarm.onset_step = min(alarm.onset_step, finding.onset_step, finding.step)
        _extend_alarm(alarm, index, finding.step, finding.reason)
        for raised in alerts_for_finding(finding, run_id="", loss_kind=loss_kind):
            _raise_severity(alarm, raised.severity, finding.step)
    if decision is None or decision.action == "continue":
        return
    alarm = _alarm_at(index, "numbers", alarms, decision.step, decision.step)
    _extend_alarm(alarm, index, decision.step, decision.reason)
    counts = alarm.further if alarm.has_acted else alarm.actions
    counts[decision.action] = counts.get(decision.action, 0) + 1
    for raised in alerts_for_decision(decision, run_id=""):
        _raise_severity(alarm, raised.severity, decision.step)
    if alarm.has_acted:
        return
    if decision.action in ("rollback", "halt"):
        alarm.has_acted, alarm.acted_step = True, decision.step
        alarm.rollback_to = decision.rollback_to_step if decision.action == "rollback" else None
    marks.append(decision_mark(decision))


def _alarm_at(
    index: int, domain: str, alarms: list[LogAlarm], step: int, onset_step: int
) -> LogAlarm:
    """Return the audit's alarm that continues at this record, or a new one."""
    for alarm in reversed(alarms[-8:]):
        if alarm.domain == domain and index - alarm.last_row <= NEAR_ROWS:
            return alarm
    alarm = LogAlarm(
        domain=domain,
        first_row=index,
        last_row=index,
        first_step=step,
        last_step=step,
        onset_step=min(onset_step, step),
    )
    alarms.append(alarm)
    return alarm


def _extend_alarm(alarm: LogAlarm, index: int, step: int, reason: str) -> None:
    alarm.last_row = index
    alarm.first_step, alarm.last_step = min(alarm.first_step, step), max(alarm.last_step, step)
    if len(alarm.reasons) < MAX_LINES:
        alarm.reasons.setdefault(reason, step)


def _raise_severity(alarm: LogAlarm, severity: Severity, step: int) -> None:
    """Raise an audit alarm's severity, unless it has already acted."""
    if not alarm.has_acted and _GRAVITY.index(severity) < _GRAVITY.index(alarm.severity):
        alarm.severity = severity
        if severity == "page" and alarm.acted_step is None:
            alarm.acted_step = step


# ---------------------------------------------------------------------------- what came afterwards


class _Trouble(NamedTuple):
    """Records of the log in which the loss was not at its reference."""

    onset: int
    end: int
    """First and last position."""
    is_back: Callable[[LoggedStep], bool]


def _judge_ending(
    alarm: LogAlarm, log: Sequence[LoggedStep], restarts: Sequence[int], before: _Trouble | None
) -> _Trouble | None:
    """Set how an audit's alarm ended, from the log after it; return the trouble it reported.

    The reference loss comes from before the onset: when a detector reports a slow rise, the records
    just before the report are part of the rise. The duration also counts from the onset. A rise
    that is reported again keeps the onset of the first report.
    """
    restart = next((index for index in restarts if index > alarm.first_row), None)
    stop = len(log) if restart is None else restart
    onset = _place_of_onset(alarm, log, restarts)
    is_back = _recovery_test(alarm, log, onset)
    if before is not None and before.onset < onset <= before.end and _SLOW & alarm.kinds.keys():
        onset, is_back = before.onset, before.is_back
    if alarm.domain != "numbers" or is_back is None:
        alarm.end_step = log[stop - 1].step
        return None
    at = _find_recovery(log, min(alarm.last_row + 1, stop), stop, is_back)
    if at is not None:
        alarm.ending = "recovered"
    elif restart is not None:
        alarm.ending, alarm.back_to, at = "restarted", log[restart].step, stop - 1
    else:
        alarm.ending, at = _ending_at_log_end(alarm, log, onset, is_back), stop - 1
    alarm.end_step, alarm.end_rows = log[at].step, at - onset
    return None if alarm.is_flat else _Trouble(onset, at, is_back)


def _place_of_onset(alarm: LogAlarm, log: Sequence[LoggedStep], restarts: Sequence[int]) -> int:
    """Return the position of the audited problem's first record, in the same start of the run."""
    begin = max((index for index in restarts if index <= alarm.first_row), default=0)
    index = alarm.first_row
    while index > begin and alarm.onset_step <= log[index - 1].step:
        index -= 1
    return index


def _recovery_test(
    alarm: LogAlarm, log: Sequence[LoggedStep], onset: int
) -> Callable[[LoggedStep], bool] | None:
    """Return a test whether an audited record shows recovery; None if the log cannot show it."""
    before = log[max(0, onset - REFERENCE_ROWS) : onset]
    if alarm.is_flat:
        # A loss that did not fall has no earlier level: the problem ends when the loss falls.
        before = log[onset : alarm.last_row + 1][-REFERENCE_ROWS:]
    if (band := _reference_loss_range(before)) is not None:
        low, high = band
        if alarm.is_flat:
            return lambda logged: _loss_or_nan(logged) < low
        if _COLLAPSED in alarm.kinds:
            return lambda logged: _loss_or_nan(logged) >= low
        return lambda logged: _loss_or_nan(logged) <= high and _is_finite(logged)
    if alarm.is_flat:
        return None
    # From the first records on. That it stays non-finite needs nothing to compare with.
    lasts = not any(_is_finite(logged) for logged in log[onset:])
    return (lambda _: False) if lasts else None


def _ending_at_log_end(
    alarm: LogAlarm, log: Sequence[LoggedStep], onset: int, is_back: Callable[[LoggedStep], bool]
) -> Ending:
    """Return the ending of trouble that is not over by the audited log's end.

    A problem that lasted from its onset to the end has an answer. After only a few records since
    the onset, or since the recovery, the outcome is unknown.
    """
    if not _is_finite(log[-1]):
        return "not recovered"
    num_since = len(log) - 1 - alarm.last_row if is_back(log[-1]) else len(log) - onset
    return "log ends" if num_since <= RECOVERY_ROWS else "not recovered"


def _reference_loss_range(before: Sequence[LoggedStep]) -> tuple[float, float] | None:
    """Return the audited log's range of the reference loss; None with too few records before."""
    losses = [_loss_or_nan(logged) for logged in before if math.isfinite(_loss_or_nan(logged))]
    if len(losses) < RECOVERY_ROWS:
        return None
    median = statistics.median(losses)
    spread = 1.4826 * statistics.median([abs(loss - median) for loss in losses])
    reach = max(3.0 * spread, TOLERANCE * abs(median))
    return median - reach, median + reach


def _find_recovery(
    log: Sequence[LoggedStep], start: int, stop: int, is_back: Callable[[LoggedStep], bool]
) -> int | None:
    """Return the first of ten consecutive audited records of which at least eight are recovered."""
    away = 0
    for index in range(start, stop):
        away += not is_back(log[index])
        begin = index - RECOVERY_ROWS + 1
        if begin > start:
            away -= not is_back(log[begin - 1])
        if begin >= start and away <= 2 and is_back(log[index]) and is_back(log[begin]):
            return begin
    return None


def _is_finite(logged: LoggedStep) -> bool:
    """Return whether an audited record's values are all finite: Trainer logs a NaN loss as 0."""
    norm = logged.grad_norm
    return math.isfinite(_loss_or_nan(logged)) and (norm is None or math.isfinite(norm))


def _loss_or_nan(logged: LoggedStep) -> float:
    return math.nan if logged.loss is None else logged.loss


def _step_seconds(log: Sequence[LoggedStep]) -> float | None:
    """Return a step's usual duration in an audited log, as logged or from the records' times."""
    logged = [record.step_seconds for record in log if record.step_seconds is not None]
    if logged:
        return statistics.median(logged)
    pairs = itertools.pairwise(log)
    between = [
        (b.time_seconds - a.time_seconds) / (b.step - a.step)
        for a, b in pairs
        if a.time_seconds is not None and b.time_seconds is not None and b.step > a.step
    ]
    usual = statistics.median(between) if between else 0.0
    return usual if usual > 0.0 else None


# ---------------------------------------------------------------------------------------- the page


def audit_blocks(audit: Audit, title: str) -> list[Block]:
    """Return the audit as blocks of text."""
    return [
        Heading(1, f"Audit of {title}"),
        Paragraph(_summarize_audit(audit)),
        *_alarm_blocks(audit),
        *_plot_blocks(audit),
        *_savings_blocks(audit),
        Heading(2, "What was assumed"),
        *(Paragraph(assumption) for assumption in audit.assumptions),
        Heading(2, "What this log cannot tell"),
        *(Paragraph(assumption) for assumption in _limits(audit)),
    ]


def _summarize_audit(audit: Audit) -> str:
    """Return an audit's first paragraph: records, skips, rollbacks, halts, pages, false alarms."""
    log, alarms = audit.history.steps, audit.alarms
    text = f"{humanize_count(len(log), 'record')}, steps {log[0].step:,} to {log[-1].step:,}. "
    skips = sum(alarm.actions.get("skip_step", 0) for alarm in alarms)
    backs = sum(alarm.actions.get("rollback", 0) for alarm in alarms)
    halts = sum(alarm.actions.get("halt", 0) for alarm in alarms)
    pages = sum(alarm.severity == "page" for alarm in alarms)
    wrong = sum(alarm.is_false_alarm for alarm in alarms)
    if not alarms:
        text += "Vitals would have done nothing, and told nothing."
        lacking = ", ".join(audit.lacking)
        text = f"{text} That says nothing of {lacking}." if lacking else text
        return " ".join([text, *_missing_scalars(audit)])
    text += (
        f"Vitals would have skipped {humanize_count(skips, 'update')}, rolled back "
        f"{_format_times(backs)}, "
    )
    text += f"stopped the run {_format_times(halts)}, and paged {_format_times(pages)}, in "
    text += f"{humanize_count(len(alarms), 'alarm')}. "
    text += (
        f"{humanize_count(wrong, 'alarm')} {'looks' if wrong == 1 else 'look'} wrong. "
        if wrong
        else ""
    )
    saved = sum(alarm.saved_steps for alarm in alarms)
    return text + (f"It would have saved about {_format_duration(audit, saved)}." if saved else "")


def _alarm_blocks(audit: Audit) -> list[Block]:
    """Return the table of an audit's alarms, the most severe if there are too many."""
    if not audit.alarms:
        return []
    order = sorted(
        audit.alarms, key=lambda alarm: (_GRAVITY.index(alarm.severity), alarm.first_row)
    )
    shown = sorted(order[:MAX_LINES], key=lambda alarm: alarm.first_row)
    blocks: list[Block] = [
        Heading(2, "Alarms"),
        TableBlock(
            ("steps", "what", "Vitals would", "severity", "in the log", "judgement"),
            [
                (
                    _format_step_span(alarm),
                    ", ".join(alarm.kinds) or alarm.action,
                    _format_actions(alarm),
                    SEVERITY_WORDS[alarm.severity],
                    _ending_text(alarm),
                    _judgement_text(alarm),
                )
                for alarm in shown
            ],
        ),
    ]
    if len(audit.alarms) > len(shown):
        blocks.append(Paragraph(f"{len(audit.alarms) - len(shown)} lesser alarms are left out."))
    for alarm in shown:
        if alarm.severity == "log":
            continue
        blocks.append(Heading(3, f"Steps {_format_step_span(alarm)}"))
        reasons = list(alarm.reasons.items())
        rows = [(step, reason) for reason, step in reasons[:8]]
        blocks.append(TableBlock(("step", "what was seen"), rows))
        if len(reasons) > len(rows):
            blocks.append(Paragraph(f"and {len(reasons) - len(rows)} more"))
    return blocks


def _format_step_span(alarm: LogAlarm) -> str:
    """Return the first and last step of an audit's alarm as text."""
    first, last = alarm.first_step, alarm.last_step
    return f"{first}" if first == last else f"{first} to {last}"


def _format_actions(alarm: LogAlarm) -> str:
    parts = []
    for action, phrase in reversed(_ACTIONS.items()):
        num = alarm.actions.get(action, 0)
        if action == "skip_step" and num:
            parts.append(f"skip {humanize_count(num, 'update')}")
        elif num:
            parts.append(phrase + (f" to step {alarm.rollback_to}" if action == "rollback" else ""))
    if any(action in alarm.further for action in ("rollback", "halt")):
        backs, halts = (alarm.further.get(action, 0) for action in ("rollback", "halt"))
        more = [f"roll back {_format_times(backs)} more"] * bool(backs) + ["stop the run"] * bool(
            halts
        )
        parts.append(f"if that changed nothing: {', '.join(more)}")
    return "; ".join(parts) or "tell"


def _ending_text(alarm: LogAlarm) -> str:
    match alarm.ending:
        case "recovered" if alarm.is_flat:
            return f"loss fell at step {alarm.end_step}"
        case "recovered":
            return f"loss back at step {alarm.end_step}"
        case "restarted":
            return f"continued to step {alarm.end_step}, then restarted from step {alarm.back_to}"
        case "not recovered" if alarm.is_flat:
            return f"loss did not fall by the end, step {alarm.end_step}"
        case "not recovered":
            return f"loss not back by the end, step {alarm.end_step}"
        case "log ends":
            return "the log ends too soon"
    return "not visible in the loss"


def _judgement_text(alarm: LogAlarm) -> str:
    if alarm.is_false_alarm:
        return "looks wrong: it passed by itself"
    if alarm.ending in ("not recovered", "restarted"):
        return "looks right"
    if alarm.ending == "recovered" and alarm.end_rows > PROMPT_ROWS:
        return "looks right: it lasted"
    if alarm.ending == "recovered":
        return "harmless: nothing was undone"
    return "cannot be judged"


def _plot_blocks(audit: Audit) -> list[Block]:
    """Return the plots of an audited log's loss and gradient norm, with alarms above level log."""
    grave = [alarm for alarm in audit.alarms if alarm.severity != "log"]
    spans = [(alarm.first_step, alarm.last_step) for alarm in grave]
    log = audit.history.steps
    steps, forks = [logged.step for logged in log], audit.cadence.restarts
    curves = [
        log_curve("loss", steps, [(logged.loss, None) for logged in log], forks),
        log_curve("gradient norm", steps, [(logged.grad_norm, None) for logged in log], forks),
    ]
    curves = [*_quantity_curves(audit, steps, forks), *curves]
    drawn = [CurvePlot(curve, audit.marks, spans) for curve in curves if not curve.is_empty]
    return [Heading(2, "Curves"), *drawn] if drawn else []


def _quantity_curves(
    audit: Audit, steps: Sequence[int], forks: Collection[int]
) -> list[PlottedCurve]:
    """Return the curves of an audited log's post-training scalars, in reading order."""
    names = [f"scalars.{name}" for name in audit.history.scalars.values()]
    lines = [line for chart in quantity_charts(audit.task, names) for line in chart.lines]
    return [
        log_curve(
            name,
            steps,
            [((logged.scalars or {}).get(name), None) for logged in audit.history.steps],
            forks,
        )
        for name, _ in lines
    ]


def _savings_blocks(audit: Audit) -> list[Block]:
    """Describe the savings of each action in an audit, and their assumptions."""
    acting = [a for a in audit.alarms if a.action in ("rollback", "halt") or a.severity == "page"]
    if not acting:
        return []
    rows = [
        (
            _format_step_span(alarm),
            _format_actions(alarm),
            "not told" if alarm.lost_steps is None else alarm.lost_steps,
            alarm.cost_steps,
            "nothing: it passed" if alarm.is_false_alarm else alarm.saved_steps,
            audit.history.steps[-1].step - alarm.acted_step if alarm.acted_step is not None else "",
        )
        for alarm in acting[:MAX_LINES]
    ]
    saved = sum(alarm.saved_steps for alarm in audit.alarms)
    header = (
        *("steps", "Vitals would", "lost as it was", "lost with Vitals", "saved"),
        "steps from then to the log's end",
    )
    explanation = (
        "In steps. Lost as it was: from the onset, or from the step that the run restarted from, "
        "to where the loss recovered, the run restarted, or the log ends. Lost with Vitals: from "
        "the checkpoint of the rollback. Assumptions: the rollback cures the problem, and no "
        "operator acts on a page. The effect of a page depends on its reader, so it is not counted."
    )
    if audit.step_seconds is None:
        explanation += " The log has no times, so there are no hours."
    elif not audit.gpus:
        explanation += " GPU-hours need --gpus, as no log says on how many it ran."
    total = f"Saved in all: about {_format_duration(audit, saved)}."
    return [
        Heading(2, "What it would have saved"),
        TableBlock(header, rows),
        Paragraph(total),
        Paragraph(explanation),
    ]


def _format_duration(audit: Audit, steps: int) -> str:
    """Return lost or saved steps as text, with hours if the audited log has times."""
    text = humanize_count(steps, "step")
    if audit.step_seconds is None:
        return text
    seconds = steps * audit.step_seconds
    text += f" ({humanize_seconds(seconds)}"
    if audit.gpus:
        text += (
            f", {seconds * audit.gpus / 3600:,.3g} GPU-hours on {humanize_count(audit.gpus, 'GPU')}"
        )
    return text + ")"


def _missing_scalars(audit: Audit) -> list[str]:
    """Describe which scalars of its task an audited log does not have."""
    spec, names = TASKS.get(audit.task), audit.history.scalars.values()
    # In SFT the loss is one of them.
    if spec is not None and not any(spec.supervised or is_of_policy(name) for name in names):
        return [
            "It has no post-training scalar with a known name, so only the loss and the gradient "
            "norm are judged; --scalar NAME=COLUMN names one."
        ]
    if spec is not None and spec.samples and not any(map(is_reward, names)):
        return [
            "It has no reward with a known name: whether the reward is lost, dead or exploited "
            "cannot be judged; --scalar reward=COLUMN names it."
        ]
    return []


def _limits(audit: Audit) -> list[str]:
    """Describe what an audited log cannot show, and why."""
    columns, limit_texts = audit.history.columns, []
    if "loss" not in columns and not audit.task:
        limit_texts.append("It has no loss: spikes, divergence and recovery cannot be judged.")
    limit_texts += _missing_scalars(audit)
    if "grad_norm" not in columns:
        limit_texts.append("It has no gradient norm: the gradients cannot be judged.")
    if "lr" not in columns:
        limit_texts.append("It has no learning rate: jumps are not detected.")
    if audit.cadence.counts_records:
        gaps = " or ".join(f"{gap:,}" for gap in audit.cadence.gaps) or "many"
        limit_texts.append(
            f"It was logged every {gaps} steps: an onset is known to that many steps only, what "
            "happened between two records is not seen at all, and Vitals, which sees each step, "
            "would have spoken sooner."
        )
    limit_texts.append(
        "It has one row for all ranks: stragglers, hangs, corrupted replicas, GPUs and hosts are "
        "not in it."
    )
    limit_texts.append(
        "It has no model: the probe, by which Vitals tells a damaged model from hard data, could "
        "not be asked, so rollbacks that need its answer are not among those above."
    )
    return limit_texts + list(audit.history.notes)


def _format_times(num: int) -> str:
    return {0: "never", 1: "once", 2: "twice"}.get(num, f"{num:,} times")
