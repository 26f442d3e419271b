"""Adam's second moments compared with what their gradients add up to: finds a state set to 0.

A second moment is a running mean of squared gradients, whose norms are measured in each step. So
the sum over a layer follows exactly from an earlier one and the norms since. If something else set
it to 0, it equals what was added from one step on, which is the step of the reset.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import Optimizer

from trainer_hooks.tensors.events import AsyncCopy, copy_to
from trainer_hooks.tensors.gradients import GradNorms, by_kind, layer_of

EVERY = 25
"""Steps between two readings: each reads the second moments once, as a gradient norm reads the
gradients in every step."""
_MOST_PARAMETERS = 10_000
"""Of more parameters, the norms of ``EVERY`` steps are not kept."""
_EXACT = 0.001
"""Relative error up to which sums are equal. Float32 is far below it; bfloat16 is above it."""
_RESET = 0.5
"""Share of the expected sum that is left at most of a state that counts as reset."""
_MIN_LAYERS = 4
"""With fewer layers, there are no others that confirm how the optimizer computes."""


class MomentSums(NamedTuple):
    """Sum of the second moment of each parameter, before the update of a step."""

    step: int
    names: tuple[str, ...]
    betas: tuple[float, ...]
    """Decay of each moment per update."""
    sums: Sequence[float] = ()


class AppliedGradients(NamedTuple):
    """Squared gradient norms of a step's update."""

    step: int
    squares: Sequence[float]
    """Of all parameters, as measured; empty if nothing was updated."""
    factor: float = 1.0
    """Square of the factor of the clip."""


class MomentReset(NamedTuple):
    """A layer whose second moments were set to 0."""

    layer: str
    step: int
    """First step whose update used the reset state."""
    missing: float
    """Share of the second moments that is missing."""


class MomentCheck:
    """Reads the second moments in some steps, without waiting, and compares them later.

    Call ``read`` before a step's gradients are measured, ``add`` with each step that was judged,
    in order, and then ``find_resets``. Abstains if ranks hold different parts of the parameters.
    """

    def __init__(self, norms: GradNorms, optimizers: Sequence[Optimizer]) -> None:
        self.norms, self._optimizers = norms, tuple(optimizers)
        self.is_possible = norms.replicated and len(norms.names) <= _MOST_PARAMETERS
        self._steps: deque[AppliedGradients] = deque(maxlen=2 * EVERY)
        self._copies: AsyncCopy[MomentSums] | None = None
        self._size = 0
        self._reading: MomentSums | None = None
        """The reading whose numbers may still be on the device."""
        self._before: MomentSums | None = None

    def forget(self) -> None:
        """Discard all readings and gradients: the state was replaced."""
        self._steps.clear()
        self._copies = self._reading = self._before = None

    @torch.no_grad()
    def read(self, step: int) -> None:
        """Start to read the second moments before the update of a step."""
        moments = _second_moments(self.norms, self._optimizers)
        if not moments:
            return
        sums = _sums([moment for _, _, moment in moments], self.norms.device)
        if self._copies is None or self._reading is not None or self._size != len(sums):
            self._copies = AsyncCopy(lag=1, size=len(sums), device=sums.device)
            self._size = len(sums)
        names = tuple(name for name, _, _ in moments)
        self._reading = MomentSums(step, names, tuple(beta for _, beta, _ in moments))
        self._copies.push(sums, self._reading)

    def add(self, applied: AppliedGradients) -> None:
        """Add a judged step, the next one of its attempt."""
        is_next = not self._steps or applied.step == self._steps[-1].step + 1
        if not is_next or len(applied.squares) not in (0, len(self.norms.names)):
            self.forget()
        self._steps.append(applied)

    def find_resets(self) -> list[MomentReset]:
        """Return the layers that were reset between the last two readings, once they have come.

        The numbers of a step were copied after a reading in it: nothing waits.
        """
        reading = self._reading
        if reading is None or not self._steps or self._steps[-1].step < reading.step:
            return []
        copied = self._copies.pop() if self._copies is not None else None
        before, self._reading, self._before = self._before, None, None
        if copied is None:
            return []
        self._before = now = reading._replace(sums=copied[0])
        if before is None or before[1:3] != now[1:3]:
            return []
        steps = [each for each in self._steps if before.step <= each.step < now.step]
        if len(steps) != now.step - before.step:
            return []
        return find_resets(before, now, steps, self.norms.names)


