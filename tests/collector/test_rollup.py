"""What upkeep leaves of old rows, on a real lake."""

import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import select

from tests.collector.alerting import decision, started
from tests.collector.rows import RUN, SECOND, START, Writer
from tests.collector.volume_runs import (
    HOUR,
    all_read,
    numbers,
    ranks,
    ranks_of_steps,
    slower,
    steps_left,
    values_of,
    write_steps,
)
from tests.support.examples import one_in
from trainvitals.catalog import LAYERS_SCHEMA
from trainvitals.errors import ConfigError
from trainvitals.records import AttemptStarted, Finding, FindingRaised
from trainvitals.testing import ManualClock
from vitals_collector.ingest.ingest import ingest, ingest_all
from vitals_collector.live.live_monitor import resume_watching, suspend_watching
from vitals_collector.numbers import chunk_stats
from vitals_collector.report.replay import replay
from vitals_collector.retention import rollup
from vitals_collector.retention.maintenance import LakeMaintenance
from vitals_collector.retention.settings import VolumeSettings
from vitals_collector.storage.schema import events
from vitals_collector.storage.store import Store, open_data_store

LATER = START + 48 * HOUR
SMALL = VolumeSettings(
    window_steps=10, margin_steps=10, num_worst_ranks=2, max_run_bytes=0, host_seconds=10
)


