"""Building blocks of averaged weights: tensors, fused update, copies to host memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from trainer_hooks.tensors.events import record_event
from trainer_hooks.tensors.gradients import local_tensor

Pair = tuple[Tensor, Tensor]
"""This rank's part of an average, and the same part of the weights."""

_MOST_CONVERTED = 2**24
"""Elements of weights converted to the average's dtype at a time."""


class EmaCopies:
    """Asynchronous copies of a step's verdict and weights to reused pinned buffers."""

    def __init__(self) -> None:
        self.pending = False
        self._due = False
        self._events: dict[torch.device, torch.cuda.Event] = {}
        self._bad: Tensor | None = None
        self._buffers: dict[str, Tensor] = {}
        self._taken: dict[str, Tensor] = {}

    def send_verdict(self, bad: Tensor, *, due: bool) -> None:
        """Start the copy of the verdict; ``due``: whether weights will follow."""
        self.pending, self._due, self._taken = True, due, {}
        self._bad = _send_to_host(bad, self._bad)
        self._record_cuda_event(bad.device)

    def send_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Start the copy of the weights, if due; the stream orders it before the next update."""
        if self._due:
            for name, weight in weights.items():
                self._buffers[name] = _send_to_host(weight, self._buffers.get(name))
                self._taken[name] = self._buffers[name]
            for device in {weight.device for weight in weights.values()}:
                self._record_cuda_event(device)

    def _record_cuda_event(self, device: torch.device) -> None:
        """Record on a GPU when the EMA's copies so far have ended; other devices need no event."""
        if device.type == "cuda":
            self._events[device] = record_event(device)

    def receive_copies(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Wait for the copies; return verdict and weights."""
        assert self._bad is not None, "nothing is under way"
        for event in self._events.values():
            event.synchronize()
        self.pending = False
        return self._bad, self._taken


def _send_to_host(tensor: Tensor, buffer: Tensor | None) -> Tensor:
    """Start the EMA's copy of a tensor to pinned host memory, so that the host does not wait."""
    if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
        buffer = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    return buffer.copy_(tensor, non_blocking=tensor.is_cuda)


def initial_average(
    weight: Tensor, device: torch.device | None, dtype: torch.dtype | None
) -> Tensor:
    """Return the initial average of a weight; a DTensor if the weight is one."""
    if weight.is_complex():
        dtype = weight.dtype
    elif dtype is None:
        dtype = torch.float32 if weight.itemsize < 4 else weight.dtype
    average = torch.zeros_like(
        weight.detach(), dtype=dtype, device=device or weight.device, requires_grad=False
    )
    with torch.no_grad():
        local_tensor(average).copy_(local_tensor(weight.detach()))
    return average


def fused_update(pairs: Sequence[Pair], rate: Tensor, skip: Tensor) -> None:
    """Move each average toward its weight by the factor ``rate``, or not at all if ``skip`` is 1.

    Fused SGD with ``maximize`` and a weight decay of 1 computes exactly ``average -= rate *
    (average - weight)`` in one pass. Its kernel returns before the first element if ``found_inf``
    is 1, so not even NaN or -0.0 changes.
    """
    torch._fused_sgd_(
        [average for average, _ in pairs],
        [weight for _, weight in pairs],
        [],
        weight_decay=1.0,
        momentum=0.0,
        lr=rate,
        dampening=0.0,
        nesterov=False,
        maximize=True,
        is_first_step=False,
        grad_scale=None,
        found_inf=skip,
    )


def in_chunks(pairs: Iterable[Pair]) -> Iterator[list[Pair]]:
    """Yield EMA pairs in bounded chunks, weights converted to the averages' layout."""
    chunk: list[Pair] = []
    num_converted = 0
    for average, weight in pairs:
        if (weight.dtype, weight.device, weight.stride()) != (
            average.dtype,
            average.device,
            average.stride(),
        ):
            if chunk and num_converted + weight.numel() > _MOST_CONVERTED:
                yield chunk
                chunk, num_converted = [], 0
            weight = torch.empty_like(average).copy_(weight)
            num_converted += weight.numel()
        chunk.append((average, weight))
    if chunk:
        yield chunk
