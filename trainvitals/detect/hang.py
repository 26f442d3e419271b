"""The blocking rank of a hang: found by asymmetry, never by silence only.

Ranks that wait for each other have started the same number of collectives; the blocking rank has
started fewer, or its process is stopped or has ended. There are two levels: *waiting* is shown
without a page, because one rank may evaluate or save alone; *page* is for a rank that is stopped,
has ended or is blocked for longer than such a phase takes in this run, and for one that computes,
only after minutes.

Pure: the observations of the agents go in, a verdict comes out; no clock or process is read here.
"""

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta

from trainvitals.config import AtLeastOne, Settings
from trainvitals.records import Finding, HangLimits, Phase, RankActivity
from trainvitals.units import humanize_seconds, name_ranks

Reason = Literal[
    "stopped",
    "gone",
    "ended",
    "debugged",
    "order",
    "blocked",
    "interpreter",
    "device",
    "computing",
    "all",
]


FAILED = "failed"
"""How a rank ended if its loop raised an error, as ``RankActivity.exit`` has it."""
_QUEUE_SECONDS = 30.0
"""Work that may be queued on a healthy GPU: 1,024 kernels of 30 ms."""


class HangConfig(Settings, frozen=True, kw_only=True):
    """How long ranks may wait for one of them."""

    section = "hang"
    ascending = (("show_seconds", "page_seconds", "computing_seconds"),)

    show_seconds: Annotated[float, Meta(gt=0.0)] = 3.0
    """A wait is shown after this long."""
    show_ratio: Annotated[float, Meta(ge=1.0)] = 3.0
    """And after this multiple of the phase's 99th percentile."""
    page_seconds: Annotated[float, Meta(gt=0.0)] = 5.0
    """A rank that is stopped, gone or blocked pages after this long."""
    page_ratio: Annotated[float, Meta(ge=1.0)] = 5.0
    """And after this multiple of the phase's 99th percentile."""
    computing_seconds: Annotated[float, Meta(gt=0.0)] = 180.0
    """One that computes pages after this long: an evaluation of rank 0 alone looks the same."""
    computing_ratio: Annotated[float, Meta(ge=1.0)] = 5.0
    """And after this multiple of the longest such wait that ended by itself."""
    restart_seconds: Annotated[float, Meta(ge=0.0)] = 60.0
    """With ``on_hang="restart"`` the job is ended once a page has held for this long."""
    max_restarts: AtLeastOne = 3
    """Jobs of one run that are ended within a day; then it only pages."""


class HangVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The blocking ranks, and whether an operator is needed."""

    pages: bool
    culprits: tuple[int, ...]
    """Empty if all ranks are at the same place."""
    reason: Reason
    step: int
    seconds: float
    limit: float
    """Time after which it pages; infinite if it does not."""
    text: str
    """Human-readable description."""

    @property
    def key(self) -> tuple[tuple[int, ...], Reason]:
        """Return the hang's blocking ranks and reason: a change of either is a new finding."""
        return self.culprits, self.reason


_KEPT = 512
_FEW = 8


class WaitHistory:
    """Durations without a step or a collective so far, by phase."""

    def __init__(self) -> None:
        self._gaps: dict[Phase, deque[float]] = {}
        self._longest = 0.0

    def add(self, phase: Phase, seconds: float) -> None:
        """Add a wait without progress that ended, so that a hang must last longer."""
        self._gaps.setdefault(phase, deque(maxlen=_KEPT)).append(seconds)

    def add_ended_wait(self, seconds: float) -> None:
        """Add a wait for a computing rank that ended, so that it was not a hang."""
        self._longest = max(self._longest, seconds)

    def p99(self, phase: Phase) -> float | None:
        """Return the 99th percentile of a phase's waits, none of them a hang; None if too few."""
        gaps = self._gaps.get(phase, ())
        if len(gaps) < _FEW:
            return None
        return sorted(gaps)[int(0.99 * (len(gaps) - 1))]

    def limits(self, config: HangConfig) -> HangLimits:
        """Return the times after which the detector shows a wait, and pages a hang."""
        usual = {phase: self.p99(phase) or 0.0 for phase in get_args(Phase)}
        shows = {p: max(config.show_seconds, config.show_ratio * s) for p, s in usual.items()}
        pages = {p: max(config.page_seconds, config.page_ratio * s) for p, s in usual.items()}
        computing = max(config.computing_seconds, config.computing_ratio * self._longest)
        return HangLimits(show=shows, page=pages, computing=computing)


