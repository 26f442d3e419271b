"""Page-locked host memory of an exact size, for copies from a GPU that nothing waits for.

Torch's own allocator of pinned memory rounds every tensor up to a power of two, so a copy of a
state would take up to twice its size, and it allocates at the first use, inside the run.
"""

from __future__ import annotations

import contextlib
import weakref

import torch
from torch import Tensor

_ALIGNMENT = 64


def register_with_cuda(memory: Tensor, device: torch.device) -> bool:
    """Page-lock memory so that copies from the GPU are asynchronous; return whether that worked.

    The memory can be used either way. It is released together with the tensor that owns it.
    """
    with torch.cuda.device(device):  # otherwise a context is made on the process's first GPU
        cudart = torch.cuda.cudart()
        address, size = memory.data_ptr(), memory.numel()
        if int(cudart.cudaHostRegister(address, size, 0)) == 0:
            weakref.finalize(memory, cudart.cudaHostUnregister, address)
            return True
        # CUDA keeps the error for the next check of a kernel, which would fail in its place.
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=device)
        return False


class PinnedBlock:
    """One block of page-locked memory, from which buffers are taken one after another.

    Its ``size`` in bytes is without gaps between the buffers. On a CPU nothing is page-locked.
    """

    def __init__(self, size: int, num_buffers: int, device: torch.device) -> None:
        self._memory = torch.empty(size + num_buffers * _ALIGNMENT, dtype=torch.uint8, device="cpu")
        self._used = -self._memory.data_ptr() % _ALIGNMENT
        if device.type == "cuda":
            register_with_cuda(self._memory, device)

    def take(self, like: Tensor) -> Tensor | None:
        """Return an uninitialized buffer of the tensor's type, shape and order of elements.

        None if there is no room left.
        """
        spec = torch.empty_like(like, device="meta")
        end = self._used + spec.numel() * spec.element_size()
        if end > self._memory.numel():
            return None
        flat = self._memory[self._used : end].view(spec.dtype)
        self._used = end + -end % _ALIGNMENT
        return flat.as_strided(spec.shape, spec.stride(), flat.storage_offset())
