"""Judges a stored run again with the very code that judged it live, and compares the decisions.

The inputs are the reduced rows of rank 0 in the order they were written, the checkpoints that the
run announced, announced changes, results of the probe and of evaluations, accepted commands, and
the steps at which rank 0 found the policy of a post-training run lost. The outputs are findings and
decisions; the recorded ones are compared with them and never used as other input.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import numpy as np
from sqlalchemy import Connection, select

from trainvitals.catalog import TURN_METRICS
from trainvitals.detect.outliers import Limits
from trainvitals.errors import UsageError
from trainvitals.judged_log import JudgedStep, export_judged_steps
from trainvitals.policy import (
    CheckpointRef,
    Judge,
    JudgeConfig,
    Judgement,
    Mode,
    Proposal,
    StepInputs,
)
from trainvitals.policy.evidence import NO_READING, NONFINITE_GRADIENT, Ask, ProbeResult
from trainvitals.records import (
    BAD_GRADIENTS,
    BAD_LOSS,
    CHANGE_EXPECTED,
    CLIPS,
    COMMANDED,
    NO_GRADIENT,
    NONFINITE_STATE,
    OVERFLOW,
    RANK_FAILED,
    RATE_DECLARED,
    REPLAYED_ALIKE,
    REPLICAS_DIFFER,
    SETTINGS_DIFFER,
    SNAPSHOT_MISSED,
    WITHHELD,
    AttemptStarted,
    ChangeExpected,
    CheckpointChanged,
    Decision,
    DecisionMade,
    Event,
    Finding,
    FindingRaised,
    RunStarted,
    StateRead,
    StepRecord,
)
from trainvitals.rows import Value
from trainvitals.units import humanize_count
from vitals_collector.ingest.tail_loss import num_lost_rows
from vitals_collector.numbers.interface import NumberStoreReader, RowSpan, StreamKey
from vitals_collector.queries.ledger import iter_rows
from vitals_collector.queries.series import exclusive_end
from vitals_collector.storage.schema import events, names, sources, streams
from vitals_collector.storage.store import ReadSnapshot, Store

COMPARED = (
    "action", "step", "attempt", "rule", "cause", "rank", "value", "acted", "checkpoint_id",
    "rollback_to_step", "skip_batches", "lr_factor", "command_number",
)  # fmt: skip
"""Fields that define equal decisions; reasons and budgets follow from these."""

_KINDS = (
    "RunStarted", "AttemptStarted", "CheckpointChanged", "ChangeExpected", "DecisionMade",
    "StateRead",
)  # fmt: skip

_READ = (
    "step", "attempt", "verdict", "culprit_rank", "skipped", "nonfinite_params", "lr_factor",
    "learning_rate", "loss", "loss_max", "loss_max_rank", "loss_limit", "grad_norm",
    "grad_norm_limit",
)  # fmt: skip
"""Columns of rank 0's rows in a record."""
_ROWS_AT_ONCE = 65_536

