"""Reads a CSV file with a head: separated by commas, tabs, semicolons or bars."""

import csv
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from trainvitals.errors import FormatError, UsageError
from vitals_plugins.bridges.importers.columns import (
    KNOWN,
    ColumnChoice,
    ImportedLog,
    ImportedRows,
    choose_columns,
    find_scalars,
    normalize_column_name,
)
from vitals_plugins.bridges.importers.files import lines_of, open_text, translate_read_errors

SEPARATORS = ",\t;|"


def read_csv(path: Path, column_options: ColumnChoice) -> ImportedLog:
    """Read the log in a CSV file; its rows are those below the head, blank lines not counted.

    Raises:
        FormatError: it is empty, or a cell is not a number.
        UsageError: no column is the step, or neither a loss nor a gradient norm.
    """
    with translate_read_errors(path), open_text(path) as file:
        lines = _without_nul(lines_of(path, file))
        first = next((line for line in lines if line.strip()), "")
        if not first:
            raise FormatError(f"{path} is empty; a CSV file begins with the names of its columns")
        separator = separator_of(first)
        if is_numbers(first):
            raise UsageError(
                f"{path} has no header: its first line is {first.strip()[:60]!r}, which are "
                "numbers, not the names of columns",
                hint="add a first line with the names, such as step,loss,grad_norm",
            )
        try:
            return _read_rows(path, [first], lines, separator, column_options)
        except csv.Error as error:
            raise FormatError(f"{path} is not CSV: {error}") from error


def separator_of(line: str) -> str:
    """Return the separator of a CSV line's cells, if it has one."""
    return max(SEPARATORS, key=line.count)


def may_be_table(lines: Sequence[str]) -> bool:
    """Return whether a file's first lines may be those of a CSV table, and not of prose."""
    separator = separator_of(lines[0])
    head = [normalize_column_name(name) for name in lines[0].split(separator)]
    if is_numbers(lines[0]) or any(name in names for names in KNOWN.values() for name in head):
        return True
    if len(head) < 2 or len(lines) < 2:
        return False
    cells = lines[1].split(separator)
    return len(cells) == len(head) and any(is_numbers(cell) for cell in cells)


def is_numbers(line: str) -> bool:
    """Return whether every cell of a CSV line is a number, and so not a column name."""
    try:
        cells = [float(cell) for cell in line.strip().split(separator_of(line))]
    except ValueError:
        return False
    return bool(cells)


def _read_rows(
    path: Path, first: list[str], lines: Iterator[str], separator: str, column_options: ColumnChoice
) -> ImportedLog:
    """Read the rows of a CSV log below its head line."""
    head = next(csv.reader(first, delimiter=separator))
    names = [name.strip() for name in head]
    columns = choose_columns(names, column_options, str(path))
    places = {role: names.index(name) for role, name in columns.items()}
    scalars = find_scalars(names, column_options, str(path))
    scalar_places = {name: names.index(column) for column, name in scalars.items()}
    rows = ImportedRows(path, "row", columns, scalars)
    row = -1
    for cells in csv.reader(lines, delimiter=separator):
        if not cells:
            continue
        row += 1
        if cells == head:
            rows.skip_row("that repeat the head")
            continue
        # A line may be shorter than the head.
        rows.add(
            row,
            {role: cells[at] for role, at in places.items() if at < len(cells)},
            {name: cells[at] for name, at in scalar_places.items() if at < len(cells)},
        )
    history = rows.to_log("CSV")
    steps = history.steps
    is_reversed = len(steps) > 2 and all(b.step < a.step for a, b in pairwise(steps))
    return _reverse_history(history) if is_reversed else history


def _reverse_history(history: ImportedLog) -> ImportedLog:
    """Return the history of a CSV log with its last record first."""
    return replace(
        history,
        steps=history.steps[::-1],
        notes=[*history.notes, "Its newest record comes first: it was read from the end."],
        evaluations={
            len(history.steps) - position: seconds
            for position, seconds in history.evaluations.items()
        },
    )


def _without_nul(lines: Iterator[str]) -> Iterator[str]:
    """Skip the NUL bytes that a crash leaves at a CSV log's end: blocks never written."""
    for line in lines:
        yield line.replace("\0", "") if "\0" in line else line
