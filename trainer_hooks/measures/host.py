"""Host measurements of a step: times, tokens, memory, learning rates, settings, utilization.

Nothing here waits for the device. Device timings are read later, with the numbers of the step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_hooks.measures.sections import SectionTimeline, SectionTimer
from trainer_hooks.tensors.events import record_event
from trainer_hooks.tensors.gradients import local_tensor
from trainer_hooks.tensors.optimizer_state import is_dense, params_of
from trainvitals.clock import Clock
from trainvitals.flops import mfu_ratio, peak_flops, transformer_flops_per_token
from trainvitals.records import Phase

Elapsed = float | tuple[Any, Any]
"""Seconds, or a pair of CUDA events that are read once the step's numbers are on the host."""


class HostMeasurements(msgspec.Struct):
    """Host measurements of one step, kept until the step's reduced numbers come back."""

    step: int
    attempt: int
    time_unix_ns: int
    monotonic_ns: int
    times: StepTimes
    exchange: Elapsed | None
    learning_rates: list[float | None]
    weight_decay: float | None
    """Largest value of all groups; on rank 0."""
    changes: list[SettingChange]
    """Other parameter group settings that changed; on rank 0."""
    lr_factor: float
    max_norm: float | None
    """Norm to which the loop clips."""
    clips_automatically: bool
    """Whether it clips to ``auto_max_norm``."""
    tokens: int | None
    weighted: bool
    """Whether the loss weights of the step are numbers of tokens."""
    samples: int | None
    """Samples in this rank's batches."""
    flops: float | None
    """FLOPs counted on this rank, in a step with ``count_flops``."""
    memory: DeviceMemory
    memory_estimate_bytes: int | None
    epoch: int | None
    batch_index: int | None
    num_batches: int | None
    auto_max_norm: float | None = None
    """Limit of ``max_norm="auto"`` in this step; arrives with the reduced numbers."""
    norm_after_clip: float | None = None
    """Measured norm after the loop's own clip, if it clips itself."""
    before_clip: bool = False
    """Whether the loop clips itself, and the gradients were measured before the clip."""
    after_clip: bool = False
    """Whether they were measured only after the loop's clip, so that earlier norms are unknown."""
    clip_unknown: bool = False
    """Whether the norm to which the loop clips is unknown."""
    turn: int = 0
    """Optimizer that was stepped: 0 for all together, k for only the k-th."""

    @property
    def samples_per_second(self) -> float | None:
        """Samples per second of this rank in the step."""
        if self.samples is None or not self.times.duration:
            return None
        return self.samples / self.times.duration

    def communication_seconds(self) -> float | None:
        """Return the time of the all-reduce; call once the step's numbers are on the host."""
        if not isinstance(self.exchange, tuple):
            return self.exchange
        begin, end = self.exchange
        milliseconds: float = begin.elapsed_time(end)
        return milliseconds / 1000

    def section_columns(self) -> dict[str, float]:
        """Return the times of the step's sections by column; the step must be on the host.

        On CUDA the optimizer time is measured on the device, like the other sections.
        """
        timeline = self.times.timeline
        if timeline is None:
            return {}
        columns = {f"{section}_seconds": value for section, value in timeline.seconds().items()}
        if isinstance(self.exchange, tuple):
            of_device = timeline.since(self.exchange[1])
            if of_device is not None:
                columns["optimizer_seconds"] = of_device
        if timeline.run_queue_seconds is not None:
            columns["run_queue_seconds"] = timeline.run_queue_seconds
        return columns


class StepTimes(NamedTuple):
    """Seconds of one step on the host clock; the parts add up to the duration."""

    duration: float | None
    data_wait: float | None
    forward_backward: float | None
    checkpoint: float | None
    optimizer: float
    monitor: float
    timeline: SectionTimeline | None
    """Times of forward and backward; None if they cannot be located in this model."""
    evaluation: float | None = None
    """Part of ``forward_backward`` that was announced as evaluation; not a separate summand."""


