"""Follows one run: reads its new rows, merges them, and has the watchers look at them.

How far rows were read, what the watchers remember and what they told are stored in one
transaction. So a collector that died at any time goes on where it was: nothing is told twice, and
rows that were held while their step was not whole are read again.
"""

import heapq
import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import Connection, func, select

from trainvitals.catalog import GPU_METRICS, NODE_METRICS
from trainvitals.detect.merged import MergedStep, NodeSample, Value
from trainvitals.detect.watch import WatchConfig, WatchSet
from trainvitals.records import Finding
from trainvitals.rows import Schema, rows_of
from vitals_collector.gathering import (
    BEFORE_ALL,
    HostRow,
    MergeConfig,
    NodeMerger,
    Round,
    StepMerger,
    Writer,
)
from vitals_collector.merging import LAYER_COLUMNS, Key, LayerPart, Part, decode, step_columns
from vitals_collector.schema import batches, checkpoints, engine_state, names, sources, streams
from vitals_collector.stored import read_schema

_BATCHES_AT_ONCE = 16
_ROWS_AT_ONCE = 50_000
_STREAMS = ("steps", "layers", "node", "gpu")
_HOST_COLUMNS = frozenset(m.column for m in (*NODE_METRICS, *GPU_METRICS))
_MORE_COLUMNS = frozenset({"ecc_corrected_errors", "last_xid"})
"""Columns that newer agents may send, and watchers know."""
_SAVED_STATES = ("verified", "healthy", "retired")
_LOG = logging.getLogger("vitals.collector.watching")


class Told(NamedTuple):
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


@dataclass(slots=True)
class _Stream:
    """One writer's stream, how far it is read, and how far it is stored."""

    writer: Writer
    source: str
    node: str
    rank: int
    world_size: int
    read_seq: int
    last_seq: int = -1
    position: Key = BEFORE_ALL
    """Of steps and layers the key, of hosts the monotonic time, that rows were read to."""
    is_resumed: bool = True
    """The next rows may lie in a batch that was read in part, before a restart."""

    @property
    def is_unread(self) -> bool:
        return self.read_seq < self.last_seq


