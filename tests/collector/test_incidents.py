"""What belongs together in time and cause, and how it is told."""

import math
import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.collector.lookback import (
    BACK_TO,
    BAD,
    ONSET,
    decision,
    end,
    finding,
    gpu_rows,
    troubled_run,
)
from tests.collector.rows import RUN, Writer
from tests.support.examples import examples
from tests.support.queries import At, query
from tests.support.served import Served
from trainvitals.alerting import alerts_for_decision
from trainvitals.clock import SystemClock
from trainvitals.records import AttemptStarted, Decision, Finding, Note, RunEnded
from trainvitals.views import FindingsQuestion, IncidentsQuestion, IncidentView, StepQuestion
from vitals_collector.ingest.ingest import ingest
from vitals_collector.queries.cost import lost_spans
from vitals_collector.queries.folder_query import FolderQuery
from vitals_collector.queries.grouping import (
    FOLLOWING_STEPS,
    SAME_CAUSE_STEPS,
    IncidentItem,
    SecondProblem,
    group_incidents,
    incident_ids,
    item_of_decision,
    item_of_finding,
)
from vitals_collector.queries.query import Query
from vitals_collector.storage.schema import alerts
from vitals_collector.storage.store import Store, open_store


def told(store: Store) -> tuple[IncidentView, ...]:
    return query(store).ask(IncidentsQuestion(run_id=RUN))


def test_an_incident_has_what_belongs_to_it_and_its_story_answers(store: Store):
    ranks = troubled_run(store)
    (alert,) = alerts_for_decision(decision(rank=1).decision, run_id=RUN)
    row = {"fingerprint": alert.fingerprint, "run_id": RUN, "name": alert.name, "severity": "log"}
    body = b"\x81\xa5point\xc3"
    with store.write() as connection:
        own = {"state": "resolved", "step": BAD, "body": body, "labels": "{}"}
        connection.execute(alerts.insert().values(**row, **own))
    slow, bad = told(store)
    assert (f"1-{BAD + 1}-straggler", f"1-{ONSET}-nonfinite_loss") == (
        slow.incident_id, bad.incident_id,
    )  # fmt: skip
    assert ("Rolled back: nonfinite loss at step 158, rank 1", "notify", False) == (
        bad.title, bad.severity, bad.is_open,
    )  # fmt: skip
    assert (ONSET, BAD + 1) == (bad.onset_step, bad.last_step)
    assert (42, 21.0) == (bad.cost_steps, bad.cost_seconds)  # the steps from 120 to 161
    assert (1, 2, 1, 1) == tuple(
        len(some) for some in (bad.findings, bad.decisions, bad.alerts, bad.data)
    )
    assert ["Xid 48 on GPU-1 [gpu_xid]"] == [one.text for one in bad.events if one.kind == "Note"]
    story = "\n".join(bad.story)
    for said in (
        "Began at step 158 of attempt 1, detected at",
        "Nonfinite was seen at step 160 (step 160).",
        "Step 158: loss 2.03",
        "learning rate 0.0003",
        "Largest changes up to step 158: Layers: `h.1`: gradient norm 500 at step 158, 165x its",
        "rank 1 trained on batch 77 of epoch 0: samples 5, 9.",
        "temperature of gpu:GPU-1 went from 60.2 °C to 91 °C.",
        "Action: rolled back to step 120 (rule: nonfinite)",
    ):
        assert said in story
    assert "Moved first: gradient norm of layer `h.1` at step 158 (500, us" in bad.verdict.cause
    assert "Lost work: 42 steps (21 s x 2 ranks)." == bad.verdict.cost
    assert "Lost work: none." == slow.verdict.cost
    end(store, ranks)
    assert [False, False] == [one.is_open for one in told(store)]


def test_a_slow_step_before_bad_numbers_is_told_but_is_not_what_moved_first(store: Store):
    ranks = troubled_run(store)
    waits = [5.0 if 0 <= step - ONSET + 4 < 3 else 0.01 for step in range(BAD + 2)]
    ingest(store, Writer("rank:2").steps(range(BAD + 2), data_wait_seconds=list(waits)))
    end(store, ranks)
    slow, bad = told(store)
    assert "Moved first: gradient norm of layer `h.1` at step 158" in bad.verdict.cause
    assert "Ranks: rank 2: data wait 5 s at step 154" in "\n".join(bad.story)
    assert "Moved first: data wait on rank 2 at step 154 (5 s, usually" in slow.verdict.cause


