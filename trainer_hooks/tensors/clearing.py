"""Clearing of the gradients after a step, also where a captured CUDA graph owns them.

A replay of a captured backward writes to the memory that the gradients had at the capture. With
``param.grad = None`` these gradients would reach no optimizer, and the training would stop without
an error; such gradients are zeroed in place.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from trainer_hooks.tensors.gradients import local_tensor
from trainer_hooks.tensors.optimizer_state import params_of

_MAX_LOOKS = 16
"""Walks over the allocator's memory per optimizer; a large job takes milliseconds for each."""


def is_graph_memory(tensor: Tensor) -> bool:
    """Return whether the tensor is in the private memory pool of a CUDA graph.

    Walks over all segments of the allocator: for rare questions only.
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


def has_compiled_graphs() -> bool:
    """Return whether compiled code replays CUDA graphs here (``mode="reduce-overhead"``)."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None or not torch.cuda.is_initialized():
        return False
    num_devices = torch.cuda.device_count()
    return any(trees.get_manager(i, create_if_none_exists=False) for i in range(num_devices))


class GradientClearing:
    """Clears the gradients of optimizers: with ``set_to_none``, unless a graph owns them."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._parts = [_OptimizerGradients(optimizer) for optimizer in optimizers]

    def clear(self) -> None:
        """Clear all gradients. Call after the update."""
        for part in self._parts:
            part.clear()

    def release(self) -> None:
        """Remove the hooks from the parameters."""
        for part in self._parts:
            part.release()


class _OptimizerGradients:
    """The gradients of one optimizer.

    A graph owns them if a step has gradients in a graph's memory although no backward has called
    autograd's hooks since the capture. One parameter with a gradient, the witness, stands for all.
    Memory alone does not tell: compiled code also returns graph memory, but its backward calls the
    hooks, and accumulates twice into a gradient that is zeroed in place.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._is_in_place = False
        self._was_backward = False
        self._is_checked = False
        self._num_looks = 0
        self._witness: Tensor | None = None
        self._witness_hook: RemovableHandle | None = None
        # Without a GPU there are no graphs, and nobody pays for the hook.
        if torch.cuda.is_initialized():
            params = params_of([optimizer])
            self._choose([p for p in params if p.requires_grad and p.is_leaf])

    def clear(self) -> None:
        """Clear one optimizer's gradients: in place if a CUDA graph owns them."""
        if self._witness_hook is not None:
            self._check_witness()
        zero_grad = self._optimizer.zero_grad
        if self._is_in_place or getattr(zero_grad, "__func__", None) is not Optimizer.zero_grad:
            zero_grad(set_to_none=not self._is_in_place)
            return
        # Torch's method also opens a range of its profiler: that takes longer than ten parameters.
        for group in self._optimizer.param_groups:
            for param in group["params"]:
                param.grad = None

    def release(self) -> None:
        """Remove the hook from the parameter whose gradient is the witness."""
        if self._witness_hook is not None:
            self._witness_hook.remove()
            self._witness_hook = None

    def _choose(self, params: Sequence[Tensor]) -> None:
        """Make the last of the parameters the witness."""
        if params:
            self.release()
            self._witness = params[-1]
            self._witness_hook = params[-1].register_post_accumulate_grad_hook(self._mark_backward)

    def _mark_backward(self, _param: Tensor) -> None:
        """Note that a backward, not a capture, wrote the witness's gradient."""
        # A capture calls the hooks once, its replays never.
        self._was_backward = not torch.cuda.is_current_stream_capturing()

    def _check_witness(self) -> None:
        """Check whether a CUDA graph owns the gradients, by the witness's gradient."""
        assert self._witness is not None
        if self._witness.grad is None:
            self._replace_witness()
        elif self._was_backward:
            self._was_backward = self._is_checked = False
        elif not self._is_checked:
            # FSDP sets gradients without hooks too, so its memory is checked only once.
            self._is_checked = True
            self._look_at(self._witness.grad)

    def _replace_witness(self) -> None:
        """Choose a parameter that has a gradient: frozen or unused ones never have one."""
        params = [
            p
            for p in params_of([self._optimizer])
            if p.grad is not None and p.requires_grad and p.is_leaf
        ]
        if params and self._num_looks < _MAX_LOOKS:
            self._choose(params)
            self._was_backward = self._is_checked = False
            # Whether its hook would have been called is unknown for this step.
            if not has_compiled_graphs():
                assert params[-1].grad is not None
                self._look_at(params[-1].grad)

    def _look_at(self, grad: Tensor) -> None:
        """Clear gradients in place from now on if this one is a graph's memory."""
        self._num_looks += 1
        if self._num_looks <= _MAX_LOOKS and is_graph_memory(local_tensor(grad)):
            self._is_in_place = True
            self.release()
