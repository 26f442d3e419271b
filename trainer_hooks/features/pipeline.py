"""Stages of a pipeline in a step: which rank a bad value comes from, and in which stage."""

from __future__ import annotations

import math
from typing import Self

from msgspec.structs import replace

from trainer_hooks.step.context import RunContext
from trainer_hooks.step.feature import ReturnedStep, StepFeature
from trainer_hooks.tensors.pipeline import StageNorms, name_stages
from trainvitals.policy import Judgement
from trainvitals.records import Decision, Finding, StepRecord


class PipelineFeature(StepFeature):
    """Names the stages of the rank of a finding; corrects the ranks of a non-finite step."""

    def __init__(self, run: RunContext, norms: StageNorms) -> None:
        super().__init__(run)
        self._norms = norms
        self._bad_stage = -1
        """Stage of the gradient that made the latest step non-finite; -1: unknown."""

    @classmethod
    def make(cls, run: RunContext) -> Self | None:
        """Return the feature; None without a pipeline."""
        norms = run.device.norms
        if not isinstance(norms, StageNorms):
            return None
        places = (f"rank {rank}: {name_stages(at)}" for rank, at in enumerate(norms.stages[:64]))
        run.emitter.note("pipeline", ", ".join(places), step=0, attempt=0)
        return cls(run, norms)

    def complete(self, step: ReturnedStep) -> None:
        """Replace the ranks of a non-finite step: values flow through the stages.

        A NaN of any stage reaches the loss, and with it every gradient, so only NaN parameters
        show the stage. If the loss is finite, a NaN gradient comes from the last stage that has
        it: backward passes it to earlier stages.
        """
        record, reduced = step.record, step.reduced
        self._bad_stage = -1
        if _has_bad_loss(record):
            ranks = reduced.ranks_where("nonfinite_params")
        elif _has_bad_norm(record):
            self._bad_stage = self._norms.last_stage_where_bad(reduced.squares)
            bad = reduced.ranks_where("bad_squares")
            ranks = tuple(rank for rank in bad if self._bad_stage in self._norms.stages[rank])
        else:
            return
        step.record = replace(record, nonfinite_ranks=ranks)

    def annotate(self, step: ReturnedStep, judgement: Judgement) -> Judgement:
        """Add the stage of the rank to findings, and to the decision about the step."""
        findings = tuple(replace(f, reason=self._with_stage(f, step)) for f in judgement.findings)
        decision = judgement.decision
        if decision is not None and decision.step == step.step:
            decision = replace(decision, reason=self._with_stage(decision, step))
        return judgement._replace(findings=findings, decision=decision)

    def _with_stage(self, about: Finding | Decision, step: ReturnedStep) -> str:
        """Return the reason of a finding or decision with the stage of its rank."""
        if about.rank >= 0:
            stages = self._norms.stages[about.rank]
            if self._bad_stage in stages and about.rank in step.record.nonfinite_ranks:
                stages = (self._bad_stage,)
            return f"{about.reason} ({name_stages(stages)} of the pipeline)"
        if about.cause == "nonfinite_loss" and _has_bad_loss(step.record):
            return f"{about.reason} (stage unknown: a NaN of any stage reaches the loss)"
        return about.reason


def _has_bad_norm(record: StepRecord) -> bool:
    """Return whether the gradients of a pipeline's step are non-finite without an overflow."""
    norm = record.grad_norm
    return norm is not None and not math.isfinite(norm) and not record.overflow


def _has_bad_loss(record: StepRecord) -> bool:
    """Return whether the loss of a pipeline's step is NaN or Inf."""
    return record.loss is not None and not math.isfinite(record.loss)
