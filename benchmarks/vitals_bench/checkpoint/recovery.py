"""From NaN parameters to the next good step: back in memory, from disk, or by a restarted job."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from vitals_bench.measure import halves
from vitals_bench.rows import Row, ratio_at_most

TRIES = 3
"""torch 2.13's gloo aborts a rank at exit now and then on a busy machine, watched or not."""
_ENVIRONMENT = {
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # without it, half of the restarts on gloo hang
    "OMP_NUM_THREADS": "1",
}


def measure_recovery(*, quick: bool) -> Iterator[Row]:
    """Start two real ranks, of which one dies, and yield what they took to train again."""
    millions, rounds, deaths = (1, 4, 1) if quick else (10, 10, 3)
    with TemporaryDirectory(prefix="vitals-bench-") as folder:
        for i in range(TRIES):
            out = Path(folder) / str(i)
            out.mkdir()
            done = subprocess.run(
                [
                    *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                    *("--nproc-per-node", "2", "--max-restarts", str(deaths)),
                    *("-m", "vitals_bench.checkpoint.restarted"),
                    *(str(millions), str(rounds), str(deaths), str(out)),
                ],
                env={**os.environ, **_ENVIRONMENT, "TMPDIR": str(out)},
                capture_output=True,
                text=True,
                timeout=400,
                check=False,
            )
            if done.returncode == 0:
                break
        else:
            raise RuntimeError(f"the ranks did not come through:\n{done.stderr[-2000:]}")
        measured = json.loads((out / "found.json").read_text())
        restarts = _seconds_of_restarts(out, deaths)
    yield from _rows(measured, restarts)


def _rows(measured: dict[str, object], restarts: list[float]) -> Iterator[Row]:
    peer = f"torchrun --max-restarts and torch.load, torch {torch.__version__}"
    for place, note in [
        ("memory", "restore and step; the verdict of the step that found it is not in it"),
        ("disk", "checksums and finiteness verified, then read; files in the page cache"),
    ]:
        times = measured[place]
        assert isinstance(times, list)
        yield Row(
            name=f"from NaN to the next step, from {place}, DDP on 2 ranks, {measured['size']}",
            ours=statistics.median(times),
            unit="s",
            peer=peer,
            theirs=statistics.median(restarts),
            goal=ratio_at_most(1.0),
            spread=halves(restarts) if len(restarts) > 1 else None,
            note=f"{note}; {len(restarts)} restarts, from the death of a rank",
        )


def _seconds_of_restarts(folder: Path, deaths: int) -> list[float]:
    """Return for each restart the time from the death to when both ranks had trained a step."""
    seconds = []
    for i in range(deaths):
        died = int((folder / f"died-{i}").read_text())
        stepped = [int((folder / f"stepped-{i + 1}-{rank}").read_text()) for rank in range(2)]
        seconds.append((max(stepped) - died) / 1e9)
    return seconds
