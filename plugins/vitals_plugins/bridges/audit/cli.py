"""`vitals audit`: applies Vitals' detectors and policy to an unmonitored run's log."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from trainvitals.cli.groups import add_commands
from trainvitals.cli.options import Force
from trainvitals.cli.output import write_json
from trainvitals.errors import UsageError
from trainvitals.io.rundir import holds_runs
from trainvitals.printable import printable
from vitals_collector.cli.replay import ReplayLogOptions
from vitals_collector.cli.writing import write_file

if TYPE_CHECKING:
    from vitals_plugins.bridges.audit.audit import Audit

Log = Annotated[
    Path,
    typer.Argument(
        help="A CSV file, JSON Lines, a training's output, trainer_state.json or its "
        "checkpoint's folder, TensorBoard's or wandb's folder or file.",
        readable=False,  # our own errors contain the fix
    ),
]
Html = Annotated[
    Path | None, typer.Option(help="Write one self-contained page: no scripts, no other files.")
]
Form = Annotated[
    Literal["text", "json"],
    typer.Option("--format", help="How to write to stdout; json: alarms and assumptions."),
]
Gpus = Annotated[
    int, typer.Option(min=0, help="How many GPUs the run was on, for GPU-hours; 0: not known.")
]


def register(app: typer.Typer) -> None:
    """Add the `vitals audit` command."""
    add_commands(app, {"audit": (audit, "vitals audit trainer_state.json --html audit.html")})


def audit(
    *,
    log: Log,
    html: Html = None,
    form: Form = "text",
    force: Force = False,
    gpus: Gpus = 0,
    settings: ReplayLogOptions,
) -> None:
    """Audit a log: what Vitals would have skipped, rolled back, paged; which alarms look wrong.

    The detectors and the policy of a live run judge the log. The output lists its assumptions.
    """
    from trainvitals.document import markdown, page
    from vitals_plugins.bridges.audit.audit import audit_blocks, audit_document

    result = audit_log(log, settings, gpus=gpus)
    blocks = audit_blocks(result, audit_title(log))
    if html is not None:
        write_file(html, page.write_page(blocks).encode(), force=force)
        sys.stdout.write(f"{html}\n")
        return
    if form == "json":
        write_json(audit_document(result, audit_title(log)))
        return
    write = markdown.write_text if sys.stdout.isatty() else markdown.write_markdown
    sys.stdout.write(write(blocks))


def audit_title(log: Path) -> str:
    """Return an audited log's name without its directory: a report may be sent to others."""
    return printable(log.name or str(log))


def audit_log(log: Path, settings: ReplayLogOptions, *, gpus: int = 0) -> "Audit":
    """Read a log of another tool, and return its audit.

    Raises:
        UsageError: there is no such log, or it contains runs that Vitals watched.
    """
    from trainvitals.judged_log import judge_history, measure_log_cadence
    from vitals_plugins.bridges.audit.audit import audit as gather
    from vitals_plugins.bridges.importers.assumptions import about, assumptions, unavailable_checks

    if not log.exists():
        raise UsageError(
            f"there is no file or folder {log}",
            hint="give a log; a run that Vitals watched has `vitals postmortem`",
        )
    if log.is_dir() and holds_runs(log):
        raise UsageError(
            f"{log} contains runs that Vitals watched; an audit reads logs of other tools",
            hint="`vitals postmortem RUN` shows what was done, `vitals replay RUN` what would be",
        )
    history, assumed = settings.read(log)
    judged = judge_history(
        history.steps,
        config=assumed.config,
        mode=assumed.mode,
        clips=assumed.clips,
        expected=assumed.expected,
    )
    return gather(
        history,
        judged,
        measure_log_cadence(history.steps),
        loss_kind=assumed.config.loss_kind,
        gpus=gpus,
        assumptions=(about(replace(history, source=log.name)), *assumptions(history, assumed)),
        lacking=unavailable_checks(assumed.config, len(history.steps)),
    )
