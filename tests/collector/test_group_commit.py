import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.collector.alerting import started
from tests.collector.rows import Writer
from trainvitals.clock import SystemClock
from trainvitals.errors import FormatError, StorageError
from trainvitals.wire import Batch
from vitals_collector.api.ingest_route import (
    BUSY,
    CommitLimits,
    CommitQueue,
    Outcome,
    PendingBody,
)
from vitals_collector.storage.store import Store, open_data_store, open_store

Told = list[tuple[PendingBody, Outcome]]


class Asker:
    """Puts bodies into an intake that has not begun, and keeps what it is told of each group."""

    def __init__(self, store: Store, limits: CommitLimits | None = None) -> None:
        self.told: list[Told] = []
        self._loop = asyncio.new_event_loop()
        self.commits = CommitQueue(
            store, clock=SystemClock(), on_done=self.told.append, limits=limits
        )

    def put(self, *raws: bytes) -> PendingBody:
        waiting = PendingBody(raws, sum(map(len, raws)), self._loop.create_future())
        self.commits.enqueue(waiting)
        return waiting

    def outcomes(self) -> list[list[Outcome]]:
        """Let it work until all is stored; return each group's outcomes."""
        if not self.commits.is_running:
            self.commits.start()
        self.commits.close()
        self._loop.close()
        return [[outcome for _, outcome in group] for group in self.told]


@pytest.fixture
def memory() -> Iterator[Store]:
    store = open_store("sqlite://")
    yield store
    store.close()


def num_rows(outcomes: Sequence[Outcome]) -> list[object]:
    """Return each body's new rows, or the code of its error."""
    return [
        [reply.num_new for reply in one] if isinstance(one, tuple) else getattr(one, "code", one)
        for one in outcomes
    ]


def test_what_waits_is_committed_together_and_told_at_once(memory: Store):
    commits: list[int] = []
    memory.after_ingest.append(lambda new: commits.append(len(new)))
    asker = Asker(memory)
    for i in range(5):
        asker.put(Writer(f"rank:{i}").steps(range(3)))
    assert [[[3]] * 5] == [num_rows(group) for group in asker.outcomes()]
    assert [5] == commits


def test_a_refused_body_keeps_no_other_back(memory: Store):
    asker = Asker(memory)
    good, torn, also_good = Writer(), Writer().steps([0])[:-1], Writer("rank:1")
    asker.put(good.steps([0]))
    asker.put(torn)
    asker.put(also_good.steps([0, 1]), torn)
    (group,) = asker.outcomes()
    assert [[1], "V230", [2, 0]] == num_rows(group)
    assert {"V230": 2} == memory.counters.rejected


def test_what_finds_no_room_is_refused_counted_and_nothing_else_is_lost(memory: Store):
    raw = Writer().steps([0])
    asker = Asker(memory, CommitLimits(max_bytes=len(raw) + 10))
    asker.put(raw)
    with pytest.raises(StorageError, match="1 bodies wait") as caught:
        asker.put(raw)
    assert (BUSY, 1, len(raw)) == (
        caught.value.code,
        memory.counters.num_deferred,
        asker.commits.num_bytes,
    )
    assert [[[1]]] == [num_rows(group) for group in asker.outcomes()]
    assert 0 == asker.commits.num_bytes


def test_the_number_of_waiting_bodies_has_a_bound_too(memory: Store):
    asker = Asker(memory, CommitLimits(max_bodies=2))
    writer = Writer()
    asker.put(writer.steps([0]))
    asker.put(writer.steps([1]))
    with pytest.raises(StorageError, match="2 bodies wait"):
        asker.put(writer.steps([2]))
    assert 2 == sum(len(group) for group in asker.outcomes())


def test_one_transaction_takes_a_bounded_number_of_batches(memory: Store):
    asker = Asker(memory, CommitLimits(group_batches=2))
    writer = Writer()
    for step in range(5):
        asker.put(writer.steps([step]))
    assert [2, 2, 1] == [len(group) for group in asker.outcomes()]


