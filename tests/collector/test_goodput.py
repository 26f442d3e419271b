"""Where a run's time went, asked of a store, a folder and a log; told by the page of counters."""

import json
import threading
from pathlib import Path

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from tests.collector.lookback import decision, gpu_rows
from tests.collector.rows import RUN, SECOND, START, Writer
from tests.support.cli import leave, vitals
from trainvitals.records import (
    AttemptStarted,
    Finding,
    FindingRaised,
    Note,
    RankStarted,
    RunEnded,
    RunInfo,
    RunStarted,
    TrainingPaused,
)
from trainvitals.rows import Value
from trainvitals.testing.clock import ManualClock
from trainvitals.views import (
    GoodputQuestion,
    GoodputView,
    IncidentsQuestion,
    RunQuestion,
    RunsQuestion,
    VerdictQuestion,
)
from vitals_collector.alerts.notifiers import LogNotifier
from vitals_collector.api.exposition import StoreCollector
from vitals_collector.ingest.ingest import ingest
from vitals_collector.live.engine import build_alert_service
from vitals_collector.live.overview import count_lost_steps
from vitals_collector.queries.goodput import GoodputCache, GoodputReader
from vitals_collector.queries.query import Query
from vitals_collector.storage.store import Store


def ask(store: Store, *, price: float = 0.0) -> GoodputView:
    query = Query(store, clock=ManualClock(), gpu_hour_price=price)
    return query.ask(GoodputQuestion(run_id=RUN))


def seconds(view: GoodputView) -> dict[str, float]:
    """Return what the buckets have; empty ones are left out."""
    assert sum(view.nanoseconds.values()) == view.end_unix_ns - view.begin_unix_ns
    return {b: round(taken / SECOND, 6) for b, taken in view.nanoseconds.items() if taken}


def begun(writer: Writer, *, attempt: int = 1, parent: int | None = None, fork: int = 0) -> bytes:
    """Return what a rank 0 says at its start, 20 s after its process began."""
    process = writer.started - 20 * SECOND
    return writer.events(
        RankStarted(
            rank=0, local_rank=0, world_size=1, pid=1, node="a", process_started_unix_ns=process
        ),
        RunStarted(info=RunInfo(name="told")),
        AttemptStarted(id=attempt, parent=parent, fork_step=fork, reason="start"),
        attempt=attempt,
        step=fork,
        at=writer.started,
    )


def trained(writer: Writer, *steps: int, attempt: int = 1, **columns: object) -> bytes:
    """Return a row a second for these steps; the first says nothing of how long it took."""
    lasted = [None, *[1.0] * (len(steps) - 1)]
    return writer.steps(
        steps,
        attempt=attempt,
        step_duration_seconds=lasted,
        skipped=0,
        **columns,  # type: ignore[arg-type]
    )


def test_a_run_is_its_start_and_what_its_steps_were_measured_to_be(store: Store):
    head = Writer()
    ingest(store, begun(head))
    ingest(store, trained(head, *range(1, 101), data_wait_seconds=0.25, checkpoint_seconds=0.25))
    ingest(store, head.events(RunEnded(state="finished"), step=101, at=head.time_of(102)))
    assert seconds(ask(store)) == {
        "start": 20, "data_wait": 25, "checkpoint": 25, "productive": 50, "unknown": 2,
    }  # fmt: skip


def test_ranks_wait_for_the_late_one_and_for_the_exchange(store: Store):
    ranks = [Writer(f"rank:{rank}") for rank in range(4)]
    ingest(store, begun(ranks[0]))
    for rank, writer in enumerate(ranks):
        waited = 0.1 if rank == 3 else 0.5
        ingest(store, trained(writer, *range(1, 101), gradient_wait_seconds=waited))
    told = seconds(ask(store))
    assert told["exchange"] == pytest.approx(10)
    assert told["straggler_wait"] == pytest.approx(30), "three of four ranks wait .4 s each"


