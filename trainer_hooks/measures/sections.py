"""Time of a step's sections on this rank: before forward, forward, backward, waits, after backward.

After an all-reduce all ranks take the same time; they differ in how long each computed before it
and waited in it. On the CPU these are host times, since its collectives block. On CUDA they are
measured by events, which are read when the step's numbers are on the host, so nothing waits.

DDP: a callback at the end of the autograd graph runs before DDP's own, which waits for the buckets;
one that the first callback queues runs after it. FSDP2: its parameter groups gather, wait and
scatter in methods, which are timed if they block. Other wrappers are not supported.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from trainer_hooks.failopen import FaultCounter
from trainer_hooks.tensors.events import record_event
from trainer_hooks.tensors.gradients import NamedModels, fsdp2_groups

Section = Literal["before_forward", "forward", "backward", "gradient_wait", "after_backward"]
SECTIONS: tuple[Section, ...] = (
    "before_forward",
    "forward",
    "backward",
    "gradient_wait",
    "after_backward",
)
Instant = Any
"""Nanoseconds of the host's monotonic clock, or a CUDA event."""
_WAITING_METHODS = ("unshard", "wait_for_unshard", "post_backward", "finalize_backward")
_MOST_OUTPUTS = 16
"""Tensors of a model's output that get hooks; a loss needs one."""


@dataclasses.dataclass(frozen=True, slots=True)
class SectionTimeline:
    """Recorded times of one step; in seconds once the device has finished it."""

    begin: Instant
    marks: list[tuple[Section, Instant]]
    """Sections in order, and the end of each."""
    waits: list[tuple[Section, Instant, Instant]]
    """Blocking collectives within a section."""
    asides: Mapping[str, int]
    """Nanoseconds per section that belong to other columns: data wait, checkpoints."""
    end: Instant | None = None
    """End of the step on the device; CUDA only."""
    run_queue_seconds: float | None = None
    """Time the training thread was runnable without a core, apart from waits for other ranks; None
    if the kernel does not count it."""

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each section."""
        seconds_by_section: dict[str, float] = dict.fromkeys(SECTIONS, 0.0)
        before = self.begin
        for section, instant in self.marks:
            seconds_by_section[section] += _seconds_between(before, instant)
            before = instant
        for section, began, ended in self.waits:
            waited = _seconds_between(began, ended)
            seconds_by_section[section] -= waited
            seconds_by_section["gradient_wait"] += waited
        for aside, nanoseconds in self.asides.items():
            seconds_by_section[aside] -= nanoseconds / 1e9
        return {section: max(0.0, seconds) for section, seconds in seconds_by_section.items()}

    def since(self, instant: Instant) -> float | None:
        """Return the device seconds from ``instant`` to the end of the step; None on the CPU."""
        return None if self.end is None else _seconds_between(instant, self.end)


def _seconds_between(begin: Instant, end: Instant) -> float:
    """Return the seconds between two instants that bound a section of a step."""
    if isinstance(begin, int):
        return float(end - begin) / 1e9
    milliseconds: float = begin.elapsed_time(end)
    return milliseconds / 1000


def _host_now() -> Instant:
    """Return the current instant, which bounds a section, on the host's monotonic clock."""
    return time.monotonic_ns()


