"""Location of the gradients in DeepSpeed's optimizers, and each rank's part of them.

ZeRO splits parameters, so a rank holds pieces of some of them. Pieces held by several ranks count
once (``trainer_hooks.tensors.gradients``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from trainer_hooks.guard.optimizers import OptimizerGuard
from trainer_hooks.ranks import Ranks
from trainer_hooks.recovery.state import HostState, TrainingState
from trainer_hooks.tensors.gradients import GradNorms, Piece, clean_name
from trainer_hooks.tensors.optimizer_state import nonfinite_count

_NOTHING: Piece = ((-1,), (0,))
"""Piece of a parameter that other ranks update entirely."""


class ParamPartition(NamedTuple):
    """This rank's part of one parameter."""

    name: str
    offsets: tuple[int, ...]
    """Start of the part within the parameter; empty if it is the whole parameter."""
    gradient: Tensor | None
    weight: Tensor
    """Tensor that the optimizer updates."""


class DeepSpeedAdapter(ABC):
    """Adapts one of DeepSpeed's optimizers to ``trainer_hooks.exchange.device.UpdateEngine``.

    ``zero`` is the engine's optimizer, which wraps a plain one.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.zero: Any = engine.optimizer
        self.device = torch.device(engine.device)
        self.names = {id(p): clean_name(n) for n, p in engine.module.named_parameters()}
        self._overflowed = False
        self.measured_scale = self._own_scale = 1.0
        """Loss scale of the measured gradients; the engine may have updated its own since."""

    @abstractmethod
    def parameter_names(self) -> list[str]:
        """Return the names of all parameters that DeepSpeed trains, in one order on all ranks."""

    @abstractmethod
    def partitions(self) -> Iterator[ParamPartition]:
        """Yield DeepSpeed's current parts on this rank in that order; empty ones may be omitted."""

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype in which DeepSpeed's model computes."""
        dtype: torch.dtype = self.zero.dtype
        return dtype

    @property
    def scaler(self) -> Any:
        """Return the object of DeepSpeed that holds the loss scale; None without one."""
        return self.zero.loss_scaler

    @property
    def own_scale(self) -> float:
        """Current loss scale of the DeepSpeed engine."""
        if self.zero.custom_loss_scaler:
            return float(self.zero.external_loss_scale)
        return float(self.scaler.cur_scale)

    @property
    def scale(self) -> float:
        """Factor by which the measured gradients are multiplied; divide by it."""
        return self.own_scale

    @property
    def is_dynamic(self) -> bool:
        """Whether the loss scale is dynamic; otherwise an overflow is a fault."""
        return bool(self.scaler.dynamic)

    @property
    def clips_to_config_norm(self) -> bool:
        """Whether the engine clips to the norm in its config."""
        return True

    def read_overflow_flag(self, *, overflowed: bool) -> None:
        """Record the engine's overflow flag and loss scale at the time of the measurement."""
        self._overflowed, self.measured_scale = overflowed, self.scale
        self._own_scale = self.own_scale

    guards: tuple[OptimizerGuard, ...] = ()
    """Empty: the engine steps by itself."""
    reads_verdict = True

    def norms(self, ranks: Ranks) -> GradNorms:
        """Return the object that measures the gradients. Collective."""
        return DeepSpeedNorms(self, ranks)

    def overflow(self) -> Tensor | None:
        """Return the engine's overflow flag, 0-dim float64; None without a dynamic loss scale."""
        if not self.is_dynamic:
            return None
        return torch.full((), float(self._overflowed), dtype=torch.float64, device=self.device)

    def loss_scale(self) -> Tensor | None:
        """Return the loss scale, 0-dim float64; None if there is none."""
        if self.dtype != torch.float16:
            return None
        return torch.full((), self._own_scale, dtype=torch.float64, device=self.device)

    def training_state(self, *args: Any, **kwargs: Any) -> TrainingState:
        """Return the engine's state to snapshot; arguments as for ``TrainingState``.

        Weights in the optimizer's precision are parameters of the inner optimizer.
        """
        return TrainingState(*args, **kwargs)

    def model_weights(self) -> dict[str, Tensor]:
        """Return the weights that forwards of DeepSpeed's model use, as far as this rank has them.

        Those that the optimizer updates may be others, in another precision.
        """
        named = self.engine.module.named_parameters()
        return {clean_name(name): param.detach() for name, param in named}

    def name_of(self, param: Tensor, group: int, index: int) -> str:
        """Return the user's name of a parameter, otherwise its group and index."""
        return self.names.get(id(param), f"group{group}.{index}")


