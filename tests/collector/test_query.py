import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from tests.collector.both_forms import QueryOfBothForms
from tests.collector.rows import OTHER_RUN, RUN, SECOND, START, STEPS, Writer
from tests.support.queries import decision, query, rolled_back_run
from trainvitals.catalog import LAYERS_SCHEMA
from trainvitals.errors import UsageError
from trainvitals.question import Question
from trainvitals.records import (
    AttemptStarted,
    CheckpointChanged,
    DecisionMade,
    Finding,
    FindingRaised,
    NamesDefined,
    Note,
    RunEnded,
)
from trainvitals.rows import Schema
from trainvitals.views import (
    Branch,
    CheckpointsQuestion,
    DecisionsQuestion,
    EventsQuestion,
    FindingsQuestion,
    ManySeriesQuestion,
    RunQuestion,
    RunsQuestion,
    SeriesQuestion,
    SeriesReply,
    SeriesRequest,
    StepQuestion,
)
from vitals_collector.ingest.ingest import ingest
from vitals_collector.storage.schema import alerts
from vitals_collector.storage.store import Store, open_data_store, open_store

BRANCHES: tuple[Branch, ...] = get_args(Branch)


@pytest.fixture
def merging(tmp_path: Path) -> Iterator[Store]:
    """A store whose rows lie in a lake, where they are merged."""
    with contextlib.closing(open_data_store(tmp_path / "data")) as opened:
        yield opened


def both(store: Store, second: int = 100) -> QueryOfBothForms:
    return QueryOfBothForms(store, query(store, second))


def test_a_curve_is_stitched_and_its_discarded_branch_stays_visible(store: Store):
    rolled_back_run(store)
    found = query(store).ask(SeriesQuestion(run_id=RUN, metric="steps.loss"))
    assert list(range(13)) == list(found.step)
    assert (1,) * 6 + (2,) * 7 == found.attempt
    assert (0, 1, 2, 3, None, 5, *(100,) * 7) == found.value
    assert [(4, 1, "nan")] == [(m.step, m.attempt, m.kind) for m in found.nonfinite]
    discarded = query(store).ask(
        SeriesQuestion(run_id=RUN, metric="steps.loss", branch="discarded")
    )
    assert [6, 7, 8, 9] == list(discarded.step)
    assert (
        17
        == query(store).ask(SeriesQuestion(run_id=RUN, metric="steps.loss", branch="all")).num_total
    )


def test_a_curve_can_be_cut_to_steps(store: Store):
    rolled_back_run(store)
    found = query(store).ask(
        SeriesQuestion(run_id=RUN, metric="steps.loss", from_step=5, to_step=7)
    )
    assert [5, 6, 7] == list(found.step)


def test_missing_is_not_nan(store: Store):
    writer = Writer()
    ingest(store, writer.steps(range(4), loss=[1.0, None, math.nan, 2.0]))
    found = query(store).ask(SeriesQuestion(run_id=RUN, metric="steps.loss"))
    assert ([0, 2, 3], [1.0, None, 2.0]) == (list(found.step), list(found.value))


def test_a_relaunched_rank_goes_on_in_the_same_curve(store: Store):
    ingest(store, Writer().steps(range(5), loss=1.0))
    again = Writer(started=START + 100 * SECOND)
    ingest(store, again.steps(range(3, 8), loss=2.0))
    found = query(store).ask(SeriesQuestion(run_id=RUN, metric="steps.loss"))
    assert (1, 1, 1, 2, 2, 2, 2, 2) == found.value
    assert 1 == len(query(store).ask(RunsQuestion()))