def find_resets(
    before: MomentSums,
    now: MomentSums,
    steps: Sequence[AppliedGradients],
    names: Sequence[str],
) -> list[MomentReset]:
    """Return the layers whose second moments were set to 0 between two readings.

    At least three quarters of the layers must have exactly the expected moments, so that it is
    known how the optimizer computes them.

    Args:
        before: the earlier reading.
        now: the later one.
        steps: the steps between them.
        names: names of the parameters in ``AppliedGradients.squares``.
    """
    updates = [each for each in steps if each.squares]
    layers = list(dict.fromkeys(map(layer_of, now.names)))
    if len(layers) < _MIN_LAYERS or not updates:
        return []
    position, where = {name: i for i, name in enumerate(names)}, np.zeros(len(now.names), np.int64)
    where[:] = [layers.index(layer_of(name)) for name in now.names]
    at = [position[name] for name in now.names]
    squares = np.array([each.squares for each in updates])[:, at]
    squares *= np.array([[each.factor] for each in updates])
    betas = np.array(now.betas)
    ages = np.arange(len(updates))[::-1, None]
    added = _sum_by_layer((1.0 - betas) * betas**ages * squares, where, len(layers))
    kept = _sum_by_layer((betas ** len(updates) * before.sums)[None], where, len(layers))[0]
    actual = _sum_by_layer(np.array(now.sums)[None], where, len(layers))[0]
    # Row i: what the updates from the i-th on have added.
    since = np.concatenate([added[::-1].cumsum(axis=0)[::-1], np.zeros((1, len(layers)))])
    expected = kept + since[0]
    if not np.isfinite(expected).all() or not np.isfinite(actual).all():
        return []
    is_exact = np.abs(actual - expected) <= _EXACT * expected
    if is_exact.sum() < 0.75 * len(layers):
        return []
    resets = []
    for i in np.flatnonzero(actual < _RESET * expected).tolist():
        first = int(np.argmin(np.abs(since[:, i] - actual[i])))
        if abs(since[first, i] - actual[i]) <= _EXACT * actual[i]:
            step = updates[first].step if first < len(updates) else now.step
            resets.append(MomentReset(layers[i], step, float(1.0 - actual[i] / expected[i])))
    return resets


def _sum_by_layer(
    values: NDArray[np.float64], where: NDArray[np.int64], num_layers: int
) -> NDArray[np.float64]:
    """Return the sum of each row's values of a layer's parameters."""
    sums = np.zeros((len(values), num_layers))
    np.add.at(sums, (slice(None), where), values)
    return sums


def _sums(moments: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the sum of each second moment, 1-dim float64 on the device; does not wait."""
    sums: list[Tensor] = [torch.empty(0)] * len(moments)
    for positions in by_kind(moments):
        group = [moments[i] for i in positions]
        dtype = torch.promote_types(group[0].dtype, torch.float32)
        # No moment is below 0, so the sum of magnitudes is the sum: one fused pass for all.
        of_group = torch.stack(torch._foreach_norm(group, 1, dtype=dtype))
        for i, part in zip(positions, copy_to(of_group.double(), device).unbind(), strict=True):
            sums[i] = part
    return torch.stack(sums)


def _second_moments(
    norms: GradNorms, optimizers: Sequence[Optimizer]
) -> list[tuple[str, float, Tensor]]:
    """Return name, decay and tensor of the second moment of each parameter that has one."""
    names = {id(param): name for name, param in zip(norms.local_names, norms.params, strict=True)}
    moments = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for param in group["params"] if "betas" in group else ():
                state, name = optimizer.state.get(param), names.get(id(param))
                moment = state.get("exp_avg_sq") if isinstance(state, Mapping) else None
                # Sharded and quantized state is another type, of which a sum may be collective.
                if not name or type(moment) is not Tensor or moment.shape != param.shape:
                    continue
                # A state that is kept on the host for a GPU is too large to be read there.
                is_near = moment.device.type == norms.device.type
                if is_near and moment.numel() and moment.is_floating_point():
                    moments.append((name, float(group["betas"][1]), moment))
    return moments


__all__ = ["EVERY", "AppliedGradients", "MomentCheck", "MomentReset", "MomentSums", "find_resets"]
