"""Merges decoded rows of all ranks into one row a step; pure functions of arrays."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trainvitals.catalog import LAYER_METRICS, STEP_METRICS
from trainvitals.detect.fleet.base import MergedStep, Value
from trainvitals.rows import Schema, column_of

Key = tuple[int, int]
"""Attempt and step: the order in which steps are merged."""
Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Column = tuple[npt.NDArray[Any], Mask]
"""Values, and which of them were measured."""

RUN_COLUMNS = tuple(m.column for m in STEP_METRICS if m.scope == "run")
"""Columns of rank 0, and ``learning_rate.N`` where it has several parameter groups."""
RANK_COLUMNS = (
    "rank_loss",
    "step_duration_seconds",
    "data_wait_seconds",
    "communication_seconds",
    "forward_backward_seconds",
    "memory_allocated_bytes",
    "memory_peak_bytes",
)
"""Columns of every rank that a watcher looks at; a test holds the watchers to them."""
LAYER_COLUMNS = tuple(m.column for m in LAYER_METRICS)

_CELLS_AT_ONCE = 1 << 20
_NO_TIME = np.int64(-(2**63))


class Origin(NamedTuple):
    """Who wrote each of some rows."""

    rank: Ints
    world_size: Ints
    writer: Ints
    """A number of the reader's own for each writer's stream."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Decoded rows of any number of writers, each writer's in the order they were written."""

    origin: Origin
    seq: Ints
    attempt: Ints
    step: Ints
    time_unix_ns: Ints
    columns: Mapping[str, Column]

    def __len__(self) -> int:
        return len(self.seq)

    def take(self, which: Mask) -> "Rows":
        """Return the chosen rows; these themselves where that is all of them."""
        if which.all():
            return self
        return Rows(
            Origin(*(values[which] for values in self.origin)),
            self.seq[which],
            self.attempt[which],
            self.step[which],
            self.time_unix_ns[which],
            {name: (v[which], ok[which]) for name, (v, ok) in self.columns.items()},
        )

    def until(self, key: Key) -> Mask:
        """Return which rows lie at or before a key."""
        attempt, step = key
        chosen: Mask = (self.attempt < attempt) | ((self.attempt == attempt) & (self.step <= step))
        return chosen

    def last(self) -> Key:
        """Return the highest key; there must be rows."""
        attempt = int(self.attempt.max())
        return attempt, int(self.step[self.attempt == attempt].max())


def decode(
    schema: Schema, rows: npt.NDArray[np.void], names: Iterable[str], origin: Origin
) -> Rows:
    """Return the rows' numbers; text and unknown columns are left out."""

    def whole(name: str) -> Ints:
        return column_of(schema, rows, name)[0].astype(np.int64)

    columns = {}
    for name in names:
        if name in schema.index:
            values, valid = column_of(schema, rows, name)
            if values.dtype.kind in "fi":
                columns[name] = (values.copy(), valid)  # the batch's bytes are let go
    seq = rows["seq"].astype(np.int64)
    return Rows(origin, seq, whole("attempt"), whole("step"), whole("time_unix_ns"), columns)


def step_columns(schema: Schema, *, is_rank0: bool) -> list[str]:
    """Return the columns to decode of a rank's steps; rank 0 writes for all as well."""
    if not is_rank0:
        return list(RANK_COLUMNS)
    groups = [c.name for c in schema.columns if c.name.startswith("learning_rate.")]
    return [*RANK_COLUMNS, *RUN_COLUMNS, *groups]


# ------------------------------------------------------------------------------------- one range


class LayerPart(NamedTuple):
    """Rows of the layers of one incarnation, with the names it gave them."""

    names: Mapping[int, str]
    rows: Rows


class Merged(NamedTuple):
    """Merged steps in order, and how many values of ranks they should have had and lack."""

    steps: list[MergedStep]
    num_missing: int


