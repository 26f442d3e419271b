"""The records that servers are sent: whole, in order, and the same in each one's words."""

import numpy as np
import pytest

from trainvitals.identity import new_run_id
from trainvitals.wire import decode_batch, split_batches
from vitals_bench.ingest import remote_write
from vitals_bench.ingest.records import NAMES, SCHEMA, Numbers, Writers, by_node

pytestmark = pytest.mark.nightly

SECOND = 1_000_000_000


def block(num_ranks=8, num_steps=3, first_step=0):
    numbers = Numbers(num_ranks)
    return numbers.block(first_step, num_steps, begin_ns=10 * SECOND, step_ns=SECOND)


def test_batches_are_what_a_collector_takes_and_hold_the_very_values():
    made = block(first_step=5)
    raws = Writers(new_run_id(1), range(8, 16), world_size=64).batches(made)
    batches = [decode_batch(raw) for raw in raws]
    assert [f"rank:{rank}" for rank in range(8, 16)] == [b.header.identity.source for b in batches]
    assert {(5, 7)} == {(b.header.first_seq, b.header.last_seq) for b in batches}
    size = SCHEMA.row_size
    for batch, values in zip(batches, made.values, strict=True):
        rows = [batch.rows[start : start + size] for start in range(0, len(batch.rows), size)]
        assert [5, 6, 7] == [SCHEMA.seq_of(row) for row in rows]
        assert values.tolist() == [[SCHEMA.unpack(row)[n] for n in NAMES] for row in rows]
        assert [15 * SECOND, 16 * SECOND, 17 * SECOND] == [
            SCHEMA.unpack(row)["time_unix_ns"] for row in rows
        ]


def test_values_are_those_of_float32_unless_all_bits_are_wanted():
    made, exact = block().values, Numbers(8, is_float32=False).block(0, 3, begin_ns=0, step_ns=1)
    assert np.array_equal(made, made.astype(np.float32))
    assert not np.array_equal(exact.values, exact.values.astype(np.float32))


def test_a_node_s_batches_travel_together():
    raws = Writers(new_run_id(1), range(16), world_size=16).batches(block(16))
    joined = by_node(raws)
    assert [raws[:8], raws[8:]] == [split_batches(one) for one in joined]


def test_a_block_is_sent_in_pieces_that_go_on_where_the_last_ended():
    parts = list(block(2, 5, first_step=3).parts(2))
    assert [(3, 2), (5, 2), (7, 1)] == [(part.first_step, part.num_steps) for part in parts]
    assert [SECOND * s for s in (13, 14, 15, 16, 17)] == [
        t for part in parts for t in part.time_unix_ns.tolist()
    ]


def test_a_remote_write_has_sorted_labels_and_each_series_samples_by_time():
    cramjam = pytest.importorskip("cramjam")
    pytest.importorskip("google.protobuf")
    made = block(8, 3)
    raw = bytes(cramjam.snappy.decompress_raw(remote_write.encode("here", 8, made)))
    request = remote_write.messages()["WriteRequest"].FromString(raw)
    assert 8 * len(NAMES) == len(request.timeseries)
    for i, series in enumerate(request.timeseries):
        rank, name = divmod(i, len(NAMES))
        labels = {label.name: label.value for label in series.labels}
        assert sorted(labels) == list(labels)
        about = {"config": "here", "node": "node-1", "rank": str(8 + rank)}
        assert {"__name__": f"bench_{NAMES[name]}", **about} == labels
        assert [10_000, 11_000, 12_000] == [sample.timestamp for sample in series.samples]
        assert made.values[rank, :, name].tolist() == [sample.value for sample in series.samples]
