"""``vitals demo``: a real small training with faults, guarded by Vitals on this machine.

Prints the injected faults, the expected decisions, and whether they match.
"""

import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple
from urllib.parse import urlsplit

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from trainvitals.cli.supervise import (
    LOOK_SECONDS,
    ProgramStack,
    environ_of_this_process,
    start_command,
)
from trainvitals.errors import TransportError, VitalsError
from trainvitals.io.client import CollectorClient, collector_on, open_collector_client
from trainvitals.records import Decision
from trainvitals.testing.faults import FaultPlan
from trainvitals.units import humanize_count
from trainvitals.views import DecisionsQuestion, RunQuestion, RunsQuestion

STEPS = 600
NAN_GRADIENT_STEP = 150
SHUFFLED_PARAMETERS_STEP = 400
NAN_PARAMETERS_STEP = 540
LOSS_TOLERANCE = 0.02
"""Maximum excess of the guarded run's validation loss over the clean run's, as a ratio."""
MIN_REASON_WIDTH = 110
"""Terminal width from which the table includes reasons."""
IDLE_SECONDS = 600.0
"""Time that the dashboard stays up without a browser; an open page keeps its connection."""
_SOCKETS = Path("/proc/net/tcp")
_ESTABLISHED = "01"
_OF_JOBS = (signal.SIGTTOU, signal.SIGTSTP)


class Expected(NamedTuple):
    """A decision that the run must record; rank -1: no single rank is at fault."""

    fault: str
    action: str
    rule: str
    rank: int
    step: int


class Match(NamedTuple):
    """An expected decision and the matching one, if any."""

    expected: Expected
    decision: Decision | None


def build_demo_faults() -> FaultPlan:
    """Return the faults that ``vitals demo`` injects into its training."""
    return (
        FaultPlan()
        .nan_gradient_at(rank=1, step=NAN_GRADIENT_STEP)
        .shuffled_parameters_at(step=SHUFFLED_PARAMETERS_STEP)
        .nan_parameters_at(rank=1, step=NAN_PARAMETERS_STEP)
    )


def list_expected_decisions() -> list[Expected]:
    """Return the decisions that ``vitals demo`` expects for its faults.

    Shuffled parameters are finite: the first loss is reported, and the probe finds the state
    damaged in the same step. After a non-finite step the ranks check their parameters; the result
    is known two steps later.
    """
    damaged, params = "damaged weights", "NaN parameters"
    broken = NAN_PARAMETERS_STEP
    return [
        Expected("NaN gradient", "skip_step", "nonfinite", 1, NAN_GRADIENT_STEP),
        Expected(damaged, "rollback", "state_damaged", -1, SHUFFLED_PARAMETERS_STEP),
        Expected(params, "skip_step", "nonfinite", 1, broken),
        Expected(params, "skip_step", "nonfinite", 1, broken + 1),
        Expected(params, "rollback", "nonfinite_params", 1, broken + 2),
    ]


def match_expected_decisions(
    expected: Sequence[Expected], decisions: Sequence[Decision]
) -> list[Match]:
    """Pair each decision that ``vitals demo`` expects with the first unused equal one."""
    unmatched = list(decisions)
    pairs = []
    for entry in expected:
        decision = next((d for d in unmatched if _matches_expected(entry, d)), None)
        if decision is not None:
            unmatched.remove(decision)
        pairs.append(Match(entry, decision))
    return pairs


def find_false_alarms(matches: Sequence[Match], decisions: Sequence[Decision]) -> list[Decision]:
    """Return the false alarms in a ``vitals demo``: decisions that no fault explains."""
    used = {id(m.decision) for m in matches}
    return [d for d in decisions if id(d) not in used]


def _matches_expected(want: Expected, decision: Decision) -> bool:
    """Return whether a decision is the one that ``vitals demo`` expects for a fault."""
    expected = (want.action, want.rule, want.rank, want.step)
    return expected == (decision.action, decision.rule, decision.rank, decision.step)


# ----------------------------------------------------------------------------------- the training


_LEDGER_SECONDS = 30.0


class DemoResult(msgspec.Struct):
    """Result of the training script."""

    run_id: str
    validation_loss: float | None
    """None: non-finite."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One training of the demo."""

    name: str
    mode: str
    faults: FaultPlan


