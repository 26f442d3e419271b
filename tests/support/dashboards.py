"""A dashboard in a process of its own, and what a browser does with it."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

CHART = "figure canvas"
TABLE = "[data-testid=stDataFrame] canvas"


def at(address: str, path: str) -> str:
    """Return the address of a page, with the token that lets in."""
    base, _, token = address.partition("/?token=")
    return f"{base}/{path}{'&' if '?' in path else '?'}token={token}"


def by_localhost(address: str) -> str:
    """Return the address by the name that programs know too, not browsers alone."""
    return re.sub(r"//[0-9a-f]+\.localhost", "//localhost", address)


@contextmanager
def dashboard(
    folder: Path, tmp_path: Path, *options: str, errors: int = subprocess.DEVNULL
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run ``vitals dashboard FOLDER``; gives the process and the address that it printed."""
    environ = {**os.environ, "PYTHONUNBUFFERED": "1", "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, "-m", "trainvitals", "dashboard", str(folder), *options],
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        env=environ,
    )
    assert process.stdout is not None
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(30)
        process.stdout.close()


class Started:
    """A dashboard with control over a folder with one run."""

    def __init__(self, address: str, terminal: Path) -> None:
        self.address, self._terminal = address, terminal
        self.base, _, self.token = address.partition("/?token=")
        self.host = urlsplit(address).hostname or ""

    def codes(self) -> list[str]:
        """Return the codes that the terminal has shown."""
        return re.findall(r"Control code: (\S+)", self._terminal.read_text())


def get_control(page: Any, started: Started, *, wrong: int = 0) -> None:
    """Ask for a code, give some wrong ones, and then the right one."""
    shown_before = len(started.codes())
    page.get_by_role("button", name="Get control").click()
    page.get_by_role("button", name="Show a code").click()
    page.get_by_label("Code shown").wait_for()
    for number in range(wrong):
        page.get_by_label("Code shown").fill(f"WRONG{number}")
        page.get_by_role("button", name="Enter").click()
        page.get_by_text("Wrong code").wait_for()
    while len(started.codes()) == shown_before:  # the launcher passes it on within half a second
        page.wait_for_timeout(100)
    page.get_by_label("Code shown").fill(started.codes()[-1])
    page.get_by_role("button", name="Enter").click()
