"""Starts the programs as separate processes, in order, and stops them in reverse.

The programs run as modules of this interpreter, so nothing depends on PATH. Each has a log file; a
failed start shows its end.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Self, TypeVar

from trainvitals.errors import (
    MissingDependencyError,
    StorageError,
    TransportError,
    UsageError,
)
from trainvitals.io.client import (
    COLLECTOR_FILE,
    collector_on,
    open_collector_client,
    read_collector_file,
)
from trainvitals.io.setting_paths import with_absolute_paths

T = TypeVar("T")
_Handler = Callable[[int, FrameType | None], object] | int | None

START_SECONDS = 60.0
STOP_SECONDS = 10.0
LOOK_SECONDS = 1.0
MAX_REVIVALS = 3
COMMAND_STOP_SECONDS = 40.0
"""torchrun gives its ranks 30 seconds to end; if killed earlier, it would leave them running."""


@dataclass(slots=True)
class ChildProgram:
    """A started program."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    options: Sequence[str] = ()
    num_revivals: int = 0

    def log_tail(self, num_lines: int = 15) -> str:
        """Return the end of the log of a program that ``vitals up`` started."""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-num_lines:])

    def exit_reason(self) -> str:
        """Return one line on why it ended: its error and the fix, otherwise its last line."""
        log = self.log.read_text(errors="replace")
        error = re.search(r"^error: (.+?)(?: \[V\d+\])?$(?:\n\nhint: (.+))?", log, re.M)
        if error is None:
            return f"{self.log_tail(1) or 'it said nothing'}; its log is {self.log}"
        return "; ".join(part for part in error.groups() if part)

    @property
    def lacks_a_package(self) -> bool:
        """Return whether the program that ``vitals`` started lacks a package: do not restart it."""
        return f"[{MissingDependencyError.code}]" in self.log.read_text(errors="replace")


