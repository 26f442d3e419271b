"""What our own detectors and ladder say about a log, fed as in training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainvitals.policy import CheckpointRef, Judge
from trainvitals.records import StepRecord
from trainvitals.testing import judgements
from vitals_bench.detect.series import Alarm, Series

CHECKPOINT_EVERY = 50
"""Records from one checkpoint, of those a rollback could have gone to, to the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdicts:
    """What was found in a log, and what would have been done."""

    told: list[Alarm]
    """Every finding."""
    skipped: list[Alarm]
    """Steps not applied in ``guard``, by the kind of what was found."""
    rollbacks: list[int]
    """Records at which the ladder, in ``heal``, would have gone back to a checkpoint."""
    halts: list[int]
    """Records at which it would have given up, in ``guard`` or in ``heal``."""


def tell(series: Series) -> list[Alarm]:
    """Return every finding about a log, in ``guard``."""
    said = judgements(Judge(mode="guard"), _records(series))
    return [Alarm(row, one.kind) for row, (_, each) in enumerate(said) for one in each.findings]


def judge(series: Series) -> Verdicts:
    """Judge a log record by record, as in training with a readback lag of one step.

    The limits that a record is held against were computed without it and the one before; a record
    above one is skipped, and enters no reference. A log cannot be rolled back, so rollbacks are
    those that ``observe`` records, with a healthy checkpoint every 50 records.
    """
    records = _records(series)
    told: list[Alarm] = []
    skipped: list[Alarm] = []
    halts: list[int] = []
    for row, (_, said) in enumerate(judgements(Judge(mode="guard"), records)):
        told += [Alarm(row, finding.kind) for finding in said.findings]
        if said.decision is None:
            continue
        if said.decision.action == "skip_step":
            acting = [finding.kind for finding in said.findings if finding.level == "act"]
            skipped.append(Alarm(row, acting[0] if acting else "spike"))
        elif said.decision.action == "halt":
            halts.append(row)
    rollbacks, given_up = _observed(records)
    return Verdicts(
        told=told, skipped=skipped, rollbacks=rollbacks, halts=sorted({*halts, *given_up})
    )


def _observed(records: Sequence[StepRecord]) -> tuple[list[int], list[int]]:
    checkpoints = [
        CheckpointRef(id=f"record-{i}", step=records[i].step)
        for i in range(0, len(records), CHECKPOINT_EVERY)
    ]
    decided = [
        (row, said.decision.action)
        for row, (_, said) in enumerate(
            judgements(Judge(mode="observe"), records, checkpoints=checkpoints)
        )
        if said.decision is not None
    ]
    rollbacks = [row for row, action in decided if action == "rollback"]
    return rollbacks, [row for row, action in decided if action == "halt"]


def _records(series: Series) -> list[StepRecord]:
    columns = (series.steps, series.losses, series.norms, series.rates)
    return [
        StepRecord(step=step, attempt=1, loss=loss, grad_norm=norm, learning_rate=rate)
        for step, loss, norm, rate in zip(*columns, strict=True)
    ]
