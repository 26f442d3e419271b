"""The style that no linter checks: silent handlers, halves of texts, folders."""

import ast
import itertools
from collections.abc import Iterator

from tests.house.source_files import ROOT, name_of, read_sources, walk_blocks


def test_no_exception_is_swallowed_without_a_word_and_no_half_of_a_text_is_left_behind():
    """A string alone on its line is the other half of the one before, without the parentheses."""
    silent, halves = [], []
    for source in read_sources():
        for node in walk_blocks(source.tree):
            if isinstance(node, ast.ExceptHandler):
                empty = all(isinstance(s, ast.Pass | ast.Continue) for s in node.body)
                handler = source.lines[node.lineno - 1 : node.end_lineno]
                if empty and "#" not in "\n".join(handler):
                    silent.append(f"{source.name}:{node.lineno}: say why in a comment")
            # A name of a module or a class may be followed by its description.
            if not isinstance(node, ast.Module | ast.ClassDef):
                halves += [f"{source.name}:{line}" for line in lines_of_halves(node)]
    assert ([], []) == (silent, halves)


def lines_of_halves(node: ast.AST) -> Iterator[int]:
    for field in ("body", "orelse", "finalbody"):
        block = getattr(node, field, None)
        for first, second in itertools.pairwise(block if isinstance(block, list) else ()):
            if isinstance(second, ast.Expr) and is_text(first) and is_text(second):
                yield second.lineno


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
    folders = {path.parent for path in (ROOT / "tests").rglob("*.py")}
    folders |= {
        parent
        for f in folders
        for parent in f.parents
        if ROOT / "tests" in (parent, *parent.parents)
    }
    assert set() == {name_of(f) for f in folders if not (f / "__init__.py").exists()}