def judge_hang(
    ranks: Sequence[RankActivity], limits: HangLimits, *, world_size: int
) -> HangVerdict | None:
    """Detect a hang: return its blocking ranks; None without a problem or evidence.

    Args:
        ranks: state of each rank. Ranks of other nodes may be missing; then only stopped or ended
            ranks are named.
        limits: allowed waits, based on the usual ones in this run.
        world_size: ranks of the job.
    """
    living = [rank for rank in ranks if rank.process not in ("gone", "ended")]
    if not living or all(rank.process == "stopped" for rank in living):
        return None  # the job is over, or an operator or a scheduler has stopped all of it
    judge = _HangJudge(ranks, living, limits)
    return (
        judge.judge_processes("gone")
        or judge.judge_processes("stopped")
        or (None if len(ranks) < world_size else judge.judge_call_order() or judge.judge_progress())
        or (None if len(ranks) < world_size else judge.judge_whole_job())
    )


def may_end(verdict: HangVerdict, ranks: Sequence[RankActivity]) -> bool:
    """Return whether a job that hangs may be ended: never if a rank may still continue.

    A rank that computes, reads, writes or waits for a disk, or whose GPU has a long queue, may
    evaluate or save for longer than before. A rank in a debugger is being examined. If a rank has
    finished training, a restart would only repeat its end.
    """
    if not verdict.pages or verdict.reason in ("device", "computing", "debugged", "ended"):
        return False
    living = [rank for rank in ranks if rank.process not in ("gone", "ended", "stopped")]
    # Waiting ranks may spin, as NCCL does; only blocking ranks can be doing useful work.
    waited_for = [rank for rank in living if not verdict.culprits or rank.rank in verdict.culprits]
    is_at_work = any(rank.is_active or rank.is_announced for rank in waited_for)
    return not is_at_work and not any(rank.is_debugged for rank in living)


class HangFollower:
    """Follows a job over time: reports a new verdict once, and learns from waits that ended."""

    def __init__(self, config: HangConfig | None = None) -> None:
        self.config = config or HangConfig()
        self.history = WaitHistory()
        self.verdict: HangVerdict | None = None
        """The current verdict."""
        self._has_paged = False

    def new_findings(
        self, ranks: Sequence[RankActivity], *, world_size: int, limits: HangLimits | None = None
    ) -> tuple[Finding, ...]:
        """Return the detector's findings on a hang that earlier checks did not report."""
        verdict = judge_hang(
            ranks, limits or self.history.limits(self.config), world_size=world_size
        )
        before, self.verdict = self.verdict, verdict
        if verdict is None or before is None or verdict.key != before.key:
            self._has_paged = False
            if before is not None and before.reason == "computing":
                self.history.add_ended_wait(before.seconds)
        if verdict is None:
            return ()
        findings = []
        if before is None or verdict.key != before.key:
            findings.append(_hang_finding("waiting", verdict))
        if verdict.pages and not self._has_paged:
            self._has_paged = True
            findings.append(_hang_finding("hang", verdict))
        return tuple(findings)


