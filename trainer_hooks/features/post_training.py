"""The scalars of a post-training run on rank 0: samples where a problem began, and a halt.

The collector runs the same detectors over the same scalars and reports their findings. A rank runs
them only if it was asked to act: with ``watch(on_collapse="stop")``, or if the loop passes samples.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Self

from trainer_hooks.exchange.reduce_vector import Slots
from trainer_hooks.repro.completions import CompletionRing, CompletionWriter
from trainer_hooks.step.context import RunContext
from trainer_hooks.step.feature import OutgoingStep, ReturnedStep, StepFeature
from trainvitals.detect.posttraining.names import (
    COLLAPSES,
    TASKS,
    is_of_policy,
    is_read,
    read_quantities,
)
from trainvitals.io.completions import StoredCompletions
from trainvitals.records import AttemptStarted, Finding

_MAX_EARLY = 256
"""Scalars that are kept until the loop first passes samples, which may be after these scalars."""
UNSEEN_AFTER = 1_000
"""Steps without a known, finite scalar after which a run of a task logs a warning. A trainer may
log every 500th step."""
_UNSEEN_BEFORE_HALT = 100
"""The same with ``on_collapse="stop"``, which cannot halt without them."""


class PostTrainingFeature(StepFeature):
    """Judges a post-training run on rank 0: ``watch(task=..., on_collapse=...)``."""

    slots = Slots(rank0=("collapse",))  # 1 + index in COLLAPSES of a finding that halts; 0: none
    state_key = "post_training"

    def __init__(self, run: RunContext, task: str) -> None:
        super().__init__(run)
        self._task = task
        self._stops = run.given.on_collapse == "stop"
        self._judge: _ScalarJudge | None = None
        self._saved: Mapping[str, Any] | None = None
        """State of the detectors to continue with, if they are needed."""
        self._ring: CompletionRing | None = None
        self._writer: CompletionWriter | None = None
        self._pending: Finding | None = None
        """Finding that no vector has returned yet; only on rank 0."""
        self._last_number = 0
        """Number that the latest vector returned."""
        self._early: deque[tuple[str, float, int, int]] = deque(maxlen=_MAX_EARLY)
        """Scalars from before the first samples, each with its step and attempt; only on rank 0."""
        self._has_seen = False
        """Whether a scalar was recorded that the detectors use; only on rank 0."""
        self._num_unseen = 0
        """Steps before the first such scalar; only on rank 0."""
        if run.is_rank0:
            run.emitter.add_scalar_observer(self._observe)
        if self._stops:
            self._listen()

    @classmethod
    def make(cls, run: RunContext) -> Self | None:
        """Return the feature if ``watch`` was given a task whose scalars have detectors."""
        spec = TASKS.get(run.given.task or "")
        if spec is None or not (spec.samples or spec.compares):
            return None
        return cls(run, run.given.task or "")

    def _listen(self) -> None:
        """Start to judge the scalars that the loop records; on rank 0."""
        if self._judge is None and self._run.is_rank0:
            self._judge = _ScalarJudge(self._task)
            self._restore_detectors(self._judge)
            for name, value, step, attempt in self._early:
                self._observe(name, value, step=step, attempt=attempt)
            self._early.clear()

    def _restore_detectors(self, judge: _ScalarJudge) -> None:
        """Continue the detectors from a checkpoint; if another version saved it, start again."""
        with self._run.faults.fail_open("post_training"):
            judge.load_state_dict(self._saved)

    def _observe(self, name: str, value: float, *, step: int, attempt: int) -> None:
        """Collect a scalar that the loop recorded on rank 0, for the detectors."""
        if not self._has_seen:
            self._has_seen = is_of_policy(name) and bool(read_quantities({name: value}))
        if self._judge is None:
            self._early.append((name, value, step, attempt))
            return
        with self._run.faults.fail_open("post_training"):
            self._judge.observe(name, value, step=step, attempt=attempt)

    # ------------------------------------------------------------------------------- samples

    def observe_samples(
        self,
        prompts: Sequence[object],
        completions: Sequence[object],
        rewards: Sequence[float | None],
        *,
        step: int,
        attempt: int,
    ) -> None:
        """Keep three completions of a step for ``monitor.observe_samples``; on rank 0.

        Raises:
            UsageError: an argument is not a sequence, the lengths differ, or a reward is not a
                number.
        """
        if self._ring is None:
            self._listen()
            self._ring = CompletionRing()
        self._ring.add(prompts, completions, rewards, step=step, attempt=attempt)

    def _store_samples(self, finding: Finding) -> None:
        """Write the completions of the step at which a finding began, if they are in memory."""
        run = self._run
        stored = None if self._ring is None else self._ring.find(finding, run.attempt)
        if stored is None:
            return
        if self._writer is None:
            self._writer = CompletionWriter(run.run_dir.path, run.faults, self._note_stored)
        self._writer.write(stored)

    def _note_stored(self, stored: StoredCompletions) -> None:
        """Name the file of completions in the run's events; in the writer's thread."""
        run = self._run
        text = (
            f"{stored.finding}: {len(stored.samples)} completions of step {stored.step} are in "
            f"{stored.name} of the run directory; `vitals why {run.run_dir.run_id} {stored.step}` "
            "shows them there"
        )
        run.emitter.note("completions", text, step=stored.reported_step, attempt=stored.attempt)

    # ---------------------------------------------------------------------------- with a step

    def rank0_values(self, step: OutgoingStep) -> Mapping[str, float]:
        """Judge the scalars of earlier steps, and return the number of a finding that halts."""
        if not self._has_seen:
            self._report_unseen(step.step)
        if self._judge is None:
            return {}
        findings: list[Finding] = []
        with self._run.faults.fail_open("post_training"):
            findings = self._judge.judge(before_step=step.step, attempt=step.attempt)
        # First the halt, which must not depend on a file.
        lost = next((finding for finding in findings if finding.cause in COLLAPSES), None)
        if self._stops and self._pending is None:
            self._pending = lost
        for finding in findings:
            with self._run.faults.fail_open("completions"):
                self._store_samples(finding)
        if self._pending is None:
            return {}
        return {"collapse": 1.0 + COLLAPSES.index(self._pending.kind)}

    def _report_unseen(self, step: int) -> None:
        """Warn once if nothing of a task can be judged, because its scalars are missing."""
        self._num_unseen += 1
        num_steps = _UNSEEN_BEFORE_HALT if self._stops else UNSEEN_AFTER
        if self._num_unseen == num_steps + 1:  # what is logged after the last of them counts
            halts = ", and on_collapse='stop' cannot halt the run" if self._stops else ""
            samples = TASKS[self._task].samples
            names = "reward=..., entropy=..., kl=..." if samples else "accuracy=..., margin=..."
            text = (
                f"task={self._task!r}: in {num_steps} steps rank 0 recorded no finite scalar "
                f"with a known name, so only the loss and the gradients are judged{halts}; call "
                f"monitor.observe({names}) on rank 0, or let the trainer log more often (the "
                "guide on post-training lists the names)"
            )
            self._run.warn("scalars_not_judged", text, step=step)

    def on_reduced(self, step: ReturnedStep) -> None:
        """Let the step be judged with rank 0's finding, once: steps in flight repeat its number."""
        number = int(step.reduced.root["collapse"])
        if number not in (0, self._last_number):
            kind = COLLAPSES[number - 1]
            step.collapse = self._pending or Finding(
                kind=kind,
                level="advisory",
                step=step.step,
                detector=kind,
                reason=f"{kind.replace('_', ' ')}, found on rank 0",
                onset_step=step.step,
                cause=kind,
            )
            self._pending = None
        self._last_number = number

    def on_change_expected(self, num_steps: int) -> None:
        """Compare later scalars with new levels: a change was announced."""
        self._early.clear()
        if self._judge is not None:
            self._judge.expect_change()

    # -------------------------------------------------------------------------- the attempt

    def on_attempt(self, attempt: AttemptStarted) -> None:
        """Take a number that comes back with the new attempt as a new finding."""
        self._last_number, self._pending = 0, None

    def state_dict(self) -> Mapping[str, Any] | None:
        """Return the state of rank 0's post-training detectors; None if nothing needs them."""
        return self._saved if self._judge is None else self._judge.state_dict()

    def load_state_dict(self, state: Mapping[str, Any] | None, *, step: int) -> None:
        """Continue the post-training detectors from a state; None: they start again."""
        self._saved = state
        if self._judge is not None:
            self._restore_detectors(self._judge)

    def close(self) -> None:
        """Wait briefly for files of completions that are being written."""
        if self._writer is not None:
            self._writer.close()


