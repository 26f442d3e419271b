"""Data on stdout, as a table for users, JSON or CSV for programs."""

import csv
import io
import json
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from typing import TextIO

import msgspec

from trainvitals.document.blocks import cell_text
from trainvitals.jsonable import to_json
from trainvitals.units import DATE_FORMAT

MAX_CELL = 60
"""Maximum characters of a table's cell, except in the last column."""

_FORMULA = ("=", "+", "-", "@")


class Format(StrEnum):
    """Format of the output."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"


def write_json(body: object, *, to: TextIO | None = None) -> None:
    """Write the result of a command as indented JSON, to stdout by default."""
    text = msgspec.json.format(to_json(body), indent=2).decode()
    (to or sys.stdout).write(_escaped(text) + "\n")


def write_json_line(body: object) -> None:
    """Write one line of JSON to stdout, as the result of a command."""
    sys.stdout.write(_escaped(msgspec.json.encode(body).decode()) + "\n")


def _escaped(text: str) -> str:
    """Escape terminal control characters in a command's JSON output: JSON allows C1 characters."""
    lines = (line if line.isprintable() else _escape_json_line(line) for line in text.split("\n"))
    return "\n".join(lines)


def _escape_json_line(line: str) -> str:
    """Escape the control characters in one line of a command's JSON output."""
    # In JSON such characters only occur inside strings. ``dumps`` does not escape DEL.
    escaped = (c if c.isprintable() else json.dumps(c)[1:-1] for c in line)
    return "".join(escaped).replace("\x7f", "\\u007f")


def write_rows(
    header: Sequence[str],
    rows: Iterable[Sequence[object]],
    form: Format,
    *,
    with_header: bool = True,
    min_width: int = 0,
    to: TextIO | None = None,
) -> None:
    """Write a command's rows as CSV or as aligned columns, never cut to a terminal's width.

    Long cells are cut, except in the last column. In CSV, text that a spreadsheet would evaluate as
    a formula is prefixed with an apostrophe.
    """
    to = to or sys.stdout
    if form is Format.CSV:
        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        exact = [[_format_csv_cell(value) for value in row] for row in rows]
        writer.writerows([header, *exact] if with_header else exact)
        to.write(buffer.getvalue())
        return
    lines = [[_cell_text(value) for value in row] for row in rows]
    lines = [[*map(_truncate_cell, line[:-1]), *line[-1:]] for line in lines]
    shown = [[name.upper() for name in header], *lines] if with_header else lines
    widths = [max(min_width, max(map(len, column))) for column in zip(*shown, strict=True)]
    for line in shown:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        to.write("  ".join(cells).rstrip() + "\n")


def write_table(
    header: Sequence[str],
    rows: Sequence[Sequence[object]],
    form: Format,
    *,
    body: object = None,
) -> None:
    """Write a command's rows to stdout in the chosen format; ``body`` is the JSON if given."""
    if form is Format.JSON:
        write_json([dict(zip(header, row, strict=True)) for row in rows] if body is None else body)
    else:
        write_rows(header, rows, form)


def format_time(time_unix_ns: int) -> str:
    """Format a time for the output of a command: to the second, in UTC; "" for none."""
    if time_unix_ns <= 0:
        return ""
    try:
        then = datetime.fromtimestamp(time_unix_ns // 10**9, tz=UTC)
    except (OverflowError, ValueError, OSError):
        return "(no date)"
    return then.strftime(DATE_FORMAT)


def _cell_text(value: object) -> str:
    """Return the text of a cell in a command's output; a query's time keeps its precision."""
    return str(value) if isinstance(value, datetime) else cell_text(value)


def _truncate_cell(cell: str) -> str:
    """Return a cell of a command's table, cut to ``MAX_CELL`` characters."""
    return cell if len(cell) <= MAX_CELL else f"{cell[: MAX_CELL - 3]}..."


def _format_csv_cell(value: object) -> str:
    """Return a cell of a command's CSV: numbers in full, no text that could be evaluated."""
    cell = float.__repr__(value) if isinstance(value, float) else _cell_text(value)
    if not isinstance(value, str) or not cell.lstrip().startswith(_FORMULA):
        return cell
    try:
        float(cell)
    except ValueError:
        return f"'{cell}"
    return cell
