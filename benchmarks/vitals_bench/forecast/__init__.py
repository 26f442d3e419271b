"""Forecasts of a run's cost and end, compared with the known outcome."""

from collections.abc import Callable, Iterator
from pathlib import Path

from vitals_bench.forecast.eta import measure_eta
from vitals_bench.forecast.final_loss import measure_final_loss
from vitals_bench.forecast.measure import measure_goodput
from vitals_bench.forecast.memory import measure_plan
from vitals_bench.forecast.noise_scale import measure_noise_scale
from vitals_bench.rows import Grid, Row

Rows = Iterator[Row | Grid]


def _without_logs(measure: Callable[..., Rows]) -> Callable[..., Rows]:
    """Return a part that other people's logs are nothing to."""

    def measured(*, quick: bool, traces: Path | None = None) -> Rows:
        return measure(quick=quick)

    return measured


PARTS: dict[str, Callable[..., Rows]] = {
    "goodput": _without_logs(measure_goodput),
    "eta": _without_logs(measure_eta),
    "final_loss": measure_final_loss,
    "plan": _without_logs(measure_plan),
    "noise_scale": _without_logs(measure_noise_scale),
}
