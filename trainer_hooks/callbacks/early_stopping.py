"""Early stopping on a validation metric, and the best state.

Rank 0's value is sent with the numbers of the next step, and applied on all ranks ``lag`` steps
later, when it returns. By then the evaluated state has changed, so each rank copies it when
``monitor.evaluate`` is called; the copy is written to disk if all ranks have one and the value is a
new best. The only separate collective is in ``restore_best``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from trainer_hooks.exchange.emit import Emitter
from trainer_hooks.exchange.reduce_vector import ReducedNumbers
from trainer_hooks.ranks import Ranks
from trainer_hooks.recovery.manager import Meta, Snapshot, SnapshotRing
from trainvitals.early_stopping import EarlyStopping, Stopper
from trainvitals.errors import UsageError, VitalsError

if TYPE_CHECKING:
    from trainer_hooks.recovery.checkpoints.index import BestMark
    from trainer_hooks.recovery.checkpoints.store import CheckpointStore


class RestoredBest(NamedTuple):
    """State that ``monitor.restore_best`` restored."""

    id: str
    """Id of its checkpoint."""
    step: int
    """Step that follows the state."""
    metric: str
    value: float


class Given(NamedTuple):
    """A value of the metric, with the step that followed it and its attempt."""

    step: int
    attempt: int
    value: float


class RankEarlyStopping:
    """One rank's part of early stopping; the decision is the same on all ranks."""

    def __init__(
        self,
        settings: EarlyStopping,
        *,
        ranks: Ranks,
        emitter: Emitter,
        ring: SnapshotRing | None = None,
        store: CheckpointStore | None = None,
    ) -> None:
        """Without ``ring`` and ``store``, the best state is not saved."""
        self._settings = settings
        self._stopper = Stopper(settings)
        self._ranks = ranks
        self._emitter = emitter
        self._ring = ring if settings.keep_best else None
        self._store = store if settings.keep_best else None
        self._submitted: Given | None = None
        self._last_evaluated = (-1, -1)
        """Step and attempt of the last evaluation on this rank."""
        self._copy: Snapshot | None = None
        self._missed = ""
        self._said: set[str] = set()
        self._calls_without: int | None = 0

    @property
    def should_stop(self) -> bool:
        """Whether the run should end; becomes true on all ranks at the same step."""
        return self._stopper.should_stop

    def evaluated(
        self, values: Mapping[str, float], *, step: int, attempt: int, meta: Callable[[], Meta]
    ) -> None:
        """Record the metric, if it is among ``values``, and copy the current state.

        ``step`` is trained next; ``meta`` returns the part of a snapshot other than tensors.
        """
        metric = self._settings.metric
        if metric not in values:
            self._warn_missing_metric(step, attempt)
            return
        self._calls_without, self._last_evaluated = None, (step, attempt)
        if self._ring is not None:
            self._take_copy(self._ring, step, attempt, meta)
        if self._is_rank0:
            self._submitted = Given(step, attempt, float(values[metric]))

    def _warn_missing_metric(self, step: int, attempt: int) -> None:
        """Warn once if the metric never arrives: with a wrong name, the run would never stop."""
        if self._calls_without is None:
            return
        self._calls_without += 1
        if self._calls_without == self._settings.patience:
            text = (
                f"early stopping waits for {self._settings.metric!r}, which was in none of "
                f"{self._calls_without} calls of monitor.evaluate()"
            )
            self._warn_once("early_stopping_waits", text, step, attempt)

    def _take_copy(
        self, ring: SnapshotRing, step: int, attempt: int, meta: Callable[[], Meta]
    ) -> None:
        """Copy the state that early stopping may keep, unless a copy of this attempt is pending."""
        before, self._missed = self._copy, ""
        if before is not None and before.attempt == attempt and before.step != step:
            self._missed = f"the evaluation of step {before.step} is not decided yet"
            return
        if before is not None:
            before.give_up()
        self._copy = None
        try:
            self._copy = ring.take_evaluated(step, attempt, meta())
        except Exception as error:  # noqa: BLE001 - becomes this rank's flag in the reduce vector
            kind = type(error).__name__
            self._missed = error.text if isinstance(error, VitalsError) else f"{kind}: {error}"

    def rank0_metric(self, step: int, attempt: int) -> float | None:
        """Return the value that rank 0 sends with ``step``; None if there is none."""
        evaluation = self._submitted
        if evaluation is None or evaluation[:2] != (step, attempt):
            return None
        return evaluation.value

    def has_state_copy(self, step: int, attempt: int) -> bool:
        """Return whether this rank has a copy of the state evaluated before ``step``."""
        copy = self._copy
        return copy is not None and (copy.step, copy.attempt) == (step, attempt)

    def apply_reduced_metric(self, reduced: ReducedNumbers, *, step: int, attempt: int) -> None:
        """Apply the reduced numbers of ``step``, which belongs to the current attempt."""
        holders = int(reduced.total("holds_evaluated"))
        value = reduced.root["evaluation"] if reduced.root["evaluated"] else None
        if value is not None or holders:
            self._apply_evaluation(value, holders, step, attempt)

    def _apply_evaluation(self, value: float | None, holders: int, step: int, attempt: int) -> None:
        """Count the metric for early stopping; keep or release the copied state."""
        metric = self._settings.metric
        if value is None:
            text = (
                f"{holders} of {self._ranks.world_size} ranks evaluated {metric} before step "
                f"{step}, and not rank 0, whose value counts"
            )
            self._warn_once("evaluated_without_rank_0", text, step, attempt)
            self._settle_state_copy(step, attempt, None)
            return
        stopped = self._stopper.should_stop
        improved = self._stopper.update(value, step=step)
        if not math.isfinite(value):
            text = f"{metric} is {value} at step {step}: no improvement"
            self._emit_note("early_stopping_not_finite", text, step, attempt, "warning")
        complete = holders == self._ranks.world_size
        self._settle_state_copy(step, attempt, value if improved and complete else None)
        if improved and not complete and self._ring is not None:
            self._note_best_missing(value, holders, step, attempt)
        if self._stopper.should_stop and not stopped:
            self._emit_note("early_stopping", self._stopper.why(value, step=step), step, attempt)

    def _settle_state_copy(self, step: int, attempt: int, best: float | None) -> None:
        """Start writing the copied state if it is the best so far; otherwise free its slot."""
        copy = self._copy
        if copy is None or not self.has_state_copy(step, attempt):
            return
        self._copy = None
        if best is not None and self._store is not None:
            copy.state, copy.best = "verified", (self._settings.metric, best)
            self._store.save(copy)  # keeps the copy until it is written
        copy.give_up()

    def _note_best_missing(self, value: float, holders: int, step: int, attempt: int) -> None:
        best = f"the best state so far ({self._settings.metric} {value:g}, step {step}) is not kept"
        if self._missed:
            self._emit_note("best_not_kept", f"{best}: {self._missed}", step, attempt, "warning")
        else:
            text = (
                f"{best}: {holders} of {self._ranks.world_size} ranks have a copy of it; call "
                "monitor.evaluate() on all ranks"
            )
            self._warn_once("best_not_on_all_ranks", text, step, attempt)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values, equal on all ranks."""
        return self._stopper.state_dict()

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Continue from the state of the restored snapshot, or of the checkpoint in a relaunch.

        Evaluations of a discarded attempt do not count.
        """
        self._submitted = None
        self._stopper.load_state_dict(state)

    def restore_best(self, *, step: int, attempt: int, meta: Callable[[], Meta]) -> RestoredBest:
        """Restore the best state, including a last evaluation. Collective.

        Call on all ranks, after the numbers of all steps have been read back. ``step`` is trained
        next.

        Raises:
            UsageError: no best state was saved.
            CheckpointCorruptError: it is damaged; nothing was changed.
            CheckpointError: it could not be read on some rank.
        """
        from trainer_hooks.agreement import RankAgreement

        ring, store = self._ring, self._store
        if ring is None or store is None:
            raise no_best_state_error("this run keeps no best state")
        store.wait(None)  # a save uses the same process group
        if self._last_evaluated == (step, attempt) and not self.has_state_copy(step, attempt):
            # The slot is free by now, and no step was made since.
            self._take_copy(ring, step, attempt, meta)
        rank_values = self._ranks.gather(
            (self.rank0_metric(step, attempt), self.has_state_copy(step, attempt))
        )
        holders = sum(holds for _, holds in rank_values)
        if rank_values[0][0] is not None or holders:
            self._apply_evaluation(rank_values[0][0], holders, step, attempt)
            store.wait(None)
        self._submitted = None
        marks: list[tuple[str, BestMark] | None] = []
        RankAgreement(self._ranks).on_root(lambda: marks.append(store.folder.best()))
        best = self._ranks.broadcast(marks[0] if marks else None)
        metric = self._settings.metric
        if best is None or best[1].metric != metric:
            raise UsageError(
                f"restore_best(): no state was kept as the best of {metric}",
                hint=f"monitor.evaluate({metric}=...) must be called on all ranks, with a finite "
                "value; the run's events show where a state was not kept",
            )
        restored = store.load(best[0])
        self._note_best_restored(restored.id, restored.step, best[1].value, step, attempt)
        return RestoredBest(restored.id, restored.step, metric, best[1].value)

    def _note_best_restored(
        self, name: str, at: int, value: float, step: int, attempt: int
    ) -> None:
        """Write the note about the best state that early stopping restored."""
        stopper, metric = self._stopper, self._settings.metric
        text = f"best state restored: {metric} {value:g} of step {at} ({name})"
        if stopper.best is not None and stopper.best_step != at:
            text += f"; the best one, of step {stopper.best_step} ({stopper.best:g}) was not kept"
        self._emit_note("best_restored", text, step, attempt)

    @property
    def _is_rank0(self) -> bool:
        """Return whether this is rank 0, whose metric decides early stopping."""
        return self._ranks.rank == 0

    def _warn_once(self, code: str, text: str, step: int, attempt: int) -> None:
        """Write a warning about early stopping once per code."""
        if code not in self._said:
            self._said.add(code)
            self._emit_note(code, text, step, attempt, "warning")

    def _emit_note(
        self,
        code: str,
        text: str,
        step: int,
        attempt: int,
        severity: Literal["info", "warning"] = "info",
    ) -> None:
        self._emitter.note(code, text, severity, step=step, attempt=attempt)


def no_best_state_error(why: str) -> UsageError:
    """Return the error of ``restore_best`` without a saved state."""
    return UsageError(
        f"restore_best(): {why}",
        hint="watch(..., checkpoints=True, early_stopping=EarlyStopping(keep_best=True)), and call "
        "it at the end of the `with` block",
    )
