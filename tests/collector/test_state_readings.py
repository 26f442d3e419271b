"""What the probe said of the state, and what was withheld: stored, told, alerted, never made up."""

import math

import pytest
from msgspec.structs import replace

from tests.collector.alerting import Place, decision
from tests.collector.rows import RUN, Writer
from tests.support.queries import query
from trainvitals.records import (
    BAD_LOSS,
    CLIPS,
    LOSS_OUTLIER,
    WITHHELD,
    ChangeExpected,
    DataWindowSkipped,
    Event,
    Finding,
    FindingRaised,
    RunInfo,
    RunStarted,
    StateRead,
)
from trainvitals.views import EventsQuestion, IncidentsQuestion, RunsQuestion, StepQuestion
from vitals_collector.ingest.ingest import ingest
from vitals_collector.ingest.projections import describe_event
from vitals_collector.queries.why import explain_step
from vitals_collector.storage.store import Store

ROW = StateRead(
    trigger="row", onset_step=4, num_batches=8, ratio=1.31, then=0.42, now=0.55, verdict="sound"
)


def finding(kind: str, level: str = "advisory", step: int = 6, cause: str = "") -> FindingRaised:
    return FindingRaised(
        finding=Finding(
            kind=kind, level=level, step=step, detector="judge", reason="it looks bad", cause=cause
        )
    )


