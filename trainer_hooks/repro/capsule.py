"""File of a bad step for ``vitals repro``: batches, RNG state, precision and facts.

A capsule is an ``.npz``: arrays that numpy reads without pickle, and ``capsule``, the facts as
JSON. Reading one never executes code.
"""

from __future__ import annotations

import copy
import io
import json
import math
import platform
import random
import sys
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_hooks.measures.sections import ModuleHook
from trainer_hooks.recovery.state import StateCheck
from trainer_hooks.tensors.gradients import NamedModels
from trainvitals import __version__
from trainvitals.errors import FormatError, VitalsError
from trainvitals.io.capsules import CapsuleFile
from trainvitals.io.private import FileOwner, read_own
from trainvitals.printable import name_type

MAX_BATCH_BYTES = 64 << 20
"""Larger batches of a step are not stored, only the ids of their samples."""
MAX_FILES = 16
"""Capsules per rank; the oldest are deleted."""
MAX_NAMES = 16
"""Tensors of the state that are listed."""
_MAX_FILE_BYTES = 512 << 20
_MAX_ARRAY_BYTES = 512 << 20
"""Total of all arrays in a capsule: a forged file of a few megabytes could unpack to any size."""
_COMPRESSED_BYTES = 8 << 20
"""Above this, compression is not worth its CPU time."""
_ARRAY_OVERHEAD = 320
"""Bytes of an array in the file in addition to its data."""
_SQUARES = frozenset({"exp_avg_sq", "max_exp_avg_sq", "square_avg", "acc_delta", "sum"})
_VERSION = 1
_FACTS = frozenset({"reason", "versions", "state", "applied", "world_size"})
"""Facts that every capsule contains."""

Tree = dict[str, Any]
"""A batch without its arrays: plain values, and indices of the arrays."""


class AttributeDict(dict[Any, Any]):
    """Replaces a batch of a custom class, such as Hugging Face's: entries are attributes too."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(
            f"the kept batch has no {name}; its entries: {', '.join(map(str, self))}"
        )

    def to(self, *args: Any, **kwargs: Any) -> AttributeDict:
        """Return a copy of a capsule's batch with tensors moved, as ``Tensor.to`` does."""
        return AttributeDict(map_tensors(dict(self), lambda tensor: tensor.to(*args, **kwargs)))


class NotPlainError(ValueError):
    """A batch contains values that cannot be stored without pickle."""


# ------------------------------------------------------------------------------------ writing


@dataclass(kw_only=True)
class Content:
    """Contents of a bad step on its rank; the tensors belong to the loop."""

    facts: dict[str, Any]
    batches: Sequence[Any]
    rng: Sequence[dict[str, Any] | None]
    """RNG state when each batch was yielded; None if unknown."""
    good: Any = None
    """Latest batch of a step that was not bad; as many rows are stored as fit."""


class _CapsuleArrays:
    """Arrays by index, without duplicates."""

    def __init__(self) -> None:
        self.arrays: list[Any] = []
        self._numbers: dict[tuple[str, bytes], int] = {}

    @property
    def num_bytes(self) -> int:
        """Return the bytes that these arrays need in the capsule."""
        return sum(array.nbytes + _ARRAY_OVERHEAD for array in self.arrays)

    def add(self, array: Any) -> int:
        """Add an array to the capsule, and return its index; equal small ones share one."""
        # RNG states that nothing drew from are equal for all micro-batches.
        key = (f"{array.dtype}{array.shape}", array.tobytes() if array.nbytes < 8192 else b"")
        if not key[1] or key not in self._numbers:
            self._numbers[key] = len(self.arrays)
            self.arrays.append(array)
        return self._numbers[key]


