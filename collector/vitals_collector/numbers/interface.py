"""What a store of numbers does: append, once; say how far; give back rows, exactly as they were."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from trainvitals.identity import Identity
from trainvitals.wire import Batch

StreamKey = tuple[str, str, str]
"""Run, incarnation and stream: one writer's rows of one kind, numbered from 0."""

NOT_A_RANK = -1
"""The ``rank`` of a node's or a GPU's rows."""


class Span(NamedTuple):
    """Rows of one stream of a run. None leaves a side open, and no ranks are all writers."""

    run_id: str
    stream: str
    ranks: tuple[int, ...] = ()
    from_step: int | None = None
    to_step: int | None = None
    """Steps below it."""


class Column(NamedTuple):
    """Values in parallel to those of the other columns."""

    values: npt.NDArray[Any]
    """float64, int64, or str objects; what stands where a value is missing is nothing to go by."""
    is_missing: npt.NDArray[np.bool_]
    """NaN is a value, and not missing."""


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


def rank_of(identity: Identity) -> int:
    """Return the rank that writes, or NOT_A_RANK."""
    kind, _, key = identity.source.partition(":")
    return int(key) if kind == "rank" else NOT_A_RANK


def texts_of(raw: npt.NDArray[np.bytes_]) -> npt.NDArray[np.object_]:
    """Return fixed-size names as text; what is no UTF-8 is shown as such, and refuses nothing."""
    distinct, index = np.unique(raw, return_inverse=True)
    texts = np.array([name.decode(errors="replace") for name in distinct.tolist()], object)
    return texts[index] if len(texts) else np.zeros(0, object)


class Numbers(Protocol):
    """A store of rows. Any thread may call; what is told to be stored survives a kill."""

    def append(self, batches: Sequence[Batch]) -> list[int]:
        """Store the rows that are new, all or none; return each batch's number of them.

        A row is new if its sequence number is above all that its stream has stored.

        Raises:
            StorageError: nothing was stored; send it again.
        """

    def mark(self, key: StreamKey) -> int:
        """Return the number of the last row that the stream has stored; -1 where it has none."""

    def scan(self, span: Span, names: Sequence[str]) -> dict[str, Column]:
        """Return columns of the rows in the span, by step, then rank, then time.

        Any of the stream's columns, and ``rank``, ``source``, ``incarnation`` and ``seq``. One that
        the stream does not have is missing in every row; where writers gave one name numbers of two
        types, all are floats; where they gave it texts as well, the numbers are missing.
        """

    def delete(self, run_id: str) -> None:
        """Remove the run's rows for good; its marks stay, so that nothing sent again comes back.

        Raises:
            StorageError: nothing was removed.
        """