def test_why_names_what_the_incident_that_begins_at_the_step_names(store: Store):
    ranks = troubled_run(store)
    stalled = finding("data_bound", ONSET, cause="loader_stall", onset_step=ONSET - 2)
    waits = [5.0 if ONSET - 2 <= step <= ONSET else 0.01 for step in range(BAD + 2)]
    ingest(store, Writer("rank:2").steps(range(BAD + 2), data_wait_seconds=waits))
    ingest(store, Writer("rank:2").events(stalled, step=ONSET))
    end(store, ranks)
    first = {
        step: query(store).ask(StepQuestion(run_id=RUN, step=step)).moved_first
        for step in (ONSET - 2, ONSET)
    }
    assert "data wait on rank 2" in (first[ONSET - 2] or "")
    assert "gradient norm of layer `h.1`" in (first[ONSET] or "")


def test_where_many_moved_at_once_none_of_them_is_said_to_be_first(store: Store):
    head = Writer()
    for rank in range(3):
        loss = [2.0 + 0.01 * (s % 5) for s in range(BAD)] + [float("nan")]
        ingest(store, Writer(f"rank:{rank}").steps(range(BAD + 1), rank_loss=loss))
    ingest(store, head.events(finding(onset_step=BAD, cause="nonfinite_loss"), step=BAD))
    (one,) = told(store)
    assert f"rank 2: rank loss NaN or infinite at step {BAD}" in "".join(one.story)


def test_a_loss_that_turns_nan_is_told_once_not_as_its_own_precursor(store: Store):
    loss = [2.0 + 0.01 * (s % 5) for s in range(BAD)] + [float("nan")]
    for rank in range(2):
        rank_loss = loss if rank else [*loss[:-1], 2.0]
        ingest(store, Writer(f"rank:{rank}").steps(range(BAD + 1), loss=loss, rank_loss=rank_loss))
    found = finding(step=BAD, onset_step=BAD, rank=1, value=math.nan, cause="nonfinite_loss")
    ingest(store, Writer().events(found, step=BAD))
    (one,) = told(store)
    assert f"Rank 1's loss was NaN at step {BAD}." == one.verdict.cause


def test_a_reset_of_optimizer_state_during_bad_data_is_an_incident_with_its_exact_step(
    store: Store,
):
    writer, bad = Writer("rank:0"), range(BAD, BAD + 5)
    loss = [9.0 if step in bad else 2.0 + 0.01 * (step % 5) for step in range(BAD + 20)]
    high = [finding("spike", step, onset_step=BAD, cause="loss_outlier") for step in bad]
    reset = finding(
        "update_ratio", BAD + 6, onset_step=BAD + 2, detector="optimizer_state", layer="h.1"
    )
    ingest(store, writer.steps(range(BAD + 20), loss=loss, rank_loss=loss, grad_norm=loss))
    for found in (*high, reset):
        ingest(store, writer.events(found, step=found.finding.step))
    ingest(store, writer.events(RunEnded(state="finished"), step=BAD + 19))
    second, first = told(store)
    assert (BAD, BAD + 2) == (first.onset_step, second.onset_step)
    assert f"Moved first: data of rank 0: its loss at step {BAD} (9, us" in first.verdict.cause
    moved = f"Moved first: optimizer state of layer `h.1` was reset at step {BAD + 2}."
    assert moved in second.verdict.cause
    asked = query(store).ask(StepQuestion(run_id=RUN, step=BAD + 2))
    assert moved == asked.moved_first


def test_the_healthy_steps_since_an_incident_end_where_the_next_one_begins(store: Store):
    """Of a branch that was left, a trouble at a later step came before: it ends nothing."""
    writer = Writer()
    ingest(store, writer.steps(range(601), loss=1.0))
    for seq, step in enumerate((50, 250, 251, 400)):
        ingest(store, writer.events(decision(step=step, ledger_seq=seq), step=step))
    ingest(store, writer.events(decision(step=320, ledger_seq=9), step=320, at=writer.time_of(401)))
    endings = [one.verdict.state.removeprefix("Running at step 600. ") for one in told(store)]
    assert [
        "Resolved: 280 healthy steps since step 320.",
        "Resolved: 200 healthy steps since step 400.",
        "Resolved: 68 healthy steps since step 251, until the next incident at step 320.",
        "Resolved: 199 healthy steps since step 50, until the next incident at step 250.",
    ] == endings


