"""Weights that something else than the optimizer has changed, found by what updates can change."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence

from msgspec.structs import replace
from torch import nn

from trainer_hooks.exchange.reduce_vector import ReducedNumbers, Slots
from trainer_hooks.measures.weight_norms import DATED_STEPS, WeightCheck, WeightWrite, date_write
from trainer_hooks.step.context import RunContext
from trainer_hooks.step.feature import OutgoingStep, ReturnedStep, StepFeature
from trainvitals.policy import Judgement
from trainvitals.records import AttemptStarted, Finding

_STEPS_TO_AGAIN = 100
"""Steps in which a layer is reported once."""


class WeightsFeature(StepFeature):
    """Compares the norms of the weights with what Adam can have changed, on rank 0.

    All ranks have it, because all judge the finding: the policy queries the probe about it.
    """

    slots = Slots(rank0=("weights_written",))  # 1 + steps since the write; 0: none

    def __init__(self, run: RunContext) -> None:
        super().__init__(run)
        self._check: WeightCheck | None = None
        if run.is_rank0 and len(run.device.turns) <= 1:
            self._check = self._make_check()
        self._reduced: deque[ReducedNumbers] = deque(maxlen=DATED_STEPS)
        """Numbers of the latest steps."""
        self._onsets: deque[int] = deque(maxlen=DATED_STEPS)
        """First steps of the latest findings."""
        self._found: Finding | None = None
        """Finding that the next step sends to the other ranks."""
        self._sent: Finding | None = None
        """Finding of a step that has not returned yet."""
        self._reported: dict[str, int] = {}
        """First step at which a layer is reported again."""
        self._num_quiet = 0
        """Steps left of an announced change."""

    @property
    def idle_hooks(self) -> tuple[str, ...]:
        """Return the hooks of rank 0's check if there is none."""
        if self._check is not None and self._check.is_possible:
            return ()
        return ("before_measure", "rank0_values", "on_judged")

    def before_measure(self, step: OutgoingStep) -> None:
        """Start to read the norms, if that is due."""
        check = self._check
        if check is None or self._num_quiet:
            self._num_quiet = max(0, self._num_quiet - 1)
        elif not check.counts(step.step, step.rates):
            with self._run.faults.fail_open("weights"):
                device = self._run.device
                if check.norms is not device.norms:  # the loop added parameter groups
                    check = self._check = self._make_check()
                    self._reduced.clear()
                if check.is_possible:
                    check.read(step.step, step.rates)

    def rank0_values(self, step: OutgoingStep) -> Mapping[str, float]:
        """Return the number of steps since a write that was found, once."""
        if self._found is None:
            return {}
        self._sent, self._found = self._found, None
        return {"weights_written": 1.0 + step.step - self._sent.onset_step}

    def on_reduced(self, step: ReturnedStep) -> None:
        """Let the step be judged with the finding."""
        if back := int(step.reduced.root["weights_written"]):
            sent = self._sent or Finding(
                kind="weight_norm",
                level="advisory",
                step=step.step,
                detector="weights",
                reason="weights were changed by something else than the optimizer",
            )
            onset = step.step - (back - 1)
            step.written, self._sent = replace(sent, step=step.step, onset_step=onset), None

    def on_judged(self, step: ReturnedStep, judgement: Judgement) -> None:
        """Find layers whose weights were written to."""
        check = self._check
        if check is None:
            return
        self._reduced.append(step.reduced)
        if judgement.findings:
            check.read_soon()
            self._onsets.extend(each.onset_step for each in judgement.findings)
        if check.is_reading:
            with self._run.faults.fail_open("weights"):
                self._find_writes(check, step.step)

    def _find_writes(self, check: WeightCheck, step: int) -> None:
        """Look for writes in the readings that have come; each layer once in some steps."""
        writes = [
            write
            for write in check.find_writes(step)
            if step >= self._reported.get(write.layer, step)
        ]
        if writes:
            first = step - len(self._reduced) + 1
            squares = {first + i: each.squares for i, each in enumerate(self._reduced)}
            self._found = _finding(writes, step, date_write(writes[0], squares, self._onsets))
            self._reported |= {write.layer: step + _STEPS_TO_AGAIN for write in writes}

    def _make_check(self) -> WeightCheck:
        """Return the check of the run's parameters, without those that a forward writes to."""
        modules = self._run.given.model.modules()
        embeddings = (m for m in modules if isinstance(m, nn.Embedding) and m.max_norm is not None)
        excluded = {id(module.weight) for module in embeddings}
        device = self._run.device
        return WeightCheck(device.norms, device.optimizers, excluded=excluded)

    def on_change_expected(self, num_steps: int) -> None:
        """Read nothing during an announced change."""
        self._discard()
        self._num_quiet = num_steps

    def on_attempt(self, attempt: AttemptStarted) -> None:
        """Discard the readings: the new attempt starts from another state."""
        self._discard()

    def on_restored(self, next_step: int) -> None:
        """Discard the readings: an earlier state was restored."""
        self._discard()

    def _discard(self) -> None:
        """Discard the readings, and what was found but not judged."""
        self._found = self._sent = None
        self._reduced.clear()
        self._onsets.clear()
        self._reported.clear()
        if self._check is not None:
            self._check.forget()


def _finding(writes: Sequence[WeightWrite], step: int, onset: int) -> Finding:
    """Return the finding about layers whose weights were written to, the clearest first."""
    write = writes[0]
    first, last = write.first_step, write.last_step
    when = f"at step {last}" if first == last else f"between steps {first} and {last}"
    others = f"; also those of {', '.join(each.layer for each in writes[1:4])}"
    return Finding(
        kind="weight_norm",
        level="advisory",
        step=step,
        detector="weights",
        reason=f"the weights of layer {write.layer} were changed by something else than the "
        f"optimizer {when}: a norm of {write.before:.4g} became {write.now:.4g}; updates "
        f"explain a change of {write.most:.2g}" + (others if len(writes) > 1 else ""),
        value=write.now,
        limit=write.before + math.copysign(write.most, write.now - write.before),
        onset_step=onset,
        layer=write.layer,
    )
