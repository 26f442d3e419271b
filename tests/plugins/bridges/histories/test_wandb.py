"""wandb's offline file, written by its published format and, where it is installed, by wandb."""

import math
import subprocess
import sys
from pathlib import Path

import pytest

from tests.plugins.bridges.wandb_files import call, field, framed
from trainvitals.errors import FormatError, UsageError
from vitals_plugins.bridges.importers import ColumnChoice, ImportedLog, read_history
from vitals_plugins.bridges.importers.wandb_file import (
    BLOCK,
)


def write(tmp_path: Path, raw: bytes) -> Path:
    folder = tmp_path / "wandb" / "offline-run-20260101_000000-abc"
    folder.mkdir(parents=True)
    path = folder / "run-abc.wandb"
    path.write_bytes(raw)
    (tmp_path / "wandb" / "latest-run").symlink_to(folder)
    return path


def read(tmp_path: Path, records: list[bytes], **wanted: str) -> ImportedLog:
    return read_history(write(tmp_path, framed(records)), ColumnChoice(**wanted))


CALLS = [
    call({"loss": 3.5, "grad_norm": 1, "lr": 0.001, "note": "x", "_step": 0}),
    field(17, b"a run"),
    call({"val_acc": 0.5, "_step": 1}),
    call({"loss": "NaN", "grad_norm": math.inf, "_step": 2}),
]


def test_what_was_logged_is_read_without_wandb(tmp_path):
    history = read(tmp_path, CALLS)
    assert [(0, 0, "3.5", "1.0"), (2, 2, "nan", "inf")] == [
        (s.row, s.step, repr(s.loss), repr(s.grad_norm)) for s in history.steps
    ]
    assert ("wandb", "_step", []) == (history.form, history.columns["step"], history.notes)


@pytest.mark.parametrize("folder", [".", "wandb", "wandb/offline-run-20260101_000000-abc"])
def test_each_folder_above_the_file_will_do(tmp_path, folder):
    write(tmp_path, framed(CALLS))
    assert 2 == len(read_history(tmp_path / folder, ColumnChoice()).steps)


def test_a_step_of_the_training_goes_before_wandbs_own(tmp_path):
    calls = [call({"train/loss": 2.0, "train/global_step": n * 10, "_step": n}) for n in range(3)]
    assert [0, 10, 20] == [s.step for s in read(tmp_path, calls).steps]


def test_wandbs_own_step_can_be_asked_for(tmp_path):
    calls = [call({"loss": 2.0, "global_step": n * 10, "_step": n}) for n in range(3)]
    assert [0, 1, 2] == [s.step for s in read(tmp_path, calls, step="_step").steps]


def test_the_step_of_the_message_counts_where_no_item_says_it(tmp_path):
    assert [4, 5] == [
        s.step for s in read(tmp_path, [call({"loss": 2}, step=n) for n in (4, 5)]).steps
    ]


def test_typed_values_of_newer_versions_are_read(tmp_path):
    items = field(1, field(2, b"loss") + field(6, 2.5)) + field(1, field(2, b"step") + field(5, 14))
    nested = field(1, field(2, b"grad") + field(2, b"norm") + field(7, b"Infinity"))
    (found,) = read(tmp_path, [field(2, items + nested)]).steps
    assert (7, 2.5, math.inf) == (found.step, found.loss, found.grad_norm)


def test_records_longer_than_a_block_are_put_together(tmp_path):
    calls = [
        call({"loss": float(n), "_step": n, "text": "x" * length})
        for n, length in enumerate((10, BLOCK - 100, 3 * BLOCK, 5, BLOCK - 60, 7))
    ]
    assert list(range(6)) == [s.loss for s in read(tmp_path, calls).steps]


def test_a_torn_end_keeps_what_is_whole(tmp_path):
    raw = framed([call({"loss": 1.0, "_step": n}) for n in range(10)])
    history = read_history(write(tmp_path, raw[:-5]), ColumnChoice())
    assert 9 == len(history.steps)
    assert "1 damaged sections of the file were skipped" in history.notes[0]


def test_a_damaged_block_costs_its_rows_and_is_said(tmp_path):
    calls = [call({"loss": 1.0, "_step": n, "text": "x" * 1000}) for n in range(200)]
    raw = bytearray(framed(calls))
    raw[BLOCK + 500] ^= 0xFF
    history = read_history(write(tmp_path, bytes(raw)), ColumnChoice())
    steps = [s.step for s in history.steps]
    assert steps == sorted(set(steps))
    assert 160 < len(steps) < 170
    assert history.notes


@pytest.mark.parametrize("cut", [b"\x0a\x7f", b"\xff" * 12, b"\x0b", b"\x12\x03\x0a\x09x"])
def test_a_message_that_is_none_is_our_error(tmp_path, cut):
    with pytest.raises(FormatError, match="of a message"):
        read(tmp_path, [*CALLS, cut])


def test_a_file_with_no_head_of_wandbs_or_no_loss_is_an_error(tmp_path):
    with pytest.raises(FormatError, match="a file of wandb's with"):
        read_history(write(tmp_path, b":W&B junk"), ColumnChoice())
    with pytest.raises(UsageError, match="no column is the step"):
        read(tmp_path / "b", [field(17, b"a run")])


def test_a_file_that_wandb_itself_wrote_is_read(tmp_path):
    pytest.importorskip("wandb", reason="needs wandb, which writes the file")
    program = """
import wandb
run = wandb.init(project="p", mode="offline", dir=".")
for i in range(200):
    loss = float("nan") if i == 150 else 3.0 / (i + 1)
    run.log({"train/loss": loss, "train/grad_norm": 1.0, "train/global_step": 2 * i, "n": {"a": i}})
run.finish()
"""
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, timeout=120)
    history = read_history(tmp_path, ColumnChoice())
    assert [2 * i for i in range(200)] == [s.step for s in history.steps]
    assert [150] == [s.row for s in history.steps if s.loss is not None and math.isnan(s.loss)]