class StepClock:
    """Measures the durations of a step on a monotonic clock."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._last_end: int | None = None
        self._data_wait_ns: int | None = None
        self._entered = self._left_ns = 0
        self._optimizer_ns = 0
        self._exchange_ns = 0
        self._checkpoint_ns: int | None = None
        self._evaluation_ns: int | None = None
        self.phase: Phase = "other"
        """Current activity of the training thread; the heartbeat thread reads it."""
        self.is_announced = False
        """Whether the loop announced that this phase may take long."""
        self.step = -1
        """The current step."""
        self.sections: SectionTimer | None = None
        """Locates forward and backward; None if that is not possible."""

    def wait_for_data(self) -> None:
        """Record that the loop requests the next batch."""
        self.phase = "data"

    def waited_for_data(self, nanoseconds: int) -> None:
        """Add a wait for the next batch to the current step."""
        self._data_wait_ns = (self._data_wait_ns or 0) + nanoseconds
        if self.sections is not None:
            self.sections.aside(nanoseconds)
        self.phase = "forward_backward"

    def start_monitor_time(self) -> None:
        """Record that ``Monitor.step`` started."""
        self._entered = self.clock.monotonic_ns()
        if self.sections is not None:
            self.sections.end_loop_part(self._entered)

    def start_loop_clip(self) -> None:
        """Record that control returns to the loop before the step ends, for its own clip."""
        self._left_ns = self.clock.monotonic_ns()

    def end_loop_clip(self) -> None:
        """Count the time since ``start_loop_clip`` as optimizer time: the loop always needs it."""
        self._optimizer_ns += self.clock.monotonic_ns() - self._left_ns

    def optimizer_time(self) -> _OptimizerTime:
        """Count the body as optimizer time, not monitor time: the loop needs it in any case."""
        return _OptimizerTime(self)

    def add_optimizer_time(self, nanoseconds: int) -> None:
        """Add a time that the loop needs in any case."""
        self._optimizer_ns += nanoseconds

    @contextmanager
    def checkpoint(self) -> Iterator[None]:
        """Count the body, between two steps, as snapshot and save time of the next step."""
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
        """Announce that the body takes long: the heartbeat shows this phase as expected."""
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
        """Record that the loop evaluated since the last step; count time not assigned otherwise."""
        if self._last_end is not None:
            took = self.clock.monotonic_ns() - self._last_end - self._aside_ns()
            self._evaluation_ns = (self._evaluation_ns or 0) + took

    def _aside_ns(self) -> int:
        """Return the time of the current step already assigned to data, checkpoints, evaluation."""
        return sum((self._data_wait_ns or 0, self._checkpoint_ns or 0, self._evaluation_ns or 0))

    def exchange(self, device: torch.device, call: Callable[[], None]) -> Elapsed:
        """Run the all-reduce and measure it, with CUDA events if the device has them.

        On the host its time does not count as monitor time: most of it is waiting for other ranks.
        """
        self.phase = "exchange"
        if device.type == "cuda":
            begin = record_event(device, timed=True)
            call()
            return begin, record_event(device, timed=True)
        if self.sections is not None:
            self.sections.start_rank_wait()
        began = self.clock.monotonic_ns()
        call()
        took = self.clock.monotonic_ns() - began
        if self.sections is not None:
            self.sections.end_rank_wait()
        self.phase = "other"
        self._exchange_ns += took
        return took / 1e9

    def finish(self) -> StepTimes:
        """Return the times of the step, and start the next one."""
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
        """Discard the end of the last measured step: what follows is not an ordinary step."""
        self._last_end = None
        if self.sections is not None:
            self.sections.forget()


class _OptimizerTime:
    """Context manager of ``optimizer_time``; a generator would cost each step more."""

    __slots__ = ("_begin", "_of")

    def __init__(self, of: StepClock) -> None:
        self._of = of

    def __enter__(self) -> None:
        self._begin = self._of.clock.monotonic_ns()

    def __exit__(self, *_error: object) -> None:
        self._of.add_optimizer_time(self._of.clock.monotonic_ns() - self._begin)


class Utilization:
    """Model FLOPs utilization, by default from 6 FLOPs per parameter and token.

    This default omits attention, so the ratio is too low. Returns None if the peak of the device is
    unknown, that is, neither in ``trainvitals.flops`` nor given.
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
        self._is_estimated = not flops_per_token
        self._per_token = flops_per_token or transformer_flops_per_token(num_parameters)
        self._per_step: float | None = None

    def count_parameters(self, num_parameters: int) -> None:
        """Measure with another number of parameters, if the FLOPs are estimated from it."""
        if self._is_estimated:
            self._per_token = transformer_flops_per_token(num_parameters)

    def use_counted_flops(self, flops: float, tokens: int | None) -> None:
        """Use the FLOPs that one rank counted in a step; ``tokens`` counts all ranks' tokens.

        If the tokens are unknown, later steps are assumed to have the same size.
        """
        of_all_ranks = flops * self._world_size
        self._is_estimated = False
        if tokens:
            self._per_token, self._per_step = of_all_ranks / tokens, None
        else:
            self._per_step = of_all_ranks

    def ratio(self, tokens: int | None, seconds: float | None) -> float | None:
        """Return the measured utilization of a step, 0 to 1, or None if unknown."""
        flops = self._per_step if self._per_step is not None else self._flops_of(tokens)
        if flops is None or not seconds:
            return None
        return mfu_ratio(
            flops_per_second=flops / seconds, peak=self._peak, num_devices=self._world_size
        )

    def _flops_of(self, tokens: int | None) -> float | None:
        """Return a step's FLOPs from its tokens, to measure utilization; None if unknown."""
        return None if tokens is None else self._per_token * tokens


def learning_rates(optimizers: Sequence[Optimizer]) -> list[float | None]:
    """Measure the learning rate of each group; None without one.

    Also None for a CUDA tensor: reading it would wait.
    """
    rates = [group.get("lr") for optimizer in optimizers for group in optimizer.param_groups]
    return [lr if type(lr) is float else _plain_rate(lr) for lr in rates]


