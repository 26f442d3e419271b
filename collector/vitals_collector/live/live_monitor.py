"""Runs the fleet detectors on every run's merged steps, and stores their findings.

Fleet detectors only report: actions are decided inside the job. Their findings are stored with
those of the ranks, under an incarnation of the collector, and raise alerts like these.

The position in a run's rows, the detectors' state and their findings are stored in one transaction.
A collector that died at any time therefore continues where it was: no finding is repeated, and rows
of incomplete steps are read again.
"""

import logging
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from sqlalchemy import Connection, delete, func, select

from trainvitals.detect.fleet import FleetConfig, FleetDetectors
from trainvitals.detect.fleet.base import MergedStep, NodeSample
from trainvitals.detect.fleet.origin.onsets import Onset
from trainvitals.detect.fleet.origin.tracker import OnsetTracker
from trainvitals.detect.fleet.ranks import STALL
from trainvitals.detect.hang import HangFollower
from trainvitals.errors import UNREADABLE, StorageError
from trainvitals.records import Finding, HangLimits, RanksStill, TrainingPaused
from trainvitals.rows import Schema
from trainvitals.wire import Batch
from vitals_collector.ingest.projections import finding_columns
from vitals_collector.live.scalar_watch import (
    SCALARS,
    ScalarState,
    ScalarWatch,
    has_unread_scalars,
)
from vitals_collector.live.step_join import (
    BEFORE_ALL,
    LAYER_COLUMNS,
    Key,
    LayerPart,
    NodeMerger,
    NodeSamples,
    RowWriters,
    StepMerger,
    decode_rank_rows,
    host_rows,
    step_columns,
)
from vitals_collector.live.tail_reader import (
    HOSTS,
    STEPS,
    WATCHED,
    CommittedRows,
    RecentRows,
    RowBlock,
    TailReader,
)
from vitals_collector.storage.schema import checkpoints, engine_state, events, findings, streams
from vitals_collector.storage.store import (
    ReadSnapshot,
    Store,
    insert,
    load_state,
    save_states,
)

_LOG = logging.getLogger("vitals.collector.watching")

# -------------------------------------------------------- how far the watchers are, as it is stored

_ASIDE = "watching-aside/"


def watch_state_name(run_id: str) -> str:
    """Return the name of a run's state in ``engine_state``."""
    return f"watching/{run_id}"


class _DoneScalars(msgspec.Struct):
    done: dict[str, int] = {}


class _SavedProgress(msgspec.Struct):
    done: dict[str, int] = {}
    last: tuple[int, int, int] = (0, -1, 0)
    scalars: _DoneScalars = msgspec.field(default_factory=_DoneScalars)


def load_watch_progress(connection: Connection, run_id: str) -> dict[str, int]:
    """Return by ``incarnation/stream`` up to which row the watchers are done with a run."""
    return _load_saved(connection, run_id, _SavedProgress).done


class Unwatched(NamedTuple):
    """Rows that the fleet detectors have not processed."""

    num_rows: int
    last_step: int
    """Last step of the latest attempt that they have processed; -1: none."""


def count_unwatched_rows(connection: Connection, run_id: str) -> Unwatched:
    """Return how many stored rows of a run the fleet detectors lack."""
    progress, table = _load_saved(connection, run_id, _SavedProgress), streams.c
    query = select(table.incarnation, table.stream, table.last_seq).where(
        table.run_id == run_id, table.stream.in_(sorted(WATCHED))
    )
    num_rows = sum(
        row.last_seq - progress.done.get(f"{row.incarnation}/{row.stream}", -1)
        for row in connection.execute(query)
    )
    return Unwatched(num_rows, progress.last[1])


def is_ahead(connection: Connection, run_id: str, state: bytes) -> bool:
    """Return whether a state of the fleet detectors has processed more rows than the stored one.

    A state with rows that are not stored here belongs to other data.
    """
    done = msgspec.msgpack.decode(state, type=_SavedProgress).done
    table = streams.c
    query = select(table.incarnation, table.stream, table.last_seq).where(table.run_id == run_id)
    stored = {f"{row.incarnation}/{row.stream}": row.last_seq for row in connection.execute(query)}
    if any(seq > stored.get(writer, -1) for writer, seq in done.items()):
        return False
    here = _load_saved(connection, run_id, _SavedProgress).done
    return sum(done.values()) + len(done) > sum(here.values()) + len(here)


KeyRange = tuple[Key, Key]
"""First and last step of a range."""
AFTER_ALL: Key = (2**63 - 1, 0)
_MOST_RANGES = 16
"""Latest ranges that are stored, one for each restart of the collector."""
_Saved = TypeVar("_Saved", bound=msgspec.Struct)


def _load_saved(connection: Connection, run_id: str, part: type[_Saved]) -> _Saved:
    """Return a part of a run's stored state; its defaults if the run was not watched."""
    body = load_state(connection, watch_state_name(run_id))
    return part() if body is None else msgspec.msgpack.decode(body, type=part)


class _SavedOnsets(msgspec.Struct):
    onsets: list[Onset] | None = None
    judged_from: Key = BEFORE_ALL
    judged_before: list[KeyRange] = []
    last: tuple[int, int, int] = (0, -1, 0)


