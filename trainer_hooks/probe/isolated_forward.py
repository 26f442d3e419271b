"""A forward between training steps that leaves the training state unchanged, bit for bit."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from trainer_hooks.tensors.clearing import has_compiled_graphs
from trainer_hooks.tensors.gradients import fsdp2_groups, reshard
from trainer_hooks.tensors.optimizer_state import is_dense, params_of, true_elements
from trainer_hooks.tensors.rng import capture_rng, restore_rng

_PLAIN = (bool, int, float, str, type(None), Tensor)
"""Types of module attributes that are restored, such as a queue pointer or a cache."""
_SHARE_OF_FREE = 0.25
"""Fraction of a device's free memory used for copies; larger ones go to the host."""


class RefusedError(Exception):
    """The forward did something forbidden; the message continues after the function's name."""


@contextmanager
def isolated_forward(
    model: nn.Module, optimizers: Sequence[Optimizer]
) -> Iterator[Callable[[], None]]:
    """Run the probe's forwards without gradients, and restore everything they write.

    Restored are the RNG state (which starts equal in each call, so that dropout draws alike),
    buffers, parameters that no optimizer holds, modes and plain attributes of modules, gradients,
    the autocast cache, and the forward bookkeeping of DDP and FSDP. Gradients are hidden meanwhile.
    Not covered: a generator of the loop itself, a list that a module appends to. Parameters in
    optimizers are not copied; call the yielded function at the end to check them.

    Yields:
        Function that raises ``RefusedError`` if gradients were enabled or parameters were modified.
    """
    modules = list(model.modules())
    reshard(model)
    tensors = {id(p): p for p in params_of(optimizers)}
    everything = {id(p): p for p in (*model.parameters(), *tensors.values())}
    with ExitStack() as undo:
        undo.callback(restore_rng, capture_rng())
        undo.callback(_put_back_attributes, [(m, _plain_attributes(m)) for m in modules])
        outside = [p for key, p in everything.items() if key not in tensors]
        undo.callback(_put_back_tensors, _buffers(modules), _copies(outside))
        gradients = [(p, p.grad, p.requires_grad) for p in everything.values()]
        undo.callback(_put_back_gradients, gradients)
        undo.enter_context(_ddp_as_before(modules))
        undo.enter_context(_fsdp_as_before(model, modules))
        undo.enter_context(_autocast_cache_off())
        undo.enter_context(eager_beside_graphs())
        for param in everything.values():
            param.grad = None
        asks = {id(p): p.requires_grad for p in everything.values()}
        versions = {key: p._version for key, p in tensors.items() if type(p) is nn.Parameter}
        undo.enter_context(torch.no_grad())

        def check() -> None:
            if torch.is_grad_enabled():
                raise RefusedError("left gradients enabled")
            if any(p.grad is not None for p in everything.values()):
                raise RefusedError("left gradients in the parameters")
            if any(p.requires_grad != asks[key] for key, p in everything.items()):
                raise RefusedError("changed requires_grad of parameters")
            if any(tensors[key]._version != version for key, version in versions.items()):
                raise RefusedError("changed trained parameters, which cannot be restored")

        yield check


def seed_all(seed: int) -> None:
    """Seed all generators of this process for the probe; only inside ``isolated_forward``."""
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)


def is_sharded(model: nn.Module) -> bool:
    """Return whether FSDP1, FSDP2 or another DTensor shards the model that is probed."""
    by_module = any(hasattr(m, "_get_fsdp_state") or hasattr(m, "_handle") for m in model.modules())
    return by_module or any(hasattr(p, "placements") for p in model.parameters())


def _is_ours(module: nn.Module) -> bool:
    """Return whether attributes to restore belong to the model, not to a DDP or FSDP wrapper."""
    wrapper = isinstance(module, DistributedDataParallel) or hasattr(module, "_orig_mod")
    return not wrapper and not hasattr(module, "_handle")


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module that an isolated forward may change."""
    if not _is_ours(module):
        return {"training": module.training}
    return {name: v for name, v in vars(module).items() if isinstance(v, _PLAIN)}


def _put_back_attributes(before: list[tuple[nn.Module, dict[str, Any]]]) -> None:
    """Restore the modules' attributes after an isolated forward."""
    for module, attributes in before:
        module_vars = vars(module)
        for name in _plain_attributes(module).keys() - attributes.keys():
            del module_vars[name]
        module_vars.update(attributes)


_Places = list[tuple[dict[str, Tensor | None], dict[str, Tensor | None]]]
_Copies = list[tuple[Tensor, Tensor, Tensor]]


