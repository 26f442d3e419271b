"""Compares the first losses of a start with those of the run's earlier starts."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from trainvitals.io.rundir import RunDir
from trainvitals.io.spool_files import SpoolPosition, read_batches, spool_files
from trainvitals.records import StepRecord
from trainvitals.rows import column_of, rows_of
from trainvitals.wire import decode_batch

_MAX_BYTES = 16 << 20
"""Size of a spool's latest files that are read. The job waits for it."""
_NUM_FIRST = 20
_NUM_LATEST = 32
_NUM_COMPARED = 8


class EarlierLosses(NamedTuple):
    """Losses of the earlier starts of a run."""

    first: float
    """Median of the first losses."""
    latest: float
    """Median of the latest losses."""
    highest: float
    """Highest of the latest losses."""
    step: int
    """Step of the latest loss."""


def read_earlier_losses(run_dir: RunDir) -> EarlierLosses | None:
    """Return a run directory's losses for ``FirstStepsFeature``; None: too few to compare with.

    It does not have the rows that no agent has stored yet.

    Raises:
        OSError: the directory cannot be read.
        FormatError: rows are damaged, or of a newer version.
    """
    firsts: list[_EarlierLoss] = []
    latest: list[_EarlierLoss] = []
    for spool in run_dir.spool_dirs().values():
        firsts += islice(_read_spooled_losses(spool, SpoolPosition()), _NUM_FIRST)
        latest += deque(_read_spooled_losses(spool, _latest_spool_files(spool)), _NUM_LATEST)
    first = [of.loss for of in sorted(firsts)[:_NUM_FIRST]]
    latest = sorted(latest)[-_NUM_LATEST:]
    if len(first) < _NUM_FIRST or len(latest) < _NUM_LATEST:
        return None
    losses = [of.loss for of in latest]
    return EarlierLosses(
        statistics.median(first), statistics.median(losses), max(losses), latest[-1].step
    )


class _EarlierLoss(NamedTuple):
    time_unix_ns: int
    step: int
    loss: float


def _read_spooled_losses(spool: Path, start: SpoolPosition) -> Iterator[_EarlierLoss]:
    """Yield the finite losses of rank 0, with which ``FirstStepsFeature`` compares new ones."""
    for _, raw in read_batches(spool, start):
        batch = decode_batch(raw)
        header, schema = batch.header, batch.header.stream_schema
        if (header.stream, header.identity.source) != ("steps", "rank:0"):
            continue
        rows = rows_of(schema, batch.rows)
        columns = (column_of(schema, rows, name)[0] for name in ("time_unix_ns", "step"))
        losses, is_known = column_of(schema, rows, "loss")
        for time_unix_ns, step, loss, known in zip(*columns, losses, is_known, strict=True):
            if known and math.isfinite(loss):
                yield _EarlierLoss(int(time_unix_ns), int(step), float(loss))


def _latest_spool_files(spool: Path) -> SpoolPosition:
    """Return the start of the spool's latest files, for the losses of ``FirstStepsFeature``."""
    start, num_bytes = SpoolPosition(), 0
    for number, path in reversed(spool_files(spool)):
        num_bytes += path.stat().st_size
        if num_bytes > _MAX_BYTES:
            break
        start = SpoolPosition(number)
    return start


class RestartCheck:
    """Whether a start continues from the weights of the earlier ones, judged by its losses."""

    def __init__(self, earlier: EarlierLosses) -> None:
        self._earlier = earlier
        self._losses: list[float] = []

    def add(self, record: StepRecord) -> str | None:
        """Add a start's step; return a feature's warning, once, if the weights are not restored."""
        if len(self._losses) >= _NUM_COMPARED or record.loss is None:
            return None
        if not math.isfinite(record.loss):
            return None
        self._losses.append(record.loss)
        loss, earlier = statistics.median(self._losses), self._earlier
        # A checkpoint may be much older than the end: it has at least half of the progress.
        limit = max(earlier.highest, (earlier.first + earlier.latest) / 2)
        if len(self._losses) < _NUM_COMPARED or loss <= limit:
            return None
        return (
            f"the first {_NUM_COMPARED} losses of this start are about {loss:.4g}, but the run "
            f"started at {earlier.first:.4g} and had reached {earlier.latest:.4g} at step "
            f"{earlier.step}: its weights are not restored; load the checkpoint into the model and "
            "the optimizer before the first step, or set another VITALS_RUN_ID for a new training"
        )
