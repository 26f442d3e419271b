"""Step records written as text, and what detectors and judges say about them.

    series("loss 2.1x20 9.5 2.1x5; grad_norm 1x26")

A line per column, separated by ``;`` or newlines: its name, then its values. ``9.5`` is one step,
``2.1x20`` twenty, ``11..6x50`` fifty on the way from 11 to 6, ``nan`` and ``inf`` are themselves,
``-`` is a step in which the column was not measured. A line that ends early leaves the rest out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from trainvitals.detect import Detector, Limits
from trainvitals.policy import CheckpointRef, Judge, Judgement
from trainvitals.policy.history import complete
from trainvitals.records import Decision, StepRecord

T = TypeVar("T")

_FLOATS = ("loss", "loss_max", "grad_norm", "learning_rate", "loss_limit", "grad_norm_limit")
_COUNTS = ("nonfinite_params", "loss_max_rank")
_FLAGS = ("skipped", "overflow")
_RANKS = ("nonfinite_ranks", "failed_ranks")


def series(text: str, *, attempt: int = 1, first_step: int = 0) -> list[StepRecord]:
    """Return the records that ``text`` describes, with steps counting up.

    Raises:
        ValueError: an unknown column or a value that cannot be read.
    """
    columns: dict[str, list[float | None]] = {}
    for line in text.replace("\n", ";").split(";"):
        words = line.split()
        if not words:
            continue
        if words[0] not in _FLOATS + _COUNTS + _FLAGS + _RANKS:
            raise ValueError(f"column {words[0]!r} is not one of a step record")
        columns[words[0]] = [value for word in words[1:] for value in _values(word)]
    length = max((len(values) for values in columns.values()), default=0)
    records = []
    for i in range(length):
        fields: dict[str, Any] = {}
        for name, values in columns.items():
            if i < len(values) and values[i] is not None:
                fields[name] = _typed(name, values[i])
        records.append(StepRecord(step=first_step + i, attempt=attempt, **fields))
    return records


def _values(word: str) -> list[float | None]:
    value, _, times = word.partition("x")
    count = int(times) if times else 1
    if value == "-":
        return [None] * count
    start, dots, end = value.partition("..")
    if not dots:
        return [float(value)] * count
    first, last = float(start), float(end)
    return [first + (last - first) * i / max(1, count - 1) for i in range(count)]


def _typed(name: str, value: float | None) -> object:
    assert value is not None
    if name in _FLAGS:
        return bool(value)
    if name in _COUNTS:
        return int(value)
    return (int(value),) if name in _RANKS else value


def replay(
    subject: Detector | Judge, text: str | Sequence[StepRecord], *, lag: int = 1, acts: bool = True
) -> dict[int, list[str]]:
    """Return the kinds of findings by step, as the subject finds them in a run of that course.

    The device's part is played as in training: a record is judged ``lag`` steps later, the limits
    computed by then are in force in the step after, and a step that is non-finite or above a limit
    is marked skipped (unless not ``acts``: then nothing is).
    """
    records = series(text) if isinstance(text, str) else text
    if isinstance(subject, Judge):
        said = judgements(subject, records, lag=lag)
        pairs = [(record, judgement.findings) for record, judgement in said]
    else:
        limits = _limits_of(subject)
        pairs = list(_run(records, limits, subject.update, lag=lag, acts=acts))
    found: dict[int, list[str]] = {}
    for record, findings in pairs:
        if findings:
            found.setdefault(record.step, []).extend(finding.kind for finding in findings)
    return found


def judgements(
    judge: Judge,
    text: str | Sequence[StepRecord],
    *,
    checkpoints: Sequence[CheckpointRef] = (),
    lag: int = 1,
    now_attempt_id: int = 0,
) -> list[tuple[StepRecord, Judgement]]:
    """Return each record as the device completed it, and what the judge said about it."""
    records = series(text) if isinstance(text, str) else text

    def update(record: StepRecord) -> Judgement:
        return judge.judge(
            record,
            decided_at_step=record.step + lag,
            checkpoints=checkpoints,
            now_attempt_id=now_attempt_id,
        )

    return list(_run(records, judge.limits, update, lag=lag, acts=judge.mode != "observe"))


def decisions(judge: Judge, text: str | Sequence[StepRecord], **options: Any) -> list[Decision]:
    """Return the ledger the judge writes over a run of that course; options of ``judgements``."""
    said = judgements(judge, text, **options)
    return [judgement.decision for _, judgement in said if judgement.decision is not None]


def _limits_of(detector: Detector) -> Callable[[], Limits]:
    limit = getattr(detector, "limit", None)
    if limit is None:
        return Limits
    metric = getattr(detector, "metric", "loss")
    return lambda: Limits(**{metric: limit()})


def _run(
    records: Sequence[StepRecord],
    limits: Callable[[], Limits],
    update: Callable[[StepRecord], T],
    *,
    lag: int,
    acts: bool,
) -> Iterator[tuple[StepRecord, T]]:
    """Play device and host: complete each record when it is due, judge it ``lag`` records later."""
    waiting: deque[StepRecord] = deque()
    for record in records:
        waiting.append(complete(record, limits(), acts=acts))
        if len(waiting) > lag:
            due = waiting.popleft()
            yield due, update(due)
    for due in waiting:
        yield due, update(due)
