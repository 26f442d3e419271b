"""Runs the trainings of a drill in copies of the project, and collects the facts about each."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil
from msgspec.structs import replace

from trainvitals.arrays import join_curve_replies
from trainvitals.cli.supervise import ProgramStack
from trainvitals.errors import UsageError, VitalsError
from trainvitals.io.client import (
    CollectorClient,
    collector_on,
    open_collector_client,
    read_collector_file,
)
from trainvitals.records import OVERFLOW
from trainvitals.views import (
    CheckpointsQuestion,
    CurveQuestion,
    DecisionsQuestion,
    EventsQuestion,
    FindingsQuestion,
    RunQuestion,
)
from vitals_plugins.lab.drill.copying import CopiedProject, copy_project, translate_path
from vitals_plugins.lab.drill.facts import DrillFacts
from vitals_plugins.lab.drill.faults import (
    VARIABLE,
    DrillPlan,
    DrillRecord,
    FaultSpec,
    read_records,
)
from vitals_plugins.lab.drill.processes import end_processes
from vitals_plugins.lab.drill.receiver import LocalReceiver
from vitals_plugins.lab.drill.sandbox import offline_environ, sandboxed

LOOK_SECONDS = 0.1
MAX_HANG_SECONDS = 120.0
"""Time for the page of a hang, which comes after 5 s, or 5 times a usual long phase."""
PAGE_SECONDS = 90.0
"""Time for the rows and alerts of a training after its end; it is only used if one is missing."""


class DrillRunner:
    """Starts the trainings of one drill, one after another."""

    def __init__(
        self,
        command: Sequence[str],
        source: Path,
        home: Path,
        stack: ProgramStack,
        receiver: LocalReceiver,
        *,
        deadline: float,
        is_protected: bool,
    ) -> None:
        """``source`` is the project, and ``home`` a new directory for its copies.

        ``is_protected``: whether trainings run in a sandbox. ``deadline`` is on the monotonic
        clock.
        """
        self._command = list(command)
        self._source = source
        self._home = home
        self._stack = stack
        self._receiver = receiver
        self._deadline = deadline
        self._is_protected = is_protected
        self._num_trainings = 0
        self.copied: CopiedProject | None = None
        """Result of the latest copy."""
        self.small_disk_bytes = 0
        """Size of the disk that ``full_disk`` fills."""

    def remaining_seconds(self) -> float:
        """Return the rest of the drill's budget."""
        return self._deadline - time.monotonic()

    def train(
        self, plan: DrillPlan, spec: FaultSpec | None = None, *, mode: str = ""
    ) -> DrillFacts:
        """Run one training, and return its facts once they are complete."""
        self._num_trainings += 1
        place = self._home / str(self._num_trainings)
        # The training can write in these two; the drill only reads there.
        copy, private = place / "project", place / "p"
        place.mkdir()
        private.mkdir()
        exclude = [Path(os.environ[name]) for name in ("VITALS_DIR",) if os.environ.get(name)]
        self.copied = copy_project(self._source, copy, exclude=exclude)
        small = None
        if spec is not None and spec.name == "full_disk":
            small = (private / "runs", self.small_disk_bytes)
        plan = replace(
            plan,
            small_disk="" if small is None else str(small[0]),
            record=str(private / "records.jsonl"),
            acknowledgment=str(place / "acknowledged"),
            waits_at_end=spec is not None and bool(spec.alerts),
        )
        training = _Training(
            self._command_in(copy, private, small),
            copy,
            self._training_environ(copy, private, plan, mode),
            place / "output.log",
            plan,
        )
        try:
            facts = self._follow(training, spec)
            if mode != "off":
                facts = self._read_run(training, facts, spec)
        finally:
            training.stop()
            shutil.rmtree(copy, ignore_errors=True)
        return facts

    def _command_in(self, copy: Path, private: Path, small: tuple[Path, int] | None) -> list[str]:
        """Return the command of the user for a drilled training in this copy."""
        command = [translate_path(word, self._source, copy) for word in self._command]
        if not self._is_protected:
            return command
        return sandboxed(command, [copy, private], protected=[self._source], small=small)

    def _training_environ(
        self, copy: Path, private: Path, plan: DrillPlan, mode: str
    ) -> dict[str, str]:
        """Return the environment of a drilled training, with the drill's own collector."""
        environ = offline_environ(os.environ, copy, private)
        if "PYTHONPATH" in environ:
            environ["PYTHONPATH"] = translate_path(environ["PYTHONPATH"], self._source, copy)
        environ |= {
            "VITALS_COLLECTOR_URL": str(self._stack.data),
            "VITALS_TOKEN_FILE": str(self._stack.token_file),
            "VITALS_QUIET": "1",
            "PYTHONUNBUFFERED": "1",
            # A second start of torchrun --standalone with gloo otherwise finds old addresses.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            VARIABLE: msgspec.json.encode(plan).decode(),
        }
        return {**environ, "VITALS_MODE": mode} if mode else environ

    def _follow(self, training: _Training, spec: FaultSpec | None) -> DrillFacts:
        """Wait for the end of a drilled training; start it again if its fault killed a rank."""
        facts = self._wait_for_end(training, spec)
        if spec is None or not spec.is_restarted or facts.is_out_of_time:
            return facts
        is_killed = facts.first("killed") is not None or facts.first("injected") is not None
        starts = [each for each in facts.records if each.kind == "started" and each.rank == 0]
        # Unless the launcher has started it again.
        if is_killed and len(starts) == 1 and starts[0].first_save_step >= 0:
            training.environ["VITALS_RUN_ID"] = starts[0].run_id
            return self._wait_for_end(training, spec)
        return facts

    def _wait_for_end(self, training: _Training, spec: FaultSpec | None) -> DrillFacts:
        """Wait for the end of one start of a drilled training, and do what its fault needs."""
        fault = "" if spec is None else spec.name
        training.start()
        while (code := training.poll()) is None:
            if self.remaining_seconds() <= 0:
                return training.facts(is_out_of_time=True)
            if fault == "collector_down":
                self._switch_collector(training)
            elif fault == "stopped_rank":
                self._continue_stopped(training)
            self._acknowledge_end(training, spec)
            time.sleep(LOOK_SECONDS)
        if fault == "collector_down":
            self._restart_collector()
        return training.facts(exit_code=code)

    def _acknowledge_end(self, training: _Training, spec: FaultSpec | None) -> None:
        """Let a drilled training end once its alerts have arrived: the end would resolve them."""
        records = training.records()
        ended = next((each for each in records if each.kind == "ended"), None)
        if ended is None or training.is_acknowledged:
            return
        is_injected = any(each.kind == "injected" for each in records)
        pages = () if spec is None or not is_injected else spec.pages(ended.mode)
        seconds = (time.time_ns() - ended.time_unix_ns) / 1e9
        has_pages = not pages or self._has_page(training.run_id, *pages)
        if has_pages or seconds > PAGE_SECONDS:
            training.acknowledge()

    def _switch_collector(self, training: _Training) -> None:
        """Kill the drill's collector at the fault, and start it again some steps later."""
        kinds = {each.kind for each in training.records()}
        if "injected" in kinds and not training.is_acknowledged:
            self._kill_collector()
            training.acknowledge()
        if "continued" in kinds:
            self._restart_collector()

    def _continue_stopped(self, training: _Training) -> None:
        """Let the stopped rank of a drill continue once the hang has paged."""
        for record in training.records():
            if record.kind == "injected" and _is_stopped(record.pid):
                seconds = (time.time_ns() - record.time_unix_ns) / 1e9
                if self._has_page(training.run_id, "RankHung") or seconds > MAX_HANG_SECONDS:
                    with suppress(ProcessLookupError):
                        os.kill(record.pid, signal.SIGCONT)

    def _kill_collector(self) -> None:
        """Kill the drill's collector, and wait for its end."""
        file = read_collector_file(self._stack.data)
        if file is not None:
            with suppress(ProcessLookupError):
                os.kill(file.pid, signal.SIGKILL)
        self._wait_until(lambda: self._stack.find_ended_program() is not None)

    def _restart_collector(self) -> None:
        """Start the drill's collector again, and wait until it responds."""
        for _ in self._stack.restart_ended_programs():
            pass
        self._wait_until(lambda: collector_on(self._stack.data) is not None)

    def _has_page(self, run_id: str, *names: str) -> bool:
        """Return whether an alert of a drilled run has arrived at the receiver."""
        return any(each.name in names for each in self._receiver.firing(run_id))

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition of a drilled training comes true, for a while."""
        end = time.monotonic() + PAGE_SECONDS
        while not condition() and time.monotonic() < end:
            time.sleep(LOOK_SECONDS)

    def _read_run(
        self, training: _Training, facts: DrillFacts, spec: FaultSpec | None
    ) -> DrillFacts:
        """Add what the collector stores about a drilled run, and the alerts that arrived."""
        run_id = training.run_id
        if not run_id or facts.is_out_of_time:
            return facts
        modes = [each.mode for each in facts.records if each.kind == "started"]
        pages = () if spec is None or facts.first("injected") is None else spec.pages(modes[0])
        read = facts
        end = min(time.monotonic() + PAGE_SECONDS, max(self._deadline, time.monotonic()))
        while True:
            with suppress(VitalsError):
                read = self._query(run_id, facts)
            has_pages = not pages or self._has_page(run_id, *pages)
            is_complete = read.is_stored and has_pages
            if is_complete or time.monotonic() > end:
                is_late = not is_complete and self.remaining_seconds() <= 0
                alerts = self._receiver.received(run_id)
                return replace(read, alerts=alerts, is_out_of_time=is_late)
            time.sleep(LOOK_SECONDS)

    def _query(self, run_id: str, facts: DrillFacts) -> DrillFacts:
        """Return the facts with those that the drill's collector stores about a run."""
        collector = collector_on(self._stack.data)
        if collector is None:
            return facts
        with open_collector_client(collector) as client:
            # First, because it shows which steps are stored. Those of a second optimizer have no
            # loss.
            verdicts = _read_column(client, run_id, "verdict")
            losses = _read_column(client, run_id, "loss")
            rates = _read_column(client, run_id, "learning_rate")
            detail = client.ask(RunQuestion(run_id=run_id))
            decisions = client.ask(DecisionsQuestion(run_id=run_id))
            findings = client.ask(FindingsQuestion(run_id=run_id))
            events = client.ask(EventsQuestion(run_id=run_id))
            checkpoints = client.ask(CheckpointsQuestion(run_id=run_id))
        resumed = [each for each in detail.attempts if each.reason.startswith("resumed")]
        latest = max((attempt for values in verdicts.values() for attempt in values), default=0)
        return replace(
            facts,
            decisions=tuple((view.time_unix_ns, view.decision) for view in decisions),
            findings=tuple((view.time_unix_ns, view.finding) for view in findings),
            checkpoints=tuple(view for view in checkpoints if view.where == "disk"),
            notes=tuple((view.time_unix_ns, view.kind, view.text) for view in events),
            resumed_step=resumed[-1].fork_step if resumed else -1,
            steps=frozenset(verdicts),
            latest_steps=frozenset(step for step in verdicts if latest in verdicts[step]),
            overflow_steps=frozenset(
                step for step, bits in verdicts.items() if int(list(bits.values())[-1]) & OVERFLOW
            ),
            # Of a step that was trained twice, the later one counts.
            losses={step: list(values.values())[-1] for step, values in losses.items()},
            repeated_losses=_repeated(losses),
            repeated_rates=_repeated(rates),
            num_lost_rows=sum(each.num_lost_rows for each in detail.sources),
        )


