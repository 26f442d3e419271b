"""What a training's state needs of a device's memory: all but activations and workspace."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_hooks.guard.optimizer_state import is_dense
from trainer_hooks.step.shards import local_tensor


class MemoryEstimate:
    """Bytes of parameters, their gradients, optimizer states and buffers on one device.

    Taken when made, and anew before the first step, the second, the fourth...: optimizers make
    their state at their first update, which may have been skipped. What is shared counts once,
    what is sparse not at all.
    """

    def __init__(
        self, model: nn.Module, optimizers: Iterable[Optimizer], device: torch.device
    ) -> None:
        self._model = model
        self._optimizers = tuple(optimizers)
        self._device = device
        self._calls = 0
        self._bytes = self._take()

    def now(self) -> int:
        """Return the bytes; call once a step."""
        self._calls += 1
        if self._calls & (self._calls - 1) == 0:
            self._bytes = self._take()
        return self._bytes

    def _take(self) -> int:
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        trained = [param for group in groups for param in group["params"]]
        states = [state for o in self._optimizers for state in o.state.values()]
        kept = [*trained, *self._model.parameters(), *self._model.buffers(), *_tensors(states)]
        gradients = sum(size for _, size in self._sizes(p for p in trained if p.requires_grad))
        return sum(dict(self._sizes(kept)).values()) + gradients

    def _sizes(self, tensors: Iterable[Tensor]) -> Iterator[tuple[int, int]]:
        """Yield address and bytes of what lies on the device."""
        for tensor in tensors:
            local = local_tensor(tensor)
            if local.device == self._device and is_dense(local) and local.numel():
                yield local.data_ptr(), local.numel() * local.element_size()


def _tensors(state: Any) -> Iterator[Tensor]:
    """Yield the tensors of an optimizer's nested state."""
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, dict | list | tuple):
        for part in state.values() if isinstance(state, dict) else state:
            yield from _tensors(part)
