"""State of every run, from the times its sources last reported; refreshed if it may change.

An ended run keeps its state until new data arrives. A running run is refreshed at intervals,
because silence changes its state; its decisions are read only after a new one. Pure functions
derive the state from the sources; ``now`` is passed in.
"""

import threading
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace
from sqlalchemy import Connection, Row, Select, select

from trainvitals.errors import UNREADABLE
from trainvitals.records import Decision, Finding
from trainvitals.views import Health, RunState
from vitals_collector.numbers.interface import MAX_RANKS, rank_of
from vitals_collector.storage.schema import decisions, events, findings, runs, sources

_FINAL: tuple[RunState, ...] = ("halted", "failed", "interrupted", "finished")
"""Reported ends of a run, the most informative first."""


class Liveness(msgspec.Struct, frozen=True, kw_only=True):
    """When a silent run counts as lost."""

    now_unix_ns: int
    up_since_unix_ns: int = 0
    """When this collector started: silence before that means nothing."""
    lost_after_seconds: float = 60.0
    """Neither a rank's row nor its agent's for longer than this: the run is lost."""
    is_reading_in: bool = False
    """A directory is being imported: the last events of its runs may be missing."""


GUEST = "otlp."
"""Prefix of the name of a pseudo-node: a program that sends OpenTelemetry metrics about a run. It
does not show that the run is alive."""


class SourceState(NamedTuple):
    """State of one incarnation of a source."""

    source: str
    started_unix_ns: int
    last_seen_unix_ns: int
    last_received_unix_ns: int
    alive: int
    ended_state: str
    world_size: int = 0
    node: str = ""
    last_step: int = -1
    last_step_unix_ns: int = 0


_Incarnation = TypeVar("_Incarnation", SourceState, Row[Any])


def _latest_incarnations(sources: Iterable[SourceState]) -> dict[str, SourceState]:
    """Return the latest incarnation of each source, on which the run's state depends."""
    newest: dict[str, SourceState] = {}
    again: dict[str, list[SourceState]] = {}
    for source in sources:  # of thousands, mostly started once
        first = newest.setdefault(source.source, source)
        if first is not source:
            again.setdefault(source.source, [first]).append(source)
    return newest | {
        name: _last_reporting_incarnation(incarnations) for name, incarnations in again.items()
    }


def _last_reporting_incarnation(incarnations: Sequence[_Incarnation]) -> _Incarnation:
    """Return the incarnation that reported last, on which the run's state depends.

    Not the one started last: it may be on another node, whose clock is behind. Among ended ones,
    the one that ended last: rows of another may have arrived after its end.
    """
    last = max(incarnations, key=lambda one: (one.last_received_unix_ns, one.started_unix_ns))
    if not last.ended_state:
        return last
    return max(
        (one for one in incarnations if one.ended_state), key=lambda one: one.last_seen_unix_ns
    )


def _is_rank_of(source: SourceState, head: SourceState | None) -> bool:
    """Return whether the source is a rank of the current launch, so that the run needs it."""
    rank = rank_of(source.source)
    return rank >= 0 and (head is None or head.world_size < 1 or rank < head.world_size)


def last_seen(sources: Iterable[SourceState]) -> int:
    """Return when a run's sources last reported, for its state; pseudo-nodes do not count."""
    reporting = (one for one in sources if not one.source.startswith(f"node:{GUEST}"))
    return max((one.last_seen_unix_ns for one in reporting), default=0)


def run_state(sources: Sequence[SourceState], when: Liveness) -> RunState:
    """Return the run's state from the latest incarnation of each source.

    A run that reported its end has that state. One whose agents report that all its processes have
    ended is lost at once: an agent reports it after the last row of the rank. A silent one is lost
    only when its agents are silent as well: a rank in a long evaluation is silent and healthy.
    """
    newest = _latest_incarnations(sources)
    head = newest.get("rank:0")
    ranks = [source for source in newest.values() if _is_rank_of(source, head)]
    agents = [
        source for name, source in newest.items() if not name.startswith(("rank:", f"node:{GUEST}"))
    ]
    ended = {source.ended_state for source in ranks} & set(_FINAL)
    if head is not None and head.ended_state:
        final_state: RunState = next((state for state in _FINAL if state in ended), "finished")
        # A launcher that loses one rank interrupts the others: theirs is not the story.
        return "failed" if final_state == "interrupted" and _lost_one_first(ranks) else final_state
    if when.is_reading_in and not any(source.last_received_unix_ns for source in newest.values()):
        return "running"
    is_gone = bool(ranks) and all(source.alive == 0 or source.ended_state for source in ranks)
    if is_gone or all(_is_silent(source, when) for source in (*ranks, *agents)):
        # If rank 0 was killed before it could report, another rank may have reported why.
        return "failed" if "failed" in ended else "lost"
    return "running"


def _lost_one_first(ranks: Sequence[SourceState]) -> bool:
    """Return whether a run has failed: a rank was lost before the first other rank ended.

    A rank that exceeds the launcher's grace period is killed: that is not a fault.
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
    is_unguarded: bool = False,
    is_partial: bool = False,
) -> Health:
    """Return the health that a list of runs shows next to the state.

    A run that ended during skipped steps is not healthy; nor is a broken one, whose last loss is
    non-finite: critical, unless Vitals is acting on it. A run whose latest steps nobody could
    measure is unguarded regardless of other conditions. If some sources are silent, the health is
    unknown.
    """
    if is_unguarded and not is_broken and state in ("running", "finished", "interrupted"):
        return "unguarded"
    if state in ("halted", "failed", "lost") or firing_pages:
        return "critical"
    if not has_steps or (is_partial and state == "running"):
        return "unknown"
    is_acted_on = ended_in_trouble or (state == "running" and recent_action)
    if is_broken and not is_acted_on:
        return "critical"
    return "acting" if is_acted_on or (state == "running" and lr_factor < 1) else "healthy"


def _is_silent(source: SourceState, when: Liveness) -> bool:
    """Return whether a source has sent no rows for so long that its run may be lost."""
    # The sender's clock may be wrong and a spool may be late: this collector's own clock at the
    # last arrival counts, unless the rows are read from a directory.
    heard = source.last_seen_unix_ns
    if source.last_received_unix_ns:
        heard = max(source.last_received_unix_ns, when.up_since_unix_ns)
    return when.now_unix_ns - heard > when.lost_after_seconds * 1e9


# ------------------------------------------------------------------------------------- who is gone
#
# A node whose agent and ranks are all silent is lost, unless the others have since completed steps
# together with its ranks: then only the agent is lost. A rank is lost if its agent reported the end
# of its process, even if that agent is silent later. A silent rank with a live agent is not lost:
# it evaluates, or it waits for others, which a stall shows.
#
# All times are the collector's own: clocks of nodes may differ by minutes. Data from before the
# latest launch of any rank belongs to an earlier launch, and does not count as a loss.


_MARGIN = 0.25
"""How much later than the silent rank the others must have completed a step, as a share of the
limit: rows in transit when a node dies arrive a few seconds after those of the others."""


class AbsentParts(msgspec.Struct, frozen=True):
    """Lost or silent parts of a run."""

    ranks: tuple[int, ...] = ()
    """Ranks whose process ended unexpectedly, on nodes that report."""
    nodes: tuple[str, ...] = ()
    """Silent nodes, while no step was completed without them."""
    agents: tuple[str, ...] = ()
    """Nodes whose agent is silent, although their ranks are running."""
    never_heard: tuple[int, ...] = ()
    """Ranks of this launch that never reported, while several others did."""


NOBODY = AbsentParts()


class _RankReportTimes(NamedTuple):
    """One rank of the present launch, by the collector's clock."""

    rank: int
    source: SourceState
    last_ns: int
    step_ns: int
    """When its latest step arrived."""


