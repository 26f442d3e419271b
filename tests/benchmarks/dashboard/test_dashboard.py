"""The bench of the dashboard: what was planted is found in what is sent. No times."""

import math
import struct
import sys
from dataclasses import replace

import pytest

from trainvitals.clock import SystemClock
from trainvitals.views import RunQuestion, SeriesQuestion
from vitals_bench.dashboard import bare_page, painted
from vitals_bench.dashboard.seen import is_sent, num_hidden
from vitals_bench.dashboard.serving import NAMES, QUICK
from vitals_bench.query.filling import Filling, Planted, pieces
from vitals_collector.ingest.ingest import ingest_all
from vitals_collector.queries.query import Query
from vitals_collector.storage.store import open_store

pytestmark = pytest.mark.nightly

SPIKE = 37.123458862304688


@pytest.mark.parametrize(
    "raw",
    [
        f'{{"value": [1.0, {SPIKE!r}]}}'.encode(),
        b"0,37.1235,\n",
        b"\x00" + struct.pack("<d", SPIKE),
        b"\x00\x00" + struct.pack("<f", SPIKE),
    ],
    ids=["json", "short", "double", "float"],
)
def test_a_value_is_found_in_whatever_form_it_is_sent(raw: bytes):
    assert is_sent(raw, SPIKE)
    assert 1 == num_hidden(raw, Planted(spikes={5: SPIKE, 9: -SPIKE}))


def test_a_run_goes_on_by_a_step_that_no_store_has_yet():
    size = replace(QUICK, num_steps=2_000, num_ranks=2, num_last=100)
    filling, store = Filling(size, NAMES), open_store("sqlite://")
    filling.fill(store)
    query = Query(store, clock=SystemClock())
    assert size.num_steps - 1 == query.ask(RunQuestion(run_id=filling.run_id)).summary.last_step
    for number in range(3):
        assert 1 == ingest_all(store, [filling.one_more(number)], 1)[0].num_new
    detail = query.ask(RunQuestion(run_id=filling.run_id))
    assert size.num_steps + 2 == detail.summary.last_step
    assert {f"steps.{name}" for name in NAMES} <= set(detail.metrics)
    values = [v for _, piece in pieces(size, filling.planted) for v in piece[:, 0].tolist()]
    sent = str(
        query.ask(SeriesQuestion(run_id=filling.run_id, metric="steps.loss", points=2_000)).value
    ).encode()
    assert 0 == num_hidden(sent, filling.planted)
    assert 40 == sum(not math.isfinite(value) for value in values)
    store.close()


def test_the_bare_page_draws_as_many_charts_as_it_is_told(monkeypatch: pytest.MonkeyPatch):
    from streamlit.testing.v1 import AppTest

    monkeypatch.setattr(sys, "argv", ["bare_page.py", "6"])
    page = AppTest.from_file(bare_page.__file__, default_timeout=60).run()
    assert not page.exception
    assert 6 == len(page.get("echarts_chart"))


@pytest.mark.slow
@pytest.mark.browser
def test_the_bench_yields_its_rows_with_their_goals(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("playwright.sync_api")
    size = replace(QUICK, num_steps=20_000, num_ranks=2, rounds=2)
    monkeypatch.setattr(painted, "QUICK", size)
    rows = [row.plain() for row in painted.measure_page(quick=True)]
    goals = ["ratio <= 1.3", "<= 300 ms", "<= 5 KiB", "", "<= 5 % of a core", "= 0 of them"]
    assert goals == [row["goal"] for row in rows]
    assert " 0 charts" not in str(rows[0]["name"])
    assert 0 == rows[5]["ours"]
