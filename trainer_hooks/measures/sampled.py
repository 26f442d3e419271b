"""What a run opted in to, as one thing that the step passes by; there is none by default.

Its part of the pack, where anything is opted in that the ranks sum::

    ranks that measured the weights | the update | their own gradients | squares of the latter |
    weights' squares, one of each parameter | updates' squares, one of each parameter

A measurement that one rank lacks is short of its part, and so is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from trainer_hooks.failopen import FaultCounter
from trainer_hooks.measures.activations import Activation, Activations, choose
from trainer_hooks.measures.settings import SignalSettings
from trainer_hooks.ranks import Ranks
from trainer_hooks.step.gradients import GradNorms, Squares


class Updates:
    """Measures when told to; waits for nothing."""

    def __init__(self, norms: GradNorms) -> None:
        self._norms = norms
        self._kept: list[Tensor] = []
        self._is_kept = False
        self._squares = Squares()

    @torch.no_grad()
    def weight_squares(self) -> Tensor:
        """Return each parameter's square, this rank's share of it."""
        return self._share_of(self._norms.local_parameters())

    @torch.no_grad()
    def keep(self) -> None:
        """Copy the parameters, into memory that stays taken; call before the update."""
        self._is_kept = False
        now = self._norms.local_parameters()
        if [t.shape for t in self._kept] != [t.shape for t in now]:
            self._kept = [torch.empty_like(tensor) for tensor in now]
        torch._foreach_copy_(self._kept, now)
        self._is_kept = True

    @torch.no_grad()
    def update_squares(self) -> Tensor | None:
        """Return the squares of what the parameters moved by since ``keep``; None if not kept."""
        if not self._is_kept:
            return None
        self._is_kept = False
        torch._foreach_sub_(self._kept, self._norms.local_parameters())
        return self._share_of(self._kept)

    def forget(self) -> None:
        """Drop the copy: the parameters have been put back since."""
        self._is_kept = False

    def _share_of(self, tensors: list[Tensor]) -> Tensor:
        return self._squares.of(tensors, self._norms.device) * self._norms.share


# --------------------------------------------------------------------- all of it as one


_HEAD = 4


class Samples(NamedTuple):
    """What came to the host with one step; None where it was not measured, or not on all ranks."""

    weight_squares: Sequence[float] | None = None
    """Of the parameters that the step began with."""
    update_squares: Sequence[float] | None = None
    """Of the update that led to them."""
    local_square: float | None = None
    """Mean over ranks of the squares of their own gradients."""
    activations: dict[str, Activation] = {}  # noqa: RUF012 - never written to

    @property
    def by_layer(self) -> bool:
        """Whether there is something to write of single layers."""
        return self.weight_squares is not None or bool(self.activations)


class Sampler:
    """Measures what was opted in, in every sampled step; all ranks make one, or none."""

    def __init__(
        self,
        settings: SignalSettings,
        model: nn.Module,
        norms: GradNorms,
        ranks: Ranks,
        faults: FaultCounter,
    ) -> None:
        self.settings = settings
        self._faults = faults
        self._num_params = len(norms.names)
        self._world_size = ranks.world_size
        self._updates = None
        if settings.weight_norm or settings.update_norm:
            self._updates = Updates(norms)
        modules = choose(model, settings.activations)
        self._noise = None
        if settings.noise_scale:
            from trainer_hooks.measures.noise import LocalSquares

            self._noise = LocalSquares.on(model, norms, faults)
        self._activations = None  # the last to put hooks on: nothing after it may be refused
        if modules and ranks.rank == 0:
            self._activations = Activations(modules, norms.device, faults)

    @property
    def pack_size(self) -> int:
        """Numbers that the ranks sum."""
        if self._updates is None and self._noise is None:
            return 0
        per_parameter = 0 if self._updates is None else 1 + self.settings.update_norm
        return _HEAD + self._num_params * per_parameter

    @property
    def own_size(self) -> int:
        """Numbers of this rank alone that are read back behind the others."""
        return 0 if self._activations is None else self._activations.size

    @property
    def activation_names(self) -> tuple[str, ...]:
        """Modules whose output is measured here."""
        return () if self._activations is None else self._activations.names

    # ------------------------------------------------------------------------------ in a step

    def begin(self, step: int) -> None:
        """Get ready for a step; call at the start, and at the end of the step before."""
        sampled = self.settings.due(step)
        with self._faults.fail_open("signals"):
            if self._noise is not None:
                self._noise.begin(sampled=sampled)
            if self._activations is not None:
                self._activations.begin(sampled=sampled)

    def fill(self, step: int, out: Tensor, loss_scale: Tensor | None) -> None:
        """Write what is measured of a step into this part of the pack, which is zero."""
        if self._updates is not None and self.settings.due(step):
            n = self._num_params
            out[_HEAD : _HEAD + n] = self._updates.weight_squares()
            out[0] = 1.0
            if (moved := self._updates.update_squares()) is not None:
                out[_HEAD + n :] = moved
                out[1] = 1.0
        if self._noise is not None and (square := self._noise.square(loss_scale)) is not None:
            out[3] = square
            out[2] = 1.0

    def before_update(self, step: int) -> None:
        """Keep the parameters, if the next step is to measure the update that led to it."""
        if self._updates is not None and self.settings.update_norm and self.settings.due(step + 1):
            with self._faults.fail_open("signals"):
                self._updates.keep()

    def own_numbers(self) -> tuple[Tensor, ...]:
        """Return what is read back of this rank alone."""
        return () if self._activations is None else (self._activations.numbers(),)

    def forget(self) -> None:
        """Drop the copy of the parameters: they have been put back."""
        if self._updates is not None:
            self._updates.forget()

    def release(self) -> None:
        """Take the hooks off. DDP's stays, as none can be taken off, and measures no more."""
        self._updates = None
        if self._activations is not None:
            self._activations.release()
        if self._noise is not None:
            self._noise.begin(sampled=False)

    # ------------------------------------------------------------------------------ on the host

    def read(self, summed: list[float], own: list[float]) -> Samples:
        """Return what a step's numbers say: the pack's part, and this rank's own."""
        activations = {} if self._activations is None else self._activations.read(own)
        if not summed:
            return Samples(activations=activations)
        weights, updates, noise = (n == self._world_size for n in summed[: _HEAD - 1])
        squares, n = summed[_HEAD:], self._num_params
        return Samples(
            weight_squares=squares[:n] if weights else None,
            update_squares=squares[n:] if updates else None,
            local_square=summed[_HEAD - 1] / self._world_size if noise else None,
            activations=activations,
        )
