"""Measures optional signals in sampled steps. All are off by default.

Its part of the reduce vector, if ranks sum any of the signals::

    ranks that measured the weights | the update | local gradients | outside writes |
    squared norms of local gradients | of the weights, one per parameter |
    of the update, one per parameter | changes of weights from outside | of optimizer state |
    ranks on which a module's output was not finite, one per module |
    for a bucket: ranks that checked it | checksums and roundings of the ranks' gradients

A signal counts only if all ranks measured it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_hooks.failopen import FaultCounter
from trainer_hooks.measures.activations import Activation, Activations, choose_modules
from trainer_hooks.measures.settings import SignalSettings
from trainer_hooks.ranks import Ranks
from trainer_hooks.tensors.gradients import GradientSquares, GradNorms, local_tensor
from trainer_hooks.tensors.optimizer_state import is_dense


class WeightUpdateNorms:
    """Measures weights and updates; never waits for the device."""

    def __init__(self, norms: GradNorms) -> None:
        self._norms = norms
        self._copied_params: list[Tensor] = []
        self._is_kept = False
        self._moved: Tensor | None = None
        self._squares = GradientSquares(norms.params)

    @torch.no_grad()
    def weight_squares(self) -> Tensor:
        """Return this rank's share of each parameter's squared norm, 1-dim on the device."""
        return self._share_of(self._norms.local_parameters())

    @torch.no_grad()
    def keep(self) -> None:
        """Copy the parameters to a buffer that is reused; call before the update."""
        self.forget()
        now = self._norms.local_parameters()
        if [t.shape for t in self._copied_params] != [t.shape for t in now]:
            self._copied_params = [torch.empty_like(tensor) for tensor in now]
        torch._foreach_copy_(self._copied_params, now)
        self._is_kept = True

    @torch.no_grad()
    def measure(self) -> None:
        """Compute squared norms of the parameters' changes since ``keep``, if it was called.

        Call right after the update: later writes do not belong to it.
        """
        if self._is_kept:
            self._is_kept = False
            torch._foreach_sub_(self._copied_params, self._norms.local_parameters())
            self._moved = self._share_of(self._copied_params)

    def update_squares(self) -> Tensor | None:
        """Return the squared norms of the last update; None without ``keep`` before it."""
        self.measure()  # needed if optimizers step one after another: the last one is not detected
        moved, self._moved = self._moved, None
        return moved

    def forget(self) -> None:
        """Discard the copy to measure against: the parameters were restored since."""
        self._is_kept, self._moved = False, None

    def _share_of(self, tensors: list[Tensor]) -> Tensor:
        """Return this rank's share of the measured squared norms of the tensors."""
        return self._norms.shares_of(self._squares.of(tensors, self._norms.device))


class OutsideWrites:
    """Detects writes between the end of one update and the measurement of the next step.

    Both sums run over the same tensors in the same order, so unwritten tensors give equal bits.
    """

    def __init__(self, norms: GradNorms, optimizers: Sequence[Optimizer]) -> None:
        self._norms = norms
        self._states = [optimizer.state for optimizer in optimizers]
        self._weights, self._moments = GradientSquares(norms.params), GradientSquares(norms.params)
        self._after: tuple[Tensor, Tensor] | None = None

    def keep(self) -> None:
        """Measure the sums with which the next step is compared; call after the update."""
        self._after = None
        self._after = self._weight_and_moment_sums()

    def forget(self) -> None:
        """Discard the measured sums: the parameters were restored since."""
        self._after = None

    def changes(self) -> tuple[Tensor, Tensor] | None:
        """Measure relative changes of parameters and their states, 0 to 1; None if unknown."""
        after, self._after = self._after, None
        if after is None:
            return None
        weights, moments = map(_relative_change, after, self._weight_and_moment_sums())
        return self._norms.shares_of(weights), self._norms.shares_of(moments)

    @torch.no_grad()
    def _weight_and_moment_sums(self) -> tuple[Tensor, Tensor]:
        """Measure sums of squares of weights and of optimizer state, by parameter."""
        norms = self._norms
        weights = self._weights.of(norms.local_parameters(), norms.device)
        owners: list[int] = []
        tensors: list[Tensor] = []
        for i, param in enumerate(norms.params):
            for state in self._states:
                for value in state[param].values() if param in state else ():
                    # Counters and factored states are skipped: they have another number of
                    # elements.
                    if isinstance(value, Tensor) and value.numel() == param.numel() > 1:
                        local = local_tensor(value)
                        if local.is_floating_point() and is_dense(local) and local.numel():
                            owners.append(i)
                            tensors.append(local)
        moments = torch.zeros_like(weights)
        if tensors:
            index = torch.tensor(owners, device="cpu").to(norms.device, non_blocking=True)
            moments.index_add_(0, index, self._moments.of(tensors, norms.device))
        return weights, moments