def register(app: typer.Typer) -> None:
    """Add the ``demo`` command."""

    @app.command(epilog="Example: vitals demo --compare")
    def demo(
        directory: Annotated[
            Path | None,
            typer.Option("--dir", help="Folder for runs and store [default: a temporary one]."),
        ] = None,
        compare: Annotated[
            bool,
            typer.Option("--compare", help="Also train with each fault alone, without Vitals."),
        ] = False,
        keep: Annotated[
            bool,
            typer.Option("--keep", help="Serve the dashboard until Ctrl-C, without a time limit."),
        ] = False,
        headless: Annotated[
            bool,
            typer.Option("--headless", help="No progress bars, no dashboard at the end; for CI."),
        ] = False,
        ranks: Annotated[int, typer.Option("--ranks", min=2, help="Ranks to train on.")] = 2,
    ) -> None:
        """Train a small GPT twice, clean and with three faults, and show how Vitals reacts.

        Exits 0 only if every decision matches its fault in kind, rank and step, there are no false
        alarms, and the loss ends within 2 % of the clean run's. On a terminal the dashboard stays
        up until Ctrl-C, or until no browser has been connected for ten minutes.
        """
        home = directory or Path(tempfile.mkdtemp(prefix="vitals-demo-"))
        console = Console(stderr=True, highlight=False)
        on_terminal = not headless and sys.stdout.isatty() and sys.stderr.isatty()
        with ProgramStack(home, environ_of_this_process()) as stack:
            good = _Demo(stack, console, headless=headless, ranks=ranks).run(compare=compare)
            if on_terminal:
                print_next(console, stack.runs)
            if keep or on_terminal:
                with alone_in_foreground() if on_terminal else nullcontext():
                    _serve(stack, console, idle_seconds=None if keep else IDLE_SECONDS)
        raise typer.Exit(0 if good else 1)


def print_next(console: Console, runs: Path) -> None:
    """Print the ``vitals`` commands to try after the demo, as lines to paste."""
    folder, vitals = shlex.quote(str(runs)), _vitals_command()
    console.print("\nnext, here or in another terminal:")
    for command, meaning in (
        (f"{vitals} why guarded {NAN_PARAMETERS_STEP + 2} --dir {folder}", "why it rolled back"),
        (f"{vitals} postmortem guarded --dir {folder}", "the report of the run"),
        (f"{vitals} dashboard {folder}", "the dashboard, any time later"),
    ):
        console.print(f"  {command}   # {meaning}", soft_wrap=True)


def _vitals_command() -> str:
    """Return how to call ``vitals`` from here: `make demo` does not put it on PATH."""
    if shutil.which("vitals"):
        return "vitals"
    script = Path(sys.argv[0])
    command = [str(script)] if script.name == "vitals" else [sys.executable, "-m", "trainvitals"]
    return shlex.join(command)


def _serve(stack: ProgramStack, console: Console, *, idle_seconds: float | None) -> None:
    """Keep the demo's dashboard up until Ctrl-C or, if given, for this long without a browser."""
    limit = (
        "" if idle_seconds is None else f", or {idle_seconds / 60:.0f} minutes without a browser"
    )
    port = urlsplit(stack.dashboard_url).port or 0
    try:
        console.print(f"\nopen: {stack.dashboard_url}", soft_wrap=True)
        console.print(f"The dashboard is served until Ctrl-C{limit}.", soft_wrap=True)
        last_visit = time.monotonic()
        while stack.find_ended_program() is None:
            time.sleep(LOOK_SECONDS)
            if has_visitors(port):
                last_visit = time.monotonic()
            elif idle_seconds is not None and time.monotonic() - last_visit >= idle_seconds:
                console.print("No browser for a while: the dashboard stops.")
                return
    except KeyboardInterrupt:
        console.print("\nThe dashboard stops.")


