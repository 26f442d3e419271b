import contextlib
import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import event, select

from tests.collector.alerting import decision, started
from tests.collector.rows import RUN, SECOND, START, Writer
from tests.collector.volume_runs import (
    HOUR,
    all_read,
    num_batches,
    numbers,
    ranks,
    ranks_of_steps,
    settled,
    slower,
    steps_left,
    values_of,
    write_steps,
)
from tests.collector.watched_again import watch_again
from trainvitals.catalog import LAYERS_SCHEMA
from trainvitals.records import AttemptStarted, Finding, FindingRaised
from vitals_collector.ingest.ingest import ingest
from vitals_collector.live.live_monitor import set_aside, take_up
from vitals_collector.report.replay import replay
from vitals_collector.retention.quota import Volumes
from vitals_collector.retention.rollup import VolumeSettings
from vitals_collector.retention.rollup_candidates import run_bytes
from vitals_collector.retention.rollup_rows import REMOVED
from vitals_collector.storage.compaction import compact
from vitals_collector.storage.schema import events, thinned
from vitals_collector.storage.store import DATABASE_FILE, Store, open_data_store

LATER = START + 48 * HOUR
SMALL = VolumeSettings(
    window_steps=10, margin_steps=10, num_worst_ranks=2, max_run_bytes=0, host_samples=10
)


def test_old_windows_keep_numbers_over_all_ranks_and_their_worst_ranks(store: Store):
    writers = ranks(6)
    write_steps(store, writers, range(40))
    settled(store)
    assert 20 * 3 == Volumes(store, SMALL).maintain(LATER)
    assert list(range(40)) == steps_left(store, "rank:0"), "rank 0 is the run's own curve"
    assert list(range(40)) == steps_left(store, "rank:5"), "its steps were the longest"
    assert list(range(20, 40)) == steps_left(store, "rank:3"), "a decision may still come"
    longest = numbers(store, "step_duration_seconds:max")
    assert {step: pytest.approx(slower(5, step)) for step in range(20)} == longest
    assert {5} == set(numbers(store, "num_ranks").values())
    assert 0 == num_batches(store, REMOVED)


def test_a_day_of_rows_stays_as_it_came(store: Store):
    write_steps(store, ranks(4), range(40))
    settled(store)
    assert 0 == Volumes(store, SMALL).maintain(START + 23 * HOUR)
    assert {3} == set(ranks_of_steps(store).values())


def test_rows_that_no_watcher_has_read_are_not_touched(store: Store):
    writers = ranks(4)
    write_steps(store, writers, range(40))
    compact(store)
    volumes = Volumes(store, SMALL)
    assert 0 == volumes.maintain(LATER)
    all_read(store, but=[writers[2].identity.incarnation])
    assert 0 == volumes.maintain(LATER + HOUR), "a step goes with all of its ranks, or stays"
    all_read(store)
    assert 20 == volumes.maintain(LATER + 2 * HOUR)


def test_rows_of_a_run_that_the_watchers_have_set_aside_wait_for_nobody(store: Store):
    write_steps(store, ranks(4), range(40))
    compact(store)
    volumes = Volumes(store, SMALL)
    assert 0 == volumes.maintain(LATER)
    with store.write() as connection:
        set_aside(connection, RUN)
    assert 20 == volumes.maintain(LATER + HOUR)
    with store.write() as connection:
        take_up(connection, RUN)
    write_steps(store, ranks(4), range(40, 80))
    compact(store)
    assert 0 == volumes.maintain(LATER + 2 * HOUR)


def test_what_looks_at_a_thinned_run_again_says_which_rows_it_lacks(store: Store):
    write_steps(store, ranks(4), range(40))
    settled(store)
    assert [] == replay(store, RUN).missing()
    assert 20 == Volumes(store, SMALL).maintain(LATER)
    judged = replay(store, RUN)
    missing = {"lost_rows": 0, "thinned_rows": 20, "thinned_to_step": 19}
    assert missing == judged.document()["missing"]
    (words,) = judged.missing()
    assert words.startswith("20 rows of other ranks were thinned, to step 19: ")
    with store.read() as connection:
        assert 20 == watch_again(connection, RUN).num_missing


@pytest.mark.parametrize("event_", [decision(step=42), AttemptStarted(
    id=2, parent=1, fork_step=42, reason="rolled back"), FindingRaised(finding=Finding(
    kind="nonfinite", level="actionable", step=42, detector="finite", reason="NaN"))],
    ids=["decision", "fork", "finding"])  # fmt: skip
def test_the_steps_around_an_incident_stay_whole(store: Store, event_):
    writers = ranks(5)
    write_steps(store, writers, range(100))
    ingest(store, writers[0].events(started(), event_, step=42))
    settled(store)
    Volumes(store, SMALL).maintain(LATER)
    whole = [step for step, num in ranks_of_steps(store).items() if num == 4]
    assert set(range(30, 60)) | set(range(80, 100)) == set(whole)
    assert set(range(80)) == set(numbers(store, "num_ranks")), "the series has no hole there"


