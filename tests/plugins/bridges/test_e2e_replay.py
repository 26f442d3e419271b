"""A real training's ledger comes out again: exactly from the store, nearly so from a CSV of it."""

import contextlib
import csv
from pathlib import Path

import pytest

from tests.trainer_hooks.torchrun import reader_of, run_id_of, train
from trainvitals.cli.main import main
from trainvitals.detect.registry import KINDS
from trainvitals.judged_log import JudgedStep, export_judged_steps, judge_history
from trainvitals.testing.faults import FaultPlan
from trainvitals.views import FindingsQuestion
from vitals_collector.ingest.folder import FolderIngest
from vitals_collector.report.replay import Replay, replay
from vitals_collector.storage.store import open_store
from vitals_plugins.bridges.importers import ColumnChoice, read_history

pytestmark = [pytest.mark.dist, pytest.mark.slow]

NAN_STEP, POISON_FIRST, POISON_LAST, BROKEN_STEP = 70, 140, 150, 195


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Two ranks in heal mode: a NaN loss, poisoned data, NaN in parameters: a rollback."""
    faults = FaultPlan().nan_loss_at(rank=1, step=NAN_STEP)
    faults = faults.poison_batches(first=POISON_FIRST, last=POISON_LAST)
    faults = faults.nan_parameters_at(rank=1, step=BROKEN_STEP)
    done = train(tmp_path_factory.mktemp("healed"), steps=220, mode="heal", faults=faults)
    assert 0 == done.exit_code, done.output
    return done


@pytest.fixture(scope="module")
def replayed(trained) -> Replay:
    with contextlib.closing(open_store("sqlite://")) as store:
        FolderIngest(store, [trained.runs]).poll()
        return replay(store, run_id_of(trained))


@pytest.fixture(scope="module")
def from_csv(replayed: Replay, tmp_path_factory) -> list[JudgedStep]:
    """The same run's numbers as a person would export them, judged as anybody's log."""
    path: Path = tmp_path_factory.mktemp("exported") / "run.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", "loss", "grad_norm", "lr"])
        writer.writerows([r.step, r.loss, r.grad_norm, r.learning_rate] for r in replayed.records)
    return list(judge_history(read_history(path, ColumnChoice()).steps))


def test_the_stored_run_is_reproduced_to_the_last_digit(trained, replayed: Replay):
    assert [] == replayed.differences()
    broken = [(BROKEN_STEP, "nonfinite"), (BROKEN_STEP + 1, "nonfinite")]
    assert [(NAN_STEP, "nonfinite"), *broken, (BROKEN_STEP + 2, "nonfinite_params")] == [
        (d.step, d.rule) for d in replayed.decisions
    ]
    assert "rollback" == replayed.decisions[-1].action
    assert repr(list(replayed.recorded)) == repr(list(replayed.decisions))
    with reader_of(trained) as reader:
        views = reader.ask(FindingsQuestion(run_id=run_id_of(trained)))
    # A reader looks at the speed too, and a busy machine changes it; a replay judges the numbers.
    found = [each.finding for each in views if KINDS[each.finding.kind].domain != "speed"]
    assert repr(found) == repr([f for j in replayed.judgements for f in j.findings])


def test_the_command_says_so(trained, capsys):
    with pytest.raises(SystemExit) as end:
        main(["replay", str(trained.runs)])
    assert not end.value.code
    assert "all as recorded" in capsys.readouterr().err


def test_until_the_rollback_a_csv_gives_the_same_limits_findings_and_actions(
    replayed: Replay, from_csv: list[JudgedStep]
):
    """What a CSV cannot say is who was to blame, and what became of the parameters."""
    stored = replayed.judged()
    last = next(j.row for j in stored if (d := j.judgement.decision) and d.action == "rollback")
    ours, theirs = from_csv[:last], stored[:last]
    assert [(j.record.loss_limit, j.record.grad_norm_limit) for j in theirs] == [
        (j.record.loss_limit, j.record.grad_norm_limit) for j in ours
    ]
    assert [j.record.skipped for j in theirs] == [j.record.skipped for j in ours]
    live, again = export_judged_steps(theirs), export_judged_steps(ours)
    for one, other in zip(live["findings"], again["findings"], strict=True):
        one["reason"] = one["reason"].removesuffix(" on rank 1")
        assert one == other
    assert [(d["row"], d["action"], d["rule"], d["cause"]) for d in live["decisions"]] == [
        (d["row"], d["action"], d["rule"], d["cause"]) for d in again["decisions"]
    ]


def test_after_the_rollback_only_the_step_in_flight_is_judged_differently(
    replayed: Replay, from_csv: list[JudgedStep]
):
    """Live it was thrown away with its branch. The log does not tell, so it is judged."""
    stored = replayed.judged()
    back = next(j.row for j in stored if (d := j.judgement.decision) and d.action == "rollback")
    fork = next(j.row for j in stored if j.row > back and j.record.step < stored[back].record.step)
    assert {f["row"] for f in export_judged_steps(stored[back + 1 :])["findings"]} == set()
    assert {f["row"] for f in export_judged_steps(from_csv[back + 1 :])["findings"]} <= set(
        range(back, fork)
    )
    assert from_csv[fork].record.attempt > from_csv[fork - 1].record.attempt
