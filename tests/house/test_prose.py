"""The linter for prose finds odd English where it is, and only there."""

import re

import pytest

from tests.house import prose

PAGE = """\
# A title

The data is
kept beside the run. `beside` is code, [a link](beside.md) is not prose.

| column | meaning |
|---|---|
| a | the rest is told |

<!-- beside -->

```text
beside
```
"""

SOURCE = '''\
"""Module kept beside another."""
# A comment that goes on
# beside its code.
PATTERN = r"rows lie beside one another"
SQL = "SELECT a FROM b WHERE it lies beside"
MESSAGE = f"the file {name} lies " "beside the run"
KEY = "beside"
'''


def find(path):
    read = prose.read_page if path.suffix == ".md" else prose.read_source
    return [
        (hit.kind, hit.line, hit.found.lower())
        for text in read(path)
        for hit in prose.check(text, ["error"])
    ]


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    (tmp_path / "trainvitals").mkdir()
    return tmp_path


def test_a_page_is_searched_except_its_code(root):
    (root / "page.md").write_text(PAGE)
    assert [("docs", 4, "beside"), ("docs", 8, "is told")] == sorted(find(root / "page.md"))


def test_comments_docstrings_and_sentences_of_a_module_are_searched(root):
    path = root / "trainvitals" / "a.py"
    path.write_text(SOURCE)
    assert [
        ("comments", 1, "beside"),
        ("comments", 2, "goes on"),
        ("comments", 3, "beside"),
        ("strings", 6, "beside"),
        ("strings", 6, "lies"),
    ] == sorted(find(path))


def test_a_public_module_is_checked_like_a_page(root):
    path = root / "trainvitals" / "client.py"
    path.write_text(SOURCE)
    assert {"public", "strings"} == {kind for kind, _, _ in find(path)}


def test_every_public_file_exists():
    assert [] == [name for name in prose.PUBLIC_FILES if not (prose.ROOT / name).exists()]


def test_anchors_lose_no_match():
    for phrase in prose.phrases():
        for text in prose.read_page(prose.ROOT / "CHANGELOG.md"):
            for _, paragraph in text.paragraphs:
                for match in phrase.pattern.finditer(paragraph):
                    anchors = phrase.anchors or ("",)
                    assert any(anchor in match[0].lower() for anchor in anchors)


def test_each_phrase_has_a_level_and_a_replacement():
    assert {"error", "warning", "suggestion"} == {phrase.level for phrase in prose.phrases()}
    assert [] == [p for p in prose.phrases() if not p.replacement]


@pytest.mark.parametrize(
    "subject",
    ["otlp: ignore client timestamps", "docs, lake: embed the plot", "cli: pass `--until` on"],
)
def test_a_subject_is_an_area_and_an_imperative(subject):
    assert [] == prose.wrong_subjects([subject])


@pytest.mark.parametrize(
    "subject",
    [
        "Lake: files of 8 MB are merged no more",
        "lake: merged files",
        "fix the lake",
        "lake: stop merging.",
        "lake: " + "merge " * 12,
    ],
)
def test_another_subject_is_not(subject):
    assert [subject] == prose.wrong_subjects([subject])


def test_a_bound_only_falls():
    bounds = {"error": {"comments": 10}, "warning": {"docs": 200}}
    counts = prose.Counter({("error", "comments"): 12, ("warning", "docs"): 100})
    assert re.findall(r"^\w+ = (\d+)$", prose.render_bounds(bounds, counts), re.M) == ["10", "100"]
    counts["warning", "docs"] = 50
    above, below = prose.compare(bounds, counts)
    assert "at most 10" in above
    assert "lower it" in below