def merge(parts: Sequence[Rows], layers: Sequence[LayerPart] = ()) -> Merged:
    """Return one row for each (attempt, step) that any rank wrote; of one written twice the last.

    A layer's rows of a step that no rank wrote are left out.
    """
    of_layers = _layers_by_step(layers)
    steps: list[MergedStep] = []
    num_missing = 0
    attempts = sorted({int(a) for part in parts for a in np.unique(part.attempt)})
    for attempt in attempts:
        mine = [part.take(part.attempt == attempt) for part in parts]
        mine = [part for part in mine if len(part)]
        width = max(max(int(p.origin.world_size.max()), int(p.origin.rank.max()) + 1) for p in mine)
        every = np.unique(np.concatenate([part.step for part in mine]))
        size = max(1, _CELLS_AT_ONCE // width)
        for start in range(0, len(every), size):
            block = every[start : start + size]
            merged = _merge_block(attempt, block, width, mine, of_layers)
            steps += merged.steps
            num_missing += merged.num_missing
    return Merged(steps, num_missing)


def _merge_block(
    attempt: int,
    steps: Ints,
    width: int,
    parts: Sequence[Rows],
    layers: Mapping[Key, dict[str, dict[str, float]]],
) -> Merged:
    """Merge some steps of one attempt; ``width`` is the number of its ranks."""
    shape = (len(steps), width)
    times = np.full(len(steps), _NO_TIME)
    of_root = times.copy()
    present = np.zeros(shape, dtype=np.bool_)
    values = {name: np.zeros(shape) for name in RANK_COLUMNS}
    valid = {name: np.zeros(shape, dtype=np.bool_) for name in RANK_COLUMNS}
    run: list[dict[str, Value]] = [{} for _ in steps]
    for part in parts:
        rows = part.take((part.step >= steps[0]) & (part.step <= steps[-1]))
        places, ranks = np.searchsorted(steps, rows.step), rows.origin.rank
        np.maximum.at(times, places, rows.time_unix_ns)
        present[places, ranks] = True
        for name, (measured, ok) in rows.columns.items():
            if name in values:
                values[name][places, ranks] = measured
                valid[name][places, ranks] = ok
        root = rows.take(ranks == 0)
        at = places[ranks == 0]
        of_root[at] = root.time_unix_ns
        for place, row in zip(at.tolist(), _run_rows(root), strict=True):
            run[place] = row
    times = np.where(of_root > _NO_TIME, of_root, times)
    names = [name for name in RANK_COLUMNS if valid[name].any()]
    columns = [_with_gaps(values[name], valid[name]) for name in names]
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
    return Merged(merged, int(present.size - present.sum()))


def _run_rows(rows: Rows) -> Iterator[dict[str, Value]]:
    """Yield what rank 0 measured for all, of each row; what is missing is absent."""
    own = {name: column for name, column in rows.columns.items() if name not in RANK_COLUMNS}
    whole = [name for name, (_, ok) in own.items() if ok.all()]
    gapped = [
        (n, v.tolist(), ok.tolist()) for n, (v, ok) in own.items() if n not in whole and ok.any()
    ]
    lists = zip(*(own[name][0].tolist() for name in whole), strict=True) if whole else None
    for i in range(len(rows)):
        row = dict(zip(whole, next(lists), strict=True)) if lists is not None else {}
        for name, values, ok in gapped:
            if ok[i]:
                row[name] = values[i]
        yield row


def _with_gaps(values: npt.NDArray[np.float64], valid: Mask) -> list[list[float | None]]:
    """Return a list for each step, with None where a rank has no value."""
    lists: list[list[float | None]] = values.tolist()
    for i in np.flatnonzero(~valid.all(axis=1)).tolist():
        pairs = zip(lists[i], valid[i].tolist(), strict=True)
        lists[i] = [value if ok else None for value, ok in pairs]
    return lists


def _layers_by_step(parts: Sequence[LayerPart]) -> dict[Key, dict[str, dict[str, float]]]:
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


__all__ = [
    "LAYER_COLUMNS",
    "RANK_COLUMNS",
    "Key",
    "LayerPart",
    "Merged",
    "Origin",
    "Rows",
    "decode",
    "merge",
    "step_columns",
]
