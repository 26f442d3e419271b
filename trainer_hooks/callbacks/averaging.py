"""What an average of the weights is made of: its tensors, its update, the way to host memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from trainer_hooks.tensors.events import record_event
from trainer_hooks.tensors.gradients import local_tensor

Pair = tuple[Tensor, Tensor]
"""A part of the average, and of the weights: this rank's."""

_MOST_CONVERTED = 2**24
"""Elements of weights that are converted to the average's type at a time."""


class Late:
    """A step's verdict and weights on their way to host memory, in pinned buffers that stay."""

    def __init__(self) -> None:
        self.pending = False
        self._due = False
        self._events: dict[torch.device, torch.cuda.Event] = {}
        self._bad: Tensor | None = None
        self._buffers: dict[str, Tensor] = {}
        self._taken: dict[str, Tensor] = {}

    def send_verdict(self, bad: Tensor, *, due: bool) -> None:
        """Send the verdict; ``due`` says whether weights will follow."""
        self.pending, self._due, self._taken = True, due, {}
        self._bad = _sent(bad, self._bad)
        self._note(bad.device)

    def send_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Send weights, if they are due; the next update comes after them on their stream."""
        if self._due:
            for name, weight in weights.items():
                self._buffers[name] = _sent(weight, self._buffers.get(name))
                self._taken[name] = self._buffers[name]
            for device in {weight.device for weight in weights.values()}:
                self._note(device)

    def _note(self, device: torch.device) -> None:
        if device.type == "cuda":
            self._events[device] = record_event(device)

    def arrived(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Return verdict and weights once they are there."""
        assert self._bad is not None, "nothing is under way"
        for event in self._events.values():
            event.synchronize()
        self.pending = False
        return self._bad, self._taken


def _sent(tensor: Tensor, buffer: Tensor | None) -> Tensor:
    """Start the copy of a tensor to host memory; pinned, so that nothing waits for it."""
    if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
        buffer = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    return buffer.copy_(tensor, non_blocking=tensor.is_cuda)


def start(weight: Tensor, device: torch.device | None, dtype: torch.dtype | None) -> Tensor:
    """Return the average of a weight before any update: a DTensor where that is one."""
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
    """Move averages by ``rate`` of the way to the weights; where ``skip`` is 1, touch nothing.

    Fused SGD that climbs (``maximize``) with a weight decay of 1 computes just that:
    ``average -= rate * (average - weight)``, in one pass. Its kernel ends before the first
    element where ``found_inf`` is 1, so neither NaN nor -0.0 is ever met there.
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
    """Yield the pairs with weights laid out as their averages, as many as memory should hold."""
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
