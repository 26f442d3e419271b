"""Ends a job that hangs, if its loop has enabled that, so that its launcher starts it again.

It sends signals, and only to processes that it has checked: first SIGTERM, on which ranks with
checkpoints save their state; then SIGKILL once no rank is left to save, or after a grace period. It
requires a page that has lasted for a while, confirmed at every check; it never exceeds the budget;
and it writes an entry to the decision log first.
"""

import os
import signal
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainvitals.clock import Clock
from trainvitals.detect.hang import HangConfig, HangVerdict, may_end
from trainvitals.records import Decision, DecisionMade, Note, ProcessState, RankActivity
from trainvitals.units import humanize_seconds
from vitals_agent.process import holds_files, stat_fields
from vitals_agent.run import ServedRun

GRACE_SECONDS = 30.0
"""Time between SIGTERM and SIGKILL; torchrun gives its ranks the same."""
MAX_GAP_SECONDS = 5.0
"""Time between two checks: a longer one means that the machine, or the agent, was suspended."""
_DAY_NS = 24 * 3600 * 10**9


@dataclass(frozen=True, slots=True)
class JobProcess:
    """A rank's process, distinguished from a later one with the same pid."""

    pid: int
    started: int
    """In clock ticks since the boot."""
    state: ProcessState
    journal: Path | None = None
    """Its journal directory; a process that has none of its files open gets no signal."""

    @property
    def is_rank(self) -> bool:
        """Return whether this is the rank, and not another container's process with its pid."""
        return self.journal is None or holds_files(self.pid, self.journal)

    def send_signal(self, number: int) -> None:
        """Send a signal to the rank of a job that hangs, if it still has this pid."""
        try:
            fd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        try:
            # The descriptor refers to the current process with that pid, and stays with it.
            if process_start_ticks(self.pid) == self.started and self.is_rank:
                signal.pidfd_send_signal(fd, number)
        except ProcessLookupError:
            return
        finally:
            os.close(fd)


def process_start_ticks(pid: int) -> int:
    """Return when a rank's process started, in clock ticks since the boot; 0 if it has ended."""
    try:
        fields = stat_fields(pid)
    except OSError:
        return 0
    return int(fields[19]) if fields[0] not in "ZX" else 0


class HungJob:
    """The job of one run on this node, whose ranks are all here."""

    def __init__(self, run: ServedRun, config: HangConfig, clock: Clock) -> None:
        self._run = run
        self._config = config
        self._clock = clock
        self._key: object = None
        self._held_since = 0.0
        self._looked_at = 0.0
        self._ended_at: list[float] = []
        """When this agent ended jobs, in monotonic seconds."""
        self._kill_at: float | None = None
        self._ended: frozenset[tuple[int, int]] = frozenset()
        """The processes that were sent SIGTERM, or for which the budget was used up."""

    @property
    def is_ending(self) -> bool:
        """Return whether the agent has sent the ranks SIGTERM, and will kill those that remain."""
        return self._kill_at is not None

    def end_if_due(
        self,
        verdict: HangVerdict | None,
        ranks: Sequence[RankActivity],
        processes: Collection[JobProcess],
        now: float,
    ) -> None:
        """End a job that hangs on this node, if it is time; continue an end that has started.

        All arguments are those of one check; ``now`` is in monotonic seconds.
        """
        if self._kill_at is not None:
            self._kill_if_due(processes, now)
            return
        gap, self._looked_at = now - self._looked_at, now
        present = frozenset((process.pid, process.started) for process in processes)
        if verdict is None or not may_end(verdict, ranks) or present <= self._ended:
            self._key = None
            return
        if (verdict.key, present) != self._key or gap > MAX_GAP_SECONDS:
            self._key, self._held_since = (verdict.key, present), now
        if now - self._held_since >= self._config.restart_seconds:
            self._ended = present
            self._terminate_job(verdict, processes, now)

    def _terminate_job(
        self, verdict: HangVerdict, processes: Collection[JobProcess], now: float
    ) -> None:
        """End the job that hangs, unless its budget of restarts is used up."""
        if not all(process.is_rank for process in processes):
            text = (
                "Vitals does not restart this job: the ranks run in containers whose process ids "
                f"their agent cannot see. {verdict.text}"
            )
            self._report("no_restart", text, verdict)
            return
        budget, time_ns = self._config.max_restarts, self._clock.time_ns()
        recent = [t for t in self._run.run_dir.restarts() if t > time_ns - _DAY_NS]
        # A clock that is set a day ahead gives no budget back.
        self._ended_at = [at for at in self._ended_at if now - at < _DAY_NS / 1e9]
        num_recent = max(len(recent), len(self._ended_at))
        if num_recent >= budget:
            text = (
                f"Vitals does not restart this job: {num_recent} of {budget} restarts per day are "
                f"used up. {verdict.text}"
            )
            self._report("restart_budget", text, verdict)
            return
        # Before the action, like all budgets: an agent that dies in between returns none.
        self._run.run_dir.write_restarts([*recent, time_ns])
        self._ended_at.append(now)
        self._write_decision(verdict, budget - num_recent - 1)
        for process in processes:
            process.send_signal(signal.SIGTERM)
        self._kill_at = now + GRACE_SECONDS

    def _report(self, code: str, text: str, verdict: HangVerdict) -> None:
        note = Note(code=code, text=text, severity="warning")
        attempt = self._latest_attempt()
        self._run.node_source.write_event(note, step=verdict.step, attempt=attempt)

    def _write_decision(self, verdict: HangVerdict, budget_left: int) -> None:
        """Write the agent's restart of the job to the decision log."""
        hang_duration = humanize_seconds(self._config.restart_seconds)
        tails = self._run.tails.values()
        decision = Decision(
            ledger_seq=1 + max((tail.last.ledger_seq for tail in tails), default=0),
            action="restart",
            step=verdict.step,
            decided_at_step=verdict.step,
            attempt=self._latest_attempt(),
            reason=f"{verdict.text}; the page held for {hang_duration}, and on_hang is 'restart'",
            rule="hang",
            cause=f"hang_{verdict.reason}",
            rank=verdict.culprits[0] if len(verdict.culprits) == 1 else -1,
            value=verdict.seconds,
            limit=verdict.limit,
            budget_left=budget_left,
        )
        event = DecisionMade(decision=decision)
        self._run.node_source.write_event(event, step=decision.step, attempt=decision.attempt)

    def _kill_if_due(self, processes: Collection[JobProcess], now: float) -> None:
        """Kill the remaining ranks: once only stopped ones are left, or after the grace period."""
        assert self._kill_at is not None
        remaining = [each for each in processes if (each.pid, each.started) in self._ended]
        if now < self._kill_at and any(each.state != "stopped" for each in remaining):
            return
        for process in remaining:
            process.send_signal(signal.SIGKILL)
        self._kill_at = None

    def _latest_attempt(self) -> int:
        return max((tail.last.attempt for tail in self._run.tails.values()), default=0)
