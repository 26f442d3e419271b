"""Reads JSON Lines, one object per line: LLaMA-Factory's, OpenMMLab's, MAE's, or your own."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from trainvitals.errors import FormatError
from vitals_plugins.bridges.importers.columns import (
    KNOWN,
    ColumnChoice,
    ImportedLog,
    ImportedRows,
    choose_columns,
    find_scalars,
    normalize_column_name,
)
from vitals_plugins.bridges.importers.files import lines_of, open_text, translate_read_errors

_NUMBER = "line number"
"""Replaces the step, if the log has none."""
_OF_EPOCH = frozenset({"iter", "iteration", "it"})
"""Names of a step that may restart in each epoch, as in OpenMMLab."""


def is_json_lines(begin: bytes) -> bool:
    """Return whether a log's first line is a complete JSON object, followed by another one."""
    first, _, rest = begin.lstrip().partition(b"\n")
    return rest.lstrip().startswith(b"{") and _object(first.decode(errors="replace")) is not None


def has_metrics(begin: bytes) -> bool:
    """Return whether a complete line of JSON Lines has a loss or a gradient norm by a usual name.

    A data set in the same directory has none.
    """
    lines = begin.decode(errors="replace").split("\n")[:-1]
    names = {normalize_column_name(name) for line in lines for name in _object(line) or ()}
    return is_json_lines(begin) and not names.isdisjoint((*KNOWN["loss"], *KNOWN["grad_norm"]))


def read_json_lines(path: Path, column_options: ColumnChoice) -> ImportedLog:
    """Read the log in a JSON Lines file; its rows are the lines.

    A log without a step uses its epochs, or the numbers of its lines.

    Raises:
        FormatError: no line is an object.
        UsageError: no key is a loss or a gradient norm, or a name fits several.
    """
    with translate_read_errors(path), open_text(path) as file:
        lines = [line for line in lines_of(path, file) if line.strip("\0 \t\r\n")]
    found = [(row, cells) for row, cells in enumerate(map(_object, lines)) if cells is not None]
    if not found:
        raise FormatError(f"{path} is not JSON Lines: no line is an object")
    names = list(dict.fromkeys(name for _, cells in found for name in cells))
    notes = []
    if column_options.step is None and not any(
        normalize_column_name(name) in KNOWN["step"] for name in names
    ):
        step = "epoch" if "epoch" in names else _NUMBER
        notes.append(f"it has no step: the {'epoch' if step == 'epoch' else step} is in its place")
        names = [name for name in names if normalize_column_name(name) not in KNOWN["step"]]
        # The step column is always available, and then holds its replacement.
        columns = choose_columns(["step", *names], column_options, str(path)) | {"step": step}
    else:
        columns = choose_columns(names, column_options, str(path))
    rows = ImportedRows(path, "line", columns, find_scalars(names, column_options, str(path)))
    epochs = (
        _EpochStepCounter()
        if normalize_column_name(columns["step"]) in _OF_EPOCH and "epoch" in names
        else None
    )
    for row, cells in found:
        if cells.get("mode", "train") != "train":
            rows.skip_row("of evaluations")
            continue
        if columns["step"] == _NUMBER:
            cells[_NUMBER] = row
        if epochs is not None:
            cells[columns["step"]] = epochs.step(cells.get("epoch"), cells.get(columns["step"]))
        rows.add_named(row, cells)
    if epochs is not None and epochs.num_resets:
        notes.append("its iterations restart in each epoch: steps are numbered continuously")
    if torn := [row for row, line in enumerate(lines) if _object(line) is None]:
        last = torn == [len(lines) - 1]
        notes.append(
            "its last line is cut off"
            if last
            else f"{len(torn)} lines are not JSON objects, and were skipped"
        )
    return rows.to_log("JSON Lines", notes)


def _object(line: str) -> dict[str, object] | None:
    """Return the JSON object of a log line, flattened; None if it is not one."""
    try:
        cells = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return dict(_flatten_cells(cells)) if isinstance(cells, dict) else None


def _flatten_cells(cells: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Yield the names and values of a JSON log line; nested ones as OUTER/INNER."""
    for name, value in cells.items():
        if isinstance(value, dict):
            yield from ((f"{name}/{inner}", x) for inner, x in value.items())
        else:
            yield name, value


class _EpochStepCounter:
    """Numbers iterations continuously if they restart in each epoch."""

    def __init__(self) -> None:
        self._before: dict[object, int] = {}
        """Iterations before each epoch."""
        self._epoch: object = None
        self._last = 0
        self.num_resets = 0

    def step(self, epoch: object, iteration: object) -> object:
        """Return the step of a log's iteration; one that is not a whole number is unchanged."""
        if not isinstance(iteration, int) or isinstance(iteration, bool):
            return iteration
        if epoch != self._epoch:
            before = self._before.get(self._epoch, 0)
            is_reset = self._epoch is not None and iteration <= self._last - before
            if epoch not in self._before:
                self._before[epoch] = self._last if is_reset else before
            self.num_resets += is_reset
            self._epoch = epoch
        self._last = self._before.get(epoch, 0) + iteration
        return self._last
