"""Replays a bad step's batches, and finds the origin of the first bad value."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from trainer_hooks.repro.capsule import AutocastSetting, map_tensors
from trainer_hooks.tensors.gradients import clean_name
from trainer_hooks.tensors.rng import capture_rng, restore_rng
from trainvitals.printable import name_type

LossOf = Callable[[Any], Tensor]
_LOWER = {
    torch.float32: (torch.float16, torch.bfloat16),
    torch.float64: (torch.float16, torch.bfloat16, torch.float32),
}
_TO_LOWER = frozenset({"half", "bfloat16", "float"})
"""Methods of a tensor that choose its precision."""
_IN_LOSS = "the loss function"


class ReplayLimits(NamedTuple):
    """Limits above which a finite step is bad; None: no finite step is."""

    loss: float | None = None
    grad_norm: float | None = None


class ReplayResult(NamedTuple):
    """Result of a replay."""

    losses: tuple[float, ...] = ()
    """Loss of each micro-batch."""
    bad_gradients: tuple[str, ...] = ()
    """Parameters with a non-finite gradient."""
    grad_norm: float = 0.0
    error: str = ""
    """Why the replay failed."""

    @property
    def loss(self) -> float:
        """Return the replayed step's loss: the mean over the micro-batches."""
        return math.fsum(self.losses) / len(self.losses) if self.losses else math.nan

    def is_bad(self, limits: ReplayLimits) -> bool:
        """Return whether something in the replay is not finite, or above its limit."""
        if self.error:
            return False
        if self.bad_gradients or not math.isfinite(sum(self.losses)):
            return True
        pairs = (self.loss, limits.loss), (self.grad_norm, limits.grad_norm)
        return any(limit is not None and value > limit for value, limit in pairs)


class NonfiniteOrigin(NamedTuple):
    """Origin of the first non-finite value."""

    module: str
    """Its name in the model, or that it was in the loss function."""
    operator: str
    direction: str
    """``forward`` or ``backward``."""


