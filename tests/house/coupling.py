"""Coupling of the tests to the code: `python -m tests.house.coupling FILE ...` lists the uses.

Three uses make a change of the code a change of its tests: a private name of another module, an
attribute that a test replaces, and an import from another test module. Names that the same file
defines do not count, nor do those of the standard library and of other packages. `coupling.json`
records the counts, which may only fall; `python -m tests.house.coupling` lowers them.
"""

import ast
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECORD = Path(__file__).with_name("coupling.json")
OURS = re.compile(r"(trainvitals|trainer_hooks|vitals_\w+|tests)\b")
MEASURES = ("private", "private of hooks and policy", "setattr", "test modules")
_PRIVATE = re.compile(r"_(?!_)\w*[A-Za-z]\w*")
_OF_TUPLES = frozenset({"_asdict", "_fields", "_make", "_replace"})
"""Public methods of every NamedTuple."""
_TEST_MODULE = re.compile(r"(.*\.)?test_\w+")


def files_of_tests() -> list[Path]:
    """Return the sources of the tests."""
    return sorted((ROOT / "tests").rglob("*.py"))


def counts() -> dict[str, Counter[str]]:
    """Return the number of uses per measure, then per folder of ``tests/``."""
    found = {measure: Counter[str]() for measure in MEASURES}
    for path in files_of_tests():
        folder = path.relative_to(ROOT / "tests").parts[0]
        for measure, _ in uses(path.read_text()):
            found[measure][folder] += 1
    return found


def uses(source: str) -> Iterator[tuple[str, ast.AST]]:
    """Yield the measure and the place of each use in the source of a test."""
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    defined = defined_names(nodes)
    modules = dict(_imported(nodes))
    is_of_rank = any(
        name.startswith(("trainer_hooks", "trainvitals.policy")) for name in modules.values()
    )
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            paths = [module, *(f"{module}.{alias.name}" for alias in node.names)]
            if any(map(_TEST_MODULE.fullmatch, paths)):
                yield "test modules", node
            for alias in node.names if _is_ours(module) else ():
                yield from _private(alias.name, node, is_of_rank=is_of_rank)
        elif isinstance(node, ast.Import):
            yield from (
                ("test modules", node) for a in node.names if _TEST_MODULE.fullmatch(a.name)
            )
        elif isinstance(node, ast.Attribute):
            root = _root(node)
            if node.attr not in defined and _is_ours(modules.get(root, "tests")):
                yield from _private(node.attr, node, is_of_rank=is_of_rank)
        elif isinstance(node, ast.Call) and _replaces(node, modules):
            yield "setattr", node


def defined_names(nodes: list[ast.AST]) -> set[str]:
    """Return the names that a source binds: functions, classes, fields and attributes."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            # An attribute that is assigned to another object is a use of it.
            names |= {node.attr} if ast.unparse(node.value) == "self" else set()
    return names


def _imported(nodes: list[ast.AST]) -> Iterator[tuple[str, str]]:
    """Yield each imported name and the module that it is, or comes from."""
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.asname or alias.name.partition(".")[0], alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module or ''}.{alias.name}"


def _private(name: str, node: ast.AST, *, is_of_rank: bool) -> Iterator[tuple[str, ast.AST]]:
    if _PRIVATE.fullmatch(name) and name not in _OF_TUPLES:
        yield "private", node
        if is_of_rank and name in private_names_of_rank():
            yield "private of hooks and policy", node


@cache
def private_names_of_rank() -> frozenset[str]:
    """Return the private names that the training hooks and the policy define."""
    names: set[str] = set()
    for package in ("trainer_hooks", "trainvitals/policy"):
        for path in (ROOT / package).rglob("*.py"):
            names |= defined_names(list(ast.walk(ast.parse(path.read_text()))))
    return frozenset(name for name in names if _PRIVATE.fullmatch(name))


def _root(node: ast.expr) -> str:
    """Return the name that a chain of attributes begins with, or "" if it begins with a call."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _is_ours(module: str) -> bool:
    return OURS.match(module) is not None


def _replaces(call: ast.Call, modules: dict[str, str]) -> bool:
    """Whether it is a ``setattr``, also a fixture's, on a class, module or object of ours."""
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else _root(function)
    if name != "setattr" or not call.args:
        return False
    target = call.args[0]
    if isinstance(target, ast.Constant):
        return isinstance(target.value, str) and _is_ours(target.value)
    return _is_ours(modules.get(_root(target), "tests"))


def recorded() -> dict[str, dict[str, int]]:
    """Return the counts that may not be exceeded."""
    record: dict[str, dict[str, int]] = json.loads(RECORD.read_text())
    return record


def lower() -> None:
    """Lower each recorded count to the present one; none is raised."""
    now = counts()
    record = {
        measure: {
            folder: min(count, now[measure][folder])
            for folder, count in by_folder.items()
            if now[measure][folder]
        }
        for measure, by_folder in recorded().items()
    }
    RECORD.write_text(json.dumps(record, indent=2) + "\n")


def main() -> None:
    """List the uses in the given files, or lower the record."""
    for name in sys.argv[1:]:
        for measure, node in uses(Path(name).read_text()):
            print(f"{name}:{node.lineno}: {measure}: {ast.unparse(node)}")  # type: ignore[attr-defined]
    if not sys.argv[1:]:
        lower()


if __name__ == "__main__":
    main()
