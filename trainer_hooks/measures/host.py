"""What a rank measures on the host in a step: times, tokens, memory, rates, settings, utilisation.

Nothing here waits for the device: what lies on it is taken with the step's numbers, later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_hooks.measures.sections import Sections, Timeline
from trainer_hooks.tensors.events import record_event
from trainer_hooks.tensors.gradients import local_tensor
from trainer_hooks.tensors.optimizer_state import is_dense
from trainvitals.clock import Clock
from trainvitals.flops import mfu_ratio, peak_flops, transformer_flops_per_token
from trainvitals.records import Phase

Elapsed = float | tuple[Any, Any]
"""Seconds, or the CUDA events they lie between: read when the step's numbers are on the host."""


@dataclass(slots=True)
class HostMeasurements:
    """Host measurements of one step, kept until the step's reduced numbers come back."""

    step: int
    attempt: int
    time_unix_ns: int
    monotonic_ns: int
    duration_seconds: float | None
    data_wait_seconds: float | None
    forward_backward_seconds: float | None
    checkpoint_seconds: float | None
    evaluation_seconds: float | None
    optimizer_seconds: float
    monitor_seconds: float | None
    exchange: Elapsed | None
    timeline: Timeline | None
    """When forward and backward were; None where that is not placed."""
    learning_rates: list[float | None]
    weight_decay: float | None
    """The largest of any group; on rank 0."""
    changes: list[Change]
    """Other settings of the parameter groups that changed; on rank 0."""
    lr_factor: float
    max_norm: float | None
    """Number that the loop clips to."""
    clips_automatically: bool
    """Whether it clips to ``auto_max_norm``."""
    tokens: int | None
    weighted: bool
    """Whether the weights of the step's losses are numbers of tokens."""
    samples: int | None
    """Of this rank's batches."""
    flops: float | None
    """Counted on this rank, in a step that counted them."""
    memory_allocated_bytes: float | None
    memory_peak_bytes: float | None
    memory_alloc_retries: int | None
    memory_ooms: int | None
    memory_estimate_bytes: int | None
    epoch: int | None
    batch_index: int | None
    num_batches: int | None
    auto_max_norm: float | None = None
    """Limit of ``max_norm="auto"`` in this step; it arrives with the reduced numbers."""
    norm_after_clip: float | None = None
    """Where the loop clips by itself: what was measured after that."""
    before_clip: bool = False
    """Whether the loop clips by itself, and the gradients were measured before that."""
    after_clip: bool = False
    """Whether they could be measured only after it: the norms before it are not known."""
    clip_unknown: bool = False
    """Whether nobody said what it clips to."""
    turn: int = 0
    """Whose update it was: 0 of all optimizers together, k of the k-th alone."""

    @property
    def samples_per_second(self) -> float | None:
        """This rank's samples per second of the step."""
        if self.samples is None or not self.duration_seconds:
            return None
        return self.samples / self.duration_seconds

    def communication_seconds(self) -> float | None:
        """Return the time of the ranks' exchange; the step's numbers must be on the host."""
        if not isinstance(self.exchange, tuple):
            return self.exchange
        begin, end = self.exchange
        milliseconds: float = begin.elapsed_time(end)
        return milliseconds / 1000

    def section_columns(self) -> dict[str, float]:
        """Return the step's parts by column; the step's numbers must be on the host.

        On CUDA the optimizers' time is the device's, as the other parts are.
        """
        if self.timeline is None:
            return {}
        parts = self.timeline.seconds().items()
        columns = {f"{section}_seconds": seconds for section, seconds in parts}
        if isinstance(self.exchange, tuple):
            of_device = self.timeline.since(self.exchange[1])
            if of_device is not None:
                columns["optimizer_seconds"] = of_device
        if self.timeline.run_queue_seconds is not None:
            columns["run_queue_seconds"] = self.timeline.run_queue_seconds
        return columns


class StepTimes(NamedTuple):
    """Seconds of one step by the host's clock; the parts make up the whole."""

    duration: float | None
    data_wait: float | None
    forward_backward: float | None
    checkpoint: float | None
    optimizer: float
    monitor: float
    timeline: Timeline | None
    evaluation: float | None = None
    """Of ``forward_backward``, as far as it was told: no part beside the others."""


