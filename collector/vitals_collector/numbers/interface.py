"""What a store of numbers does: append, once; say how far; give back rows, exactly as they were."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from trainvitals.rows import STREAMS
from trainvitals.rows import Column as RowColumn
from trainvitals.views import Branch
from trainvitals.wire import Batch
from vitals_collector.numbers.points import AttemptRow, Points

StreamKey = tuple[str, str, str]
"""Run, incarnation and stream: one writer's rows of one kind, numbered from 0."""

RANKS = "ranks"
"""The stream of numbers over ranks, which no writer sends: old rows of steps become it."""
STORED_STREAMS = (*STREAMS, RANKS)

NOT_A_RANK = -1
"""The ``rank`` of a node's or a GPU's rows."""

HOST_STREAMS = ("gpu", "node", "process")
"""Streams that are ordered by time: their rows have no step."""


class Keyed(NamedTuple):
    """Rows that a column names, such as those of one scalar: each start numbers its names anew."""

    column: str
    """The stream's own, even where it is called as what is known of a writer is (``rank``)."""
    number_of: Mapping[str, int] | int
    """By incarnation; an incarnation that is not there has no such rows. Or one for all."""


class Span(NamedTuple):
    """Rows of one stream of a run. None leaves a side open, and no sources are all of them."""

    run_id: str
    stream: str
    sources: tuple[str, ...] = ()
    """Such as ``rank:0``."""
    from_step: int | None = None
    to_step: int | None = None
    """Steps below it."""
    from_unix_ns: int | None = None
    to_unix_ns: int | None = None
    """Times before it."""
    seqs: Mapping[str, tuple[int, int]] | None = None
    """Of these incarnations only, each with its first number and the one behind its last."""
    keyed: Keyed | None = None


class Curve(NamedTuple):
    """One column over the rows of a span, and about how many points of it are wanted."""

    span: Span
    column: str
    num_points: int | None = None
    """None: every one."""


class Drawn(NamedTuple):
    """A curve, stitched: by step, or by time in streams whose rows have no step."""

    points: Points
    """All, or at least as many as were wanted: of each stretch of rows the least and the greatest
    value, both ends of the curve, and every value that is not finite."""
    num_values: int
    """How many the branch has within the span; what was written twice counts as often."""


class Column(NamedTuple):
    """Values in parallel to those of the other columns."""

    values: npt.NDArray[Any]
    """float64, int64, or str objects; what stands where a value is missing is nothing to go by."""
    is_missing: npt.NDArray[np.bool_]
    """NaN is a value, and not missing. The sign of a zero may be lost."""

    def take(self, which: npt.NDArray[Any]) -> "Column":
        """Return the chosen rows, in the order of the choice."""
        return Column(self.values[which], self.is_missing[which])


Columns = dict[str, Column]

ORDER = ("step", "rank", "time_unix_ns", "seq")
"""What decides which row comes first."""


def in_order(columns: Columns, names: Sequence[str]) -> Columns:
    """Return the named columns by ``ORDER``, which all have to be there."""
    step = columns["step"].values
    if np.all(step[1:] > step[:-1]):  # one writer's, mostly: a million need no sorting
        return {name: columns[name] for name in names}
    order = np.lexsort([columns[name].values for name in reversed(ORDER)])
    return {
        name: Column(columns[name].values[order], columns[name].is_missing[order]) for name in names
    }


def none_of(num: int) -> Column:
    """Return so many missing values."""
    return Column(np.zeros(num), np.ones(num, np.bool_))


def rank_of(source: str) -> int:
    """Return the rank that writes, or NOT_A_RANK."""
    kind, _, key = source.partition(":")
    return int(key) if kind == "rank" else NOT_A_RANK


def type_of(column: RowColumn) -> str:
    """Return ``f8``, ``i8`` or ``S``: names of any size are of one type."""
    return column.kind if column.kind in ("f8", "i8") else "S"


def common_type(kinds: Iterable[str]) -> str:
    """Return the type of a column that writers gave these types."""
    distinct = set(kinds)
    return "S" if "S" in distinct else "i8" if distinct == {"i8"} else "f8"


def texts_of(raw: npt.NDArray[np.bytes_]) -> npt.NDArray[np.object_]:
    """Return fixed-size names as text; what is no UTF-8 is shown as such, and refuses nothing."""
    distinct, index = np.unique(raw, return_inverse=True)
    texts = np.array([name.decode(errors="replace") for name in distinct.tolist()], object)
    return texts[index] if len(texts) else np.zeros(0, object)


def joined(columns: Sequence[Column]) -> Column:
    """Return one column after the other; where types differ as ``scan`` says."""
    if len(columns) == 1:
        return columns[0]
    there = [column.values.dtype.kind for column in columns if not column.is_missing.all()]
    if not there:
        return none_of(sum(len(column.values) for column in columns))
    kind = common_type({"O": "S", "f": "f8", "i": "i8"}[kind] for kind in there)
    dtype: Any = {"S": object, "f8": np.float64, "i8": np.int64}[kind]
    alike = [
        column._replace(values=column.values.astype(dtype, copy=False))
        if (column.values.dtype == object) == (kind == "S")
        else Column(np.zeros(len(column.values), dtype), np.ones(len(column.values), np.bool_))
        for column in columns
    ]
    return Column(
        np.concatenate([column.values for column in alike]),
        np.concatenate([column.is_missing for column in alike]),
    )


Reason = Literal["age", "size"]
"""Why rows were taken away: they were old, or their run above its cap."""


class Window(NamedTuple):
    """Some steps of one attempt."""

    attempt: int
    first_step: int
    end_step: int
    """The step behind the last; both are multiples of a stretch of outlines."""


