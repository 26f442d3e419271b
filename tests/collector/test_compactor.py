import pytest

from tests.collector.rows import RUN, Writer
from trainvitals.errors import StorageError
from trainvitals.views import SeriesQuestion
from vitals_collector.ingest.ingest import ingest
from vitals_collector.queries.query import Query
from vitals_collector.storage import compactor as compactor_module
from vitals_collector.storage.compactor import Compactor
from vitals_collector.storage.read_rows import read_pages
from vitals_collector.storage.store import Store


class Timer:
    """A clock that stands until it is moved."""

    def __init__(self) -> None:
        self.seconds = 1_000

    def time_ns(self) -> int:
        return self.seconds * 10**9

    def monotonic_ns(self) -> int:
        return self.seconds * 10**9


@pytest.fixture(autouse=True)
def without_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compactor_module, "_PAUSE", 0.0)


def sizes(store: Store) -> list[int]:
    """Return the rows of each batch."""
    with store.read() as connection:
        return [page.num_rows for page in read_pages(connection)]


def test_a_writer_with_enough_rows_is_compacted_and_one_with_few_is_not(store: Store):
    compactor = Compactor(store, clock=Timer())
    busy, calm = Writer("rank:0"), Writer("rank:1")
    for start in range(0, 600, 100):
        ingest(store, busy.steps(range(start, start + 100), loss=1.0))
    ingest(store, calm.steps(range(100), loss=1.0))
    compactor.compact_due()
    assert [100, 600] == sorted(sizes(store))
    assert (6, 1, 600) == (compactor.done.num_before, compactor.done.num_after,
                           compactor.done.num_rows)  # fmt: skip


def test_a_writer_that_fell_silent_is_compacted_whatever_it_has(store: Store):
    timer, writer = Timer(), Writer()
    compactor = Compactor(store, clock=timer)
    for start in (0, 50):
        ingest(store, writer.steps(range(start, start + 50), loss=1.0))
    compactor.compact_due()
    assert [50, 50] == sizes(store)
    timer.seconds += 61
    compactor.compact_due()
    assert [100] == sizes(store)


def test_what_an_earlier_collector_left_is_taken_up(store: Store):
    writer = Writer()
    for start in range(0, 600, 100):
        ingest(store, writer.steps(range(start, start + 100), loss=1.0))
    compactor = Compactor(store, clock=Timer())
    compactor.look_around()
    compactor.compact_due()
    assert [600] == sizes(store)


def test_a_store_that_refuses_is_told_and_asked_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
):
    compactor = Compactor(store, clock=Timer())
    ingest(store, Writer().steps(range(600), loss=1.0))

    def refuse(*_: object, **__: object) -> None:
        raise StorageError("no room", hint="free some")

    with monkeypatch.context() as patch:
        patch.setattr(compactor_module, "compact_writer", refuse)
        compactor.compact_due()
        compactor.compact_due()
    assert ({"compaction": 2}, 0) == (store.counters.failures, compactor.done.num_after)
    compactor.compact_due()
    assert 1 == compactor.done.num_after


def test_one_writers_bad_rows_do_not_keep_the_others_back(
    store: Store, monkeypatch: pytest.MonkeyPatch
):
    compactor = Compactor(store, clock=Timer())
    bad, good = Writer("rank:0"), Writer("rank:1")
    for writer in (bad, good):
        ingest(store, writer.steps(range(600), loss=1.0))
    compact_writer = compactor_module.compact_writer

    def stumble(store: Store, key: tuple[str, str, str], *rest: object, is_over: bool) -> None:
        if key[1] == bad.identity.incarnation:
            raise ValueError("cannot be")
        compact_writer(store, key, *rest, is_over=is_over)  # type: ignore[arg-type]

    monkeypatch.setattr(compactor_module, "compact_writer", stumble)
    compactor.compact_due()
    assert ({"compaction": 1}, 600) == (store.counters.failures, compactor.done.num_rows)


def test_it_runs_beside_the_ingest_and_ends_when_it_is_told(store: Store):
    writer, query = Writer(), Query(store, clock=Timer())
    compactor = Compactor(store, clock=Timer())
    compactor.start()
    for start in range(0, 3_000, 100):
        ingest(store, writer.steps(range(start, start + 100), loss=1.0))
        assert (
            start + 100
            == query.ask(SeriesQuestion(run_id=RUN, metric="steps.loss", points=20_000)).num_total
        )
    compactor.close()
    compactor.compact_due()
    assert 3_000 == sum(sizes(store))
    assert compactor.done.num_after > 0
