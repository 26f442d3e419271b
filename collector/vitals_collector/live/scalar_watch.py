"""Judges the scalars of a post-training run, as rank 0 recorded them.

Only runs that declared their kind are read. Scalars are read from the store in the order in which
they were written. Those of one step are judged together once a later one was written, or the run
ended: the same rows give the same findings, however they arrive. An announced change counts from
its step on, if its event is stored before these rows are judged.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from sqlalchemy import Connection, select

from trainvitals.detect.posttraining.names import is_read
from trainvitals.detect.posttraining.set import PostTrainingDetectors
from trainvitals.records import ChangeExpected, Finding
from vitals_collector.ingest.projections import stored_info, task_of
from vitals_collector.live.step_join import BEFORE_ALL, Key
from vitals_collector.numbers.interface import RowSpan
from vitals_collector.storage.schema import events, names, sources, streams
from vitals_collector.storage.store import ReadSnapshot

_LOG = logging.getLogger("vitals.collector.scalars")
SCALARS = "scalars"
"""Name of the stream."""
_COLUMNS = ("seq", "attempt", "step", "time_unix_ns", "name", "value")
_NAME_WAIT_NS = 600_000_000_000
"""Longest wait for the name of a row. Its event may be lost: then the row is left out."""


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


class _Names(NamedTuple):
    """Names of one writer's scalars."""

    last: int = -1
    """The last one that is stored or no longer waited for."""
    read: Mapping[int, str] = {}
    """Those that the detectors read."""


class _OpenStep(NamedTuple):
    """The latest step, which may get more rows."""

    key: Key
    time_unix_ns: int
    incarnation: str
    before: int
    """Sequence number of the row before its first one."""


class ScalarsRead(NamedTuple):
    """Result of reading rows: findings about whole steps, and the number of rows."""

    findings: Sequence[FindingAt]
    num_rows: int


