"""First change before a problem, from the recorded onsets, and its sentence.

Without a collector (reading a directory), or if it had just started, the same rule processes the
stored rows in order, from well before the step, like a live run.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

import msgspec
import numpy as np
from sqlalchemy import Connection, select

from trainvitals.detect.fleet.base import MergedStep
from trainvitals.detect.fleet.origin.onsets import (
    DAMAGED_WEIGHT,
    INFERRED_WEIGHTS,
    RESET_MOMENTS,
    WINDOW,
    Next,
    Onset,
    Subject,
    find_origin_onset,
)
from trainvitals.detect.fleet.origin.reference import LAG, REFERENCE
from trainvitals.detect.fleet.origin.tracker import OnsetTracker
from trainvitals.errors import UNREADABLE
from trainvitals.records import ChangeExpected, Finding
from trainvitals.units import humanize, split_unit
from trainvitals.views import FindingView
from vitals_collector.live import step_join
from vitals_collector.live.live_monitor import watched_onsets
from vitals_collector.numbers.interface import Columns, RowSpan
from vitals_collector.queries.grouping import DEATHS, SETTING_CAUSES, domain_of
from vitals_collector.queries.heatmap_layers import layer_names
from vitals_collector.queries.series import exclusive_end, measured_by_stream
from vitals_collector.queries.top_changes import attempt_of
from vitals_collector.storage.schema import events, findings
from vitals_collector.storage.store import ReadSnapshot

_BEFORE = 3 * (REFERENCE + LAG) + WINDOW
"""Steps before the problem that are replayed: layers are written every 10th step."""
_AFTER = LAG
"""Steps after it that are replayed too: a check of the weights, or a loss that recovers, names the
cause of an earlier step."""
_MOST_ROWS = 200_000
"""At most this number of rows of ranks is replayed; for large jobs this covers fewer steps."""
_MAX_TOLD = 3
_WRITTEN_STATE: Mapping[str, tuple[Subject, str]] = {
    "optimizer_state": ("optimizer", RESET_MOMENTS),
    "weights": ("layer", "weight_written_ratio"),
}
"""Detectors of state that something else than the optimizer has changed; subject and series."""
_MOST_DATED = 5
"""Steps from a write to its finding if its step is known."""
_expected = msgspec.msgpack.Decoder(ChangeExpected).decode
_finding = msgspec.msgpack.Decoder(Finding).decode


class Precursor(msgspec.Struct, frozen=True):
    """Origin of an incident."""

    onset: Onset | None = None
    """None: no series left its quiet range."""

    @property
    def text(self) -> str:
        """Return the sentence that explains the origin of an incident; empty without one."""
        return "" if self.onset is None else onset_sentence(self.onset)

    @property
    def rank(self) -> int:
        """Return the rank whose data or gradients are the origin of an incident; -1: none."""
        if self.onset is None or self.onset.subject not in ("data", "rank"):
            return -1
        kind, _, rank = self.onset.where.partition(":")
        return int(rank) if kind == "rank" else -1


def precursor(
    moment: ReadSnapshot, run_id: str, attempt: int, step: int, cause: str
) -> Precursor | None:
    """Find the first change before a problem at a step, as its cause; None if it is unknown.

    The ``cause`` of the problem decides: slowness and wrong numbers have different origins.
    """
    if cause.startswith("straggler_") and cause != "straggler_data":
        return Precursor()  # the finding names its part, which is not a wait for data
    resets = _load_resets(moment.sql, run_id, attempt)
    live = watched_onsets(moment.sql, run_id)
    if live is not None and live.cover((attempt, step - WINDOW), (attempt, step)):
        onsets = live.onsets
    else:
        tracker = OnsetTracker()
        for merged in stored_steps(moment, run_id, step - _BEFORE, step + 1 + _AFTER):
            if merged.attempt <= attempt:
                tracker.update(merged)
        is_known = tracker.is_judging or tracker.onsets  # non-finite values need no reference
        if not is_known and not resets:
            return None
        onsets = tracker.onsets
    onsets = (*onsets, *resets)
    is_of_speed = domain_of(cause) == "speed"
    if cause in DEATHS:  # a program fails over a NaN, not over a high loss
        onsets = tuple(each for each in onsets if each.is_nonfinite)
    if cause == "throughput":  # a wait that has ended does not make later steps slow
        onsets = tuple(each for each in onsets if each.last_step >= step + LAG)
    planned = _load_announced_changes(moment.sql, run_id, attempt)
    return Precursor(
        find_origin_onset(
            onsets,
            attempt=attempt,
            step=step,
            is_of_speed=is_of_speed,
            is_of_setting=cause in SETTING_CAUSES,
            planned=planned,
        )
    )


def _load_announced_changes(
    connection: Connection, run_id: str, attempt: int
) -> list[tuple[int, int]]:
    """Load the changes that the training announced: they cannot be the cause of a problem."""
    table = events.c
    query = select(table.step, table.body).where(
        table.run_id == run_id, table.attempt == attempt, table.kind == ChangeExpected.__name__
    )
    planned = []
    for step, body in connection.execute(query):
        with suppress(*UNREADABLE):  # skip damaged rows
            planned.append((int(step), _expected(body).steps))
    return planned


def _load_resets(connection: Connection, run_id: str, attempt: int) -> list[Onset]:
    """Load the writes to weights and optimizer state that the training reported."""
    table = findings.c
    query = select(table.body).where(
        table.run_id == run_id, table.attempt == attempt, table.detector.in_(_WRITTEN_STATE)
    )
    resets = []
    for (body,) in connection.execute(query):
        with suppress(*UNREADABLE):  # skip damaged rows
            resets += reset_onsets([(attempt, _finding(body))])
    return resets


def reset_onsets(found: Iterable[tuple[int, Finding]]) -> list[Onset]:
    """Return the first changes from findings about weights and second moments written to.

    Args:
        found: findings of any kind, each with its attempt.
    """
    return [
        Onset(
            attempt=attempt,
            step=finding.onset_step,
            last_step=finding.onset_step,
            subject=state[0],
            where=finding.layer,
            series=state[1],
            is_apart=True,
        )
        for attempt, finding in found
        if (state := _WRITTEN_STATE.get(finding.detector)) is not None
        and (finding.detector != "weights" or finding.step - finding.onset_step <= _MOST_DATED)
    ]


def first_change_text(
    moment: ReadSnapshot,
    run_id: str,
    step: int,
    findings: Sequence[FindingView],
    begun: tuple[int, str] | None,
) -> str | None:
    """Explain in a sentence the first change before the problem at a step.

    Args:
        moment: the stored data.
        run_id: the run.
        step: the step that is explained.
        findings: the findings about it.
        begun: attempt and cause of the incident that begins at the step; None: none does.

    Returns:
        Empty if nothing changed first; None if there was no problem, or the origin is unknown.
    """
    attempt = attempt_of(moment.sql, run_id, step)
    if attempt is None:
        return None
    finding = min((view.finding for view in findings), key=_finding_sort_key, default=None)
    cause, onset = "", step
    if begun is not None:
        attempt, cause = begun
    elif finding is not None:
        cause = finding.cause or finding.kind
        onset = step if finding.onset_step < 0 else min(finding.onset_step, step)
    first = precursor(moment, run_id, attempt, onset, cause)
    return None if first is None else first.text


def _finding_sort_key(finding: Finding) -> tuple[bool, bool]:
    """Return the order in which findings explain a step: numbers before speed, actionable first."""
    return domain_of(finding.kind) == "speed", finding.level != "actionable"


def stored_steps(moment: ReadSnapshot, run_id: str, first: int, last: int) -> Iterator[MergedStep]:
    """Yield stored steps, to find a cause in them, as the fleet detectors got them live."""
    measured = measured_by_stream(moment.sql, run_id)
    columns = sorted(measured["steps"] & {*step_join.RANK_COLUMNS, *step_join.RUN_COLUMNS})
    layer_columns = ["layer", *sorted(measured["layers"] & {*step_join.LAYER_COLUMNS})]
    span = RowSpan(run_id, "steps", from_step=max(first, 0), to_step=exclusive_end(last))
    num = moment.numbers.num_rows(span)
    if num > _MOST_ROWS:
        first = last - int((last - first) * _MOST_ROWS / num)
        span = span._replace(from_step=max(first, 0))
    rows = moment.numbers.scan(span, [*_KEYS, *columns])
    if not len(rows["step"].values):
        return
    layers = moment.numbers.scan(span._replace(stream="layers"), [*_KEYS, *layer_columns])
    parts = [*_iter_layer_parts(moment.sql, run_id, layers, layer_columns)]
    yield from step_join.merge_steps([_writer_rows(rows, columns)], parts).steps


_KEYS = ("step", "attempt", "time_unix_ns", "rank", "seq", "incarnation")


def _writer_rows(columns: Columns, names: list[str]) -> step_join.WriterRows:
    def whole(name: str) -> np.ndarray:
        return columns[name].values.astype(np.int64)

    rank = whole("rank")
    size = np.full(len(rank), int(rank.max(initial=0)) + 1)
    measured = {name: (columns[name].values, ~columns[name].is_missing) for name in names}
    numbers = {name: c for name, c in measured.items() if c[0].dtype.kind in "fi"}
    return step_join.WriterRows(
        step_join.RowWriters(rank, size, np.zeros_like(rank)),
        whole("seq"),
        whole("attempt"),
        whole("step"),
        whole("time_unix_ns"),
        numbers,
    )


def _iter_layer_parts(
    connection: Connection, run_id: str, columns: Columns, names: list[str]
) -> Iterator[step_join.LayerPart]:
    """Yield stored layer rows by incarnation, in which the cause of a problem is searched."""
    if not len(columns["step"].values):
        return
    rows = _writer_rows(columns, names)
    writers = np.array(columns["incarnation"].values.tolist())
    named = layer_names(connection, run_id)
    for writer in dict.fromkeys(writers.tolist()):
        names_of_writer = {
            number: name for (incarnation, number), name in named.items() if incarnation == writer
        }
        yield step_join.LayerPart(names_of_writer, rows.take(writers == writer))


def onset_sentence(onset: Onset) -> str:
    """Explain in a sentence what changed first before an incident, and what followed."""
    at = f"at step {onset.step:,}"
    first_moved = f"Moved first: {_onset_text(onset)} {at}{_onset_values_text(onset)}."
    if not onset.is_cause:
        first_moved += " Not enough was measured to tell why: `watch(signals=...)` measures more."
    later = [effect for effect in onset.next if effect.step > onset.step]
    if later:
        listed = "; ".join(
            f"{_effect_text(effect)} at step {effect.step:,}" for effect in later[:_MAX_TOLD]
        )
        more = len(later) - _MAX_TOLD
        first_moved += f" Then: {listed}{f'; and {more} more' if more > 0 else ''}."
    return first_moved


_SERIES = {
    "grad_norm": "gradient norm",
    "weight_norm": "weight norm",
    "activation_rms": "output",
    "update_norm": "update norm",
    "rank_loss": "loss",
    "rank_grad_norm": "gradient norm",
    "learning_rate": "the learning rate",
    "max_norm": "max_norm",
    "weight_decay": "weight decay",
}


def _onset_text(onset: Onset) -> str:
    """Describe a first change, for the sentence about the cause of an incident."""
    where = _location_text(onset.where)
    series = _SERIES.get(onset.series, onset.series.replace("_", " "))
    if onset.series == "weight_written_ratio":
        return f"weights of {where} were written by something else than the optimizer"
    if onset.series == "moment_written_ratio":
        whose = f"of {where} " if onset.where else ""
        return f"optimizer state {whose}was written by something else than the optimizer"
    if onset.series == RESET_MOMENTS:
        return f"optimizer state of {where} was reset"
    if onset.series == DAMAGED_WEIGHT:
        return f"a weight of {where} was damaged"
    if onset.series == INFERRED_WEIGHTS:
        return f"weights of {where}: the gradients of the other layers grew, its own did not,"
    if onset.subject == "lr":
        if onset.series == "learning_rate":
            return "the learning rate jumped"
        return "updates of most layers outgrew the recorded learning rate"
    if onset.subject == "config":
        return f"{series} was changed"
    if onset.subject == "loader":
        return f"data wait on {where}" if onset.where else "data wait"
    if onset.subject == "losses" and onset.value is not None:
        return "loss of all ranks"
    if onset.subject in ("loss", "losses"):
        return f"loss of {where} turned NaN or infinite" if where else "loss turned NaN or infinite"
    if onset.subject == "data":
        if onset.series == "activation_rms":
            return "output of the first module"
        return f"data of {where}: its loss" if where else "data: loss of all ranks"
    if onset.subject == "gradients":
        return "gradient norm of most layers" if onset.sigmas else "gradient norm"
    if onset.value is None and onset.series == "weight_norm":
        return f"weights{f' of {where}' if where else ''} turned NaN or infinite"
    if onset.value is None:
        return f"{series} of {where} turned NaN or infinite"
    if onset.value == 0.0 and onset.sigmas is None:
        return f"{series} of {where} became exactly 0"
    return f"{series} of {where}"


def _location_text(where: str) -> str:
    """Name the rank or layer in the sentence about the cause of an incident."""
    if not where:
        return ""
    return where.replace(":", " ") if where.startswith("rank:") else f"layer `{where}`"


def _onset_values_text(onset: Onset) -> str:
    """Describe the values of a first change, for the sentence about an incident's cause."""
    if onset.series in ("weight_written_ratio", "moment_written_ratio") or onset.value is None:
        return ""
    if onset.series == DAMAGED_WEIGHT:
        return f" (it is {onset.value:.3g})"
    if onset.series == INFERRED_WEIGHTS:
        return f" (the others {onset.value:.3g}x their usual norm)"
    if onset.sigmas is None:
        if onset.usual is None:
            return ""
        return f", from {onset.usual:.4g} to {onset.value:.4g}"
    unit = split_unit(onset.series)[1]
    usual = "" if onset.usual is None else f", usually {humanize(onset.usual, unit)}"
    return f" ({humanize(onset.value, unit)}{usual}; {onset.sigmas:.3g} sigma)"


def _effect_text(effect: Next) -> str:
    """Describe what followed the first change, for the sentence about an incident's cause."""
    as_onset = Onset(
        attempt=0,
        step=effect.step,
        last_step=effect.step,
        subject=effect.subject,
        where=effect.where,
        series=effect.series,
        value=1.0,
        sigmas=1.0,
    )
    return _onset_text(as_onset)
