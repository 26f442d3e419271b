"""One row a detector and one a kind of finding: what is told reaches every place that shows it."""

import ast
from pathlib import Path

import pytest

import trainvitals
from trainvitals.alerting import ALERTED_KINDS, ALERTS, alerts_for_finding
from trainvitals.detect.detector_set import DetectorSet
from trainvitals.detect.fleet import FleetDetectors
from trainvitals.detect.posttraining.set import WATCHERS
from trainvitals.detect.registry import ACTED_CAUSES, DETECTORS, DOMAINS, KINDS, kinds_about
from trainvitals.records import Finding

CORE = Path(trainvitals.__file__).parent
BY_DECISION = {"nonfinite", "nonfinite_params", "rank_failed", "level_shift"}
"""Kinds without an alert: a skip, a rollback or an accepted level tells of them."""

ONLY_SHOWN = {"waiting", "replica_named"}
"""Kinds without an alert: a wait may be an evaluation; what a replay says comes after its cause."""


def kinds_in_code() -> set[str]:
    """Return each kind that the detectors and the policy give a finding, as it is written there."""
    files = [*CORE.glob("detect/**/*.py"), *CORE.glob("policy/*.py")]
    calls = [
        node
        for path in files
        if path.name != "registry.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
    ]
    values = [keyword.value for call in calls for keyword in call.keywords if keyword.arg == "kind"]
    return {
        value.value
        for value in values
        if isinstance(value, ast.Constant) and isinstance(value.value, str)
    }


def test_every_detector_has_its_row_those_of_the_loop_in_their_order() -> None:
    fed = [name for name in DetectorSet().state_dict() if name != "suspended"]
    rows = [name for name in DETECTORS if name in fed]
    assert fed == rows
    watchers = set(FleetDetectors().state_dict()["watchers"]) | {"stalled", "checkpoint_overdue"}
    watchers |= {watcher.name for watcher in WATCHERS}
    assert watchers <= set(DETECTORS)
    of_others = {"hang", "outlier", "probe", "evaluation", "snapshots", "policy", "rule", "loop"}
    of_others |= {"replicas", "schedule", "shipper", "optimizer_state", "weights"}
    assert set(DETECTORS) == {*fed, *watchers, *of_others}


def test_every_kind_has_its_row_and_somebody_who_tells_it() -> None:
    told = {kind for spec in DETECTORS.values() for kind in spec.kinds}
    assert set(KINDS) == told
    assert {"spike", "state_damaged", "gpu_xid"} <= kinds_in_code() - {"lr_cap"}
    unknown = kinds_in_code() - set(KINDS)
    assert unknown <= {"state", "nonfinite"}, "kinds of causes of a rollback, which are no findings"


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_told_raises_an_alert_or_leads_to_a_decision(kind: str) -> None:
    finding = Finding(
        kind=kind, level="advisory", step=1, detector="one", reason="a reason", cause=""
    )
    alerts = alerts_for_finding(finding, run_id="run")
    assert (kind in BY_DECISION | ONLY_SHOWN) == (not alerts)
    assert (kind in ALERTED_KINDS) == bool(alerts)
    names = {spec.name for spec in ALERTS}
    row = KINDS[kind]
    assert {row.alert, *row.alerts.values()} - {""} <= names


def test_a_cause_belongs_to_one_kind() -> None:
    causes = [cause for kind in KINDS.values() for cause in kind.all_causes]
    assert len(causes) == len(set(causes)) == len(DOMAINS)


def test_a_machine_is_a_machine_whoever_watches_it() -> None:
    of_nodes = {k for spec in DETECTORS.values() if spec.where == "agent" for k in spec.kinds}
    assert of_nodes | {"stalled", "checkpoint_overdue", "straggler"} <= kinds_about("machine")


def test_each_kind_that_is_acted_on_has_a_cause_whose_count_begins_at_zero():
    kinds = {
        kind
        for spec in DETECTORS.values()
        for kind, level in spec.kinds.items()
        if level == "actionable"
    }
    causes = {"nonfinite": "nonfinite_loss", "spike": "loss_outlier"}
    assert {causes.get(kind, kind) for kind in kinds} <= set(ACTED_CAUSES)
