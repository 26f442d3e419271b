"""Finds the commands of every installed program, without importing a program by name.

A program announces `register(app: typer.Typer) -> None` in the entry point group
`trainvitals.commands`. If its packages are missing, its commands stay and print what to install.
Rules for `register`: import heavy packages inside the command, and end every command's help with
`epilog="Example: vitals ..."`.
"""

from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from importlib.metadata import EntryPoint, PackageNotFoundError, distribution, entry_points

import typer
from typer.models import CommandInfo

from trainvitals.errors import MissingDependencyError, UsageError, VitalsError

GROUP = "trainvitals.commands"

ORDER = (
    *("demo", "up", "run", "doctor", "preflight", "drill", "resume", "plan", "agent"),
    *("repro", "landscape"),
    *("collector", "runs", "show", "goodput", "forecast", "query", "export", "postmortem", "why"),
    *("tail", "mirror", "command", "stacks", "replay", "audit", "sql", "dashboard", "mcp"),
    "confirm",
)
"""Order of commands in the help; others follow, groups come last."""

COMMANDS: dict[str, tuple[str, ...]] = {
    "demo": ("demo",),
    "up": ("up", "run"),
    "doctor": ("doctor",),
    "resume": ("resume",),
    "plan": ("plan",),
    "preflight": ("preflight",),
    "drill": ("drill",),
    "agent": ("agent",),
    "collector": (
        *("collector", "runs", "show", "why", "tail", "query", "postmortem"),
        *("goodput", "forecast", "replay", "alerts", "command", "stacks", "store", "export"),
        *("sql", "token"),
    ),
    "dashboard": ("dashboard",),
    "checkpoints": ("checkpoints",),
    "repro": ("repro",),
    "mirror": ("mirror",),
    "mcp": ("mcp", "confirm", "skill"),
    "audit": ("audit",),
    "landscape": ("landscape",),
    "deploy": ("deploy",),
}
"""Command names by program, for the message if that program cannot be loaded."""

OWN = ("demo", "up", "doctor", "resume")
"""Modules of `trainvitals.cli` with their own `register`."""

PACKAGES: dict[str, tuple[str, ...]] = {
    "base": (
        *("msgspec", "numpy", "rich", "typer", "httpx", "httpcore", "cryptography"),
        *("psutil", "pynvml", "prometheus_client", "sqlalchemy", "alembic"),
    ),
    "collector": (
        *("fastapi", "starlette", "uvicorn", "httptools", "uvloop", "pyarrow"),
        *("duckdb", "duckdb_extension_ducklake", "duckdb_extension_sqlite_scanner"),
    ),
    "notify": ("apprise",),
    "remote-write": ("cramjam",),
    "postgresql": ("psycopg", "duckdb_extension_postgres_scanner"),
    "s3": ("duckdb_extension_httpfs",),
    "dashboard": ("streamlit", "pandas"),
    "oidc": ("authlib",),
    "grafana": ("grafana_api", "requests"),
    "mcp": ("mcp",),
}
"""Modules of the base install and each extra; a test compares them with pyproject.toml."""

EXTRAS = {
    "deploy": "grafana",
    "demo": "all",
    "up": "dashboard",
    "checkpoints": "torch",
    "landscape": "torch",
    "preflight": "torch",
    "drill": "collector",
    "repro": "torch",
    "mirror": "collector",
    "audit": "collector",
}
"""Extra that a program needs, if its name differs from the program's."""

HOUSE = frozenset(
    {
        "trainvitals",
        "trainer_hooks",
        "vitals_agent",
        "vitals_collector",
        "vitals_dashboard",
        "vitals_deploy",
        "vitals_plugins",
    }
)


def missing_package_error(program: str, error: ModuleNotFoundError) -> VitalsError:
    """Return the error of a ``vitals`` command that explains which package to install."""
    module = (error.name or str(error)).partition(".")[0]
    if module in HOUSE:
        return UsageError(
            f"`vitals {program}` is not part of this installation: {error}",
            hint="reinstall with pip install --force-reinstall --no-deps trainvitals",
        )
    extra = "torch" if module == "torch" else EXTRAS.get(program, program)
    return MissingDependencyError(
        f"`vitals {program}` needs the package {module}, which is not installed",
        hint=install("base" if module in PACKAGES["base"] else extra),
    )


