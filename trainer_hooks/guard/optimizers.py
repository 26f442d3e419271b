"""Applies an update, or leaves parameters, optimizer state and buffers bitwise unchanged.

Fused optimizers take the verdict on the device through ``found_inf``: nothing waits for it. For all
other optimizers the host reads the verdict and does not call ``step()``. An update is never
multiplied by zero, because 0 * NaN is NaN.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

from trainer_hooks.failopen import FaultCounter
from trainer_hooks.ranks import Ranks
from trainer_hooks.tensors.experts import expert_groups
from trainer_hooks.tensors.gradients import (
    GradNorms,
    NamedModels,
    flat_pieces,
    local_tensor,
    named_parameters,
    reads_are_free,
    reshard,
    unwrap,
)
from trainer_hooks.tensors.optimizer_state import is_dense, true_elements
from trainer_hooks.tensors.pipeline import PipelineStages, StageNorms
from trainvitals.errors import UsageError

_HONOURS_FOUND_INF = (
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.SGD,
    torch.optim.Adagrad,
)


def takes_found_inf(optimizer: Optimizer, *, has_own_step: bool | None = None) -> bool:
    """Return whether the guarded ``optimizer.step()`` itself honors ``found_inf`` on the device.

    ``has_own_step``: whether ``step`` belongs to the class; None finds it out.

    Only exactly these classes: several others have the attribute and ignore it, and a subclass, or
    an instance with a replaced ``step``, may do anything. SGD with dampening cannot be skipped on
    its first step.
    """
    if has_own_step is None:
        has_own_step = _has_own_step(optimizer)
    return (
        type(optimizer) in _HONOURS_FOUND_INF
        and has_own_step
        and all(g.get("fused") and not g.get("dampening") for g in optimizer.param_groups)
    )


def _has_own_step(optimizer: Optimizer) -> bool:
    """Return whether ``step`` belongs to the class; a scheduler's wrapper only counts its calls."""
    step = vars(optimizer).get("step")
    step = getattr(step, "stands_in_for", step)  # attach's wrapper: it calls the original step
    if step is None:
        return True
    file = getattr(getattr(step, "__code__", None), "co_filename", "")
    return file == lr_scheduler.__file__ and step.__wrapped__ is type(optimizer).step


class RestorableData(Protocol):
    """Data that forward or backward writes."""

    def keep(self) -> None:
        """Copy the data that a skip restores; call after the update, before the next forward."""

    def put_back(self, bad: Tensor) -> object:
        """Restore the guarded copy from before the step if the step was bad; never wait."""

    def settle(self, bad: Tensor) -> None:
        """Restore the copy from before a step if ``bad`` is 1, and keep a copy of the result."""


class StepShadows:
    """Everything that forward and backward write except gradients, as one object."""

    def __init__(self, *parts: RestorableData) -> None:
        self._parts = parts

    def keep(self) -> None:
        """Copy all parts that a skip restores; call after the update, before the next forward."""
        for part in self._parts:
            part.keep()

    def keep_restored(self) -> None:
        """Copy all parts after an earlier state was restored, which raises no version."""
        for part in self._parts:
            if isinstance(part, BufferShadow):
                part.forget_versions()
        self.keep()

    def put_back(self, bad: Tensor) -> None:
        """Restore all kept copies if ``bad`` is 1. Does not wait."""
        for part in self._parts:
            part.put_back(bad)

    def settle(self, bad: Tensor) -> None:
        """Restore all copies if ``bad`` is 1, and keep a copy of the result."""
        for part in self._parts:
            part.settle(bad)

    def follow_modules(self, model: nn.Module) -> None:
        """Keep the buffers of modules that the loop has added since; call like ``keep``."""
        self._parts = (BufferShadow(model), *self._parts[1:])

    @property
    def buffers(self) -> RestorableData:
        """Return the part for the model's buffers, which a skipped step restores."""
        return self._parts[0]


class ModelLoadHook:
    """Keeps the values of a ``load_state_dict`` of the model: a skip must not undo it."""

    def __init__(self, model: nn.Module, shadow: RestorableData) -> None:
        self._shadow = shadow
        modules = (
            model.unwrapped()[0].values() if isinstance(model, NamedModels) else (unwrap(model)[0],)
        )
        self._handles = [m.register_load_state_dict_post_hook(self) for m in modules]

    def __call__(self, module: nn.Module, incompatible_keys: object) -> None:
        """Keep all values; called when the complete model was loaded."""
        self._shadow.keep()

    def __reduce__(self) -> Any:
        """Copy and pickle with the model as a no-op that can be loaded without Vitals."""
        return partial, (operator.setitem, {})

    def release(self) -> None:
        """Remove the hook that protects a loaded model's values from a skip."""
        for handle in self._handles:
            handle.remove()


