"""A long run with planted spikes and non-finite values, stored by us and as wide rows."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
from sqlalchemy import Table

from trainvitals.catalog import ROW_COLUMNS
from trainvitals.identity import Identity, new_run_id
from trainvitals.io.rundir import RunDir
from trainvitals.io.spool import Spool
from trainvitals.records import (
    EVENT_SCHEMA,
    AttemptStarted,
    CheckpointChanged,
    Decision,
    DecisionMade,
    Event,
    Finding,
    FindingRaised,
    Note,
    RunInfo,
    RunStarted,
    encode_event,
)
from trainvitals.rows import Column, Schema
from trainvitals.wire import BatchHeader, encode_batch
from vitals_bench import wide
from vitals_bench.ingest.records import ATTEMPT, identity_of
from vitals_collector.ingest.ingest import ingest_all
from vitals_collector.storage.store import Store

BATCH_ROWS = 1_000
_RECEIVED_NS = 1
_BEGIN_NS = 1_700_000_000_000_000_000
_STEP_NS = 1_000_000_000
_NUM_EVENTS = 100
"""Of each kind."""
_WINDOWS = 200
"""Each window has one spike, so that no larger one may be drawn instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How long the run is, and how wide."""

    num_steps: int
    num_metrics: int
    num_ranks: int = 64
    """Rank 0 has every step, the others the last ones."""
    num_last: int = 1_000
    rounds: int = 7


@dataclass(frozen=True, slots=True)
class Planted:
    """What must be in every drawing: one-step spikes with their values, and what is not finite."""

    spikes: dict[int, float] = field(default_factory=dict)
    nonfinite: dict[int, float] = field(default_factory=dict)


def names_of(size: Size) -> tuple[str, ...]:
    """Return the metrics' columns."""
    return ("loss", "grad_norm", *(f"metric_{i}" for i in range(2, size.num_metrics)))