def test_scalars_are_found_by_their_name_in_each_incarnation(store: Store):
    first, second = Writer(), Writer(started=START + SECOND)
    # Rows may come before the event that names them, and each incarnation numbers for itself.
    ingest(store, first.scalars(7, {0: 0.5, 5: 0.4}))
    ingest(store, first.events(NamesDefined(stream="scalars", names={7: "val.loss", 8: "acc"})))
    ingest(store, second.events(NamesDefined(stream="scalars", names={8: "val.loss", 7: "acc"})))
    ingest(store, second.scalars(8, {10: 0.3}))
    found = query(store).ask(SeriesQuestion(run_id=RUN, metric="scalars.val.loss"))
    assert ([0, 5, 10], [0.5, 0.4, 0.3]) == (list(found.step), list(found.value))
    assert {"scalars.val.loss", "scalars.acc"} == set(
        query(store).ask(RunQuestion(run_id=RUN)).metrics
    )


def test_a_layers_other_columns_are_series_beside_its_gradient_norm(store: Store):
    writer = Writer()
    rows = [  # step, attempt, times; layer; gradient, weight, update; the output's three
        [0, 1, writer.time_of(0), 0, 3, 0.5, 7.0, *[None] * 6],
        [10, 1, writer.time_of(10), 0, 3, 0.4, 8.0, 0.1, *[None] * 5],
    ]
    ingest(store, writer.batch(LAYERS_SCHEMA, rows))
    ingest(store, writer.events(NamesDefined(stream="layers", names={3: "h.0:x"})))
    found = query(store)
    assert ((0, 10), (0.5, 0.4)) == _points(
        found.ask(SeriesQuestion(run_id=RUN, metric="layers.h.0:x"))
    )
    assert ((0, 10), (7.0, 8.0)) == _points(
        found.ask(SeriesQuestion(run_id=RUN, metric="layers.h.0:x:weight_norm"))
    )
    assert ((10,), (0.1,)) == _points(
        found.ask(SeriesQuestion(run_id=RUN, metric="layers.h.0:x:update_norm"))
    )
    assert {f"layers.h.0:x{c}" for c in ("", ":weight_norm", ":update_norm")} == set(
        found.ask(RunQuestion(run_id=RUN)).metrics
    )


def _points(reply: SeriesReply) -> tuple[tuple[int, ...], tuple[float, ...]]:
    return tuple(reply.step), tuple(reply.value)


def test_rows_from_before_a_column_was_there_are_one_curve_with_those_after(store: Store):
    old = Schema("steps", STEPS.columns[:20])
    writer = Writer()
    ingest(store, writer.batch(old, [[0, 1, START, 0, 2.5, *[None] * 15]]))
    ingest(store, writer.steps([1], loss=1.5, weight_norm=3.0))
    assert ((0, 1), (2.5, 1.5)) == _points(
        query(store).ask(SeriesQuestion(run_id=RUN, metric="steps.loss"))
    )
    assert ((1,), (3.0,)) == _points(
        query(store).ask(SeriesQuestion(run_id=RUN, metric="steps.weight_norm"))
    )


def test_host_series_come_by_time_from_the_first_node(store: Store):
    ingest(store, Writer("node:b").node_rows([1], cpu_ratio=0.9))
    ingest(store, Writer("node:a").node_rows([3, 4, 5], cpu_ratio=0.1))
    found = query(store).ask(SeriesQuestion(run_id=RUN, metric="node.cpu_ratio"))
    assert ("node:a", "ratio", (-1, -1, -1)) == (found.source, found.unit, found.step)
    assert [START + s * SECOND for s in (3, 4, 5)] == list(found.time_unix_ns)


def test_a_process_series_is_picked_out_of_its_agents_rows(store: Store):
    agent = Writer("node:a")
    for second in range(3):
        ingest(store, agent.process_rows(second, {0: (100, 1), 1: (101, 0)}))
    found = query(store).ask(SeriesQuestion(run_id=RUN, metric="process.alive", source="rank:1"))
    assert (0, 0, 0) == found.value
    with pytest.raises(UsageError, match="source is 'node:a'; a process series needs a rank"):
        query(store).ask(SeriesQuestion(run_id=RUN, metric="process.alive", source="node:a"))


def test_the_metrics_of_a_run_are_those_with_a_value(store: Store):
    writer = Writer()
    ingest(store, writer.steps([0], loss=1.0))
    assert ("steps.loss",) == query(store).ask(RunQuestion(run_id=RUN)).metrics
    ingest(store, writer.steps([1], grad_norm=1.0))
    ingest(store, writer.steps([2], loss=1.0))
    assert ("steps.grad_norm", "steps.loss") == query(store).ask(RunQuestion(run_id=RUN)).metrics


