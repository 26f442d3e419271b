"""A measured value with its reference and goal; tables of values."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

_HOLDS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le, ">=": operator.ge, "=": operator.eq,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Goal:
    """Expected value of a row. Missing it is reported and is no failure of the benchmark."""

    of: Literal["ratio", "ours"]
    sign: Literal["<=", ">=", "="]
    limit: float

    def text(self, unit: str) -> str:
        """Return the goal as text, such as ``ratio <= 1.05`` or ``<= 30 ms``."""
        if self.of == "ratio":
            return f"ratio {self.sign} {self.limit:.3g}"
        return f"{self.sign} {self.limit:.3g} {unit}".rstrip()


def ratio_at_most(limit: float) -> Goal:
    """Return the goal that the cost is at most ``limit`` times the peer's."""
    return Goal("ratio", "<=", limit)


def at_most(limit: float) -> Goal:
    """Return the goal of our own figure being no larger."""
    return Goal("ours", "<=", limit)


def at_least(limit: float) -> Goal:
    """Return the goal of our own figure being no smaller."""
    return Goal("ours", ">=", limit)


def exactly(value: float) -> Goal:
    """Return the goal of our own figure being just that."""
    return Goal("ours", "=", value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of a bench."""

    name: str
    ours: float | None
    unit: str
    peer: str = ""
    theirs: float | None = None
    goal: Goal | None = None
    spread: float | None = None
    """How far the peer was from itself in the same run, as a share: less than this is noise."""
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """Ours over theirs."""
        return None if self.ours is None or not self.theirs else self.ours / self.theirs

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; None without a goal, or where it could not be measured."""
        if self.goal is None:
            return None
        value = self.ratio if self.goal.of == "ratio" else self.ours
        return None if value is None else _HOLDS[self.goal.sign](value, self.goal.limit)

    def plain(self) -> dict[str, object]:
        """Return what ``--format json`` prints."""
        return {
            "name": self.name,
            "ours": self.ours,
            "peer": self.peer,
            "theirs": self.theirs,
            "ratio": self.ratio,
            "goal": self.goal.text(self.unit) if self.goal else "",
            "met": self.met,
            "unit": self.unit,
            "spread": self.spread,
            "note": self.note,
        }


Cell = str | float | int | None
"""What stands in a table; None where there is nothing to say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A table of a benchmark that compares more than two."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""
    """What is to be read in it; stands below."""
    detail: Mapping[str, object] = field(default_factory=dict)
    """What only ``--format json`` prints."""

    def cells(self) -> list[tuple[str, ...]]:
        """Return the rows as text."""
        return [tuple(_text(value) for value in row) for row in self.rows]

    def plain(self) -> dict[str, object]:
        """Return what ``--format json`` prints."""
        return {
            "name": self.title,
            "rows": [dict(zip(self.columns, row, strict=True)) for row in self.rows],
            "note": self.note,
            "detail": dict(self.detail),
        }


def _text(value: Cell) -> str:
    if value is None:
        return "-"
    return f"{value:,.2f}" if isinstance(value, float) else str(value)
