"""What the architecture's pages name is there: every file, every function, every test."""

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "docs" / "ARCHITECTURE.md",
    ROOT / "docs" / "DETECTORS.md",
    ROOT / "docs" / "PRIVACY.md",
    ROOT / "SECURITY.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs" / "decisions").glob("*.md")),
]
SHIPPED = ("trainvitals", "trainer_hooks", "agent", "collector", "dashboard", "deploy", "plugins")
USERS_OWN = {"agent/ppo.py"}
"""Files that a page names as an example of somebody else's."""
PLACE = re.compile(r"`([\w./-]+?\.py)(?::([\w.]+))?`")


@cache
def names_in(path: Path) -> frozenset[str]:
    """Return every name a file defines: functions, classes, what is in them, and constants."""
    found: set[str] = set()

    def walk(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(prefix + child.name)
                walk(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.AnnAssign | ast.Assign):
                targets = [child.target] if isinstance(child, ast.AnnAssign) else child.targets
                found.update(prefix + t.id for t in targets if isinstance(t, ast.Name))
            elif not isinstance(child, ast.expr):
                walk(child, prefix)

    walk(ast.parse(path.read_text()), "")
    return frozenset(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_everything_that_is_named_is_there(page):
    missing = []
    for file, name in PLACE.findall(page.read_text()):
        path = ROOT / file
        if file in USERS_OWN:
            continue
        if not path.is_file():
            missing.append(file)
        elif name and name not in names_in(path):
            missing.append(f"{file}:{name}")
    assert [] == missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page):
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
    found = [link for link in links if "://" not in link]
    assert [] == [link for link in found if not (page.parent / link).exists()]


def test_the_way_of_a_number_and_of_a_command_name_each_room():
    text = PAGES[0].read_text()
    way = text.partition("## One number")[2].partition("## One command")[0]
    back = text.partition("## One command")[2].partition("## What holds")[0]
    for room in ("trainer_hooks/", "trainvitals/", "agent/", "collector/", "dashboard/"):
        assert f"`{room}" in way
    for room in ("trainer_hooks/", "trainvitals/", "agent/", "collector/"):
        assert f"`{room}" in back


def test_every_folder_in_the_table_of_rooms_is_there_and_no_room_is_missing():
    text = PAGES[0].read_text()
    table = text.partition("## Packages")[2].partition("\n\nImports")[0]
    rooms = [row.split("`")[1] for row in table.splitlines() if row.startswith("| `")]
    assert [] == [room for room in rooms if not (ROOT / room).is_dir()]
    files = [path for name in SHIPPED for path in (ROOT / name).rglob("__init__.py")]
    packages = {path.parent for path in files if any(path.parent.glob("[a-z]*.py"))}
    assert packages <= {ROOT / room for room in rooms}


@pytest.mark.parametrize(
    ("first", "package"),
    [
        ("errors, clock, stateful, redaction <-", "trainvitals"),
        ("numbers <- storage", "vitals_collector"),
        ("failopen, node", "trainer_hooks"),
    ],
)
def test_the_order_of_the_rooms_is_the_one_that_is_checked(first, package):
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = {}
    for contract in linter["contracts"]:
        if contract["type"] == "layers":
            of = contract.get("containers", ["trainvitals"])[0]
            layers[of] = [layer.replace("trainvitals.", "") for layer in contract["layers"]]
    checked = [set(layer.split(" | ")) for layer in reversed(layers[package])]
    text = PAGES[0].read_text()
    chain = text[text.index(first) :].partition("\n\n")[0]
    assert checked == [{name.strip() for name in part.split(",")} for part in chain.split("<-")]


def test_decisions_are_numbered_without_gaps_and_listed():
    pages = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
    listed = (ROOT / "docs" / "decisions" / "README.md").read_text()
    assert [f"{n:02d}-" for n in range(1, len(pages) + 1)] == [page.name[:3] for page in pages]
    assert [] == [page.name for page in pages if f"({page.name})" not in listed]
    for page in pages:
        for heading in ("## Context", "## Decision", "## Alternatives", "## Consequences"):
            assert heading in page.read_text(), page.name
