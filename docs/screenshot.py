"""Takes the pictures of the documents: the demo, with every page of the dashboard in a Chromium.

Runs `vitals demo --keep --headless` to its end, then opens each page, most of them of the guarded
training. Exits with an error where there is no chromium, or where the demo fails.
"""

import argparse
import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from make_screenshot import take
from PIL import Image

IMAGES = Path(__file__).parent / "images"
README_PICTURE = IMAGES / "dashboard.png"
VERDICT_PICTURE = IMAGES / "verdict.png"
VERDICT_BOX = (64, 116, 1376, 602)
"""Crop of the run page for the README: verdict and loss."""
NUM_COLOURS = 256
WINDOW = 900
"""Height of a picture that does not show the whole page."""
VIEWS: dict[str, tuple[str, int]] = {
    "fleet": ("", 420),
    "run": ("run?run={guarded}", 0),
    "layers": ("layers?run={guarded}", WINDOW),
    "ranks": ("ranks?run={guarded}", WINDOW),
    "decisions": ("decisions?run={guarded}", 680),
    "checkpoints": ("checkpoints?run={guarded}", WINDOW),
    "incidents": ("incident?run={guarded}", 1_500),
    "compare": ("compare?runs={clean}&runs={guarded}", 1_200),
    "alerts": ("alerts?show=all", 620),
    "query": ("query?run={guarded}&table=decisions", 620),
}
"""Name of a picture, to the page's address and the picture's height; 0 is the whole page."""


def main() -> int:
    """Run the demo, take the pictures, stop the demo; return the exit code."""
    parser = argparse.ArgumentParser(prog="make screenshot ARGS=...", description=__doc__)
    parser.add_argument("--dir", type=Path, help="folder of the demo; else a temporary one")
    home = parser.parse_args().dir or Path(tempfile.mkdtemp(prefix="vitals-screenshot-"))
    if shutil.which("chromium") is None:
        sys.stderr.write("error: no chromium here\nhint: on Debian: apt-get install chromium\n")
        return 2
    vitals = [sys.executable, "-m", "trainvitals"]
    with subprocess.Popen(
        [*vitals, "demo", "--keep", "--headless", "--dir", str(home)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as demo:
        try:
            assert demo.stdout is not None
            address = ready(iter(demo.stdout.readline, ""))
            if address:
                listed = subprocess.check_output([*vitals, "runs", home / "runs", "--format=json"])
                pictures(address, {run["name"]: run["run_id"] for run in json.loads(listed)})
        finally:
            demo.send_signal(signal.SIGINT)
            demo.wait(timeout=60)
    if not address:
        sys.stderr.write("error: the demo ended before its dashboard could be pictured\n")
    return 0 if address else 1


def ready(lines: Iterator[str]) -> str:
    """Pass the demo's output on; return the dashboard's address once the demo is through, or ""."""
    for line in lines:
        sys.stderr.write(line)
        match = re.search(r"^open: (http://\S+)", line)
        if match:
            return match[1]
    return ""


def pictures(address: str, run_ids: Mapping[str, str]) -> None:
    """Write a picture of every page, and a dark one of a run's."""
    folder = IMAGES / "dashboard"
    folder.mkdir(parents=True, exist_ok=True)
    base, token = address.split("/?", 1)
    for name, (page, height) in VIEWS.items():
        path = page.format(**run_ids)
        whole = f"{base}/{path}{'&' if '?' in path else '?'}{token}"
        for theme in ("light", "dark") if name == "run" else ("light",):
            output = folder / (f"{name}.png" if theme == "light" else f"{name}-{theme}.png")
            if output.name == "run.png":
                output = README_PICTURE
            take(whole, output, height=height or WINDOW, theme=theme, full_page=not height)
            smaller(output)
    with Image.open(README_PICTURE) as whole_page:
        whole_page.crop(VERDICT_BOX).save(VERDICT_PICTURE, optimize=True)
    sys.stdout.write(f"{folder}\n")


def smaller(picture: Path) -> None:
    """Keep of a picture the colours that it needs: pages have few, and a repository keeps all."""
    with Image.open(picture) as full:
        # Rare colours of marks stay; k-means then brings those of large areas to what they are.
        few = full.convert("RGB").quantize(NUM_COLOURS, Image.Quantize.MAXCOVERAGE, kmeans=2)
        few.save(picture, optimize=True)


if __name__ == "__main__":
    sys.exit(main())
