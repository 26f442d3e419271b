"""Gradient noise scale: how large a batch still pays, from the ranks' own gradients under DDP.

A rank's gradient is seen before it is averaged only in DDP's communication hook, of which there is
one; ours hands each bucket on to torch's own all-reduce. That divides by the number of ranks, where
DDP without a hook multiplies by its inverse: equal bits where the number is a power of two.
"""

import math
from collections import deque
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from trainer_hooks.failopen import FaultCounter
from trainer_hooks.step.gradients import GradNorms
from trainvitals.errors import UsageError

_MIN_SAMPLES = 10
_WINDOW = 100


class NoiseScale:
    """Estimates the noise scale from pairs of squared norms; host arithmetic.

    With B examples, E|G_B|^2 = |G|^2 + tr(S) / B, where G is the true gradient and S the covariance
    of one example's. Two batch sizes give both without bias (McCandlish, Kaplan, Amodei and the
    OpenAI Dota Team, "An Empirical Model of Large-Batch Training", 2018, appendix A.1)::

        |G|^2 = (B_big |G_big|^2 - B_small |G_small|^2) / (B_big - B_small)
        tr(S) = (|G_small|^2 - |G_big|^2) / (1 / B_small - 1 / B_big)
        B_simple = tr(S) / |G|^2

    Here a rank's batch is the small one, and all ranks' together the big one. Each of the two is
    averaged over the last samples before they are divided, since the ratio of noisy numbers is
    biased.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._signals: deque[float] = deque(maxlen=_WINDOW)
        self._noises: deque[float] = deque(maxlen=_WINDOW)

    def add(self, *, small_square: float, big_square: float) -> None:
        """Take in one step: the mean over ranks of their own squares, and the mean's own square.

        A sample that is not finite is left out.
        """
        if not (math.isfinite(small_square) and math.isfinite(big_square)):
            return
        n = self._num_ranks  # the rank's batch is the unit: B_small = 1, B_big = n
        self._signals.append((n * big_square - small_square) / (n - 1))
        self._noises.append((small_square - big_square) / (1 - 1 / n))

    def ratio(self) -> float | None:
        """Return B_simple as a multiple of all ranks' batch; None while it is not known.

        Above 1, a larger batch still saves steps; far below 1, the batch costs more than it brings.
        """
        if len(self._signals) < _MIN_SAMPLES:
            return None
        signal, noise = math.fsum(self._signals), math.fsum(self._noises)
        if signal <= 0:  # lost in the noise: more samples are needed
            return None
        return max(noise, 0.0) / signal / self._num_ranks


class _HookState(NamedTuple):
    owner: "LocalSquares"
    group: dist.ProcessGroup


def vitals_noise_hook(state: _HookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Measure the rank's own gradients in this bucket, if asked to, and average them as ever."""
    state.owner.see(bucket)
    averaged: torch.futures.Future[torch.Tensor] = allreduce_hook(state.group, bucket)
    return averaged


class LocalSquares:
    """Adds up the squares of this rank's gradients before DDP averages them."""

    def __init__(self, device: torch.device, faults: FaultCounter) -> None:
        self._faults = faults
        self._square = torch.zeros((), dtype=torch.float64, device=device)
        self._sampled = False
        self._passes = 0

    @classmethod
    def on(cls, model: nn.Module, norms: GradNorms, faults: FaultCounter) -> "LocalSquares":
        """Hook into the model's reduction.

        Raises:
            UsageError: the model is not in DDP, has a hook already, or trains other parameters.
        """
        ddp = getattr(model, "_orig_mod", model)
        if not isinstance(ddp, DistributedDataParallel):
            raise UsageError(
                f"SignalSettings.noise_scale needs DDP; the model is {type(ddp).__name__}",
                hint="elsewhere a rank's own gradients are never seen whole; leave it out",
            )
        if ddp.process_group.size() != dist.get_world_size() or dist.get_world_size() < 2:
            raise UsageError(
                f"SignalSettings.noise_scale compares ranks; DDP has {ddp.process_group.size()} of "
                f"{dist.get_world_size()}",
                hint="it needs one DDP over all ranks, and at least two of them",
            )
        reduced = {id(p) for p in ddp.parameters() if p.requires_grad}
        if reduced != {id(p) for p in norms.params if p.requires_grad}:
            raise UsageError(
                "SignalSettings.noise_scale: DDP and the optimizers hold other parameters",
                hint="turn requires_grad off for what is not trained, before DDP is made",
            )
        return cls._hooked(ddp, cls(norms.device, faults))

    @classmethod
    def _hooked(cls, ddp: DistributedDataParallel, made: "LocalSquares") -> "LocalSquares":
        for hook, state in ddp._comm_hooks:
            if hook is vitals_noise_hook:  # of an earlier monitor: none can be taken off
                owner: LocalSquares = state.owner  # type: ignore[attr-defined]
                return owner
        taken = UsageError(
            "SignalSettings.noise_scale needs DDP's communication hook, and this model has one",
            hint="leave noise_scale out; your hook can say what it sees by monitor.observe()",
        )
        if ddp._comm_hooks:
            raise taken
        try:
            ddp.register_comm_hook(_HookState(made, ddp.process_group), vitals_noise_hook)
        except RuntimeError as error:  # one of torch's built-in hooks, or mixed precision's
            raise taken from error
        return made

    def begin(self, *, sampled: bool) -> None:
        """Begin a step."""
        if self._passes:
            self._square.zero_()
            self._passes = 0
        self._sampled = sampled

    def see(self, bucket: GradBucket) -> None:
        """Add a bucket that is not averaged yet. Waits for nothing."""
        if not self._sampled:
            return
        with self._faults.fail_open("noise_scale"):
            norm = torch.linalg.vector_norm(bucket.buffer(), dtype=torch.float64)
            self._square.add_(norm * norm)
            self._passes += bucket.is_last()

    def square(self, loss_scale: Tensor | None) -> Tensor | None:
        """Return the step's square, unscaled; None where not one backward was reduced in it."""
        if self._passes != 1:
            return None
        return self._square if loss_scale is None else self._square / loss_scale.double() ** 2
