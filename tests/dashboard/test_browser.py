"""The pages in a real browser, over a real collector that follows a folder."""

import csv
import io
import json
import math
import re
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.collector.rows import OTHER_RUN, RUN
from tests.dashboard import samples
from tests.dashboard.conftest import new_page
from tests.dashboard.folder import (
    LONG_STEPS,
    NAN_STEP,
    NUM_STEPS,
    SPIKE_STEP,
    OpenRun,
    write_long_run,
    write_troubled_run,
)
from tests.dashboard.stranger import stranger
from tests.support.cli import vitals
from tests.support.dashboards import (
    CHART,
    TABLE,
    Started,
    at,
    by_localhost,
    dashboard,
    get_control,
)
from tests.support.examples import one_in

pytestmark = pytest.mark.browser
MAP = "[data-testid=stEChartsChart] canvas"
PAGES = {
    "fleet": "",
    "run": f"run?run={RUN}",
    "layers": f"layers?run={RUN}",
    "ranks": f"ranks?run={RUN}",
    "decisions": f"decisions?run={RUN}",
    "checkpoints": f"checkpoints?run={RUN}",
    "incidents": f"incident?run={RUN}",
    "compare": f"compare?runs={RUN}&runs={OTHER_RUN}",
    "alerts": "alerts?show=all",
    "query": f"query?run={RUN}",
}
"""Every page, by what it is called here."""
CARD = "[class*='st-key-alert_text']"
READY = dict.fromkeys(PAGES, CHART) | {
    "layers": MAP,
    "ranks": MAP,
    "fleet": TABLE,
    "decisions": TABLE,
    "checkpoints": TABLE,
    "alerts": CARD,
    "query": TABLE,
}
"""What each has when it is drawn."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def training(folder: Path) -> Iterator[OpenRun]:
    """A run of a hostile name that goes on."""
    run = OpenRun(folder, name=samples.HOSTILE)
    yield run
    run.close()


@pytest.fixture(scope="module")
def started(
    folder: Path, training: OpenRun, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Started]:
    """A dashboard with control over a folder with that run and a long one."""
    write_long_run(folder)
    tmp = tmp_path_factory.mktemp("tmp")
    with (
        (tmp / "terminal").open("w") as terminal,
        dashboard(folder, tmp, "--control", errors=terminal.fileno()) as (_, address),
    ):
        yield Started(address, tmp / "terminal")


@pytest.fixture
def address(started: Started) -> str:
    """Its one-click address."""
    return started.address


def run_page(address: str) -> str:
    return at(address, PAGES["run"])


def select_row(page: Any, number: int) -> None:
    """Select a row of the first table, which is drawn on a canvas."""
    table = page.locator(TABLE).first
    table.wait_for()
    box = None
    while box is None or table.bounding_box() != box:  # what comes above it moves it
        box = table.bounding_box()
        page.wait_for_timeout(500)
    page.mouse.click(box["x"] + 16, box["y"] + 38 + 35 * number + 17)


@contextmanager
def heard(tab: Any, event: str, handle: Callable[[Any], object]) -> Iterator[None]:
    """Have the handler hear of an event of the shared page meanwhile."""

    def hear(said: Any) -> None:
        handle(said)

    tab.on(event, hear)
    yield
    tab.remove_listener(event, hear)


def sent_about(page: Any, words: str) -> list[bytes]:
    """Return where the frames with these words will be kept, as the page gets them."""
    frames: list[bytes] = []
    wanted = words.encode()

    def keep(frame: bytes | str) -> None:
        raw = frame.encode() if isinstance(frame, str) else frame
        if wanted in raw:
            frames.append(raw)

    page.on("websocket", lambda socket: socket.on("framereceived", keep))
    return frames


def point_at(page: Any, step: int, *, last: int = NUM_STEPS - 1, chart: int = 0) -> str:
    """Point at a step of a chart and return what is said of the events there."""
    figure = page.locator("figure").nth(chart)
    box = figure.locator(".u-over").bounding_box()
    page.mouse.move(box["x"] + box["width"] * step / last, box["y"] + box["height"] / 2)
    page.wait_for_timeout(200)
    return str(figure.locator(".events").inner_text())


def values_of(page: Any, chart: int) -> str:
    """Return what the legend of a chart says: the values where the cursor is."""
    return " ".join(page.locator("figure").nth(chart).locator(".u-legend").inner_text().split())


def counts_of(page: Any) -> str:
    """Return what is said of the points of the first chart."""
    return str(page.locator("figure .counts").first.text_content())


def test_the_live_page_shows_the_decisions_on_the_curve(tab, address, tmp_path: Path):
    asked: list[Any] = []
    own = f"{address.partition('/?')[0]}/"
    with heard(tab, "request", asked.append):
        tab.goto(run_page(address))
        tab.wait_for_selector(CHART)
        tab.wait_for_timeout(1_000)
        told = point_at(tab, NAN_STEP)
        assert f"skip at step {NAN_STEP}: gradients of rank 1 are NaN" in told
        assert f"nan at step {NAN_STEP} (rank:0)" in told, "and its value is marked"
        assert f"skip at step {SPIKE_STEP}: loss 9 is above" in point_at(tab, SPIKE_STEP)
        assert f"step {SPIKE_STEP} loss 9 limit 6" == values_of(tab, 0)
        assert f"step {SPIKE_STEP} raw 3" == values_of(tab, 1), "the cursor is in all charts"
        picture = tmp_path / "live.png"
        tab.screenshot(path=str(picture))
    assert 40_000 < picture.stat().st_size
    outside = {request.url for request in asked if not request.url.startswith(own)}
    assert set() == {url for url in outside if url.startswith("http")}, "the page works offline"


def test_a_refresh_keeps_the_charts_and_a_reload_keeps_the_way_in(tab, address):
    tab.goto(run_page(address))
    tab.wait_for_selector(CHART)
    tab.locator(CHART).first.evaluate("canvas => canvas.dataset.mark = 'kept'")
    before = tab.get_by_text("last seen").inner_text()
    tab.wait_for_function(
        "before => ![...document.querySelectorAll('p,div')].some(e => e.innerText === before)",
        arg=before,
    )
    assert "kept" == tab.locator(CHART).first.get_attribute("data-mark")
    assert "token" not in tab.url
    tab.reload()
    tab.wait_for_selector(CHART)


def test_a_hostile_run_name_is_only_text(tab, address):
    dialogs: list[Any] = []
    with heard(tab, "dialog", dialogs.append):
        tab.goto(run_page(address))
        tab.wait_for_selector(CHART)
        assert "<script>" in tab.locator(".st-key-run_title").inner_text()
    assert [] == dialogs, "a script ran"
    assert "owned" not in tab.title()
    assert 0 == tab.locator("img[src='x']").count()


@pytest.mark.nightly
def test_a_run_is_opened_from_the_fleet_and_a_new_decision_appears_by_itself(
    page, address, training: OpenRun
):
    frames = sent_about(page, "a cosmic ray")
    page.goto(address)
    select_row(page, 0)
    page.wait_for_selector(CHART)
    assert f"/run?run={RUN}" in page.url
    page.get_by_text(re.compile(r"Decisions \(")).wait_for()
    assert [] == frames
    step = training.skip_next("a cosmic ray")
    page.get_by_test_id("stMetric").filter(has_text="Step").get_by_text(f"{step:,}").wait_for()
    page.get_by_text(f"Decisions ({step - NUM_STEPS + 3})").wait_for()
    assert any(f"skip at step {step}: a cosmic ray".encode() in raw for raw in frames), (
        "the mark on the curve"
    )


@pytest.mark.nightly
def test_a_zoom_by_range_gets_every_point_and_is_an_address(tab, address):
    tab.goto(at(address, f"run?run={OTHER_RUN}"))
    tab.wait_for_selector(CHART)
    drawn, total = re.match(r"([\d,]+) of ([\d,]+) points", counts_of(tab)).groups()
    assert f"{LONG_STEPS:,}" == total
    assert int(drawn.replace(",", "")) <= 2_000
    tab.get_by_role("button", name="View").click()
    tab.locator(".st-key-window").get_by_text("range", exact=True).click()
    for name, step in (("from", 3_000), ("to", 3_199)):
        tab.get_by_label(f"{name} step").fill(str(step))
        tab.get_by_label(f"{name} step").press("Enter")
        tab.wait_for_url(re.compile(rf"[?&]{name}={step}(&|$)"))
    tab.wait_for_function("location.search.includes('window=range')")
    with tab.expect_event("websocket"):
        tab.goto(tab.url)
    tab.wait_for_selector(CHART)
    tab.get_by_text("200 of 200 points").first.wait_for()


@pytest.mark.nightly
def test_a_live_page_is_zoomed_by_dragging_and_stays_so_while_steps_come(
    tab, address, training: OpenRun
):
    tab.goto(run_page(address))
    tab.wait_for_selector(CHART)
    box = tab.locator("figure .u-over").nth(1).bounding_box()
    last = training.last_step
    x, y = box["x"], box["y"] + 60
    tab.mouse.move(x + box["width"] * 50 / last, y)
    tab.mouse.down()
    tab.mouse.move(x + box["width"] * 100 / last, y + 5, steps=4)
    tab.mouse.up()
    tab.wait_for_url(re.compile("window=range"))
    first, end = (int(re.search(rf"[?&]{name}=(\d+)", tab.url)[1]) for name in ("from", "to"))
    assert (50, 100) == pytest.approx((first, end), abs=2)
    tab.get_by_text(f"{end - first + 1} of {end - first + 1} points").first.wait_for()
    training.skip_next("one step more")
    tab.get_by_test_id("stMetric").get_by_text(f"{training.last_step:,}").wait_for()
    assert counts_of(tab).startswith(f"{end - first + 1} of"), "the range stays"
    tab.mouse.dblclick(x + box["width"] / 2, y)
    tab.wait_for_url(lambda url: "window=range" not in url)
    tab.get_by_text(f"{training.last_step + 1} of {training.last_step + 1} points").first.wait_for()


@pytest.mark.nightly
def test_a_chart_is_read_by_keyboard_and_aloud(tab, address, training: OpenRun):
    tab.goto(run_page(address))
    tab.wait_for_selector(CHART)
    figure = tab.locator("figure").first
    label = figure.get_attribute("aria-label")
    assert re.search(
        r"Loss over step. Newest: loss [\d.]+ at step \d+. Lowest 2.*, highest 9. ", label
    )
    assert "1 not finite" in label and "skip" in label
    figure.focus()
    tab.keyboard.press("Home")
    for _ in range(NAN_STEP // 10):
        tab.keyboard.press("Shift+ArrowRight")
    told = tab.locator(".spoken").inner_text()
    assert f"step {NAN_STEP}; loss no value; limit 6" in told
    assert f"skip at step {NAN_STEP}: gradients of rank 1 are NaN" in told


@pytest.mark.parametrize(
    ("width", "height", "lowest"), one_in(2, [(1280, 720, 720), (390, 844, 500)])
)
@pytest.mark.nightly
def test_the_first_curve_is_seen_without_scrolling(page, address, width, height, lowest):
    page.set_viewport_size({"width": width, "height": height})
    page.goto(at(address, f"run?run={OTHER_RUN}"))
    page.wait_for_selector(CHART)
    page.wait_for_timeout(500)
    box = page.locator("figure .u-over").first.bounding_box()
    assert box["y"] + box["height"] <= lowest
    assert box["x"] >= 0 and box["x"] + box["width"] <= width


@pytest.mark.nightly
def test_the_page_of_an_ended_run_asks_for_nothing_more(tab, address):
    asked: list[bytes] = []
    with heard(
        tab, "websocket", lambda socket: socket.on("framesent", lambda frame: asked.append(frame))
    ):
        tab.goto(at(address, f"run?run={OTHER_RUN}"))
        tab.wait_for_selector(CHART)
        tab.wait_for_timeout(1_000)
        assert [] != asked, "it asked for the page"
        asked.clear()
        tab.wait_for_timeout(5_000)
        assert [] == asked


# ----------------------------------------------------------------------- the component by itself

MODULE = "_stcore/bidi-components/trainvitals.charts/chart.js"
DATA_MODULE = MODULE.replace("chart.js", "data.js")


class Alone:
    """The component on a page without a training, which draws what it is given."""

    def __init__(self, page: Any, base: str) -> None:
        self.page, self._base = page, base

    def give(self, *messages: dict[str, Any]) -> list[Any]:
        """Give a new one messages, as the server would; return what it asks for."""
        self.page.mouse.move(0, 0)
        return self.page.evaluate(
            """async ([url, messages]) => {
                const draw = (await import(url)).default;
                document.querySelector("#alone")?.remove();
                const host = document.createElement("div");
                host.id = "alone";
                host.style.cssText = "position:fixed;inset:0;background:white;z-index:2000000";
                document.body.append(host);
                const root = host.attachShadow({ mode: "open" }), told = [];
                const tell = (...what) => told.push(what);
                for (const message of messages) {
                    const data = JSON.stringify(message);
                    draw({ data, parentElement: root, setTriggerValue: tell });
                }
                await new Promise((done) => setTimeout(done, 300));
                return told;
            }""",
            [f"{self._base}/{MODULE}", list(messages)],
        )


@pytest.fixture(scope="module")
def alone(browser: Any, started: Started) -> Iterator[Alone]:
    """One page for all: to load it takes a hundred times as long as to draw a chart."""
    with new_page(browser) as page:
        page.goto(at(started.address, f"run?run={OTHER_RUN}"))
        page.wait_for_selector(CHART)  # the component is known once a page has used it
        yield Alone(page, started.address.partition("/?")[0])


def whole(values: list[float | None], **chart: Any) -> dict[str, Any]:
    """Return a message with one chart of one curve."""
    line = {"from": [0], "by": [1] * (len(values) - 1), "y": values, "total": len(values), "bad": 0}
    drawn = {
        "title": "Alone", "axis": "step", "unit": "step", "log": False, "exact": False,
        "size": "full", "height": 200, "curves": [["loss", "main", 0]], "note": "",
        "ends": [0, len(values) - 1], "lines": [line],
    }  # fmt: skip
    return {
        "key": "alone", "name": secrets.token_hex(4), "number": 1, "base": 0, "kinds": {},
        "marks": [], "charts": [drawn | chart], "look": {"light": ["#0072B2"], "dark": ["#56B4E9"]},
    }  # fmt: skip


def more(first: dict[str, Any], number: int, start: int, values: list[float | None]) -> Any:
    """Return the message with further values."""
    steps = list(range(start, start + len(values)))
    line = [0, 0, 0, 0, values, start + len(values), 0]
    head = {"key": "alone", "name": first["name"], "number": number, "base": number - 1}
    return head | {"xs": [steps], "lines": [line], "ends": [[0, steps[-1]]]}


def test_a_message_that_was_missed_is_asked_for(alone: Alone):
    first = whole([1.0, 2.0, 3.0])
    assert [] == alone.give(first, more(first, 2, 3, [4.0]))
    ((kind, _),) = alone.give(more(first, 4, 5, [6.0]))
    assert "missed" == kind


def test_the_browser_thins_what_it_holds_but_for_extremes_and_gaps(alone: Alone):
    first = whole([2.0] * 2_000)
    values: list[float | None] = [2.0 + 0.1 * math.sin(i) for i in range(3_000)]
    values[1_000], values[1_500], values[1_700] = 7.5, None, -4.0
    alone.give(
        first,
        *(more(first, i + 2, 2_000 + 10 * i, values[10 * i : 10 * i + 10]) for i in range(300)),
    )
    figure = alone.page.locator("#alone figure")
    label = figure.get_attribute("aria-label")
    assert "Lowest -4, highest 7.5." in label
    drawn, total = re.search(r"([\d,]+) of ([\d,]+) points", label).groups()
    assert "5,000" == total and 1_500 < int(drawn.replace(",", "")) <= 4_000


def test_far_values_do_not_flatten_the_others_and_are_marked(alone: Alone):
    values: list[float | None] = [2.0 + 0.1 * math.sin(i) for i in range(500)]
    values[100], values[300] = 400.0, -80.0
    alone.give(whole(values))
    figure = alone.page.locator("#alone figure")
    assert "2 beyond the axis" in figure.locator(".counts").text_content()
    box = figure.locator(".u-over").bounding_box()
    alone.page.mouse.move(box["x"] + box["width"] * 100 / 499, box["y"] + 60)
    assert "loss: 400 at step 100, beyond this axis" in figure.locator(".events").inner_text()
    alone.page.locator("#alone").get_by_role("button", name="Full y range").click()
    alone.page.wait_for_timeout(300)
    assert "beyond" not in figure.locator(".counts").text_content()


def test_a_loss_that_ends_in_nan_is_not_read_as_its_last_finite_value(alone: Alone):
    alone.give(whole([2.0, 1.5, None]))
    said = alone.page.locator("#alone figure .u-legend").inner_text()
    assert "step 2 loss -" == " ".join(said.split())


def of_data(alone: Alone, call: str) -> Any:
    """Return what the functions of the component's data give for some data."""
    alone.give(whole([1.0, 2.0]))
    address = alone.page.evaluate("url => new URL(url, location.origin).href", f"/{DATA_MODULE}")
    return alone.page.evaluate(
        f"async (url) => {{ const d = await import(url); return {call} }}", address
    )


