"""Reduce vectors as ranks would sum them."""

from dataclasses import fields

import torch

from trainer_hooks.exchange.reduce_vector import (
    PackLayout,
    Rank0Values,
    RankContribution,
    ReduceVector,
)
from trainer_hooks.features import vector_fields
from trainer_hooks.ranks import Ranks

CPU = torch.device("cpu")
NO_ROW, ROW = torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64)


FIELDS = vector_fields()
_CORE = {field.name for field in fields(RankContribution)}


def contribution(loss, **given):
    """Return a rank's part: arguments of ``RankContribution``, and values of the features."""
    values = {
        name: value if isinstance(value, torch.Tensor) else float(value)
        for name, value in given.items()
        if name not in _CORE and value is not None
    }
    core = {name: value for name, value in given.items() if name in _CORE}
    return RankContribution(loss=loss, values=values, **core)


def summed(*ranks, root=None):
    """Sum the packs that these ranks (dicts of Local's arguments and ``squares``) would bring."""
    total = None
    for rank, given in enumerate(ranks):
        layout = PackLayout.of(2, Ranks(rank, len(ranks), rank, None), fields=FIELDS)
        packer = ReduceVector(layout, CPU)
        given_fields = dict(given)
        squares = given_fields.pop("squares", (1.0, 3.0))
        loss = given_fields.pop("loss", 2.0)
        packer.squares.copy_(torch.tensor(squares, dtype=torch.float64) / len(ranks))
        tensor = None if loss is None else torch.tensor(loss, dtype=torch.float64)
        local = contribution(
            tensor, weight=given_fields.pop("weight", 1.0), num_gradients=2, **given_fields
        )
        packer.fill(local, (root or Rank0Values()) if rank == 0 else None)
        total = packer.pack.clone() if total is None else total + packer.pack
    return layout, total
