import math

import pytest
from msgspec.structs import replace

from tests.collector.rows import RUN, Writer
from tests.support.cli import vitals
from tests.support.queries import decision, query
from tests.support.served import Served
from trainvitals.records import DecisionMade, Finding, FindingRaised, RunEnded, RunInfo, RunStarted
from trainvitals.views import (
    DecisionsQuestion,
    FindingsQuestion,
    IncidentsQuestion,
    RunQuestion,
    RunsQuestion,
    StepQuestion,
    VerdictQuestion,
)
from vitals_collector.ingest.ingest import ingest
from vitals_collector.storage.store import Store


def diverge(served: Served) -> None:
    """Send a run that nobody stopped: its last loss is NaN, its last gradient norm infinite."""
    writer = Writer(world_size=1)
    found = Finding(
        kind="nonfinite_loss",
        level="actionable",
        step=4,
        detector="nonfinite",
        reason="",
        value=math.nan,
    )
    evidence = {"loss": math.nan, "grad_norm": math.inf, "limit": 2.0}
    observed = decision(acted=False, value=math.nan, evidence=evidence)
    with served.client("ingest") as client:
        client.ingest(writer.events(RunStarted(info=RunInfo(name="diverged"))))
        loss = [1.0, 1.0, 1.0, 1.0, math.nan]
        client.ingest(writer.steps(range(5), loss=loss, grad_norm=[*loss[:4], math.inf]))
        client.ingest(writer.events(FindingRaised(finding=found), step=4))
        client.ingest(writer.events(DecisionMade(decision=observed), step=4))
        client.ingest(writer.events(RunEnded(state="finished"), step=4))


def test_a_run_that_ends_with_nan_says_so_wherever_it_is_asked(
    served: Served, capsys: pytest.CaptureFixture[str]
):
    diverge(served)
    with served.client("read") as client:
        (line,) = client.ask(RunsQuestion())
        made = client.ask(DecisionsQuestion(run_id=RUN))[0].decision
        values = [
            *(
                line.loss,
                client.ask(RunQuestion(run_id=RUN)).summary.loss,
                made.value,
                made.evidence["loss"],
            ),
            *(view.finding.value for view in client.ask(FindingsQuestion(run_id=RUN))),
            *(
                view.decision.value
                for view in client.ask(StepQuestion(run_id=RUN, step=4)).decisions
            ),
            *(
                v.finding.value
                for one in client.ask(IncidentsQuestion(run_id=RUN))
                for v in one.findings
            ),
        ]
    assert ["nan"] * 7 == [str(value) for value in values]
    assert (math.inf, math.inf) == (line.grad_norm, made.evidence["grad_norm"])
    assert ("finished", "critical") == (line.state, line.health)
    where = ("--collector", served.url, "--token-file", served.settings.data / "tokens.json")
    assert 0 == vitals("postmortem", "diverged", *where)
    told = capsys.readouterr().out
    assert "| loss | nan |\n| gradient norm | inf |" in told
    assert "loss nan, grad_norm inf, limit 2" in told


def test_a_run_whose_latest_steps_nobody_measured_is_unguarded(store: Store):
    writer = Writer(world_size=1)
    found = Finding(
        kind="unguarded", level="advisory", step=99, detector="guard", reason="", onset_step=90
    )
    ingest(store, writer.steps(range(100), loss=1.0))
    ingest(store, writer.events(FindingRaised(finding=found), step=99))
    (line,) = query(store).ask(RunsQuestion())
    assert "unguarded" == line.health
    told = query(store).ask(VerdictQuestion(run_id=RUN)).verdict
    assert "nothing checked these updates" in told.next
    ingest(store, writer.steps(range(100, 300), loss=1.0))
    (line,) = query(store).ask(RunsQuestion())
    assert "healthy" == line.health  # measured again


def test_a_run_whose_state_is_not_finite_under_a_finite_loss_is_not_healthy(store: Store):
    writer = Writer(world_size=1)
    bad = Finding(
        kind="nonfinite_state", level="actionable", step=200, detector="nonfinite", reason=""
    )

    def health() -> str:
        (line,) = query(store).ask(RunsQuestion())
        return line.health

    ingest(store, writer.steps(range(201), loss=1.0))
    assert "healthy" == health()
    ingest(store, writer.events(FindingRaised(finding=bad), step=200))
    assert "critical" == health()
    ingest(store, writer.steps(range(201, 900), loss=1.0))
    assert "healthy" == health()  # it would have been said again
    again = replace(bad, step=890)
    ingest(store, writer.events(FindingRaised(finding=again), step=890))
    assert "critical" == health()
    ingest(store, writer.steps(range(880, 890), loss=1.0, attempt=2))
    assert "healthy" == health()  # the rollback has left it behind


def test_the_document_says_which_numbers_may_be_words(served: Served):
    schemas = served.request("GET", "/openapi.json").json()["components"]["schemas"]
    word = {"type": "string", "enum": ["nan", "inf", "-inf"]}
    for name, of in (("RunSummary", "loss"), ("Finding", "value"), ("Decision", "value")):
        assert word in schemas[name]["properties"][of]["anyOf"]
    assert word in schemas["Decision"]["properties"]["evidence"]["additionalProperties"]["anyOf"]