class DeepSpeedNorms(GradNorms):
    """Squared norms of the gradient pieces, without the loss scale."""

    def __init__(self, holder: DeepSpeedAdapter, ranks: Ranks) -> None:
        self._holder = holder
        nothing = torch.empty(0, device=holder.device)
        params: dict[str, Tensor] = {name: nothing.clone() for name in holder.parameter_names()}
        pieces = {id(tensor): _NOTHING for tensor in params.values()}
        for part in holder.partitions():
            params[part.name] = part.weight.detach()
            pieces[id(params[part.name])] = part.offsets, tuple(part.weight.shape)
        super().__init__(params, ranks, pieces)
        self.device = holder.device
        self.share = self.share.to(holder.device)
        self._at = {name: i for i, name in enumerate(self.names)}

    @torch.no_grad()
    def gradients(self) -> tuple[list[int], list[Tensor]]:
        """Return indices of the parameters of which this rank has a part, and their gradients.

        The gradients still include the loss scale.
        """
        parts = [
            (self._at[part.name], part.gradient.detach())
            for part in self._holder.partitions()
            if part.gradient is not None and part.gradient.numel()
        ]
        return [at for at, _ in parts], [gradient for _, gradient in parts]

    @torch.no_grad()
    def local_parameters(self) -> list[Tensor]:
        """Return this rank's part of each parameter; empty if it has none."""
        parts = list(self.params)
        for part in self._holder.partitions():
            parts[self._at[part.name]] = part.weight.detach()
        return parts

    def clip_fallback_gradients(self) -> list[Tensor]:
        """Return nothing: DeepSpeed's engine clips by itself."""
        return []

    def squares_into(self, out: Tensor, where: list[int], grads: list[Tensor]) -> None:
        """Write this rank's share of each squared norm to ``out``, without the loss scale."""
        super().squares_into(out, where, grads)
        out.div_(self._holder.measured_scale**2)

    def nonfinite_parameters(self) -> Tensor:
        """Return the number of parts with a NaN or Inf, on the device; does not wait."""
        with torch.no_grad():
            parts = [*self.local_parameters(), *self._holder.model_weights().values()]
            return nonfinite_count(parts, self.device)

    def nonfinite_names(self) -> list[str]:
        """Return the names of parts with a NaN or Inf; waits for the device."""
        weights = self._holder.model_weights().items()
        bad = [name for name, part in weights if nonfinite_count([part], self.device).item()]
        return list(dict.fromkeys([*super().nonfinite_names(), *bad]))


class ZeroTwo(DeepSpeedAdapter):
    """ZeRO stages 1 and 2: each rank updates one piece of each group's flat parameters."""

    def parameter_names(self) -> list[str]:
        """Return the names of all trained parameters, in the optimizer's order."""
        return [
            self.name_of(param, i, j)
            for i, group in enumerate(self.zero.bit16_groups)
            for j, param in enumerate(group)
        ]

    def partitions(self) -> Iterator[ParamPartition]:
        """Yield this rank's partitions, with their averaged gradients."""
        zero = self.zero
        for i, params in enumerate(zero.params_in_partition):
            rank = dist.get_rank(zero.real_dp_process_group[i])
            averaged = zero.averaged_gradients.get(i)
            grads = [g for g in averaged or () if not getattr(g, "_zero_padding", False)]
            flat = zero.single_partition_of_fp32_groups[i]
            index = {id(param): j for j, param in enumerate(zero.bit16_groups[i])}
            for n, param in enumerate(params):
                of_param = zero.get_param_id(param)
                begin = zero.grad_start_offset[i][rank][of_param]
                at = zero.grad_partition_insertion_offset[i][rank][of_param]
                size = min(param.numel() - begin, flat.numel() - at)
                name = self.name_of(param, i, index[id(param)])
                grad = grads[n] if n < len(grads) else None
                yield ParamPartition(name, (int(begin),), grad, flat.narrow(0, int(at), int(size)))