def test_a_finding_that_only_tells_keeps_no_rows_of_ranks(store: Store):
    writers = ranks(5)
    write_steps(store, writers, range(100))
    finding = Finding(kind="slow", level="advisory", step=42, detector="ranks", reason="slow")
    ingest(store, writers[0].events(FindingRaised(finding=finding), step=42))
    settled(store)
    Volumes(store, SMALL).maintain(LATER)
    assert {2} == {num for step, num in ranks_of_steps(store).items() if step < 80}


def test_a_spike_of_any_rank_is_seen_after_thinning(store: Store):
    spikes = {(1, 2): 500.0, (2, 6): -3.0, (3, 14): math.nan, (4, 15): math.inf}

    def loss(rank: int, step: int) -> float:
        return spikes.get((rank, step), 2.0)

    write_steps(store, ranks(8), range(40), loss=loss)
    settled(store)
    Volumes(store, SMALL).maintain(LATER)
    assert 500.0 == numbers(store, "rank_loss:max")[2]
    assert -3.0 == numbers(store, "rank_loss:min")[6]
    broken = numbers(store, "rank_loss:nonfinite")
    assert {14: 1.0, 15: 1.0} == {step: num for step, num in broken.items() if num}
    assert set(range(10)) <= set(steps_left(store, "rank:1")), "its loss was the furthest"
    for rank in (3, 4):
        assert set(range(10, 20)) <= set(steps_left(store, f"rank:{rank}"))


def test_rows_that_come_late_join_the_numbers_of_their_step(store: Store):
    writers = ranks(6)
    write_steps(store, writers[:5], range(40))
    settled(store)
    volumes = Volumes(store, SMALL)
    volumes.maintain(LATER)
    assert {4} == set(numbers(store, "num_ranks").values())
    write_steps(store, writers[5:], range(40))
    settled(store)
    volumes.maintain(LATER + HOUR)
    found = numbers(store, "step_duration_seconds:max")
    assert {step: pytest.approx(slower(5, step)) for step in range(20)} == found
    assert {5} == set(numbers(store, "num_ranks").values())
    mean = sum(slower(rank, 3) for rank in range(1, 6)) / 5
    assert pytest.approx(mean) == numbers(store, "step_duration_seconds:mean")[3]


def test_steps_trained_again_have_numbers_of_their_own(store: Store):
    writers = ranks(4)
    write_steps(store, writers, range(40))
    write_steps(store, writers, range(24, 64), attempt=2)
    settled(store)
    Volumes(store, SMALL).maintain(LATER)
    keys = zip(values_of(store, "ranks", "attempt"), values_of(store, "ranks", "step"), strict=True)
    expected = [(1, step) for step in range(40)] + [(2, step) for step in range(24, 50)]
    assert sorted(expected) == sorted(keys)


def test_layers_keep_every_tenth_step_but_all_near_a_finding(store: Store):
    writer = Writer(world_size=1)
    rest = [None] * (len(LAYERS_SCHEMA.columns) - 6)
    rows = [
        [step, 1, writer.time_of(step), 0, layer, 0.5, *rest]
        for step in range(80)
        for layer in range(3)
    ]
    write_steps(store, [writer], range(100))
    ingest(store, writer.batch(LAYERS_SCHEMA, rows))
    finding = Finding(kind="slow", level="advisory", step=40, detector="ranks", reason="slow")
    ingest(store, writer.events(FindingRaised(finding=finding), step=40))
    settled(store)
    assert 3 * (80 - 8 - 21 + 3) == Volumes(store, SMALL).maintain(LATER)
    kept = sorted({*range(0, 80, 10), *range(30, 51)})
    assert [step for step in kept for _ in range(3)] == values_of(store, "layers", "step")


def test_samples_of_hosts_become_their_least_and_their_greatest(store: Store):
    writer = Writer("node:a", world_size=1)
    for second in range(100):
        ingest(store, writer.node_rows([second], cpu_ratio=0.9 if second == 33 else 0.5))
    write_steps(store, ranks(1), range(10))
    settled(store)
    assert 80 == Volumes(store, SMALL).maintain(LATER)
    values = values_of(store, "node", "cpu_ratio")
    assert 20 == len(values)
    assert [0.9] == [value for value in values if value > 0.6], "a peak is never averaged away"
    times = values_of(store, "node", "time_unix_ns")
    assert [START, START + 9 * SECOND, START + 10 * SECOND] == times[:3]


