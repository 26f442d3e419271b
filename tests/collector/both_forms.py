"""Asks of rows as they came and again once they are merged: the answers must be the same."""

from collections.abc import Callable
from typing import TypeVar

from msgspec.structs import replace

from trainvitals.question import Question
from trainvitals.views import RunDetail
from vitals_collector.queries.query import Query
from vitals_collector.storage.store import Store

Answer = TypeVar("Answer")


def asked_twice(store: Store, ask: Callable[[], Answer]) -> Answer:
    """Return the answer, which is the same before and after everything in the lake was merged."""
    before = ask()
    store.numbers.merge()
    assert _comparable(before) == _comparable(ask())
    return before


def _comparable(answer: object) -> str:
    if isinstance(answer, RunDetail):  # how much room it takes is what merging is for
        answer = replace(answer, volume=replace(answer.volume, num_bytes=0))
    return repr(answer)  # NaN is not equal to itself, but is written alike


class QueryOfBothForms:
    """A Query whose every answer was asked for twice."""

    def __init__(self, store: Store, query: Query) -> None:
        self._store = store
        self._query = query

    def ask(self, question: Question[Answer]) -> Answer:
        return asked_twice(self._store, lambda: self._query.ask(question))
