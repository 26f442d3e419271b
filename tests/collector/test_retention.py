import shutil
from pathlib import Path

import numpy as np
import pytest
from sqlalchemy import func, select

from tests.collector.alerting import Place, decision, started
from tests.collector.rows import OTHER_RUN, RUN, SECOND, START, Writer
from tests.collector.volume_runs import all_read, ranks, write_steps
from tests.support.small_disks import small_file_system
from trainvitals.clock import SystemClock
from trainvitals.errors import StorageError, UsageError
from trainvitals.records import RunEnded, RunInfo, RunStarted
from trainvitals.views import RunsQuestion, StepQuestion
from vitals_collector.ingest.ingest import ingest, ingest_all
from vitals_collector.live.run_status import Liveness
from vitals_collector.numbers import lake_maintenance
from vitals_collector.numbers.interface import RowSpan
from vitals_collector.numbers.lake import Lake
from vitals_collector.queries.query import Query
from vitals_collector.retention.removal import delete_old, delete_run, finish_removals, pin
from vitals_collector.storage.schema import audit, forgotten, metadata, runs
from vitals_collector.storage.store import Store, open_data_store

DAY = 86_400 * SECOND
LATER = Liveness(now_unix_ns=START + 40 * DAY)


def tables_with(store: Store, run_id: str) -> set[str]:
    """Return the tables that hold anything of a run."""
    found: set[str] = set()
    with store.read_transaction() as connection:
        for table in metadata.sorted_tables:
            if "run_id" in table.c:
                query = select(func.count()).where(table.c.run_id == run_id)
                if connection.execute(query).scalar_one():
                    found.add(table.name)
    if store.numbers.num_rows(RowSpan(run_id, "steps")):
        found.add("rows")
    return found


def a_run(store: Store, run: str = RUN, *, tags: tuple[str, ...] = ()) -> list[Writer]:
    """Store a run that ended, and return its writers."""
    writers = ranks(2, run=run)
    info = RunInfo(name="a run", mode="guard", tags=tags)
    ingest(store, writers[0].events(RunStarted(info=info), decision(), step=5))
    write_steps(store, writers, range(80))
    ingest_all(store, [one.events(RunEnded(state="finished"), step=79) for one in writers], 0)
    all_read(store, run)
    return writers


def test_everything_of_a_forgotten_run_goes_and_nothing_of_another(store: Store):
    a_run(store)
    a_run(store, OTHER_RUN)
    others = tables_with(store, OTHER_RUN)
    gone = delete_run(store, RUN, by="ann", when=LATER)
    assert ("a run", True) == (gone.name, gone.num_bytes > 0)
    assert {"forgotten"} == tables_with(store, RUN)
    assert others == tables_with(store, OTHER_RUN)
    with store.read_transaction() as connection:
        (row,) = connection.execute(select(audit)).all()
    assert ("ann", "delete", f"run/{RUN}") == (row.actor, row.action, row.subject)


def test_an_agent_that_comes_late_does_not_bring_half_of_a_forgotten_run_back(store: Store):
    writers = a_run(store)
    late = writers[1].steps(range(80, 90))
    stranger = Writer("rank:7").steps(range(20))
    delete_run(store, RUN, by="ann", when=LATER)
    replies = ingest_all(store, [late, stranger], 0)
    assert [89, 19] == [reply.durable_seq for reply in replies], "their spools are freed"
    assert [0, 0] == [reply.num_new for reply in replies]
    assert {"forgotten"} == tables_with(store, RUN)
    assert 30 == store.counters.num_forgotten


def test_who_remembers_how_far_a_stream_was_stored_meets_the_removal(store: Store):
    late = a_run(store)[1].steps(range(80, 90))
    delete_run(store, RUN, by="ann", when=LATER)
    reply = ingest(store, late)
    assert (89, 0) == (reply.durable_seq, reply.num_new)
    assert {"forgotten"} == tables_with(store, RUN)


def test_a_start_after_the_removal_is_a_run_again(store: Store):
    a_run(store)
    delete_run(store, RUN, by="ann", when=LATER)
    resumed = Writer(started=LATER.now_unix_ns + SECOND)
    assert 10 == ingest(store, resumed.steps(range(80, 90))).num_new
    assert {"runs", "sources", "streams", "rows"} <= tables_with(store, RUN)


