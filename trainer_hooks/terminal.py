"""Terminal lines of a run: how it starts, each action, and how it ends.

Only rank 0 writes them, through the logger ``trainvitals``, which can be silenced or redirected.
"""

from __future__ import annotations

import logging
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from trainvitals.clock import Clock
from trainvitals.detect.registry import DETECTORS
from trainvitals.printable import LineFormatter
from trainvitals.records import ActionName, Decision, Finding, RunInfo, decision_text

_LOG = logging.getLogger("trainvitals")
_UNPROTECTED = {kind for name in ("snapshots", "replicas") for kind in DETECTORS[name].kinds} | {
    "unguarded"
}
"""Findings printed even if no action was taken: protection is reduced."""
SECONDS_BETWEEN_LINES = 1.0
"""Per kind of line: a fast loop with many bad steps must not flood the terminal."""

if TYPE_CHECKING:
    _StreamHandler = logging.StreamHandler[TextIO]
else:
    _StreamHandler = logging.StreamHandler


class _StderrHandler(_StreamHandler):
    """Writes to the current stderr, above a tqdm bar, while logging is not configured."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a terminal line, unless the root logger has a handler by now, which writes it."""
        if logging.getLogger().handlers:
            return
        self.stream = sys.stderr  # a notebook or test may have replaced it
        bars = getattr(sys.modules.get("tqdm"), "tqdm", None)
        if bars is None or not getattr(bars, "_instances", None):
            super().emit(record)
            return
        try:
            bars.write(self.format(record), file=sys.stderr)
        except Exception:  # noqa: BLE001 - as in every logging handler
            self.handleError(record)


def show_log() -> None:
    """Show INFO lines on the terminal if logging is not configured; otherwise do nothing."""
    if _LOG.handlers or logging.getLogger().handlers:
        return
    handler = _StderrHandler()
    handler.setFormatter(LineFormatter())
    _LOG.addHandler(handler)
    if _LOG.level == logging.NOTSET:
        _LOG.setLevel(logging.INFO)


