"""Commands that look back: `vitals runs`, `why` and `tail`, and those of the files beside."""

import time
from collections.abc import Collection
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from trainvitals.cli.output import Format, format_time, write_json, write_rows
from trainvitals.errors import UsageError
from trainvitals.io.rundir import RunDir, is_run_id
from trainvitals.views import (
    DecisionsQuestion,
    EventsQuestion,
    FindingsQuestion,
    RunQuestion,
    RunsQuestion,
    SeriesQuestion,
    StacksQuestion,
    StacksView,
    StepQuestion,
    VerdictQuestion,
)
from vitals_collector.cli import export, forecast, goodput, postmortem, query, show
from vitals_collector.cli.follow import follow as show_progress
from vitals_collector.cli.opening import (
    Collector,
    Dir,
    Run,
    TokenFile,
    open_run,
    warn_of_unreadable,
)
from vitals_collector.cli.writing import Force, Output, TableForm, TableFormat, write_columns
from vitals_collector.queries.open import Opened, open_reader
from vitals_collector.queries.stacks import stood
from vitals_collector.queries.tail import Tail

_RUN_COLUMNS = (
    *("run", "name", "state", "health", "step", "loss"),
    *("skips", "rollbacks", "started"),
)


class TextFormat(StrEnum):
    """How an answer in words is written."""

    TEXT = "text"
    JSON = "json"
    CSV = "csv"


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("runs", epilog="Example: vitals runs --format csv")(list_runs)
    show.register(app)
    goodput.register(app)
    forecast.register(app)
    query.register(app)
    export.register(app)
    postmortem.register(app)
    app.command("why", epilog="Example: vitals why my-run 31219")(why)
    app.command("tail", epilog="Example: vitals tail my-run --follow")(tail)


def list_runs(
    folder: Annotated[
        Path | None,
        typer.Argument(
            help="Folder with run directories [default: ask the collector].", readable=False
        ),
    ] = None,
    collector: Collector = "",
    token_file: TokenFile = None,
    form: TableForm = TableFormat.TABLE,
    output: Output = None,
    force: Force = False,
) -> None:
    """List the runs of a collector, or of a folder without any server."""
    with open_reader(folder, collector=collector, token_file=token_file) as opened:
        runs = opened.reader.ask(RunsQuestion())
        others = _without_rows(opened, {run.run_id for run in runs})
        warn_of_unreadable(opened.unreadable)
        if not runs and not others and opened.folder is not None:
            typer.echo(f"there are no runs in {opened.folder}", err=True)
    rows: list[tuple[object, ...]] = [
        (
            *(run.run_id, run.name, run.state, run.health, run.last_step, run.loss),
            *(run.num_skips, run.num_rollbacks, format_time(run.started_unix_ns)),
        )
        for run in runs
    ]
    rows += [(run_id, "", state, "", *[None] * 4, "") for run_id, state in others.items()]
    columns = {name: [row[at] for row in rows] for at, name in enumerate(_RUN_COLUMNS)}
    write_columns(columns, form, output, force=force, body=runs)
    if opened.unreadable and not runs:
        raise typer.Exit(1)


def _without_rows(opened: Opened, listed: Collection[str]) -> dict[str, str]:
    """Return the folder's runs of which there is nothing to tell, and what to say instead."""
    folder = opened.folder
    if folder is None:
        return {}
    run_dirs = [RunDir(folder)] if is_run_id(folder.name) else RunDir.find_all(folder)
    return {
        run_dir.run_id: "unreadable" if run_dir.run_id in opened.unreadable else "no rows"
        for run_dir in reversed(run_dirs)
        if run_dir.run_id not in listed
    }


