"""Reads a run's new steps, scalars and decisions since the last poll.

A cursor stores the read position. It consists of plain numbers, so that a new process can continue
where another was killed: each row once, and none left out.

Steps of one attempt come in order, but attempts do not end in order: a dead node's last rows may
arrive during the next attempt. So each attempt has a separate position.
"""

import copy
import math
from collections.abc import Iterator, Sequence, Set
from typing import Literal

import msgspec
import numpy as np

from trainvitals.metrics import STEP_METRICS
from trainvitals.printable import printable
from trainvitals.records import Decision, decision_text
from trainvitals.views import (
    AttemptView,
    CurveQuestion,
    DecisionsQuestion,
    RunDetail,
    RunQuestion,
    TableQuestion,
)
from vitals_collector.queries.open import Reader

PAGE = 2_000
"""Steps of one batch."""
_RECENT = 2
"""The latest attempts, whose scalars are queried at every poll; all others, at the last."""
_SLACK = 1_000
"""Steps by which one scalar may arrive later than another, except at the last poll."""
_PLUMBING = frozenset(
    {"verdict", "readback_lag", "culprit_rank", "loss_max_rank", "skipped", "rank_loss"}
)
"""Columns that are not useful as curves, or that duplicate another metric."""
_KEYS = ("step", "attempt", "time_unix_ns", "monotonic_ns")
_KNOWN = frozenset(metric.column for metric in STEP_METRICS)
MAX_NAME = 200

ATTEMPT, SKIPPED = "vitals/attempt", "vitals/skipped"
"""With each step: its attempt, counted from 1, and 1 if its update was not applied."""

Level = Literal["info", "warning", "error"]


class TrackerRow(msgspec.Struct, frozen=True, kw_only=True):
    """Values of one step."""

    attempt: int
    """Counts from 1."""
    step: int
    time_unix_ns: int
    values: dict[str, float]
    discarded: bool = False
    """A rollback, or a restart from an earlier checkpoint, has discarded the step already."""


class ActionNote(msgspec.Struct, frozen=True, kw_only=True):
    """An action as a line of text."""

    key: str
    """Identifies it within the run, permanently."""
    attempt: int
    step: int
    time_unix_ns: int
    level: Level
    title: str
    text: str


class Fork(msgspec.Struct, frozen=True, kw_only=True):
    """A new attempt starts at a step that was, or may have been, trained before."""

    attempt: int
    step: int
    time_unix_ns: int
    text: str


Entry = TrackerRow | ActionNote | Fork


class Cursor(msgspec.Struct, kw_only=True):
    """Read position in a run."""

    attempts: dict[int, int] = {}
    """The next step of each attempt."""
    scalars: dict[str, dict[int, int]] = {}
    """Likewise of each scalar."""
    ledger_seq: int = -1


class EntryBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive entries, and the position of the next ones."""

    entries: tuple[Entry, ...]
    cursor: Cursor


class RunFollower:
    """Reads one run from a cursor on.

    The cursor that is passed is not changed.
    """

    def __init__(self, reader: Reader, run_id: str, cursor: Cursor) -> None:
        self._reader = reader
        self._run_id = run_id
        self._cursor = copy.deepcopy(cursor)
        self._acted: tuple[int, int, str] | None = None

    def detail(self) -> RunDetail:
        """Return the run as it is now, for its mirror."""
        return self._reader.ask(RunQuestion(run_id=self._run_id, volume=False))

    def read_batches(self, detail: RunDetail, *, whole: bool = False) -> Iterator[EntryBatch]:
        """Yield the run's new entries for a tracker, in batches of some thousand rows.

        ``whole``: also query data that may have arrived late, at the end of a run.
        """
        attempts = sorted(detail.attempts, key=lambda attempt: attempt.id)
        lineage = _AttemptLineage(attempts)
        for attempt in attempts:
            yield from self._step_batches(attempt, lineage)
        recent = attempts if whole else attempts[-_RECENT:]
        yield from self._scalar_batches(detail, recent, lineage, whole=whole)
        yield from self._note_batches(detail, lineage, whole=whole)

    # ------------------------------------------------------------------------------ steps

    def _step_batches(
        self, attempt: AttemptView, lineage: "_AttemptLineage"
    ) -> Iterator[EntryBatch]:
        """Yield an attempt's start and its new steps, in batches for a tracker."""
        entries: list[Entry] = []
        places = self._cursor.attempts
        if attempt.id not in places:
            places[attempt.id] = attempt.fork_step
            if attempt.parent is not None:
                entries.append(_fork_entry(attempt))
        # In pages: a query reads all rows after its first step. The last step may be of another
        # rank, so a page without rows may get some later.
        for first in range(places[attempt.id], attempt.last_step + 1, PAGE):
            reply = self._reader.ask(
                TableQuestion(
                    table="steps",
                    run_id=self._run_id,
                    where=(f"attempt = {attempt.id}",),
                    from_step=first,
                    to_step=first + PAGE - 1,
                    limit=PAGE,
                )
            )
            rows = _build_step_rows(reply.columns, reply.data, lineage)
            if not rows:
                continue
            places[attempt.id] = rows[-1].step + 1
            yield self._build_batch([*entries, *rows])
            entries = []
        if entries:
            yield self._build_batch(entries)

    def _build_batch(self, entries: Sequence[Entry]) -> EntryBatch:
        """Return entries as a batch for a tracker, with the position after them."""
        return EntryBatch(entries=tuple(entries), cursor=copy.deepcopy(self._cursor))

    # ---------------------------------------------------------------------------- scalars

    def _scalar_batches(
        self,
        detail: RunDetail,
        attempts: Sequence[AttemptView],
        lineage: "_AttemptLineage",
        *,
        whole: bool,
    ) -> Iterator[EntryBatch]:
        """Yield the scalars of those attempts for a tracker, in pages of steps."""
        names = [name for name in detail.metrics if name.startswith("scalars.")]
        if not names or not attempts:
            return
        attempt_ids = {attempt.id for attempt in attempts}
        first = min(self._first_unread_scalar_step(attempt, whole=whole) for attempt in attempts)
        last = max(attempt.last_step for attempt in attempts)
        size = PAGE
        while True:
            end = first + size - 1 if first + size <= last else None
            rows: dict[tuple[int, int], TrackerRow] = {}
            for name in names:
                self._add_scalar_values(name, (first, end), attempt_ids, lineage, rows)
            if rows:
                yield self._build_batch([rows[position] for position in sorted(rows)])
            if end is None:
                return
            first, size = end + 1, size if len(rows) * 4 > size else 2 * size

    def _first_unread_scalar_step(self, attempt: AttemptView, *, whole: bool) -> int:
        """Return the step from which on the mirror may have unread scalars of the attempt."""
        # some are from before step 0
        begin = attempt.fork_step if attempt.parent is not None else -1
        if whole:
            return begin
        read = [places.get(attempt.id, begin) for places in self._cursor.scalars.values()]
        # At most the run's last step: data from other programs may name a step far ahead.
        newest = min(max(read, default=begin), attempt.last_step + 1)
        return max(begin, newest - _SLACK)

    def _add_scalar_values(
        self,
        metric: str,
        span: tuple[int, int | None],
        attempts: Set[int],
        lineage: "_AttemptLineage",
        rows: dict[tuple[int, int], TrackerRow],
    ) -> None:
        """Add one scalar's new values to a tracker's rows."""
        reply = self._reader.ask(
            CurveQuestion(
                run_id=self._run_id, metric=metric, branch="all", from_step=span[0], to_step=span[1]
            )
        )
        steps, ids, times = (
            np.frombuffer(raw, "<i8").tolist()
            for raw in (reply.step, reply.attempt, reply.time_unix_ns)
        )
        name = _scalar_name(metric.partition(".")[2])
        places = self._cursor.scalars.setdefault(metric, {})
        values = np.frombuffer(reply.value, "<f8").tolist()
        for step, attempt, time_unix_ns, value in sorted(
            zip(steps, ids, times, values, strict=True), key=lambda point: point[:3]
        ):
            # If a value was logged twice in a step, the last one counts, as in a curve.
            if attempt not in attempts or step < places.get(attempt, step):
                continue
            row = rows.get((attempt, step))
            if row is None:
                row = rows[attempt, step] = lineage.new_row(attempt, step, time_unix_ns)
            row.values[name] = value
        for step, attempt in zip(steps, ids, strict=True):
            if attempt in attempts:
                places[attempt] = max(places.get(attempt, step + 1), step + 1)

    # ------------------------------------------------------------------------------ notes

    def _note_batches(
        self, detail: RunDetail, lineage: "_AttemptLineage", *, whole: bool
    ) -> Iterator[EntryBatch]:
        """Yield the run's new decisions as notes for a tracker."""
        summary = detail.summary
        acted = (summary.num_skips, summary.num_rollbacks, summary.last_decision)
        if acted == self._acted and not whole:
            return
        self._acted = acted
        new = [
            view
            for view in self._reader.ask(DecisionsQuestion(run_id=self._run_id))
            if view.decision.ledger_seq > self._cursor.ledger_seq
        ]
        if not new:
            return
        self._cursor.ledger_seq = max(view.decision.ledger_seq for view in new)
        yield self._build_batch(
            [
                _action_note(view.decision, view.time_unix_ns, lineage)
                for view in new
                if view.decision.action != "continue"
            ]
        )