@dataclass(kw_only=True)
class ReplaySetup:
    """A model and its loss, restored before each replay: weights, buffers and generators."""

    model: nn.Module
    loss_of: LossOf
    autocast: AutocastSetting | None = None
    loss_scale: float = 1.0

    def __post_init__(self) -> None:
        self._slots = list(slots(self.model))
        self.kept = [(tensor, tensor.detach().clone()) for _, _, tensor in self._slots]
        """Each tensor of ``slots``, and its saved value."""

    def replay(
        self,
        batches: Sequence[Any],
        rng: Sequence[dict[str, Any] | None] = (),
        *,
        dtype: torch.dtype | None = None,
        trace: NonfiniteTrace | None = None,
    ) -> ReplayResult:
        """Compute a stored step's loss and gradients; the model is as before afterwards.

        The loss function gets each batch, and the gradients are added. ``rng`` has the generators
        before each. ``dtype`` is the minimum precision; None: as the code requests.
        """
        losses: list[float] = []
        around = capture_rng()
        try:
            with ExitStack() as stack:
                stack.enter_context(_eager())
                if dtype is not None:
                    stack.enter_context(self._converted(dtype))
                    stack.enter_context(_use_minimum_precision(dtype))
                elif self.autocast is not None and self.autocast.dtype:
                    lower = getattr(torch, self.autocast.dtype)
                    stack.enter_context(torch.autocast(self.autocast.device, lower))
                if trace is not None:
                    stack.enter_context(trace.trace_model(self.model))
                for number, batch in enumerate(batches):
                    if number < len(rng) and (state := rng[number]) is not None:
                        restore_rng(state)
                    losses.append(self._run_batch(copied(batch, dtype), trace, dtype))
                bad = tuple(self._bad_gradients())
                return ReplayResult(tuple(losses), bad, self._grad_norm(dtype))
        except Exception as error:  # noqa: BLE001 - the user's code, of which anything can come
            text = str(error).partition("\n")[0]
            return ReplayResult(error=f"{type(error).__name__}: {text}"[:300])
        finally:
            self.restore_weights()
            restore_rng(around)

    def first_different_module(
        self,
        batches: Sequence[Any],
        rng: Sequence[dict[str, Any] | None],
        tensor: Tensor,
        elements: Sequence[int],
        one: Sequence[float],
        other: Sequence[float],
    ) -> str:
        """Return the first module whose output differs between two values of some weights.

        Compared bit for bit, in the order in which modules are done; empty: all are alike.
        """
        outputs: list[list[tuple[str, int]]] = []
        where = torch.tensor(elements, device=tensor.device)
        for values in (one, other):
            with torch.no_grad():
                tensor.put_(where, torch.tensor(values, device=tensor.device).to(tensor.dtype))
            outputs.append([])
            with _record_output_checksums(self.model, outputs[-1]):
                self.replay(batches, rng)
        pairs = zip(*outputs, strict=False)
        return next((now[0] for now, then in pairs if now != then), "")

    def _run_batch(
        self, batch: Any, trace: NonfiniteTrace | None, dtype: torch.dtype | None
    ) -> float:
        if trace is not None:
            trace.start_micro_batch()
        loss = self.loss_of(batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise TypeError(
                f"the loss function returned {kind_of(loss)}, not a tensor of one number"
            )
        if trace is not None:
            trace.finish_forward(loss)
        if loss.requires_grad:
            scaled = loss if dtype is not None else loss * self.loss_scale
            with torch.autocast(loss.device.type, enabled=False):
                scaled.backward()
        return loss.item()

    def _bad_gradients(self) -> Iterator[str]:
        """Yield the parameters whose gradients are not finite in a replay."""
        for name, param in self.model.named_parameters():
            if param.grad is not None and not bool(torch.isfinite(param.grad).all()):
                yield clean_name(name)

    def _grad_norm(self, dtype: torch.dtype | None) -> float:
        """Return the norm of a replay's gradients, without the loss scale."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norms = [float(torch.linalg.vector_norm(g, dtype=torch.float64)) for g in gradients]
        return math.hypot(*norms) / (self.loss_scale if dtype is None else 1.0)

    @torch.no_grad()
    def restore_weights(self) -> None:
        """Restore saved weights and buffers before a replay, and delete gradients."""
        for tensor, saved_tensor in self.kept:
            tensor.copy_(saved_tensor)
        for module, name, tensor in self._slots:
            if name in module._buffers:
                module._buffers[name] = tensor
        self.model.zero_grad(set_to_none=True)

    @contextmanager
    def _converted(self, dtype: torch.dtype) -> Iterator[None]:
        """Convert a replayed model's lower-precision tensors to ``dtype`` temporarily."""
        converted = [(tensor, tensor.data) for _, _, tensor in self._slots]
        self.model.zero_grad(set_to_none=True)
        try:
            for _, _, tensor in self._slots:
                if tensor.dtype in _LOWER[dtype]:
                    tensor.data = tensor.data.to(dtype)
            yield
        finally:
            # A gradient has its parameter's type: delete it first.
            self.model.zero_grad(set_to_none=True)
            for tensor, data in converted:
                tensor.data = data


def slots(model: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Yield a replayed model's parameters and buffers, each once, with their module and name."""
    seen: set[int] = set()
    for module in model.modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield module, name, tensor


def copied(batch: Any, dtype: torch.dtype | None) -> Any:
    """Return copies of a batch for a replay: a loss function may write into it."""

    def copy(value: Tensor) -> Tensor:
        if dtype is not None and value.dtype in _LOWER[dtype]:
            return value.to(dtype)
        return value.clone()

    return map_tensors(batch, copy)


@contextmanager
def _record_output_checksums(model: nn.Module, outputs: list[tuple[str, int]]) -> Iterator[None]:
    """Record each module's name after its call in a replay, and its output's checksum."""

    def hook_of(name: str) -> Callable[..., None]:
        def note(module: nn.Module, inputs: Any, output: Any) -> None:
            crc = 0
            for tensor in tree_flatten(output)[0]:
                if isinstance(tensor, Tensor):
                    plain = tensor.detach().cpu().contiguous().view(-1)
                    crc = zlib.crc32(plain.view(torch.uint8).numpy().tobytes(), crc)
            outputs.append((name, crc))

        return note

    modules = list(model.named_modules())
    handles = [
        m.register_forward_hook(hook_of(clean_name(n) or type(m).__name__)) for n, m in modules
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def kind_of(value: object) -> str:
    """Return a description of the value's type, for an error of a replay."""
    shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
    return f"{name_type(value)}{shape}"


@contextmanager
def _eager() -> Iterator[None]:
    """Replay compiled code uncompiled: a fused kernel has no operators to name."""
    stance = getattr(torch.compiler, "set_stance", None)
    if stance is None:
        yield
        return
    with stance("force_eager"):
        yield


# ------------------------------------------------------------------------- another precision


@contextmanager
def _use_minimum_precision(dtype: torch.dtype) -> Iterator[None]:
    """Let the replayed code compute in ``dtype`` where it requests less, without autocast."""
    enter: Any = torch.amp.autocast_mode.autocast.__enter__

    def enter_disabled(self: Any) -> Any:
        self._enabled = False
        return enter(self)

    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with (
            mock.patch.object(torch.amp.autocast_mode.autocast, "__enter__", enter_disabled),
            _Precision(dtype),
        ):
            yield
    finally:
        torch.set_default_dtype(default)


class _Precision(TorchFunctionMode):
    """Replaces every lower precision that is requested."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        lower = _LOWER[self._dtype]

        def widened(value: Any) -> Any:
            return self._dtype if isinstance(value, torch.dtype) and value in lower else value

        name = getattr(func, "__name__", "")
        if name in _TO_LOWER and args and (name != "float" or self._dtype is torch.float64):
            return args[0].to(self._dtype)
        args = tuple(map(widened, args))
        kwargs = {key: widened(value) for key, value in (kwargs or {}).items()}
        return func(*args, **kwargs)


# --------------------------------------------------------------------------------- the origin


class _NonfiniteResult(NamedTuple):
    """A result that is not finite."""

    module: str
    operator: str
    is_made: bool
    """Whether it originated there: its input was finite, or had no NaN."""
    is_view: bool
    parents: tuple[int, ...]


class _OperationInput(NamedTuple):
    """Input of an operation."""

    event: int
    is_nan: bool
    is_inf: bool


_FINITE, _UNKNOWN = -1, -2
"""Instead of an event."""


class NonfiniteTrace(TorchDispatchMode):
    """Records which operation of which module produces non-finite values, forward and backward.

    Forward: every result is checked, and the path from the loss back to the first operation that
    made it non-finite. An infinity that the code writes (a mask of -inf) does not count. Backward:
    the first node whose incoming gradient is finite and whose outgoing one is not.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.origin: NonfiniteOrigin | None = None
        self.lowest: torch.dtype | None = None
        """The least precise type that an operation gave."""
        self._modules: list[str] = []
        self._names: dict[int, str] = {}
        self._events: list[_NonfiniteResult] = []
        self._last: dict[int, int] = {}
        """By address of the memory, its latest event."""
        self._held: list[Tensor] = []
        """Otherwise their addresses would be reused."""
        self._nodes: dict[Any, str] = {}
        """Nodes of the graph, and the innermost module whose forward created them."""
        self._is_forward = False

    @contextmanager
    def trace_model(self, model: nn.Module) -> Iterator[None]:
        """Trace the replay of the model inside the block."""
        handles: list[Any] = []
        for name, module in model.named_modules():
            self._names[id(module)] = clean_name(name) or type(module).__name__
            handles += [
                module.register_forward_pre_hook(
                    self._enter_module, prepend=True, with_kwargs=True
                ),
                module.register_forward_hook(self._leave_module, always_call=True),
            ]
        try:
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()
            self._held.clear()
            self._last.clear()
            self._nodes.clear()

    def start_micro_batch(self) -> None:
        """Start the trace of a micro-batch in a replay."""
        self._is_forward = True
        self._modules.clear()

    # ------------------------------------------------------------------------------- modules

    def _enter_module(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Note that the replay enters a module; earlier nodes belong to the caller."""
        # Nodes created before belong to the caller; otherwise they would count as this module's
        # own.
        self._claim((args, kwargs), self._current_module())
        self._modules.append(self._names[id(module)])

    def _leave_module(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Note that the replay leaves a module, which owns the new nodes of its output."""
        if self._modules:
            self._claim(output, self._modules.pop())

    def _claim(self, output: Any, module: str) -> None:
        """Assign the graph's nodes that no inner module created in the replay to this one."""
        tensors = [t for t in tree_flatten(output)[0] if isinstance(t, Tensor)]
        waiting = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
        while waiting:
            node = waiting.pop()
            if node in self._nodes:
                continue
            self._nodes[node] = module
            waiting += [each for each, _ in node.next_functions if each is not None]

    # ------------------------------------------------------------------------------- forward

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._is_forward or self.origin is not None:
            return func(*args, **(kwargs or {}))
        name = func.__name__.partition(".")[0]
        values = tree_flatten((args, kwargs or {}))[0]
        # Before the call, which may write into them.
        sources = [
            self._operation_input(v)
            for v in values
            if isinstance(v, Tensor) and _can_be_nonfinite(v)
        ]
        result = func(*args, **(kwargs or {}))
        results = [
            t for t in tree_flatten(result)[0] if isinstance(t, Tensor) and _can_be_nonfinite(t)
        ]
        for tensor in results:
            if tensor.is_floating_point() and _dtype_bits(tensor.dtype) < _dtype_bits(self.lowest):
                self.lowest = tensor.dtype
        if name.startswith(("empty", "new_empty")):
            self._last.update(dict.fromkeys(map(_storage_address, results), _FINITE))
            return result
        if name in ("copy_", "fill_", "zero_"):
            sources = sources[1:]  # the previous value is overwritten
        is_written = any(isinstance(v, float) and math.isinf(v) for v in values)
        for tensor in results:
            self._record_operation(func, sources, tensor, is_written)
        return result

    def _record_operation(
        self, func: Any, sources: Sequence[_OperationInput], tensor: Tensor, is_written: bool
    ) -> None:
        """Record an operation of the replay whose result is NaN or infinite."""
        is_nan, is_inf = _find_nan_inf(tensor)
        if not (is_nan or is_inf):
            if tensor.nbytes == tensor.untyped_storage().nbytes():
                self._last[_storage_address(tensor)] = _FINITE
            return
        had_nan = any(source.is_nan for source in sources)
        had_inf = any(source.is_inf for source in sources)
        is_new_inf = is_inf and not is_nan and not had_inf and not is_written
        self._last[_storage_address(tensor)] = len(self._events)
        self._held.append(tensor)
        parents = tuple(source.event for source in sources if source.event >= 0)
        is_made = (is_nan and not had_nan) or is_new_inf
        name = func.__name__.partition(".")[0].strip("_")
        self._events.append(
            _NonfiniteResult(self._current_module(), name, is_made, func.is_view, parents)
        )

    def _operation_input(self, tensor: Tensor) -> _OperationInput:
        """Return whether a replayed operation's input is NaN or infinite, and its origin."""
        event = self._last.get(_storage_address(tensor), _UNKNOWN)
        if event == _FINITE:  # or uninitialized memory
            return _OperationInput(event, False, False)
        return _OperationInput(event, *_find_nan_inf(tensor))

    def _current_module(self) -> str:
        """Return the module that the replay is in."""
        return self._modules[-1] if self._modules else _IN_LOSS

    def finish_forward(self, loss: Tensor) -> None:
        """Finish the trace of the replay's forward; what follows is ``loss``'s backward."""
        self._is_forward = False
        start = self._last.get(_storage_address(loss), _UNKNOWN)
        if start >= 0:
            outputs, waiting, seen = [], [start], set()
            while waiting:
                number = waiting.pop()
                if number in seen:
                    continue
                seen.add(number)
                if self._events[number].is_made:
                    outputs.append(number)
                waiting += self._events[number].parents
            # A value that was bad before the replay has no origin: use the first operation on it.
            computed = [number for number in seen if not self._events[number].is_view]
            event = self._events[min(outputs or computed or seen)]
            self.origin = self.origin or NonfiniteOrigin(event.module, event.operator, "forward")
        self._claim(loss, _IN_LOSS)
        for node, module in self._nodes.items():
            node.register_hook(self._backward_hook(node.name(), module))
        self._nodes.clear()

    # ------------------------------------------------------------------------------ backward

    def _backward_hook(self, node: str, module: str) -> Callable[[Any, Any], None]:
        """Return a hook that finds whether a node of the replay made gradients non-finite."""
        operator = re.sub(r"Backward\d*$", "", node)

        def look(outgoing: Any, incoming: Any) -> None:
            if (
                self.origin is None
                and not _has_nonfinite_gradient(incoming)
                and _has_nonfinite_gradient(outgoing)
            ):
                self.origin = NonfiniteOrigin(module, operator, "backward")

        return look


def _dtype_bits(dtype: torch.dtype | None) -> float:
    """Return the bits of a replayed tensor's type; infinite for None."""
    return math.inf if dtype is None else torch.finfo(dtype).bits


def _can_be_nonfinite(tensor: Tensor) -> bool:
    """Return whether a replayed tensor can hold NaN or infinity: floating-point, not empty."""
    return (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel() > 0


def _find_nan_inf(tensor: Tensor) -> tuple[bool, bool]:
    """Return whether a replayed tensor holds a NaN, and an infinity."""
    if tensor.layout is not torch.strided or tensor.is_meta:
        return False, False
    return bool(tensor.isnan().any()), bool(tensor.isinf().any())


def _has_nonfinite_gradient(gradients: Any) -> bool:
    """Return whether one of a replayed node's gradients is not finite."""
    return any(
        any(_find_nan_inf(g)) for g in gradients if isinstance(g, Tensor) and _can_be_nonfinite(g)
    )


def _storage_address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
