"""CSV files as loggers and people write them."""

import gzip
import math
import os
import random
from pathlib import Path

import pytest

from trainvitals.errors import FormatError, StorageError, UsageError, VitalsError
from vitals_plugins.bridges.importers import ColumnChoice, ImportedLog, read_history


def read(tmp_path: Path, content: str | bytes, **wanted: str) -> ImportedLog:
    path = tmp_path / "log.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_history(path, ColumnChoice(**wanted))


def values(history: ImportedLog) -> list[tuple[object, ...]]:
    """Return the records without their rows, as text: nan is not equal to itself."""
    return [(s.step, repr(s.loss), repr(s.grad_norm), repr(s.learning_rate)) for s in history.steps]


PLAIN = "step,loss,grad_norm,lr\n0,3.5,1.25,0.001\n1,nan,inf,0.002\n2,,-Infinity,\n3,2.5\n"
SAID = [
    (0, "3.5", "1.25", "0.001"),
    (1, "nan", "inf", "0.002"),
    (2, "None", "-inf", "None"),
    (3, "2.5", "None", "None"),
]


def test_missing_is_missing_and_nan_is_itself(tmp_path):
    history = read(tmp_path, PLAIN)
    assert SAID == values(history)
    assert ("CSV", []) == (history.form, history.notes)


@pytest.mark.parametrize("separator", [";", "\t", "|"])
def test_other_separators_are_recognised(tmp_path, separator):
    assert SAID == values(read(tmp_path, PLAIN.replace(",", separator)))


@pytest.mark.parametrize(
    "content",
    [
        PLAIN.replace("\n", "\r\n").encode(),
        b"\xef\xbb\xbf" + PLAIN.encode(),
        gzip.compress(PLAIN.encode()),
        gzip.compress(b"\xef\xbb\xbf" + PLAIN.replace("\n", "\r\n").encode()),
        ("\n\n" + PLAIN.replace("\n1,", "\n\n1,")).encode(),
        PLAIN.encode() + b"\0" * 500,
        PLAIN.removesuffix("\n").encode(),
    ],
    ids=["crlf", "bom", "gz", "gz-bom-crlf", "blank-lines", "nul-tail", "no-last-newline"],
)
def test_the_same_numbers_come_out_however_the_file_is_written(tmp_path, content):
    assert SAID == values(read(tmp_path, content))


@pytest.mark.parametrize(
    ("head", "chosen"),
    [
        ("iteration,train_loss,gradient_norm,learning_rate", "train_loss"),
        ("global_step,train/loss,train/grad_norm,train/learning_rate", "train/loss"),
        ("Iter,Training Loss,Grad-Norm,LR", "Training Loss"),
        (' step , loss ,"grad norm",lr', "loss"),
        ("trainer/global_step,train_loss_step,grad_norm,lr", "train_loss_step"),
    ],
)
def test_the_usual_names_are_known(tmp_path, head, chosen):
    history = read(tmp_path, f"{head}\n7,3.5,1.25,0.001\n")
    assert [(7, "3.5", "1.25", "0.001")] == values(history)
    assert chosen == history.columns["loss"]


def test_columns_can_be_named_and_others_are_left_alone(tmp_path):
    content = "epoch,n,objective,norm\none,4,1.5,2.5\ntwo,8,1.25,x\n"
    with pytest.raises(FormatError, match=r"row 1: the gradient norm is 'x'"):
        read(tmp_path, content, step="n", loss="objective", grad_norm="norm")
    history = read(tmp_path, content, step="n", loss="objective")
    assert [(4, "1.5"), (8, "1.25")] == [row[:2] for row in values(history)]


def test_a_row_keeps_its_number_when_others_say_nothing(tmp_path):
    content = "step,loss\n0,1.5\n1,\nstep,loss\n,1.5\n2,1.25\n"
    history = read(tmp_path, content)
    assert [(0, 0), (4, 2)] == [(s.row, s.step) for s in history.steps]
    assert [
        "skipped rows that repeat the head: 1",
        "skipped rows without a step: 1",
    ] == history.notes


def test_steps_may_be_written_as_floats_and_go_back(tmp_path):
    history = read(tmp_path, "step,loss\n1.0,2\n1e3,2\n500.0,2\n-1,2\n")
    assert [1, 1000, 500, -1] == [s.step for s in history.steps]


