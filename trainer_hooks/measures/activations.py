"""Magnitude and dead features of module outputs, measured by forward hooks.

Each rank measures its own part of the batch and, if modules are sharded, of the output. Only rank
0's values are stored; of other ranks, only whether the output is finite. They measure as much as
rank 0 does: they would wait for it in the next collective anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from trainer_hooks.failopen import FaultCounter
from trainer_hooks.ranks import Ranks
from trainer_hooks.tensors.gradients import clean_name, local_tensor
from trainvitals.errors import UsageError

_NOT_MEASURED = -1.0
"""Marks a missing value; all measured values are at least 0."""

_IMAGE_DIMS = (4, 5)
"""Outputs with this many dimensions are images or volumes, whose features are dimension 1."""


class Activation(NamedTuple):
    """Output of one module in one step."""

    rms: float
    max_abs: float | None
    dead_ratio: float | None
    """Fraction of features that are 0 for every element of the batch; None if another rank's."""


def choose_modules(
    named_modules: Iterable[tuple[str, nn.Module]], patterns: tuple[str, ...], ranks: Ranks
) -> dict[str, nn.Module | None]:
    """Return the modules of all ranks that match the patterns, to measure their activations.

    Collective. A module that only other ranks have is None: another expert, or stage of a pipeline.

    Raises:
        UsageError: a pattern matches no module on any rank.
    """
    modules: dict[str, nn.Module] = {}
    for name, module in named_modules:
        modules.setdefault(clean_name(name), module)  # the wrapper instead of the module inside
    modules.pop("", None)
    matching = [[name for name in modules if fnmatchcase(name, p)] for p in patterns]
    everyone = ranks.gather(matching)
    for i, pattern in enumerate(patterns):
        if not any(names[i] for names in everyone):
            raise UsageError(
                f"SignalSettings.activations: no module is named {pattern!r}",
                hint=f"the model has {', '.join(list(modules)[:8])}",
            )
    union = dict.fromkeys(name for rank in everyone for names in rank for name in names)
    return {name: modules.get(name) for name in union}


class Activations:
    """Measures module outputs in sampled steps; the values stay on the device until readback.

    ``modules``: those of all ranks, None for one that this rank does not have.

    Only the first training forward of a module counts; later micro-batches and the recomputation of
    activation checkpointing do not.
    """

    def __init__(
        self, modules: Mapping[str, nn.Module | None], device: torch.device, faults: FaultCounter
    ) -> None:
        self.names = tuple(modules)
        self._faults = faults
        self._sampled = False
        self._seen: set[int] = set()
        shape = (len(self.names), len(Activation._fields))
        self._figures = torch.full(shape, _NOT_MEASURED, dtype=torch.float64, device=device)
        self._handles = [
            module.register_forward_hook(self._make_forward_hook(i))
            for i, module in enumerate(modules.values())
            if module is not None
        ]

    @property
    def size(self) -> int:
        """Return the number of measured values that are read back."""
        return self._figures.numel()

    def reset(self, *, sampled: bool) -> None:
        """Start a step's measurement, and discard the values of the last one."""
        if self._seen:
            self._figures.fill_(_NOT_MEASURED)
            self._seen.clear()
        self._sampled = sampled

    def numbers(self) -> Tensor:
        """Return the measured values on the device, 1-dim."""
        return self._figures.view(-1)

    def nonfinite(self) -> Tensor:
        """Return 1 for each module whose output is not finite, otherwise 0; 1-dim float64."""
        return (~torch.isfinite(self._figures[:, 0])).to(torch.float64)

    def unpack(self, numbers: list[float]) -> dict[str, Activation]:
        """Convert values on the host; return only modules that were measured in the step."""
        width = len(Activation._fields)
        rows = (numbers[i : i + width] for i in range(0, len(numbers), width))
        named_rows = zip(self.names, rows, strict=True)
        return {name: Activation(*row) for name, row in named_rows if row[0] != _NOT_MEASURED}

    def release(self) -> None:
        """Remove the hooks that measure module outputs."""
        for handle in self._handles:
            handle.remove()

    def _make_forward_hook(self, index: int) -> Callable[[nn.Module, Any, Any], None]:
        def measure(module: nn.Module, _inputs: Any, output: Any) -> None:
            if not self._sampled or index in self._seen or not module.training:
                return
            with self._faults.fail_open("activations"), torch.no_grad():
                tensor = _tensor_in(output)
                if tensor is not None:
                    self._figures[index] = _activation_figures(tensor)
                    self._seen.add(index)

        return cast(Callable[[nn.Module, Any, Any], None], torch.compiler.disable(measure))


def _tensor_in(output: Any) -> Tensor | None:
    """Return this rank's part of the first float tensor in a module's output, to measure it.

    None for a partial sum (DTensor): completing it would need a collective.
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


def _activation_figures(output: Tensor) -> Tensor:
    """Measure rms, largest magnitude and fraction of dead features, without copying the output."""
    wide = torch.float64 if output.dtype == torch.float64 else torch.float32
    norm = torch.linalg.vector_norm(output, dtype=wide)
    feature = 1 if output.dim() in _IMAGE_DIMS else output.dim() - 1
    others = [d for d in range(output.dim()) if d != feature]
    # Without dimensions given, torch would reduce all of them.
    each = torch.linalg.vector_norm(output, torch.inf, dim=others) if others else output.abs()
    return torch.stack(
        (norm / output.numel() ** 0.5, each.max().to(wide), (each == 0).to(wide).mean())
    ).to(torch.float64)