def why(
    run: Annotated[
        str, typer.Argument(help="Run id or its beginning, name, or folder (its latest run).")
    ],
    step: Annotated[int, typer.Argument(help="The step.", min=0)],
    folder: Dir = None,
    collector: Collector = "",
    token_file: TokenFile = None,
    form: Annotated[
        TextFormat, typer.Option("--format", help="text is a paragraph to read.")
    ] = TextFormat.TEXT,
) -> None:
    """Explain one step: its numbers, limits, findings, the decision and the reason."""
    from vitals_collector.queries.user_alerts import episodes
    from vitals_collector.queries.why import (
        FOLLOWING,
        explain,
        loss_of,
        profiles_near,
        with_kept_samples,
    )

    with open_run(run, folder, collector, token_file) as (opened, summary):
        view = opened.reader.ask(StepQuestion(run_id=summary.run_id, step=step))
        ledger = opened.reader.ask(DecisionsQuestion(run_id=summary.run_id))
        detail = opened.reader.ask(RunQuestion(run_id=summary.run_id))
        findings = opened.reader.ask(FindingsQuestion(run_id=summary.run_id))
        notes = opened.reader.ask(EventsQuestion(run_id=summary.run_id, kind="Note"))
        incidents = opened.reader.ask(VerdictQuestion(run_id=summary.run_id)).incidents
        stacks: tuple[StacksView, ...] = ()
        if any(entry.finding.kind == "waiting" for entry in view.findings):
            stacks = opened.reader.ask(StacksQuestion(run_id=summary.run_id))
        after = None
        if "steps.loss" in detail.metrics and form is TextFormat.TEXT:
            after = opened.reader.ask(
                SeriesQuestion(
                    run_id=summary.run_id,
                    metric=loss_of(view),
                    from_step=step + 1,
                    to_step=step + FOLLOWING,
                )
            )
    kept_in = (folder or Path(run)) / summary.run_id
    view = with_kept_samples(view, kept_in, Path(run), detail.info.run_dir)
    if not (view.rows or view.findings or view.decisions):
        raise UsageError(
            f"no rows are stored for step {step}; the last step of {summary.run_id} is "
            f"{summary.last_step}",
            hint="`vitals tail RUN` shows the latest steps",
        )
    if form is TextFormat.JSON:
        write_json(view)
    elif form is TextFormat.CSV:
        names = sorted({name for row in view.rows for name in row.values})
        header = ("source", "attempt", *names, "nonfinite")
        rows = [
            (row.source, row.attempt, *(row.values.get(name) for name in names), *_joined(row))
            for row in view.rows
        ]
        write_rows(header, rows, Format.CSV)
    else:
        alerts = episodes(raised.finding for raised in findings)
        typer.echo(explain(summary, view, ledger, after, alerts))
        for line in incidents:
            if line.onset_step <= step <= line.last_step:
                typer.echo(
                    f"Part of an incident: vitals postmortem {summary.run_id} "
                    f"--incident {line.incident_id}"
                )
        for part in (stood(stacks, step), profiles_near(notes, step)):
            if part:
                typer.echo(part)


def tail(
    run: Run = "",
    folder: Dir = None,
    num: Annotated[
        int,
        typer.Option(
            "-n", help="Number of latest steps to show, without --follow.", min=1, max=10_000
        ),
    ] = 20,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Follow the run until it ends or Ctrl-C.")
    ] = False,
    every: Annotated[
        int, typer.Option(help="With --follow in a pipe: steps between two lines.", min=1)
    ] = 10,
    collector: Collector = "",
    token_file: TokenFile = None,
    form: TableForm = TableFormat.TABLE,
    output: Output = None,
    force: Force = False,
) -> None:
    """Show the latest steps, or with --follow the running run.

    In a terminal, --follow shows a panel that updates in place; in a pipe, one line every few steps
    and one per action. It waits for a run that has not started, continues through rollbacks and
    restarts, and exits when the run ends. With --format csv or json, every step is a line.
    """
    if follow and (output is not None or form is TableFormat.PARQUET):
        raise UsageError(
            "--follow writes lines as they come, but --output and parquet write one complete file",
            hint="leave out --follow, or redirect its lines: --format csv > FILE",
        )
    if follow and form is TableFormat.TABLE:
        show_progress(run, folder, collector, token_file, every=every)
        return
    with open_run(run, folder, collector, token_file) as (opened, summary):
        first = max(0, summary.last_step - num + 1)
        if output is not None or form is TableFormat.PARQUET:
            columns = Tail(opened.reader, summary.run_id).columns(first)
            write_columns(columns, form, output, force=force)
            return
        shown = Tail(opened.reader, summary.run_id, Format(form.value))
        shown.write_header(first)
        while follow and summary.state == "running":
            time.sleep(1.0)
            opened.refresh()
            summary = shown.go_on()


def _joined(row: object) -> tuple[str]:
    return (" ".join(getattr(row, "nonfinite", ())),)
