"""Writes a report as one self-contained HTML page without scripts, light or dark, printable."""

from collections.abc import Sequence
from pathlib import Path

from trainvitals.printable import printable
from vitals_collector.report.curves import KINDS
from vitals_collector.report.postmortem import pictures
from vitals_collector.report.postmortem.blocks import (
    Block,
    CommandLines,
    Heading,
    HeatMap,
    Plot,
    TableBlock,
    Words,
    rolled_back,
)
from vitals_collector.report.postmortem.tree import Node, node, style, written

_STYLE = Path(__file__).with_name("page.css")
_SHORT, _LONG = 20, 40
"""Characters up to which a cell is one line, and from which it has a minimum width."""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def write(blocks: Sequence[Block]) -> str:
    """Return the report as HTML."""
    title = next(
        (heading.text for heading in blocks if isinstance(heading, Heading)), "Post-mortem"
    )
    body: list[Node] = []
    has_plot = False
    for block in blocks:
        body.append(_node(block))
        if isinstance(block, Plot) and not has_plot:
            has_plot = True
            body.insert(len(body) - 1, _legend())
    if body and isinstance(blocks[-1], Words):
        body[-1].set("class", "dim")
    head = node(
        "head",
        node("meta", charset="utf-8"),
        node("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        node("meta", name="viewport", content="width=device-width,initial-scale=1"),
        node("title", title),
        style(_STYLE.read_text(encoding="utf-8")),
    )
    page = node("html", head, node("body", node("main", *body)), lang="en")
    return f"<!doctype html>\n{written(page)}\n"


def _legend() -> Node:
    letters = ", ".join(f"{letter} {label}" for letter, label in KINDS.values())
    return node(
        "p",
        "A curve shows the minimum and the maximum of each of its columns, so no spike is "
        "hidden. A cross is a non-finite value, gray is a discarded attempt, "
        f"dashed the limit in force, shaded an incident. Letters: {letters}. Point at one to "
        "read why.",
        class_="dim",
    )


def _node(block: Block) -> Node:
    match block:
        case Heading():
            return node(f"h{block.level}", block.text)
        case Words():
            return node("p", block.text)
        case CommandLines():
            return node("pre", "\n".join(map(printable, block.lines)))
        case TableBlock():
            return _table(block)
        case Plot():
            caption = pictures.caption(block.curve)
            drawn = pictures.draw_curve(block.curve, block.marks, block.spans)
            return node("figure", node("figcaption", caption), drawn)
        case HeatMap():
            return _heat_map(block)


def _heat_map(block: HeatMap) -> Node:
    reply = block.reply
    scale = pictures.shades(reply)
    low, high = scale.ticks()[0], scale.ticks()[-1]
    unit = f" {reply.unit}" if reply.unit else ""
    text = f": dark is {low:.4g}{unit}, bright {high:.4g}{unit}"
    text += ", logarithmic" if scale.is_log else ""
    if reply.num_rows > len(reply.rows):
        text += f"; {len(reply.rows)} of {reply.num_rows} rows, those that deviate most"
    text += "; a cross is a value that is not finite" if reply.nonfinite else ""
    if reply.rolled_back is not None:
        text += f"; {rolled_back(reply.rolled_back)}"
    caption = node("figcaption", node("b", block.title), text)
    return node("figure", caption, pictures.draw_cells(reply, block.onset_step))


def _table(block: TableBlock) -> Node:
    numeric = [
        any(_is_number(row[at]) for row in block.rows)
        and all(row[at] in ("", None) or _is_number(row[at]) for row in block.rows)
        for at in range(len(block.header))
    ]
    names = (
        node("th", name, class_="number" if numeric[at] else None)
        for at, name in enumerate(block.header)
    )
    rows = (
        node(
            "tr",
            *(
                node("td", _cell(value), class_=_class(value, is_number=numeric[at]))
                for at, value in enumerate(row)
            ),
        )
        for row in block.rows
    )
    table = node("table", node("thead", node("tr", *names)), node("tbody", *rows))
    return node("div", table, class_="table")


def _class(value: object, *, is_number: bool) -> str | None:
    if is_number:
        return "number"
    num = len(_cell(value))
    return "long" if num > _LONG else "short" if num <= _SHORT else None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _cell(value: object) -> str:
    if value is None:
        return ""
    return printable(f"{value:.6g}" if isinstance(value, float) else str(value))
