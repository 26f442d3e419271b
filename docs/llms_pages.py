"""Writes `llms.txt`, an index of the pages, and `llms-full.txt`, the pages that users need.

The order is the order of the site's menu. `llms-full.txt` is part of the package: `vitals mcp`
searches it.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).parent
ROOT = DOCS.parent
FULL_PATH = "../plugins/vitals_plugins/bridges/assistants/llms-full.txt"
HEAD = """\
# Vitals

> Vitals watches PyTorch training runs: it records every step, skips harmful updates, rolls back,
> and explains why. Package `trainvitals`, command `vitals`, Python 3.11 or newer, Linux.

Wrap a loop: the page of its framework. Read a run: "Reading a result". Coding assistants can read
runs with `vitals mcp` ([guide](guides/assistants.md)). All pages for users in one file:
`llms-full.txt`.
"""
_FULL_SECTIONS = ("Start", "Train", "Frameworks", "Understand", "Fix", "Operate")
_FULL_REFERENCE = ("API.md", "SETTINGS.md", "METRICS.md", "DETECTORS.md")
_NOT_IN_FULL = ("contents.md", "INTEGRATIONS.md", "scale.md")
_IN_ROOT = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
_MAX_ABOUT = 160
_LINK = re.compile(r"\[([^\]]+)\]\([^)]*\)")
_HIDDEN = re.compile(r"<!--.*?-->\n?|^!\[[^\n]*\n", re.M | re.S)


class MenuEntry(NamedTuple):
    """One page of the site's menu."""

    section: str
    title: str
    path: str

    def read(self) -> str:
        """Return the page without comments and pictures."""
        folder = ROOT if self.path in _IN_ROOT else DOCS
        return _HIDDEN.sub("", (folder / self.path).read_text())


def menu() -> Iterator[MenuEntry]:
    """Yield the pages of the site's menu."""
    section = "Start"
    yield MenuEntry(section, "Overview", "README.md")
    for line in (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2].splitlines():
        if heading := re.fullmatch(r"  - (.+):", line):
            section = heading[1]
        elif entry := re.fullmatch(r"      - (.+): (\S+\.md)", line):
            yield MenuEntry(section, entry[1], entry[2])


def index(link_suffix: str = ".md") -> str:
    """Return `llms.txt`; on the site, links have the suffix `.html`."""
    lines, section = [HEAD], ""
    for entry in menu():
        if entry.section != section:
            section = entry.section
            lines += [f"\n## {section}\n"] if len(lines) > 1 else [f"## {section}\n"]
        link = entry.path.removesuffix(".md") + link_suffix
        if link_suffix == ".md" and entry.path in _IN_ROOT:
            link = f"../{link}"
        about = _about(entry.read())
        lines.append(f"- [{entry.title}]({link})" + (f": {about}" if about else ""))
    return "\n".join(lines).replace("assistants.md)", f"assistants{link_suffix})") + "\n"


def _about(page: str) -> str:
    """Return the first sentence of a page; a cut one ends with three dots."""
    paragraphs = re.split(r"\n\s*\n", page.partition("\n")[2])
    prose = next((p for p in paragraphs if re.match(r"(?!```)[A-Z`\[*]", p.strip())), "")
    text = " ".join(_LINK.sub(r"\1", prose).split())
    sentence = re.split(r"(?<=[.:])\s", text)[0].rstrip(":.")
    return sentence if len(sentence) <= _MAX_ABOUT else f"{sentence[:_MAX_ABOUT]}..."


def full() -> str:
    """Return `llms-full.txt`: each page after a line with its path."""
    return "".join(
        f"<!-- page: {entry.path} -->\n{entry.read().strip()}\n\n"
        for entry in menu()
        if entry.path not in _NOT_IN_FULL
        and (entry.section in _FULL_SECTIONS or entry.path in _FULL_REFERENCE)
    )
