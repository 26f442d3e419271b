"""What every store of numbers promises; the lake and memory alike."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.collector.numbers.conftest import empty_numbers
from tests.collector.numbers.written import OTHER_RUN, RUN, batch, identity
from tests.support.numbers import STEPS, losses, plain
from trainvitals.catalog import ROW_COLUMNS
from trainvitals.errors import FormatError
from trainvitals.rows import Value
from trainvitals.views import Branch
from vitals_collector.numbers.interface import (
    AttemptRow,
    CurveRequest,
    DownsampledCurve,
    NumberStore,
    RowSpan,
    SeriesKey,
)

ATTEMPTS = [AttemptRow(1, None, 0)]
BEGIN_NS = 1_700_000_000_000_000_000


def test_a_row_that_comes_again_is_stored_once(numbers: NumberStore) -> None:
    first = batch(identity(), [{"loss": 3.0}, {"loss": 2.0}])
    longer = batch(identity(), [{"loss": 3.0}, {"loss": 2.0}, {"loss": 1.0}])
    assert [2, 0, 1, 0] == numbers.append([first, first, longer, longer])
    assert [0] == numbers.append([longer])
    assert [3.0, 2.0, 1.0] == losses(numbers)
    assert numbers.mark((RUN, identity().incarnation, "steps")) == 2


def test_an_unwritten_stream_is_empty_and_marks_start_below_zero(numbers: NumberStore) -> None:
    assert losses(numbers) == []
    assert numbers.mark((RUN, identity().incarnation, "steps")) == -1
    assert numbers.append([]) == []


def test_nan_infinity_and_missing_are_three_things(numbers: NumberStore) -> None:
    values = [math.nan, math.inf, -math.inf, None, -0.0, 5e-324, 1.7976931348623157e308]
    numbers.append([batch(identity(), [{"loss": value} for value in values])])
    column = numbers.scan(STEPS, ["loss"])["loss"]
    assert column.is_missing.tolist() == [value is None for value in values]
    there = np.array([value for value in values if value is not None])
    bits = column.values[~column.is_missing].view(np.int64)
    assert bits.tolist() == there.view(np.int64).tolist()


def test_a_large_counter_is_kept_to_the_last_digit(numbers: NumberStore) -> None:
    numbers.append([batch(identity(), [{"tokens": 2**53 + 1}], kinds={"tokens": "i8"})])
    assert plain(numbers.scan(STEPS, ["tokens"])["tokens"]) == [2**53 + 1]


def test_a_new_column_is_missing_in_the_rows_before_it(numbers: NumberStore) -> None:
    numbers.append([batch(identity(), [{"loss": 3.0}])])
    numbers.append([batch(identity(), [{"loss": 2.0, "z": 7.0}], first_seq=1)])
    columns = numbers.scan(STEPS, ["z", "never_written", "loss"])
    assert list(columns) == ["z", "never_written", "loss"]
    assert plain(columns["z"]) == [None, 7.0]
    assert plain(columns["never_written"]) == [None, None]


def test_names_that_differ_in_case_alone_are_two_columns(numbers: NumberStore) -> None:
    awkward = {"Loss": 1.0, "loss": 2.0, 'a"b': 3.0, "seq ": 4.0, "S$hex$61": 5.0, "select": 6.0}
    numbers.append([batch(identity(), [awkward])])
    columns = numbers.scan(STEPS, list(awkward))
    assert {name: plain(column) for name, column in columns.items()} == {
        name: [value] for name, value in awkward.items()
    }


def test_one_name_of_two_types_gives_floats(numbers: NumberStore) -> None:
    numbers.append([batch(identity(), [{"n": 1}], kinds={"n": "i8"})])
    numbers.append([batch(identity(), [{"n": 2.5}], first_seq=1)])
    assert plain(numbers.scan(STEPS, ["n"])["n"]) == [1.0, 2.5]


def test_texts_come_back_and_bytes_that_are_none_refuse_nothing(numbers: NumberStore) -> None:
    rows: list[dict[str, Value]] = [{"name": b"layers.0"}, {"name": b"\xff\xfe"}, {}]
    numbers.append([batch(identity(), rows, kinds={"name": "S16"}, stream="layers")])
    columns = numbers.scan(RowSpan(RUN, "layers"), ["name"])
    assert plain(columns["name"]) == ["layers.0", "\ufffd\ufffd", None]


def test_rows_come_by_step_then_rank_then_time(numbers: NumberStore) -> None:
    later = batch(identity(rank=0, start=1), [{"step": 1, "loss": 9.0}])
    for rank in (2, 1, 0):
        rows = [{"loss": float(rank + step)} for step in (0, 10, 20)]
        numbers.append([batch(identity(rank=rank), rows)])
    numbers.append([later])
    columns = numbers.scan(STEPS, ["step", "rank", "incarnation", "source", "seq"])
    assert plain(columns["step"]) == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2]
    assert plain(columns["rank"]) == [0, 1, 2, 0, 0, 1, 2, 0, 1, 2]
    assert plain(columns["source"])[:3] == ["rank:0", "rank:1", "rank:2"]
    assert later.header.identity.incarnation in plain(columns["incarnation"])[3:5]


@pytest.fixture(scope="module", params=["lake", "memory"])
def three_rows(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, fresh_lake: Path
) -> Iterator[NumberStore]:
    """A store of each kind with three rows of a run and one of another, for questions alone."""
    with empty_numbers(request.param, tmp_path_factory.mktemp("numbers"), fresh_lake) as numbers:
        numbers.append([batch(identity(rank=3), [{"loss": float(i)} for i in range(3)])])
        numbers.append([batch(identity(OTHER_RUN), [{"loss": 8.0}])])
        yield numbers


@pytest.mark.parametrize(
    ("span", "expected"),
    [
        (STEPS._replace(from_step=1), [1.0, 2.0]),
        (STEPS._replace(to_step=2), [0.0, 1.0]),
        (STEPS._replace(from_step=1, to_step=2), [1.0]),
        (STEPS._replace(sources=("rank:3",)), [0.0, 1.0, 2.0]),
        (STEPS._replace(sources=("rank:4", "node:a")), []),
        (STEPS._replace(from_unix_ns=BEGIN_NS + 2), [2.0]),
        (STEPS._replace(to_unix_ns=BEGIN_NS + 1), [0.0]),
        (STEPS._replace(seqs={identity(rank=3).incarnation: (1, 3)}), [1.0, 2.0]),
        (STEPS._replace(seqs={identity(rank=4).incarnation: (0, 3)}), []),
        (STEPS._replace(seqs={}), []),
        (STEPS._replace(keyed=SeriesKey("step", 1)), [1.0]),
        (STEPS._replace(keyed=SeriesKey("never_written", 1)), []),
        (STEPS._replace(run_id=OTHER_RUN), [8.0]),
        (STEPS._replace(stream="scalars"), []),
    ],
)
def test_a_span_bounds_what_is_read(
    three_rows: NumberStore, span: RowSpan, expected: list[float]
) -> None:
    assert losses(three_rows, span) == expected
    assert three_rows.num_rows(span) == len(expected)


def test_each_writer_numbers_its_rows_and_its_names_anew(numbers: NumberStore) -> None:
    first, second = identity(), identity(start=1)
    for who, names in ((first, (0, 1, 0)), (second, (1, 0, 0))):
        rows = [{"name": name, "value": 10.0 * (who is second) + i} for i, name in enumerate(names)]
        kinds = {"name": "i8", "value": "f8"}
        numbers.append([batch(who, rows, kinds=kinds, stream="scalars")])

    def values(**of_span: Any) -> list[Value | str]:
        span = RowSpan(RUN, "scalars", **of_span)
        assert numbers.num_rows(span) == len(plain(numbers.scan(span, ["value"])["value"]))
        return sorted(plain(numbers.scan(span, ["value"])["value"]), key=str)

    of_both = {first.incarnation: 0, second.incarnation: 1}
    assert values(keyed=SeriesKey("name", 0)) == [0.0, 11.0, 12.0, 2.0]
    assert values(keyed=SeriesKey("name", of_both)) == [0.0, 10.0, 2.0]
    assert values(keyed=SeriesKey("name", {second.incarnation: 0})) == [11.0, 12.0]
    assert values(keyed=SeriesKey("name", {})) == []
    seqs = {first.incarnation: (1, 2), second.incarnation: (0, 2)}
    assert values(seqs=seqs) == [1.0, 10.0, 11.0]
    assert values(seqs=seqs, keyed=SeriesKey("name", of_both)) == [10.0]


def test_a_run_has_the_columns_and_the_sources_of_its_own_rows(numbers: NumberStore) -> None:
    assert numbers.kinds(RUN, "steps") == {}
    assert numbers.sources(RUN, "steps") == []
    numbers.append([batch(identity(OTHER_RUN), [{"theirs": 1.0}])])
    numbers.append([batch(identity(rank=10), [{"loss": 1.0, "n": 1}], kinds=KINDS)])
    numbers.append([batch(identity(rank=2), [{"n": 2.5, "name": b"a"}], kinds=MORE_KINDS)])
    own = {column.name: "i8" for column in ROW_COLUMNS}
    assert numbers.kinds(RUN, "steps") == own | {"loss": "f8", "n": "f8", "name": "S"}
    assert numbers.sources(RUN, "steps") == ["rank:10", "rank:2"]
    assert numbers.sources(RUN, "layers") == []
    numbers.delete(RUN)
    assert numbers.kinds(RUN, "steps") == {}
    assert numbers.sources(RUN, "steps") == []


KINDS = {"loss": "f8", "n": "i8"}
MORE_KINDS = {"n": "f8", "name": "S16"}


def test_numbers_under_a_name_that_is_text_too_are_missing(numbers: NumberStore) -> None:
    numbers.append([batch(identity(OTHER_RUN), [{"n": b"theirs"}], kinds={"n": "S16"})])
    numbers.append([batch(identity(), [{"n": 1.0}])])
    assert plain(numbers.scan(STEPS, ["n"])["n"]) == [1.0]
    numbers.append([batch(identity(), [{"n": b"mine"}], first_seq=1, kinds={"n": "S8"})])
    assert plain(numbers.scan(STEPS, ["n"])["n"]) == [None, "mine"]
    assert plain(numbers.scan(STEPS._replace(to_step=1), ["n"])["n"]) == [None]
    with pytest.raises(FormatError, match="n is text"):
        numbers.curves([CurveRequest(STEPS, "n")], ATTEMPTS, "lineage")


def of(drawn: DownsampledCurve) -> dict[int, float]:
    """Return a curve's values by step."""
    return dict(zip(drawn.points.step.tolist(), drawn.points.value.tolist(), strict=True))