def _relative_change(before: Tensor, now: Tensor) -> Tensor:
    """Return a measured relative difference of squares, 0 to 1; 1 if one became NaN or Inf."""
    largest = torch.maximum(before, now)
    changed = (now - before).abs() / torch.where(largest > 0, largest, 1.0)
    turned = torch.isfinite(before) != torch.isfinite(now)
    return torch.where(torch.isfinite(changed), changed, turned.to(changed))


# -------------------------------------------------------------------------- the sampler


_HEAD = 5
_BEYOND = 1e30
"""Error of a reduced sum that is not finite although the contributions are."""


class SampledSignals(NamedTuple):
    """Optional signals of one step on the host; None if not measured on all ranks."""

    weight_squares: Sequence[float] | None = None
    """Squared norm per parameter at the start of the step."""
    update_squares: Sequence[float] | None = None
    """Squared norm per parameter of the preceding update."""
    local_square: float | None = None
    """Mean over ranks of the squared norms of local gradients."""
    own_grad_norm: float | None = None
    """Norm of this rank's gradients before they were averaged."""
    weight_writes: Sequence[float] | None = None
    """Relative change of each parameter by other code, 0 to 1."""
    moment_writes: Sequence[float] | None = None
    """The same for its optimizer state."""
    reduction_error: float | None = None
    """Difference between a reduced bucket and the sum of contributions, in roundings."""
    activations: dict[str, Activation] = {}  # noqa: RUF012 - never written to
    nonfinite_parameters: Sequence[str] = ()
    """Names of parameters that a check after a bad step found NaN or infinite, on this rank."""
    huge_parameters: Mapping[str, float] = MappingProxyType({})
    """Largest absolute values of finite parameters that a bad step found damaged."""

    @property
    def by_layer(self) -> bool:
        """Return whether there are measured values per layer to write."""
        measured = (self.weight_squares, self.weight_writes)
        return any(squares is not None for squares in measured) or bool(self.activations)


