import math
from pathlib import Path

import numpy as np
import pytest

from tests.collector.alerting import decision
from tests.collector.rows import OTHER_RUN, RUN, SECOND, START, Writer
from tests.collector.volume_runs import (
    HOUR,
    all_read,
    numbers,
    ranks,
    ranks_of_steps,
    steps_left,
    write_steps,
)
from tests.support.served import Served
from trainvitals.records import RunEnded
from trainvitals.testing import ManualClock
from trainvitals.views import RunQuestion, RunsQuestion, SeriesQuestion, StepQuestion
from vitals_collector.api.app import CollectorSettings
from vitals_collector.ingest.ingest import ingest
from vitals_collector.queries.query import Query
from vitals_collector.queries.why import explain_step
from vitals_collector.retention.maintenance import LakeMaintenance
from vitals_collector.retention.settings import VolumeSettings
from vitals_collector.retention.sizes import measure_runs
from vitals_collector.storage.store import open_data_store

CAP = 600_000
"""Bytes: with all rows it would be 680,000, with those that may be thinned gone 550,000."""


class LongStepped(Writer):
    """A writer whose steps take ten seconds."""

    def time_of(self, step: int) -> int:
        return self.started + 10 * step * SECOND


@pytest.mark.slow
def test_hours_of_sixteen_ranks_stay_below_the_cap_and_lose_no_spike(tmp_path: Path):
    store = open_data_store(tmp_path / "data")
    clock = ManualClock(time_ns=START)
    settings = VolumeSettings(
        keep_hours=1.5, max_run_bytes=CAP, window_steps=256, margin_steps=64, num_worst_ranks=3
    )
    upkeep = LakeMaintenance(store, settings, clock=clock, pause=0.0)
    writers = [LongStepped(f"rank:{rank}", world_size=16) for rank in range(16)]
    rng = np.random.default_rng(5)
    spikes = {(1 + step % 15, step): 90.0 + step for step in range(7, 3_000, 97)}
    spikes[9, 400] = math.nan
    noise = rng.normal(1.0, 0.01, (16, 3_072))

    for start in range(0, 3_072, 128):  # a third of an hour
        write_steps(
            store,
            writers,
            range(start, start + 128),
            seconds=lambda rank, step: float(noise[rank, step]),
            loss=lambda rank, step: spikes.get((rank, step), 2.0 + float(noise[rank, step])),
        )
        if start == 1_024:
            ingest(store, writers[0].events(decision(step=1_000), step=1_001))
        clock.advance(1_280)
        all_read(store)
        upkeep.run_once()
        (volume,) = measure_runs(store, settings).values()
        assert volume.num_bytes <= CAP, f"after {start + 128} steps"
    assert {} == store.counters.failures
    assert "age" in {part.reason for part in volume.thinned}
    to_step = max(one.to_step for one in volume.thinned)
    assert to_step > 1_500
    assert list(range(3_072)) == steps_left(store, "rank:0"), "the run's curve is whole"
    whole = {step for step, num in ranks_of_steps(store).items() if num == 15}
    assert set(range(768, 1_280)) <= whole, "the incident's steps are whole"
    assert set(range(to_step + 1, 3_072)) <= whole
    assert len(whole) < 2_200
    highest, broken = numbers(store, "rank_loss:max"), numbers(store, "rank_loss:nonfinite")
    for (_, step), value in spikes.items():
        if step <= to_step and math.isnan(value):
            assert 1 == broken[step]
        elif step <= to_step:
            assert value == highest[step]
    reply = Query(store, clock=clock).ask(
        SeriesQuestion(run_id=RUN, metric="ranks.rank_loss:max", points=50)
    )
    drawn = {value for value in reply.value if value is not None}
    assert max(v for (_, s), v in spikes.items() if s <= to_step) in drawn
    store.close()


def test_a_thinned_step_says_so_and_tells_the_numbers_over_all_ranks(tmp_path: Path):
    store = open_data_store(tmp_path / "data")
    write_steps(store, ranks(12), range(300))
    all_read(store)
    settings = VolumeSettings(window_steps=10, margin_steps=10, num_worst_ranks=2)
    LakeMaintenance(
        store, settings, clock=ManualClock(time_ns=START + 48 * HOUR), pause=0.0
    ).run_once()
    query = Query(store, clock=ManualClock(), volumes=settings)
    thinned, whole = (
        query.ask(StepQuestion(run_id=RUN, step=5)),
        query.ask(StepQuestion(run_id=RUN, step=295)),
    )
    assert ["rank:0", "rank:10", "rank:11"] == [row.source for row in thinned.rows]
    summary = query.ask(RunsQuestion())[0]
    assert "Thinned: 2 of 11 ranks besides rank 0 still have their own rows" in " ".join(
        explain_step(summary, thinned, ()).split()
    )
    assert "Thinned" not in explain_step(summary, whole, ())
    (over,) = thinned.over_ranks
    assert 11 == over.values["num_ranks"]
    assert (12, ()) == (len(whole.rows), whole.over_ranks)
    volume = query.ask(RunQuestion(run_id=RUN)).volume
    assert volume is not None
    assert volume.num_bytes > 0
    (thinning,) = volume.thinned
    assert ("steps", "age", 9 * 256) == (thinning.stream, thinning.reason, thinning.num_rows)
    assert "2 worst ranks of every 256 steps" in thinning.rule
    assert (
        "seconds"
        == query.ask(SeriesQuestion(run_id=RUN, metric="ranks.step_duration_seconds:max")).unit
    )
    store.close()


def test_old_runs_are_removed_only_where_that_is_asked(tmp_path: Path):
    store = open_data_store(tmp_path / "data")
    for run in (RUN, OTHER_RUN):
        (writer,) = ranks(1, run=run)
        write_steps(store, [writer], range(5))
        ingest(store, writer.events(RunEnded(state="finished"), step=5))
        all_read(store, run)
    clock = ManualClock(time_ns=START + 20 * 24 * HOUR)
    LakeMaintenance(store, VolumeSettings(), clock=clock).run_once()
    assert 2 == len(Query(store, clock=clock).ask(RunsQuestion()))
    LakeMaintenance(store, VolumeSettings(keep_days=10), clock=clock).run_once()
    assert 0 == len(Query(store, clock=clock).ask(RunsQuestion()))
    store.close()


def test_metrics_count_what_was_taken_away(tmp_path: Path):
    settings = CollectorSettings(data=tmp_path / "data")
    with Served(settings) as served:
        served.store.counters.thinned["steps", "age"] = 7
        served.store.counters.removed_runs["asked"] = 1
        text = served.request("GET", "/metrics").text
    assert 'collector_thinned_rows_total{reason="age",stream="steps"} 7.0' in text
    assert 'collector_removed_runs_total{reason="asked"} 1.0' in text
    assert "collector_runs_over_cap 0.0" in text