def test_a_curve_is_stitched_from_the_attempts_of_its_branch(numbers: NumberStore) -> None:
    rows: list[dict[str, Value]] = [{"step": i, "loss": float(i)} for i in range(6)]
    again: list[dict[str, Value]] = [
        {"step": i, "loss": 10.0 + i, "attempt": 2} for i in range(3, 5)
    ]
    numbers.append([batch(identity(), rows)])
    numbers.append([batch(identity(start=1), [{"step": 1, "loss": 7.0, "time_unix_ns": 2**62}])])
    numbers.append([batch(identity(start=2), again)])
    attempts = [*ATTEMPTS, AttemptRow(2, 1, 3)]

    def curve(branch: Branch, **of_span: Any) -> tuple[dict[int, float], int]:
        (drawn,) = numbers.curves(
            [CurveRequest(STEPS._replace(**of_span), "loss")], attempts, branch
        )
        return of(drawn), drawn.num_values

    assert curve("lineage") == ({0: 0.0, 1: 7.0, 2: 2.0, 3: 13.0, 4: 14.0}, 6)
    assert curve("discarded") == ({3: 3.0, 4: 4.0, 5: 5.0}, 3)
    assert curve("all")[1] == 9
    assert curve("lineage", from_step=2, to_step=4) == ({2: 2.0, 3: 13.0}, 2)