class SectionTimer:
    """Records the ends of a step's sections with hooks of the model. Training thread only.

    ``wrappers`` are DDP modules or FSDP2 roots that the loop calls.
    """

    def __init__(
        self, wrappers: list[nn.Module], device: torch.device, faults: FaultCounter
    ) -> None:
        self._is_cuda = device.type == "cuda"
        self._now = partial(record_event, device, timed=True) if self._is_cuda else _host_now
        self._faults = faults
        self._is_in_backward = False
        self._has_begun = False
        self._was_backward = False
        self._section: Section = "before_forward"
        self.forget()
        self._queue = _RunQueue()
        self._handles: list[Any] = []
        self._timed: list[tuple[Any, str]] = []
        for wrapper in wrappers:
            # Before FSDP's own hook, which gathers, and after those that register backward hooks.
            pre = wrapper.register_forward_pre_hook(
                ModuleHook(self._mark_forward_start), prepend=True
            )
            self._handles += [pre, wrapper.register_forward_hook(ModuleHook(self._forwarded))]
            for group in _parameter_groups(wrapper):
                for name in _WAITING_METHODS:
                    if callable(getattr(group, name, None)):
                        setattr(group, name, self._timed_call(getattr(group, name)))
                        self._timed.append((group, name))

    def release(self) -> None:
        """Remove all hooks and replaced methods that measure the sections."""
        for handle in self._handles:
            handle.remove()
        for group, name in self._timed:
            vars(group).pop(name, None)
        self._handles, self._timed = [], []
        self._queue.close()

    def start_step(self, now_ns: int) -> None:
        """Record that a step ended at ``now_ns`` of the step clock, and start the next one."""
        self.forget()
        with self._faults.fail_open("sections"):
            self._begin = self._now() if self._is_cuda else now_ns
            self._has_begun = True

    def aside(self, nanoseconds: int) -> None:
        """Subtract a data wait or checkpoint from the step's current section."""
        self._asides[self._section] += nanoseconds

    def start_rank_wait(self) -> None:
        """Record that this thread waits for other ranks: its wait for a core delays nobody."""
        if not self._is_cuda:  # otherwise the device waits, and not this thread
            with self._faults.fail_open("sections"):
                self._queue.pause()

    def end_rank_wait(self) -> None:
        """Record the end of a wait for other ranks."""
        if not self._is_cuda:
            with self._faults.fail_open("sections"):
                self._queue.resume()

    def end_loop_part(self, now_ns: int) -> None:
        """Record that the loop finished its part of the step at ``now_ns`` of the step clock."""
        if self._has_begun:
            with self._faults.fail_open("sections"):
                instant = self._now() if self._is_cuda else now_ns
                self._marks.append((self._section, instant))

    def pop_timeline(self) -> SectionTimeline | None:
        """Return the times of the step; None if forward or backward was not seen."""
        end = queued = None
        with self._faults.fail_open("sections"):
            queued = self._queue.seconds()  # called in each step: it counts since the last call
        if not (self._has_begun and self._was_backward):
            return None
        with self._faults.fail_open("sections"):
            end = self._now() if self._is_cuda else None
        return SectionTimeline(self._begin, self._marks, self._waits, self._asides, end, queued)

    def forget(self) -> None:
        """Discard the marks of the current step."""
        self._begin = 0
        self._has_begun = self._was_backward = self._is_in_backward = False
        self._section = "before_forward"
        self._marks: list[tuple[Section, Instant]] = []
        self._waits: list[tuple[Section, Instant, Instant]] = []
        self._asides: Counter[str] = Counter()

    def _end_section(self, following: Section) -> None:
        """Record the end of the current section."""
        if self._has_begun:
            with self._faults.fail_open("sections"):
                self._marks.append((self._section, self._now()))
        self._section = following

    def _mark_forward_start(self, *_: Any) -> None:
        """End the section before the forward, unless it runs in a backward or without gradients."""
        if torch.is_grad_enabled() and not self._is_in_backward:
            self._end_section("forward")

    def _forwarded(self, _module: nn.Module, _args: Any, output: Any) -> None:
        """Register hooks for the backward; until it starts, time counts as forward."""
        if not torch.is_grad_enabled() or self._is_in_backward:
            return
        with self._faults.fail_open("sections"):
            for tensor in _differentiable_outputs(output):
                tensor.register_hook(self._backward)

    def _backward(self, _gradient: Tensor) -> None:
        """Queue callbacks for the end of the graph, and for the end of the waits behind it."""
        if self._is_in_backward or torch.compiler.is_compiling():
            return
        with self._faults.fail_open("sections"):
            Variable._execution_engine.queue_callback(self._mark_backward_computed)
            self._is_in_backward = True
            self._end_section("backward")

    def _mark_backward_computed(self) -> None:
        """End the section of the backward; the wait for gradients follows."""
        self._end_section("gradient_wait")
        self.start_rank_wait()
        with self._faults.fail_open("sections"):
            Variable._execution_engine.queue_callback(self._mark_gradients_received)

    def _mark_gradients_received(self) -> None:
        """End the section of the wait for gradients: the backward is complete."""
        self._end_section("after_backward")
        self.end_rank_wait()
        self._was_backward, self._is_in_backward = True, False

    def _timed_call(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            section = self._section
            if section not in ("forward", "backward") or not self._has_begun:
                return call(*args, **kwargs)
            began = self._now()
            self.start_rank_wait()
            try:
                return call(*args, **kwargs)
            finally:
                self._waits.append((section, began, self._now()))
                self.end_rank_wait()

        return timed


class _RunQueue:
    """Time the kernel let this thread wait for a core, from its scheduler statistics (Linux)."""

    def __init__(self) -> None:
        self._file: int | None = None
        self._waited_ns = 0
        self._paused_ns: int | None = None
        with suppress(OSError):  # another system, or a kernel without these statistics
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)

    def seconds(self) -> float | None:
        """Return the seconds, since the last call, in which this thread waited for a core."""
        if self._file is None:
            return None
        self.resume()
        waited_ns = self._read(self._file)
        before, self._waited_ns = self._waited_ns, waited_ns
        return (waited_ns - before) / 1e9

    def pause(self) -> None:
        """Do not count until ``resume``."""
        if self._file is not None and self._paused_ns is None:
            self._paused_ns = self._read(self._file)

    def resume(self) -> None:
        """Count again."""
        if self._file is not None and self._paused_ns is not None:
            self._waited_ns += self._read(self._file) - self._paused_ns
            self._paused_ns = None

    def _read(self, file: int) -> int:
        """Return the nanoseconds in which this thread waited for a core since its start."""
        # Time on a core, time waiting for one, number of runs
        # (Documentation/scheduler/sched-stats).
        return int(os.pread(file, 96, 0).split()[1])

    def close(self) -> None:
        """Close the kernel's file with this thread's measured waits for a core."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


class ModuleHook:
    """Hook that has no effect in a copy of the module, in a pickle, and in a compiled graph."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        """Call the hook, except while a graph is being traced."""
        if not torch.compiler.is_compiling():
            self._call(*args)

    def __reduce__(self) -> Any:
        # A callable that takes anything, returns None, and unpickles without this package.
        return getattr, (nullcontext(), "__exit__")


def _differentiable_outputs(output: Any, depth: int = 4) -> Iterator[Tensor]:
    """Yield the tensors in a model's output through which a backward, which is timed, may pass."""
    num_hooked = 0
    for tensor in _all_tensors(output, depth):
        if tensor.requires_grad:
            yield tensor
            num_hooked += 1
            if num_hooked == _MOST_OUTPUTS:
                return


