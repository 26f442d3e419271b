"""Batches of two runs, and what queries return of them."""

from tests.collector.numbers.written import OTHER_RUN, RUN, batch, identity
from tests.support.numbers import plain
from trainvitals.wire import Batch
from vitals_collector.numbers.interface import AttemptRow, CurveRequest, NumberStore, RowSpan

ATTEMPTS = [AttemptRow(1, None, 0)]


def sent() -> list[Batch]:
    """Return what two runs have written."""
    batches = []
    for first in (0, 10, 20):
        for run in (RUN, OTHER_RUN):
            for rank in (0, 1):
                rows = [{"loss": float(first + i + 100 * rank)} for i in range(10)]
                batches.append(batch(identity(run, rank=rank), rows, first_seq=first))
    return batches


def answers(numbers: NumberStore, run: str) -> list[object]:
    """Return all that a run's losses are asked for."""
    span = RowSpan(run, "steps")
    columns = numbers.scan(span, ["loss", "rank", "seq"])
    curves = [CurveRequest(span._replace(sources=(f"rank:{rank}",)), "loss", 2) for rank in (0, 1)]
    drawn = numbers.curves(curves, ATTEMPTS, "lineage")
    ends = [(len(d.points), d.points.value[[0, -1]].tolist(), d.num_values) for d in drawn]
    return [{name: plain(column) for name, column in columns.items()}, [end[1:] for end in ends]]