@pytest.mark.parametrize(("last", "is_open"), [(59, True), (60, False)])
def test_skips_to_the_last_step_of_a_finished_run_are_an_open_incident(
    store: Store, last: int, is_open: bool
):
    writer = Writer()
    ingest(store, writer.steps(range(last + 1), loss=1.0))
    for seq, step in enumerate(range(20, 60)):
        ingest(store, writer.events(decision(step=step, ledger_seq=seq), step=step))
    ingest(store, writer.events(RunEnded(state="finished"), step=last))
    (one,) = told(store)
    assert (is_open, is_open) == (one.is_open, "Nothing to do." != one.verdict.next)
    assert "Resolved" not in one.verdict.state


def test_an_incident_is_open_until_the_run_was_healthy_for_long_enough(store: Store):
    troubled_run(store, num_after=BAD + 1 - BACK_TO + 90)
    assert [True, True] == [one.is_open for one in told(store)]
    assert "Open: last bad step 161." in told(store)[1].verdict.state


def test_odd_records_become_incidents_too_and_nothing_is_made_up(store: Store):
    writer = Writer()
    ingest(store, writer.events(finding(step=-5, onset_step=99, value=float("nan")), step=-5))
    ingest(store, writer.events(decision(step=10**15, attempt=77, rank=10**9), step=3))
    ingest(store, writer.events(decision("rollback", 7, attempt=9, rollback_to_step=50)))
    ingest(store, writer.events(decision("continue", 8, command_number=4)))
    ingest(store, Writer("node:a").events(Note(code="x\n/", text="<b>\n", severity="error")))
    ingest(store, writer.events(RunEnded(state="failed", reason="out of memory"), step=3))
    found = told(store)
    assert 5 == len(found)
    stories = ["\n".join(one.story) for one in found]
    assert all(" stored" in story for story in stories)
    failed = next(one for one in found if "RunFailed" in one.incident_id)
    assert "rank 0: failed: out of memory." in failed.story[0]
    assert all(part.isprintable() for one in found for part in one.story)
    assert len(found) == len({one.incident_id for one in found})


@pytest.mark.parametrize(("seconds", "is_root"), [(2.0, True), (-60.0, False)])
def test_a_wait_for_a_rank_that_failed_follows_from_the_failure(
    store: Store, seconds: float, is_root: bool
):
    ranks = [Writer(f"rank:{rank}") for rank in range(2)]
    for writer in ranks:
        ingest(store, writer.steps(range(61), loss=1.0))
    failed = RunEnded(state="failed", reason="ValueError: no such shard")
    at = ranks[0].time_of(61)
    ingest(store, ranks[0].events(failed, step=61, at=at))
    hang = finding(
        "hang", 61, level="advisory", rank=0, cause="hang_ended",
        reason="Rank 0 failed; rank 1 waits for it", value=1.0,
    )  # fmt: skip
    found_at = at + int(seconds * 1e9)
    agent = Writer("node:a")
    ingest(store, agent.events(hang, step=61, at=found_at))
    incidents = told(store)
    assert is_root == (len(incidents) == 1)
    if is_root:
        assert "RunFailed at step 61" == incidents[0].title
        cause = "failed: ValueError: no such shard. Then: Rank 0 failed; rank 1 waits for it"
        assert cause in incidents[0].verdict.cause


def test_a_high_loss_names_its_rank_and_is_not_why_a_program_failed(store: Store):
    writers = [Writer(f"rank:{rank}", world_size=2) for rank in range(2)]
    losses = [2.0 + 0.01 * (s % 7) for s in range(304)]
    for rank, writer in enumerate(writers):
        own = [*losses[:300], *[9.0] * 4] if rank else losses
        ingest(store, writer.steps(range(304), rank_loss=own, loss=losses))
    high = finding("spike", 300, cause="loss_outlier", value=5.5, limit=3.0)
    failed = RunEnded(state="failed", reason="ValueError: no such shard")
    ingest(store, writers[0].events(high, failed, step=300))
    causes = {one.title: one.verdict.cause for one in told(store)}
    assert {"Loss outlier at step 300", "RunFailed at step 303"} == set(causes)
    loss, failure = causes["Loss outlier at step 300"], causes["RunFailed at step 303"]
    assert loss.startswith("Loss reached 5.5 (limit 3) at step 300, because of rank 1.")
    assert "Moved first: data of rank 1: its loss at step 300" in loss
    assert "no such shard" in failure
    assert "Moved first" not in failure


def test_a_run_without_trouble_has_none_and_http_says_what_the_store_does(served: Served):
    with served.client("ingest") as client:
        client.ingest(Writer().steps(range(3), loss=1.0))
    with served.client() as client:
        assert () == client.ask(IncidentsQuestion(run_id=RUN))
        end(served.store, troubled_run(served.store))
        deadline = time.monotonic() + 60
        while True:  # the watchers look at the run meanwhile, and what they find is told as well
            found = client.ask(IncidentsQuestion(run_id=RUN))
            asked = served.app.state.query.ask(IncidentsQuestion(run_id=RUN))
            # Before its end was heard of, the run, silent for long, may have been found lost.
            stories = [
                [(one.title, one.story) for one in some if "RunLost" not in one.incident_id]
                for some in (asked, found)
            ]
            if stories[0] == stories[1] or time.monotonic() > deadline:
                break
    assert stories[0] == stories[1] != []


def test_people_read_which_attempt_it_was_not_its_id(store: Store):
    head, first, second = Writer(), 1_762_861_234_567_890, 1_762_861_299_000_001
    ingest(store, head.events(AttemptStarted(id=first, parent=None, fork_step=0, reason="start")))
    again = AttemptStarted(id=second, parent=first, fork_step=20, reason="rollback")
    ingest(store, head.events(again, step=20, attempt=second))
    ingest(store, head.steps(range(40), attempt=second, loss=1.0))
    ingest(store, head.events(finding(step=30), step=30, attempt=second))
    (one,) = told(store)
    assert "2-30-nonfinite" == one.incident_id
    assert "Began at step 30 of attempt 2," in one.story[0]
    assert str(second) not in "".join((one.title, *one.story))


@pytest.mark.parametrize(
    ("masks", "expected"),
    [
        ("0 0 0 0 0 0 | 64 64 0", "gpu:GPU-1 began to throttle (heat (hardware))."),
        ("0 0 0 0 0 64 | 64 64 0", "gpu:GPU-1 began to throttle (heat (hardware))."),
        (
            "8 8 8 8 | 12 40 136",
            "began to throttle (heat (driver); power brake).",
        ),
        ("64 64 64 | 64 0 0", "GPUs showed nothing unusual"),
        ("0 0 0 | 4 4 4", "GPUs showed nothing unusual"),
    ],
    ids=["comes and goes", "came before", "one more", "always", "power cap"],
)
def test_a_throttle_is_told_by_its_reasons_however_it_ended(store: Store, masks, expected):
    before, late = ([int(mask) for mask in part.split()] for part in masks.split("|"))
    head, gpu = Writer(), Writer("gpu:GPU-1")
    ingest(store, head.steps(range(80), loss=1.0))
    ingest(store, head.events(finding("straggler", 50), step=50, at=head.time_of(50)))
    seconds = range(50 - len(before), 50 + len(late))
    ingest(store, gpu_rows(gpu, seconds, before + late, "throttle_reasons"))
    (one,) = told(store)
    (said,) = [part for part in one.story if part.startswith(("GPUs: ", "The GPUs"))]
    assert expected in said


def test_an_incident_begins_where_its_cause_was_first_out_and_lasts_while_it_holds(store: Store):
    last = 420
    losses = [2.0 + 0.01 * (s % 7) for s in range(last)]
    losses[300:400] = [9.0 + 0.01 * (s % 7) for s in range(100)]
    rates = [1e-3 if s < 297 else 0.03 for s in range(last)]
    writers = [Writer(f"rank:{rank}") for rank in range(2)]
    for writer in writers:
        ingest(store, writer.steps(range(last), rank_loss=losses, learning_rate=rates))
    writer = writers[0]
    found = finding("divergence", 303, onset_step=300, cause="loss_divergence")
    ingest(store, writer.events(found, step=303))
    for turn in range(3):  # each is a new process; the last ones get rows that came later
        if turn:
            steps = range(last + 40 * (turn - 1), last + 40 * turn)
            for writer in writers:
                ingest(store, writer.steps(steps, rank_loss=2.0, learning_rate=0.03))
        reader = FolderQuery(store, clock=SystemClock())
        (one,) = (
            each
            for each in reader.ask(IncidentsQuestion(run_id=RUN))
            if "loss_divergence" in {view.finding.cause for view in each.findings}
        )
        assert 297 == one.onset_step
        assert one.last_step >= 305
        assert "Moved first: the learning rate jumped at step 297" in one.verdict.cause


