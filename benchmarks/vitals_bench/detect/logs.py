"""Labeled logs from a directory: ``labels.json`` and ``series/NAME.csv``.

A label is ``{"cls": "anomalous" | "clean" | "clean_with_minor", "split": "dev" | ..., "events":
[{"onset_idx", "end_idx", "kind", "severity", "reason"}]}``; a file has the columns step, loss,
grad_norm, lr and step_time, of which all but the step may be absent, and an empty cell is missing.
A label may also say what the run declared of its loss (``loss_kind``), the steps of the changes
that it announced (``changes``), and what it is shown with (``family``).
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from trainvitals.errors import UsageError
from vitals_bench.detect.series import Event, Number, Series

_UNREADABLE = (OSError, msgspec.DecodeError, KeyError, ValueError, TypeError, AttributeError)
LISTED_BY_RULE = ("sinv6", "imagenet_resnet")
"""Both in its name: the events of such a log were listed by a rule and not by hand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Logs:
    """Which labelled logs are scored."""

    folder: Path
    split: str = "all"
    """One of the labels' splits, or ``all``."""
    manual: bool = False
    """Leave out the logs whose events were listed by a rule."""

    @property
    def words(self) -> str:
        """What was chosen, for a title."""
        return f"split {self.split}" + (", labelled by hand only" if self.manual else "")


def read_logs(logs: Logs) -> list[Series]:
    """Return the chosen logs, in the order of the labels.

    Raises:
        UsageError: the folder holds no labels, none are left, or a log cannot be read.
    """
    chosen = read_labels(logs)
    try:
        return [_read(logs.folder / "series", name, label) for name, label in chosen.items()]
    except _UNREADABLE as error:
        raise _refused(logs, error) from error


def read_labels(logs: Logs) -> dict[str, dict[str, Any]]:
    """Return the labels of the chosen logs, by name.

    Raises:
        UsageError: the folder holds no labels, or none are left.
    """
    path = logs.folder / "labels.json"
    try:
        labels: dict[str, dict[str, Any]] = msgspec.json.decode(path.read_bytes())
        chosen = {
            name: label
            for name, label in labels.items()
            if logs.split in ("all", label["split"])
            and not (logs.manual and all(part in name for part in LISTED_BY_RULE))
        }
    except _UNREADABLE as error:
        raise _refused(logs, error) from error
    if not chosen:
        raise UsageError(
            f"{path} has no log of {logs.words}", hint="--split takes one of the labels' splits"
        )
    return chosen


def _refused(logs: Logs, error: Exception) -> UsageError:
    return UsageError(
        f"{logs.folder} does not hold labelled logs: {type(error).__name__}: {error}",
        hint="--traces needs a folder with labels.json and series/NAME.csv",
    )


def _read(folder: Path, name: str, label: dict[str, Any]) -> Series:
    with (folder / f"{name}.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return labelled(
        name,
        label,
        steps=[_step(row.get("step"), i) for i, row in enumerate(rows)],
        losses=[_number(row.get("loss")) for row in rows],
        norms=[_number(row.get("grad_norm")) for row in rows],
        rates=[_number(row.get("lr")) for row in rows],
    )


def labelled(name: str, label: Mapping[str, Any], **columns: Any) -> Series:
    """Return a log with its label as what is scored."""
    events = (
        Event(
            kind=event["kind"],
            onset=event["onset_idx"],
            end=event["end_idx"],
            severity=event["severity"],
            reason=event.get("reason", ""),
        )
        for event in label["events"]
    )
    return Series(
        name=name,
        events=tuple(events),
        is_clean=label["cls"] != "anomalous",
        loss_kind=label.get("loss_kind", "minimize"),
        changes=tuple(label.get("changes", ())),
        family=label.get("family", ""),
        **columns,
    )


def _number(cell: str | None) -> Number:
    return float(cell) if cell else None


def _step(cell: str | None, row: int) -> int:
    """Return the step of a record; one without a step is counted."""
    step = _number(cell)
    return int(step) if step is not None and math.isfinite(step) else row
