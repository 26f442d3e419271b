"""The run page in a headless Chromium: when it is painted, what a refresh costs and carries."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import streamlit

from vitals_bench.dashboard.asked import Asked
from vitals_bench.dashboard.seen import num_hidden
from vitals_bench.dashboard.serving import FULL, QUICK, Serving, bare, serve
from vitals_bench.measure import halves, interleave
from vitals_bench.processes import program
from vitals_bench.rows import Row, at_most, exactly, ratio_at_most

CHART = "figure canvas, [data-testid=stEChartsChart] canvas"
_ARE_THERE = """(num) => {
    const drawn = (root, selector) => root.querySelectorAll(selector).length;
    const hosts = [...document.querySelectorAll("*")].filter((each) => each.shadowRoot);
    const ours = hosts.map((host) => drawn(host.shadowRoot, "figure canvas"));
    const theirs = drawn(document, "[data-testid=stEChartsChart] canvas");
    return ours.reduce((a, b) => a + b, theirs) >= num;
}"""
"""Asked in each frame: Playwright by itself looks twice a second, once it has waited a while."""
NUM_STEPS = 10
"""Trained between two refreshes."""
_WAIT_MS = 120_000
_STILL_MS = 3_000
"""The number of charts is known when none was added for so long."""
_REFRESHES, _FEW_REFRESHES = 10, 2


def measure_page(*, quick: bool, asked: Asked | None = None) -> Iterator[Row]:
    """Yield how soon the page of a long run is painted, and what its refreshes cost."""
    size = QUICK if quick else FULL
    with TemporaryDirectory(prefix="vitals-bench-") as name, opened_chromium() as chromium:
        folder = Path(name)
        with serve(folder, size) as serving:
            begin = time.perf_counter()
            page = open_page(chromium, serving.run_page)
            page.wait_for_selector(CHART)
            first = time.perf_counter() - begin
            num_charts = settled(page)
            page.close()
            with bare(folder, num_charts) as bare_address:
                yield _painted(chromium, serving, bare_address, num_charts, first)
            yield from _refreshed(chromium, serving, _FEW_REFRESHES if quick else _REFRESHES)


@contextmanager
def opened_chromium() -> Iterator[Any]:
    """Give one browser window: what it has loaded once is in its cache.

    Raises:
        RuntimeError: there is no chromium here.
    """
    from playwright.sync_api import sync_playwright

    binary = program("chromium")
    if not binary:
        raise RuntimeError("no chromium is on PATH")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=binary, args=["--no-sandbox", "--disable-gpu"]
        )
        context = browser.new_context(viewport={"width": 1440, "height": 900})
        context.set_default_timeout(_WAIT_MS)
        try:
            yield context
        finally:
            browser.close()


def open_page(chromium: Any, address: str) -> Any:
    """Open an address in a new tab."""
    page = chromium.new_page()
    page.goto(address)
    return page


def settled(page: Any) -> int:
    """Return how many charts there are once no more are added."""
    page.wait_for_selector(CHART)
    num, before = 0, -1
    while num != before or not num:
        before = num
        page.wait_for_timeout(_STILL_MS)
        num = page.locator(CHART).count()
    return int(num)


def paint(chromium: Any, address: str, num_charts: int) -> None:
    """Open a page and return when all of its charts are there."""
    page = open_page(chromium, address)
    page.wait_for_function(_ARE_THERE, arg=num_charts)
    page.close()


def _painted(
    chromium: Any, serving: Serving, bare_address: str, num_charts: int, first: float
) -> Row:
    size = serving.filling.size
    times = interleave(
        {
            "ours": partial(paint, chromium, serving.run_page, num_charts),
            "theirs": partial(paint, chromium, bare_address, num_charts),
        },
        rounds=size.rounds,
        warm_up=1,
        between=serving.train,
    )
    return Row(
        name=f"page of a run of {size.num_steps:,} steps, {num_charts} charts painted",
        ours=statistics.median(times["ours"]),
        unit="s",
        peer="bare page, as many charts of 100 points",
        theirs=statistics.median(times["theirs"]),
        goal=ratio_at_most(1.3),
        spread=halves(times["theirs"]),
        note=f"wall time in headless Chromium; the run has one step more each time, so that no "
        f"answer is cached; ours against itself {100 * halves(times['ours']):.0f} %; the very "
        f"first chart of the server's first page came after {first:.1f} s; "
        f"Streamlit {streamlit.__version__}",
    )


def _refreshed(chromium: Any, serving: Serving, num: int) -> Iterator[Row]:
    per_step = _step_cpu_seconds(serving)
    page = chromium.new_page()
    received: list[bytes] = []
    sent: list[int] = []
    page.on("websocket", lambda socket: _listen(socket, received, sent))
    page.goto(serving.run_page)
    settled(page)
    hidden = num_hidden(b"".join(received), serving.filling.planted)
    received.clear()
    sent.clear()
    begin, cpu, drawing = time.perf_counter(), serving.cpu_seconds(), renderer_cpu_seconds()
    for _ in range(num):
        for _ in range(NUM_STEPS):
            serving.train()
        newest = f"{serving.filling.size.num_steps + serving.num_more - 1}]".encode()
        while not any(_of_charts(frame) and newest in frame for frame in received):
            page.wait_for_timeout(100)
    drawing = (renderer_cpu_seconds() - drawing) / (time.perf_counter() - begin)
    cpu = serving.cpu_seconds() - cpu - num * NUM_STEPS * per_step
    page.close()
    name = f"refresh of this page, live, {serving.filling.size.num_steps:,} steps"
    yield Row(
        name=f"{name}: time of the servers",
        ours=1e3 * cpu / len(sent),
        unit="ms",
        goal=at_most(300.0),
        note=f"CPU of dashboard and collector over {len(sent)} refreshes, with new steps in each, "
        f"less the {1e3 * per_step:.0f} ms that a step takes to be stored with no page open",
    )
    of_charts = sum(len(frame) for frame in received if _of_charts(frame))
    yield Row(
        name=f"{name}: what goes to the charts for {NUM_STEPS} new steps",
        ours=of_charts / num / 1024,
        unit="KiB",
        goal=at_most(5.0),
        note="before the connection compresses it; a refresh without a new step is in it too",
    )
    yield Row(
        name=f"{name}: what goes to the browser",
        ours=sum(map(len, received)) / len(sent) / 1024,
        unit="KiB",
        note="of charts, tables and numbers, before the connection compresses it",
    )
    yield Row(
        name=f"{name}: CPU of the tab",
        ours=100 * drawing,
        unit="% of a core",
        goal=at_most(5.0),
        note="of the browser's renderer process, without a GPU",
    )
    planted = serving.filling.planted
    yield Row(
        name=f"of {len(planted.spikes)} planted one-step spikes of the loss, not sent to the page",
        ours=float(hidden),
        unit="of them",
        goal=exactly(0),
    )


def _step_cpu_seconds(serving: Serving) -> float:
    begin = serving.cpu_seconds()
    for _ in range(NUM_STEPS):
        serving.train()
    return (serving.cpu_seconds() - begin) / NUM_STEPS


def renderer_cpu_seconds() -> float:
    """Return the CPU time of this process' browser tabs so far."""
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if "--type=renderer" in process.cmdline():
                times = process.cpu_times()
                total += times.user + times.system
    return total


def _of_charts(frame: bytes) -> bool:
    return b"trainvitals.charts" in frame


def _listen(socket: Any, received: list[bytes], sent: list[int]) -> None:
    socket.on("framereceived", lambda frame: received.append(_bytes(frame)))
    socket.on("framesent", lambda frame: sent.append(len(frame)))


def _bytes(frame: str | bytes) -> bytes:
    return frame.encode() if isinstance(frame, str) else frame
