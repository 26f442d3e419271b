"""Joins rows: of all ranks to a step, of a node's GPUs to a sample. Pure.

Ranks' rows arrive in batches, each rank's in order, but not in step with the others'. A step is
merged as soon as every awaited rank has passed it. A rank that is late is awaited for a limited
time, then no more until it sends again: its values are missing from the merged steps, and are
counted. Steps are ordered by (attempt, step), because ids of attempts grow with time and a later
attempt may start at an earlier step.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from trainvitals.catalog import LAYER_METRICS, STEP_METRICS
from trainvitals.detect.fleet.base import MergedStep, Value
from trainvitals.rows import Schema, column_of
from vitals_collector.numbers.interface import MAX_RANKS, sorted_distinct

Key = tuple[int, int]
"""Attempt and step: the order in which steps are merged."""
Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Column = tuple[npt.NDArray[Any], Mask]
"""Values, and which of them were measured."""

RUN_COLUMNS = tuple(m.column for m in STEP_METRICS if m.scope == "run")
"""Columns of rank 0, and ``learning_rate.N`` if it has several parameter groups."""
RANK_COLUMNS = (
    "rank_loss",
    "step_duration_seconds",
    "data_wait_seconds",
    "communication_seconds",
    "before_forward_seconds",
    "forward_seconds",
    "backward_seconds",
    "gradient_wait_seconds",
    "after_backward_seconds",
    "run_queue_seconds",
    "optimizer_seconds",
    "checkpoint_seconds",
    "monitor_seconds",
    "rank_grad_norm",
    "reduction_error",
    "memory_allocated_bytes",
    "memory_peak_bytes",
)
"""Columns of every rank that a fleet detector uses; a test compares them with the detectors."""
LAYER_COLUMNS = tuple(m.column for m in LAYER_METRICS)

_CELLS_AT_ONCE = 1 << 20
_NO_TIME = np.int64(-(2**63))


class RowWriters(NamedTuple):
    """Writers of some rows."""

    rank: Ints
    world_size: Ints
    writer: Ints
    """The reader's number for each writer's stream."""


class WriterRows(msgspec.Struct, frozen=True):
    """Decoded rows of any number of writers, each writer's in the order they were written."""

    origin: RowWriters
    seq: Ints
    attempt: Ints
    step: Ints
    time_unix_ns: Ints
    columns: Mapping[str, Column]

    def __len__(self) -> int:
        return len(self.seq)

    def take(self, which: Mask) -> "WriterRows":
        """Select rows to join to steps; the object itself if all are selected."""
        if which.all():
            return self
        return WriterRows(
            RowWriters(*(values[which] for values in self.origin)),
            self.seq[which],
            self.attempt[which],
            self.step[which],
            self.time_unix_ns[which],
            {name: (v[which], ok[which]) for name, (v, ok) in self.columns.items()},
        )

    def until(self, key: Key) -> Mask:
        """Return which of the arrived rows are at or before a key of attempt and step."""
        attempt, step = key
        mask: Mask = (self.attempt < attempt) | ((self.attempt == attempt) & (self.step <= step))
        return mask

    def last(self) -> Key:
        """Return the highest attempt and step of the rows that arrived; there must be rows."""
        attempt = int(self.attempt.max())
        return attempt, int(self.step[self.attempt == attempt].max())


