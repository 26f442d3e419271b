"""Runs the real detectors on a course, and draws a panel of the result; no mark is set by hand.

A panel names its expected result: a finding of one detector, or none. If the detectors differ, an
error is raised.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from docs.drawn.svg import Line, Mark, Panel, Point
from trainvitals.detect.detector_set import DetectorSet
from trainvitals.detect.fleet import FleetDetectors
from trainvitals.detect.fleet.base import MergedStep, NodeSample
from trainvitals.detect.level import LevelDetector
from trainvitals.detect.outliers import LossKind
from trainvitals.detect.posttraining.set import PostTrainingDetectors
from trainvitals.detect.spike import BurstDetector, SpikeDetector
from trainvitals.records import Finding, StepRecord

SECOND = 1_000_000_000
State = dict[str, Any]
Levels = Mapping[str, Callable[[State], float | None]]
"""Reads the limit from a detector's state, by label."""


class ExampleError(Exception):
    """An example does not show the expected result."""


def check(title: str, findings: Sequence[Finding], detector: str) -> tuple[Finding, ...]:
    """Return the findings of a detector; without a name, none are expected.

    Raises:
        ExampleError: there is no finding, or an unexpected one.
    """
    mine = tuple(finding for finding in findings if finding.detector == detector)
    if detector and not mine:
        raise ExampleError(f"{title!r}: {detector} says nothing; heard: {findings}")
    if not detector and findings:
        raise ExampleError(
            f"{title!r}: to be silent, but {findings[0].detector}: {findings[0].reason}"
        )
    return mine


def _height(lines: Sequence[Line], at: float) -> float | None:
    """Return the height of the first curve at the position of a mark."""
    heights = dict(lines[0].points)
    value = heights.get(at)
    return value if value is not None and math.isfinite(value) else None


def _panel(title: str, lines: Sequence[Line], findings: Sequence[Finding], **options: Any) -> Panel:
    marks = [
        Mark(x=f.step, y=_height(lines, f.step), level=f.level, word=f.kind.replace("_", " "))
        for f in findings
    ]
    return Panel(title=title, lines=lines, marks=marks, findings=findings, **options)


# ------------------------------------------------------------------------------- in every rank


def in_loop(
    title: str,
    records: Sequence[StepRecord],
    detector: str = "",
    *,
    column: str = "loss",
    limit: bool = True,
    levels: Levels | None = None,
    of: str = "",
    log: bool = False,
    every: int = 1,
    loss_kind: LossKind = "minimize",
) -> Panel:
    """Run all detectors on records, none of them withheld, and return the panel.

    Args:
        title: title of the course.
        records: the course.
        detector: expected detector; empty: no findings are expected.
        column: column to draw.
        limit: also draw the limit that each step was compared with.
        levels: values to read from the state of ``detector`` at each step.
        of: detector whose state is read, if it is not ``detector``.
        log: draw logarithms.
        every: draw every Nth step; steps with findings always.
        loss_kind: kind of loss that the run declares.
    """
    detectors = DetectorSet(loss_kind=loss_kind)
    own = SpikeDetector("grad_norm" if column == "grad_norm" else "loss")
    findings, limits = list[Finding](), list[Point]()
    for record in records:
        limits.append((record.step, own.limit()))
        own.update(record)
        findings += detectors.update(record)
    spoken_of = check(title, findings, detector)
    spoken = {finding.step for finding in spoken_of}
    kept = {record.step for record in records if record.step % every == 0} | spoken
    label = {"loss": "loss", "grad_norm": "gradient norm"}[column]
    lines = [
        Line(label=label, points=[(r.step, getattr(r, column)) for r in records if r.step in kept])
    ]
    if limit:
        lines.append(Line(label="its limit", points=limits, role="limit"))
    lines += _levels_of(detector or of, records, levels or {}, kept)
    return _panel(title, lines, spoken_of, x_label="step", y_label=label, log=log)


def _levels_of(
    name: str, records: Sequence[StepRecord], levels: Levels, kept: set[int]
) -> list[Line]:
    """Read a detector's state after each step."""
    if not levels:
        return []
    detector = {"grad_norm_burst": BurstDetector, "loss_level": LevelDetector}[name]()
    points: dict[str, list[Point]] = {label: [] for label in levels}
    for record in records:
        detector.update(record)
        if record.step not in kept:
            continue
        state = detector.state_dict()
        for label, read in levels.items():
            points[label].append((record.step, read(state)))
    roles = {label: "other" if label.startswith("median") else "limit" for label in levels}
    return [Line(label=label, points=made, role=roles[label]) for label, made in points.items()]  # type: ignore[arg-type]


# ----------------------------------------------------------------------- merged steps and nodes


