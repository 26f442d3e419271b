"""`vitals drill`: injects faults into a copy of the user's training, and checks the promises."""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer

from trainvitals.cli.output import Format, write_json, write_rows
from trainvitals.cli.supervise import ProgramStack, environ_of_this_process
from trainvitals.errors import UsageError
from trainvitals.printable import printable
from trainvitals.units import humanize_count, humanize_seconds
from vitals_plugins.lab.drill.copying import CopiedProject
from vitals_plugins.lab.drill.facts import DrillFacts
from vitals_plugins.lab.drill.faults import FAULT_STEP, FAULTS, VARIABLE, DrillPlan, FaultSpec
from vitals_plugins.lab.drill.forwarding import user_receivers
from vitals_plugins.lab.drill.judge import MORE_RANKS, DrillRow, judge_fault
from vitals_plugins.lab.drill.processes import guarded
from vitals_plugins.lab.drill.receiver import local_receiver
from vitals_plugins.lab.drill.runner import DrillRunner
from vitals_plugins.lab.drill.sandbox import (
    find_gaps,
    has_mount_namespace,
    unavailable_reason,
)

MAX_NAMES = 5
SMALL_DISK_BYTES = 64 << 20
"""Bytes of the disk that is filled, in addition to those of a checkpoint."""
OVERHEAD_TURNS = 3
"""Turns with and without Vitals if ``--max-overhead`` is given; otherwise one."""


class OverheadFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Cost of Vitals in the drilled training."""

    watched_step_seconds: float
    """Median time of a step with Vitals."""
    unwatched_step_seconds: float
    """The same with VITALS_MODE=off."""
    ratio: float
    """Excess of the first over the second: 0.02 is 2%."""


class DrillResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a drill."""

    mode: str
    world_size: int
    rows: tuple[DrillRow, ...]
    overhead: OverheadFigures | None
    """None if the program ended too early, or the budget was used up."""
    max_overhead: float | None = None
    """Largest ratio of the overhead with which the drill does not fail; None for any."""
    has_receivers: bool = False
    """Whether the alerts were forwarded to the user's receivers."""
    notes: tuple[str, ...] = ()
    """Limits of this drill, such as files that were not copied."""

    @property
    def exit_code(self) -> int:
        """Return 1 if a promise is broken, and 3 if a fault or the limit was not tested."""
        outcomes = {row.outcome for row in self.rows}
        if self.max_overhead is not None:
            if self.overhead is None:
                outcomes.add("not tested")
            elif self.overhead.ratio > self.max_overhead:
                outcomes.add("broken")
        return 1 if "broken" in outcomes else 3 if "not tested" in outcomes else 0


def register(app: typer.Typer) -> None:
    """Add the `vitals drill` command."""
    app.command(
        epilog="Example: vitals drill -- torchrun --standalone --nproc-per-node 2 train.py",
        context_settings={"ignore_unknown_options": True},
    )(drill)


def drill(
    command: Annotated[list[str], typer.Argument(help="The training command, after --.")],
    only: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Inject only this fault; may be repeated: {', '.join(FAULTS)}.",
            show_default=False,
        ),
    ] = None,
    budget: Annotated[
        float, typer.Option(min=10, max=86_400, help="Seconds for all trainings together.")
    ] = 300.0,
    max_overhead: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Fail if a step takes longer by more than this part than with VITALS_MODE=off, "
            "such as 0.05.",
            show_default=False,
        ),
    ] = None,
    receivers: Annotated[
        Path | None,
        typer.Option(
            help="TOML file of receivers, as for `vitals collector`: they get the alerts of the "
            "drill too, marked as a drill.",
            show_default=False,
        ),
    ] = None,
    unprotected: Annotated[
        bool,
        typer.Option(
            "--unprotected",
            help="Run even if the kernel cannot keep the program from writing outside of the copy.",
        ),
    ] = False,
    form: Annotated[
        Literal["table", "json"], typer.Option("--format", help="How to write the result.")
    ] = "table",
) -> None:
    """Inject faults into a copy of your training, and check what Vitals promises for each.

    Runs the command once without a fault and once per fault, for about 200 steps, in a copy of
    the working directory, with its own collector and receiver. The loop needs watch, attach or
    an adapter, and no other change.

    Exits 1 if a promise is broken, and 3 if a fault could not be tested.
    """
    specs = _chosen_faults(only or ())
    reason = unavailable_reason()
    if reason is not None and not unprotected:
        raise UsageError(
            f"the training cannot be kept from writing outside of the copy: {reason}",
            hint="--unprotected runs it anyway; the copy, trackers and run directory are still "
            "separate",
        )
    with tempfile.TemporaryDirectory(prefix="vd-") as name:  # short: it contains sockets
        home = Path(name).resolve()
        result = run_drill(
            command,
            home,
            specs,
            budget=budget,
            max_overhead=max_overhead,
            receivers=receivers,
            is_protected=reason is None,
        )
    if form == "json":
        write_json(result)
    else:
        _write_result(result)
    if result.exit_code:
        raise typer.Exit(result.exit_code)