def _read_column(client: CollectorClient, run_id: str, name: str) -> dict[int, dict[int, float]]:
    """Return a column of a drilled run by step and attempt, both in order."""
    curve = CurveQuestion(run_id=run_id, metric=f"steps.{name}", source="", branch="all")
    series = join_curve_replies([client.ask(curve)])
    columns = (series.attempt.tolist(), series.step.tolist(), series.value.tolist())
    values: dict[int, dict[int, float]] = {}
    for attempt, step, value in sorted(zip(*columns, strict=True)):
        values.setdefault(step, {})[attempt] = value
    return values


def _repeated(column: dict[int, dict[int, float]]) -> dict[int, tuple[float, float]]:
    """Return the first and latest value of the drilled steps that were trained more than once."""
    values = {step: list(values.values()) for step, values in column.items()}
    return {step: (each[0], each[-1]) for step, each in values.items() if len(each) > 1}


class _Training:
    """Processes of one training of a drill."""

    def __init__(
        self,
        command: Sequence[str],
        cwd: Path,
        environ: dict[str, str],
        log: Path,
        plan: DrillPlan,
    ) -> None:
        self.environ = environ
        self._command, self._cwd, self._log = command, cwd, log
        self._record, self._acknowledgment = Path(plan.record), Path(plan.acknowledgment)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def run_id(self) -> str:
        return next((each.run_id for each in self.records() if each.run_id), "")

    def start(self) -> None:
        """Start the program of the user in its own session."""
        with self._log.open("ab") as output:
            try:
                self._process = subprocess.Popen(
                    self._command,
                    cwd=self._cwd,
                    env=self.environ,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            except OSError as error:
                raise UsageError(
                    f"{self._command[0]!r} cannot be run: {error.strerror}",
                    hint="vitals drill -- torchrun --standalone --nproc-per-node 2 train.py",
                ) from error

    @property
    def is_acknowledged(self) -> bool:
        return self._acknowledgment.exists()

    def acknowledge(self) -> None:
        """Let the drilled training continue after the drill has killed a program."""
        self._acknowledgment.touch()

    def poll(self) -> int | None:
        """Return the exit code of the drilled program; None while it runs."""
        assert self._process is not None
        return self._process.poll()

    def records(self) -> list[DrillRecord]:
        """Return the records of all ranks of the drilled training."""
        return read_records(self._record)

    def facts(self, *, exit_code: int | None = None, is_out_of_time: bool = False) -> DrillFacts:
        """Return what is known without the collector about a drilled training."""
        lines = self._log.read_text(errors="replace").splitlines() if self._log.exists() else []
        return DrillFacts(
            records=tuple(self.records()),
            exit_code=exit_code,
            is_out_of_time=is_out_of_time,
            output=tuple(lines[-20:]),
        )

    def stop(self) -> None:
        """End what the drilled program has left running."""
        if self._process is not None:
            end_processes(self._acknowledgment.parent)
            self._process.wait()


def _is_stopped(pid: int) -> bool:
    """Return whether a rank of the drill is stopped by SIGSTOP."""
    try:
        return str(psutil.Process(pid).status()) == str(psutil.STATUS_STOPPED)
    except psutil.Error:
        return False
