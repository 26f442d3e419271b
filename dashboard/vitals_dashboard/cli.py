"""``vitals dashboard``: the pages over a collector, or over a directory of runs."""

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from trainvitals.cli.options import Control
from trainvitals.errors import MissingDependencyError, UsageError

if TYPE_CHECKING:
    from vitals_dashboard import launch


def register(app: typer.Typer) -> None:
    """Add the `vitals dashboard` command."""
    app.command("dashboard", epilog="Example: vitals dashboard vitals_runs --open")(dashboard)


def dashboard(
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="[DIR]", help="Folder of runs to read; needs no collector."),
    ] = None,
    collector: Annotated[
        str, typer.Option(help="Address or data folder of a collector [default: this user's own].")
    ] = "",
    token_file: Annotated[
        Path | None, typer.Option(help="That collector's tokens.json (mode 0600).")
    ] = None,
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1; 0 picks a free port.")] = 0,
    open_browser: Annotated[
        bool, typer.Option("--open", help="Open the address in a browser.")
    ] = False,
    control: Control = False,
    public_url: Annotated[
        str, typer.Option(help="Address at which a proxy with TLS serves the pages.")
    ] = "",
    oidc: Annotated[
        Path | None,
        typer.Option(help="TOML file (mode 0600) of the OpenID provider for --public-url."),
    ] = None,
) -> None:
    """Show runs live in a browser. Prints the address to open; Ctrl-C stops it."""
    import os

    if find_spec("streamlit") is None:
        raise MissingDependencyError(
            "the dashboard needs streamlit", hint="pip install 'trainvitals[dashboard]'"
        )
    from vitals_dashboard import launch

    if folder is not None and collector:
        raise UsageError(
            f"both a folder ({folder}) and a collector ({collector}) are given",
            hint="leave out one of them",
        )
    entrance = _build_access_options(control, public_url, oidc)
    port = launch.free_port(port)
    environ = dict(os.environ)
    with ended_by_signals(), ExitStack() as stack:
        children = []
        if folder is not None:
            path = launch.check_folder(folder)
            child, collector_place = stack.enter_context(launch.run_folder_collector(path, environ))
            children.append(child)
        elif collector:
            collector_place = _resolve_collector(collector, token_file, environ)
        else:
            collector_place = launch.find_collector_location(environ)
        pages = stack.enter_context(
            launch.run_page_server(collector_place, port, environ, entrance)
        )
        typer.echo(pages.address)
        if pages.public_address:
            typer.echo(f"Through the proxy: {pages.public_address}", err=True)
        typer.echo(
            f"If a browser does not resolve that name (Safari, tunnels), read-only:"
            f" {pages.look_address}\nCtrl-C stops it.",
            err=True,
        )
        if open_browser:
            typer.launch(pages.redirect_file.as_uri())
        launch.watch_programs([*children, pages.program], pages.codes, _show_code)


def _show_code(code: str) -> None:
    """Print the control code that a browser requested to the dashboard's terminal."""
    now = time.strftime("%H:%M:%S")
    typer.echo(
        f"Control code: {code}  (asked for by a browser at {now}, for 2 minutes; ignore it if that"
        " was not you)",
        err=True,
    )


def _build_access_options(
    control: bool, public_url: str, oidc: Path | None
) -> "launch.AccessOptions":
    from vitals_dashboard.launch import AccessOptions
    from vitals_dashboard.settings import check_public_url, read_sign_on

    if public_url:
        check_public_url(public_url)
    if oidc is None:
        return AccessOptions(control=control, public_url=public_url)
    if urlsplit(public_url).path.strip("/") or not public_url:
        raise UsageError(
            f"--oidc needs --public-url https://HOST without a path; it is {public_url!r}",
            hint="give the address that the proxy serves: the provider sends people back there",
        )
    for package in ("authlib", "httpx"):
        if find_spec(package) is None:
            raise MissingDependencyError(
                f"--oidc needs {package}", hint="pip install 'trainvitals[oidc]'"
            )
    return AccessOptions(control=control, public_url=public_url, sign_on=read_sign_on(oidc))


def _resolve_collector(
    url: str, token_file: Path | None, environ: dict[str, str]
) -> "launch.CollectorLocation":
    from trainvitals.io.client import read_tokens
    from trainvitals.io.server_identity import parse_url
    from trainvitals.io.setting_paths import collector_folder
    from vitals_dashboard.launch import CollectorLocation, locate_collector

    data = collector_folder(url)
    if data is not None:
        return locate_collector(data, str(token_file or ""))
    parse_url(url)  # rejects an invalid URL
    path = str(token_file) if token_file is not None else environ.get("VITALS_TOKEN_FILE", "")
    if not path:
        raise UsageError(
            "the address of a collector is given without a token",
            hint="add --token-file FILE: the tokens.json in the collector's data folder",
        )
    read_tokens(path)  # raises its error now
    return CollectorLocation(url=url, token_file=str(Path(path).absolute()))


def _raise_interrupt(number: int, frame: FrameType | None) -> None:
    """Handle SIGTERM and SIGHUP in `vitals dashboard` as Ctrl-C."""
    raise KeyboardInterrupt


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP stop `vitals dashboard` and its processes as Ctrl-C does."""
    signals = (signal.SIGTERM, signal.SIGHUP)
    before = [(number, signal.signal(number, _raise_interrupt)) for number in signals]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)