def _chosen_faults(names: Sequence[str]) -> list[FaultSpec]:
    """Return the faults to inject; all without ``--only``."""
    unknown = [name for name in names if name not in FAULTS]
    if unknown:
        raise UsageError(f"no fault is named {unknown[0]!r}", hint=f"one of {', '.join(FAULTS)}")
    return [spec for name, spec in FAULTS.items() if not names or name in names]


def run_drill(
    command: Sequence[str],
    home: Path,
    specs: Sequence[FaultSpec],
    *,
    budget: float,
    max_overhead: float | None,
    receivers: Path | None = None,
    is_protected: bool = True,
) -> DrillResult:
    """Run all trainings of a drill in ``home``, and judge them.

    Raises:
        UsageError: the undisturbed training failed, or is not watched by Vitals.
    """
    if shutil.which(command[0]) is None:
        raise UsageError(
            f"{command[0]!r} cannot be run: command not found",
            hint="vitals drill -- torchrun --standalone --nproc-per-node 2 train.py",
        )
    can_mount = is_protected and has_mount_namespace()
    is_left_out = len(specs) == len(FAULTS) and not can_mount  # nobody asked for it by name
    injected = [each for each in specs if not (is_left_out and each.name == "full_disk")]
    deadline = time.monotonic() + budget
    environ = {
        name: value
        for name, value in environ_of_this_process().items()
        if not name.startswith("VITALS_")
    }
    with (
        guarded(home),
        user_receivers(receivers) as forwards_to,
        local_receiver(forwards_to) as receiver,
    ):
        marker = {VARIABLE: f"{home}/"}
        programs = {**environ, **marker, "VITALS_COLLECTOR_WEBHOOK": receiver.url}
        # Signals end the drill in order while the stack is open.
        with ProgramStack(home / "programs", programs) as stack:
            stack.start_collector()
            runner = DrillRunner(
                command,
                Path.cwd().resolve(),
                home,
                stack,
                receiver,
                deadline=deadline,
                is_protected=is_protected,
            )
            result = _train_all(runner, injected, max_overhead)
    notes = find_gaps() if is_protected else ("Writes outside of the copy were not denied.",)
    if len(injected) < len(specs):
        notes = (*notes, "full_disk was left out: the kernel allows no mount namespace.")
    errors = [f"The receiver {r.name!r} failed: {r.error}." for r in forwards_to if r.error]
    notes = (*notes, *errors)
    return msgspec.structs.replace(
        result, has_receivers=bool(forwards_to), notes=(*notes, *_copy_notes(runner.copied))
    )


def _copy_notes(copied: CopiedProject | None) -> tuple[str, ...]:
    """Return sentences about what the drill did not copy."""
    if copied is None:
        return ()
    notes = []
    if copied.linked:
        notes.append(f"Linked read-only, not copied: {join_names(copied.linked)}.")
    reasons = [f"{path} ({reason})" for path, reason in copied.omitted.items()]
    if reasons:
        notes.append(f"Not copied: {join_names(reasons)}.")
    if copied.changed:
        notes.append(f"Changed while they were copied: {join_names(copied.changed)}.")
    return tuple(notes)


def join_names(names: Sequence[str]) -> str:
    """Return the first names of a drill's list, and the number of others."""
    rest = len(names) - MAX_NAMES
    text = ", ".join(names[:MAX_NAMES])
    return f"{text} and {rest} more" if rest > 0 else text


def _train_all(
    runner: DrillRunner, specs: Sequence[FaultSpec], max_overhead: float | None
) -> DrillResult:
    """Run the undisturbed training, one per fault, and those of the overhead."""
    end_step = FAULT_STEP + max(spec.num_steps for spec in specs)
    plan = DrillPlan(record="", acknowledgment="", end_step=end_step)
    _show_progress("undisturbed", runner)
    undisturbed = runner.train(plan)
    _check_undisturbed(undisturbed)
    started = undisturbed.records[0]
    runner.small_disk_bytes = SMALL_DISK_BYTES + 6 * started.state_bytes
    rows = []
    for spec in specs:
        if started.world_size < spec.min_ranks:
            rows.append(_untested(spec, "not protected", "the training has one rank", MORE_RANKS))
            continue
        if runner.remaining_seconds() <= 0:
            rows.append(_untested(spec, "not tested", "the budget ended", "--budget SECONDS"))
            continue
        _show_progress(spec.name, runner)
        fault_plan = msgspec.structs.replace(
            plan,
            fault=spec.name,
            end_step=FAULT_STEP + spec.num_steps,
        )
        rows.append(judge_fault(spec, runner.train(fault_plan, spec), undisturbed))
    num_turns = 1 if max_overhead is None else OVERHEAD_TURNS
    return DrillResult(
        mode=started.mode,
        world_size=started.world_size,
        rows=tuple(rows),
        overhead=_measure_overhead(runner, plan, undisturbed, num_turns),
        max_overhead=max_overhead,
    )


