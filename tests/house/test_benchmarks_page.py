"""The page of benchmarks for users, made from the page of all figures."""

from pathlib import Path

import pytest

from docs import benchmarks_page

DOCS = Path(__file__).parents[2] / "docs"
FIGURES = """\
## guard

### CPU A, 2 cores

| what | ours | against | theirs | ratio | spread | goal | met | note |
|---|---|---|---|---|---|---|---|---|
| a step | 2 ms | bare | 1 ms | 2.00 | 3 % | ratio <= 1.5 | MISSED | alone |
| a skip | - | bare | - |  |  |  |  | not installed |

| fault | culprit right |
|---|---|
| SIGSTOP | 10 of 10 |
"""


def test_rows_are_read_with_their_benchmark_and_processor():
    step, skip = benchmarks_page.read_figures(FIGURES)
    assert ("guard", "CPU A, 2 cores", "a step", "2 ms") == step[:4]
    assert ("2.00", "3 %", "ratio <= 1.5", "MISSED") == step[6:]
    assert "-" == skip.ours


def test_the_page_is_short_and_lists_each_missed_goal():
    figures = (DOCS / "figures.md").read_text()
    text = benchmarks_page.page("", figures)
    assert 150 >= text.count("\n")
    missed = sum(figure.met == "MISSED" for figure in benchmarks_page.read_figures(figures))
    assert f"{missed} of " in text
    assert missed == text.partition("## Missed goals")[2].count(", goal ")


def test_a_row_that_was_renamed_is_an_error():
    with pytest.raises(ValueError, match=r"no row of guard that starts with 'a whole step"):
        benchmarks_page.page("", FIGURES)
