"""A job that never ran: knows what each second truly was, and writes what a run would have written.

An independent oracle: it shares no line with ``trainvitals.goodput``. Time passes in pieces, each
with its bucket. Steps that are rolled back later are marked when that happens. The output is that
of ranks and agents: rows with jitter on their clocks, events, decisions.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from trainvitals.catalog import steps_schema
from trainvitals.identity import Identity, new_incarnation
from trainvitals.records import (
    EVENT_SCHEMA,
    AttemptStarted,
    Decision,
    DecisionMade,
    Event,
    Finding,
    FindingRaised,
    Note,
    RankStarted,
    RunEnded,
    RunInfo,
    RunStarted,
    TrainingPaused,
    encode_event,
)
from trainvitals.rows import Schema, Value
from trainvitals.wire import BatchHeader, encode_batch

SECOND = 1_000_000_000
_STEPS = steps_schema()
_JITTER_NS = 20_000
"""Between the reading of a duration and that of the wall clock."""
_EVERY_SAVE, _EVERY_EVALUATION = 50, 120


@dataclass(slots=True)
class _Writer:
    """One incarnation of a source."""

    identity: Identity
    rows: list[list[Value]] = field(default_factory=list)
    events: list[list[Value]] = field(default_factory=list)

    def say(self, event: Event, at: int, *, step: int, attempt: int) -> None:
        times = {"time_unix_ns": at, "monotonic_ns": at}
        self.events += encode_event(event, step=step, attempt=attempt, **times)

    def batches(self) -> Iterator[bytes]:
        for schema, rows in ((EVENT_SCHEMA, self.events), (_STEPS, self.rows)):
            for first in range(0, len(rows), 500):
                yield self._batch(schema, first, rows[first : first + 500])

    def _batch(self, schema: Schema, first: int, rows: list[list[Value]]) -> bytes:
        raw = b"".join(schema.pack(first + i, row) for i, row in enumerate(rows))
        header = BatchHeader(
            identity=self.identity, stream_schema=schema, first_seq=first, num_rows=len(rows)
        )
        return encode_batch(header, raw)


class SimulatedRun:
    """Plays a job of some ranks with random faults.

    Args:
        run_id: what it is called.
        seed: of its faults.
        num_steps: of the model that comes out of it.
    """

    def __init__(self, run_id: str, seed: int, *, num_steps: int = 1_500) -> None:
        self._random = random.Random(seed)
        self._run_id = run_id
        self.num_ranks = self._random.choice((1, 2, 4, 8))
        self._num_steps = num_steps
        self._pace = self._random.uniform(0.2, 2.0)
        self._now = 1_700_000_000 * SECOND
        self.truth: dict[str, float] = {}
        """Nanoseconds by bucket; whole numbers but for the shares of a mean rank."""
        self._begin = self._now
        self._writers: list[_Writer] = []
        self._agent = self._writer("node:a", -1)
        self._step, self._attempt = 0, 1
        self._saved = 0
        self._since_save: dict[int, dict[str, float]] = {}
        """Of each step that might be undone: what it would lose."""
        self._ledger = 0
        self.num_failures = 0
        self._play()

    @property
    def wall_ns(self) -> int:
        """From the first process to the last word."""
        return self._now - self._begin

    def batches(self) -> Iterator[bytes]:
        """Yield all that was written, as agents send it."""
        for writer in (*self._writers, self._agent):
            yield from writer.batches()

    # ------------------------------------------------------------------------------------- playing

    def _play(self) -> None:
        draw = self._random
        num_stops = draw.randrange(6)
        stops = sorted(draw.sample(range(30, self._num_steps - 30), num_stops))
        rollbacks = set(draw.sample(range(60, self._num_steps - 30), draw.randrange(4)))
        pauses = set(draw.sample(range(60, self._num_steps - 30), draw.randrange(3)))
        hangs = set(draw.sample(range(60, self._num_steps - 30), draw.randrange(3)))
        is_first = True
        for stop in (*stops, self._num_steps):
            how = "finished" if stop == self._num_steps else draw.choice(
                ("lost", "failed", "hang", "halted", "interrupted")
            )  # fmt: skip
            self._launch(is_first=is_first)
            is_first = False
            self._train(stop, rollbacks, pauses, hangs)
            self._stop(how)

    def _launch(self, *, is_first: bool) -> None:
        began = self._now
        self._pass("start" if is_first else "restart", self._random.uniform(5, 60))
        self._heads = [self._writer(f"rank:{rank}", rank) for rank in range(self.num_ranks)]
        self._writers += self._heads
        parent = None if is_first else self._attempt
        self._attempt = 1 if is_first else self._attempt + 1
        for rank, writer in enumerate(self._heads):
            started = RankStarted(
                rank=rank,
                local_rank=rank,
                world_size=self.num_ranks,
                pid=1,
                node="a",
                process_started_unix_ns=began,
            )
            writer.say(started, self._now, step=self._step, attempt=self._attempt)
        info = RunInfo(name="simulated", mode="heal", world_size=self.num_ranks)
        self._say(RunStarted(info=info))
        self._say(
            AttemptStarted(id=self._attempt, parent=parent, fork_step=self._step, reason="start")
        )
        self._is_new, self._is_timed = True, False

    def _train(self, stop: int, rollbacks: set[int], pauses: set[int], hangs: set[int]) -> None:
        draw = self._random
        bad = 0
        while self._step < stop:
            if self._step in pauses:
                pauses.discard(self._step)
                self._say(TrainingPaused(is_paused=True, reason="maintenance"))
                self._pass("halted", draw.uniform(30, 300))
                self._say(TrainingPaused(is_paused=False))
                self._is_timed = False
            bad = bad - 1 if bad else 3 * (draw.random() < 0.003)
            hung = self._step in hangs
            hangs.discard(self._step)
            self._one_step(is_skipped=bad > 0, hung=draw.uniform(60, 400) if hung else 0.0)
            if self._step in rollbacks and self._step - self._saved > 3:
                rollbacks.discard(self._step)
                self._roll_back()

    def _one_step(self, *, is_skipped: bool, hung: float) -> None:
        """Let one step pass, and have each rank write its row."""
        draw, num = self._random, self.num_ranks
        began, step = self._now, self._step
        saved = draw.uniform(0.5, 2) * self._pace if step and step % _EVERY_SAVE == 0 else 0.0
        evaluated = draw.uniform(10, 40) if step and step % _EVERY_EVALUATION == 0 else 0.0
        is_first, self._is_new = self._is_new, False
        compiled = draw.uniform(10, 120) if is_first else 0.0
        compute = self._pace * draw.uniform(0.97, 1.03)
        data = [self._pace * draw.expovariate(50) for _ in range(num)]
        if draw.random() < 0.01:
            data[draw.randrange(num)] += self._pace * draw.uniform(1, 20)
        late = [self._pace * draw.expovariate(100) for _ in range(num)]
        if draw.random() < 0.2:
            late[draw.randrange(num)] += self._pace * draw.uniform(0, 1)
        exchange = self._pace * draw.uniform(0.05, 0.15) if num > 1 else 0.0
        slowest = max(a + b for a, b in zip(data, late, strict=True))
        waits = [slowest - a - b for a, b in zip(data, late, strict=True)]
        self._pass("checkpoint", saved)
        self._pass("evaluation", evaluated)
        parts = {
            "data_wait": sum(data) / num,
            "straggler_wait": sum(waits) / num,
            "exchange": exchange,
            "productive": compute + sum(late) / num,
        }
        if hung:
            stood = self._now
            self._pass("hang", hung)
            self._tell_hang(stood)
            note = Note(code="wait_over", text="The wait is over")
            self._agent.say(note, self._now, step=step, attempt=self._attempt)
            self.num_failures += 1
        total = sum(parts.values())
        if is_skipped:
            # A first step may compile: where it is skipped too, that is what it lost.
            parts = {"skipped": total + compiled}
        else:
            parts["compile"] = compiled
        for bucket, part in parts.items():
            self._pass(bucket, part)
        self._since_save[step] = parts
        seconds = (self._now - began) / SECOND if self._is_timed else None
        self._is_timed = True
        for rank, writer in enumerate(self._heads):
            columns: dict[str, Value] = {
                "step_duration_seconds": seconds,
                "data_wait_seconds": data[rank],
                "checkpoint_seconds": saved or None,
                "evaluation_seconds": evaluated or None,
            }
            if num > 1:
                columns["gradient_wait_seconds"] = waits[rank] + 0.8 * exchange
                columns["communication_seconds"] = 0.2 * exchange
            if rank == 0:
                columns |= {"loss": 2.0, "skipped": int(is_skipped)}
            end = self._now + draw.randrange(_JITTER_NS)
            values = [columns.get(column.name) for column in _STEPS.columns[4:]]
            writer.rows.append([step, self._attempt, end, self._now, *values])
        if is_skipped:
            self._decide(action="skip_step", step=step, decided_at_step=step)
        self._step += 1
        if saved:
            self._saved = step
            self._since_save = {step: self._since_save[step]}

    def _tell_hang(self, stood: int) -> None:
        """Write what the agent says of a hang that has ended by now."""
        told = min(self._now, stood + 6 * SECOND)
        finding = Finding(
            kind="hang",
            level="advisory",
            step=self._step,
            detector="hang",
            reason="rank 0 is blocked",
            value=(told - stood) / SECOND,
            cause="hang_blocked",
        )
        raised = FindingRaised(finding=finding)
        self._agent.say(raised, told, step=self._step, attempt=self._attempt)

    def _roll_back(self) -> None:
        """Go back to the last save, in the same process."""
        decided, fork = self._step - 1, self._saved
        self._undo(fork)
        self._decide(
            action="rollback",
            step=decided,
            decided_at_step=decided,
            rollback_to_step=fork,
            new_attempt=self._attempt + 1,
        )
        self._pass("restart", self._random.uniform(1, 10))
        before, self._attempt = self._attempt, self._attempt + 1
        self._step = fork
        self._say(
            AttemptStarted(id=self._attempt, parent=before, fork_step=fork, reason="rollback")
        )
        self._is_timed = False

    def _stop(self, how: str) -> None:
        """End the processes, and let time pass until somebody starts them again."""
        draw = self._random
        if how == "finished":
            self._pass("unknown", draw.uniform(0, 5))
            self._say(RunEnded(state="finished"))
            return
        self.num_failures += how != "interrupted"
        if how == "hang":
            stood = self._now
            self._pass("hang", draw.uniform(60, 600))
            self._tell_hang(stood)
            self._say(RunEnded(state="interrupted", reason="SIGTERM"))
        elif how == "lost":
            pass  # killed between two steps, without a word
        else:
            self._pass("rolled_back", draw.uniform(0.0, 0.9) * self._pace)
            self._say(RunEnded(state="halted" if how == "halted" else how))  # type: ignore[arg-type]
        self._pass("halted" if how == "halted" else "down", draw.uniform(5, 900))
        self._undo(self._saved)
        self._step = self._saved

    def _undo(self, fork: int) -> None:
        """Mark the training since ``fork`` as rolled back."""
        for step in [step for step in self._since_save if step >= fork]:
            for bucket, seconds in self._since_save.pop(step).items():
                self.truth[bucket] -= seconds * SECOND
                self._add("rolled_back", seconds * SECOND)

    # ------------------------------------------------------------------------------------- writing

    def _pass(self, bucket: str, seconds: float) -> None:
        self._now += round(seconds * SECOND)
        self._add(bucket, seconds * SECOND)

    def _add(self, bucket: str, nanoseconds: float) -> None:
        self.truth[bucket] = self.truth.get(bucket, 0.0) + nanoseconds

    def _say(self, event: Event) -> None:
        self._heads[0].say(event, self._now, step=self._step, attempt=self._attempt)

    def _decide(self, **how: object) -> None:
        self._ledger += 1
        fields = {
            "ledger_seq": self._ledger,
            "attempt": self._attempt,
            "reason": "simulated",
            "rule": "nonfinite",
            "cause": "nonfinite_loss",
            **how,
        }
        self._say(DecisionMade(decision=Decision(**fields)))  # type: ignore[arg-type]

    def _writer(self, source: str, rank: int) -> _Writer:
        return _Writer(
            Identity(
                run_id=self._run_id,
                incarnation=new_incarnation(),
                source=source,
                node="a",
                pid=1,
                rank=rank,
                local_rank=rank,
                world_size=self.num_ranks,
                started_unix_ns=self._now,
                gpu_uuid=f"GPU-{rank}" if rank >= 0 else "",
            )
        )