def why(store: Store, step: int) -> str:
    asked = query(store)
    return " ".join(
        explain_step(
            asked.ask(RunsQuestion())[0], asked.ask(StepQuestion(run_id=RUN, step=step)), ()
        ).split()
    )


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (
            ROW,
            "Probe: loss on kept batches is 1.31x its earlier value (8 batches, 0.42 before, 0.55 "
            "now, a share of the initial loss added to both): the state is healthy",
        ),
        (
            replace(ROW, ratio=5.3, then=None, now=None, verdict="state"),
            "Probe: loss on kept batches is 5.3x its earlier value (8 batches): the state is "
            "damaged",
        ),
        (
            replace(ROW, ratio=math.inf, then=None, now=math.nan, verdict="state"),
            "Probe: loss on kept batches is NaN or infinite, against its earlier value (8 batches, "
            "nan now, a share of the initial loss added to both): the state is damaged",
        ),
        (
            replace(ROW, num_batches=2, ratio=None, verdict="abstained"),
            "Probe: no verdict: only 2 kept batches could be evaluated; it needs 3",
        ),
        (
            replace(ROW, ratio=None, verdict="abstained", detail="losses at or below zero"),
            "Probe: no verdict: losses at or below zero",
        ),
        (
            replace(ROW, trigger="level", ratio=3.0, then=None, now=None, verdict="state"),
            "Probe: loss on kept batches is 3x its earlier value (8 batches): the state got worse "
            "on these batches",
        ),
        (
            replace(ROW, trigger="evaluation", ratio=2.4, then=1.0, now=2.4, verdict="state"),
            "Evaluation: the loss is 2.4x that of the previous evaluation (1 before, 2.4 now): the "
            "state is damaged",
        ),
    ],
    ids=lambda value: getattr(value, "trigger", ""),
)
def test_a_reading_is_told_with_its_numbers(event: StateRead, expected: str):
    assert expected == describe_event(event)


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (
            DataWindowSkipped(epoch=0, first_batch=77, last_batch=86, reason="r"),
            "batches 77 to 85 of epoch 0 skipped: r",
        ),
        (
            DataWindowSkipped(epoch=0, first_batch=77, last_batch=78, reason="r"),
            "batch 77 of epoch 0 skipped: r",
        ),
        (RunStarted(info=RunInfo(name="n", world_size=1)), "run n started on 1 rank, guard"),
        (RunStarted(info=RunInfo(name="n", world_size=8)), "run n started on 8 ranks, guard"),
        (ChangeExpected(steps=1, reason="r"), "a change is expected for 1 step: r"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_line_about_an_event_counts_what_it_names(event: Event, expected: str):
    assert expected == describe_event(event)


def test_a_step_of_the_trouble_tells_what_the_state_said(store: Store):
    writer = Writer()
    ingest(store, writer.steps(range(12), loss=1.0))
    ingest(store, writer.events(ROW, step=6))
    for step in (4, 5, 6):
        assert "the state is healthy" in why(store, step)
    for step in (3, 7):
        assert "Probe" not in why(store, step)
    (event,) = query(store).ask(EventsQuestion(run_id=RUN, kind="StateRead"))
    assert describe_event(ROW) == event.text
    assert () == query(store).ask(EventsQuestion(run_id=RUN, kind="Note"))


@pytest.mark.parametrize(
    ("verdict", "skipped", "expected"),
    [
        (LOSS_OUTLIER | CLIPS, 0, "the update was applied after clipping."),
        (LOSS_OUTLIER | CLIPS | WITHHELD, 1, "the update was withheld."),
        (LOSS_OUTLIER | WITHHELD, 1, "the update was withheld."),
        (LOSS_OUTLIER | WITHHELD, 0, "the update was applied."),
        (LOSS_OUTLIER, 0, "the update was applied."),
        (BAD_LOSS | CLIPS, 1, "the update was skipped."),
        (CLIPS, 0, "The update was applied."),
    ],
)
def test_an_outlier_that_was_applied_is_not_called_skipped(
    store: Store, verdict: int, skipped: int, expected: str
):
    row = {"loss": 9.0, "loss_limit": 3.0, "verdict": verdict, "skipped": skipped}
    ingest(store, Writer().steps([5], culprit_rank=-1, **row))
    text = why(store, 5)
    assert expected in text
    assert skipped or "skipped" not in text


def test_an_incident_tells_what_the_state_said_before_what_was_decided(store: Store):
    writer = Writer()
    ingest(store, writer.steps(range(12), loss=1.0))
    ingest(store, writer.events(decision(rule="outlier", cause="spike"), ROW, step=5))
    (incident,) = query(store).ask(IncidentsQuestion(run_id=RUN))
    (reading,) = [
        i for i, words in enumerate(incident.story) if words.startswith("Probe: loss on kept")
    ]
    assert "(rule: outlier)" in incident.story[reading + 1]
    assert "1.31x" in incident.story[reading]


@pytest.mark.parametrize(
    ("actions", "expected"),
    [
        (["skip_step"], ["StateDamaged firing", "StepSkipped firing"]),
        (["skip_step", "rollback"], ["StepSkipped firing", "TrainingRolledBack firing"]),
    ],
)
def test_a_damaged_state_pages_unless_vitals_went_back(
    store: Store, actions: list[str], expected: list[str]
):
    place, writer = Place(store), Writer()
    place.send(writer.steps(range(8), loss=1.0))
    made = [
        decision(i, action, step=6, budget_left=2, cause="spike")
        for i, action in enumerate(actions, start=1)
    ]
    place.send(writer.events(finding("state_damaged", "actionable"), *made, step=6))
    assert expected == sorted(place.look())
    severities = {"page" if "StateDamaged" in name else "notify" for name in expected[:1]}
    (incident,) = query(store).ask(IncidentsQuestion(run_id=RUN))
    assert ("page" in severities) == (incident.severity == "page")


@pytest.mark.parametrize(("loss_kind", "severity"), [("minimize", "page"), ("rl", "log")])
def test_lost_progress_pages_only_where_the_loss_is_what_training_makes_small(
    store: Store, loss_kind: str, severity: str
):
    place, writer = Place(store), Writer()
    place.send(writer.events(RunStarted(info=RunInfo(name="x", judge={"loss_kind": loss_kind}))))
    place.send(writer.steps(range(8), loss=1.0))
    place.send(writer.events(finding("lost_progress"), step=6))
    assert ["ProgressLost firing"] == place.look()
    assert severity == place.heard.alerts[0].severity
    assert severity == query(store).ask(IncidentsQuestion(run_id=RUN))[0].severity