class SignalSampler:
    """Measures the enabled signals in every sampled step; equal settings on all ranks."""

    def __init__(
        self,
        settings: SignalSettings,
        model: nn.Module,
        norms: GradNorms,
        ranks: Ranks,
        faults: FaultCounter,
        optimizers: Sequence[Optimizer] = (),
    ) -> None:
        # Collective, so nothing before it may raise on one rank only.
        modules = choose_modules(norms.named_modules(model), settings.activations, ranks)
        self.settings = settings
        self._faults = faults
        self._num_params = len(norms.names)
        self._is_next_due = False
        self._world_size = ranks.world_size
        self._updates = None
        if settings.weight_norm or settings.update_norm:
            self._updates = WeightUpdateNorms(norms)
        self._writes = OutsideWrites(norms, optimizers) if settings.outside_writes else None
        self._own_square = torch.full((1,), -1.0, dtype=torch.float64, device=norms.device)
        self._own_gradients = None
        if settings.noise_scale or settings.reduction:
            from trainer_hooks.measures.noise import LocalGradientMeter

            setting = "noise_scale" if settings.noise_scale else "reduction"
            self._own_gradients = LocalGradientMeter.register_on_model(
                model, norms, faults, setting
            )
        self._came_out = torch.zeros(1, dtype=torch.float64, device=norms.device)
        # Indices behind the parts of the sampler's numbers in the reduce vector.
        norms_per_param = 0 if self._updates is None else 1 + settings.update_norm
        self._end_of_squares = _HEAD + self._num_params * norms_per_param
        num_writes = 0 if self._writes is None else 2 * self._num_params
        self._end_of_writes = self._end_of_squares + num_writes
        self._end_of_activations = self._end_of_writes + len(modules)
        self._activations = None  # registers hooks, so it comes last: nothing after it may raise
        if modules:
            self._activations = Activations(modules, norms.device, faults)

    @property
    def pack_size(self) -> int:
        """Return the number of this sampler's values in the reduce vector."""
        sums = (self._updates, self._own_gradients, self._writes, self._activations)
        if all(part is None for part in sums):
            return 0
        return self._end_of_activations + (3 if self.settings.reduction else 0)

    @property
    def own_size(self) -> int:
        """Return the number of local measurements that are read back behind the others."""
        of_activations = 0 if self._activations is None else self._activations.size
        return of_activations + self.settings.noise_scale + self.settings.reduction

    @property
    def measured_modules(self) -> tuple[str, ...]:
        """Modules whose output is measured."""
        return () if self._activations is None else self._activations.names

    # ------------------------------------------------------------------------------ in a step

    def start_step(self, step: int) -> None:
        """Prepare a sampled step; call at the start, and at the end of each step for the next."""
        sampled = self.settings.due(step)
        with self._faults.fail_open("signals"):
            if self._own_gradients is not None:
                checked = sampled and self.settings.reduction
                self._own_gradients.start_step(
                    square=sampled and self.settings.noise_scale,
                    turn=step // self.settings.every if checked else None,
                )
            if self._activations is not None:
                self._activations.reset(sampled=sampled)

    def fill(self, step: int, out: Tensor, loss_scale: Tensor | None) -> None:
        """Write the measurements of a step to this part of the reduce vector, which is zero."""
        # fill_ instead of "= 1.0", which on a GPU waits: torch copies the number from the host.
        if self._updates is not None and self.settings.due(step):
            n = self._num_params
            out[_HEAD : _HEAD + n] = self._updates.weight_squares()
            out[0].fill_(1.0)
            if (moved := self._updates.update_squares()) is not None:
                out[_HEAD + n : _HEAD + 2 * n] = moved
                out[1].fill_(1.0)
        if self._own_gradients is not None:
            self._own_square = torch.full_like(self._own_square, -1.0)
            if (square := self._own_gradients.square(loss_scale)) is not None:
                out[4] = square
                out[2].fill_(1.0)
                self._own_square = square.reshape(1).clone()
            if (checked := self._own_gradients.checked()) is not None:
                put_in, came_out = checked
                at = self._end_of_activations
                out[at : at + 3] = torch.stack((torch.ones_like(came_out), *put_in))
                self._came_out = came_out.reshape(1)
        if self._writes is not None and (changes := self._writes.changes()) is not None:
            out[self._end_of_squares : self._end_of_writes] = torch.cat(changes)
            out[3].fill_(1.0)
        if self._activations is not None:
            out[self._end_of_writes : self._end_of_activations] = self._activations.nonfinite()

    def before_update(self, step: int) -> None:
        """Copy the parameters if the next step measures this update."""
        self._is_next_due = self.settings.due(step + 1)
        if self._updates is not None and self.settings.update_norm and self._is_next_due:
            with self._faults.fail_open("signals"):
                self._updates.keep()

    def after_update(self) -> None:
        """Compute what the next sampled step is compared with; after all optimizers stepped."""
        with self._faults.fail_open("signals"):
            if self._updates is not None:
                self._updates.measure()
            if self._writes is not None and self._is_next_due:
                self._writes.keep()

    def own_numbers(self) -> tuple[Tensor, ...]:
        """Return this rank's local measurements that are read back."""
        numbers = [] if self._activations is None else [self._activations.numbers()]
        numbers += [self._own_square] if self.settings.noise_scale else []
        numbers += [self._came_out] if self.settings.reduction else []
        return tuple(numbers)

    def discard_copies(self) -> None:
        """Discard the copies of parameters that updates are measured against, after a restore."""
        for part in (self._updates, self._writes):
            if part is not None:
                part.forget()

    def release(self) -> None:
        """Remove the hooks. DDP's cannot be removed, so it is only deactivated."""
        self._updates = self._writes = None
        if self._activations is not None:
            self._activations.release()
        if self._own_gradients is not None:
            self._own_gradients.start_step(square=False)

    # ------------------------------------------------------------------------------ on the host

    def unpack(self, summed: list[float], rank_values: list[float]) -> SampledSignals:
        """Convert a step's numbers: the summed part, and this rank's local values."""
        norm, came_out = None, 0.0
        if self.settings.reduction:
            *rank_values, came_out = rank_values
        if self.settings.noise_scale:
            *rank_values, square = rank_values
            norm = math.sqrt(square) if square >= 0.0 else None if square < 0.0 else math.nan
        activations = {} if self._activations is None else self._activations.unpack(rank_values)
        if not summed:
            return SampledSignals(activations=activations)
        weights, updates, noise, writes = (n == self._world_size for n in summed[: _HEAD - 1])
        squares, n = summed[_HEAD : self._end_of_squares], self._num_params
        changes = summed[self._end_of_squares : self._end_of_writes]
        nonfinite = summed[self._end_of_writes : self._end_of_activations]
        for name, num in zip(self.measured_modules, nonfinite, strict=True):
            measured = activations.get(name, Activation(math.inf, None, None))
            if num:  # maybe on another rank, whose values are not read here
                is_finite = math.isfinite(measured.rms)
                activations[name] = measured._replace(rms=math.inf) if is_finite else measured
        return SampledSignals(
            weight_squares=squares[:n] if weights else None,
            update_squares=squares[n:] if updates else None,
            local_square=summed[_HEAD - 1] / self._world_size if noise else None,
            own_grad_norm=norm,
            weight_writes=changes[:n] if writes else None,
            moment_writes=changes[n:] if writes else None,
            reduction_error=self._reduction_error(summed, came_out),
            activations=activations,
        )

    def _reduction_error(self, summed: list[float], came_out: float) -> float | None:
        """Return the error of the checked bucket on this rank; None if none was checked."""
        if not self.settings.reduction:
            return None
        from trainer_hooks.measures.noise import rounding_of

        num, put_in, roundings = summed[self._end_of_activations :]
        if num != self._world_size or not math.isfinite(roundings):
            return None  # non-finite gradients have their own finding
        rounding = rounding_of(roundings, num_ranks=int(num))
        error = abs(came_out - put_in / num) / rounding
        return min(error, _BEYOND) if math.isfinite(error) else _BEYOND