_decode_event = msgspec.msgpack.Decoder(Event).decode


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Results of a replay, and the recorded decisions."""

    records: tuple[StepRecord, ...]
    judgements: tuple[Judgement, ...]
    """One per record, in the same order."""
    recorded: tuple[Decision, ...]
    num_lost_rows: int
    """Rows of rank 0 that never arrived: a replay without them may differ."""
    num_thinned_rows: int
    """Rolled-up rows of other ranks: if only these identified a rank, the replay cannot name it."""
    thinned_to_step: int
    """Last step with a rolled-up row; -1 for none."""
    other_limits: tuple[int, ...]
    """Steps whose recorded limits differ from those that the replayed detectors had computed."""

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """Return the decisions of the replay of a stored run, in order."""
        return tuple(j.decision for j in self.judgements if j.decision is not None)

    def differences(self) -> list[str]:
        """Return how the replay differs from the record, as lines; none if it was reproduced."""
        replayed, theirs = self.decisions, self.recorded
        differences = [
            difference
            for number, (a, b) in enumerate(zip(replayed, theirs, strict=False), start=1)
            if (difference := _difference_text(number, a, b))
        ]
        if self.other_limits:
            num, first = len(self.other_limits), self.other_limits[0]
            differences.append(
                f"limits differ from the recorded ones in {humanize_count(num, 'step')}, first at "
                f"{first}"
            )
        if len(replayed) != len(theirs):
            differences.append(
                f"{humanize_count(len(replayed), 'decision')} replayed, {len(theirs)} recorded"
            )
        return differences

    def document(self) -> dict[str, Any]:
        """Return the replay as JSON values: findings and decisions, each with its row.

        Includes the numbers of missing rows.
        """
        missing = {
            "lost_rows": self.num_lost_rows,
            "thinned_rows": self.num_thinned_rows,
            "thinned_to_step": self.thinned_to_step,
        }
        return {**export_judged_steps(self.judged()), "missing": missing}

    def missing(self) -> list[str]:
        """Return a line for each kind of stored rows that the replay lacks."""
        texts = []
        if self.num_lost_rows:
            lost = f"lost {humanize_count(self.num_lost_rows, 'row')} of rank 0"
            texts.append(f"{lost}: the replay may differ without them")
        if self.num_thinned_rows:
            thinned = f"thinned {humanize_count(self.num_thinned_rows, 'row')} of other ranks"
            texts.append(
                f"{thinned}, to step {self.thinned_to_step}: where only these rows identified the "
                "rank, the replay cannot name it"
            )
        return texts

    def judged(self) -> list[JudgedStep]:
        """Return each replayed record with its findings and decision; its row is its index."""
        pairs = enumerate(zip(self.records, self.judgements, strict=True))
        return [JudgedStep(row, record, judgement) for row, (record, judgement) in pairs]


def replay(store: Store, run_id: str, *, config: JudgeConfig | None = None) -> Replay:
    """Replay a stored run: judge it again, with the same code and, unless given, settings.

    Raises:
        UsageError: no step of rank 0 is stored for the run.
    """
    with store.read_transaction() as connection:
        starts = _incarnations(connection, run_id)
        pages = [_read_incarnation(connection, run_id, start) for start in starts]
        records = [
            list(_iter_step_records(store.snapshot_on(connection), run_id, start))
            for start in starts
        ]
        lost = sum(_count_lost_rows(connection, run_id, start) for start in starts)
        thinned = [part for part in store.numbers.deleted_rows(run_id) if part.stream == "steps"]
    if not any(records):
        raise UsageError(
            f"no step of rank 0 of run {run_id} is stored; there is nothing to replay",
            hint="`vitals runs` lists the runs there are",
        )
    replayer = _Replayer(config, pages)
    for incarnation, rows in enumerate(records):
        replayer.start_incarnation(incarnation)
        for record in rows:
            replayer.replay_step(record)
        replayer.judge_remaining_steps()
    return Replay(
        records=tuple(record for rows in records for record in rows),
        judgements=tuple(replayer.judgements),
        recorded=tuple(replayer.recorded),
        num_lost_rows=lost,
        num_thinned_rows=sum(part.num_rows for part in thinned),
        thinned_to_step=max((part.to_step for part in thinned), default=-1),
        other_limits=tuple(replayer.other_limits),
    )


# ------------------------------------------------------------------------------------ judging


@dataclass(frozen=True, slots=True)
class _LoggedEvent:
    """An event with the columns of its row that matter here."""

    step: int
    attempt: int
    event: Event


@dataclass(slots=True)
class _SavedDetectors:
    """A checkpoint's share of the detectors' memory."""

    attempt: int
    step: int
    state: dict[str, Any] | None = None


def _recorded_config(started: RunStarted | None) -> JudgeConfig | None:
    """Return the settings with which a replayed run was judged; None: the defaults."""
    if started is None or not started.info.judge:
        return None
    return msgspec.convert(started.info.judge, JudgeConfig)


class _Replayer:
    """Feeds one judge in the order in which the run fed its judge."""

    def __init__(self, config: JudgeConfig | None, pages: Sequence[list[_LoggedEvent]]) -> None:
        self._config = config
        self._pages = pages
        self._judge: Judge | None = None
        self._pending: list[_LoggedEvent] = []
        self._lag = 1
        self._refs: dict[tuple[str, str], CheckpointRef] = {}
        self._saved: list[_SavedDetectors] = []
        every = [entry for page in pages for entry in page]
        recorded_decisions = [e.event.decision for e in every if isinstance(e.event, DecisionMade)]
        # An event of the agent about processes: the escalation policy does not reproduce it.
        self.recorded = [
            decision for decision in recorded_decisions if decision.action != "restart"
        ]
        self.judgements: list[Judgement] = []
        self.other_limits: list[int] = []
        self._waiting: deque[StepRecord] = deque()
        self._knows_limits = False
        self._commands = {
            (d.attempt, d.step): _proposal(d) for d in self.recorded if d.command_number
        }
        self._collapses = {
            (d.attempt, d.step): _collapse(d) for d in self.recorded if d.rule == "post_training"
        }
        self._writes = {
            (e.attempt, e.step): e.event.finding
            for e in every
            if isinstance(e.event, FindingRaised) and e.event.finding.detector == "weights"
        }
        self._readings = {
            (e.attempt, e.step, e.event.trigger): e.event
            for e in every
            if isinstance(e.event, StateRead)
        }
        self._has_probe = any(trigger != "evaluation" for _, _, trigger in self._readings)
        self._attempts = {e.event.id: e.event for e in every if isinstance(e.event, AttemptStarted)}
        announced = ((e, e.event) for e in every if isinstance(e.event, CheckpointChanged))
        for entry, event in announced:
            saved = _SavedDetectors(entry.attempt, event.checkpoint_step)
            if all((s.attempt, s.step) != (saved.attempt, saved.step) for s in self._saved):
                self._saved.append(saved)

    def start_incarnation(self, incarnation: int) -> None:
        """Continue the replay at the next start of rank 0: mode and lag may change."""
        self._pending = list(self._pages[incarnation])
        started = next((e.event for e in self._pending if isinstance(e.event, RunStarted)), None)
        mode: Mode = cast(Mode, started.info.mode) if started else "guard"
        self._lag = started.info.readback_lag if started else 1
        facts = self._judge.facts if self._judge else None
        if facts is not None and facts.halted:
            facts = msgspec.structs.replace(facts, halted="")  # it was restarted: resumed
        recorded = _recorded_config(started)
        config = self._config or recorded
        if config is not None and recorded is not None:
            # With other settings, the kind of loss is still the one that the run declared.
            config = msgspec.structs.replace(config, loss_kind=recorded.loss_kind)
        self._judge = Judge(config, mode, facts=facts)
        self._knows_limits = False

    def replay_step(self, record: StepRecord) -> None:
        """Replay one stored step, and judge those whose values are read back by then.

        Values arrive ``lag`` steps late, but immediately during consecutive outliers.
        """
        judge = self._judge
        assert judge is not None, "begin comes first"
        if record.attempt != judge.attempt and judge.attempt:
            self.judge_remaining_steps()
            self._start_attempt(judge, record)
        for saved in self._saved:
            # A snapshot before a step contains the state at the start of that step.
            is_due = saved.attempt == record.attempt and record.step >= saved.step
            if is_due and saved.state is None:
                saved.state = judge.detector_state()
        self._compare_limits(judge, record)
        self._waiting.append(record)
        while len(self._waiting) > self._lag or (self._waiting and judge.is_suspicious):
            self._judge_next(judge, now_step=record.step)

    def judge_remaining_steps(self) -> None:
        """Judge the steps of the replay whose values were not yet read back."""
        judge = self._judge
        assert judge is not None, "begin comes first"
        while self._waiting:
            self._judge_next(judge, now_step=self._waiting[-1].step)

    def _judge_next(self, judge: Judge, *, now_step: int) -> None:
        """Judge the oldest waiting step of the replay, with its recorded inputs."""
        record = self._waiting.popleft()
        self._apply_events(judge, record)
        attempt_and_step = (record.attempt, record.step)
        evaluation = self._readings.get((*attempt_and_step, "evaluation"))
        child = (a.id for a in self._attempts.values() if a.parent == record.attempt)
        self.judgements.append(
            judge.judge(
                record,
                StepInputs(
                    now_step,
                    checkpoints=tuple(self._refs.values()),
                    command=self._commands.get(attempt_and_step),
                    next_attempt=min(child, default=record.attempt + 1),
                    probe=self._recorded_probe_result(record.attempt) if self._has_probe else None,
                    evaluation=None if evaluation is None else evaluation.ratio,
                    written=self._writes.get(attempt_and_step),
                    collapse=self._collapses.get(attempt_and_step),
                ),
            )
        )
        self._knows_limits = True

    def _recorded_probe_result(self, attempt: int) -> Callable[[Ask], ProbeResult]:
        """Return a function that returns recorded probe results to the replayed judge."""

        def answer(ask: Ask) -> ProbeResult:
            read = self._readings.get((attempt, ask.step, ask.trigger))
            if read is None or read.now is None:
                return NO_READING
            return ProbeResult(
                num_batches=read.num_batches,
                then=math.nan if read.then is None else read.then,
                now=read.now,
                detail=read.detail,
                has_gradient=not read.detail.startswith(NONFINITE_GRADIENT),
            )

        return answer

    def _compare_limits(self, judge: Judge, record: StepRecord) -> None:
        """Compare the replay's limits with the recorded ones: they depend on all earlier values."""
        replayed_limits = Limits() if self._is_expecting(record) else judge.limits(record.turn)
        theirs = Limits(record.loss_limit, record.grad_norm_limit)
        if self._knows_limits and record.attempt == judge.attempt and replayed_limits != theirs:
            self.other_limits.append(record.step)

    def _is_expecting(self, record: StepRecord) -> bool:
        """Return whether the replayed run had announced a change that is not yet judged.

        Rank 0 has no limits after its announcement.
        """
        attempt_and_step = (record.attempt, record.step)
        return any(
            isinstance(entry.event, ChangeExpected)
            and (entry.attempt, entry.step) <= attempt_and_step
            for entry in self._pending
        )

    def _start_attempt(self, judge: Judge, record: StepRecord) -> None:
        """Start a new attempt of the replay, with the detectors of the restored checkpoint."""
        attempt = self._attempts.get(record.attempt)
        fork, parent = (attempt.fork_step, attempt.parent) if attempt else (record.step, None)
        states = [s for s in self._saved if s.step == fork and s.state is not None]
        parent_states = [s for s in states if s.attempt == parent]
        state = (parent_states or states or [_SavedDetectors(0, 0)])[-1].state
        judge.rolled_back(detector_state=state, attempt=record.attempt, step=fork)
        self._knows_limits = False

    def _apply_events(self, judge: Judge, record: StepRecord) -> None:
        """Apply the recorded events that the run knew when it judged the replayed step."""
        while self._pending and self._is_known(self._pending[0], record):
            event = self._pending.pop(0).event
            if isinstance(event, ChangeExpected):
                judge.rebaseline(event.steps)
            elif isinstance(event, CheckpointChanged):
                self._refs[event.checkpoint_id, event.where] = CheckpointRef(
                    id=event.checkpoint_id,
                    step=event.checkpoint_step,
                    state=event.state,
                    where=event.where,
                )

    def _is_known(self, entry: _LoggedEvent, record: StepRecord) -> bool:
        """Return whether the replayed run knew the event when it judged the record."""
        if entry.attempt != record.attempt:
            return entry.attempt < record.attempt  # ids of attempts grow with time
        if isinstance(entry.event, ChangeExpected):
            return record.step >= entry.step  # the step's reduce vector brings it to all ranks
        if isinstance(entry.event, CheckpointChanged):
            return entry.step < record.step or entry.event.checkpoint_step >= entry.step
        return entry.step <= record.step


