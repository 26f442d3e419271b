"""LoRA adapters: whether the first steps train them, and only them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor, nn

from trainer_hooks.step.context import RunContext
from trainer_hooks.step.feature import OutgoingStep, StepFeature
from trainer_hooks.tensors.gradients import local_tensor
from trainer_hooks.tensors.optimizer_state import params_of

_STEPS = 3
"""Steps in which gradients are read. In the first one those of lora_A are 0."""
_PREFIX = "lora_"
_BASES = ("weight", "base_layer.weight", "linear.weight")
"""Names of the adapted weight in a layer with an adapter: torchtune, PEFT, own layers."""


class AdaptersFeature(StepFeature):
    """Counts the LoRA adapters that a post-training run trains, once in its third step.

    The counts are scalars of rank 0; the collector judges them.
    """

    def __init__(self, run: RunContext, adapters: Mapping[str, nn.Parameter]) -> None:
        super().__init__(run)
        self._adapters = adapters
        self._num_steps = 0
        self._has_gradient = False
        self._has_other_gradient = False

    @classmethod
    def make(cls, run: RunContext) -> Self | None:
        """Return the feature if the run declares its kind and its model has LoRA adapters."""
        if not run.is_rank0 or run.given.task is None:
            return None
        adapters = {}
        with run.faults.fail_open("adapters"):
            adapters = adapters_of(run.given.model)
        return cls(run, adapters) if adapters else None

    def before_measure(self, step: OutgoingStep) -> None:
        """Read the adapters' gradients in the first steps, and then record the counts."""
        if self._num_steps >= _STEPS:
            return
        self._num_steps += 1
        with self._run.faults.fail_open("adapters"):
            self._read_gradients()
            if self._num_steps == _STEPS:
                self._record(step)

    def _read_gradients(self) -> None:
        """Note whether an adapter, or else another trained parameter, has a gradient."""
        if self._has_gradient:
            return
        ids = {id(param) for param in self._adapters.values()}
        trained = params_of(self._run.device.optimizers)
        self._has_gradient = any(_has_gradient(p) for p in trained if id(p) in ids)
        if not self._has_gradient and not self._has_other_gradient:
            self._has_other_gradient = any(_has_gradient(p) for p in trained if id(p) not in ids)

    def _record(self, step: OutgoingStep) -> None:
        """Record the counts as scalars; one that is not certain is left out."""
        run, adapters = self._run, self._adapters.values()
        params = dict(run.given.model.named_parameters())
        trained = {id(param) for param in params_of(run.device.optimizers)}
        if not trained <= {id(param) for param in params.values()}:
            return  # the optimizer has copies, such as DeepSpeed's
        in_optimizer = [p for p in adapters if p.requires_grad and id(p) in trained]
        values = {"lora/optimizer_share": len(in_optimizer) / len(adapters)}
        is_sharded = any(hasattr(p, "to_local") or not p.numel() for p in adapters)
        if in_optimizer and not is_sharded and (self._has_gradient or self._has_other_gradient):
            values["lora/has_gradient"] = float(self._has_gradient)
        if bases := bases_of(params):
            num_trained = sum(p.requires_grad and id(p) in trained for p in bases)
            values["lora/base_share"] = num_trained / len(bases)
        run.emitter.scalars(values, step=step.step, attempt=step.attempt)


def adapters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of the model's LoRA adapters by name."""
    return {n: p for n, p in model.named_parameters() if _layer_of(n) is not None}


def bases_of(params: Mapping[str, nn.Parameter]) -> list[nn.Parameter]:
    """Return the weights of the layers that have a LoRA adapter."""
    layers = {layer for name in params if (layer := _layer_of(name)) is not None}
    names = (f"{layer}{base}" for layer in layers for base in _BASES)
    return [params[name] for name in names if name in params]


def _layer_of(name: str) -> str | None:
    """Return the name of the layer to which a LoRA parameter belongs, with a dot; or None."""
    parts = name.split(".")
    for index, part in enumerate(parts):
        if part.lower().startswith(_PREFIX):
            return "".join(f"{before}." for before in parts[:index])
    return None


def _has_gradient(param: Tensor) -> bool:
    """Return whether this rank's part of a gradient is not 0; waits for its device.

    Of a DTensor only the local part: the other ranks do not take part in a reduction here.
    """
    return param.grad is not None and bool(torch.count_nonzero(local_tensor(param.grad)))