def _buffers(modules: Iterable[nn.Module]) -> tuple[_Places, _Copies]:
    """Return buffers by name, and copies of contents to restore after the probe's forward."""
    places = [(module._buffers, dict(module._buffers)) for module in modules]
    distinct = {
        id(b): b for _, saved_buffer in places for b in saved_buffer.values() if b is not None
    }
    return places, _copies(distinct.values())


@torch.no_grad()
def _copies(tensors: Iterable[Tensor]) -> _Copies:
    """Return each tensor with its storage and a copy, for an isolated forward.

    The storage is recorded because ``param.data = ...`` replaces it.
    """
    each = [(t, true_elements(t)) for t in tensors if is_dense(t) and t.numel()]
    total = sum(e.numel() * e.element_size() for _, e in each if e.device.type == "cuda")
    to_host = bool(total) and total > _SHARE_OF_FREE * min(
        torch.cuda.mem_get_info(device)[0]
        for device in {e.device for _, e in each if e.device.type == "cuda"}
    )
    host = torch.device("cpu")
    return [(t, t.data, e.to(host, copy=True) if to_host else e.clone()) for t, e in each]


@torch.no_grad()
def _put_back_tensors(buffers: tuple[_Places, _Copies], outside: _Copies) -> None:
    """Restore the buffers and other tensors after an isolated forward."""
    places, copies = buffers
    for live, saved_tensor in places:
        live.clear()
        live.update(saved_tensor)
    for tensor, memory, values in (*copies, *outside):
        before, now = true_elements(memory), true_elements(tensor)
        if now.data_ptr() != before.data_ptr() or now.shape != before.shape:
            tensor.data = memory
        before.copy_(values)


def _put_back_gradients(before: list[tuple[Tensor, Tensor | None, bool]]) -> None:
    """Restore gradients and ``requires_grad`` after an isolated forward."""
    for param, grad, asks in before:
        if param.grad is not grad:
            param.grad = grad
        if param.requires_grad != asks:
            param.requires_grad_(asks)


@contextmanager
def _ddp_as_before(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Keep DDP from syncing in the probe's forward; restore its flags later.

    Otherwise a forward with gradients makes its reducer wait for a backward that never comes.
    """
    wrapped: list[Any] = [m for m in modules if isinstance(m, DistributedDataParallel)]
    syncs = [(d.require_forward_param_sync, d.require_backward_grad_sync) for d in wrapped]
    for ddp in wrapped:
        ddp.require_forward_param_sync = ddp.require_backward_grad_sync = False
    try:
        yield
    finally:
        for ddp, (forward, backward) in zip(wrapped, syncs, strict=True):
            ddp.require_forward_param_sync = forward
            ddp.require_backward_grad_sync = backward


@contextmanager
def _fsdp_as_before(model: nn.Module, modules: Iterable[nn.Module]) -> Iterator[None]:
    """Prevent FSDP from prefetching in the probe, and drop the recorded order of its forwards.

    If a forward raised halfway, FSDP's states are reset to those between two forwards.
    """
    states = [m._get_fsdp_state() for m in modules if hasattr(m, "_get_fsdp_state")]  # type: ignore[operator]
    groups = [g for state in states for g in fsdp2_groups(state)]
    orders = [(g, list(g._post_forward_indices)) for g in groups]
    lists = {id(o): (o, list(o)) for g in groups if (o := _post_forward_order(g)) is not None}
    try:
        yield
    finally:
        for part in (*states, *groups):
            state = getattr(part, "_training_state", None)
            if state is not None:
                part._training_state = type(state).IDLE
        for state in states:
            if (context := getattr(state, "_state_ctx", None)) is not None:
                context.iter_forward_root = None
        for group, indices in orders:
            group._post_forward_indices[:] = indices
        for order, before in lists.values():
            order[:] = before
        reshard(model)


def _post_forward_order(group: Any) -> Any:
    """Return FSDP2's recorded order of forwards, which a probe restores; None without one."""
    return getattr(getattr(group, "comm_ctx", None), "post_forward_order", None)


def eager_beside_graphs() -> AbstractContextManager[object]:
    """Run compiled code eagerly if it replays CUDA graphs (``mode="reduce-overhead"``).

    A replay would overwrite the outputs of the step that the loop still holds, such as its loss.
    """
    if has_compiled_graphs():
        eager: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
        return eager
    return nullcontext()


@contextmanager
def _autocast_cache_off() -> Iterator[None]:
    """Disable the autocast cache in a probe: a later backward would find gradient-free casts."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
