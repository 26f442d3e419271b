"""A sparkline shows what is stored, and where a loss ceased to be a number."""

import base64
import contextlib
import math
import re
from pathlib import Path

import numpy as np
import pytest

from tests.collector.rows import RUN, Writer
from trainvitals.testing import ManualClock
from trainvitals.views import SeriesQuestion, SeriesReply
from vitals_collector.ingest.ingest import ingest
from vitals_collector.queries.query import Query
from vitals_collector.storage.store import open_store
from vitals_dashboard.charts.sparkline import HEIGHT, WIDTH, sparkline
from vitals_dashboard.theme import LIGHT

PIXEL = 1.0
"""What coordinates are rounded to, and a line's own width."""


def stored(folder: Path, losses: list[float]) -> SeriesReply:
    """Return what a collector answers of a run of these losses."""
    with contextlib.closing(open_store(f"sqlite:///{folder / 'store.db'}")) as store:
        ingest(store, Writer().steps(range(len(losses)), loss=losses))
        query = Query(store, clock=ManualClock())
        return query.ask(SeriesQuestion(run_id=RUN, metric="steps.loss", points=60))


def drawn(address: str) -> tuple[list[list[tuple[float, float]]], list[float]]:
    """Return the lines of a picture, and where something is marked."""
    svg = base64.b64decode(address.partition(",")[2]).decode()
    curve, marks = re.findall(r'<path d="([^"]*)"', svg)
    lines = [
        [(float(x), float(y)) for x, y in re.findall(r"([\d.]+) ([\d.]+)", line)]
        for line in curve.split("M")[1:]
    ]
    return lines, [float(x) for x in re.findall(r"M([\d.]+) ", marks)]


@pytest.mark.parametrize("seed", range(6))
def test_its_envelope_is_that_of_the_rows(seed: int, tmp_path: Path):
    rng = np.random.default_rng(seed)
    num = int(rng.choice([40, 700, 5_000]))
    losses = np.cumsum(rng.normal(size=num)) + 50.0 * (rng.random(num) > 0.999)
    losses[rng.random(num) < 0.004] = math.nan
    losses = losses.astype(np.float32).astype(np.float64)
    lines, marks = drawn(sparkline(stored(tmp_path, losses.tolist()), LIGHT))
    low, high = np.nanmin(losses), np.nanmax(losses)
    xs = 3 + (WIDTH - 6) * np.arange(num) / (num - 1)
    ys = HEIGHT - 3 - (HEIGHT - 6) * (losses - low) / (high - low)
    points = np.array([point for line in lines for point in line])
    assert len(points) >= min(60, num) - np.isnan(losses).sum()
    wide = 2 * (WIDTH - 6) / 60  # no column is wider
    for x, y in zip(xs, ys, strict=True):
        near = points[abs(points[:, 0] - x) <= wide + PIXEL, 1]
        if math.isnan(y):
            assert min(abs(np.array(marks) - x)) <= wide + PIXEL
        else:
            assert near.min() - 0.06 <= y <= near.max() + 0.06
    for x, y in points:
        assert np.hypot(xs - x, ys - y)[~np.isnan(ys)].min() < 0.1, "a point that nobody measured"


def test_a_loss_that_ends_in_nan_is_no_perfect_descent(tmp_path: Path):
    descent = np.linspace(4.0, 1.0, 500).tolist()
    well, broken = (
        drawn(sparkline(stored(_made(tmp_path / name), losses), LIGHT))
        for name, losses in (("well", descent), ("broken", [*descent, *[math.nan] * 200]))
    )
    assert [] == well[1]
    assert WIDTH - 3 == pytest.approx(max(broken[1]), abs=4), "to the very end"
    assert WIDTH * 0.6 < max(x for x, _ in broken[0][0]) < WIDTH * 0.75


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_a_line_is_not_drawn_over_a_gap_and_a_lone_value_is_a_dot(tmp_path: Path):
    lines, marks = drawn(sparkline(stored(tmp_path, [3.0, math.inf, 2.0, math.nan, 1.0]), LIGHT))
    assert [1, 1, 1] == [len(line) for line in lines]
    assert 2 == len(marks)


def test_a_run_without_a_loss_has_no_picture():
    assert "" == sparkline(None, LIGHT)
