"""Memory of DDP's communication hooks, such as PowerSGD's errors, which backward writes directly.

A NaN in one gradient stays in such a memory and poisons every later step. If it is registered with
``watch(state=...)``, it is copied before backward and restored after a bad step, like buffers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainer_hooks.guard.optimizers import is_copyable

_GENERATOR = "numpy generator"
_PLAIN = (int, float, bool, str, type(None))


def comm_hooks(model: nn.Module) -> list[tuple[Callable[..., Any], Any]]:
    """Return every communication hook on the model's DDP and FSDP1 wrappers, with its state."""
    hooks: list[tuple[Callable[..., Any], Any]] = []
    for module in model.modules():
        hooks += getattr(module, "_comm_hooks", ())
        hook = getattr(module, "_comm_hook", None)
        if hook is not None:
            hooks.append((hook, getattr(module, "_comm_hook_state", None)))
    ours = "trainer_hooks."  # a hook that measures; it stays on a module permanently
    return [(h, s) for h, s in hooks if not getattr(h, "__module__", "").startswith(ours)]


def comm_hook_states(model: nn.Module) -> list[Any]:
    """Return the state object of every communication hook that has one."""
    return [state for _, state in comm_hooks(model) if state is not None]


def has_memory(state: object) -> bool:
    """Return whether a hook's memory holds tensors now, or an empty dict for later ones."""
    return any(_hook_tensors(value) is not None for value in _hook_attributes(state).values())


def registered_hook_memory(model: nn.Module, state: Mapping[str, Any]) -> dict[str, CommHookMemory]:
    """Return the memory of each hook whose state was registered, by name."""
    ids = {id(hook_state) for hook_state in comm_hook_states(model)}
    return {name: CommHookMemory(value) for name, value in state.items() if id(value) in ids}


def unregistered_hook_warnings(model: nn.Module, state: Mapping[str, Any]) -> list[str]:
    """Return a warning about the memory of each hook that was not registered."""
    registered = {id(value) for value in state.values()}
    unseen = {
        id(s): s for s in comm_hook_states(model) if id(s) not in registered and has_memory(s)
    }
    return [
        f"a communication hook keeps tensors in its {type(hook_state).__name__}, which a skip does "
        "not put back: one NaN stays there; register it: watch(..., state={'hook': that_state})"
        for hook_state in unseen.values()
    ]


class CommHookMemory:
    """Memory of one hook under the verdict. Has the ``state_dict`` that a rollback needs.

    The hook's counters and RNGs advance with every attempted step, like schedulers. It costs one
    copy of the memory, made again in each step.
    """

    def __init__(self, state: object) -> None:
        self._state = state
        self._copies: dict[tuple[str, object], Tensor] = {}
        self._has_stepped = False
        self.keep()

    def _live_tensors(self) -> Iterator[tuple[tuple[str, object], Tensor]]:
        """Yield the dense tensors of a hook's memory, each with its attribute and key in it."""
        for name, value in _hook_attributes(self._state).items():
            for key, tensor in (_hook_tensors(value) or {}).items():
                if tensor.layout == torch.strided:
                    yield (name, key), tensor.detach()

    @torch.no_grad()
    def keep(self) -> None:
        """Copy the memory; call after the update, before the next backward."""
        copies = {}
        for key, live in self._live_tensors():
            before = self._copies.get(key)
            if before is not None and is_copyable(before, live):
                copies[key] = before.copy_(live)
            else:
                copies[key] = live.clone()
        self._copies = copies

    @torch.no_grad()
    def put_back(self, bad: Tensor) -> None:
        """Restore a communication hook's memory if the step was bad; never wait.

        Memory created in this step is reset to the initial memory of a hook: zero, and for the Q of
        PowerSGD random numbers, equal on all ranks (Q would never leave zero).
        """
        self._has_stepped = True
        for key, live in self._live_tensors():
            before = self._copies.get(key)
            if before is None or not is_copyable(before, live):
                before = _initial_tensor(key[0], live)
            live.copy_(torch.where(bad.to(live.device) != 0, before, live))

    def settle(self, bad: Tensor) -> None:
        """Restore the memory if ``bad`` is 1, and keep a copy of the result."""
        self.put_back(bad)
        self.keep()

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the memory, the counters and numpy's RNG state."""
        copies: dict[str, Any] = {}
        for name, value in _hook_attributes(self._state).items():
            if isinstance(value, _PLAIN) or _hook_tensors(value) is not None:
                copies[name] = copy.deepcopy(value)
            elif type(value).__name__ == "RandomState":
                kind, keys, *rest = value.get_state()
                copies[name] = {_GENERATOR: (kind, keys.tolist(), *rest)}
        return copies

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the memory; call in the process that filled it.

        In a new process DDP has different buckets until its second step: there the memory starts
        empty, and a hook that waits for some steps waits again.
        """
        if not self._has_stepped:
            return
        for name, value in state_dict.items():
            if isinstance(value, dict) and _GENERATOR in value:
                getattr(self._state, name).set_state(tuple(value[_GENERATOR]))
            else:
                setattr(self._state, name, copy.deepcopy(value))


def _hook_attributes(state: object) -> dict[str, Any]:
    """Return the attributes of a hook's state object, including those in ``__slots__``."""
    slots = [name for kind in type(state).__mro__ for name in getattr(kind, "__slots__", ())]
    attributes = {name: getattr(state, name) for name in slots if hasattr(state, name)}
    return attributes | getattr(state, "__dict__", {})


def _hook_tensors(value: object) -> dict[object, Tensor] | None:
    """Return a hook's tensors in an attribute that holds only tensors; a dict may be empty now."""
    if isinstance(value, Tensor):
        return {None: value}
    if isinstance(value, list | tuple) and value:
        value = dict(enumerate(value))
    if isinstance(value, dict) and all(isinstance(part, Tensor) for part in value.values()):
        return value
    return None


def _initial_tensor(name: str, live: Tensor) -> Tensor:
    """Return a communication hook's tensor as its first step creates it."""
    if name != "q_memory_dict":
        return torch.zeros_like(live)
    generator = torch.Generator(live.device).manual_seed(live.numel())
    return torch.randn(live.shape, generator=generator, dtype=live.dtype, device=live.device)
