"""`vitals runs`, `why` and `tail`."""

import time
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Literal

import typer
from msgspec.structs import replace

from trainvitals.cli.options import Dir
from trainvitals.cli.output import Format, format_time, write_json, write_rows
from trainvitals.errors import UsageError
from trainvitals.io.rundir import RunDir, is_run_id
from trainvitals.views import RunsQuestion
from vitals_collector.cli.follow import follow as show_progress
from vitals_collector.cli.opening import CollectorOptions, RunChoice, warn_of_unreadable
from vitals_collector.cli.tail import StepTail
from vitals_collector.cli.writing import TableFormat, TableOutput
from vitals_collector.queries.open import OpenedReader

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
    server: CollectorOptions,
    out: TableOutput,
) -> None:
    """List the runs of a collector, or of a folder without any server."""
    with server.open_all(folder) as opened:
        runs = opened.reader.ask(RunsQuestion())
        others = _runs_without_rows(opened, {run.run_id for run in runs})
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


def _runs_without_rows(opened: OpenedReader, listed: Collection[str]) -> dict[str, str]:
    """Return the runs that `vitals runs` lists without any rows, with a message for each."""
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
    server: CollectorOptions,
    form: Annotated[
        Literal["text", "json", "csv"],
        typer.Option("--format", help="text is a paragraph to read."),
    ] = "text",
) -> None:
    """Explain one step: its numbers, limits, findings, the decision and the reason."""
    from vitals_collector.queries.why import (
        completions_text,
        gather_step,
        step_text,
        with_kept_samples,
    )

    with server.open(RunChoice(run, folder)) as (opened, summary):
        facts = gather_step(opened.reader, summary, step, with_text=form == "text")
    kept_in = (folder or Path(run)) / summary.run_id
    run_dirs = [kept_in, Path(run), Path(facts.detail.info.run_dir)]
    view = with_kept_samples(facts.view, *run_dirs)
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
                " ".join(row.nonfinite),
            )
            for row in view.rows
        ]
        write_rows(header, rows, Format.CSV)
    else:
        typer.echo(step_text(replace(facts, view=view)))
        typer.echo(completions_text(run_dirs, view), nl=False)


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
    server: CollectorOptions,
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
            out.write(StepTail(opened.reader, summary.run_id).columns(first))
            return
        shown = StepTail(opened.reader, summary.run_id, Format(out.form.value))
        shown.write_header(first)
        while follow and summary.state == "running":
            time.sleep(1.0)
            opened.refresh()
            summary = shown.write_new_steps()
