"""The tools of `vitals mcp`: each runs the same queries as a command, and shapes the response.

The docstring of a tool is its description for the assistant.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from trainvitals.errors import StorageError, UsageError, VitalsError
from trainvitals.views import (
    AlertsQuestion,
    Branch,
    CellsQuestion,
    CheckpointsQuestion,
    DecisionsQuestion,
    DifferenceQuestion,
    ForecastQuestion,
    GoodputQuestion,
    IncidentsQuestion,
    IncidentView,
    RunQuestion,
    RunsQuestion,
    RunSummary,
    SeriesQuestion,
    VerdictQuestion,
)
from vitals_collector.queries.open import OpenedReader, Reader, find_run
from vitals_plugins.bridges.assistants.answers import (
    DEFAULT_KB,
    MAX_POINTS,
    Fixed,
    Story,
    ToolResponse,
    downsample_points,
    mark_as_data,
    redacted_pairs,
    strip_data_marks,
)
from vitals_plugins.bridges.assistants.pages import load_pages, search_sections, split_sections
from vitals_plugins.bridges.assistants.rows import (
    alert_row,
    config_differences,
    curve_points,
    decision_row,
    incident_row,
    incident_state,
    node_rows,
    number_or_none,
    run_id_text,
    series_names,
    summary_row,
    utc_time,
    verdict_facts,
)
from vitals_plugins.bridges.assistants.sources import RunSource

MAX_STEP = 2**62
MAX_SQL_ROWS = 500
MAX_SQL = 10_000
MAX_QUERY = 300
"""Characters of a search that are used."""
SQL_SECONDS = 20.0
NUM_COLUMNS = 12
"""Columns of a heat map: each with the value furthest from the middle."""
OTHER_MODES_CALL = 'search_docs(query="bad steps: evidence in guard and in heal")'
"""Call that shows what another mode decides on the same evidence."""
_MAX_ERROR = 800
_UNITS = {"started, last_seen, time": "UTC", "loss": "unit of the loop's loss"}

State = Literal["", "running", "finished", "halted", "interrupted", "failed", "lost"]
AlertState = Literal["", "pending", "firing", "resolved"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTools:
    """The tools over one source of runs.

    Args:
        source: where runs are read.
        logs: directory whose log files may be audited; None: no tool `audit`.
        data: data directory of a collector for SQL queries; None: no tool `sql`.
    """

    source: RunSource
    logs: Path | None = None
    data: Path | None = None

    def all(self) -> list[Callable[..., str]]:
        """Return the MCP server's tools; the name of a tool is the name of its method."""
        tools: list[Callable[..., str]] = [
            *(self.list_runs, self.run_summary, self.incidents, self.why, self.series),
            *(self.compare, self.ranks, self.alerts, self.decisions, self.checkpoints),
            *(self.goodput, self.forecast, self.search_docs),
        ]
        tools += [self.audit] if self.logs is not None else []
        return [*tools, self.sql] if self.data is not None else tools

    def list_runs(self, text: str = "", state: State = "", max_kb: int = DEFAULT_KB) -> str:
        """List runs, latest first: state, health, step, loss, skips, rollbacks, firing alerts.

        Args:
            text: only runs with this text in the id, name, project or a tag.
            state: only runs in this state.
            max_kb: size of the response in KiB, 1 to 32.
        """
        text = strip_data_marks(text).lower()
        with self.source.open() as opened:
            runs = opened.reader.ask(RunsQuestion())
            unreadable = len(opened.unreadable)
        rows = [
            summary_row(run)
            for run in runs
            if (not state or run.state == state)
            and text in " ".join((run.run_id, run.name, run.project, *run.tags)).lower()
        ]
        omitted = [f"{unreadable} runs cannot be read: `vitals runs` lists them"]
        return ToolResponse(
            facts={"num_runs": len(rows)},
            lists={"runs": rows},
            more={"runs": "narrow with text or state, or give a larger max_kb"},
            units=_UNITS,
            omitted=omitted if unreadable else (),
            next=_next_call("run_summary", rows[0]["run_id"]) if rows else (),
        ).render(max_kb=max_kb)

    def run_summary(self, run: str = "", max_kb: int = DEFAULT_KB) -> str:
        """Show one run with its verdict: state, cause, action, cost, next command, incidents.

        Start here. The verdict is about the most severe open incident, or the latest one.

        Args:
            run: id, beginning of an id, or name; empty: the latest run.
            max_kb: size of the response in KiB, 1 to 32.
        """
        with self.source.open() as opened:
            reader, summary = opened.reader, _find(opened, run)
            detail = reader.ask(RunQuestion(run_id=summary.run_id, volume=False))
            verdict = reader.ask(VerdictQuestion(run_id=summary.run_id))
            unjudged = _unjudged_notes(opened, summary.run_id)
        info = detail.info
        run_id = summary.run_id
        calls = _next_call("goodput", run_id)
        if verdict.incidents:
            line = verdict.incidents[0]
            calls = (
                f'incidents(run="{run_id}", incident=ID)',
                f'why(run="{run_id}", step={line.onset_step})',
            )
        return ToolResponse(
            facts={
                "run": summary_row(detail.summary),
                "missing": detail.summary.missing,
                "planned_steps": info.total_steps or None,
                "num_params": info.num_params or None,
                "git_commit": info.git_commit,
                "findings": Fixed("incomplete, see omitted") if unjudged else None,
                "verdict": verdict_facts(verdict.verdict),
            },
            lists={
                "incidents": [incident_row(line) for line in verdict.incidents],
                "attempts": [
                    {
                        "attempt": attempt.id,
                        "number": attempt.ordinal,
                        "from_step": attempt.fork_step,
                        "last_step": attempt.last_step,
                        "reason": attempt.reason,
                    }
                    for attempt in reversed(detail.attempts)
                ],
                "series": series_names(detail.metrics),
                "config": redacted_pairs(info.config),
            },
            more={"incidents": f'incidents(run="{run_id}") lists all'},
            units=_UNITS,
            omitted=unjudged,
            next=calls,
        ).render(max_kb=max_kb)

    def incidents(self, run: str = "", incident: str = "", max_kb: int = DEFAULT_KB) -> str:
        """List the incidents of a run, or show one with its story, timeline and evidence.

        An incident joins findings, decisions and alerts of one cause.

        Args:
            run: id, beginning of an id, or name; empty: the latest run.
            incident: id of one incident, from a list; empty: list all, latest first.
            max_kb: size of the response in KiB, 1 to 32.
        """
        with self.source.open() as opened:
            reader, run_id = opened.reader, _find(opened, run).run_id
            if not strip_data_marks(incident):
                lines = reader.ask(VerdictQuestion(run_id=run_id, judgement=False)).incidents
                return ToolResponse(
                    facts={"run_id": run_id_text(run_id), "num_incidents": len(lines)},
                    lists={"incidents": [incident_row(line) for line in lines]},
                    omitted=_unjudged_notes(opened, run_id),
                    next=(f'incidents(run="{run_id}", incident=ID)',) if lines else (),
                ).render(max_kb=max_kb)
            view = _find_incident(reader, run_id, incident)
            unjudged = _unjudged_notes(opened, run_id)
        return ToolResponse(
            facts={
                "run_id": run_id_text(run_id),
                "incident_id": view.incident_id,
                "title": view.title,
                "severity": Fixed(view.severity),
                "state": incident_state(view),
                "onset_step": view.onset_step,
                "last_step": view.last_step,
                "started": utc_time(view.started_unix_ns),
                "cost_steps": view.cost_steps,
                "cost_seconds": view.cost_seconds,
                "verdict": verdict_facts(view.verdict),
                "story": [Story(paragraph) for paragraph in view.story],
            },
            lists={
                "decisions": [decision_row(entry) for entry in view.decisions],
                "findings": [
                    {
                        "step": entry.finding.step,
                        "kind": entry.finding.kind,
                        "rank": number_or_none(entry.finding.rank),
                        "reason": entry.finding.reason,
                    }
                    for entry in view.findings
                ],
                "alerts": [alert_row(alert) for alert in view.alerts],
                "timeline": [
                    {
                        "time": utc_time(e.time_unix_ns),
                        "step": number_or_none(e.step),
                        "text": e.text,
                    }
                    for e in view.verdict.timeline
                ],
            },
            units=_UNITS,
            omitted=unjudged,
            next=(
                f'why(run="{run_id}", step={view.onset_step})',
                f'series(run="{run_id}", from_step={max(0, view.onset_step - 100)}, '
                f"to_step={view.last_step + 100})",
            ),
        ).render(max_kb=max_kb)

    def why(self, step: int, run: str = "", max_kb: int = DEFAULT_KB) -> str:
        """Explain one step: its numbers and limits, the findings, the decision and its reason.

        Args:
            step: the step, from 0.
            run: id, beginning of an id, or name; empty: the latest run.
            max_kb: size of the response in KiB, 1 to 32.
        """
        from vitals_collector.queries.why import gather_step, step_text

        with self.source.open() as opened:
            summary = _find(opened, run)
            facts = gather_step(opened.reader, summary, _step(step))
            unjudged = _unjudged_notes(opened, summary.run_id)
        run_id = summary.run_id
        return ToolResponse(
            facts={
                "run_id": run_id_text(run_id),
                "step": facts.view.step,
                "explanation": Story(step_text(facts)),
            },
            lists={"decisions": [decision_row(entry) for entry in facts.view.decisions]},
            omitted=unjudged,
            next=(f'series(run="{run_id}", from_step={max(0, step - 50)}, to_step={step + 50})',),
        ).render(max_kb=max_kb)

    def series(
        self,
        run: str = "",
        metric: str = "steps.loss",
        from_step: int | None = None,
        to_step: int | None = None,
        source: str = "",
        branch: Branch = "lineage",
        points: int = 100,
        max_kb: int = DEFAULT_KB,
    ) -> str:
        """Return one curve with at most 400 points; spikes, NaN and infinities are kept.

        Args:
            run: id, beginning of an id, or name; empty: the latest run.
            metric: STREAM.COLUMN, such as steps.loss, gpu.power_watts or scalars.NAME; run_summary
                lists the series of a run.
            from_step: first step.
            to_step: last step.
            source: rank:N, gpu:UUID or node:ID; empty: rank 0, or the first GPU or node.
            branch: lineage (without discarded steps), discarded, or all.
            points: number of points, 2 to 400.
            max_kb: size of the response in KiB, 1 to 32.
        """
        most = min(max(points, 2), MAX_POINTS)
        with self._open_run(run) as (reader, summary):
            reply = reader.ask(
                SeriesQuestion(
                    run_id=summary.run_id,
                    metric=strip_data_marks(metric),
                    source=strip_data_marks(source),
                    branch=branch,
                    points=most,
                    from_step=None if from_step is None else _step(from_step),
                    to_step=None if to_step is None else _step(to_step),
                )
            )
        curve = curve_points(reply.step, reply.value, reply.nonfinite)
        shown = downsample_points(curve, most)
        numbers = [value for value in reply.value if value is not None]
        return ToolResponse(
            facts={
                "run_id": run_id_text(summary.run_id),
                "metric": reply.metric,
                "source": reply.source,
                "num_values": reply.num_total,
                "num_nonfinite": reply.num_nonfinite,
                "min": min(numbers, default=None),
                "max": max(numbers, default=None),
                "last": numbers[-1] if numbers else None,
            },
            curve=shown,
            units={"points": f"[step, {reply.unit or 'value without a unit'}]"},
            omitted=[
                *_omitted_values_note(len(shown), reply.num_total),
                *_discarded_note(summary, branch),
            ],
        ).render(max_kb=max_kb)

    def compare(
        self,
        run: str,
        other: str,
        metric: str = "steps.loss",
        along: Literal["step", "tokens"] = "step",
        max_kb: int = DEFAULT_KB,
    ) -> str:
        """Compare two runs: state, differing configuration, lead, difference of one curve.

        Args:
            run: id, beginning of an id, or name.
            other: the run to compare with.
            metric: series of both runs.
            along: axis of the curve.
            max_kb: size of the response in KiB, 1 to 32.
        """
        with self.source.open() as opened:
            first, second = (_find(opened, name) for name in (run, other))
            details = [
                opened.reader.ask(RunQuestion(run_id=each.run_id, volume=False))
                for each in (first, second)
            ]
            forecast = opened.reader.ask(ForecastQuestion(run_id=first.run_id, other=second.run_id))
            reply = opened.reader.ask(
                DifferenceQuestion(
                    run_id=first.run_id,
                    other=second.run_id,
                    metric=strip_data_marks(metric),
                    along=along,
                    points=MAX_POINTS // 4,
                )
            )
        curve = list(zip(reply.x, reply.value, strict=True))
        return ToolResponse(
            facts={
                "run": summary_row(details[0].summary),
                "other": summary_row(details[1].summary),
                "run_is": forecast.comparison_text(),
                "metric": reply.metric,
            },
            lists={"config": config_differences(details[0], details[1])},
            curve=downsample_points(curve, MAX_POINTS),
            units={"points": f"[{along}, other minus run]", "config": "[name, run, other]"},
            omitted=_omitted_values_note(len(curve), reply.num_total),
        ).render(max_kb=max_kb)

    def ranks(
        self,
        run: str = "",
        metric: str = "steps.step_duration_seconds",
        from_step: int | None = None,
        to_step: int | None = None,
        branch: Branch = "lineage",
        max_kb: int = DEFAULT_KB,
    ) -> str:
        """Compare ranks, GPUs or nodes: the most unusual ones first; nodes with lost rows.

        Args:
            run: id, beginning of an id, or name; empty: the latest run.
            metric: steps.COLUMN for ranks, gpu.COLUMN or node.COLUMN, such as steps.rank_loss,
                steps.data_wait_seconds, gpu.temperature_celsius.
            from_step: first step.
            to_step: last step.
            branch: lineage (without discarded steps), discarded, or all.
            max_kb: size of the response in KiB, 1 to 32.
        """
        with self._open_run(run) as (reader, summary):
            detail = reader.ask(RunQuestion(run_id=summary.run_id, volume=False))
            reply = reader.ask(
                CellsQuestion(
                    run_id=summary.run_id,
                    metric=strip_data_marks(metric),
                    points=NUM_COLUMNS,
                    branch=branch,
                    from_step=None if from_step is None else _step(from_step),
                    to_step=None if to_step is None else _step(to_step),
                )
            )
        nonfinite = {*reply.nonfinite}
        rows = [
            {
                "source": name,
                "values": [
                    Fixed("NaN or infinite") if (index, column) in nonfinite else value
                    for column, value in enumerate(values)
                ],
            }
            for index, (name, values) in enumerate(zip(reply.rows, reply.value, strict=True))
        ]
        hidden = reply.num_rows - len(rows)
        return ToolResponse(
            facts={
                "run_id": run_id_text(summary.run_id),
                "metric": reply.metric,
                "world_size": detail.summary.world_size,
                "missing": detail.summary.missing,
                "first_step_of_column": reply.step,
            },
            lists={"rows": rows, "nodes": node_rows(detail.sources)},
            units={
                "values": f"{reply.unit or 'no unit'}; per column the value of the steps that "
                "is furthest from the middle; null: nothing was recorded"
            },
            omitted=[
                *([f"{hidden} of {reply.num_rows} rows with usual values"] if hidden else []),
                *_discarded_note(summary, branch),
            ],
            next=(f'series(run="{summary.run_id}", metric=..., source="rank:N")',),
        ).render(max_kb=max_kb)

    def alerts(self, run: str = "", state: AlertState = "firing", max_kb: int = DEFAULT_KB) -> str:
        """List alerts, latest first, with the name of their section in the runbook.

        Args:
            run: id, beginning of an id, or name; empty: all runs.
            state: pending, firing or resolved; empty: all.
            max_kb: size of the response in KiB, 1 to 32.
        """
        with self.source.open() as opened:
            run_id = _find(opened, run).run_id if run else ""
            views = opened.reader.ask(AlertsQuestion(run_id=run_id, state=state))
            unjudged = [note for each in opened.unjudged for note in _unjudged_notes(opened, each)]
        return ToolResponse(
            facts={"num_alerts": len(views)},
            lists={"alerts": [alert_row(view) for view in views]},
            more={"alerts": "give run and state, or a larger max_kb"},
            units=_UNITS,
            omitted=[*unjudged[:2], "alerts are updated after that"] if unjudged else (),
            next=('search_docs(query="runbook ALERT_NAME")',) if views else (),
        ).render(max_kb=max_kb)

    def decisions(
        self, run: str = "", from_step: int = 0, to_step: int = MAX_STEP, max_kb: int = DEFAULT_KB
    ) -> str:
        """List what Vitals decided, latest first, with the evidence: values, limits, reasons.

        Args:
            run: id, beginning of an id, or name; empty: the latest run.
            from_step: first step.
            to_step: last step.
            max_kb: size of the response in KiB, 1 to 32.
        """
        with self._open_run(run) as (reader, summary):
            ledger = reader.ask(DecisionsQuestion(run_id=summary.run_id))
        views = [view for view in ledger if from_step <= view.decision.step <= to_step]
        rows = [decision_row(view) for view in reversed(views)]
        steps = [view.decision.step for view in views[-1:]]
        calls = [f'why(run="{summary.run_id}", step={step})' for step in steps]
        return ToolResponse(
            facts={
                "run_id": run_id_text(summary.run_id),
                "mode": summary.mode,
                "num_decisions": len(rows),
            },
            lists={"decisions": rows},
            more={"decisions": "give from_step and to_step, or a larger max_kb"},
            next=[*calls, OTHER_MODES_CALL],
        ).render(max_kb=max_kb)

    def checkpoints(self, run: str = "", max_kb: int = DEFAULT_KB) -> str:
        """List checkpoints and snapshots, latest first: only healthy ones are rolled back to.

        Args:
            run: id, beginning of an id, or name; empty: the latest run.
            max_kb: size of the response in KiB, 1 to 32.
        """
        with self._open_run(run) as (reader, summary):
            views = reader.ask(CheckpointsQuestion(run_id=summary.run_id))
        rows = [
            {
                "checkpoint_id": view.checkpoint_id,
                "step": view.step,
                "attempt": view.attempt,
                "state": view.state,
                "where": view.where,
                "bytes": view.num_bytes,
                "time": utc_time(view.time_unix_ns),
                "detail": view.detail,
            }
            for view in reversed(views)
        ]
        return ToolResponse(
            facts={"run_id": run_id_text(summary.run_id), "num_checkpoints": len(rows)},
            lists={"checkpoints": rows},
            units={"time": "UTC"},
        ).render(max_kb=max_kb)

    def goodput(self, run: str = "", max_kb: int = DEFAULT_KB) -> str:
        """Show where the wall time went: productive, waiting, lost, down; failures and cost.

        Args:
            run: id, beginning of an id, or name; empty: the latest run.
            max_kb: size of the response in KiB, 1 to 32.
        """
        with self._open_run(run) as (reader, summary):
            view = reader.ask(GoodputQuestion(run_id=summary.run_id))
        return ToolResponse(
            facts={
                "run_id": run_id_text(view.run_id),
                "wall_seconds": (view.end_unix_ns - view.begin_unix_ns) / 1e9,
                "goodput_ratio": view.ratio,
                "seconds": {name: ns / 1e9 for name, ns in view.nanoseconds.items() if ns},
                "steps": view.steps,
                "lost_steps": view.lost_steps,
                "num_failures": view.num_failures,
                "mean_seconds_to_failure": view.mttf_seconds,
                "mean_seconds_to_recovery": view.mttr_seconds,
                "gpu_hours": view.gpu_hours,
                "price": view.money,
                "energy_joules": view.energy_joules,
            },
            lists={"unknown": [Story(note) for note in view.notes]},
            next=_next_call("ranks", view.run_id),
        ).render(max_kb=max_kb)

    def forecast(
        self, run: str = "", other: str = "", total_steps: int = 0, max_kb: int = DEFAULT_KB
    ) -> str:
        """Forecast the end and the final loss of a run with intervals, or why there is none.

        Args:
            run: id, beginning of an id, or name; empty: the latest run.
            other: another run: how much earlier it reached the current loss.
            total_steps: planned steps; 0: the number that the run declared.
            max_kb: size of the response in KiB, 1 to 32.
        """
        with self.source.open() as opened:
            summary = _find(opened, run)
            view = opened.reader.ask(
                ForecastQuestion(
                    run_id=summary.run_id,
                    total_steps=min(max(total_steps, 0), MAX_STEP),
                    other=_find(opened, other).run_id if other else "",
                )
            )
        return ToolResponse(
            facts={
                "run_id": run_id_text(view.run_id),
                **{name.replace(" ", "_"): Story(text) for name, text in view.facts()},
                "finish": utc_time(view.finish_unix_ns),
                "finish_low": utc_time(view.finish_low_unix_ns),
                "finish_high": utc_time(view.finish_high_unix_ns),
                "seconds_per_step": view.seconds_per_step,
            },
            units={"finish": "UTC; four runs in five end between low and high"},
        ).render(max_kb=max_kb)

    def search_docs(self, query: str, num: int = 3, max_kb: int = DEFAULT_KB) -> str:
        """Search the documentation of Vitals: guides, integrations, runbook, settings, API.

        Args:
            query: a few words, such as "wrap a Lightning loop" or "RankHung".
            num: number of sections, 1 to 10.
            max_kb: size of the response in KiB, 1 to 32.
        """
        sections = search_sections(
            split_sections(load_pages()), query[:MAX_QUERY], min(max(num, 1), 10)
        )
        room = 1024 * min(max(max_kb, 1), 32) * 3 // 4 // max(1, len(sections))
        return ToolResponse(
            facts={"num_sections": len(sections)},
            lists={
                "sections": [
                    {
                        "page": Fixed(section.page),
                        "title": Fixed(section.title),
                        "text": Fixed(_excerpt(section.text, room)),
                    }
                    for section in sections
                ]
            },
            next=("resource vitals://docs/PAGE (without .md) for a complete page",),
        ).render(max_kb=max_kb)

    def audit(self, log: str, start: int = 0, max_kb: int = DEFAULT_KB) -> str:
        """Audit a log of a run that Vitals did not watch: what it would have done, and when.

        Args:
            log: path of a CSV file, JSON Lines, trainer_state.json, TensorBoard or wandb folder.
            start: first character of the report, to read on.
            max_kb: size of the response in KiB, 1 to 32.
        """
        from trainvitals.document import markdown
        from vitals_collector.cli.replay import ReplayLogOptions
        from vitals_plugins.bridges.audit.audit import audit_blocks
        from vitals_plugins.bridges.audit.cli import audit_log, audit_title

        assert self.logs is not None
        with self.source.open() as opened:
            opened.reader.ask(RunsQuestion())  # over HTTP, only the collector checks the token
        path = _resolve_log_path(self.logs, log)
        result = audit_log(path, ReplayLogOptions())
        report = markdown.write_markdown(audit_blocks(result, audit_title(path)))
        first, num = min(max(start, 0), len(report)), 600 * min(max(max_kb, 1), 32)
        end = min(first + num, len(report))
        rest = f"characters {end} to {len(report)}: audit(log=..., start={end})"
        return ToolResponse(
            facts={"characters": len(report)},
            lists={"report": [Story(line) for line in report[first:end].splitlines() if line]},
            omitted=(rest,) if end < len(report) else (),
        ).render(max_kb=max_kb)

    def sql(self, query: str, limit: int = 50, max_kb: int = DEFAULT_KB) -> str:
        """Query the collector's data with one SELECT in DuckDB SQL, read-only.

        Tables: runs, steps (rank 0), ranks, levels, layers, scalars, nodes, gpus, processes,
        decisions, findings, alerts, checkpoints, events, annotations. DESCRIBE is refused: SELECT
        * FROM a table LIMIT 1 shows its columns.

        Args:
            query: one SELECT.
            limit: number of rows, at most 500.
            max_kb: size of the response in KiB, 1 to 32.
        """
        assert self.data is not None
        rows = run_sql(self.data, query, min(max(limit, 1), MAX_SQL_ROWS))
        return ToolResponse(
            facts={"num_rows": len(rows)},
            lists={
                "columns": list(rows[0]) if rows else [],
                "rows": [list(row.values()) for row in rows],
            },
            more={"rows": "aggregate in the query, or give a larger max_kb"},
        ).render(max_kb=max_kb)

    @contextmanager
    def _open_run(self, run: str) -> Iterator[tuple[Reader, RunSummary]]:
        """Provide a reader, and the run that an assistant named."""
        with self.source.open() as opened:
            yield opened.reader, _find(opened, run)


