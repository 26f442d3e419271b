"""A long run with two planted troubles, judged as it would be live, written as its ranks would.

The detectors and the ladder of ``trainvitals.policy`` decide over it, so that both rollbacks, the
limits and the reasons are real; what they decide about is planted:

- ``shard``: a damaged shard of data. The gradients of one layer grow first, then the gradient norm,
  at last one rank's loss, until the run goes back and on past those batches.
- ``gpu``: a GPU gets hot and slow, then its rank's gradients are NaN.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from trainvitals.catalog import GPU_SCHEMA, LAYERS_SCHEMA, steps_schema
from trainvitals.identity import Identity
from trainvitals.io.rundir import RunDir
from trainvitals.io.spool import Spool
from trainvitals.policy import CheckpointRef, Judge, JudgeConfig, StepInputs
from trainvitals.policy.evidence import Ask, ProbeResult
from trainvitals.policy.state import DeviceRule
from trainvitals.records import (
    BAD_GRADIENTS,
    EVENT_SCHEMA,
    LOSS_OUTLIER,
    NORM_OUTLIER,
    WITHHELD,
    AttemptStarted,
    BatchNoted,
    CheckpointChanged,
    Decision,
    DecisionMade,
    Event,
    FindingRaised,
    NamesDefined,
    RankStarted,
    RunEnded,
    RunInfo,
    RunStarted,
    StepRecord,
    encode_event,
)
from trainvitals.rows import Schema
from trainvitals.wire import BatchHeader, encode_batch

RUN = "01JD00000000000000000000QA"
NUM_RANKS = 4
LAYERS = tuple(f"blocks.{i}.{part}" for i in range(4) for part in ("attn", "mlp"))
SECOND = 1_000_000_000
BEGIN = 1_700_000_000 * SECOND
SAMPLES_PER_BATCH = 4
_BATCH_ROWS = 1_000
_AROUND = 500
"""Steps around a trouble of which every rank and every layer is there; else rank 0, each 100th."""
_HEALTHY_AFTER = 60
_COLUMNS = tuple(column.name for column in steps_schema().columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """What was planted, and so what the answers must be."""

    onset: int
    """The first step at which anything is other than usual."""
    bad: int
    """The first step that must not be applied; the next ones are bad too, until the rollback."""
    rank: int
    layer: str = ""
    gpu: str = ""

    def is_in(self, step: int) -> bool:
        return self.onset <= step < self.bad + 10


@dataclass(slots=True)
class Row:
    """One step as it was trained: its place in time, its record, and what the ladder made of it."""

    tick: int
    record: StepRecord
    losses: Sequence[float]


@dataclass
class LongRun:
    """Makes the run; ``batches`` gives it as agents would ship it."""

    num_steps: int
    rows: list[Row] = field(default_factory=list)
    events: list[tuple[int, int, int, Event]] = field(default_factory=list)
    """Tick, step, attempt and event, as rank 0 writes them."""
    ledger: list[Decision] = field(default_factory=list)

    def __post_init__(self) -> None:
        third = self.num_steps // 3
        self.shard = Trouble(onset=third - 30, bad=third, rank=2, layer="blocks.2.attn")
        self.gpu = Trouble(onset=2 * third - 20, bad=2 * third, rank=1, gpu="GPU-1")
        self.checkpoint_every = min(max(100, self.num_steps // 100), 1_000)
        self.config = JudgeConfig()
        _Training(self).run()

    @property
    def num_discarded(self) -> int:
        """Steps that were trained and then left behind."""
        return len(self.rows) - self.num_steps

    def learning_rate(self, step: int) -> float:
        """Return the schedule's value: a cosine from 3e-4 to a tenth of it."""
        return 3e-4 * (0.1 + 0.9 * (1 + float(np.cos(np.pi * step / self.num_steps))) / 2)

    def samples(self, step: int, rank: int) -> tuple[int, ...]:
        """Return which samples fed a step on a rank."""
        first = (step * NUM_RANKS + rank) * SAMPLES_PER_BATCH
        return tuple(range(first, first + SAMPLES_PER_BATCH))

    def batches(self) -> Iterator[bytes]:
        """Yield all that rank 0, then what the other ranks, then what the agent wrote."""
        return _Writing(self).batches()

    def write_into(self, folder: str) -> None:
        """Leave a run directory, as an agent without any server does."""
        spool = Spool(
            RunDir.create(folder, RUN).agent_dir("a") / "spool", max_bytes=1 << 30, keep=True
        )
        for raw in self.batches():
            spool.append(raw)
        spool.close()


