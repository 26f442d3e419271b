"""``EMA``: the exponential moving average of the weights, which a skipped step leaves alone.

    ema = trainer_hooks.EMA(model)
    with trainvitals.watch(model, optimizer, state={"ema": ema}) as monitor:
        ...
        with ema.swap():
            validate(model)

Each rank averages what it holds (a DTensor's shard, FSDP1's pieces): no collective, no gather.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trainer_hooks.guard.fused_ema import EmaCopies, Pair, fused_update, in_chunks, initial_average
from trainer_hooks.tensors.copying import wait_for_copies
from trainer_hooks.tensors.gradients import clean_name, local_tensor, reshard, unwrap
from trainvitals.errors import CheckpointError, UsageError
from trainvitals.printable import name_type

_HALVES = (torch.bfloat16, torch.float16)
_DTYPES = (torch.float32, torch.float64, *_HALVES)
_COUNTER = "num_steps"


class EMA(nn.Module):
    """Moving average of a model's floating-point parameters.

    ``average += (1 - decay) * (weight - average)``. Create it on all ranks, after wrapping and
    moving the model and before the first step. If you register it with ``watch(state={"ema":
    ema})`` or ``attach``, each step updates it right after the optimizers, and a rollback restores
    it; otherwise call ``update`` after each optimizer step.

    Buffers are not averaged: the model's buffers are used, and ``copy_to`` copies them. Parameters
    that belong to no watched optimizer keep the value they had at ``watch()``.

    It is a module so that its tensors are saved and restored in place. It has no forward, and
    ``to()`` does not move it.

    Args:
        model: the module, wrapped or not; it may be a part of the trained model.
        decay: between 0 and 1, exclusive: the share of the average that an update keeps.
        warmup: start with the smaller decay ``(1 + n) / (10 + n)`` after n updates.
        device: device of the averages; None: that of the weights. ``"cpu"`` for weights on a GPU
            needs pinned memory of their size, a copy that the GPU waits for but the host does not,
            and an update on the CPU one step later: use it with ``every``.
        dtype: None: float32 for half-precision weights, otherwise that of the weights.
        every: number of applied steps between two updates.

    Raises:
        UsageError: an argument is out of range, or the model has no floating-point parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        decay: float = 0.999,
        *,
        warmup: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        every: int = 1,
    ) -> None:
        """Start at the current weights; the class describes the arguments."""
        super().__init__()
        _refuse_settings(decay, dtype, every)
        self.decay, self.warmup, self.every = float(decay), bool(warmup), operator.index(every)
        reshard(model)
        self._of = (model,)  # in a tuple, so that the model does not become a submodule
        self._weights = {
            clean_name(name): param
            for name, param in unwrap(model)[0].named_parameters()
            if param.is_floating_point() or param.is_complex()
        }
        _refuse_weights(self._weights)
        where = None if device is None else torch.device(device)
        self._averages = {n: initial_average(p, where, dtype) for n, p in self._weights.items()}
        first = next(iter(self._averages.values()))
        self._steps = torch.zeros((), dtype=torch.int64, device=first.device)
        self._rates: dict[torch.device, Pair] = {}
        self._late: EmaCopies | None = None
        self._swapped = False
        self.is_watched = False
        """Whether a monitor updates it."""

    # -------------------------------------------------------------------------------- updates

    @torch.no_grad()
    def update(self) -> None:
        """Update the averages. Call after an optimizer step that Vitals does not watch.

        Raises:
            UsageError: a monitor updates them, or the weights are currently swapped.
        """
        if self.is_watched:
            raise UsageError(
                "ema.update() was called, but the monitor already updates this average in each "
                "step",
                hint="remove the call, or remove the average from watch(state=...)",
            )
        self.refuse_swapped()
        wait_for_copies()
        self.begin(torch.zeros((), device=next(iter(self._weights.values())).device))
        self.follow(list(self._weights))

    def averages_any(self, params: Collection[int]) -> bool:
        """Return whether any of these parameters, given by their ``id``, is averaged."""
        return any(id(weight) in params for weight in self._weights.values())

    @torch.no_grad()
    def begin(self, bad: Tensor) -> None:
        """Set the step's verdict, 0.0 or 1.0 on the device. For the monitor; does not wait."""
        self._rates = {}
        if self._is_far(bad):
            self._settle()
            due = (int(self._steps) + 1) % self.every == 0
            self._late = self._late or EmaCopies()
            self._late.send_verdict(bad, due=due)
        else:
            self._rates = {self._steps.device: self._count_update(bad.to(self._steps.device))}

    @torch.no_grad()
    def follow(self, names: Sequence[str]) -> None:
        """Update the EMA of these weights after their step, unless it was bad.

        For the monitor. After a bad step, no element is written.
        """
        if self._late is not None and self._late.pending:
            self._late.send_weights(
                {name: local_tensor(self._weights[name].detach()) for name in names}
            )
            return
        weights = {name: self._weights[name] for name in names}
        self._average(weights)

    def forget(self) -> None:
        """Discard the EMA's pending copies: a rollback has restored its averages."""
        if self._late is not None:
            self._late.pending = False

    def _is_far(self, bad: Tensor) -> bool:
        """Whether host memory averages device weights, which the host must not wait for."""
        weight = next(iter(self._weights.values()))
        return self._steps.device.type == "cpu" and {"cpu"} != {weight.device.type, bad.device.type}

    def _count_update(self, bad: Tensor) -> Pair:
        """Count the step if it was applied; return the rate of the update and the skip flag."""
        applied = bad == 0
        self._steps += applied
        num_before = self._steps - 1
        if self.every > 1:
            applied = applied & (self._steps % self.every == 0)
            num_before = self._steps // self.every - 1
        decay = torch.full_like(bad, self.decay, dtype=torch.float64)
        if self.warmup:
            decay = decay.minimum((1 + num_before).double() / (10 + num_before))
        return (1 - decay).float(), (~applied).float()

    def _average(self, weights: Mapping[str, Tensor]) -> None:
        """Average the weights, in one fused pass per device and dtype."""
        rate, skip = self._rates[self._steps.device]
        groups: dict[tuple[torch.device, torch.dtype], list[Pair]] = defaultdict(list)
        for name, weight in weights.items():
            pair = local_tensor(self._averages[name]), local_tensor(weight.detach())
            if pair[0].is_complex():
                pair = torch.view_as_real(pair[0]), torch.view_as_real(pair[1])
            if pair[0].numel():
                groups[pair[0].device, pair[0].dtype].append(pair)
        for (device, _), pairs in groups.items():
            if device not in self._rates:
                self._rates[device] = rate.to(device), skip.to(device)
            for chunk in in_chunks(pairs):
                fused_update(chunk, *self._rates[device])

    def _settle(self) -> None:
        """Finish an update whose weights were copied asynchronously; waits for that step only."""
        if self._late is not None and self._late.pending:
            bad, weights = self._late.receive_copies()
            self._rates = {self._steps.device: self._count_update(bad)}
            self._average(weights)

    # --------------------------------------------------------------------------- the weights

    @contextmanager
    def swap(self) -> Iterator[None]:
        """Put the averages into the model for the body; then restore the weights, bit for bit.

        Keeps a copy of the weights on the device of the averages. Call on all ranks that run
        forward.

        Raises:
            UsageError: they are swapped already.
        """
        self.refuse_swapped()
        with torch.no_grad():
            self._settle()
            parts = self._parts()
            live_weights = [w.to(a.device, copy=True) for a, w in parts]
            wait_for_copies()
        self._swapped = True
        try:
            with torch.no_grad():
                _copy_pairs(parts)
            yield
        finally:
            with torch.no_grad():
                wait_for_copies()  # copies of the evaluated averages
                _copy_pairs([(k, w) for k, (_, w) in zip(live_weights, self._parts(), strict=True)])
                reshard(self._of[0])
            self._swapped = False

    def _parts(self) -> list[Pair]:
        """Return pairs of the EMA's averages and this rank's weights, safe to write."""
        reshard(self._of[0])
        torch.clear_autocast_cache()
        return [
            (local_tensor(self._averages[name]), local_tensor(weight.detach()))
            for name, weight in self._weights.items()
        ]

    @torch.no_grad()
    def copy_to(self, model: nn.Module) -> None:
        """Copy the averages, and the buffers of the averaged model, into ``model``.

        Args:
            model: a module of the same architecture, sharded in the same way.

        Raises:
            UsageError: ``model`` has other parameters, buffers or shards.
        """
        self._settle()
        reshard(model)
        target, source = unwrap(model)[0], unwrap(self._of[0])[0]
        target_tensors = _tensors_of(target)
        source_tensors = _tensors_of(source) | self._averages
        problem = _tensor_mismatch(source_tensors, target_tensors)
        if problem:
            raise UsageError(
                f"the averages do not fit this model: {problem}",
                hint="give a model of the same architecture, sharded in the same way",
            )
        wait_for_copies()
        _copy_pairs(
            [
                (local_tensor(source_tensors[name]), local_tensor(t))
                for name, t in target_tensors.items()
            ]
        )
        reshard(model)

    # ----------------------------------------------------------------------------- its state

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the averages by parameter name, and the counter of applied steps."""
        with torch.no_grad():
            self._settle()
        dot = "." if prefix else ""
        for name, tensor in {**self._averages, _COUNTER: self._steps}.items():
            yield f"{prefix}{dot}{name}", tensor

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        """Write the averages by name; DTensors if the weights are DTensors."""
        destination.update({prefix + name: tensor for name, tensor in self.named_buffers()})

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load as part of another module's state."""
        own_entries = {
            k.removeprefix(prefix): v for k, v in state_dict.items() if k.startswith(prefix)
        }
        try:
            self.load_state_dict(own_entries)
        except CheckpointError as error:
            error_msgs.append(str(error))

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Load averages and counter. Decay and other arguments are not loaded.

        Args:
            state_dict: state of an ``EMA`` of the same model, sharded in the same way.

        Raises:
            CheckpointError: it belongs to another model or other shards; nothing was changed.
        """
        live = dict(self.named_buffers())
        problem = _tensor_mismatch(live, state_dict)
        if problem:
            raise CheckpointError(
                f"the state does not belong to this average: {problem}",
                hint="load what state_dict() of an average of the same model, sharded in the same "
                "way, returned",
            )
        wait_for_copies()
        _copy_pairs(
            [(local_tensor(state_dict[n]), local_tensor(tensor)) for n, tensor in live.items()]
        )

    def __getstate__(self) -> dict[str, Any]:
        """Copy and pickle without the monitor that updates it."""
        with torch.no_grad():
            self._settle()
        return {**self.__dict__, "_late": None, "is_watched": False, "_swapped": False}

    # ------------------------------------------------------------------------- for the monitor

    @property
    def is_swapped(self) -> bool:
        """Whether the model currently holds the averages."""
        return self._swapped

    def refuse_swapped(self) -> None:
        """Refuse operations that are invalid while the model holds the averages."""
        if self._swapped:
            raise UsageError(
                "the model currently holds its averages: a step would train them and be lost",
                hint="leave `with ema.swap():` before the next step, update or swap",
            )

    def refuse_watch(self, params: Iterable[Tensor]) -> None:
        """Refuse a second monitor, swapped weights, and ``params`` of which none is averaged."""
        self.refuse_swapped()
        if self.is_watched:
            raise UsageError(
                "the average is already registered: each step would update it twice",
                hint="register it once; close() the earlier monitor first",
            )
        if not self.names_of(params):
            raise UsageError(
                "no optimizer holds a parameter of the average, so it would never change",
                hint="create the EMA after wrapping (fully_shard replaces the parameters), from "
                "the model that the optimizers train",
            )

    @torch.no_grad()
    def watch(self) -> None:
        """Let a monitor update it from now on; at first, start at the current weights.

        They may have been loaded since it was created, including untrained ones.
        """
        self._settle()
        self.is_watched = True
        if int(self._steps) == 0:
            _copy_pairs([(weight, average) for average, weight in self._parts()])

    def names_of(self, params: Iterable[Tensor]) -> list[str]:
        """Return the names of the averaged parameters that are among ``params``."""
        ids = {id(param) for param in params}
        return [name for name, weight in self._weights.items() if id(weight) in ids]


def _copy_pairs(pairs: Sequence[Pair]) -> None:
    """Copy the first tensor of each pair into the second, for an EMA."""
    for source, target in pairs:
        target.copy_(source)


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's parameters and buffers by name, for its EMA."""
    named = (*module.named_parameters(), *module.named_buffers())
    return {clean_name(name): tensor.detach() for name, tensor in named}


