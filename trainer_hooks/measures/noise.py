"""Local gradients of the ranks under DDP: gradient noise scale, and a check of the all-reduce.

The noise scale estimates the largest batch size that is still efficient. A linear checksum of the
data that each rank contributes to a bucket must sum to the checksum of the reduced bucket.

Only DDP's communication hook sees local gradients before they are averaged, and a model can have
one hook. Ours passes each bucket to torch's own all-reduce hook, which divides by the number of
ranks; DDP without a hook multiplies by the inverse. The bits are equal if the number is a power of
two.
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
from trainer_hooks.tensors.gradients import GradNorms
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

    The small batch belongs to one rank, and the big one to all ranks. Both quantities are averaged
    over the last samples before the division, because a ratio of noisy numbers is biased.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._signals: deque[float] = deque(maxlen=_WINDOW)
        self._noises: deque[float] = deque(maxlen=_WINDOW)

    def add(self, *, small_square: float, big_square: float) -> None:
        """Add a step: mean over ranks of their squared norms, and that of the mean gradient.

        Samples that are not finite are ignored.
        """
        if not (math.isfinite(small_square) and math.isfinite(big_square)):
            return
        n = self._num_ranks  # in units of a rank's batch: B_small = 1, B_big = n
        self._signals.append((n * big_square - small_square) / (n - 1))
        self._noises.append((small_square - big_square) / (1 - 1 / n))

    def ratio(self) -> float | None:
        """Return B_simple in units of the global batch; None if unknown.

        Above 1, a larger batch still saves steps; far below 1, it costs more than it saves.
        """
        if len(self._signals) < _MIN_SAMPLES:
            return None
        signal, noise = math.fsum(self._signals), math.fsum(self._noises)
        if signal <= 0:  # smaller than the noise: more samples are needed
            return None
        return max(noise, 0.0) / signal / self._num_ranks


class _NoiseHookState(NamedTuple):
    owner: "LocalGradientMeter"
    group: dist.ProcessGroup


def vitals_noise_hook(
    state: _NoiseHookState, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Measure this rank's gradients in the bucket, if due, and average them as torch does."""
    state.owner.measure_bucket(bucket)
    averaged: torch.futures.Future[torch.Tensor] = allreduce_hook(state.group, bucket)
    return state.owner.check(bucket, averaged)


class Sums(NamedTuple):
    """Two sums over one bucket, float64; the checksums of all ranks sum to that of the result."""

    checksum: Tensor
    """Linear: each element times its own weight, 1 to 4."""
    roundings: Tensor
    """Sum of squares of the possible rounding errors of the elements."""


