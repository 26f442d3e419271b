"""Starts the node's agent as a child of its first rank: a fresh process, never a fork."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from trainvitals.io.rundir import RunDir

_NEEDED = ("vitals_agent", "psutil", "prometheus_client", "httpx")


def missing_packages() -> list[str]:
    """Return the packages without which there is no agent, only the journal."""
    return [name for name in _NEEDED if importlib.util.find_spec(name) is None]


def start_agent(run_dir: RunDir, base: Path, node: str, environ: Mapping[str, str]) -> int:
    """Start the agent for this run and node and return its pid.

    It is told where the ranks' journals are and what the node is called, and never finds another
    answer than they did. It gets a session of its own, so that a Ctrl-C meant for the training
    leaves it to drain; it ends by itself once the ranks are gone, and at once where another agent
    serves the folder. Its output goes to ``agent.log`` in its folder: one file for all nodes would
    be torn, as no network file system appends for two machines.
    """
    log = os.open(
        run_dir.agent_dir(node) / "agent.log",
        os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC,
        0o600,
    )
    try:
        return os.posix_spawn(
            sys.executable,
            [
                *(sys.executable, "-m", "vitals_agent"),
                *("--dir", str(run_dir.path.parent), "--run", run_dir.run_id, "--child"),
            ],
            {**environ, "VITALS_NODE": node, "VITALS_SHM": str(base.parent)},
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, log, 1),
                (os.POSIX_SPAWN_DUP2, log, 2),
            ],
            setsid=True,
        )
    finally:
        os.close(log)