def plant(num_steps: int, *, num_spikes: int = 40, num_nonfinite: int = 40) -> Planted:
    """Return spikes up and down, NaNs and infinities, at random steps."""
    rng = np.random.default_rng(7)
    wide = num_steps // _WINDOWS
    starts = rng.permutation(_WINDOWS)[: num_spikes + num_nonfinite] * wide
    steps = [int(start + rng.integers(wide // 4, wide // 2)) for start in starts]
    heights = [float(np.float32(s * h)) for s, h in _heights(rng, num_spikes)]
    kinds = [(np.nan, np.inf, -np.inf)[i % 3] for i in range(num_nonfinite)]
    return Planted(
        dict(zip(steps[:num_spikes], heights, strict=True)),
        dict(zip(steps[num_spikes:], kinds, strict=True)),
    )


def _heights(rng: np.random.Generator, count: int) -> Iterator[tuple[int, float]]:
    for i in range(count):
        yield (1 if i % 2 else -1), float(rng.uniform(5.0, 50.0))


def pieces(size: Size, planted: Planted) -> Iterator[tuple[int, npt.NDArray[np.float64]]]:
    """Yield the first step and the values, by step and metric, of some steps at a time."""
    rng = np.random.default_rng(3)
    everything = {**planted.spikes, **planted.nonfinite}
    for first in range(0, size.num_steps, 10 * BATCH_ROWS):
        num = min(10 * BATCH_ROWS, size.num_steps - first)
        noise = rng.standard_normal((num, size.num_metrics))
        values = (1.0 + 0.01 * noise).astype(np.float32).astype(np.float64)
        for step, value in everything.items():
            if first <= step < first + num:
                values[step - first, 0] = value
        yield first, values


class Filling:
    """Stores the run; ``run_id`` is its name, ``names`` are its metrics unless they are given."""

    def __init__(self, size: Size, names: Sequence[str] = ()) -> None:
        self.run_id = new_run_id(time.time_ns())
        self.size = size
        self.names = tuple(names) or names_of(size)
        self.planted = plant(size.num_steps)
        self._schema = Schema("steps", (*ROW_COLUMNS, *(Column(n, "f8") for n in self.names)))

    @property
    def incident(self) -> int:
        """The step that people ask about."""
        return self.size.num_steps - self.size.num_last // 2

    def fill(self, store: Store, *, is_merged: bool = True) -> None:
        """Store the run as it would have come, and merge its files, or leave that to do."""
        ingest_all(store, [self._events(self._identity(0))], _RECEIVED_NS)
        for batches in self._row_batches():
            ingest_all(store, batches, _RECEIVED_NS)
        if is_merged:
            wide.merge(store)

    def fill_folder(self, folder: Path) -> Path:
        """Write the run as an agent without a collector does; return the directory of runs."""
        spool = Spool(
            RunDir.create(folder, self.run_id).agent_dir("bench") / "spool",
            max_bytes=1 << 34,
            keep=True,
        )
        spool.append(self._events(self._identity(0)))
        for batches in self._row_batches():
            for raw in batches:
                spool.append(raw)
        spool.close()
        return folder

    def _row_batches(self) -> Iterator[list[bytes]]:
        for first, values in pieces(self.size, self.planted):
            yield list(self._batches(self._identity(0), first, values))
        rng = np.random.default_rng(5)
        first = self.size.num_steps - self.size.num_last
        for rank in range(1, self.size.num_ranks):
            values = 1.0 + 0.01 * rng.standard_normal((self.size.num_last, len(self.names)))
            yield list(self._batches(self._identity(rank), first, values, first_seq=first))

    def fill_wide(self, store: Store, table: Table) -> None:
        """Store rank 0's steps as wide rows, by the driver's own executemany."""
        keys = ("run_id", "rank", "step", "time_unix_ns")
        columns = ", ".join((*keys, *self.names))
        marks = ", ".join("?" * (len(keys) + len(self.names)))
        insert = f"INSERT INTO {table.name} ({columns}) VALUES ({marks})"
        with store.write() as connection:
            table.create(connection)
        for first, values in pieces(self.size, self.planted):
            rows = [
                (self.run_id, 0, first + i, _BEGIN_NS + (first + i) * _STEP_NS, *row)
                for i, row in enumerate(values.tolist())
            ]
            with store.write() as connection:
                connection.exec_driver_sql(insert, rows)

    def one_more(self, number: int) -> bytes:
        """Return the step that comes so many after the last one, as rank 0 sends it."""
        values = np.ones((1, len(self.names)))
        step = self.size.num_steps + number
        (raw,) = self._batches(self._identity(0), step, values)
        return raw

    def _identity(self, rank: int) -> Identity:
        return identity_of(self.run_id, rank, world_size=self.size.num_ranks)

    def _batches(
        self,
        identity: Identity,
        first: int,
        values: npt.NDArray[np.float64],
        *,
        first_seq: int | None = None,
    ) -> Iterator[bytes]:
        rows = np.zeros(len(values), self._schema.dtype)
        steps = np.arange(first, first + len(values))
        rows["seq"] = steps - (first_seq or 0)
        rows["validity"] = (1 << len(self._schema.columns)) - 1
        times = _BEGIN_NS + steps * _STEP_NS
        for i, column in enumerate((steps, ATTEMPT, times, times)):
            rows[f"c{i}"] = column
        for i in range(len(self.names)):
            rows[f"c{len(ROW_COLUMNS) + i}"] = values[:, i]
        for start in range(0, len(rows), BATCH_ROWS):
            chunk = rows[start : start + BATCH_ROWS]
            header = BatchHeader(
                identity=identity,
                stream_schema=self._schema,
                first_seq=int(chunk["seq"][0]),
                num_rows=len(chunk),
            )
            yield encode_batch(header, chunk.tobytes())

    def _events(self, identity: Identity) -> bytes:
        rows: list[bytes] = []
        for step, event in self._said():
            now = _BEGIN_NS + step * _STEP_NS
            for values in encode_event(
                event, step=step, attempt=ATTEMPT, time_unix_ns=now, monotonic_ns=now
            ):
                rows.append(EVENT_SCHEMA.pack(len(rows), values))
        header = BatchHeader(
            identity=identity, stream_schema=EVENT_SCHEMA, first_seq=0, num_rows=len(rows)
        )
        return encode_batch(header, b"".join(rows))

    def _said(self) -> Iterator[tuple[int, Event]]:
        info = RunInfo(name="bench", world_size=self.size.num_ranks)
        yield 0, RunStarted(info=info)
        yield 0, AttemptStarted(id=ATTEMPT, parent=None, fork_step=0, reason="start")
        for i, step in enumerate(self._eventful()):
            yield step, FindingRaised(finding=_finding(step))
            yield step, DecisionMade(decision=_decision(i, step))
            yield step, Note(code="bench", text="a line for people")
            yield (
                step,
                CheckpointChanged(
                    checkpoint_id=f"step-{step:09d}",
                    checkpoint_step=step,
                    state="healthy",
                    where="disk",
                    num_bytes=1 << 30,
                ),
            )

    def _eventful(self) -> Sequence[int]:
        apart = max(1, self.incident // _NUM_EVENTS)
        return [self.incident - i * apart for i in reversed(range(_NUM_EVENTS))]


def _finding(step: int) -> Finding:
    return Finding(
        kind="grad_norm_outlier",
        level="actionable",
        step=step,
        detector="bench",
        reason="the norm was far above its limit",
        value=9.0,
        limit=2.0,
    )


def _decision(number: int, step: int) -> Decision:
    return Decision(
        ledger_seq=number,
        action="skip_step",
        step=step,
        decided_at_step=step + 1,
        attempt=ATTEMPT,
        reason="the norm was far above its limit",
        rule="outlier",
        cause="grad_norm",
        value=9.0,
        limit=2.0,
    )
