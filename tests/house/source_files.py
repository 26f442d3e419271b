"""The Python sources of the project, read once for all tests of a file."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
FOLDERS = (
    "trainvitals",
    "trainer_hooks",
    "agent",
    "collector",
    "dashboard",
    "deploy",
    "plugins",
    "docs",
    "benchmarks",
)


def sources() -> list[Path]:
    """Return the sources without those of the tests."""
    return sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def name_of(path: Path) -> str:
    """Return the path relative to the root."""
    return str(path.relative_to(ROOT))


class Source(NamedTuple):
    """One source and its tree."""

    name: str
    lines: list[str]
    tree: ast.Module


@functools.cache
def read_sources() -> list[Source]:
    """Return every source. One test asks all: one for each file would cost more to start."""
    texts = {name_of(path): path.read_text() for path in sources()}
    return [Source(name, text.splitlines(), ast.parse(text)) for name, text in texts.items()]


def walk_blocks(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that are statements or hold them: a tenth of all."""
    todo = [tree]
    while todo:
        node = todo.pop()
        yield node
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            block = getattr(node, field, None)
            todo += block if isinstance(block, list) else ()
