"""Entry point of the console script: prints errors as text, never as a traceback.

Exit codes: 0 ok, 1 failed, 2 wrong usage, 130 interrupted. Data are written to stdout, everything
else to stderr.
"""

import gc
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from trainvitals import __version__
from trainvitals.cli.programs import missing_package_error, register_all
from trainvitals.errors import UsageError, VitalsError
from trainvitals.printable import printable

# Skip httpx's command line: it imports rich and pygments, 3 MB in a collector and slow starts.
sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]

_MAX_OBJECTS_OF_QUICK_COMMAND = 200_000
"""`vitals show` of a small run has made 170,000 when it ends."""


def build_app(command: str = "") -> tuple[typer.Typer, dict[str, str]]:
    """Return the ``vitals`` app with its commands, and which program brought which command.

    Args:
        command: the command to run; the app has only the commands of its program.
    """
    app = typer.Typer(
        name="vitals",
        help="Keeps PyTorch training runs healthy.",
        epilog="Example: vitals demo",
        rich_markup_mode=None,  # plain help: the same text in a terminal, a pipe and docs/CLI.md
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback(invoke_without_command=True)
    def vitals(
        context: typer.Context,
        version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    ) -> None:
        if version:
            typer.echo(f"vitals {__version__}")
        elif context.invoked_subcommand is None:
            typer.echo(context.get_help())

    return app, register_all(app, command=command)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one ``vitals`` command; return its exit code if the command did not exit itself."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # Typer's completion passes the words in the environment, and needs all commands.
    app, owners = build_app(arguments[0] if arguments else "")
    _enable_gc_for_a_long_command()
    program = next((owners[word] for word in arguments if word in owners), "")
    try:
        app(args=arguments, prog_name="vitals")
    except KeyboardInterrupt:
        return 130
    except VitalsError as error:
        return report(error)
    except ModuleNotFoundError as error:
        if not program:
            raise
        return report(missing_package_error(program, error))
    return 0


def _enable_gc_for_a_long_command() -> None:
    """Collect garbage, which `entry` disabled, as usual after the command made many objects.

    A quick command makes fewer, nearly all of them when its modules load: searching them took a
    quarter of its time and found nothing.
    """
    thresholds = gc.get_threshold()

    def collect_as_usual(phase: str, info: dict[str, int]) -> None:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(collect_as_usual)

    gc.set_threshold(_MAX_OBJECTS_OF_QUICK_COMMAND, *thresholds[1:])
    gc.callbacks.append(collect_as_usual)
    gc.enable()


def report(error: VitalsError) -> int:
    """Print an error of a ``vitals`` command with code and fix; return the exit code for it."""
    # The text may contain untrusted input: a newline in it must not start a new line.
    text = "\n  ".join(map(printable, error.text.splitlines()))
    hint = f"\n\nhint: {printable(error.hint)}" if error.hint else ""
    typer.echo(f"error: {text} [{error.code}]{hint}", err=True)
    return 2 if isinstance(error, UsageError) else 1
