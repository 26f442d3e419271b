"""Replicas in a step: ranks that must be equal send a checksum, and vote if one differs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Self

from msgspec.structs import replace
from torch import Tensor

from trainer_hooks.exchange.reduce_vector import Slots
from trainer_hooks.recovery.replicas import NO_ORDER, Difference, Replicas
from trainer_hooks.step.context import RunContext
from trainer_hooks.step.feature import OutgoingStep, ReturnedStep, StepFeature
from trainvitals.policy import Judgement
from trainvitals.records import AttemptStarted, Finding, StepRecord

_COMPARED = frozenset({"replica_corrupted", "settings_differ"})
"""Findings about ranks that differ where they must be equal."""


class ReplicasFeature(StepFeature):
    """Compares parameters, optimizer state and settings of ranks that must be equal."""

    slots = Slots(rank=("replicas",), exact=("replicas",))  # 52-bit checksum; 0: no comparison

    def __init__(self, run: RunContext, replicas: Replicas) -> None:
        super().__init__(run)
        self.replicas = replicas
        self.data_order: Callable[[], tuple[int, int]] | None = None
        """Returns the seed and the epoch of the data order, in a loop over batches."""
        self._difference: Difference | None = None
        """Difference of the ranks in the step that is being judged."""

    @classmethod
    def make(cls, run: RunContext) -> Self | None:
        """Return the feature; None if this rank holds nothing in common with others."""
        return None if run.replicas is None else cls(run, run.replicas)

    def contribute(self, step: OutgoingStep) -> Mapping[str, Tensor | float]:
        """Return the checksum of what is compared in the step, without waiting for the device."""
        run, recovery = self._run, self._run.recovery
        if recovery is not None and recovery.missed(step.step):
            return {}
        with run.faults.fail_open("replicas"):
            snapshot = None if recovery is None else recovery.fingerprint(step.step)
            order = NO_ORDER if self.data_order is None else self.data_order()
            checksum = self.replicas.word(
                step.step, max_norm=step.max_norm, turn=step.turn, order=order, snapshot=snapshot
            )
            if checksum is not None:
                return {"replicas": checksum}
        return {}

    def complete(self, step: ReturnedStep) -> None:
        """Find out what differs, if checksums do. Collective in that case."""
        self._difference = difference = self._compare_replicas(step)
        step.differing_ranks = self.replicas.unresolved
        if difference is not None:
            step.differing_ranks = difference.vote.apart or step.differing_ranks
            step.may_share_copies = difference.kind in ("state", "settings")
            step.record = _with_difference(step.record, difference)

    def _compare_replicas(self, step: ReturnedStep) -> Difference | None:
        """Vote over the ranks' fingerprints of a step; diagnose a difference."""
        replicas, record = self.replicas, step.record
        votes = replicas.votes(step.reduced.by_rank("replicas"))
        if not votes.apart:
            replicas.agreed(record.step)
            return None
        difference = replicas.diagnose(record.step, votes, at=step.now_step + 1)
        if difference.kind == "untied":
            self._run.warn("replicas_not_alike", difference.text, step=record.step)
        return difference

    def annotate(self, step: ReturnedStep, judgement: Judgement) -> Judgement:
        """Add the names of the difference, and the result of a replay."""
        findings, decision = judgement.findings, judgement.decision
        if (difference := self._difference) is not None:
            findings = tuple(
                replace(f, reason=f"{f.reason}: {difference.text}") if f.kind in _COMPARED else f
                for f in findings
            )
            if decision is not None and decision.rule == "replica_corrupted":
                decision = replace(decision, reason=f"{decision.reason} ({difference.text})")
            judgement = judgement._replace(findings=findings, decision=decision)
            self._run.report_unprotected(judgement)
        if (replayed := self.replicas.pop_diagnosis(step.step)) is not None:
            finding = Finding(
                kind="replica_named",
                level="advisory",
                step=step.step,
                detector="replicas",
                reason=replayed.text,
                rank=replayed.rank,
                onset_step=step.step,
                cause="replica_named",
            )
            judgement = judgement._replace(findings=(*judgement.findings, finding))
        return judgement

    def on_attempt(self, attempt: AttemptStarted) -> None:
        """Expect the steps after the restored state to be trained again."""
        self.replicas.rolled_back(attempt.fork_step)

    def stop_collectives(self) -> None:
        """Enter no further collectives."""
        self.replicas.close()


def _with_difference(record: StepRecord, difference: Difference) -> StepRecord:
    """Return the step with the difference that ``ReplicasFeature`` found on the ranks together."""
    if difference.kind not in ("state", "settings"):
        return record
    rank = difference.vote.rank
    if difference.kind == "settings":
        return replace(record, settings_differ=True, replica_rank=rank)
    return replace(
        record,
        replicas_differ=max(1, len(difference.vote.suspects)),
        replica_rank=rank,
        replayed_alike=difference.is_again,
    )
