"""docs/DETECTORS.md: each picture shows what was really reported."""

import re
from xml.etree import ElementTree

import pytest

from docs.draw_detectors import drawn, images, page
from docs.drawn import collapse
from docs.drawn.entries import ENTRIES, IN_LOOP
from docs.drawn.svg import WIDTH, Line, Panel, draw
from docs.drawn.trained import FAULT, TRAININGS, heard, is_found, panels, read, withheld

pytestmark = pytest.mark.nightly  # to draw each page and picture takes seconds

NAMES = [entry.name for entry in ENTRIES]
SVG = "{http://www.w3.org/2000/svg}"
MOST_BYTES = 64_000


def test_every_detector_is_described_and_drawn_on_the_page():
    text = page()
    for name in NAMES:
        assert f"\n### {name}\n" in text
        assert f"](#{name})" in text
        assert f"](images/detectors/{name}.svg)" in text
    assert text.isascii()


@pytest.mark.parametrize("entry", ENTRIES, ids=NAMES)
class TestExamples:
    def test_one_speaks_and_one_that_looks_alike_is_silent(self, entry):
        panels = drawn()[entry.name]
        assert any(panel.findings for panel in panels)
        silent = [panel for panel in panels if panel.title.startswith("silent: ")]
        assert silent
        assert all(panel.findings == () and not panel.marks for panel in silent)

    def test_what_is_said_is_of_the_kinds_and_levels_that_are_named(self, entry):
        for finding in (finding for panel in drawn()[entry.name] for finding in panel.findings):
            assert entry.name == finding.detector or finding.kind == entry.name
            assert finding.level in entry.kinds[finding.kind].split(" or ")
            assert finding.reason in page()

    def test_only_the_set_of_the_ranks_may_act(self, entry):
        may_act = any("actionable" in level for level in entry.kinds.values())
        assert entry in IN_LOOP or not may_act

    def test_each_finding_is_marked_where_it_was_said(self, entry):
        for panel in drawn()[entry.name]:
            if panel.x_label != "seconds":
                assert [f.step for f in panel.findings] == [mark.x for mark in panel.marks]
            for mark in panel.marks:
                assert mark.y in (dict(panel.lines[0].points)[mark.x], None)

    def test_the_picture_is_small_labelled_and_marks_what_was_said(self, entry):
        text = images()[f"images/detectors/{entry.name}.svg"]
        assert text.isascii()
        assert len(text) < MOST_BYTES
        tree = ElementTree.fromstring(text)
        said = [f for panel in drawn()[entry.name] for f in panel.findings]
        dots = [dot.get("class") for dot in tree.iter(f"{SVG}circle")]
        assert sorted(f.level for f in said) == sorted(dots)
        words = [element.text for element in tree.iter(f"{SVG}text")]
        for panel in drawn()[entry.name]:
            assert {panel.title, panel.x_label} <= set(words)
            assert any(word.startswith(panel.y_label) for word in words)
            assert {line.label for line in panel.lines if line.label} <= set(words)

    def test_title_and_legend_have_room_beside_each_other(self, entry):
        for panel in drawn()[entry.name]:
            labels = {line.label for line in panel.lines if line.label}
            wide = 7 * len(panel.title) + sum(6 * len(label) + 36 for label in labels)
            assert wide <= WIDTH - 84, panel.title

    def test_judged_and_drawn_again_it_is_the_same(self, entry):
        again = [panel.lines for panel in entry.examples()]
        assert [panel.lines for panel in drawn()[entry.name]] == again


@pytest.mark.parametrize("training", TRAININGS, ids=[training.name for training in TRAININGS])
class TestTrainings:
    def test_nothing_is_withheld_from_a_healthy_one_that_says_what_it_is(self, training):
        if training.declared:
            assert 0 == withheld(training, declared=True)
            assert 0 == withheld(training, declared=True, clips=False)
        assert 32 >= withheld(training, declared=False, clips=False)

    def test_declared_less_is_told_and_the_fault_is_found(self, training):
        undeclared, declared = (heard(training, declared=said) for said in (False, True))
        assert len(undeclared) > len(declared) or not training.declared
        assert any(is_found(training, name) for name in NAMES)
        assert {finding.detector for finding in undeclared} <= set(NAMES)

    def test_its_damaged_twin_is_the_same_until_the_fault(self, training):
        healthy, damaged = read(training), read(training, damaged=True)
        assert healthy[:FAULT] == damaged[:FAULT]
        assert healthy[FAULT + 1] != damaged[FAULT + 1]
        assert len(damaged) < len(healthy)

    def test_its_picture_has_a_dot_for_all_that_is_said_and_room_for_its_titles(self, training):
        text = images()[f"images/detectors/trained_{training.name}.svg"]
        assert len(text) < MOST_BYTES
        dots = list(ElementTree.fromstring(text).iter(f"{SVG}circle"))
        shown = panels(training)
        assert sum(len(panel.findings) for panel in shown) == len(dots)
        assert all(7 * len(panel.title) + 6 * len(panel.y_label) + 36 < WIDTH - 84
                   for panel in shown)  # fmt: skip

    def test_the_page_says_of_each_detector_what_it_is_worth_there(self, training):
        assert f"**{training.title}.** {training.about}" in page()
        assert f"(images/detectors/trained_{training.name}.svg)" in page()


def test_the_collapse_of_the_guide_has_a_dot_for_its_fault_and_one_for_its_report():
    tree = ElementTree.fromstring(images()["images/collapse.svg"])
    dots = [dot.get("class") for dot in tree.iter(f"{SVG}circle")]
    assert ["other", "advisory"] * len(collapse.panels()) == dots


class TestDrawing:
    def panel(self, *points, **options):
        line = Line(label="loss", points=points)
        return Panel(title="a < b", x_label="step", y_label="loss", lines=[line], **options)

    def paths(self, panel, role="value"):
        tree = ElementTree.fromstring(draw([panel], "a & b"))
        return [p.get("d") for p in tree.iter(f"{SVG}path") if p.get("class") == role]

    def test_what_is_missing_is_a_gap_and_what_is_not_finite_a_cross(self):
        panel = self.panel((0, 1.0), (1, 2.0), (2, None), (3, 1.0), (4, float("nan")), (5, 2.0))
        curve, _ = self.paths(panel)  # the other is the legend's
        assert 3 == curve.count("M")
        assert 1 == len(self.paths(panel, "x"))

    def test_points_on_a_straight_way_are_left_out_and_no_extreme_is(self):
        curve, _ = self.paths(self.panel(*((i, 9.0 if i == 50 else 1.0) for i in range(101))))
        assert 5 == len(re.findall(r"[ML]", curve))

    @pytest.mark.parametrize("log", [False, True])
    @pytest.mark.parametrize("values", [[], [None], [0.0], [5.0] * 3, [1e-9, 1e12], [-1.0, 1.0]])
    def test_any_course_is_drawn(self, values, log):
        panel = self.panel(*enumerate(values), log=log)
        assert ElementTree.fromstring(draw([panel], "")) is not None

    def test_every_color_has_one_for_a_dark_ground(self):
        style = draw([self.panel((0, 1.0), (1, 2.0))], "").partition("<style>")[2]
        light, _, dark = style.partition("</style>")[0].partition("@media")
        names = set(re.findall(r"(\.?\w+)\{[^}]*(?:fill|stroke):#", light))
        assert names == set(re.findall(r"(\.?\w+)\{(?:fill|stroke)", dark))
        assert {".value", ".limit", ".actionable", ".advisory", "text"} < names
