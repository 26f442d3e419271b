"""Simulated jobs with a known end: forecasts of it at a quarter of their steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trainvitals.forecast import Finish, forecast_finish
from vitals_bench.rows import Cell, Grid, Row, at_least, at_most

_Ints = npt.NDArray[np.int64]
_NUM_STEPS, _STEP_SECONDS = 8_000, 10.0
_LIMIT, _COVERS = 0.05, 0.7


class _Kind(NamedTuple):
    name: str
    num_restarts: int = 3
    share: float = 1.0
    """The part of the steps within which they happen."""
    is_stalled: bool = False


_KINDS = (
    _Kind("three restarts over the run"),
    _Kind("three restarts, and a night without progress", is_stalled=True),
    _Kind("three restarts in the first quarter, none after", share=0.25),
    _Kind("twelve restarts over the run", num_restarts=12),
)


def measure_eta(*, quick: bool) -> Iterator[Row | Grid]:
    """Yield the error of the forecast end at a quarter of the steps, for jobs with restarts."""
    cells: list[tuple[Cell, ...]] = []
    for kind in _KINDS:
        outcomes = [_told(kind, seed) for seed in range(20 if quick else 300)]
        off = np.array([each.of_all for each in outcomes])
        of_left = np.array([each.of_left for each in outcomes])
        covered = float(np.mean([each.is_within for each in outcomes]))
        cells.append(
            (kind.name, len(outcomes),
             *(f"{100 * np.quantile(off, q):.2f}" for q in (0.5, 0.9, 1.0)),
             *(f"{100 * np.quantile(of_left, q):.2f}" for q in (0.5, 0.9)),
             f"{100 * covered:.0f}")
        )  # fmt: skip
        if kind is _KINDS[0]:
            yield Row(
                name="three restarts: 90 % of predicted ends are off by at most",
                ours=100 * float(np.quantile(off, 0.9)),
                unit="%",
                goal=at_most(100 * _LIMIT),
                note=f"of the run's whole time; {len(outcomes)} jobs",
            )
            yield Row(
                name="the same, of the time that is left",
                ours=100 * float(np.quantile(of_left, 0.9)),
                unit="%",
                goal=at_most(100 * _LIMIT),
                note="most of these jobs had no restart or one by then: what comes after a calm "
                "quarter cannot be predicted, and the interval covers that",
            )
            yield Row(
                name="the end is within the 80 % interval",
                ours=covered,
                unit="",
                goal=at_least(_COVERS),
            )
    yield Grid(
        title="The end as told at a quarter of the steps",
        columns=(
            "jobs",
            "number",
            "median off, %",
            "90 % within, %",
            "most, %",
            "median, % of what is left",
            "90 %, of what is left",
            "in interval, %",
        ),
        rows=tuple(cells),
        note="Jobs of 8,000 steps of 10 s, with an evaluation every 400, saves every 200, and "
        "restarts that each take 3 to 15 min and up to 100 steps that are trained again. "
        "Errors are shares of the run's whole time, unless a column says otherwise.",
    )


class _Outcome(NamedTuple):
    of_all: float
    """Error of the forecast end, as a share of the run's whole time."""
    of_left: float
    """The same of the time that was left."""
    is_within: bool


def _told(kind: _Kind, seed: int) -> _Outcome:
    at, attempt = _job(kind, seed)
    done = _NUM_STEPS // 4
    foreseen = forecast_finish(
        np.arange(done),
        at[:done],
        attempt[:done],
        total_steps=_NUM_STEPS,
        now_unix_ns=int(at[done - 1]),
    )
    if not isinstance(foreseen, Finish):
        return _Outcome(float("inf"), float("inf"), False)
    is_within = foreseen.low_unix_ns <= at[-1] <= foreseen.high_unix_ns
    off = abs(foreseen.unix_ns - float(at[-1]))
    return _Outcome(off / float(at[-1]), off / float(at[-1] - at[done - 1]), is_within)


def _job(kind: _Kind, seed: int) -> tuple[_Ints, _Ints]:
    """Return when each step that counts ended, and its attempt; what a restart lost is a gap."""
    draw = np.random.default_rng([seed, _KINDS.index(kind)])
    seconds = _STEP_SECONDS * draw.lognormal(0.0, 0.08, _NUM_STEPS)
    seconds[::400] += draw.uniform(120, 180, len(seconds[::400]))
    seconds[100::200] += draw.uniform(5, 15, len(seconds[100::200]))
    within = int(kind.share * _NUM_STEPS)
    restarts = draw.integers(50, within, kind.num_restarts)
    lost = draw.uniform(0, 100, kind.num_restarts) * _STEP_SECONDS
    np.add.at(seconds, restarts, draw.uniform(180, 900, kind.num_restarts) + lost)
    if kind.is_stalled:
        seconds[int(draw.integers(50, _NUM_STEPS // 4))] += 8 * 3_600
    attempt = np.searchsorted(np.sort(restarts), np.arange(_NUM_STEPS), "right")
    return np.rint(np.cumsum(seconds) * 1e9).astype(np.int64), attempt
