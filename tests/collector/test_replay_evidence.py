"""A stored run with questions to the state, evaluations, a person's word and an announced change.

It is judged again from what is stored, and must come out the same.
"""

import math
import random
from collections import deque

import pytest
from msgspec.structs import replace

from tests.collector.alerting import Place, started
from tests.collector.rows import Writer
from tests.support.replays import columns, replayed
from trainvitals.detect.outliers import Limits
from trainvitals.policy import CheckpointRef, Judge, Judgement, Mode, Proposal, StepInputs
from trainvitals.policy.evidence import Ask, ProbeResult
from trainvitals.policy.state import DeviceRule
from trainvitals.records import (
    AttemptStarted,
    ChangeExpected,
    CheckpointChanged,
    DecisionMade,
    Event,
    FindingRaised,
    StepRecord,
)
from vitals_collector.storage.store import Store

SAVED, KNOWN_AFTER = 40, 50
"""The step of the only checkpoint, and the one after which it is known to be healthy."""


def damaged(ask: Ask) -> ProbeResult:
    return ProbeResult(num_batches=8, then=2.0, now=18.0, detail=f"before {ask.onset_step}")


def silent(ask: Ask) -> ProbeResult:
    return ProbeResult(num_batches=0, then=math.nan, now=math.nan, detail="the probe is off")


class Live:
    """A run of rank 0, as the hooks make it: it judges a step late, and writes all down."""

    def __init__(self, place: Place, mode: Mode = "heal", *, lag: int = 1, probe=damaged) -> None:
        self.said: list[tuple[StepRecord, Judgement]] = []
        self._judge, self._device, self._probe = Judge(mode=mode), DeviceRule(), probe
        self._place, self._writer, self._lag = place, Writer(), lag
        self._rng = random.Random(0)
        self._step, self._attempt, self._expecting = 0, 1, 0
        self._waiting: deque[tuple[StepRecord, dict, int]] = deque()
        self._state: dict | None = None
        self._send(started(mode, lag))
        self._send(AttemptStarted(id=1, parent=None, fork_step=0, reason="start"))

    def _send(self, *events: Event, step: int = 0) -> None:
        self._place.send(self._writer.events(*events, step=step, attempt=self._attempt))

    def expect(self, steps: int) -> None:
        self._expecting = steps
        self._send(ChangeExpected(reason="longer context", steps=steps), step=self._step)

    def train(self, to: int, loss: float = 2.0, **brought) -> None:
        """Train up to a step or a rollback; what is brought travels with the first of these."""
        attempt = self._attempt
        while self._step < to and self._attempt == attempt:
            usual = 3.0 if self._step < 20 else loss  # progress that an outlier is measured by
            self._one(usual * math.exp(self._rng.gauss(0.0, 0.02)), brought)
            brought = {}

    def _one(self, loss: float, brought: dict) -> None:
        if (self._attempt, self._step) == (1, SAVED):
            self._state = self._judge.detector_state()
        limits = Limits() if self._expecting else self._judge.limits()
        row = self._judge.max_row()
        record = StepRecord(step=self._step, attempt=self._attempt, loss=loss, clips=True)
        record, self._device = self._device.judge(record, limits, row, acts=True)
        self._waiting.append((record, brought, self._expecting))
        self._step += 1
        while self._waiting and (len(self._waiting) > self._lag or self._judge.is_suspicious):
            self._judged(*self._waiting.popleft())

    def end(self) -> None:
        while self._waiting:
            self._judged(*self._waiting.popleft())

    def _judged(self, record: StepRecord, brought: dict, expected: int) -> None:
        if expected and self._expecting:
            self._judge.rebaseline(expected)
            self._expecting = 0
        known = record.attempt > 1 or record.step > KNOWN_AFTER
        ref = CheckpointRef(id="c40", step=SAVED)
        judged = self._judge.judge(
            record,
            StepInputs(
                self._step - 1,
                checkpoints=[ref] if known else [],
                next_attempt=self._attempt + 1,
                probe=self._probe,
                **brought,
            ),
        )
        self.said.append((record, judged))
        self._write(record, judged)
        made = judged.decision
        if made is not None and made.action == "rollback":
            self._back(made.rollback_to_step)

    def _write(self, record: StepRecord, judged: Judgement) -> None:
        row = columns(record)
        self._place.send(self._writer.steps([record.step], attempt=record.attempt, **row))
        said: list[Event] = [FindingRaised(finding=finding) for finding in judged.findings]
        said += judged.readings
        if (record.attempt, record.step) == (1, KNOWN_AFTER):
            how = {"checkpoint_step": SAVED, "state": "healthy", "where": "memory"}
            said.append(CheckpointChanged(checkpoint_id="c40", **how))
        if judged.decision is not None:
            said.append(DecisionMade(decision=judged.decision))
        if said:
            self._send(*said, step=record.step)

    def _back(self, to: int) -> None:
        self._attempt += 1
        self._judge.rolled_back(detector_state=self._state, attempt=self._attempt, step=to)
        fork = AttemptStarted(id=self._attempt, parent=self._attempt - 1, fork_step=to, reason="x")
        self._step, self._device = to, DeviceRule()
        self._send(fork, step=to)