@dataclass(slots=True)
class Followed:
    """One run that is followed. Call ``read``, then ``advance``, and store what that returns."""

    run_id: str
    saved: Saved
    watchers: WatchSet
    steps: StepMerger
    schemas: dict[str, Schema]
    hosts: NodeMerger = field(default_factory=NodeMerger)
    heard_ns: int | None = None
    """When this process last saw a new step, or first looked; by the clock of ``advance``."""
    has_changed: bool = False
    """Whether anything was taken in since this was stored."""
    _streams: dict[Writer, _Stream] = field(default_factory=dict)
    _names: dict[str, dict[int, str]] = field(default_factory=dict)
    _saves: list[tuple[Key, int]] = field(default_factory=list)
    _num_unmerged: int = 0

    def __post_init__(self) -> None:
        self._num_unmerged = self.steps.num_missing

    # -------------------------------------------------------------------------------- reading

    def read(self, connection: Connection, budget: int, now_ns: int) -> int:
        """Read new rows, about ``budget`` at most, and return how many.

        Those that are behind are read first, so that a rank's rows which are stored are never
        taken for late.
        """
        self._look(connection)
        ranks = self._unread("steps", "layers")
        num = self._read_lowest(connection, ranks, budget, now_ns)
        hosts = self._unread("node", "gpu")
        if not self._unread("steps"):  # else they would be ahead of the steps they belong to
            num += self._read_lowest(connection, hosts, budget - num, now_ns)
        self._saves = self._new_checkpoints(connection)
        return num

    @property
    def is_read(self) -> bool:
        """Whether there was nothing more to read."""
        return not any(stream.is_unread for stream in self._streams.values())

    @property
    def is_drained(self) -> bool:
        """Whether nothing is left to read or to merge."""
        return self.is_read and self.steps.is_empty

    def _unread(self, *kinds: str) -> list[_Stream]:
        return [s for s in self._streams.values() if s.is_unread and s.writer[1] in kinds]

    def _look(self, connection: Connection) -> None:
        """Find the writers, and how far each is stored."""
        at = (streams.c.run_id == sources.c.run_id) & (
            streams.c.incarnation == sources.c.incarnation
        )
        query = (
            select(
                streams.c.incarnation,
                streams.c.stream,
                streams.c.last_seq,
                sources.c.source,
                sources.c.node,
                sources.c.rank,
                sources.c.world_size,
            )
            .join(sources, at)
            .where(streams.c.run_id == self.run_id, streams.c.stream.in_(_STREAMS))
            .order_by(sources.c.started_unix_ns)
        )
        world_size = largest = 0
        for row in connection.execute(query):
            writer = (row.incarnation, row.stream)
            known = self._streams.get(writer)
            if known is None:
                done = self.saved.done.get("/".join(writer), -1)
                known = self._streams[writer] = _Stream(
                    writer, row.source, row.node, row.rank, row.world_size, done
                )
            known.last_seq = row.last_seq
            largest = max(largest, row.world_size)
            if row.source == "rank:0" and row.stream == "steps":
                world_size = row.world_size  # of its newest start
        self.steps.world_size = world_size or largest

    def _read_lowest(
        self, connection: Connection, unread: list[_Stream], budget: int, now_ns: int
    ) -> int:
        queue = [(stream.position, i, stream) for i, stream in enumerate(unread)]
        heapq.heapify(queue)
        num = 0
        while queue and num < budget:
            _, i, stream = heapq.heappop(queue)
            taken = self._read_page(connection, stream, now_ns)
            num += taken
            if taken and stream.is_unread:
                heapq.heappush(queue, (stream.position, i, stream))
        self.has_changed = self.has_changed or num > 0
        return num

    def _read_page(self, connection: Connection, stream: _Stream, now_ns: int) -> int:
        """Read the next rows of one writer; return how many, 0 where they must wait."""
        incarnation, kind = stream.writer
        if kind == "layers" and not self._names_of(connection, incarnation):
            stream.last_seq = stream.read_seq  # names come in another stream: look again later
            return 0
        pages = connection.execute(self._query(connection, stream)).all()
        if not pages:
            stream.read_seq = stream.last_seq  # removed from the store
            return 1
        num = 0
        for digest, alike in groupby(pages, key=lambda page: page.schema_digest):
            some = list(alike)
            raw = b"".join(page.row_bytes for page in some)
            num += self._take(stream, self._schema(connection, digest), raw, now_ns)
            stream.read_seq = some[-1].first_seq + some[-1].num_rows - 1
        return max(1, num)

    def _query(self, connection: Connection, stream: _Stream) -> Any:
        table, (incarnation, kind) = batches.c, stream.writer
        mine = (table.run_id == self.run_id, table.incarnation == incarnation, table.stream == kind)
        first = stream.read_seq + 1
        if stream.is_resumed and first > 0:
            query = select(func.max(table.first_seq)).where(*mine, table.first_seq <= first)
            first = connection.execute(query).scalar() or 0
        stream.is_resumed = False
        return (
            select(table.first_seq, table.num_rows, table.schema_digest, table.row_bytes)
            .where(*mine, table.first_seq >= first)
            .order_by(table.first_seq)
            .limit(_BATCHES_AT_ONCE)
        )

    def _schema(self, connection: Connection, digest: str) -> Schema:
        schema = self.schemas.get(digest)
        if schema is None:
            schema = self.schemas[digest] = read_schema(connection, digest)
        return schema

    def _take(self, stream: _Stream, schema: Schema, raw: bytes, now_ns: int) -> int:
        incarnation, kind = stream.writer
        if kind in ("node", "gpu"):
            return self._take_hosts(stream, schema, raw)
        is_steps = kind == "steps"
        is_root = stream.rank == 0
        wanted = step_columns(schema, is_root=is_root) if is_steps else ["layer", *LAYER_COLUMNS]
        rows = decode(schema, raw, wanted, after=stream.read_seq)
        if not len(rows):
            return 0
        stream.position = max(stream.position, rows.last())
        if not is_steps:
            part = LayerPart(self._names[incarnation], rows)
            self.steps.add_layers(stream.writer, part, now_ns)
        elif stream.rank >= 0:
            if rows.last() > self.steps.merged:
                self.heard_ns = now_ns
            self.steps.add(stream.writer, Part(stream.rank, stream.world_size, rows), now_ns)
        return len(rows)

    def _take_hosts(self, stream: _Stream, schema: Schema, raw: bytes) -> int:
        size = schema.row_size
        seqs = rows_of(schema, raw)["seq"].tolist()
        rows = [
            _host_row(seq, schema.unpack(raw[i * size : (i + 1) * size]))
            for i, seq in enumerate(seqs)
            if seq > stream.read_seq
        ]
        if rows:
            stream.position = (rows[-1].monotonic_ns, 0)
            uuid = stream.source.removeprefix("gpu:") if stream.writer[1] == "gpu" else ""
            self.hosts.add(stream.writer, stream.node, uuid, rows)
        return len(rows)

    def _names_of(self, connection: Connection, incarnation: str) -> dict[int, str]:
        known = self._names.get(incarnation)
        if not known:
            query = select(names.c.id, names.c.name).where(
                names.c.run_id == self.run_id,
                names.c.incarnation == incarnation,
                names.c.stream == "layers",
            )
            known = {row.id: row.name for row in connection.execute(query)}
            self._names[incarnation] = known
        return known

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

    def advance(self, now_ns: int, *, is_running: bool) -> list[Told]:
        """Merge what was read, and return what the watchers tell of it."""
        if self.heard_ns is None:
            self.heard_ns = now_ns
        unread = self._unread("steps", "layers")
        gate = min((stream.position for stream in unread), default=None)
        merged = self.steps.ready(now_ns, gate=gate)
        # Those of later steps stay where they are until these steps are here.
        rounds = deque(self.hosts.ready(self._host_gates()) if gate is None else ())
        told: list[Told] = []
        for step in merged:
            self._save_until((step.attempt, step.step))
            while rounds and rounds[0].time_unix_ns <= step.time_unix_ns:
                told += self._sampled(rounds.popleft())
            told += self._stepped(step)
        if gate is None:
            self._save_until(self.steps.merged)
            for left in rounds:
                told += self._sampled(left)
        if is_running and self.is_drained:
            told += self._idle(now_ns)
        self.has_changed = self.has_changed or bool(merged or told)
        return told

    def num_unmerged(self) -> int:
        """Return how many rows of ranks steps were merged without, since it was last asked."""
        before, self._num_unmerged = self._num_unmerged, self.steps.num_missing
        return self._num_unmerged - before

    def _host_gates(self) -> dict[str, int]:
        gates: dict[str, int] = {}
        for stream in self._unread("node", "gpu"):
            gates[stream.node] = min(stream.position[0], gates.get(stream.node, 2**63))
        return gates

    def _stepped(self, step: MergedStep) -> list[Told]:
        found = self.watchers.update(step)
        self.saved.last = (step.attempt, step.step, step.time_unix_ns)
        if self.saved.open:
            self._close("stalled")
        return self._told(found, step.time_unix_ns) if found else []

    def _sampled(self, found: Round) -> list[Told]:
        sample = NodeSample(
            node=found.node,
            time_unix_ns=found.time_unix_ns,
            step=self.saved.last[1],
            host=found.host,
            gpus=found.gpus,
        )
        return self._told(self.watchers.update_node(sample), found.time_unix_ns)

    def _idle(self, now_ns: int) -> list[Told]:
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

    def _told(self, found: tuple[Finding, ...], time_unix_ns: int) -> list[Told]:
        for finding in found:
            if finding.kind in ("stalled", "checkpoint_overdue"):
                self._close(finding.kind)
                self.saved.open = [*self.saved.open, finding]
        return [Told(finding, self.saved.last[0], time_unix_ns) for finding in found]

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
    schemas: dict[str, Schema],
    watch: WatchConfig | None = None,
    merge: MergeConfig | None = None,
) -> Followed:
    """Return the run as it was stored, or from its beginning."""
    query = select(engine_state.c.body).where(engine_state.c.name == state_name(run_id))
    body = connection.execute(query).scalar()
    saved = Saved() if body is None else msgspec.msgpack.decode(body, type=Saved)
    watchers, steps = WatchSet(watch), StepMerger(merge or MergeConfig())
    if saved.merger:
        steps.load_state_dict(saved.merger)
    if saved.watchers:
        try:
            watchers.load_state_dict(saved.watchers)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            # Another version's memory: they learn anew, and what was told stays told.
            _LOG.warning("watchers_start_anew run=%s reason=%r", run_id, error)
            watchers = WatchSet(watch)
    return Followed(run_id, saved, watchers, steps, schemas)


