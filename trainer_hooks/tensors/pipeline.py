"""Pipelines of ``torch.distributed.pipelining``: each rank trains the parameters of its stages.

The layout of the reduce vector is the union of all stages' parameters, in the order of the stages.
A rank fills the parts of its own stages, so each square is counted once. Stages often have the same
names and shapes: the names of such a stage get a prefix, so that its parameters are never taken for
replicas of another stage's.
"""

from __future__ import annotations

import gc
import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from trainer_hooks.ranks import Ranks
from trainer_hooks.tensors.experts import RankGroup
from trainer_hooks.tensors.gradients import GradNorms, Piece, Shard, check_alike, clean_name, unwrap
from trainvitals.errors import UsageError
from trainvitals.printable import name_type


@dataclass(frozen=True, slots=True)
class PipelineStages:
    """Stages of a pipeline that a rank trains."""

    modules: Mapping[int, nn.Module]
    """By index of the stage, from 0; several with an interleaved schedule."""
    num_stages: int

    @classmethod
    def of(cls, schedule: Any) -> PipelineStages:
        """Return the stages of a schedule's rank.

        Raises:
            UsageError: ``schedule`` is not a schedule.
        """
        stages = getattr(schedule, "_stages", None) or [getattr(schedule, "_stage", None)]
        if not all(hasattr(stage, "stage_index") for stage in stages):
            raise UsageError(
                f"pipeline is {name_type(schedule)}; it must be a schedule",
                hint="watch(stage_module, optimizer, pipeline=schedule) with a schedule of "
                "torch.distributed.pipelining, such as Schedule1F1B",
            )
        modules = {stage.stage_index: unwrap(stage.submod)[0] for stage in stages}
        return cls(modules, stages[0].num_stages)

    def names(self, params: Mapping[str, Tensor]) -> list[tuple[int, str]]:
        """Return the stage of each parameter, and the name that it has in the stage.

        A parameter that is in no stage counts as one of the first.
        """
        by_id = {
            id(param): (number, clean_name(name))
            for number, module in self.modules.items()
            for name, param in module.named_parameters()
        }
        first = min(self.modules)
        return [by_id.get(id(param), (first, name)) for name, param in params.items()]


_CAN_EVALUATE = frozenset(
    {"ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble"}
)
"""Schedules with an ``eval`` that leaves the next training step bit for bit unchanged."""


def check_can_evaluate(schedule: Any) -> None:
    """Refuse a probe in a pipeline that cannot run forward only.

    Raises:
        UsageError: the schedule's ``eval`` is missing or fails on some of the ranks.
    """
    name = type(schedule).__name__
    if name not in _CAN_EVALUATE or not hasattr(schedule, "eval"):
        raise UsageError(
            f"probe was given in a pipeline with {name}, which cannot run forward only",
            hint=f"leave the probe out, or use one of {', '.join(sorted(_CAN_EVALUATE))}, with a "
            "torch that has schedule.eval()",
        )


@contextmanager
def schedule_as_before(schedule: Any) -> Iterator[None]:
    """Restore the schedule and its stages after evaluations between two training steps.

    Otherwise torch prepares the stages again for the next step, with a forward and a backward that
    change the order in which DDP adds gradients.
    """
    stages = getattr(schedule, "_stages", None) or [schedule._stage]
    before = [
        (part, {k: copy(v) if type(v) in (dict, list) else v for k, v in vars(part).items()})
        for part in (schedule, *stages)
    ]
    try:
        yield
    finally:
        for part, attributes in before:
            vars(part).clear()
            vars(part).update(attributes)


def stages_of(model: nn.Module) -> list[tuple[int, int]]:
    """Return index and number of the stages of a pipeline that are in a module; empty otherwise.

    Walks over all objects if the process has imported pipelines: for set-up only.
    """
    module = sys.modules.get("torch.distributed.pipelining.stage")
    base = getattr(module, "_PipelineStageBase", None)
    if base is None:
        return []
    inside, stages = {id(each) for each in model.modules()}, []
    for candidate in gc.get_objects():
        # By type: attribute access, as isinstance does, can run third-party code.
        if issubclass(type(candidate), base):
            submodule = getattr(candidate, "submod", None)
            if isinstance(submodule, nn.Module) and id(unwrap(submodule)[0]) in inside:
                stages.append((candidate.stage_index, candidate.num_stages))
    return stages


