"""A picture of bounded size in which nothing is hidden."""

import math
import re
import xml.etree.ElementTree as ElementTree

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from trainvitals.judged_log import JudgedStep, LoggedStep, judge_history
from trainvitals.policy.judge import Judgement
from trainvitals.records import Finding, StepRecord
from vitals_collector.report.curves import judged_curves, judged_marks
from vitals_collector.report.svg_plot import HEIGHT, curves_file

SVG = "{http://www.w3.org/2000/svg}"


def picture_of(title: str, judged: list[JudgedStep]) -> str:
    return curves_file(title, judged_curves(judged), judged_marks(judged))


def draw(
    losses: list[float | None], norms: list[float | None] | None = None
) -> ElementTree.Element:
    steps = [
        LoggedStep(row, row, loss, norms[row] if norms else None) for row, loss in enumerate(losses)
    ]
    judged = list(judge_history(steps))
    return ElementTree.fromstring(picture_of("a <title> & \x1b[31mmore", judged))


def points(picture: ElementTree.Element, name: str) -> list[tuple[float, float]]:
    """Return the points of the first path of this class."""
    paths = [e for e in picture.iter(f"{SVG}path") if e.get("class") == name]
    pairs = [re.findall(r"[ML]([\d.]+),(-?[\d.]+)", path.get("d") or "") for path in paths[:1]]
    return [(float(x), float(y)) for path in pairs for x, y in path]


def test_one_spike_among_a_hundred_thousand_is_drawn_to_its_full_height():
    judged = []
    for row in range(100_000):
        loss = 30.0 if row == 77_777 else 2.0 + row % 3 * 0.1
        judged.append(JudgedStep(row, StepRecord(step=row, attempt=1, loss=loss), Judgement()))
    text = picture_of("long", judged)
    drawn = points(ElementTree.fromstring(text), "line")
    top = min(y for _, y in drawn)
    assert 683 == next(x for x, y in drawn if y == top)
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
    def panels(picture: ElementTree.Element) -> list[str]:
        texts = [e.text or "" for e in picture.iter(f"{SVG}text")]
        return [text.partition(":")[0] for text in texts if " of them not finite" in text]

    assert ["loss"] == panels(draw([1.0, 2.0]))
    assert ["loss", "gradient norm"] == panels(draw([1.0], [1.0]))


def test_findings_and_decisions_are_letters_that_the_picture_explains():
    finding = Finding(kind="drift", level="advisory", step=1, detector="x", reason="slow")
    records = [StepRecord(step=step, attempt=1, loss=2.0) for step in range(3)]
    judged = [JudgedStep(row, record, Judgement()) for row, record in enumerate(records)]
    judged[1] = judged[1]._replace(judgement=Judgement(findings=(finding,)))
    texts = [e.text for e in ElementTree.fromstring(picture_of("x", judged)).iter()]
    assert "i" in texts
    assert "step 1: drift: slow" in texts
    assert "Letters: i advisory finding. Point at one to read why." in texts


def test_records_that_a_restarted_log_overwrote_are_gray():
    steps = [*range(10), *range(6, 12)]
    judged = list(judge_history([LoggedStep(row, step, 2.0) for row, step in enumerate(steps)]))
    picture = ElementTree.fromstring(picture_of("x", judged))
    assert 4 == len(points(picture, "left"))
    assert 12 == len(points(picture, "line"))


def test_no_words_of_a_log_can_break_the_picture():
    finding = Finding(kind="<b>", level="advisory", step=0, detector="x", reason='"&\x00]]>')
    record = StepRecord(step=0, attempt=1, loss=1.0)
    judged = [JudgedStep(0, record, Judgement(findings=(finding,)))]
    picture = ElementTree.fromstring(picture_of("</text><script>", judged))
    assert "script" not in {e.tag.removeprefix(SVG) for e in picture.iter()}


values = st.none() | st.floats()


@settings(max_examples=examples(80), deadline=None)
@given(st.lists(values, max_size=40), st.lists(values, min_size=40, max_size=40))
def test_any_numbers_give_a_picture(losses, norms):
    picture = draw(losses, norms)
    for _, y in points(picture, "line") + points(picture, "limit"):
        assert 0 <= y <= HEIGHT
