"""The documentation: pages by name, and a search over their sections."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

TEXT_FILE = "llms-full.txt"
_PAGE = re.compile(r"^<!-- page: (\S+) -->\n", re.M)
_WORD = re.compile(r"[a-z0-9_]{2,}")
_SATURATION, _LENGTH_SHARE = 1.2, 0.75
"""k1 and b of BM25 (Robertson and Zaragoza, 2009): its usual values."""
_TITLE_WEIGHT = 2.0
"""Value of a word in a title, compared with a repeated word in the text."""


@dataclass(frozen=True, slots=True)
class Section:
    """Part of a page below one heading."""

    page: str
    title: str
    text: str


@cache
def load_pages() -> dict[str, str]:
    """Return the Markdown of each documentation page that an assistant can read, by its path."""
    return split_pages((files(__package__) / TEXT_FILE).read_text())


def split_pages(text: str) -> dict[str, str]:
    """Return the documentation pages for assistants, by their paths in `llms-full.txt`."""
    _, *parts = _PAGE.split(text)
    return {path: page.strip() for path, page in zip(parts[::2], parts[1::2], strict=True)}


def split_sections(pages: Mapping[str, str]) -> list[Section]:
    """Return an assistant's documentation as sections; a line in a code block is not a heading."""
    sections: list[Section] = []
    for page, text in pages.items():
        title, lines, is_code = page, list[str](), False
        for line in text.splitlines():
            is_code ^= line.startswith("```")
            if not is_code and re.match(r"#{1,3} ", line):
                sections.append(Section(page, title, "\n".join(lines).strip()))
                title, lines = line.lstrip("# "), []
            else:
                lines.append(line)
        sections.append(Section(page, title, "\n".join(lines).strip()))
    return [section for section in sections if section.text]


def search_sections(sections: Sequence[Section], query: str, num: int) -> list[Section]:
    """Return the sections that fit an assistant's query best, by BM25; title words count more."""
    words = set(_words(query))
    counts = [Counter(_words(section.text)) for section in sections]
    titles = [set(_words(f"{s.title} {s.page}")) for s in sections]
    lengths = [count.total() for count in counts]
    mean_length = sum(lengths) / max(1, len(lengths))
    weights = {
        word: math.log((1 + len(sections)) / (1 + sum(word in count for count in counts)))
        for word in words
    }

    def score(at: int) -> float:
        share = _LENGTH_SHARE * lengths[at] / mean_length + 1.0 - _LENGTH_SHARE
        return sum(
            weight
            * (
                counts[at][word] * (_SATURATION + 1.0) / (counts[at][word] + _SATURATION * share)
                + _TITLE_WEIGHT * (word in titles[at])
            )
            for word, weight in weights.items()
        )

    ranked = sorted(range(len(sections)), key=lambda at: (-score(at), at))
    return [sections[at] for at in ranked[:num] if score(at) > 0]


def _words(text: str) -> list[str]:
    """Return the words of a text of the documentation, plurals without their "s"."""
    return [re.sub(r"(?<=[^s]{3})s$", "", word) for word in _WORD.findall(text.lower())]
