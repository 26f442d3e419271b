"""From numbers of every parameter to rows of the layers that own them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from trainer_hooks.measures.sampled import Samples
from trainvitals.rows import Value


class Layers:
    """Adds up squares by layer, a parameter's name without its last part; modules may be added."""

    def __init__(self, names: Sequence[str], modules: Sequence[str] = ()) -> None:
        owners = [name.rpartition(".")[0] or name for name in names]
        of_parameters = tuple(dict.fromkeys(owners))
        self._num_layers = len(of_parameters)
        self.names = tuple(dict.fromkeys((*of_parameters, *modules)))
        position = {name: i for i, name in enumerate(self.names)}
        self._owner = [position[owner] for owner in owners]

    def norms(self, squares: Sequence[float]) -> list[float]:
        """Return the L2 norm of each layer that has parameters."""
        sums = [0.0] * self._num_layers
        for owner, square in zip(self._owner, squares, strict=True):
            sums[owner] += square
        return [math.sqrt(s) if s >= 0 else math.nan for s in sums]

    def rows(self, grad_squares: Sequence[float] | None, samples: Samples) -> Iterator[list[Value]]:
        """Yield, of each layer that has one, its id and values in the order of LAYER_METRICS.

        Without squares the gradients' norms are missing.
        """
        squares = (grad_squares, samples.weight_squares, samples.update_squares)
        by_layer = [None if s is None else self.norms(s) for s in squares]
        for layer, name in enumerate(self.names):
            has_parameters = layer < self._num_layers
            norms = [norms[layer] if norms and has_parameters else None for norms in by_layer]
            activation = samples.activations.get(name, (None, None, None))
            if any(value is not None for value in (*norms, activation[0])):
                yield [layer, *norms, *activation]
