"""Step records written as text, and the findings of detectors and judges about them.

    series("loss 2.1x20 9.5 2.1x5; grad_norm 1x26")

A line per column, separated by ``;`` or newlines: its name, then its values. ``9.5`` is one step,
``2.1x20`` twenty, ``11..6x50`` fifty on the way from 11 to 6, ``nan`` and ``inf`` are themselves,
``-`` is a step in which the column was not measured. A line that ends early leaves the rest out.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from trainvitals.detect.outliers import Detector
from trainvitals.policy import CheckpointRef, Judge, Judgement, StepInputs
from trainvitals.policy.evidence import Ask, ProbeResult
from trainvitals.policy.state import DeviceRule
from trainvitals.records import Decision, StepRecord

_FLOATS = ("loss", "loss_max", "grad_norm", "learning_rate", "loss_limit", "grad_norm_limit")
_COUNTS = ("nonfinite_params", "loss_max_rank")
_FLAGS = ("skipped", "overflow", "no_gradient")
_RANKS = ("nonfinite_ranks", "failed_ranks")


def series(text: str, *, attempt: int = 1, first_step: int = 0) -> list[StepRecord]:
    """Return the step records that a test describes as ``text``, with steps counting up.

    Raises:
        ValueError: an unknown column or a value that cannot be read.
    """
    columns: dict[str, list[float | None]] = {}
    for line in text.replace("\n", ";").split(";"):
        tokens = line.split()
        if not tokens:
            continue
        if tokens[0] not in _FLOATS + _COUNTS + _FLAGS + _RANKS:
            raise ValueError(f"column {tokens[0]!r} is not one of a step record")
        columns[tokens[0]] = [value for word in tokens[1:] for value in values_of(word)]
    length = max((len(values) for values in columns.values()), default=0)
    records = []
    for i in range(length):
        fields: dict[str, Any] = {}
        for name, values in columns.items():
            if i < len(values) and values[i] is not None:
                fields[name] = _field_value(name, values[i])
        records.append(StepRecord(step=first_step + i, attempt=attempt, **fields))
    return records


def values_of(word: str) -> list[float | None]:
    """Return the values of one token in a test's description of steps."""
    value, _, times = word.partition("x")
    count = int(times) if times else 1
    if value == "-":
        return [None] * count
    start, dots, end = value.partition("..")
    if not dots:
        return [float(value)] * count
    first, last = float(start), float(end)
    return [first + (last - first) * i / max(1, count - 1) for i in range(count)]


def _field_value(name: str, value: float | None) -> object:
    """Return a value in a test's description of steps as the type of its field."""
    assert value is not None
    if name in _FLAGS:
        return bool(value)
    if name in _COUNTS:
        return int(value)
    return (int(value),) if name in _RANKS else value


def replay(subject: Detector | Judge, text: str | Sequence[StepRecord]) -> dict[int, list[str]]:
    """Return the kinds of findings by step for a run described by ``text``.

    A judge is fed as ``judgements`` feeds it, a detector with the records as they are.
    """
    records = series(text) if isinstance(text, str) else text
    if isinstance(subject, Judge):
        pairs = [(record, judged.findings) for record, judged in judgements(subject, records)]
    else:
        pairs = [(record, subject.update(record)) for record in records]
    kinds: dict[int, list[str]] = {}
    for record, findings in pairs:
        if findings:
            kinds.setdefault(record.step, []).extend(finding.kind for finding in findings)
    return kinds


def judgements(
    judge: Judge,
    text: str | Sequence[StepRecord],
    *,
    checkpoints: Sequence[CheckpointRef] = (),
    lag: int = 1,
    now_attempt_id: int = 0,
    clips: bool = True,
    probe: Callable[[Ask], ProbeResult] | None = None,
) -> list[tuple[StepRecord, Judgement]]:
    """Judge a run that a test describes: return each completed record with its judgement.

    The device is simulated as in training: a record is judged ``lag`` steps later, or at once while
    the judge is suspicious; limits computed by then apply to the next step.
    """
    records = series(text) if isinstance(text, str) else text
    acts, device = judge.mode != "observe", DeviceRule()
    waiting: deque[StepRecord] = deque()
    pairs: list[tuple[StepRecord, Judgement]] = []

    def take() -> None:
        due = waiting.popleft()
        judgement = judge.judge(
            due,
            StepInputs(
                due.step + lag, checkpoints=checkpoints, next_attempt=now_attempt_id, probe=probe
            ),
        )
        pairs.append((due, judgement))

    for each in records:
        record = replace(each, clips=clips)
        record, device = device.judge(record, judge.limits(), judge.max_row(), acts=acts)
        waiting.append(record)
        while len(waiting) > lag or (waiting and judge.is_suspicious):
            take()
    while waiting:
        take()
    return pairs


def decisions(judge: Judge, text: str | Sequence[StepRecord], **options: Any) -> list[Decision]:
    """Return the decision log of a run described by ``text``; options of ``judgements``."""
    pairs = judgements(judge, text, **options)
    return [judgement.decision for _, judgement in pairs if judgement.decision is not None]