class _AttemptLineage:
    """Steps and attempts in the lineage of the current attempt."""

    def __init__(self, attempts: Sequence[AttemptView]) -> None:
        by_id = {attempt.id: attempt for attempt in attempts}
        self._ordinals = {attempt.id: attempt.ordinal for attempt in attempts}
        self._ends: dict[int, float] = {}
        at, end = (attempts[-1] if attempts else None), math.inf
        while at is not None and at.id not in self._ends:
            self._ends[at.id] = end
            end = min(end, at.fork_step)
            at = None if at.parent is None else by_id.get(at.parent)

    def ordinal(self, attempt: int) -> int:
        """Return the attempt's number in a tracker, from 1; 0 if it is not known yet."""
        return self._ordinals.get(attempt, 0)

    def new_row(self, attempt: int, step: int, time_unix_ns: int) -> TrackerRow:
        """Return a row for a tracker with only its position."""
        ordinal = self.ordinal(attempt)
        return TrackerRow(
            attempt=ordinal,
            step=step,
            time_unix_ns=time_unix_ns,
            values={ATTEMPT: float(ordinal)},
            discarded=step >= self._ends.get(attempt, -1),
        )


def _build_step_rows(
    columns: Sequence[str], data: Sequence[Sequence[object]], lineage: _AttemptLineage
) -> list[TrackerRow]:
    """Return a tracker's row for each step of the reply's columns."""
    by_name = dict(zip(columns, data, strict=True))
    curves = {
        f"train/{_printable_name(name)}": cells
        for name, cells in by_name.items()
        if name not in _KEYS and name not in _PLUMBING and _is_curve(name)
    }
    rows = []
    for at, step in enumerate(by_name["step"]):
        attempt, time_unix_ns = by_name["attempt"][at], by_name["time_unix_ns"][at]
        assert isinstance(step, int) and isinstance(attempt, int) and isinstance(time_unix_ns, int)
        row = lineage.new_row(attempt, step, time_unix_ns)
        for name, cells in curves.items():
            value = cells[at]
            if value is not None:
                row.values[name] = float(str(value)) if isinstance(value, str) else float(value)  # type: ignore[arg-type]
        skipped = by_name.get("skipped")
        if skipped is not None and skipped[at] is not None:
            row.values[SKIPPED] = float(skipped[at])  # type: ignore[arg-type]
        rows.append(row)
    return rows


def _is_curve(name: str) -> bool:
    """Return whether a column of steps is a known metric, which a tracker draws as a curve."""
    return name in _KNOWN or name.partition(".")[0] in _KNOWN


def _printable_name(name: str) -> str:
    """Return a metric's name for a tracker: printable, cut to a length."""
    return printable(name)[:MAX_NAME]


def _scalar_name(name: str) -> str:
    """Return a scalar's name in a tracker: its own, unless Vitals' own curves have that name."""
    head, _, curve = name.partition("/")
    is_taken = head == "vitals" or (head == "train" and _is_curve(curve))
    return _printable_name(f"scalars/{name}" if is_taken else name)


def _fork_entry(attempt: AttemptView) -> Fork:
    """Return the entry that marks in a tracker where a new attempt starts."""
    text = f"attempt {attempt.ordinal} begins at step {attempt.fork_step}: {attempt.reason}"
    return Fork(
        attempt=attempt.ordinal,
        step=attempt.fork_step,
        time_unix_ns=attempt.started_unix_ns,
        text=printable(text),
    )


_LEVELS: dict[str, Level] = {"halt": "error", "rollback": "warning", "restart": "warning"}


def _action_note(decision: Decision, time_unix_ns: int, lineage: _AttemptLineage) -> ActionNote:
    """Return a decision as a note for a tracker."""
    level = _LEVELS.get(decision.action, "info") if decision.acted else "info"
    return ActionNote(
        key=f"decision-{decision.ledger_seq}",
        attempt=lineage.ordinal(decision.attempt),
        step=decision.step,
        time_unix_ns=time_unix_ns,
        level=level,
        title=f"Vitals: {decision.action} at step {decision.step}",
        text=printable(f"step {decision.step}: {decision_text(decision)}"),
    )
