"""What a person has a run do beside its steps: stand still, or be profiled."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from trainer_hooks.ranks import Ranks
from trainvitals.io.private import ensure_private_dir

ROUND_SECONDS = 1.0
"""Time between two looks for a command while the run is paused: far below any group's timeout."""


def paused_round(
    ranks: Ranks, words: tuple[float, float, float], told_to_stop: bool, device: torch.device
) -> tuple[tuple[float, float, float], bool]:
    """Wait a moment, and tell all ranks what rank 0 was asked and whether one was told to stop.

    Collective, on the training's own group: nothing else is under way on it between two steps. A
    round is short, so no group's timeout is near, however long the pause.

    Args:
        ranks: of the job.
        words: rank 0's command as three numbers; zeros elsewhere, and where there is none.
        told_to_stop: whether this rank was sent SIGTERM.
        device: where tensors of the group lie.
    """
    time.sleep(ROUND_SECONDS)
    pack = torch.tensor([*words, float(told_to_stop)], dtype=torch.float64, device=device)
    ranks.reduce(pack)
    number, action, argument, stops = pack.tolist()
    return (number, action, argument), stops > 0


class StepProfile:
    """Records the next steps of this rank with ``torch.profiler``, and writes the trace.

    Args:
        folder: where to; made if need be.
        first_step: the first step of the trace.
        num_steps: how many.
        done: told where the trace is, from another thread.
        failed: told why there is none.
    """

    def __init__(
        self,
        folder: Path,
        *,
        first_step: int,
        num_steps: int,
        done: Callable[[Path], None],
        failed: Callable[[Exception], None],
    ) -> None:
        from torch.profiler import ProfilerActivity, profile

        self._path = ensure_private_dir(folder) / f"step-{first_step:06d}-rank0.json.gz"
        self._left = num_steps
        self._done, self._failed = done, failed
        self._thread: threading.Thread | None = None
        has_gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        self._profiler = profile(activities=[ProfilerActivity.CPU, *has_gpu])
        self._profiler.start()

    def stepped(self) -> bool:
        """Take in that a step is over; return whether more are to come."""
        self._left -= 1
        if self._left > 0:
            self._profiler.step()
            return True
        self.close()
        return False

    def close(self) -> None:
        """Stop, and have the trace written beside the training."""
        if self._thread is None:
            self._profiler.stop()
            self._thread = threading.Thread(target=self._write, name="vitals-profile")
            self._thread.start()

    def _write(self) -> None:
        partial = self._path.with_name(f".{self._path.name}")
        try:
            self._profiler.export_chrome_trace(str(partial))
            os.replace(partial, self._path)  # noqa: PTH105
            self._done(self._path)
        except Exception as error:  # noqa: BLE001 - told where it is counted
            self._failed(error)
