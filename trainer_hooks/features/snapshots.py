"""Snapshots and checkpoints in a step: their checks travel with it, and proven ones are kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

from msgspec.structs import replace
from torch import Tensor

from trainer_hooks.exchange.reduce_vector import Slots
from trainer_hooks.measures.sampled import SampledSignals
from trainer_hooks.recovery.manager import RecoveryManager
from trainer_hooks.recovery.state import StateCheck
from trainer_hooks.step.context import RunContext
from trainer_hooks.step.feature import OutgoingStep, ReturnedStep, StepFeature
from trainvitals.detect.replicas import format_ranks
from trainvitals.policy import Judgement, Proposal

_MAX_NAMES = 4
"""Maximum number of non-finite tensors to name."""
_IS_INTENDED = (
    "; no optimizer has it, so it counts as intended from now on: snapshots continue with it"
)


class SnapshotsFeature(StepFeature):
    """States for rollbacks; without ``checkpoints=`` only the check of the live state.

    Both report non-finite tensors in the same slot, so a run has one of them, never both.
    """

    slots = Slots(
        rank0=(
            "saved_step",  # step and attempt of the latest complete checkpoint on disk
            "saved_attempt",  # 0: none yet
            "save_due",  # the time between two checkpoints on disk is over
            "saving",  # a checkpoint is being written: the next one waits for it
        ),
        rank=(
            "nonfinite_state",  # non-finite tensors of the training state, if it was checked
            "snapshot_missed",  # the rank could not take the snapshot that was due
        ),
    )

    def __init__(
        self, run: RunContext, recovery: RecoveryManager | None, state_check: StateCheck | None
    ) -> None:
        super().__init__(run)
        self._recovery = recovery
        self._state_check = state_check
        self._shown_names = ""
        """Non-finite tensors of this rank in its latest report."""
        self._nonfinite_parameters: Sequence[str] = ()
        """The same for parameters that the check after a bad step found."""

    @classmethod
    def make(cls, run: RunContext) -> Self:
        """Return the feature: with snapshots, or with a check of the live state."""
        state_check = None
        if run.recovery is None:
            with run.faults.fail_open("state_check"):
                state_check = StateCheck(run.given.model, run.given.optimizers)
        return cls(run, run.recovery, state_check)

    @property
    def idle_hooks(self) -> tuple[str, ...]:
        """Without snapshots, the hooks that only send and use them."""
        if self._recovery is not None:
            return ()
        return ("rank0_values", "before_update", "on_reduced", "on_step_done")

    def rank0_values(self, step: OutgoingStep) -> Mapping[str, float]:
        """Return what rank 0 knows about the disk; its clock and its disk decide for all ranks."""
        recovery = self._recovery
        if recovery is None:
            return {}
        saved_step, saved_attempt = recovery.newest_saved
        return {
            "saved_step": float(saved_step),
            "saved_attempt": float(saved_attempt),
            "save_due": float(recovery.save_due),
            "saving": float(recovery.is_saving),
        }

    def contribute(self, step: OutgoingStep) -> Mapping[str, Tensor | float]:
        """Return the result of this rank's check, if the step includes one; waits for nothing."""
        recovery = self._recovery
        if recovery is None:
            num_nonfinite = self._check_live_state(step.step)
            return {} if num_nonfinite is None else {"nonfinite_state": num_nonfinite}
        values: dict[str, Tensor | float] = {}
        if recovery.missed(step.step):
            values["snapshot_missed"] = 1.0
        num_nonfinite = recovery.nonfinite_count(step.step)
        if num_nonfinite is not None:
            values["nonfinite_state"] = num_nonfinite
        return values

    def _check_live_state(self, step: int) -> Tensor | None:
        """Count non-finite tensors of the live state; None without a check."""
        if self._state_check is not None:
            with self._run.faults.fail_open("state_check"):
                return self._state_check.nonfinite_count(step)
        return None

    def before_update(self) -> None:
        """Make the update wait, on the device, for a copy in flight."""
        if self._recovery is not None:
            self._recovery.ring.before_update()

    def on_reduced(self, step: ReturnedStep) -> None:
        """Commit or drop the snapshot of the step, and list the targets of a rollback."""
        if self._recovery is not None:
            self._recovery.returned(
                step.reduced,
                step=step.step,
                attempt=step.attempt,
                differ=step.differing_ranks,
                is_shared=step.may_share_copies,
            )
            step.checkpoints = self._recovery.refs()

    def annotate(self, step: ReturnedStep, judgement: Judgement) -> Judgement:
        """Add the names of non-finite tensors, and the reason of a missed snapshot."""
        judgement = self._add_nonfinite_parameters(step, judgement)
        if step.record.nonfinite_state or step.record.snapshots_missed:
            if self._state_check is not None:
                self._state_check.every = self._state_check.AGAIN
            judgement = self._add_nonfinite_names(step, judgement)
            self._run.report_unprotected(judgement)
        return judgement

    def _add_nonfinite_parameters(self, step: ReturnedStep, judgement: Judgement) -> Judgement:
        """Add this rank's non-finite parameters to the rows of their layers, and to the reasons.

        Without rank 0, which writes the findings and those rows, the reasons have the ranks, and
        one of them notes its names.
        """
        ranks = step.reduced.ranks_where("nonfinite_params") if step.record.nonfinite_params else ()
        run, rank = self._run, self._run.ranks.rank
        if rank not in ranks or rank != min(ranks):
            self._nonfinite_parameters = ()
            is_elsewhere = ranks and min(ranks) > 0
            text = format_ranks(ranks)
            return _add_names(judgement, "nonfinite_params", text) if is_elsewhere else judgement
        if not self._nonfinite_parameters:  # once per row: it waits for the device
            with run.faults.fail_open("nonfinite_params"):
                self._nonfinite_parameters = run.device.norms.nonfinite_names()
            if rank:
                text = f"rank {rank}: NaN or infinite: {_format_names(self._nonfinite_parameters)}"
                run.note_of_rank("nonfinite_params", text, step=step.step)
        names = self._nonfinite_parameters
        step.samples = (step.samples or SampledSignals())._replace(nonfinite_parameters=names)
        return (
            _add_names(judgement, "nonfinite_params", _format_names(names)) if names else judgement
        )

    def _add_nonfinite_names(self, step: ReturnedStep, judgement: Judgement) -> Judgement:
        """Write this rank's non-finite tensors, or its error, for the findings about a step.

        Returns the judgement with rank 0's names, because rank 0 writes the run's findings.
        """
        run, reduced, decision = self._run, step.reduced, judgement.decision
        rank = run.ranks.rank
        rolls_back = decision is not None and decision.rule == "nonfinite_state"
        kinds = {finding.kind for finding in judgement.findings}
        if "snapshot_missed" in kinds and rank in reduced.ranks_where("snapshot_missed"):
            assert self._recovery is not None, "only a run with snapshots misses one"
            text = f"rank {rank} could not take a snapshot: {self._recovery.ring.failure}"
            run.note_of_rank("snapshot_missed", text, step=step.step)
        has_nonfinite = rank in reduced.ranks_where("nonfinite_state")
        if not has_nonfinite or not (rolls_back or "nonfinite_state" in kinds):
            return judgement
        if rolls_back or any(f.onset_step == f.step for f in judgement.findings):
            # Once per row: it reads the complete state on the host.
            names = self._nonfinite_names()
            self._shown_names = _format_names(names)
            text = f"rank {rank}: NaN or infinite: {self._shown_names}"
            if not rolls_back and self._accept_intended_nonfinite(names):
                self._shown_names += _IS_INTENDED
                text += _IS_INTENDED
            run.note_of_rank("nonfinite_state", text, step=step.step)
        return _add_names(judgement, "nonfinite_state", self._shown_names)

    def _accept_intended_nonfinite(self, names: Sequence[str]) -> bool:
        """Continue snapshots if the model itself writes the values: no rollback fixed them."""
        if self._recovery is not None:
            with self._run.faults.fail_open("state_check"):
                return self._recovery.ring.accept(names)
        return False

    def _nonfinite_names(self) -> list[str]:
        with self._run.faults.fail_open("state_check"):
            source = self._state_check if self._recovery is None else self._recovery.ring
            return [] if source is None else source.nonfinite_names()
        return []

    def on_step_done(self, step: ReturnedStep) -> None:
        """Mark proven snapshots healthy, and start a save if one is due."""
        if self._recovery is not None:
            with self._run.times.checkpoint():
                self._recovery.promote(step.step, self._run.judge.last_unhealthy_step)

    def on_command(self, command: Proposal, *, now_step: int) -> None:
        """Write the next proven snapshot to disk."""
        if command.action == "checkpoint" and self._recovery is not None:
            self._recovery.save_soon()
            run = self._run
            self._recovery.promote(run.last_step, run.judge.last_unhealthy_step)


def _add_names(judgement: Judgement, kind: str, names: str) -> Judgement:
    """Return the judgement with ``SnapshotsFeature``'s tensor names in findings and decision."""
    decision = judgement.decision
    reasons = {f.reason: f"{f.reason} ({names})" for f in judgement.findings if f.kind == kind}
    findings = tuple(
        replace(f, reason=reasons[f.reason]) if f.kind == kind else f for f in judgement.findings
    )
    if decision is not None and decision.rule == kind:
        quoted = next((reason for reason in reasons if reason in decision.reason), decision.reason)
        reason = decision.reason.replace(quoted, f"{quoted} ({names})", 1)
        decision = replace(decision, reason=reason)
    return judgement._replace(findings=findings, decision=decision)


def _format_names(names: Sequence[str]) -> str:
    """Return the non-finite tensors that ``SnapshotsFeature`` found, as text, shortened."""
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return (", ".join(names[:_MAX_NAMES]) or "unknown") + more
