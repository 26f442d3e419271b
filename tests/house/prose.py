"""Linter for prose: patterns of odd English, in what users read and in the code's comments.

``phrases.tsv`` holds the patterns with their levels and replacements. ``make lint`` runs this
module. An error-level pattern fails. The number of warnings of each kind is bounded by
``prose.toml``; the bounds may only fall. Subjects of new commits are checked too.

    python -m tests.house.prose                  check, as `make lint` does
    python -m tests.house.prose --list docs      print all hits in files whose path contains "docs"
    python -m tests.house.prose --update         lower the bounds to the current numbers
"""

import argparse
import csv
import functools
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from re import _constants as sre  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
PHRASES = Path(__file__).with_name("phrases.tsv")
BOUNDS = Path(__file__).with_name("prose.toml")
SLACK = 100
"""Hits below a bound from which the bound has to be lowered."""

SHIPPED = ("trainvitals", "trainer_hooks", "agent", "collector", "dashboard", "deploy", "plugins")
OTHER_CODE = ("benchmarks", "docs", "supply")
MEASUREMENT_PAGES = {"docs/figures.md", "docs/decisions/appendix-lake-measurements.md"}
"""Pages of measurements. Generated pages are checked too: their sentences come from strings."""
PUBLIC_FILES = {
    "trainvitals/__init__.py",
    "trainvitals/client.py",
    "trainvitals/errors.py",
    "trainvitals/views.py",
    "trainer_hooks/__init__.py",
    "trainer_hooks/_attach.py",
    "trainer_hooks/_watch.py",
    "trainer_hooks/monitor.py",
    "trainer_hooks/outcome.py",
}
"""Files that the API reference shows: their docstrings and comments are user texts."""

FIRST_CHECKED_COMMIT = "6ffd09447e954fcc0305741efb63a1f3782ee276"
SUBJECT = re.compile(
    r"[a-z][\w./-]*(, [a-z][\w./-]*)*: "
    r"(?!(?!(?:embed|feed|need|seed|speed|bring|ping) )\w+(?:ed|ing|[^s]s) )[a-z`].*[^.]"
)
MAX_SUBJECT = 72


class Phrase(NamedTuple):
    """A pattern, and what to write instead."""

    pattern: re.Pattern[str]
    level: str
    replacement: str
    anchors: tuple[str, ...]
    """Lower-case substrings; each match contains one of them. Empty if there are none."""


class Text(NamedTuple):
    """Prose of one kind in a file: paragraphs in order, each with its first line's number."""

    path: str
    kind: str
    paragraphs: list[tuple[int, str]]


class Hit(NamedTuple):
    """A match of a phrase."""

    path: str
    line: int
    kind: str
    level: str
    found: str
    replacement: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.level}: {self.found!r}; write: {self.replacement}"


