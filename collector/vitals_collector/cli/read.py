"""Commands that look back: `vitals runs`, `why` and `tail`, and those of the files beside."""

import time
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from trainvitals.cli.output import Format, moment, write_json, write_rows
from trainvitals.errors import UsageError
from trainvitals.views import (
    DecisionsQuestion,
    FindingsQuestion,
    RunQuestion,
    RunsQuestion,
    SeriesQuestion,
    StepQuestion,
)
from vitals_collector.cli import postmortem, query, show
from vitals_collector.cli.opening import Collector, Dir, Run, TokenFile, open_run
from vitals_collector.cli.writing import Force, Output, TableForm, TableFormat, write_columns
from vitals_collector.queries.open import open_reader
from vitals_collector.queries.tail import Tail


class TextFormat(StrEnum):
    """How an answer in words is written."""

    TEXT = "text"
    JSON = "json"
    CSV = "csv"


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("runs", epilog="Example: vitals runs --format csv")(list_runs)
    show.register(app)
    query.register(app)
    postmortem.register(app)
    app.command("why", epilog="Example: vitals why my-run 31219")(why)
    app.command("tail", epilog="Example: vitals tail my-run --follow")(tail)


def list_runs(
    folder: Annotated[
        Path | None, typer.Argument(help="Folder with run directories; else a collector is asked.")
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
    columns: dict[str, Sequence[object]] = {
        "run": [run.run_id for run in runs],
        "name": [run.name for run in runs],
        "state": [run.state for run in runs],
        "health": [run.health for run in runs],
        "step": [run.last_step for run in runs],
        "loss": [run.loss for run in runs],
        "skips": [run.num_skips for run in runs],
        "rollbacks": [run.num_rollbacks for run in runs],
        "started": [moment(run.started_unix_ns) for run in runs],
    }
    write_columns(columns, form, output, force=force, body=runs)


def why(
    run: Annotated[
        str, typer.Argument(help="Id, beginning of an id, name, or a folder (its newest run).")
    ],
    step: Annotated[int, typer.Argument(help="The step.", min=0)],
    folder: Dir = None,
    collector: Collector = "",
    token_file: TokenFile = None,
    form: Annotated[
        TextFormat, typer.Option("--format", help="text is a paragraph to read.")
    ] = TextFormat.TEXT,
) -> None:
    """Say what happened at a step: numbers, limits, findings, the decision and its reason."""
    from vitals_collector.queries.user_alerts import episodes
    from vitals_collector.queries.why import FOLLOWING, explain, with_kept_samples

    with open_run(run, folder, collector, token_file) as (opened, summary):
        view = opened.reader.ask(StepQuestion(run_id=summary.run_id, step=step))
        ledger = opened.reader.ask(DecisionsQuestion(run_id=summary.run_id))
        detail = opened.reader.ask(RunQuestion(run_id=summary.run_id))
        findings = opened.reader.ask(FindingsQuestion(run_id=summary.run_id))
        after = None
        if "steps.loss" in detail.metrics and form is TextFormat.TEXT:
            after = opened.reader.ask(
                SeriesQuestion(
                    run_id=summary.run_id,
                    metric="steps.loss",
                    from_step=step + 1,
                    to_step=step + FOLLOWING,
                )
            )
    kept_in = (folder or Path(run)) / summary.run_id
    view = with_kept_samples(view, kept_in, Path(run), detail.info.run_dir)
    if not (view.rows or view.findings or view.decisions):
        raise UsageError(
            f"nothing is stored of step {step}; the last step of {summary.run_id} is "
            f"{summary.last_step}",
            hint="`vitals tail RUN` shows the newest steps",
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


def tail(
    run: Run = "",
    folder: Dir = None,
    num: Annotated[int, typer.Option("-n", help="Steps to begin with.", min=1, max=10_000)] = 20,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the run ends or Ctrl-C.")
    ] = False,
    collector: Collector = "",
    token_file: TokenFile = None,
    form: TableForm = TableFormat.TABLE,
    output: Output = None,
    force: Force = False,
) -> None:
    """Show the newest steps, and with --follow those to come."""
    if follow and (output is not None or form is TableFormat.PARQUET):
        raise UsageError(
            "--follow never ends, and a file is written as a whole",
            hint="leave --follow out, or send its lines to a file: --format csv > FILE",
        )
    with open_run(run, folder, collector, token_file) as (opened, summary):
        first = max(0, summary.last_step - num + 1)
        if output is not None or form is TableFormat.PARQUET:
            columns = Tail(opened.reader, summary.run_id).columns(first)
            write_columns(columns, form, output, force=force)
            return
        shown = Tail(opened.reader, summary.run_id, Format(form.value))
        shown.begin(first)
        while follow and summary.state == "running":
            time.sleep(1.0)
            opened.refresh()
            summary = shown.go_on()


def _joined(row: object) -> tuple[str]:
    return (" ".join(getattr(row, "nonfinite", ())),)