def group_sizes(optimizers: Sequence[Optimizer]) -> list[int]:
    """Measure the number of parameters of each group."""
    return [len(group["params"]) for optimizer in optimizers for group in optimizer.param_groups]


def _plain_rate(rate: Any) -> float | None:
    """Return a measured learning rate as a number; None for a CUDA tensor, and without one."""
    if rate is None or (isinstance(rate, Tensor) and rate.is_cuda):
        return None
    return float(rate)


_NUMBERS = (int, float)  # not int | float: a union is built at every use


def weight_decay(optimizers: Sequence[Optimizer]) -> float | None:
    """Measure the largest weight decay of all groups; None if none is a number."""
    decays = [group.get("weight_decay") for o in optimizers for group in o.param_groups]
    numbers = [float(decay) for decay in decays if isinstance(decay, _NUMBERS)]
    return max(numbers) if numbers else None


class DeviceMemory(NamedTuple):
    """Values of the CUDA caching allocator; None on the CPU."""

    allocated_bytes: float | None = None
    peak_bytes: float | None = None
    alloc_retries: int | None = None
    ooms: int | None = None


NO_MEMORY = DeviceMemory()


def device_memory(device: torch.device) -> DeviceMemory:
    """Measure the allocator's values in one call; separate functions cost as much each."""
    if device.type != "cuda":
        return NO_MEMORY
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


class SettingChange(NamedTuple):
    """Change of one setting of one parameter group."""

    group: int
    key: str
    before: object
    after: object
    times: int
    """Changes of this setting so far, including this one."""

    @property
    def is_told(self) -> bool:
        """Return whether to report this measured change: only the 1st, 2nd, 4th, 8th... one.

        A schedule may change a setting at every step.
        """
        return self.times & (self.times - 1) == 0

    def numbers(self) -> dict[str, float]:
        """Return a measured setting's new value as scalars by name, without non-numbers."""
        name = f"group{self.group}/{self.key}"
        if isinstance(self.after, tuple | list):
            parts = {f"{name}.{i}": value for i, value in enumerate(self.after)}
        else:
            parts = {name: self.after}
        return {n: float(v) for n, v in parts.items() if isinstance(v, int | float)}


class GroupSettings:
    """Detects changed settings of parameter groups. Skips tensors: reading one would wait."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self._seen = [_param_group_settings(group) for group in self._groups]
        self._counts: Counter[tuple[int, str]] = Counter()

    def take_changes(self) -> list[SettingChange]:
        """Return measured changes of parameter groups' settings since the last call."""
        changes = []
        for index, (group, seen) in enumerate(zip(self._groups, self._seen, strict=True)):
            for key, before in seen.items():
                after = group.get(key)
                if after is before or not _is_plain(after) or after == before:
                    continue
                seen[key] = after
                self._counts[index, key] += 1
                changes.append(SettingChange(index, key, before, after, self._counts[index, key]))
        return changes


def _param_group_settings(group: dict[str, Any]) -> dict[str, object]:
    """Return the settings of a parameter group whose changes are measured."""
    return {k: v for k, v in group.items() if k not in _NOT_SETTINGS and _is_plain(v)}


def _is_plain(value: object) -> bool:
    """Return whether a parameter group's setting is plain, so that its change is measured."""
    if isinstance(value, tuple | list):
        return all(_is_plain(part) for part in value)
    return value is None or isinstance(value, int | float | str)


# ------------------------------------------------------ the memory that the state needs


class MemoryEstimate:
    """Bytes of parameters, gradients, optimizer states and buffers on one device.

    Estimated at creation, and again before the 1st, 2nd, 4th... step: optimizers create their state
    in their first update, which may have been skipped. Shared tensors count once, sparse ones not
    at all.
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
        """Count a step, and return the estimate of this rank's measured memory, in bytes."""
        self._calls += 1
        if self._calls & (self._calls - 1) == 0:
            self._bytes = self._estimate()
        return self._bytes

    def _estimate(self) -> int:
        """Estimate the bytes of parameters, gradients, optimizer states and buffers."""
        trained = params_of(self._optimizers)
        states = [state for o in self._optimizers for state in o.state.values()]
        tensors = [
            *trained,
            *self._model.parameters(),
            *self._model.buffers(),
            *_state_tensors(states),
        ]
        gradients = sum(size for _, size in self._sizes(p for p in trained if p.requires_grad))
        return sum(dict(self._sizes(tensors)).values()) + gradients

    def _sizes(self, tensors: Iterable[Tensor]) -> Iterator[tuple[int, int]]:
        """Yield data pointer and bytes of each tensor on the measured device."""
        for tensor in tensors:
            local = local_tensor(tensor)
            if local.device == self._device and is_dense(local) and local.numel():
                yield local.data_ptr(), local.numel() * local.element_size()


def _state_tensors(state: Any) -> Iterator[Tensor]:
    """Yield the tensors of an optimizer's nested state, to measure their memory."""
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, dict | list | tuple):
        for part in state.values() if isinstance(state, dict) else state:
            yield from _state_tensors(part)
