"""Statistics over the ranks per step, which replace most ranks' rows. Pure.

Rank 0 is not among them: its rows stay, and are the run's curves.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
import numpy.typing as npt

from trainvitals.catalog import ROW_COLUMNS
from trainvitals.identity import Identity
from trainvitals.rows import Column as RowColumn
from trainvitals.rows import Schema
from trainvitals.wire import Batch, BatchHeader
from vitals_collector.numbers.interface import RANKS, Columns, ColumnValues

STATISTICS = ("min", "mean", "max", "num", "nonfinite")
"""Statistics of a column: of its finite values, their number, and the number of non-finite ones."""
NUM_RANKS = "num_ranks"
"""Column: number of ranks in the statistics of a step."""
DURATION, LOSS = "step_duration_seconds", "rank_loss"
"""Columns that determine the worst ranks."""
_COUNTS = ("num", "nonfinite")


def order_worst_ranks(
    broken: Mapping[str, int], slow: Mapping[str, float], far: Mapping[str, float], num: int
) -> list[str]:
    """Return the worst ranks' sources, at most ``num``, whose rows a roll-up keeps.

    First the ranks with a NaN or Inf, by first such step (``broken``). Then alternately the rank
    with the longest step (``slow``) and the one whose loss was furthest from the ranks' median
    (``far``).
    """
    firsts = sorted(broken, key=lambda source: (broken[source], source))
    orders = (
        sorted(of_source, key=lambda source: (-of_source[source], source))
        for of_source in (slow, far)
    )
    turns = (source for pair in zip_longest(*orders) for source in pair if source is not None)
    return list(dict.fromkeys([*firsts, *turns]))[:num]


def _complete_column(values: npt.NDArray[Any]) -> ColumnValues:
    """Return values of a roll-up as a column without missing ones."""
    return ColumnValues(values, np.zeros(len(values), np.bool_))


def ranks_schema(names: Iterable[str]) -> Schema:
    """Return the columns of the roll-up over ranks of some columns."""
    statistics = (
        RowColumn(f"{name}:{what}", "i8" if what in _COUNTS else "f8")
        for name in sorted(names)
        for what in STATISTICS
    )
    return Schema(RANKS, (*ROW_COLUMNS, RowColumn(NUM_RANKS, "i8"), *statistics))


def ranks_batch(
    run_id: str, attempt: int, names: Sequence[str], numbers: Columns, first_seq: int
) -> Batch:
    """Return a roll-up's numbers over ranks as rows of the stream ``ranks``.

    The mean of values that overflow together is the nearest of their ends.
    """
    schema = ranks_schema(names)
    for name in names:
        low, mean, high = (numbers[f"{name}:{what}"].values for what in ("min", "mean", "max"))
        is_missing = numbers[f"{name}:mean"].is_missing
        numbers[f"{name}:mean"] = ColumnValues(np.minimum(high, np.maximum(low, mean)), is_missing)
    num = len(numbers["step"].values)
    key_columns = {"attempt": np.full(num, attempt), "monotonic_ns": np.zeros(num, np.int64)}
    columns = [numbers.get(c.name) or _complete_column(key_columns[c.name]) for c in schema.columns]
    listed = [
        [
            None if is_missing else value
            for value, is_missing in zip(
                column.values.tolist(), column.is_missing.tolist(), strict=True
            )
        ]
        for column in columns
    ]
    rows = b"".join(
        schema.pack(first_seq + i, row) for i, row in enumerate(zip(*listed, strict=True))
    )
    who = Identity(run_id, RANKS, RANKS, node="", rank=0, local_rank=0)
    header = BatchHeader(identity=who, stream_schema=schema, first_seq=first_seq, num_rows=num)
    return Batch(header, rows)