class ProgramStack:
    """Collector, agent and dashboard for a directory of runs. Use it as a context manager."""

    def __init__(self, home: Path, environ: Mapping[str, str]) -> None:
        self.home = home.absolute()
        self.runs = self.home / "runs"
        self.data = self.home / "collector"
        self.environ = with_absolute_paths(environ)
        self.collector_url = ""
        self.dashboard_url = ""
        self._children: list[ChildProgram] = []
        self._num_codes = 0
        self._handlers: list[tuple[signal.Signals, _Handler]] = []

    @property
    def token_file(self) -> Path:
        """Return the token file of the collector that ``vitals up`` starts."""
        return self.data / "tokens.json"

    def training_environ(self) -> dict[str, str]:
        """Return the environment for a training that ``vitals run`` or the demo starts.

        Without a collector there is no agent here: the training starts its own.
        """
        environ = {**self.environ, "VITALS_DIR": str(self.runs)}
        if self.collector_url:
            environ["VITALS_AGENT"] = "off"
            environ["VITALS_COLLECTOR_URL"] = str(self.data)
            environ["VITALS_TOKEN_FILE"] = str(self.token_file)
        return environ

    # ---------------------------------------------------------------------------- starting

    def start_collector(self) -> str:
        """Start the collector for ``vitals up``; return its URL, once it responds."""
        (self.data / COLLECTOR_FILE).unlink(missing_ok=True)
        child = self._start_child("collector", ["--data", str(self.data)])
        self.collector_url = self._poll_until_ready(
            child, lambda: _find_collector_url(self.data, child.process.pid)
        )
        return self.collector_url

    def start_agent(self) -> None:
        """Start the agent for ``vitals up``, which ships to the collector, wherever that is.

        It gets the collector's data directory, not its URL: after a restart the port may differ.
        """
        options = ["--dir", str(self.runs), "--collector", str(self.data)]
        self._start_child("agent", [*options, "--token-file", str(self.token_file)])

    def start_dashboard(self, *, port: int = 0, control: bool = False) -> str:
        """Start the dashboard for ``vitals up``; return the one-click URL that it printed."""
        options = ["--collector", str(self.data), "--token-file", str(self.token_file)]
        if control:
            options.append("--control")
        child = self._start_child("dashboard", [*options, "--port", str(port)])
        self.dashboard_url = self._poll_until_ready(child, lambda: _find_dashboard_url(child.log))
        return self.dashboard_url

    def _start_child(self, name: str, options: Sequence[str]) -> ChildProgram:
        """Start collector, agent or dashboard for ``vitals up``, with its own log."""
        log = self.home / f"{name}.log"
        child = ChildProgram(name, self._spawn(name, options, log, os.O_TRUNC), log, options)
        self._children.append(child)
        return child

    def _spawn(
        self, name: str, options: Sequence[str], log: Path, how: int
    ) -> subprocess.Popen[bytes]:
        """Start ``python -m trainvitals NAME`` with its output in the log."""
        fd = os.open(log, os.O_WRONLY | os.O_CREAT | how | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as output:  # private: the dashboard prints its secret URL
            return subprocess.Popen(
                [sys.executable, "-m", "trainvitals", name, *options],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self.environ,
                start_new_session=True,
            )

    def _poll_until_ready(self, child: ChildProgram, probe: Callable[[], T | None]) -> T:
        """Wait until a program of ``vitals up`` is ready; return the probe's first result.

        Raises:
            TransportError: the program ended, or did not respond in time.
        """
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            answer = probe()
            if answer is not None:
                return answer
            if child.process.poll() is not None:
                raise TransportError(
                    f"the {child.name} ended at once with exit code {child.process.returncode}:\n"
                    f"{child.log_tail()}",
                    hint=f"its whole log is {child.log}",
                )
            time.sleep(0.05)
        raise TransportError(
            f"the {child.name} did not answer within {START_SECONDS:.0f} seconds",
            hint=f"its log is {child.log}",
        )

    def stop_latest_program(self) -> str:
        """Stop the latest program, and return one line on why it did not respond."""
        child = self._children.pop()
        stop_process(child.process)
        return child.exit_reason()

    def find_ended_program(self) -> ChildProgram | None:
        """Return a program of ``vitals up`` that ended unexpectedly, or None."""
        return next((c for c in self._children if c.process.poll() is not None), None)

    def restart_ended_programs(self) -> Iterator[str]:
        """Restart programs that ended, at most ``MAX_REVIVALS`` times each; yield messages.

        A training must not end because another program did.
        """
        for child in [program for program in self._children if program.process.poll() is not None]:
            message = f"the {child.name} ended with exit code {child.process.returncode}"
            if child.lacks_a_package:
                self._children.remove(child)
                yield f"no {child.name}: {child.exit_reason()}"
                continue
            if child.num_revivals >= MAX_REVIVALS:
                self._children.remove(child)
                yield f"{message} again; it stays away. Its log is {child.log}"
                continue
            child.num_revivals += 1
            child.process = self._spawn(child.name, child.options, child.log, os.O_APPEND)
            yield f"{message}; it is started again"

    def control_codes(self) -> list[str]:
        """Return the control codes that the dashboard printed since the last call."""
        lines: list[str] = []
        for child in self._children:
            if child.name == "dashboard":
                lines = re.findall(r"^Control code: .+$", child.log.read_text("utf-8"), re.M)
        new, self._num_codes = lines[self._num_codes :], len(lines)
        return new

    # ---------------------------------------------------------------------------- stopping

    def stop(self) -> None:
        """Stop the programs of ``vitals up``: the agent drains before its collector stops."""
        for child in sorted(self._children, key=lambda c: _STOP_ORDER.index(c.name)):
            stop_process(child.process)
        self._children.clear()

    def __enter__(self) -> Self:
        try:
            self.runs.mkdir(parents=True, exist_ok=True)
            self.data.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(
                f"{self.home}: cannot be used: {error.strerror}",
                hint="give another folder with --dir",
            ) from error
        signals = (signal.SIGTERM, signal.SIGHUP)
        self._handlers = [(number, signal.signal(number, _raise_termination)) for number in signals]
        return self

    def __exit__(self, *error: object) -> None:
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        # A second Ctrl-C during the stop would leave programs running.
        now = [(number, signal.signal(number, signal.SIG_IGN)) for number in numbers]
        try:
            self.stop()
        finally:
            for number, handler in now + self._handlers:
                signal.signal(number, handler)


_STOP_ORDER = ("agent", "dashboard", "collector")


def stop_process(process: subprocess.Popen[bytes], seconds: float = STOP_SECONDS) -> int:
    """Terminate a program of ``vitals up``, kill it after ``seconds``; return its exit code."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
    return process.wait()


@contextmanager
def start_command(
    command: Sequence[str], environ: Mapping[str, str], log: Path
) -> Iterator[ChildProgram]:
    """Run the demo's training in the background, with its output in ``log``."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=dict(environ),
        )
    try:
        yield ChildProgram("training", process, log)
    except KeyboardInterrupt as interrupt:
        _end_command(process, interrupt)
        raise
    finally:
        stop_process(process)


