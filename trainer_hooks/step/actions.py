"""Actions of a judgement: rollback, halt, commands; and the attempts that they start.

Functions are not collective unless they say so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from msgspec.structs import replace

from trainer_hooks.data.loader import DataState
from trainer_hooks.exchange.emit import TokenCount
from trainer_hooks.recovery.manager import Meta, Restored
from trainer_hooks.step.context import RunContext
from trainvitals.errors import CheckpointError, TrainingHalted
from trainvitals.io.rundir import HaltMarker
from trainvitals.policy import Judgement
from trainvitals.policy.plan import BatchWindow, Branch
from trainvitals.records import (
    AttemptStarted,
    CommandAcknowledged,
    Decision,
    DecisionMade,
    RunEnded,
)


def carry_out(
    run: RunContext, judgement: Judgement, *, now_step: int, window: BatchWindow | None = None
) -> Restored | None:
    """Carry out a step's judgement; return the restored state if it was a rollback.

    The plan journal is written before the action, so that a relaunch finds the intended action and
    no command is applied twice. The response to a command is written after it. A skip on its own is
    not written: it must not wait for a disk, and because a relaunch is a new attempt, entries of
    the decision log stay distinct. ``now_step`` is the step in whose call this happens. A rollback
    skips the data in ``window``.

    Raises:
        TrainingHalted: the decision is a halt.
    """
    decision, ack = judgement.decision, judgement.ack
    action = decision.action if decision is not None and decision.acted else ""
    restored = None
    if action == "rollback" and decision is not None:
        branch = _branch_of(decision, decision.rollback_to_step)
        run.plan.add(run.judge.facts, branch=branch, window=window)
    elif action in ("halt", "accept_level") or ack is not None:
        run.plan.add(run.judge.facts)
    if decision is not None:
        event = DecisionMade(decision=decision)
        run.emitter.run_event(event, step=decision.step, attempt=decision.attempt)
        if action == "rollback":
            restored = _roll_back(run, decision)
    if run.terminal is not None and (decision is not None or run.terminal.in_row):
        _report_action(run, decision, restored)
    if judgement.order is not None:
        for feature in run.features:
            feature.on_command(judgement.order, now_step=now_step)
    if ack is not None:
        acknowledged = CommandAcknowledged(ack=ack)
        run.emitter.run_event(acknowledged, step=now_step, attempt=run.attempt)
    if action == "halt" and decision is not None:
        _halt(run, decision)
    return restored


def carry_out_at_end(run: RunContext, judgement: Judgement) -> None:
    """Record the judgement of the loop's last step; a halt still leaves its marker.

    Training is over, so a rollback is entered as not carried out.

    Raises:
        TrainingHalted: the decision is a halt.
    """
    decision, ack = judgement.decision, judgement.ack
    if decision is not None and decision.action == "rollback":
        decision = replace(
            decision,
            acted=False,
            new_attempt=0,
            cost_steps=0,
            reason=f"{decision.reason}; not carried out: the loop had ended",
        )
        if ack is not None:
            ack = replace(ack, status="refused", detail="the loop had ended")
    if ack is not None and judgement.order is not None and decision is None:
        ack = replace(ack, status="refused", detail="the loop had ended")
    carry_out(run, Judgement(judgement.findings, decision, ack), now_step=-1)


def run_between_steps(run: RunContext, step: int, device: torch.device) -> None:
    """Let the features work after ``step``, the latest completed one. Collective."""
    for judgement in run.features.run_between_steps(step, device):
        carry_out(run, judgement, now_step=step)


def _report_action(run: RunContext, decision: Decision | None, restored: Restored | None) -> None:
    """Report a step's action at the terminal; before a halt, because its error may be caught."""
    if decision is not None and restored is not None:
        decision = replace(decision, rollback_to_step=restored.step)
    if run.terminal is not None:
        with run.faults.fail_open("terminal"):
            run.terminal.judged(decision)


