"""Judges a log that recorded no limits: the findings and decisions that a live run would have had.

The log provides the numbers. Everything else rests on these assumptions:

- **Limits** are applied as in a live loop: the limits in force at a step are those that the
  detectors had computed ``lag`` steps earlier. A non-finite or withheld step counts as skipped
  (unless in ``observe``), so its value enters no reference.
- **Checkpoints** are ideal: a healthy state from before the log starts, and one every
  ``checkpoint_every`` steps that becomes healthy as in a run, after ``ladder.margin`` good steps.
- **After a would-be rollback** the log continues unchanged, because it does not contain the other
  attempt. The escalation policy assumes that the rollback was done, so budgets and the cooldown
  count; the detectors continue over the log, as they would in ``observe``. The rest shows the worst
  case: the decisions if the rollback had changed nothing.
- **After a would-be HALT** nobody acts, every step is still judged, and the escalation policy acts
  again once the log has recovered by itself (as in ``observe``) or was started again.
- **Steps that go back** are a resumed run: a new attempt, with the detectors as they were at that
  step, or new ones if the log starts after it.
- **A coarse log** has one record for many steps. The escalation policy then counts records.
- **The probe** would run at some steps, and a log cannot provide its result. So no decision that
  needs the result is simulated: the log shows the steps at which the probe would run, and for each
  action whether the probe could have ruled it out.
- **A loss scaler** skips its overflows itself. An overflow is recognized by a scale that falls, or
  by a non-finite gradient norm with a finite loss, if the norm is soon finite again.
- **The clip** is assumed to exist, unless the caller states that the loop does not clip: then kept
  batches must read worse before the state counts as damaged.
"""

import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from trainvitals.detect.fleet import FleetDetectors
from trainvitals.detect.fleet.base import MergedStep
from trainvitals.policy import StepInputs
from trainvitals.policy.evidence import NO_READING, Ask, ProbeResult
from trainvitals.policy.judge import Judge, JudgeConfig, Judgement
from trainvitals.policy.state import CheckpointRef, DeviceRule, Mode
from trainvitals.records import Decision, StateRead, StepRecord

EVERY_STEP_SHARE = 0.9
"""Share of records that must follow the one before by one step, for steps to be counted."""

LAG = 1
"""Steps until a step's numbers are read back, as in a live loop with a fused optimizer."""

CHECKPOINT_EVERY = 100
"""Steps between the assumed checkpoints."""

EXPECTED_STEPS = 200
"""Steps without finite findings after an announced change: the default of ``monitor.expect``."""

MAX_STATES = 128
"""Detector states kept for a log that goes back; every second one is deleted at this number."""


MAX_OVERFLOWS, MAX_FIRST_OVERFLOWS = 5, 40
"""Most overflows in a row of a loss scaler: later, and at the start while it finds its scale."""

_RULED_OUT = frozenset({"nonfinite_streak", "stuck"})
"""Rules of actions that would not have been taken if the probe had found the state healthy."""

_QUESTIONS = {
    "spike": "a spike or burst since step {}: the probe would run here; only a damaged state would "
    "lead to a rollback",
    "nonfinite": "non-finite steps in a row since step {}: the probe would run here, to tell a "
    "damaged state from bad data",
    "level": "the loss has risen since step {}: the probe would run here and report; right after a "
    "learning-rate jump, a damaged state would lead to a rollback",
}


class LoggedStep(NamedTuple):
    """One record of a log. A value that the log lacks is None, which is not NaN."""

    row: int
    """Position in the log, from 0."""
    step: int
    loss: float | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    loss_scale: float | None = None
    step_seconds: float | None = None
    tokens_per_second: float | None = None
    data_seconds: float | None = None
    time_seconds: float | None = None
    """Time at which it was logged: seconds since 1970."""
    scalars: Mapping[str, float] | None = None
    """Scalars of a post-training run, by their names in the table of ``detect.posttraining``."""


class JudgedStep(NamedTuple):
    """A record as the device would have completed it, with its findings and decision."""

    row: int
    record: StepRecord
    judgement: Judgement


class Cadence(msgspec.Struct, frozen=True, kw_only=True):
    """Spacing of a log's steps."""

    counts_records: bool
    """Whether the policy counts records, because too few of them are one step apart."""
    gaps: tuple[int, ...]
    """The usual distances between steps, the most frequent first."""
    restarts: frozenset[int]
    """Positions of the records at which the log goes back."""
    num_repeated: int
    """Records with the same step as the record before."""
    num_out_of_order: int
    """Single late records, which are not a restart."""