def _proposal(decision: Decision) -> Proposal:
    """Return the operator's command that a recorded decision carried out, for the replay."""
    is_rollback = decision.action == "rollback"
    if decision.action == "accept_level":
        step = decision.evidence.get("accepted_step", float(decision.step))
        return Proposal(number=decision.command_number, action="accept", argument=step)
    if is_rollback and decision.rule != "command":  # it waited for this approval
        return Proposal(number=decision.command_number, action="approve")
    return Proposal(
        number=decision.command_number,
        action="rollback" if is_rollback else "halt",
        argument=float(decision.rollback_to_step) if is_rollback else 0.0,
        checkpoint_id=decision.checkpoint_id,
    )


def _collapse(decision: Decision) -> Finding:
    """Return the finding that led to a recorded halt by ``on_collapse="stop"``, for the replay."""
    return Finding(
        kind=decision.cause,
        level="advisory",
        step=decision.step,
        detector=decision.cause,
        reason=decision.reason.partition(" (on_collapse=")[0],
        value=decision.value,
        limit=decision.limit,
        onset_step=decision.step,
        cause=decision.cause,
    )


def _difference_text(number: int, replayed: Decision, theirs: Decision) -> str:
    """Describe how a replayed decision differs from the recorded one; "" if equal."""
    parts = [
        f"{name} {getattr(replayed, name)!r} instead of {getattr(theirs, name)!r}"
        for name in COMPARED
        if not _is_same_value(getattr(replayed, name), getattr(theirs, name))
    ]
    return f"decision {number} (step {theirs.step}): {', '.join(parts)}" if parts else ""