def test_a_removal_that_died_in_between_is_ended_later(store: Store, monkeypatch):
    a_run(store)
    monkeypatch.setattr("vitals_collector.retention.removal._delete_run_rows", lambda *_: None)
    delete_run(store, RUN, by="ann", when=LATER)
    assert {"runs", "rows", "forgotten"} == tables_with(store, RUN)
    monkeypatch.undo()
    resumed = Writer(started=LATER.now_unix_ns + SECOND)
    ingest(store, resumed.steps(range(80, 90)))
    finish_removals(store)
    with store.read_transaction() as connection:
        assert [True] == list(connection.execute(select(forgotten.c.is_gone)).scalars())
        assert [RUN] == list(connection.execute(select(runs.c.run_id)).scalars())


def test_a_running_run_is_not_removed(store: Store):
    ingest(store, Writer().steps(range(5)))
    now = Liveness(now_unix_ns=START + 10 * SECOND)
    with pytest.raises(UsageError, match="is still running"):
        delete_run(store, RUN, by="ann", when=now)
    with pytest.raises(UsageError, match="there is no run"):
        delete_run(store, OTHER_RUN, by="ann", when=now)


def test_runs_that_ended_long_ago_are_removed_but_not_pinned_ones(store: Store):
    a_run(store)
    a_run(store, OTHER_RUN, tags=("keep",))
    third = "01JD0000000000000000000002"
    a_run(store, third)
    pin(store, third, by="ann", now_unix_ns=START)
    assert [] == delete_old(store, 0, LATER)
    assert [] == delete_old(store, 41, LATER)
    assert [RUN] == [gone.run_id for gone in delete_old(store, 39, LATER)]
    pin(store, third, by="ann", now_unix_ns=START, is_kept=False)
    assert [third] == [gone.run_id for gone in delete_old(store, 39, LATER)]
    assert {"age": 2} == store.counters.removed_runs


def test_a_service_that_goes_on_sending_does_not_keep_a_run(store: Store):
    a_run(store)
    guest = Writer("node:otlp.loader", node="otlp.loader", started=LATER.now_unix_ns)
    ingest(store, guest.scalars(0, {1: 1.0}))
    assert [RUN] == [gone.run_id for gone in delete_old(store, 39, LATER)]


def test_the_engine_goes_on_after_a_lost_run_was_removed(store: Store):
    place = Place(store)
    writer = Writer(started=place.clock.time_ns(), world_size=1)
    place.send(writer.events(started()))
    place.send(writer.steps(range(5)))
    place.look()
    assert any("lost" in word.lower() for word in place.pass_time(140))
    delete_run(store, RUN, by="ann", when=Liveness(now_unix_ns=place.clock.time_ns()))
    place.clock.advance(5)
    place.look()
    other = Writer(run=OTHER_RUN, started=place.clock.time_ns(), world_size=1)
    place.send(other.events(started(), decision()))
    place.send(other.steps(range(10)))
    place.clock.advance(5)
    assert any("firing" in word for word in place.look()[1:])


@pytest.mark.nightly
def test_a_disk_with_hardly_any_room_is_freed_of_a_run_that_is_much_larger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(lake_maintenance, "_KEPT_SECONDS", 0)  # no question is under way
    with small_file_system(tmp_path / "small", "24m") as disk:
        store = open_data_store(disk / "data")
        writers = a_run(store)
        rng = np.random.default_rng(1)
        for start in range(100, 50_100, 5_000):
            steps = range(start, start + 5_000)
            losses = rng.normal(size=(2, 5_000))
            write_steps(
                store,
                writers,
                steps,
                loss=lambda rank, step, of=losses, at=start: of[rank, step - at],
            )
        store.close()  # so that the journal is as small as it gets
        free = shutil.disk_usage(disk).free
        (disk / "others").write_bytes(bytes(free - (1 << 20)))
        store = open_data_store(disk / "data")
        num_bytes = delete_run(store, RUN, by="ann", when=LATER).num_bytes
        assert num_bytes > 1 << 19
        assert {"forgotten"} == tables_with(store, RUN)
        assert isinstance(store.numbers, Lake)
        store.numbers.merge()
        assert shutil.disk_usage(disk).free > num_bytes * 3 // 4
        a_run(store, OTHER_RUN)
        store.close()


def test_a_run_that_is_being_removed_is_gone_for_readers_and_removed_by_asking_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
):
    a_run(store)
    query = Query(store, clock=SystemClock())
    with monkeypatch.context() as patch:
        patch.setattr(store.numbers, "delete", no_room)
        with pytest.raises(StorageError):
            delete_run(store, RUN, by="ann", when=LATER)
    assert () == query.ask(RunsQuestion())
    with pytest.raises(UsageError, match="there is no run"):
        query.ask(StepQuestion(run_id=RUN, step=3))
    assert "a run" == delete_run(store, RUN, by="ann", when=LATER).name
    assert {"forgotten"} == tables_with(store, RUN)


def no_room(*_: object) -> bool:
    raise StorageError("no room left")
