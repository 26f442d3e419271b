"""Pipelines of ``torch.distributed.pipelining``: each rank trains the parameters of one stage.

The layout of the reduce vector is the union of all stages' parameters, in the order of the stages.
A rank fills the part of its own stage, so each square is counted once. Stages often have the same
names and shapes: the names of such a stage get a prefix, so that its parameters are never taken for
replicas of another stage's.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from trainer_hooks.ranks import Ranks
from trainer_hooks.tensors.gradients import GradNorms, Piece, Shard, check_alike, unwrap
from trainvitals.errors import UsageError
from trainvitals.printable import name_type


class PipelineStage(NamedTuple):
    """Place of a rank in a pipeline."""

    number: int
    """Index of the stage, from 0."""
    num_stages: int

    @classmethod
    def of(cls, schedule: Any) -> PipelineStage:
        """Return the stage of a schedule's rank.

        Raises:
            UsageError: ``schedule`` is not a schedule with one stage per rank.
        """
        stage = getattr(schedule, "_stage", None)
        if hasattr(schedule, "_stages"):
            raise UsageError(
                f"pipeline is {name_type(schedule)}, which has several stages per rank",
                hint="use a schedule with one stage per rank: ScheduleGPipe or Schedule1F1B",
            )
        if stage is None or not hasattr(stage, "stage_index"):
            raise UsageError(
                f"pipeline is {name_type(schedule)}; it must be a schedule",
                hint="watch(stage_module, optimizer, pipeline=schedule) with the ScheduleGPipe or "
                "Schedule1F1B of torch.distributed.pipelining",
            )
        return cls(stage.stage_index, stage.num_stages)


def stages_of(model: nn.Module) -> list[PipelineStage]:
    """Return the places of a module that is a stage of a pipeline; empty otherwise.

    Walks over all objects if the process has imported pipelines: for set-up only.
    """
    module = sys.modules.get("torch.distributed.pipelining.stage")
    base = getattr(module, "_PipelineStageBase", None)
    if base is None:
        return []
    inner, stages = unwrap(model)[0], []
    for candidate in gc.get_objects():
        # By type: attribute access, as isinstance does, can run third-party code.
        if issubclass(type(candidate), base):
            submodule = getattr(candidate, "submod", None)
            if isinstance(submodule, nn.Module) and unwrap(submodule)[0] is inner:
                stages.append(PipelineStage(candidate.stage_index, candidate.num_stages))
    return stages


class StageNorms(GradNorms):
    """The gradients of one stage, measured into its part of the vector; creation is collective.

    Raises:
        UsageError: the ranks disagree on the pipeline, or two ranks of one stage train other
            parameters.
    """

    def __init__(
        self,
        params: dict[str, Tensor],
        ranks: Ranks,
        pieces: Mapping[int, Piece],
        stage: PipelineStage,
    ) -> None:
        everyone = ranks.gather((stage, tuple(params)))
        self.stages = tuple(stage_of_rank.number for stage_of_rank, _ in everyone)
        """Stage of each rank."""
        names_by_stage = _union(everyone)
        qualified = zip(names_by_stage[stage.number], params.values(), strict=True)
        super().__init__(dict(qualified), ranks, pieces)
        self.names = tuple(name for names in names_by_stage for name in names)
        begin = sum(map(len, names_by_stage[: stage.number]))
        self._own = slice(begin, begin + len(params))

    def _check_names(self, everyone: Sequence[Sequence[Shard]]) -> None:
        """Accept other names on the ranks of other stages: ``_union`` has compared them."""

    def squares_into(self, out: Tensor, where: list[int], grads: list[Tensor]) -> None:
        """Write the squares of this rank's stage into its part of ``out``; the rest is 0."""
        out.zero_()
        super().squares_into(out[self._own], where, grads)


def _union(
    everyone: Sequence[tuple[PipelineStage, tuple[str, ...]]],
) -> tuple[tuple[str, ...], ...]:
    """Return the names of each stage's parameters; a stage that shares names gets a prefix."""
    counts = {stage.num_stages for stage, _ in everyone}
    by_stage: dict[int, list[tuple[str, ...]]] = {}
    for stage, names in everyone:
        by_stage.setdefault(stage.number, []).append(names)
    if len(counts) > 1 or sorted(by_stage) != list(range(max(counts))):
        places = ", ".join(
            f"rank {rank}: stage {stage.number} of {stage.num_stages}"
            for rank, (stage, _) in enumerate(everyone[:8])
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