class ScalarWatch(msgspec.Struct):
    """The scalars of one run and their detectors. Call ``read`` with each snapshot of the store."""

    run_id: str
    saved: ScalarState
    is_read: bool = True
    """Whether all stored rows were read."""
    _detectors: PostTrainingDetectors | None = None
    _info: bytes | None = None
    """Stored information of a run that declared no kind."""
    _read: dict[str, int] = {}
    _names: dict[str, _Names] = {}
    _waits: dict[str, int] = {}
    """By incarnation: since when a row waits for its name."""
    _changes: list[Key] = []
    """Announced changes that the detectors do not know yet."""
    _open: _OpenStep | None = None
    _values: dict[str, float] = {}
    """Scalars of the open step."""

    @property
    def is_used(self) -> bool:
        """Return whether the run declared a kind whose scalars are judged as they arrive."""
        return self._detectors is not None

    def read(self, moment: ReadSnapshot, budget: int, now_ns: int) -> ScalarsRead:
        """Read at most ``budget`` rows of rank 0. ``now_ns`` is a monotonic clock."""
        self.is_read = True
        findings: list[FindingAt] = []
        num_rows = 0
        if self._detectors is None and not self._find_task(moment.sql):
            return ScalarsRead(findings, num_rows)
        self._changes = self._new_changes(moment.sql)
        for incarnation, last_seq in _incarnations(moment.sql, self.run_id):
            first = self._read.get(incarnation, self.saved.done.get(incarnation, -1)) + 1
            end = until = min(last_seq, first + budget - num_rows - 1)
            if first <= until:
                rows, end = self._named_rows(moment, incarnation, first, until, now_ns)
                for row in rows:
                    findings += self._add(row, incarnation)
                self._read[incarnation] = end
                num_rows += end - first + 1
            if end < last_seq:
                self.is_read = end < until  # a row that waits for its name is not read at once
                break
        return ScalarsRead(findings, num_rows)

    def finish(self) -> list[FindingAt]:
        """Judge the latest step of a run that has ended: no more rows of it arrive."""
        return self._judge_open()

    def _find_task(self, connection: Connection) -> bool:
        """Find the run's kind in the store, and load the detectors of its scalars."""
        info = stored_info(connection, self.run_id)
        if info is None or info == self._info:
            return False
        task = task_of(info)
        detectors = PostTrainingDetectors(task)
        if detectors.is_empty:
            self._info = info
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

    def _new_changes(self, connection: Connection) -> list[Key]:
        """Query the announced changes that the live detectors do not know yet, in order."""
        attempt, step = self.saved.changed
        is_later = (events.c.attempt > attempt) | (
            (events.c.attempt == attempt) & (events.c.step > step)
        )
        query = select(events.c.attempt, events.c.step).where(
            events.c.run_id == self.run_id, events.c.kind == ChangeExpected.__name__, is_later
        )
        return sorted((row.attempt, row.step) for row in connection.execute(query))

    def _named_rows(
        self, moment: ReadSnapshot, incarnation: str, first: int, last: int, now_ns: int
    ) -> tuple[list[_Row], int]:
        """Read scalars whose names have arrived; return also the last row not to read again.

        A row without a stored name waits for it, and with it all later ones.
        """
        span = RowSpan(self.run_id, SCALARS, seqs={incarnation: (first, last + 1)})
        columns = moment.numbers.scan(span, _COLUMNS)
        seqs, ids = columns["seq"].values, columns["name"].values
        writer_names = self._names.get(incarnation, _Names())
        if (ids > writer_names.last).any():
            stored = _names_of(moment.sql, self.run_id, incarnation)
            writer_names = stored._replace(last=max(stored.last, writer_names.last))
        is_unnamed = ids > writer_names.last
        if not is_unnamed.any():
            self._waits.pop(incarnation, None)
        elif now_ns - self._waits.setdefault(incarnation, now_ns) < _NAME_WAIT_NS:
            last = int(seqs[is_unnamed].min()) - 1
        else:
            del self._waits[incarnation]
            writer_names = writer_names._replace(last=int(ids.max()))
        self._names[incarnation] = writer_names
        chosen = np.isin(ids, list(writer_names.read)) & (seqs <= last)
        values = (columns[name].values[chosen].tolist() for name in _COLUMNS)
        return sorted(map(_Row._make, zip(*values, strict=True))), last

    def _add(self, row: _Row, incarnation: str) -> list[FindingAt]:
        """Add a row that arrived to its step; if it starts a step, judge the one before."""
        key = (row.attempt, row.step)
        findings: list[FindingAt] = []
        if self._open is None or key > self._open.key:
            if key <= self.saved.judged:
                return []  # an earlier start that was late
            findings = self._judge_open()
            self._open = _OpenStep(key, row.time_unix_ns, incarnation, row.seq - 1)
        if key == self._open.key:
            self._values[self._names[incarnation].read[row.name]] = row.value
        return findings

    def _judge_open(self) -> list[FindingAt]:
        """Judge the latest step: no more rows of it arrive."""
        if self._open is None or self._detectors is None:
            return []
        key, time_unix_ns, _, _ = self._open
        values, self._open, self._values = self._values, None, {}
        while self._changes and self._changes[0] < key:
            self.saved.changed = self._changes.pop(0)
            self._detectors.expect_change()
        attempt, step = self.saved.judged = key
        findings = self._detectors.update(
            values, step=step, attempt=attempt, time_unix_ns=time_unix_ns
        )
        return [(finding, attempt, time_unix_ns) for finding in findings]

    def holds(self, finding: Finding) -> bool:
        """Return whether the condition of an earlier live finding on scalars still holds."""
        return self._detectors is not None and self._detectors.holds(finding)

    def state(self) -> ScalarState:
        """Return the state to store between polls; rows of the latest step are read again."""
        if self._detectors is None:
            return self.saved
        done = self.saved.done | self._read
        if self._open is not None:
            done[self._open.incarnation] = self._open.before
        return msgspec.structs.replace(
            self.saved, done=done, detectors=self._detectors.state_dict()
        )


def has_unread_scalars(connection: Connection, run_id: str, done: Mapping[str, int]) -> bool:
    """Return whether scalars have arrived that detectors read, but have not read yet."""
    is_unread = any(
        last_seq > done.get(incarnation, -1)
        for incarnation, last_seq in _incarnations(connection, run_id)
    )
    info = stored_info(connection, run_id) if is_unread else None
    return info is not None and not PostTrainingDetectors(task_of(info)).is_empty


def _incarnations(connection: Connection, run_id: str) -> Sequence[tuple[str, int]]:
    """Return the starts of rank 0 whose scalars arrived, oldest first, and their last row."""
    at = (streams.c.run_id == sources.c.run_id) & (streams.c.incarnation == sources.c.incarnation)
    query = (
        select(streams.c.incarnation, streams.c.last_seq)
        .join(sources, at)
        .where(
            streams.c.run_id == run_id,
            streams.c.stream == SCALARS,
            sources.c.source == "rank:0",
        )
        .order_by(sources.c.started_unix_ns, streams.c.incarnation)
    )
    return [(row.incarnation, row.last_seq) for row in connection.execute(query)]


def _names_of(connection: Connection, run_id: str, incarnation: str) -> _Names:
    """Query the names of a writer's scalars that the live detectors read."""
    query = select(names.c.id, names.c.name).where(
        names.c.run_id == run_id,
        names.c.incarnation == incarnation,
        names.c.stream == SCALARS,
    )
    rows = connection.execute(query).all()
    return _Names(
        max((row.id for row in rows), default=-1),
        {row.id: row.name for row in rows if is_read(row.name)},
    )