def _hang_finding(kind: str, verdict: HangVerdict) -> Finding:
    """Return the detector's finding on a hang, as its verdict describes it."""
    return Finding(
        kind=kind,
        level="advisory",
        step=verdict.step,
        detector="hang",
        reason=verdict.text,
        rank=verdict.culprits[0] if len(verdict.culprits) == 1 else -1,
        value=verdict.seconds,
        limit=None if math.isinf(verdict.limit) else verdict.limit,
        cause=f"hang_{verdict.reason}" if kind == "hang" else "",
    )


class _HangJudge:
    """The checks of ``judge_hang``, over one observation of the ranks."""

    def __init__(
        self, ranks: Sequence[RankActivity], living: Sequence[RankActivity], limits: HangLimits
    ) -> None:
        self._ranks = ranks
        self._living = living
        self._limits = limits

    def judge_processes(self, state: Literal["gone", "stopped"]) -> HangVerdict | None:
        """Detect a hang by ranks whose process has this state, while the others are idle."""
        culprits = [rank for rank in self._ranks if rank.process == state]
        others = [rank for rank in self._living if rank.process != "stopped"]
        if not culprits or not others:
            return None
        seconds = min(rank.still_seconds for rank in (*culprits, *others))
        # A fact needs no pattern, so it is shown at once, but an instant may be an accident.
        if seconds < 1.0:
            return None
        return self._culprit_verdict(culprits, others, state, seconds)

    def judge_call_order(self) -> HangVerdict | None:
        """Detect a hang by ranks that called another collective than the others."""
        seconds = min(rank.still_seconds for rank in self._living)
        if seconds < self._limits.show["exchange"] or any(r.pipeline for r in self._living):
            return None
        groups = sorted({group for rank in self._living for group in rank.last_collectives})
        for group in groups:
            of_ranks = {rank.rank: rank.last_collectives.get(group, {}) for rank in self._living}
            for number in sorted(set().union(*of_ranks.values())):
                calls = {rank: of[number] for rank, of in of_ranks.items() if number in of}
                odd = _find_deviating_callers(calls)
                if odd:
                    return self._call_order_verdict(group, number, calls, odd, seconds)
        return None

    def _call_order_verdict(
        self, group: str, number: int, calls: Mapping[int, str], odd: Sequence[int], seconds: float
    ) -> HangVerdict:
        """Return the detector's verdict on ranks that disagree on a collective."""
        by_call: dict[str, list[int]] = {}
        for rank, call in sorted(calls.items()):
            by_call.setdefault(call, []).append(rank)
        who = "; ".join(f"{name_ranks(ranks)} called {call}" for call, ranks in by_call.items())
        culprits = [rank for rank in self._living if rank.rank in odd]
        where = next((f", in {rank.where}" for rank in culprits if rank.where), "")
        text = f"The ranks disagree on collective {number} of group {group}: {who}{where}"
        limit = self._limits.page["exchange"]
        return self._build_verdict(culprits, "order", seconds, limit, text)

    def judge_progress(self) -> HangVerdict | None:
        """Detect a hang by ranks that are behind in a collective or step, and wait for no rank."""
        seen = [rank for rank in self._ranks if rank.process != "gone"]
        if all(rank.pipeline for rank in seen):
            return self._judge_pipeline(seen)
        waits = {
            rank.rank: {ahead.rank for ahead in seen if _is_behind(rank, ahead)} for rank in seen
        }
        culprits = [
            rank
            for rank in seen
            if waits[rank.rank] and not any(rank.rank in others for others in waits.values())
        ]
        if not culprits:
            return None
        waiting = set().union(*(waits[rank.rank] for rank in culprits))
        others = [rank for rank in self._living if rank.rank in waiting]
        if not others:
            return None
        seconds = min(rank.still_seconds for rank in (*culprits, *others))
        if seconds < self._limits.show[culprits[0].phase]:
            return None
        return self._culprit_verdict(culprits, others, _hang_reason(culprits, others), seconds)

    def _judge_pipeline(self, seen: Sequence[RankActivity]) -> HangVerdict | None:
        """Detect the ranks of a pipeline that do not wait for others, while the rest does.

        Stages send and receive different numbers of messages, so their counts do not compare.
        """
        others = [rank for rank in self._living if rank.pipeline == "waits"]
        culprits = [rank for rank in seen if rank.pipeline != "waits"]
        if not others or not culprits:
            return None
        seconds = min(rank.still_seconds for rank in (*culprits, *others))
        if seconds < self._limits.show[culprits[0].phase]:
            return None
        return self._culprit_verdict(culprits, others, _hang_reason(culprits, others), seconds)

    def judge_whole_job(self) -> HangVerdict | None:
        """Detect a hang of the whole job: no progress, and no computing or announced rank."""
        seconds = min(rank.still_seconds for rank in self._living)
        limit = self._limits.computing
        is_told = any(r.is_announced or r.is_debugged or r.is_active for r in self._living)
        # A single rank may be a notebook, or wait for its next batch: a stall is reported instead.
        if seconds < limit or is_told or len(self._living) < 2:
            return None
        return self._build_verdict(
            [], "all", seconds, limit, f"No rank has moved{_shared_place_text(self._living)}"
        )

    # ------------------------------------------------------------------------------ the verdict

    def _culprit_verdict(
        self,
        culprits: Sequence[RankActivity],
        others: Sequence[RankActivity],
        reason: Reason,
        seconds: float,
    ) -> HangVerdict:
        """Return the detector's verdict on the blocking ranks of a hang."""
        names, first = name_ranks([rank.rank for rank in culprits]), culprits[0]
        are, in_place = ("is" if len(culprits) == 1 else "are"), ""
        if first.where and len(culprits) == 1:
            in_place = f" in {first.where}"
        reasons = {
            "gone": f"ended without a word{f' ({first.exit})' if first.exit else ''}",
            "stopped": f"{are} stopped (SIGSTOP){in_place}",
            "ended": "failed" if first.exit == FAILED else "finished training before the others",
            "debugged": f"{are} in a debugger{in_place}",
            "blocked": f"{are} blocked{_disk_wait_text(first)}{in_place}",
            "interpreter": f"{are} in native code that holds the Python interpreter"
            + (f", last seen{in_place}" if in_place else ""),
            "device": f"{'has' if len(culprits) == 1 else 'have'} a GPU that has not begun a "
            "collective which others have begun: an earlier kernel does not end",
            "computing": f"{'computes' if len(culprits) == 1 else 'compute'}{in_place}",
        }[reason]
        # The ranks of a pipeline mostly wait for messages, which the recorder does not number.
        calls = {
            call for rank in others if not rank.pipeline and (call := _current_collective(rank))
        }
        waiting = name_ranks([rank.rank for rank in others])
        wait = "waits" if len(others) == 1 else "wait"
        text = f"{names[0].upper()}{names[1:]} {reasons}; {waiting} {wait} for it"
        if len(calls) == 1:
            text += f" in {calls.pop()}"
        return self._build_verdict(
            culprits, reason, seconds, self._page_limit_seconds(culprits, reason), text
        )

    def _page_limit_seconds(self, culprits: Sequence[RankActivity], reason: Reason) -> float:
        """Return the seconds after which a hang with these blocking ranks pages."""
        phases = {rank.phase for rank in culprits}
        blocked = max(self._limits.page[phase] for phase in phases)
        if reason == "debugged":
            return float("inf")
        if reason in ("gone", "stopped", "ended"):
            return blocked
        is_announced = any(rank.is_announced for rank in culprits)
        if reason == "computing" or any(rank.is_active for rank in culprits):
            return float("inf") if is_announced else self._limits.computing
        # A first step compiles, reads, connects; an announced phase may wait for a disk.
        is_first = any(rank.num_steps < 2 for rank in culprits)
        if is_announced or is_first:
            return max(blocked, self._limits.computing)
        if reason == "device":
            return max(blocked, _QUEUE_SECONDS)
        return blocked

    def _build_verdict(
        self,
        culprits: Sequence[RankActivity],
        reason: Reason,
        seconds: float,
        limit: float,
        text: str,
    ) -> HangVerdict:
        """Return the detector's verdict, which pages if the hang has lasted beyond the limit."""
        return HangVerdict(
            pages=seconds >= limit,
            culprits=tuple(sorted(rank.rank for rank in culprits)),
            reason=reason,
            # Not the culprit's own step: its last report may be half a second, and ten steps, old.
            step=max(rank.step for rank in self._ranks),
            seconds=seconds,
            limit=limit,
            text=f"{text} (for {humanize_seconds(seconds)})",
        )