class WatchedOnsets(NamedTuple):
    """Onsets of a run's series, detected live."""

    onsets: tuple[Onset, ...]
    judged: tuple[KeyRange, ...]
    """Steps in which they were detected; between two ranges, the collector was restarted."""

    def cover(self, first: Key, last: Key) -> bool:
        """Return whether the onsets of all these steps are known."""
        return any(begin <= first <= last <= end for begin, end in self.judged)


def watched_onsets(connection: Connection, run_id: str) -> WatchedOnsets | None:
    """Return a run's onsets as detected live; None: the run was not watched."""
    saved = _load_saved(connection, run_id, _SavedOnsets)
    if saved.onsets is None:
        return None
    judged = (*saved.judged_before, (saved.judged_from, saved.last[:2]))
    return WatchedOnsets(tuple(saved.onsets), judged)


class _SavedConditions(msgspec.Struct):
    open: list[Finding] = []
    lasting: list[Finding] = []


def conditions_of(connection: Connection, run_id: str) -> tuple[Finding, ...]:
    """Return the findings of fleet detectors whose condition held at the last step."""
    saved = _load_saved(connection, run_id, _SavedConditions)
    return (*saved.open, *saved.lasting)


def unread_runs(connection: Connection, of: Collection[str] | None = None) -> list[str]:
    """Return the runs, of all or some, with stored rows that the fleet detectors lack.

    The latest sample of a host always waits for the next one of its node.
    """
    table = streams.c
    query = select(table.run_id, table.incarnation, table.stream, table.last_seq)
    query = query.where(table.stream.in_([*sorted(WATCHED), SCALARS])).order_by(table.run_id)
    if of is not None:
        query = query.where(table.run_id.in_(of))
    unread = []
    for run_id, rows in groupby(connection.execute(query).all(), key=lambda row: row.run_id):
        done, has_scalars = _load_saved(connection, run_id, _SavedProgress), False
        for row in rows:
            if row.stream == SCALARS:
                has_scalars = True
                continue
            num = row.last_seq - done.done.get(f"{row.incarnation}/{row.stream}", -1)
            if num > (1 if row.stream in HOSTS else 0):
                unread.append(run_id)
                break
        else:
            if has_scalars and has_unread_scalars(connection, run_id, done.scalars.done):
                unread.append(run_id)
    return unread


def suspend_watching(connection: Connection, run_id: str) -> None:
    """Record that fleet detectors fail on a run: its rows can be rolled up without them."""
    statement = insert(connection, engine_state).values(name=_ASIDE + run_id, body=b"")
    connection.execute(statement.on_conflict_do_nothing(index_elements=["name"]))


def resume_watching(connection: Connection, run_id: str) -> None:
    """Record that the fleet detectors process a suspended run again."""
    connection.execute(delete(engine_state).where(engine_state.c.name == _ASIDE + run_id))


def load_suspended_runs(connection: Connection) -> set[str]:
    """Return the runs whose rows the fleet detectors cannot process, after repeated errors."""
    query = select(engine_state.c.name).where(engine_state.c.name.startswith(_ASIDE))
    return {name.removeprefix(_ASIDE) for name in connection.execute(query).scalars()}


def delete_watch_progress(connection: Connection, run_id: str) -> None:
    """Delete what the fleet detectors have stored about a removed run."""
    names = (watch_state_name(run_id), _ASIDE + run_id)
    connection.execute(delete(engine_state).where(engine_state.c.name.in_(names)))


# ------------------------------------------------------------------------------------------ one run

_decode_pause = msgspec.msgpack.Decoder(TrainingPaused).decode
_LOOK_NS = 30_000_000_000
"""Interval of reading the store for rows of other processes."""
_FEW_ROWS = 64
_SAVED_STATES = ("verified", "healthy", "retired")


class TimedFinding(NamedTuple):
    """A finding with its attempt, step and time."""

    finding: Finding
    attempt: int
    time_unix_ns: int


class RunWatchState(msgspec.Struct, kw_only=True):
    """State of a run's detectors, without its findings."""

    done: dict[str, int] = {}
    """By ``incarnation/stream``: the sequence number up to which rows are done with."""
    merger: dict[str, Any] = {}
    watchers: dict[str, Any] = {}
    next_seq: int = 0
    """Number of the next finding."""
    checkpoint: Key = BEFORE_ALL
    """The latest checkpoint that the detectors have processed."""
    last: tuple[int, int, int] = (0, -1, 0)
    """Attempt, step and time of the latest merged step."""
    open: list[Finding] = []
    """Reported conditions that still apply: a stalled step, an overdue checkpoint."""
    onsets: list[Onset] | None = None
    """Onsets of series, as detected then; None: the run was not watched."""
    judged_from: Key = AFTER_ALL
    """First step from which this process could detect onsets."""
    judged_before: list[KeyRange] = []
    """Steps in which earlier processes could."""
    lasting: list[Finding] = []
    """Findings whose condition lasts: a straggler, a drop of throughput."""
    scalars: ScalarState = msgspec.field(default_factory=ScalarState)
    """Judged scalars of a post-training run."""