def test_behind_rows_that_wait_too_long_no_rows_are_taken_but_events_are(memory: Store):
    asker = Asker(memory, CommitLimits(wait_seconds=0.05))
    writer = Writer()
    asker.put(writer.steps([0]))
    time.sleep(0.06)
    with pytest.raises(StorageError, match=r"for up to \d+\.\d s") as caught:
        asker.put(writer.steps([1]))
    assert (BUSY, 1) == (caught.value.code, memory.counters.num_deferred)
    asker.put(Writer("rank:1").events(started()))
    assert 2 == sum(len(group) for group in asker.outcomes())


def test_a_closed_intake_takes_nothing_more(memory: Store):
    asker = Asker(memory)
    waiting = asker.put(Writer().steps([0]))
    asker.outcomes()
    with pytest.raises(StorageError, match="shutting down"):
        asker.commits.enqueue(waiting)


def test_a_database_that_refuses_is_told_to_the_group_and_the_next_one_is_stored(
    memory: Store, monkeypatch: pytest.MonkeyPatch
):
    heard = threading.Event()
    asker = Asker(memory)
    told = asker.told.append
    asker.commits._on_done = lambda some: (told(some), heard.set())  # type: ignore[assignment]
    raw = Writer().steps([0])
    with monkeypatch.context() as patch:

        def locked() -> None:
            raise StorageError("locked", code="V303")

        patch.setattr(memory, "write", locked)
        asker.put(raw)
        asker.put(raw)
        asker.commits.start()
        assert heard.wait(30)
    asker.put(raw)
    assert [["V303", "V303"], [[1]]] == [num_rows(group) for group in asker.outcomes()]


def test_a_bug_is_told_and_does_not_end_the_thread(
    memory: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    heard = threading.Event()
    asker = Asker(memory)
    told = asker.told.append

    def tell(some: Told) -> None:
        told(some)
        heard.set()
        raise RuntimeError("the loop is closed")

    asker.commits._on_done = tell
    with monkeypatch.context() as patch:
        patch.setattr("vitals_collector.api.ingest_route.store_bodies", lambda *_: 1 / 0)
        asker.put(Writer().steps([0]))
        asker.commits.start()
        assert heard.wait(30)
    asker.put(Writer().steps([0]))
    first, second = asker.outcomes()
    assert ZeroDivisionError is type(first[0])
    assert [[1]] == num_rows(second)
    assert "answers_not_given" in caplog.text
    assert not isinstance(second[0], FormatError)


def test_events_are_stored_while_rows_wait_for_a_merge(tmp_path: Path):
    store = open_data_store(tmp_path / "data")
    stored: list[str] = []
    events_stored = threading.Event()

    def note(new: Sequence[tuple[Batch, object]]) -> None:
        stored.extend(batch.header.stream for batch, _ in new)
        events_stored.set()

    store.after_ingest.append(note)
    asker, writer = Asker(store), Writer()
    with store.numbers.write_lock():
        asker.commits.start()
        asker.put(writer.steps([0]), writer.events(started()))
        assert events_stored.wait(30)
        with store.write():  # nor does who writes what they mean wait
            assert ["events"] == stored
        assert [] == asker.told
    assert [[[1, 1]]] == [num_rows(group) for group in asker.outcomes()]
    assert ["events", "steps"] == stored
    store.close()


def test_replies_stand_in_the_order_of_the_batches(memory: Store):
    asker, writer = Asker(memory), Writer()
    torn = writer.steps([9])[:-1]
    asker.put(writer.events(started()), torn, writer.steps([0, 1]), writer.events(started())[:-1])
    (outcome,) = [outcome for group in asker.outcomes() for outcome in group]
    assert isinstance(outcome, tuple)
    assert [(1, ""), (0, "V230"), (2, ""), (0, "V230")] == [(r.num_new, r.code) for r in outcome]
