"""TensorBoard's event files: every event that was written, by its own writers."""

import math
import struct
import sys
from pathlib import Path

import pytest

from trainvitals.errors import MissingDependencyError, UsageError
from vitals_plugins.bridges.importers import ColumnChoice, read_history

EVENTS = "events.out.tfevents.1700000000.host.1.0"


def test_without_tensorboard_it_is_said_what_to_install(tmp_path, monkeypatch):
    for name in ["tensorboard", *(n for n in sys.modules if n.startswith("tensorboard."))]:
        monkeypatch.setitem(sys.modules, name, None)
    version = b"\x09" + struct.pack("<d", 1.7e9) + b"\x1a\x0dbrain.Event:2"
    frame = struct.pack("<QI", len(version), 0) + version + struct.pack("<I", 0)
    (tmp_path / EVENTS).write_bytes(frame)
    for path in (tmp_path, tmp_path / EVENTS):
        with pytest.raises(MissingDependencyError) as caught:
            read_history(path, ColumnChoice())
        assert "pip install 'trainvitals[replay]'" == caught.value.hint


@pytest.fixture
def writer_of():
    """Returns what writes events to a folder as every TensorBoard writer does."""
    reason = "needs tensorboard, which writes and reads the files"
    pytest.importorskip("tensorboard", reason=reason)
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter
    from tensorboard.util.tensor_util import make_tensor_proto

    def write(folder: Path, rows, *, as_tensor: bool = False, suffix: str = "") -> None:
        writer = EventFileWriter(str(folder), filename_suffix=suffix)
        for step, values in rows:
            for tag, value in values.items():
                said = (
                    {"tensor": make_tensor_proto(value)} if as_tensor else {"simple_value": value}
                )
                summary = Summary(value=[Summary.Value(tag=tag, **said)])
                writer.add_event(Event(step=step, summary=summary))
        writer.close()

    return write


ROWS = [
    (n, {"train/loss": 3.0 / (n + 1), "train/learning_rate": 0.5, "train/grad_norm": 1.0})
    for n in range(30_000)
]


@pytest.mark.parametrize("as_tensor", [False, True])
def test_every_event_is_there_however_many_there_are(tmp_path, writer_of, as_tensor):
    rows = ROWS if not as_tensor else ROWS[:500]
    writer_of(tmp_path, rows, as_tensor=as_tensor)
    history = read_history(tmp_path, ColumnChoice())
    assert [step for step, _ in rows] == [s.step for s in history.steps]
    assert (3.0, 1.0, 0.5) == (
        history.steps[0].loss, history.steps[0].grad_norm, history.steps[0].learning_rate,
    )  # fmt: skip
    assert [] == history.notes


def test_nan_is_itself_and_evaluations_are_no_records(tmp_path, writer_of):
    rows = [
        (10, {"loss": 1.5}),
        (10, {"eval/loss": 9.0}),
        (20, {"loss": math.nan}),
        (20, {"lr": 1.0}),
    ]
    writer_of(tmp_path, rows)
    history = read_history(tmp_path, ColumnChoice())
    assert [(10, "1.5"), (20, "nan")] == [(s.step, repr(s.loss)) for s in history.steps]
    assert 1.0 == history.steps[1].learning_rate


def test_tags_written_one_after_another_are_joined_by_step(tmp_path, writer_of):
    rows = [(n, {"loss": 2.0}) for n in range(50)] + [(n, {"grad_norm": 1.0}) for n in range(50)]
    writer_of(tmp_path, rows)
    history = read_history(tmp_path, ColumnChoice())
    assert list(range(50)) == [s.step for s in history.steps]
    assert {1.0} == {s.grad_norm for s in history.steps}


def test_a_resumed_run_keeps_the_steps_that_were_written_twice(tmp_path, writer_of):
    writer_of(tmp_path, ROWS[:100])
    first = next(tmp_path.glob("*tfevents*"))
    first.rename(tmp_path / "events.out.tfevents.1000000000.host")
    writer_of(tmp_path, ROWS[60:90])
    history = read_history(tmp_path, ColumnChoice())
    assert [*range(100), *range(60, 90)] == [s.step for s in history.steps]
    assert ["2 event files were read as one log, in the order of their names"] == history.notes


def test_a_torn_end_keeps_what_is_whole_and_is_said(tmp_path, writer_of):
    writer_of(tmp_path, ROWS[:100])
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-5])
    history = read_history(path, ColumnChoice())
    assert 100 == len(history.steps)  # the last event torn is the last tag's
    assert "damaged or not completely written yet" in history.notes[0]


def test_two_runs_below_a_folder_are_one_too_many(tmp_path, writer_of):
    for name in ("a", "b"):
        writer_of(tmp_path / "runs" / name, ROWS[:20])
    with pytest.raises(UsageError, match="holds 2 logs"):
        read_history(tmp_path, ColumnChoice())
    assert 20 == len(read_history(tmp_path / "runs" / "a", ColumnChoice()).steps)


def test_a_tag_that_fits_twice_must_be_named(tmp_path, writer_of):
    writer_of(tmp_path, [(n, {"loss": 1.0, "Loss": 2.0}) for n in range(5)])
    with pytest.raises(UsageError, match="2 columns may be the loss"):
        read_history(tmp_path, ColumnChoice())
    assert 2.0 == read_history(tmp_path, ColumnChoice(loss="Loss")).steps[0].loss


def test_the_step_is_the_events_own(tmp_path, writer_of):
    writer_of(tmp_path, [(n, {"loss": 1.0, "global_step": 9.0, "step": 8.0}) for n in range(5)])
    assert list(range(5)) == [s.step for s in read_history(tmp_path, ColumnChoice()).steps]
    with pytest.raises(UsageError, match="carries its own step"):
        read_history(tmp_path, ColumnChoice(step="global_step"))
