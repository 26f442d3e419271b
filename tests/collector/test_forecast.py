"""A stored run's forecast, asked of a store, a folder and a collector."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.collector.rows import OTHER_RUN, RUN, SECOND, START, Writer
from tests.support.cli import leave, vitals
from tests.support.queries import query
from trainvitals.errors import UsageError
from trainvitals.records import AttemptStarted, RunEnded, RunInfo, RunStarted
from trainvitals.rows import Value
from trainvitals.views import ForecastQuestion, ForecastView
from vitals_collector.ingest.ingest import ingest
from vitals_collector.queries.query import within
from vitals_collector.storage.store import Store

TOTAL = 2_000


def loss_at(steps: range, *, slower: float = 1.0) -> list[Value]:
    return [float(4.0 * ((step + 1.0) / slower) ** -0.1) for step in steps]


def train(
    store: Store, num: int, *, run: str = RUN, slower: float = 1.0, tokens: int = 1_000
) -> Writer:
    """Store a run of a step a second that plans ``TOTAL`` steps."""
    writer = Writer(run=run)
    info = RunInfo(name=f"run {slower:g}", total_steps=TOTAL)
    ingest(store, writer.events(RunStarted(info=info)))
    counted: list[Value] = [tokens * (step + 1) for step in range(num)]
    losses = loss_at(range(num), slower=slower)
    ingest(store, writer.steps(range(num), loss=losses, tokens_seen=counted))
    return writer


def ask(store: Store, *, at: int, **asked: object) -> ForecastView:
    return query(store, at).ask(ForecastQuestion(run_id=RUN, **asked))  # type: ignore[arg-type]


def test_a_run_is_told_its_end_and_its_final_loss(store: Store):
    train(store, 1_000)
    view = ask(store, at=1_000)
    assert view.total_steps == TOTAL, "as the run said it"
    assert view.finish_unix_ns == pytest.approx(START + TOTAL * SECOND, abs=20 * SECOND)
    assert view.final_loss == pytest.approx(4.0 * (0.975 * TOTAL) ** -0.1, rel=0.01)
    assert "step 1,000 of 2,000" in view.end_text() and "in 16 min" in view.end_text()
    assert view.loss_text().startswith("1.87")


def test_a_planned_number_that_is_asked_with_counts_before_the_runs_own(store: Store):
    train(store, 1_000)
    assert ask(store, at=1_000, total_steps=4_000).finish_unix_ns == pytest.approx(
        START + 4_000 * SECOND, abs=40 * SECOND
    )


def test_without_a_plan_or_a_run_that_goes_on_that_is_said(store: Store):
    writer = Writer()
    ingest(store, writer.steps(range(50), loss=loss_at(range(50))))
    view = ask(store, at=50)
    assert "watch(total_steps=...)" in view.end_text()
    assert "watch(total_steps=...)" in view.loss_text()
    ingest(store, writer.events(RunEnded(state="halted"), step=50))
    view = ask(store, at=51, total_steps=100)
    assert view.no_finish == "the run has stopped (halted)"
    assert ask(store, at=51, total_steps=50).end_text() == "all 50 planned steps are done"
    with pytest.raises(UsageError, match="at least 1"):
        ask(store, at=51, total_steps=-1)


def test_steps_that_a_rollback_discarded_cost_time_and_are_no_part_of_the_curve(store: Store):
    writer = train(store, 600)
    ingest(store, writer.events(AttemptStarted(id=1, parent=None, fork_step=0, reason="start")))
    again = AttemptStarted(id=2, parent=1, fork_step=500, reason="rollback")
    writer.started += 100 * SECOND
    ingest(store, writer.events(again, attempt=2, step=500))
    steps = range(500, 1_000)
    ingest(store, writer.steps(steps, attempt=2, loss=loss_at(steps)))
    view = ask(store, at=1_100)
    assert view.last_step == 999
    assert view.step_ratio == pytest.approx(1 / 1.1, abs=0.01)
    assert view.finish_unix_ns == pytest.approx(START + 2_100 * SECOND, abs=5 * SECOND)


def test_a_run_is_held_against_another_at_equal_tokens(store: Store):
    train(store, 1_000, slower=1.25, tokens=2_000)
    train(store, 2_000, run=OTHER_RUN, slower=2.0, tokens=2_000)
    view = ask(store, at=1_000, other=OTHER_RUN)
    assert view.along == "tokens"
    assert view.behind_steps == pytest.approx(-600, rel=0.1), "the other needs 1.6 times as many"
    assert view.behind == pytest.approx(2_000 * view.behind_steps)
    assert "ahead of run 2 by 6" in view.comparison_text()
    limited = within(query(store, 1_000), frozenset({RUN}))
    with pytest.raises(UsageError, match="there is no run"):
        limited.ask(ForecastQuestion(run_id=RUN, other=OTHER_RUN))
    with pytest.raises(UsageError, match="behind itself"):
        ask(store, at=1_000, other=RUN)
    with pytest.raises(UsageError, match="there is no run"):
        ask(store, at=1_000, other="01JD0000000000000000000009")


def test_runs_without_tokens_are_held_against_each_other_at_equal_steps(store: Store):
    for run, slower in ((RUN, 1.25), (OTHER_RUN, 1.0)):
        losses = loss_at(range(1_000), slower=slower)
        ingest(store, Writer(run=run).steps(range(1_000), loss=losses))
    view = ask(store, at=1_000, other=OTHER_RUN)
    assert view.along == "step"
    assert view.behind_steps == pytest.approx(200, rel=0.1)
    assert view.comparison_text().startswith(f"behind {OTHER_RUN} by ")


def test_a_folder_is_asked_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    writer = Writer()
    num = 1_000
    leave(
        tmp_path,
        writer.events(RunStarted(info=RunInfo(name="tiny"))),
        writer.steps(range(num), loss=loss_at(range(num))),
        writer.events(RunEnded(state="interrupted"), step=num),
    )
    assert 0 == vitals("forecast", tmp_path, "--total-steps", TOTAL, "--format", "json")
    view = json.loads(capsys.readouterr().out)
    assert view["final_loss"] == pytest.approx(4.0 * (0.975 * TOTAL) ** -0.1, rel=0.01)
    assert 0 == vitals("forecast", "--dir", tmp_path, "--total-steps", TOTAL)
    shown = capsys.readouterr().out
    assert "final loss" in shown and "the run has stopped (interrupted)" in shown
    assert np.isfinite(view["final_loss_low"])