def test_a_directory_tells_of_what_only_the_watchers_find(store: Store):
    """The finding is in `vitals why` and in the incidents, without a question about alerts."""
    steps = range(340)
    waits = [0.4 if s in (300, 301, 302) else 0.001 for s in steps]
    took = [0.01 + wait for wait in waits]
    for rank in range(2):
        rows = Writer(f"rank:{rank}").steps(
            steps, data_wait_seconds=waits, step_duration_seconds=took, loss=1.0
        )
        ingest(store, rows)
    reader = FolderQuery(store, clock=SystemClock())
    findings = reader.ask(StepQuestion(run_id=RUN, step=302)).findings
    assert ["loader_stall"] == [view.finding.cause for view in findings]
    assert 300 == findings[0].finding.onset_step
    (one,) = reader.ask(IncidentsQuestion(run_id=RUN))
    assert (300, 302) == (one.onset_step, one.last_step)
    assert reader.ask(FindingsQuestion(run_id=RUN)) == findings


def test_a_reader_processes_rows_that_come_after_its_first_query(store: Store):
    waits = [0.4 if s in (300, 301, 302) else 0.001 for s in range(340)]
    writers = [Writer(f"rank:{rank}") for rank in range(2)]
    reader = FolderQuery(store, clock=SystemClock())
    causes = []
    for steps in (range(250), range(250, 340)):
        for writer in writers:
            took = [0.01 + waits[s] for s in steps]
            stalls = [waits[s] for s in steps]
            rows = writer.steps(
                steps, data_wait_seconds=stalls, step_duration_seconds=took, loss=1.0
            )
            ingest(store, rows)
        for _ in range(2):
            findings = reader.ask(FindingsQuestion(run_id=RUN))
            causes.append([view.finding.cause for view in findings])
    assert [[], [], ["loader_stall"], ["loader_stall"]] == causes


# ------------------------------------------------------------------------------------ grouping


def grouped(
    *records: Finding | Decision,
    attempts: dict[int, int] | None = None,
    seconds: Sequence[SecondProblem] = (),
) -> list[str]:
    """Return the groups as words: the steps of each."""
    items = []
    for i, one in enumerate(records):
        if isinstance(one, Decision):
            items.append(item_of_decision(i, one, i))
        else:
            items.append(item_of_finding(i, one, (attempts or {}).get(i, 1), i))
    return [
        " ".join(str(records[item.which].step) for item in some)
        for some in group_incidents(items, seconds)
    ]


def f(step: int, kind: str = "spike", **how: object) -> Finding:
    return finding(kind, step, **how).finding


def d(action: str, step: int, **how: object) -> Decision:
    return decision(action, step, **how).decision