def test_a_value_beyond_every_float_is_infinite(tmp_path):
    (found,) = read(tmp_path, "step,loss\n0," + "9" * 5000 + "\n").steps
    assert math.inf == found.loss


@pytest.mark.parametrize(
    ("content", "error", "words"),
    [
        ("", FormatError, "is empty; looked for a CSV file"),
        ("\n\n  \n", FormatError, "is empty; a CSV file begins with the names"),
        ("step,loss\n", UsageError, "nothing to replay"),
        ("step,loss\n,\n", UsageError, "nothing to replay"),
        ("a,b\n1,2\n", UsageError, "no column is the step; looked for global_step"),
        ("step,b\n1,2\n", UsageError, "no column is the loss or gradient norm"),
        ("0,3.5\n1,3.4\n", UsageError, "has no header"),
        ("step,loss,loss\n1,2,3\n", UsageError, "2 columns may be the loss: 'loss', 'loss'"),
        ("step,train_loss,train/loss\n1,2,3\n", UsageError, "2 columns may be the loss"),
        ("step,loss\n1,abc\n", FormatError, "row 0: the loss is 'abc'; it must be a number"),
        ("step,loss\n1.5,2\n", FormatError, "the step is '1.5'; it must be a whole number"),
        ("step,loss\ninf,2\n", FormatError, "the step is 'inf'"),
        ("step,loss\n" + "9" * 30 + ",2\n", FormatError, "it must be a whole number"),
        ('step,loss\n1,"' + "x" * 200_000 + '"\n', FormatError, "is not CSV: field larger"),
        (b"step,loss\n1,\xff\xfe\n", FormatError, "is not UTF-8 text"),
        (bytes(range(256)) * 8, FormatError, "looked for a CSV file with a head"),
        (b"\x89PNG\r\n\x1a\n" + b"\0" * 90, FormatError, "looked for a CSV file with a head"),
        (gzip.compress(PLAIN.encode(), mtime=0)[:-12], FormatError, "compressed file is damaged"),
        (b"\x1f\x8b" + b"junk" * 9, FormatError, "compressed file is damaged"),
    ],
)
def test_what_cannot_be_read_is_said_in_words(tmp_path, content, error, words):
    with pytest.raises(error) as caught:
        read(tmp_path, content)
    assert words in str(caught.value)


def test_a_small_file_that_unpacks_to_a_huge_one_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("vitals_plugins.bridges.importers.files.MIN_UNPACKED_BYTES", 1 << 16)
    rows = "".join(f"{step},1.0\n" for step in range(100))
    read(tmp_path, gzip.compress(b"step,loss\n" + rows.encode()))
    bomb = gzip.compress(b"step,loss\n" + b"1,1.0\n" * 100_000)
    with pytest.raises(FormatError, match="unpacks to more than 200 times its size") as caught:
        read(tmp_path, bomb)
    assert "gunzip" in caught.value.hint


def test_a_named_column_that_is_not_there_names_the_nearest(tmp_path):
    with pytest.raises(UsageError) as caught:
        read(tmp_path, PLAIN, grad_norm="grad_nrm")
    assert "--grad-norm is 'grad_nrm'; there is no such column" in str(caught.value)
    assert "did you mean 'grad_norm'?" in caught.value.hint


def test_a_file_that_cannot_be_read_is_a_storage_error(tmp_path):
    with pytest.raises(StorageError, match="cannot be read"):
        read_history(tmp_path / "absent.csv", ColumnChoice())


def test_a_pipe_is_refused_in_words(tmp_path):
    os.mkfifo(tmp_path / "pipe.csv")
    with pytest.raises(UsageError, match="neither a file nor a folder"):
        read_history(tmp_path / "pipe.csv", ColumnChoice())


@pytest.mark.parametrize("seed", range(40))
def test_junk_of_any_kind_is_our_error_or_a_history(tmp_path, seed):
    rng = random.Random(seed)
    words = ["step", "loss", ",", "\n", "\r", '"', "nan", "1", "-3", "1e9", "\0", "\xff", ";", "{"]
    body = "step,loss\n" * (seed % 2) + "".join(rng.choices(words, k=200))
    try:
        history = read(tmp_path, body.encode("latin-1" if seed % 3 else "utf-8"))
    except VitalsError as error:
        assert error.text
    else:
        assert history.steps
