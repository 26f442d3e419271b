"""Plugin of pytest: appends the outcome and the seconds of each test to the file in RECORD."""

import json
import os
from pathlib import Path

import pytest

_seconds: dict[str, float] = {}
_failed: set[str] = set()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note one phase of a test; workers send theirs to the main process."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    name = report.nodeid
    _seconds[name] = _seconds.get(name, 0.0) + report.duration
    if not report.passed:
        _failed.add(name)
    if report.when == "teardown":
        line = json.dumps([name, name not in _failed, round(_seconds.pop(name), 4)])
        with Path(os.environ["RECORD"]).open("a") as file:
            file.write(line + "\n")
