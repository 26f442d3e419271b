"""Takes the README's pictures: the demo, with the dashboard open in a headless Chromium.

Runs `vitals demo --keep --headless` to its end, then opens the overview and the page of the guarded
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
from collections.abc import Iterator
from pathlib import Path

from make_screenshot import take

IMAGES = Path(__file__).parent / "images"


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
                run_id = next(r["run_id"] for r in json.loads(listed) if r["name"] == "guarded")
                pictures(address, run_id)
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
        found = re.search(r"dashboard: (http://\S+)\s+\(Ctrl-C", line)
        if found:
            return found[1]
    return ""


def pictures(address: str, run_id: str) -> None:
    """Write the pictures of the overview and of one run's page."""
    IMAGES.mkdir(exist_ok=True)
    page, token = address.split("/?", 1)
    take(address, IMAGES / "overview.png", height=480)
    take(f"{page}/run?run={run_id}&{token}", IMAGES / "dashboard.png", full_page=True)
    sys.stdout.write(f"{IMAGES}\n")


if __name__ == "__main__":
    sys.exit(main())
