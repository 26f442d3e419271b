"""A training's numbers played through the device's rule and the judge, as the hooks do it."""

from collections import deque
from collections.abc import Callable

from msgspec.structs import replace

from trainvitals.policy import CheckpointRef, Judge, Mode, StepInputs
from trainvitals.policy.evidence import Ask, ProbeResult
from trainvitals.policy.state import DeviceRule
from trainvitals.records import Decision, Finding, StateRead, StepRecord


def reads(ratio: float, num_batches: int = 8) -> Callable[[Ask], ProbeResult]:
    """Return a probe whose batches lost 2.0 then, and read this many times as much now."""

    def probe(ask: Ask) -> ProbeResult:
        then = 2.0
        now = ratio * (then + ask.floor) - ask.floor
        return ProbeResult(num_batches=num_batches, then=then, now=now)

    return probe


class Played:
    """A run of one judge; a rollback is carried out at once, with the detectors as they were.

    ``made(step)`` gives a step's numbers; its rate is what the schedule asks for. A record is
    judged ``lag`` steps later, or at once while the judge is suspicious.
    """

    def __init__(
        self,
        made: Callable[[int], StepRecord],
        *,
        mode: Mode = "heal",
        clips: bool = True,
        lag: int = 1,
        probe: Callable[[Ask], ProbeResult] | None = None,
        checkpoints: tuple[int, ...] = (),
    ) -> None:
        self.judge = Judge(mode=mode)
        self.records: list[StepRecord] = []
        """In the order they were judged, over all branches."""
        self.decisions: list[Decision] = []
        self.told: list[Finding] = []
        self.readings: list[StateRead] = []
        self.applied: dict[int, float] = {}
        """The newest rate that was applied at a step."""
        self._made, self._clips, self._lag, self._probe = made, clips, lag, probe
        self._saved = {step: CheckpointRef(id=f"s{step}", step=step) for step in checkpoints}
        self._states: dict[int, dict] = {}
        self._attempt = 1

    def run(self, steps: int) -> "Played":
        """Train up to a step; steps that a rollback gives back are trained again."""
        step, device, waiting = 0, DeviceRule(), deque[StepRecord]()
        while step < steps or waiting:
            if step < steps:
                if step in self._saved:
                    self._states[step] = self.judge.detector_state()
                record, device = self._on_device(step, device)
                waiting.append(record)
                step += 1
            back = None
            while waiting and back is None and self._is_due(waiting, is_last=step == steps):
                back = self._judged(waiting.popleft(), step)
            if back is not None:
                step, device = back, DeviceRule()
                waiting.clear()
        return self

    def _on_device(self, step: int, device: DeviceRule) -> tuple[StepRecord, DeviceRule]:
        judge = self.judge
        record = replace(self._made(step), step=step, attempt=self._attempt, clips=self._clips)
        if record.learning_rate is not None:
            factor = judge.lr_factor_at(step, record.learning_rate)
            rate = record.learning_rate * factor
            record = replace(record, learning_rate=rate, lr_factor=factor)
            self.applied[step] = rate
        return device.judge(record, judge.limits(), judge.max_row(), acts=judge.mode != "observe")

    def _is_due(self, waiting: deque[StepRecord], *, is_last: bool) -> bool:
        return len(waiting) > self._lag or is_last or self.judge.is_suspicious

    def _judged(self, record: StepRecord, now: int) -> int | None:
        """Take a record in; return the step to go on from where that goes back."""
        said = self.judge.judge(
            record,
            StepInputs(
                now - 1,
                checkpoints=[ref for step, ref in self._saved.items() if step <= record.step],
                next_attempt=self._attempt + 1,
                probe=self._probe,
            ),
        )
        self.records.append(record)
        self.told += said.findings
        self.readings += said.readings
        if said.decision is None:
            return None
        self.decisions.append(said.decision)
        if not (said.decision.action == "rollback" and said.decision.acted):
            return None
        self._attempt += 1
        target = said.decision.rollback_to_step
        state = self._states.get(target)
        self.judge.rolled_back(detector_state=state, attempt=self._attempt, step=target)
        return target
