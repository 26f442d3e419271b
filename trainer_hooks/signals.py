"""What a rank measures on the host in a step: times, tokens, memory, rates, utilisation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from trainvitals.clock import Clock
from trainvitals.flops import peak_flops


@dataclass(slots=True)
class HostStep:
    """Host measurements of one step, kept until the step's reduced numbers come back."""

    step: int
    attempt: int
    time_unix_ns: int
    monotonic_ns: int
    duration_seconds: float | None
    data_wait_seconds: float | None
    monitor_seconds: float | None
    learning_rates: list[float | None]
    lr_factor: float
    max_norm: float | None
    tokens: int | None
    weighted: bool
    """Whether the weights of the step's losses are numbers of tokens."""
    memory_allocated_bytes: float | None
    memory_peak_bytes: float | None
    epoch: int | None
    batch_index: int | None


class StepClock:
    """Durations of one step; monotonic."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._last_end: int | None = None
        self._data_wait_ns: int | None = None
        self._entered = 0

    def waited_for_data(self, nanoseconds: int) -> None:
        """Add a wait for the next batch to the present step."""
        self._data_wait_ns = (self._data_wait_ns or 0) + nanoseconds

    def enter(self) -> None:
        """Note that ``Monitor.step`` began."""
        self._entered = self.clock.monotonic_ns()

    @contextmanager
    def not_ours(self) -> Iterator[None]:
        """Leave the body out of the time spent inside the monitor: the loop had it before."""
        begin = self.clock.monotonic_ns()
        try:
            yield
        finally:
            self._entered += self.clock.monotonic_ns() - begin

    def finish(self) -> tuple[float | None, float | None, float]:
        """Return (step, data wait, inside the monitor) in seconds and begin the next step."""
        now = self.clock.monotonic_ns()
        duration = None if self._last_end is None else (now - self._last_end) / 1e9
        wait = None if self._data_wait_ns is None else self._data_wait_ns / 1e9
        self._last_end, self._data_wait_ns = now, None
        return duration, wait, (now - self._entered) / 1e9

    def restart(self) -> None:
        """Forget the last end: what follows is no ordinary step."""
        self._last_end = None


class Utilization:
    """Model FLOPs utilization, from 6 FLOPs per parameter and token (PaLM, appendix B).

    Attention's own FLOPs are not counted, so the figure errs low. A device whose peak is not in
    ``trainvitals.flops`` gives None, never a wrong number.
    """

    def __init__(self, num_parameters: int, world_size: int, device: torch.device) -> None:
        peak = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        self._per_token = 6.0 * num_parameters
        self._peak = None if peak is None else peak * world_size

    def ratio(self, tokens_per_second: float | None) -> float | None:
        """Return the utilization, 0 to 1, or None where it is unknown."""
        if self._peak is None or tokens_per_second is None:
            return None
        return self._per_token * tokens_per_second / self._peak


def learning_rates(optimizers: Sequence[Optimizer]) -> list[float | None]:
    """Return the rate of every group; None where a tensor rate would have to be waited for."""
    rates = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    return [None if isinstance(lr, torch.Tensor) and lr.is_cuda else float(lr) for lr in rates]


def device_memory(device: torch.device) -> tuple[float | None, float | None]:
    """Return (allocated, peak) bytes of the caching allocator; unknown on the CPU."""
    if device.type != "cuda":
        return None, None
    return (
        float(torch.cuda.memory_allocated(device)),
        float(torch.cuda.max_memory_allocated(device)),
    )
