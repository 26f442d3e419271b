"""Mapping between the names of this rank's tensors and the names in a checkpoint.

In a checkpoint ``model.X`` and ``optim.I.X.KEY`` are complete tensors of the parameter X, however
the ranks held it. A tensor without a position in a complete one is ``rank.N.`` and its local name.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from trainer_hooks.recovery.state import TensorSpec, mismatch_error
from trainer_hooks.tensors.shard_layout import LocalShard, Shape, ShardPiece

Scalars = list[dict[str, dict[str, Any]]]
"""For each optimizer, by parameter: the state that is not a tensor."""

_MODEL = "model."


class RankShardLayout:
    """One rank's view of the complete tensors.

    ``tensors`` are parameters, and tensors of registered modules, by this rank's names. Each
    rank keeps the state of some parameters only, if the optimizer is in ``split``.
    """

    def __init__(self, tensors: Mapping[str, LocalShard], split: Collection[int]) -> None:
        self._tensors = tensors
        self._split = split
        self._owners = {whole: key for key, tensor in tensors.items() for whole in tensor.wholes}

    def find_writable(self, key: str, shape: Shape) -> LocalShard | None:
        """Return the position of a tensor that this rank may write; None if it has none.

        A counter of a parameter without elements on this rank may be outdated: FSDP1 gives such a
        parameter no gradient.
        """
        tensor = self.find(key, shape)
        if tensor is None or not key.startswith("optim."):
            return tensor
        i, param, name = _parse_optimizer_key(key)
        filled = {
            _optimizer_key(i, piece.name, name) for piece in self._tensors[_MODEL + param].pieces
        }
        return replace(tensor, pieces=tuple(p for p in tensor.pieces if p.name in filled))

    def find(self, key: str, shape: Shape) -> LocalShard | None:
        """Return a tensor's position within a checkpoint's complete ones; None if it has none."""
        if not key.startswith("optim."):
            tensor = self._tensors.get(key)
            return tensor if tensor is not None and tensor.shape == shape else None
        i, param, name = _parse_optimizer_key(key)
        owner = self._tensors.get(_MODEL + param)
        if owner is None or i in self._split:
            return None
        names = {whole: _optimizer_key(i, whole, name) for whole in owner.wholes}
        if _is_cut_alike(name, shape, owner.shape):
            pieces = tuple(p._replace(name=names[p.name]) for p in owner.pieces)
            wholes = {names[whole]: size for whole, size in owner.wholes.items()}
            return replace(owner, wholes=wholes, pieces=pieces)
        if math.prod(shape) != 1 and not owner.uncut:
            return None
        zeros = tuple(0 for _ in shape)
        pieces = tuple(
            ShardPiece(whole_name, shape, zeros, shape, None) for whole_name in names.values()
        )
        return replace(
            owner, shape=shape, wholes=dict.fromkeys(names.values(), shape), pieces=pieces
        )

    def spread(self, scalars: Scalars) -> Scalars:
        """Name a checkpoint's scalars by the complete parameters with elements on this rank."""
        spread: Scalars = []
        for i, of_params in enumerate(scalars):
            by_whole: dict[str, dict[str, Any]] = {}
            for param, values in of_params.items():
                tensor = None if i in self._split else self._tensors.get(_MODEL + param)
                wholes = {_MODEL + param} if tensor is None else {p.name for p in tensor.pieces}
                by_whole |= {whole.removeprefix(_MODEL): values for whole in wholes}
            spread.append(by_whole)
        return spread

    def collect(self, scalars: Scalars) -> Scalars:
        """Return a checkpoint's scalars by the names of the parameters on this rank."""
        collected: Scalars = []
        for of_params in scalars:
            by_param: dict[str, dict[str, Any]] = {}
            for whole, values in of_params.items():
                param = self._owners.get(_MODEL + whole, _MODEL + whole).removeprefix(_MODEL)
                if by_param.setdefault(param, dict(values)) != values:
                    raise mismatch_error(
                        f"the state of {whole} differs from that of others in {param}"
                    )
            collected.append(by_param)
        return collected

    def is_missing_scalars(self, scalars: Scalars) -> bool:
        """Return whether a checkpoint's scalars lack some parameters, which other ranks have."""
        wholes = {w.removeprefix(_MODEL) for w in self._owners if w.startswith(_MODEL)}
        return any(of_params and wholes - of_params.keys() for of_params in scalars)

    def local_specs(
        self, stored: Mapping[str, TensorSpec], rank_keys: Collection[str]
    ) -> dict[str, TensorSpec]:
        """Return the shapes and types that this rank's tensors need to load a checkpoint's ones.

        ``stored`` are tensors for this rank, without the ranks' prefixes, which ``rank_keys`` had.

        Raises:
            CheckpointError: a complete tensor has another shape here, or was stored in parts.
        """
        for whole in self._owners:
            if whole.startswith(_MODEL) and whole not in stored:
                raise mismatch_error(f"{whole} is not in the checkpoint")
        specs: dict[str, TensorSpec] = {}
        for name, spec in stored.items():
            key, local = self._local_key_and_spec(name, spec, is_own=name in rank_keys)
            if specs.setdefault(key, local) != local:
                raise mismatch_error(
                    f"{name} was saved as {spec}; others in {key} are not of that kind"
                )
        return specs

    def _local_key_and_spec(
        self, name: str, spec: TensorSpec, *, is_own: bool
    ) -> tuple[str, TensorSpec]:
        """Return the name, shape and type on this rank of a tensor in a checkpoint."""
        i, param, moment = _parse_optimizer_key(name) if name.startswith("optim.") else (-1, "", "")
        whole = _MODEL + param if moment else name
        owner = self._owners.get(whole)
        if owner is None or i in self._split:
            return name, spec
        tensor = self._tensors[owner]
        key = _optimizer_key(i, owner, moment) if moment else owner
        if is_own and moment and self.find(key, spec.shape) is None:
            return key, spec  # it had no position in a complete tensor, and has none now
        if is_own and not name.startswith("extra."):
            raise mismatch_error(
                f"{name} was saved separately by each rank; here all ranks share it"
            )
        if _is_cut_alike(moment, spec.shape, tensor.wholes[whole]):
            return key, TensorSpec(tensor.shape, spec.dtype)
        if moment and (math.prod(spec.shape) == 1 or tensor.uncut):
            return key, spec
        text = f"{name} was saved as {spec}; the shape of {whole} is {tensor.wholes[whole]} now"
        raise mismatch_error(text + (", and there is no rule to cut it" if moment else ""))


def _is_cut_alike(moment: str, shape: Shape, of_param: Shape) -> bool:
    """Return whether a checkpoint's optimizer state is sharded like its parameter."""
    return shape == of_param and moment != "step"


def _parse_optimizer_key(key: str) -> tuple[int, str, str]:
    """Return a checkpoint's key of optimizer state as index, parameter and name."""
    _, i, rest = key.split(".", 2)
    param, name = rest.rsplit(".", 1)
    return int(i), param, name


def _optimizer_key(i: int, whole: str, name: str) -> str:
    """Return the key of optimizer state in a checkpoint."""
    return f"optim.{i}.{whole.removeprefix(_MODEL)}.{name}"
