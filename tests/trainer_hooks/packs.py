"""Reduce vectors as ranks would sum them."""

import torch
from msgspec.structs import fields

from trainer_hooks.exchange.reduce_vector import (
    Rank0Values,
    RankContribution,
    ReduceVector,
    ReduceVectorLayout,
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


def filled(given, rank=0, world_size=1, *, root=None, on_host=False):
    """Return the vector of a rank: a dict of RankContribution's arguments and ``squares``."""
    packer = ReduceVector(
        ReduceVectorLayout.of(2, Ranks(rank, world_size, rank, None), fields=FIELDS), CPU
    )
    given_fields = dict(given)
    squares = given_fields.pop("squares", (1.0, 3.0))
    loss = given_fields.pop("loss", 2.0)
    packer.squares.copy_(torch.tensor(squares, dtype=torch.float64) / world_size)
    tensor = None if loss is None else torch.tensor(loss, dtype=torch.float64)
    local = contribution(
        tensor, weight=given_fields.pop("weight", 1.0), num_gradients=2, **given_fields
    )
    fill = packer.fill_on_host if on_host else packer.fill
    fill(local, (root or Rank0Values()) if rank == 0 else None)
    return packer


def summed(*ranks, root=None):
    """Sum the packs that these ranks would bring."""
    total = None
    for rank, given in enumerate(ranks):
        packer = filled(given, rank, len(ranks), root=root)
        total = packer.pack.clone() if total is None else total + packer.pack
    return packer.layout, total
