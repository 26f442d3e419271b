"""The thread that keeps a lake small, quick and whole."""

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.collector.numbers.written import RUN, batch, identity
from tests.collector.volume_runs import all_read
from tests.support.levels import STEPS, fill, kept_rows, levels
from tests.support.rolled_memory import RolledMemory
from trainvitals.testing import ManualClock
from trainvitals.wire import encode_batch
from vitals_collector.ingest.ingest import ingest_all
from vitals_collector.numbers.lake import Lake
from vitals_collector.retention import maintenance as upkeep_module
from vitals_collector.retention.maintenance import LakeMaintenance
from vitals_collector.retention.rollup import CurrentStep, DeletionPass, RunHistory, roll_up_run
from vitals_collector.retention.settings import VolumeSettings
from vitals_collector.storage.store import Store, open_data_store

BEGIN_NS = 1_700_000_000_000_000_000
DAY_NS = 24 * 3_600 * 10**9
SETTINGS = VolumeSettings(window_steps=256, margin_steps=50, num_worst_ranks=2)
HISTORY = RunHistory(RUN, (1,), CurrentStep(1, 2_000), (), 12)
OLD = DeletionPass(BEGIN_NS + DAY_NS, BEGIN_NS + 2 * DAY_NS)


class Ingested:
    """Takes batches as numbers do, through the collector's ingest."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def append(self, batches: list) -> None:
        ingest_all(self._store, [encode_batch(b.header, b.rows) for b in batches], 0)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory, fresh_data: Path) -> Path:
    """A data directory with 600 steps of 12 ranks that the watchers have read."""
    data = shutil.copytree(fresh_data, tmp_path_factory.mktemp("filled") / "data")
    store = open_data_store(data)
    fill(Ingested(store))
    all_read(store, RUN)
    store.close()
    return data


@pytest.fixture
def store(tmp_path: Path, filled: Path) -> Iterator[Store]:
    """Give a store with those steps."""
    store = open_data_store(shutil.copytree(filled, tmp_path, dirs_exist_ok=True))
    yield store
    store.close()


@pytest.fixture
def lake(store: Store) -> Lake:
    """Return its rows."""
    assert isinstance(store.numbers, Lake)
    return store.numbers


def upkeep_of(
    store: Store, *, settings: VolumeSettings = SETTINGS, hours: float = 48, **how: object
) -> LakeMaintenance:
    """Return the upkeep of a store, so long after its rows were written."""
    clock = ManualClock(time_ns=BEGIN_NS + int(hours * 3_600e9))
    return LakeMaintenance(store, settings, clock=clock, pause=0.0, **how)


def test_rows_of_a_day_stay_and_older_ones_become_levels(store: Store, lake: Lake) -> None:
    upkeep_of(store, hours=23).run_once()
    assert kept_rows(lake) == dict.fromkeys(range(12), 600)
    upkeep_of(store, hours=25).run_once()
    assert levels(lake)["step"] == list(range(512))  # a decision may still come about the others
    num = 12 * 600 - lake.num_rows(STEPS)
    assert store.counters.thinned == {("steps", "age"): num} == {("steps", "age"): 9 * 512}


def test_a_run_above_its_cap_is_thinned_sooner_and_only_until_it_is_enough(
    store: Store, lake: Lake
) -> None:
    cap = lake.num_bytes(RUN) - 1
    settings = VolumeSettings(
        window_steps=256, margin_steps=50, max_run_bytes=cap, num_worst_ranks=2
    )
    upkeep_of(store, settings=settings, hours=1).run_once()
    assert levels(lake)["step"] == list(range(256))
    assert lake.num_bytes(RUN) <= cap
    assert lake.deleted_rows(RUN) == [("steps", "size", 9 * 256, 255, 0)]
    assert store.counters.over_cap == {}


def test_steps_near_an_incident_stay_whole_and_the_present_is_not_touched() -> None:
    numbers = RolledMemory()
    fill(numbers)
    run = HISTORY._replace(near=(290,), present=CurrentStep(1, 562))
    # 256 to 511 are within 50 steps of 290, and so are 240 to 255; 512 to 767 are not past yet.
    assert roll_up_run(numbers, run, SETTINGS, OLD) == 0
    assert levels(numbers)["step"] == list(range(512))
    assert kept_rows(numbers) == dict.fromkeys(range(12), 600)


def test_few_ranks_are_kept_whole() -> None:
    numbers = RolledMemory()
    fill(numbers, num_ranks=2)
    run = HISTORY._replace(num_ranks=2)
    assert roll_up_run(numbers, run, SETTINGS, OLD) == 0
    assert levels(numbers)["step"] == []


def test_where_nothing_came_nothing_is_done(
    store: Store, lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    upkeep = upkeep_of(store)
    upkeep.run_once()
    upkeep.run_once()
    asked: list[str] = []
    for name in ("merge", "next_window", "roll_up"):
        monkeypatch.setattr(lake, name, lambda *args, name=name, **kwargs: asked.append(name))
    upkeep.run_once()
    assert asked == []
    lake.append([batch(identity(rank=99), [{"rank_loss": 1.0}])])
    upkeep.run_once()
    assert asked == ["merge"]


def test_another_collector_s_lake_is_left_alone(store: Store, lake: Lake) -> None:
    upkeep_of(store, is_mine=lambda: False).run_once()
    assert kept_rows(lake) == dict.fromkeys(range(12), 600)


def test_an_error_ends_a_round_and_not_the_thread(
    store: Store, lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    upkeep = upkeep_of(store)
    monkeypatch.setattr(lake, "merge", lambda *_: 1 // 0)
    upkeep.run_once()
    upkeep.run_once()
    assert store.counters.failures == {"upkeep": 2}


def test_damage_is_told_taken_out_and_its_rows_can_be_sent_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_data_store(tmp_path)
    fill(Ingested(store))
    all_read(store, RUN)
    store.close()
    (file,) = (tmp_path / "lake" / "data" / "main" / "steps").iterdir()
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    store = open_data_store(tmp_path)
    upkeep_of(store).run_once()
    assert store.damage.num == 1
    assert f"steps/{file.name} (7200 rows, runs {RUN}) is damaged" in caplog.text
    fill(Ingested(store))
    assert kept_rows(store.numbers) == dict.fromkeys(range(12), 600)
    store.close()


def test_the_thread_works_at_its_start_and_ends_when_it_is_closed(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = threading.Event()
    monkeypatch.setattr(upkeep_module.LakeMaintenance, "run_once", lambda self: done.set())
    upkeep = upkeep_of(store)
    upkeep.start()
    assert done.wait(10.0)
    upkeep.close()
    assert "vitals-upkeep" not in {thread.name for thread in threading.enumerate()}