_SIX = ["40", "80", "120", "160", "200", "240"]
_BACK: dict[str, object] = {"rollback_to_step": 5, "new_attempt": 2}
_PARAMS = f(12, "nonfinite_params", cause="nonfinite_params")
_SKIP = d("skip_step", 10)
_HIGH = f(8, cause="loss_burst")
_STALL = f(10, "data_bound", cause="loader_stall")
_RATE = ["8", "10 10"]
_BURST = f(8, cause="loss_burst", value=9.0, limit=3.0)
_ZERO = f(10, "layer_gradient", value=0.0, limit=None)
_NAN = (f(10, cause="nonfinite_loss", rank=1), d("skip_step", 10, rank=1))


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        ((f(10), f(10 + SAME_CAUSE_STEPS)), ["10 30"]),
        ((f(10), f(11 + SAME_CAUSE_STEPS)), ["10", "31"]),
        (tuple(f(40 * i) for i in range(1, 7)), _SIX),
        ((f(10, cause="nonfinite_loss"), _PARAMS, _SKIP), ["12 10 10"]),
        ((f(10, cause="nonfinite_loss"), _PARAMS), ["10 12"]),
        ((_HIGH, *_NAN, f(12, cause="grad_norm_burst")), ["8 12", "10 10"]),
        ((_HIGH, *_NAN, d("skip_step", 11)), ["8 10 10 11"]),
        ((_HIGH, _NAN[0]), ["8 10"]),
        ((_HIGH, f(9, cause="loss_outlier"), *_NAN), ["8 9", "10 10"]),
        ((f(9, cause="loss_outlier"), *_NAN, f(11, cause="loss_outlier")), ["9 10 10 11"]),
        ((_HIGH, *_NAN, d("rollback", 12, **_BACK)), ["8 10 10 12"]),
        ((_HIGH, *_NAN, f(12, "nonfinite_params", cause="nonfinite_params")), ["8 10 10 12"]),
        ((_HIGH, f(10, "learning_rate", cause="lr_jump"), f(12, cause="spike")), ["8", "10 12"]),
        ((f(8, cause="a"), f(10, cause="b"), f(10, "learning_rate", cause="lr_jump")), _RATE),
        ((f(10, "learning_rate", cause="lr_jump"), f(12, cause="loss_burst")), ["10 12"]),
        ((_BURST, _ZERO), ["8", "10"]),
        ((_ZERO, f(11, cause="loss_burst")), ["10 11"]),
        ((f(8, "learning_rate", cause="lr_jump"), _BURST, _ZERO), ["8 8 10"]),
        ((_BURST, f(10, "layer_gradient", value=5.0, limit=1.0)), ["8 10"]),
        ((_BURST, *_NAN, _PARAMS), ["8", "12 10 10"]),
        ((f(8, cause="loss_burst", value=1e9, limit=1.0), *_NAN, _PARAMS), ["8 10 10 12"]),
        ((_STALL, f(12, "throughput")), ["10", "12"]),
        ((_STALL, f(12, "straggler", cause="straggler_host", rank=1)), ["10", "12"]),
        ((_STALL, f(12, "data_bound", cause="data_bound"), f(14, "throughput")), ["10 12 14"]),
        ((f(10), f(200, onset_step=30)), ["10 200"]),
        ((f(10, rank=1, cause="a"), f(12, rank=2, cause="b")), ["10", "12"]),
        ((f(10, rank=1, cause="a"), f(12, rank=2, cause="a")), ["10 12"]),
        ((f(10, rank=1, cause="a"), f(12, "straggler", rank=1)), ["10 12"]),
        ((f(10, rank=1, cause="a"), f(50, rank=1, cause="b")), ["10", "50"]),
        (tuple(f(40 * i, rank=0, cause=c) for i, c in enumerate("abcdef", 1)), _SIX),
        ((f(10, cause="a"), f(12, "straggler", rank=1)), ["10", "12"]),
        ((f(10, cause="a"), f(12, cause="b", rank=1)), ["10 12"]),
        ((f(10, cause="a"), f(10 + FOLLOWING_STEPS, cause="b")), ["10 20"]),
        ((f(10, cause="a"), f(11 + FOLLOWING_STEPS, cause="b")), ["10", "21"]),
        ((f(10, "throughput"), f(12, "gpu_throttle")), ["12 10"]),
        ((f(10, cause="nonfinite_loss"), d("rollback", 200, **_BACK)), ["10 200"]),
        ((f(10, cause="loss_outlier"), d("rollback", 200, **_BACK)), ["10", "200"]),
        ((f(10, cause="nonfinite_loss"), d("rollback", 200, **_BACK, acted=False)), ["10", "200"]),
        ((d("rollback", 90, **_BACK), f(70, cause="other")), ["70", "90"]),
        ((d("rollback", 90, **_BACK), d("skip_step", 88, attempt=2, cause="other")), ["90 88"]),
        ((d("rollback", 90, **_BACK), d("skip_step", 40, attempt=2, cause="other")), ["90", "40"]),
        (
            (d("rollback", 90, rollback_to_step=5, new_attempt=2), d("skip_step", 80, attempt=2)),
            ["90 80"],
        ),
        (
            (d("rollback", 90, rollback_to_step=5, new_attempt=2), d("skip_step", 300, attempt=2)),
            ["90", "300"],
        ),
        ((d("skip_step", 10, attempt=1), d("skip_step", 10, attempt=2)), ["10", "10"]),
    ],
)
def test_what_is_near_and_alike_belongs_together(records, expected):
    assert expected == grouped(*records)


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        ((1, 10, False), ["8 11 12", "10 10"]),
        ((1, 10, True), ["8", "10 10 11 12"]),
        ((1, 8, True), ["8 11 10 10 12"]),
        ((1, 13, True), ["8 11 10 10 12"]),
        ((2, 10, True), ["8 11 10 10 12"]),
    ],
)
def test_a_second_problem_is_apart_from_the_high_losses_in_which_it_began(second, expected):
    records = (
        f(8, cause="loss_burst"),
        f(10, "layer_gradient", value=200.0, limit=1.0),
        d("skip_step", 10, cause="grad_norm_outlier"),
        f(11, cause="grad_norm_burst", onset_step=8),
        f(12, cause="loss_outlier"),
    )
    assert expected == grouped(*records, seconds=[SecondProblem(*second)])