def write(file: BinaryIO, content: Content) -> None:
    """Write a capsule of a bad step: at most twice its batches' bytes, plus about 16 KiB.

    May wait for a device that holds the batches.
    """
    import numpy

    arrays, facts = _CapsuleArrays(), {"version": _VERSION, **content.facts}
    facts["batches"], num_bytes = _batch_trees(content.batches, arrays, facts)
    facts["rng"] = [None if state is None else _rng_tree(state, arrays) for state in content.rng]
    room = 2 * num_bytes - arrays.num_bytes - len(json.dumps(facts)) - 2 * _ARRAY_OVERHEAD
    if content.good is not None and facts["batches"]:
        facts["good"] = _encode_fitting_rows(content.good, arrays, min(room, num_bytes // 2))
    raw = numpy.frombuffer(json.dumps(facts).encode(), dtype=numpy.uint8)
    named = {f"a{number}": array for number, array in enumerate(arrays.arrays)}
    save = numpy.savez_compressed if num_bytes < _COMPRESSED_BYTES else numpy.savez
    save(file, capsule=raw, **named)


def _batch_trees(
    batches: Sequence[Any], arrays: _CapsuleArrays, facts: dict[str, Any]
) -> tuple[list[Tree], int]:
    """Return trees and bytes of a capsule's batches; none if refused: ``facts`` has the reason."""
    num_bytes = _num_batch_bytes(list(batches))
    if num_bytes > MAX_BATCH_BYTES:
        facts["why_no_batch"] = f"it has {num_bytes:,} bytes; at most {MAX_BATCH_BYTES:,} are kept"
        return [], 0
    try:
        return [_encode_tree(batch, arrays) for batch in batches], num_bytes
    except NotPlainError as error:
        facts["why_no_batch"] = str(error)
        return [], 0


def _encode_fitting_rows(batch: Any, arrays: _CapsuleArrays, room: int) -> Tree | None:
    """Return the tree of a batch's first rows that fit into a capsule; None if none does."""
    num_rows = rows_in(batch)
    num_bytes = _num_batch_bytes(batch)
    fitting = num_rows * max(0, room - 8 * _ARRAY_OVERHEAD) // max(1, num_bytes)
    if not fitting:
        return None
    try:
        return _encode_tree(take_rows(batch, list(range(min(num_rows, fitting)))), arrays)
    except NotPlainError:
        return None


def _encode_tree(value: Any, arrays: _CapsuleArrays) -> Tree:
    """Return a capsule's batch as a tree of plain values, its tensors among the arrays."""
    numpy = sys.modules["numpy"]
    if isinstance(value, Tensor):
        plain, dtype = _host_copy(value)
        return {"tensor": arrays.add(plain), "dtype": dtype}
    if isinstance(value, numpy.ndarray) and value.dtype.kind in "biufc":
        return {"array": arrays.add(value)}
    if isinstance(value, Mapping):
        if not all(isinstance(key, str | int) for key in value):
            raise NotPlainError("a key of the batch is neither text nor a number")
        dict_tree = {} if type(value) is dict else {"own": True}
        return {
            "dict": [[key, _encode_tree(each, arrays)] for key, each in value.items()],
            **dict_tree,
        }
    if isinstance(value, tuple):
        fields = getattr(value, "_fields", None)
        named = {} if fields is None else {"fields": list(fields)}
        return {"tuple": [_encode_tree(each, arrays) for each in value], **named}
    if isinstance(value, list):
        return {"list": [_encode_tree(each, arrays) for each in value]}
    if isinstance(value, bool | int | float | str) or value is None:
        return {"value": value}
    raise NotPlainError(f"the batch holds {name_type(value)}")


def _host_copy(tensor: Tensor) -> tuple[Any, str]:
    """Return a capsule's tensor as an array; the raw bits if numpy lacks the dtype."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        raise NotPlainError("the batch holds a tensor that is not dense")
    plain = tensor.detach().cpu().contiguous()
    dtype = str(plain.dtype).removeprefix("torch.")
    if plain.dtype.is_floating_point and plain.element_size() < 4 and plain.dtype != torch.float16:
        plain = plain.view(torch.int16 if plain.element_size() == 2 else torch.uint8)
    try:
        return plain.numpy(), dtype
    except TypeError as error:
        raise NotPlainError(f"the batch holds a tensor of {dtype}") from error


def _rng_tree(state: dict[str, Any], arrays: _CapsuleArrays) -> Tree:
    """Return the RNG state of a repro capsule as a tree of plain values."""
    import numpy

    version, generator_words, gauss = state["python"]
    words_number = arrays.add(numpy.array(generator_words, dtype=numpy.uint32))
    tree: Tree = {"python": [version, words_number, gauss]}
    tree["torch"] = arrays.add(state["torch"].numpy())
    if "numpy" in state:
        kind, keys, *rest = state["numpy"]
        tree["numpy"] = [kind, arrays.add(numpy.asarray(keys)), *rest]
    if "cuda" in state:
        tree["cuda"] = [arrays.add(each.cpu().numpy()) for each in state["cuda"]]
    return tree


# ------------------------------------------------------------------------------------ reading


@dataclass(frozen=True, kw_only=True)
class Capsule:
    """A bad step that was read from its file."""

    path: Path
    step: int
    attempt: int
    rank: int
    facts: dict[str, Any]
    batches: list[Any]
    """Empty if no batch was stored."""
    rng: list[dict[str, Any] | None]
    good: Any = None
    """Rows of a batch from a step shortly before that was not bad; None if there are none."""
    sample_ids: tuple[int | str, ...] = field(default=())

    @property
    def loss(self) -> float:
        """Return the rank's local loss of the stored step; NaN if the loop passed none."""
        loss = self.facts.get("loss")
        return math.nan if loss is None else loss


def read(file: CapsuleFile) -> Capsule:
    """Read a capsule, the stored bad step.

    Raises:
        FormatError: the file is damaged, not a capsule, or this version of Vitals is too old for
            it.
        InsecurePathError: other users can write the file.
    """
    import numpy

    path = file.path
    try:
        raw = read_own(path, owner=FileOwner.from_directory(path.parent), max_bytes=_MAX_FILE_BYTES)
        with numpy.load(io.BytesIO(raw), allow_pickle=False) as members:
            num_bytes = sum(info.file_size for info in members.zip.infolist())
            if num_bytes > _MAX_ARRAY_BYTES:
                raise ValueError(f"it unpacks to {num_bytes} bytes, above {_MAX_ARRAY_BYTES}")
            arrays = {name: members[name] for name in members.files}
        facts = json.loads(arrays.pop("capsule").tobytes())
        if facts["version"] > _VERSION:
            raise FormatError(
                f"{path} was written by a newer version of Vitals ({facts['versions']['vitals']})",
                hint="use that version, or a newer one",
            )
        if missing := _FACTS - facts.keys():
            raise ValueError(f"it does not tell {min(missing)}")
        if type(facts.get("loss")) not in (int, float, type(None)):
            raise ValueError(f"the loss it tells is {facts['loss']!r}")
        by_number = [arrays[f"a{number}"] for number in range(len(arrays))]
        good = facts.pop("good", None)
        return Capsule(
            path=path,
            step=file.step,
            attempt=file.attempt,
            rank=file.rank,
            batches=[_decode_tree(tree, by_number) for tree in facts.pop("batches")],
            rng=[None if s is None else _decode_rng(s, by_number) for s in facts.pop("rng")],
            good=None if good is None else _decode_tree(good, by_number),
            sample_ids=tuple(facts.pop("sample_ids", ())),
            facts=facts,
        )
    except VitalsError:
        raise
    except Exception as error:  # zip, numpy and JSON raise various errors for invalid bytes
        raise FormatError(
            f"{path} cannot be read: {type(error).__name__}: {error}",
            hint="it is damaged; another rank or step may have a capsule",
        ) from error


def _decode_tree(tree: Tree, arrays: Sequence[Any]) -> Any:
    """Return the batch of a repro capsule from its tree and arrays."""
    if "tensor" in tree:
        tensor = torch.from_numpy(arrays[tree["tensor"]].copy())
        dtype = getattr(torch, tree["dtype"])
        return tensor if tensor.dtype == dtype else tensor.view(dtype)
    if "array" in tree:
        return arrays[tree["array"]].copy()
    if "dict" in tree:
        rebuilt = {key: _decode_tree(each, arrays) for key, each in tree["dict"]}
        return AttributeDict(rebuilt) if tree.get("own") else rebuilt
    if "list" in tree:
        return [_decode_tree(each, arrays) for each in tree["list"]]
    if "tuple" in tree:
        values = [_decode_tree(each, arrays) for each in tree["tuple"]]
        if "fields" in tree:
            return namedtuple("Batch", tree["fields"])(*values)
        return tuple(values)
    return tree["value"]


def _decode_rng(tree: Tree, arrays: Sequence[Any]) -> dict[str, Any]:
    """Return the RNG state of a repro capsule; raise if it is damaged."""
    version, generator_words, gauss = tree["python"]
    state: dict[str, Any] = {"python": (version, tuple(arrays[generator_words].tolist()), gauss)}
    state["torch"] = torch.from_numpy(arrays[tree["torch"]].copy())
    # A state that the generators refuse is a damaged file, not a fault of the step.
    random.Random().setstate(state["python"])
    torch.Generator().set_state(state["torch"])
    if "numpy" in tree:
        kind, keys, *rest = tree["numpy"]
        state["numpy"] = (kind, arrays[keys], *rest)
    if "cuda" in tree:
        state["cuda"] = [torch.from_numpy(arrays[number].copy()) for number in tree["cuda"]]
    return state


# --------------------------------------------------------------------------------- its parts


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a capsule's batch."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_in(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return a capsule's batch with ``function`` applied to each tensor."""
    if isinstance(value, Tensor):
        return function(value)
    return _map_entries(value, lambda each: map_tensors(each, function))


def _map_entries(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return a container with ``function`` applied to each entry; other values unchanged."""
    if isinstance(value, Mapping):
        return _like(value, {key: function(each) for key, each in value.items()})
    if isinstance(value, tuple):
        parts = [function(each) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return [function(each) for each in value] if isinstance(value, list) else value


def _like(mapping: Mapping[Any, Any], entries: dict[Any, Any]) -> Any:
    """Return a capsule's entries in a mapping of its class, if it can be copied and modified."""
    if type(mapping) is dict:
        return entries
    try:
        other: Any = copy.copy(mapping)
        for key, value in entries.items():
            other[key] = value
    except Exception:  # noqa: BLE001 - a user-defined class
        return AttributeDict(entries)
    return other


def _num_batch_bytes(value: Any) -> int:
    """Return the bytes of the tensors in a capsule's batch."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(value))


def rows_in(batch: Any) -> int:
    """Return a capsule batch's number of samples: most tensors' first dimension; 0 if unknown."""
    sizes = [len(tensor) for tensor in tensors_in(batch) if tensor.dim()]
    return max(set(sizes), key=sizes.count) if sizes else 0


def take_rows(batch: Any, rows: Sequence[int]) -> Any:
    """Return a capsule's batch of these samples: rows of tensors and lists with one row each."""
    count = rows_in(batch)

    def take(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value[list(rows)] if value.dim() and len(value) == count else value
        is_per_row = isinstance(value, list) and len(value) == count
        if is_per_row and not any(isinstance(each, Tensor) for each in value):
            return [value[row] for row in rows]
        return _map_entries(value, take)

    return take(batch)


# ------------------------------------------------------------------------ state around a step


@dataclass(frozen=True, slots=True)
class AutocastSetting:
    """Autocast setting during the last call of the model."""

    device: str
    dtype: str
    """Empty if autocast was off."""

    @classmethod
    def now(cls, device: str) -> AutocastSetting:
        """Return this thread's setting, for a repro capsule."""
        if not torch.is_autocast_enabled(device):
            return cls(device, "")
        return cls(device, str(torch.get_autocast_dtype(device)).removeprefix("torch."))


def versions(device: torch.device) -> dict[str, str]:
    """Return software versions for a repro capsule, and the device's name."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "vitals": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda or "",
        "device": name,
        "threads": str(torch.get_num_threads()),
        "float32_matmul": torch.get_float32_matmul_precision(),
    }


def state_facts(state: StateCheck) -> dict[str, Any]:
    """Return a capsule's facts: non-finite tensors, and largest values. Waits for the device.

    A negative second moment counts as non-finite, because its root is NaN.
    """
    tensors = {
        name: tensor
        for name, tensor in state.tensors().items()
        if tensor.is_floating_point() and tensor.numel()
    }
    if not tensors:
        return {"bad": [], "largest": {}}
    low, high = zip(*(torch.aminmax(tensor) for tensor in tensors.values()), strict=True)
    device = next(iter(tensors.values())).device
    both = torch.stack([each.to(device, torch.float64) for each in (*low, *high)]).tolist()
    bad, largest = [], {}
    for number, name in enumerate(tensors):
        smallest, greatest = both[number], both[number + len(tensors)]
        if not math.isfinite(smallest + greatest) or (is_second_moment(name) and smallest < 0):
            bad.append(name)
        else:
            largest[name] = max(abs(smallest), abs(greatest))
    first = sorted(largest, key=largest.__getitem__, reverse=True)[:MAX_NAMES]
    return {"bad": bad[:MAX_NAMES], "largest": {name: largest[name] for name in first}}


def is_second_moment(name: str) -> bool:
    """Return whether an optimizer tensor of a bad step contains squares."""
    return name.startswith("optim.") and name.rpartition(".")[2] in _SQUARES


class CapsuleContext:
    """Training state around a step on one rank: model, optimizers, scaler and autocast.

    Call ``open`` before the loop and ``close`` at its end. Each forward calls one hook.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        self._model = model
        self._optimizers = tuple(optimizers)
        self._scaler = scaler
        self._handles: list[Any] = []
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.autocast: AutocastSetting | None = None
        """Setting at the last call of the model; None if unknown."""

    def open(self) -> None:
        """Register forward hooks that record the autocast setting for repro capsules."""
        models = self._model.values() if isinstance(self._model, NamedModels) else (self._model,)
        for model in models if not self._handles else ():
            inner = getattr(model, "_orig_mod", model)
            # In a module that was compiled in place, hooks would become part of the graph.
            if getattr(inner, "_compiled_call_impl", None) is None:
                hook = ModuleHook(self._record_autocast)
                self._handles.append(model.register_forward_pre_hook(hook))

    def close(self) -> None:
        """Remove the hooks that recorded settings for repro capsules."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _record_autocast(self, *_: object) -> None:
        """Record the autocast setting of a forward for a repro capsule."""
        self.autocast = AutocastSetting.now(self._device.type)

    def loss_scale(self) -> Tensor | None:
        """Return the step's loss scale for a capsule, without waiting; None if there is none."""
        scale = None if self._scaler is None else getattr(self._scaler, "_scale", None)
        return scale.detach().clone() if isinstance(scale, Tensor) else None

    def describe_state(self) -> dict[str, Any]:
        """Return software versions and the names of non-finite tensors for a repro capsule.

        Waits for the device.
        """
        state = state_facts(StateCheck(self._model, self._optimizers))
        return {"versions": versions(self._device), "state": state}
