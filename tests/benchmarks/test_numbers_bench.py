"""The bench of the store of rows runs, and every row that it sends is stored. No times."""

import pytest

from vitals_bench.numbers import commits, merging
from vitals_bench.numbers.commits import Case

pytestmark = pytest.mark.nightly


@pytest.mark.slow
def test_small_commits_are_judged_by_the_commit_and_large_ones_by_the_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(commits, "QUICK", (Case(2, 1, 3), Case(1, 16, 70)))
    rows = list(commits.measure_commits(quick=True))
    assert ["<= 40 ms", "<= 23 us"] == [row.plain()["goal"] for row in rows]
    assert [
        "CPU of a commit, 2 runs of 1 rank, 3 rows each",
        "CPU of a row of 20 values, 16 ranks, 70 rows each",
    ] == [row.name for row in rows]
    assert all(row.ours and row.ours > 0 for row in rows)


def test_answers_are_timed_while_files_are_merged() -> None:
    row = merging.measure_case(Case(1, 8, 1), 5)
    assert row.ours is not None and row.ours > 0
    assert "<= 2 s" == row.plain()["goal"]
