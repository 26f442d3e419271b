"""A few steps of a few ranks as a trace: where a person asks for it, and where a run gets slower.

The ranks are the slowest and a typical one, unless one is named. A trace is bounded in steps and
bytes, and lies with the run; a profiler of the loop's own is never disturbed.
"""

from __future__ import annotations

import os
import re
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.autograd.profiler as autograd_profiler

from trainer_hooks.failopen import FaultCounter
from trainer_hooks.ranks import Ranks
from trainvitals.detect.fleet.base import MergedStep, upper_median
from trainvitals.detect.fleet.speed import ThroughputWatcher
from trainvitals.errors import UsageError
from trainvitals.io.private import ensure_private_dir
from trainvitals.records import Command, Profiled
from trainvitals.rows import Value

MAX_BYTES = 64 << 20
"""Of one trace; a larger one is not kept."""
KEPT = 8
"""The newest traces of one rank that are kept."""
WINDOW = 16
"""Steps that say which rank is the slowest."""
AUTO_STEPS = 3
AUTO_PER_RUN = 3
AUTO_EVERY_NS = 3600 * 10**9
_WAITS = ("gradient_wait_seconds", "communication_seconds")
"""Columns of the time in which a rank waits for the others: whoever waits least is the slowest."""
_PROFILER: Any = autograd_profiler
_BY_ITSELF = "auto"
"""How the name of a trace begins that nobody asked for."""


class Lateness:
    """How much later than the others this rank is, as far as it can tell: over some steps."""

    def __init__(self) -> None:
        self._steps: deque[float] = deque(maxlen=WINDOW)

    def add(self, columns: Mapping[str, Value], data_wait: float | None) -> None:
        """Take in a step's columns."""
        waits = [float(value) for name in _WAITS if (value := columns.get(name)) is not None]
        self._steps.append((data_wait or 0.0) - sum(waits))

    @property
    def seconds(self) -> float:
        """The median; higher is later, and only the difference between ranks says anything."""
        return upper_median(self._steps) if self._steps else 0.0


