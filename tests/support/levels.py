"""Rows of many ranks, and the statistics over them."""

import math
import random

import numpy as np

from tests.collector.numbers.written import RUN, batch, identity
from tests.support.numbers import plain
from trainvitals.rows import Value
from vitals_collector.numbers.interface import NumberStore, RowSpan, StepWindow
from vitals_collector.numbers.rank_rollup import STATISTICS

SIZE = 256


FIRST = StepWindow(1, 0, SIZE)


KINDS = {"rank_loss": "f8", "step_duration_seconds": "f8", "tokens": "i8", "z": "f8", "host": "S8"}


NUMBERS = ("rank_loss", "step_duration_seconds", "tokens", "z")


STEPS = RowSpan(RUN, "steps")


def rows_of(rank: int, num: int) -> list[dict[str, Value]]:
    """Return a rank's rows: rank 3 is slow, 5's loss is far off, 7 has a NaN, 9 an infinity."""
    rng = random.Random(rank)
    rows: list[dict[str, Value]] = []
    for step in range(num):
        row: dict[str, Value] = {
            "rank_loss": 2.0 + rng.random() + (50.0 if rank == 5 and step == 11 else 0.0),
            "step_duration_seconds": 0.1 + rng.random() / 100 + (rank == 3) * 0.5,
            "tokens": 2**40 + rank,
            "host": b"node-%d" % rank,
        }
        if step % 3 == 0:
            row["z"] = {7: math.nan, 9: math.inf}.get(rank, rng.random())
        rows.append(row)
    return rows


def fill(numbers: NumberStore, *, num_ranks: int = 12, num: int = 600, first: int = 0) -> None:
    """Store rows of some ranks."""
    numbers.append(
        [
            batch(identity(rank=r), rows_of(r, num)[first:], first_seq=first, kinds=KINDS)
            for r in range(num_ranks)
        ]
    )


def kept_rows(numbers: NumberStore) -> dict[int, int]:
    """Return how many rows each rank has."""
    ranks = numbers.scan(STEPS, ["rank"])["rank"].values
    return dict(zip(*(part.tolist() for part in np.unique(ranks, return_counts=True)), strict=True))


def levels(numbers: NumberStore) -> dict[str, list[Value | str]]:
    """Return the numbers over ranks."""
    names = [f"{name}:{what}" for name in NUMBERS for what in STATISTICS]
    scanned = numbers.scan(RowSpan(RUN, "ranks"), ["step", "attempt", "num_ranks", *names])
    return {name: plain(column) for name, column in scanned.items()}
