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
from torch import Tensor
from torch.optim import Optimizer

from trainer_hooks.tensors.events import AsyncCopy, copy_to
from trainer_hooks.tensors.gradients import GradNorms, by_kind, layer_of

EVERY = 50
"""Steps between two readings: each reads the second moments once, as a gradient norm reads the
gradients in every step."""
_MOST_PARAMETERS = 10_000
"""Maximum number of parameters: the norms of all of them are kept for ``EVERY`` steps."""
_EXACT = 0.001
"""Relative error up to which sums are equal. Float32 is far below it; bfloat16 is above it."""
_MOST_LEFT = 0.95
"""Share of the expected sum that is left at most of a state that counts as reset."""
_ROUNDING = 1e-5
"""Largest relative error of a sum in float32."""
_MOST_ROWS = 3
"""Steps of a reset that may explain the moments equally well."""
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
    """Squares of all parameters, as measured; empty if nothing was updated."""
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

    All parameters of a layer must have exactly what the updates from one step on have added, and
    those of at least three quarters of the layers exactly the expected moments: so it is known how
    the optimizer computes them.

    Args:
        before: the earlier reading.
        now: the later one.
        steps: the steps between them.
        names: names of the parameters in ``AppliedGradients.squares``.
    """
    updates = [each for each in steps if each.squares]
    if not updates:
        return []
    squares, actual = np.array([each.squares for each in updates]), np.array(now.sums)
    measured = (squares, actual, np.array(before.sums))
    if not all(np.isfinite(part).all() for part in measured):
        return []
    if now.names != tuple(names):  # some parameters have no second moment
        position = {name: i for i, name in enumerate(names)}
        squares = squares[:, [position[name] for name in now.names]]
    is_uniform = len(set(now.betas)) == 1  # usually: then one power per step is enough
    betas = np.array(now.betas[:1] if is_uniform else now.betas)
    ages = np.arange(len(updates))[::-1, None]
    factors = np.array([[each.factor] for each in updates])
    added = (1.0 - betas) * betas**ages * factors * squares
    expected = betas ** len(updates) * before.sums + added.sum(axis=0)
    is_exact = np.abs(actual - expected) <= _EXACT * expected
    if is_exact.all():
        return []
    # Row i: what the updates from the i-th on have added; the last row is 0.
    since = np.concatenate([added[::-1].cumsum(axis=0)[::-1], np.zeros((1, len(actual)))])
    nothing_left = np.where(since > 0.0, np.inf, 0.0)
    scale = np.where(actual > 0.0, actual, 1.0)
    errors = np.where(actual > 0.0, np.abs(since - actual) / scale, nothing_left)
    layers: dict[str, list[int]] = {}
    for i, name in enumerate(now.names):
        layers.setdefault(layer_of(name), []).append(i)
    changed = {layer: at for layer, at in layers.items() if not is_exact[at].all()}
    if len(layers) < _MIN_LAYERS or len(changed) > len(layers) // 4:
        return []
    resets = []
    for layer, at in changed.items():
        worst = errors[:, at].max(axis=1)
        first = int(np.argmin(worst))
        left = float(actual[at].sum() / expected[at].sum())
        # Gradients that explode after a reset hide those of its first steps.
        is_dated = (worst <= max(_ROUNDING, 10.0 * worst[first])).sum() <= _MOST_ROWS
        if worst[first] <= _EXACT and is_dated and left < _MOST_LEFT:
            step = updates[first].step if first < len(updates) else now.step
            resets.append(MomentReset(layer, step, 1.0 - left))
    return resets


def _sums(moments: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the sums of the second moments, 1-dim float64 on the device; does not wait."""
    sums: list[Tensor] = [torch.empty(0)] * len(moments)
    for positions in by_kind(moments):
        group = [moments[i] for i in positions]
        dtype = torch.promote_types(group[0].dtype, torch.float32)
        if device.type == "cpu":
            of_group = torch.stack([moment.sum(dtype=dtype) for moment in group])
        else:  # no moment is below 0, so the sum of magnitudes is the sum: one pass for all
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