def test_marks_of_a_kind_are_grouped_by_their_distance_in_pixels(alone: Alone):
    marks = [["skip", 40, "", 1, 2], ["skip", 0, "", 1, 1], ["halt", 1, "", 1, 1]]
    marks += [["skip", 10, "", 1, 1], ["skip", 27, "", 1, 97]]
    groups = of_data(alone, f"d.grouped({json.dumps(marks)}, x => x)")
    assert [("skip", 0, 27, 99), ("halt", 1, 1, 1), ("skip", 40, 40, 2)] == [
        (each["kind"], each["first"], each["last"], each["num"]) for each in groups
    ]
    assert [0, 10, 27] == [mark[1] for mark in groups[0]["marks"]]


def test_parts_are_stacked_on_those_after_them(alone: Alone):
    given = of_data(alone, "d.stacked([[1, 1, null], [2, null, null], [4, 4, null]])")
    assert [[7, 5, None], [6, 4, None], [4, 4, None]] == given


def test_a_chart_as_csv_has_no_formula_and_a_gap_for_no_value(alone: Alone):
    text = of_data(alone, 'd.csv(["step", "=1+1", "a, b"], [[1, 2], [-0.5, null], [1e-9, 3]])')
    assert [["step", "'=1+1", "a, b"], ["1", "-0.5", "1e-9"], ["2", "", "3"]] == [
        *csv.reader(io.StringIO(text))
    ]


