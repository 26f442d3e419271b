"""Reduce vectors as ranks would sum them."""

import torch

from trainer_hooks.ranks import Ranks
from trainer_hooks.step.reduce_vector import (
    PackLayout,
    Rank0Values,
    RankContribution,
    ReduceVector,
)

CPU = torch.device("cpu")
NO_ROW, ROW = torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64)


def summed(*ranks, root=None):
    """Sum the packs that these ranks (dicts of Local's arguments and ``squares``) would bring."""
    total = None
    for rank, given in enumerate(ranks):
        layout = PackLayout.of(2, Ranks(rank, len(ranks), rank, None))
        packer = ReduceVector(layout, CPU)
        fields = dict(given)
        squares = fields.pop("squares", (1.0, 3.0))
        loss = fields.pop("loss", 2.0)
        packer.squares.copy_(torch.tensor(squares, dtype=torch.float64) / len(ranks))
        tensor = None if loss is None else torch.tensor(loss, dtype=torch.float64)
        local = RankContribution(
            loss=tensor, weight=fields.pop("weight", 1.0), num_gradients=2, **fields
        )
        packer.fill(local, (root or Rank0Values()) if rank == 0 else None)
        total = packer.pack.clone() if total is None else total + packer.pack
    return layout, total