# ------------------------------------------------- ranks on several nodes that make no progress

FORGET_NS = 8_000_000_000
"""A node that is silent for longer may be running again, or lost."""
_decode_still = msgspec.msgpack.Decoder(RanksStill).decode


class _StallReport(NamedTuple):
    seq: int
    came_ns: int
    event: RanksStill


class StallReports(msgspec.Struct):
    """Latest reports of the agents of one run about stalled ranks.

    The blocking rank is visible only if all nodes are. A job on one node is judged by its agent.
    """

    _words: dict[str, _StallReport] = {}
    """By incarnation of an agent."""
    _follower: HangFollower = msgspec.field(default_factory=HangFollower)

    def load_events(self, connection: Connection, run_id: str, now_ns: int) -> None:
        """Read the agents' reports on stalled ranks that arrived since the last poll."""
        conditions = (events.c.run_id == run_id, events.c.kind == RanksStill.__name__)
        last = select(events.c.incarnation, func.max(events.c.seq)).where(*conditions)
        for incarnation, seq in connection.execute(last.group_by(events.c.incarnation)).all():
            before = self._words.get(incarnation)
            if before is not None and before.seq >= seq:
                continue
            query = select(events.c.body).where(
                *conditions, events.c.incarnation == incarnation, events.c.seq == seq
            )
            try:
                event = _decode_still(connection.execute(query).scalar() or b"")
            except UNREADABLE:
                continue  # of a later agent version: it at least judges its own node
            self._words[incarnation] = _StallReport(seq, now_ns, event)

    def findings_due(self, now_ns: int) -> tuple[Finding, ...]:
        """Return the findings that are due; ``now_ns`` is of the clock of ``load_events``."""
        present = [word for word in self._words.values() if now_ns - word.came_ns <= FORGET_NS]
        present = [word for word in present if word.event.ranks]
        if not present and self._follower.verdict is None:
            return ()
        # As in the latest reports, and not for longer: a silent node may be running again.
        ranks = {rank.rank: rank for word in present for rank in word.event.ranks}
        world_size = max((word.event.world_size for word in present), default=1)
        limits = _max_hang_limits(word.event.limits for word in present)
        return self._follower.new_findings(
            list(ranks.values()), world_size=world_size, limits=limits
        )


def _max_hang_limits(limits: Iterable[HangLimits]) -> HangLimits | None:
    """Return the longest of the nodes' limits per phase, which the live hang detector uses."""
    every = list(limits)
    if not every:
        return None
    return HangLimits(
        show={phase: max(of.show.get(phase, 0.0) for of in every) for phase in every[0].show},
        page={phase: max(of.page.get(phase, 0.0) for of in every) for phase in every[0].page},
        computing=max(of.computing for of in every),
    )


# ------------------------------------------------------------------------------------- one run


