"""Magnitude of modules' outputs and their dead features, by forward hooks.

Of each rank's own part of the batch and, where modules are sharded, of its part of the output. What
is written is rank 0's; of the others, only whether it is finite. They measure as much as rank 0
does: all would wait for it anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from trainer_hooks.failopen import FaultCounter
from trainer_hooks.tensors.gradients import clean_name, local_tensor, unwrap
from trainvitals.errors import UsageError

_NOT_MEASURED = -1.0
"""Stands for a missing value; no figure of ours is negative."""

_IMAGE_DIMS = (4, 5)
"""Outputs of as many dimensions are images or volumes: their features are dimension 1."""


class Activation(NamedTuple):
    """One module's output in one step."""

    rms: float
    max_abs: float
    dead_ratio: float
    """Share of features that are 0 for every element of the batch."""


def choose(model: nn.Module, patterns: tuple[str, ...]) -> dict[str, nn.Module]:
    """Return the modules that a pattern names.

    Raises:
        UsageError: a pattern names none.
    """
    modules: dict[str, nn.Module] = {}
    for name, module in unwrap(model)[0].named_modules():
        modules.setdefault(clean_name(name), module)  # the wrapper, not what it lies around
    modules.pop("")
    selected: dict[str, nn.Module] = {}
    for pattern in patterns:
        matching = {name: m for name, m in modules.items() if fnmatchcase(name, pattern)}
        if not matching:
            raise UsageError(
                f"SignalSettings.activations: no module is named {pattern!r}",
                hint=f"the model has {', '.join(list(modules)[:8])}",
            )
        selected.update(matching)
    return selected


class Activations:
    """Keeps the figures of a sampled step on the device until they are read back.

    A module's first forward in training counts; the recomputation of activation checkpointing and
    further micro-batches do not.
    """

    def __init__(
        self, modules: Mapping[str, nn.Module], device: torch.device, faults: FaultCounter
    ) -> None:
        self.names = tuple(modules)
        self._faults = faults
        self._sampled = False
        self._seen: set[int] = set()
        shape = (len(self.names), len(Activation._fields))
        self._figures = torch.full(shape, _NOT_MEASURED, dtype=torch.float64, device=device)
        self._handles = [
            module.register_forward_hook(self._hook(i)) for i, module in enumerate(modules.values())
        ]

    @property
    def size(self) -> int:
        """Numbers that are read back."""
        return self._figures.numel()

    def reset(self, *, sampled: bool) -> None:
        """Begin a step: forget the last one's figures."""
        if self._seen:
            self._figures.fill_(_NOT_MEASURED)
            self._seen.clear()
        self._sampled = sampled

    def numbers(self) -> Tensor:
        """Return the figures as they lie on the device."""
        return self._figures.view(-1)

    def nonfinite(self) -> Tensor:
        """Return of each module 1 where its output is not finite, else 0."""
        return (~torch.isfinite(self._figures[:, 0])).to(torch.float64)

    def unpack(self, numbers: list[float]) -> dict[str, Activation]:
        """Return, of what came to the host, the modules that were measured."""
        width = len(Activation._fields)
        rows = (numbers[i : i + width] for i in range(0, len(numbers), width))
        named_rows = zip(self.names, rows, strict=True)
        return {name: Activation(*row) for name, row in named_rows if row[0] != _NOT_MEASURED}

    def release(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _hook(self, index: int) -> Callable[[nn.Module, Any, Any], None]:
        def measure(module: nn.Module, _inputs: Any, output: Any) -> None:
            if not self._sampled or index in self._seen or not module.training:
                return
            with self._faults.fail_open("activations"), torch.no_grad():
                tensor = _tensor_in(output)
                if tensor is not None:
                    self._figures[index] = _figures(tensor)
                    self._seen.add(index)

        return cast(Callable[[nn.Module, Any, Any], None], torch.compiler.disable(measure))


def _tensor_in(output: Any) -> Tensor | None:
    """Return the first tensor of floating numbers in a module's output, this rank's part of it.

    A partial sum is none: to complete it were a collective.
    """
    if isinstance(output, Tensor):
        if any(p.is_partial() for p in getattr(output, "placements", ())):
            return None
        output = local_tensor(output)
        usable = output.is_floating_point() and output.numel() > 0
        return output.detach() if usable else None
    parts = output.values() if isinstance(output, Mapping) else output
    if not isinstance(output, list | tuple | Mapping):
        return None
    return next((t for part in parts if (t := _tensor_in(part)) is not None), None)


def _figures(output: Tensor) -> Tensor:
    """Return rms, largest magnitude and share of dead features, without a copy of the output."""
    wide = torch.float64 if output.dtype == torch.float64 else torch.float32
    norm = torch.linalg.vector_norm(output, dtype=wide)
    feature = 1 if output.dim() in _IMAGE_DIMS else output.dim() - 1
    others = [d for d in range(output.dim()) if d != feature]
    # Of no dimensions torch would reduce all.
    each = torch.linalg.vector_norm(output, torch.inf, dim=others) if others else output.abs()
    return torch.stack(
        (norm / output.numel() ** 0.5, each.max().to(wide), (each == 0).to(wide).mean())
    ).to(torch.float64)
