"""The host's part of a step, in order; the device's part is in ``trainer_hooks.step.phases``.

Runs on every rank with the same reduced numbers, so all ranks make the same decisions; only rank 0
writes values that are equal on all ranks.
"""

from __future__ import annotations

from msgspec.structs import replace

from trainer_hooks.exchange.reduce_vector import (
    NUM_FIGURES,
    ReducedNumbers,
    VerdictFigures,
    step_record,
)
from trainer_hooks.measures.host import HostMeasurements
from trainer_hooks.step.context import RunContext
from trainer_hooks.step.feature import ReturnedStep
from trainvitals.policy import Judgement, StepInputs
from trainvitals.records import StepRecord


def judge_returned(
    run: RunContext, numbers: list[float], measured: HostMeasurements, *, now_step: int
) -> Judgement:
    """Judge one step's numbers and write its row; return the judgement to carry out.

    A step of a discarded attempt is written but not judged: it was in flight during a rollback, and
    the judge no longer knows the steps before it. ``numbers`` are the reduced vector and the
    device's own figures. ``now_step`` is the step in whose call this happens.

    Raises:
        UsageError: the first step has no gradients, or the loop steps its schedulers itself.
    """
    step = _unpack_step(run, numbers, measured, now_step=now_step)
    if step.attempt != run.attempt:
        _write_step(run, step, Judgement())
        return Judgement()
    # Data sent with the step is handled before its judgement: the escalation policy chooses
    # among checkpoints, and runs the probe, as all ranks know them at this step.
    run.features.complete(step)
    run.features.on_reduced(step)
    judgement = run.judge.judge(
        step.record,
        StepInputs(
            now_step,
            checkpoints=step.checkpoints,
            command=step.command,
            next_attempt=step.next_attempt,
            probe=step.probe,
            evaluation=step.evaluation,
            unavailable_commands=step.unavailable_commands,
            written=step.written,
            collapse=step.collapse,
            moves_on=not run.given.owns_step,
        ),
    )
    if step.optimizer:
        judgement = prefix_optimizer_name(judgement, step.optimizer)
    judgement = run.features.annotate(step, judgement)
    if step.record.failed_ranks:
        judgement = _name_unguarded(run, step.record, judgement)
    run.judged_step(step, judgement)
    run.features.on_judged(step, judgement)
    _write_step(run, step, judgement)
    run.features.on_step_done(step)
    return judgement


def _unpack_step(
    run: RunContext, numbers: list[float], measured: HostMeasurements, *, now_step: int
) -> ReturnedStep:
    layout, sampler = run.device.packer.layout, run.device.sampler
    reduced = ReducedNumbers(layout, numbers[: layout.size])
    derived = VerdictFigures.of(numbers[layout.size : layout.size + NUM_FIGURES])
    own_samples = numbers[layout.size + NUM_FIGURES :]
    record = step_record(
        reduced,
        derived,
        step=measured.step,
        attempt=measured.attempt,
        skipped=derived.blocked(run.mode),
        learning_rate=measured.learning_rates[0] if measured.turn <= 1 else None,
        lr_factor=measured.lr_factor,
        before_clip=_is_before_clip(run, reduced, derived, measured),
        turn=measured.turn,
    )
    return ReturnedStep(
        reduced,
        measured,
        record,
        now_step,
        derived=derived,
        samples=None if sampler is None else sampler.unpack(reduced.sampled, own_samples),
        optimizer=run.device.turns[measured.turn].name,
    )


def _write_step(run: RunContext, step: ReturnedStep, judgement: Judgement) -> None:
    """Write a step's row, its findings, and what the probe read for it."""
    step.columns = run.log.write(
        step.measured,
        step.record,
        step.reduced,
        step.derived,
        step.samples,
        judgement,
        step.optimizer,
        step.columns,
    )
    run.features.on_row_written(step)
    run.log.write_readings(step.measured, judgement)


def _name_unguarded(run: RunContext, record: StepRecord, judgement: Judgement) -> Judgement:
    """Count an unmeasured step, and add this rank's error to a finding about it."""
    if run.terminal is not None:
        run.terminal.num_unguarded += 1
    finding = next((f for f in judgement.findings if f.kind == "unguarded"), None)
    if finding is None or run.ranks.rank not in record.failed_ranks:
        return judgement
    error = run.faults.last.get("prepare", "unknown")
    run.note_of_rank("unguarded", f"the step could not be measured: {error}", step=record.step)
    named = replace(finding, reason=f"{finding.reason} ({error})")
    findings = tuple(named if f is finding else f for f in judgement.findings)
    judgement = judgement._replace(findings=findings)
    run.report_unprotected(judgement)
    return judgement


def _is_before_clip(
    run: RunContext, reduced: ReducedNumbers, derived: VerdictFigures, measured: HostMeasurements
) -> bool:
    """Return whether the norm is from before the clip; the row gets the norm after the clip."""
    if run.given.owns_clip or measured.before_clip:
        return True
    is_given = reduced.total("norm_before_clip") != 0
    after = reduced.slot_sum("norm_before_clip")
    measured.norm_after_clip = after if is_given else derived.grad_norm
    measured.after_clip = not is_given
    return is_given


def prefix_optimizer_name(judgement: Judgement, name: str) -> Judgement:
    """Prefix the findings about one optimizer's step with the optimizer's name.

    A command of an operator applies to the run, unless it accepts a step.
    """
    findings = tuple(replace(f, reason=f"{name}: {f.reason}") for f in judgement.findings)
    decision = judgement.decision
    if decision is not None and decision.rule != "command":
        decision = replace(decision, reason=f"{name}: {decision.reason}")
    return judgement._replace(findings=findings, decision=decision)
