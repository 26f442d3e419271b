"""Traces of a few steps on a few ranks: on request, and automatically if a run gets slower.

The ranks are the slowest and a typical one, unless the request specifies one. A trace is bounded in
steps and bytes, and is stored with the run; a profiler of the loop is never disturbed.
"""

from __future__ import annotations

import os
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
import torch.autograd.profiler as autograd_profiler

from trainer_hooks.step.context import RunContext
from trainer_hooks.step.feature import ReturnedStep, StepFeature
from trainvitals.detect.fleet.base import MergedStep, upper_median
from trainvitals.detect.fleet.speed import ThroughputWatcher
from trainvitals.errors import UsageError
from trainvitals.io.private import ensure_private_dir
from trainvitals.policy import Judgement, Proposal
from trainvitals.records import Command, Note, ProfileArgument
from trainvitals.rows import Value

MAX_BYTES = 64 << 20
"""Maximum size of one trace; a larger one is deleted."""
KEPT = 8
"""Number of latest traces kept per rank."""
WINDOW = 16
"""Steps used to determine the slowest rank."""
AUTO_STEPS = 3
AUTO_PER_RUN = 3
AUTO_EVERY_NS = 3600 * 10**9
_WAITS = ("gradient_wait_seconds", "communication_seconds")
"""Columns of the time that a rank waits for others: the rank that waits least is the slowest."""
_PROFILER: Any = autograd_profiler
_AUTOMATIC_PREFIX = "auto"
"""Prefix of the name of an automatic trace."""


class Lateness:
    """Estimate of how late this rank is compared with the others, over several steps."""

    def __init__(self) -> None:
        self._steps: deque[float] = deque(maxlen=WINDOW)

    def add(self, columns: Mapping[str, Value], data_wait: float | None) -> None:
        """Add the times of a step from its columns, to choose the ranks that are profiled."""
        waits = [float(value) for name in _WAITS if (value := columns.get(name)) is not None]
        self._steps.append((data_wait or 0.0) - sum(waits))

    @property
    def seconds(self) -> float:
        """Return the median, for profiling; higher is later; only ranks' differences count."""
        return upper_median(self._steps) if self._steps else 0.0


