"""Runs a measurement on two real ranks of torchrun, and reads what rank 0 wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch.distributed as dist

TRIES = 3
"""torch 2.13's gloo aborts a rank at exit now and then on a busy machine, watched or not."""


def run_on_two_ranks(module: str, *, millions: int, rounds: int) -> Any:
    """Return what ``run_on_this_rank`` of the module measured.

    Args:
        module: one that calls it as a program.
        millions: parameters of the model, in millions.
        rounds: times of each arm.
    """
    with TemporaryDirectory() as folder:
        out = Path(folder) / "measured.json"
        for _ in range(TRIES):
            done = subprocess.run(
                [
                    *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                    *("--nproc-per-node", "2", "-m", module, str(millions), str(rounds), str(out)),
                ],
                env={**os.environ, "TMPDIR": folder},
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
            if out.exists():
                return json.loads(out.read_text())
    raise RuntimeError(f"the ranks left nothing:\n{done.stderr[-2000:]}")


def run_on_this_rank(measure: Callable[[int, int], Any]) -> None:
    """Measure on one of torchrun's ranks; rank 0 writes the result."""
    millions, rounds, out = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    measured = measure(millions, rounds)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(measured))
    dist.barrier()
    dist.destroy_process_group()
