"""A picture of bounded size in which nothing is hidden."""

import math
import xml.etree.ElementTree as ElementTree

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from trainvitals.judged_log import JudgedStep, LoggedStep, judge_history
from trainvitals.policy.judge import Judgement
from trainvitals.records import Finding, StepRecord
from vitals_collector.report.drawing import COLORS, Drawing

SVG = "{http://www.w3.org/2000/svg}"


def draw(
    losses: list[float | None], norms: list[float | None] | None = None
) -> ElementTree.Element:
    steps = [
        LoggedStep(row, row, loss, norms[row] if norms else None) for row, loss in enumerate(losses)
    ]
    drawing = Drawing(len(steps), "a <title> & \x1b[31mmore")
    for judged in judge_history(steps):
        drawing.add(judged)
    return ElementTree.fromstring(drawing.svg())


def points(picture: ElementTree.Element, color: str) -> list[tuple[float, float]]:
    (line, *_) = [e for e in picture.iter(f"{SVG}polyline") if e.get("stroke") == COLORS[color]]
    pairs = (pair.split(",") for pair in (line.get("points") or "").split())
    return [(float(x), float(y)) for x, y in pairs]


def test_one_spike_among_a_hundred_thousand_is_drawn_to_its_full_height():
    drawing = Drawing(100_000, "long")
    for row in range(100_000):
        loss = 30.0 if row == 77_777 else 2.0 + row % 3 * 0.1
        drawing.add(JudgedStep(row, StepRecord(step=row, attempt=1, loss=loss), Judgement()))
    text = drawing.svg()
    drawn = points(ElementTree.fromstring(text), "line")
    top = min(y for _, y in drawn)
    assert 731 == next(x for x, y in drawn if y == top)
    assert len(text) < 60_000


def test_each_column_with_a_value_that_is_not_finite_is_marked():
    losses: list[float | None] = [2.0] * 3000
    losses[1500] = math.nan
    losses[2999] = math.inf
    titles = [e.text for e in draw(losses).iter(f"{SVG}title")]
    assert 2 == titles.count("1 not finite")


def test_an_axis_is_logarithmic_only_where_values_span_much_and_are_positive():
    def is_log(losses: list[float | None]) -> bool:
        return any("logarithmic" in (e.text or "") for e in draw(losses).iter(f"{SVG}text"))

    assert is_log([0.1, 50.0, 1.0])
    assert not is_log([1.0, 2.0])
    assert not is_log([-1.0, 500.0])


def test_a_run_without_gradient_norms_has_one_panel():
    texts = [e.text for e in draw([1.0, 2.0]).iter(f"{SVG}text")]
    assert "loss" in texts
    assert "gradient norm" not in texts
    assert "gradient norm" in [e.text for e in draw([1.0], [1.0]).iter(f"{SVG}text")]


def test_no_words_of_a_log_can_break_the_picture():
    drawing = Drawing(1, "</text><script>")
    finding = Finding(kind="<b>", level="advisory", step=0, detector="x", reason='"&\x00]]>')
    record = StepRecord(step=0, attempt=1, loss=1.0)
    drawing.add(JudgedStep(0, record, Judgement(findings=(finding,))))
    assert "script" not in {e.tag for e in ElementTree.fromstring(drawing.svg()).iter()}


values = st.none() | st.floats()


@settings(max_examples=examples(80), deadline=None)
@given(st.lists(values, max_size=40), st.lists(values, min_size=40, max_size=40))
def test_any_numbers_give_a_picture(losses, norms):
    for _, y in [p for e in ("line", "limit") for p in _all(draw(losses, norms), e)]:
        assert 0 <= y <= 210


def _all(picture: ElementTree.Element, color: str) -> list[tuple[float, float]]:
    lines = [e for e in picture.iter(f"{SVG}polyline") if e.get("stroke") == COLORS[color]]
    return [p for _ in lines[:1] for p in points(picture, color)]