LOOK = {"line": "", "width": 1, "size": 9}
KINDS = {
    "checkpoint": LOOK | {"symbol": "flag", "colour": "#009E73", "lane": 3},
    "skip": LOOK | {"symbol": "triangle", "colour": "#E69F00", "lane": 0, "line": "dotted"},
}


def test_dense_marks_are_one_with_their_number_and_each_kind_has_a_switch(alone: Alone):
    marks = [["checkpoint", step, f"state of step {step}", 1, 1] for step in range(1_000)]
    marks.append(["skip", 500, "skip at step 500: loss 9", 1, 1])
    alone.give(whole([1.0] * 1_000) | {"marks": marks, "kinds": KINDS})
    page = alone.page.locator("#alone")
    box = page.locator("figure .u-over").bounding_box()

    def at_the_skip() -> str:
        alone.page.mouse.move(0, 0)
        alone.page.mouse.move(box["x"] + box["width"] * 500 / 999, box["y"] + 60)
        return str(page.locator("figure .events").inner_text())

    assert re.search(r"\d+ times checkpoint, step \d+ to \d+: zoom in for each", at_the_skip())
    assert "skip at step 500: loss 9" in at_the_skip()
    switch = page.get_by_role("button", name="checkpoint (1,000)")
    assert "true" == switch.get_attribute("aria-pressed")
    switch.click()
    assert "false" == switch.get_attribute("aria-pressed")
    assert "skip at step 500: loss 9" == at_the_skip()


