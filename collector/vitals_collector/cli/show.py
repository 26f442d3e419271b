"""`vitals show`: one run with its curves, decisions and checkpoints, or one curve as data."""

import os
import shutil
from collections.abc import Iterator, Sequence
from typing import Annotated, TextIO

import typer

from trainvitals import views
from trainvitals.cli.output import Format, format_time, write_json, write_rows
from trainvitals.document.blocks import TableBlock
from trainvitals.document.incident import incident_state, verdict_facts
from trainvitals.errors import UsageError
from trainvitals.records import SEVERITY_WORDS
from trainvitals.units import humanize_count
from vitals_collector.cli.opening import CollectorOptions, RunChoice
from vitals_collector.cli.writing import TableFormat, TableOutput
from vitals_collector.queries.open import Reader

MAX_EVENTS = 20
"""Maximum number of latest events, and of incidents, that ``show`` prints; JSON has all."""
MIN_WIDTH, MAX_WIDTH = 50, 160
_COLORS = {"not finite": 208, "decided": 33}


def show(
    *,
    choice: RunChoice,
    metric: Annotated[str, typer.Option(help="Print this metric only, such as steps.loss.")] = "",
    source: Annotated[
        str, typer.Option(help="Source of the metric: rank:N, gpu:UUID or node:ID.")
    ] = "",
    points: Annotated[int, typer.Option(help="Approximate number of points.")] = 1_000,
    names: Annotated[
        bool, typer.Option("--series", help="List the names that --metric takes.")
    ] = False,
    server: CollectorOptions,
    out: TableOutput,
) -> None:
    """Show one run: its curves, attempts, decisions and checkpoints, or one curve as data.

    Marks below the curves show non-finite values and decisions. No color with NO_COLOR, or when
    stdout is not a terminal.
    """
    if out.form is TableFormat.PARQUET and not metric:
        raise UsageError(
            "--format parquet holds one table, and a run has several",
            hint="add --metric steps.loss, or ask for a table with `vitals query`",
        )
    with server.open(choice) as (opened, summary):
        if metric:
            series = opened.reader.ask(
                views.SeriesQuestion(
                    run_id=summary.run_id, metric=metric, source=source, points=points
                )
            )
            out.write(_series_columns(series, out.form), body=series)
            return
        with out.open() as to:
            write_run(opened.reader, summary.run_id, out.form, to, names=names)


def _series_columns(series: views.SeriesReply, form: TableFormat) -> dict[str, Sequence[object]]:
    """Return the columns of `vitals show --metric`: one curve's values with steps and times."""
    marks = {(mark.step, mark.attempt): mark.kind for mark in series.nonfinite}
    points = zip(series.step, series.attempt, series.value, strict=True)
    values = [marks.get((s, a), "nan") if value is None else value for s, a, value in points]
    times: dict[str, Sequence[object]] = (
        {"time_unix_ns": series.time_unix_ns}
        if form is TableFormat.PARQUET
        else {"time": [format_time(time) for time in series.time_unix_ns]}
    )
    return {"step": series.step, "attempt": series.attempt} | times | {series.metric: values}


def write_run(
    reader: Reader, run_id: str, form: TableFormat, to: TextIO, *, names: bool = False
) -> None:
    """Write a run's data for `vitals show` except its curves' values; ``names`` lists series."""
    from vitals_collector.report import run_tables

    detail = reader.ask(views.RunQuestion(run_id=run_id))
    ledger = reader.ask(views.DecisionsQuestion(run_id=run_id))
    saved = reader.ask(views.CheckpointsQuestion(run_id=run_id))
    events = reader.ask(views.EventsQuestion(run_id=run_id))
    findings = reader.ask(views.FindingsQuestion(run_id=run_id))
    judged = reader.ask(views.VerdictQuestion(run_id=run_id))
    if form is TableFormat.JSON:
        body = {"run": detail, "verdict": judged.verdict, "incidents": judged.incidents}
        write_json({**body, "decisions": ledger, "checkpoints": saved, "events": events}, to=to)
        return
    facts = run_tables.run_facts(detail, ledger, _learning_rates(reader, detail.summary))
    facts += _volume_rows(detail.volume)
    facts.append(
        ("series", ", ".join(detail.metrics) if names else _series_count_text(detail.metrics))
    )
    facts += verdict_rows(judged.verdict)
    write_rows(("field", "value"), facts, Format(form.value), to=to)
    if form is TableFormat.CSV:
        return
    to.write("\n" + "".join(f"{line}\n" for line in _curve_plots(reader, detail, ledger, to)))
    attempts = [(a.ordinal, a.fork_step, a.last_step, a.reason) for a in detail.attempts]
    decided = run_tables.decision_table(ledger)
    width = decided.header.index("reason") + 1  # the last column, which is never cut
    tables = [
        TableBlock(("attempt", "from step", "to step", "reason"), attempts),
        *_incident_tables(judged),
        TableBlock(decided.header[:width], [row[:width] for row in decided.rows]),
        *(table for table in _waits_traces_and_alerts(findings, events) if table.rows),
        run_tables.checkpoint_table(saved),
        run_tables.event_table(events[-MAX_EVENTS:]),
    ]
    for table in tables:
        to.write("\n")
        write_rows(table.header, table.rows, Format.TABLE, to=to)