class StepClock:
    """Durations of one step; monotonic."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._last_end: int | None = None
        self._data_wait_ns: int | None = None
        self._entered = self._left = 0
        self._optimizer_ns = 0
        self._exchange_ns = 0
        self._checkpoint_ns: int | None = None
        self._evaluation_ns: int | None = None
        self.phase: Phase = "other"
        """What the training thread does now: read by the heartbeat's thread."""
        self.is_announced = False
        """Whether the loop said that this takes its time."""
        self.step = -1
        """The step that is under way."""
        self.sections: Sections | None = None
        """What places forward and backward; None where nothing can."""

    def wait_for_data(self) -> None:
        """Note that the loop asks for the next batch."""
        self.phase = "data"

    def waited_for_data(self, nanoseconds: int) -> None:
        """Add a wait for the next batch to the present step."""
        self._data_wait_ns = (self._data_wait_ns or 0) + nanoseconds
        if self.sections is not None:
            self.sections.aside(nanoseconds)
        self.phase = "forward_backward"

    def enter(self) -> None:
        """Note that ``Monitor.step`` began."""
        self._entered = self.clock.monotonic_ns()
        if self.sections is not None:
            self.sections.enter(self._entered)

    def leave(self) -> None:
        """Note that the loop goes on, to its own clip, before the step is finished."""
        self._left = self.clock.monotonic_ns()

    def come_back(self) -> None:
        """Count what passed since ``leave`` as the optimizers' time: the loop had it before."""
        self._optimizer_ns += self.clock.monotonic_ns() - self._left

    @contextmanager
    def not_ours(self) -> Iterator[None]:
        """Count the body as the optimizers' time, not the monitor's: the loop had it before."""
        begin = self.clock.monotonic_ns()
        try:
            yield
        finally:
            self._optimizer_ns += self.clock.monotonic_ns() - begin

    @contextmanager
    def checkpoint(self) -> Iterator[None]:
        """Count the body, between two steps, as the time of snapshots and saves in the next one."""
        begin = self.clock.monotonic_ns()
        before = self.phase, self.is_announced
        self.phase, self.is_announced = "checkpoint", True
        try:
            yield
        finally:
            self.phase, self.is_announced = before
            took = self.clock.monotonic_ns() - begin
            self._checkpoint_ns = (self._checkpoint_ns or 0) + took
            if self.sections is not None:
                self.sections.aside(took)

    @contextmanager
    def within(self, phase: Phase) -> Iterator[None]:
        """Let the body be an announced phase: it may take its time."""
        before = self.phase, self.is_announced
        begin, aside_ns = self.clock.monotonic_ns(), self._aside_ns()
        self.phase, self.is_announced = phase, True
        try:
            yield
        finally:
            self.phase, self.is_announced = before
            if phase == "evaluate":
                took = self.clock.monotonic_ns() - begin - (self._aside_ns() - aside_ns)
                self._evaluation_ns = (self._evaluation_ns or 0) + took

    def evaluated(self) -> None:
        """Note that the loop has evaluated: since the step before, as far as nothing else did."""
        if self._last_end is not None:
            took = self.clock.monotonic_ns() - self._last_end - self._aside_ns()
            self._evaluation_ns = (self._evaluation_ns or 0) + took

    def _aside_ns(self) -> int:
        """Return what of the present step is known to have gone to something else than the step."""
        return sum((self._data_wait_ns or 0, self._checkpoint_ns or 0, self._evaluation_ns or 0))

    def exchange(self, device: torch.device, call: Callable[[], None]) -> Elapsed:
        """Make the ranks' exchange and time it, on the device's clock where it has one.

        On the host its time is not the monitor's: most of it is waiting for others.
        """
        self.phase = "exchange"
        if device.type == "cuda":
            begin = record_event(device, timed=True)
            call()
            return begin, record_event(device, timed=True)
        began = self.clock.monotonic_ns()
        call()
        took = self.clock.monotonic_ns() - began
        self.phase = "other"
        self._exchange_ns += took
        return took / 1e9

    def finish(self) -> StepTimes:
        """Return the step's times, and begin the next step."""
        timeline = None if self.sections is None else self.sections.pop_timeline()
        now = self.clock.monotonic_ns()
        last, waited, checkpoint_ns = self._last_end, self._data_wait_ns, self._checkpoint_ns
        before_ns = (waited or 0) + (checkpoint_ns or 0)
        times = StepTimes(
            duration=None if last is None else (now - last) / 1e9,
            data_wait=None if waited is None else waited / 1e9,
            forward_backward=None if last is None else (self._entered - last - before_ns) / 1e9,
            checkpoint=None if last is None or checkpoint_ns is None else checkpoint_ns / 1e9,
            evaluation=None if self._evaluation_ns is None else self._evaluation_ns / 1e9,
            optimizer=self._optimizer_ns / 1e9,
            monitor=(now - self._entered - self._optimizer_ns - self._exchange_ns) / 1e9,
            timeline=None if last is None else timeline,
        )
        if self.sections is not None:
            self.sections.start_step(now)
        self._last_end = now
        self._data_wait_ns = self._checkpoint_ns = self._evaluation_ns = None
        self._optimizer_ns = self._exchange_ns = 0
        self.phase = "forward_backward"
        return times

    def restart(self) -> None:
        """Forget the last end: what follows is no ordinary step."""
        self._last_end = None
        if self.sections is not None:
            self.sections.forget()


