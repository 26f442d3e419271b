"""Order of work between a GPU and its host."""

import torch
from torch import Tensor


def record_event(device: torch.device, *, timed: bool = False) -> torch.cuda.Event:
    """Record an event behind the current work of a device, and return it.

    It uses the stream of ``device``, whatever the process's current device is: an event on the
    stream of another GPU happens at once, and numbers would be read before their copy has ended. A
    host that waits for the event sleeps; otherwise it would spin, and a rank that waits for a hung
    GPU would look like one that computes.

    Args:
        device: a CUDA device.
        timed: whether ``elapsed_time`` will be asked for.
    """
    event = torch.cuda.Event(enable_timing=timed, blocking=True)
    event.record(torch.cuda.current_stream(device))
    return event


def copy_to(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on a device; waits only if that is the host.

    A copy to the host that does not wait may be read before it has ended.
    """
    return tensor.to(device, non_blocking=device.type != "cpu")