def slowest_and_typical(lateness: Sequence[float]) -> tuple[int, ...]:
    """Return the slowest rank and one in the middle; of a single rank that one."""
    order = sorted(range(len(lateness)), key=lambda rank: (-lateness[rank], rank))
    others = order[1:]
    return (order[0], others[len(others) // 2]) if others else (order[0],)


class StepProfile:
    """Records the next steps of this rank with ``torch.profiler``, and writes the trace.

    Args:
        path: where to.
        num_steps: how many.
        done: told what became of it, from another thread.
        failed: told why there is none.

    Raises:
        UsageError: a profiler of the loop's own runs, or this torch's cannot be told from ours.
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
        self._guard = _Guard(self.close)
        self._path = path
        self._left = num_steps
        self._done, self._failed = done, failed
        self._thread: threading.Thread | None = None
        has_gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        self._profiler = profile(activities=[ProfilerActivity.CPU, *has_gpu])
        self._profiler.start()
        self._guard.begin()

    def stepped(self) -> bool:
        """Take in that a step is over; return whether more are to come."""
        self._left -= 1
        if self._left > 0 and self._thread is None:
            self._profiler.step()
            return True
        self.close()
        return False

    def close(self) -> None:
        """Stop, and have the trace written beside the training."""
        if self._thread is None:
            self._guard.end()
            self._thread = threading.Thread(target=self._write, name="vitals-profile")
            self._profiler.stop()
            self._thread.start()

    def _write(self) -> None:
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
            _forget_oldest(self._path)
            self._done(
                f"the profile is {self._path} ({size / 1e6:.1f} MB); open it with Perfetto or "
                "chrome://tracing"
            )
        except Exception as error:  # noqa: BLE001 - told where it is counted
            self._failed(error)


class _Guard:
    """Ends our profile the moment the loop begins one of its own.

    torch lets two be started, and crashes when the first is stopped after the second.
    """

    def __init__(self, end: Callable[[], None]) -> None:
        self._end = end
        self._theirs: Any = getattr(_PROFILER, "_prepare_profiler", None)
        if self._theirs is None:
            raise UsageError(f"torch {torch.__version__} does not say when a profiler starts")

    def begin(self) -> None:
        """Watch for another; ours has begun."""

        def prepare(*given: Any, **named: Any) -> Any:
            self._end()
            return self._theirs(*given, **named)

        self._ours = prepare
        _PROFILER._prepare_profiler = prepare

    def end(self) -> None:
        """Watch no more."""
        if getattr(_PROFILER, "_prepare_profiler", None) is self._ours:
            _PROFILER._prepare_profiler = self._theirs


def _forget_oldest(path: Path) -> None:
    """Keep the newest traces of this rank."""
    of_rank = path.name[path.name.rindex("-rank") :]
    traces = sorted(path.parent.glob(f"*{of_rank}"), key=lambda each: each.stat().st_mtime_ns)
    for old in traces[:-KEPT]:
        old.unlink(missing_ok=True)


class Profiling:
    """Which profile is under way on this rank, and which is to begin.

    Args:
        folder: of the run's traces.
        ranks: this process among the job's.
        lateness: of this rank.
        faults: counts what fails.
        say: given what became of a trace, from another thread.
    """

    def __init__(
        self,
        folder: Path,
        ranks: Ranks,
        lateness: Lateness,
        faults: FaultCounter,
        say: Callable[[str], None],
    ) -> None:
        self._folder, self._ranks, self._faults, self._say = folder, ranks, faults, say
        self._lateness = lateness
        self._order: tuple[int, Profiled] | None = None
        self._profile: StepProfile | None = None

    @property
    def has_work(self) -> bool:
        """Whether ``work`` has anything to do."""
        return self._order is not None or self._profile is not None

    def order(self, first_step: int, profiled: Profiled) -> None:
        """Have steps profiled, from this one on; on all ranks alike."""
        self._order = (first_step, profiled)

    def work(self, device: torch.device) -> None:
        """End a step's profile, begin the next. After a step, and where one was ordered collective.

        Args:
            device: where tensors of the ranks' group lie.
        """
        if self._profile is not None:
            with self._faults.fail_open("profile"):
                if not self._profile.stepped():
                    self._profile = None
        if self._order is None:
            return
        (first_step, profiled), self._order = self._order, None
        chosen = (profiled.rank,) if profiled.rank >= 0 else self._choose(device)
        if self._ranks.rank not in chosen:
            return
        with self._faults.fail_open("profile"):
            self.close()
            name = f"step-{first_step:06d}-rank{self._ranks.rank}.json.gz"
            self._profile = StepProfile(
                ensure_private_dir(self._folder)
                / (f"{_BY_ITSELF}-{name}" if profiled.by_itself else name),
                num_steps=profiled.num_steps,
                done=self._say,
                failed=lambda error: self._faults.count("profile", error),
            )

    def _choose(self, device: torch.device) -> tuple[int, ...]:
        """Return the slowest rank and a typical one. Collective, outside of any fail-open."""
        all_of_them = torch.zeros(self._ranks.world_size, dtype=torch.float64, device=device)
        all_of_them[self._ranks.rank] = self._lateness.seconds
        self._ranks.reduce(all_of_them)
        return slowest_and_typical(all_of_them.tolist())

    def close(self) -> None:
        """Write a profile that has not come to its end."""
        if self._profile is not None:
            self._profile.close()
            self._profile = None


class Slowdowns:
    """Orders a profile where the run gets slower than it was: on rank 0, within a budget.

    Args:
        folder: of the run's traces; those of earlier starts count.
    """

    def __init__(self, folder: Path) -> None:
        self._watcher = ThroughputWatcher()
        self._folder = folder
        self._last_ns = -AUTO_EVERY_NS
        self._found = ""
        self._order: Command | None = None
        self.reason = ""
        """Of the newest order."""

    def add(
        self, step: int, attempt: int, columns: Mapping[str, Value], seconds: float | None
    ) -> None:
        """Take in a step: of rank 0, whose steps take as long as all others'."""
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
        """Return the order that waits for its answer; a new one where the run got slower.

        Args:
            run_id: of the run.
            newest: number of the newest command that was answered; the order's is the next, so
                that none of a person's is overtaken.
            now_ns: monotonic.
        """
        if self._order is not None:
            if self._order.number > newest:
                return self._order
            self._order = None
        reason, self._found = self._found, ""
        if not reason or now_ns - self._last_ns < AUTO_EVERY_NS or self._spent() >= AUTO_PER_RUN:
            return None
        self._last_ns, self.reason = now_ns, reason
        self._order = Command(
            number=newest + 1,
            run_id=run_id,
            action="profile",
            reason=reason,
            issued_by=BY_ITSELF,
            issued_unix_ns=0,
            expires_unix_ns=0,
            argument=Profiled(AUTO_STEPS, by_itself=True).argument,
        )
        return self._order

    def _spent(self) -> int:
        """Return how many profiles nobody asked for: those of one step are one."""
        names = (path.name for path in self._folder.glob(f"{_BY_ITSELF}-step-*"))
        return len({re.sub(r"-rank.*", "", name) for name in names})


BY_ITSELF = "vitals"
"""Who issued an order that nobody gave."""