def test_a_crash_loses_the_steps_behind_the_checkpoint(store: Store):
    first, second = Writer(), Writer(started=START + 500 * SECOND)
    ingest(store, begun(first))
    ingest(store, trained(first, *range(1, 101)))
    ingest(store, first.events(RunEnded(state="failed"), step=101, at=first.time_of(100)))
    ingest(store, begun(second, attempt=2, parent=1, fork=81))
    second.started -= 80 * SECOND  # rows are a second apart, from step 80 on
    ingest(store, trained(second, *range(81, 121), attempt=2))
    view = ask(store)
    assert seconds(view) == {
        "start": 20, "productive": 120, "rolled_back": 20, "down": 380, "restart": 20,
    }  # fmt: skip
    assert view.num_failures == 1
    assert view.mttr_seconds == pytest.approx(401)
    assert view.lost_steps == 20


def test_what_decisions_lost_is_what_the_verdict_says(store: Store):
    """Saves and evaluations between the steps are no part of it."""
    head = Writer()
    ingest(store, begun(head))
    parts = {"checkpoint_seconds": 0.2, "evaluation_seconds": 0.1}
    ingest(store, trained(head, *range(1, 101), **parts))
    back = decision("rollback", 100, decided_at_step=100, rollback_to_step=61, new_attempt=2)
    again = AttemptStarted(id=2, parent=1, fork_step=61, reason="rollback")
    ingest(store, head.events(back, again, step=61, attempt=2, at=head.time_of(100)))
    head.started += 40 * SECOND
    ingest(store, trained(head, *range(61, 121), attempt=2, **parts))
    query = Query(store, clock=ManualClock())
    view = query.ask(GoodputQuestion(run_id=RUN))
    lost = query.ask(VerdictQuestion(run_id=RUN)).verdict.lost
    assert lost.seconds == pytest.approx(40 * 0.7)
    assert seconds(view)["rolled_back"] == pytest.approx(40 * 0.7)
    assert (lost.steps, view.lost_steps) == (40, 40)


def test_a_hang_lasts_from_the_last_progress_until_the_wait_is_over(store: Store):
    head, agent = Writer(), Writer("node:a")
    ingest(store, begun(head))
    ingest(store, trained(head, *range(1, 51)))
    head.started += 300 * SECOND
    lasted: list[Value] = [301.0, *[1.0] * 49]
    ingest(store, head.steps(range(51, 101), step_duration_seconds=lasted, skipped=0))
    finding = Finding(
        kind="hang", level="advisory", step=50, detector="hang", reason="rank 1", value=10.0
    )
    stood = START + 50 * SECOND
    ingest(store, agent.events(FindingRaised(finding=finding), step=50, at=stood + 10 * SECOND))
    over = Note(code="wait_over", text="The wait is over")
    ingest(store, agent.events(over, step=50, at=stood + 300 * SECOND))
    view = ask(store)
    assert seconds(view)["hang"] == 300
    assert view.num_failures == 1


def test_a_pause_is_told_as_halted(store: Store):
    head = Writer()
    ingest(store, begun(head))
    ingest(store, trained(head, *range(1, 51)))
    pause, go_on = TrainingPaused(is_paused=True), TrainingPaused(is_paused=False)
    ingest(store, head.events(pause, step=50, at=head.time_of(50)))
    head.started += 60 * SECOND
    ingest(store, head.events(go_on, step=50, at=head.time_of(50)))
    ingest(store, trained(head, *range(51, 101)))
    assert seconds(ask(store)) == {"start": 20, "productive": 100, "halted": 60}


def test_gpus_cost_hours_money_and_energy(store: Store):
    head = Writer()
    head.identity = msgspec.structs.replace(head.identity, gpu_uuid="GPU-0")
    ingest(store, begun(head))
    ingest(store, trained(head, *range(1, 3_581)))
    gpu = Writer("gpu:GPU-0")
    ingest(store, gpu_rows(gpu, [0, 1000, 2000], [5e6, 6e6, 7e6], "energy_joules"))
    view = ask(store, price=2.5)
    assert (view.gpu_hours, view.money) == (pytest.approx(1.0), pytest.approx(2.5))
    assert view.energy_joules == pytest.approx(2e6)