def _is_same_value(a: object, b: object) -> bool:
    """Return whether replayed and recorded values are equal; NaN equals NaN."""
    both_nan = isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b)
    return both_nan or a == b


# ------------------------------------------------------------------------------------ reading


def _incarnations(connection: Connection, run_id: str) -> list[str]:
    """Return the starts of rank 0 in the stored run that is replayed, oldest first."""
    query = (
        select(sources.c.incarnation)
        .where(sources.c.run_id == run_id, sources.c.source == "rank:0")
        .order_by(sources.c.started_unix_ns, sources.c.incarnation)
    )
    return list(connection.execute(query).scalars())


def _count_lost_rows(connection: Connection, run_id: str, incarnation: str) -> int:
    """Count the rows of rank 0 that the replay of a stored run lacks."""
    query = select(num_lost_rows()).where(
        streams.c.run_id == run_id,
        streams.c.incarnation == incarnation,
        streams.c.stream.in_(("steps", "events")),
    )
    return sum(connection.execute(query).scalars())


def _read_incarnation(connection: Connection, run_id: str, incarnation: str) -> list[_LoggedEvent]:
    """Read the stored events of one start of rank 0 that the replay needs."""
    query = (
        select(events.c.step, events.c.attempt, events.c.body)
        .where(
            events.c.run_id == run_id,
            events.c.incarnation == incarnation,
            events.c.kind.in_(_KINDS),
        )
        .order_by(events.c.seq)
    )
    event_rows = connection.execute(query)
    return [_LoggedEvent(step, at, _decode_event(body)) for step, at, body in event_rows if body]


