"""Starts the node's agent as a child of its first rank, and restarts it if it was killed.

The agent is a new process, never a fork, and nothing waits for it: between two steps, at most once
per second, the rank checks whether it is still running.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import signal
import sys
from collections.abc import Mapping

from trainer_hooks.exchange.emit import Emitter
from trainer_hooks.failopen import FaultCounter
from trainer_hooks.run_paths import RunPaths
from trainvitals.io.discovery import AWAY_FILE, NOTICE_FILE
from trainvitals.io.private import open_own
from trainvitals.io.rundir import is_full
from trainvitals.io.setting_paths import with_absolute_paths
from trainvitals.printable import printable
from trainvitals.records import Note

_LOG = logging.getLogger("trainvitals")
_NEEDED = ("vitals_agent", "psutil", "prometheus_client", "httpx")

LOOK_EVERY_NS = 1_000_000_000
"""Time between two checks of the child; each is one system call."""
WAITS_NS = (0, 10_000_000_000, 60_000_000_000, 600_000_000_000)
"""Delay before each consecutive start; the last one repeats. So there are at most three starts in
ten minutes: if memory is short, another process does not help."""
LIVED_NS = 600_000_000_000
"""After an agent ran this long, earlier failures no longer count."""
_EXITS_ON_REQUEST = (0, -signal.SIGTERM, -signal.SIGINT)
"""Exit codes of a deliberate stop; a signal only if it came before the agent's handler."""


def missing_packages() -> list[str]:
    """Return the packages missing to start the agent here; without it there is only the journal."""
    return [name for name in _NEEDED if importlib.util.find_spec(name) is None]


class AgentStarter:
    """Starts the agent of this run and node, each time it is called.

    The agent receives the journal directory and the name of the node, so that it cannot resolve
    them differently from the ranks. It has its own session, so Ctrl-C in the terminal does not
    reach it and it can drain. It exits by itself when the ranks have ended, or if another agent
    serves the directory. Output goes to ``agent.log`` in its state directory, one per node: network
    file systems do not append atomically for two machines. The file stays open, so a hanging disk
    cannot block a later start.
    """

    def __init__(self, run_paths: RunPaths, environ: Mapping[str, str]) -> None:
        assert run_paths.folder is not None, "without journals there is nothing to ship"
        variables = {
            "VITALS_NODE": run_paths.node,
            "VITALS_SHM": str(run_paths.folder.parent.parent),
        }
        self._away, self._notice = run_paths.folder / AWAY_FILE, run_paths.folder / NOTICE_FILE
        # The training may have changed its working directory before a restart.
        self._environ = {**with_absolute_paths(environ), **variables}
        self._run_id, self.directory = run_paths.run_dir.run_id, str(run_paths.run_dir.path.parent)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        try:
            path = run_paths.run_dir.agent_dir(run_paths.node) / "agent.log"
            self._log = open_own(path, flags, mode=0o600)
        except OSError as error:
            if not is_full(error):
                raise
            # The agent continues in memory and reports that in the run; its log is discarded.
            self._log = os.open(os.devnull, flags | os.O_CLOEXEC)

    def __call__(self) -> int:
        """Start the agent, and return its pid."""
        return os.posix_spawn(
            sys.executable,
            [
                *(sys.executable, "-m", "vitals_agent"),
                *("--dir", self.directory, "--run", self._run_id, "--child"),
            ],
            self._environ,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, self._log, 1),
                (os.POSIX_SPAWN_DUP2, self._log, 2),
            ],
            setsid=True,
        )

    def down_collector(self) -> str:
        """Return the collector that the rank's agent reports as down; empty if it responds.

        The file is in shared memory, so no disk can block.
        """
        return self._away.read_text() if self._away.exists() else ""

    def notice(self) -> str:
        """Return the agent's notice to this rank, such as a full disk; empty if all is well."""
        return self._notice.read_text() if self._notice.exists() else ""

    def close(self) -> None:
        """Start no more agents from the training process; a running one continues."""
        os.close(self._log)


def agent_restart_delay_ns(losses: int) -> int:
    """Return the nanoseconds before the next start, after this many consecutive losses."""
    return WAITS_NS[min(losses, len(WAITS_NS)) - 1]


