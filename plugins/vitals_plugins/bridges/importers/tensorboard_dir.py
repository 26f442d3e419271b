"""Reads TensorBoard's event files through TensorBoard's own loader, without sampling."""

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trainvitals.errors import FormatError, MissingDependencyError, UsageError
from vitals_plugins.bridges.importers.columns import (
    ColumnChoice,
    ImportedLog,
    ImportedRows,
    choose_columns,
    find_scalars,
)
from vitals_plugins.bridges.importers.files import translate_read_errors

FIRST_EVENT = b"brain.Event:"
"""In the first event of every event file; before it are TFRecord's frame and a time."""

_FRAME_BYTES = 16
"""Of TFRecord, around each event: its length and two checksums."""

_WALL_TIME = "\0wall_time"
"""A column name that no tag can have."""

Value = tuple[str, int, float, float]
"""Tag, step, value, and when it was written."""


def read_tensorboard(
    path: Path, files: Sequence[Path], column_options: ColumnChoice
) -> ImportedLog:
    """Read the log in TensorBoard's files; its rows are the written steps, in the files' order.

    Raises:
        MissingDependencyError: TensorBoard is not installed.
        FormatError: an event is damaged.
        UsageError: no tag is a loss or a gradient norm, a name fits several, or a step was named.
    """
    if column_options.step not in (None, "step"):
        raise UsageError(
            f"--step is {column_options.step!r}; each of TensorBoard's events carries its own step",
            hint="leave --step out",
        )
    notes: list[str] = []
    tags: dict[str, bool] = {}
    """Every tag, and whether its values are wanted."""
    values: list[Value] = []
    for file in sorted(files):
        for value in _read_scalars(file, notes):
            if value[0] not in tags:
                tags[value[0]] = column_options.may_match(value[0])
            if tags[value[0]]:
                values.append(value)
    columns = choose_columns(
        ["step", *(tag for tag in tags if tag != "step")], column_options, str(path)
    )
    columns["step"], columns["time"] = "step", _WALL_TIME  # of each event
    scalars = find_scalars(tags, column_options, str(path))
    rows = ImportedRows(path, "row", columns, scalars)
    tags_read = {*columns.values(), *scalars} - {"step", _WALL_TIME}
    for row, cells in enumerate(_rows_by_step(values, tags_read)):
        rows.add_named(row, cells)
    columns["time"] = "wall_time"  # the displayed name
    if len(files) > 1:
        notes.append(f"{len(files)} event files were read as one log, in the order of their names")
    return rows.to_log("TensorBoard", notes)


def _rows_by_step(values: Sequence[Value], tags: set[str]) -> list[dict[str, object]]:
    """Return a row for each TensorBoard step and each time it was written, with all its tags.

    The tags of a step may be written together or one after another, in one file or in several.
    """
    rows: dict[tuple[int, int], dict[str, object]] = {}
    times: dict[tuple[str, int], int] = {}
    for tag, step, value, written in values:
        if tag not in tags:
            continue
        time = times[tag, step] = times.get((tag, step), -1) + 1
        row = rows.setdefault((step, time), {"step": step, _WALL_TIME: written})
        row[tag] = value
    return list(rows.values())


def _read_scalars(path: Path, notes: list[str]) -> Iterator[Value]:
    """Yield the scalars of a TensorBoard file, in the formats of all writers since TensorFlow 1."""
    loader, event_of, array_of, broken = _import_tensorboard()
    num_read = 0
    with translate_read_errors(path):
        for raw in loader(str(path)).Load():
            num_read += len(raw) + _FRAME_BYTES
            try:
                event = event_of(raw)
            except broken as error:
                raise FormatError(f"{path}: an event before byte {num_read} is damaged") from error
            for value in event.summary.value:
                number = _scalar_value(value, array_of)
                if number is not None:
                    yield value.tag, event.step, number, event.wall_time
        num_left = path.stat().st_size - num_read
    if num_left:
        notes.append(
            f"{path.name}: the last {num_left} bytes are damaged or not completely written yet"
        )


def _scalar_value(value: Any, array_of: Any) -> float | None:
    """Return the number of a TensorBoard value; None if it is not a scalar."""
    kind = value.WhichOneof("value")
    if kind == "simple_value":
        return float(value.simple_value)
    if kind != "tensor" or value.metadata.plugin_data.plugin_name not in ("", "scalars"):
        return None
    try:
        array = array_of(value.tensor)
        return float(array.item()) if array.size == 1 and array.dtype.kind in "fiu" else None
    except (TypeError, ValueError, struct.error):  # a tensor with other data
        return None


def _import_tensorboard() -> tuple[Any, Any, Any, type[Exception]]:
    """Return TensorBoard's loader, event decoder, tensor converter, and error class."""
    try:
        from google.protobuf.message import DecodeError
        from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.util.tensor_util import make_ndarray
    except ImportError as error:
        raise MissingDependencyError(
            "reading TensorBoard's event files needs the package tensorboard, which is not "
            "installed",
            hint="pip install 'trainvitals[replay]'",
        ) from error
    return RawEventFileLoader, Event.FromString, make_ndarray, DecodeError