class _RankStages(NamedTuple):
    """Stages and parameters that a rank trains, which the ranks compare."""

    numbers: tuple[int, ...]
    num_stages: int
    names: list[tuple[int, str]]
    """Stage and name of each parameter."""

    def names_in(self, stage: int) -> tuple[str, ...]:
        """Return the names of the parameters of a pipeline's stage, in the order of the rank."""
        return tuple(name for number, name in self.names if number == stage)


class StageNorms(GradNorms):
    """The gradients of a rank's stages, measured into their parts of the vector.

    Creation is collective.

    Raises:
        UsageError: the ranks disagree on the pipeline, or two ranks of one stage train other
            parameters.
    """

    def __init__(
        self,
        params: dict[str, Tensor],
        ranks: Ranks,
        pieces: Mapping[int, Piece],
        experts: Mapping[int, RankGroup],
        stages: PipelineStages,
    ) -> None:
        own = _RankStages(tuple(stages.modules), stages.num_stages, stages.names(params))
        everyone = ranks.gather(own)
        self.has_loss = stages.num_stages - 1 in stages.modules
        self.stages = tuple(rank.numbers for rank in everyone)
        """Stages of each rank."""
        self.place = f"{name_stages(own.numbers)} of the pipeline"
        names_by_stage = _names_by_stage(everyone)
        self._stage_at = [stage for stage, names in enumerate(names_by_stage) for _ in names]
        """Stage of each entry of the vector."""
        self._all_names = tuple(name for names in names_by_stage for name in names)
        unused = {stage: iter(names) for stage, names in enumerate(names_by_stage)}
        qualified = [next(unused[stage]) for stage, _ in own.names]
        self._prefixes = {
            stage: names_by_stage[stage][0].removesuffix(own.names_in(stage)[0])
            for stage in stages.modules
            if names_by_stage[stage]
        }
        self._modules = stages.modules
        super().__init__(dict(zip(qualified, params.values(), strict=True)), ranks, pieces, experts)

    def _union(self, everyone: Sequence[Sequence[Shard]]) -> tuple[str, ...]:
        """Return the names of the parameters of all stages, which ``_names_by_stage`` compared."""
        return self._all_names

    def named_modules(self, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules of this rank's stages by the names of their gradients' layers."""
        for stage, module in self._modules.items():
            for name, part in module.named_modules():
                yield f"{self._prefixes.get(stage, '')}{name}", part

    def last_stage_where_bad(self, squares: Iterable[float]) -> int:
        """Return the last stage with a non-finite summed square; -1 without one."""
        bad = (at for at, s in zip(self._stage_at, squares, strict=True) if not math.isfinite(s))
        return max(bad, default=-1)


def _names_by_stage(everyone: Sequence[_RankStages]) -> tuple[tuple[str, ...], ...]:
    """Return the names of each stage's parameters; a stage that shares names gets a prefix."""
    counts = {rank.num_stages for rank in everyone}
    by_stage: dict[int, list[tuple[str, ...]]] = {}
    for rank in everyone:
        for stage in rank.numbers:
            by_stage.setdefault(stage, []).append(rank.names_in(stage))
    if len(counts) > 1 or sorted(by_stage) != list(range(max(counts))):
        places = ", ".join(
            f"rank {rank}: {name_stages(each.numbers)} of {each.num_stages}"
            for rank, each in enumerate(everyone[:8])
        )
        raise UsageError(
            f"the ranks' schedules do not form one pipeline: {places}",
            hint="all ranks must watch stages of the same pipeline",
        )
    for names_of_ranks in by_stage.values():
        check_alike([list(names) for names in names_of_ranks])
    stages = [by_stage[index][0] for index in range(len(by_stage))]
    holders = Counter(name for names in stages for name in set(names))
    return tuple(
        tuple(f"stage{index}.{name}" for name in names)
        if any(holders[name] > 1 for name in names)
        else names
        for index, names in enumerate(stages)
    )


def name_stages(stages: Sequence[int]) -> str:
    """Return ``stage 1`` or ``stages 1, 3``, for messages about a rank of a pipeline."""
    return f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"
