"""The limit of ``max_norm="auto"``: a multiple of the recent median gradient norm."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from trainer_hooks.exchange.reduce_vector import Slots
from trainer_hooks.step.context import RunContext
from trainer_hooks.step.feature import OutgoingStep, ReturnedStep, StepFeature
from trainvitals.auto_clip import AutoClip
from trainvitals.policy import Judgement


class AutoClipFeature(StepFeature):
    """Keeps the norms of each optimizer's steps. The update reads the limit from the vector."""

    slots = Slots(rank0=("auto_max_norm",))  # inf: none
    state_key = "auto_clip"
    is_resumable = True

    def __init__(self, run: RunContext) -> None:
        super().__init__(run)
        self._norms: dict[int, AutoClip] = {}
        """Norms by turn; empty if ``max_norm="auto"`` is not used."""

    def _norms_of(self, turn: int) -> AutoClip:
        """Return the norms of one optimizer's turn, or of all optimizers together."""
        if turn not in self._norms:
            self._norms[turn] = AutoClip(self._run.judge.config.auto_clip)
        return self._norms[turn]

    def rank0_values(self, step: OutgoingStep) -> Mapping[str, float]:
        """Return the norm to which ``max_norm="auto"`` clips this step; inf for none."""
        limit = self._norms_of(step.turn).limit(step.step) if step.max_norm == "auto" else None
        return {"auto_max_norm": math.inf if limit is None else limit}

    def on_judged(self, step: ReturnedStep, judgement: Judgement) -> None:
        """Keep the norm of an applied update."""
        measured, record = step.measured, step.record
        if measured.clips_automatically:
            measured.auto_max_norm = step.reduced.limit("auto_max_norm")
            if not (record.skipped or record.failed_ranks or record.grad_norm is None):
                self._norms_of(measured.turn).add(step.step, record.grad_norm)

    def state_dict(self) -> dict[str, Any] | None:
        """Return the norms by turn; None if they are not used."""
        norms = self._norms.items()
        return {str(turn): norms.state_dict() for turn, norms in norms} if norms else None

    def load_state_dict(self, state: Mapping[str, Any] | None, *, step: int) -> None:
        """Continue the limits from ``step``."""
        state = state or {}
        for turn in self._norms.keys() | {int(turn) for turn in state}:
            self._norms_of(turn).roll_back(step, state.get(str(turn)))

    @classmethod
    def check_state(cls, state: Mapping[str, Any]) -> None:
        """Raise if limits could not be computed from the state."""
        for turn, norms in state.items():
            int(turn)
            AutoClip().load_state_dict(norms)
