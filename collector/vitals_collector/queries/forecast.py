"""Forecast of a stored run: reads the lineage's steps for ``trainvitals.forecast``."""

from collections.abc import Sequence

import numpy as np

from trainvitals.errors import UsageError
from trainvitals.forecast import Lag, forecast_final_loss, forecast_finish, measure_token_lag
from trainvitals.views import Along, ForecastQuestion, ForecastView, RunSummary
from vitals_collector.live.overview import info_of
from vitals_collector.numbers.interface import Floats, Points
from vitals_collector.queries import series
from vitals_collector.queries.difference import TOKENS, tokens_at_steps
from vitals_collector.queries.ledger import run_row
from vitals_collector.storage.store import ReadSnapshot

LOSS = "steps.loss"
_TIMED = (LOSS, "steps.grad_norm", "steps.step_duration_seconds")
"""Metrics with the end time of each step; the first that a run has is read."""


def forecast(
    moment: ReadSnapshot,
    question: ForecastQuestion,
    runs: Sequence[RunSummary],
    *,
    now_unix_ns: int,
) -> ForecastView:
    """Return the end of the first run, its final loss, and its lag behind the other run.

    Raises:
        UsageError: the planned number of steps is negative, or a run is compared with itself.
    """
    run = runs[0]
    if question.total_steps < 0:
        raise UsageError(f"total_steps is {question.total_steps}; it must be at least 1")
    if question.other == run.run_id:
        raise UsageError("a run cannot be behind itself", hint="name another run")
    of_run = _LineageCurves(moment, run.run_id)
    total = question.total_steps or info_of(run_row(moment.sql, run.run_id)).total_steps
    timed = next((points for name in _TIMED if len(points := of_run.curve(name))), None)
    last_step = int(timed.step[-1]) if timed is not None else -1
    view = {
        "run_id": run.run_id,
        "name": run.name,
        "state": run.state,
        "asked_unix_ns": now_unix_ns,
        "last_step": last_step,
        "total_steps": total,
    }
    view |= _finish_fields(timed, run, total, now_unix_ns) | _final_loss_fields(of_run, total)
    if question.other:
        view |= _lag_fields(of_run, _LineageCurves(moment, question.other), runs[1])
    return ForecastView(**view)  # type: ignore[arg-type]


_NO_TOTAL = (
    "nobody said how many steps are planned; say watch(total_steps=...), or --total-steps here"
)


def _finish_fields(
    timed: Points | None, run: RunSummary, total: int, now_unix_ns: int
) -> dict[str, object]:
    """Return the fields of a queried forecast on the end of the run, or why it has none."""
    if not total:
        return {"no_finish": _NO_TOTAL}
    is_over = timed is not None and int(timed.step[-1]) + 1 >= total
    if run.state != "running" and not is_over:
        return {"no_finish": f"the run has stopped ({run.state})"}
    if timed is None:
        return {"no_finish": "no step has ended yet"}
    predicted = forecast_finish(
        timed.step,
        timed.time_unix_ns,
        timed.attempt,
        total_steps=total,
        now_unix_ns=now_unix_ns,
    )
    if isinstance(predicted, str):
        return {"no_finish": predicted}
    return {
        "finish_unix_ns": predicted.unix_ns,
        "finish_low_unix_ns": predicted.low_unix_ns,
        "finish_high_unix_ns": predicted.high_unix_ns,
        "seconds_per_step": predicted.seconds_per_step,
        "step_ratio": predicted.step_share,
        "is_waiting": predicted.is_waiting,
    }


def _final_loss_fields(of_run: "_LineageCurves", total: int) -> dict[str, object]:
    """Return the fields of a queried forecast on the final loss, or why it has none."""
    if not total:
        return {"no_final_loss": _NO_TOTAL}
    points = of_run.curve(LOSS)
    predicted = forecast_final_loss(points.step, points.value, total_steps=total)
    if isinstance(predicted, str):
        return {"no_final_loss": predicted}
    return {
        "final_loss": predicted.loss,
        "final_loss_low": predicted.low,
        "final_loss_high": predicted.high,
    }


def _lag_fields(
    of_run: "_LineageCurves", of_other: "_LineageCurves", other: RunSummary
) -> dict[str, object]:
    """Return the fields of a queried forecast on the lag behind another run."""
    both = (of_run, of_other)
    along: Along = "tokens" if all(len(steps.curve(TOKENS)) for steps in both) else "step"
    predicted = measure_token_lag(*of_run.losses(along), *of_other.losses(along))
    view: dict[str, object] = {"against": other.name or other.run_id, "along": along}
    if isinstance(predicted, str):
        return view | {"no_comparison": predicted}
    view |= {"behind": predicted.tokens, "is_at_least": predicted.is_least}
    return view | {"behind_steps": _in_steps(of_run, along, predicted)}


def _in_steps(of_run: "_LineageCurves", along: Along, predicted: Lag) -> float | None:
    """Convert a forecast's lag from tokens to steps, by the run's mean tokens per step so far."""
    if along == "step":
        return predicted.tokens
    counted = of_run.curve(TOKENS)
    tokens = float(counted.value[-1] - counted.value[0])
    steps = int(counted.step[-1] - counted.step[0])
    return predicted.tokens * steps / tokens if tokens > 0 else None


class _LineageCurves:
    """Reads a run's curves in the lineage, each once."""

    def __init__(self, moment: ReadSnapshot, run_id: str) -> None:
        self._moment = moment
        self._run_id = run_id
        self._attempts = series.attempt_rows(moment.sql, run_id)
        self._names = series.names_of(moment.sql, run_id)
        self._read: dict[str, Points] = {}

    def curve(self, metric: str) -> Points:
        """Return a stored curve for the forecast of a run; empty if it was never measured."""
        if metric not in self._read:
            self._read[metric] = self._load(metric)
        return self._read[metric]

    def _load(self, metric: str) -> Points:
        """Query a curve in the lineage for the forecast of a run."""
        if metric not in self._names:
            none = np.zeros(0, np.int64)
            return Points(none, none, none, np.zeros(0))
        _, curve = series.curve_of(self._moment, self._run_id, metric, "")
        (drawn,) = self._moment.numbers.curves([curve], self._attempts, "lineage")
        return drawn.points

    def losses(self, along: Along) -> tuple[Floats, Floats]:
        """Return a run's losses for its forecast, and the position of each in tokens or steps."""
        points = self.curve(LOSS)
        steps = points.step.astype(np.float64)
        at = tokens_at_steps(self.curve, steps) if along == "tokens" else steps + 1.0
        return at, points.value
