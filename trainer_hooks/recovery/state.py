"""Everything that training changes, under stable names; read and restored without a copy.

Tensors are live ones, never copies: a snapshot copies from them, a restore copies into them, and
their addresses never change, so a fused optimizer, a compiled step and DDP's buckets are not
affected. The rest (scalars of the parameter groups, schedulers, registered state, RNG state) is
small and is handled as one tree of plain values, the *host state*.

Names: ``model.<parameter>``, ``buffer.<buffer>``, ``optim.<i>.<parameter>.<key>``,
``group.<i>.<g>.<key>`` (a learning rate that is a tensor), ``scaler.<key>``,
``extra.<name>.<key>`` (registered modules, such as an EMA).
"""

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from trainer_hooks.guard.ema import EMA
from trainer_hooks.guard.hook_memory import comm_hooks
from trainer_hooks.stateful import HasStateDict
from trainer_hooks.tensors import optimizer_state
from trainer_hooks.tensors.copying import wait_for_copies
from trainer_hooks.tensors.experts import ddp_groups, expert_groups
from trainer_hooks.tensors.gradients import clean_name, reshard, unwrap
from trainer_hooks.tensors.rng import capture_rng, restore_rng
from trainer_hooks.tensors.shard_layout import LocalShard, local_shards
from trainvitals.errors import CheckpointError

HostState = dict[str, Any]

_PLAIN = frozenset({Tensor, nn.Parameter})

_IMPLEMENTATION = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})
"""Keys of a parameter group that select how the update is computed: kept from the live process."""


