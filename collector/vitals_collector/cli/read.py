"""`vitals runs`, `why` and `tail`."""

import time
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Literal

import typer

from trainvitals.cli.options import Dir
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
from vitals_collector.cli.follow import follow as show_progress
from vitals_collector.cli.opening import RunChoice, Server, warn_of_unreadable
from vitals_collector.cli.writing import TableFormat, TableOutput
from vitals_collector.queries.open import Opened
from vitals_collector.queries.stacks import stood
from vitals_collector.queries.tail import Tail

_RUN_COLUMNS = (
    *("run", "name", "state", "health", "step", "loss"),
    *("skips", "rollbacks", "started"),
)


def list_runs(
    *,
    folder: Annotated[
        Path | None,
        typer.Argument(
            help="Folder with run directories [default: ask the collector].", readable=False
        ),
    ] = None,
    server: Server,
    out: TableOutput,
) -> None:
    """List the runs of a collector, or of a folder without any server."""
    with server.open_all(folder) as opened:
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
    out.write(columns, body=runs)
    if opened.unreadable and not runs:
        raise typer.Exit(1)


def _without_rows(opened: Opened, listed: Collection[str]) -> dict[str, str]:
    """Return the directory's runs without any rows to show, with a message for each."""
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
    *,
    run: Annotated[
        str, typer.Argument(help="Run id or its beginning, name, or folder (its latest run).")
    ],
    step: Annotated[int, typer.Argument(help="The step.", min=0)],
    folder: Dir = None,
    server: Server,
    form: Annotated[
        Literal["text", "json", "csv"],
        typer.Option("--format", help="text is a paragraph to read."),
    ] = "text",
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

    with server.open(RunChoice(run, folder)) as (opened, summary):
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
        if "steps.loss" in detail.metrics and form == "text":
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
    if form == "json":
        write_json(view)
    elif form == "csv":
        names = sorted({name for row in view.rows for name in row.values})
        header = ("source", "attempt", *names, "nonfinite")
        rows = [
            (
                row.source,
                row.attempt,
                *(row.values.get(name) for name in names),
                *_nonfinite_cell(row),
            )
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
    *,
    choice: RunChoice,
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
    server: Server,
    out: TableOutput,
) -> None:
    """Show the latest steps, or with --follow the running run.

    In a terminal, --follow shows a panel that updates in place; in a pipe, one line every few steps
    and one per action. It waits for a run that has not started, continues through rollbacks and
    restarts, and exits when the run ends. With --format csv or json, every step is a line.
    """
    writes_file = out.output is not None or out.form is TableFormat.PARQUET
    if follow and writes_file:
        raise UsageError(
            "--follow writes lines as they come, but --output and parquet write one complete file",
            hint="leave out --follow, or redirect its lines: --format csv > FILE",
        )
    if follow and out.form is TableFormat.TABLE:
        show_progress(choice, server, every=every)
        return
    with server.open(choice) as (opened, summary):
        first = max(0, summary.last_step - num + 1)
        if writes_file:
            out.write(Tail(opened.reader, summary.run_id).columns(first))
            return
        shown = Tail(opened.reader, summary.run_id, Format(out.form.value))
        shown.write_header(first)
        while follow and summary.state == "running":
            time.sleep(1.0)
            opened.refresh()
            summary = shown.go_on()


def _nonfinite_cell(row: object) -> tuple[str]:
    return (" ".join(getattr(row, "nonfinite", ())),)
