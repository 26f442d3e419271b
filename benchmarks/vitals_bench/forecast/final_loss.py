"""Final losses forecast at half of a run, compared with the outcome: third-party logs and own runs.

The constants of ``trainvitals.forecast`` were set on the logs; the trainings were held back.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from trainvitals.forecast import FINAL_SHARE, forecast_final_loss
from vitals_bench.rows import Cell, Grid, Row, at_least, at_most

_SHARES = (0.3, 0.5, 0.7)
_HALF = 0.5
_LIMIT, _ABSTAINS, _COVERS, _COVERS_AT_MOST = 3.5, 1 / 3, 0.7, 0.9


class _Curve(NamedTuple):
    name: str
    step: npt.NDArray[np.int64]
    loss: npt.NDArray[np.float64]


class _Told(NamedTuple):
    """Forecasts of the curves at one share of their steps."""

    number: int
    off: npt.NDArray[np.float64]
    """Errors of these forecasts."""
    covered: float

    @property
    def abstained(self) -> float:
        return (self.number - len(self.off)) / self.number


def measure_final_loss(*, quick: bool, traces: Path | None = None) -> Iterator[Row | Grid]:
    """Yield the errors of final losses, the coverage of the interval, and abstentions.

    Args:
        quick: fewer trainings.
        traces: a folder of logs, as the benchmark `detect` takes it.
    """
    cells: list[tuple[Cell, ...]] = []
    kinds: dict[str, list[_Curve]] = {}
    if traces is None:
        yield Row(name="logs of others", ours=None, unit="", note="skipped: --traces names none")
    else:
        kinds["logs of others"] = list(_logs(traces))
    kinds["small trainings, held back"] = list(_trainings(2 if quick else 12))
    for kind, curves in kinds.items():
        for share in _SHARES:
            outcome = _told(curves, share)
            median = 100 * float(np.median(outcome.off)) if len(outcome.off) else math.nan
            cells.append(
                (kind, f"{100 * share:.0f} %", outcome.number, f"{median:.2f}",
                 f"{100 * outcome.covered:.0f}", f"{100 * outcome.abstained:.0f}")
            )  # fmt: skip
            if share == _HALF:
                yield from _rows(kind, outcome, median)
    yield Grid(
        title="The final loss as told on the way",
        columns=("curves", "told at", "number", "median off, %", "in interval, %", "abstained, %"),
        rows=tuple(cells),
        note="The final loss is the median of the last 5 % of the steps; the interval is to hold "
        "it four times in five.",
    )


def _rows(kind: str, outcome: _Told, median: float) -> Iterator[Row]:
    yield Row(
        name=f"{kind}, at half: median error", ours=median, unit="%", goal=at_most(_LIMIT),
        note=f"{len(outcome.off)} of {outcome.number} curves",
    )  # fmt: skip
    covers = at_least(_COVERS) if outcome.covered <= _COVERS_AT_MOST else at_most(_COVERS_AT_MOST)
    yield Row(
        name=f"{kind}, at half: within the 80 % interval",
        ours=outcome.covered,
        unit="",
        goal=covers,
    )
    yield Row(
        name=f"{kind}, at half: abstained", ours=outcome.abstained, unit="",
        goal=at_most(_ABSTAINS),
    )  # fmt: skip


def _told(curves: Iterable[_Curve], share: float) -> _Told:
    off, hits, number = [], 0, 0
    for curve in curves:
        number += 1
        total = int(curve.step[-1]) + 1
        is_last = curve.step + 1 > (1 - FINAL_SHARE) * total
        came = float(np.nanmedian(curve.loss[is_last]))
        is_done = curve.step + 1 <= share * total
        outcome = forecast_final_loss(curve.step[is_done], curve.loss[is_done], total_steps=total)
        if not isinstance(outcome, str):
            off.append(abs(outcome.loss / came - 1))
            hits += outcome.low <= came <= outcome.high
    return _Told(number, np.array(off), hits / len(off) if off else math.nan)


def _logs(folder: Path) -> Iterator[_Curve]:
    """Yield the curves of a folder's logs; a log that begins late is taken as if it began then."""
    for path in sorted((folder / "series").glob("*.csv")):
        with path.open(newline="") as file:
            pairs = [
                (float(row["step"]), float(row["loss"])) for row in csv.DictReader(file)
                if row["step"] and row["loss"]
            ]  # fmt: skip
        step, loss = (np.array(column) for column in zip(*pairs, strict=True))
        each = step[1] - step[0]
        yield _Curve(path.stem, np.rint(step - step[0] + each - 1).astype(np.int64), loss)


_STEPS = 1_200


def _trainings(num: int) -> Iterator[_Curve]:
    """Yield real small trainings: three tasks, and four courses of the learning rate."""
    for number in range(num):
        torch.manual_seed(number)
        losses = _train(number)
        yield _Curve(f"training {number}", np.arange(len(losses)), np.array(losses))


_COURSES = ("constant", "cosine", "linear", "warm-up, stable, decay")


def _rate(course: str, part: float) -> float:
    """Return the learning rate's multiple at a part of the training."""
    if course == "cosine":
        return 0.5 * (1 + math.cos(math.pi * part))
    if course == "linear":
        return 1 - part
    if course == "constant":
        return 1.0
    return min(1.0, part / 0.05, (1 - part) / 0.2)


def _train(number: int) -> list[float]:
    task, course = number % 3, _COURSES[number % 4]
    words, wide = 64, 64
    # A language whose next word depends on the last two, by a table that has to be learned.
    table = torch.randn(words, words, words).mul(1.5).softmax(-1)
    teacher = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    if task == 0:
        model: nn.Module = nn.Sequential(
            nn.Embedding(words, wide), nn.Flatten(), nn.Linear(2 * wide, 256), nn.GELU(),
            nn.Linear(256, words),
        )  # fmt: skip
    elif task == 1:
        model = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 1))
    else:
        model = nn.Sequential(nn.Linear(32, 24), nn.GELU(), nn.Linear(24, 4), nn.Linear(4, 32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: _rate(course, step / _STEPS)
    )
    mixing = torch.randn(12, 32)
    losses = []
    for _ in range(_STEPS):
        if task == 0:
            seen = torch.randint(words, (256, 2))
            target = torch.multinomial(table[seen[:, 0], seen[:, 1]], 1).squeeze(1)
            loss = nn.functional.cross_entropy(model(seen), target)
        elif task == 1:
            x = torch.randn(64, 16)
            with torch.no_grad():
                y = teacher(x) + 0.1 * torch.randn(64, 1)
            loss = nn.functional.mse_loss(model(x), y)
        else:
            x = torch.randn(64, 12) @ mixing / 12**0.5 + 0.1 * torch.randn(64, 32)
            loss = nn.functional.mse_loss(model(x), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses
