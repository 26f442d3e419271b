"""What a person has a run do between two of its steps: stand still."""

from __future__ import annotations

import time

import torch

from trainer_hooks.ranks import Ranks

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
