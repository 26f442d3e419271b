"""The faults: each with its step, rank, layer, cause and origin, and where a second one strikes."""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec
import numpy as np

from vitals_bench.attribution.trainings import Fault

Placement = Literal["alone", "after", "overlapping"]
PLACEMENTS: tuple[Placement, ...] = ("alone", "after", "overlapping")
AFTER_STEPS = 40
"""Steps between an earlier, independent fault and the scored one."""
OVERLAP_STEPS = 2
"""The same if they overlap: the earlier one lasts for 3 or 5 steps."""
EARLIEST, LATEST = 280, 310
"""Steps at which the scored fault strikes: attribution learns for 220 steps."""
STEPS = 400
"""Steps of a training, unless it dies before."""
QUIET_WINDOWS = 10
"""Queries about each healthy training."""
FIRST_QUERY = 120
"""First step of a healthy training that is queried."""


class Kind(NamedTuple):
    """The ground truth about one kind of fault."""

    causes: tuple[str, ...]
    """Causes that name the fault; the first word of an incident's own."""
    origin: Literal["layer", "rank", "data", "lr", "loader", "loss", ""]
    """The first mover; "": none can be named."""
    is_of_rank: bool = False
    """Whether one rank has it; otherwise all ranks do."""
    is_lasting: bool = False
    """Whether it lasts to the end of the training."""
    is_own_origin: bool = False
    """Whether the cause itself is the first mover, so that none needs to be named."""
    tolerance: int = 1
    """Steps by which the reported step may be off."""


_NONFINITE = ("nonfinite_loss", "nonfinite_gradient")
_OUTLIER = ("loss_outlier", "grad_norm_outlier", "state_damaged", "loss_burst", "grad_norm_burst")
_LOSS = (*_OUTLIER, "loss_divergence", "loss_level_shift", "not_recovered", "rank_loss")
KINDS: dict[str, Kind] = {
    "nan_grad": Kind(("nonfinite_gradient",), "layer"),
    "inf_act": Kind(_NONFINITE, "layer", is_of_rank=True),
    "loss_overflow": Kind(("nonfinite_loss",), "loss", is_own_origin=True),
    "nan_weight": Kind(("nonfinite_params",), "layer", is_lasting=True),
    "grad_x100": Kind(("grad_norm_outlier", "grad_norm_burst", "layer_gradient"), "layer"),
    "weights_x10": Kind((*_LOSS, "weight_norm"), "layer"),
    "v_zero": Kind((*_LOSS, "update_ratio"), "layer", tolerance=2),
    "lr_x30_on": Kind(("lr_jump", "learning_rate", "schedule"), "lr", is_lasting=True),
    "rank_garbage5": Kind(_LOSS, "rank", is_of_rank=True),
    "labels_shuffled5": Kind(_LOSS, "data"),
    "bitflip_bit30": Kind(
        (*_NONFINITE, "nonfinite_params", *_LOSS, "weight_norm"), "layer", is_lasting=True
    ),
    "frozen_layer": Kind(("zero_gradient", "layer_gradient"), "layer", is_lasting=True),
    "loader_stall": Kind(
        (
            "data_bound",
            "data_bound_rank",
            "loader_stall",
            "throughput",
            "straggler_data",
            "stalled",
        ),
        "loader",
        is_own_origin=True,
        tolerance=3,
    ),
    "slow_rank": Kind(
        ("straggler", "straggler_host", "straggler_forward", "straggler_backward", "throughput"),
        "",
        is_of_rank=True,
        is_lasting=True,
        tolerance=10,
    ),
    "crash": Kind(("RunFailed", "rank_gone", "rank_failed"), "", is_of_rank=True, is_lasting=True),
}
_EARLIER = ("nan_grad", "loss_overflow", "grad_x100", "loader_stall")
"""Transient kinds that strike before the scored fault."""
_BELOW = ("rank_garbage5", "labels_shuffled5", "loader_stall")
"""Kinds that last for some steps, into which the scored fault strikes."""


class Job(NamedTuple):
    """One training."""

    kind: str
    """The scored fault; "": the training is healthy."""
    placement: Placement
    seed: int
    ranks: int = 1
    has_signals: bool = False
    """Whether the optional signals are measured at each step."""

    @property
    def is_held_out(self) -> bool:
        """Whether the seed is only reported; rules are tuned on the even ones."""
        return self.seed % 2 == 1


class Truth(msgspec.Struct, frozen=True, kw_only=True):
    """One fault of a training."""

    kind: str
    step: int
    rank: int
    """The rank that has it; -1: all ranks."""
    layer: str


def plan(job: Job, layers: list[str]) -> list[Fault]:
    """Return the faults of a training: the scored one first.

    Args:
        job: the training.
        layers: names of the layers that have a matrix.
    """
    if not job.kind:
        return []
    draws = np.random.default_rng([job.seed, list(KINDS).index(job.kind), job.ranks, 45])
    step = int(draws.integers(EARLIEST, LATEST))
    faults = [_fault(job.kind, step, job.ranks, layers, draws)]
    if job.placement != "alone":
        names = _EARLIER if job.placement == "after" else _BELOW
        others = [name for name in names if name != job.kind]
        distance = AFTER_STEPS if job.placement == "after" else OVERLAP_STEPS
        name = str(draws.choice(others))
        faults.append(_fault(name, step - distance, job.ranks, layers, draws))
    return faults


def _fault(
    name: str, step: int, ranks: int, layers: list[str], draws: np.random.Generator
) -> Fault:
    layer, rank = str(draws.choice(layers)), int(draws.integers(ranks))
    return Fault(name, step, layer, rank, int(draws.integers(1 << 30)), step)


def truth_of(fault: Fault) -> Truth:
    """Return the ground truth about a fault."""
    kind = KINDS[fault.name]
    return Truth(
        kind=fault.name,
        step=fault.step,
        rank=fault.rank if kind.is_of_rank else -1,
        layer=fault.layer if kind.origin == "layer" else "",
    )