def _iter_step_records(moment: ReadSnapshot, run_id: str, incarnation: str) -> Iterator[StepRecord]:
    """Yield the stored steps of one start of rank 0 as records to replay."""
    turns = _load_optimizer_steps(moment, run_id, incarnation)
    for row in _iter_stream_rows(moment, (run_id, incarnation, "steps"), _READ):
        yield step_record(moment.numbers, run_id, row, turns)


def _iter_stream_rows(
    moment: ReadSnapshot, key: StreamKey, names: Sequence[str]
) -> Iterator[dict[str, Value]]:
    """Yield a writer's stored rows in the order they were written, for the replay."""
    run_id, incarnation, stream = key
    query = select(streams.c.last_seq).where(
        streams.c.run_id == run_id,
        streams.c.incarnation == incarnation,
        streams.c.stream == stream,
    )
    for low in range(0, (moment.sql.execute(query).scalar() or 0) + 1, _ROWS_AT_ONCE):
        span = RowSpan(run_id, stream, seqs={incarnation: (low, low + _ROWS_AT_ONCE)})
        columns = moment.numbers.scan(span, [*names, "seq"])
        order = np.argsort(columns.pop("seq").values)
        yield from iter_rows({name: column.take(order) for name, column in columns.items()})


@dataclass(frozen=True, slots=True)
class _RankValues:
    """Values from the ranks' rows that complete the reduced row, which names no rank."""

    nonfinite: tuple[int, ...] = ()
    failed: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _OptimizerValues:
    """Values of an optimizer in a step that moved only it."""

    turn: int
    numbers: dict[str, float]


