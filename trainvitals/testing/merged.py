"""Merged steps and node samples written as text, and the findings of detectors about them.

    merged_series("loss 2.1x50; step_duration_seconds[*] 0.5x50; rank_loss[2] 2.1x50", ranks=4)

A line per column as in ``series``: ``column`` is the run's, ``column[3]`` rank 3's, ``column[*]``
every rank's, ``layer:column`` a layer's. A dash is a step in which it was not measured.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from trainvitals.detect.fleet import FleetDetectors
from trainvitals.detect.fleet.base import MergedStep, Watcher
from trainvitals.records import Finding
from trainvitals.testing.series import values_of

_RANK = re.compile(r"(?P<column>[a-z_]+)\[(?P<rank>\d+|\*)\]")
_SECOND = 1_000_000_000


def merged_series(
    text: str, *, ranks: int = 1, attempt: int = 1, first_step: int = 0
) -> list[MergedStep]:
    """Return the merged steps that a test describes as ``text``, one second apart."""
    lines = [line.split() for line in text.replace("\n", ";").split(";") if line.split()]
    columns = [(line[0], [v for word in line[1:] for v in values_of(word)]) for line in lines]
    length = max((len(values) for _, values in columns), default=0)
    steps = []
    for i in range(length):
        parts: dict[str, dict[str, Any]] = {"run": {}, "ranks": {}, "layers": {}}
        for name, values in columns:
            if i < len(values):
                _put_value(parts, name, values[i], ranks)
        step = first_step + i
        steps.append(MergedStep(step=step, attempt=attempt, time_unix_ns=step * _SECOND, **parts))
    return steps


def _put_value(
    parts: dict[str, dict[str, Any]], name: str, value: float | None, ranks: int
) -> None:
    """Put one value of a test's text into a merged step: of the run, a rank or a layer."""
    layer, colon, column = name.rpartition(":")
    of_rank = _RANK.fullmatch(name)
    if of_rank is not None:
        row = parts["ranks"].setdefault(of_rank["column"], [None] * ranks)
        put_ranks = range(ranks) if of_rank["rank"] == "*" else [int(of_rank["rank"])]
        for rank in put_ranks:
            row[rank] = value
    elif colon and value is not None:
        parts["layers"].setdefault(layer, {})[column] = value
    elif not colon:
        parts["run"][name] = value


def watched(
    watcher: Watcher | FleetDetectors, steps: str | Sequence[MergedStep], *, ranks: int = 1
) -> list[Finding]:
    """Run a detector in a test: return its findings for a run described by ``steps``."""
    rows = merged_series(steps, ranks=ranks) if isinstance(steps, str) else steps
    return [finding for row in rows for finding in watcher.update(row)]


def causes(findings: Iterable[Finding]) -> dict[int, list[str]]:
    """Return the causes of findings by step, for a test to compare."""
    by_step: dict[int, list[str]] = {}
    for finding in findings:
        by_step.setdefault(finding.step, []).append(finding.cause)
    return by_step
