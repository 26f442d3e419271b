"""Injects planned faults into a training loop, as a broken node or data set would cause them."""

from __future__ import annotations

import os
import signal

import torch
from torch import Tensor, nn

from trainvitals.testing.faults import FaultPlan


class FaultInjector:
    """Faults of the plan for one rank.

    A fault at a step happens once: after a rollback the step is trained again, and a bit flip does
    not recur. Poisoned data stays poisoned.
    """

    def __init__(self, plan: FaultPlan, rank: int) -> None:
        self._faults = list(plan.faults)
        self._rank = rank

    def _trigger_fault(self, kind: str, step: int) -> bool:
        """Return whether the demo's plan has such a fault now; use it up."""
        for fault in self._faults:
            if fault.kind == kind and fault.hits(rank=self._rank, step=step):
                if fault.last < 0:
                    self._faults.remove(fault)
                return True
        return False

    def batch(self, tokens: Tensor, index: int) -> Tensor:
        """Return a batch of the demo; within a poisoned window, a corrupted one."""
        if not self._trigger_fault("poison_batches", index):
            return tokens
        return poisoned(tokens)

    def before_forward(self, model: nn.Module, step: int) -> None:
        """Overwrite parameters of the demo's small GPT, or kill its process."""
        if self._trigger_fault("kill", step):
            os.kill(os.getpid(), signal.SIGKILL)
        if self._trigger_fault("nan_parameters", step):
            with torch.no_grad():
                for param in list(model.parameters())[:2]:
                    param.fill_(float("nan"))
        if self._trigger_fault("shuffled_parameters", step):
            with torch.no_grad():
                generator = torch.Generator().manual_seed(step)
                for param in model.parameters():
                    order = torch.randperm(param.numel(), generator=generator).to(param.device)
                    param.copy_(param.flatten()[order].view_as(param))

    def loss(self, loss: Tensor, step: int) -> Tensor:
        """Return the loss of the demo, or NaN."""
        return loss * float("nan") if self._trigger_fault("nan_loss", step) else loss

    def after_backward(self, model: nn.Module, step: int) -> None:
        """Corrupt gradients that are already averaged, on this rank only."""
        if self._trigger_fault("nan_gradient", step):
            grad = next(p.grad for p in model.parameters() if p.grad is not None)
            grad.view(-1)[0] = float("nan")
        if self._trigger_fault("spike_gradient", step):
            for param in model.parameters():
                if param.grad is not None:
                    param.grad.mul_(1e6)


def poisoned(tokens: Tensor) -> Tensor:
    """Return the demo's corrupted batch: bytes shuffled in place and inverted."""
    generator = torch.Generator().manual_seed(int(tokens.sum()))
    order = torch.randperm(tokens.shape[1], generator=generator)
    return 255 - tokens[:, order]
