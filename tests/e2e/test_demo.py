"""`vitals demo` is the promise of the README: its exit code says whether it was kept."""

import io
import os
import pty
import re
import runpy
import shlex
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace
from rich.console import Console

from trainvitals.cli import demo
from trainvitals.cli.demo import (
    Expected,
    build_demo_faults,
    find_false_alarms,
    has_visitors,
    list_expected_decisions,
    match_expected_decisions,
)
from trainvitals.records import Decision


@pytest.mark.slow
@pytest.mark.dist
def test_the_demo_finds_every_fault_and_nothing_else(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "trainvitals", "demo", "--headless", "--dir", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert 0 == done.returncode, done.stdout + done.stderr
    for want in list_expected_decisions():
        assert want.rule in done.stdout
    assert "missing" not in done.stdout


def decision(**fields):
    given = {"ledger_seq": 1, "decided_at_step": 0, "attempt": 1, "reason": "", "cause": ""}
    return Decision(**(given | fields))


def test_a_decision_of_another_rank_or_step_answers_nothing():
    want = Expected("NaN gradient", "skip_step", "nonfinite", 1, 150)
    right = decision(action="skip_step", rule="nonfinite", rank=1, step=150)
    other_rank = decision(action="skip_step", rule="nonfinite", rank=0, step=150)
    other_step = decision(action="skip_step", rule="nonfinite", rank=1, step=151)
    assert [right] == [
        m.decision for m in match_expected_decisions([want], [other_rank, other_step, right])
    ]
    assert [None] == [
        m.decision for m in match_expected_decisions([want], [other_rank, other_step])
    ]
    matched = match_expected_decisions([want], [right, other_step])
    assert [other_step] == find_false_alarms(matched, [right, other_step])


def test_one_decision_answers_one_fault_only():
    want = Expected("NaN gradient", "skip_step", "nonfinite", 1, 150)
    right = decision(action="skip_step", rule="nonfinite", rank=1, step=150)
    assert [right, None] == [m.decision for m in match_expected_decisions([want, want], [right])]


def test_the_plan_injects_what_is_expected():
    kinds = {fault.kind for fault in build_demo_faults().faults}
    assert {"nan_gradient", "shuffled_parameters", "nan_parameters"} == kinds
    assert 3 == len({want.fault for want in list_expected_decisions()})


# ---------------------------------------------------------------------------- on a terminal


class Stack:
    """A dashboard that runs."""

    dashboard_url = "http://127.0.0.1:54321/?token=secret"

    def find_ended_program(self):
        return None


def served(monkeypatch, visits, *, idle_seconds):
    """Serve as long as the demo would; one look a minute. Return what was said, and the minutes."""
    minutes = iter(range(1000))
    output, now = io.StringIO(), 0

    def sleep(seconds):
        nonlocal now
        now = next(minutes)
        if visits.get(now) == "ctrl-c":
            raise KeyboardInterrupt

    clock = SimpleNamespace(sleep=sleep, monotonic=lambda: 60.0 * now)
    monkeypatch.setattr(demo, "time", clock)
    monkeypatch.setattr(demo, "has_visitors", lambda port: visits.get(now) == port)
    demo._serve(Stack(), Console(file=output, width=200), idle_seconds=idle_seconds)
    return output.getvalue().split("\n"), now


def test_the_dashboard_is_served_until_nobody_has_looked_for_ten_minutes(monkeypatch):
    lines, minutes = served(monkeypatch, {3: 54321, 7: 54321}, idle_seconds=demo.IDLE_SECONDS)
    assert 17 == minutes
    assert [
        "",
        "open: http://127.0.0.1:54321/?token=secret",
        "The dashboard is served until Ctrl-C, or 10 minutes without a browser.",
        "No browser for a while: the dashboard stops.",
        "",
    ] == lines


def test_the_script_of_the_pictures_finds_the_dashboard_in_what_the_demo_prints(monkeypatch):
    docs = Path(__file__).parents[2] / "docs"
    monkeypatch.syspath_prepend(docs)
    script = runpy.run_path(str(docs / "screenshot.py"))
    lines, _ = served(monkeypatch, {500: "ctrl-c"}, idle_seconds=None)
    assert "http://127.0.0.1:54321/?token=secret" == script["ready"](iter(lines))
    assert "" == script["ready"](iter(lines[:1])), "the demo ended before"


def test_ctrl_c_is_an_end_and_no_error(monkeypatch):
    lines, minutes = served(monkeypatch, {500: "ctrl-c"}, idle_seconds=None)
    assert 500 == minutes
    assert "The dashboard is served until Ctrl-C." in lines
    assert ["", "The dashboard stops.", ""] == lines[-3:]


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="tells nobody who is connected")
def test_an_open_page_is_a_visitor_until_it_is_closed():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert not has_visitors(port)
        with socket.create_connection(("127.0.0.1", port)):
            assert has_visitors(port)