def verdict_rows(verdict: views.VerdictView) -> list[tuple[str, object]]:
    """Return the verdict's rows for `vitals show`; none for a run without an incident."""
    if not verdict.incident_id:
        return []
    facts = verdict_facts(verdict).pairs
    return [
        ("incident", f"{verdict.incident_id}: {verdict.state}"),
        *((name.lower(), text) for name, text in facts if name != "State"),
        *(("command", command) for command in verdict.commands),
    ]


def _incident_tables(judged: views.RunVerdict) -> Iterator[TableBlock]:
    """Yield the table of incidents for `vitals show`, open ones first, if there are several."""
    if len(judged.incidents) < 2:
        return
    rows: list[tuple[object, ...]] = [
        (
            format_time(incident.started_unix_ns),
            incident.onset_step,
            incident.last_step,
            SEVERITY_WORDS[incident.severity],
            incident_state(incident),
            incident.title,
        )
        for incident in sorted(judged.incidents, key=lambda each: not each.is_open)
    ]
    more = len(rows) - MAX_EVENTS
    if more > 0:
        rows[MAX_EVENTS:] = [("", "", "", "", "", f"{more} more, all in --format json")]
    header = ("started", "from step", "to step", "severity", "state", "incident")
    yield TableBlock(header, rows)


def _waits_traces_and_alerts(
    findings: Sequence[views.FindingView], events: Sequence[views.EventView]
) -> Iterator[TableBlock]:
    """Yield the tables of waits and hangs, of traces, and of custom alerts; some may be empty."""
    from vitals_collector.queries.user_alerts import user_alert_episodes

    waits = [
        (
            format_time(v.time_unix_ns),
            v.finding.step,
            "yes" if v.finding.kind == "hang" else "no",
            v.finding.reason,
        )
        for v in findings
        if v.finding.kind in ("waiting", "hang")
    ]
    yield TableBlock(("time", "step", "paged", "blocking rank"), waits[-MAX_EVENTS:])
    traces = [(e.source, e.step, e.profile) for e in events if e.profile]
    yield TableBlock(("profiled", "until step", "trace"), traces[-MAX_EVENTS:])
    alerts = [
        (a.newest.cause, a.newest.severity, a.first, a.last, a.where, a.newest.reason)
        for a in user_alert_episodes(view.finding for view in findings)
    ]
    header = ("your alert", "severity", "from step", "to step", "ranks", "what it said last")
    yield TableBlock(header, alerts)


def _curve_plots(
    reader: Reader, detail: views.RunDetail, ledger: Sequence[views.DecisionView], to: TextIO
) -> list[str]:
    """Return the plots of a run's curves for `vitals show`, as wide as the terminal."""
    from vitals_collector.report import curves, text_plot

    marks = curves.decision_marks(ledger)
    width = min(max(shutil.get_terminal_size((100, 24)).columns, MIN_WIDTH), MAX_WIDTH)
    has_braille = can_encode(to, text_plot.BRAILLE)
    lines: list[str] = []
    for curve in curves.curves(reader, detail):
        lines += [*text_plot.draw(curve, marks, width=width, has_braille=has_braille), ""]
    if not lines:
        return ["no loss and no gradient norm recorded"]
    if to.isatty() and not os.environ.get("NO_COLOR"):
        lines = [_color_marks(line) for line in lines]
    return [*lines, text_plot.legend(marks)]


def can_encode(to: TextIO, text: str) -> bool:
    """Return whether the encoding of a command's output has all characters of a text."""
    try:
        text.encode(to.encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _color_marks(line: str) -> str:
    """Color rows below a terminal plot: orange and blue, safe for most color-blind users."""
    name, bar, marks = line.partition("|")
    color = _COLORS.get(name.strip())
    return line if color is None else f"{name}{bar}{typer.style(marks, fg=color, bold=True)}"


def _series_count_text(metrics: Sequence[str]) -> str:
    """Return how many series a run has, for `vitals show`, and the option that lists them."""
    return f"{len(metrics)}; --series lists them" if metrics else ""


def _volume_rows(volume: views.RunVolume | None) -> list[tuple[str, object]]:
    """Return the rows of `vitals show` on a run's bytes, its cap, and what was rolled up."""
    if volume is None:
        return []
    cap = f" of at most {volume.max_bytes}" if volume.max_bytes else ""
    pin_note = ", pinned" if volume.is_pinned else ""
    lines: list[tuple[str, object]] = [("bytes", f"{volume.num_bytes}{cap}{pin_note}")]
    for thinning in volume.thinned:
        until = (
            f"to step {thinning.to_step}"
            if thinning.to_step >= 0
            else f"to {format_time(thinning.to_unix_ns)}"
        )
        removal_note = (
            f"{humanize_count(thinning.num_rows, 'row')} {until} removed for their "
            f"{thinning.reason}; kept: {thinning.rule}"
        )
        lines.append((f"thinned {thinning.stream}", removal_note))
    return lines


def _learning_rates(reader: Reader, run: views.RunSummary) -> str:
    """Return the learning rates of all groups at the last step, for `vitals show`."""
    from vitals_collector.queries.why import learning_rates  # brings the store's packages

    if run.last_step < 0:
        return ""
    rows = reader.ask(views.StepQuestion(run_id=run.run_id, step=run.last_step)).rows
    rank0_rows = [row for row in rows if row.source == "rank:0"]
    return learning_rates(rank0_rows[-1].values) if rank0_rows else ""