class _Training:
    """Plays the loop: device, host, readback lag of one step, checkpoints, rollbacks."""

    def __init__(self, run: LongRun) -> None:
        self.run_ = run
        self.judge = Judge(run.config, "heal")
        self.attempt = 1
        self.tick = 0
        self.device = DeviceRule()
        self.refs: dict[str, CheckpointRef] = {}
        self.states: dict[int, Mapping[str, object]] = {}
        rng = np.random.default_rng(8)
        self.noise = rng.standard_normal((2, run.num_steps + 10 * run.checkpoint_every))

    def run(self) -> None:
        self.say(0, RunStarted(info=self.info()))
        self.say(0, AttemptStarted(id=1, parent=None, fork_step=0, reason="start"))
        self.say(0, NamesDefined(stream="layers", names=dict(enumerate(LAYERS))))
        self.say_checkpoint(0, 0, "healthy")
        step, waiting = 0, None
        while step < self.run_.num_steps:
            row = self.train(step)
            self.checkpoint(step)
            back = None if waiting is None else self.handle(waiting)
            waiting = row
            if back is None and self.judge.is_suspicious:
                back, waiting = self.handle(row), None
            if back is not None:
                step, waiting = self.go_back(back), None
            else:
                step += 1
        self.handle(waiting)
        self.say(step - 1, RunEnded(state="finished"))

    def info(self) -> RunInfo:
        judge = msgspec.to_builtins(self.run_.config)
        return RunInfo(name="long", mode="heal", world_size=NUM_RANKS, judge=judge, user="ada")

    def train(self, step: int) -> Row:
        """Take one step as the device does: bad ones are not applied."""
        a, b = self.noise[:, self.tick]
        loss, norm = 2.0 + 2.0 / (1.0 + step / 500.0) + 0.02 * a, 1.0 + 0.03 * b
        losses = [loss + 0.001 * rank for rank in range(NUM_RANKS)]
        shard, gpu = self.run_.shard, self.run_.gpu
        ranks: tuple[int, ...] = ()
        if self.attempt == 1 and shard.onset + 20 <= step:
            norm *= 1.6
        if self.attempt == 1 and shard.bad <= step:
            losses[shard.rank] += 2000.0
        if self.attempt == 2 and gpu.bad <= step:
            norm, ranks = float("nan"), (gpu.rank,)
        loss = float(np.mean(losses))
        record = StepRecord(
            step=step,
            attempt=self.attempt,
            loss=loss,
            loss_max=max(losses),
            loss_max_rank=int(np.argmax(losses)),
            grad_norm=norm,
            nonfinite_ranks=ranks,
            learning_rate=self.run_.learning_rate(step),
            clips=False,
        )
        record, self.device = self.device.judge(
            record, self.judge.limits(), self.judge.max_row(), acts=True
        )
        row = Row(self.tick, record, losses)
        self.run_.rows.append(row)
        self.tick += 1
        return row

    def checkpoint(self, step: int) -> None:
        every = self.run_.checkpoint_every
        if step and step % every == 0:
            self.say_checkpoint(step, step, "candidate")
        if step > every and step % every == _HEALTHY_AFTER:
            self.say_checkpoint(step - _HEALTHY_AFTER, step, "healthy")

    def say_checkpoint(self, of: int, step: int, state: str) -> None:
        name = f"step-{of:07d}"
        event = CheckpointChanged(
            checkpoint_id=name, checkpoint_step=of, state=state, where="disk", num_bytes=1 << 30
        )
        self.say(step, event)
        self.refs[name] = CheckpointRef(id=name, step=of, state=state, where="disk")

    def handle(self, row: Row) -> Decision | None:
        """Judge a step that was read back; return a rollback."""
        record = row.record
        waited = int(not self.judge.is_suspicious)
        if (record.step + 1) % self.run_.checkpoint_every == 0:
            self.states[record.step + 1] = self.judge.detector_state()
        said = self.judge.judge(
            record,
            StepInputs(
                record.step + waited,
                checkpoints=tuple(self.refs.values()),
                next_attempt=self.attempt + 1,
                probe=self.probe,
            ),
        )
        for reading in said.readings:
            self.say(record.step, reading)
        for finding in said.findings:
            self.say(record.step, FindingRaised(finding=finding))
        if said.decision is None:
            return None
        self.say(record.step, DecisionMade(decision=said.decision))
        self.run_.ledger.append(said.decision)
        return said.decision if said.decision.action == "rollback" else None

    def probe(self, ask: Ask) -> ProbeResult:
        """Answer as a probe does whose state is damaged: nine times the loss of before."""
        return ProbeResult(num_batches=8, then=2.2, now=19.8)

    def go_back(self, decision: Decision) -> int:
        target, parent = decision.rollback_to_step, self.attempt
        self.attempt += 1
        self.judge.rolled_back(detector_state=self.states.get(target), attempt=self.attempt)
        self.device = DeviceRule()
        event = AttemptStarted(id=self.attempt, parent=parent, fork_step=target, reason="rollback")
        self.say(target, event)
        return target

    def say(self, step: int, event: Event) -> None:
        self.run_.events.append((self.tick, step, self.attempt, event))


