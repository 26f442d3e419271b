"""`vitals preflight`: measures the nodes of a job, names slow and faulty ones, remembers them."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer

from trainvitals.cli.options import VitalsDir
from trainvitals.cli.output import Format, format_time, write_json, write_rows
from trainvitals.errors import UsageError
from trainvitals.printable import printable
from trainvitals.units import humanize_bytes, humanize_count, humanize_seconds
from trainvitals.views import FailingNode
from vitals_plugins.lab.burn_in.runner import running_here
from vitals_plugins.lab.preflight.history import (
    LOCAL,
    NodeHistory,
    baseline,
    exclude_list,
    failing_nodes,
    node_affinity,
    node_checks,
)
from vitals_plugins.lab.preflight.judge import PreflightFinding, judge
from vitals_plugins.lab.preflight.launch import (
    RANK_SHARE,
    Launched,
    launch,
    launcher_command,
    local_words,
)
from vitals_plugins.lab.preflight.report import PreflightReport

_VISIBLE = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")
"""Variables with the GPUs that a process may use."""
PreflightFormat = Literal["table", "json", "exclude", "selector"]


class PreflightResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a preflight."""

    check_id: str
    time_unix_ns: int
    findings: tuple[PreflightFinding, ...]
    """Failures first."""
    reports: tuple[PreflightReport, ...]
    """Figures of each rank that reported."""

    @property
    def exit_code(self) -> int:
        """Return 1 if a node is at fault, and 3 if something failed, but no node can be named."""
        failed = [each for each in self.findings if each.severity == "fail"]
        return 0 if not failed else 1 if any(each.nodes for each in failed) else 3


def register(app: typer.Typer) -> None:
    """Add the `vitals preflight` command."""
    app.command(
        epilog="Example: vitals preflight -- torchrun --nproc-per-node 8 train.py",
        context_settings={"ignore_unknown_options": True},
    )(preflight)


def preflight(
    command: Annotated[
        list[str] | None,
        typer.Argument(
            help="The training command with torchrun, after -- [default: this node, a rank per "
            "GPU, or two on the CPU].",
            show_default=False,
        ),
    ] = None,
    budget: Annotated[
        float, typer.Option(min=5, max=3600, help="Seconds for the measurement.")
    ] = 60.0,
    checkpoint_bytes: Annotated[
        int, typer.Option(min=1 << 20, help="Bytes that each rank writes to the disk.")
    ] = 256 << 20,
    gpus: Annotated[
        int, typer.Option(min=0, help="GPUs that each node must have.", show_default=False)
    ] = 0,
    directory: VitalsDir = Path("vitals_runs"),
    failed_nodes: Annotated[
        bool,
        typer.Option(
            "--failed-nodes",
            help="Instead list nodes with a fault in at least 2 of their latest 5 checks.",
        ),
    ] = False,
    form: Annotated[
        PreflightFormat,
        typer.Option(
            "--format",
            help="How to write the result; with --failed-nodes also exclude (for sbatch) or "
            "selector (for Kubernetes).",
        ),
    ] = "table",
    yes: Annotated[bool, typer.Option("--yes", help="Measure although a run trains here.")] = False,
) -> None:
    """Measure the nodes of a job before the training, and name slow or faulty ones.

    Measures loader, matrix product, memory, checkpoint write, clocks, all-reduce and changing
    pairs of ranks. Compares each rank with the other ranks and with earlier checks of its node.
    The launcher starts a measuring program instead of the training script, which is never started.

    Exits 1 if a node should not be used, and 3 if something failed, but no node can be named.
    """
    history = NodeHistory(directory)
    if failed_nodes:
        _list_failing(history, form)
        return
    if form not in ("table", "json"):
        raise UsageError(f"--format {form} lists nodes", hint="add --failed-nodes")
    runs = running_here(os.environ)
    if runs and not yes:
        raise UsageError(
            f"{', '.join(runs)} trains on this node; a preflight takes CPU, GPU and disk from it",
            hint="wait until it has ended, or add --yes",
        )
    parameters = {
        "seconds": RANK_SHARE * budget,
        "directory": str(directory.absolute()),
        "checkpoint_bytes": checkpoint_bytes,
    }
    started = time.monotonic()
    try:
        line = launcher_command(command or local_words(), msgspec.json.encode(parameters).decode())
    except ModuleNotFoundError:
        raise  # the caller names the package
    except (ImportError, OSError) as error:  # exit code 1 would exclude the node
        raise UsageError(
            f"PyTorch cannot be loaded: {error}", hint="try: python -c 'import torch'"
        ) from error
    environ = os.environ if command else {**os.environ, **_local_environ()}
    typer.echo(f"Measuring for at most {budget:g} s.", err=True)
    launched = launch(line, environ, seconds=budget - (time.monotonic() - started))
    if launched.exit_code or not launched.reports:
        for text in launched.tail:
            typer.echo(printable(text), err=True)
    visible = [os.environ.get(name) for name in _VISIBLE]
    result = conclude(
        launched,
        history,
        now_unix_ns=time.time_ns(),
        settings=f"{'job' if command else LOCAL}, {budget:g} s, {visible}",
        num_gpus=gpus,
    )
    if form == "json":
        write_json(result)
    else:
        _write_result(result)
    if result.exit_code:
        raise typer.Exit(result.exit_code)