def watch_again(
    connection: Connection, run_id: str, *, watch: WatchConfig | None = None
) -> list[Told]:
    """Return what the watchers tell of a stored run from its beginning; stores nothing.

    What needs the clock, a step that does not come, is left out.
    """
    steps = StepMerger(MergeConfig())
    followed = Followed(run_id, Saved(), WatchSet(watch), steps, {})
    now_ns, told = 0, list[Told]()
    while not followed.is_drained or not now_ns:
        followed.read(connection, _ROWS_AT_ONCE, now_ns)
        told += followed.advance(now_ns, is_running=False)
        if followed.is_read:  # nobody is waited for any more
            now_ns += int(steps.config.patience_seconds * 1e9)
    return told


def state_name(run_id: str) -> str:
    """Return the name under which a run's state is kept in ``engine_state``."""
    return f"watching/{run_id}"


def _host_row(seq: int, fields: Mapping[str, Any]) -> HostRow:
    known = _HOST_COLUMNS | _MORE_COLUMNS
    values: dict[str, Value] = {name: v for name, v in fields.items() if name in known}
    at, when = fields.get("monotonic_ns"), fields.get("time_unix_ns")
    return HostRow(
        seq, at if isinstance(at, int) else 0, when if isinstance(when, int) else 0, values
    )


__all__ = ["Followed", "Saved", "Told", "open_run", "state_name", "watch_again"]
