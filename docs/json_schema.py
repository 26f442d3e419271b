"""Writes `output.schema.json`: the JSON that each command writes with `--format json`.

The schema follows from the types that the commands write. A test validates the output of the
commands with it.
"""

import inspect
import json
from typing import Any, NotRequired, TypedDict

import msgspec

from trainer_hooks.recovery.checkpoints.cli import VerifyResult
from trainer_hooks.recovery.checkpoints.index import IndexEntry
from trainvitals.cli.doctor import Check
from trainvitals.views import (
    AlertView,
    AnnotationView,
    CheckpointView,
    CommandView,
    DecisionView,
    EventView,
    FailingNode,
    ForecastView,
    GoodputView,
    IncidentLine,
    IncidentView,
    RunDetail,
    RunSummary,
    RunVolume,
    SeriesReply,
    SilenceView,
    StacksView,
    StepView,
    VerdictView,
)
from vitals_collector.report.curves import PlottedCurve
from vitals_collector.report.postmortem.report_data import IncidentFacts
from vitals_collector.retention.checkup import StoreSize
from vitals_plugins.bridges.audit.audit import AuditDocument
from vitals_plugins.lab.drill.cli import DrillResult
from vitals_plugins.lab.plan.training_plan import PlanInput, TrainingPlan
from vitals_plugins.lab.preflight.cli import PreflightResult
from vitals_plugins.lab.repro.verdict import ReplayVerdict

VERSION = 1
"""Increases when a field is removed or changes its meaning; new fields do not change it."""
Cell = str | int | float | bool | None


class ShowBody(TypedDict):
    """JSON of `vitals show`."""

    run: RunDetail
    verdict: VerdictView
    incidents: tuple[IncidentLine, ...]
    decisions: tuple[DecisionView, ...]
    checkpoints: tuple[CheckpointView, ...]
    events: tuple[EventView, ...]


class PostmortemBody(TypedDict):
    """JSON of `vitals postmortem`."""

    detail: RunDetail
    made_unix_ns: int
    curves: tuple[PlottedCurve, ...]
    decisions: tuple[DecisionView, ...]
    checkpoints: tuple[CheckpointView, ...]
    events: tuple[EventView, ...]
    annotations: tuple[AnnotationView, ...]
    all_incidents: tuple[IncidentView, ...]
    incidents: tuple[IncidentFacts, ...]
    missing: tuple[str, ...]


class TailLine(TypedDict):
    """One line of `vitals tail`; the lines are separate JSON objects."""

    step: int
    attempt: int
    loss: float | None
    grad_norm: float | None
    learning_rate: float | None
    skipped: float | None


class ReplayedFinding(TypedDict):
    """Finding of a replay."""

    row: int
    step: int
    kind: str
    level: str
    reason: str


class MissingRows(TypedDict):
    """Rows without which a run is replayed."""

    lost_rows: int
    thinned_rows: int
    thinned_to_step: int


class ReplayBody(TypedDict):
    """JSON of `vitals replay`."""

    findings: tuple[ReplayedFinding, ...]
    questions: tuple[dict[str, Any], ...]
    decisions: tuple[dict[str, Any], ...]
    missing: NotRequired[MissingRows]
    """Only if a stored run is replayed."""


class StoreSizeBody(TypedDict):
    """JSON of `vitals store size`."""

    store: StoreSize
    runs: dict[str, RunVolume]


class DamagedFile(TypedDict):
    """Damaged file of rows, or damaged records of a table."""

    what: str
    num_rows: int
    run_ids: tuple[str, ...]


class StoreCheckBody(TypedDict):
    """JSON of `vitals store check`."""

    damaged: tuple[DamagedFile, ...]


class TokenLine(TypedDict):
    """Token in `vitals token list`."""

    id: str
    owner: str
    scopes: str
    runs: str
    created: str
    ends: str
    state: str


class DeliveryLine(TypedDict):
    """Receiver in `vitals alerts test`."""

    receiver: str
    outcome: str
    error: str


class PlanBody(TypedDict):
    """JSON of `vitals plan`."""

    asked: PlanInput
    plan: TrainingPlan
    sources: dict[str, str]


OUTPUTS: dict[str, Any] = {
    "vitals doctor": tuple[Check, ...],
    "vitals plan": PlanBody,
    "vitals preflight": PreflightResult,
    "vitals drill": DrillResult,
    "vitals preflight --failed-nodes": tuple[FailingNode, ...],
    "vitals repro": ReplayVerdict,
    "vitals landscape": dict[str, Any],
    "vitals runs": tuple[RunSummary, ...],
    "vitals show": ShowBody,
    "vitals show --metric": SeriesReply,
    "vitals goodput": GoodputView,
    "vitals goodput --all": tuple[GoodputView, ...],
    "vitals forecast": ForecastView,
    "vitals query": tuple[dict[str, Cell], ...],
    "vitals postmortem": PostmortemBody,
    "vitals why": StepView,
    "vitals tail": TailLine,
    "vitals command": tuple[CommandView, ...],
    "vitals stacks": tuple[StacksView, ...],
    "vitals replay": ReplayBody,
    "vitals audit": AuditDocument,
    "vitals sql": tuple[dict[str, Cell], ...],
    "vitals checkpoints list": tuple[IndexEntry, ...],
    "vitals checkpoints verify": tuple[VerifyResult, ...],
    "vitals alerts list": tuple[AlertView, ...],
    "vitals alerts ack": tuple[AlertView, ...],
    "vitals alerts silence": tuple[AlertView, ...],
    "vitals alerts silence --match": tuple[SilenceView, ...],
    "vitals alerts silences": tuple[SilenceView, ...],
    "vitals alerts unsilence": tuple[SilenceView, ...],
    "vitals alerts test": tuple[DeliveryLine, ...],
    "vitals store size": StoreSizeBody,
    "vitals store check": StoreCheckBody,
    "vitals token list": tuple[TokenLine, ...],
}
"""Type of the JSON by command, with the option that selects it."""

_NOT_FINITE = {"type": "string", "enum": ["nan", "inf", "-inf"]}


def schema() -> dict[str, Any]:
    """Return the JSON Schema: `commands` has one schema per command."""
    schemas, definitions = msgspec.json.schema_components(
        OUTPUTS.values(), ref_template="#/$defs/{name}"
    )
    document = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "JSON of the vitals commands",
        "description": "Output of each command with --format json. A number that is not finite is "
        "the string nan, inf or -inf; null means not measured.",
        "version": VERSION,
        "commands": dict(zip(OUTPUTS, schemas, strict=True)),
        "$defs": definitions,
    }
    allowed = _adapt(document)
    assert isinstance(allowed, dict)
    return allowed


def text() -> str:
    """Return the file."""
    return json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"


def _adapt(node: Any) -> Any:
    """Return the schema with strings allowed for non-finite numbers, and without indentation.

    msgspec removes the indentation of docstrings since version 0.23.
    """
    if isinstance(node, list):
        return [_adapt(part) for part in node]
    if not isinstance(node, dict):
        return node
    if node.get("type") == "number":
        return {"anyOf": [node, _NOT_FINITE]}
    return {
        name: inspect.cleandoc(part)
        if name == "description" and isinstance(part, str)
        else _adapt(part)
        for name, part in node.items()
    }