def test_without_a_counter_energy_is_power_over_time(store: Store):
    head, gpu = Writer(), Writer("gpu:GPU-0")
    ingest(store, begun(head))
    ingest(store, trained(head, *range(1, 101)))
    ingest(store, gpu_rows(gpu, [0, 50, 100], [300.0, 300.0, 300.0], "power_watts"))
    assert ask(store).energy_joules == pytest.approx(30_000)


def test_a_run_that_nobody_heard_of_says_so(store: Store):
    ingest(store, Writer("node:a").node_rows([1, 2]))
    assert ask(store).notes == ("No process of the run has reported.",)


def test_a_run_that_goes_on_is_read_again_only_now_and_then(store: Store):
    head = Writer()
    ingest(store, begun(head))
    ingest(store, trained(head, *range(1, 11)))
    now = [0.0]

    def stopwatch() -> float:
        now[0] += 1.0  # each look at it costs a second
        return now[0]

    cache = GoodputCache(stopwatch=stopwatch)
    query = Query(store, clock=ManualClock(), goodput=cache)
    question = GoodputQuestion(run_id=RUN)
    assert query.ask(question).steps == 10
    ingest(store, trained(head, *range(11, 21)))
    assert query.ask(question).steps == 10, "it was read a moment ago"
    now[0] += 100.0
    assert query.ask(question).steps == 20


# ---------------------------------------------------------------------------------- the counters


def buckets(registry: CollectorRegistry) -> dict[str, float]:
    """Return what one scrape has of the one run."""
    families = {family.name: family for family in registry.collect()}
    samples = families["train_goodput_seconds"].samples
    return {sample.labels["bucket"]: sample.value for sample in samples}


def test_counters_have_every_bucket_and_never_fall(store: Store):
    clock = ManualClock()
    now = [0.0]
    registry = CollectorRegistry()
    acting = build_alert_service(store, [LogNotifier()], clock=clock)
    reader = GoodputReader(store, GoodputCache(stopwatch=lambda: now[0]))
    registry.register(
        StoreCollector(
            store, acting=acting, liveness=Query(store, clock=clock).liveness, goodput=reader
        )
    )

    def told() -> dict[str, float]:
        buckets(registry)  # asks for it
        reader.read_queried_runs()
        return buckets(registry)

    head = Writer(started=clock.time_ns() - 100 * SECOND)
    ingest(store, begun(head), received_unix_ns=clock.time_ns())
    ingest(store, trained(head, *range(1, 51)), received_unix_ns=clock.time_ns())
    before = told()
    assert (before["productive"], before["rolled_back"], before["halted"]) == (50, 0, 0)
    again = AttemptStarted(id=2, parent=1, fork_step=21, reason="rollback")
    ingest(store, head.events(again, step=21, attempt=2, at=head.time_of(50)))
    head.started += 30 * SECOND
    ingest(store, trained(head, *range(21, 41), attempt=2), received_unix_ns=clock.time_ns())
    now[0] += 1.0
    after = told()
    assert (after["productive"], after["rolled_back"]) == (70, 30)


def test_no_scrape_reads_more_than_a_run_s_newest_row(store: Store, monkeypatch):
    """The first neither: the counters are there from the next one on."""
    clock = ManualClock()
    head = Writer(started=clock.time_ns() - 3_100 * SECOND)
    ingest(store, begun(head), received_unix_ns=clock.time_ns())
    ingest(store, trained(head, *range(1, 3_001)), received_unix_ns=clock.time_ns())
    registry = CollectorRegistry()
    acting = build_alert_service(store, [LogNotifier()], clock=clock)
    reader = GoodputReader(store, GoodputCache())
    registry.register(
        StoreCollector(
            store, acting=acting, liveness=Query(store, clock=clock).liveness, goodput=reader
        )
    )
    rows: list[int] = []
    scan = type(store.numbers).scan

    def counted(numbers, span, names):
        columns = scan(numbers, span, names)
        rows.append(max(len(column.values) for column in columns.values()))
        return columns

    monkeypatch.setattr(type(store.numbers), "scan", counted)
    assert buckets(registry) == {}
    assert sum(rows) <= 1
    reader.read_queried_runs()
    assert sum(rows) >= 3_000
    rows.clear()
    assert buckets(registry)["productive"] == 3_000
    assert sum(rows) <= 1