class NodeAgent:
    """The agent that this process started, and restarts if it was killed or failed.

    Closes ``start`` at its end. All times are monotonic nanoseconds.
    """

    def __init__(
        self,
        start: AgentStarter,
        *,
        emitter: Emitter,
        faults: FaultCounter,
        now_ns: int,
    ) -> None:
        self._start, self._emitter, self._faults = start, emitter, faults
        self._owner = os.getpid()
        self._losses, self._why, self._notice = 0, "", ""
        self._started_ns = now_ns
        self.next_look_ns = now_ns
        """Monotonic time of the next check."""
        self._ended_on_request = False
        self.pid: int | None = start()
        """None while no agent runs."""

    def restart_if_ended(self, now_ns: int, *, step: int, attempt: int) -> None:
        """Restart the agent if it has ended and its delay has passed. Fails open, never waits."""
        if now_ns < self.next_look_ns:
            return
        self.next_look_ns = now_ns + LOOK_EVERY_NS
        with self._faults.fail_open("agent.look"):
            self._restart_if_ended(now_ns, step, attempt)

    def close(self, now_ns: int, *, step: int, attempt: int) -> str:
        """Check the rank's agent a last time: without it, last rows would stay in shared memory.

        Returns:
            The collector that is down; empty if it responds.
        """
        with self._faults.fail_open("agent.look"):
            self._restart_if_ended(now_ns, step, attempt, last=True)
            self._start.close()
            return self._start.down_collector()
        return ""

    def _restart_if_ended(
        self, now_ns: int, step: int, attempt: int, *, last: bool = False
    ) -> None:
        """Restart the agent from the training process if it ended and its delay has passed."""
        # A forked child is not the agent's parent, and must not start another one.
        if os.getpid() != self._owner:
            return
        notice = self._start.notice()
        if notice and notice != self._notice:
            self._notice = notice
            _LOG.warning("vitals: %s", printable(notice))
        if self._ended_on_request:
            return
        if self.pid is not None:
            has_ended, exit_code = _poll_agent_exit(self.pid)
            if not has_ended:
                return
            why = f"the node's agent (pid {self.pid}) {_describe_exit(exit_code)}"
            self.pid = None
            self._ended_on_request = exit_code in _EXITS_ON_REQUEST
            if self._ended_on_request:
                return
            self._record_agent_loss(why, now_ns, step, attempt)
            if now_ns < self.next_look_ns and not last:
                return
        self._restart_agent(now_ns, step, attempt)

    def _record_agent_loss(self, why: str, now_ns: int, step: int, attempt: int) -> None:
        """Record in the rank that the node's agent was lost, and schedule its next start."""
        self._losses = 1 if now_ns - self._started_ns >= LIVED_NS else self._losses + 1
        self._why = why
        self.next_look_ns = now_ns + agent_restart_delay_ns(self._losses)
        if self._losses == len(WAITS_NS):
            minutes = WAITS_NS[-1] // 60_000_000_000
            text = (
                f"{why}, the {self._losses}th in a row: unless another agent serves this folder, "
                "this node's metrics are neither stored nor shipped, and old rows are overwritten. "
                f"Next attempt in {minutes} minutes. Its agent.log may show the cause; `vitals "
                f"agent --dir {self._start.directory}` starts one manually"
            )
            self._emit_agent_note("agent_gone", text, step, attempt)

    def _restart_agent(self, now_ns: int, step: int, attempt: int) -> None:
        """Start the agent again from the training process after it was lost, and note it."""
        self._started_ns = now_ns
        try:
            self.pid = self._start()
        except OSError as error:
            self._faults.count("agent.start", error)
            self._record_agent_loss(
                f"the node's agent cannot be started: {error}", now_ns, step, attempt
            )
            return
        self.next_look_ns = now_ns + LOOK_EVERY_NS
        text = f"{self._why}; restarted as pid {self.pid}"
        self._emit_agent_note("agent_restarted", text, step, attempt)

    def _emit_agent_note(self, code: str, text: str, step: int, attempt: int) -> None:
        """Write a rank's note to the run; log it unless the agent was lost many times in a row."""
        if self._losses <= len(WAITS_NS):
            _LOG.warning("vitals: %s", text)
        note = Note(code=code, text=text, severity="warning")
        self._emitter.event(note, step=step, attempt=attempt)


def _poll_agent_exit(pid: int) -> tuple[bool, int | None]:
    """Return whether the agent, this rank's child, has ended, and its exit code if known."""
    try:
        ended_pid, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:  # SIGCHLD is ignored, or other code reaps every child
        return True, None
    return ended_pid != 0, os.waitstatus_to_exitcode(status) if ended_pid else None


def _describe_exit(exit_code: int | None) -> str:
    """Return as text how the agent that a rank had started ended."""
    if exit_code is None:
        return "has ended; its exit code is unknown"
    if exit_code == -signal.SIGKILL:
        return "was killed by SIGKILL (possibly out of memory)"
    if exit_code < 0:
        return f"was killed by signal {-exit_code} ({signal.strsignal(-exit_code)})"
    return f"ended with exit code {exit_code}"
