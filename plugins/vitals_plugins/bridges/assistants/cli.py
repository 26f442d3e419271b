"""`vitals mcp`: serves runs to coding assistants. `vitals skill install`: writes the skill file.

`vitals confirm`: sends a command that an assistant proposed.
"""

import os
import secrets
import sys
import time
from contextlib import closing
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from trainvitals.cli.groups import add_commands, add_group
from trainvitals.cli.options import Collector, Force, TokenFile
from trainvitals.cli.output import Format
from trainvitals.cli.programs import missing_package_error
from trainvitals.errors import StorageError, UsageError
from trainvitals.io.lookup import default_runs_directory, find_collector
from trainvitals.io.rundir import check_folder
from vitals_collector.cli.writing import write_file
from vitals_collector.queries.open import open_folder, open_reader
from vitals_plugins.bridges.assistants.sources import TokenSource, start_shared_source

SKILL_FILE = "SKILL.md"
SKILL_FOLDER = Path(".agents/skills")

Folder = Annotated[
    Path | None,
    typer.Argument(
        help="Folder with run directories [default: ask the collector].", readable=False
    ),
]


def register(app: typer.Typer) -> None:
    """Add the `vitals mcp`, `vitals confirm` and `vitals skill` commands."""
    add_commands(
        app,
        {
            "mcp": (serve_mcp, "vitals mcp vitals_runs"),
            "confirm": (confirm, "vitals confirm 3f2a9c0d11e4"),
        },
    )
    add_group(
        app,
        "skill",
        {"install": (install_skill, "vitals skill install")},
        about="Install the skill file for coding assistants.",
        example="vitals skill install",
    )


def serve_mcp(
    *,
    folder: Folder = None,
    http: Annotated[
        str,
        typer.Option(
            metavar="[HOST:]PORT", help="Serve over HTTP on this machine [default: stdio]."
        ),
    ] = "",
    logs: Annotated[
        Path | None,
        typer.Option(
            help="Folder of log files for the tool audit [default: the current one; none with "
            "--http].",
            readable=False,
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="A collector's data folder for the tool sql [default: no such tool]; not with "
            "--http.",
            readable=False,
        ),
    ] = None,
    control: Annotated[
        bool,
        typer.Option(
            "--control",
            help="Let the assistant propose commands, which you confirm with `vitals confirm`; not "
            "with --http or --data.",
        ),
    ] = False,
    collector: Collector = "",
    token_file: TokenFile = None,
) -> None:
    """Let a coding assistant read runs: a server of the Model Context Protocol (MCP).

    The assistant starts it over stdio. With --http, each request needs a token: one of the
    collector with the scope read, or for a folder the one that is printed. Nothing can be changed.
    """
    if control and (http or data is not None):
        raise UsageError(
            f"--control cannot be used with {'--http' if http else '--data'}",
            hint="start a server over stdio for it: vitals mcp --control",
        )
    try:
        import mcp  # noqa: F401 - so that the error names the extra, and not a module of the SDK
    except ModuleNotFoundError as error:
        raise missing_package_error("mcp", error) from None
    from vitals_plugins.bridges.assistants.proposals import Proposer
    from vitals_plugins.bridges.assistants.server import build_server
    from vitals_plugins.bridges.assistants.tools import RunTools

    if folder is not None:
        check_folder(folder)
    if not http:
        opens = partial(
            open_reader, folder, collector=collector, token_file=token_file, waits=False
        )
        with closing(start_shared_source(opens)) as source:
            environ = dict(os.environ)
            environ |= {"VITALS_COLLECTOR_URL": collector} if collector else {}
            environ |= {"VITALS_TOKEN_FILE": str(token_file)} if token_file else {}
            proposer = Proposer(source=source, environ=environ) if control else None
            tools = RunTools(source=source, logs=logs or Path(), data=data)
            build_server(tools, proposer).run("stdio")
        return
    if data is not None:
        raise UsageError(
            "--data cannot be used with --http: a query in SQL reads all runs, whatever the token",
            hint="leave out --http, or --data",
        )
    from vitals_plugins.bridges.assistants.http import serve_mcp_http

    address = None if folder is not None else find_collector(collector, token_file)
    if address is not None:
        serve_mcp_http(build_server(RunTools(source=TokenSource(address), logs=logs)), http)
        return
    opens = partial(open_folder, folder or default_runs_directory(), waits=False)
    with closing(start_shared_source(opens)) as source:
        token = secrets.token_urlsafe(24)
        serve_mcp_http(build_server(RunTools(source=source, logs=logs)), http, token=token)


def confirm(
    *,
    proposal: Annotated[str, typer.Argument(help="Id of the proposal, from the assistant.")],
    wait: Annotated[
        float, typer.Option(help="Seconds to wait for the run's response, through a collector.")
    ] = 15.0,
) -> None:
    """Send a command that an assistant proposed, after you type the end of the run's id.

    Needs a terminal. The command is signed and sent as by `vitals command`, once.
    """
    from vitals_collector.cli.control import show_response
    from vitals_plugins.bridges.assistants.proposals import (
        NUM_TYPED,
        confirm_proposal,
        proposal_folder,
    )

    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError(
            "vitals confirm has no terminal, in which an operator reads the proposal",
            hint=f"run it yourself, in your own terminal: vitals confirm {proposal}",
        )

    def ask(facts: str) -> str:
        typer.echo(facts, err=True)
        text = f"To send it, type the last {NUM_TYPED} characters of the run's id"
        return str(typer.prompt(text, err=True))

    view = confirm_proposal(
        proposal_folder(os.environ), proposal, ask=ask, clock=time.time_ns, wait=wait
    )
    show_response(view, Format.TABLE)


def install_skill(
    *,
    to: Annotated[
        Path, typer.Option(help="Folder of skills; the file is in its folder vitals.")
    ] = SKILL_FOLDER,
    force: Force = False,
) -> None:
    """Write the skill file: how to wrap a loop and read a verdict, and what never to do.

    Give the folder in which your assistant looks for skills; it must be one that you trust.
    """
    path = to / "vitals" / SKILL_FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"{path.parent} cannot be created: {error.strerror or error}",
            hint="give a folder that you may write to: --to FOLDER",
        ) from error
    write_file(path, (files(__package__) / SKILL_FILE).read_bytes(), force=force)
    typer.echo(str(path))
