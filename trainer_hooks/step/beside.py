"""A pause between two steps, which an operator requested."""

from __future__ import annotations

import time

import torch

from trainer_hooks.ranks import Ranks

ROUND_SECONDS = 1.0
"""Time between two checks for a command during a pause: far below the timeout of any group."""


def paused_round(
    ranks: Ranks, words: tuple[float, float, float], told_to_stop: bool, device: torch.device
) -> tuple[tuple[float, float, float], bool]:
    """Wait one round, then exchange rank 0's command and whether a rank received SIGTERM.

    Collective, on the training's own group: no other collective is in flight between two steps. A
    round is short, so a pause of any length stays far from the group's timeout.

    Args:
        ranks: ranks of the job.
        words: rank 0's command as three numbers; zeros on other ranks, and without a command.
        told_to_stop: whether this rank received SIGTERM.
        device: device of the group's tensors.
    """
    time.sleep(ROUND_SECONDS)
    pack = torch.tensor([*words, float(told_to_stop)], dtype=torch.float64, device=device)
    ranks.reduce(pack)
    number, action, argument, stops = pack.tolist()
    return (number, action, argument), stops > 0