@pytest.fixture
def store(tmp_path: Path, fresh_data: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """Give a store whose stretches, and so its windows, are of ten steps."""
    for module in (chunk_stats, rollup):
        monkeypatch.setattr(module, "CHUNK_STEPS", 10)
    store = open_data_store(shutil.copytree(fresh_data, tmp_path / "data"))
    yield store
    store.close()


def thin(store: Store, now_unix_ns: int, settings: VolumeSettings = SMALL) -> int:
    """Thin what is due then; return how many rows went."""
    return LakeMaintenance(
        store, settings, clock=ManualClock(time_ns=now_unix_ns), pause=0.0
    ).delete_due()


def test_old_windows_keep_numbers_over_all_ranks_and_their_worst_ranks(store: Store):
    writers = ranks(6)
    write_steps(store, writers, range(40))
    all_read(store)
    assert 20 * 3 == thin(store, LATER)
    assert list(range(40)) == steps_left(store, "rank:0"), "rank 0 is the run's own curve"
    assert list(range(40)) == steps_left(store, "rank:5"), "its steps were the longest"
    assert list(range(20, 40)) == steps_left(store, "rank:3"), "a decision may still come"
    longest = numbers(store, "step_duration_seconds:max")
    assert {step: pytest.approx(slower(5, step)) for step in range(20)} == longest
    assert {5} == set(numbers(store, "num_ranks").values())
    assert ranks_of_steps(store)[5] == 2
    # The reason is recorded.
    assert [("steps", "age", 60, 19, 0)] == store.numbers.deleted_rows(RUN)
    assert {("steps", "age"): 60} == store.counters.thinned


def test_a_day_of_rows_stays_as_it_came(store: Store):
    write_steps(store, ranks(4), range(40))
    all_read(store)
    assert 0 == thin(store, START + 23 * HOUR)
    assert {3} == set(ranks_of_steps(store).values())


def test_rows_that_no_watcher_has_read_are_not_touched(store: Store):
    writers = ranks(4)
    write_steps(store, writers, range(40))
    assert 0 == thin(store, LATER)
    all_read(store, but=[writers[2].identity.incarnation])
    assert 0 == thin(store, LATER + HOUR), "a step goes with all of its ranks, or stays"
    all_read(store)
    assert 20 == thin(store, LATER + 2 * HOUR)


@pytest.mark.nightly
def test_rows_of_a_run_that_the_watchers_have_set_aside_wait_for_nobody(store: Store):
    write_steps(store, ranks(4), range(40))
    assert 0 == thin(store, LATER)
    with store.write() as connection:
        suspend_watching(connection, RUN)
    assert 20 == thin(store, LATER + HOUR)
    with store.write() as connection:
        resume_watching(connection, RUN)
    write_steps(store, ranks(4), range(40, 80))
    assert 0 == thin(store, LATER + 2 * HOUR)


@pytest.mark.nightly
def test_what_looks_at_a_thinned_run_again_says_which_rows_it_lacks(store: Store):
    write_steps(store, ranks(4), range(40))
    all_read(store)
    assert [] == replay(store, RUN).missing()
    assert 20 == thin(store, LATER)
    judged = replay(store, RUN)
    missing = {"lost_rows": 0, "thinned_rows": 20, "thinned_to_step": 19}
    assert missing == judged.document()["missing"]
    (words,) = judged.missing()
    assert words.startswith("thinned 20 rows of other ranks, to step 19: ")


@pytest.mark.parametrize("event_", one_in(3, [decision(step=22), AttemptStarted(
    id=2, parent=1, fork_step=22, reason="rolled back"), FindingRaised(finding=Finding(
    kind="nonfinite", level="actionable", step=22, detector="finite", reason="NaN"))]),
    ids=["decision", "fork", "finding"])  # fmt: skip
def test_the_steps_around_an_incident_stay_whole(store: Store, event_):
    writers = ranks(5)
    write_steps(store, writers, range(70))
    ingest(store, writers[0].events(started(), event_, step=22))
    all_read(store)
    thin(store, LATER)
    whole = [step for step, num in ranks_of_steps(store).items() if num == 4]
    assert set(range(10, 40)) | set(range(50, 70)) == set(whole)
    assert set(range(50)) == set(numbers(store, "num_ranks")), "the series has no hole there"


@pytest.mark.nightly
def test_a_finding_that_only_tells_keeps_no_rows_of_ranks(store: Store):
    writers = ranks(5)
    write_steps(store, writers, range(40))
    finding = Finding(kind="slow", level="advisory", step=12, detector="ranks", reason="slow")
    ingest(store, writers[0].events(FindingRaised(finding=finding), step=12))
    all_read(store)
    thin(store, LATER)
    assert {2} == {num for step, num in ranks_of_steps(store).items() if step < 20}


def test_a_spike_of_any_rank_is_seen_after_thinning(store: Store):
    spikes = {(1, 2): 500.0, (2, 6): -3.0, (3, 14): math.nan, (4, 15): math.inf}

    def loss(rank: int, step: int) -> float:
        return spikes.get((rank, step), 2.0)

    write_steps(store, ranks(8), range(40), loss=loss)
    all_read(store)
    thin(store, LATER)
    assert 500.0 == numbers(store, "rank_loss:max")[2]
    assert -3.0 == numbers(store, "rank_loss:min")[6]
    broken = numbers(store, "rank_loss:nonfinite")
    assert {14: 1.0, 15: 1.0} == {step: num for step, num in broken.items() if num}
    assert set(range(10)) <= set(steps_left(store, "rank:1")), "its loss was the furthest"
    for rank in (3, 4):
        assert set(range(10, 20)) <= set(steps_left(store, f"rank:{rank}"))


def test_rows_that_come_later_than_the_level_of_their_step_stay_as_they_came(store: Store):
    writers = ranks(6)
    write_steps(store, writers[:5], range(40))
    all_read(store)
    thin(store, LATER)
    write_steps(store, writers[5:], range(40))
    all_read(store)
    assert 0 == thin(store, LATER + HOUR)
    assert {4} == set(numbers(store, "num_ranks").values())
    assert list(range(40)) == steps_left(store, "rank:5")


@pytest.mark.nightly
def test_steps_trained_again_have_numbers_of_their_own(store: Store):
    writers = ranks(4)
    write_steps(store, writers, range(20))
    write_steps(store, writers, range(14, 44), attempt=2)
    all_read(store)
    thin(store, LATER)
    keys = zip(values_of(store, "ranks", "attempt"), values_of(store, "ranks", "step"), strict=True)
    expected = [(1, step) for step in range(20)] + [(2, step) for step in range(14, 30)]
    assert sorted(expected) == sorted(keys)


def test_layers_keep_every_tenth_step_but_all_near_a_finding(store: Store):
    writer = Writer(world_size=1)
    write_steps(store, [writer], range(100))
    ingest(store, writer.batch(LAYERS_SCHEMA, rows_of_layers(writer, range(80))))
    finding = Finding(kind="slow", level="advisory", step=40, detector="ranks", reason="slow")
    ingest(store, writer.events(FindingRaised(finding=finding), step=40))
    all_read(store)
    kept = sorted({*range(0, 80, 10), *range(30, 60)})
    assert 3 * (80 - len(kept)) == thin(store, LATER)
    assert 0 == thin(store, LATER + HOUR)
    assert [step for step in kept for _ in range(3)] == values_of(store, "layers", "step")


def rows_of_layers(writer: Writer, steps: range, attempt: int = 1) -> list[list[object]]:
    """Return a row of each of three layers a step."""
    rest = [None] * (len(LAYERS_SCHEMA.columns) - 6)
    return [
        [step, attempt, writer.time_of(step), 0, layer, 0.5, *rest]
        for step in steps
        for layer in range(3)
    ]


@pytest.mark.nightly
def test_layers_of_an_attempt_whose_steps_are_not_there_are_thinned_as_well(store: Store):
    writer = Writer(world_size=1)
    ingest(store, writer.batch(LAYERS_SCHEMA, rows_of_layers(writer, range(40))))
    write_steps(store, [writer], range(100), attempt=2)
    all_read(store)
    assert 3 * 36 == thin(store, LATER)
    assert [step for step in range(0, 40, 10) for _ in range(3)] == values_of(
        store, "layers", "step"
    )


def test_samples_of_hosts_become_their_least_and_their_greatest(store: Store):
    writer = Writer("node:a", world_size=1)
    values = [{33: 0.9, 51: math.nan}.get(second, 0.5) for second in range(100)]
    ingest_all(store, [writer.node_rows([s], cpu_ratio=v) for s, v in enumerate(values)], 0)
    write_steps(store, ranks(1), range(10))
    all_read(store)
    assert 79 == thin(store, LATER)
    left = values_of(store, "node", "cpu_ratio")
    assert 21 == len(left)
    assert [0.9] == [value for value in left if value > 0.6], "a peak is never averaged away"
    assert 1 == sum(map(math.isnan, left)), "nor a broken sample"
    times = values_of(store, "node", "time_unix_ns")
    assert [START, START + 9 * SECOND, START + 10 * SECOND] == times[:3]
    assert 0 == thin(store, LATER + HOUR), "what was thinned is not thinned again"


@pytest.mark.nightly
def test_a_sample_that_has_no_value_stays_one(store: Store):
    writer = Writer("node:a", world_size=1)
    ingest(store, writer.node_rows(range(10), cpu_ratio=None))
    all_read(store)
    assert 8 == thin(store, LATER)
    assert [] == values_of(store, "node", "cpu_ratio")
    assert 2 == len(values_of(store, "node", "time_unix_ns"))


@pytest.mark.nightly
def test_hours_of_samples_near_an_incident_stay(store: Store):
    writer = Writer("node:a", world_size=1)
    first = START // HOUR * HOUR - START  # of the hour
    seconds = [first // SECOND + second for second in range(0, 4 * 3_600, 5)]
    ingest(store, writer.node_rows(seconds))
    head = ranks(1)
    write_steps(store, head, range(10))
    at = START + first + 2 * HOUR + 300 * SECOND  # also near the hour before
    ingest(store, head[0].events(decision(step=5), at=at))
    all_read(store)
    thin(store, LATER)
    times = [(int(t) - START - first) // HOUR for t in values_of(store, "node", "time_unix_ns")]
    assert [720, 720] == [times.count(1), times.count(2)]
    assert [times.count(0), times.count(3)] == [720, 720], "two samples in ten seconds are kept"


@pytest.mark.nightly
def test_a_run_with_no_more_ranks_than_are_kept_is_left_as_it_is(store: Store):
    write_steps(store, ranks(3), range(40))
    all_read(store)
    assert 0 == thin(store, LATER)
    assert {2} == set(ranks_of_steps(store).values())
    assert {} == numbers(store, "num_ranks")


def test_what_is_kept_for_ever_stays_above_the_cap_and_that_is_said_once(store: Store):
    write_steps(store, ranks(3), range(40))
    all_read(store)
    settings = VolumeSettings(num_worst_ranks=1, max_run_bytes=1, window_steps=10, margin_steps=10)
    for hours in range(2):
        thin(store, LATER + hours * HOUR, settings)
        assert store.counters.over_cap is not None
        assert {RUN} == store.counters.over_cap.keys()
    assert list(range(40)) == steps_left(store, "rank:0")
    with store.read_transaction() as connection:
        said = list(connection.execute(select(events.c.summary)).scalars())
    assert 1 == len(said)
    assert "above its cap" in said[0]


def test_rounds_while_rows_come_leave_one_number_of_each_step(store: Store):
    writers = ranks(6)
    for start in (0, 25):
        write_steps(store, writers, range(start, start + 25))
        all_read(store)
        thin(store, LATER + start * HOUR)
    assert set(range(30)) == set(numbers(store, "num_ranks"))
    assert {5} == set(numbers(store, "num_ranks").values())


def test_settings_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match="keep_hours is -1"):
        VolumeSettings(keep_hours=-1)
    with pytest.raises(ConfigError, match="host_seconds is 0"):
        VolumeSettings(host_seconds=0)