def _check_undisturbed(facts: DrillFacts) -> None:
    """Refuse a command that fails by itself, or that Vitals does not watch."""
    output = "\n".join(facts.output)
    if facts.is_out_of_time:
        raise UsageError(
            f"the undisturbed training did not reach its end within the budget:\n{output}",
            hint="--budget SECONDS",
        )
    # A rank of gloo may abort after its last step, on a busy machine and also without Vitals.
    if facts.exit_code and facts.end_step < 0:
        raise UsageError(
            f"the undisturbed training failed with exit code {facts.exit_code}:\n{output}",
            hint="the drill runs in a copy; see docs/guides/drill.md#the-copy",
        )
    if not facts.records:
        raise UsageError(
            f"the training was not watched by Vitals:\n{output}",
            hint="call trainvitals.watch or trainvitals.attach, and do not set VITALS_MODE=off",
        )


def _untested(
    spec: FaultSpec, outcome: Literal["not protected", "not tested"], reason: str, hint: str
) -> DrillRow:
    """Return the row of a fault that the drill did not inject."""
    return DrillRow(fault=spec.name, outcome=outcome, reason=reason, hint=hint)


def _measure_overhead(
    runner: DrillRunner, plan: DrillPlan, undisturbed: DrillFacts, num_turns: int
) -> OverheadFigures | None:
    """Train in turns with and without Vitals; None if the drill's budget is too small."""
    watched, unwatched = [_step_seconds(undisturbed)], []
    for turn in range(num_turns):
        if runner.remaining_seconds() <= 0:
            break
        _show_progress("VITALS_MODE=off", runner)
        unwatched.append(_step_seconds(runner.train(plan, mode="off")))
        if turn and runner.remaining_seconds() > 0:
            _show_progress("undisturbed", runner)
            watched.append(_step_seconds(runner.train(plan)))
    with_vitals = [seconds for seconds in watched if seconds]
    without = [seconds for seconds in unwatched if seconds]
    if not with_vitals or not without:
        return None
    first, second = statistics.median(with_vitals), statistics.median(without)
    return OverheadFigures(
        watched_step_seconds=first,
        unwatched_step_seconds=second,
        ratio=first / second - 1,
    )


def _step_seconds(facts: DrillFacts) -> float | None:
    """Return the median time of a step in a drilled training; None if it did not reach its end."""
    seconds = [
        each.step_seconds for each in facts.records if each.kind == "ended" and each.step_seconds
    ]
    return statistics.median(seconds) if seconds else None


def _show_progress(name: str, runner: DrillRunner) -> None:
    """Print which training of the drill starts."""
    typer.echo(f"{name} ({max(runner.remaining_seconds(), 0):.0f} s left)", err=True)


def _write_result(result: DrillResult) -> None:
    """Print the drill's table, and a reason for each row that is not kept."""
    header = ("fault", "at step", "result", "seen", "rank", "action", "after", "loss", "alert")
    rows = [_cells(row, result.has_receivers) for row in result.rows]
    write_rows(header, rows, Format.TABLE)
    typer.echo("")
    for row in result.rows:
        if row.outcome != "kept":
            typer.echo(f"{row.outcome}  {row.fault}: {printable(row.reason)}")
            if row.hint:
                typer.echo(f"      -> {printable(row.hint)}")
    for note in result.notes:
        typer.echo(f"note  {printable(note)}")
    ranks = humanize_count(result.world_size, "rank")
    kept = sum(row.outcome == "kept" for row in result.rows)
    typer.echo(
        f"{kept} of {humanize_count(len(result.rows), 'fault')} kept: {ranks}, {result.mode}"
    )
    cost = result.overhead
    if cost is None:
        typer.echo("overhead not measured: the program ended too early, or the budget was used up")
    else:
        typer.echo(
            f"a step took {humanize_seconds(cost.watched_step_seconds)}, with VITALS_MODE=off "
            f"{humanize_seconds(cost.unwatched_step_seconds)} ({cost.ratio:+.1%})"
        )


def _cells(row: DrillRow, has_receivers: bool) -> tuple[str, ...]:
    """Return a row of the drill's table."""
    alert = row.alert or "-"
    if row.alert and has_receivers:
        alert += f" -> {join_names(row.accepted_by)}" if row.accepted_by else ", not accepted"
    rank = {None: "-", True: "right", False: "wrong"}[row.is_named_right]
    return (
        row.fault,
        "-" if row.injected_step is None else str(row.injected_step),
        row.outcome,
        row.seen or "-",
        rank,
        row.action or "-",
        "-" if row.seconds is None else humanize_seconds(row.seconds),
        "-" if row.loss_ratio is None else f"{row.loss_ratio - 1:+.1%}",
        alert,
    )
