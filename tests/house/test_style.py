"""The house style that no linter checks: silent handlers, annotations, folders.

How long a file or a function may be is no rule: what it costs to follow one event is measured in
``test_measures``.
"""

import ast
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

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


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


class Source(NamedTuple):
    """One file of a room, read once for all that is asked of it."""

    name: str
    text: str
    tree: ast.Module


@pytest.fixture(scope="module", params=sources(), ids=name_of)
def source(request):
    text = request.param.read_text()
    return Source(name_of(request.param), text, ast.parse(text))


def test_no_exception_is_swallowed_without_a_word(source):
    lines = source.text.splitlines()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ExceptHandler):
            empty = all(isinstance(s, ast.Pass | ast.Continue) for s in node.body)
            handler = "\n".join(lines[node.lineno - 1 : node.end_lineno])
            assert not empty or "#" in handler, f"{source.name}:{node.lineno}: say why in a comment"
            assert node.type is not None, f"{source.name}:{node.lineno}: a bare except"


def test_everything_is_annotated(source):
    for function in functions(source.tree):
        arguments = function.args
        named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        named += [a for a in (arguments.vararg, arguments.kwarg) if a is not None]
        bare = [a.arg for a in named if a.annotation is None and a.arg not in ("self", "cls")]
        assert [] == bare, f"{source.name}:{function.name}"
        assert function.returns is not None, f"{source.name}:{function.name}"


def test_no_half_of_a_text_is_left_behind(source):
    """A string alone on its line is the other half of the one before, without the parentheses."""
    left = [
        second.lineno
        for function in functions(source.tree)
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
