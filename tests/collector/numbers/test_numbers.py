"""What every store of numbers promises; the lake and memory alike."""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.collector.numbers.written import OTHER_RUN, RUN, batch, identity
from trainvitals.rows import Value
from vitals_collector.numbers.interface import Column, Numbers, Span
from vitals_collector.numbers.lake import Lake
from vitals_collector.numbers.memory import MemoryNumbers

STEPS = Span(RUN, "steps")


@pytest.fixture(params=["lake", "memory"])
def numbers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Numbers]:
    """Give an empty store of each kind."""
    if request.param == "memory":
        yield MemoryNumbers()
        return
    lake = Lake(tmp_path)
    yield lake
    lake.close()


def plain(column: Column) -> list[Value | str]:
    """Return the values, None where one is missing."""
    pairs = zip(column.values.tolist(), column.is_missing.tolist(), strict=True)
    return [None if is_missing else value for value, is_missing in pairs]


def losses(numbers: Numbers, span: Span = STEPS) -> list[Value | str]:
    """Return the run's losses."""
    return plain(numbers.scan(span, ["loss"])["loss"])


def test_a_row_that_comes_again_is_stored_once(numbers: Numbers) -> None:
    first = batch(identity(), [{"loss": 3.0}, {"loss": 2.0}])
    longer = batch(identity(), [{"loss": 3.0}, {"loss": 2.0}, {"loss": 1.0}])
    assert [2, 0, 1, 0] == numbers.append([first, first, longer, longer])
    assert [0] == numbers.append([longer])
    assert [3.0, 2.0, 1.0] == losses(numbers)
    assert numbers.mark((RUN, identity().incarnation, "steps")) == 2


def test_an_unwritten_stream_is_empty_and_marks_start_below_zero(numbers: Numbers) -> None:
    assert losses(numbers) == []
    assert numbers.mark((RUN, identity().incarnation, "steps")) == -1
    assert numbers.append([]) == []


def test_nan_infinity_and_missing_are_three_things(numbers: Numbers) -> None:
    values = [math.nan, math.inf, -math.inf, None, -0.0, 5e-324, 1.7976931348623157e308]
    numbers.append([batch(identity(), [{"loss": value} for value in values])])
    column = numbers.scan(STEPS, ["loss"])["loss"]
    assert column.is_missing.tolist() == [value is None for value in values]
    there = np.array([value for value in values if value is not None])
    bits = column.values[~column.is_missing].view(np.int64)
    assert bits.tolist() == there.view(np.int64).tolist()


def test_a_large_counter_is_kept_to_the_last_digit(numbers: Numbers) -> None:
    numbers.append([batch(identity(), [{"tokens": 2**53 + 1}], kinds={"tokens": "i8"})])
    assert plain(numbers.scan(STEPS, ["tokens"])["tokens"]) == [2**53 + 1]


def test_a_new_column_is_missing_in_the_rows_before_it(numbers: Numbers) -> None:
    numbers.append([batch(identity(), [{"loss": 3.0}])])
    numbers.append([batch(identity(), [{"loss": 2.0, "z": 7.0}], first_seq=1)])
    columns = numbers.scan(STEPS, ["z", "never_written", "loss"])
    assert list(columns) == ["z", "never_written", "loss"]
    assert plain(columns["z"]) == [None, 7.0]
    assert plain(columns["never_written"]) == [None, None]


def test_names_that_differ_in_case_alone_are_two_columns(numbers: Numbers) -> None:
    awkward = {"Loss": 1.0, "loss": 2.0, 'a"b': 3.0, "seq ": 4.0, "S$hex$61": 5.0, "select": 6.0}
    numbers.append([batch(identity(), [awkward])])
    columns = numbers.scan(STEPS, list(awkward))
    assert {name: plain(column) for name, column in columns.items()} == {
        name: [value] for name, value in awkward.items()
    }


def test_one_name_of_two_types_gives_floats(numbers: Numbers) -> None:
    numbers.append([batch(identity(), [{"n": 1}], kinds={"n": "i8"})])
    numbers.append([batch(identity(), [{"n": 2.5}], first_seq=1)])
    assert plain(numbers.scan(STEPS, ["n"])["n"]) == [1.0, 2.5]


def test_texts_come_back_and_bytes_that_are_none_refuse_nothing(numbers: Numbers) -> None:
    rows: list[dict[str, Value]] = [{"name": b"layers.0"}, {"name": b"\xff\xfe"}, {}]
    numbers.append([batch(identity(), rows, kinds={"name": "S16"}, stream="layers")])
    columns = numbers.scan(Span(RUN, "layers"), ["name"])
    assert plain(columns["name"]) == ["layers.0", "\ufffd\ufffd", None]


def test_rows_come_by_step_then_rank_then_time(numbers: Numbers) -> None:
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


@pytest.mark.parametrize(
    ("span", "expected"),
    [
        (STEPS._replace(from_step=1), [1.0, 2.0]),
        (STEPS._replace(to_step=2), [0.0, 1.0]),
        (STEPS._replace(from_step=1, to_step=2), [1.0]),
        (STEPS._replace(ranks=(3,)), [0.0, 1.0, 2.0]),
        (STEPS._replace(ranks=(4,)), []),
        (STEPS._replace(run_id=OTHER_RUN), [8.0]),
        (STEPS._replace(stream="scalars"), []),
    ],
)
def test_a_span_bounds_what_is_read(numbers: Numbers, span: Span, expected: list[float]) -> None:
    numbers.append([batch(identity(rank=3), [{"loss": float(i)} for i in range(3)])])
    numbers.append([batch(identity(OTHER_RUN), [{"loss": 8.0}])])
    assert losses(numbers, span) == expected


def test_a_deleted_run_is_gone_and_does_not_come_back(numbers: Numbers) -> None:
    old = batch(identity(), [{"loss": 1.0}])
    other = batch(identity(OTHER_RUN), [{"loss": 8.0}])
    numbers.append([old, other])
    numbers.delete(RUN)
    assert numbers.append([old]) == [0]
    assert losses(numbers) == []
    assert losses(numbers, STEPS._replace(run_id=OTHER_RUN)) == [8.0]


def test_thousands_of_writers_are_one_commit(numbers: Numbers) -> None:
    batches = [batch(identity(rank=rank), [{"loss": float(rank)}]) for rank in range(2_000)]
    assert [1] * 2_000 == numbers.append(batches)
    assert [float(rank) for rank in range(2_000)] == losses(numbers)