class ZeroThree(DeepSpeedAdapter):
    """ZeRO stage 3: each rank holds and updates a piece of every parameter."""

    def parameter_names(self) -> list[str]:
        """Return the names of all trained parameters, in the optimizer's order."""
        return [name for name, _, _, _ in self._trainable_params()]

    def partitions(self) -> Iterator[ParamPartition]:
        """Yield this rank's piece of each parameter, without padding."""
        zero = self.zero
        rank = dist.get_rank(zero.dp_process_group)
        for name, i, j, param in self._trainable_params():
            averaged = zero.averaged_gradients.get(i)
            at, real = self.place_of(param)
            weight = zero.fp32_partitioned_groups_flat[i].narrow(0, at, real)
            grad = None if averaged is None else averaged[j].reshape(-1).narrow(0, 0, real)
            yield ParamPartition(name, (rank * param.partition_numel(),), grad, weight)

    def place_of(self, param: Any) -> tuple[int, int]:
        """Return the start of a parameter's piece in its flat group, and its size unpadded."""
        _, at, _ = self.zero.grad_position[self.zero.get_param_id(param)]
        return at, self.unpadded_size(param)

    def unpadded_size(self, param: Any) -> int:
        """Return the number of elements of ZeRO 3's parameter that this rank holds."""
        size = param.partition_numel()
        rank = dist.get_rank(self.zero.dp_process_group)
        return int(min(size, max(0, param.ds_numel - rank * size)))

    def training_state(self, *args: Any, **kwargs: Any) -> TrainingState:
        """Return the pieces of ZeRO 3 to snapshot; arguments as for ``TrainingState``."""
        return ZeroThreeState(self, *args, **kwargs)

    def model_weights(self) -> dict[str, Tensor]:
        """Return this rank's pieces of the weights that forwards gather, without padding."""
        return {
            clean_name(name): param.ds_tensor.view(-1).narrow(0, 0, self.unpadded_size(param))
            for name, param in self.engine.module.named_parameters()
        }

    def trained_by_group(self) -> dict[int, list[tuple[str, Any]]]:
        """Return name and parameter of each that ZeRO 3 trains, by its flat group."""
        groups: dict[int, list[tuple[str, Any]]] = {}
        for name, i, _, param in self._trainable_params():
            groups.setdefault(i, []).append((name, param))
        return groups

    def _trainable_params(self) -> Iterator[tuple[str, int, int, Any]]:
        """Yield name, group, index and parameter of each that ZeRO 3 trains."""
        for i, group in enumerate(self.zero.fp16_groups):
            for j, param in enumerate(group):
                if param.requires_grad:
                    yield self.name_of(param, i, j), i, j, param