@dataclass(slots=True)
class FollowedRun:
    """One run whose new rows the fleet detectors process as they arrive.

    Call ``read_stored``, then ``advance``, and store what that returns.
    """

    run_id: str
    saved: RunWatchState
    watchers: FleetDetectors
    steps: StepMerger
    hosts: NodeMerger = field(default_factory=NodeMerger)
    heard_ns: int | None = None
    """When this process last saw a new step, or first polled; by the clock of ``advance``."""
    has_changed: bool = False
    """Whether anything was added since this was stored."""
    _fresh: TailReader = field(init=False)
    _looked_ns: int | None = None
    _saves: list[tuple[Key, int]] = field(default_factory=list)
    _num_unmerged: int = 0
    _is_paused: bool = False
    _onsets: OnsetTracker = field(init=False)
    has_new_onset: bool = False
    """Whether a series left its course since this was stored."""
    _still: StallReports = field(default_factory=StallReports)
    _scalars: ScalarWatch = field(init=False)
    _scalar_findings: list[TimedFinding] = field(default_factory=list)
    """Those since the last call of ``advance``."""

    def __post_init__(self) -> None:
        saved = self.saved
        if saved.judged_from <= saved.last[:2]:
            before = [*saved.judged_before, (saved.judged_from, saved.last[:2])]
            saved.judged_before = before[-_MOST_RANGES:]
        self._onsets = OnsetTracker(saved.onsets or ())
        self._fresh = TailReader(self.run_id, self.saved.done, self.steps.number_of)
        self._scalars = ScalarWatch(self.run_id, self.saved.scalars)
        self.watchers.gpus = self._fresh.gpus
        self._num_unmerged = self.steps.num_missing

    # -------------------------------------------------------------------------------- reading

    def add_committed(self, taken: CommittedRows, now_ns: int) -> int:
        """Give rows that were just committed to the detectors' input; return their number."""
        fresh = self._fresh
        # If some writers are behind, rows that wait for them would accumulate.
        is_full = not fresh.is_read and self.steps.num_held > self.steps.most_held
        num = self._add_blocks(fresh.add_committed(taken.batches, is_full=is_full), now_ns)
        self.steps.world_size = fresh.world_size
        self.has_changed = self.has_changed or num > 0
        return num

    def note_scalars(self) -> None:
        """Record that new scalars of the run have arrived in the store."""
        self._scalars.is_read = False

    def needs_store(self, taken: CommittedRows, now_ns: int) -> bool:
        """Return whether ``read_stored`` is needed: the committed rows are not all there are."""
        return taken.has_more or not self.is_read or self._is_read_due(now_ns)

    def read_stored(
        self, moment: ReadSnapshot, budget: int, now_ns: int, *, has_more: bool = True
    ) -> int:
        """Read about ``budget`` stored rows that the detectors lack; return their number.

        Writers that are behind are read first, so that a rank's stored rows never count as late.
        The snapshot ``moment`` is taken after the added rows were committed, and ``now_ns`` is by
        the clock of ``advance``. With ``has_more``, the store may have rows that were never added.
        """
        fresh = self._fresh
        if has_more or self._is_read_due(now_ns):
            fresh.find_streams(moment.sql)
            self._looked_ns = now_ns
        self.steps.world_size = fresh.world_size
        num_read = 0
        while num_read < budget and (blocks := fresh.read_stored(*moment, STEPS, budget)):
            num_read += self._add_blocks(blocks, now_ns)
        # Hosts not before: they would be ahead of the steps they belong to.
        while (
            num_read < budget
            and not fresh.behind(("steps",))
            and (blocks := fresh.read_stored(*moment, HOSTS, budget))
        ):
            num_read += self._add_blocks(blocks, now_ns)
        scalars = self._scalars.read(moment, max(0, budget - num_read), now_ns)
        self._scalar_findings += map(TimedFinding._make, scalars.findings)
        num_read += scalars.num_rows
        self.has_changed |= num_read > 0
        self._saves = self._new_checkpoints(moment.sql)
        if has_more or self._is_paused:
            self._look_for_pause(moment.sql, now_ns)
        if has_more:
            self._still.load_events(moment.sql, self.run_id, now_ns)
        return num_read

    def _is_read_due(self, now_ns: int) -> bool:
        """Return whether it is time to search the store for rows that the detectors lack."""
        return self._looked_ns is None or now_ns - self._looked_ns >= _LOOK_NS

    @property
    def is_read(self) -> bool:
        """Return whether the detectors have read all rows that have arrived."""
        return self._fresh.is_read and self._scalars.is_read

    @property
    def reads_scalars(self) -> bool:
        """Return whether the run's scalars are judged as they arrive."""
        return self._scalars.is_used

    @property
    def is_drained(self) -> bool:
        """Return whether no row waits to be read, or to be joined to a step."""
        return self.is_read and self.steps.is_empty

    def _add_blocks(self, blocks: list[RowBlock], now_ns: int) -> int:
        """Add rows that arrived to the step and node mergers; return their number."""
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
        """Add a block of the ranks' step rows to the step merger."""
        origin = block.origin
        # For few writers rank 0's extra columns are decoded for all: two calls would cost more.
        if len(block.rows) <= _FEW_ROWS and (origin.rank >= 0).all():
            self._add_steps(block.schema, block.rows, origin, now_ns, is_rank0=True)
            return
        for is_rank_zero, is_rank0 in ((origin.rank == 0, True), (origin.rank > 0, False)):
            if is_rank_zero.any():
                writer_ids = RowWriters(*(values[is_rank_zero] for values in origin))
                self._add_steps(
                    block.schema, block.rows[is_rank_zero], writer_ids, now_ns, is_rank0=is_rank0
                )

    def _add_steps(
        self,
        schema: Schema,
        raw: npt.NDArray[np.void],
        origin: RowWriters,
        now_ns: int,
        *,
        is_rank0: bool,
    ) -> None:
        """Decode step rows and add them to the step merger."""
        rows = decode_rank_rows(schema, raw, step_columns(schema, is_rank0=is_rank0), origin)
        if rows.last() > self.steps.merged:
            self.heard_ns = now_ns
        self.steps.add(rows, now_ns)

    def _take_layers(self, block: RowBlock, now_ns: int) -> None:
        """Decode layer rows and add them to the step merger."""
        origin, first = block.origin, 0
        columns = ["layer", *LAYER_COLUMNS]
        for stream, raw in block.by_stream():
            stream_origin = type(origin)(*(values[first : first + len(raw)] for values in origin))
            first += len(raw)
            names = self._fresh.names[stream.writer[0]]
            rows = decode_rank_rows(block.schema, raw, columns, stream_origin)
            self.steps.add_layers(LayerPart(names, rows), now_ns)

    def _take_hosts(self, block: RowBlock) -> None:
        """Add rows of nodes and GPUs to the node merger."""
        for stream, raw in block.by_stream():
            uuid = stream.source.removeprefix("gpu:") if stream.writer[1] == "gpu" else ""
            rows = host_rows(block.schema, raw)
            self.hosts.add(stream.writer, stream.node, uuid, rows)

    def _new_checkpoints(self, connection: Connection) -> list[tuple[Key, int]]:
        """Return stored checkpoints that the fleet detectors do not know yet."""
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

    def _look_for_pause(self, connection: Connection, now_ns: int) -> None:
        """Check whether the latest attempt is paused by a command."""
        newest = connection.execute(
            select(events.c.attempt, events.c.body)
            .where(events.c.run_id == self.run_id, events.c.kind == TrainingPaused.__name__)
            .order_by(events.c.time_unix_ns.desc(), events.c.seq.desc())
            .limit(1)
        ).first()
        was_paused, self._is_paused = self._is_paused, False
        if newest is not None and newest.attempt == self.saved.last[0]:
            with suppress(*UNREADABLE):  # skip a damaged one
                self._is_paused = _decode_pause(newest.body).is_paused
        if was_paused and not self._is_paused:  # the stall timeout starts again now
            self.watchers.resumed(self._now_of_run(now_ns))

    # ------------------------------------------------------------------------------- watching

    def advance(self, now_ns: int, *, is_running: bool) -> list[TimedFinding]:
        """Join the rows that arrived to steps, and return the fleet detectors' findings."""
        if self.heard_ns is None:
            self.heard_ns = now_ns
        gate = min((stream.position for stream in self._fresh.behind(STEPS)), default=None)
        merged = self.steps.take_ready(now_ns, gate=gate)
        # Those of later steps stay queued until their steps are merged.
        rounds = deque(self.hosts.take_ready(self._host_gates()) if gate is None else ())
        records: list[TimedFinding] = []
        for step in merged:
            self._pass_checkpoints((step.attempt, step.step))
            while rounds and rounds[0].time_unix_ns <= step.time_unix_ns:
                records += self._process_node_samples(rounds.popleft())
            records += self._process_step(step)
        if gate is None:
            self._pass_checkpoints(self.steps.merged)
            for unjoined in rounds:
                records += self._process_node_samples(unjoined)
        if is_running:
            at = self._now_of_run(now_ns)
            if self.is_drained and not self._is_paused:
                records += self._timed_findings(self.watchers.check_stall(at), at)
            records += self._timed_findings(self._still.findings_due(now_ns), at)
        if not is_running and self.is_drained:
            self._finish_scalars()
        records += self._scalar_findings
        self._scalar_findings = []
        if merged or rounds or records:
            self._update_lasting_findings(records)
        self.has_changed = self.has_changed or bool(merged or records)
        return records

    def _finish_scalars(self) -> None:
        """Judge the latest logged step of a run that ended."""
        judged = self._scalars.saved.judged
        self._scalar_findings += map(TimedFinding._make, self._scalars.finish())
        self.has_changed |= self._scalars.saved.judged != judged

    def _update_lasting_findings(self, records: list[TimedFinding]) -> None:
        """Keep the latest finding per cause while its fleet detector's condition holds."""
        lasting = {(finding.kind, finding.cause): finding for finding in self.saved.lasting}
        lasting |= {
            (record.finding.kind, record.finding.cause): record.finding
            for record in records
            if record.finding.cause != STALL
        }
        self.saved.lasting = [
            finding
            for finding in lasting.values()
            if self.watchers.holds(finding) or self._scalars.holds(finding)
        ]

    def take_unmerged(self) -> int:
        """Return the number of ranks' rows missing in merged steps, since the last call."""
        before, self._num_unmerged = self._num_unmerged, self.steps.num_missing
        return self._num_unmerged - before

    def _host_gates(self) -> dict[str, int]:
        """Return, per node, up to which time its samples can be joined: all rows were read."""
        gates: dict[str, int] = {}
        for stream in self._fresh.behind(HOSTS):
            gates[stream.node] = min(stream.position[0], gates.get(stream.node, 2**63))
        return gates

    def _process_step(self, step: MergedStep) -> list[TimedFinding]:
        findings = self.watchers.update(step)
        self.has_new_onset |= self._onsets.update(step)
        self.saved.last = (step.attempt, step.step, step.time_unix_ns)
        if self.saved.open:
            self._close_findings("stalled")
        return self._timed_findings(findings, step.time_unix_ns) if findings else []

    def _process_node_samples(self, host_round: NodeSamples) -> list[TimedFinding]:
        sample = NodeSample(
            node=host_round.node,
            time_unix_ns=host_round.time_unix_ns,
            step=self.saved.last[1],
            gpus=host_round.gpus,
        )
        return self._timed_findings(self.watchers.update_node(sample), host_round.time_unix_ns)

    def _now_of_run(self, now_ns: int) -> int:
        """Return the current time by the clock of the arriving rows."""
        heard_ns = now_ns if self.heard_ns is None else self.heard_ns
        return self.saved.last[2] + max(0, now_ns - heard_ns)

    def _pass_checkpoints(self, key: Key) -> None:
        """Pass checkpoints up to a step to the fleet detectors, in step order."""
        while self._saves and self._saves[0][0] <= key:
            self.saved.checkpoint, step = self._saves.pop(0)
            self.watchers.saved(step)
            self._close_findings("checkpoint_overdue")
            self.has_changed = True

    def _timed_findings(
        self, findings: tuple[Finding, ...], time_unix_ns: int
    ) -> list[TimedFinding]:
        """Add attempt and time to the fleet detectors' findings; remember those that stay open."""
        for finding in findings:
            if finding.kind in ("stalled", "checkpoint_overdue"):
                self._close_findings(finding.kind)
                self.saved.open = [*self.saved.open, finding]
        return [TimedFinding(finding, self.saved.last[0], time_unix_ns) for finding in findings]

    def _close_findings(self, kind: str) -> None:
        """Drop open findings of the fleet detectors whose condition has ended."""
        self.saved.open = [finding for finding in self.saved.open if finding.kind != kind]

    # ------------------------------------------------------------------------- over restarts

    def build_watch_state(self, num_findings: int) -> RunWatchState:
        """Return the fleet detectors' state to store with new findings; valid after the commit."""
        last_seqs = self.steps.done() | self.hosts.done()
        done = {"/".join(writer): seq for writer, seq in last_seqs.items() if seq >= 0}
        return msgspec.structs.replace(
            self.saved,
            done=self.saved.done | done,
            merger=self.steps.state_dict(),
            watchers=self.watchers.state_dict(),
            onsets=list(self._onsets.onsets),
            judged_from=self._onsets.judged_from,
            next_seq=self.saved.next_seq + num_findings,
            scalars=self._scalars.state(),
        )