def test_a_chart_is_saved_as_it_is_shown(alone: Alone, tmp_path: Path):
    alone.give(whole([1.0, None, 3.0], title="Loss (log)"))
    saved = {}
    for kind in ("CSV", "PNG"):
        with alone.page.expect_download() as offered:
            alone.page.locator("#alone").get_by_role("button", name=f"as {kind}").click()
        offered.value.save_as(tmp_path / kind)
        saved[offered.value.suggested_filename] = (tmp_path / kind).read_bytes()
    assert b"step,loss\r\n0,1\r\n1,\r\n2,3\r\n" == saved["loss_log.csv"]
    assert saved["loss_log.png"].startswith(b"\x89PNG") and len(saved["loss_log.png"]) > 2_000


@pytest.mark.nightly
def test_a_page_finds_its_server_and_its_program_at_once(tab, address):
    tab.goto(run_page(address))
    tab.wait_for_selector(CHART)  # from now on the server knows the program
    answers: list[Any] = []
    with heard(tab, "response", answers.append):
        tab.goto(run_page(address))
        tab.wait_for_selector(CHART)
    failed = [answer.url for answer in answers if answer.status >= 400]
    programs = [answer.url for answer in answers if MODULE in answer.url]
    assert ([], 1) == (failed, len(programs))