class EngineNumbers:
    """Numbers of a DeepSpeed engine to snapshot: of its steps, and of its loss scale."""

    _OF_ENGINE = ("global_steps", "skipped_steps")
    _OF_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")

    def __init__(self, engine: Any, holder: DeepSpeedAdapter | None) -> None:
        self._owners: list[tuple[Any, tuple[str, ...]]] = [(engine, self._OF_ENGINE)]
        if holder is not None:
            # A step that rolls back was skipped, and a loop's scheduler waits for such steps.
            self._owners += [(holder.scaler, self._OF_SCALE), (holder.zero, ("overflow",))]

    def state_dict(self) -> dict[str, Any]:
        """Return the engine's numbers by name."""
        return {
            name: getattr(owner, name)
            for owner, names in self._owners
            for name in names
            if hasattr(owner, name)
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the engine's numbers back."""
        for owner, names in self._owners:
            for name in names:
                if name in state:
                    setattr(owner, name, state[name])


class _PieceState(dict[str, Any]):
    """A piece of a flat group's optimizer state; clearing it clears that of the group."""

    def __init__(self, whole: dict[str, Any], key: str, piece: Tensor) -> None:
        super().__init__({key: piece})
        self._whole = whole

    def clear(self) -> None:
        """Clear the optimizer state of the whole flat group."""
        self._whole.clear()


class ZeroThreeState(TrainingState):
    """This rank's pieces of all parameters under ZeRO 3, without their padding.

    Nothing ever sets the padding, so it may be NaN. ``master.<parameter>`` is the piece that the
    optimizer updates, and ``model.<parameter>`` the one that forwards gather.
    """

    def __init__(self, holder: ZeroThree, *args: Any, **kwargs: Any) -> None:
        self._holder = holder
        super().__init__(*args, **kwargs)

    def _look_up_parameters(self) -> None:
        """Find the pieces; the optimizer has them only within its step."""
        weights = self._holder.model_weights()
        trained = weights.keys() & set(self._holder.parameter_names())
        self._masters = {f"master.{part.name}": part.weight for part in self._holder.partitions()}
        self._params = weights | self._masters
        self._names = {id(param): name for name, param in self._params.items()}
        self._trained = frozenset(f"model.{name}" for name in trained | self._masters.keys())

    def _named_params(self, i: int) -> Iterator[tuple[str, Tensor]]:
        """Yield the pieces that the optimizer updates, and its flat groups, which have no piece."""
        yield from ((name.removeprefix("master."), p) for name, p in self._masters.items())
        flats = self._holder.zero.fp32_partitioned_groups_flat
        yield from ((f"flat{number}", flats[number]) for number in self._holder.trained_by_group())

    def _moments(self) -> Iterator[tuple[str, int, dict[str, Any], str]]:
        """Yield the optimizer's state: by piece, and what a flat group has only once."""
        holder = self._holder
        for number, params in holder.trained_by_group().items():
            flat = holder.zero.fp32_partitioned_groups_flat[number]
            state: dict[str, Any] = self._optimizers[0].state.get(flat, {})
            for key, value in state.items():
                if not isinstance(value, Tensor):
                    continue
                if value.shape != flat.shape:
                    yield f"optim.0.flat{number}.{key}", 0, state, key
                    continue
                for name, param in params:
                    piece = value.view(-1).narrow(0, *holder.place_of(param))
                    yield f"optim.0.{name}.{key}", 0, _PieceState(state, key, piece), key

    def load_host_state(self, host: HostState, *, rng: bool = True) -> None:
        """Restore the rest, and gather again the small parameters that stay whole. Collective."""
        super().load_host_state(host, rng=rng)
        self._holder.zero.checkpoint_event_prologue()
        self._holder.zero.checkpoint_event_epilogue()


class _ReplicatedAdapter(DeepSpeedAdapter):
    """No ZeRO: every rank holds all gradients, already reduced."""

    @abstractmethod
    def grouped(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield each parameter of a DeepSpeed optimizer with its gradient."""

    def parameter_names(self) -> list[str]:
        """Return the names of all trained parameters, in the optimizer's order."""
        return [part.name for part in self.partitions()]

    def partitions(self) -> Iterator[ParamPartition]:
        """Yield all of DeepSpeed's parameters as whole tensors, because there is no ZeRO."""
        for index, (param, grad) in enumerate(self.grouped()):
            yield ParamPartition(self.name_of(param, 0, index), (), grad, param)


class HalfPrecisionAdapter(_ReplicatedAdapter):
    """Half precision without ZeRO: FP16_Optimizer and FP16_UnfusedOptimizer, also bfloat16."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self.scales_losses = False
        """Whether the loss was multiplied by the scale: DeepSpeed 0.19 only divides by it."""

    @property
    def scaler(self) -> Any:
        """Return DeepSpeed's object that holds the loss scale."""
        return getattr(self.zero, "loss_scale_config", self.zero)

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype in which DeepSpeed's half-precision model computes."""
        dtype: torch.dtype = self.zero.fp16_groups[0][0].dtype
        return dtype

    @property
    def scale(self) -> float:
        """Return the factor that multiplies DeepSpeed's measured gradients; divide by it."""
        return self.own_scale if self.scales_losses else 1.0

    @property
    def is_dynamic(self) -> bool:
        """Return whether DeepSpeed's loss scale is dynamic."""
        return self.is_scaled and bool(self.scaler.dynamic_loss_scale)

    @property
    def is_scaled(self) -> bool:
        """Return whether the DeepSpeed engine has a loss scale."""
        return self.dtype == torch.float16

    @property
    def clips_to_config_norm(self) -> bool:
        """Whether the clip uses the config's norm; not if it divides by an unapplied loss scale."""
        return self.scales_losses or not self.is_scaled

    def grouped(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield each parameter of DeepSpeed's half-precision model with its gradient."""
        return ((param, param.grad) for group in self.zero.fp16_groups for param in group)


class Bfloat16Adapter(_ReplicatedAdapter):
    """BF16_Optimizer: bfloat16 with gradients that accumulate in float32."""

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype in which DeepSpeed's bfloat16 model computes."""
        return torch.bfloat16

    @property
    def scaler(self) -> Any:
        """Return None: DeepSpeed's bfloat16 optimizer has no loss scale."""
        return None

    @property
    def own_scale(self) -> float:
        """Return 1: DeepSpeed's bfloat16 optimizer has no loss scale."""
        return 1.0

    @property
    def is_dynamic(self) -> bool:
        """Return False: DeepSpeed's bfloat16 optimizer has no loss scale."""
        return False

    def grouped(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield each parameter of the model with its float32 gradient."""
        zero = self.zero
        for i, group in enumerate(zero.bf16_groups):
            for j, param in enumerate(group):
                has = zero.fp32_groups_has_gradients[i][j]
                yield param, zero.fp32_groups_gradients[i][j] if has else None
