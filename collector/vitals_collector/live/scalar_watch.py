"""Judges the scalars of a post-training run, as rank 0 recorded them.

Only runs that declared their kind are read. Scalars are read from the store in the order in which
they were written, and those of one step are judged together once a later one was written: the same
rows give the same findings, however they arrive.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import Connection, select

from trainvitals.detect.posttraining.set import PostTrainingDetectors
from trainvitals.records import ChangeExpected, Finding
from vitals_collector.ingest.projections import task_of
from vitals_collector.live.step_join import BEFORE_ALL, Key
from vitals_collector.numbers.interface import NumbersReader, RowSpan
from vitals_collector.storage.schema import events, names, sources, streams
from vitals_collector.storage.store import ReadSnapshot

_LOG = logging.getLogger("vitals.collector.scalars")
_COLUMNS = ("seq", "attempt", "step", "time_unix_ns", "name", "value")


class ScalarState(msgspec.Struct, kw_only=True):
    """Position in a run's scalars, and the state of their detectors."""

    done: dict[str, int] = {}
    """By incarnation of rank 0: the sequence number up to which rows are judged."""
    judged: Key = BEFORE_ALL
    """The last judged step."""
    changed: Key = BEFORE_ALL
    """The last announced change that the detectors know."""
    detectors: dict[str, Any] = {}


FindingAt = tuple[Finding, int, int]
"""A finding, its attempt and its time."""


class _Row(NamedTuple):
    seq: int
    attempt: int
    step: int
    time_unix_ns: int
    name: int
    value: float


@dataclass(slots=True)
class ScalarWatch:
    """The scalars of one run and their detectors. Call ``read`` with each snapshot of the store."""

    run_id: str
    saved: ScalarState
    is_read: bool = True
    """Whether all stored rows were read."""
    _detectors: PostTrainingDetectors | None = None
    _read: dict[str, int] = field(default_factory=dict)
    _open: tuple[Key, int] | None = None
    """The latest step, which may get more rows, and its time."""
    _values: dict[str, float] = field(default_factory=dict)
    """Its scalars."""

    @property
    def is_used(self) -> bool:
        """Whether the run declared a kind of which scalars are judged."""
        return self._detectors is not None

    def read(self, moment: ReadSnapshot, budget: int) -> list[FindingAt]:
        """Read about ``budget`` rows of rank 0, and return the findings about whole steps."""
        if self._detectors is None and not self._find_task(moment.sql):
            return []
        changes = self._new_changes(moment.sql)
        findings: list[FindingAt] = []
        self.is_read = True
        for incarnation, last_seq in self._incarnations(moment.sql):
            first = self._read.get(incarnation, self.saved.done.get(incarnation, -1)) + 1
            if first > last_seq:
                continue
            end = min(last_seq, first + max(budget, 1) - 1)
            known = _names_of(moment.sql, self.run_id, incarnation)
            for row in _rows(moment.numbers, self.run_id, incarnation, first, end):
                if row.name > max(known, default=-1):
                    end = row.seq - 1  # its name is not stored yet: read it again later
                    last_seq = end
                    break
                findings += self._add(row, known, incarnation, changes)
            self._read[incarnation] = end
            budget -= end - first + 1
            if end < last_seq:
                self.is_read = False
                break
        return findings

    def _find_task(self, connection: Connection) -> bool:
        task = task_of(connection, self.run_id)
        detectors = PostTrainingDetectors(task)
        if detectors.is_empty:
            return False
        if self.saved.detectors:
            try:
                detectors.load_state_dict(self.saved.detectors)
            except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
                # State of another version: the detectors start without it.
                _LOG.warning("scalars_start_anew run=%s reason=%r", self.run_id, error)
                detectors = PostTrainingDetectors(task)
        self._detectors = detectors
        return True

    def _incarnations(self, connection: Connection) -> Sequence[tuple[str, int]]:
        """Return the starts of rank 0 with scalars, oldest first, and their last stored row."""
        at = (streams.c.run_id == sources.c.run_id) & (
            streams.c.incarnation == sources.c.incarnation
        )
        query = (
            select(streams.c.incarnation, streams.c.last_seq)
            .join(sources, at)
            .where(
                streams.c.run_id == self.run_id,
                streams.c.stream == "scalars",
                sources.c.source == "rank:0",
            )
            .order_by(sources.c.started_unix_ns, streams.c.incarnation)
        )
        return [(row.incarnation, row.last_seq) for row in connection.execute(query)]

    def _new_changes(self, connection: Connection) -> list[Key]:
        """Return the announced changes that the detectors do not know yet, in order."""
        attempt, step = self.saved.changed
        is_later = (events.c.attempt > attempt) | (
            (events.c.attempt == attempt) & (events.c.step > step)
        )
        query = select(events.c.attempt, events.c.step).where(
            events.c.run_id == self.run_id, events.c.kind == ChangeExpected.__name__, is_later
        )
        return sorted((row.attempt, row.step) for row in connection.execute(query))

    def _add(
        self, row: _Row, known: Mapping[int, str], incarnation: str, changes: list[Key]
    ) -> list[FindingAt]:
        key, name = (row.attempt, row.step), known.get(row.name)
        findings: list[FindingAt] = []
        if self._open is None or key > self._open[0]:
            if key <= self.saved.judged:
                return []  # an earlier start that was late
            findings = self._judge_open(changes)
            self._open = key, row.time_unix_ns
            self.saved.done[incarnation] = row.seq - 1
        if key == self._open[0] and name is not None:
            self._values[name] = row.value
        return findings

    def _judge_open(self, changes: list[Key]) -> list[FindingAt]:
        """Judge the latest step: it gets no more rows."""
        if self._open is None or self._detectors is None:
            return []
        (key, time_unix_ns), values, self._values = self._open, self._values, {}
        while changes and changes[0] < key:
            self.saved.changed = changes.pop(0)
            self._detectors.expect_change()
        attempt, step = self.saved.judged = key
        findings = self._detectors.update(
            values, step=step, attempt=attempt, time_unix_ns=time_unix_ns
        )
        return [(finding, attempt, time_unix_ns) for finding in findings]

    def lasting(self) -> frozenset[str]:
        """Return the detectors with a reported condition that still holds."""
        return frozenset() if self._detectors is None else self._detectors.lasting()

    def state(self) -> ScalarState:
        """Return the state to store; rows of the latest step are read again."""
        detectors = {} if self._detectors is None else self._detectors.state_dict()
        done = dict(self.saved.done)
        return msgspec.structs.replace(self.saved, done=done, detectors=detectors)


def _names_of(connection: Connection, run_id: str, incarnation: str) -> dict[int, str]:
    query = select(names.c.id, names.c.name).where(
        names.c.run_id == run_id,
        names.c.incarnation == incarnation,
        names.c.stream == "scalars",
    )
    return {row.id: row.name for row in connection.execute(query)}


def _rows(
    numbers: NumbersReader, run_id: str, incarnation: str, first: int, last: int
) -> Iterator[_Row]:
    """Yield the rows of a writer in the order they were written."""
    span = RowSpan(run_id, "scalars", seqs={incarnation: (first, last + 1)})
    columns = numbers.scan(span, _COLUMNS)
    rows = zip(*(columns[name].values.tolist() for name in _COLUMNS), strict=True)
    yield from sorted(_Row(*row) for row in rows)
