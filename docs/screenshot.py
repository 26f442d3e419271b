"""Takes the README's picture: the demo, with the dashboard open in a headless Chromium.

Runs `vitals demo --keep --headless` to its end, opens the page of the guarded training,
and writes docs/dashboard.png. Exits with an error where there is no
chromium, or where the demo fails.
"""

import argparse
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from playwright.sync_api import sync_playwright

CHART_SELECTOR = "canvas, svg.marks, .js-plotly-plot"
PATIENCE_MS = 60_000
"""A first chart needs seconds, and many where the machine also trains."""


def main() -> int:
    """Run the demo, take the picture, stop the demo; return the exit code."""
    parser = argparse.ArgumentParser(prog="make screenshot ARGS=...", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "dashboard.png")
    parser.add_argument("--dir", type=Path, help="folder of the demo; else a temporary one")
    arguments = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.stderr.write("error: no chromium here\nhint: on Debian: apt-get install chromium\n")
        return 2
    command = [sys.executable, "-m", "trainvitals", "demo", "--keep", "--headless"]
    if arguments.dir is not None:
        command += ["--dir", str(arguments.dir)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as demo:
        try:
            assert demo.stdout is not None
            url = drive(iter(demo.stdout.readline, ""))
            if url:
                take_picture(url, chromium, arguments.output)
                sys.stdout.write(f"{arguments.output}\n")
        finally:
            demo.send_signal(signal.SIGINT)
            demo.wait(timeout=60)
    if not url:
        sys.stderr.write("error: the demo ended before its dashboard could be pictured\n")
    return 0 if url else 1


def drive(lines: Iterator[str]) -> str:
    """Pass the demo's output on; return the dashboard's address once the demo is through, or ""."""
    for line in lines:
        sys.stderr.write(line)
        found = re.search(r"dashboard: (http://\S+).*Ctrl-C", line)
        if found:
            return found[1]
    return ""


def take_picture(url: str, chromium: str, output: Path) -> None:
    """Write a picture of the newest run's page; the address lets the browser in once."""
    parts = urlsplit(url)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page(viewport={"width": 1440, "height": 1200})
        page.set_default_timeout(PATIENCE_MS)
        page.goto(url)
        page.goto(f"{parts.scheme}://{parts.netloc}/run")
        page.locator(CHART_SELECTOR).nth(2).wait_for()
        page.wait_for_timeout(3000)  # the last fragment is drawn after its chart is there
        page.screenshot(path=output, full_page=True)
        browser.close()


if __name__ == "__main__":
    sys.exit(main())
