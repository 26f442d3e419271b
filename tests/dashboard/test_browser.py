"""The pages in a real browser, over a real collector that follows a folder."""

import csv
import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.collector.rows import OTHER_RUN, RUN
from tests.dashboard import samples
from tests.dashboard.folder import (
    LONG_STEPS,
    NAN_STEP,
    NUM_STEPS,
    SPIKE_STEP,
    OpenRun,
    write_long_run,
)
from tests.dashboard.test_access import Started, get_control
from tests.dashboard.test_launch import dashboard

pytestmark = pytest.mark.browser
CHART_ROW = 13
CHART = "[data-testid=stEChartsChart] canvas"
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
TABLE, CARD = "[data-testid=stDataFrame] canvas", "[class*='st-key-alert_text']"
READY = dict.fromkeys(PAGES, CHART) | {
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


def at(address: str, path: str) -> str:
    """Return the address of a page, with the token that lets in."""
    base, _, token = address.partition("/?token=")
    return f"{base}/{path}{'&' if '?' in path else '?'}token={token}"


def run_page(address: str) -> str:
    return at(address, PAGES["run"])


def select_row(page: Any, number: int) -> None:
    """Select a row of the first table, which is drawn on a canvas."""
    table = page.locator(TABLE).first
    table.wait_for()
    box = table.bounding_box()
    page.wait_for_timeout(500)
    page.mouse.click(box["x"] + 16, box["y"] + 38 + 35 * number + 17)


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


def tooltip_at(page: Any, step: int) -> str:
    """Return what the loss chart says when the head of the mark at a step is pointed at."""
    box = page.locator(CHART).first.bounding_box()
    x = box["x"] + 20 + (box["width"] - 56) * step / (NUM_STEPS - 1)
    said = ""
    # Rows of other marks may stand above the decisions, which are nearest to the curves.
    rows = [30 + CHART_ROW * row + 4 for row in range(4)]
    offsets = (0, *(sign * d for d in range(3, 15, 3) for sign in (-1, 1)))
    for offset, row in itertools.product(offsets, rows):
        page.mouse.move(x + offset, box["y"] + row)
        page.wait_for_timeout(120)
        said = page.evaluate(
            """() => [...document.querySelectorAll('[data-testid=stEChartsChart] div')]
                 .filter(e => getComputedStyle(e).position === 'absolute'
                              && getComputedStyle(e).visibility === 'visible')
                 .map(e => e.innerText).join(' ')"""
        )
        if f"skip at step {step}" in said:
            break
    return str(said)


def test_the_live_page_shows_the_decisions_on_the_curve(page, address, tmp_path: Path):
    outside: list[str] = []
    own = f"{address.partition('/?')[0]}/"
    page.on("request", lambda r: outside.append(r.url) if not r.url.startswith(own) else None)
    page.goto(run_page(address))
    page.wait_for_selector(CHART)
    page.wait_for_timeout(1_000)
    assert f"skip at step {NAN_STEP}: gradients of rank 1 are NaN" in tooltip_at(page, NAN_STEP)
    assert f"skip at step {SPIKE_STEP}: loss 9 is above" in tooltip_at(page, SPIKE_STEP)
    page.wait_for_timeout(500)
    picture = tmp_path / "live.png"
    page.screenshot(path=str(picture))
    assert 40_000 < picture.stat().st_size
    assert [] == [url for url in outside if url.startswith("http")], "the page works offline"


def test_a_refresh_keeps_the_charts_and_a_reload_keeps_the_way_in(page, address):
    page.goto(run_page(address))
    page.wait_for_selector(CHART)
    page.evaluate(f"document.querySelector('{CHART}').dataset.mark = 'kept'")
    before = page.get_by_text("last seen").inner_text()
    page.wait_for_function(
        "before => ![...document.querySelectorAll('p,div')].some(e => e.innerText === before)",
        arg=before,
    )
    assert "kept" == page.evaluate(f"document.querySelector('{CHART}').dataset.mark")
    assert "token" not in page.url
    page.reload()
    page.wait_for_selector(CHART)


def test_a_hostile_run_name_is_only_text(page, address):
    page.on("dialog", lambda dialog: pytest.fail(f"a script ran: {dialog.message}"))
    page.goto(run_page(address))
    page.wait_for_selector(CHART)
    assert "<script>" in page.locator(".st-key-run_title").inner_text()
    assert "owned" not in page.title()
    assert 0 == page.locator("img[src='x']").count()


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


def test_a_zoom_by_range_gets_every_point_and_is_an_address(page, address):
    frames = sent_about(page, " points")
    page.goto(at(address, f"run?run={OTHER_RUN}&live=false"))
    page.wait_for_selector(CHART)
    said = [re.search(rb"([\d,]+) of ([\d,]+) points", raw) for raw in frames]
    drawn, total = next(found.groups() for found in said if found)
    assert f"{LONG_STEPS:,}" == total.decode()
    assert int(drawn.replace(b",", b"")) <= 1_000
    page.locator(".st-key-window").get_by_text("range", exact=True).click()
    for name, step in (("from", 3_000), ("to", 3_199)):
        page.get_by_label(f"{name} step").fill(str(step))
        page.get_by_label(f"{name} step").press("Enter")
        page.wait_for_url(re.compile(rf"[?&]{name}={step}(&|$)"))
    page.wait_for_function("location.search.includes('window=range')")
    with page.expect_event("websocket"):
        page.goto(page.url)
    page.wait_for_selector(CHART)
    page.wait_for_timeout(500)
    assert any(b"200 of 200 points" in raw for raw in frames)


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


def test_an_incident_leads_to_the_curves_around_it(page, address):
    expect = pytest.importorskip("playwright.sync_api").expect
    page.goto(run_page(address))
    page.wait_for_selector(CHART)
    page.get_by_role("link", name="Incidents").click()
    page.locator(".st-key-incident_title").wait_for()
    told = page.locator(".st-key-facts_incident").inner_text()
    onset, last = (int(step) for step in re.findall(r"\d+", told)[:2])
    page.get_by_role("link", name="Curves around it").click()
    for name, step in (("from", max(0, onset - 100)), ("to", last + 100)):
        page.wait_for_url(re.compile(rf"/run\?.*[?&]{name}={step}(&|$)"))
        expect(page.get_by_label(f"{name} step")).to_have_value(str(step))
    page.wait_for_selector(CHART)


def test_the_answer_to_a_question_is_taken_away_as_csv(page, address, tmp_path: Path):
    page.goto(at(address, f"query?run={RUN}&table=steps&where=loss %3E 8.5&columns=step%2C loss"))
    page.get_by_text("1 of 1 row").wait_for()
    with page.expect_download() as offered:
        page.get_by_role("button", name="CSV").click()
    assert f"vitals_steps_{RUN}.csv" == offered.value.suggested_filename
    offered.value.save_as(tmp_path / "taken.csv")
    with (tmp_path / "taken.csv").open(newline="") as taken:
        assert [{"step": str(SPIKE_STEP), "loss": "9.0"}] == list(csv.DictReader(taken))


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_page_can_be_read_by_everybody(page, address, started, theme: str):
    refused: list[str] = []
    page.on("console", lambda m: refused.append(m.text) if "Security Policy" in m.text else None)
    page.emulate_media(color_scheme=theme)
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()

    def grave() -> list[tuple[str, str, str]]:
        page.wait_for_timeout(500)
        return [
            (each["id"], node["target"], node["failureSummary"])
            for each in axe.run(page).response["violations"]
            if each["impact"] in ("serious", "critical")
            for node in each["nodes"]
        ]

    page.goto(address)
    for name, path in PAGES.items():
        page.goto(at(address, path))
        page.wait_for_selector(READY[name])
        assert [] == grave(), name
    page.goto(at(address, PAGES["run"]))
    get_control(page, started)
    page.get_by_role("button", name="Note").click()
    page.get_by_role("button", name="Add the note").wait_for()
    assert [] == grave(), "a form"
    assert [] == refused, "the policy lets the pages be as they are"


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
