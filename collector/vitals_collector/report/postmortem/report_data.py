"""Runs the queries for the post-mortem of a run, on a collector or on a directory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from trainvitals import views
from trainvitals.errors import UsageError
from vitals_collector.queries.open import Reader
from vitals_collector.report.curves import PlottedCurve, curves

Answer = TypeVar("Answer")

MAX_INCIDENTS = 10
"""Incidents described in full: the most severe, then the latest. Others are one line each."""
AROUND = 100
"""Steps before and after an incident in its curves."""
HEAT_MAPS = {
    "steps.rank_loss": "Loss of each rank",
    "steps.step_duration_seconds": "Step time of each rank",
    "layers.grad_norm": "Gradient norm of each layer",
}
_COLUMNS, _ROWS = 120, 24
_GRAVITY = ("page", "notify", "log")


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentFacts:
    """One incident and its measurements."""

    incident: views.IncidentView
    curves: tuple[PlottedCurve, ...]
    heat_maps: tuple[views.CellsReply, ...]
    movers: tuple[views.MoverView, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportData:
    """All data of a post-mortem."""

    detail: views.RunDetail
    made_unix_ns: int
    curves: tuple[PlottedCurve, ...]
    ledger: tuple[views.DecisionView, ...]
    checkpoints: tuple[views.CheckpointView, ...]
    events: tuple[views.EventView, ...]
    annotations: tuple[views.AnnotationView, ...]
    all_incidents: tuple[views.IncidentView, ...]
    """Incidents of the run, the latest first."""
    incidents: tuple[IncidentFacts, ...]
    """Incidents described in full."""
    missing: tuple[str, ...]
    """Queries without a result, and the reasons."""


def gather_report_data(
    reader: Reader, run_id: str, *, now_unix_ns: int, incident_id: str = ""
) -> ReportData:
    """Query all data for the post-mortem of a run, or of one of its incidents.

    Raises:
        UsageError: no such run, or no incident of that id.
    """
    missing: list[str] = []
    detail = reader.ask(views.RunQuestion(run_id=run_id))
    everything = reader.ask(views.IncidentsQuestion(run_id=run_id))
    detailed_incidents = _detailed_incidents(everything, incident_id)
    return ReportData(
        detail=detail,
        made_unix_ns=now_unix_ns,
        curves=curves(reader, detail),
        ledger=reader.ask(views.DecisionsQuestion(run_id=run_id)),
        checkpoints=reader.ask(views.CheckpointsQuestion(run_id=run_id)),
        events=reader.ask(views.EventsQuestion(run_id=run_id)),
        annotations=reader.ask(views.AnnotationsQuestion(run_id=run_id)),
        all_incidents=everything,
        incidents=tuple(
            _query_incident_facts(reader, detail, incident, missing)
            for incident in detailed_incidents
        ),
        missing=tuple(missing),
    )


def _detailed_incidents(
    incidents: Sequence[views.IncidentView], incident_id: str
) -> list[views.IncidentView]:
    """Choose the incidents that the post-mortem describes in full, by time."""
    if incident_id:
        matches = [incident for incident in incidents if incident.incident_id == incident_id]
        if not matches:
            newest_ids = ", ".join(incident.incident_id for incident in incidents[:5])
            raise UsageError(
                f"there is no incident {incident_id!r} of this run",
                hint=f"its newest are {newest_ids}" if newest_ids else "the run never had one",
            )
        return matches
    gravest = sorted(incidents, key=lambda incident: _GRAVITY.index(incident.severity))
    return sorted(
        gravest[:MAX_INCIDENTS],
        key=lambda incident: (incident.started_unix_ns, incident.onset_step),
    )


def _query_incident_facts(
    reader: Reader, detail: views.RunDetail, incident: views.IncidentView, missing: list[str]
) -> IncidentFacts:
    """Query the curves, heat maps and changes of an incident for the post-mortem."""
    run_id = detail.summary.run_id
    first, last = max(0, incident.onset_step - AROUND), incident.last_step + AROUND
    replies = [
        _ask_or_note(
            missing,
            name,
            lambda metric=metric: reader.ask(  # type: ignore[misc]
                views.CellsQuestion(
                    run_id=run_id,
                    metric=metric,
                    points=_COLUMNS,
                    rows=_ROWS,
                    from_step=first,
                    to_step=last,
                )
            ),
        )
        for metric, name in HEAT_MAPS.items()
        if _is_known(metric, detail.metrics)
    ]
    moved = _ask_or_note(
        missing,
        "Movers",
        lambda: reader.ask(views.MoversQuestion(run_id=run_id, step=incident.onset_step)),
    )
    return IncidentFacts(
        incident=incident,
        curves=curves(reader, detail, first, last),
        heat_maps=tuple(reply for reply in replies if reply is not None and reply.rows),
        movers=moved or (),
    )


def _ask_or_note(missing: list[str], name: str, ask: Callable[[], Answer]) -> Answer | None:
    """Return the result; without such data, return None and list the query as missing."""
    try:
        return ask()
    except UsageError as error:
        text = f"{name}: {error.text}"
        if text not in missing:
            missing.append(text)
        return None


def _is_known(metric: str, metrics: Sequence[str]) -> bool:
    """Return whether the post-mortem can show a metric: the run has measured it."""
    return metric in metrics or (
        metric.startswith("layers.") and any(name.startswith("layers.") for name in metrics)
    )