@pytest.mark.parametrize(
    ("metric", "source", "said"),
    [
        ("steps.los", "", "no series 'steps.los'"),
        ("loss", "", "must be stream.column"),
        ("scalars.none", "", "no series"),
        ("steps.loss", "robot:1", "source is 'robot:1'"),
    ],
)
def test_a_series_that_is_not_there_is_explained(store: Store, metric: str, source: str, said: str):
    ingest(store, Writer().steps([0], loss=1.0))
    with pytest.raises(UsageError, match=said):
        query(store).ask(SeriesQuestion(run_id=RUN, metric=metric, source=source))


def test_many_series_at_once_are_what_each_is_alone(store: Store):
    rolled_back_run(store)
    asked = [
        SeriesRequest(metric=metric, source=source, branch=branch, points=points, from_step=first)
        for metric in ("steps.loss", "steps.grad_norm", "steps.rank_loss", "gpu.power_watts")
        for source in ("", "rank:1")
        for branch, points in (("lineage", 5), ("discarded", 100))
        for first in (None, 4)
    ]
    alone = [
        query(store).ask(
            SeriesQuestion(
                run_id=RUN,
                metric=a.metric,
                source=a.source,
                branch=a.branch,
                points=a.points,
                from_step=a.from_step,
            )
        )
        for a in asked
    ]
    assert repr(alone) == repr(
        list(query(store).ask(ManySeriesQuestion(run_id=RUN, series=tuple(asked))))
    )  # NaN is not itself
    assert () == query(store).ask(ManySeriesQuestion(run_id=RUN, series=()))
    assert any(one.num_total for one in alone)


def test_what_has_no_step_can_be_cut_to_a_time(store: Store):
    node = Writer("node:node-a", world_size=0)
    ingest(store, node.node_rows(range(100)))
    ingest(store, node.node_rows(range(100, 200)))
    for first, last, num in (
        (90, 110, 21),
        (0, 99, 100),
        (None, 4, 5),
        (199, None, 1),
        (300, 9, 0),
    ):
        times = [None if s is None else node.time_of(s) for s in (first, last)]
        asked = SeriesRequest(
            metric="node.cpu_ratio", from_time_unix_ns=times[0], to_time_unix_ns=times[1]
        )
        whole = SeriesRequest(metric="node.cpu_ratio")
        found, all_of_it = query(store).ask(ManySeriesQuestion(run_id=RUN, series=(asked, whole)))
        assert (num, num, 200) == (found.num_total, len(found.step), all_of_it.num_total)
        begin = 0 if first is None else first
        assert [node.time_of(begin + i) for i in range(num)] == list(found.time_unix_ns)


def test_more_points_than_an_answer_may_have_are_refused(store: Store):
    rolled_back_run(store)
    many = [SeriesRequest(metric="steps.loss", points=20_000)] * 11
    with pytest.raises(UsageError, match="11 series are to have 220000 points"):
        query(store).ask(ManySeriesQuestion(run_id=RUN, series=tuple(many)))
    with pytest.raises(UsageError, match="points is 1"):
        query(store).ask(
            ManySeriesQuestion(run_id=RUN, series=(SeriesRequest(metric="steps.loss", points=1),))
        )


def test_a_mistyped_metric_gets_the_right_name(store: Store):
    ingest(store, Writer().steps([0], loss=1.0))
    with pytest.raises(UsageError) as caught:
        query(store).ask(SeriesQuestion(run_id=RUN, metric="steps.los"))
    assert "did you mean steps.loss?" == caught.value.hint


def test_a_known_metric_without_values_is_an_empty_curve(store: Store):
    ingest(store, Writer().steps([0], loss=1.0))
    assert () == query(store).ask(SeriesQuestion(run_id=RUN, metric="gpu.power_watts")).value