def find_absent_parts(sources: Sequence[SourceState], when: Liveness) -> AbsentParts:
    """Return the lost parts of a running run, to alert about; none during an import."""
    newest = _latest_incarnations(sources)
    head = newest.get("rank:0")
    if when.is_reading_in or head is None:
        return NOBODY
    ranks = [
        _last_report_times(source, when) for source in newest.values() if _is_rank_of(source, head)
    ]
    launched = max(_launch_time(rank.source) for rank in ranks)
    relaunched = _last_relaunch_time(sources, ranks)
    present = [rank for rank in ranks if rank.source.last_received_unix_ns >= relaunched]
    expected = [rank for rank in present if not rank.source.ended_state]
    silent_since = when.now_unix_ns - int(when.lost_after_seconds * 1e9)

    def is_silent(heard_ns: int) -> bool:
        return heard_ns < silent_since

    speaking = _last_of_nodes(newest.values(), when)
    dead = [rank for rank in expected if rank.source.alive == 0]
    ranks_of: dict[str, list[_RankReportTimes]] = defaultdict(list)
    for rank in expected:
        if rank.source.alive != 0:
            ranks_of[rank.source.node].append(rank)
    silent = {
        node: of_node
        for node, of_node in ranks_of.items()
        if node in speaking and is_silent(speaking[node])
    }
    step_times: dict[int, int] = {}
    for rank in present if silent else ():
        step = rank.source.last_step
        step_times[step] = max(rank.step_ns, step_times.get(step, 0))
    passed = {
        node for node, of_node in silent.items() if _has_step_without(of_node, step_times, when)
    }
    return AbsentParts(
        ranks=tuple(sorted(rank.rank for rank in dead if is_silent(rank.last_ns))),
        nodes=tuple(sorted(silent.keys() - passed)),
        agents=tuple(sorted(passed)),
        never_heard=_never_heard(head, present, is_silent(max(launched, when.up_since_unix_ns))),
    )


def lost_before_the_end(sources: Sequence[SourceState], when: Liveness) -> AbsentParts:
    """Return nodes of a failed run that became silent before a rank reported the failure.

    This explains the failure: connections to a dead machine break. A node that reported later was
    ended by its launcher, because the others had failed.
    """
    newest = _latest_incarnations(sources).values()
    failed = [source.last_received_unix_ns for source in newest if source.ended_state == "failed"]
    heard = _last_of_nodes(newest, replace(when, up_since_unix_ns=0))
    first = min(failed, default=0)
    return AbsentParts(
        nodes=tuple(n for n in find_absent_parts(sources, when).nodes if heard[n] < first)
    )


def _launch_time(source: SourceState) -> int:
    """Return when a part of a run started, by the collector's clock; later if its rows are late."""
    return source.last_received_unix_ns - max(0, source.last_seen_unix_ns - source.started_unix_ns)


def _last_relaunch_time(sources: Sequence[SourceState], ranks: Sequence[_RankReportTimes]) -> int:
    """Return when the latest of the restarted ranks started; 0 if none was restarted."""
    num_starts = Counter(source.source for source in sources)
    again = (rank.source for rank in ranks if num_starts[rank.source.source] > 1)
    return max(map(_launch_time, again), default=0)


def find_ranks_behind(sources: Sequence[SourceState]) -> tuple[int, ...]:
    """Return the ranks whose latest step has not arrived, while that of others has."""
    newest = _latest_incarnations(sources)
    head = newest.get("rank:0")
    steps = {
        rank_of(source.source): source.last_step
        for source in newest.values()
        if _is_rank_of(source, head) and not source.ended_state
    }
    furthest = max(steps.values(), default=-1)
    return tuple(sorted(rank for rank, step in steps.items() if step < furthest))


def _last_report_times(source: SourceState, when: Liveness) -> _RankReportTimes:
    """Return when a rank last reported, and when its latest step arrived."""
    last = max(source.last_received_unix_ns, when.up_since_unix_ns)
    # Both times are of the sender's clock: how long it reported after its latest step.
    since_step = max(0, source.last_seen_unix_ns - source.last_step_unix_ns)
    return _RankReportTimes(
        rank_of(source.source), source, last, source.last_received_unix_ns - since_step
    )


def _last_of_nodes(sources: Iterable[SourceState], when: Liveness) -> dict[str, int]:
    """Return when each node of a run last reported; nodes that never had an agent are left out."""
    last: dict[str, int] = {}
    spoke: set[str] = set()
    for source in sources:
        if not source.source.startswith("rank:"):
            spoke.add(source.node)
        heard = max(source.last_received_unix_ns, when.up_since_unix_ns)
        last[source.node] = max(heard, last.get(source.node, 0))
    return {node: heard for node, heard in last.items() if node in spoke}


def _has_step_without(
    silent: Sequence[_RankReportTimes], step_times: Mapping[int, int], when: Liveness
) -> bool:
    """Return whether others completed steps after these became silent: steps need every rank.

    ``step_times`` has the arrival times of each rank's latest step: those are few, while silent
    ranks and nodes may be thousands.
    """
    step = max(rank.source.last_step for rank in silent)
    heard = max(rank.source.last_received_unix_ns for rank in silent)
    margin = int(when.lost_after_seconds * _MARGIN * 1e9)
    return any(at > heard + margin for other, at in step_times.items() if other > step)


def _never_heard(
    head: SourceState, present: Sequence[_RankReportTimes], is_due: bool
) -> tuple[int, ...]:
    """Return the ranks of this launch that never reported, while others did."""
    # If only rank 0 reports, the others are not monitored at all.
    if not is_due or len(present) < 2:
        return ()
    expected = range(min(head.world_size, MAX_RANKS))
    return tuple(sorted(set(expected) - {rank.rank for rank in present}))


# -------------------------------------------------------------------------------------- of all runs

_RUNS_AT_ONCE = 100
_MOST_NAMED = 8
"""Nodes that a text names."""
_decision = msgspec.msgpack.Decoder(Decision).decode


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """State of one run."""

    run_id: str
    state: RunState
    reason: str = ""
    """Reason of its end, if known."""
    last_step: int = -1
    step: int = -1
    """The step that the state is about."""
    last_trouble: int = -1
    """The step of its latest skip or rollback."""
    last_seen_unix_ns: int = 0
    """When it last reported, by its own clocks."""
    ended_unix_ns: int = 0
    """When it halted, or its ranks last reported; by its own clocks."""
    absent: AbsentParts = NOBODY
    """Lost parts of a running run, or parts lost before it failed."""
    unheard: AbsentParts = NOBODY
    """Parts that would be lost if this collector had been running all the time: not known yet."""
    is_unheard: bool = False
    """The run would be lost if this collector had been running all the time: not known yet."""
    behind: tuple[int, ...] = ()
    """Ranks of a running run that have not reached the latest step."""
    hang: str = ""
    """Ranks that hung before ranks were lost, if no step followed."""


class _LastDecisions(NamedTuple):
    last_trouble: int = -1
    halt: Decision | None = None
    halted_unix_ns: int = 0