def measure_log_cadence(log: Sequence[LoggedStep]) -> Cadence:
    """Return the spacing of a log's steps, before the log is judged."""
    restarts: set[int] = set()
    forward: Counter[int] = Counter()
    num_repeated = num_late = 0
    top = log[0].step if log else 0
    for index in range(1, len(log)):
        step = log[index].step
        gap = step - log[index - 1].step
        if gap > 0:
            forward[gap] += 1
        elif gap == 0:
            num_repeated += 1
        elif index + 1 < len(log) and log[index + 1].step <= top:
            restarts.add(index)
            top = step
        else:
            num_late += 1
        top = max(top, step)
    total = sum(forward.values())
    common = [gap for gap, times in forward.most_common(3) if times * 20 >= total]
    return Cadence(
        counts_records=forward[1] < EVERY_STEP_SHARE * total,
        gaps=tuple(common),
        restarts=frozenset(restarts),
        num_repeated=num_repeated,
        num_out_of_order=num_late,
    )


def find_overflow_records(log: Sequence[LoggedStep]) -> frozenset[int]:
    """Return the positions in a log at which its loss scaler skipped a step for an overflow.

    Overflows are single or in short rows. If the log has the loss scale, it must fall.
    """
    has_scale = any(logged.loss_scale is not None for logged in log)
    places: set[int] = set()
    start = 0
    while start < len(log):
        end = start
        while end < len(log) and _is_overflow(log[end]):
            end += 1
        most = MAX_OVERFLOWS if start else MAX_FIRST_OVERFLOWS
        ends_soon = start < end < len(log) and end - start <= most
        if ends_soon and (not has_scale or _has_falling_scale(log[max(0, start - 1) : end + 1])):
            places.update(range(start, end))
        start = end + 1
    return frozenset(places)


def _is_overflow(logged: LoggedStep) -> bool:
    """Return whether a log's record has a non-finite norm and a finite loss: an overflow."""
    norm, loss = logged.grad_norm, logged.loss
    is_norm_lost = norm is not None and not math.isfinite(norm)
    return is_norm_lost and loss is not None and math.isfinite(loss)


def _has_falling_scale(stretch: Sequence[LoggedStep]) -> bool:
    """Return whether the loss scale falls over these records of a log."""
    scales = [logged.loss_scale for logged in stretch if logged.loss_scale is not None]
    return len(scales) > 1 and scales[-1] < scales[0]


def is_prevented_by_healthy_probe(decision: Decision) -> bool:
    """Return whether a healthy probe result, which a log lacks, would prevent the action.

    A log has no probe, so an action that needs the probe to find damage is never simulated.
    """
    return decision.rule in _RULED_OUT


def describe_query(read: StateRead) -> str:
    """Return a sentence on the query that a probe would have received in a judged log."""
    return _QUESTIONS.get(read.trigger, "").format(read.onset_step)


def judge_history(
    log: Sequence[LoggedStep],
    *,
    config: JudgeConfig | None = None,
    mode: Mode = "heal",
    lag: int = LAG,
    checkpoint_every: int = CHECKPOINT_EVERY,
    clips: bool = True,
    expected: Iterable[int] = (),
) -> Iterator[JudgedStep]:
    """Judge each record of a log, in order, as a function: with the class of a live run.

    Args:
        log: the records, oldest first. The steps may go back if a run was resumed.
        config: detectors and escalation policy; None: the defaults.
        mode: mode of the escalation policy: its most severe action.
        lag: the readback lag in steps.
        checkpoint_every: steps between the assumed checkpoints.
        clips: whether the loop that wrote the log clipped its gradients.
        expected: steps of planned changes, as if ``monitor.expect`` had announced each before it.
    """
    return _LogReplay(log, config, mode, lag, checkpoint_every, clips, expected).judge_log()


def export_judged_steps(judged_steps: Iterable[JudgedStep]) -> dict[str, list[dict[str, Any]]]:
    """Return a judged log's findings, queries to the probe and decisions as plain records."""
    findings: list[dict[str, Any]] = []
    decisions: list[dict[str, Any]] = []
    questions: list[dict[str, Any]] = []
    for judged in judged_steps:
        questions += [
            {"row": judged.row, "step": judged.record.step, **msgspec.to_builtins(read)}
            for read in judged.judgement.readings
        ]
        findings += [
            {
                "row": judged.row,
                "step": f.step,
                "kind": f.kind,
                "level": f.level,
                "reason": f.reason,
            }
            for f in judged.judgement.findings
        ]
        if (decision := judged.judgement.decision) is not None:
            needs = {"could_be_ruled_out_by_probe": is_prevented_by_healthy_probe(decision)}
            decisions.append({"row": judged.row, **msgspec.to_builtins(decision), **needs})
    return {"findings": findings, "questions": questions, "decisions": decisions}


