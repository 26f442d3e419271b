"""A curve in a terminal hides nothing, whatever its length."""

import math

import pytest

from trainvitals.views import NonFiniteMark, SeriesReply
from vitals_collector.report.curves import CurveMark, PlottedCurve
from vitals_collector.report.text_plot import HEIGHT, LABEL, draw, legend


def series(values: dict[int, float], *, attempt: int = 1) -> SeriesReply:
    kinds = {math.inf: "+inf", -math.inf: "-inf"}
    lost = {step: value for step, value in values.items() if not math.isfinite(value)}
    return SeriesReply(
        run_id="",
        metric="steps.loss",
        source="rank:0",
        unit="",
        branch="lineage",
        num_total=len(values),
        step=tuple(values),
        time_unix_ns=(0,) * len(values),
        attempt=(attempt,) * len(values),
        value=tuple(value if math.isfinite(value) else None for value in values.values()),
        nonfinite=tuple(NonFiniteMark(s, attempt, kinds.get(v, "nan")) for s, v in lost.items()),
        num_nonfinite=len(lost),
    )


def curve(values: dict[int, float], left: dict[int, float] | None = None) -> PlottedCurve:
    discarded = None if left is None else series(left, attempt=0)
    return PlottedCurve(name="loss", series=series(values), discarded=discarded)


def cells(line: str) -> str:
    return line[LABEL + 2 :]


def test_one_spike_and_one_nan_among_a_million_steps_are_seen_where_they_were():
    values = dict.fromkeys(range(0, 1_000_000, 500), 2.0) | {500_000: 30.0, 750_000: math.nan}
    title, *rows = draw(curve(dict(sorted(values.items()))), [], width=100)
    assert "2,000 steps, 1 not finite" in title
    assert "30" == rows[0].split("|")[0].strip()
    (at,) = [i for i, cell in enumerate(cells(rows[0])) if cell != " "]
    assert at in range(43, 45)
    assert all(at < len(cells(row)) and cells(row)[at] != " " for row in rows[:HEIGHT])
    (lost,) = [row for row in rows if row.startswith("not finite")]
    assert 65 <= cells(lost).index("x") <= 66


def test_nothing_is_drawn_across_a_value_that_is_not_finite():
    values = dict.fromkeys(range(100), 1.0) | {40: math.nan, 99: 2.0}
    for step in (38, 39, 41, 42):
        del values[step]
    bottom = draw(curve(dict(sorted(values.items()))), [], width=112)[HEIGHT]
    assert "   " in cells(bottom)[37:43]
    assert "   " not in cells(bottom)[:36]


def test_of_decisions_in_one_place_the_gravest_is_shown_and_all_are_counted():
    marks = [
        CurveMark(step=50, kind=kind, words="") for kind in ("skip_step", "rollback", "skip_step")
    ]
    marks += [
        CurveMark(step=90, kind="observed", words=""),
        CurveMark(step=900, kind="halt", words=""),
    ]
    lines = draw(curve(dict.fromkeys(range(100), 1.0)), marks)
    (decided,) = [line for line in lines if line.strip().startswith("decided")]
    assert ["R", "o"] == cells(decided).split()
    assert "R rollback (1)   s step skipped (2)   o observed, not done (1)" in legend(marks)


def test_what_a_rollback_left_behind_is_seen_and_joined_to_no_other_branch():
    left = {50: 9.0, 51: 9.0}
    lines = draw(curve(dict.fromkeys(range(100), 1.0), left), [], width=112)
    assert "; 2 discarded by rollbacks" in lines[0]
    assert "~" in lines[1]
    assert "~" not in "".join(lines[2:])


@pytest.mark.parametrize(
    "values",
    [[], [0.0], [5.0] * 3, [1e-300, 1e300], [-1.0, 1.0], [math.nan], [math.inf, -math.inf, 1.0]],
    ids=["none", "one", "equal", "far", "signs", "nan", "infinities"],
)
@pytest.mark.parametrize("width", [20, 100])
def test_any_course_is_drawn_within_its_width(values: list[float], width: int):
    for has_braille in (True, False):
        lines = draw(curve(dict(enumerate(values))), [], width=width, has_braille=has_braille)
        assert max(len(line) for line in lines[1:]) <= max(width, LABEL + 12)
        assert has_braille or "".join(lines).isascii()