def run_command(
    command: Sequence[str], environ: Mapping[str, str], look: Callable[[], object]
) -> int:
    """Run the command of ``vitals run`` in the foreground; return its exit code or 128 + signal.

    Args:
        command: the program and its arguments.
        environ: its environment.
        look: called about once per second while it runs.

    Raises:
        UsageError: the command does not exist.
        KeyboardInterrupt: at a Ctrl-C, once the command has ended.
    """
    try:
        process = subprocess.Popen(list(command), env=dict(environ))
    except OSError as error:
        raise UsageError(
            f"{command[0]!r} cannot be run: {error.strerror}",
            hint="vitals run -- torchrun --nproc-per-node 8 train.py",
        ) from error
    try:
        code = _wait_and_poll(process, look)
    except _TerminationSignal as ended:
        code = _end_command(process, ended)
    except KeyboardInterrupt as interrupt:
        _end_command(process, interrupt)
        raise
    return code if code >= 0 else 128 - code


def _wait_and_poll(process: subprocess.Popen[bytes], look: Callable[[], object]) -> int:
    """Wait for the command of ``vitals run``, and call ``look`` about once per second."""
    while True:
        try:
            return process.wait(LOOK_SECONDS)
        except subprocess.TimeoutExpired:
            look()


class _TerminationSignal(KeyboardInterrupt):
    """SIGTERM or SIGHUP, which reached only this process."""


def _raise_termination(number: int, frame: FrameType | None) -> None:
    """Handle SIGTERM or SIGHUP while `vitals run` waits: raise an exception."""
    raise _TerminationSignal


def _end_command(process: subprocess.Popen[bytes], interrupt: KeyboardInterrupt) -> int:
    """Let the command of ``vitals run`` end, kill it if it does not, and return its exit code.

    A Ctrl-C already reached it from the terminal. Another signal too early keeps torchrun from
    waiting for its ranks.
    """
    try:
        if not isinstance(interrupt, _TerminationSignal):
            return process.wait(STOP_SECONDS)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        pass  # it does not react, or the user does not wait
    return stop_process(process, COMMAND_STOP_SECONDS)


def _find_collector_url(data: Path, pid: int) -> str | None:
    """Return the URL of the collector that ``vitals up`` started, once it responds."""
    file, collector = read_collector_file(data), collector_on(data)
    if file is None or file.pid != pid or collector is None:
        return None
    with open_collector_client(collector, "", timeout=2.0) as client:
        return file.url if client.answers() else None


def _find_dashboard_url(log: Path) -> str | None:
    """Return the one-click URL that the dashboard of ``vitals up`` has logged; None before."""
    match = re.search(r"http://\S+[?&]token=\S+", log.read_text(errors="replace"))
    return match.group(0) if match else None


def environ_of_this_process() -> dict[str, str]:
    """Return the environment for programs that ``vitals up`` starts; their logs are unbuffered."""
    return {**os.environ, "PYTHONUNBUFFERED": "1"}
