"""Alarms of our detectors and policy on a log, fed as in training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trainvitals.judged_log import JudgedStep, LoggedStep, judge_history
from trainvitals.policy import JudgeConfig
from vitals_bench.detect.series import Alarm, Series


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdicts:
    """What was found in a log, and what would have been done."""

    alarms: list[Alarm]
    """Every finding."""
    skipped: list[Alarm]
    """Records that would not have been applied, by the kind of what was found."""
    rollbacks: list[int]
    """Records at which the policy would have rolled back."""
    halts: list[int]
    """Records at which it would have given up."""


def judge(series: Series) -> Verdicts:
    """Judge a log as `vitals replay` does, in ``heal``, where all that could be done is done."""
    made = Verdicts(alarms=[], skipped=[], rollbacks=[], halts=[])
    for row, record, judged in _play(series):
        made.alarms.extend(Alarm(row, finding.kind) for finding in judged.findings)
        if record.skipped:
            acting = [finding.kind for finding in judged.findings if finding.level == "actionable"]
            made.skipped.append(Alarm(row, acting[0] if acting else "spike"))
        if judged.decision is not None and judged.decision.action == "rollback":
            made.rollbacks.append(row)
        elif judged.decision is not None and judged.decision.action == "halt":
            made.halts.append(row)
    return made


def _play(series: Series) -> Iterator[JudgedStep]:
    columns = (range(len(series)), series.steps, series.losses, series.norms, series.rates)
    log = [LoggedStep(*record) for record in zip(*columns, strict=True)]
    config = JudgeConfig(loss_kind=series.loss_kind)
    return judge_history(log, config=config, mode="heal", expected=series.changes)
