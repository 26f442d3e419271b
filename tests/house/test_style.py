"""The house style that no linter checks: silent handlers, annotations, folders.

How long a file or a function may be is no rule: what it costs to follow one event is measured in
``test_measures``.
"""

import ast
import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
ROOT = Path(__file__).parents[2]
ROOMS = (
    "trainvitals",
    "trainer_hooks",
    "agent",
    "collector",
    "dashboard",
    "deploy",
    "docs",
    "benchmarks",
)


def sources() -> list[Path]:
    return sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))


def files_of_tests() -> list[Path]:
    return sorted((ROOT / "tests").rglob("*.py"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


class Source(NamedTuple):
    """One file of a room, read once for all that is asked of it."""

    name: str
    lines: list[str]
    tree: ast.Module


@functools.cache
def read_sources() -> list[Source]:
    """Read every file of the rooms. A test asks all: one for each file would cost more to start."""
    texts = {name_of(path): path.read_text() for path in sources()}
    return [Source(name, text.splitlines(), ast.parse(text)) for name, text in texts.items()]


def each_node() -> Iterator[tuple[Source, ast.AST]]:
    for source in read_sources():
        for node in ast.walk(source.tree):
            yield source, node


def test_no_exception_is_swallowed_without_a_word():
    for source, node in each_node():
        if isinstance(node, ast.ExceptHandler):
            empty = all(isinstance(s, ast.Pass | ast.Continue) for s in node.body)
            handler = "\n".join(source.lines[node.lineno - 1 : node.end_lineno])
            assert not empty or "#" in handler, f"{source.name}:{node.lineno}: say why in a comment"
            assert node.type is not None, f"{source.name}:{node.lineno}: a bare except"


def test_everything_is_annotated():
    for source, function in each_node():
        if not isinstance(function, FUNCTION):
            continue
        arguments = function.args
        named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        named += [a for a in (arguments.vararg, arguments.kwarg) if a is not None]
        bare = [a.arg for a in named if a.annotation is None and a.arg not in ("self", "cls")]
        assert [] == bare, f"{source.name}:{function.name}"
        assert function.returns is not None, f"{source.name}:{function.name}"


def test_no_half_of_a_text_is_left_behind():
    """A string alone on its line is the other half of the one before, without the parentheses."""
    left = [
        f"{source.name}:{second.lineno}"
        for source, function in each_node()
        if isinstance(function, FUNCTION)
        for node in ast.walk(function)
        for field in ("body", "orelse", "finalbody")
        if isinstance(block := getattr(node, field, None), list)
        for first, second in itertools.pairwise(block)
        if is_text(first) and is_text(second) and isinstance(second, ast.Expr)
    ]
    assert left == []


def is_text(statement) -> bool:
    """Whether it is a string, or sets one to a local name: an attribute's may be documented."""
    value = getattr(statement, "value", None)
    if isinstance(statement, ast.Assign) and not isinstance(statement.targets[0], ast.Name):
        return False
    is_string = isinstance(value, ast.Constant) and isinstance(value.value, str)
    return isinstance(statement, ast.Assign | ast.Expr) and (
        is_string or isinstance(value, ast.JoinedStr)
    )


def test_every_folder_of_tests_is_a_package():
    folders = {path.parent for path in files_of_tests()}
    folders |= {
        parent
        for f in folders
        for parent in f.parents
        if ROOT / "tests" in (parent, *parent.parents)
    }
    assert set() == {name_of(f) for f in folders if not (f / "__init__.py").exists()}