def _is_behind(rank: RankActivity, other: RankActivity) -> bool:
    """Return whether a hanging job's rank lacks a collective that the other has started."""
    if _has_issued_less(rank, other):
        return True
    # The host may issue a collective that its device, in an earlier kernel, never begins.
    groups = rank.started.keys() & other.started.keys()
    return any(rank.started[group] < other.started[group] for group in groups)


def _has_issued_less(rank: RankActivity, other: RankActivity) -> bool:
    """Return whether a hanging job's rank has issued fewer collectives, or steps, than another."""
    shared = rank.sequences.keys() & other.sequences.keys()
    if any(rank.sequences[group] < other.sequences[group] for group in shared):
        return True
    # Without sequence numbers, compare the steps.
    return not shared and rank.step < other.step


def _hang_reason(ranks: Sequence[RankActivity], others: Iterable[RankActivity]) -> Reason:
    """Return the reason for which the detector holds ranks responsible for a hang."""
    if all(rank.process == "ended" for rank in ranks):
        return "ended"
    if any(rank.is_debugged or rank.process == "traced" for rank in ranks):
        return "debugged"
    if any(rank.is_mute for rank in ranks):
        return "interpreter"
    is_behind = any(_has_issued_less(rank, other) for rank in ranks for other in others)
    if not is_behind and not any(rank.pipeline for rank in ranks):
        return "device"
    is_busy = any(rank.is_active and rank.process != "disk" for rank in ranks)
    return "computing" if is_busy else "blocked"