def _tensor_mismatch(expected: Mapping[str, Tensor], actual: Mapping[str, Any]) -> str:
    """Return how an EMA's tensors differ from others in names or shapes; empty if they do not."""
    odd = sorted(expected.keys() ^ actual.keys())[:4]
    if odd:
        return f"{', '.join(odd)} {'is' if len(odd) == 1 else 'are'} in one of them alone"
    for name, tensor in expected.items():
        other = actual[name]
        if not isinstance(other, Tensor):
            return f"{name} is {name_type(other)}"
        if (tensor.shape, local_tensor(tensor).shape) != (other.shape, local_tensor(other).shape):
            return (
                f"{name} has shape {_format_shape(tensor)} in the average and "
                f"{_format_shape(other)} there"
            )
    return ""


def _format_shape(tensor: Tensor) -> str:
    """Return an EMA tensor's shape as text, with that of this rank's part if it is sharded."""
    local = local_tensor(tensor)
    part = f" (this rank's part {tuple(local.shape)})" if local is not tensor else ""
    return f"{tuple(tensor.shape)}{part}"


def _refuse_settings(decay: float, dtype: torch.dtype | None, every: int) -> None:
    if not 0.0 < decay < 1.0:
        raise UsageError(
            f"decay is {decay!r}; it must be between 0 and 1, both excluded",
            hint="0.999 averages over about the last 1,000 updates, 0.9999 over 10,000",
        )
    if every < 1:
        raise UsageError(f"every is {every!r}; it must be a number of steps of at least 1")
    if dtype is not None and dtype not in _DTYPES:
        names = ", ".join(str(allowed) for allowed in _DTYPES)
        raise UsageError(f"dtype is {dtype}; it must be one of {names}, or None")


def _refuse_weights(weights: Mapping[str, Tensor]) -> None:
    """Refuse an ``EMA`` of weights that cannot be averaged."""
    if not weights:
        raise UsageError("the model has no floating parameters, so there is nothing to average")
    odd = [name for name, weight in weights.items() if weight.layout != torch.strided]
    odd += [name for name, weight in weights.items() if weight.is_meta]
    odd += [name for name, weight in weights.items() if hasattr(weight, "ds_numel")]
    odd += [_COUNTER] if _COUNTER in weights else []
    if odd:
        raise UsageError(
            f"{odd[0]!r} cannot be averaged: it is sparse, on the meta device, partitioned by "
            f"DeepSpeed ZeRO-3, or named {_COUNTER!r} like the average's own counter",
            hint="average the rest: EMA(model.backbone), or make it after the weights exist",
        )
