"""``vitals agent``: arguments in, exit code out. Expensive imports happen when it runs."""

import logging
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainvitals.errors import ConfigError, VitalsError
from trainvitals.identity import check_run_id, safe_node_id

if TYPE_CHECKING:
    from vitals_agent.agent import AgentConfig
    from vitals_agent.collector_endpoint import CollectorEndpoint

_Dir = Annotated[
    Path,
    typer.Option(
        "--dir", envvar="VITALS_DIR", help="Folder with run directories.", file_okay=False
    ),
]
_Run = Annotated[str, typer.Option("--run", help="Serve only this run.")]
_Collector = Annotated[
    str,
    typer.Option(
        "--collector",
        envvar="VITALS_COLLECTOR_URL",
        help="URL or data directory of the collector to forward to. For several collectors on one "
        "PostgreSQL: their URLs, comma-separated; the agent tries them in turn. "
        "Without it, metrics stay in the run directory, and also go to your own collector while "
        "one runs.",
    ),
]
_TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        envvar="VITALS_TOKEN_FILE",
        help="A copy of the collector's tokens.json (0600).",
    ),
]
_Listen = Annotated[
    str,
    typer.Option("--listen", help="Address of /metrics and /healthz; port 0 picks a free port."),
]
_Node = Annotated[
    str,
    typer.Option("--node", envvar="VITALS_NODE", help="This node's id [default: its host name]."),
]
_RetainHours = Annotated[
    float,
    typer.Option(
        "--retain-hours",
        min=0.0,
        help="Hours for which acknowledged rows stay here, because a collector that is restored "
        "from a backup requests them again. At least the time between two backups.",
    ),
]
_RetainMegabytes = Annotated[
    int,
    typer.Option(
        "--retain-mb",
        min=0,
        help="Size limit of these rows per run on this node; the oldest are deleted first.",
    ),
]
_Once = Annotated[
    bool,
    typer.Option("--once", help="Store the remaining rows of ended ranks on this node, then exit."),
]
_LingerHours = Annotated[
    float,
    typer.Option(
        "--linger-hours",
        envvar="VITALS_LINGER_HOURS",
        min=0.0,
        help="How long the agent of a training waits after its end for a collector that is "
        "down; then any later agent on the node sends the remaining rows.",
    ),
]
_Mirror = Annotated[
    str,
    typer.Option(
        "--mirror",
        envvar="VITALS_MIRROR",
        metavar="TRACKERS",
        help="Mirror each run whose rank 0 is on this node, as `vitals mirror --to`; several are "
        "space-separated [default: none].",
    ),
]
_Child = Annotated[bool, typer.Option("--child", hidden=True)]


def register(app: typer.Typer) -> None:
    """Add the ``vitals agent`` command, which runs the node agent."""
    app.command(
        "agent",
        epilog="Example: vitals agent --dir ./vitals_runs --collector https://c.example.org:8765"
        " --token-file tokens.json",
    )(agent)


def agent(
    directory: _Dir = Path("vitals_runs"),
    run_id: _Run = "",
    collector: _Collector = "",
    token_file: _TokenFile = None,
    listen: _Listen = "127.0.0.1:0",
    node: _Node = "",
    retain_hours: _RetainHours = 24.0,
    retain_mb: _RetainMegabytes = 1024,
    once: _Once = False,
    linger_hours: _LingerHours = 24.0,
    mirror: _Mirror = "",
    child: _Child = False,
) -> None:
    """Run the node agent: store metrics, sample hardware, forward, relay commands.

    Run one agent per folder and node. It may start before any run, and serves all of them.
    """
    from trainvitals.io.control_key import control_folder
    from trainvitals.io.private import private_base
    from vitals_agent.agent import Agent, AgentConfig
    from vitals_agent.daemon import (
        LoopConfig,
        close_inherited,
        log_to_stderr,
        run,
        wait_for_release,
    )

    if child:
        close_inherited()
    host, port = _parse_host_port(listen)
    log_to_stderr(logging.WARNING if once else logging.INFO)
    endpoint, scrape_token, notice = _endpoint(collector, token_file, run_id, child=child)
    keeps_history = endpoint is None or not collector
    config = AgentConfig(
        vitals_dir=directory.absolute(),
        base=private_base(os.environ),
        keys=control_folder(os.environ, token_file, collector),
        node=_node_id(node, child=child),
        run_id=check_run_id(run_id) if run_id else "",
        host=host,
        port=port,
        scrape_token=scrape_token,
        collector=_canonical_collector(collector) if endpoint is not None else "",
        is_collector_named=bool(collector),
        takes_over=child,
        notice=notice,
        keeps_history=keeps_history,
        mirrors=tuple(mirror.split()),
        mirror_source=() if keeps_history else _mirror_source_options(collector, token_file),
        retain_seconds=retain_hours * 3600.0,
        retain_bytes=retain_mb << 20,
    )
    if once:
        wait_for_release(config.base, config.vitals_dir)
    try:
        served = Agent(
            config,
            client=endpoint,
            reachable=endpoint.reachable if endpoint else None,
            ahead=endpoint.send_ahead if endpoint else None,
        )
        outcome = run(served, LoopConfig(child=child, once=once))
        if child and run_id and endpoint is not None and outcome == "ended" and linger_hours:
            _linger(config, endpoint, linger_hours)
    finally:
        if endpoint is not None:
            endpoint.close()


