"""Optimizer state that was reset: second moments far below the squares of the layer's gradients.

Read once a problem was found, never in a healthy step.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer_hooks.tensors.gradients import GradNorms, layer_of

_MIN_ROWS = 5
"""Rows of gradient norms from which a layer's usual one is known."""
_MIN_LAYERS = 4
"""With fewer layers, there are no others to compare one with."""
_RESET, _RESET_OF_OTHERS = 0.05, 0.05
"""Mean square over the usual square of the gradient: below both, the state was reset. The second is
relative to the other layers, because a clip lowers all of them. A gradient that grew and stays so
does not come below: it has been in the moments for as many steps as in the rows.""" ""


@torch.no_grad()
def find_reset_layers(
    norms: GradNorms, optimizers: Sequence[Optimizer], recent: Sequence[Sequence[float]]
) -> dict[str, float]:
    """Return the layers whose second moments were reset, with the missing share of the moments.

    Adam's second moment is the running mean of squared gradients, so it is at least about half of
    the median square, also for gradients that are mostly zero. A state of zeros takes hundreds of
    steps to get there, and makes updates too large meanwhile. Waits for the device.

    Args:
        norms: gradients of this rank. Abstains if ranks hold different parts of them.
        optimizers: optimizers; those without ``exp_avg_sq`` and ``betas`` are left out.
        recent: squared gradient norm of each parameter, in steps before the problem.
    """
    recent = [row for row in recent if len(row) == len(norms.names)]
    if not norms.replicated or len(recent) < _MIN_ROWS:
        return {}
    moments = _mean_squares(norms, optimizers)
    at = {name: i for i, name in enumerate(norms.names)}
    names_of: dict[str, list[str]] = {}
    for name in moments:
        names_of.setdefault(layer_of(name), []).append(name)
    ratios = {}
    for layer, names in names_of.items():
        usual = statistics.median(sum(row[at[name]] for name in names) for row in recent)
        if usual > 0.0:
            ratios[layer] = sum(moments[name] for name in names) / usual
    if len(ratios) < _MIN_LAYERS:
        return {}
    typical = statistics.median(ratios.values())
    reset = {k: 1.0 - r / typical for k, r in ratios.items() if r < _RESET_OF_OTHERS * typical}
    reset = {layer: share for layer, share in reset.items() if ratios[layer] < _RESET}
    return reset if len(reset) <= len(ratios) // 4 else {}


def _mean_squares(norms: GradNorms, optimizers: Sequence[Optimizer]) -> dict[str, float]:
    """Return the bias-corrected second moments of each parameter, summed over its elements."""
    names = {id(param): name for name, param in zip(norms.local_names, norms.params, strict=True)}
    sums: dict[str, Tensor] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for param in group["params"] if "betas" in group else ():
                state, name = optimizer.state.get(param, {}), names.get(id(param), "")
                if not name or not isinstance(state, Mapping) or "step" not in state:
                    continue
                moment = state.get("exp_avg_sq")
                # Sharded and quantized state is another type, of which a sum may be collective.
                if type(moment) is Tensor and moment.shape == param.shape:
                    steps = torch.as_tensor(state["step"], dtype=torch.float64)
                    correction = (1.0 - group["betas"][1] ** steps).to(norms.device)
                    sums[name] = moment.sum(dtype=torch.float64).to(norms.device) / correction
    found = torch.stack(list(sums.values())).tolist() if sums else []
    return {name: total for name, total in zip(sums, found, strict=True) if math.isfinite(total)}


__all__ = ["find_reset_layers"]
