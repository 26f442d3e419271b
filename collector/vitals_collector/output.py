"""Data on stdout, as a table for people, JSON or CSV for programs."""

import csv
import io
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from enum import StrEnum

import msgspec


class Format(StrEnum):
    """How data is written."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"


def write_json(body: object) -> None:
    """Write the body as indented JSON."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(body), indent=2).decode() + "\n")


def write_rows(
    header: Sequence[str],
    rows: Iterable[Sequence[object]],
    form: Format,
    *,
    with_header: bool = True,
    min_width: int = 0,
) -> None:
    """Write rows as CSV or as aligned columns, never cut to a terminal's width."""
    lines = [[_cell(value) for value in row] for row in rows]
    if form is Format.CSV:
        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        writer.writerows([header, *lines] if with_header else lines)
        sys.stdout.write(buffer.getvalue())
        return
    shown = [[name.upper() for name in header], *lines] if with_header else lines
    widths = [max(min_width, max(map(len, column))) for column in zip(*shown, strict=True)]
    for line in shown:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        sys.stdout.write("  ".join(cells).rstrip() + "\n")


def moment(time_unix_ns: int) -> str:
    """Return the time for people, to the second, in UTC; "" for none."""
    if time_unix_ns <= 0:
        return ""
    try:
        then = datetime.fromtimestamp(time_unix_ns // 10**9, tz=UTC)
    except (OverflowError, ValueError, OSError):
        return "(no date)"
    return then.strftime("%Y-%m-%d %H:%M:%SZ")


def printable(text: str) -> str:
    """Return the text without control characters: no stranger's name may steer the terminal."""
    return "".join(c if c.isprintable() else " " for c in text)


def _cell(value: object) -> str:
    if value is None:
        return ""
    return printable(f"{value:.6g}" if isinstance(value, float) else str(value))
