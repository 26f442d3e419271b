"""Reads the log in ``trainer_state.json`` of Hugging Face's Trainer."""

import json
import math
from pathlib import Path
from typing import Any

from trainvitals.errors import FormatError
from vitals_plugins.bridges.importers.columns import (
    ColumnChoice,
    ImportedLog,
    ImportedRows,
    choose_columns,
    find_scalars,
)
from vitals_plugins.bridges.importers.files import read_whole, translate_read_errors


def read_trainer_state(path: Path, column_options: ColumnChoice) -> ImportedLog:
    """Read the log in Trainer's state file; its rows are the entries of ``log_history``.

    Raises:
        FormatError: it is not JSON, or has no ``log_history``.
        UsageError: no entry has a step, or none a loss or a gradient norm.
    """
    with translate_read_errors(path):
        text = read_whole(path).decode("utf-8-sig")
        try:
            state = json.loads(text)  # accepts NaN and Infinity, which Trainer writes
        except (ValueError, RecursionError) as error:
            raise FormatError(f"{path} is not JSON: {error}") from error
    log = state.get("log_history") if isinstance(state, dict) else state
    state = state if isinstance(state, dict) else {}
    if not isinstance(log, list) or not all(isinstance(entry, dict) for entry in log):
        raise FormatError(
            f"{path} is JSON, but has no list of objects 'log_history'",
            hint="JSON logs that can be read: a checkpoint's trainer_state.json, a list of "
            "objects, and JSON Lines (one object per line)",
        )
    names = list(dict.fromkeys(name for entry in log for name in entry))
    columns = choose_columns(names, column_options, str(path))
    rows = ImportedRows(path, "entry", columns, find_scalars(names, column_options, str(path)))
    for row, entry in enumerate(log):
        rows.add_named(row, entry)
    is_state = "log_history" in state
    return rows.to_log(
        "trainer_state.json" if is_state else "JSON",
        _habits(state) if is_state else (),
        total_seconds=_training_seconds(log),
    )


def _training_seconds(log: list[dict[str, Any]]) -> float | None:
    """Return the duration of the last start, which Trainer logs at its end."""
    totals = [entry["train_runtime"] for entry in log if "train_runtime" in entry]
    last = totals[-1] if totals else None
    if not isinstance(last, int | float) or isinstance(last, bool) or not 0 < last < math.inf:
        return None
    return float(last)


def _habits(state: dict[str, Any]) -> list[str]:
    """Describe Trainer's changes to a loss before it is logged."""
    every = state.get("logging_steps")
    notes = []
    if isinstance(every, int | float) and every > 1:
        notes.append(
            f"Trainer logs the mean loss of {every:g} steps, which flattens a spike of one step"
        )
    notes.append(
        "Trainer excludes non-finite losses from the mean unless logging_nan_inf_filter is off; "
        "only the gradient norm shows them"
    )
    return notes