def _linger(config: "AgentConfig", endpoint: "CollectorEndpoint", hours: float) -> None:
    """Keep the agent alive for some hours, to send an ended run's spooled rows."""
    from trainvitals.io.rundir import RunDir
    from vitals_agent.agent import Agent
    from vitals_agent.daemon import LoopConfig, deliver_when_reachable, log, run
    from vitals_agent.state_dir import AgentStateDir

    path = RunDir(config.vitals_dir / config.run_id).agent_path(config.node)
    state_dir = AgentStateDir(path, config.base)
    num_rows = state_dir.num_waiting() if state_dir.destination() == config.collector else 0
    if not num_rows:
        return
    log.warning(
        "%d rows of run %s wait in %s: the collector at %s does not answer. This process (pid %d) "
        "sends them once it does, for %g hours; `kill %d` ends that, and any later agent on this "
        "node sends them",
        *(num_rows, config.run_id, path, config.collector, os.getpid(), hours, os.getpid()),
    )
    deliver_when_reachable(
        lambda: run(
            Agent(config, client=endpoint, reachable=endpoint.reachable),
            LoopConfig(child=True, lingers=True),
        ),
        is_waiting=lambda: state_dir.num_waiting(1) > 0,
        answers=endpoint.answers,
        seconds=hours * 3600.0,
    )


def _mirror_source_options(collector: str, token_file: Path | None) -> tuple[str, ...]:
    """Return the options with which a mirror reads from the agent's collector."""
    tokens = () if token_file is None else ("--token-file", str(token_file.absolute()))
    return ("--collector", _canonical_collector(collector), *tokens)


def _canonical_collector(collector: str) -> str:
    """Return the collector's name in the agent's files; equal for all ways to specify it."""
    from trainvitals.io.setting_paths import collector_folder, default_data_dir

    folder = collector_folder(collector) if collector else default_data_dir(os.environ)
    return collector if folder is None else str(folder)


def _endpoint(
    collector: str, token_file: Path | None, run_id: str, *, child: bool
) -> "tuple[CollectorEndpoint | None, str, str]":
    """Return the agent's link to its collector, the scrape token, and a notice for its runs."""
    from vitals_agent.collector_endpoint import CollectorEndpoint, make_collector_finder

    try:
        find = make_collector_finder(collector, token_file, os.environ, run_id=run_id)
        address = find()
        return CollectorEndpoint(find), address.tokens.scrape if address is not None else "", ""
    except VitalsError as error:
        if collector and not child:
            raise
        # A rank's child can only report to the run, and its directory still keeps everything.
        return None, "", f"nothing is shipped: {error.text}"


def _parse_host_port(listen: str) -> tuple[str, int]:
    """Split the ``--listen`` option of ``vitals agent`` into host and port."""
    host, colon, port = listen.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65_535:
        raise ConfigError(
            f"--listen is {listen!r}; it must be HOST:PORT", hint="127.0.0.1:0 picks a free port"
        )
    return host.strip("[]"), int(port)


def _node_id(node: str, *, child: bool) -> str:
    """Return the node id of the agent and of the ranks here; with another, it finds no journal."""
    safe = safe_node_id(node or socket.gethostname())
    if node and node != safe and not child:
        raise ConfigError(
            f"--node is {node!r}; use letters, digits and ._- (at most 64)",
            hint=f"ranks with VITALS_NODE={node} call themselves {safe}",
        )
    return safe


def main() -> None:
    """Run the command as ``python -m vitals_agent``; errors as text, as ``vitals`` does."""
    from trainvitals.cli.main import report
    from trainvitals.cli.programs import missing_package_error

    app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)
    register(app)
    try:
        app(prog_name="python -m vitals_agent")
    except VitalsError as error:
        sys.exit(report(error))
    except ModuleNotFoundError as error:
        sys.exit(report(missing_package_error("agent", error)))
