"""SIGTERM in a step: once one rank received it, all ranks save at the same step and stop."""

from __future__ import annotations

from collections.abc import Mapping

from trainer_hooks.exchange.reduce_vector import Slots
from trainer_hooks.step.feature import OutgoingStep, ReturnedStep, StepFeature


class SigtermFeature(StepFeature):
    """Informs all ranks of a SIGTERM; only runs with checkpoints save and stop because of it."""

    slots = Slots(rank=("terminating",))

    is_received = False
    """Whether this rank received SIGTERM; set by the signal handler."""
    is_stopping = False
    """Whether any rank received SIGTERM: known on all ranks at the same step."""

    @property
    def _saves(self) -> bool:
        """Whether the ranks save a checkpoint and stop; otherwise each rank ends by itself."""
        recovery = self._run.recovery
        return recovery is not None and recovery.is_on_disk

    @property
    def idle_hooks(self) -> tuple[str, ...]:
        """Without checkpoints, each rank ends by itself."""
        return () if self._saves else ("on_reduced",)

    def contribute_always(self, step: OutgoingStep) -> Mapping[str, float]:
        """Return whether this rank received SIGTERM, even if it could not measure the step."""
        return {"terminating": float(self.is_received)}

    def on_reduced(self, step: ReturnedStep) -> None:
        """Learn whether any rank received SIGTERM."""
        if self._saves:
            self.is_stopping = step.reduced.total("terminating") != 0

    def on_pause_ended(self) -> None:
        """Stop after the next step: a rank received SIGTERM during a pause."""
        self.is_stopping = self._saves

    def on_saved(self) -> None:
        """Continue if the loop decides itself how to end; covers a SIGTERM during the save too."""
        self.is_received = self.is_stopping = False
