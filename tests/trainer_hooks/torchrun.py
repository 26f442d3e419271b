"""Starts real torchrun ranks on the demo's training and reads what they left, without a server."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.forked import TRAINING
from trainvitals.testing.faults import FaultPlan
from vitals_collector.queries.open import open_reader

GLOO_ABORT = "terminate called without an active exception"
"""What torch 2.13 says now and then on a busy machine when a gloo rank exits, watched or not."""


@dataclass(frozen=True)
class Trained:
    """One finished training."""

    exit_code: int
    output: str
    result: dict
    runs: Path


def train(
    folder: Path,
    *,
    ranks: int = 2,
    steps: int = 60,
    mode: str = "guard",
    faults: FaultPlan | None = None,
    module: str = "tests.trainer_hooks.short_demo",
    environ: dict[str, str] | None = None,
    timeout: float = 240,
) -> Trained:
    """Train to the end; the agent is local rank 0's child, as for a user without any server."""
    for _ in range(3):
        trained = _train(folder, ranks, steps, mode, faults, module, environ, timeout)
        if trained.exit_code == 0 or GLOO_ABORT not in trained.output:
            break
        shutil.rmtree(folder / "runs", ignore_errors=True)
        shutil.rmtree(folder / "shm", ignore_errors=True)
    return trained


def _train(folder, ranks, steps, mode, faults, module, environ, timeout) -> Trained:
    result = folder / "result.json"
    shared = folder / "shm"
    shared.mkdir(exist_ok=True)
    done = TRAINING.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(ranks), "-m", module),
            *("--steps", str(steps), "--mode", mode, "--result", str(result)),
        ],
        env={
            **os.environ,
            "VITALS_DIR": str(folder / "runs"),
            "VITALS_SHM": str(shared),
            "VITALS_DEMO_FAULTS": (faults or FaultPlan()).to_json(),
            "OMP_NUM_THREADS": "1",
            **(environ or {}),
        },
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    found = json.loads(result.read_text()) if result.exists() else {}
    wait_for_agents(folder / "runs")
    return Trained(done.returncode, done.stdout + done.stderr, found, folder / "runs")


def wait_for_agents(runs: Path) -> None:
    """Wait until the agents of these runs have taken every row in, and ended.

    An agent removes a journal once all of it is safe in the spool, and lets go of its lock at the
    end; the journals lie in ``shm`` beside the folder of runs.
    """
    deadline = time.monotonic() + 60
    while list((runs.parent / "shm").rglob("*.seg")) and time.monotonic() < deadline:
        time.sleep(0.05)
    for lock in runs.glob("*/agents/*/agent.lock"):
        with lock.open("rb+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)


@contextmanager
def reader_of(trained: Trained):
    """Open the run directory as `vitals show DIR` does."""
    with open_reader(trained.runs) as opened:
        yield opened.reader


def run_id_of(trained: Trained) -> str:
    """Return the one run's id."""
    (folder,) = trained.runs.glob("[0-9A-Z]*")
    return folder.name