def error_text(error: VitalsError) -> str:
    """Return an error for an assistant: its text may quote a run, so it is marked as data."""
    hint = f" Hint: {error.hint}" if error.hint else ""
    return f"[{error.code}] {mark_as_data(error.text + hint, _MAX_ERROR)}"


def run_sql(data: Path, query: str, limit: int) -> list[dict[str, Any]]:
    """Return rows of `vitals sql` for an assistant: it checks the query, limits memory and time.

    It runs in its own process: the engine cannot interrupt every function.

    Raises:
        UsageError: the query is refused.
        StorageError: it fails, or takes too long.
    """
    if len(query) > MAX_SQL:
        raise UsageError(
            f"the query has {len(query)} characters; at most {MAX_SQL} are allowed",
            hint="write a shorter one",
        )
    command = [sys.executable, "-m", "trainvitals", "sql", "-", "--data", str(data)]
    command += ["--format", "json", "--limit", str(limit)]
    command += ["--seconds", f"{SQL_SECONDS:g}", "--memory", "256"]
    try:
        done = subprocess.run(
            command,
            input=query,
            capture_output=True,
            text=True,
            timeout=3 * SQL_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise StorageError(
            f"the query took more than {3 * SQL_SECONDS:g} seconds", hint="read fewer rows"
        ) from None
    if done.returncode:
        text = done.stderr.strip().removeprefix("error: ")
        raise (UsageError if done.returncode == 2 else StorageError)(text)
    return msgspec.json.decode(done.stdout, type=list[dict[str, Any]])


def _find(opened: OpenedReader, run: str) -> RunSummary:
    """Return the run that an assistant named in an MCP tool call."""
    return find_run(opened.reader, strip_data_marks(run))


def _unjudged_notes(opened: OpenedReader, run_id: str) -> tuple[str, ...]:
    """Return the note of an MCP tool that findings of a long run are missing; empty without one."""
    if run_id not in opened.unjudged:
        return ()
    text = mark_as_data(opened.unjudged[run_id], _MAX_ERROR)  # it may quote an error
    return (f"findings are incomplete: {text}: call again in 30 seconds",)


def _find_incident(reader: Reader, run_id: str, incident: str) -> IncidentView:
    """Return the incident that an assistant named in an MCP tool call, as it was listed.

    Raises:
        UsageError: the run has no such incident.
    """
    name = strip_data_marks(incident)
    views = reader.ask(IncidentsQuestion(run_id=run_id, incident_id=name))
    if not views:  # an id with text from the run is listed with that text marked and cleaned
        lines = reader.ask(VerdictQuestion(run_id=run_id, judgement=False)).incidents
        ids = (line.incident_id for line in lines)
        listed = next(
            (each for each in ids if _mark_incident_id(each) == _mark_incident_id(name)), ""
        )
        if listed:
            views = reader.ask(IncidentsQuestion(run_id=run_id, incident_id=listed))
    if not views:
        raise UsageError(
            f"run {run_id} has no incident {incident[:80]!r}",
            hint=f'incidents(run="{run_id}") lists them',
        )
    return views[0]


def _resolve_log_path(folder: Path, name: str) -> Path:
    """Return the path of a log that an assistant named; it has to be below the directory.

    Raises:
        UsageError: it is outside, also through a symbolic link.
    """
    if "\0" in name or len(name) > 1_000:
        raise UsageError("the log's path is not a path", hint=f"give a path below {folder}")
    root = folder.resolve()
    path = (root / strip_data_marks(name)).resolve()
    if not path.is_relative_to(root):
        raise UsageError(
            f"{name[:200]} is not below {root}",
            hint="start `vitals mcp` with --logs FOLDER for another directory",
        )
    return path


def _step(value: int) -> int:
    """Clamp the step that an assistant passed to an MCP tool."""
    return min(max(value, -MAX_STEP), MAX_STEP)


def _excerpt(text: str, num: int) -> str:
    """Return the start of a text for an MCP tool, and how much was cut."""
    return text if len(text) <= num else f"{text[:num]} ... (+{len(text) - num} characters)"


def _mark_incident_id(incident_id: str) -> str:
    """Return an incident's id marked as data, for an MCP tool."""
    return mark_as_data(incident_id, 1_000)


def _next_call(tool: str, run_id: str) -> tuple[str, ...]:
    return (f'{tool}(run="{run_id}")',)


def _discarded_note(run: RunSummary, branch: Branch) -> tuple[str, ...]:
    """Return the note of an MCP tool that it omits discarded steps; empty without a rollback."""
    if branch != "lineage" or not run.num_rollbacks:
        return ()
    return ('steps that a rollback discarded: branch="discarded" shows them',)


def _omitted_values_note(num_points: int, num_values: int) -> tuple[str, ...]:
    """Return the note of an MCP tool that its curve omits values; empty if it has all of them."""
    if num_points >= num_values:
        return ()
    return (
        f"{num_values - num_points} of {num_values} values; the extremes are kept: give from_step "
        "and to_step for a part",
    )
