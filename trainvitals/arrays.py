"""Results of ``trainvitals.client``: a run's numbers as numpy arrays, or for pandas."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trainvitals.errors import MissingDependencyError
from trainvitals.views import Branch, CellsReply, CurveReply, SeriesReply, TableReply

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_NONFINITE = {"nan": np.nan, "inf": np.inf, "+inf": np.inf, "-inf": -np.inf}


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One series; its arrays are all of shape ``(len(series),)`` and cannot be written to.

    Rows of GPUs, nodes and processes have the step -1 and are ordered by time, all others by step.
    """

    metric: str
    source: str
    """Source: ``rank:N``, ``gpu:UUID``, ``node:ID``."""
    unit: str
    """Base unit: seconds, bytes, ratio (0 to 1), watts, celsius...; "" is a plain number."""
    branch: Branch
    step: Ints
    time_unix_ns: Ints
    """Nanoseconds since 1970, UTC."""
    attempt: Ints
    """Attempt that trained the step: ids as in ``Run.detail().attempts``."""
    value: Floats
    """In ``unit``. NaN and Inf are measured values."""
    num_total: int
    """Number of points of the whole series; more than here if fewer were requested."""

    def __len__(self) -> int:
        return len(self.step)

    def __repr__(self) -> str:
        of = "" if len(self) == self.num_total else f" of {self.num_total}"
        return f"<Series {self.metric} of {self.source}: {len(self)}{of} points>"

    @property
    def time(self) -> npt.NDArray[np.datetime64]:
        """Time of each point, UTC."""
        return self.time_unix_ns.view("datetime64[ns]")

    def to_pandas(self) -> Any:
        """Return a ``DataFrame`` of the columns step, time, attempt and value.

        Raises:
            MissingDependencyError: pandas is not installed.
        """
        columns = {"step": self.step, "time": self.time, "attempt": self.attempt}
        return _import_pandas().DataFrame(columns | {"value": self.value})


@dataclass(frozen=True, slots=True, kw_only=True)
class Cells:
    """A heat map: one metric of every rank, GPU, node or layer, over steps."""

    metric: str
    unit: str
    rows: tuple[str, ...]
    """Sources or layers; if there are more than requested, those that deviate most."""
    num_rows: int
    """Number of rows."""
    step: Ints
    """First step of each column, shape ``(columns,)``."""
    value: Floats
    """Shape ``(rows, columns)``: the value furthest from the row's median; NaN: none is finite."""
    is_nonfinite: npt.NDArray[np.bool_]
    """Shape ``(rows, columns)``: whether a NaN or Inf was measured."""
    is_nonfinite_rolled_back: npt.NDArray[np.bool_]
    """Shape ``(rows, columns)``: whether only rolled-back steps have one."""
    rolled_back: tuple[int, int] | None
    """The first and the last rolled-back step with a value; None: there is none."""

    def to_pandas(self) -> Any:
        """Return a ``DataFrame`` with the rows as its index and the steps as its columns."""
        return _import_pandas().DataFrame(self.value, index=self.rows, columns=self.step)


class Table(Mapping[str, npt.NDArray[Any]]):
    """Columns by name, all of one length: a mapping to numpy arrays.

    A numeric column is ``int64``, or ``float64`` if some values are fractional, non-finite or
    missing (NaN). Flags are ``bool``. Other columns are objects, with None for a missing value.
    """

    def __init__(self, reply: TableReply) -> None:
        pairs = zip(reply.columns, reply.data, strict=True)
        self._columns = {name: _column_array(values) for name, values in pairs}
        self.num_total = reply.num_total
        """Number of rows that met the conditions; more than here if ``limit`` cut them."""

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        return self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def __repr__(self) -> str:
        num = len(next(iter(self.values()), ()))
        return f"<Table of {num} rows of {self.num_total}: {', '.join(self)}>"

    def to_pandas(self) -> Any:
        """Return the table as a ``DataFrame``."""
        return _import_pandas().DataFrame(self._columns)


def decode_series_reply(reply: SeriesReply) -> Series:
    """Return the points of a downsampled reply, with non-finite values restored."""
    value = np.array(reply.value, dtype=np.float64)  # None becomes NaN
    step, attempt = (np.array(column, dtype=np.int64) for column in (reply.step, reply.attempt))
    time = np.array(reply.time_unix_ns, dtype=np.int64)
    kinds = {(mark.step, mark.attempt): mark.kind for mark in reply.nonfinite}
    for i in np.flatnonzero(np.isnan(value)).tolist():
        value[i] = _NONFINITE[kinds.get((int(step[i]), int(attempt[i])), "nan")]
    return Series(
        metric=reply.metric,
        source=reply.source,
        unit=reply.unit,
        branch=reply.branch,
        step=step,
        time_unix_ns=time,
        attempt=attempt,
        value=value,
        num_total=reply.num_total,
    )


def join_curve_replies(replies: Sequence[CurveReply]) -> Series:
    """Return the points of consecutive parts of one series; at least one part is needed."""
    first = replies[0]
    step = _concat_arrays([reply.step for reply in replies], "<i8")
    return Series(
        metric=first.metric,
        source=first.source,
        unit=first.unit,
        branch=first.branch,
        step=step,
        time_unix_ns=_concat_arrays([reply.time_unix_ns for reply in replies], "<i8"),
        attempt=_concat_arrays([reply.attempt for reply in replies], "<i8"),
        value=_concat_arrays([reply.value for reply in replies], "<f8"),
        num_total=len(step),
    )


def decode_cells_reply(reply: CellsReply) -> Cells:
    """Return a heat map's reply as arrays."""
    shape = (len(reply.rows), len(reply.step))
    is_nonfinite, is_left = (np.zeros(shape, dtype=np.bool_) for _ in range(2))
    for mask, marks in ((is_nonfinite, reply.nonfinite), (is_left, reply.nonfinite_rolled_back)):
        for row, column in marks:
            mask[row, column] = True
    return Cells(
        metric=reply.metric,
        unit=reply.unit,
        rows=reply.rows,
        num_rows=reply.num_rows,
        step=np.array(reply.step, dtype=np.int64),
        value=np.array(reply.value, dtype=np.float64).reshape(shape),
        is_nonfinite=is_nonfinite,
        is_nonfinite_rolled_back=is_left,
        rolled_back=reply.rolled_back,
    )


def _concat_arrays(parts: Sequence[bytes], kind: str) -> npt.NDArray[Any]:
    """Return the raw buffers of a curve's parts as one array."""
    return np.frombuffer(parts[0] if len(parts) == 1 else b"".join(parts), dtype=kind)


def _column_array(values: Sequence[str | float | int | bool | None]) -> npt.NDArray[Any]:
    """Return a column of a table as an array with its own dtype."""
    kinds = {type(value) for value in values}
    if kinds == {int}:
        return np.array(values, dtype=np.int64)
    if kinds == {bool}:
        return np.array(values, dtype=np.bool_)
    texts = {value for value in values if isinstance(value, str)}
    if kinds & {int, float} and bool not in kinds and texts <= _NONFINITE.keys():
        numbers = [_NONFINITE[v] if isinstance(v, str) else v for v in values]
        return np.array(numbers, dtype=np.float64)
    return np.array(values, dtype=object)


def _import_pandas() -> Any:
    try:
        return importlib.import_module("pandas")
    except ModuleNotFoundError:
        raise MissingDependencyError(
            "to_pandas() needs the package pandas, which is not installed",
            hint="pip install pandas; without it the arrays are there all the same",
        ) from None
