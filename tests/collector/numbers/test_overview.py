"""An overview out of the lake is the curve's shape, wherever rows lie and whatever is outlined."""

import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.collector.numbers.written import RUN, batch, identity
from tests.support.examples import examples, one_in
from trainvitals.identity import new_run_id
from trainvitals.rows import Value
from trainvitals.views import Branch
from vitals_collector.numbers import chunk_stats, lake_maintenance
from vitals_collector.numbers.interface import (
    HOST_STREAMS,
    AttemptRow,
    CurveRequest,
    DownsampledCurve,
    RowSpan,
)
from vitals_collector.numbers.lake import Lake
from vitals_collector.numbers.memory import MemoryNumberStore

FORKED = [AttemptRow(1, None, 0), AttemptRow(2, 1, 9), AttemptRow(3, 2, 14)]


def rows_of(drawn: DownsampledCurve) -> list[tuple[int, int, int, str]]:
    """Return a curve's points as they can be compared: NaN is NaN."""
    points = drawn.points
    columns = (points.step, points.attempt, points.time_unix_ns)
    values = map(repr, (points.value + 0.0).tolist())  # the lake may lose the sign of a zero
    return list(zip(*(c.tolist() for c in columns), values, strict=True))


def check(drawn: DownsampledCurve, full: DownsampledCurve, curve: CurveRequest) -> None:
    """Assert that a curve is what ``DownsampledCurve`` promises of it."""
    mine, every = rows_of(drawn), rows_of(full)
    assert drawn.num_values == full.num_values
    if curve.num_points is None:
        assert mine == every
        return
    assert set(mine) <= set(every)
    if len(every) == len(set(every)):  # samples of a GPU can be alike
        assert mine == [row for row in every if row in set(mine)]
    assert len(mine) >= min(curve.num_points, len(every))
    if every:
        assert mine[0][:3] == every[0][:3]
        assert mine[-1][:3] == every[-1][:3]
    not_finite = [row for row in every if row[3] in ("nan", "inf", "-inf")]
    assert [row for row in mine if row[3] in ("nan", "inf", "-inf")] == not_finite
    if curve.span.stream not in HOST_STREAMS:
        assert _extremes(mine) == _extremes(every)


