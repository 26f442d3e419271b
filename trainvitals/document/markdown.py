"""Writes a document as Markdown for a ticket, or as text for a terminal."""

from collections.abc import Callable, Sequence

from trainvitals.document.blocks import (
    Block,
    CommandLines,
    DrawnLines,
    Fold,
    Heading,
    KeyFacts,
    Paragraph,
    TableBlock,
    cell_text,
)
from trainvitals.printable import escape_markdown, printable

Escape = Callable[[str], str]


def write_markdown(blocks: Sequence[Block]) -> str:
    """Return the document as Markdown; external text is escaped."""
    return "\n\n".join(_format_block(block, escape_markdown, "**") for block in blocks) + "\n"


def write_text(blocks: Sequence[Block]) -> str:
    """Return the document as text, without escapes."""
    return "\n\n".join(_format_block(block, _make_printable, "") for block in blocks) + "\n"


def _make_printable(text: str) -> str:
    """Return text of a document for a terminal: without control characters, stripped."""
    return printable(text).strip()


def _format_block(block: Block, escape: Escape, strong: str) -> str:
    """Return one block of a document as Markdown or plain text."""
    match block:
        case Heading():
            return f"{'#' * block.level} {escape(block.text)}"
        case Paragraph():
            return escape(block.text)
        case KeyFacts():
            names = (f"- {strong}{escape(name)}{strong}: " for name, _ in block.pairs)
            texts = (escape(text) for _, text in block.pairs)
            return "\n".join(map("".join, zip(names, texts, strict=True)))
        case CommandLines():
            return "\n".join(["```sh", *map(printable, block.lines), "```"])
        case TableBlock():
            rows = [block.header, *([cell_text(value) for value in row] for row in block.rows)]
            lines = ["| " + " | ".join(map(escape, row)) + " |" for row in rows]
            return "\n".join([lines[0], "|" + "---|" * len(block.header), *lines[1:]])
        case DrawnLines():
            return "\n".join(["```text", *block.lines, "```"])
        case Fold():
            section = [Heading(block.level, block.title), *block.blocks]
            return "\n\n".join(_format_block(part, escape, strong) for part in section)
        case _:
            return "\n\n".join(_format_block(part, escape, strong) for part in block.to_blocks())