class _Writing:
    """Makes batches of rows of what was trained."""

    def __init__(self, run: LongRun) -> None:
        self.run = run
        self.near = [
            row
            for row in run.rows
            if any(abs(row.record.step - t.bad) <= _AROUND for t in (run.shard, run.gpu))
        ]

    def batches(self) -> Iterator[bytes]:
        yield from self.of_rank(0, self.run.rows)
        for rank in range(1, NUM_RANKS):
            yield from self.of_rank(rank, self.near)
        for i in range(NUM_RANKS):
            yield from self.of_gpu(i)

    def of_rank(self, rank: int, rows: Sequence[Row]) -> Iterator[bytes]:
        identity = _identity(f"rank:{rank}", rank)
        started = RankStarted(
            rank=rank,
            local_rank=rank,
            world_size=NUM_RANKS,
            pid=100 + rank,
            node="node-a",
            gpu_uuid=f"GPU-{rank}",
        )
        noted = [
            (row.tick, row.record.step, row.record.attempt, self.noted(row.record.step, rank))
            for row in self.near
            if row.record.skipped
        ]
        own = [(0, 0, 1, started), *noted, *(self.run.events if rank == 0 else ())]
        yield from _batches(identity, EVENT_SCHEMA, _event_rows(sorted(own, key=_when)))
        yield from _batches(identity, steps_schema(), (self.step_row(row, rank) for row in rows))
        if rank == 0:
            yield from _batches(identity, LAYERS_SCHEMA, self.layer_rows())

    def noted(self, step: int, rank: int) -> BatchNoted:
        ids = self.run.samples(step, rank)
        return BatchNoted(
            epoch=0, first_batch=step, num_batches=1, sample_ids=ids, num_samples=len(ids)
        )

    def step_row(self, row: Row, rank: int) -> list[object]:
        record = row.record
        values: dict[str, object] = {"rank_loss": row.losses[rank], "batch_index": record.step}
        slow = self.is_hot(record) and rank == self.run.gpu.rank
        values |= {"step_duration_seconds": 1.6 if slow else 1.0, "epoch": 0}
        if rank == 0:
            values |= {
                "loss": record.loss,
                "loss_max": record.loss_max,
                "loss_max_rank": record.loss_max_rank,
                "grad_norm": record.grad_norm,
                "loss_limit": record.loss_limit,
                "grad_norm_limit": record.grad_norm_limit,
                "learning_rate": record.learning_rate,
                "verdict": _verdict(record),
                "skipped": int(record.skipped),
                "culprit_rank": self.culprit(record),
                "nonfinite_params": 0,
                "readback_lag": 1,
            }
        head = [record.step, record.attempt, BEGIN + row.tick * SECOND, row.tick * SECOND]
        return [*head, *(values.get(name) for name in _COLUMNS[4:])]

    def is_hot(self, record: StepRecord) -> bool:
        return record.attempt == 2 and record.step >= self.run.gpu.onset

    def culprit(self, record: StepRecord) -> int:
        if record.nonfinite_ranks:
            return record.nonfinite_ranks[0]
        return record.loss_max_rank if record.skipped else -1

    def layer_rows(self) -> Iterator[list[object]]:
        near = {row.tick for row in self.near}
        shard = self.run.shard
        for row in self.run.rows:
            record = row.record
            if row.tick not in near and record.step % 100:
                continue
            for i, name in enumerate(LAYERS):
                norm = 0.3 + 0.01 * i + 0.01 * np.sin(row.tick * (i + 1))
                if record.attempt == 1 and name == shard.layer and record.step >= shard.onset:
                    norm *= 2.0 + 0.2 * (record.step - shard.onset)
                times = [BEGIN + row.tick * SECOND, row.tick * SECOND]
                yield [record.step, record.attempt, *times, i, float(norm), *[None] * 7]

    def of_gpu(self, i: int) -> Iterator[bytes]:
        hot = {row.tick for row in self.near if self.is_hot(row.record)}
        near = {row.tick for row in self.near}
        ticks = [row.tick for row in self.run.rows if row.tick in near or row.tick % 100 == 0]
        identity = _identity(f"gpu:GPU-{i}", -1)
        rows = (self.gpu_row(tick, i == self.run.gpu.rank and tick in hot) for tick in ticks)
        yield from _batches(identity, GPU_SCHEMA, rows)

    def gpu_row(self, tick: int, is_hot: bool) -> list[object]:
        values: dict[str, object] = {
            "utilization_ratio": 0.97,
            "temperature_celsius": 94.0 if is_hot else 61.0 + tick % 3,
            "power_watts": 310.0 if is_hot else 640.0,
            "sm_clock_hertz": 0.9e9 if is_hot else 1.7e9,
            "throttle_reasons": 0x40 if is_hot else 0,
        }
        names = (column.name for column in GPU_SCHEMA.columns[4:])
        return [-1, 0, BEGIN + tick * SECOND, tick * SECOND, *(values.get(n) for n in names)]