class Utilization:
    """Model FLOPs utilization, from the FLOPs of a token; 6 a parameter unless told or counted.

    6 a parameter leaves attention's own FLOPs out, so the figure errs low. A device whose peak is
    not in ``trainvitals.flops``, and was not told, gives None, never a wrong number.
    """

    def __init__(
        self,
        num_parameters: int,
        world_size: int,
        device: torch.device,
        flops_per_token: float | None = None,
        peak: float | None = None,
    ) -> None:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        self._peak = peak or peak_flops(name)
        self._world_size = world_size
        self._per_token = flops_per_token or transformer_flops_per_token(num_parameters)
        self._per_step: float | None = None

    def counted(self, flops: float, tokens: int | None) -> None:
        """Take the FLOPs that one rank counted in a step of so many tokens of all ranks.

        Without tokens, later steps are taken to be as large as this one.
        """
        of_all_ranks = flops * self._world_size
        if tokens:
            self._per_token, self._per_step = of_all_ranks / tokens, None
        else:
            self._per_step = of_all_ranks

    def ratio(self, tokens: int | None, seconds: float | None) -> float | None:
        """Return the utilization of a step, 0 to 1, or None where it is unknown."""
        flops = self._per_step if self._per_step is not None else self._flops_of(tokens)
        if flops is None or not seconds:
            return None
        return mfu_ratio(
            flops_per_second=flops / seconds, peak=self._peak, num_devices=self._world_size
        )

    def _flops_of(self, tokens: int | None) -> float | None:
        return None if tokens is None else self._per_token * tokens


def learning_rates(optimizers: Sequence[Optimizer]) -> list[float | None]:
    """Return the rate of every group; None where a tensor rate would have to be waited for."""
    rates = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    return [None if isinstance(lr, torch.Tensor) and lr.is_cuda else float(lr) for lr in rates]


def weight_decay(optimizers: Sequence[Optimizer]) -> float | None:
    """Return the largest weight decay of any group: many have one without. None: no number."""
    decays = (group.get("weight_decay") for o in optimizers for group in o.param_groups)
    return max((float(d) for d in decays if isinstance(d, int | float)), default=None)


class DeviceMemory(NamedTuple):
    """The caching allocator's figures; unknown on the CPU."""

    allocated_bytes: float | None = None
    peak_bytes: float | None = None
    alloc_retries: int | None = None
    ooms: int | None = None


def device_memory(device: torch.device) -> DeviceMemory:
    """Return the allocator's figures, in one call: the flat ones cost as much for each."""
    if device.type != "cuda":
        return DeviceMemory()
    stats = torch.cuda.memory_stats_as_nested_dict(device)
    allocated = stats["allocated_bytes"]["all"]
    return DeviceMemory(
        float(allocated["current"]),
        float(allocated["peak"]),
        int(stats["num_alloc_retries"]),
        int(stats["num_ooms"]),
    )


# --------------------------------------------------------------- settings of the groups


_NOT_SETTINGS = frozenset({"params", "lr", "initial_lr", "max_lr", "min_lr"})


class Change(NamedTuple):
    """One setting of one parameter group got another value."""

    group: int
    key: str
    before: object
    after: object
    times: int
    """Changes of this setting so far, this one included."""

    @property
    def is_told(self) -> bool:
        """Whether it is the 1st, 2nd, 4th, 8th...: a schedule may change one at every step."""
        return self.times & (self.times - 1) == 0

    def numbers(self) -> dict[str, float]:
        """Return the new value as scalars by name; what is no number is left out."""
        name = f"group{self.group}/{self.key}"
        if isinstance(self.after, tuple | list):
            parts = {f"{name}.{i}": value for i, value in enumerate(self.after)}
        else:
            parts = {name: self.after}
        return {n: float(v) for n, v in parts.items() if isinstance(v, int | float)}


class GroupSettings:
    """What the groups' settings were at the last look. Tensors are not read: that would wait."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self._seen = [_plain(group) for group in self._groups]
        self._counts: Counter[tuple[int, str]] = Counter()

    def take_changes(self) -> list[Change]:
        """Return what has changed since the last look."""
        changes = []
        for index, (group, seen) in enumerate(zip(self._groups, self._seen, strict=True)):
            for key, before in seen.items():
                after = group.get(key)
                if after is before or not _is_plain(after) or after == before:
                    continue
                seen[key] = after
                self._counts[index, key] += 1
                changes.append(Change(index, key, before, after, self._counts[index, key]))
        return changes


def _plain(group: dict[str, Any]) -> dict[str, object]:
    return {k: v for k, v in group.items() if k not in _NOT_SETTINGS and _is_plain(v)}


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(_is_plain(part) for part in value)
    return value is None or isinstance(value, int | float | str)


# ------------------------------------------------------ the memory that the state needs


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
        self._bytes = self._estimate()

    def count_step(self) -> int:
        """Count a step, and return the bytes."""
        self._calls += 1
        if self._calls & (self._calls - 1) == 0:
            self._bytes = self._estimate()
        return self._bytes

    def _estimate(self) -> int:
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        trained = [param for group in groups for param in group["params"]]
        states = [state for o in self._optimizers for state in o.state.values()]
        tensors = [*trained, *self._model.parameters(), *self._model.buffers(), *_tensors(states)]
        gradients = sum(size for _, size in self._sizes(p for p in trained if p.requires_grad))
        return sum(dict(self._sizes(tensors)).values()) + gradients

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
