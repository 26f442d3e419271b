"""What a paused owner commits after its run was taken is found, and taken out again."""

from pathlib import Path

from tests.collector.numbers.test_numbers import losses
from tests.collector.numbers.written import RUN, batch, identity
from trainvitals.wire import Batch
from vitals_collector.numbers.interface import AttemptRow, Curve, Span
from vitals_collector.numbers.lake import Lake

KEY = RUN, identity().incarnation, "steps"


def rows(first: int, end: int, owner: float, *, rank: int = 0) -> Batch:
    """Return a rank's steps, whose loss says who was to store them."""
    values = [{"loss": owner + step / 100} for step in range(first, end)]
    return batch(identity(rank=rank), values, first_seq=first)


def expected(*owners: tuple[int, int, float]) -> list[float]:
    """Return losses by who stored them."""
    return [owner + step / 100 for first, end, owner in owners for step in range(first, end)]


def test_rows_of_a_paused_owner_are_taken_out(tmp_path: Path) -> None:
    paused, owner = Lake(tmp_path), Lake(tmp_path)
    paused.own({RUN: 1})
    paused.append([rows(0, 10, 1.0)])
    owner.own({RUN: 2})
    assert owner.mark(KEY) == 9
    owner.append([rows(10, 13, 2.0)])
    assert paused.append([rows(10, 15, 1.0)]) == [5]  # it does not know yet
    assert len(losses(owner)) == 18
    owner.merge()
    assert losses(owner) == expected((0, 10, 1.0), (10, 13, 2.0))
    span = Span(RUN, "steps", ("rank:0",))
    (drawn,) = owner.curves([Curve(span, "loss", 2)], [AttemptRow(1, None, 0)], "lineage")
    assert drawn.num_values == 13
    assert owner.append([rows(13, 15, 2.0)]) == [2]
    assert owner.append([rows(0, 15, 2.0)]) == [0]
    paused.close()
    owner.close()


def test_the_third_owner_starts_where_the_second_was(tmp_path: Path) -> None:
    paused, second = Lake(tmp_path), Lake(tmp_path)
    paused.own({RUN: 1})
    paused.append([rows(0, 4, 1.0)])
    second.own({RUN: 2})
    # A stream that the fence has nothing of, and one that ran ahead of the owner's.
    paused.append([rows(4, 9, 1.0), rows(0, 2, 1.0, rank=1)])
    second.append([rows(4, 6, 2.0)])
    second.close()
    third = Lake(tmp_path)
    assert third.mark(KEY) == 5
    third.own({RUN: 3})
    assert third.mark(KEY) == 5
    assert third.mark((RUN, identity(rank=1).incarnation, "steps")) == -1
    assert losses(third) == expected((0, 4, 1.0), (4, 6, 2.0))
    paused.append([rows(9, 12, 1.0)])
    third.append([rows(6, 8, 3.0)])
    third.merge()
    assert losses(third) == expected((0, 4, 1.0), (4, 6, 2.0), (6, 8, 3.0))
    paused.close()
    third.close()


def test_an_owner_of_a_run_without_rows_has_a_fence_as_well(tmp_path: Path) -> None:
    paused, owner = Lake(tmp_path), Lake(tmp_path)
    paused.own({RUN: 1})
    owner.own({RUN: 2})
    paused.append([rows(0, 3, 1.0)])
    owner.append([rows(0, 2, 2.0)])
    owner.merge()
    assert losses(owner) == expected((0, 2, 2.0))
    paused.close()
    owner.close()
