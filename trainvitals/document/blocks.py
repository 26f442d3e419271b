"""Blocks of a document, independent of its format."""

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Protocol

import msgspec

from trainvitals.printable import printable
from trainvitals.units import DATE_FORMAT

if TYPE_CHECKING:
    from trainvitals.document.tree import Node


class Heading(msgspec.Struct, frozen=True):
    """A title; only one has level 1."""

    level: int
    text: str


class Paragraph(msgspec.Struct, frozen=True):
    """A paragraph; a dim one is less important."""

    text: str
    is_dim: bool = False


class KeyFacts(msgspec.Struct, frozen=True):
    """Facts with their names."""

    pairs: Sequence[tuple[str, str]]


class CommandLines(msgspec.Struct, frozen=True):
    """Lines to copy into a terminal."""

    lines: Sequence[str]


class TableBlock(msgspec.Struct, frozen=True):
    """Rows of cells below column names."""

    header: Sequence[str]
    rows: Sequence[Sequence[object]]


class DrawnLines(msgspec.Struct, frozen=True):
    """Lines drawn with characters."""

    lines: Sequence[str]


class ChartBlock(Protocol):
    """A chart, which draws itself."""

    @property
    def note(self) -> str:
        """Return the explanation that a page shows once, above its first chart; "" for none."""
        ...

    def to_figure(self) -> "Node":
        """Return the chart as an SVG figure with its caption, for a document in HTML."""
        ...

    def to_blocks(self) -> "Sequence[TextBlock]":
        """Return the chart as blocks of a document whose format has no images."""
        ...


class Fold(msgspec.Struct, frozen=True):
    """A section that a page shows as its title until it is opened; it is printed open."""

    level: int
    title: str
    blocks: "Sequence[Block]"


TextBlock = Heading | Paragraph | KeyFacts | CommandLines | TableBlock | DrawnLines
Block = TextBlock | ChartBlock | Fold


def cell_text(value: object) -> str:
    """Return the text of a cell in a document's table: times in UTC, numbers with six digits."""
    if value is None:
        return ""
    if isinstance(value, datetime):
        return value.strftime(DATE_FORMAT)
    return printable(f"{value:.6g}" if isinstance(value, float) else str(value))
