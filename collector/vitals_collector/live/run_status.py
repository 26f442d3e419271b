"""What every run is doing, from what was last heard of its sources; asked again if it may change.

A run that ended stays what it was until something of it comes. A run that goes on is asked after at
intervals, for silence tells too; its decisions only when one came. What its sources say it is, is
decided by pure functions: ``now`` is handed in.
"""

import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import Connection, Row, func, select

from trainvitals.records import Decision
from trainvitals.views import Health, RunState
from vitals_collector.storage.schema import decisions, events, runs, sources

_FINAL: tuple[RunState, ...] = ("halted", "failed", "interrupted", "finished")
"""How a run can end by its own word, the one that explains most first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Liveness:
    """When a silent run counts as lost."""

    now_unix_ns: int
    up_since_unix_ns: int = 0
    """When this collector started: silence while it was away says nothing."""
    lost_after_seconds: float = 60.0
    """Neither a rank's row nor its agent's for longer than this: the run is lost."""
    is_reading_in: bool = False
    """A folder is being read for the first time: its runs' last words may be yet to come."""


class SourceState(NamedTuple):
    """What is known of one incarnation of a source."""

    source: str
    started_unix_ns: int
    last_seen_unix_ns: int
    last_received_unix_ns: int
    alive: int
    ended_state: str
    world_size: int = 0


def run_state(sources: Sequence[SourceState], when: Liveness) -> RunState:
    """Return the run's state from the newest incarnation of each source.

    A run that said goodbye is what it said. One whose agents say that all its processes are gone is
    lost at once: an agent says so after the last row of the rank. A silent one is lost only when
    its agents are silent as well: a rank in a long evaluation is silent and fine.
    """
    newest = _newest(sources)
    head = newest.get("rank:0")
    ranks = [source for source in newest.values() if _is_rank_of(source, head)]
    agents = [source for name, source in newest.items() if not name.startswith("rank:")]
    ended = {source.ended_state for source in ranks} & set(_FINAL)
    if head is not None and head.ended_state:
        final_state: RunState = next((state for state in _FINAL if state in ended), "finished")
        # A launcher that loses one rank interrupts the others: theirs is not the story.
        return "failed" if final_state == "interrupted" and _lost_one_first(ranks) else final_state
    if when.is_reading_in and not any(source.last_received_unix_ns for source in newest.values()):
        return "running"
    is_gone = bool(ranks) and all(source.alive == 0 or source.ended_state for source in ranks)
    if is_gone or all(_is_silent(source, when) for source in (*ranks, *agents)):
        # Where rank 0 was killed before it could speak, another rank may have said why.
        return "failed" if "failed" in ended else "lost"
    return "running"


def _lost_one_first(ranks: Sequence[SourceState]) -> bool:
    """Return whether a rank was gone, without a word, before the first of the others was ended.

    One that outlives the launcher's grace is killed after it: that is no fault.
    """
    goodbyes = [source.last_seen_unix_ns for source in ranks if source.ended_state]
    lost = [
        source.last_seen_unix_ns for source in ranks if source.alive == 0 and not source.ended_state
    ]
    return bool(goodbyes) and bool(lost) and min(lost) < min(goodbyes)


def health(
    state: RunState,
    *,
    has_steps: bool,
    recent_action: bool,
    lr_factor: float,
    firing_pages: int,
    ended_in_trouble: bool = False,
    is_broken: bool = False,
) -> Health:
    """Return the one word a list of runs shows beside the state.

    A run that ended while its last steps were being skipped is not healthy for having ended; nor is
    a broken one, whose last loss is not finite: critical, unless it is being acted on.
    """
    if state in ("halted", "failed", "lost") or firing_pages:
        return "critical"
    if not has_steps:
        return "unknown"
    is_acted_on = ended_in_trouble or (state == "running" and recent_action)
    if is_broken and not is_acted_on:
        return "critical"
    return "acting" if is_acted_on or (state == "running" and lr_factor < 1) else "healthy"


def _newest(sources: Iterable[SourceState]) -> dict[str, SourceState]:
    newest: dict[str, SourceState] = {}
    for source in sorted(sources, key=lambda source: source.started_unix_ns):
        newest[source.source] = source
    return newest