def bucket_sums(buffer: Tensor) -> Sums:
    """Measure a bucket's sums without waiting; copies at most ``_PIECE`` elements at once."""
    flat = buffer.detach().reshape(-1)
    checksum, energy = flat.new_zeros(2, dtype=torch.float64).unbind()
    info = torch.finfo(flat.dtype)
    columns = _checksum_weights(0, _COLUMNS, _GOLDEN, flat.device)
    for i, piece in enumerate(flat.split(_PIECE)):
        wide = piece.double()
        energy = energy + torch.dot(wide, wide)
        short = -len(wide) % _COLUMNS
        rows = torch.nn.functional.pad(wide, (0, short)).view(-1, _COLUMNS)
        first = i * (_PIECE // _COLUMNS)
        of_rows = _checksum_weights(first, len(rows), _SILVER, flat.device)
        checksum = checksum + of_rows @ rows @ columns
    # Scale now: when the sums are read, the next bucket may have another dtype.
    return Sums(checksum, energy * info.eps**2 + info.tiny**2)  # tiny: values flushed to zero


_COLUMNS, _PIECE = 4096, 1 << 20
_GOLDEN, _SILVER = (math.sqrt(5) - 1) / 2, math.sqrt(2) - 1


def _checksum_weights(first: int, num: int, step: float, device: torch.device) -> Tensor:
    """Return weights of a measured checksum: 1 to 2, unlike their neighbors (float64)."""
    places = torch.arange(first, first + num, dtype=torch.float64, device=device)
    return 1.0 + (places * step) % 1.0


def rounding_of(roundings: float, *, num_ranks: int) -> float:
    """Return an upper estimate of a measured checksum's standard error from rounding.

    Each of n numbers is rounded when divided and when added, by half a unit in the last place of
    the partial sum. That sum is at most the sum of magnitudes, which Cauchy's inequality bounds by
    the squares. Roundings are independent, so their squares add up.

    Args:
        roundings: ``Sums.roundings``, summed over the ranks.
        num_ranks: number of averaged ranks.
    """
    # Mean square of a product of two weights, each uniform from 1 to 2.
    mean_square_of_weights = 49 / 9
    return math.sqrt(mean_square_of_weights * (num_ranks + 1) * roundings / num_ranks)


class LocalGradientMeter:
    """Sees local gradients before DDP averages them, and one bucket per step after that."""

    def __init__(self, device: torch.device, faults: FaultCounter) -> None:
        self._faults = faults
        self._square = torch.zeros((), dtype=torch.float64, device=device)
        self._measures_square = False
        self._turn: int | None = None
        self._passes = 0
        self._num_buckets = 1
        self._put_in: Sums | None = None
        self._came_out: Tensor | None = None

    @classmethod
    def register_on_model(
        cls, model: nn.Module, norms: GradNorms, faults: FaultCounter, setting: str
    ) -> "LocalGradientMeter":
        """Register the communication hook that measures local gradients on the model.

        Raises:
            UsageError: the model is not wrapped in DDP, already has a hook, or trains other
                parameters.
        """
        ddp = getattr(model, "_orig_mod", model)
        if not isinstance(ddp, DistributedDataParallel):
            raise UsageError(
                f"SignalSettings.{setting} needs DDP; the model is {type(ddp).__name__}",
                hint="otherwise the gradients of one rank are not available; leave it out",
            )
        if ddp.process_group.size() != dist.get_world_size() or dist.get_world_size() < 2:
            raise UsageError(
                f"SignalSettings.{setting} compares ranks; DDP has {ddp.process_group.size()} of "
                f"{dist.get_world_size()}",
                hint="it needs one DDP over all ranks, and at least two of them",
            )
        reduced = {id(p) for p in ddp.parameters() if p.requires_grad}
        if reduced != {id(p) for p in norms.params if p.requires_grad}:
            raise UsageError(
                f"SignalSettings.{setting}: DDP and the optimizers hold other parameters",
                hint="turn requires_grad off for what is not trained, before DDP is made",
            )
        return cls._register_comm_hook(ddp, cls(norms.device, faults), setting)

    @classmethod
    def _register_comm_hook(
        cls, ddp: DistributedDataParallel, gradients: "LocalGradientMeter", setting: str
    ) -> "LocalGradientMeter":
        """Register DDP's hook for measuring local gradients once; refuse another's hook."""
        for hook, state in ddp._comm_hooks:
            if hook is vitals_noise_hook:  # a hook of an earlier monitor: it cannot be removed
                owner: LocalGradientMeter = state.owner  # type: ignore[attr-defined]
                return owner
        taken = UsageError(
            f"SignalSettings.{setting} needs DDP's communication hook, and this model has one",
            hint=f"leave {setting} out; your hook can say what it sees by monitor.observe()",
        )
        if ddp._comm_hooks:
            raise taken
        try:
            ddp.register_comm_hook(_NoiseHookState(gradients, ddp.process_group), vitals_noise_hook)
        except RuntimeError as error:  # a built-in hook of torch, or that of mixed precision
            raise taken from error
        return gradients

    def start_step(self, *, square: bool, turn: int | None = None) -> None:
        """Start the measurement of a step.

        ``turn`` is the number of the check, and selects the bucket in rotation.
        """
        if self._passes:
            self._square.zero_()
            self._passes = 0
        self._put_in = self._came_out = None
        self._measures_square, self._turn = square, turn

    def _is_due(self, bucket: GradBucket) -> bool:
        """Return whether the bucket is the one that this step measures."""
        return self._turn is not None and bucket.index() == self._turn % self._num_buckets

    def measure_bucket(self, bucket: GradBucket) -> None:
        """Measure a bucket of local gradients before DDP averages them; does not wait."""
        if not self._measures_square and self._turn is None:
            return
        with self._faults.fail_open("own_gradients"):
            if self._measures_square:
                norm = torch.linalg.vector_norm(bucket.buffer(), dtype=torch.float64)
                self._square.add_(norm * norm)
            if self._is_due(bucket):
                self._put_in = bucket_sums(bucket.buffer())
            if bucket.is_last():
                self._passes += 1
                self._num_buckets = bucket.index() + 1

    def check(
        self, bucket: GradBucket, averaged: torch.futures.Future[torch.Tensor]
    ) -> torch.futures.Future[torch.Tensor]:
        """Compute the checksum of a reduced DDP bucket, if it is the one to check."""
        if self._put_in is None or not self._is_due(bucket):
            return averaged

        def look(future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            reduced = future.value()
            with self._faults.fail_open("own_gradients"):
                self._came_out = bucket_sums(reduced).checksum
            return reduced

        looked: torch.futures.Future[torch.Tensor] = averaged.then(look)
        return looked

    def square(self, loss_scale: Tensor | None) -> Tensor | None:
        """Return the squared norm of a rank's gradients before DDP averages them."""
        if self._passes != 1 or not self._measures_square:
            return None
        return self._square if loss_scale is None else self._square / loss_scale.double() ** 2

    def checked(self) -> tuple[Sums, Tensor] | None:
        """Return the measured sums of this rank's bucket, and the reduced bucket's checksum."""
        if self._passes != 1 or self._put_in is None or self._came_out is None:
            return None
        return self._put_in, self._came_out
