"""Follows one run: reads its new rows, merges them, and has the watchers look at them.

How far rows were read, what the watchers remember and what they told are stored in one
transaction. So a collector that died at any time goes on where it was: nothing is told twice, and
rows that were held while their step was not whole are read again.
"""

import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import Connection, select

from trainvitals.detect.fleet import FleetConfig, FleetDetectors
from trainvitals.detect.fleet.base import MergedStep, NodeSample
from trainvitals.records import Finding
from vitals_collector.live.nodes import NodeMerger, Round, host_rows
from vitals_collector.live.progress import state_name
from vitals_collector.live.recent_rows import Taken
from vitals_collector.live.step_join import BEFORE_ALL, MergeConfig, StepMerger, Writer
from vitals_collector.live.step_merge import (
    LAYER_COLUMNS,
    Key,
    LayerPart,
    Rows,
    decode,
    step_columns,
)
from vitals_collector.live.tail_reader import HOSTS, STEPS, RowBlock, TailReader
from vitals_collector.storage.schema import checkpoints, engine_state

_LOOK_NS = 30_000_000_000
"""How often the store is asked for rows that nobody told of: another process may write there."""
_SAVED_STATES = ("verified", "healthy", "retired")
_LOG = logging.getLogger("vitals.collector.watching")


class Progress(NamedTuple):
    """A finding, and where it belongs."""

    finding: Finding
    attempt: int
    time_unix_ns: int


class Saved(msgspec.Struct, kw_only=True):
    """What is kept of a run beside its findings."""

    done: dict[str, int] = {}
    """By ``incarnation/stream``: the sequence number up to which rows are done with."""
    merger: dict[str, Any] = {}
    watchers: dict[str, Any] = {}
    next_seq: int = 0
    """Number of the next finding."""
    checkpoint: Key = BEFORE_ALL
    """The newest checkpoint that the watchers were told of."""
    last: tuple[int, int, int] = (0, -1, 0)
    """Attempt, step and time of the newest merged step."""
    open: list[Finding] = []
    """What was told and still holds: a stalled step, a checkpoint that is overdue."""
    lasting: list[Finding] = []
    """What the watchers told as it began, and say goes on: a straggler, a fall of throughput."""