def _extremes(rows: Sequence[tuple[int, int, int, str]]) -> dict[int, tuple[float, float]]:
    """Return the least and the greatest finite value of each stretch of steps."""
    stretches: dict[int, list[float]] = {}
    for step, _, _, value in rows:
        if math.isfinite(float(value)):
            stretches.setdefault(step // chunk_stats.CHUNK_STEPS, []).append(float(value))
    return {stretch: (min(values), max(values)) for stretch, values in stretches.items()}


class Piece(NamedTuple):
    """Rows that a writer sends, and whether the lake is tidied up behind them."""

    rank: int
    start: int
    attempt: int
    first_step: int
    values: list[float | None]
    jump: int
    """Steps that the last row lies away from where it would."""
    late: int
    """Nanoseconds that its times lie off."""
    is_merged: bool


VALUES = st.one_of(
    st.none(), st.sampled_from([math.nan, math.inf, -math.inf, 0.0]), st.floats(-9.0, 9.0, width=16)
)
PIECES = st.builds(
    Piece,
    st.integers(0, 2),
    st.integers(0, 1),
    st.integers(1, 3),
    st.integers(0, 16),
    st.lists(VALUES, min_size=1, max_size=9),
    st.integers(-3, 3),
    st.integers(-30, 30),
    st.booleans(),
)


@pytest.fixture
def _short_stretches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(chunk_stats, "CHUNK_STEPS", 4)
    monkeypatch.setattr(chunk_stats, "_MAX_NONFINITE", 2)
    yield


@pytest.fixture
def lake(tmp_path: Path) -> Iterator[Lake]:
    """Give a lake for many runs: to open one takes longer than to fill it."""
    lake = Lake(tmp_path)
    yield lake
    lake.close()


@pytest.mark.usefixtures("_short_stretches")
@pytest.mark.parametrize("stream", one_in(2, ["steps", "gpu"]))
@settings(
    max_examples=examples(15),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    pieces=st.lists(PIECES, min_size=1, max_size=5),
    bounds=st.tuples(
        st.sampled_from(["step", "unix_ns"]),
        st.one_of(st.none(), st.integers(0, 16)),
        st.one_of(st.none(), st.integers(0, 24)),
    ),
    num_points=st.integers(0, 20),
    branch=st.sampled_from(["lineage", "discarded", "all"]),
)
def test_an_overview_keeps_the_shape_of_the_curve(
    lake: Lake,
    stream: str,
    pieces: list[Piece],
    bounds: tuple[str, int | None, int | None],
    num_points: int,
    branch: Branch,
) -> None:
    run, memory = new_run_id(time.time_ns()), MemoryNumberStore()
    seqs: dict[tuple[int, int], int] = {}
    for number, piece in enumerate(pieces):
        who = identity(run, rank=piece.rank, start=piece.start)
        first = seqs.get((piece.rank, piece.start), 0)
        rows: list[dict[str, Value]] = []
        for i, value in enumerate(piece.values):
            is_last = i == len(piece.values) - 1
            step = max(0, piece.first_step + i + piece.jump * is_last)
            at = 1_000 * step + number + piece.late * is_last
            keys = {"step": step if stream == "steps" else -1, "attempt": piece.attempt}
            rows.append({**keys, "time_unix_ns": at, "loss": value, "z": float(i)})
        seqs[piece.rank, piece.start] = first + len(rows)
        sent = batch(who, rows, first_seq=first, kinds={"loss": "f8", "z": "f8"}, stream=stream)
        assert lake.append([sent]) == memory.append([sent])
        if piece.is_merged:
            lake.merge()
    unit, begin, end = bounds
    scale = 1 if unit == "step" else 1_000
    span = RowSpan(run, stream)._replace(
        **{
            f"from_{unit}": None if begin is None else begin * scale,
            f"to_{unit}": None if end is None else end * scale,
        }
    )
    spans = [span._replace(sources=(f"rank:{rank}",)) for rank in range(3)]
    spans += [span, span._replace(sources=("rank:0", "rank:1"))]
    curves = [
        CurveRequest(of, name, num)
        for of in spans
        for name in ("loss", "z")
        for num in (num_points, None)
    ]
    drawn = lake.curves(curves, FORKED, branch)
    full = memory.curves(curves, FORKED, branch)
    for mine, every, curve in zip(drawn, full, curves, strict=True):
        check(mine, every, curve)


def test_rows_that_say_no_time_end_nobody_s_outlines(lake: Lake) -> None:
    num = 3_000
    timeless = [{"loss": 2.0, "time_unix_ns": None, "monotonic_ns": None}] * num
    lake.append([batch(identity(), timeless), batch(identity(rank=1), [{"loss": 1.0}] * num)])
    lake.merge()
    spans = [RowSpan(RUN, "steps", (f"rank:{rank}",)) for rank in range(2)]
    loss = [lake.scan(span, ["loss"])["loss"].values for span in spans]
    assert [[2.0] * num, [1.0] * num] == [values.tolist() for values in loss]


def test_what_is_outlined_is_not_read(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    num = 20_000
    values = rng.normal(size=num)
    values[5_000], values[7_777], values[12_345] = 99.0, math.nan, -88.0
    rows: list[dict[str, Value]] = [{"loss": value} for value in values.tolist()]
    for start in range(0, num, 5_000):
        lake.append([batch(identity(), rows[start : start + 5_000], first_seq=start)])
    lake.merge()
    lake.append([batch(identity(), [{"loss": 77.0}], first_seq=num)])
    asked: list[str] = []
    ask = lake.engine.ask
    monkeypatch.setattr(lake.engine, "ask", lambda sql, *rest: asked.append(sql) or ask(sql, *rest))
    span = RowSpan(RUN, "steps", ("rank:0",))
    twice = [CurveRequest(span, "loss", 20), CurveRequest(span, "loss", 100)]
    drawn, same = lake.curves(twice, FORKED[:1], "lineage")
    assert rows_of(drawn) == rows_of(same)
    assert drawn.num_values == num + 1
    assert {99.0, -88.0, 77.0} <= set(drawn.points.value.tolist())
    assert drawn.points.step[np.isnan(drawn.points.value)].tolist() == [7_777]
    assert 100 <= len(drawn.points) < num // 50
    assert len(asked) == 2  # outlines, and the one row behind them


def test_a_few_rows_wait_for_more_to_be_outlined_with_them(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lake_maintenance, "FEWEST_ROWS", 300)
    span = RowSpan(RUN, "steps", ("rank:0",))

    def num_outlined() -> int:
        counted = lake.engine.ask("SELECT count(*) AS num FROM outlines")["num"]
        return int(counted.to_pylist()[0])

    for start in range(0, 400, 100):
        rows: list[dict[str, Value]] = [{"loss": float(i)} for i in range(start, start + 100)]
        lake.append([batch(identity(), rows, first_seq=start)])
        lake.merge()
        assert (num_outlined() > 0) == (start >= 200)
        (drawn,) = lake.curves([CurveRequest(span, "loss")], FORKED[:1], "lineage")
        assert [float(i) for i in range(start + 100)] == drawn.points.value.tolist()
