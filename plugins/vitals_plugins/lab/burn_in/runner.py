"""Runs the self-test of ``vitals doctor --burn-in`` in a separate process with a timeout."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec

import msgspec
import typer

from trainvitals.cli.doctor import Check
from trainvitals.errors import VitalsError
from trainvitals.io.discovery import find_journals
from trainvitals.io.heartbeat import read_heartbeat
from trainvitals.io.private import private_bases

START_SECONDS = 60.0
"""Time to load torch and find the devices; the requested time follows."""
GRACE_SECONDS = 10.0
_FRESH_NS = 10_000_000_000
_PROGRAM = (sys.executable, "-m", "vitals_plugins.lab.burn_in.program")


def running_here(environ: Mapping[str, str]) -> list[str]:
    """Return the ids of this user's runs with ranks alive on this node, before a burn-in."""
    runs = set()
    base = next(private_bases(environ, []), None)
    for journal in find_journals(base) if base else []:
        try:
            heartbeat = read_heartbeat(journal.directory)
        except (VitalsError, OSError):
            continue  # no heartbeat that can be read: an old journal, or it is closed
        if abs(time.monotonic_ns() - heartbeat.monotonic_ns) < _FRESH_NS:
            runs.add(journal.run_id)
    return sorted(runs)


def burn_in(
    seconds: int, environ: Mapping[str, str], *, program: Sequence[str] = _PROGRAM
) -> tuple[list[Check], bool]:
    """Test every device of this node; return a check for each, and whether Ctrl-C ended it.

    Args:
        seconds: counted from when torch is loaded and the devices are found.
        environ: environment of the program.
        program: gets the seconds as its argument, and prints lines of checks as JSON.

    Raises:
        ModuleNotFoundError: torch is not installed.
    """
    if find_spec("torch") is None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
    typer.echo(f"Trying this node for {seconds} s; Ctrl-C shows what was found so far.", err=True)
    environ = {**environ, "OMP_NUM_THREADS": "1"}  # a thread for each device is started anyway
    if sys.platform == "linux":
        environ["GLOO_SOCKET_IFNAME"] = "lo"  # a suspected node's own name may not resolve
    process = subprocess.Popen(
        [*program, str(seconds)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env=environ,
        start_new_session=True,  # Ctrl-C reaches only this process, which then ends the child
    )
    assert process.stdout is not None
    checks: list[Check] = []
    is_overdue, is_interrupted = threading.Event(), False

    def end() -> None:
        is_overdue.set()
        process.kill()

    timer = threading.Timer(START_SECONDS, end)
    timer.start()
    try:
        for line in process.stdout:
            if not checks:
                timer.cancel()
                timer = threading.Timer(seconds + GRACE_SECONDS, end)
                timer.start()
            if line.endswith(b"\n"):  # the last one may be cut
                checks = msgspec.json.decode(line, type=list[Check])
        with suppress(subprocess.TimeoutExpired):
            process.wait(1)  # its output ends shortly before it does
    except KeyboardInterrupt:
        is_interrupted = True
    timer.cancel()
    process.kill()
    with suppress(subprocess.TimeoutExpired):  # a process that waits for a broken device stays
        process.wait(1)
    process.stdout.close()
    if is_interrupted:
        text = "stopped by Ctrl-C; above is what was tried until then"
        checks.append(Check(name="burn-in", status="info", text=text))
    elif is_overdue.is_set() or process.returncode:
        if is_overdue.is_set():
            text = "no answer in time: a device hangs, or this machine is too busy"
        elif process.returncode < 0:
            text = f"the self-test was ended by {signal.Signals(-process.returncode).name}"
        else:
            text = f"the self-test ended early with exit code {process.returncode}"
        hint = "see dmesg (did memory run out?), and try again while nothing else runs here"
        checks.append(Check(name="burn-in", status="fail", text=text, hint=hint))
    return checks, is_interrupted
