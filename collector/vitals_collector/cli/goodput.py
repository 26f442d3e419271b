"""`vitals goodput`: use of a run's time and its cost; also for a log, if it has the columns."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from trainvitals.cli.options import Dir, FactsForm
from trainvitals.cli.output import Format, write_json, write_rows, write_table
from trainvitals.errors import UsageError
from trainvitals.goodput import BUCKETS, Bucket, Goodput
from trainvitals.io.rundir import holds_runs
from trainvitals.plugins import load_plugin
from trainvitals.units import humanize_seconds
from trainvitals.views import GoodputQuestion, GoodputView, RunsQuestion
from vitals_collector.cli.opening import CollectorOptions, RunChoice, warn_of_unreadable

LABELS: Mapping[Bucket, str] = {bucket: bucket.replace("_", " ") for bucket in BUCKETS}

RunOrLog = Annotated[
    str,
    typer.Argument(
        help="A run: id or its beginning, name, or folder [default: the latest run]. Or a log: "
        "a CSV file, JSON Lines, a training's output, a trainer_state.json, TensorBoard's or "
        "wandb's folder or file."
    ),
]


def show_goodput(
    *,
    run: RunOrLog = "",
    folder: Dir = None,
    every: Annotated[bool, typer.Option("--all", help="A line for each run.")] = False,
    server: CollectorOptions,
    step: Annotated[str | None, typer.Option(help="Column of the steps in a log.")] = None,
    time: Annotated[
        str | None, typer.Option(help="Column of the times: seconds since 1970, or ISO 8601.")
    ] = None,
    step_seconds: Annotated[
        str | None, typer.Option(help="Column of the seconds per step.")
    ] = None,
    data_seconds: Annotated[
        str | None, typer.Option(help="Column of the seconds a step waited for data.")
    ] = None,
    form: FactsForm = Format.TABLE,
) -> None:
    """Show where a run's wall time went: productive, waiting, lost, down.

    Also shows GPU-hours, and with VITALS_GPU_HOUR_PRICE (or the collector's --gpu-hour-price) their
    price. Time that a log of another tool does not cover is unknown.
    """
    named = {
        "--step": step,
        "--time": time,
        "--step-seconds": step_seconds,
        "--data-seconds": data_seconds,
    }
    if every:
        _reject_options(
            [*(["RUN"] if run else []), *(name for name, value in named.items() if value)]
        )
        _show_all(folder, server, form)
        return
    if run and folder is None and _is_log(Path(run)):
        importers = load_plugin("importers")
        choice = importers.ColumnChoice(
            step=step, time=time, step_seconds=step_seconds, data_seconds=data_seconds
        )
        history = importers.read_history(Path(run), choice)
        _write_goodput(_log_goodput_view(history.source, importers.log_goodput(history)), form)
        return
    if run and folder is None and Path(run).name != run and not Path(run).exists():
        raise UsageError(
            f"there is no file or folder {run}", hint="give a log's file or folder, or a run's id"
        )
    _reject_options([name for name, value in named.items() if value], "a run has these recorded")
    with server.open(RunChoice(run, folder)) as (opened, summary):
        view = opened.reader.ask(GoodputQuestion(run_id=summary.run_id))
    _write_goodput(view, form)


def _reject_options(
    named: Sequence[str], why: str = "--all shows each run by what it recorded"
) -> None:
    """Refuse options of a log in ``vitals goodput`` for stored runs."""
    if named:
        raise UsageError(
            f"{', '.join(named)}: {why}", hint="leave them out, or give a log's file or folder"
        )


def _is_log(path: Path) -> bool:
    """Return whether ``vitals goodput`` is given a file, or a directory without Vitals runs."""
    return path.is_file() or (path.is_dir() and not holds_runs(path))


def _log_goodput_view(source: str, sums: Goodput) -> GoodputView:
    """Return the goodput of a log in the form of a run's, for ``vitals goodput``."""
    return GoodputView(
        run_id="",
        name=source,
        state="finished",
        begin_unix_ns=sums.begin_unix_ns,
        end_unix_ns=sums.end_unix_ns,
        nanoseconds=dict(sums.nanoseconds),
        ratio=sums.ratio if sums.nanoseconds["productive"] else None,
        steps=sums.steps,
        lost_steps=sums.lost_steps,
        notes=sums.notes,
    )


def _show_all(folder: Path | None, server: CollectorOptions, form: Format) -> None:
    """Print the goodput of every run as a table, for ``vitals goodput --all``."""
    with server.open_all(folder) as opened:
        runs = opened.reader.ask(RunsQuestion())
        views = [opened.reader.ask(GoodputQuestion(run_id=run.run_id)) for run in runs]
        warn_of_unreadable(opened.unreadable)
    shown = [b for b in BUCKETS if any(view.nanoseconds.get(b) for view in views)]
    is_csv = form is Format.CSV
    unit = " seconds" if is_csv else ""
    header = ("run", "name", "state", f"wall{unit}", "goodput", *(LABELS[b] + unit for b in shown))
    header += ("failures", "GPU-hours", "price")
    rows = [
        (
            *(view.run_id, view.name, view.state, _seconds_cell(_wall_time_ns(view), is_csv)),
            *(
                _ratio_cell(view.ratio, is_csv),
                *(_bucket_cell(view, bucket, is_csv) for bucket in shown),
            ),
            *(view.num_failures, _round_or_none(view.gpu_hours), _round_or_none(view.money)),
        )
        for view in views
    ]
    write_table(header, rows, form, body=views)


def _write_goodput(view: GoodputView, form: Format) -> None:
    """Print a run's time by bucket, its cost and its notes, for ``vitals goodput``."""
    if form is Format.JSON:
        write_json(view)
        return
    is_csv = form is Format.CSV
    wall = _wall_time_ns(view)
    if is_csv:
        rows = [(LABELS[b], view.nanoseconds.get(b, 0) / 1e9) for b in BUCKETS]
        write_rows(("bucket", "seconds"), [*rows, ("wall", wall / 1e9)], form)
        return
    shares = [
        (LABELS[bucket], humanize_seconds(taken / 1e9), f"{100 * taken / wall:.2f} %")
        for bucket in BUCKETS
        if (taken := view.nanoseconds.get(bucket, 0))
    ]
    total = [("wall time", humanize_seconds(wall / 1e9), "100 %")] if wall else []
    write_rows(("where the time went", "time", "share"), [*shares, *total], form)
    typer.echo("")
    ratio = "not known" if view.ratio is None else _ratio_cell(view.ratio, False)
    facts = [("run" if view.run_id else "log", view.run_id or view.name), ("goodput", ratio)]
    write_rows(("field", "value"), [*facts, *view.cost()], form)
    for note in view.notes:
        typer.echo(f"\n{note}")


def _wall_time_ns(view: GoodputView) -> int:
    """Return the wall time of a run in the output of ``vitals goodput``."""
    return view.end_unix_ns - view.begin_unix_ns


def _seconds_cell(nanoseconds: int, is_csv: bool) -> object:
    """Return a duration as a cell of ``vitals goodput``: seconds in CSV, otherwise with a unit."""
    return nanoseconds / 1e9 if is_csv else humanize_seconds(nanoseconds / 1e9)


def _bucket_cell(view: GoodputView, bucket: Bucket, is_csv: bool) -> object:
    """Return a bucket's time as a cell of ``vitals goodput``: seconds in CSV, otherwise a share."""
    taken, wall = view.nanoseconds.get(bucket, 0), _wall_time_ns(view)
    if is_csv:
        return taken / 1e9
    return f"{100 * taken / wall:.1f} %" if taken and wall else ""


def _ratio_cell(ratio: float | None, is_csv: bool) -> object:
    """Return a ratio as a cell of ``vitals goodput``: a number in CSV, otherwise a percentage."""
    if ratio is None or is_csv:
        return ratio
    return f"{100 * ratio:.1f} %"


def _round_or_none(value: float | None) -> object:
    """Return a number of ``vitals goodput`` with four significant digits; None stays."""
    return None if value is None else float(f"{value:.4g}")