def _all_tensors(output: Any, depth: int) -> Iterator[Tensor]:
    """Yield the tensors in a model's output, nested ones included, to time their backward."""
    if isinstance(output, Tensor):
        yield output
    elif depth:
        parts: Any = ()
        if isinstance(output, Mapping):
            parts = output.values()
        elif isinstance(output, list | tuple):
            parts = output
        elif dataclasses.is_dataclass(output):
            parts = (getattr(output, field.name) for field in dataclasses.fields(output))
        for part in parts:
            yield from _all_tensors(part, depth - 1)


def modules_to_hook(model: nn.Module) -> list[nn.Module]:
    """Return the modules to hook: the DDP wrapper or the FSDP2 root; empty for other models.

    Modules inside a wrapper belong to the user, whose code may copy, script or pickle them.
    """
    if isinstance(model, NamedModels):
        return [wrapper for each in model.values() for wrapper in modules_to_hook(each)]
    inner = getattr(model, "_orig_mod", model)
    if getattr(inner, "_compiled_call_impl", None) is not None:
        return []  # hooks would become part of the graph
    is_ddp = isinstance(inner, DistributedDataParallel)
    return [model] if is_ddp or _is_fsdp2(inner) else []


def _is_fsdp2(module: nn.Module) -> bool:
    """Return whether a module whose sections are timed is wrapped by FSDP2."""
    return any(base.__name__ == "FSDPModule" for base in type(module).__mro__)


def _parameter_groups(wrapper: nn.Module) -> Iterator[Any]:
    """Yield FSDP2's parameter groups, to time waits; each module's own, each once."""
    seen: set[int] = set()
    for module in wrapper.modules():
        if _is_fsdp2(module):
            for group in fsdp2_groups(module._get_fsdp_state()):  # type: ignore[operator]
                if id(group) not in seen:
                    seen.add(id(group))
                    yield group
