"""What of the monitor lives on the device: filled, summed, judged and applied without waiting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainer_hooks.guard import BufferShadow, OptimizerGuard
from trainer_hooks.norms import GradNorms, named_parameters
from trainer_hooks.pack import Packer, PackLayout
from trainer_hooks.ranks import Ranks
from trainer_hooks.readback import Readback
from trainer_hooks.signals import HostStep
from trainer_hooks.verdict import NUM_DERIVED


@dataclass(slots=True, kw_only=True)
class Device:
    """The parts, and the training they act on."""

    optimizers: tuple[Optimizer, ...]
    schedulers: tuple[Any, ...]
    scaler: torch.amp.GradScaler | None
    norms: GradNorms
    packer: Packer
    guards: tuple[OptimizerGuard, ...]
    shadow: BufferShadow
    readback: Readback[HostStep]

    @property
    def reads_verdict(self) -> bool:
        """Whether an optimizer needs the verdict on the host: then every rank reads it at once."""
        return not all(guard.on_device for guard in self.guards)


def lay_out(
    model: nn.Module,
    optimizers: tuple[Optimizer, ...],
    schedulers: tuple[Any, ...],
    scaler: torch.amp.GradScaler | None,
    ranks: Ranks,
) -> Device:
    """Lay out what works on the device. Collective: the ranks compare what each holds."""
    params = named_parameters(model, optimizers)
    norms = GradNorms(params, ranks)
    guards = tuple(OptimizerGuard(o, scaler) for o in optimizers)
    layout = PackLayout.of(len(params), ranks)
    # One optimizer that needs the verdict on the host makes every step wait for it: no lag then.
    lag = 1 if all(guard.on_device for guard in guards) else 0
    size = layout.size + NUM_DERIVED + 1
    return Device(
        optimizers=optimizers,
        schedulers=schedulers,
        scaler=scaler,
        norms=norms,
        packer=Packer(layout, norms.device),
        guards=guards,
        shadow=BufferShadow(model),
        readback=Readback[HostStep](lag=lag, size=size, device=norms.device),
    )
