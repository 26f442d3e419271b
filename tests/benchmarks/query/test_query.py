"""The bench of queries: what was planted is in the answer, or is said to be hidden. No times."""

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from vitals_bench import wide
from vitals_bench.numbers.commits import Case
from vitals_bench.query import measure, ranks
from vitals_bench.query.filling import Filling, Size, pieces, plant

pytestmark = pytest.mark.nightly

TINY = Size(num_steps=20_000, num_metrics=4, num_ranks=8, num_last=200, rounds=2)


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    folder: Path = tmp_path_factory.mktemp("query")
    filling = Filling(TINY)
    with wide.sqlite_store(folder, "ours") as store:
        filling.fill(store)
        yield measure.Asking(store, filling)


def test_spikes_and_nans_are_planted_alone_in_their_windows_and_nowhere_else():
    planted = plant(20_000)
    steps = sorted([*planted.spikes, *planted.nonfinite])
    assert 80 == len(set(steps))
    assert min(b - a for a, b in pairwise(steps)) > 20_000 // 1_000
    values = [v for _, piece in pieces(TINY, planted) for v in piece[:, 0].tolist()]
    assert planted.spikes == {s: v for s, v in enumerate(values) if 2 < abs(v) < math.inf}
    assert set(planted.nonfinite) == {s for s, v in enumerate(values) if not math.isfinite(v)}


def test_an_overview_of_two_thousand_points_shows_all_that_was_planted(asked):
    reply = asked.overview()
    assert TINY.num_steps == reply.num_total
    assert len(reply.step) <= 2 * measure.NUM_POINTS
    assert 0 == measure.num_hidden(reply, asked.filling.planted)


def test_what_an_answer_lacks_is_counted(asked):
    planted, reply = asked.filling.planted, asked.overview()
    spike, gone = next(iter(planted.spikes)), next(iter(planted.nonfinite))
    value = tuple(0.0 if s == spike else v for s, v in zip(reply.step, reply.value, strict=True))
    marks = tuple(mark for mark in reply.nonfinite if mark.step != gone)
    lacking = msgspec.structs.replace(reply, value=value, nonfinite=marks)
    assert 2 == measure.num_hidden(lacking, planted)


def test_a_post_mortem_asks_ten_questions_and_the_step_has_all_ranks(asked):
    questions = asked.post_mortem()
    answers = {name: question() for name, question in questions.items()}
    assert 10 == len(answers)
    assert all(answers.values())
    assert TINY.num_ranks == len(answers["step"].rows)
    assert "the norm was far above its limit" in " ".join(answers["why"].split())


def test_a_page_has_a_chart_of_each_of_nine_metrics(tmp_path):
    filling = Filling(replace(TINY, num_steps=2_000, num_metrics=10, num_ranks=1))
    with wide.sqlite_store(tmp_path, "ours") as store:
        filling.fill(store)
        page = measure.Asking(store, filling).page()
    assert [f"steps.{name}" for name in filling.names[:9]] == [chart.metric for chart in page]
    assert {2_000} == {chart.num_total for chart in page}


@pytest.mark.slow
def test_questions_across_ranks_have_all_of_them_merged_or_not():
    rows = list(ranks.measure_case(Case(1, 16, 2)))
    assert ["never merged", "never merged", "merged", "merged"] == [
        row.name.rpartition(", ")[2] for row in rows
    ]
    assert ["<= 130 ms", "", "<= 130 ms", ""] == [row.plain()["goal"] for row in rows]