@contextmanager
def alone_in_foreground() -> Iterator[None]:
    """Deliver a Ctrl-C on this terminal only to ``vitals demo``, not to its parent.

    Under `make demo` it would also reach make, which would report an error.
    """
    terminal, group = sys.stdout.fileno(), os.getpgrp()
    if group == os.getpid() or os.tcgetpgrp(terminal) != group:  # a shell has already done so
        yield
        return
    # Stopped by Ctrl-Z, it would leave the shell waiting for make, and make waiting for it.
    ignored = {number: signal.signal(number, signal.SIG_IGN) for number in _OF_JOBS}
    os.setpgid(0, 0)
    os.tcsetpgrp(terminal, os.getpid())
    try:
        yield
    finally:
        os.tcsetpgrp(terminal, group)
        os.setpgid(0, group)
        for number, handler in ignored.items():
            signal.signal(number, handler)


def has_visitors(port: int) -> bool:
    """Return whether a browser is connected to the dashboard that ``vitals demo`` serves."""
    try:
        sockets = _SOCKETS.read_text().splitlines()[1:]
    except OSError:
        return False
    here = f":{port:04X}"
    return any(
        address.endswith(here) and state == _ESTABLISHED
        for _, address, _, state, *_ in map(str.split, sockets)
    )


class _Demo:
    def __init__(
        self, stack: ProgramStack, console: Console, *, headless: bool, ranks: int
    ) -> None:
        self._stack = stack
        self._console = console
        self._headless = headless
        self._ranks = ranks

    def run(self, *, compare: bool) -> bool:
        """Train the arms of ``vitals demo`` and print the summary; return whether it succeeded."""
        stack, say = self._stack, self._console.print
        stack.start_collector()
        stack.start_agent()
        say(f"dashboard: {stack.start_dashboard()}", soft_wrap=True)
        say(f"runs, store and logs: {stack.home}", soft_wrap=True)
        faults = build_demo_faults()
        clean = self._train(Arm("clean", "heal", FaultPlan()))
        guarded = self._train(Arm("guarded", "heal", faults))
        bare = []
        if compare:
            arms = [Arm(f"unguarded: {f.kind}", "off", faults.only(f)) for f in faults.faults]
            bare = [(arm.name, self._train(arm)) for arm in arms]
        with self._open_client() as client:
            false_alarms = self._wait_for_decisions(client, clean.run_id, 0)
            decisions = self._wait_for_decisions(
                client, guarded.run_id, len(list_expected_decisions())
            )
        matches = match_expected_decisions(list_expected_decisions(), decisions)
        extra = find_false_alarms(matches, decisions) + false_alarms
        # A pipe has no width; with 80 columns every reason would wrap into a narrow column.
        output = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
        print_summary(output, matches, extra, clean, guarded, bare)
        against = compare_losses(guarded, clean)
        near = against is not None and abs(against) <= LOSS_TOLERANCE
        return near and not extra and all(m.decision for m in matches)

    # ------------------------------------------------------------------------------ training

    def _train(self, arm: Arm) -> DemoResult:
        """Train one arm of the demo under torchrun, and show its progress on the terminal.

        Raises:
            VitalsError: the training failed; includes the end of its log.
        """
        result = self._stack.home / f"result-{arm.name.replace(': ', '-')}.json"
        log = self._stack.home / f"train-{arm.name.replace(': ', '-')}.log"
        result.unlink(missing_ok=True)
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(self._ranks), "-m", "trainer_hooks.demo.train"),
            *("--steps", str(STEPS), "--mode", arm.mode, "--name", arm.name),
            *("--result", str(result)),
        ]
        environ = self._stack.training_environ()
        environ |= {"VITALS_DEMO_FAULTS": arm.faults.to_json(), "OMP_NUM_THREADS": "1"}
        with start_command(command, environ, log) as child:
            self._show_progress(arm, child.process.poll)
            code = child.process.wait()
        if code != 0 and result.exists():
            # Occurs on busy machines, also without Vitals: gloo aborts a rank while it exits.
            self._console.print(f"{arm.name}: done, but torchrun ended with exit code {code}")
        if not result.exists():
            raise VitalsError(
                f"the {arm.name} training ended with exit code {code}:\n{child.log_tail()}",
                hint=f"its whole log is {log}",
            )
        return msgspec.json.decode(result.read_bytes(), type=DemoResult)

    def _show_progress(self, arm: Arm, ended: Callable[[], int | None]) -> None:
        """Show the progress bar of one training of ``vitals demo`` until it ends."""
        columns = ("{task.description:<28}", "{task.fields[status]}")
        progress = Progress(
            TextColumn(columns[0]), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn(columns[1]), console=self._console, disable=self._headless,
        )  # fmt: skip
        if self._headless:
            self._console.print(f"training: {arm.name}")
        with progress, self._open_client() as client:
            task = progress.add_task(arm.name, total=STEPS, status="")
            while ended() is None:
                step, status = self._query_progress(client, arm)
                progress.update(task, completed=step, status=status)
                time.sleep(0.5)
            progress.update(task, completed=STEPS)

    def _query_progress(self, client: CollectorClient, arm: Arm) -> tuple[int, str]:
        """Return the step of the latest run of that name, and its last decision."""
        if arm.mode == "off":
            return 0, "not watched"
        try:
            arm_runs = [run for run in client.ask(RunsQuestion()) if run.name == arm.name]
        except VitalsError as error:
            return 0, error.text
        if not arm_runs:
            return 0, ""
        run = max(arm_runs, key=lambda r: r.started_unix_ns)
        loss = "" if run.loss is None else f"loss {run.loss:.3f}"
        return run.last_step + 1, f"{loss}  skips {run.num_skips}  rollbacks {run.num_rollbacks}"

    # ------------------------------------------------------------------------------- reading

    def _open_client(self) -> CollectorClient:
        """Return a client of the demo's collector."""
        collector = collector_on(self._stack.data)
        if collector is None:
            raise TransportError("the demo's collector has ended", hint=f"see {self._stack.home}")
        return open_collector_client(collector, timeout=10.0)

    def _wait_for_decisions(
        self, client: CollectorClient, run_id: str, at_least: int
    ) -> list[Decision]:
        """Wait until the collector has the end of the demo's run; return its decisions."""
        deadline = time.monotonic() + _LEDGER_SECONDS
        while True:
            decisions = [view.decision for view in client.ask(DecisionsQuestion(run_id=run_id))]
            ended = client.ask(RunQuestion(run_id=run_id)).summary.state != "running"
            if (ended and len(decisions) >= at_least) or time.monotonic() > deadline:
                return decisions
            time.sleep(0.2)


