"""The bench of the two stores of numbers runs, and both hold the same rows. No times."""

import pytest

from vitals_bench.numbers import commits, questions
from vitals_bench.query.filling import Size


def test_commits_are_measured_beside_the_store_of_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commits, "CASES", (commits.Case(2, 8, 40),))
    rows = {row.name.split(",")[0]: row for row in commits.measure_commits(quick=True)}
    assert set(rows) == {"CPU of a stored row of 20 values", "CPU of a commit", "bytes of a value"}
    assert all(row.ours and row.theirs for row in rows.values())


def test_questions_are_answered_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    size = Size(num_steps=2_000, num_metrics=10, num_ranks=2, num_last=50)
    monkeypatch.setattr(questions, "QUICK", size)
    names = [row.name for row in questions.measure_questions(quick=True)]
    assert "whole curve of 2,000 steps x 10 metrics, merged" in names


def test_one_step_of_many_ranks_is_answered_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions, "_RANKS_QUICK", commits.Case(1, 16, 2))
    steps = [row for row in questions.measure_ranks(quick=True) if row.peer]
    assert ["one step of 16 ranks, never merged", "one step of 16 ranks, merged"] == [
        row.name for row in steps
    ]
