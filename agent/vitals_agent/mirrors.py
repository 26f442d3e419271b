"""Starts `vitals mirror` for a run whose rank 0 is on this node, independent of its target.

It is a separate process in its own session, so that a tracker cannot delay the agent, and it
continues when the agent ends. If two serve one run, the later one exits by itself.
"""

import logging
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from trainvitals.io.private import open_own
from trainvitals.records import Note
from vitals_agent.run import ServedRun

_LOG = logging.getLogger("vitals_agent")
MAX_LOG_BYTES = 8 << 20
"""Limit of a mirror's log: it is on the disk of the run directory, which the rows need."""


class MirrorStarter:
    """Starts one process for each run, once.

    Args:
        targets: as in `vitals mirror --to`; if empty, nothing is started.
        source: further arguments, if the run is not read from its directory.
    """

    def __init__(self, targets: Sequence[str], source: Sequence[str] = ()) -> None:
        self._to = [word for target in targets for word in ("--to", target)]
        self._source = list(source)
        self._pids: dict[str, int | None] = {}
        """Pid by run; None after it has ended."""

    def start_if_due(self, run: ServedRun) -> None:
        """Start the run's mirror if rank 0 is on the agent's node; report a mirror that failed."""
        if not self._to:
            return
        if run.run_id not in self._pids:
            if any(tail.identity.rank == 0 for tail in run.tails.values()):
                self._pids[run.run_id] = None  # one attempt is enough if it cannot be started
                self._pids[run.run_id] = self._start_mirror(run)
            return
        pid = self._pids[run.run_id]
        if pid is None:
            return
        _limit_log_size(run.state_dir.path / "mirror.log")
        ended, status = os.waitpid(pid, os.WNOHANG)
        if not ended:
            return
        self._pids[run.run_id] = None
        code = os.waitstatus_to_exitcode(status)
        if code:
            text = (
                f"the run's mirror ended with exit code {code}; "
                f"{run.state_dir.path / 'mirror.log'} says why. The training is not affected"
            )
            run.node_source.write_event(Note(code="mirror_ended", text=text, severity="warning"))

    def _start_mirror(self, run: ServedRun) -> int:
        """Start ``vitals mirror`` as a process that outlives the agent; return its pid."""
        name = [run.run_id, *self._source] if self._source else [str(run.run_dir.path)]
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        log = open_own(run.state_dir.path / "mirror.log", flags, mode=0o600)
        try:
            pid = os.posix_spawn(
                sys.executable,
                [sys.executable, "-m", "trainvitals", "mirror", *name, *self._to],
                os.environ,
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, log, 1),
                    (os.POSIX_SPAWN_DUP2, log, 2),
                ],
                setsid=True,
            )
        finally:
            os.close(log)
        _LOG.info("mirror started run=%s pid=%d", run.run_id, pid)
        return pid


def _limit_log_size(log: Path) -> None:
    """Empty the log of a mirror that the agent started, if it is too large."""
    with suppress(OSError):
        if log.stat().st_size > MAX_LOG_BYTES:
            # The mirror appends to it, so it continues at the start of the file.
            os.truncate(log, 0)
            _LOG.warning("mirror_log_emptied path=%s bytes=%d", log, MAX_LOG_BYTES)
