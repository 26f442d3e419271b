"""`vitals audit`: applies Vitals' detectors and policy to an unmonitored run's log."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from trainvitals.cli.groups import add_commands
from trainvitals.cli.options import Force
from trainvitals.cli.output import write_json
from trainvitals.detect.posttraining.names import Task, is_read, known_names
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
TaskOption = Annotated[
    Task | None,
    typer.Option(
        help="Kind of a post-training run, as in watch(task=...): its reward, entropy and other "
        "scalars are judged too."
    ),
]
Scalars = Annotated[
    list[str] | None,
    typer.Option(
        "--scalar",
        metavar="NAME=COLUMN",
        help="Column of a post-training scalar with a name of your own, such as "
        "reward=mean_reward; needs --task. Repeatable.",
    ),
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
    task: TaskOption = None,
    scalar: Scalars = None,
    settings: ReplayLogOptions,
) -> None:
    """Audit a log: what Vitals would have skipped, rolled back, paged; which alarms look wrong.

    The detectors and the policy of a live run judge the log. The output lists its assumptions.
    """
    from trainvitals.document import markdown, page
    from vitals_plugins.bridges.audit.audit import audit_blocks, audit_document

    scalars = _parse_scalar_options(scalar or (), task)
    result = audit_log(log, settings, gpus=gpus, task=task, scalars=scalars)
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


def _parse_scalar_options(options: Sequence[str], task: Task | None) -> dict[str, str]:
    """Return the column of each post-training scalar that `vitals audit` is given.

    Raises:
        UsageError: an option is not NAME=COLUMN, its name is unknown, or the task is missing.
    """
    pairs = [option.partition("=") for option in options]
    if pairs and task is None:
        raise UsageError("--scalar needs --task", hint="for example --task grpo")
    for option, (name, _, column) in zip(options, pairs, strict=True):
        if not column or not is_read(name):
            raise UsageError(
                f"--scalar is {option!r}; it must be NAME=COLUMN with a known name",
                hint=f"names: {', '.join(known_names())}",
            )
    return {name: column for name, _, column in pairs}


def audit_title(log: Path) -> str:
    """Return an audited log's name without its directory: a report may be sent to others."""
    return printable(log.name or str(log))


def audit_log(
    log: Path,
    settings: ReplayLogOptions,
    *,
    gpus: int = 0,
    task: Task | None = None,
    scalars: Mapping[str, str] | None = None,
) -> "Audit":
    """Read a log of another tool, and return its audit.

    Args:
        log: file or directory.
        settings: options for a log.
        gpus: number of GPUs; 0: unknown.
        task: kind of a post-training run.
        scalars: column of each post-training scalar with another name than Vitals knows.

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
    history, assumed = settings.read(log, task=task, scalars=scalars)
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
        task=task or "",
        expected=assumed.expected,
        gpus=gpus,
        assumptions=(about(replace(history, source=log.name)), *assumptions(history, assumed)),
        lacking=unavailable_checks(assumed.config, len(history.steps)),
    )