def slowest_and_typical(lateness: Sequence[float]) -> tuple[int, ...]:
    """Return the ranks to profile: the slowest and a median one; with a single rank only that."""
    order = sorted(range(len(lateness)), key=lambda rank: (-lateness[rank], rank))
    others = order[1:]
    return (order[0], others[len(others) // 2]) if others else (order[0],)


class StepProfile:
    """Records the next steps of this rank with ``torch.profiler``, and writes the trace.

    ``done`` is called with the result, ``failed`` with the error, both from another thread.

    Raises:
        UsageError: a profiler of the loop is running, or cannot be distinguished from ours in
            this version of torch.
    """

    def __init__(
        self,
        path: Path,
        *,
        num_steps: int,
        done: Callable[[str], None],
        failed: Callable[[Exception], None],
    ) -> None:
        from torch.profiler import ProfilerActivity, profile

        autograd: Any = torch.autograd
        if autograd._profiler_enabled():
            raise UsageError("a torch.profiler of the loop's own runs; two end the process")
        self._guard = _ForeignProfilerWatch(self.close)
        self._path = path
        self._steps_left = num_steps
        self._done, self._failed = done, failed
        self._thread: threading.Thread | None = None
        has_gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        self._profiler = profile(activities=[ProfilerActivity.CPU, *has_gpu])
        self._profiler.start()
        self._guard.begin()

    def stepped(self) -> bool:
        """Count a step of the torch profile; return whether more steps follow."""
        self._steps_left -= 1
        if self._steps_left > 0 and self._thread is None:
            self._profiler.step()
            return True
        self.close()
        return False

    def close(self) -> None:
        """Stop profiling, and write the trace in a separate thread."""
        if self._thread is None:
            self._guard.end()
            self._thread = threading.Thread(target=self._export_trace, name="vitals-profile")
            self._profiler.stop()
            self._thread.start()

    def _export_trace(self) -> None:
        """Write the trace of torch.profiler to its file, and delete old traces."""
        partial = self._path.with_name(f".{self._path.name}")
        try:
            self._profiler.export_chrome_trace(str(partial))
            size = partial.stat().st_size
            if size > MAX_BYTES:
                partial.unlink()
                raise UsageError(
                    f"the trace has {size >> 20} MB; at most {MAX_BYTES >> 20} MB are kept",
                    hint="profile fewer steps",
                )
            os.replace(partial, self._path)  # noqa: PTH105
            delete_old_traces(self._path)
            self._done(
                f"the profile is {self._path} ({size / 1e6:.1f} MB); open it with Perfetto or "
                "chrome://tracing"
            )
        except Exception as error:  # noqa: BLE001 - passed to the callback, which counts it
            self._failed(error)


class _ForeignProfilerWatch:
    """Ends our profile when the loop starts its own.

    torch allows starting two, and crashes when the first is stopped after the second.
    """

    def __init__(self, end: Callable[[], None]) -> None:
        self._end = end
        self._theirs: Any = getattr(_PROFILER, "_prepare_profiler", None)
        if self._theirs is None:
            raise UsageError(f"torch {torch.__version__} does not say when a profiler starts")

    def begin(self) -> None:
        """Watch for another profiler during profiling; ours has started."""

        def prepare(*given: Any, **named: Any) -> Any:
            self._end()
            return self._theirs(*given, **named)

        self._ours = prepare
        _PROFILER._prepare_profiler = prepare

    def end(self) -> None:
        """Stop watching for other profilers after profiling."""
        if getattr(_PROFILER, "_prepare_profiler", None) is self._ours:
            _PROFILER._prepare_profiler = self._theirs


def delete_old_traces(path: Path) -> None:
    """Keep only the latest traces of this rank's profiling."""
    of_rank = path.name[path.name.rindex("-rank") :]
    traces = sorted(path.parent.glob(f"*{of_rank}"), key=lambda each: each.stat().st_mtime_ns)
    for old in traces[:-KEPT]:
        old.unlink(missing_ok=True)


class Slowdowns:
    """Orders a profile if the run gets slower: on rank 0, within a budget.

    Traces of earlier starts in ``folder`` count.
    """

    def __init__(self, folder: Path) -> None:
        self._watcher = ThroughputWatcher()
        self._folder = folder
        self._last_ns = -AUTO_EVERY_NS
        self._found = ""
        self._order: Command | None = None
        self.reason = ""

    def add(
        self, step: int, attempt: int, columns: Mapping[str, Value], seconds: float | None
    ) -> None:
        """Add a step of rank 0 to decide on profiling; its steps take as long as all ranks'."""
        rate = columns.get("tokens_per_second")
        merged = MergedStep(
            step=step,
            attempt=attempt,
            time_unix_ns=0,
            run={"tokens_per_second": rate if isinstance(rate, float) else None},
            ranks={"step_duration_seconds": (seconds,)},
        )
        for finding in self._watcher.update(merged):
            self._found = finding.reason

    def command(self, run_id: str, *, newest: int, now_ns: int) -> Command | None:
        """Return the profiling order that awaits its response; a new one if the run got slower.

        It gets the number after ``newest``, the latest command with a response, so that it does not
        overtake an operator's command. ``now_ns`` is monotonic.
        """
        if self._order is not None:
            if self._order.number > newest:
                return self._order
            self._order = None
        reason, self._found = self._found, ""
        if (
            not reason
            or now_ns - self._last_ns < AUTO_EVERY_NS
            or self._num_automatic() >= AUTO_PER_RUN
        ):
            return None
        self._last_ns, self.reason = now_ns, reason
        self._order = Command(
            number=newest + 1,
            run_id=run_id,
            action="profile",
            reason=reason,
            issued_by=AUTOMATIC_ISSUER,
            issued_unix_ns=0,
            expires_unix_ns=0,
            argument=ProfileArgument(AUTO_STEPS, by_itself=True).argument,
        )
        return self._order

    def _num_automatic(self) -> int:
        """Return the number of automatic profiles: those of one step count as one."""
        names = (path.name for path in self._folder.glob(f"{_AUTOMATIC_PREFIX}-step-*"))
        return len({re.sub(r"-rank.*", "", name) for name in names})


AUTOMATIC_ISSUER = "vitals"


class ProfilingFeature(StepFeature):
    """Records a trace of the next steps: on a manual command, or if the run gets slower.

    It adds no numbers to the vector: the ranks agree on whom to profile between two steps, and only
    if a profile was ordered.
    """

    def __init__(self, run: RunContext, slowdowns: Slowdowns | None) -> None:
        super().__init__(run)
        self._lateness = Lateness()
        self._order: tuple[int, ProfileArgument] | None = None
        """First step of the ordered profile, and the order."""
        self._profile: StepProfile | None = None
        self.slowdowns = slowdowns
        """Orders a profile if the run gets slower; on rank 0, if enabled."""

    @classmethod
    def make(cls, run: RunContext) -> Self:
        """Return the feature; in a mode that acts, with automatic profiles if enabled."""
        signals, slowdowns = run.given.signals, None
        is_automatic = signals is not None and signals.profile_slowdowns
        if run.ranks.rank == 0 and run.mode != "observe" and is_automatic:
            slowdowns = Slowdowns(run.run_dir.profiles_dir)
        return cls(run, slowdowns)

    def _report_trace(self, text: str) -> None:
        """Report the path of this rank's trace; called from a separate thread."""
        note = Note(code="profile_written", text=text)
        self._run.emitter.event(note, step=self._run.last_step, attempt=self._run.attempt)

    @property
    def idle_hooks(self) -> tuple[str, ...]:
        """Without automatic profiles, the run orders none."""
        return () if self.slowdowns is not None else ("own_command",)

    def on_row_written(self, step: ReturnedStep) -> None:
        """Update this rank's lateness, and the detection of slowdowns, with a step's times."""
        measured = step.measured
        self._lateness.add(step.columns, measured.times.data_wait)
        if self.slowdowns is not None and measured.turn <= 1:
            with self._run.faults.fail_open("slowdowns"):
                seconds = measured.times.duration
                self.slowdowns.add(step.step, step.attempt, step.columns, seconds)

    def own_command(self) -> Command | None:
        """Return the profile that the run orders itself because it got slower, if any."""
        if self.slowdowns is None:
            return None
        run = self._run
        newest, now_ns = run.judge.facts.last_command, run.clock.monotonic_ns()
        return self.slowdowns.command(run.run_dir.run_id, newest=newest, now_ns=now_ns)

    def on_command(self, command: Proposal, *, now_step: int) -> None:
        """Order a profile from the next step on."""
        if command.action != "profile":
            return
        profiled = ProfileArgument.from_argument(command.argument)
        self._order = now_step + 1, profiled
        if profiled.by_itself and self.slowdowns is not None:
            text = f"Vitals profiles {profiled.num_steps} steps: {self.slowdowns.reason}"
            emitter = self._run.emitter
            emitter.note("profile_begun", text, step=now_step, attempt=self._run.attempt)

    @property
    def has_pending_work(self) -> bool:
        """Whether a profile was ordered or is being recorded."""
        return self._order is not None or self._profile is not None

    def run_between_steps(self, step: int, device: torch.device) -> Iterable[Judgement]:
        """End a step's profile, and start the ordered one. Collective if one was ordered."""
        run = self._run
        if self._profile is not None:
            with run.faults.fail_open("profile"):
                if not self._profile.stepped():
                    self._profile = None
        if self._order is None:
            return ()
        (first_step, profiled), self._order = self._order, None
        ranks = (profiled.rank,) if profiled.rank >= 0 else self._choose_profiled_ranks(device)
        if run.ranks.rank in ranks:
            with run.faults.fail_open("profile"):
                self._end_profile()
                name = f"step-{first_step:06d}-rank{run.ranks.rank}.json.gz"
                name = f"{_AUTOMATIC_PREFIX}-{name}" if profiled.by_itself else name
                self._profile = StepProfile(
                    ensure_private_dir(run.run_dir.profiles_dir) / name,
                    num_steps=profiled.num_steps,
                    done=self._report_trace,
                    failed=lambda error: run.faults.count("profile", error),
                )
        return ()

    def _choose_profiled_ranks(self, device: torch.device) -> tuple[int, ...]:
        """Return the slowest rank and a typical one. Collective, so outside of any fail-open."""
        ranks = self._run.ranks
        all_of_them = torch.zeros(ranks.world_size, dtype=torch.float64, device=device)
        all_of_them[ranks.rank] = self._lateness.seconds
        ranks.reduce(all_of_them)
        return slowest_and_typical(all_of_them.tolist())

    def _end_profile(self) -> None:
        if self._profile is not None:
            self._profile.close()
            self._profile = None

    def close(self) -> None:
        """Write the trace of an unfinished profile."""
        with self._run.faults.fail_open("profile"):
            self._end_profile()