def _local_environ() -> Mapping[str, str]:
    """Return the environment for a preflight on this node only: gloo uses the loopback."""
    # The name of a suspected node may not resolve; no other node takes part.
    return {"GLOO_SOCKET_IFNAME": "lo"} if Path("/sys/class/net/lo").exists() else {}


def conclude(
    launched: Launched,
    history: NodeHistory,
    *,
    now_unix_ns: int,
    settings: str = "",
    num_gpus: int = 0,
) -> PreflightResult:
    """Judge the preflight's reports, store them in the history, and return the result.

    Args:
        launched: the reports.
        history: of their nodes.
        now_unix_ns: time of the check.
        settings: everything that must be equal for a comparison with an earlier check.
        num_gpus: GPUs that each node must have; 0 if unknown.
    """
    reports = launched.reports
    current = node_checks(reports, (), check_id="", now_unix_ns=now_unix_ns, settings=settings)
    baselines = {node: baseline(history.read(node) or (), check) for node, check in current.items()}
    findings = judge(reports, baselines=baselines, num_gpus=num_gpus)
    # The id that the ranks agreed on: several commands may store the same preflight.
    check_id = next((each.check_id for each in reports if each.check_id), secrets.token_hex(8))
    entries = node_checks(
        reports, findings, check_id=check_id, now_unix_ns=now_unix_ns, settings=settings
    )
    for node, entry in entries.items():
        history.add(node, entry)
    problems = tuple(
        PreflightFinding(
            kind="history",
            severity="note",
            text=f"history: {problem}",
            hint="later checks compare with less history",
        )
        for problem in history.problems
    )
    return PreflightResult(
        check_id=check_id,
        time_unix_ns=now_unix_ns,
        findings=(*findings, *problems),
        reports=reports,
    )


def _list_failing(history: NodeHistory, form: PreflightFormat) -> None:
    """Print the nodes that failed earlier preflights repeatedly, in the requested format."""
    histories = history.read_all()
    failing = failing_nodes(histories)
    if not histories:
        typer.echo("No check is stored in this directory.", err=True)
    for problem in history.problems:
        typer.echo(f"warning: {printable(problem)}", err=True)
    if form == "json":
        write_json(failing)
    elif form == "exclude":
        typer.echo(exclude_list(failing))
    elif form == "selector":
        typer.echo(node_affinity(failing))
    else:
        _write_failing(failing)
    if history.problems:  # the list may be incomplete
        raise typer.Exit(2)


def _write_failing(failing: Sequence[FailingNode]) -> None:
    """Print a table of the nodes that failed earlier preflights repeatedly."""
    rows = [
        (
            each.node,
            f"{each.num_failed} of {each.num_checks}",
            format_time(each.last_unix_ns),
            ", ".join(each.kinds),
        )
        for each in failing
    ]
    write_rows(("node", "failed checks", "last", "kinds"), rows, Format.TABLE)


def _write_result(result: PreflightResult) -> None:
    """Print a preflight's measurements by rank, and its findings."""
    header = ("rank", "node", "gemm", "memory", "loader", "disk", "fsync", "all-reduce", "clock")
    write_rows(header, [_row(report) for report in result.reports], Format.TABLE)
    typer.echo("")
    for finding in result.findings:
        typer.echo(f"{finding.severity}  {printable(finding.text)}")
        if finding.hint:
            typer.echo(f"      -> {printable(finding.hint)}")
    if not result.findings:
        ranks = humanize_count(len(result.reports), "rank")
        typer.echo(f"ok  {ranks}, no fault found")
    nodes = sorted({node for each in result.findings for node in each.nodes})
    if nodes:
        typer.echo(f"\nDo not train on: {printable(', '.join(nodes))}")


def _row(report: PreflightReport) -> tuple[str, ...]:
    """Return a rank's measurements as a row of the preflight's table."""
    figures = report.figures
    return (
        str(report.rank),
        report.node,
        _rate(figures.get("gemm_flops_per_second"), "FLOP/s"),
        _rate(figures.get("memory_bytes_per_second")),
        _rate(figures.get("loader_bytes_per_second")),
        _rate(figures.get("disk_bytes_per_second")),
        humanize_seconds(figures["fsync_seconds"]) if "fsync_seconds" in figures else "-",
        _rate(report.ring_bytes_per_second),
        humanize_seconds(report.offset.seconds) if report.offset else "-",
    )


def _rate(value: float | None, unit: str = "B/s") -> str:
    """Return a rate that a preflight measured as text; a dash if it is missing."""
    if value is None:
        return "-"
    return f"{value:.3g} {unit}" if unit != "B/s" else f"{humanize_bytes(value)}/s"