class Due(NamedTuple):
    """The oldest window of which nothing was taken away yet."""

    window: Window
    """Of streams whose rows have no step, nanoseconds stand for steps."""
    newest_unix_ns: int
    """When its newest row was written."""
    last_seqs: Mapping[str, int]
    """The number of the last row in it, by incarnation."""


class Thinned(NamedTuple):
    """What was taken away of a stream of a run."""

    stream: str
    reason: Reason
    num_rows: int
    to_step: int
    """The last step of the newest window; -1 where rows have no step."""
    to_unix_ns: int
    """Its end, where rows have no step; else 0."""


class Levelled(NamedTuple):
    """What became of a window."""

    num_rows: int
    """Taken away."""
    kept: tuple[str, ...]
    """The sources whose rows stay, beside rank 0: all, or the worst ranks."""


class NumbersReader(Protocol):
    """What of a store of rows can be asked. Any thread may call."""

    def kinds(self, run_id: str, stream: str) -> dict[str, str]:
        """Return the columns that the run's rows of the stream may have, each with its type.

        ``f8``, ``i8`` or ``S``; the columns of every row (``ROW_COLUMNS``) are among them. Where
        writers gave one name two types it is what ``scan`` gives. Of a stream without rows: none.
        """

    def sources(self, run_id: str, stream: str) -> list[str]:
        """Return who wrote rows of the stream, in the order of their names."""

    def num_rows(self, span: Span) -> int:
        """Return how many rows a scan would look at, or somewhat more; costs little."""

    def scan(self, span: Span, names: Sequence[str]) -> dict[str, Column]:
        """Return columns of the rows in the span, by step, then rank, then time.

        Any of the stream's columns, and ``rank``, ``source``, ``incarnation`` and ``seq``. One that
        the stream does not have is missing in every row; where writers gave one name numbers of two
        types, all are floats; where they gave it texts as well, the numbers are missing.
        """

    def curves(
        self, curves: Sequence[Curve], attempts: Sequence[AttemptRow], branch: Branch
    ) -> list[Drawn]:
        """Return each curve's measured values on the branch; many cost little more than one.

        Args:
            curves: of any streams of one run.
            attempts: the run's.
            branch: of streams whose rows have no step, all rows are taken.

        Raises:
            FormatError: a column is text.
        """

    def last_steps(self, run_id: str) -> dict[int, int]:
        """Return the last step of each attempt that has rows of steps."""


class Numbers(NumbersReader, Protocol):
    """A store of rows. Any thread may call; what is told to be stored survives a kill."""

    def turn(self) -> AbstractContextManager[object]:
        """Wait for the turn to change the store, and hold it: a merge may have it for seconds.

        To be taken before the database's own turn, for which others wait.
        """

    def append(self, batches: Sequence[Batch]) -> list[int]:
        """Store the rows that are new, all or none; return each batch's number of them.

        A row is new if its sequence number is above all that its stream has stored.

        Raises:
            StorageError: nothing was stored; send it again.
        """

    def mark(self, key: StreamKey) -> int:
        """Return the number of the last row that the stream has stored; -1 where it has none."""

    def marks(self, run_id: str) -> Mapping[tuple[str, str], int]:
        """Return the marks of the run's streams by incarnation and stream."""

    def has_holes(self, run_id: str) -> bool:
        """Return whether damage took rows of the run."""

    def missing(self, key: StreamKey) -> list[tuple[int, int]]:
        """Return what damage took from a stream: first numbers, each with the one behind the last.

        ``mark`` stays above them, and they are taken when they come again.
        """

    def wanted(self, key: StreamKey, before: int) -> int:
        """Return the first number below one that damage took and nobody was asked for; else -1.

        It counts as asked for now: who does not have it any more is asked again much later.
        """

    def next_window(self, run_id: str, attempt: int, size: int) -> Due | None:
        """Return the oldest steps that are no level yet.

        None where the attempt has no such rows of ranks other than 0. What comes later than the
        level of its steps stays as it came.

        Args:
            run_id: the run.
            attempt: the attempt.
            size: steps of a window, a multiple of ``outlines.STRETCH``.
        """

    def level(
        self,
        run_id: str,
        window: Window,
        num_worst: int,
        *,
        is_whole: bool = False,
        reason: Reason = "age",
    ) -> Levelled:
        """Put numbers over the ranks in the place of most ranks' rows of some steps, all or none.

        The rows of rank 0 and of the worst ranks stay. Of each column of numbers the stream
        ``ranks`` gets ``NAME:min``, ``mean`` and ``max`` of the finite values, ``num`` of them and
        ``nonfinite``, over the other ranks of a step, and ``num_ranks``.

        Args:
            run_id: the run.
            window: as ``next_window`` gives it.
            num_worst: how many ranks' rows stay.
            is_whole: let every row stay, beside the numbers.
            reason: what ``thinned`` says of it.

        Raises:
            StorageError: nothing was changed, or it is to be called again.
        """

    def thinned(self, run_id: str) -> list[Thinned]:
        """Return what was taken away of the run, by stream and reason."""

    def delete(self, run_id: str, but: Collection[str] = ()) -> None:
        """Remove the run's rows for good; its marks stay, so that nothing sent again comes back.

        Args:
            run_id: the run.
            but: incarnations that began after the removal: their rows stay.

        Raises:
            StorageError: nothing was removed.
        """

    def num_bytes(self, run_id: str) -> int:
        """Return about how many bytes the run's rows take."""

    def merge(self, max_seconds: float = 60.0) -> bool:
        """Tidy up for so long; return whether all was done."""

    def close(self) -> None:
        """Let go of what is open."""