_SAME_SIZES = frozenset({"all_reduce", "allreduce", "broadcast"})
"""Collectives in which all ranks contribute equal sizes; otherwise only the names are compared."""


def _find_deviating_callers(calls: Mapping[int, str]) -> tuple[int, ...]:
    """Return the ranks of a hang whose call differs from the majority; all if there is none."""
    names = {rank: call.partition("(")[0] for rank, call in calls.items()}
    if set(names.values()) <= _SAME_SIZES:
        names = dict(calls)
    counts = Counter(names.values()).most_common()
    if len(counts) < 2:
        return ()
    usual = counts[0][0] if counts[0][1] > counts[1][1] else None
    return tuple(sorted(rank for rank, name in names.items() if name != usual))


def _current_collective(rank: RankActivity) -> str:
    """Return the collective that a rank waits in, from the group last reported by the recorder."""
    of_groups = [calls for calls in rank.last_collectives.values() if calls]
    return of_groups[0][max(of_groups[0])] if len(of_groups) == 1 else ""


def _disk_wait_text(rank: RankActivity) -> str:
    """Return the verdict's text on a rank that hangs in an uninterruptible system call."""
    return " in a call to the system that cannot be interrupted" if rank.process == "disk" else ""


def _shared_place_text(ranks: Sequence[RankActivity]) -> str:
    """Return the place in which all ranks of a hang wait, if it is one."""
    calls = {call for rank in ranks if (call := _current_collective(rank))}
    places = {rank.where for rank in ranks if rank.where}
    at = calls if len(calls) == 1 else places
    return f": all wait in {at.pop()}" if len(at) == 1 else ""