def test_a_command_is_copied_from_the_verdict(tab, address):
    tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    tab.goto(at(address, PAGES["incidents"]))
    copy = tab.get_by_role("button", name="Copy vitals").first
    copy.wait_for()
    command = copy.get_attribute("aria-label").removeprefix("Copy ")
    assert command == tab.locator("code").filter(has_text=command).first.inner_text()
    # While the page is being drawn, another command can become the first.
    tab.bring_to_front()  # a page without focus may not read the clipboard
    tab.get_by_role("button", name=f"Copy {command}", exact=True).first.click()
    tab.wait_for_function(
        "async (command) => await navigator.clipboard.readText() === command", arg=command
    )


@pytest.mark.parametrize(
    ("ends", "labels"),
    [
        ((0.0679, 0.0683), [0.0679, 0.068, 0.0681, 0.0682, 0.0683]),
        ((0.9, 4.2), [1, 2, 3, 4]),
        ((0.3, 25), [0.5, 1, 2, 5, 10, 20]),
        ((1e-6, 2e3), [1e-6, 1e-4, 1e-2, 1, 100]),
    ],
)
def test_a_logarithmic_axis_has_labels_however_narrow_it_is(alone: Alone, ends, labels):
    alone.give(whole([1.0, 2.0], log=True))
    address = alone.page.evaluate("url => new URL(url, location.origin).href", f"/{MODULE}")
    given = alone.page.evaluate(
        "async ([url, [min, max]]) => (await import(url)).logSplits(null, 1, min, max)",
        [address, list(ends)],
    )
    assert labels == given


@pytest.mark.parametrize(
    ("span_ms", "label"), [(1e3, "08:00:00"), (7.2e6, "08:00"), (1e9, "11-28 08:00")]
)
def test_a_time_just_before_a_whole_second_is_labeled_with_that_second(
    alone: Alone, span_ms, label
):
    alone.give(whole([1.0, 2.0]))
    address = alone.page.evaluate("url => new URL(url, location.origin).href", f"/{MODULE}")
    given = alone.page.evaluate(
        "async ([url, at, span]) => (await import(url)).clock(at, [0, span])",
        [address, 1795852799999.7, span_ms],
    )
    assert label == given


