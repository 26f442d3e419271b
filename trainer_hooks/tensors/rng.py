"""RNG states of this process, captured and restored as plain values and tensors."""

import random
import sys
from typing import Any

import torch


def capture_rng() -> dict[str, Any]:
    """Return the state of every RNG of this process; does not wait for a device.

    Python's, numpy's if it was imported, torch's for the CPU, and torch's of every CUDA device once
    CUDA is in use.
    """
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        state["numpy"] = (kind, keys.tolist(), *rest)
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def capture_now() -> dict[str, Any]:
    """Return the RNG state at a batch, with only the current CUDA device's."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = numpy.random.get_state()
    if torch.cuda.is_initialized():
        state["cuda"] = [torch.cuda.get_rng_state()]
    return state


def restore_rng(state: dict[str, Any]) -> None:
    """Restore every captured RNG; an RNG that was not captured keeps its state."""
    random.setstate(_as_tuples(state["python"]))
    torch.set_rng_state(state["torch"])
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        numpy.random.set_state(tuple(state["numpy"]))
    if "cuda" in state and torch.cuda.is_available():
        for device, generator in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(generator, device)


def _as_tuples(value: Any) -> Any:
    """Return an RNG state with its lists as tuples, as Python's and numpy's RNG need it."""
    return tuple(_as_tuples(v) for v in value) if isinstance(value, list | tuple) else value
