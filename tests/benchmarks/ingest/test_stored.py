"""Rows into the store and a database: the same rows, each counted, and bytes a value. No times."""

import pytest

from trainvitals.wire import decode_batch
from vitals_bench import wide
from vitals_bench.ingest import stored
from vitals_bench.ingest.records import NAMES, SCHEMA

pytestmark = pytest.mark.nightly

TINY = stored.Size(rounds=2, batches=2, num_rows=10_000)


def test_the_rows_come_in_two_forms_with_the_same_numbers():
    source = stored.Source()
    (first, second), plain = source.batches(2, 3)
    assert [(0, 2), (3, 5)] == [
        (header.first_seq, header.last_seq)
        for header in (decode_batch(first).header, decode_batch(second).header)
    ]
    rows = decode_batch(second).rows
    found = [SCHEMA.unpack(rows[i * SCHEMA.row_size : (i + 1) * SCHEMA.row_size]) for i in range(3)]
    names = ("step", "time_unix_ns", *NAMES)
    assert [{name: row[name] for name in names} for row in found] == [
        {name: row[name] for name in names} for row in plain[1]
    ]


@pytest.mark.slow
def test_rows_into_sqlite_are_measured_beside_core_and_orm():
    rows = list(stored.measure_sqlite(TINY))
    assert ["ratio >= 4", "ratio >= 15"] * 2 == [row.plain()["goal"] for row in rows]
    assert all(row.ours > 0 and row.theirs > 0 for row in rows)


@pytest.mark.slow
def test_bytes_of_a_value_are_counted_after_merging(monkeypatch):
    monkeypatch.setattr(stored, "QUICK", TINY)
    rows = list(stored.measure_bytes(quick=True))
    assert ["<= 5 bytes", "<= 9 bytes"] == [row.plain()["goal"] for row in rows]
    assert all(1.0 < row.ours < row.theirs for row in rows)


def test_rows_that_are_not_there_make_the_figure_void(tmp_path):
    source = stored.Source()
    with wide.sqlite_store(tmp_path, "store") as store:
        raws, _ = source.batches(1, 100)
        assert 100 == stored.store_all(store, raws)
        stored.expect_rows(store, source.run_id, 100)
        with pytest.raises(RuntimeError, match="101 rows were stored; 100 are counted, 100 read"):
            stored.expect_rows(store, source.run_id, 101)