_Turns = Mapping[tuple[int, int], _OptimizerValues]
"""Keyed by (step, attempt)."""


def _load_optimizer_steps(moment: ReadSnapshot, run_id: str, incarnation: str) -> _Turns:
    """Load the steps made by one of several optimizers, which the replay judges as such.

    The run's main columns belong to the first optimizer: the steps that fill them identify it. The
    others are judged alike, in any order.
    """
    query = select(names.c.id, names.c.name).where(
        names.c.run_id == run_id,
        names.c.incarnation == incarnation,
        names.c.stream == "scalars",
    )
    of_turns = {
        key: (metric, turn)
        for key, name in moment.sql.execute(query)
        for metric, _, turn in [name.partition("/")]
        if turn and metric in TURN_METRICS
    }
    turns = sorted({turn for metric, turn in of_turns.values() if metric == "skipped"})
    if not turns:
        return {}
    number = {turn: 2 + i for i, turn in enumerate(turns)}
    turn_rows: dict[tuple[int, int], _OptimizerValues] = {}
    columns = ("step", "attempt", "name", "value")
    for row in _iter_stream_rows(moment, (run_id, incarnation, "scalars"), columns):
        metric, turn = of_turns.get(_int_or_default(row, "name", -1), ("", ""))
        value = _float_or_none(row, "value")
        if turn in number and value is not None:
            step_and_attempt = _int_or_default(row, "step", 0), _int_or_default(row, "attempt", 0)
            entry = turn_rows.setdefault(step_and_attempt, _OptimizerValues(number[turn], {}))
            entry.numbers[metric] = value
    return turn_rows