class RunStatusCache:
    """States of runs. ``touch`` is thread-safe.

    With ``is_shared``, other collectors may have received data of a run before this one first
    checked it: silence counts from then on, because its senders may not have found this one yet.
    """

    def __init__(self, *, is_shared: bool = False) -> None:
        self._is_shared = is_shared
        self._since: dict[str, int] = {}
        """When runs were first checked, with other collectors."""
        self._lock = threading.Lock()
        self._touched: dict[str, bool] = {}
        self._statuses: dict[str, RunStatus] = {}
        self._decided: dict[str, _LastDecisions] = {}
        self._moved: dict[str, dict[str, tuple[int, int]]] = {}
        """By run and incarnation of a directory: its last report by its own clock, and when this
        process first saw it."""
        self._rest_until: dict[str, int] = {}
        """Until when large runs are not checked again, by this process's clock."""
        self._failed_at: dict[str, int] = {}
        """When runs were first seen to have failed, by our clock: lost parts show later."""

    def touch(self, run_ids: Iterable[str], *, at_once: bool) -> None:
        """Record new data of these runs; ``at_once``: data that may change their state."""
        with self._lock:
            for run_id in run_ids:
                self._touched[run_id] = at_once or self._touched.get(run_id, False)

    @property
    def running(self) -> set[str]:
        """Return the runs whose latest state is running."""
        return {status.run_id for status in self._statuses.values() if status.state == "running"}

    def statuses(self, run_ids: Iterable[str] | None = None) -> list[RunStatus]:
        """Return the latest states of some runs, or of all."""
        if run_ids is None:
            return list(self._statuses.values())
        return [self._statuses[run_id] for run_id in run_ids if run_id in self._statuses]

    def drop(self, run_ids: Iterable[str]) -> None:
        """Drop the state of runs; those that are still refreshed start without one."""
        for run_id in run_ids:
            for cache in (
                *(self._statuses, self._decided, self._moved),
                *(self._failed_at, self._since, self._rest_until),
            ):
                cache.pop(run_id, None)

    def refresh(
        self,
        connection: Connection,
        when: Liveness,
        *,
        only_new: bool,
        of: Collection[str] | None = None,
        exclude: Collection[str] = (),
    ) -> set[str]:
        """Refresh the states of runs and return the refreshed runs.

        With ``only_new``, refresh only runs with urgent news, otherwise all that may change. ``of``
        limits that to some runs; others refresh those in ``exclude``. The connection is that of a
        ``Store.read_transaction``.
        """
        with self._lock:
            touched = self._touched
            due_runs = {run_id for run_id, at_once in touched.items() if at_once or not only_new}
            self._touched = {
                run_id: now for run_id, now in touched.items() if run_id not in due_runs
            }
        try:
            if not only_new:
                query = select(runs.c.run_id)
                query = query if of is None else query.where(runs.c.run_id.in_(of))
                every = set(connection.execute(query).scalars()).difference(exclude)
                self.drop(self._statuses.keys() - every)
                since = when.now_unix_ns - int(2 * when.lost_after_seconds * 1e9)
                failed = {run_id for run_id, at in self._failed_at.items() if at >= since}
                run_ids = self.running | failed | (every - self._statuses.keys())
                resting = {
                    run_id
                    for run_id, until in self._rest_until.items()
                    if when.now_unix_ns < until and not touched.get(run_id)
                }
                due_runs = ((due_runs | run_ids) & every) - resting
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
        """Read the status of some runs from the database into the cache."""
        running = self.running
        for run_id in run_ids:
            if touched.get(run_id) or run_id not in running:
                self._decided[run_id] = _load_last_decisions(connection, run_id)
        of_run: dict[str, list[tuple[str, SourceState]]] = defaultdict(list)
        query = select(*_COLUMNS).where(sources.c.run_id.in_(run_ids))
        for run_id, incarnation, *state in connection.execute(query).all():
            of_run[run_id].append(
                (incarnation, _fix_future_arrival(SourceState._make(state), when))
            )
        for run_id in run_ids:
            writer_states = [state for _, state in of_run[run_id]]
            heard_since = self._heard_since(run_id, when)
            status = _status_of(
                connection, run_id, writer_states, self._decided[run_id], heard_since
            )
            if status.state == "running":
                self._rest_until[run_id] = when.now_unix_ns + _rest_ns(len(writer_states), when)
            else:
                self._rest_until.pop(run_id, None)
                self._moved.pop(run_id, None)
            if status.state == "failed":
                self._failed_at.setdefault(run_id, when.now_unix_ns)
            else:
                self._failed_at.pop(run_id, None)
            if status.state in ("running", "failed"):
                status = self._add_absent_parts(connection, status, of_run[run_id], heard_since)
            self._statuses[run_id] = status

    def _heard_since(self, run_id: str, when: Liveness) -> Liveness:
        """Return the criteria of lost runs, with silence counted from the first check here."""
        if not self._is_shared:
            return when
        since = self._since.setdefault(run_id, when.now_unix_ns)
        return replace(when, up_since_unix_ns=max(since, when.up_since_unix_ns))

    def _add_absent_parts(
        self,
        connection: Connection,
        status: RunStatus,
        of_run: Sequence[tuple[str, SourceState]],
        when: Liveness,
    ) -> RunStatus:
        """Add a run's lost parts, and those that were silent since this collector started."""
        if status.state == "failed":
            parts, gone = [state for _, state in of_run], lost_before_the_end
        else:
            parts, gone = self._fill_arrival_times(status.run_id, of_run, when), find_absent_parts
            status = replace(status, behind=find_ranks_behind(parts))
        status = replace(status, absent=gone(parts, when))
        if status.absent.ranks and status.state == "running":
            hang = hang_of(connection, status.run_id, status.last_step)
            status = replace(status, hang=hang)
        if when.now_unix_ns - when.up_since_unix_ns > when.lost_after_seconds * 1e9:
            return status
        always_up = replace(when, up_since_unix_ns=0)
        is_unheard = run_state(parts, always_up) == "lost"
        return replace(status, unheard=gone(parts, always_up), is_unheard=is_unheard)

    def _fill_arrival_times(
        self, run_id: str, of_run: Iterable[tuple[str, SourceState]], when: Liveness
    ) -> list[SourceState]:
        """Return the sources; for those in a directory, with the time of the last change seen."""
        before, moved = self._moved.get(run_id, {}), {}
        parts = []
        for incarnation, state in of_run:
            if not state.last_received_unix_ns:
                seen, at = before.get(incarnation, (-1, 0))
                if seen != state.last_seen_unix_ns:
                    seen, at = state.last_seen_unix_ns, when.now_unix_ns
                moved[incarnation] = (seen, at)
                state = state._replace(last_received_unix_ns=at)
            parts.append(state)
        self._moved[run_id] = moved
        return parts


_FEW = 1_000
_NS_PER_SOURCE = 1_000_000
_LONGEST_REST = 1 / 6
"""In parts of the time after which a silent run counts as lost."""


