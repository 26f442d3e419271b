"""Commands that look back: `vitals runs`, `show`, `why` and `tail`."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from trainvitals.cli.output import Format, moment, write_json, write_rows
from trainvitals.errors import UsageError
from trainvitals.policy.hindsight import tally
from trainvitals.views import DecisionView, RunDetail, RunSummary, RunVolume
from vitals_collector.queries.reading import Opened, Reader, find_run, open_reader
from vitals_collector.queries.tail import Tail

Run = Annotated[
    str,
    typer.Argument(
        help="Id, beginning of an id, name, or folder; of a folder, or if absent, the newest run."
    ),
]
Dir = Annotated[Path | None, typer.Option("--dir", help="Folder with run directories.")]
Collector = Annotated[str, typer.Option("--collector", help="Address of a running collector.")]
TokenFile = Annotated[Path | None, typer.Option("--token-file", help="The collector's tokens.")]
Form = Annotated[Format, typer.Option("--format", help="How to write the data.")]

MAX_EVENTS = 20
"""The newest events that ``show`` writes; ``--format json`` has all."""


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("runs", epilog="Example: vitals runs --format csv")(list_runs)
    app.command("show", epilog="Example: vitals show my-run --metric steps.loss --format csv")(show)
    app.command("why", epilog="Example: vitals why my-run 31219")(why)
    app.command("tail", epilog="Example: vitals tail my-run --follow")(tail)


def list_runs(
    folder: Annotated[
        Path | None, typer.Argument(help="Folder with run directories; else a collector is asked.")
    ] = None,
    collector: Collector = "",
    token_file: TokenFile = None,
    form: Form = Format.TABLE,
) -> None:
    """List the runs of a collector, or of a folder without any server."""
    with open_reader(folder, collector=collector, token_file=token_file) as opened:
        runs = opened.reader.runs()
    if form is Format.JSON:
        write_json(runs)
        return
    header = ("run", "name", "state", "health", "step", "loss", "skips", "rollbacks", "started")
    write_rows(
        header,
        [
            (
                run.run_id,
                run.name,
                run.state,
                run.health,
                run.last_step,
                run.loss,
                run.num_skips,
                run.num_rollbacks,
                moment(run.started_unix_ns),
            )
            for run in runs
        ],
        form,
    )


def show(
    run: Run = "",
    folder: Dir = None,
    metric: Annotated[str, typer.Option(help="A curve instead, such as steps.loss.")] = "",
    source: Annotated[str, typer.Option(help="Whose curve: rank:N, gpu:UUID, node:ID.")] = "",
    points: Annotated[int, typer.Option(help="At most about this many points.")] = 1_000,
    collector: Collector = "",
    token_file: TokenFile = None,
    form: Form = Format.TABLE,
) -> None:
    """Show one run: its state, attempts, decisions and checkpoints, or one curve."""
    with _open_run(run, folder, collector, token_file) as (opened, summary):
        if metric:
            _show_curve(opened.reader, summary.run_id, metric, source, points, form)
        else:
            _show_run(opened.reader, summary.run_id, form)


def why(
    run: Annotated[
        str, typer.Argument(help="Id, beginning of an id, name, or a folder (its newest run).")
    ],
    step: Annotated[int, typer.Argument(help="The step.", min=0)],
    folder: Dir = None,
    collector: Collector = "",
    token_file: TokenFile = None,
    form: Annotated[Format, typer.Option("--format", help="table is a paragraph.")] = Format.TABLE,
) -> None:
    """Say what happened at a step: numbers, limits, findings, the decision and its reason."""
    from vitals_collector.queries.why import explain, with_kept_samples

    with _open_run(run, folder, collector, token_file) as (opened, summary):
        view = opened.reader.step(summary.run_id, step)
        ledger = opened.reader.decisions(summary.run_id)
        info = opened.reader.run(summary.run_id).info
    view = with_kept_samples(view, (folder or Path(run)) / summary.run_id, Path(run), info.run_dir)
    if not (view.rows or view.findings or view.decisions):
        raise UsageError(
            f"nothing is stored of step {step}; the last step of {summary.run_id} is "
            f"{summary.last_step}",
            hint="`vitals tail RUN` shows the newest steps",
        )
    if form is Format.JSON:
        write_json(view)
    elif form is Format.CSV:
        names = sorted({name for row in view.rows for name in row.values})
        header = ("source", "attempt", *names, "nonfinite")
        rows = [
            (row.source, row.attempt, *(row.values.get(name) for name in names), *_joined(row))
            for row in view.rows
        ]
        write_rows(header, rows, form)
    else:
        typer.echo(explain(summary, view, ledger))


def tail(
    run: Run = "",
    folder: Dir = None,
    num: Annotated[int, typer.Option("-n", help="Steps to begin with.", min=1, max=10_000)] = 20,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the run ends or Ctrl-C.")
    ] = False,
    collector: Collector = "",
    token_file: TokenFile = None,
    form: Form = Format.TABLE,
) -> None:
    """Show the newest steps, and with --follow those to come."""
    with _open_run(run, folder, collector, token_file) as (opened, summary):
        shown = Tail(opened.reader, summary.run_id, form)
        shown.begin(max(0, summary.last_step - num + 1))
        while follow and summary.state == "running":
            time.sleep(1.0)
            opened.refresh()
            summary = shown.go_on()


@contextlib.contextmanager
def _open_run(
    run: str, folder: Path | None, collector: str, token_file: Path | None
) -> Iterator[tuple[Opened, RunSummary]]:
    """Open what is asked about; a run given as a folder is read without any server."""
    if run and folder is None and Path(run).is_dir():
        folder, run = Path(run), ""
    with open_reader(folder, collector=collector, token_file=token_file) as opened:
        yield opened, find_run(opened.reader, run)


def _joined(row: object) -> tuple[str]:
    return (" ".join(getattr(row, "nonfinite", ())),)


def _show_curve(
    reader: Reader, run_id: str, metric: str, source: str, points: int, form: Format
) -> None:
    found = reader.series(run_id, metric, source=source, points=points)
    if form is Format.JSON:
        write_json(found)
        return
    marks = {(mark.step, mark.attempt): mark.kind for mark in found.nonfinite}
    rows = [
        (step, attempt, moment(time), marks.get((step, attempt), "nan") if value is None else value)
        for step, attempt, time, value in zip(
            found.step, found.attempt, found.time_unix_ns, found.value, strict=True
        )
    ]
    write_rows(("step", "attempt", "time", metric), rows, form)


def _show_run(reader: Reader, run_id: str, form: Format) -> None:
    detail = reader.run(run_id)
    ledger = reader.decisions(run_id)
    saved = reader.checkpoints(run_id)
    said = reader.events(run_id)
    if form is Format.JSON:
        write_json({"run": detail, "decisions": ledger, "checkpoints": saved, "events": said})
        return
    write_rows(("what", "value"), [*_facts(detail), *_shadow(ledger)], form)
    if form is Format.CSV:
        return
    typer.echo("")
    attempts = [(a.ordinal, a.fork_step, a.last_step, a.reason) for a in detail.attempts]
    write_rows(("attempt", "from step", "to step", "reason"), attempts, form)
    typer.echo("")
    decisions = [
        (d.step, d.action, d.rule, d.rank, "yes" if d.acted else view.hindsight or "no", d.reason)
        for view, d in ((view, view.decision) for view in ledger)
    ]
    write_rows(("step", "decision", "rule", "rank", "done", "reason"), decisions, form)
    typer.echo("")
    kept = [(c.checkpoint_id, c.step, c.state, c.where, c.num_bytes) for c in saved]
    write_rows(("checkpoint", "step", "state", "where", "bytes"), kept, form)
    typer.echo("")
    newest = [(moment(e.time_unix_ns), e.source, e.step, e.text) for e in said[-MAX_EVENTS:]]
    write_rows(("time", "source", "step", "what was said"), newest, form)


def _shadow(ledger: Sequence[DecisionView]) -> list[tuple[str, object]]:
    """Say how often what was only observed would have been right."""
    words = tally(view.hindsight or None for view in ledger)
    return [("observed decisions", words)] if words else []


def _volume(volume: RunVolume | None) -> list[tuple[str, object]]:
    if volume is None:
        return []
    cap = f" of at most {volume.max_bytes}" if volume.max_bytes else ""
    kept = ", kept whatever its age" if volume.is_pinned else ""
    lines: list[tuple[str, object]] = [("bytes", f"{volume.num_bytes}{cap}{kept}")]
    for one in volume.thinned:
        until = f"to step {one.to_step}" if one.to_step >= 0 else f"to {moment(one.to_unix_ns)}"
        words = f"{one.num_rows} rows {until} for their {one.reason}; left are {one.rule}"
        lines.append((f"thinned {one.stream}", words))
    return lines


def _facts(detail: RunDetail) -> list[tuple[str, object]]:
    summary, info = detail.summary, detail.info
    lost = sum(source.num_lost_rows for source in detail.sources)
    return [
        ("run", summary.run_id),
        ("name", summary.name),
        ("project", summary.project),
        ("user", summary.user),
        ("tags", ", ".join(summary.tags)),
        ("state", summary.state),
        ("health", summary.health),
        ("mode", summary.mode),
        ("ranks", summary.world_size),
        ("started", moment(summary.started_unix_ns)),
        ("last seen", moment(summary.last_seen_unix_ns)),
        ("last step", summary.last_step),
        ("loss", summary.loss),
        ("gradient norm", summary.grad_norm),
        ("skips", summary.num_skips),
        ("rollbacks", summary.num_rollbacks),
        ("rows lost", lost),
        *_volume(detail.volume),
        ("git commit", info.git_commit),
        ("folder", info.run_dir),
        ("series", ", ".join(detail.metrics)),
    ]