@pytest.fixture
def place(store: Store) -> Place:
    return Place(store)


def assert_reproduced(place: Place, live: Live) -> None:
    live.end()
    done = replayed(place)
    assert [] == done.differences()
    assert repr([record for record, _ in live.said]) == repr(list(done.records))
    for what in ("decision", "readings", "findings"):
        said = [getattr(judged, what) for _, judged in live.said]
        assert repr(said) == repr([getattr(judged, what) for judged in done.judgements]), what


def test_a_rollback_by_the_probe_an_accepted_step_and_evaluations_are_reproduced(place: Place):
    live = Live(place)
    live.train(60)
    live.train(80, evaluation=1.0)
    live.train(100, evaluation=0.9)
    live.train(103, 90.0)  # asked at the first, and back to step 40
    live.train(60)
    live.train(90, evaluation=1.0)
    live.train(91, 90.0)
    live.train(95)
    live.train(99, evaluation=3.0)  # in the cooldown: told
    live.train(103, command=Proposal(number=5, action="accept", argument=90.0))
    live.train(104, 80.0)  # passes
    live.train(180)
    live.train(183, 300.0)
    live.train(220)
    assert_reproduced(place, live)
    decisions = [j.decision for _, j in live.said if j.decision is not None]
    assert [
        ("rollback", "state_damaged"), ("skip_step", "outlier"),
        ("accept_level", "operator_accepted"), ("skip_step", "outlier"), ("skip_step", "outlier"),
    ] == [(d.action, d.rule) for d in decisions]  # fmt: skip
    readings = [(read.trigger, read.verdict) for _, j in live.said for read in j.readings]
    assert [
        ("evaluation", "sound"), ("evaluation", "sound"), ("spike", "state"),
        ("evaluation", "sound"), ("spike", "state"), ("evaluation", "state"), ("spike", "state"),
    ] == readings  # fmt: skip


def test_a_rollback_by_an_evaluation_is_reproduced(place: Place):
    live = Live(place, probe=None)
    live.train(70)
    live.train(90, evaluation=1.0)
    live.train(92, 30.0)
    live.train(100)
    live.train(101, evaluation=2.4)
    live.train(102)  # its answer comes a step late
    live.train(150)
    assert_reproduced(place, live)
    assert "evaluation" in [j.decision.rule for _, j in live.said if j.decision is not None]


def test_a_probe_that_could_not_say_is_replayed_as_one(place: Place):
    live = Live(place, probe=silent)
    live.train(100)
    live.train(108, 30.0)
    live.train(140)
    assert_reproduced(place, live)
    assert ["abstained"] == [read.verdict for _, j in live.said for read in j.readings]


@pytest.mark.parametrize("lag", [0, 1])
def test_an_announced_change_is_no_difference_although_the_run_had_no_limits_from_then_on(
    place: Place, lag: int
):
    live = Live(place, "guard", lag=lag)
    live.train(80)
    live.expect(6)
    live.train(150, 2.5)
    live.train(151, 4000.0)
    live.train(160, 2.5)
    assert_reproduced(place, live)
    limits = {record.step: record.loss_limit for record, _ in live.said}
    assert all(limits[step] is None for step in range(80, 86))
    assert ["skip_step"] == [j.decision.action for _, j in live.said if j.decision is not None]


def test_limits_that_are_there_while_a_change_is_expected_are_a_difference(place: Place):
    live = Live(place, "guard")
    live.train(80)
    live.expect(6)
    write = live._write
    live._write = lambda record, judged: write(
        replace(record, loss_limit=4.0) if record.step == 80 else record, judged
    )
    live.train(120, 60.0)
    live.end()
    assert ["limits differ from the recorded ones in 1 step, first at 80"] == replayed(
        place
    ).differences()
