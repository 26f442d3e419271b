"""Clearing of the gradients after a step, also where a captured CUDA graph owns them.

A replay of a captured backward writes to the memory that the gradients had at the capture. With
``param.grad = None`` these gradients would reach no optimizer, and the training would stop without
an error; such gradients are zeroed in place.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from trainer_hooks.tensors.gradients import local_tensor


def is_graph_memory(tensor: Tensor) -> bool:
    """Return whether the tensor is in the private memory pool of a CUDA graph.

    Walks over all segments of the allocator, so do not call it in every step.
    """
    try:
        segments = torch.cuda.memory_snapshot()
    except RuntimeError:  # such as the allocator cudaMallocAsync, which cannot list them
        return False
    address = tensor.data_ptr()
    return any(
        segment["address"] <= address < segment["address"] + segment["total_size"]
        and tuple(segment["segment_pool_id"]) != (0, 0)
        for segment in segments
    )


class GradientClearing:
    """Clears the gradients of optimizers: with ``set_to_none``, unless a graph owns them.

    A graph owns them if a step has gradients in a graph's memory although no backward has called
    autograd's hooks. One parameter, the last that requires a gradient, stands for all. Memory alone
    does not tell: ``torch.compile(mode="reduce-overhead")`` also returns graph memory, but its
    backward calls the hooks, and accumulates twice into a gradient that is zeroed in place.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = tuple(optimizers)
        self._is_in_place = False
        self._was_backward = False
        self._is_checked = False
        self._witness: Tensor | None = None
        self._witness_hook: RemovableHandle | None = None
        for optimizer in self._optimizers:
            for param in (p for group in optimizer.param_groups for p in group["params"]):
                # Without a GPU there are no graphs, and nobody pays for the hook.
                if param.requires_grad and param.is_leaf and torch.cuda.is_initialized():
                    self._witness = param
        if self._witness is not None:
            self._witness_hook = self._witness.register_post_accumulate_grad_hook(self._accumulated)

    def clear(self) -> None:
        """Clear all gradients. Call after the update."""
        if self._witness_hook is not None:
            self._check()
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=not self._is_in_place)

    def release(self) -> None:
        """Remove the hook from the parameter."""
        if self._witness_hook is not None:
            self._witness_hook.remove()
            self._witness_hook = None

    def _accumulated(self, param: Tensor) -> None:
        # A capture calls the hooks once, its replays never.
        if not (param.is_cuda and torch.cuda.is_current_stream_capturing()):
            self._was_backward = True

    def _check(self) -> None:
        assert self._witness is not None
        grad = self._witness.grad
        if self._was_backward:
            self._was_backward = self._is_checked = False
        elif grad is not None and not self._is_checked:
            # FSDP sets gradients without hooks too, so its memory is checked only once.
            self._is_checked = True
            if is_graph_memory(local_tensor(grad)):
                self._is_in_place = True
                self.release()