def test_many_curves_are_each_what_they_are_alone(numbers: NumberStore) -> None:
    for rank in range(4):
        rows = [{"loss": float(rank * 10 + i), "z": None if i else 1.0} for i in range(5)]
        numbers.append([batch(identity(rank=rank), rows)])
    layers = [{"layer": i % 2, "norm": float(i)} for i in range(6)]
    kinds = {"layer": "i8", "norm": "f8"}
    numbers.append([batch(identity(), layers, kinds=kinds, stream="layers")])
    curves = [
        *(CurveRequest(STEPS._replace(sources=(f"rank:{rank}",)), "loss", 2) for rank in range(5)),
        CurveRequest(STEPS._replace(sources=("rank:1",)), "z"),
        CurveRequest(STEPS._replace(sources=("rank:1",)), "never_written"),
        CurveRequest(STEPS._replace(sources=("rank:1",), from_step=2), "loss"),
        CurveRequest(RowSpan(RUN, "layers", keyed=SeriesKey("layer", 1)), "norm"),
        CurveRequest(RowSpan(RUN, "layers", keyed=SeriesKey("layer", 0)), "norm"),
        CurveRequest(RowSpan(RUN, "layers", keyed=SeriesKey("layer", {"0" * 16: 0})), "norm"),
        CurveRequest(RowSpan(OTHER_RUN, "layers"), "norm"),
    ]
    drawn = list(map(of, numbers.curves(curves, ATTEMPTS, "lineage")))
    assert drawn == [of(numbers.curves([c], ATTEMPTS, "lineage")[0]) for c in curves]
    assert list(drawn[2].values()) == [20.0, 21.0, 22.0, 23.0, 24.0]
    assert drawn[4:8] == [{}, {0: 1.0}, {}, {2: 12.0, 3: 13.0, 4: 14.0}]
    assert drawn[8:] == [{1: 1.0, 3: 3.0, 5: 5.0}, {0: 0.0, 2: 2.0, 4: 4.0}, drawn[9], {}]


