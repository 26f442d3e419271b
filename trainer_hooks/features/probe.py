"""The probe in a step: batches are kept from clean steps, and read when the policy asks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import torch

from trainer_hooks.exchange.reduce_vector import Slots
from trainer_hooks.probe.probe import Probe, ValidationLosses
from trainer_hooks.step.context import RunContext
from trainer_hooks.step.feature import OutgoingStep, ReturnedStep, StepFeature
from trainvitals.policy import Judgement
from trainvitals.policy.state import is_outlier


class ProbeFeature(StepFeature):
    """Evidence about the state: the probe of earlier batches, and the loop's validation losses.

    Every run has it, because the loop provides ``loss_of`` only with its first batch.
    """

    slots = Slots(
        rank0=("evaluation_ratio",),  # loss compared with the previous evaluation; 0: none
        rank=("probe_ready",),  # the rank was given a loss_of, and keeps batches for it
    )

    def __init__(self, run: RunContext, probe: Probe) -> None:
        super().__init__(run)
        self.probe = probe
        self.loss_evaluations = ValidationLosses()

    @classmethod
    def make(cls, run: RunContext) -> Self:
        """Return the feature with a probe that has no ``loss_of`` yet."""
        device, given = run.device, run.given
        probe = Probe(
            given.model,
            given.optimizers,
            ranks=run.ranks,
            emitter=run.emitter,
            faults=run.faults,
            rewind=lambda: device.shadow.buffers.put_back(
                torch.ones((), device=device.norms.device)
            ),
            schedule=given.pipeline,
            computes_loss=device.norms.has_loss,
        )
        return cls(run, probe)

    def rank0_values(self, step: OutgoingStep) -> Mapping[str, float]:
        """Return the largest ratio of a validation loss since the previous step."""
        ratio, self.loss_evaluations.ratio = self.loss_evaluations.ratio, 0.0
        return {"evaluation_ratio": ratio}

    def contribute_always(self, step: OutgoingStep) -> Mapping[str, float]:
        """Return whether this rank can run the probe."""
        return {"probe_ready": float(self.probe.has_loss and self.probe.is_ready)}

    def on_reduced(self, step: ReturnedStep) -> None:
        """Let the step be judged with the probe, if all ranks can run it."""
        if self.probe.has_loss:
            self.probe.update_readiness(step.reduced.total("probe_ready"))
        step.probe = self.probe.evaluate if self.probe.is_on else None
        step.evaluation = step.reduced.root["evaluation_ratio"] or None

    def on_judged(self, step: ReturnedStep, judgement: Judgement) -> None:
        """Keep the batches of a step that was judged clean; drop those of any other step."""
        if not self.probe.has_loss:
            return
        record = step.record
        is_bad = any(finding.level == "actionable" for finding in judgement.findings)
        if is_bad or record.skipped or is_outlier(record):
            self.probe.dropped(step.step)
        else:
            own_loss = step.reduced.losses()[step.reduced.layout.rank]
            self.probe.accepted(step.step, step.attempt, own_loss)

    def on_restored(self, next_step: int) -> None:
        """Drop the batches of steps that are trained again."""
        self.probe.rolled_back(next_step)

    def report_missing(self, line: str) -> None:
        """Report once, in a mode that acts, that there is no probe, and the ``line`` to add."""
        run = self._run
        if run.mode != "observe" and not self.probe.has_loss:
            text = "no probe, so Vitals cannot check whether the weights are damaged; add one: "
            text += line
            run.emitter.note("no_probe", text, step=max(run.first_step, 0), attempt=run.attempt)

    def stop_collectives(self) -> None:
        """Evaluate nothing from now on: it is collective, and other ranks may be gone."""
        self.probe.close()
