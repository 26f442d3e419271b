"""What our detectors cost a step, in pure Python, on a log like a real one."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from trainvitals.detect.detector_set import DetectorSet
from trainvitals.detect.fleet import FleetDetectors
from trainvitals.detect.fleet.base import MergedStep, Value
from trainvitals.policy import Judge, StepInputs
from trainvitals.records import StepRecord
from trainvitals.testing import judgements
from vitals_bench.detect.logs import Logs
from vitals_bench.detect.series import Series
from vitals_bench.detect.shapes import SHAPES, make_shape
from vitals_bench.rows import Row, at_most

IN_LOOP_US = 25.0
COLLECTOR_US = 1e6 / 20_000
RANKS, LAYERS = 8, 24
"""Of the merged step that the collector's set is given."""


def measure_cost(*, quick: bool, logs: Logs | None = None) -> Iterator[Row]:
    """Yield what a step costs in the loop and in the collector."""
    del logs
    series = make_shape(next(shape for shape in SHAPES if shape.name == "clean"), 0)
    records = _completed(series)
    times = 3 if quick else 30
    yield Row(
        name="all detectors in the loop that tell: one step",
        ours=_median(_detector, records, times),
        unit="us",
        goal=at_most(IN_LOOP_US),
    )
    ladder = _median(_judge, records, times)
    yield Row(name="the same with the escalation policy", ours=ladder, unit="us")
    yield _collector(series, times)


def _detector() -> Callable[[StepRecord], object]:
    return DetectorSet().update


def _judge() -> Callable[[StepRecord], object]:
    judge = Judge()

    def decide(record: StepRecord) -> object:
        return judge.judge(record, StepInputs(record.step + 1)), judge.limits()

    return decide


def _completed(series: Series) -> list[StepRecord]:
    """Return the records as the device completes them, with the limits that were in force."""
    columns = zip(series.steps, series.losses, series.norms, series.rates, strict=True)
    bare = [
        StepRecord(step=step, attempt=1, loss=loss, grad_norm=norm, learning_rate=rate)
        for step, loss, norm, rate in columns
    ]
    return [record for record, _ in judgements(Judge(), bare)]


def _collector(series: Series, times: int) -> Row:
    return Row(
        name=f"the collector's watchers: a merged step of {RANKS} ranks and {LAYERS} layers",
        ours=_median(lambda: FleetDetectors().update, _merged(series), times),
        unit="us",
        goal=at_most(COLLECTOR_US),
        note="the goal is 20,000 steps a second; layers are in every 10th step",
    )


def _merged(series: Series) -> list[MergedStep]:
    """Return merged steps with the columns that watchers read, steady and with some noise."""
    made = []
    columns = zip(series.steps, series.losses, series.norms, series.rates, strict=True)
    for step, loss, norm, rate in columns:
        wobble = [1.0 + ((step * 7 + rank * 3) % 11) / 200.0 for rank in range(RANKS)]
        made.append(
            MergedStep(
                step=step,
                attempt=1,
                time_unix_ns=step * 500_000_000,
                run={
                    "loss": loss,
                    "grad_norm": norm,
                    "learning_rate": rate,
                    "loss_scale": 65536.0,
                    "verdict": 0,
                    "overflow_steps": 0,
                    "tokens_per_second": 1e5 * wobble[0],
                },
                ranks=_ranks(wobble, 3.0 if loss is None else loss),
                layers=_layers(wobble) if step % 10 == 0 else {},
            )
        )
    return made


def _ranks(wobble: list[float], loss: float) -> dict[str, list[Value]]:
    usual = {
        "step_duration_seconds": 0.5,
        "forward_backward_seconds": 0.4,
        "communication_seconds": 0.05,
        "data_wait_seconds": 0.01,
        "memory_allocated_bytes": 40e9,
        "memory_peak_bytes": 60e9,
        "rank_loss": loss,
    }
    return {column: [value * each for each in wobble] for column, value in usual.items()}


def _layers(wobble: list[float]) -> dict[str, dict[str, float]]:
    usual = {"grad_norm": 1.0, "update_norm": 1e-3, "weight_norm": 9.0, "activation_max": 20.0}
    return {
        f"layers.{i}": {column: value * wobble[i % RANKS] for column, value in usual.items()}
        for i in range(LAYERS)
    }


def _median(
    make: Callable[[], Callable[[Any], object]], items: Sequence[object], times: int
) -> float:
    """Return the microseconds of CPU of one call: the median over stretches of 100 of them.

    Each round starts with a new detector, because a restarting log would look like a fault.
    """
    costs: list[float] = []
    for _ in range(times):
        call = make()
        for start in range(0, len(items) - 99, 100):
            part = items[start : start + 100]
            begin = time.thread_time_ns()
            for item in part:
                call(item)
            costs.append((time.thread_time_ns() - begin) / len(part) / 1e3)
    return statistics.median(costs)