class BufferShadow:
    """Keeps the model's buffers from before forward, and restores them after a bad step.

    It copies floating buffers and scalar counters at each step: batch norm's kernel writes its
    running statistics without raising their version counter, so a change cannot be detected
    cheaply. Other integers are mostly constants (positions, masks): they are copied only if their
    version shows a write. All buffers are looked up by their place in the module, because a forward
    may put a new tensor there.

    The copies are stored in one memory per device, so that hundreds cost a few operations. The
    buffers themselves stay unchanged: other code holds references to them.

    A skip also undoes writes of the loop to a buffer between two steps: they cannot be
    distinguished from writes of forward (except for a load: ``ModelLoadHook``). A sparse or nested
    buffer is not kept: for example a graph's adjacency, which no forward writes.
    """

    def __init__(self, model: nn.Module) -> None:
        self._places = [
            (module._buffers, name)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._seen: list[tuple[Tensor | None, int]] = []
        self._live: dict[int, Tensor] = {}
        self._constant: dict[int, Tensor] = {}
        self._saved_copies: dict[int, Tensor] = {}
        self._kept_of: dict[int, Tensor] = {}
        self._versions: dict[int, int] = {}
        self._flat: list[_FlatShadow] = []
        """Copies of buffers that did not move for a step, combined into one memory per device."""
        self._one_by_one: dict[int, Tensor] = {}
        """Copies of the other buffers."""
        self._placed: list[list[int]] = []
        """Places of the buffers in each of the flat copies."""
        self.keep()

    def _live_buffers(self) -> dict[int, Tensor]:
        """Return the buffers by place, each as its true elements; looked up again if one moved.

        A buffer moved if its place holds another tensor, or that tensor has another memory.
        """
        if not self._is_unmoved():
            each_now = [buffers.get(name) for buffers, name in self._places]
            dense = [b if _is_restorable(b) else None for b in each_now]
            each = {i: true_elements(b) for i, b in enumerate(dense) if b is not None and b.numel()}
            self._seen = [(b, 0 if b is None else b.data_ptr()) for b in dense]
            self._live = each
            self._constant = {i: b for i, b in each.items() if _has_write_counter(dense[i], b)}
        return self._live

    def _is_unmoved(self) -> bool:
        """Return whether every model buffer still has its place and memory."""
        if len(self._seen) != len(self._places):
            return False
        for (buffers, name), (seen, pointer) in zip(self._places, self._seen, strict=True):
            buffer = buffers.get(name)
            if buffer is not seen and (seen is not None or _is_restorable(buffer)):
                return False
            if seen is not None and seen.data_ptr() != pointer:
                return False
        return True

    @torch.no_grad()
    def keep(self, *, is_kept: bool = False) -> None:
        """Copy the buffers, as far as they may have changed; call after the update, before forward.

        ``is_kept``: the flat copies already equal the buffers.
        """
        live = self._live_buffers()
        if live is self._kept_of:
            if not self._flat and not self._one_by_one:
                self._build_flat_shadows(live)
            for flat in () if is_kept else self._flat:
                flat.keep()
            self._copy_buffers(self._written(self._one_by_one))
        else:
            self._dissolve_flat_shadows()
            self._kept_of = live
            if self._has_matching_copies(live):
                self._copy_buffers(live)
            else:
                self._saved_copies = {i: buffer.clone() for i, buffer in live.items()}
        self._versions = {i: buffer._version for i, buffer in self._constant.items()}

    def forget_versions(self) -> None:
        """Copy all buffers at the next ``keep``, also those that are mostly constant."""
        self._versions = {}

    def _copy_buffers(self, live: dict[int, Tensor]) -> None:
        """Copy these buffers of the model to their kept copies."""
        if live:
            torch._foreach_copy_([self._saved_copies[i] for i in live], list(live.values()))

    def _build_flat_shadows(self, live: dict[int, Tensor]) -> None:
        """Move the copies made in each step into one memory, if their types allow it."""
        alike: dict[tuple[torch.device, torch.dtype], dict[int, Tensor]] = defaultdict(dict)
        for i, buffer in live.items():
            bits = None if i in self._constant else _bits_of(buffer)
            if bits is None:
                self._one_by_one[i] = buffer
            else:
                alike[bits.device, bits.dtype][i] = bits
        for group in alike.values():
            self._flat.append(_FlatShadow([*group.values()]))
            self._placed.append([*group])
            for i in group:
                del self._saved_copies[i]

    def _dissolve_flat_shadows(self) -> None:
        """Keep each buffer separately again, because one has moved."""
        for flat, places in zip(self._flat, self._placed, strict=True):
            for i, bits in zip(places, flat.each(), strict=True):
                before = self._kept_of[i]
                # A copy: 8-byte integers may have an alignment of only 4 bytes here.
                self._saved_copies[i] = bits.clone().view(before.dtype).view(before.shape)
        self._flat, self._placed, self._one_by_one = [], [], {}

    def _has_matching_copies(self, live: dict[int, Tensor]) -> bool:
        """Return whether each of the model's buffers has a kept copy of its shape and type."""
        copies = self._saved_copies
        return live.keys() == copies.keys() and all(is_copyable(copies[i], live[i]) for i in live)

    def _written(self, live: dict[int, Tensor]) -> dict[int, Tensor]:
        """Return the model's buffers that may differ from their kept copies."""
        versions = self._versions
        return {i: b for i, b in live.items() if i not in versions or versions[i] != b._version}

    def settle(self, bad: Tensor) -> None:
        """Restore the buffers if ``bad`` is 1, and keep a copy of the result."""
        if self._places:
            self.keep(is_kept=self.put_back(bad))

    @torch.no_grad()
    def put_back(self, bad: Tensor) -> bool:
        """Restore every kept buffer if ``bad`` is 1. Does not wait.

        If forward changed a buffer's shape or type, no copy fits, so it is not restored.

        Returns:
            Whether the flat copies already equal the buffers.
        """
        live = self._live_buffers()
        if reads_are_free(bad.device) and not bad.item():
            return False
        flags: dict[torch.device, Tensor] = {}
        lies_flat = live is self._kept_of and bool(self._flat)
        if live is not self._kept_of:
            self._dissolve_flat_shadows()
        else:
            for flat in self._flat:
                flat.put_back(_flag_on(flat.device, bad, flags))
            live = self._written(self._one_by_one if lies_flat else live)
        for i, buffer in live.items():
            saved_copy = self._saved_copies.get(i)
            if saved_copy is not None and is_copyable(saved_copy, buffer):
                # Through .data, which raises no version: the backward of another optimizer's loss
                # may still need the buffer, and would refuse one with a newer version.
                flag = _flag_on(buffer.device, bad, flags)
                buffer.data.copy_(torch.where(flag, saved_copy, buffer))
        return lies_flat


class _FlatShadow:
    """Buffers of one device in one memory, as bits, whatever their type; they stay in place.

    One kernel for each buffer of a hundred batch norms would cost more than copying the contents.
    """

    def __init__(self, live: Sequence[Tensor]) -> None:
        self._live = list(live)
        self._sizes = [bits.numel() for bits in live]
        self._saved_copies = torch.cat(self._live)
        self.device = self._saved_copies.device

    def each(self) -> tuple[Tensor, ...]:
        """Return the kept copies of the model's buffers, one by one, as bits."""
        return torch.split(self._saved_copies, self._sizes)

    def keep(self) -> None:
        """Copy the live buffers to the shadow."""
        torch.cat(self._live, out=self._saved_copies)

    def put_back(self, flag: Tensor) -> None:
        """Restore all buffers if the flag is set; then copies and buffers are equal.

        It reads the flag only on the CPU, which does not wait.
        """
        if not reads_are_free(self.device):
            torch.where(flag, self._saved_copies, torch.cat(self._live), out=self._saved_copies)
        elif not flag.item():
            self.keep()
            return
        torch._foreach_copy_(self._live, self.each())


_SMALL_BYTES = 1 << 20
"""A larger buffer, such as a table, gets its own operations and no second copy."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
"""Four bytes at once if possible: float statistics and long counters share one memory."""


def _bits_of(buffer: Tensor) -> Tensor | None:
    """Return the buffer's memory as integers in one row; None if such a view is impossible.

    Through .data: writes to it raise no version.
    """
    bits = _BITS.get(buffer.element_size())
    is_plain = type(buffer) is Tensor and not (buffer.is_inference() or buffer.is_quantized)
    if bits is None or not is_plain or not buffer.is_contiguous():
        return None
    if buffer.is_conj() or buffer.is_neg() or buffer.nbytes > _SMALL_BYTES:
        return None
    return buffer.data.view(-1).view(bits)


def _flag_on(device: torch.device, bad: Tensor, flags: dict[torch.device, Tensor]) -> Tensor:
    """Return a step's verdict on a device as a flag; copy once per device."""
    if device not in flags:
        flags[device] = bad.to(device) != 0
    return flags[device]


def _is_restorable(buffer: Tensor | None) -> bool:
    """Return whether a skip can restore this buffer: it exists and is dense."""
    return buffer is not None and is_dense(buffer)


def _has_write_counter(buffer: Tensor | None, elements: Tensor) -> bool:
    """Whether the version counter shows each write: true for integers except scalar counters.

    A DTensor's local part is written below the level at which versions are counted.
    """
    numbers = elements.is_floating_point() or elements.is_complex() or not elements.dim()
    return not (numbers or elements.is_inference() or hasattr(buffer, "to_local"))


def is_copyable(tensor: Tensor, other: Tensor) -> bool:
    """Return whether a buffer and its kept copy can be copied into each other, by element."""
    return (tensor.shape, tensor.dtype, tensor.device) == (other.shape, other.dtype, other.device)


class OptimizerGuard:
    """One optimizer under the verdict.

    Step hooks that the loop registered on it run in every step that reaches ``step()``, including
    a step that is skipped on the device.
    """

    def __init__(self, optimizer: Optimizer, scaler: torch.amp.GradScaler | None) -> None:
        self.optimizer = optimizer
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._flags: dict[str, Tensor] = {}
        # Found once: a framework may replace ``step`` for the time of its own.
        self._has_own_step = _has_own_step(optimizer)
        self._look_again(optimizer)
        self._hook = None
        if type(optimizer) in _HONOURS_FOUND_INF:  # a wrapper may lack the hooks of an optimizer
            self._hook = optimizer.register_load_state_dict_post_hook(self._look_again)

    def _look_again(self, optimizer: Optimizer) -> None:
        """Check after a load whether the optimizer is fused; create missing momentum."""
        self.on_device = takes_found_inf(optimizer, has_own_step=self._has_own_step)
        if self.on_device:
            _create_momentum(optimizer)

    def follow_groups(self) -> None:
        """Guard the parameter groups that the optimizer has now."""
        self._look_again(self.optimizer)

    def release(self) -> None:
        """Restore the optimizer to its original state."""
        if self._hook is not None:
            self._hook.remove()

    def apply(
        self,
        bad: Tensor,
        *,
        skip_on_host: bool | None,
        lr_factor: float,
        divisor: Tensor | None = None,
    ) -> None:
        """Step the optimizer unless the verdict ``bad``, 0.0 or 1.0 on the device, is bad.

        ``skip_on_host`` is the same verdict, already read, if an optimizer needs it on the host;
        None leaves it on the device. ``lr_factor`` multiplies every group's rate, only during this
        step. ``divisor`` divides the gradients: only if every optimizer takes the verdict on the
        device.
        """
        if skip_on_host:
            self._mark_stepped()
            return
        if lr_factor == 1.0:
            self._step(bad, skip_on_host, divisor)
        else:
            with scaled_rates(self.optimizer, lr_factor):
                self._step(bad, skip_on_host, divisor)
        self._mark_stepped()

    def _step(self, bad: Tensor, skip_on_host: bool | None, divisor: Tensor | None) -> None:
        """Step the optimizer: with the verdict as a flag on the device, or without."""
        if self.on_device and skip_on_host is None:
            self._step_with_flag(bad, divisor)
        else:
            self.optimizer.step()

    def _step_with_flag(self, bad: Tensor, divisor: Tensor | None) -> None:
        """Step with the attributes that a gradient scaler would set.

        The flag must be exactly 0.0 or 1.0; both must be 0-dim float32.
        """
        optimizer: Any = self.optimizer
        if divisor is None and reads_are_free(bad.device) and not bad.item():
            optimizer.step()  # the same update without the operations that would undo it
            return
        optimizer.found_inf = self._persistent("found_inf", bad)
        if divisor is not None:
            optimizer.grad_scale = self._persistent("grad_scale", divisor)
        try:
            optimizer.step()
        finally:
            del optimizer.found_inf
            if divisor is not None:
                del optimizer.grad_scale

    def _persistent(self, name: str, value: Tensor) -> Tensor:
        """Return the value in a persistent buffer, so that a compiled step sees one tensor."""
        buffer = self._flags.get(name)
        if buffer is None or buffer.device != value.device:
            buffer = torch.zeros((), dtype=torch.float32, device=value.device)
            self._flags[name] = buffer
        return buffer.copy_(value)

    def _mark_stepped(self) -> None:
        """Mark this step as attempted for the scheduler and the scaler, as both expect."""
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        if self._scaler is not None:
            from torch.amp.grad_scaler import OptState

            self._scaler._per_optimizer_states[id(self.optimizer)]["stage"] = OptState.STEPPED


class OptimizerGroup(NamedTuple):
    """Optimizers that a step moves: all of them (turn 0), or one alone."""

    number: int
    name: str
    """Name of the one optimizer; empty for all."""
    optimizers: tuple[Optimizer, ...]
    guards: tuple[OptimizerGuard, ...]
    part: slice
    """Its parameters among the measured ones."""

    @property
    def is_headline(self) -> bool:
        """Return whether this turn has the run's loss and norm: all optimizers, or the first."""
        return self.number <= 1


class LoopOptimizers:
    """The loop's own optimizers and gradient scaler, which make the updates without an engine.

    ``guards``: those from before the loop added parameter groups.

    Raises:
        UsageError: the optimizers hold no parameters, or two of them hold the same one.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: tuple[Optimizer, ...],
        scaler: torch.amp.GradScaler | None,
        stages: PipelineStages | None = None,
        guards: tuple[OptimizerGuard, ...] = (),
    ) -> None:
        self._stages = stages
        self._optimizers = optimizers
        self._scaler = scaler
        reshard(model)
        self._pieces, self._experts = flat_pieces(model), expert_groups(model)
        self._params = named_parameters(model, optimizers)
        self._device = local_tensor(next(iter(self._params.values()))).device
        for guard in guards:
            guard.follow_groups()
        self.guards = guards or tuple(OptimizerGuard(optimizer, scaler) for optimizer in optimizers)

    def norms(self, ranks: Ranks) -> GradNorms:
        """Return the object that measures the guarded parameters' gradients. Collective."""
        if self._stages is not None:
            return StageNorms(self._params, ranks, self._pieces, self._experts, self._stages)
        return GradNorms(self._params, ranks, self._pieces, self._experts)

    def release(self) -> None:
        """Restore the optimizers to their original state."""
        for guard in self.guards:
            guard.release()

    @property
    def reads_verdict(self) -> bool:
        """Whether an optimizer needs the verdict on the host: then every rank reads it at once."""
        return not all(guard.on_device for guard in self.guards)

    def overflow(self) -> Tensor | None:
        """Return this rank's flag of the gradient scaler on the device, or None without one."""
        return overflow_flag(self._scaler, self._optimizers, self._device)

    def loss_scale(self) -> Tensor | None:
        """Return the guarded optimizers' loss scale on its device, or None without scaling."""
        return getattr(self._scaler, "_scale", None)


class UnguardedStepDetector:
    """Distinguishes guarded steps from unguarded steps that the loop makes itself."""

    def __init__(self, optimizers: Sequence[Optimizer], faults: FaultCounter) -> None:
        self._faults = faults
        self._inside = self._any = False
        self._hooks = [
            optimizer.register_step_pre_hook(self._check_unguarded_step)
            for optimizer in optimizers
            if hasattr(optimizer, "_optimizer_step_pre_hooks")  # a wrapper may lack them
        ]

    def __enter__(self) -> None:
        """Start the guarded steps."""
        self._inside = self._any = True

    def __exit__(self, *_error: object) -> None:
        """End the guarded steps."""
        self._inside = False

    def close(self) -> None:
        """Remove the hooks that detect unguarded steps."""
        for hook in self._hooks:
            hook.remove()

    def _check_unguarded_step(
        self, optimizer: Optimizer, _args: Any, kwargs: Mapping[str, Any]
    ) -> None:
        """Refuse a step of the loop itself before any guarded step; later only count it.

        It is traced with a compiled step, so the usual case comes first.
        """
        if self._inside or is_state_initialization(optimizer, kwargs):
            return
        error = UsageError(
            f"{type(optimizer).__name__}.step() was called outside monitor.step(), so that update "
            "was not guarded",
            hint="monitor.step() replaces optimizer.step(), and with watch(..., scaler=scaler) "
            "also scaler.step() and scaler.update(): take them out of the loop, or keep them and "
            "use trainvitals.attach() instead of watch()",
        )
        if not self._any:
            raise error
        self._faults.count("unguarded_step", error)


def is_state_initialization(optimizer: Optimizer, kwargs: Mapping[str, Any]) -> bool:
    """Return whether a step comes from ``torch.distributed.checkpoint``, so it is not guarded.

    It creates an optimizer's state by a step of rate 0 over zeros, with exactly this call.
    """
    if kwargs != {"closure": None} or optimizer.state:
        return False
    return all(float(group.get("lr", 0.0)) == 0.0 for group in optimizer.param_groups)


@contextmanager
def scaled_rates(optimizer: Optimizer, factor: float) -> Iterator[None]:
    """Multiply ``group['lr']`` and restore the same object, so schedulers never see the change.

    A group without a rate stays as it is.
    """
    if factor == 1.0:
        yield
        return
    groups = [group for group in optimizer.param_groups if "lr" in group]
    rates = [group["lr"] for group in groups]
    for group in groups:
        group["lr"] = group["lr"] * factor
    try:
        yield
    finally:
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate


def _create_momentum(optimizer: Optimizer) -> None:
    """Create momentum buffers of fused SGD: a skipped first step would leave uninitialized ones.

    A buffer of zeros makes the first step equal to SGD's own first step only without dampening;
    with it ``takes_found_inf`` returns False.
    """
    if type(optimizer) is not torch.optim.SGD:
        return
    for group in optimizer.param_groups:
        if not group["momentum"]:
            continue
        for param in group["params"]:
            state = optimizer.state[param]
            if state.get("momentum_buffer") is None:
                state["momentum_buffer"] = torch.zeros_like(param)


def update_scaler(
    scaler: torch.amp.GradScaler | None, optimizers: Sequence[Optimizer], overflow: Tensor
) -> None:
    """Update the guarded loss scale from the overflow that the ranks agreed on; does not wait."""
    agree_on_overflow(scaler, optimizers, overflow)
    if scaler is not None:
        scaler.update()


def agree_on_overflow(
    scaler: torch.amp.GradScaler | None, optimizers: Sequence[Optimizer], overflow: Tensor
) -> None:
    """Write the reduced overflow into the flags of the guarded optimizers' scaler.

    Otherwise an overflow in one rank's shard would make the ranks' scales differ.
    """
    if scaler is None or not scaler.is_enabled():
        return
    states = [scaler._per_optimizer_states[id(optimizer)] for optimizer in optimizers]
    flags = [flag for state in states for flag in state["found_inf_per_device"].values()]
    for flag in flags:
        flag.copy_(overflow)
    if not flags:  # no gradient on this rank
        states[0]["found_inf_per_device"][overflow.device] = overflow.to(torch.float32)


def is_stepped(scaler: torch.amp.GradScaler, optimizer: Optimizer) -> bool:
    """Return whether the scaler has seen the guarded optimizer's step since its last update."""
    from torch.amp.grad_scaler import OptState

    return scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.STEPPED


def unscale(scaler: torch.amp.GradScaler, optimizers: Sequence[Optimizer]) -> None:
    """Unscale the guarded optimizers' gradients, unless the loop already did in this step."""
    from torch.amp.grad_scaler import OptState

    for optimizer in optimizers:
        if scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
            scaler.unscale_(optimizer)


def overflow_flag(
    scaler: torch.amp.GradScaler | None, optimizers: Sequence[Optimizer], device: torch.device
) -> Tensor | None:
    """Unscale guarded optimizers' gradients once; return whether any overflowed, on the device."""
    if scaler is None or not scaler.is_enabled():
        return None
    unscale(scaler, optimizers)
    states = [scaler._per_optimizer_states[id(optimizer)] for optimizer in optimizers]
    flags = [f.to(device) for state in states for f in state["found_inf_per_device"].values()]
    if not flags:
        return torch.zeros((), dtype=torch.float64, device=device)
    return (torch.stack([f.reshape(()) for f in flags]).sum() > 0).to(torch.float64)
