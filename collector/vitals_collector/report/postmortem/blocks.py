"""Blocks of a report, independent of its format."""

from collections.abc import Sequence
from dataclasses import dataclass

from trainvitals.views import CellsReply
from vitals_collector.report.curves import CurveMark, PlottedCurve


@dataclass(frozen=True, slots=True)
class Heading:
    """A title; only one has level 1."""

    level: int
    text: str


@dataclass(frozen=True, slots=True)
class Words:
    """A paragraph."""

    text: str


@dataclass(frozen=True, slots=True)
class CommandLines:
    """Lines to copy into a terminal."""

    lines: Sequence[str]


@dataclass(frozen=True, slots=True)
class TableBlock:
    """Rows of cells below column names."""

    header: Sequence[str]
    rows: Sequence[Sequence[object]]


@dataclass(frozen=True, slots=True)
class Plot:
    """A curve with its decisions; the spans are steps of incidents."""

    curve: PlottedCurve
    marks: Sequence[CurveMark]
    spans: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True, slots=True)
class HeatMap:
    """One metric of all ranks or layers over steps."""

    title: str
    reply: CellsReply
    onset_step: int


def rolled_back(steps: tuple[int, int]) -> str:
    """Return a note on the discarded steps in a heat map."""
    first, last = steps
    return f"steps {first} to {last} include rollbacks: a cell shows the worst of all attempts"


Block = Heading | Words | CommandLines | TableBlock | Plot | HeatMap
