"""The documentation in the package: its pages, its sections, and what a search finds."""

import pytest

from vitals_plugins.bridges.assistants.pages import (
    Section,
    load_pages,
    search_sections,
    split_pages,
    split_sections,
)

TEXT = """\
<!-- page: guides/a.md -->
# A

First.

```sh
# no heading
```

## Hang of a rank

Second.

<!-- page: B.md -->
# B

Third: hang.
"""


def test_pages_and_sections_are_split_at_their_headings():
    pages = split_pages(TEXT)
    assert ["guides/a.md", "B.md"] == list(pages)
    assert [
        Section("guides/a.md", "A", "First.\n\n```sh\n# no heading\n```"),
        Section("guides/a.md", "Hang of a rank", "Second."),
        Section("B.md", "B", "Third: hang."),
    ] == split_sections(pages)


def test_a_word_in_a_title_counts_more():
    found = search_sections(split_sections(split_pages(TEXT)), "hang", 5)
    assert ["guides/a.md", "B.md"] == [section.page for section in found]


def test_nothing_is_found_for_words_that_no_page_has():
    assert [] == search_sections(split_sections(split_pages(TEXT)), "quaternion", 5)


@pytest.mark.parametrize(
    ("query", "page"),
    [
        ("Lightning trainer", "integrations/lightning.md"),
        ("RankHung", "RUNBOOK.md"),
        ("vitals sql select", "guides/sql.md"),
        ("gradient clipping auto max_norm", "guides/clipping.md"),
        ("V220", "ERRORS.md"),
    ],
)
def test_the_package_has_the_page_for_a_task(query, page):
    found = search_sections(split_sections(load_pages()), query, 3)
    assert page in [section.page for section in found]
