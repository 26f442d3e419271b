"""Filters of a table, ``COLUMN OP VALUE``: their grammar, and the rows that match. Pure.

A missing value matches only ``= none``, every other value matches ``!= none``. NaN is a value:
``loss = nan`` finds it, comparisons by size do not.
"""

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from trainvitals.errors import UsageError

Kind = Literal["number", "text", "bool"]
Mask = npt.NDArray[np.bool_]

MAX_CONDITIONS = 32
MAX_LENGTH = 500
OPERATORS = ("=", "!=", "<", "<=", ">", ">=", "~")
_SHAPE = re.compile(
    r"\s*(?P<column>[^\W\d][\w.:]*)\s*(?P<op>[=!<>~]+)\s*(?P<value>.*?)\s*", re.DOTALL
)
_TRUE, _FALSE = ("true", "yes", "1"), ("false", "no", "0")
_WORDS = 40
"""Characters of the input that an error repeats."""


class TableColumn(NamedTuple):
    """One column of a table."""

    values: npt.NDArray[np.generic]
    """Numbers, booleans, or strings as objects."""
    valid: Mask | None = None
    """Which cells were measured; None: all."""

    def take(self, which: npt.NDArray[np.intp] | Mask) -> "TableColumn":
        """Return the chosen cells of a queried column, in the order of the choice."""
        return TableColumn(self.values[which], None if self.valid is None else self.valid[which])


class TableCondition(NamedTuple):
    """A parsed condition."""

    column: str
    op: str
    value: float | int | str | bool | None
    """None matches missing values."""

    def matching_cells(self, cells: TableColumn) -> Mask:
        """Return a mask of the cells that match the condition of a table query."""
        there = np.ones(len(cells.values), bool) if cells.valid is None else cells.valid
        if self.value is None:
            return ~there if self.op == "=" else there.copy()
        return _compare(cells.values, self.op, self.value) & there


def parse(texts: Sequence[str], columns: Mapping[str, Kind]) -> tuple[TableCondition, ...]:
    """Parse the conditions of a table query.

    Raises:
        UsageError: a condition is invalid; the message lists the existing columns or operators.
    """
    if len(texts) > MAX_CONDITIONS:
        raise UsageError(f"{len(texts)} conditions; there may be {MAX_CONDITIONS}")
    return tuple(_parse_condition(text, columns) for text in texts)


def unknown_column(name: str, columns: Mapping[str, Kind]) -> UsageError:
    """Return the error for a table query that lists the columns, and suggests a similar one."""
    close = difflib.get_close_matches(name[:MAX_LENGTH], columns, n=1)
    meant = f"did you mean {close[0]}? " if close else ""
    return UsageError(
        f"there is no column {_shortened_repr(name)}", hint=f"{meant}There are {', '.join(columns)}"
    )


def _parse_condition(text: str, columns: Mapping[str, Kind]) -> TableCondition:
    """Parse one condition of a table query, COLUMN OP VALUE."""
    if len(text) > MAX_LENGTH:
        raise UsageError(f"a condition has {len(text)} characters; it may have {MAX_LENGTH}")
    match = _SHAPE.fullmatch(text)
    if match is None:
        raise UsageError(
            f"the condition {_shortened_repr(text)} is not COLUMN OP VALUE",
            hint=f"such as `step >= 100` or `name ~ gpt`; OP is one of {' '.join(OPERATORS)}",
        )
    column, op, value = match["column"], match["op"], match["value"]
    op = "=" if op == "==" else op
    kind = columns.get(column)
    if kind is None:
        raise unknown_column(column, columns)
    if op not in OPERATORS:
        close = difflib.get_close_matches(op, OPERATORS, n=1, cutoff=0.1)
        meant = f"did you mean {close[0]}? " if close else ""
        raise UsageError(
            f"{_shortened_repr(op)} in {_shortened_repr(text)} is not an operator",
            hint=f"{meant}There are {' '.join(OPERATORS)}",
        )
    if value.lower() == "none" and op in ("=", "!="):
        return TableCondition(column, op, None)
    return TableCondition(column, op, _parse_value(text, column, op, value, kind))


def _parse_value(
    text: str, column: str, op: str, value: str, kind: Kind
) -> float | int | str | bool:
    """Parse the value in a condition of a table query, by the kind of its column."""
    if kind == "text":
        is_quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
        if not value:
            raise UsageError(
                f"{_shortened_repr(text)} has no value", hint=f"write {column} {op} ''"
            )
        return value[1:-1] if is_quoted else value
    if op == "~" or (kind == "bool" and op not in ("=", "!=")):
        raise UsageError(
            f"{column} is a {'number' if kind == 'number' else 'yes or no'}; {op} is not for it",
            hint="~ looks into texts, < and > compare numbers and texts",
        )
    if kind == "bool":
        if value.lower() in _TRUE + _FALSE:
            return value.lower() in _TRUE
        raise UsageError(
            f"{column} is yes or no, not {_shortened_repr(value)}", hint="write true or false"
        )
    for read in (int, float):
        try:
            return read(value)
        except ValueError:  # perhaps a float; otherwise an error is raised below
            continue
    raise UsageError(f"{column} is a number; {_shortened_repr(value)} is not one")


def _compare(values: npt.NDArray[np.generic], op: str, value: float | int | str | bool) -> Mask:
    """Return a mask of the values that satisfy the condition of a table query."""
    if op == "~":
        substring = str(value).casefold()
        return np.fromiter((substring in str(v).casefold() for v in values), bool, len(values))
    if isinstance(value, float) and math.isnan(value):
        is_nan = np.isnan(values.astype(np.float64))
        if op in ("=", "!="):
            return is_nan if op == "=" else ~is_nan
        return np.zeros(len(values), dtype=bool)
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        value = float(value) if abs(value) < 2**1023 else math.copysign(math.inf, value)
    how = {
        "=": np.equal,
        "!=": np.not_equal,
        "<": np.less,
        "<=": np.less_equal,
        ">": np.greater,
        ">=": np.greater_equal,
    }
    if values.dtype != object:
        return np.asarray(how[op](values, value), dtype=np.bool_)
    return np.fromiter((bool(how[op](v, value)) for v in values), bool, len(values))


def _shortened_repr(text: str) -> str:
    """Return a quoted part of a table query for an error message."""
    return repr(text if len(text) <= _WORDS else text[:_WORDS] + "...")