def test_what_a_scrape_asked_for_is_read_beside_it(store: Store):
    head = Writer()
    ingest(store, begun(head))
    ingest(store, trained(head, *range(1, 11)))
    cache, is_read = GoodputCache(), threading.Event()
    of = cache.of

    def noted(moment, run):
        view = of(moment, run)
        is_read.set()
        return view

    cache.of = noted  # type: ignore[method-assign]
    reader = GoodputReader(store, cache)
    reader.start()
    try:
        runs = Query(store, clock=ManualClock()).ask(RunsQuestion())
        assert reader.known(runs) == []
        assert is_read.wait(20)
        assert [view.steps for view in reader.known(runs)] == [10]
    finally:
        reader.close()


def test_the_goodput_of_a_run_that_somebody_looks_at_is_read(store: Store):
    head = Writer()
    ingest(store, begun(head))
    ingest(store, trained(head, *range(1, 11)))
    query = Query(store, clock=ManualClock())
    reader = GoodputReader(store, query.goodput)
    query.read_goodput_soon = reader.read_soon
    detail = query.ask(RunQuestion(run_id=RUN))
    query.ask(RunQuestion(run_id=RUN))
    assert [] == query.goodput.known([detail.summary])
    reader.read_queried_runs()
    assert [10] == [view.steps for view in query.goodput.known([detail.summary])]


def test_a_run_that_cannot_be_read_is_counted_and_the_next_scrape_tries_again(store: Store):
    head = Writer()
    ingest(store, begun(head))
    ingest(store, trained(head, *range(1, 11)))
    cache = GoodputCache()
    of, cache.of = cache.of, lambda *_: 1 / 0  # type: ignore[method-assign,assignment]
    reader = GoodputReader(store, cache)
    runs = Query(store, clock=ManualClock()).ask(RunsQuestion())
    reader.known(runs)
    reader.read_queried_runs()
    assert store.counters.failures == {"goodput": 1}
    cache.of = of  # type: ignore[method-assign]
    reader.read_queried_runs()
    assert len(reader.known(runs)) == 1


# ------------------------------------------------------------------------------- the command line


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    head = Writer()
    leave(
        tmp_path, begun(head), trained(head, *range(1, 101), data_wait_seconds=0.25),
        head.events(RunEnded(state="finished"), step=101, at=head.time_of(100)),
    )  # fmt: skip
    return tmp_path


def test_a_folder_is_asked_without_a_server(folder: Path, capsys: pytest.CaptureFixture[str]):
    assert vitals("goodput", "told", "--dir", folder) == 0
    out = capsys.readouterr().out
    assert "productive           1 min 15 s  62.50 %" in out
    assert "wall time            2 min 0 s   100 %" in out


def test_every_run_is_a_line(folder: Path, capsys: pytest.CaptureFixture[str]):
    assert vitals("goodput", "--all", "--dir", folder, "--format", "csv") == 0
    header, line = capsys.readouterr().out.splitlines()
    cells = dict(zip(header.split(","), line.split(","), strict=True))
    assert (cells["run"], cells["goodput"], cells["data wait seconds"]) == (RUN, "0.625", "25.0")


def test_json_has_all_of_it(folder: Path, capsys: pytest.CaptureFixture[str]):
    assert vitals("goodput", folder, "--format", "json") == 0
    view = json.loads(capsys.readouterr().out)
    assert view["nanoseconds"]["data_wait"] == 25 * SECOND


def test_what_is_of_logs_is_refused_for_a_run(folder: Path, capsys: pytest.CaptureFixture[str]):
    assert vitals("goodput", "told", "--dir", folder, "--time", "t") == 2
    assert "--time: a run has these recorded" in capsys.readouterr().err
    assert vitals("goodput", "told", "--all", "--dir", folder) == 2


def test_what_is_neither_file_nor_folder_is_said(capsys: pytest.CaptureFixture[str]):
    assert vitals("goodput", "logs/nope.csv") == 2
    assert "there is no file or folder logs/nope.csv" in capsys.readouterr().err


