"""The pages in a real browser, over a real collector that reads a folder."""

import itertools
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.dashboard import samples
from tests.dashboard.folder import NAN_STEP, NUM_STEPS, SPIKE_STEP, write_run
from tests.dashboard.test_launch import dashboard

pytestmark = pytest.mark.browser
WAIT_MS = 60_000
CHART_ROW = 13
CHART = "[data-testid=stEChartsChart] canvas"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The one-click address of a dashboard over a folder with one run of a hostile name."""
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder, name=samples.HOSTILE)
    with dashboard(folder, tmp_path_factory.mktemp("tmp")) as (_, address):
        yield address


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    context.set_default_timeout(WAIT_MS)
    yield context.new_page()
    context.close()


def run_page(address: str) -> str:
    base, _, token = address.partition("/?token=")
    return f"{base}/run?token={token}"


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
    page.on("request", lambda r: outside.append(r.url) if "127.0.0.1" not in r.url else None)
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


def test_selecting_a_run_in_the_overview_opens_it(page, address):
    page.goto(address)
    table = page.locator("[data-testid=stDataFrame] canvas").first
    table.wait_for()
    box = table.bounding_box()
    page.wait_for_timeout(500)
    page.mouse.click(box["x"] + 16, box["y"] + 38 + 17)
    page.wait_for_selector(CHART)
    assert "/run?" in page.url and "run=" in page.url


def test_without_the_token_there_is_only_the_door(page, address):
    base, _, token = address.partition("/?token=")
    page.goto(f"{base}/run")
    assert "needs its token" in page.locator("body").inner_text()
    page.fill("input[name=token]", token)
    page.click("button")
    page.wait_for_selector("[data-testid=stDataFrame] canvas")
    assert "token" not in page.url


def test_the_screenshot_script_writes_a_picture_of_the_address(address, tmp_path: Path):
    script = Path(__file__).parents[2] / "docs" / "make_screenshot.py"
    picture = tmp_path / "run.png"
    command = [sys.executable, str(script), run_page(address), str(picture), "--theme", "dark"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (0, f"{picture}\n") == (done.returncode, done.stdout), done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