class TensorSpec(NamedTuple):
    """Shape and type of a saved tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorSpec":
        """Return the shape and type of a tensor in a snapshot."""
        return cls(tuple(tensor.shape), tensor.dtype)


class TrainingState:
    """The live state of one rank's training.

    Create it before the first forward, when FSDP2 holds its sharded parameters: they are found once
    and kept. Optimizer state is looked up each time, because it is created at the first step.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        schedulers: Sequence[HasStateDict] = (),
        *,
        scaler: torch.amp.GradScaler | None = None,
        extra: Mapping[str, HasStateDict] | None = None,
        is_stage: bool = False,
        owns_step: bool = True,
    ) -> None:
        """``is_stage``: other ranks hold other parameters, which may have the same names.

        Without ``owns_step`` the loop has the step and the data: a restore is inside its
        ``scaler.step()``, and the same random numbers would draw the same data again.
        """
        self._wrapped = model
        self._is_stage = is_stage
        self._owns_step = owns_step
        self._model, self._is_ddp = unwrap(model)
        # A wrapper may expose the state of its inner optimizer as its own.
        inner = [
            part for o in optimizers for part in _inner_optimizers(o) if part.state is not o.state
        ]
        self._optimizers = [*optimizers, *inner]
        self._schedulers = list(schedulers)
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._extra = dict(extra or {})
        self._look_up_parameters()
        nonfinite = self.nonfinite()
        live = self.tensors()
        self._finite_at_start = {k: TensorSpec.of(t) for k, t in live.items() if k not in nonfinite}

    def _look_up_parameters(self) -> None:
        """Find the parameters, and those that the optimizers train; a snapshot has all of them."""
        self._params: dict[str, Tensor] = {
            clean_name(n): p for n, p in self._model.named_parameters()
        }
        self._names = {id(p): n for n, p in self._params.items()}
        self._trained = frozenset(
            f"model.{name}"
            for i in range(len(self._optimizers))
            for name, _ in self._named_params(i)
        )

    def follow_groups(self) -> None:
        """Include parameter groups, and parameters of the model, that were added since.

        Snapshots taken before do not fit afterwards.
        """
        self._look_up_parameters()

    # -------------------------------------------------------------------------------- position

    def shard_positions(self, *, rank: int, world_size: int) -> dict[str, LocalShard]:
        """Return the positions of this rank's parameters in the complete ones, by their names.

        Includes registered modules. A missing parameter has no position: only this rank has it, as
        experts and all of a pipeline's stage.
        """
        if self._is_stage:
            return {}
        local_shard = partial(local_shards, rank=rank, world_size=world_size)
        alike, experts = self._alike_on_all_ranks(world_size), expert_groups(self._wrapped)
        common = {name: p for name, p in self._params.items() if id(p) not in experts}
        places = local_shard(self._model, "model.", common, alike=alike)
        for name, stateful in self._extra.items():
            if isinstance(stateful, nn.Module):
                prefix, tensors = f"extra.{name}.", dict(_tensors_of(stateful))
                places |= local_shard(stateful, prefix, tensors, alike=())
                if isinstance(stateful, EMA | AveragedModel):
                    places |= _held_as_weights(prefix, tensors, places)
        return places

    @property
    def split_optimizers(self) -> frozenset[int]:
        """Indexes of optimizers that may hold only a part of the state, with the rest elsewhere.

        These are wrappers, such as ZeroRedundancyOptimizer, and the optimizers inside them.
        """
        inner = {id(part): o for o in self._optimizers for part in _inner_optimizers(o)}
        split_keys = {
            key for key, o in inner.items() if any(id(part) == key for part in self._optimizers)
        }
        around = {id(inner[key]) for key in split_keys}
        return frozenset(i for i, o in enumerate(self._optimizers) if id(o) in split_keys | around)

    def replicas(self, world_size: int) -> Callable[[str], bool]:
        """Return a function that tells from a tensor's name if DDP keeps it equal on all ranks.

        True for parameters that DDP synchronizes, and their optimizer state if each rank holds all
        of it. Not for buffers, which forward writes from each rank's own batch.
        """
        alike: frozenset[str] = frozenset()
        if self._is_ddp and not self._trains_apart():
            alike = self._alike_on_all_ranks(world_size)
        split = self.split_optimizers

        def is_replica(key: str) -> bool:
            kind, _, rest = key.partition(".")
            if kind == "optim":
                number, _, rest = rest.partition(".")
                return int(number) not in split and rest.rpartition(".")[0] in alike
            return kind == "model" and rest in alike

        return is_replica if alike and world_size > 1 else lambda key: False

    def holders(self, world_size: int) -> dict[str, tuple[int, ...]]:
        """Return the ranks that must hold the same as this one, by the names of parameters.

        The ranks of DDP if it keeps it equal, those along the replicated sides of a mesh for a
        DTensor and along FSDP1's replicas. A missing parameter belongs to this rank, or is unknown.
        """
        everyone = tuple(range(world_size))
        apart, flat = self._trains_apart(), _flat_holders(self._wrapped)
        alike = frozenset() if apart else self._alike_on_all_ranks(world_size)
        groups: dict[int, tuple[int, ...]] = {}
        if not apart:
            groups |= ddp_groups(self._wrapped) if self._is_ddp or self._is_stage else {}
            groups |= expert_groups(self._wrapped)
        holders: dict[str, tuple[int, ...]] = {}
        for name, param in self._params.items():
            if id(param) in flat:
                holders[f"model.{name}"] = flat[id(param)]
            elif hasattr(param, "to_local"):
                holders[f"model.{name}"] = _dtensor_replica_ranks(param)
            elif name in alike:
                holders[f"model.{name}"] = everyone
            elif id(param) in groups:
                holders[f"model.{name}"] = groups[id(param)]
        return {key: ranks for key, ranks in holders.items() if len(ranks) > 1}

    def _trains_apart(self) -> bool:
        """Return whether each rank trains separately between two averages."""
        hooks = comm_hooks(self._wrapped)
        return any(getattr(hook, "__name__", "") == "post_localSGD_hook" for hook, _ in hooks)

    def trains_one_model(self, world_size: int) -> bool:
        """Return whether the ranks train one model together: in full, or each rank its part."""
        if self._trains_apart():
            return False
        is_cut = any(hasattr(p, "to_local") for p in self._params.values())
        is_flat = any(hasattr(m, "_handle") for m in self._wrapped.modules())
        return is_cut or is_flat or (self._is_ddp and bool(self._alike_on_all_ranks(world_size)))

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Parameters by the names of ``tensors``, as the model has them: DTensors, not shards."""
        return {f"model.{name}": param for name, param in self._params.items()}

    def plain_parameters(self) -> dict[str, Tensor]:
        """Return the parameters that other ranks have too if they have the name: no shards."""
        if self._is_stage:
            return {}
        experts = expert_groups(self._wrapped)
        return {
            f"model.{name}": param
            for name, param in self._params.items()
            if not hasattr(param, "to_local") and id(param) not in experts and param.numel()
        }

    def optimizer_states(self) -> list[tuple[int, str, Tensor, Mapping[Tensor, Any]]]:
        """Return (optimizer, parameter's name, parameter, state) of each parameter to restore.

        Without optimizers that may hold only a part of the state.
        """
        split = self.split_optimizers
        return [
            (i, name, param, optimizer.state)
            for i, optimizer in enumerate(self._optimizers)
            if i not in split
            for name, param in self._named_params(i)
        ]

    def averages(self) -> dict[str, str]:
        """Return the names of registered averages of parameters, with those of the parameters."""
        of: dict[str, str] = {}
        for name, stateful in self._extra.items():
            if isinstance(stateful, EMA | AveragedModel):
                for key, _ in _tensors_of(stateful):
                    of[f"extra.{name}.{key}"] = f"model.{_averaged(key, self._params)}"
        return of

    def _alike_on_all_ranks(self, world_size: int) -> frozenset[str]:
        """Return the plain parameters that every rank updates in the same way."""
        plain = frozenset(n for n, p in self._params.items() if not hasattr(p, "to_local"))
        if world_size == 1:
            return plain
        if any(isinstance(module, DistributedDataParallel) for module in self._wrapped.modules()):
            everyone = tuple(range(world_size))
            groups = ddp_groups(self._wrapped)
            synced = {n for n in plain if groups.get(id(self._params[n])) == everyone}
            return frozenset(synced) if self._is_ddp else frozenset()
        parallel = len(plain) < len(self._params)
        fsdp = any(
            base.__name__ in ("FSDPModule", "FullyShardedDataParallel")
            for module in self._model.modules()
            for base in type(module).__mro__
        )
        # With only tensor parallelism, ranks compute the same wherever they hold the same.
        # Parameters that FSDP was told to leave out belong to each rank, as experts do.
        if not parallel or fsdp:
            return frozenset()
        experts = expert_groups(self._wrapped)
        return frozenset(name for name in plain if id(self._params[name]) not in experts)

    # ------------------------------------------------------------------------------- reading

    @torch.no_grad()
    def tensors(self) -> dict[str, Tensor]:
        """Return this rank's live tensors to snapshot by name, always in the same order.

        A DTensor provides its local shard, and an expanded tensor its one true element: writing to
        the result changes the training. Optimizer state is included once it exists.
        """
        live: dict[str, Tensor] = {f"model.{n}": p for n, p in self._params.items()}
        live |= {f"buffer.{clean_name(n)}": b for n, b in self._model.named_buffers()}
        for key, _, state, name in self._moments():
            live[key] = state[name]
        for i, optimizer in enumerate(self._optimizers):
            for g, group in enumerate(optimizer.param_groups):
                live |= {f"group.{i}.{g}.{k}": v for k, v in group.items() if _is_tensor(v)}
        live |= self._scaler_tensors()
        for name, stateful in self._extra.items():
            if isinstance(stateful, nn.Module):
                live |= {f"extra.{name}.{k}": t for k, t in _tensors_of(stateful)}
        return {key: _dense_local_tensor(key, tensor) for key, tensor in live.items()}

    def host_state(self) -> HostState:
        """Return a deep copy of everything that is not a live tensor; does not wait for a device.

        It includes the results of registered ``state_dict()`` calls, with their tensors.
        """
        state = copy.deepcopy(
            {
                "groups": [[_scalar_settings(g) for g in o.param_groups] for o in self._optimizers],
                "moments": [self._moment_scalars(i) for i in range(len(self._optimizers))],
                "schedulers": [s.state_dict() for s in self._schedulers],
                "scaler": self._scaler_scalars(),
                "extra": {
                    name: stateful.state_dict()
                    for name, stateful in self._extra.items()
                    if not isinstance(stateful, nn.Module)
                },
            }
        )
        return state | {"rng": capture_rng()}  # already a new copy

    @property
    def device(self) -> torch.device:
        """Return the device of the parameters, from which snapshots are copied."""
        return next((p.device for p in self._params.values()), torch.device("cpu"))

    def bytes_when_warm(self) -> int:
        """Return the size of a snapshot's tensors, with an estimate for missing optimizer state."""
        return sum(self._sizes_when_warm().values())

    def num_tensors_when_warm(self) -> int:
        """Return an upper bound of the number of tensors in a snapshot, with optimizer state."""
        return len(self._sizes_when_warm()) + 4 * len(self._params)

    def replica_bytes_when_warm(self, is_replica: Callable[[str], bool]) -> int:
        """Return the part of a snapshot's estimated size that is replicas."""
        return sum(size for key, size in self._sizes_when_warm().items() if is_replica(key))

    def _sizes_when_warm(self) -> dict[str, int]:
        """Return a snapshot's bytes by tensor, with an estimate for missing optimizer state."""
        sizes = {key: t.numel() * t.element_size() for key, t in self.tensors().items()}
        for i, optimizer in enumerate(self._optimizers):
            if optimizer.state:
                continue
            param_bytes = {n: p.numel() * p.element_size() for n, p in self._named_params(i)}
            expected, whole = optimizer_state.expected_bytes(optimizer), sum(param_bytes.values())
            for name, size in param_bytes.items():
                sizes[f"optim.{i}.{name}.expected"] = expected * size // max(1, whole)
        return sizes

    # -------------------------------------------------------------------------------- health

    def must_be_finite(self, key: str) -> bool:
        """Return whether a healthy state has no NaN or Inf there.

        Optimizers never have such values; other tensors only if they had none at the start (a mask
        of -inf is a buffer, or a frozen parameter).
        """
        return self.is_trained(key) or key in self._finite_at_start

    def forget_replaced(self, live: Mapping[str, Tensor]) -> None:
        """Stop checking a buffer that the model has replaced by one of another shape.

        A mask that is built at the first batch, or grows with the longest one, is infinite by
        design.
        """
        for key, tensor in live.items():
            if self._finite_at_start.get(key, TensorSpec.of(tensor)) != TensorSpec.of(tensor):
                del self._finite_at_start[key]

    def is_trained(self, key: str) -> bool:
        """Return whether a snapshot's tensor is a trained parameter or optimizer state."""
        return key.startswith("optim.") or key in self._trained

    def accept(self, keys: Iterable[str]) -> None:
        """Stop requiring finite values in these tensors of a snapshot, except for trained ones."""
        for key in keys:
            self._finite_at_start.pop(key, None)

    def nonfinite(self) -> list[str]:
        """Return the names of all tensors with a NaN or Inf; waits for the device."""
        return _nonfinite_in(self.tensors())

    # ----------------------------------------------------------------------------- restoring

    @torch.no_grad()
    def conform(self, saved: Mapping[str, TensorSpec], host: HostState) -> None:
        """Make live tensors match the shapes and types of a state to restore, before ``write``.

        Optimizer state that was absent starts again: zeroed in place if the optimizer is known to
        start from zeros, otherwise removed so that the optimizer creates it as in a new run. State
        that is absent here (a new process) is created. Checked before anything changes.

        Raises:
            CheckpointError: the model, the optimizers or the registered state do not match the
                checkpoint.
        """
        live = self.tensors()
        self._check_fit(saved, live, host)
        wait_for_copies()
        owners = {key: (i, state, name) for key, i, state, name in self._moments()}
        saved_state_ids = {id(state) for key, (_, state, _) in owners.items() if key in saved}
        for key in [k for k in owners if k not in saved]:
            i, state, name = owners[key]
            if id(state) not in saved_state_ids and not optimizer_state.starts_from_zeros(
                self._optimizers[i]
            ):
                state.clear()
            elif name in state:
                _dense_local_tensor(key, state[name]).zero_()
        for key in [k for k in saved if k not in live and k.startswith("optim.")]:
            self._create_moment(key, saved[key])
        if "scaler.scale" in saved and "scaler.scale" not in live and self._scaler is not None:
            self._scaler._lazy_init_scale_growth_tracker(self.device)

    @torch.no_grad()
    def write(self, saved: Mapping[str, Tensor]) -> None:
        """Restore tensors: copy them into the live ones of the same name, after ``conform``."""
        live = self.tensors()
        for key, tensor in saved.items():
            # Through .data, which raises no version: within a batch of several optimizers the loop
            # still calls a backward whose graph has the tensor. Its update is dropped.
            live[key].data.copy_(tensor, non_blocking=True)

    def load_host_state(self, host: HostState, *, rng: bool = True) -> None:
        """Restore everything that is not a live tensor; the last part of a restore.

        ``rng=False`` leaves the RNGs, for a checkpoint without those of this rank.
        """
        host = copy.deepcopy(host)
        for optimizer, groups in zip(self._optimizers, host["groups"], strict=True):
            for group, scalars in zip(optimizer.param_groups, groups, strict=True):
                group.update(scalars)
        for i, scalars in enumerate(host["moments"]):
            self._load_moment_scalars(i, scalars)
        for scheduler, state in zip(self._schedulers, host["schedulers"], strict=True):
            scheduler.load_state_dict(state)
        self._load_scaler_scalars(host["scaler"])
        for name, state in host["extra"].items():
            self._extra[name].load_state_dict(state)
        reshard(self._wrapped)
        torch.clear_autocast_cache()
        if rng and self._owns_step:
            restore_rng(host["rng"])

    # ------------------------------------------------------------------------------- the parts

    def _named_params(self, i: int) -> Iterator[tuple[str, Tensor]]:
        """Yield an optimizer's parameters to snapshot; one outside the model gets a name here."""
        for group in self._optimizers[i].param_groups:
            for param in group["params"]:
                if id(param) not in self._names:
                    self._names[id(param)] = f"unnamed.{len(self._params)}"
                    self._params[self._names[id(param)]] = param
                yield self._names[id(param)], param

    def _moments(self) -> Iterator[tuple[str, int, dict[str, Any], str]]:
        """Yield (key, optimizer, its state of the parameter, name in it) of each state tensor."""
        for i, optimizer in enumerate(self._optimizers):
            for param_name, param in self._named_params(i):
                state = optimizer.state.get(param, {})
                for name in [n for n, v in state.items() if _is_tensor(v)]:
                    yield f"optim.{i}.{param_name}.{name}", i, state, name

    def _moment_scalars(self, i: int) -> dict[str, dict[str, Any]]:
        """Return an optimizer's state other than tensors, by parameter, for a snapshot."""
        scalars = {}
        for param_name, param in self._named_params(i):
            state = self._optimizers[i].state.get(param, {})
            rest = {k: v for k, v in state.items() if not _is_tensor(v) and v is not None}
            if rest:
                scalars[param_name] = rest
        return scalars

    def _load_moment_scalars(self, i: int, saved: dict[str, dict[str, Any]]) -> None:
        """Restore an optimizer's state other than tensors; a newer counter becomes 0."""
        state = self._optimizers[i].state
        for param_name, param in self._named_params(i):
            scalars = saved.get(param_name, {})
            for name, value in state.get(param, {}).items():
                if name not in scalars and isinstance(value, int | float):
                    scalars[name] = type(value)(0)  # a step counter that did not exist yet
            if scalars:
                state[param].update(scalars)

    def _create_moment(self, key: str, spec: TensorSpec) -> None:
        """Create optimizer state that a restore will fill and that the optimizer lacks."""
        i, rest = key.removeprefix("optim.").split(".", 1)
        param_name, name = rest.rsplit(".", 1)
        optimizer, param = self._optimizers[int(i)], self._params[param_name]
        group = next(g for g in optimizer.param_groups if any(p is param for p in g["params"]))
        on_host = name == "step" and not (group.get("fused") or group.get("capturable"))
        device = torch.device("cpu") if on_host else param.device
        optimizer.state[param][name] = optimizer_state.zeros(
            spec.shape, spec.dtype, device, like=param
        )

    def _scaler_tensors(self) -> dict[str, Tensor]:
        """Return the gradient scaler's tensors for a snapshot; empty without them."""
        if self._scaler is None or self._scaler._scale is None:
            return {}
        tracker = self._scaler._growth_tracker
        assert tracker is not None
        return {"scaler.scale": self._scaler._scale, "scaler.growth_tracker": tracker}

    def _scaler_scalars(self) -> dict[str, Any]:
        """Return the gradient scaler's settings for a snapshot; empty without a scaler."""
        names = ("_init_scale", "_init_growth_tracker", "_growth_factor", "_backoff_factor")
        if self._scaler is None:
            return {}
        return {n: getattr(self._scaler, n) for n in (*names, "_growth_interval")} | {
            "absent": self._scaler._scale is None
        }

    def _load_scaler_scalars(self, saved: dict[str, Any]) -> None:
        """Restore the gradient scaler's settings, and its initial scale if none was saved."""
        if self._scaler is None or not saved:
            return
        if self._owns_step:
            self._scaler._per_optimizer_states.clear()  # discard a step in progress
        absent = saved.pop("absent")
        for name, value in saved.items():
            setattr(self._scaler, name, value)
        if absent and self._scaler._scale is not None:
            assert self._scaler._growth_tracker is not None
            self._scaler._scale.fill_(saved["_init_scale"])
            self._scaler._growth_tracker.fill_(saved["_init_growth_tracker"])

    def _check_fit(
        self, saved: Mapping[str, TensorSpec], live: Mapping[str, Tensor], host: HostState
    ) -> None:
        """Raise if the saved state cannot be restored into this training."""
        saved_groups = [len(groups) for groups in host["groups"]]
        live_groups = [len(optimizer.param_groups) for optimizer in self._optimizers]
        if saved_groups != live_groups:
            raise mismatch_error(
                f"the checkpoint has {_format_groups(saved_groups)}; the optimizers have "
                f"{_format_groups(live_groups)} now",
                hint="if the loop adds groups during training, add those of the checkpoint before "
                "watch()",
            )
        lazy = ("optim.", "scaler.")
        param_names = {
            name for i in range(len(self._optimizers)) for name, _ in self._named_params(i)
        }
        for key in [*saved, *live]:
            if key in saved and key in live and saved[key] != TensorSpec.of(live[key]):
                raise mismatch_error(
                    f"{key} was saved as {saved[key]}; it is {TensorSpec.of(live[key])} now"
                )
            if key not in saved and not key.startswith(lazy):
                raise mismatch_error(f"{key} is not in the checkpoint")
            if key not in live and not key.startswith(lazy):
                raise mismatch_error(f"{key} is in the checkpoint and nowhere in this training")
            owner = key.split(".", 2)[2].rsplit(".", 1)[0] if key.startswith("optim.") else ""
            if owner and owner not in param_names:
                raise mismatch_error(f"{key} belongs to a parameter that no optimizer has now")
        if len(host["schedulers"]) != len(self._schedulers):
            raise mismatch_error(
                f"{len(host['schedulers'])} schedulers were saved; {len(self._schedulers)} now"
            )
        ours = {n for n, s in self._extra.items() if not isinstance(s, nn.Module)}
        if set(host["extra"]) != ours:
            raise mismatch_error(
                f"state registered then: {sorted(host['extra'])}; now: {sorted(ours)}"
            )


class StateCheck:
    """Periodic check, without snapshots, for non-finite state that a finite loss may hide.

    It covers the parameters and states of optimizers, and buffers and frozen parameters that were
    finite at ``watch()`` and have the same shape. Nothing is copied, and it never waits for a GPU.
    """

    EVERY = 200
    """Steps between two checks: each reads everything once."""
    AGAIN = 50
    """The same after a non-finite check, so that its alert continues for as long as it lasts."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._model, self._optimizers = unwrap(model)[0], tuple(optimizers)
        self._names = {id(p): clean_name(n) for n, p in self._model.named_parameters()}
        self.every = self.EVERY
        others = self._others()
        bad = set(_nonfinite_in(others))
        self._finite_at_start = {k: TensorSpec.of(t) for k, t in others.items() if k not in bad}

    def nonfinite_count(self, step: int) -> Tensor | None:
        """Return, on the device, the number of non-finite tensors; None if no check is due."""
        if step % self.every or not step:
            return None
        tensors = self.tensors()
        device = next((t.device for t in tensors.values() if t.is_cuda), torch.device("cpu"))
        return optimizer_state.nonfinite_count(list(tensors.values()), device)

    def nonfinite_names(self) -> list[str]:
        """Return the names of currently non-finite tensors; waits for the device."""
        return _nonfinite_in(self.tensors())

    def _others(self) -> dict[str, Tensor]:
        """Return buffers, and parameters that no optimizer has."""
        trained = set(map(id, optimizer_state.params_of(self._optimizers)))
        named = {f"buffer.{clean_name(n)}": b for n, b in self._model.named_buffers()}
        for name, param in self._model.named_parameters():
            if id(param) not in trained:
                named[f"model.{clean_name(name)}"] = param
        return {k: optimizer_state.true_elements(t) for k, t in named.items() if _is_readable(t)}

    def tensors(self) -> dict[str, Tensor]:
        """Return the checked tensors, by the names of ``TrainingState``."""
        others = self._others().items()
        live = {k: t for k, t in others if self._finite_at_start.get(k) == TensorSpec.of(t)}
        for i, optimizer in enumerate(self._optimizers):
            for number, param in enumerate(optimizer_state.params_of([optimizer])):
                name = self._names.get(id(param), f"unnamed.{number}")
                parts = {f"model.{name}": param}
                state = optimizer.state.get(param)
                if isinstance(state, Mapping):
                    parts |= {f"optim.{i}.{name}.{k}": v for k, v in state.items() if k != "step"}
                live |= {
                    k: optimizer_state.true_elements(t) for k, t in parts.items() if _is_readable(t)
                }
        return live


def _is_readable(value: object) -> bool:
    """Return whether a value is a training state's tensor that can be checked for NaN and Inf."""
    return isinstance(value, Tensor) and optimizer_state.is_dense(value) and not value.is_meta


def _nonfinite_in(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the training state's tensors with a NaN or Inf; waits for the device."""
    return [k for k, t in tensors.items() if optimizer_state.nonfinite_count([t], t.device).item()]


def _held_as_weights(
    prefix: str, averages: Mapping[str, Tensor], tensors: Mapping[str, LocalShard]
) -> dict[str, LocalShard]:
    """Return the positions of averages, which are sharded and replicated like their weights."""
    places = {}
    for key, average in averages.items():
        name = _averaged(key, tensors, "model.")
        weight = tensors.get(f"model.{name}")
        if weight is not None and weight.shape == tuple(_dense_local_tensor(key, average).shape):
            places[prefix + key] = weight.renamed("model.", prefix)
    return places


def _averaged(key: str, names: Collection[str], prefix: str = "") -> str:
    """Return the name of the parameter whose average is in the training state."""
    name = clean_name(key)
    while prefix + name not in names and name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def _dtensor_replica_ranks(param: Any) -> tuple[int, ...]:
    """Return the ranks that hold the same replica of a DTensor's part as this one."""
    here, placements = param.device_mesh.get_coordinate(), param.placements
    if here is None or any(placement.is_partial() for placement in placements):
        return ()
    sides = zip(here, placements, strict=True)
    index = tuple(slice(None) if side.is_replicate() else at for at, side in sides)
    return tuple(sorted(param.device_mesh.mesh[index].flatten().tolist()))


def _flat_holders(model: nn.Module) -> dict[int, tuple[int, ...]]:
    """Return ranks with the same replica as this one of each FSDP1 tensor, by its id."""
    holders: dict[int, tuple[int, ...]] = {}
    for module in model.modules():
        handle: Any = getattr(module, "_handle", None)
        flat = getattr(handle, "flat_param", None)
        if flat is None:
            continue
        group: Any = getattr(module, "_inter_node_pg", None)
        if not handle.uses_sharded_strategy:
            group = handle.process_group
        ranks = () if group is None else tuple(sorted(dist.get_process_group_ranks(group)))
        holders |= {id(tensor): ranks for tensor in (flat, *(flat._params or ()))}
    return holders


def mismatch_error(
    text: str,
    hint: str = "restore with the same model, optimizers, schedulers and watch(state=...)",
) -> CheckpointError:
    """Return the error of a checkpoint that does not match the training."""
    return CheckpointError(text, hint=hint)


def _format_groups(counts: Sequence[int]) -> str:
    """Return the number of parameter groups of each optimizer in a checkpoint as text."""
    each = " and ".join(map(str, counts))
    return f"{each} parameter group{'s' if counts != [1] else ''}"


def _inner_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """Return optimizers in a wrapper to restore, such as ZeroRedundancyOptimizer's local one."""
    many = (v if isinstance(v, list | tuple) else (v,) for v in vars(optimizer).values())
    return [value for values in many for value in values if isinstance(value, Optimizer)]


def _is_tensor(value: object) -> bool:
    """Return whether a part of the training state is a tensor."""
    return isinstance(value, Tensor)


def _scalar_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter group's settings to restore that are not tensors."""
    return {k: v for k, v in group.items() if k not in _IMPLEMENTATION and not _is_tensor(v)}


def _tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield a module's parameters and buffers, as parts of a snapshot."""
    yield from module.named_parameters()
    yield from module.named_buffers()


def _dense_local_tensor(key: str, tensor: Tensor) -> Tensor:
    """Return this rank's dense part of a live tensor to restore; refuse other layouts."""
    is_plain = type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_meta
    if is_plain and not tensor.is_nested and tensor.is_contiguous():
        # Most are, and hundreds are read per step: the code below takes twice as long.
        return tensor.detach() if tensor.requires_grad else tensor
    if not optimizer_state.is_dense(tensor) or tensor.is_meta:
        kind = "nested" if tensor.is_nested else "meta" if tensor.is_meta else tensor.layout
        raise CheckpointError(
            f"{key} is {kind}; only dense tensors can be put back",
            hint="keep a constant one as a plain attribute instead of a buffer; mode 'guard' needs "
            "no snapshots",
        )
    return optimizer_state.true_elements(tensor)