def compare_losses(result: DemoResult, clean: DemoResult) -> float | None:
    """Return a demo's excess over the loss of its clean run, as a ratio; None if non-finite."""
    if result.validation_loss is None or clean.validation_loss is None:
        return None
    return result.validation_loss / clean.validation_loss - 1.0


def print_summary(
    console: Console,
    matches: list[Match],
    extra: list[Decision],
    clean: DemoResult,
    guarded: DemoResult,
    bare: list[tuple[str, DemoResult]],
) -> None:
    """Print the result of ``vitals demo``: faults, decisions, their cost, and the losses."""
    table = Table(title="Decision log", title_justify="left")
    columns: tuple[str, ...] = ("fault", "step", "rank", "decided", "by rule", "cost", "reason")
    # Too wide for a narrow terminal; `vitals why` shows the reasons.
    columns = columns if console.width >= MIN_REASON_WIDTH else columns[:-1]
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column != "reason")
    for want, decision in matches:
        rank = "all" if want.rank < 0 else str(want.rank)
        if decision is None:
            missing = f"[red]missing: {want.action}"
            table.add_row(want.fault, str(want.step), rank, missing, want.rule)
            continue
        cost = humanize_count(decision.cost_steps, "step")
        row = (want.fault, str(want.step), rank, decision.action, decision.rule, cost)
        table.add_row(*(*row, decision.reason)[: len(columns)])
    for alarm in extra:
        row = ("[red]none", str(alarm.step), str(alarm.rank), alarm.action, alarm.rule, "")
        table.add_row(*(*row, alarm.reason)[: len(columns)])
    console.print(table)
    losses = Table(title="Validation loss, nats per byte", title_justify="left")
    for column in ("training", "loss", "against clean"):
        losses.add_column(column)
    for name, result in [("clean", clean), ("guarded, three faults", guarded), *bare]:
        against = compare_losses(result, clean)
        if against is None:
            losses.add_row(name, "not finite", "lost")
        else:
            losses.add_row(name, f"{result.validation_loss:.4f}", f"{100 * against:+.1f} %")
    console.print(losses)
