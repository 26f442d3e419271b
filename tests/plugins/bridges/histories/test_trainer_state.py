"""The log in Hugging Face's trainer_state.json."""

import json
import math
from pathlib import Path

import pytest

from trainvitals.errors import FormatError, UsageError
from vitals_plugins.bridges.importers import ColumnChoice, read_history

LOG = [
    {"epoch": 0.1, "grad_norm": 1.5, "learning_rate": 5e-5, "loss": 3.25, "step": 10},
    {"epoch": 0.2, "grad_norm": math.nan, "learning_rate": 4e-5, "loss": 3.0, "step": 20},
    {"epoch": 0.2, "eval_loss": 2.9, "eval_runtime": 1.0, "step": 20},
    {"epoch": 0.3, "grad_norm": math.inf, "learning_rate": 3e-5, "loss": math.nan, "step": 30},
    {"epoch": 0.3, "train_loss": 3.1, "train_runtime": 9.0, "total_flos": 10**400, "step": 30},
]


def state(folder: Path, log: object = LOG, **more: object) -> Path:
    """Write the file as Trainer does."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "trainer_state.json"
    path.write_text(json.dumps({"log_history": log, "global_step": 30, **more}, indent=2))
    return path


def test_evaluations_and_the_summary_are_no_records_and_nan_is_itself(tmp_path):
    history = read_history(state(tmp_path), ColumnChoice())
    assert [0, 1, 3] == [s.row for s in history.steps]
    assert [10, 20, 30] == [s.step for s in history.steps]
    assert ["1.5", "nan", "inf"] == [repr(s.grad_norm) for s in history.steps]
    assert ["3.25", "3.0", "nan"] == [repr(s.loss) for s in history.steps]
    assert 5e-5 == history.steps[0].learning_rate


def test_the_folder_of_a_checkpoint_will_do(tmp_path):
    state(tmp_path / "checkpoint-30")
    assert 3 == len(read_history(tmp_path / "checkpoint-30", ColumnChoice()).steps)


def test_of_trainers_output_folder_the_last_checkpoint_is_read(tmp_path):
    state(tmp_path / "checkpoint-9", LOG[:1])
    state(tmp_path / "checkpoint-30")
    assert 3 == len(read_history(tmp_path, ColumnChoice()).steps)


def test_what_trainer_does_to_a_loss_is_said(tmp_path):
    notes = read_history(state(tmp_path, logging_steps=10), ColumnChoice()).notes
    assert "Trainer logs the mean loss of 10 steps, which flattens a spike of one step" == notes[0]
    assert "logging_nan_inf_filter" in notes[1]


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("{", FormatError, "is not JSON"),
        ("[" * 100_000, FormatError, "is not JSON"),
        ('{"log_history": ' + "9" * 5000 + "}", FormatError, "is not JSON"),
        ("[1, 2]", FormatError, "has no list of objects 'log_history'"),
        ('{"log_history": 3}', FormatError, "has no list of objects"),
        ('{"log_history": [3]}', FormatError, "has no list of objects"),
        ('{"log_history": []}', UsageError, "no column is the step"),
        ('{"log_history": [{"step": 1, "loss": [2]}]}', FormatError, "the loss is [2]"),
        ('{"log_history": [{"step": true, "loss": 2}]}', FormatError, "the step is True"),
    ],
)
def test_what_cannot_be_read_is_said_in_words(tmp_path, text, error, words):
    path = tmp_path / "trainer_state.json"
    path.write_text(text)
    with pytest.raises(error) as caught:
        read_history(path, ColumnChoice())
    assert words in str(caught.value)


def test_a_file_that_trainer_itself_wrote_is_read(tmp_path):
    reason = "needs transformers, which writes the file"
    trainer_callback = pytest.importorskip("transformers.trainer_callback", reason=reason)
    written = trainer_callback.TrainerState(log_history=LOG[:4], logging_steps=10, global_step=30)
    path = tmp_path / "trainer_state.json"
    written.save_to_json(str(path))
    history = read_history(path, ColumnChoice())
    assert ["1.5", "nan", "inf"] == [repr(s.grad_norm) for s in history.steps]
