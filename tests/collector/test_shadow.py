"""What only was observed is shown with whether it would have been right."""

from pathlib import Path

import pytest

from tests.collector.rows import RUN, Writer
from tests.support.cli import leave, vitals
from tests.support.queries import decision, query
from trainvitals.records import AttemptStarted, DecisionMade, RunInfo, RunStarted
from trainvitals.views import DecisionsQuestion
from vitals_collector.ingest.ingest import ingest
from vitals_collector.storage.store import Store


def observed(seq: int, step: int, cause: str = "loss_outlier") -> DecisionMade:
    return DecisionMade(
        decision=decision(
            ledger_seq=seq, step=step, mode="observe", acted=False, cause=cause, rule="loss_spike"
        )
    )


def parts() -> list[bytes]:
    """Return a run that spikes at 100 and comes back, and at 200 does not."""
    rank, losses = Writer(), [2.0 + 0.001 * (step % 7) for step in range(260)]
    losses[100] = 9.0
    losses[200:] = [5.0] * 60
    return [
        rank.events(RunStarted(info=RunInfo(name="tiny", mode="observe"))),
        rank.events(AttemptStarted(id=1, parent=None, fork_step=0, reason="start")),
        rank.steps(range(260), loss=losses),
        rank.events(observed(1, 100), step=100),
        rank.events(observed(2, 200), step=200),
        rank.events(observed(3, 258), step=258),
    ]


def test_the_ledger_says_what_would_have_been_needed(store: Store):
    for part in parts():
        ingest(store, part)
    assert ["unneeded", "needed", "open"] == [
        v.hindsight for v in query(store).ask(DecisionsQuestion(run_id=RUN))
    ]


def test_what_was_carried_out_has_no_hindsight(store: Store):
    rank = Writer()
    ingest(store, rank.events(RunStarted(info=RunInfo(name="tiny"))))
    ingest(store, rank.steps(range(50), loss=2.0))
    ingest(store, rank.events(DecisionMade(decision=decision())))
    assert [""] == [v.hindsight for v in query(store).ask(DecisionsQuestion(run_id=RUN))]


def test_show_counts_it_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    leave(tmp_path / "runs", *parts())
    assert 0 == vitals("show", tmp_path / "runs")
    said = " ".join(capsys.readouterr().out.split())
    assert "1 of 2 would have been needed, 1 was not; 1 are undecided" in said
