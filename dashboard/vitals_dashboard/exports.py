"""Table downloads: CSV that no spreadsheet runs as a formula, and Parquet. Pure."""

import io

import pyarrow as pa
import pyarrow.parquet

from trainvitals.cli.output import Format, write_rows
from trainvitals.views import TableReply

_NONFINITE = {"nan": float("nan"), "inf": float("inf"), "-inf": -float("inf")}
Value = str | float | int | bool | None


def csv_bytes(reply: TableReply) -> bytes:
    """Return a table for download from the dashboard as CSV, safe from running as a formula."""
    text = io.StringIO()
    rows = [
        [repr(value) if isinstance(value, float) else value for value in row]  # all digits
        for row in zip(*reply.data, strict=True)
    ]
    write_rows(reply.columns, rows, Format.CSV, to=text)
    return text.getvalue().encode()


def parquet_bytes(reply: TableReply) -> bytes:
    """Return a table for download from the dashboard as Parquet, with NaN as numbers."""
    columns = {
        name: unify_column_type(values)
        for name, values in zip(reply.columns, reply.data, strict=True)
    }
    to = io.BytesIO()
    pa.parquet.write_table(pa.table(columns), to)
    return to.getvalue()


def unify_column_type(values: tuple[Value, ...]) -> list[Value]:
    """Return a column of a table on the dashboard as one type: numbers, or text if mixed."""
    present = [value for value in values if value is not None]
    numbers = [v for v in present if isinstance(v, int | float) and not isinstance(v, bool)]
    texts = [v for v in present if isinstance(v, str)]
    if numbers and len(numbers) + len(texts) == len(present) and set(texts) <= set(_NONFINITE):
        return [_NONFINITE[v] if isinstance(v, str) else v for v in values]
    if len({type(value) for value in present}) > 1:
        return [None if value is None else str(value) for value in values]
    return list(values)