def _rest_ns(num_sources: int, when: Liveness) -> int:
    """Return how long a running run is not checked again, unless its state may change.

    4,096 ranks are 50 ms of work: so large runs rest one millisecond per source.
    """
    if num_sources < _FEW:
        return 0
    return min(num_sources * _NS_PER_SOURCE, int(_LONGEST_REST * when.lost_after_seconds * 1e9))


def _fix_future_arrival(source: SourceState, when: Liveness) -> SourceState:
    """Return the source; an arrival in the future was received before a clock was set back.

    Its silence counts from when this collector started.
    """
    if source.last_received_unix_ns <= when.now_unix_ns + when.lost_after_seconds * 1e9:
        return source
    return source._replace(last_received_unix_ns=max(1, when.up_since_unix_ns))


_COLUMNS = tuple(sources.c[name] for name in ("run_id", "incarnation", *SourceState._fields))


def _status_of(
    connection: Connection,
    run_id: str,
    parts: Sequence[SourceState],
    decided: _LastDecisions,
    when: Liveness,
) -> RunStatus:
    """Return a run's status from its sources and its last decisions."""
    state = run_state(parts, when)
    heads = [part for part in parts if part.source == "rank:0" and part.last_step >= 0]
    head = max(heads, key=lambda part: part.last_step_unix_ns, default=None)
    last_step = -1 if head is None else head.last_step
    status = RunStatus(
        run_id=run_id,
        state=state,
        last_step=last_step,
        step=last_step,
        last_trouble=decided.last_trouble,
        last_seen_unix_ns=last_seen(parts),
        # An agent may outlive its ranks by hours.
        ended_unix_ns=max(
            (part.last_seen_unix_ns for part in parts if part.source.startswith("rank:")), default=0
        ),
    )
    if decided.halt is not None:
        # The rank may have died before it could report its end; then its last decision shows it.
        halt = decided.halt
        return replace(
            status,
            state="halted",
            reason=halt.reason,
            step=halt.step,
            ended_unix_ns=decided.halted_unix_ns,
        )
    if state in ("failed", "lost"):
        starts = [part for part in parts if part.source == "rank:0"]
        started = _last_reporting_incarnation(starts).started_unix_ns if starts else 0
        why = _load_end_reason(connection, run_id, state, started)
        if hang := hang_of(connection, run_id, last_step):
            # The first lost rank when a hung job is ended means nothing.
            why = f"{hang}; then: {why or 'the run stopped reporting'}"
        if state == "lost" and parts:
            why = f"{why or 'the run stopped reporting'}; {_last_report_text(parts)}"
        return replace(status, reason=why)
    return status