def test_a_second_problem_of_the_data_has_the_findings_after_its_start():
    high = [f(step, cause="loss_outlier", onset_step=8) for step in (8, 9, 10, 12)]
    records = (*high, f(12, cause="grad_norm_burst", onset_step=8))
    assert ["8 9", "10 12 12"] == grouped(*records, seconds=[SecondProblem(1, 10, False, True)])
    assert ["8 9 10 12 12"] == grouped(*records, seconds=[SecondProblem(1, 13, False, True)])


def test_a_value_that_was_found_after_the_second_problem_is_not_older_than_it():
    high, outlier = f(8, cause="loss_burst"), f(12, cause="loss_outlier")
    late = f(14, cause="loss_outlier", onset_step=8)
    items = [item_of_finding(i, each, 1, i) for i, each in enumerate((high, outlier, late))]
    found = group_incidents(items, [SecondProblem(1, 10, is_lasting=True)])
    assert [[8], [10, 12]] == [[item.onset for item in some] for some in found]


_ITEMS = st.builds(
    lambda attempt, first, length, cause, rank, domain: IncidentItem(
        "finding", 0, attempt, first, first, first + length, 0, cause, domain, rank
    ),
    st.integers(1, 2),
    st.integers(0, 300),
    st.integers(0, 60),
    st.sampled_from("abc"),
    st.integers(-1, 2),
    st.sampled_from(["numbers", "speed"]),
)


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(_ITEMS, max_size=25), st.randoms())
def test_groups_do_not_depend_on_the_order_and_hold_each_thing_once(items, random):
    items = [item._replace(which=i, time_unix_ns=i) for i, item in enumerate(items)]
    found = group_incidents(items)
    assert sorted(items) == sorted(one for some in found for one in some)
    shuffled = list(items)
    random.shuffle(shuffled)
    assert sorted(map(sorted, found)) == sorted(map(sorted, group_incidents(shuffled)))
    assert len(found) == len(set(incident_ids(found)))


def test_a_step_lost_twice_is_counted_once():
    ledger = [
        d("skip_step", 50, cost_steps=1),
        d("skip_step", 52),
        d("rollback", 52, rollback_to_step=40, decided_at_step=53, new_attempt=2),
        d("skip_step", 52, attempt=2),
        d("skip_step", 70, acted=False),
        d("halt", 80, attempt=2, skipped=True),
    ]
    from trainvitals.views import DecisionView

    views = [DecisionView(run_id=RUN, time_unix_ns=0, decision=one) for one in ledger]
    assert [(1, 40, 53), (2, 52, 52), (2, 80, 80)] == lost_spans(views)


def test_many_incidents_are_bounded_and_the_gravest_are_told_whole(monkeypatch):
    from vitals_collector.queries import incidents

    monkeypatch.setattr(incidents, "MAX_INCIDENTS", 6)
    monkeypatch.setattr(incidents, "MAX_EVIDENCE", 2)
    store = open_store("sqlite://")
    writer = Writer()
    for i in range(10):
        kind = "rollback" if i == 5 else "skip_step"
        how = {"rollback_to_step": i * 1_000 - 10, "new_attempt": 0}
        made = decision(kind, i * 1_000, ledger_seq=i, **(how if i == 5 else {}))
        ingest(store, writer.events(made, step=i * 1_000))
    found = Query(store, clock=At(100)).ask(IncidentsQuestion(run_id=RUN))
    store.close()
    assert [9_000, 8_000, 7_000, 6_000, 5_000, 4_000] == [one.onset_step for one in found]
    whole = [one.onset_step for one in found if "Too many incidents" not in one.story[1]]
    assert [9_000, 5_000] == whole


def test_one_incident_is_read_by_its_id_as_it_is_among_all(store: Store):
    troubled_run(store)
    every = told(store)
    assert 2 == len(every)
    for view in every:
        one = IncidentsQuestion(run_id=RUN, incident_id=view.incident_id)
        assert (view,) == query(store).ask(one)
    assert () == query(store).ask(IncidentsQuestion(run_id=RUN, incident_id="absent"))
