"""How far a stream's numbers may go on ahead: what is lost is counted, and no lie ends a stream."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.collector.rows import SECOND, START, Writer, seqs_stored
from tests.support.examples import examples
from trainvitals.errors import FormatError
from vitals_collector.ingest.ingest import GAP_SECONDS, MOST_ROWS_PER_SECOND, ingest
from vitals_collector.numbers.memory import MemoryNumberStore
from vitals_collector.storage.store import Store, open_store

HOUR, DAY = 3_600, 86_400
WEEK, YEAR = 7 * DAY, 365 * DAY


def at(second: float) -> int:
    """Return the collector's time, so many seconds after the writer's start."""
    return START + int(second * SECOND)


@pytest.mark.parametrize("year", [0, 100])
@pytest.mark.parametrize("number", [2**52, 10**8])
def test_one_batch_that_is_far_ahead_is_refused_and_its_stream_goes_on(
    store: Store, number: int, year: int
):
    writer = Writer()
    ingest(store, writer.steps(range(100)), received_unix_ns=at(100))
    with pytest.raises(FormatError, match=r"jump to \d+ after 99") as caught:
        lie = writer.steps([101 + year * YEAR], lose=number)
        ingest(store, lie, received_unix_ns=at(102))
    assert "each start has its own" in caught.value.hint
    writer.next_seq["steps"] = 100
    assert 2 == ingest(store, writer.steps([100, 101]), received_unix_ns=at(102)).num_new
    assert list(range(102)) == seqs_stored(store)
    assert 0 == store.counters.num_lost


def test_what_a_single_batch_can_pretend_is_lost_is_made_up_for(store: Store):
    writer = Writer()
    ingest(store, writer.steps(range(100)), received_unix_ns=at(100))
    most = int(MOST_ROWS_PER_SECOND * (GAP_SECONDS + 1))
    ingest(store, writer.steps([100], lose=most), received_unix_ns=at(100))
    with pytest.raises(FormatError):
        ingest(store, writer.steps([100], lose=most + 1), received_unix_ns=at(100))


def test_a_week_without_a_collector_whose_spool_was_full(store: Store):
    writer = Writer()
    ingest(store, writer.steps(range(100)), received_unix_ns=at(100))
    late = writer.steps([100 + WEEK], lose=1_000 * WEEK)
    assert 1 == ingest(store, late, received_unix_ns=at(101 + WEEK)).num_new
    assert 1_000 * WEEK == store.counters.num_lost


def test_the_fastest_stream_there_is_may_lose_an_hour(store: Store):
    writer = Writer()
    ingest(store, writer.steps([0]), received_unix_ns=at(1))
    late = writer.steps([HOUR], lose=MOST_ROWS_PER_SECOND * HOUR)
    ingest(store, late, received_unix_ns=at(HOUR + 1))


def test_the_first_rows_to_arrive_may_be_a_days_after_the_start(store: Store):
    ingest(store, Writer().steps([DAY], lose=1_000 * DAY), received_unix_ns=at(DAY))


def test_two_holes_in_what_is_caught_up_at_once(store: Store):
    writer = Writer()
    ingest(store, writer.steps([0]), received_unix_ns=at(1))
    for hour in (1, 2, 3):
        late = writer.steps([hour * HOUR], lose=10_000 * HOUR)
        ingest(store, late, received_unix_ns=at(WEEK + hour))


@pytest.mark.parametrize("skew", [WEEK, -WEEK, 50 * YEAR, -50 * YEAR])
def test_a_node_whose_clock_is_wrong_may_lose_days(store: Store, skew: int):
    writer = Writer(started=START + skew * SECOND)
    for second in range(3):
        ingest(store, writer.steps([second]), received_unix_ns=at(second))
    late = writer.steps([3 * DAY], lose=1_000 * DAY)
    ingest(store, late, received_unix_ns=at(3 * DAY))
    for hour in (1, 2):  # and, in the same breath, hours at a hundred rows a second
        late = writer.steps([3 * DAY + hour * HOUR], lose=100 * HOUR)
        ingest(store, late, received_unix_ns=at(3 * DAY + 2 * HOUR))


def test_what_is_found_in_a_folder_is_as_old_as_it_says(store: Store):
    writer = Writer()
    ingest(store, writer.steps([0]))
    ingest(store, writer.steps([WEEK], lose=1_000 * WEEK))


def test_rows_lost_with_an_older_copy_of_the_files_may_be_many():
    store = open_store("sqlite://")
    writer = Writer()
    ingest(store, writer.steps([0]), received_unix_ns=at(1))
    ingest(store, writer.steps([WEEK], lose=1_000 * WEEK), received_unix_ns=at(WEEK))
    store.numbers = MemoryNumberStore()
    assert 1 == ingest(store, writer.steps([WEEK + 1]), received_unix_ns=at(WEEK + 1)).num_new
    store.close()


@settings(max_examples=examples(50), deadline=None)
@given(
    skew=st.integers(-2 * YEAR, 0),
    stretches=st.lists(
        st.tuples(
            st.integers(1, WEEK),
            st.integers(0, MOST_ROWS_PER_SECOND),
            st.booleans(),
            st.integers(0, WEEK),
        ),
        max_size=8,
    ),
)
def test_whatever_a_healthy_writer_loses_is_taken(skew, stretches):
    """Each stretch has a length, rows a second, is lost or not, and what comes behind it is late.

    The writer's clock is behind ours or right; rows that arrive do so one after the other.
    """
    store = open_store("sqlite://")
    writer = Writer(started=START + skew * SECOND)
    second = received = num_lost = 0
    for length, rate, is_lost, late in stretches:
        second += length
        lose = rate * length if is_lost else 0
        received = max(received, second + late)
        ingest(store, writer.steps([second], lose=lose), received_unix_ns=at(received))
        num_lost += lose
    assert num_lost == store.counters.num_lost
    store.close()