def _load_end_reason(
    connection: Connection, run_id: str, state: RunState, started_unix_ns: int
) -> str:
    """Load the reason for a run's state: of the first failed rank, otherwise an agent's."""
    if state == "failed":
        query = (
            select(sources.c.source, sources.c.ended_reason, sources.c.ended_unix_ns)
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
            cause = f"{failure.source.replace(':', ' ')}: {failure.ended_reason}"
            killed = _find_killed_rank(connection, run_id, started_unix_ns, failure.ended_unix_ns)
            return f"{killed}; then {cause}" if killed else cause
    notes = _notes_of_lost_ranks(run_id, started_unix_ns)
    # An agent may report a death before a relaunch only after the relaunch started.
    replaced = _find_replaced_processes(connection, run_id)
    for note in connection.execute(notes).scalars():
        if not any(process in note for process in replaced):
            return str(note).removesuffix(_GONE)
    return ""


def _find_killed_rank(
    connection: Connection, run_id: str, started_unix_ns: int, failed_unix_ns: int
) -> str:
    """Return which rank was killed before the first of the others failed: they fail of that.

    Those that the launcher ends afterwards are sent SIGTERM.
    """
    table = events.c
    query = _notes_of_lost_ranks(run_id, started_unix_ns).where(
        table.summary.contains("clean exit (signal "),
        ~table.summary.contains("SIGTERM"),
        table.time_unix_ns <= failed_unix_ns + _TOLD_NS,
    )
    note = connection.execute(query.limit(1)).scalar()
    return "" if note is None else str(note).removesuffix(_GONE)


def _notes_of_lost_ranks(run_id: str, since_unix_ns: int) -> Select[Any]:
    """Return the query for the agents' notes that a rank's process has ended, oldest first."""
    table = events.c
    conditions = (table.run_id == run_id, table.kind == "Note", table.summary.endswith(_GONE))
    query = select(table.summary).where(*conditions, table.time_unix_ns >= since_unix_ns)
    return query.order_by(table.time_unix_ns)


def hang_of(connection: Connection, run_id: str, last_step: int) -> str:
    """Return the latest hang of a run, if no step followed; "" if there is none."""
    table = findings.c
    query = (
        select(table.body)
        .where(table.run_id == run_id, table.kind == "hang", table.step >= last_step)
        .order_by(table.time_unix_ns.desc())
        .limit(1)
    )
    body = connection.execute(query).scalar()
    if not body:
        return ""
    try:
        return msgspec.msgpack.decode(body, type=Finding).reason
    except UNREADABLE:  # of a later version
        return ""


def _find_replaced_processes(connection: Connection, run_id: str) -> set[str]:
    """Return the processes of ranks that were restarted since, as an agent names them."""
    columns = [sources.c[name] for name in _PROCESS]
    ranks = connection.execute(
        select(*columns).where(sources.c.run_id == run_id, sources.c.source.startswith("rank:"))
    )
    starts: dict[str, list[Row[Any]]] = defaultdict(list)
    for rank in ranks:
        starts[rank.source].append(rank)
    present = {_process_label(_last_reporting_incarnation(of_rank)) for of_rank in starts.values()}
    return {_process_label(start) for of_rank in starts.values() for start in of_rank} - present


def _process_label(rank: Row[Any]) -> str:
    """Return a rank's process as the agents' notes name it."""
    return f"{rank.source.replace(':', ' ')} (pid {rank.pid} on {rank.node}) "


def _last_report_text(parts: Sequence[SourceState]) -> str:
    """Describe the state of a lost run: its last report, and the nodes of its ranks."""
    newest = _latest_incarnations(parts)
    ranks = [s for s in newest.values() if _is_rank_of(s, newest.get("rank:0"))]
    nodes = sorted({rank.node for rank in ranks} - {""})
    last = datetime.fromtimestamp(max(part.last_seen_unix_ns for part in parts) / 1e9, UTC)
    seen_text = f"last seen at {last:%Y-%m-%d %H:%M:%S} UTC"
    if not nodes:
        return seen_text
    more = f" and {len(nodes) - _MOST_NAMED} more" if nodes[_MOST_NAMED:] else ""
    on = "on node" if len(nodes) == 1 else "on nodes"
    return f"{seen_text}, {on} {', '.join(nodes[:_MOST_NAMED])}{more}"


_PROCESS = (
    *("source", "pid", "node"),
    *("started_unix_ns", "last_seen_unix_ns", "last_received_unix_ns", "ended_state"),
)
"""A rank's process, and the columns that show which incarnation reported last."""
_TOLD_NS = 2_000_000_000
"""An agent may report the end of a process this late; other ranks' failures are reported at
once."""
_GONE = " [rank_gone]"
"""Suffix of a line about an agent's note of that code."""


def _load_last_decisions(connection: Connection, run_id: str) -> _LastDecisions:
    """Return a run's latest problem, and the halt that its latest start of rank 0 decided."""
    condition = decisions.c.run_id == run_id
    trouble = (
        select(decisions.c.step)
        .where(condition, decisions.c.action.in_(("skip_step", "rollback")))
        .order_by(decisions.c.ledger_seq.desc())
        .limit(1)
    )
    starts = connection.execute(
        select(*_COLUMNS).where(sources.c.run_id == run_id, sources.c.source == "rank:0")
    ).all()
    halts = (
        select(decisions.c.body, decisions.c.time_unix_ns)
        .where(
            condition,
            decisions.c.action == "halt",
            decisions.c.acted,
            decisions.c.incarnation
            == (_last_reporting_incarnation(starts).incarnation if starts else ""),
        )
        .order_by(decisions.c.ledger_seq.desc())
        .limit(1)
    )
    step = connection.execute(trouble).scalar()
    last_trouble = -1 if step is None else step
    halt = connection.execute(halts).first()
    if halt is None or not halt.body:
        return _LastDecisions(last_trouble)
    try:
        return _LastDecisions(last_trouble, _decision(halt.body), halt.time_unix_ns)
    except UNREADABLE:  # of a later version; its ranks report their end themselves
        return _LastDecisions(last_trouble)