def watched(
    title: str,
    steps: Sequence[MergedStep],
    detector: str = "",
    *,
    lines: Mapping[str, Callable[[MergedStep], float | None]],
    y_label: str,
    limit: tuple[str, Callable[[State], float | None]] | None = None,
    of: str = "",
    totals: float | None = None,
    log: bool = False,
    every: int = 1,
) -> Panel:
    """Run all fleet detectors on merged steps, and return the panel.

    Args:
        title: title of the course.
        steps: the course.
        detector: expected detector; empty: no findings are expected.
        lines: values to draw of a step, by label; the first gets the marks, labels that start with
            a dash are not in the legend.
        y_label: name of the axis.
        limit: a label, and the function that reads the limit from a detector's state.
        of: detector whose state is read, if it is not ``detector``.
        totals: memory of the GPUs in bytes, as in their samples.
        log: draw logarithms.
        every: draw every Nth step; steps with findings always.
    """
    watchers, findings, levels = FleetDetectors(), list[Finding](), list[Point]()
    if totals:
        gpu = {"memory_total_bytes": totals}
        watchers.update_node(NodeSample(node="node-0", time_unix_ns=0, step=0, gpus={"0": gpu}))
    for place, step in enumerate(steps):
        of_step = watchers.update(step)
        findings += of_step
        if limit is not None and (of_step or place % every == 0):
            state = watchers.state_dict()["watchers"][detector or of]
            levels.append((step.step, limit[1](state)))
    mine = check(title, findings, detector)
    spoken = {finding.step for finding in mine}
    kept = [s for n, s in enumerate(steps) if n % every == 0 or s.step in spoken]
    drawn = [
        Line(
            label="" if label.startswith("-") else label,
            points=[(s.step, read(s)) for s in kept],
            role="value" if number == 0 else "limit" if "limit" in label else "other",
        )
        for number, (label, read) in enumerate(lines.items())
    ]
    if limit is not None:
        drawn.append(Line(label=limit[0], points=levels, role="limit"))
    return _panel(title, drawn, mine, x_label="step", y_label=y_label, log=log)


def logged(
    title: str,
    rows: Sequence[Mapping[str, float]],
    detector: str = "",
    *,
    lines: Mapping[str, str],
    task: str = "grpo",
    y_label: str,
    log: bool = False,
) -> Panel:
    """Run the detectors of a post-training run on its scalars, and return the panel.

    Args:
        title: title of the course.
        rows: the scalars of each step.
        detector: expected detector; empty: no findings are expected.
        lines: scalars to draw, by label.
        task: kind of the run.
        y_label: name of the axis.
        log: draw logarithms.
    """
    detectors, findings = PostTrainingDetectors(task), list[Finding]()
    for number, values in enumerate(rows):
        findings += detectors.update(values, step=number, attempt=1, time_unix_ns=0)
    drawn = [
        Line(
            label=label,
            points=[(float(n), row[name]) for n, row in enumerate(rows) if name in row],
            role="other" if number else "value",
        )
        for number, (label, name) in enumerate(lines.items())
    ]
    mine = check(title, findings, detector)
    return _panel(title, drawn, mine, x_label="step", y_label=y_label, log=log)


def sampled(
    title: str,
    samples: Sequence[NodeSample],
    detector: str = "",
    *,
    lines: Mapping[str, Callable[[NodeSample], float | None]],
    y_label: str,
) -> Panel:
    """Run all fleet detectors on a node's samples, numbered by ``step``."""
    watchers = FleetDetectors()
    mine = check(title, [f for s in samples for f in watchers.update_node(s)], detector)
    drawn = [
        Line(
            label=label,
            points=[(s.step, read(s)) for s in samples],
            role="value" if number == 0 else "limit" if "limit" in label else "other",
        )
        for number, (label, read) in enumerate(lines.items())
    ]
    return _panel(title, drawn, mine, x_label="sample", y_label=y_label)


def silence(title: str, times: Sequence[float], seconds_after: float, detector: str = "") -> Panel:
    """End steps at ``times``, check every second for overdue ones, and draw the wait.

    A mark is at the second of its finding.
    """
    watchers, timed_findings, waits, limits = FleetDetectors(), [], [], []
    step, last = -1, 0.0
    limit: float | None = None
    for now in range(int(times[0]), int(times[-1] + seconds_after) + 1):
        step_before = step
        while step + 1 < len(times) and times[step + 1] <= now:
            step, before = step + 1, last
            last = times[step]
            duration = {"step_duration_seconds": [last - before if step else 1.0]}
            at = int(last * SECOND)
            watchers.update(MergedStep(step=step, attempt=1, time_unix_ns=at, ranks=duration))
        told = [(now, finding) for finding in watchers.check_stall(now * SECOND)]
        timed_findings += told
        waits.append((float(now), now - last))
        if told or step != step_before:  # otherwise it is unchanged
            limit = _limit_of_silence(watchers, now)
        limits.append((float(now), limit))
    mine = check(title, [finding for _, finding in timed_findings], detector)
    lines = [
        Line(label="since the last step", points=waits),
        Line(label="limit", points=limits, role="limit"),
    ]
    marks = [
        Mark(x=now, y=_height(lines, now), level=f.level, word=f.kind) for now, f in timed_findings
    ]
    return Panel(
        title=title, lines=lines, marks=marks, findings=mine, x_label="seconds", y_label="seconds"
    )


def _limit_of_silence(watchers: FleetDetectors, now: int) -> float | None:
    """Query a copy, much later: its finding names the limit."""
    (*_, finding) = (None, *copy.deepcopy(watchers).check_stall(now * SECOND + 10**18))
    return None if finding is None else finding.limit