def test_a_lake_answers_as_memory_does_before_and_after_a_merge(merging: Store):
    memory = open_store("sqlite://")
    agent = Writer("node:a")
    told = [agent.process_rows(second, {0: (7, 1), 1: (8, 1 - second // 2)}) for second in range(4)]
    for store in (memory, merging):
        rolled_back_run(store)
        for raw in told:
            ingest(store, raw)
    series = [SeriesQuestion(run_id=RUN, metric="steps.loss", branch=b) for b in BRANCHES]
    alive = SeriesQuestion(run_id=RUN, metric="process.alive", source="rank:1")
    for question in (*series, alive):
        assert repr(query(memory).ask(question)) == repr(both(merging).ask(question))
    at = StepQuestion(run_id=RUN, step=8)
    shown, expected = (
        [(row.source, row.attempt, row.values) for row in reader.ask(at).rows]
        for reader in (both(merging), query(memory))
    )
    assert expected == shown
    memory.close()


@pytest.mark.parametrize(
    "kind",
    [RunQuestion, DecisionsQuestion, FindingsQuestion, CheckpointsQuestion, EventsQuestion],
)
def test_a_run_that_is_not_there_is_said(store: Store, kind: type[Question]):
    with pytest.raises(UsageError, match=f"there is no run {OTHER_RUN}") as caught:
        query(store).ask(kind(run_id=OTHER_RUN))
    assert "V101" == caught.value.code


def test_the_list_of_runs_tells_what_each_is_doing(store: Store):
    rolled_back_run(store)
    ingest(store, Writer(run=OTHER_RUN).steps([0], loss=math.nan))
    with store.write() as connection:
        firing = {"run_id": RUN, "severity": "log", "state": "firing"}
        connection.execute(alerts.insert().values(fingerprint="f", **firing))
    other, run = query(store, 60).ask(RunsQuestion())
    assert ("tiny", ("a", "b"), "running", "acting") == (run.name, run.tags, run.state, run.health)
    assert (12, 100.0, 1, 1, 2) == (
        run.last_step,
        run.loss,
        run.num_skips,
        run.num_rollbacks,
        run.num_attempts,
    )
    assert (1, "rollback at step 9: the loss of step 4 is nan") == (
        run.num_firing_alerts,
        run.last_decision,
    )
    assert (OTHER_RUN, "nan", 1) == (other.run_id, str(other.loss), other.num_attempts)
    assert "critical" == other.health


def test_a_run_says_how_it_ended_and_a_relaunch_runs_again(store: Store):
    first = Writer()
    ingest(store, first.steps(range(3)))
    ingest(store, first.events(RunEnded(state="interrupted", reason="SIGTERM"), step=3))
    assert "interrupted" == query(store, 10_000).ask(RunsQuestion())[0].state
    again = Writer(started=START + 9_990 * SECOND)
    ingest(store, again.steps([3]))
    assert "running" == query(store, 10_000).ask(RunsQuestion())[0].state


def test_a_silent_run_is_lost_unless_its_agent_is_there(store: Store):
    ingest(store, Writer().steps([0]))
    agent = Writer("node:a")
    assert "lost" == query(store, 300).ask(RunsQuestion())[0].state
    ingest(store, agent.node_rows([290]))
    assert "running" == query(store, 300).ask(RunsQuestion())[0].state
    ingest(store, agent.process_rows(291, {0: (100, 0)}))
    assert "lost" == query(store, 300).ask(RunsQuestion())[0].state


def test_a_run_shows_its_attempts_and_sources_with_what_was_lost(store: Store):
    rolled_back_run(store)
    ranks = Writer("rank:1", started=START + 50 * SECOND)
    ingest(store, ranks.steps([12], attempt=2, lose=4))
    detail = query(store).ask(RunQuestion(run_id=RUN))
    assert [(1, None, 0, 9), (2, 1, 6, 12)] == [
        (a.ordinal, a.parent, a.fork_step, a.last_step) for a in detail.attempts if a.id < 3
    ]
    assert [("rank:0", 0), ("rank:1", 0), ("rank:1", 4)] == [
        (source.source, source.num_lost_rows) for source in detail.sources
    ]
    assert ("events", "steps") == detail.sources[0].streams


def test_a_batch_across_a_rollback_gives_each_attempt_its_own_last_step(store: Store):
    writer = Writer()
    for attempt in (
        AttemptStarted(id=1, parent=None, fork_step=0, reason=""),
        AttemptStarted(id=2, parent=1, fork_step=2, reason=""),
    ):
        ingest(store, writer.events(attempt))
    rest = [None] * (len(STEPS.columns) - 4)
    whole = [[s, a, START, 0, *rest] for s, a in ((8, 1), (9, 1), (2, 2), (3, 2))]
    ingest(store, writer.batch(STEPS, whole))
    assert [9, 3] == [a.last_step for a in query(store).ask(RunQuestion(run_id=RUN)).attempts]


def test_a_step_shows_every_ranks_row_on_every_attempt(store: Store):
    rolled_back_run(store)
    view = query(store).ask(StepQuestion(run_id=RUN, step=8))
    assert [("rank:0", 1), ("rank:1", 1), ("rank:0", 2), ("rank:1", 2)] == [
        (row.source, row.attempt) for row in view.rows
    ]
    bad = query(store).ask(StepQuestion(run_id=RUN, step=4))
    assert (None, ("loss=nan", "rank_loss=nan")) == (
        bad.rows[0].values["loss"],
        bad.rows[0].nonfinite,
    )
    assert "grad_norm" not in bad.rows[0].values, "what was not measured is absent"
    assert ["skip_step"] == [one.decision.action for one in bad.decisions]


def test_the_ledger_findings_checkpoints_and_events_come_in_order(store: Store):
    writer = Writer()
    events = [
        FindingRaised(
            finding=Finding(
                kind="k", level="actionable", step=s, detector="d", reason="", value=math.inf
            )
        )
        for s in (7, 3)
    ]
    notes = [Note(code="N1", text="one"), Note(code="N2", text="two")]
    saved = [
        CheckpointChanged(checkpoint_id=f"c{s}", checkpoint_step=s, state="healthy", where="disk")
        for s in (20, 10)
    ]
    evidence = DecisionMade(decision=decision(evidence={"a": 1.0, "b": math.nan}, value=math.nan))
    ingest(store, writer.events(*events, *notes, *saved, evidence))
    asked = query(store)
    assert [3, 7] == [one.finding.step for one in asked.ask(FindingsQuestion(run_id=RUN))]
    assert ["one [N1]", "two [N2]"] == [one.text for one in asked.ask(EventsQuestion(run_id=RUN))]
    assert [10, 20] == [one.step for one in asked.ask(CheckpointsQuestion(run_id=RUN))]
    assert "{'a': 1.0, 'b': nan}" == str(
        asked.ask(DecisionsQuestion(run_id=RUN))[0].decision.evidence
    )


def test_snapshots_in_memory_are_healthy_only_while_their_process_lives(store: Store):
    def saved(step: int, where: str) -> CheckpointChanged:
        name = f"{where}-{step}"
        return CheckpointChanged(
            checkpoint_id=name, checkpoint_step=step, state="healthy", where=where
        )

    def healthy() -> list[str]:
        views = asked.ask(CheckpointsQuestion(run_id=RUN))
        return [view.checkpoint_id for view in views if view.state == "healthy"]

    first, asked = Writer(), query(store)
    ingest(store, first.events(saved(10, "memory"), saved(10, "disk"), step=10))
    assert {"memory-10", "disk-10"} == set(healthy())
    second = Writer(started=first.time_of(50))
    ingest(store, second.events(saved(20, "memory"), step=20))
    assert ["disk-10", "memory-20"] == healthy()
    ingest(store, second.events(RunEnded(state="failed", reason="no disk"), step=30))
    assert ["disk-10"] == healthy()
    (lost,) = [v for v in asked.ask(CheckpointsQuestion(run_id=RUN)) if v.step == 20]
    assert ("retired", "its process ended") == (lost.state, lost.detail)