def test_samples_near_an_incident_stay(store: Store):
    writer = Writer("node:a", world_size=1)
    ingest(store, writer.node_rows(range(3_000)))
    head = ranks(1)
    write_steps(store, head, range(10))
    ingest(store, head[0].events(decision(step=5), at=START + 1_500 * SECOND))
    settled(store)
    Volumes(store, SMALL).maintain(LATER)
    times = [(int(t) - START) // SECOND for t in values_of(store, "node", "time_unix_ns")]
    assert set(range(900, 2_101)) <= set(times)
    assert 2 * 180 == len([one for one in times if not 900 <= one <= 2_100])


def test_what_was_thinned_is_said_with_its_reason(store: Store):
    write_steps(store, ranks(6), range(40))
    settled(store)
    Volumes(store, SMALL).maintain(LATER)
    with store.read() as connection:
        (row,) = connection.execute(select(thinned)).all()
    assert ("steps", "age", 60, 19) == (row.stream, row.reason, row.num_rows, row.to_step)
    assert row.num_bytes > 0
    assert {("steps", "age"): 60} == store.counters.thinned


def test_a_run_above_its_cap_is_thinned_before_its_time_oldest_first(store: Store):
    write_steps(store, ranks(30), range(250), at_once=250)
    settled(store)
    with store.read() as connection:
        num_bytes = run_bytes(connection, RUN)
    settings = VolumeSettings(
        window_steps=50, margin_steps=50, num_worst_ranks=1, max_run_bytes=num_bytes * 3 // 4
    )
    volumes = Volumes(store, settings)
    volumes.maintain(START + HOUR)
    with store.read() as connection:
        assert run_bytes(connection, RUN) <= settings.max_run_bytes
        (row,) = connection.execute(select(thinned)).all()
    assert "size" == row.reason
    whole = sorted(step for step, num in ranks_of_steps(store).items() if num == 29)
    assert list(range(row.to_step + 1, 250)) == whole
    assert 49 <= row.to_step < 199, "no more than what it needs"
    assert not volumes.over_cap


def test_a_run_with_no_more_ranks_than_are_kept_is_left_as_it_is(store: Store):
    write_steps(store, ranks(3), range(40))
    settled(store)
    assert 0 == Volumes(store, SMALL).maintain(LATER)
    assert {2} == set(ranks_of_steps(store).values())
    assert {} == numbers(store, "num_ranks")


def test_what_is_kept_for_ever_stays_above_the_cap_and_that_is_said_once(store: Store):
    write_steps(store, ranks(3), range(40))
    settled(store)
    settings = VolumeSettings(num_worst_ranks=1, max_run_bytes=1, window_steps=10, margin_steps=10)
    for _ in range(2):
        volumes = Volumes(store, settings)
        volumes.maintain(LATER)
        volumes.maintain(LATER + HOUR)
        assert {RUN} == volumes.over_cap.keys() == store.counters.over_cap.keys()
    assert list(range(40)) == steps_left(store, "rank:0")
    with store.read() as connection:
        said = list(connection.execute(select(events.c.summary)).scalars())
    assert 1 == len(said)
    assert "above its cap" in said[0]


def test_compaction_never_joins_what_is_left_with_rows_that_may_yet_be_thinned(store: Store):
    writers = ranks(6)
    volumes = Volumes(store, SMALL)
    for start in range(0, 120, 15):
        write_steps(store, writers, range(start, start + 15), at_once=5)
        settled(store)
        volumes.maintain(LATER + start * HOUR)
    assert set(range(100)) == set(numbers(store, "num_ranks"))
    assert {5} == set(numbers(store, "num_ranks").values())


class Died(BaseException):
    """What a killed process does: nothing more."""


@contextlib.contextmanager
def dies_at(store: Store, number: int) -> Iterator[None]:
    """Have the store's process die before a statement that writes, or before a commit."""
    num = 0

    def count(*about: object) -> None:
        nonlocal num
        is_commit = len(about) == 1
        num += is_commit or not str(about[2]).startswith(("SELECT", "BEGIN", "PRAGMA"))
        if num == number:
            raise Died

    names = ("before_cursor_execute", "commit")
    for name in names:
        event.listen(store.engine, name, count)
    yield
    for name in names:
        event.remove(store.engine, name, count)


def test_a_crash_before_any_write_leaves_each_step_whole_or_thinned(tmp_path: Path):
    store = open_data_store(tmp_path / "data")
    writers = ranks(3)
    write_steps(store, writers[:2], range(31), at_once=10)
    write_steps(store, writers[2:], range(31), at_once=31)  # to be cut
    all_read(store)
    store.close()
    settings = VolumeSettings(window_steps=10, margin_steps=10, num_worst_ranks=1, max_run_bytes=0)
    seen: set[tuple[int, int]] = set()
    number, has_died = 0, True
    while has_died:
        number += 1
        again = tmp_path / f"again{number}"
        again.mkdir(mode=0o700)
        shutil.copy(tmp_path / "data" / DATABASE_FILE, again / DATABASE_FILE)
        store = open_data_store(again)
        has_died = False
        with dies_at(store, number):
            try:
                Volumes(store, settings).maintain(LATER)
            except Died:
                has_died = True
        rows, over = ranks_of_steps(store), numbers(store, "num_ranks")
        states = {(rows[step], int(over.get(step, 0))) for step in range(31)}
        seen |= states
        assert states <= {(2, 0), (1, 2)}, f"at write {number}"
        Volumes(store, settings).maintain(LATER)
        expected = dict.fromkeys(range(20), 1) | dict.fromkeys(range(20, 31), 2)
        assert expected == ranks_of_steps(store)
        assert 0 == num_batches(store, REMOVED)
        store.close()
    assert number > 20
    assert {(2, 0), (1, 2)} == seen