@functools.cache
def phrases() -> list[Phrase]:
    """Read the patterns."""
    with PHRASES.open(newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    return [
        Phrase(
            re.compile(row["pattern"], re.IGNORECASE),
            row["level"],
            row["replacement"],
            tuple(find_anchors(_parser.parse(row["pattern"]))),
        )
        for row in rows
    ]


def find_anchors(parsed: Iterable[Any]) -> list[str]:
    """Return substrings of which each match contains at least one; the longest set, or none.

    They are searched before the pattern is, which makes the linter ten times as fast.
    """
    choices: list[list[str]] = []
    run = ""
    for operation, argument in parsed:
        if operation is sre.LITERAL:
            run += chr(argument).lower()
            continue
        choices.append([run] if run else [])
        run = ""
        if operation is sre.SUBPATTERN:
            choices.append(find_anchors(argument[3]))
        elif operation is sre.BRANCH:
            branches = [find_anchors(branch) for branch in argument[1]]
            choices.append([a for branch in branches for a in branch] if all(branches) else [])
        elif operation is sre.MAX_REPEAT and argument[0] >= 1:
            choices.append(find_anchors(argument[2]))
    choices.append([run] if run else [])
    return max((c for c in choices if c), key=lambda c: min(map(len, c)), default=[])


FENCE = re.compile(r"^( *)(```|~~~).*?^\1\2 *$", re.M | re.S)
HIDDEN = re.compile(r"<!--.*?-->", re.S)
CODE = re.compile(r"``.+?``|`[^`]+`", re.S)
LINK = re.compile(r"\]\([^)]*\)")
URL = re.compile(r"https?://\S+")
BREAK = re.compile(r"\n\s*\n|\n(?= *(?:[-*] |\d+\. |\||#|>))|(?<=\|)", re.M)


def blank(match: re.Match[str]) -> str:
    """Return the newlines of a match: what is removed must not move the lines below."""
    return "\n" * match[0].count("\n")


def split_paragraphs(text: str, first_line: int = 1) -> list[tuple[int, str]]:
    """Return the paragraphs, list items and table cells of a text with their lines."""
    text = CODE.sub(lambda m: "`_`" + blank(m), text)
    text = URL.sub("URL", LINK.sub("]", text))
    paragraphs, start = [], 0
    for match in [*BREAK.finditer(text), None]:
        end = len(text) if match is None else match.start()
        raw = text[start:end]
        stripped = re.sub(r"^[\s|>*#-]+|^\s*\d+\.\s", "", raw)
        line = first_line + text.count("\n", 0, start + raw.find(stripped[:1] or "x"))
        if stripped.strip(" |\n"):
            paragraphs.append((line, re.sub(r"\n[ \t#>]*", "\n", stripped).strip(" |\n")))
        start = end if match is None else match.end()
    return paragraphs


def read_page(path: Path) -> Iterator[Text]:
    """Yield the prose of a Markdown page."""
    text = HIDDEN.sub(blank, FENCE.sub(blank, path.read_text()))
    name = str(path.relative_to(ROOT))
    yield Text(name, "docs", split_paragraphs(text))


TOKEN = re.compile(
    r"""(?P<prefix>\b[rbfuRBFU]{1,2})?(?P<quote>\"\"\"|'''|"|')"""
    r"""(?P<body>(?:\\.|(?!(?P=quote)).)*?)(?P=quote)|(?P<comment>\#[^\n]*)""",
    re.S,
)
PLACEHOLDER = re.compile(r"\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}")
PROSE = re.compile(r"[A-Za-z]{2,}[,;:]? +[A-Za-z]{2,}[,;:.]? +[A-Za-z]{2,}")
NOT_PROSE = re.compile(
    r"SELECT |INSERT |UPDATE |DELETE |CREATE |WHERE |JOIN |;\s*\}|\(\?"
    r"|<(svg|div|span|td|text|path) "
)


def read_source(path: Path) -> Iterator[Text]:
    """Yield a module's docstrings and comments, and its strings that are sentences."""
    source, name = path.read_text(), str(path.relative_to(ROOT))
    comments: list[tuple[int, str]] = []
    docstrings: list[tuple[int, str]] = []
    strings: list[tuple[int, str]] = []
    line, position, last_end = 1, 0, -1
    for token in TOKEN.finditer(source):
        line += source.count("\n", position, token.start())
        position = token.start()
        between = source[last_end : token.start()] if last_end >= 0 else "x"
        if token["comment"]:
            text = token["comment"].lstrip("#!").strip()
            if (
                comments
                and not between.strip()
                and comments[-1][1].count("\n") + comments[-1][0] + 1 == line
            ):
                comments[-1] = (comments[-1][0], f"{comments[-1][1]}\n{text}")
            else:
                comments.append((line, text))
            last_end = token.end()
            continue
        before = source[source.rfind("\n", 0, token.start()) + 1 : token.start()]
        if token["quote"] == '"""' and not before.strip():
            docstrings.append((line, token["body"]))
        elif not set("rbRB") & set(token["prefix"] or ""):
            body = token["body"].replace("\\n", "\n").replace('\\"', '"').replace("\\'", "'")
            is_format = "f" in (token["prefix"] or "").lower()
            body = PLACEHOLDER.sub("X", body) if is_format else body
            if strings and not between.strip():
                strings[-1] = (strings[-1][0], strings[-1][1] + body)
            else:
                strings.append((line, body))
        last_end = token.end()
    public = name in PUBLIC_FILES
    shipped = name.startswith(SHIPPED)
    for kind, found in (("comments", comments), ("comments", docstrings), ("strings", strings)):
        if kind == "strings" and not shipped:
            continue
        if kind == "strings":
            found = [(n, t) for n, t in found if PROSE.search(t) and not NOT_PROSE.search(t)]
        paragraphs = [p for n, text in found for p in split_paragraphs(text, n)]
        yield Text(name, "public" if public and kind == "comments" else kind, paragraphs)


def read_all() -> Iterator[Text]:
    """Yield the prose of the project."""
    for path in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]):
        if str(path.relative_to(ROOT)) not in MEASUREMENT_PAGES:
            yield from read_page(path)
    for room in (*SHIPPED, *OTHER_CODE):
        for path in sorted((ROOT / room).rglob("*.py")):
            yield from read_source(path)


