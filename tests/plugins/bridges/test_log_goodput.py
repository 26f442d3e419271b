"""Where the time of a training went by the log of another tool."""

import json
from pathlib import Path

import pytest

from tests.collector.rows import SECOND
from tests.support.cli import vitals
from trainvitals.errors import UsageError
from vitals_plugins.bridges.importers import ColumnChoice, log_goodput, read_history


def log(tmp_path: Path, lines: list[str]) -> Path:
    path = tmp_path / "log.csv"
    path.write_text("\n".join(lines))
    return path


def read(path: Path, **columns: str) -> dict[str, float]:
    sums = log_goodput(read_history(path, ColumnChoice(**columns)))
    assert sum(sums.nanoseconds.values()) == sums.wall_ns
    return {b: round(taken / SECOND, 3) for b, taken in sums.nanoseconds.items() if taken}


def test_a_log_with_times_tells_steps_and_what_was_trained_again(tmp_path: Path):
    """A gap of a minute before step 50, and back to step 80 after step 99."""
    lines, now = ["_step,_timestamp,loss"], 1_700_000_000.0
    for step in [*range(100), *range(80, 120)]:
        now += 61 if step == 50 else 1
        lines.append(f"{step},{now},2.0")
    assert read(log(tmp_path, lines)) == {"productive": 120, "rolled_back": 20, "unknown": 60}


def test_times_may_be_dates(tmp_path: Path):
    lines = ["step,wall_time,loss"]
    lines += [f"{step},2026-01-01T00:00:{step:02}Z,2.0" for step in range(10)]
    assert read(log(tmp_path, lines)) == {"productive": 10}


def test_a_second_column_of_times_and_words_in_one_refuse_no_log(tmp_path: Path):
    """Times are for goodput alone: what reads a log without them must go on doing so."""
    lines = ["step,_timestamp,timestamp,loss", "0,soon,1,2.0", "1,,1,2.0"]
    history = read_history(log(tmp_path, lines), ColumnChoice())
    assert [record.time_seconds for record in history.steps] == [None, None]


def test_a_log_of_every_tenth_step_tells_as_much(tmp_path: Path):
    lines = ["step,timestamp,loss,data_time"]
    lines += [f"{step},{1_700_000_000 + step},2.0,0.5" for step in range(0, 101, 10)]
    assert read(log(tmp_path, lines))["data_wait"] == pytest.approx(50, abs=1)


def test_without_times_the_steps_own_seconds_are_all_there_is(tmp_path: Path):
    lines = ["step,step_time,loss", *(f"{step},2.0,1.0" for step in range(10))]
    assert read(log(tmp_path, lines)) == {"productive": 20}


def test_a_log_without_any_time_is_refused(tmp_path: Path):
    lines = ["step,loss", *(f"{step},1.0" for step in range(10))]
    with pytest.raises(UsageError, match="neither times nor seconds per step"):
        read(log(tmp_path, lines))


def test_the_command_says_what_a_log_does_not_tell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    lines = ["step,timestamp,loss"]
    lines += [f"{step},{1_700_000_000 + step},2.0" for step in range(10)]
    assert vitals("goodput", log(tmp_path, lines)) == 0
    shown = capsys.readouterr().out
    assert "A log does not tell starts" in shown
    assert "failures" not in shown


def test_evaluations_that_a_log_times_are_evaluation(tmp_path: Path):
    """Hugging Face's Trainer logs a step, evaluates for a minute and logs how long it took."""
    lines, now = ["global_step,timestamp,loss,eval_runtime"], 1_700_000_000.0
    for step in range(10, 110, 10):
        now += 10
        lines.append(f"{step},{now},2.0,")
        if step in (30, 60):
            now += 62
            lines.append(f"{step},{now},,60.0")
    assert read(log(tmp_path, lines)) == {"productive": 91, "evaluation": 120, "unknown": 4}


def test_evaluations_count_where_a_log_has_seconds_per_step_alone(tmp_path: Path):
    lines = ["step,step_time,loss,eval_runtime", *(f"{step},2.0,1.0," for step in range(10))]
    lines.insert(5, "4,,,30.0")
    assert read(log(tmp_path, lines)) == {"productive": 20, "evaluation": 30}


def trainer_state(tmp_path: Path, *more: dict[str, object]) -> Path:
    history: list[dict[str, object]] = []
    for step in range(10, 110, 10):
        history.append({"step": step, "loss": 2.0, "learning_rate": 1e-4})
        if step % 50 == 0:
            history.append({"step": step, "eval_loss": 2.1, "eval_runtime": 12.5})
    path = tmp_path / "trainer_state.json"
    path.write_text(json.dumps({"log_history": [*history, *more], "logging_steps": 10}))
    return path


def test_of_a_trainer_state_the_whole_and_its_evaluations_are_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = trainer_state(tmp_path, {"step": 100, "train_runtime": 145.0, "train_loss": 2.0})
    assert read(path) == {"evaluation": 25, "unknown": 120}
    assert vitals("goodput", path) == 0
    shown = capsys.readouterr().out
    assert "no step's time: evaluations apart, what of it went to steps is unknown" in shown
    assert "0.0 %" not in shown
    assert "not known" in shown
    assert vitals("goodput", path, "--format", "json") == 0
    assert json.loads(capsys.readouterr().out)["ratio"] is None


def test_a_trainer_state_of_a_run_that_goes_on_says_where_times_are(tmp_path: Path):
    with pytest.raises(UsageError, match="neither times nor seconds") as error:
        read(trainer_state(tmp_path))
    assert "its TensorBoard or wandb log has times" in error.value.hint


@pytest.mark.parametrize(
    ("times", "words"), [([5], "has one step alone"), ([5, 4, 3], "has times that do not rise")]
)
def test_times_that_tell_no_duration_are_said(tmp_path: Path, times: list[int], words: str):
    lines = ["step,time,loss"]
    lines += [f"{step},{1_700_000_000 + at},2.0" for step, at in enumerate(times)]
    with pytest.raises(UsageError, match=words):
        read(log(tmp_path, lines))