def _is_rank_of(source: SourceState, head: SourceState | None) -> bool:
    """Return whether this is a rank of the present world, not one a smaller relaunch left over."""
    kind, _, number = source.source.partition(":")
    if kind != "rank":
        return False
    return head is None or head.world_size < 1 or int(number) < head.world_size


def _is_silent(source: SourceState, when: Liveness) -> bool:
    # The sender's clock may be wrong and a spool may be late: what this collector's own clock said
    # at the last arrival counts, where rows arrive at all and are not read from a folder.
    heard = source.last_seen_unix_ns
    if source.last_received_unix_ns:
        heard = max(source.last_received_unix_ns, when.up_since_unix_ns)
    return when.now_unix_ns - heard > when.lost_after_seconds * 1e9


# -------------------------------------------------------------------------------------- of all runs


_RUNS_AT_ONCE = 100
_decision = msgspec.msgpack.Decoder(Decision).decode


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """What one run is doing."""

    run_id: str
    state: RunState
    reason: str = ""
    """Why it ended as it did, where that is known."""
    last_step: int = -1
    step: int = -1
    """The step that the state is about."""
    last_trouble: int = -1
    """The step of its newest skip or rollback."""
    last_seen_unix_ns: int = 0
    """When it was last heard of, by its own clocks."""
    ended_unix_ns: int = 0
    """When it halted, or its ranks were last heard of; by its own clocks."""


class _Decided(NamedTuple):
    last_trouble: int = -1
    halt: Decision | None = None
    halted_unix_ns: int = 0


class RunStatusCache:
    """What every run is doing. ``touch`` is for any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._touched: dict[str, bool] = {}
        self._statuses: dict[str, RunStatus] = {}
        self._decided: dict[str, _Decided] = {}

    def touch(self, run_ids: Iterable[str], *, at_once: bool) -> None:
        """Remember that something of these runs came; ``at_once``: what may change their state."""
        with self._lock:
            for run_id in run_ids:
                self._touched[run_id] = at_once or self._touched.get(run_id, False)

    @property
    def has_urgent(self) -> bool:
        """Whether something came that may have changed a run's state."""
        with self._lock:
            return any(self._touched.values())

    @property
    def running(self) -> set[str]:
        """The runs that go on."""
        return {status.run_id for status in self._statuses.values() if status.state == "running"}

    def statuses(self, run_ids: Iterable[str] | None = None) -> list[RunStatus]:
        """Return what was last seen of some runs, or of all."""
        if run_ids is None:
            return list(self._statuses.values())
        return [self._statuses[run_id] for run_id in run_ids if run_id in self._statuses]

    def refresh(self, connection: Connection, when: Liveness, *, only_new: bool) -> set[str]:
        """Ask after runs and return which; ``only_new``: after those of which that cannot wait."""
        with self._lock:
            touched = self._touched
            due_runs = {run_id for run_id, at_once in touched.items() if at_once or not only_new}
            self._touched = {
                run_id: now for run_id, now in touched.items() if run_id not in due_runs
            }
        try:
            if not only_new:
                every = set(connection.execute(select(runs.c.run_id)).scalars())
                for removed_id in self._statuses.keys() - every:
                    del self._statuses[removed_id]
                    self._decided.pop(removed_id, None)
                due_runs = (due_runs | self.running | (every - self._statuses.keys())) & every
            order = sorted(due_runs)
            for first in range(0, len(order), _RUNS_AT_ONCE):
                self._refresh_some(connection, order[first : first + _RUNS_AT_ONCE], touched, when)
        except BaseException:
            self.touch(due_runs, at_once=True)
            raise
        return due_runs

    def _refresh_some(
        self,
        connection: Connection,
        run_ids: Sequence[str],
        touched: dict[str, bool],
        when: Liveness,
    ) -> None:
        running = self.running
        for run_id in run_ids:
            if touched.get(run_id) or run_id not in running:
                self._decided[run_id] = _decided(connection, run_id)
        of_run: dict[str, list[Row[Any]]] = defaultdict(list)
        for row in connection.execute(select(*_COLUMNS).where(sources.c.run_id.in_(run_ids))):
            of_run[row.run_id].append(row)
        for run_id in run_ids:
            self._statuses[run_id] = _status_of(
                connection, run_id, of_run[run_id], self._decided[run_id], when
            )


