"""``vitals up`` and ``vitals run``: the programs for this machine, also around a training."""

import shutil
import time
from pathlib import Path
from typing import Annotated

import typer

from trainvitals.cli.options import Control
from trainvitals.cli.supervise import ProgramStack, environ_of_this_process, run_command
from trainvitals.errors import TransportError, UsageError

_Dir = Annotated[
    Path, typer.Option("--dir", help="Folder for runs, store and logs.", file_okay=False)
]
_Port = Annotated[int, typer.Option("--port", help="The dashboard's port; 0 picks a free port.")]


def register(app: typer.Typer) -> None:
    """Add the commands ``vitals up`` and ``vitals run``."""

    @app.command(epilog="Example: vitals up --dir ~/vitals")
    def up(
        directory: _Dir = Path("vitals_home"), port: _Port = 0, control: Control = False
    ) -> None:
        """Start collector, agent and dashboard for this machine; Ctrl-C stops them."""
        with ProgramStack(directory, environ_of_this_process()) as stack:
            _start_stack(stack, port, control)
            typer.echo(f"training: set VITALS_DIR={stack.runs}", err=True)
            while (dead := stack.find_ended_program()) is None:
                _print_control_codes(stack)
                time.sleep(0.5)
            raise TransportError(
                f"the {dead.name} ended:\n{dead.log_tail()}", hint=f"its log is {dead.log}"
            )

    @app.command(
        epilog="Example: vitals run -- torchrun --nproc-per-node 2 train.py",
        context_settings={"ignore_unknown_options": True},
    )
    def run(
        command: Annotated[list[str], typer.Argument(help="The training command, after --.")],
        directory: _Dir = Path("vitals_home"),
        port: _Port = 0,
        control: Control = False,
    ) -> None:
        """Run a training command with collector, agent and dashboard around it.

        Keeps the command's output and exit code (128 + N after signal N). If the collector or the
        dashboard cannot start, prints one line about it and runs the command without it.
        """
        if shutil.which(command[0]) is None:
            raise UsageError(
                f"{command[0]!r} cannot be run: command not found",
                hint="write the training command after --: vitals run -- torchrun train.py",
            )
        with ProgramStack(directory, environ_of_this_process()) as stack:
            _start_available_programs(stack, port, control)
            code = run_command(command, stack.training_environ(), lambda: _revive_programs(stack))
        raise typer.Exit(code)


def _revive_programs(stack: ProgramStack) -> None:
    """Restart programs that ended during ``vitals run``; print messages and control codes."""
    for message in stack.restart_ended_programs():
        typer.echo(f"vitals: {message}", err=True)
    _print_control_codes(stack)


def _print_control_codes(stack: ProgramStack) -> None:
    """Print the dashboard's new control codes on stderr, during ``vitals up`` or ``vitals run``."""
    for line in stack.control_codes():
        typer.echo(line, err=True)


def _start_available_programs(stack: ProgramStack, port: int, control: bool) -> None:
    """Start the programs of `vitals run`; print which ones could not start."""
    try:
        _start_collector(stack)
    except TransportError:
        _print_unavailable("collector and no dashboard", stack.stop_latest_program())
        return
    stack.start_agent()
    try:
        typer.echo(f"dashboard: {stack.start_dashboard(port=port, control=control)}", err=True)
    except TransportError:
        _print_unavailable("dashboard", stack.stop_latest_program())
    _revive_programs(stack)


def _print_unavailable(what: str, why: str) -> None:
    """Print which program of ``vitals run`` could not start, and why."""
    typer.echo(f"vitals: no {what}: {why}", err=True)


def _start_collector(stack: ProgramStack) -> None:
    """Start the collector of ``vitals up`` and print its URL."""
    # Commands on this machine get the directory, not the URL: it contains the tokens.
    typer.echo(f"collector: {stack.start_collector()} (data in {stack.data})", err=True)


def _start_stack(stack: ProgramStack, port: int, control: bool) -> None:
    """Start collector, agent and dashboard for ``vitals up``, and print their URLs."""
    _start_collector(stack)
    stack.start_agent()
    typer.echo(f"dashboard: {stack.start_dashboard(port=port, control=control)}", err=True)