def test_what_was_rolled_back_of_several_curves_is_one_entry_of_the_legend(alone: Alone):
    names = ("whole", "data")
    curves = [[name, "main", i] for i, name in enumerate(names)]
    curves += [[f"{name}, rolled back", "discarded", i] for i, name in enumerate(names)]
    chart = whole([1.0, 2.0, 3.0])["charts"][0]
    alone.give(whole([1.0, 2.0, 3.0], curves=curves, lines=chart["lines"] * 4))
    entries = alone.page.locator("#alone figure .u-legend tr:visible")
    assert ["step", "whole", "data", "rolled back"] == [
        entry.locator(".u-label").inner_text() for entry in entries.all()
    ]
    assert "rolled back" == entries.last.inner_text().strip(), "of two values it tells none"
    entries.last.locator("th").click()
    assert 2 == alone.page.locator("#alone figure tr.u-off").count(), "both are hidden"


@pytest.mark.nightly
def test_an_alert_is_silenced_with_a_reason_and_an_end(page, address, started):
    page.goto(at(address, "alerts"))
    get_control(page, started)
    cards = page.locator("[class*='st-key-alert_']:not([class*='alert_group'])")
    card = cards.filter(has_text="StepSkipped").first
    card.get_by_text("Silence", exact=True).click()
    form = page.get_by_test_id("stPopoverBody")
    form.get_by_role("button", name="Silence").click()
    form.get_by_text("A silence needs a reason").wait_for()
    form.get_by_label("Reason").fill("the data are mended")
    form.get_by_role("button", name="Silence").click()
    page.get_by_text("Silenced for 15 min.").first.wait_for()
    page.goto(at(address, "alerts?show=silenced"))
    page.get_by_text(re.compile("silenced for another .* the data are mended")).wait_for()


@pytest.mark.nightly
def test_an_incident_leads_to_the_curves_around_it(tab, address):
    expect = pytest.importorskip("playwright.sync_api").expect
    tab.goto(run_page(address))
    tab.wait_for_selector(CHART)
    tab.get_by_role("link", name="Incidents", exact=True).click()
    tab.locator(".st-key-incident_title").wait_for()
    told = tab.locator(".st-key-facts_incident").inner_text()
    steps = re.match(r"steps? (\d+)(?: to (\d+))?", told)
    onset, last = int(steps[1]), int(steps[2] or steps[1])
    tab.get_by_role("link", name="Curves around it").click()
    tab.get_by_role("button", name="View").click()
    for name, step in (("from", max(0, onset - 100)), ("to", last + 100)):
        expect(tab).to_have_url(re.compile(rf"/run\?.*[?&]{name}={step}(&|$)"))
        expect(tab.get_by_label(f"{name} step")).to_have_value(str(step))
    tab.wait_for_selector(CHART)


@pytest.mark.nightly
def test_the_answer_to_a_question_is_taken_away_as_csv(tab, address, tmp_path: Path):
    tab.goto(at(address, f"query?run={RUN}&table=steps&where=loss %3E 8.5&columns=step%2C loss"))
    tab.get_by_text("1 of 1 row").wait_for()
    with tab.expect_download() as offered:
        tab.get_by_role("button", name="CSV").click()
    assert f"vitals_steps_{RUN}.csv" == offered.value.suggested_filename
    offered.value.save_as(tmp_path / "taken.csv")
    with (tmp_path / "taken.csv").open(newline="") as taken:
        assert [{"step": str(SPIKE_STEP), "loss": "9.0"}] == list(csv.DictReader(taken))


WIDTHS, THEMES = ((390, 844), (800, 900), (1440, 900)), ("light", "dark")
IN_ORDER = """() => [...document.querySelectorAll("h1,h2,h3,h4,h5,h6")]
    .filter((head) => head.checkVisibility()).map((head) => Number(head.tagName[1]))"""
REACHED = """() => {
    let at = document.activeElement;
    while (at?.shadowRoot?.activeElement) at = at.shadowRoot.activeElement;
    if (!at || at === document.body) return "";
    return at.getAttribute("aria-label") || at.textContent.trim();
}"""