@dataclass(slots=True)
class FollowedRun:
    """One run that is followed. Call ``read``, then ``advance``, and store what that returns."""

    run_id: str
    saved: Saved
    watchers: FleetDetectors
    steps: StepMerger
    hosts: NodeMerger = field(default_factory=NodeMerger)
    heard_ns: int | None = None
    """When this process last saw a new step, or first looked; by the clock of ``advance``."""
    has_changed: bool = False
    """Whether anything was taken in since this was stored."""
    _fresh: TailReader = field(init=False)
    _looked_ns: int | None = None
    _saves: list[tuple[Key, int]] = field(default_factory=list)
    _num_unmerged: int = 0

    def __post_init__(self) -> None:
        self._fresh = TailReader(self.run_id, self.saved.done, self.steps.number_of)
        self._num_unmerged = self.steps.num_missing

    # -------------------------------------------------------------------------------- reading

    def take(self, taken: Taken, now_ns: int) -> int:
        """Take in rows that were just committed; return how many."""
        fresh = self._fresh
        # Where others are behind, rows that wait for them would be more and more.
        is_full = not fresh.is_read and self.steps.num_held > self.steps.most_held
        num = self._take_all(fresh.take(taken.batches, is_full=is_full), now_ns)
        self.steps.world_size = fresh.world_size
        self.has_changed = self.has_changed or num > 0
        return num

    def needs_store(self, taken: Taken, now_ns: int) -> bool:
        """Say whether ``read`` is to be called: not all that there is was taken."""
        return taken.has_more or not self.is_read or self._is_due(now_ns)

    def read(
        self, connection: Connection, budget: int, now_ns: int, *, has_more: bool = True
    ) -> int:
        """Read about ``budget`` rows that were not taken; return how many.

        Those that are behind are read first, so that a rank's rows which are stored are never
        taken for late.

        Args:
            connection: one moment of the store, after what was taken was committed.
            budget: how many to read from the store, about.
            now_ns: the clock of ``advance``.
            has_more: whether the store may have more than was ever taken.
        """
        fresh = self._fresh
        if has_more or self._is_due(now_ns):
            fresh.look(connection)
            self._looked_ns = now_ns
        self.steps.world_size = fresh.world_size
        num_read = 0
        while num_read < budget and (blocks := fresh.read(connection, STEPS, budget)):
            num_read += self._take_all(blocks, now_ns)
        # Hosts not before: they would be ahead of the steps they belong to.
        while (
            num_read < budget
            and not fresh.behind(("steps",))
            and (blocks := fresh.read(connection, HOSTS, budget))
        ):
            num_read += self._take_all(blocks, now_ns)
        self.has_changed = self.has_changed or num_read > 0
        self._saves = self._new_checkpoints(connection)
        return num_read

    def _is_due(self, now_ns: int) -> bool:
        return self._looked_ns is None or now_ns - self._looked_ns >= _LOOK_NS

    @property
    def is_read(self) -> bool:
        """Whether there was nothing more to read."""
        return self._fresh.is_read

    @property
    def is_drained(self) -> bool:
        """Whether nothing is left to read or to merge."""
        return self.is_read and self.steps.is_empty

    def _take_all(self, blocks: list[RowBlock], now_ns: int) -> int:
        for block in blocks:
            kind = block.streams[0].writer[1]
            if kind == "steps":
                self._take_steps(block, now_ns)
            elif kind == "layers":
                self._take_layers(block, now_ns)
            else:
                self._take_hosts(block)
        return sum(len(block.rows) for block in blocks)

    def _take_steps(self, block: RowBlock, now_ns: int) -> None:
        origin = block.origin
        for mine, is_rank0 in ((origin.rank == 0, True), (origin.rank > 0, False)):
            if mine.any():
                columns = step_columns(block.schema, is_rank0=is_rank0)
                own_origin = type(origin)(*(values[mine] for values in origin))
                rows: Rows = decode(block.schema, block.rows[mine], columns, own_origin)
                if rows.last() > self.steps.merged:
                    self.heard_ns = now_ns
                self.steps.add(rows, now_ns)

    def _take_layers(self, block: RowBlock, now_ns: int) -> None:
        origin, first = block.origin, 0
        columns = ["layer", *LAYER_COLUMNS]
        for stream, raw in block.by_stream():
            stream_origin = type(origin)(*(values[first : first + len(raw)] for values in origin))
            first += len(raw)
            names = self._fresh.names[stream.writer[0]]
            rows = decode(block.schema, raw, columns, stream_origin)
            self.steps.add_layers(LayerPart(names, rows), now_ns)

    def _take_hosts(self, block: RowBlock) -> None:
        for stream, raw in block.by_stream():
            uuid = stream.source.removeprefix("gpu:") if stream.writer[1] == "gpu" else ""
            rows = host_rows(block.schema, raw)
            self.hosts.add(stream.writer, stream.node, uuid, rows)

    def _new_checkpoints(self, connection: Connection) -> list[tuple[Key, int]]:
        table, (attempt, step) = checkpoints.c, self.saved.checkpoint
        query = select(table.attempt, table.step).where(
            table.run_id == self.run_id,
            table.place == "disk",
            table.state.in_(_SAVED_STATES),
            (table.attempt > attempt) | ((table.attempt == attempt) & (table.step > step)),
        )
        return [
            ((row.attempt, row.step), row.step)
            for row in connection.execute(query.order_by(table.attempt, table.step))
        ]

    # ------------------------------------------------------------------------------- watching

    def advance(self, now_ns: int, *, is_running: bool) -> list[Progress]:
        """Merge what was read, and return what the watchers tell of it."""
        if self.heard_ns is None:
            self.heard_ns = now_ns
        gate = min((stream.position for stream in self._fresh.behind(STEPS)), default=None)
        merged = self.steps.ready(now_ns, gate=gate)
        # Those of later steps stay where they are until these steps are here.
        rounds = deque(self.hosts.ready(self._host_gates()) if gate is None else ())
        records: list[Progress] = []
        for step in merged:
            self._save_until((step.attempt, step.step))
            while rounds and rounds[0].time_unix_ns <= step.time_unix_ns:
                records += self._sampled(rounds.popleft())
            records += self._stepped(step)
        if gate is None:
            self._save_until(self.steps.merged)
            for left in rounds:
                records += self._sampled(left)
        if is_running and self.is_drained:
            records += self._idle(now_ns)
        if merged or rounds or records:
            self._keep_lasting(records)
        self.has_changed = self.has_changed or bool(merged or records)
        return records

    def _keep_lasting(self, records: list[Progress]) -> None:
        """Keep the newest finding of each cause for as long as its watcher says it goes on."""
        kept = {(finding.kind, finding.cause): finding for finding in self.saved.lasting}
        kept |= {(record.finding.kind, record.finding.cause): record.finding for record in records}
        on = self.watchers.lasting() if kept else frozenset()
        self.saved.lasting = [finding for finding in kept.values() if finding.detector in on]

    def num_unmerged(self) -> int:
        """Return how many rows of ranks steps were merged without, since it was last asked."""
        before, self._num_unmerged = self._num_unmerged, self.steps.num_missing
        return self._num_unmerged - before

    def _host_gates(self) -> dict[str, int]:
        gates: dict[str, int] = {}
        for stream in self._fresh.behind(HOSTS):
            gates[stream.node] = min(stream.position[0], gates.get(stream.node, 2**63))
        return gates

    def _stepped(self, step: MergedStep) -> list[Progress]:
        findings = self.watchers.update(step)
        self.saved.last = (step.attempt, step.step, step.time_unix_ns)
        if self.saved.open:
            self._close("stalled")
        return self._told(findings, step.time_unix_ns) if findings else []

    def _sampled(self, host_round: Round) -> list[Progress]:
        sample = NodeSample(
            node=host_round.node,
            time_unix_ns=host_round.time_unix_ns,
            step=self.saved.last[1],
            gpus=host_round.gpus,
        )
        return self._told(self.watchers.update_node(sample), host_round.time_unix_ns)

    def _idle(self, now_ns: int) -> list[Progress]:
        """Ask how long nothing came: by this collector's clock, carried on from the run's own."""
        assert self.heard_ns is not None, "set by advance"
        at = self.saved.last[2] + max(0, now_ns - self.heard_ns)
        return self._told(self.watchers.idle(at), at)

    def _save_until(self, key: Key) -> None:
        """Tell the watchers of the checkpoints up to a step, in the order of the steps."""
        while self._saves and self._saves[0][0] <= key:
            self.saved.checkpoint, step = self._saves.pop(0)
            self.watchers.saved(step)
            self._close("checkpoint_overdue")
            self.has_changed = True

    def _told(self, findings: tuple[Finding, ...], time_unix_ns: int) -> list[Progress]:
        for finding in findings:
            if finding.kind in ("stalled", "checkpoint_overdue"):
                self._close(finding.kind)
                self.saved.open = [*self.saved.open, finding]
        return [Progress(finding, self.saved.last[0], time_unix_ns) for finding in findings]

    def _close(self, kind: str) -> None:
        self.saved.open = [finding for finding in self.saved.open if finding.kind != kind]

    # ------------------------------------------------------------------------- over restarts

    def state(self, num_told: int) -> bytes:
        """Return what to store, once ``num_told`` more findings are stored beside it."""
        done = self.saved.done | {
            "/".join(writer): seq for writer, seq in self._done().items() if seq >= 0
        }
        self.saved.done = done
        self.saved.merger = self.steps.state_dict()
        self.saved.watchers = self.watchers.state_dict()
        self.saved.next_seq += num_told
        return msgspec.msgpack.encode(self.saved)

    def _done(self) -> Mapping[Writer, int]:
        return {**self.steps.done(), **self.hosts.done()}


def open_run(
    connection: Connection,
    run_id: str,
    *,
    watch: FleetConfig | None = None,
    merge: MergeConfig | None = None,
) -> FollowedRun:
    """Return the run as it was stored, or from its beginning."""
    query = select(engine_state.c.body).where(engine_state.c.name == state_name(run_id))
    body = connection.execute(query).scalar()
    saved = Saved() if body is None else msgspec.msgpack.decode(body, type=Saved)
    watchers, steps = FleetDetectors(watch), StepMerger(merge or MergeConfig())
    if saved.merger:
        steps.load_state_dict(saved.merger)
    if saved.watchers:
        try:
            watchers.load_state_dict(saved.watchers)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            # Another version's memory: they learn anew, and what was told stays told.
            _LOG.warning("watchers_start_anew run=%s reason=%r", run_id, error)
            watchers = FleetDetectors(watch)
    return FollowedRun(run_id, saved, watchers, steps)


__all__ = ["FollowedRun", "Progress", "Saved", "open_run"]