def killed(store: Store) -> None:
    """Leave a run of two ranks, one of which is killed; it resumes from a checkpoint."""
    head, other = Writer(started=START), Writer("rank:1", started=START)
    agent = Writer("node:node-a", started=START)
    ingest(store, begun(head))
    took: list[Value] = [1.0] * 150
    ingest(store, head.steps(range(150), step_duration_seconds=took))
    ingest(store, other.steps(range(150), step_duration_seconds=took))
    died = START + 150 * SECOND
    # The victim speaks first, of a later step; the agent looks only now and then.
    lost_peer = "RuntimeError: Connection closed by peer [127.0.0.1]:15262"
    ended = RunEnded(state="failed", reason=lost_peer)
    ingest(store, head.events(ended, step=150, at=died))
    text = "rank 1 (pid 7 on node-a) ended without a clean exit (signal 9, SIGKILL)"
    gone = Note(code="rank_gone", text=text, severity="error")
    ingest(store, agent.events(gone, step=149, attempt=1, at=died + SECOND))
    again = Writer(started=START + 200 * SECOND - 120 * SECOND)
    ingest(store, begun(again, attempt=2, parent=1, fork=120))
    rows = range(120, 260)
    ingest(store, again.steps(rows, attempt=2, step_duration_seconds=[1.0] * len(rows)))
    at = again.time_of(260)
    ingest(store, again.events(RunEnded(state="finished"), step=260, attempt=2, at=at))


def test_a_death_is_one_incident_whose_root_comes_first(store: Store):
    killed(store)
    (incident,) = Query(store, clock=ManualClock()).ask(IncidentsQuestion(run_id=RUN))
    told = incident.verdict
    assert told.cause.startswith("Rank 1 (pid 7 on node-a) ended without a clean exit")
    assert "Resumed the run at step 120 after it was restarted" in told.action
    assert "took no action" not in told.action
    assert ["rank_gone" in incident.incident_id, True] == [True, "Lost" not in told.state]
    lines = [line.text for line in told.timeline]
    assert any(line.startswith("Resumed the run at step 120") for line in lines)


def test_lost_steps_and_down_time_are_one_figure_everywhere(store: Store):
    killed(store)
    query = Query(store, clock=ManualClock())
    sums = query.ask(GoodputQuestion(run_id=RUN))
    told = query.ask(VerdictQuestion(run_id=RUN)).verdict
    with store.read_transaction() as connection:
        counted, _ = count_lost_steps(connection, [RUN])[RUN]
    assert (30, 30, 30) == (sums.lost_steps, told.lost.steps, counted)
    assert sums.mttr_seconds == told.lost.down_seconds == 51.0
    assert "Lost work: 30 steps" in told.cost and "Down for 51 s x" in told.cost


def test_a_run_that_was_stopped_after_its_checkpoint_has_lost_nothing(store: Store):
    head = Writer(started=START)
    ingest(store, begun(head))
    ingest(store, head.steps(range(150)))
    ended = RunEnded(state="interrupted", reason="SIGTERM")
    ingest(store, head.events(ended, step=150, at=START + 150 * SECOND))
    again = Writer(started=START + 50 * SECOND)
    ingest(store, begun(again, attempt=2, parent=1, fork=150))
    ingest(store, again.steps(range(150, 200), attempt=2))
    query = Query(store, clock=ManualClock())
    assert () == query.ask(IncidentsQuestion(run_id=RUN))
    assert 0 == query.ask(GoodputQuestion(run_id=RUN)).lost_steps


def test_a_restart_from_the_first_step_has_lost_all_that_was_before(store: Store):
    head = Writer(started=START)
    ingest(store, begun(head))
    ingest(store, head.steps(range(50)))
    again = Writer(started=START + 100 * SECOND)
    ingest(store, begun(again, attempt=2))
    ingest(store, again.steps(range(100), attempt=2))
    query = Query(store, clock=ManualClock())
    sums = query.ask(GoodputQuestion(run_id=RUN))
    told = query.ask(VerdictQuestion(run_id=RUN)).verdict
    assert (50, 50) == (sums.lost_steps, told.lost.steps)
    assert "The run ended after step 49 and was restarted" in told.cause
