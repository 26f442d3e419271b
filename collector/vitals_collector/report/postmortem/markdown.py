"""Writes a report as Markdown for a ticket, or as text; curves are drawn with characters."""

from collections.abc import Callable, Sequence

from trainvitals.printable import escape_markdown, printable
from vitals_collector.report import text_plot
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

_WIDTH = 100
Escape = Callable[[str], str]


def write(blocks: Sequence[Block]) -> str:
    """Return the report as Markdown."""
    return "\n\n".join(_text(block, escape_markdown) for block in blocks) + "\n"


def write_text(blocks: Sequence[Block]) -> str:
    """Return the report as text for a terminal, without escapes."""
    return "\n\n".join(_text(block, _plain) for block in blocks) + "\n"


def _plain(text: str) -> str:
    return printable(text).strip()


def _text(block: Block, escape: Escape) -> str:
    match block:
        case Heading():
            return f"{'#' * block.level} {escape(block.text)}"
        case Words():
            return escape(block.text)
        case CommandLines():
            return "\n".join(["```sh", *map(printable, block.lines), "```"])
        case TableBlock():
            return _table(block.header, block.rows, escape)
        case Plot():
            lines = text_plot.draw(block.curve, block.marks, width=_WIDTH)
            shown = [m for m in block.marks if block.curve.span[0] <= m.step <= block.curve.span[1]]
            return "\n".join(["```text", *lines, text_plot.legend(shown), "```"])
        case HeatMap():
            return _heat_map(block, escape)


def _table(header: Sequence[str], rows: Sequence[Sequence[object]], escape: Escape) -> str:
    lines = ["| " + " | ".join(map(escape, header)) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(_cell(value, escape) for value in row) + " |" for row in rows]
    return "\n".join(lines)


def _heat_map(block: HeatMap, escape: Escape) -> str:
    """Return each row's maximum, its step, and whether all of its values are finite."""
    reply = block.reply
    lost = {row for row, _ in reply.nonfinite}
    rows = []
    for number, (name, values) in enumerate(zip(reply.rows, reply.value, strict=True)):
        cells = zip(values, reply.step, strict=True)
        measured_points = [(value, step) for value, step in cells if value is not None]
        least, most = (
            min(measured_points, default=(None, None)),
            max(measured_points, default=(None, None)),
        )
        rows.append((name, least[0], most[0], most[1], "yes" if number in lost else "no"))
    header = (block.title, "least", "greatest", "about step", "not finite values")
    num_omitted = reply.num_rows - len(reply.rows)
    more = [f"{num_omitted} rows that deviate less are left out."] if num_omitted > 0 else []
    if reply.rolled_back is not None:
        more.append(f"{rolled_back(reply.rolled_back).capitalize()}.")
    return "\n\n".join([_table(header, rows, escape), *more])


def _cell(value: object, escape: Escape) -> str:
    if value is None:
        return ""
    return escape(f"{value:.6g}" if isinstance(value, float) else str(value))