def open_run(
    connection: Connection,
    run_id: str,
    *,
    watch: FleetConfig | None = None,
) -> FollowedRun:
    """Load a run's fleet detectors as they were stored, or start new ones."""
    saved = _load_saved(connection, run_id, RunWatchState)
    watchers, steps = FleetDetectors(watch), StepMerger()
    if saved.merger:
        steps.load_state_dict(saved.merger)
    if saved.watchers:
        try:
            watchers.load_state_dict(saved.watchers)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            # State of another version: the detectors start without it; reported findings stay
            # reported.
            _LOG.warning("watchers_start_anew run=%s reason=%r", run_id, error)
            watchers = FleetDetectors(watch)
    return FollowedRun(run_id, saved, watchers, steps)


# ----------------------------------------------------------------------------------------- all runs

COLLECTOR = "collector"
"""The incarnation of findings that no rank wrote."""
_PAUSE_SECONDS = 10.0
"""First pause after watching a run met an internal error; doubled each time."""
_LONGEST_PAUSE_SECONDS = 600.0
"""The longest of these pauses; when a run reaches it, watching is suspended: its old rows are
rolled up although no detector has processed them. Retries continue."""


class LiveMonitorConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of live monitoring."""

    rows_at_once: int = 50_000
    """Rows per poll, so that a collector that has to catch up still reports a halt at once."""
    live_bytes: int = 64 << 20
    """Memory for rows of all runs until the next poll; beyond it, rows are read from the store."""
    save_seconds: float = 5.0
    """Interval of storing the state if there is no finding; later rows are read again."""
    save_bytes_a_second: int = 1 << 16
    """A large memory, of thousands of ranks, is stored so much less often."""
    watch: FleetConfig = msgspec.field(default_factory=FleetConfig)
    """Settings of the fleet detectors."""


class PollResult(NamedTuple):
    """Result of one poll."""

    runs_with_findings: frozenset[str]
    """Runs with new findings."""
    has_more: bool
    """Rows remain: poll again at once."""


class _Pause(NamedTuple):
    """Pause of a run."""

    until_ns: int
    seconds: float


class _StateToStore(NamedTuple):
    """State of a run to store."""

    followed: FollowedRun
    saved: RunWatchState
    body: bytes
    """``saved`` as it is stored."""
    findings: Sequence[Mapping[str, object]]
    is_over: bool
    """Nothing more comes of it: it is followed no longer once that is stored."""


class LiveMonitor:
    """Follows the runs that have new rows or are running. ``add`` and ``note`` are for any thread.

    With several collectors, each processes the runs that it owns; storing results of a run that
    another one has acquired in the meantime fails. ``now_ns`` is a monotonic clock throughout.
    After a StorageError nothing is lost: call again.
    """

    def __init__(self, store: Store, config: LiveMonitorConfig | None = None) -> None:
        self._store = store
        self._config = config or LiveMonitorConfig()
        self._live = RecentRows(most_bytes=self._config.live_bytes)
        self._open: dict[str, FollowedRun] = {}
        self._save_ns: dict[str, int] = {}
        self._pauses: dict[str, _Pause] = {}
        self._with_scalars: set[str] = set()
        """Runs with new scalars in the store."""
        self._aside: set[str] = set()
        """Runs for which watching is suspended: their rows do not wait for it."""
        self._is_first = True
        self.num_unmerged = 0
        """Rows of ranks that steps were merged without."""
        self.num_dropped_samples = 0
        """GPU samples that were dropped before their node's own row arrived."""

    @property
    def num_left_to_store(self) -> int:
        """Return how many new rows memory had no space for: they are read from the store."""
        return self._live.num_dropped

    def add(self, batches: Iterable[Batch]) -> None:
        """Add batches that were just committed; the next ``poll`` runs the detectors on them."""
        self._live.add(batches)

    def note(self, run_id: str) -> None:
        """Record that a run has new stored rows, names or checkpoints to process."""
        self._live.note(run_id)

    def note_scalars(self, run_id: str) -> None:
        """Remember that the store has new scalars, if those of the run may be judged."""
        followed = self._open.get(run_id)
        if followed is None or followed.reads_scalars:
            self._with_scalars.add(run_id)

    def take_over(self, run_ids: Collection[str]) -> None:
        """Load the fleet detectors of runs that this collector has acquired."""
        if not run_ids:
            return
        with self._store.read_transaction() as connection:
            self._aside = load_suspended_runs(connection)
        for run_id in run_ids:
            self._begin_again(run_id)

    def _stop_following(self, run_ids: Iterable[str]) -> None:
        """Drop the fleet detectors of runs that other collectors follow now."""
        for run_id in run_ids:
            self._live.pop(run_id)
            self._with_scalars.discard(run_id)
            self._pauses.pop(run_id, None)
            self._drop_run(run_id)

    def poll(
        self,
        *,
        now_ns: int,
        running: Collection[str],
        only_new: bool = False,
        owned: Collection[str] | None = None,
    ) -> PollResult:
        """Process new rows of all runs, and store the detectors' findings.

        With ``only_new``, skip running runs without new rows. ``owned`` are runs given to
        ``take_over``; None: all.
        """
        if owned is not None:
            followed_here = {*self._queue((), only_new=False)}
            self._stop_following(followed_here.difference(owned))
        elif self._is_first:
            self._load_unwatched()
            self._is_first = False
        queue = self._queue(running, only_new=only_new)
        budget = self._config.rows_at_once
        has_more = False
        states: list[_StateToStore] = []
        try:
            for run_id in queue:
                is_running = run_id in running
                if self._is_paused(run_id, now_ns):
                    self._live.pop(run_id)  # the store has them
                    continue
                if budget <= 0 and not is_running:
                    self.note(run_id)
                    has_more = True
                    continue
                num, to_keep = self._watch(run_id, max(0, budget), now_ns, is_running)
                budget -= num
                states += to_keep
                followed = self._open.get(run_id)
                has_more = has_more or (followed is not None and not followed.is_read)
            self._store_states(states, now_ns)
        except StorageError:
            for of_run in states:
                if of_run.followed.saved is not of_run.saved:
                    self._begin_again(of_run.followed.run_id)
            raise
        return PollResult(frozenset(k.followed.run_id for k in states if k.findings), has_more)

    def conditions(self, run_id: str) -> tuple[Finding, ...]:
        """Return a run's fleet findings whose condition still holds."""
        followed = self._open.get(run_id)
        return () if followed is None else tuple(followed.saved.open)

    def lasting(self, run_id: str) -> tuple[Finding, ...]:
        """Return a run's findings whose condition lasts."""
        followed = self._open.get(run_id)
        return () if followed is None else tuple(followed.saved.lasting)

    def _load_unwatched(self) -> None:
        """Note stored rows that the fleet detectors of an earlier process did not process."""
        with self._store.read_transaction() as connection:
            unread = unread_runs(connection)
            self._aside = load_suspended_runs(connection)
        for run_id in unread:
            self.note(run_id)

    def _queue(self, running: Collection[str], *, only_new: bool) -> list[str]:
        """Return the runs to process; those with new rows come first."""
        queue = [*self._live.waiting(), *tuple(self._with_scalars)]
        queue += [
            followed.run_id
            for followed in self._open.values()
            if not (only_new and followed.is_read)
        ]
        if not only_new:
            queue += [*self._pauses, *sorted(running)]
        return list(dict.fromkeys(queue))

    def _is_paused(self, run_id: str, now_ns: int) -> bool:
        """Return whether a run is left out for now, after an internal error."""
        pause = self._pauses.get(run_id)
        return pause is not None and now_ns < pause.until_ns

    def _watch(
        self, run_id: str, budget: int, now_ns: int, is_running: bool
    ) -> tuple[int, list[_StateToStore]]:
        """Process one run; return the number of rows read, and the state to store."""
        states: list[_StateToStore] = []
        taken = self._live.pop(run_id)  # before the store is opened: it must have these
        has_scalars = run_id in self._with_scalars
        self._with_scalars.discard(run_id)
        try:
            followed = self._open.get(run_id) or self._open_followed_run(run_id)
            num = followed.add_committed(taken, now_ns)
            if has_scalars:
                followed.note_scalars()
            if followed.needs_store(taken, now_ns):
                with self._store.read_transaction() as connection:
                    moment = self._store.snapshot_on(connection)
                    num += followed.read_stored(moment, budget, now_ns, has_more=taken.has_more)
            before = followed.steps.absent
            records = followed.advance(now_ns, is_running=is_running)
            self.num_unmerged += followed.take_unmerged()
            self.num_dropped_samples += followed.hosts.take_dropped()
            if absent_ranks := followed.steps.absent - before:
                _LOG.warning(
                    "ranks_not_waited_for run=%s ranks=%s", run_id, sorted(absent_ranks)[:16]
                )
            is_over = followed.is_drained and not is_running
            if (
                records
                or followed.has_new_onset
                or self._is_save_due(followed, now_ns, is_over=is_over)
            ):
                states.append(_build_state_to_store(followed, records, is_over=is_over))
        except StorageError:
            self._begin_again(run_id)
            raise
        except Exception:  # noqa: BLE001 - one run's watchers must not silence all runs' alerts
            self._pause_failed_run(run_id, now_ns)
            return 0, []
        if num:
            self._pauses.pop(run_id, None)
            self._set_suspended(run_id, is_aside=False)
        if is_over and not states:
            self._drop_run(run_id)
        return num, states

    def _open_followed_run(self, run_id: str) -> FollowedRun:
        """Load a run's detectors from the store into memory."""
        with self._store.read_transaction() as connection:
            followed = self._open[run_id] = open_run(connection, run_id, watch=self._config.watch)
        return followed

    def _begin_again(self, run_id: str) -> None:
        """Reload a run's stored detectors, because those in memory are ahead of them."""
        self._drop_run(run_id)
        self.note(run_id)

    def _drop_run(self, run_id: str) -> None:
        """Drop a run's detectors from memory; their stored state remains."""
        self._open.pop(run_id, None)
        self._save_ns.pop(run_id, None)

    def _pause_failed_run(self, run_id: str, now_ns: int) -> None:
        """Pause a run after an internal error, in its exception handler."""
        self._drop_run(run_id)
        seconds = self._pause(run_id, now_ns)
        self._store.counters.fail("watching")
        _LOG.exception("watching_failed run=%s again_in_seconds=%g", run_id, seconds)
        if seconds >= _LONGEST_PAUSE_SECONDS:
            self._set_suspended(run_id, is_aside=True)

    def _pause(self, run_id: str, now_ns: int) -> float:
        """Pause a run, longer each time; return the seconds."""
        before = self._pauses.get(run_id)
        seconds = _PAUSE_SECONDS if before is None else 2 * before.seconds
        seconds = min(seconds, _LONGEST_PAUSE_SECONDS)
        self._pauses[run_id] = _Pause(now_ns + int(seconds * 1e9), seconds)
        return seconds

    def _set_suspended(self, run_id: str, *, is_aside: bool) -> None:
        """Record that watching a run is suspended or resumed."""
        if is_aside == (run_id in self._aside):
            return
        with self._store.write() as connection:
            (suspend_watching if is_aside else resume_watching)(connection, run_id)
        self._aside ^= {run_id}
        _LOG.warning("watching_%s run=%s", "set_aside" if is_aside else "taken_up", run_id)

    def _is_save_due(self, followed: FollowedRun, now_ns: int, *, is_over: bool) -> bool:
        """Return whether it is time to store the state of a run's detectors."""
        if not followed.has_changed:
            return False
        return is_over or now_ns >= self._save_ns.get(followed.run_id, now_ns)

    def _store_states(self, states: Sequence[_StateToStore], now_ns: int) -> None:
        """Store findings and memory of runs, of each in one transaction: that of all, if it can.

        A sync to disk costs the same for one run and for hundreds.
        """
        try:
            stored_runs = self._store_all(states)
        except Exception as error:  # an error in one run must not affect others
            if len(states) > 1:
                for of_run in states:
                    self._store_states([of_run], now_ns)
                return
            if isinstance(error, StorageError):
                raise
            self._pause_failed_run(states[0].followed.run_id, now_ns)
            return
        for followed, saved, body, _, is_over in states:
            if followed.run_id not in stored_runs:  # its new owner continues from what was stored
                self._stop_following([followed.run_id])
                continue
            followed.saved, followed.has_changed = saved, False
            followed.has_new_onset = False
            pause = max(len(body) / self._config.save_bytes_a_second, self._config.save_seconds)
            self._save_ns[followed.run_id] = now_ns + int(pause * 1e9)
            if is_over:
                self._drop_run(followed.run_id)

    def _store_all(self, states: Sequence[_StateToStore]) -> Collection[str]:
        """Store the states of runs; return the runs that are still owned here."""
        if not states:
            return ()
        with self._store.write() as connection:
            claimed_runs = self._store.claims.hold(connection, [k.followed.run_id for k in states])
            states = [of_run for of_run in states if of_run.followed.run_id in claimed_runs]
            rows = [row for of_run in states for row in of_run.findings]
            if rows:
                connection.execute(findings.insert(), rows)
            bodies = {watch_state_name(k.followed.run_id): k.body for k in states}
            save_states(connection, bodies)
        return claimed_runs


def _build_state_to_store(
    followed: FollowedRun, records: Sequence[TimedFinding], *, is_over: bool
) -> _StateToStore:
    """Return the stored form of a run's detectors, with their new findings."""
    first = followed.saved.next_seq
    rows = [_finding_row(followed.run_id, first + i, record) for i, record in enumerate(records)]
    saved = followed.build_watch_state(len(records))
    return _StateToStore(followed, saved, msgspec.msgpack.encode(saved), rows, is_over)


def _finding_row(run_id: str, seq: int, record: TimedFinding) -> dict[str, object]:
    key = {"run_id": run_id, "incarnation": COLLECTOR, "seq": seq}
    columns = finding_columns(record.finding, record.attempt)
    return {**key, "time_unix_ns": record.time_unix_ns, **columns}
