"""What a run opted in to, as one thing that the step passes by; it does nothing by default.

Its part of the pack, where anything is opted in that the ranks sum::

    ranks that measured updates | ranks that measured noise | their own squares | weights' squares,
    one of each parameter | updates' squares, one of each parameter

A measurement that one rank lacks is short of its part, and so is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn

from trainer_hooks.failopen import FaultCounter
from trainer_hooks.measures.activations import Activation, Activations, choose
from trainer_hooks.measures.settings import SignalSettings
from trainer_hooks.measures.updates import Updates
from trainer_hooks.norms import GradNorms
from trainer_hooks.ranks import Ranks

_HEAD = 3


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
    """Measures what was opted in, in every sampled step; collective when made."""

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
            self._updates = Updates(norms, update_norm=settings.update_norm)
        modules = choose(model, settings.activations)
        self._activations = None
        if modules and ranks.rank == 0:
            self._activations = Activations(modules, norms.device, faults)
        self._noise = None
        if settings.noise_scale:
            from trainer_hooks.measures.noise import LocalSquares

            self._noise = LocalSquares.on(model, norms, faults)
        self._measures_update = False

    @property
    def pack_size(self) -> int:
        """Numbers that the ranks sum."""
        if self._updates is None and self._noise is None:
            return 0
        return _HEAD + (0 if self._updates is None else self._updates.size)

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
        if self._noise is not None:
            self._noise.begin(sampled=self.settings.due(step))
        if self._activations is not None:
            with self._faults.fail_open("activations"):
                self._activations.begin(sampled=self.settings.due(step))

    def fill(self, out: Tensor, loss_scale: Tensor | None) -> None:
        """Write what was measured into this part of the pack, which is zero."""
        if self._updates is not None and (squares := self._updates.take()) is not None:
            out[0] = 1.0
            out[_HEAD:] = squares
        if self._noise is not None and (square := self._noise.square(loss_scale)) is not None:
            out[1] = 1.0
            out[2] = square

    def before_update(self, step: int) -> None:
        """Keep the parameters, if the next step's row is to have this update's norm."""
        if self._updates is not None and self.settings.due(step + 1):
            self._measures_update = False
            with self._faults.fail_open("updates"):
                self._updates.before_update()
                self._measures_update = True

    def after_update(self) -> None:
        """Measure the update that was just made."""
        if self._updates is not None and self._measures_update:
            self._measures_update = False
            with self._faults.fail_open("updates"):
                self._updates.after_update()

    def own_numbers(self) -> tuple[Tensor, ...]:
        """Return what is read back of this rank alone."""
        return () if self._activations is None else (self._activations.numbers(),)

    def forget(self) -> None:
        """Drop what waits for the next pack: the parameters have been put back."""
        if self._updates is not None:
            self._updates.forget()

    def release(self) -> None:
        """Take the hooks off. DDP's stays, as none can be taken off, and measures no more."""
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
        updates, noise, square = summed[:_HEAD]
        n = self._num_params
        squares = summed[_HEAD:] if round(updates) == self._world_size else []
        return Samples(
            weight_squares=squares[:n] or None,
            update_squares=squares[n:] or None,
            local_square=square / self._world_size if round(noise) == self._world_size else None,
            activations=activations,
        )
