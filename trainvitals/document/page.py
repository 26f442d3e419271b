"""Writes a document as HTML without scripts, as a page or a part of one; and SVG files."""

import re
from collections.abc import Sequence
from pathlib import Path

from trainvitals.document.blocks import (
    Block,
    ChartBlock,
    CommandLines,
    DrawnLines,
    Fold,
    Heading,
    KeyFacts,
    Paragraph,
    TableBlock,
    TextBlock,
    cell_text,
)
from trainvitals.document.tree import Node, make_element, serialize_element, style
from trainvitals.printable import printable

_STYLES = tuple(Path(__file__).with_name(name) for name in ("page.css", "plot.css"))
_SHORT, _LONG = 20, 40
"""Characters up to which a cell is one line, and from which it has a minimum width."""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def write_page(blocks: Sequence[Block]) -> str:
    """Return the document as a page, light or dark, printable."""
    titles = [block.text for block in blocks if isinstance(block, Heading)]
    head = make_element(
        "head",
        make_element("meta", charset="utf-8"),
        make_element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        make_element("meta", name="viewport", content="width=device-width,initial-scale=1"),
        make_element("title", *titles[:1]),
        style("".join(file.read_text(encoding="utf-8") for file in _STYLES)),
    )
    main = make_element("main", *_build_elements(blocks))
    page = make_element("html", head, make_element("body", main), lang="en")
    return f"<!doctype html>\n{serialize_element(page)}\n"


def write_part(blocks: Sequence[Block]) -> str:
    """Return the document as a part of an HTML page, without a style."""
    return "".join(f"{serialize_element(element)}\n" for element in _build_elements(blocks))


def write_svg(width: float, height: float, inside: Sequence[Node]) -> str:
    """Write an SVG document on a white background, in the colors of a page in print."""
    page, plot = (file.read_text(encoding="utf-8") for file in _STYLES)
    # Only browsers know CSS variables; a file is also opened by other programs.
    colors = dict(re.findall(r"(--\w+): ([#\w]+);", page.partition("@media print")[2]))
    sheet = re.sub(r"var\((--\w+)\)", lambda name: colors[name[1]], plot)
    root = make_element(
        "svg",
        style(f"\n{sheet}"),
        make_element("rect", width=width, height=height, fill="white"),
        *inside,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width} {height}",
        width=width,
        height=height,
        font_family="sans-serif",
    )
    return serialize_element(root, method="xml")


def _build_elements(blocks: Sequence[Block], notes: set[str] | None = None) -> list[Node]:
    """Return the HTML elements of a document's blocks; ``notes`` are on the page already."""
    nodes: list[Node] = []
    notes = {""} if notes is None else notes
    for block in blocks:
        if isinstance(block, Fold):
            summary = make_element("summary", make_element(f"h{block.level}", block.title))
            nodes.append(make_element("details", summary, *_build_elements(block.blocks, notes)))
            continue
        note = "" if isinstance(block, TextBlock) else block.note
        if note not in notes:
            notes.add(note)
            nodes.append(make_element("p", note, class_="dim"))
        nodes.append(_build_block_element(block))
    return nodes


def _build_block_element(block: TextBlock | ChartBlock) -> Node:
    """Return the HTML element of one block of a document."""
    match block:
        case Heading():
            return make_element(f"h{block.level}", block.text)
        case Paragraph():
            return make_element("p", block.text, class_="dim" if block.is_dim else None)
        case KeyFacts():
            rows = [
                make_element("tr", make_element("th", name), make_element("td", text))
                for name, text in block.pairs
            ]
            return make_element("div", make_element("table", *rows), class_="table")
        case CommandLines() | DrawnLines():
            pre = make_element("pre")
            pre.text = "\n".join(map(printable, block.lines))  # `node` makes a line break a space
            return pre
        case TableBlock():
            return _build_table_element(block)
        case _:
            return block.to_figure()


def _build_table_element(block: TableBlock) -> Node:
    """Return the HTML element of a document's table; columns of numbers get their own class."""
    numeric = [
        any(_is_number(row[at]) for row in block.rows)
        and all(row[at] in ("", None) or _is_number(row[at]) for row in block.rows)
        for at in range(len(block.header))
    ]
    names = (
        make_element("th", name, class_="number" if numeric[at] else None)
        for at, name in enumerate(block.header)
    )
    rows = (
        make_element(
            "tr",
            *(
                make_element(
                    "td", text, class_="number" if numeric[at] else _choose_cell_class(text)
                )
                for at, text in enumerate(map(cell_text, row))
            ),
        )
        for row in block.rows
    )
    table = make_element(
        "table", make_element("thead", make_element("tr", *names)), make_element("tbody", *rows)
    )
    return make_element("div", table, class_="table")


def _choose_cell_class(text: str) -> str | None:
    """Return the CSS class of a cell in a document's table, by the length of its text."""
    return "long" if len(text) > _LONG else "short" if len(text) <= _SHORT else None


def _is_number(value: object) -> bool:
    """Return whether a cell of a document's table is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)