class _ScalarJudge:
    """Passes a post-training run's scalars on rank 0 to the detectors, step by step.

    As in the collector, a step is complete once a later one starts: a loop may log some of its
    scalars after the gradients were measured.
    """

    def __init__(self, task: str) -> None:
        self._task = task
        self._scalars: dict[str, float] = {}
        self._logged_at = (0, 0)
        """Attempt and step of these."""
        self._findings: list[Finding] = []
        self.load_state_dict(None)

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Continue as the post-training detectors that had the state; None: start again.

        Raises:
            Exception: the state is damaged, or is another version's; the detectors start again.
        """
        # Here: a rank that does not act needs none of the detectors.
        from trainvitals.detect.posttraining.set import PostTrainingDetectors

        self._scalars, self._findings = {}, []
        self._detectors = PostTrainingDetectors(self._task)
        if state is not None:
            restored = PostTrainingDetectors(self._task)
            restored.load_state_dict(state)
            self._detectors = restored

    def state_dict(self) -> dict[str, Any]:
        """Return the post-training detectors' state as JSON types."""
        return self._detectors.state_dict()

    def observe(self, name: str, value: float, *, step: int, attempt: int) -> None:
        """Add a scalar that the loop recorded; one of a later step completes the earlier step."""
        if not is_read(name):
            return
        if self._logged_at != (attempt, step):
            self._judge_step()
            self._logged_at = (attempt, step)
        self._scalars[name] = value

    def judge(self, *, before_step: int, attempt: int) -> list[Finding]:
        """Return the post-training findings about the scalars of earlier steps."""
        if self._logged_at < (attempt, before_step):
            self._judge_step()
        findings, self._findings = self._findings, []
        return findings

    def _judge_step(self) -> None:
        """Pass the scalars of a complete step to the detectors."""
        values, self._scalars = self._scalars, {}
        if values:
            attempt, step = self._logged_at
            self._findings += self._detectors.update(
                values, step=step, attempt=attempt, time_unix_ns=0
            )

    def expect_change(self) -> None:
        """Let the post-training detectors start again: a change was announced."""
        self._detectors.expect_change()