_COLUMNS = tuple(
    sources.c[name]
    for name in (
        "run_id",
        "source",
        "started_unix_ns",
        "last_seen_unix_ns",
        "last_received_unix_ns",
        "alive",
        "ended_state",
        "world_size",
        "last_step",
        "last_step_unix_ns",
    )
)


def _status_of(
    connection: Connection,
    run_id: str,
    rows: Sequence[Row[Any]],
    decided: _Decided,
    when: Liveness,
) -> RunStatus:
    state = run_state([SourceState._make(row[1:8]) for row in rows], when)
    heads = [row for row in rows if row.source == "rank:0" and row.last_step >= 0]
    head = max(heads, key=lambda row: row.last_step_unix_ns, default=None)
    last_step = -1 if head is None else head.last_step
    status = RunStatus(
        run_id=run_id,
        state=state,
        last_step=last_step,
        step=last_step,
        last_trouble=decided.last_trouble,
        last_seen_unix_ns=max((row.last_seen_unix_ns for row in rows), default=0),
        # An agent may outlive its ranks by hours.
        ended_unix_ns=max(
            (row.last_seen_unix_ns for row in rows if row.source.startswith("rank:")), default=0
        ),
    )
    if decided.halt is not None:
        # The rank may have died before it could say goodbye; its last decision says it for it.
        halt = decided.halt
        return replace(
            status,
            state="halted",
            reason=halt.reason,
            step=halt.step,
            ended_unix_ns=decided.halted_unix_ns,
        )
    if state in ("failed", "lost"):
        started = max((row.started_unix_ns for row in rows if row.source == "rank:0"), default=0)
        return replace(status, reason=_why(connection, run_id, state, started))
    return status


def _why(connection: Connection, run_id: str, state: RunState, started_unix_ns: int) -> str:
    """Return what the first rank that failed said, else what an agent said of one that is gone."""
    if state == "failed":
        query = (
            select(sources.c.source, sources.c.ended_reason)
            .where(
                sources.c.run_id == run_id,
                sources.c.ended_state == "failed",
                sources.c.ended_reason != "",
                sources.c.ended_unix_ns >= started_unix_ns,
            )
            .order_by(sources.c.ended_unix_ns)
            .limit(1)
        )
        failure = connection.execute(query).first()
        if failure is not None:
            return f"{failure.source.replace(':', ' ')}: {failure.ended_reason}"
    lost_memory = (
        select(events.c.summary)
        .where(
            events.c.run_id == run_id,
            events.c.kind == "Note",
            events.c.summary.endswith(_GONE),
            events.c.time_unix_ns >= started_unix_ns,
        )
        .order_by(events.c.time_unix_ns)
        .limit(1)
    )
    note: str = connection.execute(lost_memory).scalar() or ""
    return note.removesuffix(_GONE)


_GONE = " [rank_gone]"
"""How a line about an agent's note of that code ends."""


def _decided(connection: Connection, run_id: str) -> _Decided:
    """Return a run's newest trouble, and the halt that its newest start of rank 0 decided."""
    mine = decisions.c.run_id == run_id
    trouble = (
        select(decisions.c.step)
        .where(mine, decisions.c.action.in_(("skip_step", "rollback")))
        .order_by(decisions.c.ledger_seq.desc())
        .limit(1)
    )
    newest = (
        select(func.max(sources.c.started_unix_ns))
        .where(sources.c.run_id == run_id, sources.c.source == "rank:0")
        .scalar_subquery()
    )
    halts = (
        select(decisions.c.body, decisions.c.time_unix_ns)
        .join(
            sources,
            (sources.c.run_id == decisions.c.run_id)
            & (sources.c.incarnation == decisions.c.incarnation),
        )
        .where(
            mine,
            decisions.c.action == "halt",
            decisions.c.acted,
            sources.c.source == "rank:0",
            sources.c.started_unix_ns == newest,
        )
        .order_by(decisions.c.ledger_seq.desc())
        .limit(1)
    )
    step = connection.execute(trouble).scalar()
    last_trouble = -1 if step is None else step
    halt = connection.execute(halts).first()
    if halt is None or not halt.body:
        return _Decided(last_trouble)
    return _Decided(last_trouble, _decision(halt.body), halt.time_unix_ns)


__all__ = ["Liveness", "RunStatus", "RunStatusCache", "SourceState", "health", "run_state"]