def _verdict(record: StepRecord) -> int:
    if record.nonfinite_ranks:
        return BAD_GRADIENTS
    bits = LOSS_OUTLIER * _is_above(record.loss, record.loss_limit) | WITHHELD * record.withheld
    return bits | NORM_OUTLIER * _is_above(record.grad_norm, record.grad_norm_limit)


def _is_above(value: float | None, limit: float | None) -> bool:
    return value is not None and limit is not None and value > limit


def _identity(source: str, rank: int) -> Identity:
    return Identity(
        run_id=RUN,
        incarnation=f"{abs(rank) * 16 + sum(map(ord, source)):016x}",
        source=source,
        node="node-a",
        pid=100 + rank,
        rank=rank,
        local_rank=rank,
        world_size=NUM_RANKS,
        started_unix_ns=BEGIN,
    )


def _when(entry: tuple[int, int, int, Event]) -> int:
    return entry[0]


def _event_rows(entries: Sequence[tuple[int, int, int, Event]]) -> Iterator[list[object]]:
    for tick, step, attempt, event in entries:
        times = {"time_unix_ns": BEGIN + tick * SECOND, "monotonic_ns": tick * SECOND}
        yield from encode_event(event, step=step, attempt=attempt, **times)


def _batches(identity: Identity, schema: Schema, rows: Iterator[list[object]]) -> Iterator[bytes]:
    first = 0
    while some := list(itertools.islice(rows, _BATCH_ROWS)):
        raw = b"".join(schema.pack(first + i, row) for i, row in enumerate(some))
        header = BatchHeader(
            identity=identity, stream_schema=schema, first_seq=first, num_rows=len(some)
        )
        yield encode_batch(header, raw)
        first += len(some)