def decode_rank_rows(
    schema: Schema, rows: npt.NDArray[np.void], names: Iterable[str], origin: RowWriters
) -> WriterRows:
    """Decode the ranks' rows as they arrive, to join them; text columns are left out."""

    def whole(name: str) -> Ints:
        return column_of(schema, rows, name)[0].astype(np.int64)

    there = [(name, schema.index[name]) for name in names if name in schema.index]
    places = np.array([i for _, i in there], dtype=np.uint64)
    bits = np.uint64(1) << (places % np.uint64(64))
    # All columns at once: a call costs more than its work for a small run's rows.
    valid = (rows["validity"][:, (places // np.uint64(64)).astype(np.intp)] & bits) != 0
    columns: dict[str, Column] = {}
    for (name, i), measured in zip(there, valid.T, strict=True):
        values = rows[f"c{i}"]
        if values.dtype.kind in "fi":
            columns[name] = (values.copy(), measured)  # release the batch's bytes
    seq = rows["seq"].astype(np.int64)
    return WriterRows(origin, seq, whole("attempt"), whole("step"), whole("time_unix_ns"), columns)


def step_columns(schema: Schema, *, is_rank0: bool) -> list[str]:
    """Return the columns to join of a rank's steps; rank 0 writes for all ranks as well."""
    if not is_rank0:
        return list(RANK_COLUMNS)
    groups = [c.name for c in schema.columns if c.name.startswith("learning_rate.")]
    return [*RANK_COLUMNS, *RUN_COLUMNS, *groups]


# ------------------------------------------------------------------------------------- one range


class LayerPart(NamedTuple):
    """Rows of the layers of one incarnation, with the names it gave them."""

    names: Mapping[int, str]
    rows: WriterRows


class MergeResult(NamedTuple):
    """Merged steps in order, and how many values of ranks they should have had and lack."""

    steps: list[MergedStep]
    num_missing: int


def merge_steps(parts: Sequence[WriterRows], layers: Sequence[LayerPart] = ()) -> MergeResult:
    """Join the ranks' rows to one per (attempt, step); if one was written twice, the last.

    A layer's rows of a step that no rank wrote are left out.
    """
    of_layers = _layers_by_step(layers)
    steps: list[MergedStep] = []
    num_missing = 0
    for attempt in sorted_distinct(np.concatenate([part.attempt for part in parts])).tolist():
        attempt_parts = [part.take(part.attempt == attempt) for part in parts]
        attempt_parts = [part for part in attempt_parts if len(part)]
        width = max(
            max(int(p.origin.world_size.max()), int(p.origin.rank.max()) + 1) for p in attempt_parts
        )
        every = sorted_distinct(np.concatenate([part.step for part in attempt_parts]))
        size = max(1, _CELLS_AT_ONCE // width)
        for start in range(0, len(every), size):
            block = every[start : start + size]
            merged = _merge_block(attempt, block, width, attempt_parts, of_layers)
            steps += merged.steps
            num_missing += merged.num_missing
    return MergeResult(steps, num_missing)


def _merge_block(
    attempt: int,
    steps: Ints,
    width: int,
    parts: Sequence[WriterRows],
    layers: Mapping[Key, dict[str, dict[str, float]]],
) -> MergeResult:
    """Join the ranks' rows of some steps; ``width`` is the number of ranks of the attempt."""
    shape = (len(steps), width)
    times = np.full(len(steps), _NO_TIME)
    of_root = times.copy()
    present = np.zeros(shape, dtype=np.bool_)
    values = np.zeros((len(RANK_COLUMNS), *shape))
    valid = np.zeros(values.shape, dtype=np.bool_)
    run: list[dict[str, Value]] = [{} for _ in steps]
    for part in parts:
        rows = part.take((part.step >= steps[0]) & (part.step <= steps[-1]))
        places, ranks = np.searchsorted(steps, rows.step), rows.origin.rank
        np.maximum.at(times, places, rows.time_unix_ns)
        present[places, ranks] = True
        for i, name in enumerate(RANK_COLUMNS):
            if name in rows.columns:
                values[i, places, ranks], valid[i, places, ranks] = rows.columns[name]
        root = np.flatnonzero(ranks == 0)
        at = places[root]
        of_root[at] = rows.time_unix_ns[root]
        for place, row in zip(at.tolist(), _run_rows(rows, root), strict=True):
            run[place] = row
    times = np.where(of_root > _NO_TIME, of_root, times)
    of_column = valid.reshape(len(RANK_COLUMNS), -1)
    is_measured: list[bool] = np.logical_or.reduce(of_column, axis=1).tolist()
    is_whole: list[bool] = np.logical_and.reduce(of_column, axis=1).tolist()
    names = [name for name, ok in zip(RANK_COLUMNS, is_measured, strict=True) if ok]
    columns = [
        values[i].tolist() if is_whole[i] else _with_gaps(values[i], valid[i])
        for i, ok in enumerate(is_measured)
        if ok
    ]
    of_ranks = list(zip(*columns, strict=True)) if columns else [()] * len(steps)
    merged = [
        MergedStep(
            step=step,
            attempt=attempt,
            time_unix_ns=time,
            run=run[i],
            ranks=dict(zip(names, of_ranks[i], strict=True)),
            layers=layers.get((attempt, step), {}),
        )
        for i, (step, time) in enumerate(zip(steps.tolist(), times.tolist(), strict=True))
    ]
    return MergeResult(merged, int(present.size - present.sum()))


def _run_rows(rows: WriterRows, root: Ints) -> Iterator[dict[str, Value]]:
    """Yield rank 0's measurements of the run for each joined step; missing ones are absent."""
    run_columns = {name: c for name, c in rows.columns.items() if name not in RANK_COLUMNS}
    if len(root) == 1:  # the usual case; an array per number would dominate the cost
        at = int(root[0])
        yield {name: v.item(at) for name, (v, ok) in run_columns.items() if ok.item(at)}
        return
    columns_at_root = {name: (v[root], ok[root]) for name, (v, ok) in run_columns.items()}
    whole = [name for name, (_, ok) in columns_at_root.items() if ok.all()]
    gapped = [
        (n, v.tolist(), ok.tolist())
        for n, (v, ok) in columns_at_root.items()
        if n not in whole and ok.any()
    ]
    lists = (
        zip(*(columns_at_root[name][0].tolist() for name in whole), strict=True) if whole else None
    )
    for i in range(len(root)):
        row = dict(zip(whole, next(lists), strict=True)) if lists is not None else {}
        for name, values, ok in gapped:
            if ok[i]:
                row[name] = values[i]
        yield row


def _with_gaps(values: npt.NDArray[np.float64], valid: Mask) -> list[list[float | None]]:
    """Return the ranks' values of each merged step, with None for missing ones."""
    lists: list[list[float | None]] = values.tolist()
    for i in np.flatnonzero(~valid.all(axis=1)).tolist():
        pairs = zip(lists[i], valid[i].tolist(), strict=True)
        lists[i] = [value if ok else None for value, ok in pairs]
    return lists


def _layers_by_step(parts: Sequence[LayerPart]) -> dict[Key, dict[str, dict[str, float]]]:
    """Return the layers' values by step, to join them with the ranks' rows."""
    by_step: dict[Key, dict[str, dict[str, float]]] = {}
    for names, rows in parts:
        if "layer" not in rows.columns:
            continue
        ids = rows.columns["layer"][0].tolist()
        columns = [
            (name, values.tolist(), ok.tolist())
            for name, (values, ok) in rows.columns.items()
            if name != "layer" and ok.any()
        ]
        keys = zip(rows.attempt.tolist(), rows.step.tolist(), strict=True)
        for i, (key, layer) in enumerate(zip(keys, ids, strict=True)):
            measured = {name: float(values[i]) for name, values, ok in columns if ok[i]}
            by_step.setdefault(key, {})[names.get(layer, f"layer {layer}")] = measured
    return by_step


# ----------------------------------------------------------------------- held until a step is whole

Writer = tuple[str, str]
"""An incarnation and one of its streams."""

BEFORE_ALL: Key = (-(2**63), -(2**63))


class MergeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How long to wait for a rank."""

    patience_seconds: float = 20.0
    """Agents send every second or two; one that is further behind is not awaited."""
    most_rows: int = 1 << 16
    """Rows of ranks that may be held; beyond, the oldest steps are merged as they are."""
    least_steps: int = 50
    """Steps that are held in any case, however many ranks there are."""


class _HeldRows(msgspec.Struct):
    """Rows that came together, and wait for others."""

    since_ns: int
    rows: WriterRows
    names: Mapping[int, str] | None = None
    """For rows of layers, the names of their numbers."""


class _LayerCadence(msgspec.Struct):
    """Steps at which layers are written: not before ``last + gap`` again, as far as known."""

    attempt: int
    last: int
    gap: int = 1

    @property
    def complete_through(self) -> Key:
        """Return up to which step no more rows of layers will arrive."""
        return self.attempt, self.last + self.gap - 1


class _RankPositions:
    """The highest key that each rank has written, and which ranks are not waited for."""

    def __init__(self) -> None:
        self.keys = np.full((0, 2), BEFORE_ALL[0], dtype=np.int64)
        self.absent = np.zeros(0, dtype=np.bool_)

    def reach(self, num: int) -> None:
        """Grow to this number of ranks, for whose rows the join of steps can wait."""
        more = num - len(self.absent)
        if more > 0:
            self.keys = np.pad(self.keys, ((0, more), (0, 0)), constant_values=BEFORE_ALL[0])
            self.absent = np.pad(self.absent, (0, more))

    def move(self, rows: WriterRows, merged: Key) -> None:
        """Record each rank's latest key; a rank ahead of the merged steps is awaited again."""
        # The latest key of each rank by one sort: a loop over thousands of ranks would cost more
        # than all other work on their rows.
        ranks, attempt, step = rows.origin.rank, rows.attempt, rows.step
        if not (ranks[1:] > ranks[:-1]).all():  # otherwise each has one row, in their order
            order = np.lexsort((step, attempt, ranks))
            ranks = ranks[order]
            newest = order[np.flatnonzero(np.append(ranks[1:] != ranks[:-1], True))]
            ranks, attempt, step = rows.origin.rank[newest], attempt[newest], step[newest]
        self.reach(int(ranks[-1]) + 1)
        keys = np.stack((attempt, step), axis=1)
        ahead = _is_after(keys, self.keys[ranks])
        self.keys[ranks[ahead]] = keys[ahead]
        self.absent[ranks[_is_after(keys, np.array([merged]))]] = False

    def lowest(self, num: int) -> Key | None:
        """Return the key that all awaited ones of the first ``num`` have come to."""
        self.reach(num)
        keys = self.keys[:num][~self.absent[:num]]
        if not len(keys):
            return None
        attempt = int(keys[:, 0].min())
        return attempt, int(keys[keys[:, 0] == attempt, 1].min())

    def overtake(self, num: int, merged: Key) -> None:
        """Stop waiting for those of the first ``num`` ranks that are behind the joined steps."""
        self.reach(num)
        self.absent[:num] |= _is_after(np.array([merged]), self.keys[:num])


def _is_after(keys: Ints, others: Ints) -> Mask:
    """Return for each pair whether the first step is later, to order the rows that arrive."""
    after: Mask = (keys[:, 0] > others[:, 0]) | (
        (keys[:, 0] == others[:, 0]) & (keys[:, 1] > others[:, 1])
    )
    return after


class StepMerger(msgspec.Struct):
    """Holds rows until their step is whole. Steps come out in order, each once.

    ``world_size`` is that of the latest start of rank 0; set it when that changes. Rows name their
    writers by the number from ``number_of``.
    """

    config: MergeConfig = msgspec.field(default_factory=MergeConfig)
    world_size: int = 0
    merged: Key = BEFORE_ALL
    """The last key that came out."""
    num_missing: int = 0
    """Values of ranks that were not there when their step was merged."""
    num_late: int = 0
    """Rows that arrived after their step had been merged: they are ignored."""
    num_held: int = 0
    """Rows of ranks that wait."""
    _held: list[_HeldRows] = []
    _positions: _RankPositions = msgspec.field(default_factory=_RankPositions)
    _numbers: dict[Writer, int] = {}
    _read: Ints = msgspec.field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """By a writer's number: the last of its rows that was added."""
    _cadence: _LayerCadence | None = None
    _awaits_layers: bool = False

    @property
    def absent(self) -> frozenset[int]:
        """Return the ranks for whose rows no step waits until they report again."""
        return frozenset(np.flatnonzero(self._positions.absent).tolist())

    @property
    def is_empty(self) -> bool:
        """Return whether no row waits to be joined to a step."""
        return not self._held

    @property
    def most_held(self) -> int:
        """Return how many rows of ranks may wait for other ranks, to be joined to steps."""
        return max(self.config.most_rows, self.config.least_steps * self._num_ranks)

    def number_of(self, writer: Writer) -> int:
        """Return the number by which rows name this writer."""
        number = self._numbers.setdefault(writer, len(self._numbers))
        if number >= len(self._read):
            self._read = np.pad(self._read, (0, number + 64), constant_values=-1)
        return number

    def add(self, rows: WriterRows, now_ns: int) -> None:
        """Add rows of ranks' steps; those of one writer in order."""
        self._advance_read_seqs(rows)
        rows = rows.take(rows.origin.rank < MAX_RANKS)
        if not len(rows):
            return
        np.minimum(rows.origin.world_size, MAX_RANKS, out=rows.origin.world_size)
        self._positions.move(rows, self.merged)
        self.num_held += self._hold_rows(_HeldRows(now_ns, rows))

    def add_layers(self, part: LayerPart, now_ns: int) -> None:
        """Add rows of layers, to be joined to the ranks' rows of their steps."""
        rows = part.rows
        if not len(rows):
            return
        for attempt, step in zip(rows.attempt.tolist(), rows.step.tolist(), strict=True):
            cadence = self._cadence
            if cadence is None or attempt != cadence.attempt or step < cadence.last:
                gap = cadence.gap if cadence is not None else 1
                self._cadence = _LayerCadence(attempt, step, gap)
            elif step > cadence.last:
                self._cadence = _LayerCadence(attempt, step, step - cadence.last)
        self._awaits_layers = self._awaits_layers or rows.last() > self.merged
        self._advance_read_seqs(rows)
        self._hold_rows(_HeldRows(now_ns, rows, part.names))

    def _advance_read_seqs(self, rows: WriterRows) -> None:
        """Record up to which row each writer was added to the step merger."""
        np.maximum.at(self._read, rows.origin.writer, rows.seq)

    def _hold_rows(self, pending: _HeldRows) -> int:
        """Hold rows until their step is whole; ignore those of merged steps."""
        late = pending.rows.until(self.merged)
        if late.any():
            self.num_late += int(late.sum())
            pending.rows = pending.rows.take(~late)
        if len(pending.rows):
            self._held.append(pending)
        return len(pending.rows)

    def take_ready(self, now_ns: int, *, gate: Key | None = None) -> list[MergedStep]:
        """Return and drop the steps that are complete or have waited long enough.

        ``now_ns`` is the clock by which rows were added. Rows up to the key ``gate`` have all been
        added; None: all existing rows have.
        """
        # Called several times a second for every run, mostly without result: ranks' positions come
        # from arrays, and no row is touched before a step is known to be complete.
        until = max(self._complete_key(), self._overdue_key(now_ns), self._overflow_key())
        if gate is not None:
            until = min(until, gate)
        if until <= self.merged or not self._held:
            return []
        taken, layers = self._pop_held_rows(until)
        if not taken:
            return []  # layers only: of steps that no rank wrote
        merged = merge_steps(taken, layers)
        last = merged.steps[-1]
        self.merged = (last.attempt, last.step)
        self.num_missing += merged.num_missing
        self._positions.overtake(self._num_ranks, self.merged)
        if self._cadence is not None and self._cadence.complete_through < self.merged:
            self._awaits_layers = False
        return merged.steps

    def _pop_held_rows(self, until: Key) -> tuple[list[WriterRows], list[LayerPart]]:
        """Return and drop the rows up to a key."""
        taken: list[WriterRows] = []
        layers: list[LayerPart] = []
        pending_later: list[_HeldRows] = []
        for pending in self._held:
            ready_rows = pending.rows.until(until)
            if ready_rows.any():
                due_rows = pending.rows.take(ready_rows)
                if pending.names is None:
                    self.num_held -= len(due_rows)
                    taken.append(due_rows)
                else:
                    layers.append(LayerPart(pending.names, due_rows))
            if not ready_rows.all():
                pending.rows = pending.rows.take(~ready_rows)
                pending_later.append(pending)
        self._held = pending_later
        return taken, layers

    @property
    def _num_ranks(self) -> int:
        """Return the number of ranks from which each step is joined."""
        return min(self.world_size, MAX_RANKS) or len(self._positions.absent)

    def _complete_key(self) -> Key:
        """Return the key up to which the rows of every awaited writer have arrived."""
        lowest = self._positions.lowest(self._num_ranks)
        awaited = [] if lowest is None else [lowest]
        if self._awaits_layers and self._cadence is not None:
            awaited.append(self._cadence.complete_through)
        return min(awaited, default=BEFORE_ALL)

    def _overdue_key(self, now_ns: int) -> Key:
        """Return the latest step whose rows have waited long enough for late ranks."""
        waited = now_ns - int(self.config.patience_seconds * 1e9)
        old = (pending.rows.last() for pending in self._held if pending.since_ns <= waited)
        return max(old, default=BEFORE_ALL)

    def _overflow_key(self) -> Key:
        """Return the key up to which steps must come out for the rest to be few enough."""
        most = self.most_held
        if self.num_held <= most:
            return BEFORE_ALL
        ranks = [pending.rows for pending in self._held if pending.names is None]
        attempt = np.concatenate([rows.attempt for rows in ranks])
        step = np.concatenate([rows.step for rows in ranks])
        at = np.lexsort((step, attempt))[len(step) - most - 1]
        return int(attempt[at]), int(step[at])

    # ------------------------------------------------------------------------------- over restarts

    def done(self) -> dict[Writer, int]:
        """Return the sequence number up to which each writer's rows need not be read again."""
        done = self._read.copy()
        for pending in self._held:
            np.minimum.at(done, pending.rows.origin.writer, pending.rows.seq - 1)
        return dict(zip(self._numbers, done[: len(self._numbers)].tolist(), strict=True))

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a restart needs, as JSON types; held rows are read again."""
        cadence = self._cadence
        return {
            "merged": list(self.merged),
            "absent": sorted(self.absent),
            "cadence": None if cadence is None else [cadence.attempt, cadence.last, cadence.gap],
            "awaits_layers": self._awaits_layers,
            "num_missing": self.num_missing,
            "num_late": self.num_late,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue as the merger that returned ``state``; rows that it held must be added again."""
        attempt, step = state["merged"]
        self.merged = (int(attempt), int(step))
        absent = [int(rank) for rank in state["absent"]]
        self._positions = _RankPositions()
        self._positions.reach(max(absent, default=-1) + 1)
        self._positions.absent[absent] = True
        cadence = state["cadence"]
        self._cadence = None if cadence is None else _LayerCadence(*cadence)
        self._awaits_layers = bool(state["awaits_layers"])
        self.num_missing, self.num_late = int(state["num_missing"]), int(state["num_late"])


# -------------------------------------------------------------------------------- samples of a node

GPU_COLUMNS = (
    "memory_total_bytes",
    "throttle_reasons",
    "sm_clock_hertz",
    "temperature_celsius",
    "power_watts",
    "ecc_corrected_errors",
    "ecc_uncorrected_errors",
    "last_xid",
)
"""Columns of a GPU that a fleet detector uses, none of the node's own; a test compares them with
the detectors. A GPU without any of these values is lost."""
_MOST_SAMPLES = 4_096
"""Rows of GPUs that wait for the node's own row; beyond, the oldest are dropped and counted."""


class HostRow(NamedTuple):
    """One row of a node or of one of its GPUs: the values that detectors use."""

    seq: int
    monotonic_ns: int
    time_unix_ns: int
    values: Mapping[str, Value]


class NodeSamples(NamedTuple):
    """Samples of an agent at one time: a ``NodeSample`` without a step."""

    node: str
    time_unix_ns: int
    gpus: Mapping[str, Mapping[str, Value]]


class _PendingHostRow(NamedTuple):
    """A row of a node or GPU that waits for its round of samples."""

    writer: Writer
    uuid: str
    row: HostRow


class _NodeRows(msgspec.Struct):
    hosts: deque[_PendingHostRow] = msgspec.field(default_factory=deque)
    gpus: list[_PendingHostRow] = []


class NodeMerger:
    """Joins the rows of a node's GPUs to the node's own.

    An agent writes its node's row first in each round, then those of the GPUs: rows between two
    rows of the node belong together, by its monotonic clock. So the latest round is complete when
    the next starts; otherwise a GPU whose row has not arrived yet would seem lost.
    """

    def __init__(self) -> None:
        self._num_dropped = 0
        self._nodes: dict[str, _NodeRows] = {}
        self._read: dict[Writer, int] = {}

    def add(self, writer: Writer, node: str, uuid: str, rows: Iterable[HostRow]) -> None:
        """Add rows, the node's own if ``uuid`` is empty; those of a writer in order."""
        node_rows = self._nodes.setdefault(node, _NodeRows())
        for row in rows:
            self._read[writer] = row.seq
            waiting = _PendingHostRow(writer, uuid, row)
            if not uuid:
                node_rows.hosts.append(waiting)
            else:
                node_rows.gpus.append(waiting)
        excess = len(node_rows.gpus) - _MOST_SAMPLES
        if excess > 0:
            self._num_dropped += excess
            del node_rows.gpus[:excess]

    def take_ready(self, gates: Mapping[str, int]) -> list[NodeSamples]:
        """Return and drop the complete rounds of samples, by time.

        ``gates`` has, for a node with rows that were not added yet, the monotonic time up to which
        all have been.
        """
        rounds: list[NodeSamples] = []
        for node, node_rows in self._nodes.items():
            gate = gates.get(node)
            while len(node_rows.hosts) > 1 and (
                gate is None or node_rows.hosts[1].row.monotonic_ns <= gate
            ):
                rounds.append(_next_round(node, node_rows))
        return sorted(rounds, key=lambda host_round: host_round.time_unix_ns)

    def take_dropped(self) -> int:
        """Return the number of dropped rows of GPUs since the last call."""
        num, self._num_dropped = self._num_dropped, 0
        return num

    def done(self) -> dict[Writer, int]:
        """Return the sequence number up to which each writer's rows need not be read again."""
        done = dict(self._read)
        for node_rows in self._nodes.values():
            for writer, _, row in (*node_rows.hosts, *node_rows.gpus):
                done[writer] = min(done[writer], row.seq - 1)
        return done


def _next_round(node: str, node_rows: _NodeRows) -> NodeSamples:
    """Return and drop a node's oldest complete round of GPU samples."""
    begin = node_rows.hosts.popleft().row
    end = node_rows.hosts[0].row.monotonic_ns
    is_rebooted = end < begin.monotonic_ns
    round_rows: list[_PendingHostRow] = []
    rest: list[_PendingHostRow] = []
    for waiting in node_rows.gpus:
        at = waiting.row.monotonic_ns
        belongs = at >= begin.monotonic_ns if is_rebooted else at < end
        (round_rows if belongs else rest).append(waiting)
    node_rows.gpus = rest
    gpus = {waiting.uuid: waiting.row.values for waiting in round_rows}
    return NodeSamples(node, begin.time_unix_ns, gpus)


def host_rows(schema: Schema, rows: npt.NDArray[np.void]) -> list[HostRow]:
    """Decode rows of a node or one of its GPUs as they arrive, to join them to a sample."""
    columns = []
    for name in GPU_COLUMNS if schema.stream == "gpu" else ():
        values, valid = column_of(schema, rows, name)
        if values.dtype.kind in "fi":
            measured = zip(values.tolist(), valid.tolist(), strict=True)
            columns.append((name, [value if ok else None for value, ok in measured]))
    seqs, at, when = (
        column.astype(np.int64).tolist()
        for column in (
            rows["seq"],
            column_of(schema, rows, "monotonic_ns")[0],
            column_of(schema, rows, "time_unix_ns")[0],
        )
    )
    return [
        HostRow(seqs[i], at[i], when[i], {name: values[i] for name, values in columns})
        for i in range(len(rows))
    ]