@pytest.mark.slow
def test_every_page_can_be_read_by_everybody(page, address, started):
    """Each page at each width, its themes in turn: three looks find what six would."""
    refused: list[str] = []
    page.on("console", lambda m: refused.append(m.text) if "Security Policy" in m.text else None)
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()

    def grave() -> list[tuple[str, str, str]]:
        # What a rerun has not drawn again yet is faded for a moment.
        page.locator("[data-stale=true]").first.wait_for(state="detached")
        page.wait_for_timeout(500)
        found = axe.run(page, options={"resultTypes": ["violations"]}).response["violations"]
        return [
            (each["id"], node["target"], node["failureSummary"])
            for each in found
            if each["impact"] in ("serious", "critical")
            for node in each["nodes"]
        ]

    page.goto(address)
    for number, (name, path) in enumerate(PAGES.items()):
        page.goto(at(address, f"{path}{'&' if '?' in path else '?'}live=false"))
        page.wait_for_selector(READY[name])
        for turn, (width, height) in enumerate(WIDTHS):
            theme = THEMES[(number + turn) % 2]
            page.emulate_media(color_scheme=theme)
            page.set_viewport_size({"width": width, "height": height})
            assert [] == grave(), f"{name}, {theme}, {width} px"
            assert page.evaluate("document.documentElement.scrollWidth") <= width, name
        levels = page.evaluate(IN_ORDER)
        assert [1] == [level for level in levels if level == 1], name
        assert all(b - a <= 1 for a, b in pairwise(levels)), f"{name}: {levels}"
        heading = page.locator("h1").text_content()
        assert f"{heading} - Vitals" == page.title()
    page.goto(at(address, PAGES["run"]))
    page.wait_for_selector(CHART)  # what is below moves down once they are there
    get_control(page, started)
    page.get_by_role("button", name="Note").click()
    page.get_by_role("button", name="Add the note").wait_for()
    assert [] == grave(), "a form"
    assert [] == refused, "the policy lets the pages be as they are"


@pytest.mark.nightly
def test_the_keyboard_reaches_every_control_of_the_run_page(tab, address):
    tab.goto(run_page(address))
    tab.wait_for_selector(CHART)
    tab.get_by_text(re.compile(r"Attempts \(")).wait_for()
    tab.locator("body").press("Tab")
    reached = [tab.evaluate(REACHED)]
    while len(reached) < 80 and reached[-1] not in reached[:-1]:
        tab.keyboard.press("Tab")
        reached.append(tab.evaluate(REACHED))
    said = "\n".join(reached)
    for control in ("Fleet", "Incidents", "View", "Live", "Run", "Full y range", "Loss over step"):
        assert control in said, said
    for part in ("Verdict", "Go to a decision", "Decisions (", "Attempts ("):
        assert part in said, said


def test_without_the_token_there_is_only_the_door(page, address):
    base, _, token = address.partition("/?token=")
    page.goto(f"{base}/run")
    assert "needs its token" in page.locator("body").inner_text()
    page.fill("input[name=token]", token)
    page.click("button")
    page.wait_for_selector(TABLE)
    assert "token" not in page.url


