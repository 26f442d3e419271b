"""Plugin of pytest: prints CPU time per folder and of 60 files and 60 tests that take most.

`make test ARGS="-p tests.support.cpu_table"`.

The time of processes is that of those a test waited for.
"""

import os
from collections import defaultdict
from collections.abc import Generator

import pytest

CPU = "cpu seconds"
_began: dict[str, tuple[float, float]] = {}
_by_folder: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
_by_file: dict[str, float] = defaultdict(float)
_by_test: dict[str, float] = defaultdict(float)


def _cpu_seconds() -> tuple[float, float]:
    times = os.times()
    return times.user + times.system, times.children_user + times.children_system


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Note the time before a test."""
    _began[item.nodeid] = _cpu_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add what a test took to its last report, which a worker sends to the main process."""
    report = yield
    if call.when == "teardown":
        own, processes = _cpu_seconds()
        own_before, processes_before = _began.pop(item.nodeid)
        report.user_properties.append((CPU, (own - own_before, processes - processes_before)))
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add up the reports of a folder."""
    for name, value in report.user_properties:
        if name == CPU and report.when == "teardown" and "PYTEST_XDIST_WORKER" not in os.environ:
            row = _by_folder["/".join(report.nodeid.split("/")[:2])]
            row[0] += 1
            row[1] += value[0]
            row[2] += value[1]
            _by_file[report.nodeid.partition("::")[0]] += sum(value)
            _by_test[report.nodeid] += sum(value)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table."""
    write = terminalreporter.write_line
    write("| folder | tests | CPU seconds | of their processes |")
    write("|---|---:|---:|---:|")
    total = [sum(row[i] for row in _by_folder.values()) for i in range(3)]
    for name, (num, own, processes) in [*sorted(_by_folder.items()), ("all", total)]:
        write(f"| {name} | {num:.0f} | {own:.0f} | {processes:.0f} |")
    for seconds_of in (_by_file, _by_test):
        write("")
        for name in sorted(seconds_of, key=seconds_of.__getitem__, reverse=True)[:60]:
            write(f"{seconds_of[name]:6.1f} {name}")