class Terminal:
    """Terminal lines of one run. A healthy step costs one check of ``in_row``."""

    def __init__(self, info: RunInfo, run_id: str, clock: Clock) -> None:
        self._name = f"{info.name} ({run_id})" if info.name else run_id
        self._run_id = run_id
        self._mode = info.mode
        self._path = shlex.quote(_short(Path(info.run_dir)))
        self._clock = clock
        self._counts: Counter[tuple[ActionName, bool]] = Counter()
        self._lost_steps = 0
        self._last_line_ns: dict[str, int] = {}
        self.in_row = False
        """Whether the previous step was skipped."""
        self._untold, self._last_skip = 0, -1
        self._resumed = ""
        self.num_unguarded = 0
        """Number of steps that were not measured."""
        self._unguarded_since = -1
        self._last_hidden = -1
        """Last step whose parameters, optimizer state or buffers were non-finite without an
        action."""

    @classmethod
    def open(
        cls, info: RunInfo, run_id: str, clock: Clock, environ: Mapping[str, str]
    ) -> Terminal | None:
        """Return the terminal lines of the run; None with ``VITALS_QUIET=1``."""
        if environ.get("VITALS_QUIET", "") not in ("", "0"):
            return None
        show_log()
        return cls(info, run_id, clock)

    def started(self, resumed: str) -> None:
        """Print which run this is, whether it ``resumed`` an earlier one, and how to follow it."""
        self._resumed = f", {resumed}" if resumed else ""
        _LOG.info(
            "vitals: run %s %s in %s mode; to follow it: vitals tail %s --follow",
            self._name,
            resumed or "started",
            self._mode,
            self._path,
        )

    def hint(self, text: str) -> None:
        """Print one line about a possible improvement of the loop."""
        _LOG.info("vitals: %s", text)

    def without_agent(self, missing: Sequence[str]) -> None:
        """Print that this run cannot be read later without the agent, and how to install it."""
        names = ", ".join(missing)
        _LOG.warning(
            "vitals: %s not installed, so this run is guarded but its metrics are not stored; next "
            "time: pip install %s",
            f"{names} {'is' if len(missing) == 1 else 'are'}",
            " ".join(missing),
        )

    def judged(self, decision: Decision | None) -> None:
        """Print a decision. Call for each decision, and for every step while ``in_row``."""
        action = None if decision is None else decision.action
        if self.in_row and action != "skip_step":
            self._end_row()
        if decision is None or action is None or action == "continue":
            return
        self._counts[action, decision.acted] += 1
        if action == "rollback":
            self._lost_steps += decision.cost_steps
        if action == "skip_step":
            self._last_skip = decision.step
            was_in_row, self.in_row = self.in_row, True
            if was_in_row or not self._may_print(action):
                self._untold += 1
                return
        elif action == "accept_level" and not self._may_print(action):
            return
        _LOG.warning("vitals: step %d: %s", decision.step, self._describe(decision))

    def unprotected(self, findings: Sequence[Finding]) -> None:
        """Print findings that reduce protection without an action, once per consecutive stretch."""
        for finding in findings:
            if finding.kind == "nonfinite_state":
                self._last_hidden = finding.step
            is_new = finding.onset_step in (-1, finding.step)
            if finding.kind == "unguarded":  # this finding is raised some steps after its start
                is_new = finding.onset_step != self._unguarded_since
                self._unguarded_since = finding.onset_step
            if is_new and finding.kind in _UNPROTECTED:
                _LOG.warning(
                    "vitals: step %d: %s; details: vitals show %s",
                    finding.step,
                    finding.reason,
                    self._path,
                )

    def ended(self, state: str, num_steps: int) -> None:
        """Print how the run ended, and its skips and rollbacks."""
        steps = _format_count(num_steps, "step")
        summary = self._guard_summary() + self._resumed
        _LOG.info("vitals: run %s %s after %s: %s", self._name, state, steps, summary)
        if self.num_unguarded:
            _LOG.warning(
                "vitals: NOT GUARDED: %s of %s could not be measured, so nothing checked "
                "whether their updates would damage the model",
                f"{self.num_unguarded:,}",
                _format_count(num_steps, "step"),
            )
        if self._last_hidden >= 0:
            _LOG.warning(
                "vitals: parameters, optimizer state or buffers were NaN or infinite at step "
                "%d, and training continued with them",
                self._last_hidden,
            )
        _LOG.info("vitals: details: vitals show %s", self._path)

    def agent_still_sending(self, collector: str, agent_pid: int | None) -> None:
        """Print that the agent keeps running to send rows to a collector that is down."""
        _LOG.warning(
            "vitals: the collector at %s does not answer, so rows of this run wait on disk. Its "
            "agent (pid %s) stays for VITALS_LINGER_HOURS (24) at most to send them; `kill %s` "
            "ends it, and any later agent on this node sends them",
            *(collector, agent_pid, agent_pid),
        )

    def interrupted(self, step: int | None, folder: Path) -> None:
        """Print, after Ctrl-C, from which step a new start can continue; None: no checkpoint."""
        if step is None:
            _LOG.warning("vitals: no checkpoint was saved yet, so a new start begins at step 0")
            return
        _LOG.warning(
            "vitals: the newest checkpoint in %s continues at step %d; to continue: start again "
            "with VITALS_RUN_ID=%s",
            shlex.quote(_short(folder)),
            step,
            self._run_id,
        )

    def _may_print(self, kind: str) -> bool:
        """Return whether a terminal line of this kind may be printed again, by time."""
        now, last = self._clock.monotonic_ns(), self._last_line_ns.get(kind)
        if last is not None and now - last < SECONDS_BETWEEN_LINES * 1e9:
            return False
        self._last_line_ns[kind] = now
        return True

    def _end_row(self) -> None:
        """End a series of skips, and print the number of those without a terminal line."""
        self.in_row = False
        if self._untold and self._may_print("more"):
            verb = "would have been skipped" if self._mode == "observe" else "skipped"
            text = "vitals: and %s %s, the last one at step %d"
            _LOG.warning(text, _format_count(self._untold, "more update"), verb, self._last_skip)
            self._untold = 0

    def _describe(self, decision: Decision) -> str:
        """Return a decision as a line for the terminal; after a halt, with the next command."""
        text = decision_text(decision)
        if decision.action == "halt" and decision.acted:
            text = f"{text}; next: vitals why {self._path} {decision.step}"
        return text

    def _guard_summary(self) -> str:
        """Return the skips and rollbacks of the run as text, for its last terminal line."""
        counts = self._counts
        if self._mode == "observe":
            skips, rollbacks = counts["skip_step", False], counts["rollback", False]
            guarded = f"{_format_count(skips, 'update')} would have been skipped"
            if rollbacks:
                guarded = f"{guarded}, and {_format_count(rollbacks, 'rollback')} made"
            return guarded
        skips, rollbacks = counts["skip_step", True], counts["rollback", True]
        lost = f" ({_format_count(self._lost_steps, 'step')} lost)" if rollbacks else ""
        return (
            f"{_format_count(skips, 'update')} skipped, "
            f"{_format_count(rollbacks, 'rollback')}{lost}"
        )


def _format_count(count: int, what: str) -> str:
    """Return a count with its noun for a line on the terminal: plural, or "no" for 0."""
    return (f"{count:,}" if count else "no") + f" {what}" + ("" if count == 1 else "s")


def _short(path: Path) -> str:
    """Return the path for the terminal, relative to the working directory if it is inside."""
    path, here = path.absolute(), Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
