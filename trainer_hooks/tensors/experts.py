"""Parameters of experts: under one name, each rank or group of ranks trains another one.

Experts of a mixture that live on different ranks are never replicas, even if their names, shapes
and first values are equal. They are found by the conventions of the field: DDP ignores them, or
they have ``allreduce = False``, as in Megatron and DeepSpeed. A DTensor of all experts that is
sharded over the ranks needs no mark.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

RankGroup = tuple[int, ...]
"""Ranks that train a parameter together, in order."""


def ddp_groups(model: nn.Module) -> dict[int, RankGroup]:
    """Return the ranks among which DDP averages the gradient of each parameter, by its id.

    Without an entry, no DDP wrapper averages the parameter's gradient.
    """
    groups: dict[int, RankGroup] = {}
    for module in _ddp_wrappers(model):
        ranks = tuple(sorted(dist.get_process_group_ranks(module.process_group)))
        for name, param in module.module.named_parameters():
            if not _is_ignored(module, name, param):
                groups.setdefault(id(param), ranks)
    return groups


def expert_groups(model: nn.Module) -> dict[int, RankGroup]:
    """Return the ranks that train each expert's parameter together, by its id.

    The ranks of a DDP wrapper around the expert only, or of its device mesh, and otherwise only
    this rank.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return {}
    experts = {id(p): p for p in model.parameters() if getattr(p, "allreduce", True) is False}
    for module in _ddp_wrappers(model):
        for name, param in module.module.named_parameters():
            if _is_ignored(module, name, param):
                experts[id(param)] = param
    averaged = ddp_groups(model) if experts else {}
    return {
        key: averaged.get(key) or _mesh_ranks(param) or (dist.get_rank(),)
        for key, param in experts.items()
    }


def _ddp_wrappers(model: nn.Module) -> list[DistributedDataParallel]:
    """Return the DDP wrappers in a model, outer ones first; an inner one may be around experts."""
    return [each for each in model.modules() if isinstance(each, DistributedDataParallel)]


def _is_ignored(module: DistributedDataParallel, name: str, param: Tensor) -> bool:
    """Return whether DDP leaves a gradient as it is, like an expert's."""
    # DDP ignores delayed ones in backward only, and averages them after it.
    delayed = getattr(module, "_delay_all_reduce_params", ())
    return name in module.parameters_to_ignore and all(param is not each for each in delayed)


def _mesh_ranks(param: Any) -> RankGroup:
    """Return the ranks of an expert's device mesh; empty for a plain tensor."""
    mesh = getattr(param, "device_mesh", None)
    return () if mesh is None else tuple(sorted(mesh.mesh.flatten().tolist()))