def _roll_back(run: RunContext, decision: Decision) -> Restored:
    """Restore the checkpoint of a step's decision and start its attempt."""
    assert run.recovery is not None, "only a run with checkpoints rolls back"
    try:
        restored = run.recovery.roll_back(decision)
    except CheckpointError as error:
        # Maybe only this rank: it cannot continue, and the marker stops all ranks.
        reason = f"{decision.reason}; the restore failed: {error.text}"
        decision = replace(decision, action="halt", rule="rollback_failed", reason=reason)
        _report_action(run, decision, None)
        _halt(run, decision)
    if restored.step != decision.rollback_to_step:
        text = f"{decision.checkpoint_id} could not be read; used {restored.id} instead"
        run.emitter.note(
            "older_checkpoint", text, "warning", step=decision.step, attempt=run.attempt
        )
        run.plan.add(run.judge.facts, branch=_branch_of(decision, restored.step))
    take_meta(run, restored.meta, step=restored.step)
    attempt = AttemptStarted(
        id=decision.new_attempt,
        parent=decision.attempt,
        fork_step=restored.step,
        reason=decision.reason,
    )
    begin_attempt(run, attempt, restored.meta["judge"])
    run.emitter.run_event(attempt, step=attempt.fork_step, attempt=attempt.id)
    return restored


def _halt(run: RunContext, decision: Decision) -> NoReturn:
    """Halt at a step, with the durable marker first: torchrun restarts ranks at any exit code."""
    halted = TrainingHalted(
        f"halted by Vitals at step {decision.step}: {decision.reason}",
        hint=f"`vitals why {run.run_dir.path} {decision.step}` explains; "
        f"`vitals resume {run.run_dir.path}` allows a restart",
    )
    if run.is_rank0 or decision.rule == "rollback_failed":
        marker = HaltMarker(
            reason=decision.reason,
            step=decision.step,
            attempt=decision.attempt,
            time_unix_ns=run.clock.time_ns(),
        )
        with run.faults.fail_open("halt.marker"):  # the halt itself works without a marker
            run.run_dir.write_halted(marker)
        event = RunEnded(state="halted", reason=decision.reason)
        run.emitter.event(event, step=decision.step, attempt=decision.attempt)
    run.halted = halted
    raise halted


def start_branch(
    run: RunContext, attempt: AttemptStarted, detectors: dict[str, Any] | None
) -> None:
    """Start an attempt before the loop's first step, and write it to the plan journal."""
    branch = Branch(attempt.id, attempt.parent, attempt.fork_step)
    begin_attempt(run, attempt, detectors)
    run.plan.add(run.judge.facts, branch=branch)


def begin_attempt(
    run: RunContext, attempt: AttemptStarted, detectors: dict[str, Any] | None
) -> None:
    """Continue with the steps of a new attempt, with the detectors of its start state."""
    run.attempt = attempt.id
    for feature in run.features:
        feature.on_attempt(attempt)
    run.judge.rolled_back(detector_state=detectors, attempt=attempt.id, step=attempt.fork_step)
    run.checks_parameters = False


def resume(
    run: RunContext,
    attempt: AttemptStarted,
    detectors: dict[str, Any],
    tokens: TokenCount,
    features: Mapping[str, Any],
) -> None:
    """Continue, before the first step, from a state that the loop itself saved. Collective.

    If there are snapshots, the first one is replaced by one of this attempt.
    """
    run.log.tokens = tokens
    run.features.resume(features, step=attempt.fork_step)
    start_branch(run, attempt, detectors)
    run.emitter.run_event(attempt, step=attempt.fork_step, attempt=attempt.id)
    if run.recovery is not None:  # a snapshot of this attempt, with the state the loop loaded
        run.recovery.take_first_snapshot(attempt.fork_step, attempt.id, snapshot_meta(run, None))


def snapshot_meta(run: RunContext, data: DataState | None) -> Meta:
    """Return the data of a snapshot after a step, except tensors and the policy's facts."""
    return {
        "judge": run.judge.detector_state(),
        "tokens_seen": run.log.tokens.seen,
        "tokens_trained": run.log.tokens.trained,
        "data": data,
        **run.features.state_dict(),
    }


def take_meta(run: RunContext, meta: Meta, *, step: int) -> None:
    """Restore the snapshot's counters before ``step`` of the loop; consumed tokens stay counted."""
    tokens = TokenCount(int(meta["tokens_seen"]), int(meta["tokens_trained"]))
    run.log.tokens.restore_counts(tokens)
    run.features.load_state_dict(meta, step=step)


def _branch_of(decision: Decision, fork_step: int) -> Branch:
    """Return the branch that a step's rollback starts, for the plan journal."""
    return Branch(decision.new_attempt, decision.attempt, fork_step)
