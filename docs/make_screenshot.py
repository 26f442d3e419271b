"""Takes a picture of a running dashboard: ``make_screenshot.py ADDRESS OUTPUT.png``.

The address is the one-click address that ``vitals dashboard`` prints, token included; a page and
its controls may be added: ``http://127.0.0.1:8501/run?run=ID&token=...``. Needs playwright and a
chromium.
"""

import argparse
import shutil
import sys
from pathlib import Path

CHROMIUM_FLAGS = ("--no-sandbox", "--disable-gpu", "--hide-scrollbars")
WAIT_MS = 60_000
DRAWN = "figure, [data-testid=stEChartsChart], [data-testid=stDataFrame], .st-key-notice"
"""Elements of a complete page."""
SETTLE_MS = 1_500
"""Time for the last chart to be drawn after the first one is there."""


def take(
    address: str,
    output: Path,
    *,
    width: int = 1440,
    height: int = 900,
    theme: str = "light",
    full_page: bool = False,
) -> None:
    """Open the address in a headless chromium and write what it shows to ``output``."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=list(CHROMIUM_FLAGS)
        )
        try:
            page = browser.new_page(
                viewport={"width": width, "height": height},
                color_scheme="dark" if theme == "dark" else "light",
            )
            page.goto(address, timeout=WAIT_MS)
            # On a phone the Fleet page hides its wide table and shows a narrow one.
            page.wait_for_selector(f"{DRAWN} >> visible=true", timeout=WAIT_MS)
            page.wait_for_selector("[data-testid=stSkeleton]", state="detached", timeout=WAIT_MS)
            page.wait_for_timeout(SETTLE_MS)
            if full_page:
                # Streamlit scrolls inside the page, so the window is made as high as its content.
                tall = page.evaluate(
                    "document.querySelector('[data-testid=stMainBlockContainer]').scrollHeight"
                )
                page.set_viewport_size({"width": width, "height": min(int(tall) + 80, 6000)})
                page.wait_for_timeout(SETTLE_MS)
            page.screenshot(path=str(output))
        finally:
            browser.close()


def main() -> int:
    """Read the arguments, take the picture, say where it is."""
    parser = argparse.ArgumentParser(description="Takes a picture of a running dashboard.")
    parser.add_argument("address", help="one-click address of a dashboard, token included")
    parser.add_argument("output", type=Path, help="PNG file to write")
    parser.add_argument("--theme", choices=("light", "dark"), default="light")
    parser.add_argument("--width", type=int, default=1440)
    parser.add_argument("--height", type=int, default=900)
    parser.add_argument("--full-page", action="store_true", help="the whole page, not the window")
    given = parser.parse_args()
    take(
        given.address,
        given.output,
        width=given.width,
        height=given.height,
        theme=given.theme,
        full_page=given.full_page,
    )
    sys.stdout.write(f"{given.output}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
