"""What is forecast, beside what came: the bench's parts run, on few jobs."""

import csv
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from vitals_bench.forecast import PARTS
from vitals_bench.forecast.final_loss import measure_final_loss
from vitals_bench.rows import Row

pytestmark = pytest.mark.nightly


@pytest.mark.parametrize("part", ["eta", "plan", "noise_scale"])
def test_a_part_yields_figures(part: str):
    measure: Callable[..., object] = PARTS[part]
    rows = [row for row in measure(quick=True) if isinstance(row, Row)]  # type: ignore[attr-defined]
    assert rows
    assert [] == [row.name for row in rows if row.ours is None]


def test_logs_of_others_are_read_and_trainings_held_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("vitals_bench.forecast.final_loss._STEPS", 120)
    (tmp_path / "series").mkdir()
    for number in range(3):
        draw = np.random.default_rng(number)
        with (tmp_path / "series" / f"log{number}.csv").open("w", newline="") as file:
            log = csv.writer(file)
            log.writerow(("step", "loss"))
            steps = np.arange(0, 20_000, 10)
            loss = 4 * (steps + 1.0) ** -0.1 * np.exp(draw.normal(0, 0.02, len(steps)))
            log.writerows(zip(steps, loss, strict=True))
    rows = [r for r in measure_final_loss(quick=True, traces=tmp_path) if isinstance(r, Row)]
    of_logs = {row.name: row.ours for row in rows if row.name.startswith("logs")}
    assert len(rows) == 6
    assert of_logs["logs of others, at half: abstained"] == 0
    median = of_logs["logs of others, at half: median error"]
    assert median is not None and median < 3