class _LogReplay:
    """Simulates device and host over a log. Its clock counts steps, or records of a coarse log."""

    def __init__(
        self,
        log: Sequence[LoggedStep],
        config: JudgeConfig | None,
        mode: Mode,
        lag: int,
        checkpoint_every: int,
        clips: bool,
        expected: Iterable[int],
    ) -> None:
        self._log = log
        self._config = config or JudgeConfig()
        self._mode: Mode = mode
        self._lag = lag
        self._every = checkpoint_every
        self._clips = clips
        self._expected = sorted(set(expected), reverse=True)
        self._cadence = measure_log_cadence(log)
        self._judge = Judge(self._config, mode)
        self._attempt = 1
        self._device = DeviceRule()
        self._waiting: deque[tuple[int, StepRecord]] = deque()
        self._candidates: list[CheckpointRef] = []
        self._checkpoints: list[CheckpointRef] = []
        self._next_checkpoint = 0
        self._states: list[tuple[int, dict[str, Any]]] = []
        self._overflows = find_overflow_records(log)
        self._watches = FleetDetectors()
        self._num_starts = 1

    def judge_log(self) -> Iterator[JudgedStep]:
        """Complete each record of the log when due, and judge it once its numbers would be read."""
        for index, logged in enumerate(self._log):
            if index == 0:
                self._add_initial_checkpoint()
            if index in self._cadence.restarts:
                yield from self._judge_waiting()
                self._resume_earlier(index)
            if self._is_announced(logged.step):
                yield from self._judge_waiting()
                self._judge.rebaseline(EXPECTED_STEPS)
            while self._waiting and self._is_read(*self._waiting[0], logged):
                yield self._judge_record(*self._waiting.popleft())
            record = StepRecord(
                step=self._clock_at_index(index),
                attempt=self._attempt,
                loss=logged.loss,
                grad_norm=logged.grad_norm,
                learning_rate=logged.learning_rate,
                overflow=index in self._overflows,
                clips=self._clips,
            )
            acts = self._judge.mode != "observe"
            judge = self._judge
            record, self._device = self._device.judge(
                record, judge.limits(), judge.max_row(), acts=acts
            )
            self._waiting.append((index, record))
            while len(self._waiting) > self._lag or (self._waiting and self._judge.is_suspicious):
                yield self._judge_record(*self._waiting.popleft())
        yield from self._judge_waiting()

    def _is_announced(self, step: int) -> bool:
        """Return whether this is the log's first record at or after an announced change."""
        num_left = len(self._expected)
        while self._expected and self._expected[-1] <= step:
            self._expected.pop()
        return len(self._expected) < num_left

    def _clock_at_index(self, index: int) -> int:
        """Return the policy's clock at a record of the judged log."""
        return index if self._cadence.counts_records else self._log[index].step

    def _logged_step(self, clock: int) -> int:
        """Return the step in the judged log for a time of its clock."""
        return self._map_record_to_step(clock) if self._cadence.counts_records else clock

    def _is_read(self, index: int, record: StepRecord, now: LoggedStep) -> bool:
        """Whether a record's numbers have reached the host when the step of ``now`` starts."""
        return self._log[index].step + self._lag < now.step or len(self._waiting) > self._lag

    def _judge_waiting(self) -> Iterator[JudgedStep]:
        """Judge the log's records whose numbers the simulated host has not read yet."""
        while self._waiting:
            yield self._judge_record(*self._waiting.popleft())

    def _judge_record(self, index: int, record: StepRecord) -> JudgedStep:
        """Judge one record of the log, and follow a rollback or halt."""
        if record.attempt != self._attempt:
            record = replace(record, attempt=self._attempt)  # in flight: not discarded in a log
        self._take_checkpoint(index, record.step)
        judgement = self._judge.judge(
            record,
            StepInputs(
                record.step + (0 if self._cadence.counts_records else self._lag),
                checkpoints=self._checkpoints,
                next_attempt=self._attempt + 1,
                probe=_abstain_probe,
            ),
        )
        decision = judgement.decision
        if decision is not None and decision.acted and decision.action == "rollback":
            self._follow_rollback(decision.rollback_to_step)
        elif self._judge.halted:
            self._switch_mode("observe")
        elif self._judge.mode != self._mode and not self._judge.facts.halted:
            self._switch_mode(self._mode)
        if self._cadence.counts_records:
            record = replace(record, step=self._log[index].step)
            judgement = self._judgement_as_logged(judgement)
        judgement = self._add_fleet_findings(index, judgement)
        return JudgedStep(self._log[index].row, record, judgement)

    def _add_fleet_findings(self, index: int, judgement: Judgement) -> Judgement:
        """Add the findings on a log's other numbers: learning rate, loss scale, speed."""
        logged = self._log[index]
        run = {
            "learning_rate": logged.learning_rate,
            "loss_scale": logged.loss_scale,
            "tokens_per_second": logged.tokens_per_second,
        }
        of_rank = {
            "step_duration_seconds": logged.step_seconds,
            "data_wait_seconds": logged.data_seconds,
        }
        merged = MergedStep(
            step=logged.step,
            attempt=self._num_starts,
            time_unix_ns=0,
            run={name: value for name, value in run.items() if value is not None},
            ranks={name: [value] for name, value in of_rank.items() if value is not None},
        )
        causes = {finding.cause for finding in judgement.findings}
        watched = self._watches.update(merged)
        # The job reports a jump of the learning rate too: report it once.
        new = tuple(finding for finding in watched if finding.cause not in causes)
        return judgement._replace(findings=judgement.findings + new)

    # ------------------------------------------------------------------------- checkpoints

    def _add_initial_checkpoint(self) -> None:
        """Assume a healthy checkpoint from before the judged log."""
        first = self._clock_at_index(0)
        oldest = max(0, first - self._config.ladder.margin)
        self._checkpoints.append(CheckpointRef(id="before-the-log", step=oldest))
        self._next_checkpoint = first + self._every

    def _take_checkpoint(self, index: int, step: int) -> None:
        """Assume an ideal checkpoint of the log's run if one is due; mark older ones healthy."""
        good_since = self._judge.last_unhealthy_step + 1
        proven = step - self._config.ladder.margin
        while self._candidates and max(self._candidates[0].step, good_since) <= proven:
            self._checkpoints.append(self._candidates.pop(0))
        if step >= self._next_checkpoint:
            self._next_checkpoint = step + self._every
            self._candidates.append(CheckpointRef(id=f"assumed-{step:06d}", step=step))
            self._states.append((self._log[index].step, self._judge.detector_state()))
            if len(self._states) > MAX_STATES:
                del self._states[1::2]

    # ------------------------------------------------------------------------ other branches

    def _follow_rollback(self, target: int) -> None:
        """Let the judge of the log assume that the rollback was done, as a new attempt."""
        self._attempt += 1
        state = self._judge.detector_state()
        self._judge.rolled_back(detector_state=state, attempt=self._attempt)
        self._candidates.clear()
        self._checkpoints = [ref for ref in self._checkpoints if ref.step <= target]

    def _resume_earlier(self, index: int) -> None:
        """Judge on as a run that was resumed at an earlier step of its log."""
        step, clock = self._log[index].step, self._clock_at_index(index)
        self._num_starts += 1
        self._states = [saved_state for saved_state in self._states if saved_state[0] <= step]
        state = self._states[-1][1] if self._states else None
        self._attempt += 1
        facts = replace(self._judge.facts, halted="")
        self._judge = Judge(self._config, self._mode, facts=facts)
        self._judge.rolled_back(detector_state=state, attempt=self._attempt)
        self._candidates.clear()
        saved_state = [ref for ref in self._checkpoints if self._logged_step(ref.step) <= step]
        self._checkpoints = saved_state or [CheckpointRef(id="before-the-log", step=max(0, clock))]
        self._next_checkpoint = clock + self._every

    def _switch_mode(self, mode: Mode) -> None:
        """Judge the rest of the log in another mode, with the complete state of the judge."""
        judge_state = self._judge.state_dict()
        self._judge = Judge(self._config, mode)
        self._judge.load_state_dict(judge_state)

    # ----------------------------------------------------------------------- records as steps

    def _judgement_as_logged(self, judgement: Judgement) -> Judgement:
        """Return the judgement with the steps of the log instead of record numbers."""
        step_of = self._map_record_to_step
        findings = tuple(
            replace(finding, step=step_of(finding.step), onset_step=step_of(finding.onset_step))
            for finding in judgement.findings
        )
        readings = tuple(
            replace(read, onset_step=step_of(read.onset_step)) for read in judgement.readings
        )
        decision = judgement.decision
        if decision is not None:
            decision = replace(
                decision,
                step=step_of(decision.step),
                decided_at_step=step_of(decision.step) + self._lag,
                rollback_to_step=step_of(decision.rollback_to_step),
            )
        return judgement._replace(findings=findings, decision=decision, readings=readings)

    def _map_record_to_step(self, clock: int) -> int:
        """Return the step of the judged log's record with this number."""
        return self._log[clock].step if 0 <= clock < len(self._log) else clock


def _abstain_probe(ask: Ask) -> ProbeResult:
    """Abstain as the probe of a judged log: a log has no state to evaluate."""
    return NO_READING
