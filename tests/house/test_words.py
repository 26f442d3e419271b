"""Texts for people: the phrases of an earlier, translated English stay out of what anyone reads."""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.house.source_files import ROOT, name_of, read_sources

BANNED = {
    r"in vain": "lost work",
    r"\bscales\)|scales away": "sigma",
    r"left its course|left their course|\bits course of\b": "unusual; its usual value",
    r"What moved first, ": "Moved first: A; B",
    r"It is over: |is not over\b": "Resolved: N healthy steps since step S",
    r"its health is": "Health: healthy",
    r"does not run: ": "The run has stopped",
    r"Told about|have told nothing|told of at|\(told only\)": "Findings: none; detected at",
    r"Who reports|Commands of people|Nobody has sent": "Reporting processes; Manual commands: none",
    r"without \{?\w*\}? ?batches from|and on past|passes over (\w+ )?batches": "skipping N batches",
    r"did not cure|no rollback is left": "N rollbacks (the limit) did not fix it; budget used up",
    r"a storm is": "N bad steps within M",
    r"Further of this kind": "and N more",
    r"\bsaid: ": "the source's name, or the text alone",
    r"Trained \{?\w*\(?\w*\)?\}? ?times|Time \{": "First attempt (discarded): ...",
    r"own losses lay|the greatest on": "Per-rank loss A to B (highest: rank R)",
    r"furthest from|\bin the middle\.": "the most unusual value; median",
    r"No rank stands out": "No straggler",
    r"Nothing fires|Nothing is silenced|Nothing was ever decided": "Vitals took no action",
    r"are asked of one run": "Pick a run to query",
    r"points and marks": "(remove)",
    r"takes the verdict on the host": "this optimizer is not fused; pass fused=True",
    r"times so far\), training goes on": "(N so far), training continues",
    r"[Tt]he ladder\b|climb over": "the escalation policy",
    r"turns a run down|is told by VITALS_RUN_ID": "lowers the mode; otherwise set VITALS_RUN_ID",
    r"its sums would round otherwise": "so that bucket order and rounding match",
    r"what waiting for nothing costs": "nothing synchronizes",
    r"held the update back|updates? (are|is) kept back|are kept back by": "suppressed; skipped",
    r"refused in words": "unsupported (clear error)",
    r"Looking back|being told, steering|What it never does": "Inspect runs offline; Guarantees",
    r"alone made it bad": "Caused by rank R",
    r"\bDecision \{\w+\.?\w*\}\{": "Action: ...",
    r"what was said|WHAT WAS SAID|left behind by|as left behind": "message; discarded by rollback",
    r"Keep what the ranks of this node write|Keep everything that was seen": "Run the agent/server",
    r"\bmade whole again|goodbye|\bnobody is there\b": "clean exit; not running",
}
"""Pattern of a text that once stood on a page, and what to write instead. A short list on purpose:
it keeps each of them from coming back, it does not judge style."""

PAGES = [
    ROOT / "README.md",
    *sorted(
        path
        for path in (ROOT / "docs").rglob("*.md")
        if "decisions" not in path.parts  # written once, and left as they were written
    ),
]


def texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Give the literal texts of a file with their lines, docstrings left out; f-strings joined."""
    skipped = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    parts: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts.update(id(part) for part in node.values)
            yield (
                node.lineno,
                "".join(
                    str(part.value)
                    if isinstance(part, ast.Constant)
                    else f"{{{ast.unparse(part)}}}"
                    for part in node.values
                ),
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            is_text = id(node) not in skipped and id(node) not in parts
            yield from [(node.lineno, node.value)] if is_text else []


ANY = re.compile("|".join(f"(?:{pattern})" for pattern in BANNED))
"""One search for what nearly no text has."""


def banned(text: str) -> list[str]:
    if not ANY.search(text):
        return []
    return [f"{p!r}; write: {instead}" for p, instead in BANNED.items() if re.search(p, text)]


@pytest.mark.nightly
def test_no_text_of_the_source_reads_as_it_once_did():
    hits = [
        f"{source.name}:{line}: {hit}"
        for source in read_sources()
        for line, text in texts(source.tree)
        for hit in banned(text)
    ]
    assert not hits, "\n".join(hits)


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_no_page_reads_as_it_once_did(path):
    lines = path.read_text().splitlines()
    hits = [
        f"{name_of(path)}:{i}: {hit}" for i, line in enumerate(lines, 1) for hit in banned(line)
    ]
    assert not hits, "\n".join(hits)


@pytest.mark.parametrize(
    "text",
    [
        "It cost 5 steps trained in vain, 2 seconds.",
        "grad norm of places, 0.3056 at step 140 (0.06805 before, 4.69 scales)",
        "Further of this kind (finding): 8.",
        "rank:0 said: halted: NaN",
        "The ladder gave up.",
        "rank 0 alone made it bad (its own loss was nan)",
    ],
)
def test_the_list_bites(text):
    """What once stood in reports is found, also where it is put together from parts."""
    assert banned(text)
    (line, found) = next(iter(texts(ast.parse(f"text = f'{{a}} ' '{text}'"))))
    assert (1, True) == (line, bool(banned(found)))