def step_record(
    numbers: NumberStoreReader, run_id: str, row: dict[str, Value], turns: _Turns | None = None
) -> StepRecord:
    """Rebuild, for the replay, a step as the run's detectors got it, from stored rows."""
    step, attempt = _int_or_default(row, "step", 0), _int_or_default(row, "attempt", 0)
    bits, culprit = _int_or_default(row, "verdict", 0), _int_or_default(row, "culprit_rank", -1)
    is_bad = bool(bits & (BAD_LOSS | BAD_GRADIENTS))
    ranks = _RankValues(nonfinite=(culprit,) if is_bad and culprit >= 0 else ())
    if (is_bad and culprit < 0) or bits & RANK_FAILED:
        own_ranks = _read_rank_values(numbers, run_id, step, attempt)
        ranks = _RankValues(
            nonfinite=ranks.nonfinite or (own_ranks.nonfinite if is_bad else ()),
            failed=own_ranks.failed if bits & RANK_FAILED else (),
        )
    differs = 0 if bits & NONFINITE_STATE else REPLICAS_DIFFER | SETTINGS_DIFFER
    factor = _float_or_none(row, "lr_factor")
    turn_row = (turns or {}).get((step, attempt))
    if (
        turn_row is not None
        and _float_or_none(row, "grad_norm") is None
        and _float_or_none(row, "loss") is None
    ):
        own_numbers = {key: value for key, value in turn_row.numbers.items() if key != "skipped"}
        row = {**row, "learning_rate": None, "loss_max": own_numbers.get("loss"), **own_numbers}
        turn = turn_row.turn
    else:
        turn = 0 if turn_row is None else 1
    return StepRecord(
        step=step,
        attempt=attempt,
        loss=_float_or_none(row, "loss"),
        loss_max=_float_or_none(row, "loss_max"),
        loss_max_rank=_int_or_default(row, "loss_max_rank", -1),
        grad_norm=_float_or_none(row, "grad_norm"),
        loss_limit=_float_or_none(row, "loss_limit"),
        grad_norm_limit=_float_or_none(row, "grad_norm_limit"),
        nonfinite_ranks=ranks.nonfinite,
        failed_ranks=ranks.failed,
        nonfinite_params=_int_or_default(row, "nonfinite_params", 0),
        nonfinite_state=int(bool(bits & NONFINITE_STATE)),
        nonfinite_state_rank=culprit if bits & NONFINITE_STATE and not is_bad else -1,
        snapshots_missed=int(bool(bits & SNAPSHOT_MISSED)),
        replicas_differ=int(bool(bits & REPLICAS_DIFFER)),
        replica_rank=culprit if bits & differs and not is_bad else -1,
        settings_differ=bool(bits & SETTINGS_DIFFER),
        replayed_alike=bool(bits & REPLAYED_ALIKE),
        skipped=bool(_int_or_default(row, "skipped", 0)),
        withheld=bool(bits & WITHHELD),
        commanded=bool(bits & COMMANDED),
        overflow=bool(bits & OVERFLOW),
        learning_rate=_float_or_none(row, "learning_rate"),
        lr_factor=1.0 if factor is None else factor,
        rate_declared=bool(bits & RATE_DECLARED),
        change_expected=bool(bits & CHANGE_EXPECTED),
        clips=bool(bits & CLIPS),
        no_gradient=bool(bits & NO_GRADIENT),
        turn=turn,
    )


def _read_rank_values(
    numbers: NumberStoreReader, run_id: str, step: int, attempt: int
) -> _RankValues:
    """Read the ranks' stored losses of a step, which the replay merges into its record."""
    span = RowSpan(run_id, "steps", from_step=step, to_step=exclusive_end(step))
    rows = numbers.scan(span, ["rank", "attempt", "rank_loss"])
    losses: dict[int, float | None] = {}
    for i in np.flatnonzero(rows["attempt"].values == attempt).tolist():
        loss, is_missing = rows["rank_loss"].values[i], rows["rank_loss"].is_missing[i]
        losses[int(rows["rank"].values[i])] = None if is_missing else float(loss)
    return _RankValues(
        nonfinite=tuple(
            r for r, x in sorted(losses.items()) if x is not None and not math.isfinite(x)
        ),
        failed=tuple(r for r, x in sorted(losses.items()) if x is None),
    )


def _float_or_none(row: dict[str, Value], name: str) -> float | None:
    """Return a number of the replayed row; None if it is missing."""
    value = row.get(name)
    return float(value) if isinstance(value, int | float) else None


def _int_or_default(row: dict[str, Value], name: str, default: int) -> int:
    """Return a whole number of the replayed row, otherwise the default."""
    value = row.get(name)
    return int(value) if isinstance(value, int) else default