def install(extra: str) -> str:
    """Return the pip command that installs an extra, for the hint of a ``vitals`` command."""
    return "pip install trainvitals" if extra == "base" else f"pip install 'trainvitals[{extra}]'"


def register_all(
    app: typer.Typer, *, command: str = "", programs: Iterable[EntryPoint] | None = None
) -> dict[str, str]:
    """Add the commands of all programs to the ``vitals`` app; return which brought which.

    Args:
        app: gets the commands.
        command: the command to run: only its program is imported and only this command is
            added, for a quick start. Empty or unknown: all are.
        programs: their entry points; None looks up the installed ones.
    """
    owners: dict[str, str] = {}
    chosen = {program for program, names in COMMANDS.items() if command in names}
    for name in OWN:
        if not chosen or name in chosen:
            _register_program(app, name, partial(_load_program, name), owners)
    points = _installed_programs(is_ours=bool(chosen)) if programs is None else programs
    for point in sorted(points, key=lambda point: point.name):
        if not chosen or point.name in chosen:
            _register_program(app, point.name, point.load, owners)
    if chosen:  # Typer builds each command that it is given: a twentieth of a start
        app.registered_commands = [
            info for info in app.registered_commands if _command_name(info) == command
        ]
        app.registered_groups = [group for group in app.registered_groups if group.name == command]
    app.registered_commands.sort(key=_command_sort_key)
    return owners


def _installed_programs(*, is_ours: bool) -> Iterable[EntryPoint]:
    """Return the entry points of all packages, or only those of this one: 8 ms less."""
    if is_ours:
        try:
            return distribution("trainvitals").entry_points.select(group=GROUP)
        except PackageNotFoundError:
            pass  # a copy of the source, without metadata
    return entry_points(group=GROUP)


def _command_sort_key(command: CommandInfo) -> int:
    """Return the position of a CLI command in the help."""
    name = _command_name(command)
    return ORDER.index(name) if name in ORDER else len(ORDER)


def _load_program(name: str) -> Callable[[typer.Typer], None]:
    """Return the ``register`` function of a module of ``trainvitals.cli``."""
    register: Callable[[typer.Typer], None] = import_module(f"trainvitals.cli.{name}").register
    return register


def _register_program(
    app: typer.Typer,
    program: str,
    load: Callable[[], Callable[[typer.Typer], None]],
    owners: dict[str, str],
) -> None:
    """Add a program's CLI commands, or placeholders if it cannot be loaded."""
    before = _command_names(app)
    try:
        load()(app)
    except ModuleNotFoundError as error:
        failure = missing_package_error(program, error)
    except Exception as error:  # noqa: BLE001 - one broken program must not take the others away; shown when its command is asked for
        failure = UsageError(
            f"`vitals {program}` cannot be loaded: {type(error).__name__}: {error}",
            hint="reinstall trainvitals; if that does not help, this is a bug to report",
        )
    else:
        owners.update(dict.fromkeys(_command_names(app) - before, program))
        return
    for command in COMMANDS.get(program, (program,)):
        if command not in _command_names(app):
            _add_placeholder(app, command, failure)
            owners[command] = program


def _command_names(app: typer.Typer) -> set[str]:
    """Return the names of the CLI app's commands and groups."""
    groups = {group.name for group in app.registered_groups}
    commands = {_command_name(command) for command in app.registered_commands}
    return {name for name in groups | commands if isinstance(name, str)}


def _command_name(command: CommandInfo) -> str:
    """Return the name of a CLI command as Typer shows it."""
    return command.name or typer.main.get_command_name(getattr(command.callback, "__name__", ""))


def _add_placeholder(app: typer.Typer, command: str, failure: VitalsError) -> None:
    def explain() -> None:
        raise failure

    app.command(
        command,
        help=f"Not available: {failure.text}.",
        epilog=f"Example: {failure.hint}",
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )(explain)
