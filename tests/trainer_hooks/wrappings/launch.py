"""Starts ranks that meet over a file, which is cheaper than torchrun, and reads what they found."""

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp

from tests.trainer_hooks.spawned import start_ranks

PATIENCE_SECONDS = 240


def launch(main: Callable[..., None], world: int, folder: Path) -> list[dict[str, Any]]:
    """Run ``main(rank, world, folder)`` on every rank; return the ranks' ``RANK.json``."""
    before = dict(os.environ)
    try:
        for attempt in range(3):
            here = folder / str(attempt)
            (here / "shm").mkdir(parents=True)
            os.environ |= {
                "VITALS_DIR": str(here / "runs"),
                "VITALS_SHM": str(here / "shm"),
                "VITALS_AGENT": "off",
                "OMP_NUM_THREADS": "1",
            }
            try:
                _join(start_ranks(main, world, str(here), ranks=world))
                return [json.loads((here / f"{rank}.json").read_text()) for rank in range(world)]
            except mp.ProcessExitedException as error:
                # gloo aborts a rank now and then on a busy machine, watched or not.
                if error.signal_name != "SIGABRT" or attempt == 2:
                    raise
            finally:
                shutil.rmtree(here / "shm", ignore_errors=True)
    finally:
        os.environ.clear()
        os.environ.update(before)
    raise AssertionError("unreachable")


def _join(context: Any) -> None:
    """Wait for the ranks; those that hang are ended, and the hang is an error."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not context.join(timeout=5):
        if time.monotonic() > deadline:
            for process in context.processes:
                process.kill()
                process.join()
            raise TimeoutError(f"the ranks still ran after {PATIENCE_SECONDS} s")