def test_rows_without_a_step_are_drawn_by_their_time(numbers: NumberStore) -> None:
    def sample(start: int, second: int, value: float) -> None:
        row: dict[str, Value] = {"step": -1, "attempt": 0, "watts": value}
        row["time_unix_ns"] = second
        numbers.append([batch(identity(start=start), [row], stream="gpu")])

    for start, second, value in ((0, 5, 1.0), (1, 3, 2.0), (2, 4, math.nan)):
        sample(start, second, value)
    (drawn,) = numbers.curves([CurveRequest(RowSpan(RUN, "gpu"), "watts", 2)], ATTEMPTS, "lineage")
    assert drawn.points.time_unix_ns.tolist() == [3, 4, 5]
    assert drawn.num_values == 3


def test_a_deleted_run_is_gone_and_does_not_come_back(numbers: NumberStore) -> None:
    old = batch(identity(), [{"loss": 1.0}])
    other = batch(identity(OTHER_RUN), [{"loss": 8.0}])
    numbers.append([old, other])
    numbers.delete(RUN)
    assert numbers.append([old]) == [0]
    assert losses(numbers) == []
    assert losses(numbers, STEPS._replace(run_id=OTHER_RUN)) == [8.0]


def test_thousands_of_writers_are_one_commit(numbers: NumberStore) -> None:
    batches = [batch(identity(rank=rank), [{"loss": float(rank)}]) for rank in range(2_000)]
    assert [1] * 2_000 == numbers.append(batches)
    assert [float(rank) for rank in range(2_000)] == losses(numbers)


def test_a_key_is_the_streams_own_column_though_every_row_has_one_of_that_name(
    numbers: NumberStore,
) -> None:
    """An agent writes the rows of its node's ranks; whose they are is a column."""
    rows: list[dict[str, Value]] = [{"rank": rank, "alive": rank + 10} for rank in (0, 1, 2)]
    kinds = {"rank": "i8", "alive": "i8"}
    numbers.append([batch(identity(rank=7), rows, stream="process", kinds=kinds)])
    columns = numbers.scan(RowSpan(RUN, "process", keyed=SeriesKey("rank", 1)), ["alive", "rank"])
    assert [11] == columns["alive"].values.tolist()
    assert [7] == columns["rank"].values.tolist()
    curves = [
        CurveRequest(RowSpan(RUN, "process", keyed=SeriesKey("rank", rank)), "alive")
        for rank in (2, 1)
    ]
    drawn = numbers.curves(curves, [], "lineage")
    assert [[12.0], [11.0]] == [curve.points.value.tolist() for curve in drawn]


def test_the_last_step_of_each_attempt_is_known(numbers: NumberStore) -> None:
    assert {} == numbers.last_steps(RUN)
    rows: list[dict[str, Value]] = [
        {"step": step, "attempt": attempt} for step, attempt in ((1, 1), (2, 1), (0, 2), (5, 3))
    ]
    numbers.append([batch(identity(), rows), batch(identity(rank=1), rows[:2])])
    assert {1: 2, 2: 0, 3: 5} == numbers.last_steps(RUN)