@pytest.mark.slow
def test_the_screenshot_script_writes_a_picture_of_the_address(address, tmp_path: Path):
    script = Path(__file__).parents[2] / "docs" / "make_screenshot.py"
    picture = tmp_path / "run.png"
    command = [sys.executable, str(script), run_page(address), str(picture), "--theme", "dark"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (0, f"{picture}\n") == (done.returncode, done.stdout), done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")


CUT = """() => [...document.querySelectorAll(".table")]
    .filter((table) => table.scrollWidth > table.clientWidth).length"""


def test_a_post_mortem_has_six_screens_at_most_and_no_cut_column(page, tmp_path: Path):
    write_troubled_run(tmp_path / "runs", 15)
    file = tmp_path / "report.html"
    assert 0 == vitals("postmortem", tmp_path / "runs", "--html", file)
    page.set_viewport_size({"width": 1280, "height": 900})
    page.goto(file.as_uri())
    assert page.evaluate("document.documentElement.scrollHeight") <= 6 * 900
    title = page.get_by_role("heading", name="Skipped: data at step")
    assert 10 == title.count()
    assert 9 == page.locator("details > summary", has=title).count(), "one is described in full"
    assert not page.get_by_text("key59").is_visible()
    page.evaluate("document.querySelectorAll('details').forEach((fold) => { fold.open = true })")
    assert 0 == page.evaluate(CUT)
    assert page.get_by_text("key59").is_visible()


# ------------------------------------------------------- a second program on this machine


def test_a_code_of_the_terminal_gives_this_browser_control_until_it_signs_out(
    page: Any, started: Started
) -> None:
    page.goto(started.address)
    page.wait_for_selector(TABLE)
    assert 0 == page.get_by_label("Code shown").count(), "who looks is asked for nothing"
    get_control(page, started, wrong=1)
    page.get_by_text("You may send commands for 60 more minutes").wait_for()
    page.get_by_role("button", name="Sign out").click()
    page.get_by_text("Signed out").wait_for()
    page.goto(started.base)
    assert "needs its token" in page.locator("body").inner_text()


@pytest.mark.nightly
def test_where_every_program_shares_the_name_one_can_only_look(page: Any, started: Started) -> None:
    page.goto(by_localhost(started.address))
    page.wait_for_selector(TABLE)
    page.get_by_text("This URL is read-only").wait_for()
    assert 0 == page.get_by_role("button", name="Get control").count()


# What a page of another port tries, given even the name that it cannot know.
ATTACK = """
const own = "NAME:PORT", results = {};
async function attempt(name, action) {
  try { results[name] = String(await action()) } catch (error) { results[name] = "refused" }
}
function socket(host) {
  return () => new Promise((resolve, reject) => {
    const tried = new WebSocket(`ws://${host}/_stcore/stream`, ["streamlit"]);
    tried.onopen = () => resolve("open");
    tried.onerror = () => reject();
  });
}
(async () => {
  for (const host of [own, "localhost:PORT", "127.0.0.1:PORT"]) {
    const all = {credentials: "include", headers: {"x-own": "1"}};
    await attempt("socket " + host, socket(host));
    await attempt("read " + host, async () => (await fetch(`http://${host}/`, all)).status);
    for (const method of ["PUT", "POST", "DELETE"])
      await attempt(method + " " + host, async () =>
        (await fetch(`http://${host}/_stcore/upload_file/a/b`, {...all, method})).status);
  }
  const frame = document.createElement("iframe");
  frame.src = `http://${own}/`;
  frame.onload = async () => {
    await attempt("frame", () => frame.contentDocument ? "blank" : "shown");
    document.title = JSON.stringify(results);
  };
  document.body.append(frame);
})();
"""


def test_a_link_to_another_port_hands_over_neither_cookie_nor_name_nor_control(
    page: Any, started: Started
) -> None:
    """The way in which a run was once rolled back by another user of the node."""
    port = str(urlsplit(started.address).port)
    script = ATTACK.replace("NAME", started.host).replace("PORT", port)
    page.goto(started.address)
    page.wait_for_selector(TABLE)
    with stranger(script) as (theirs, seen):
        for host in ("localhost", "127.0.0.1"):
            there = f"http://{host}:{theirs}/"
            page.goto(started.base)
            page.wait_for_selector(TABLE)
            page.evaluate(  # a link in a run's name or note, clicked
                "there => { const a = document.createElement('a'); a.href = there;"
                " document.body.append(a); a.click(); }",
                there,
            )
            page.wait_for_url(there)
            page.wait_for_function("document.title.startsWith('{')")
            results: dict[str, str] = page.evaluate("JSON.parse(document.title)")
            assert 16 == len(results)
            assert {"refused"} == {v for k, v in results.items() if k != "frame"}, results
        sent = "".join(seen)
        assert 2 == len([text for text in seen if text.startswith("/\n")]), "it was visited"
        for secret in ("vitals-", started.host, started.token):
            assert secret not in sent
        assert all("Referer" not in text for text in seen if text.startswith("/\n"))


def test_the_cookie_of_localhost_that_a_link_does_hand_over_can_only_look(
    page: Any, started: Started
) -> None:
    """Why that name is look-only: browsers send its cookies to every port."""
    page.goto(by_localhost(started.address))
    page.wait_for_selector(TABLE)
    with stranger() as (theirs, seen):
        page.goto(f"http://localhost:{theirs}/")
    cookie = re.findall(r"^Cookie: (.*)$", seen[0], re.M)[0]
    assert "vitals-" in cookie
    port = urlsplit(started.address).port
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as thief:
        assert 200 == thief.get("/", headers={"Host": "localhost", "Cookie": cookie}).status_code
        own = {"Host": started.host, "Cookie": cookie}
        assert 401 == thief.get("/", headers=own).status_code


def test_a_websocket_of_another_origin_is_refused(page: Any, started: Started) -> None:
    client = pytest.importorskip("websockets.sync.client")
    page.goto(started.address)
    page.wait_for_selector(TABLE)
    (cookie,) = [c for c in page.context.cookies() if c["name"].startswith("vitals-")]
    assert (True, "Strict", started.host) == (
        cookie["httpOnly"], cookie["sameSite"], cookie["domain"],
    )  # fmt: skip
    port = urlsplit(started.address).port

    def status(origin: str | None, host: str = f"{started.host}:{port}") -> int:
        try:
            with client.connect(
                f"ws://{host}/_stcore/stream",
                sock=socket.create_connection(("127.0.0.1", port)),
                origin=origin,
                subprotocols=["streamlit"],
                additional_headers={"Cookie": f"{cookie['name']}={cookie['value']}"},
                proxy=None,
            ):
                return 101
        except Exception as error:
            return int(error.response.status_code)  # type: ignore[attr-defined]

    assert 101 == status(started.base)
    for origin in (None, "null", "http://evil.example", f"http://{started.host}:1"):
        assert 403 == status(origin), origin
    assert 403 == status("http://evil.example", "evil.example"), "a name that was rebound"
