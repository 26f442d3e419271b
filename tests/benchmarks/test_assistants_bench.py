"""The bench of `vitals mcp`: each tool has a row, and its response shows the run. No times."""

import pytest

from vitals_bench import assistants, wide
from vitals_bench.query.filling import Filling

pytestmark = pytest.mark.nightly


def test_every_tool_that_reads_runs_is_measured_and_small(tmp_path):
    filling = Filling(assistants.QUICK, assistants.COLUMNS)
    with wide.sqlite_store(tmp_path, "store") as store:
        filling.fill(store)
        source = assistants.QuerySource(assistants.Query(store, clock=assistants.SystemClock()))
        calls = assistants.tool_calls(source, filling)
        names = {tool.__name__ for tool in assistants.RunTools(source=source).all()}
        assert names - {"compare"} == {name.partition(" ")[0] for name in calls}
        for name, call in calls.items():
            assert 40 < len(call().encode()) <= assistants.LIMIT_BYTES, name
        assert filling.run_id in calls["incidents of one id"]()


def test_the_rows_have_goals_and_the_first_call_in_their_notes():
    *rows, largest = assistants.measure_size(assistants.QUICK)
    assert {"store", "directory", "collector by HTTPS"} == {
        row.name.split(", ")[1] for row in rows if "first call" in row.note
    }
    first, later = (row for row in rows if "server" in row.name)
    assert "complete after 1 calls" not in first.note
    assert "complete after 1 calls and 0.0 s" in later.note
    assert 0 < largest.ours <= assistants.LIMIT_BYTES