def at_a_terminal(*command: str) -> tuple[int, str]:
    """Run the command where stdout and stderr are a terminal; Ctrl-C once it serves."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvp(command[0], command)
    shown, pressed = "", False
    with os.fdopen(terminal, "rb", buffering=0) as screen, suppress(OSError):  # EIO is its end
        while text := screen.read(65536):
            shown += text.decode(errors="replace")
            if not pressed and "is served until" in shown:
                pressed = True
                os.write(screen.fileno(), b"\x03")
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), shown


SERVES = """
from rich.console import Console
from tests.e2e.test_demo import Stack
from trainvitals.cli import demo
with demo.alone_in_foreground():
    demo._serve(Stack(), Console(), idle_seconds=None)
"""


def test_ctrl_c_is_no_error_of_make_either(tmp_path):
    (tmp_path / "serves.py").write_text(SERVES)
    makefile = tmp_path / "Makefile"
    makefile.write_text(
        f"demo:\n\t@{sys.executable} {tmp_path / 'serves.py'}\n\t@echo all is well\n"
    )
    path = os.pathsep.join(filter(None, sys.path))
    code, shown = at_a_terminal("env", f"PYTHONPATH={path}", "make", "-f", str(makefile))
    assert 0 == code, shown
    assert "The dashboard stops." in shown
    assert "all is well" in shown
    assert "Interrupt" not in shown


@pytest.mark.slow
@pytest.mark.dist
def test_on_a_terminal_it_serves_until_ctrl_c_and_its_next_commands_work(tmp_path):
    code, shown = at_a_terminal(
        *(sys.executable, "-m", "trainvitals", "demo", "--dir", str(tmp_path))
    )
    assert 0 == code, shown
    assert re.search(r"open: http://[0-9a-f]+\.localhost:\d+/\?token=", shown), shown
    lines = re.findall(r"^  (.+?)   # ", shown.replace("\r", ""), re.M)
    for line, command in zip(lines, ("why", "postmortem", "dashboard"), strict=True):
        assert f" {command} " in line
    for line in lines[:2]:
        done = subprocess.run(shlex.split(line), capture_output=True, text=True, timeout=120)
        assert 0 == done.returncode, done.stderr
        assert "parameters are non-finite" in done.stdout
    assert Path(shlex.split(lines[2])[-1]).is_dir()


def test_a_narrow_terminal_gets_the_ledger_without_its_reasons():
    want = Expected("NaN gradient", "skip_step", "nonfinite", 1, 150)
    made = decision(action="skip_step", rule="nonfinite", rank=1, step=150, cost_steps=1)
    made = replace(made, reason="loss is nan on rank 1")
    result = demo.DemoResult("R", 1.0)
    shown = {}
    for width in (80, 140):
        output = io.StringIO()
        pairs = [demo.Match(want, made), demo.Match(want, None)]
        demo.print_summary(
            Console(file=output, width=width), pairs, [made], result, result, [("bare", result)]
        )
        shown[width] = output.getvalue()
    for text in shown.values():
        assert 4 == text.count("NaN gradient") + text.count("none") + text.count("missing")
    assert "loss is nan on rank 1" not in shown[80]
    assert 2 == shown[140].count("loss is nan on rank 1")
