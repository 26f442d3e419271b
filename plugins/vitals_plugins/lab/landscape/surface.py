"""The loss of a model with weights moved along straight lines, and restored afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from trainer_hooks.tensors.rng import capture_rng, restore_rng
from trainvitals.errors import UsageError
from vitals_plugins.lab.repro.play import LossOf, ReplaySetup, copied, kind_of, slots

Mode = Literal["eval", "train"]
MODES: tuple[Mode, ...] = get_args(Mode)
Direction = Sequence[Tensor | None]
"""Offsets of each tensor of ``slots(model)``, in their order; None: none."""


def random_directions(model: nn.Module, num: int, seed: int) -> list[Direction]:
    """Return a loss landscape's random directions, with filters as long as the model's own.

    Filter normalization (Li et al., "Visualizing the Loss Landscape of Neural Nets", 2018, section
    4): each filter of a normal direction is scaled to the norm of the same filter of the weights,
    so that the sharpness does not depend on the scale of the weights. A filter is a slice of the
    first axis: for a linear layer the weights of one output, for an embedding one token's. Biases
    and the parameters of norms (all with one axis), frozen parameters and buffers are unchanged.
    Equal seeds give equal directions, on every device.

    Raises:
        UsageError: no trainable parameter has two axes.
    """
    generator = torch.Generator().manual_seed(seed)
    directions: list[Direction] = [
        [_filter_normalized_noise(tensor, generator) for _, _, tensor in slots(model)]
        for _ in range(num)
    ]
    if all(part is None for direction in directions for part in direction):
        raise UsageError(
            "the model has no trainable weight with filters (two axes or more): there is nothing "
            "to move along",
            hint="leave the weights trainable in the entry: requires_grad",
        )
    return directions


def _filter_normalized_noise(tensor: Tensor, generator: torch.Generator) -> Tensor | None:
    """Return a landscape's random direction of a tensor, with its filters' lengths; or None."""
    is_moved = isinstance(tensor, nn.Parameter) and tensor.requires_grad
    if not is_moved or tensor.ndim < 2 or not tensor.is_floating_point() or not tensor.numel():
        return None
    noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
    axes = tuple(range(1, tensor.ndim))
    lengths = torch.linalg.vector_norm(
        tensor.detach().to("cpu", torch.float64), dim=axes, keepdim=True
    )
    noise *= lengths / torch.linalg.vector_norm(noise, dim=axes, keepdim=True)
    return noise.to(tensor.device, _sum_dtype(tensor))


def copy_model_tensors(model: nn.Module) -> list[Tensor]:
    """Return copies of parameters and buffers for a landscape, in the order of ``slots``."""
    return [tensor.detach().clone() for _, _, tensor in slots(model)]


def direction_to_weights(model: nn.Module, other: Sequence[Tensor]) -> Direction:
    """Return a landscape's direction that ends, at 1, in other weights of the same model.

    All floating-point parameters and buffers, including those of norms: at 1 it is the other model.
    The straight line between two states is that of Goodfellow et al., "Qualitatively characterizing
    neural network optimization problems", 2015. ``other`` is the result of ``copy_model_tensors``
    at the other end.
    """
    return [
        end.to(_sum_dtype(tensor)) - tensor.detach().to(_sum_dtype(tensor))
        if tensor.is_floating_point()
        else None
        for (_, _, tensor), end in zip(slots(model), other, strict=True)
    ]


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    """Return the type in which a landscape sums a tensor's values: at least float32."""
    return torch.promote_types(tensor.dtype, torch.float32)


class LossSurface:
    """Returns the mean loss of some batches at moved weights."""

    def __init__(self, scene: ReplaySetup, batches: Sequence[Any], rng: dict[str, Any]) -> None:
        self._scene = scene
        self._batches = batches
        self._rng = rng
        self._needs_grad = False

    def loss_at(self, moves: Sequence[tuple[float, Direction]]) -> float:
        """Return the loss with so much of each direction added to the weights.

        Each is computed with the same random numbers and buffers.

        Raises:
            UsageError: the loss function raised, or gave no number.
        """
        scene = self._scene
        scene.restore_weights()
        with torch.no_grad():
            for index, (tensor, original) in enumerate(scene.kept):
                parts = [(by, of[index]) for by, of in moves if by and of[index] is not None]
                if parts:
                    moved = original.to(_sum_dtype(tensor))
                    for by, part in parts:
                        moved = moved + by * part  # type: ignore[operator] # None was left out
                    tensor.copy_(moved)
        restore_rng(self._rng)
        return sum(self._batch_loss(batch) for batch in self._batches) / len(self._batches)

    def _batch_loss(self, batch: Any) -> float:
        """Return the loss of a batch at the moved weights, by the user's loss function."""
        try:
            with torch.set_grad_enabled(self._needs_grad):
                loss = self._scene.loss_of(copied(batch, None))
        except Exception as error:
            if not self._needs_grad and "grad" in str(error):
                self._needs_grad = True  # a loss with derivatives, such as a penalty
                return self._batch_loss(batch)
            text = str(error).partition("\n")[0]
            raise _loss_function_error(f"raised {type(error).__name__}: {text}"[:300]) from error
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise _loss_function_error(f"returned {kind_of(loss)}, not a tensor of one number")
        return float(loss.item())


def _loss_function_error(what: str) -> UsageError:
    """Return the error that a landscape's loss function returned no loss."""
    return UsageError(
        f"loss_of {what}", hint="it gets a batch as the loader gives it, and returns its loss"
    )


@contextmanager
def open_loss_surface(
    model: nn.Module, loss_of: LossOf, batches: Sequence[Any], *, mode: Mode, seed: int
) -> Iterator[LossSurface]:
    """Yield the loss landscape around the model's weights, which are restored afterwards.

    Weights, buffers, gradients (none afterwards), generators, and training modes.

    Args:
        model: with the weights in the middle.
        loss_of: returns the loss of a batch.
        batches: at least one; the loss is their mean.
        mode: whether modules are as in training (dropout, BatchNorm by the batch) or evaluation.
        seed: of the random numbers at each point.
    """
    training = [(module, module.training) for module in model.modules()]
    around = capture_rng()
    scene = ReplaySetup(model=model, loss_of=loss_of)
    try:
        model.train(mode == "train")
        torch.manual_seed(seed)
        yield LossSurface(scene, batches, capture_rng())
    finally:
        scene.restore_weights()
        restore_rng(around)
        for module, was_training in training:
            module.training = was_training


Losses = tuple[tuple[float, ...], ...]
"""``losses[j][i]``: at position i along the first direction and j along the second; a line is one
row."""


def losses_along(
    around: LossSurface,
    directions: Sequence[Direction],
    places: Sequence[float],
    on_point: Callable[[], None] = lambda: None,
) -> Losses:
    """Return a landscape's losses at positions along one direction, or on the grid of two."""
    first, *second = directions
    rows = []
    for up in places if second else (0.0,):
        row = []
        for along in places:
            row.append(around.loss_at([(along, first), *((up, each) for each in second)]))
            on_point()
        rows.append(tuple(row))
    return tuple(rows)
