"""What a store of numbers holds."""

from tests.collector.numbers.written import RUN
from trainvitals.rows import Value
from vitals_collector.numbers.interface import (
    Column,
    Numbers,
    Span,
)

STEPS = Span(RUN, "steps")


def plain(column: Column) -> list[Value | str]:
    """Return the values, None where one is missing."""
    pairs = zip(column.values.tolist(), column.is_missing.tolist(), strict=True)
    return [None if is_missing else value for value, is_missing in pairs]


def losses(numbers: Numbers, span: Span = STEPS) -> list[Value | str]:
    """Return the run's losses."""
    return plain(numbers.scan(span, ["loss"])["loss"])
