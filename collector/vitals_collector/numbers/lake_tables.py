"""How rows lie in the lake's tables: one a stream, whose columns only grow; to Arrow and back.

A name that DuckDB could not tell from another one (it folds case), or that another type has taken,
gets a column of its own whose name spells it in hex.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trainvitals.identity import CROCKFORD
from trainvitals.rows import Column as RowColumn
from trainvitals.rows import Schema, column_of
from trainvitals.wire import Batch
from vitals_collector.numbers.interface import Column, rank_of, texts_of, type_of

KEYS = {
    "run": "BIGINT",
    "incarnation": "VARCHAR",
    "source": "VARCHAR",
    "rank": "INTEGER",
    "seq": "BIGINT",
    "$epoch": "INTEGER",
}
"""The columns that every stream's table has beside those of its rows."""
TYPES = {"f8": "DOUBLE", "i8": "BIGINT", "S": "VARCHAR"}
SORTED_BY = "run ASC, step // 64 ASC, rank ASC, step ASC"
"""Of merged files: one rank's steps lie together, and one step of all ranks in few groups of rows.
"""
_SPELLED = "$hex$"
"""In the name of a column's place, before the column's name in hex."""

Places = dict[tuple[str, str], str]
"""By a column's name and type, the name of the table's column that holds it."""


class Part(NamedTuple):
    """Rows of a batch that are new."""

    batch: Batch
    start: int
    end: int

    @property
    def num_rows(self) -> int:
        """How many they are."""
        return self.end - self.start


def by_schema(parts: Sequence[Part]) -> Iterator[list[Part]]:
    """Yield the parts of each schema."""
    groups: dict[int, list[Part]] = defaultdict(list)
    for part in parts:
        groups[id(part.batch.header.stream_schema)].append(part)
    yield from groups.values()


def places_for(schema: Schema, places: Places) -> Places:
    """Return places for the columns that have none yet."""
    added: Places = {}
    taken = {name.casefold() for name in (*KEYS, *places.values())}
    for column in schema.columns:
        kind = type_of(column)
        if (column.name, kind) in places:
            continue
        is_free = column.name.casefold() not in taken and _SPELLED not in column.name
        place = column.name if is_free else _spelled(column)
        taken.add(place.casefold())
        added[column.name, kind] = place
    return added


def to_arrow(
    group: Sequence[Part], runs: Mapping[str, int], epochs: Mapping[str, int], places: Places
) -> pa.Table:
    """Return rows of one schema."""
    schema = group[0].batch.header.stream_schema
    size = schema.row_size
    raw = b"".join(
        [
            batch.rows
            if end - start == batch.header.num_rows
            else batch.rows[start * size : end * size]
            for batch, start, end in group
        ]
    )
    rows = np.frombuffer(raw, schema.dtype)
    counts = np.array([part.num_rows for part in group])
    writers = [part.batch.header.identity for part in group]
    columns: dict[str, pa.Array] = {
        "run": _repeated([runs[w.run_id] for w in writers], counts, pa.int64()),
        "incarnation": _repeated([w.incarnation for w in writers], counts, pa.string()),
        "source": _repeated([w.source for w in writers], counts, pa.string()),
        "rank": _repeated([rank_of(w.source) for w in writers], counts, pa.int32()),
        "seq": pa.array(rows["seq"]),
        "$epoch": _repeated([epochs.get(w.run_id, 0) for w in writers], counts, pa.int32()),
    }
    for column in schema.columns:
        values, is_valid = column_of(schema, rows, column.name)
        columns[places[column.name, type_of(column)]] = _array(values, is_valid)
    return pa.table(columns)


def _array(values: npt.NDArray[Any], is_valid: npt.NDArray[np.bool_]) -> pa.Array:
    mask = None if is_valid.all() else ~is_valid
    if values.dtype.kind != "S":
        return pa.array(np.ascontiguousarray(values), mask=mask, from_pandas=False)
    return pa.array(texts_of(values), pa.string(), mask=mask)


def _repeated(values: Sequence[Any], counts: npt.NDArray[np.int64], kind: pa.DataType) -> pa.Array:
    """Return each value so many times."""
    return pa.array(values, kind).take(pa.array(np.repeat(np.arange(len(values)), counts)))


def table_of(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> pa.Table:
    """Return rows of values as a table with named columns."""
    columns = list(map(list, zip(*rows, strict=True))) or [[] for _ in names]
    return pa.table(dict(zip(names, columns, strict=True)))


def expression(name: str, places: Places) -> str:
    """Return what gives a column by its name; what every row has comes before the stream's own."""
    return quoted(name) if name in KEYS else own_expression(name, places)


def own_expression(name: str, places: Places) -> str:
    """Return what gives a column of the stream, however many places its types have made for it."""
    kinds = {kind: place for (column, kind), place in places.items() if column == name}
    if "S" in kinds:
        return quoted(kinds["S"])
    numbers = [quoted(place) for place in kinds.values()]
    if len(numbers) == 1:
        return numbers[0]
    doubles = [f"CAST({place} AS DOUBLE)" for place in numbers]
    return f"coalesce({', '.join(doubles)})" if doubles else "CAST(NULL AS DOUBLE)"


def to_column(values: pa.ChunkedArray) -> Column:
    """Return a column of an answer."""
    is_missing = np.zeros(len(values), np.bool_)
    if values.null_count:
        is_missing = values.is_null().to_numpy()
        values = values.fill_null("" if pa.types.is_string(values.type) else 0)
    return Column(values.to_numpy(), is_missing)


def number_for(run_id: str, taken: Iterable[int]) -> int:
    """Return a number for a run, in the order of the runs' beginnings.

    Rows are found by a number in half the time of a name. 48 bits are a ULID's milliseconds and 15
    are of its random ones; where another run has the number, the next is taken.
    """
    bits = 0
    for character in run_id:
        bits = bits << 5 | CROCKFORD.index(character)
    number = bits >> 65
    taken = set(taken)
    while number in taken:
        number += 1
    return number


def quoted(name: str) -> str:
    """Return a name as SQL takes it."""
    return '"' + name.replace('"', '""') + '"'


def _spelled(column: RowColumn) -> str:
    return f"{type_of(column)}{_SPELLED}{column.name.encode().hex()}"


def unspelled(place: str) -> str:
    """Return the name of the column that a place holds."""
    _, mark, rest = place.partition(_SPELLED)
    return bytes.fromhex(rest).decode() if mark else place