def check(text: Text, levels: Iterable[str] = ("error", "warning")) -> Iterator[Hit]:
    """Yield the hits in a text."""
    lowered = [(line, paragraph, paragraph.lower()) for line, paragraph in text.paragraphs]
    everything = "\n".join(lower for _, _, lower in lowered)
    for phrase in phrases():
        anchors = phrase.anchors or ("",)
        if phrase.level not in levels or not any(anchor in everything for anchor in anchors):
            continue
        for line, paragraph, lower in lowered:
            if not any(anchor in lower for anchor in anchors):
                continue
            for match in phrase.pattern.finditer(paragraph):
                number = line + paragraph.count("\n", 0, match.start())
                found = " ".join(match[0].split())
                yield Hit(text.path, number, text.kind, phrase.level, found, phrase.replacement)


def wrong_subjects(subjects: Iterable[str]) -> list[str]:
    """Return the commit subjects that are not ``area: imperative``, or too long."""
    return [s for s in subjects if len(s) > MAX_SUBJECT or not SUBJECT.fullmatch(s)]


def new_subjects() -> list[str]:
    """Return the subjects of the commits since the check began; none outside a clone.

    In a shallow clone these are the commits it has.
    """
    git = ["git", "-C", str(ROOT)]
    has_first = (
        _run([*git, "merge-base", "--is-ancestor", FIRST_CHECKED_COMMIT, "HEAD"]) is not None
    )
    is_shallow = (_run([*git, "rev-parse", "--is-shallow-repository"]) or "").strip() == "true"
    if not has_first and not is_shallow:
        return []
    since = [f"{FIRST_CHECKED_COMMIT}..HEAD"] if has_first else ["HEAD"]
    return (_run([*git, "log", "--no-merges", "--format=%s", *since]) or "").splitlines()


def _run(command: list[str]) -> str | None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout if done.returncode == 0 else None


def main() -> int:
    """Check the project; return 1 if something is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.house.prose", description="Prose linter")
    parser.add_argument("--list", metavar="PATH", help="print all hits in paths that contain PATH")
    parser.add_argument("--kind", help="print only hits in docs, strings, public or comments")
    parser.add_argument("--suggestions", action="store_true", help="print suggestions too")
    parser.add_argument("--update", action="store_true", help="lower the bounds")
    arguments = parser.parse_args()
    levels = ("error", "warning", *(["suggestion"] if arguments.suggestions else []))
    hits = [hit for text in read_all() for hit in check(text, levels)]
    if arguments.list is not None:
        shown = [h for h in hits if arguments.list in h.path and arguments.kind in (None, h.kind)]
        sys.stdout.writelines(f"{hit}\n" for hit in shown)
        return 0
    counts = Counter((hit.level, hit.kind) for hit in hits)
    bounds = tomllib.loads(BOUNDS.read_text())
    if arguments.update:
        BOUNDS.write_text(render_bounds(bounds, counts))
    problems = [str(h) for h in hits if h.level == "error"]
    problems += compare(
        bounds if not arguments.update else tomllib.loads(BOUNDS.read_text()), counts
    )
    problems += [
        f"commit {s!r}: write `area: imperative`, at most {MAX_SUBJECT} characters"
        for s in wrong_subjects(new_subjects())
    ]
    sys.stdout.writelines(f"{problem}\n" for problem in problems)
    figures = ", ".join(
        f"{kind} {counts['error', kind]}/{counts['warning', kind]}" for kind in KINDS
    )
    sys.stdout.write(f"prose: errors/warnings: {figures}\n")
    return 1 if problems else 0


KINDS = ("docs", "strings", "public", "comments")


def compare(bounds: dict[str, dict[str, int]], counts: Counter[tuple[str, str]]) -> list[str]:
    """Return what is wrong with the counts: above the bound, or far below it."""
    problems = []
    for level, kinds in bounds.items():
        for kind, bound in kinds.items():
            count = counts[level, kind]
            if count > bound:
                problems.append(
                    f"{kind}: {count} hits of level {level}, at most {bound} are allowed; see them "
                    f"with `python -m tests.house.prose --list PATH --kind {kind}`"
                )
            elif count < bound - SLACK:
                problems.append(
                    f"{kind}: {count} hits of level {level}, the bound is {bound}; lower it with "
                    "`python -m tests.house.prose --update`"
                )
    return problems


def render_bounds(bounds: dict[str, dict[str, int]], counts: Counter[tuple[str, str]]) -> str:
    """Return the file of bounds, none higher than before."""
    lines = [
        "# Number of hits that tests/house/prose.py allows. To lower the numbers:",
        "# python -m tests.house.prose --update",
    ]
    for level, kinds in bounds.items():
        lines += ["", f"[{level}]"]
        lines += [f"{kind} = {min(bound, counts[level, kind])}" for kind, bound in kinds.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
