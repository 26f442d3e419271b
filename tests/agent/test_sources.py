import pytest

from tests.agent.builders import ManualClock, identity
from trainvitals.catalog import EVENT_SCHEMA, NODE_SCHEMA
from trainvitals.errors import StorageError
from trainvitals.records import Note, decode_events
from trainvitals.wire import decode_batch
from vitals_agent.sources import AgentSource


def _into(batches: list[bytes]):
    return lambda raw: batches.append(raw) is None


def test_samples_are_rows_of_the_catalogs_schema_with_step_minus_one():
    batches: list[bytes] = []
    source = AgentSource(identity(), _into(batches), ManualClock())
    source.sample(NODE_SCHEMA, [{"load1": 0.5}])
    batch = decode_batch(batches[0])
    assert NODE_SCHEMA == batch.header.stream_schema
    stamp = {"step": -1, "attempt": 0, "time_unix_ns": ManualClock().now_ns}
    stamp["monotonic_ns"] = ManualClock().now_ns
    assert {**stamp, "load1": 0.5} == NODE_SCHEMA.unpack(batch.rows)


def test_each_stream_of_a_source_counts_from_zero_by_itself():
    batches: list[bytes] = []
    source = AgentSource(identity(), _into(batches), ManualClock())
    source.sample(NODE_SCHEMA, [{"load1": 0.5}, {"load1": 0.6}])
    source.write_event(Note(code="a", text="x" * 2000))
    source.sample(NODE_SCHEMA, [{"load1": 0.7}])
    headers = [decode_batch(raw).header for raw in batches]
    assert [("node", 0, 1), ("events", 0, 2), ("node", 2, 2)] == [
        (h.stream, h.first_seq, h.last_seq) for h in headers
    ]


def test_a_long_event_comes_back_whole():
    batches: list[bytes] = []
    note = Note(code="a", text="x" * 2000, severity="error")
    AgentSource(identity(), _into(batches), ManualClock()).write_event(note, step=7, attempt=3)
    (row,) = decode_events(EVENT_SCHEMA, decode_batch(batches[0]).rows)
    assert (7, 3, note) == (row.step, row.attempt, row.event)


def test_rows_that_could_not_be_put_are_a_gap_and_the_next_batch_says_how_many():
    batches: list[bytes] = []
    full = True

    def put(raw: bytes) -> bool:
        if full:
            raise StorageError("no space")
        batches.append(raw)
        return True

    source = AgentSource(identity(), put, ManualClock())
    for _ in range(2):
        with pytest.raises(StorageError):
            source.sample(NODE_SCHEMA, [{"load1": 0.5}])
    full = False
    source.sample(NODE_SCHEMA, [{"load1": 0.5}])
    source.sample(NODE_SCHEMA, [{"load1": 0.5}])
    headers = [decode_batch(raw).header for raw in batches]
    assert [(2, 2), (3, 0)] == [(h.first_seq, h.dropped) for h in headers]
