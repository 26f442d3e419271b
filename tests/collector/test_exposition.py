import math
import shutil
import subprocess

import pytest
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.collector.rows import RUN, SECOND, START, Writer
from tests.support.exposition import Page
from tests.support.orders import keys, signed
from trainvitals.alerting import Alert, fingerprint
from trainvitals.catalog import CATALOG, GPU_SCHEMA, STEP_METRICS
from trainvitals.detect.registry import ACTED_CAUSES
from trainvitals.errors import ForeignBatchError, FormatError, NewerVersionError, StorageError
from trainvitals.identity import new_run_id
from trainvitals.records import Decision, DecisionMade, Finding, FindingRaised, RunInfo, RunStarted
from trainvitals.views import AckRequest, AlertView, CommandRequest, SilenceRequest
from vitals_collector.alerts import commands
from vitals_collector.alerts.delivery import resolve_alert
from vitals_collector.alerts.inbox import AlertOccurrence, list_alerts
from vitals_collector.api.exposition import (
    MAX_ALERTS,
    MAX_CAUSES,
    MAX_RUNS,
    OTHER_CAUSES,
)
from vitals_collector.storage.schema import alerts
from vitals_collector.storage.store import Store

BY_NAME = {metric.name: metric for metric in CATALOG}


@pytest.fixture
def page(store: Store) -> Page:
    return Page(store)


def decision(seq: int, action: str = "skip_step", cause: str = "nonfinite_loss") -> DecisionMade:
    made = Decision(
        ledger_seq=seq,
        action=action,
        step=seq,
        decided_at_step=seq + 1,
        attempt=1,
        reason="because",
        rule="nonfinite",
        cause=cause,
    )
    return DecisionMade(decision=made)


def a_busy_run(page: Page, name: str = "a run") -> None:
    writer = Writer()
    finding = Finding(
        kind="nonfinite", level="actionable", step=3, detector="nonfinite", reason="nan"
    )
    info = RunInfo(name=name, project="p", mode="heal")
    page.send(writer.events(RunStarted(info=info), FindingRaised(finding=finding)))
    page.send(writer.events(decision(1), decision(2), decision(3, "rollback")))
    loss = [3.0, 2.5]
    page.send(writer.steps([7, 8], loss=loss, grad_norm=1.5, tokens_seen=4096, skipped=0))
    page.acting.engine.poll()
    page.acting.dispatcher.deliver_due()
    request = CommandRequest(action="halt", reason="x")
    now = page.clock.time_ns()
    command = signed(RUN, request, now_unix_ns=now)
    commands.issue(page.store, RUN, command, keys=keys(), now_unix_ns=now)


def test_every_name_type_and_label_set_is_the_catalogs(page: Page):
    a_busy_run(page)
    families = list(text_string_to_metric_families(page.text()))
    kinds = {"counter": "counter", "gauge": "gauge", "info": "gauge"}
    for family in families:
        name = family.name + ("_total" if family.type == "counter" else "")
        metric = BY_NAME[name]
        assert (kinds[metric.kind], metric.help) == (family.type, family.documentation)
        for sample in family.samples:
            assert name == sample.name
            assert set(metric.labels) == set(sample.labels)
    assert len(families) == len({family.name for family in families})


def test_every_metric_of_runs_and_of_the_collector_is_there(page: Page):
    a_busy_run(page)
    said = {f.name for f in text_string_to_metric_families(page.text())}
    wanted = {m.name.removesuffix("_total") for m in CATALOG if m.scope == "collector"}
    wanted |= {m.name.removesuffix("_total") for m in STEP_METRICS if m.scope == "run"}
    assert wanted <= said


def test_no_step_and_no_free_text_is_a_label(page: Page):
    a_busy_run(page)
    for family in text_string_to_metric_families(page.text()):
        for sample in family.samples:
            assert not {"step", "reason_text", "summary", "checkpoint_id"} & set(sample.labels)


def test_the_values_are_the_newest_row_of_rank_zero(page: Page):
    a_busy_run(page)
    assert (2.5, 1.5, 8.0) == tuple(
        page.value(name, run=RUN) for name in ("train_loss", "train_grad_norm", "train_step")
    )
    assert 4096.0 == page.value("train_tokens_total", run=RUN)
    assert 2.0 == page.value("train_steps_total", run=RUN)
    assert 2.0 == page.value("train_skipped_steps_total", run=RUN, reason="nonfinite_loss")
    assert 1.0 == page.value("train_rollbacks_total", run=RUN, reason="nonfinite_loss")
    assert 1.0 == page.value("train_nonfinite_total", run=RUN)
    assert 1.0 == page.value("train_run_state", run=RUN, state="running")
    assert 1.0 == page.value("collector_commands_total", status="pending")
    assert 1.0 == page.value("collector_alerts_total", alert="StepSkipped", severity="log")
    skip = {"run": RUN, "alert": "StepSkipped", "severity": "log", "cause": "nonfinite_loss"}
    assert 1.0 == page.value("collector_alert_firing", **skip)
    told = page.value("collector_notifications_total", notifier="log", outcome="delivered")
    assert told == 2.0


def test_missing_is_absent_and_nan_is_nan(page: Page):
    page.send(Writer().steps([0], loss=math.nan))
    value = page.value("train_loss", run=RUN)
    assert value is not None and math.isnan(value)
    assert page.value("train_grad_norm", run=RUN) is None


def test_a_relaunch_shows_its_own_last_row(page: Page):
    page.send(Writer().steps([100], loss=1.0))
    page.send(Writer(started=START + 60 * SECOND).steps([40], loss=2.0))
    assert (2.0, 2.0) == (
        page.value("train_loss", run=RUN),
        page.value("train_steps_total", run=RUN),
    )


@pytest.mark.parametrize(
    "name", ['"\n# HELP x', "\\", "\x1b[31m", "{}" * 300, "<script>alert(1)</script>", "\u202egnp"]
)
def test_a_hostile_run_name_stays_inside_its_label(page: Page, name: str):
    a_busy_run(page, name)
    (info,) = [f for f in text_string_to_metric_families(page.text()) if f.name == "train_run_info"]
    (sample,) = info.samples
    assert len(sample.labels["name"]) <= 80
    assert sample.labels["name"].isprintable()


def test_causes_that_nobody_foresaw_are_other_which_was_there_before(page: Page):
    writer = Writer()
    page.send(writer.steps([0]))
    page.send(writer.events(decision(1, cause='x"} 1\n'), decision(2, cause="y z")))
    page.send(writer.events(*(decision(10 + i, cause=f"cause_{i:03d}") for i in range(60))))
    (family,) = [
        f for f in text_string_to_metric_families(page.text()) if f.name == "train_skipped_steps"
    ]
    assert len(family.samples) == len(ACTED_CAUSES)
    assert 62.0 == sum(sample.value for sample in family.samples)
    assert 62.0 == page.value(family.name + "_total", run=RUN, reason="other")


def test_only_the_newest_runs_appear(page: Page):
    for i in range(MAX_RUNS + 5):
        run = new_run_id(START + i * SECOND)
        page.send(Writer(run=run, started=START + i * SECOND).steps([0], loss=1.0))
    (family,) = [f for f in text_string_to_metric_families(page.text()) if f.name == "train_loss"]
    assert MAX_RUNS == len(family.samples)


def test_a_run_that_ended_stays_for_an_hour_and_then_goes(page: Page):
    page.send(Writer().steps([0], loss=1.0))
    page.clock.advance(600)
    assert 1.0 == page.value("train_run_state", run=RUN, state="lost")
    page.clock.advance(3_600)
    assert page.value("train_run_state", run=RUN, state="lost") is None


def test_an_empty_store_is_a_valid_page(page: Page):
    assert 0.0 == page.value("collector_ingested_rows_total")


def test_what_failed_and_what_the_watchers_did_not_take_at_once_is_counted(page: Page):
    page.store.counters.fail("upkeep")
    page.store.counters.fail("upkeep")
    assert 2.0 == page.value("collector_part_failures_total", part="upkeep")
    watching = page.acting.engine.watching
    watching._live._most = 1  # no room: the store has the rows
    page.send(Writer().steps(range(10), loss=1.0))
    page.acting.engine.poll()
    assert 10.0 == page.value("collector_rows_left_to_store_total")
    row = [None] * (len(GPU_SCHEMA.columns) - 4)
    rows = [[-1, 0, START + i, i, *row] for i in range(4_100)]
    page.send(Writer("gpu:G").batch(GPU_SCHEMA, rows))
    page.acting.engine.poll()
    assert 4.0 == page.value("collector_dropped_samples_total")


def test_a_scrape_stores_nothing_and_so_works_on_a_full_disk(
    page: Page, monkeypatch: pytest.MonkeyPatch
):
    page.send(Writer().steps([7], loss=[3.0]))

    def refuse(*_: object) -> None:
        raise AssertionError("a scrape wants to write")

    monkeypatch.setattr(page.store, "write", refuse)
    monkeypatch.setattr(page.store.numbers, "append", refuse)
    assert "train_loss" in generate_latest(page.registry).decode()


COLLECTOR_COUNTERS = [m.name for m in CATALOG if (m.scope, m.kind) == ("collector", "counter")]


@pytest.mark.parametrize("name", COLLECTOR_COUNTERS)
def test_each_counter_of_a_fresh_collector_is_born_at_zero(page: Page, name: str):
    families = {f.name: f for f in text_string_to_metric_families(page.text())}
    values = [sample.value for sample in families[name.removesuffix("_total")].samples]
    assert values
    assert {0.0} == set(values)


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("collector_part_failures_total", {"part": "upkeep"}),
        ("collector_part_failures_total", {"part": "remote_write"}),
        ("collector_thinned_rows_total", {"stream": "gpu", "reason": "size"}),
        ("collector_thinned_rows_total", {"stream": "steps", "reason": "age"}),
        ("collector_removed_runs_total", {"reason": "age"}),
        ("collector_remote_writes_total", {"outcome": "dropped"}),
        ("collector_commands_total", {"status": "refused"}),
    ],
)
def test_a_label_set_that_can_come_is_there_before_it_does(page: Page, name: str, labels: dict):
    assert 0.0 == page.value(name, **labels)


def test_a_new_runs_counters_are_born_at_zero_for_each_cause(page: Page):
    page.send(Writer().steps([0], loss=1.0))
    for name in ("train_skipped_steps_total", "train_rollbacks_total"):
        assert {0.0} == {page.value(name, run=RUN, reason=cause) for cause in ACTED_CAUSES}
    assert 0.0 == page.value("train_nonfinite_total", run=RUN)


def test_what_can_be_counted_is_there_before_it_happens(page: Page):
    assert 0.0 == page.value("collector_alerts_total", alert="NodeLost", severity="page")
    for outcome in ("delivered", "dropped", "failed", "retried"):
        told = page.value("collector_notifications_total", notifier="log", outcome=outcome)
        assert 0.0 == told
    for error in (FormatError, NewerVersionError, StorageError, ForeignBatchError):
        assert 0.0 == page.value("collector_rejected_batches_total", reason=error.code)
    for code in ("V410", "V411", "V412", "V413", "V414"):
        assert 0.0 == page.value("collector_refused_requests_total", reason=code)


def raise_alert(page: Page, run: str, name: str, severity: str, cause: str) -> None:
    alert = an_alert(run, name, severity, cause)
    page.acting.inbox.raise_alerts([AlertOccurrence(run, page.clock.time_ns(), alert)], cursors={})


def an_alert(run: str, name: str, severity: str, cause: str) -> Alert:
    labels = {"run": run, "cause": cause}
    return Alert(name=name, severity=severity, labels=labels, summary="s", step=1, point=True)  # type: ignore[arg-type]


def test_a_flood_of_alerts_that_page_nobody_leaves_the_page_in(page: Page):
    page.send(Writer().steps([0]))
    raise_alert(page, RUN, "StateDamaged", "page", "x")
    for i in range(MAX_ALERTS + 50):
        page.clock.advance(1)
        raise_alert(page, RUN, f"Flood{i}", "log", "x")
    families = {f.name: f for f in text_string_to_metric_families(page.text())}
    samples = families["collector_alert_firing"].samples
    assert MAX_ALERTS + 1 == len(samples)
    assert [1.0] == [s.value for s in samples if s.labels["severity"] == "page"]


def test_two_alerts_of_one_name_in_one_run_are_told_apart(page: Page):
    page.send(Writer().steps([0]))
    raise_alert(page, RUN, "NodeLost", "page", "node-a")
    raise_alert(page, RUN, "NodeLost", "page", "node-b")
    about = {"run": RUN, "alert": "NodeLost", "severity": "page"}
    views = list_alerts(page.store, now_unix_ns=page.clock.time_ns())
    (first,) = [view for view in views if view.labels["cause"] == "node-a"]
    page.acting.inbox.report(resolve_alert(first, page.clock.time_ns()))
    assert 0.0 == page.value("collector_alert_firing", **about, cause="node-a")
    assert 1.0 == page.value("collector_alert_firing", **about, cause="node-b")


def test_of_names_that_a_training_makes_as_it_goes_the_first_are_told_apart(page: Page):
    page.send(Writer().steps([0]))
    for i in range(MAX_CAUSES + 5):
        page.clock.advance(1)
        raise_alert(page, RUN, "UserAlert", "page", f"loss at {i}")
    families = {f.name: f for f in text_string_to_metric_families(page.text())}
    causes = [s.labels["cause"] for s in families["collector_alert_firing"].samples]
    assert {OTHER_CAUSES, *(f"loss at {i}" for i in range(MAX_CAUSES))} == set(causes)
    assert MAX_CAUSES + 1 == len(causes)


def test_an_alert_that_resolved_is_told_as_over_for_a_day_also_by_another_process(page: Page):
    writer = Writer()
    page.send(writer.steps([0], loss=1.0))
    page.acting.engine.poll()
    for _ in range(6):
        page.clock.advance(20)
        page.acting.engine.poll()
    lost = {"run": RUN, "alert": "RunLost", "severity": "page", "cause": ""}
    assert 1.0 == page.value("collector_alert_firing", **lost)
    page.send(writer.steps([1], loss=1.0))
    page.acting.engine.poll()
    assert 0.0 == page.value("collector_alert_firing", **lost)
    other = Page(page.store)
    other.clock.advance(130)
    assert 0.0 == other.value("collector_alert_firing", **lost)
    other.clock.advance(86_400)
    assert other.value("collector_alert_firing", **lost) is None


def test_an_alert_of_a_run_that_was_removed_is_over(page: Page):
    page.send(Writer().steps([0]))
    raise_alert(page, RUN, "StateDamaged", "page", "x")
    about = {"run": RUN, "alert": "StateDamaged", "severity": "page", "cause": "x"}
    assert 1.0 == page.value("collector_alert_firing", **about)
    with page.store.write() as connection:
        connection.execute(alerts.delete())
    assert 0.0 == page.value("collector_alert_firing", **about)


def test_a_receiver_that_refuses_fires_as_an_alert_of_no_run(page: Page):
    labels = {"receiver": "team"}
    refusal = AlertView(
        fingerprint=fingerprint("ReceiverFailing", labels),
        name="ReceiverFailing",
        run_id="",
        severity="page",
        state="firing",
        summary="Receiver team takes no alerts: 404",
        labels=labels,
        step=-1,
        started_unix_ns=page.clock.time_ns(),
        updated_unix_ns=page.clock.time_ns(),
    )
    page.acting.inbox.report(refusal)
    about = {"run": "", "alert": "ReceiverFailing", "severity": "page", "cause": "team"}
    assert 1.0 == page.value("collector_alert_firing", **about)
    page.acting.inbox.report(resolve_alert(refusal, page.clock.time_ns()))
    assert 0.0 == page.value("collector_alert_firing", **about)


def test_every_silenced_alert_of_fifteen_hundred_is_told_as_not_firing(page: Page):
    page.send(Writer().steps([0]))
    occurrences = [
        AlertOccurrence(RUN, page.clock.time_ns(), an_alert(RUN, f"Page{i}", "page", "x"))
        for i in range(1_500)
    ]
    page.acting.inbox.raise_alerts(occurrences, cursors={})
    silence = SilenceRequest(matchers=("name=~Page.*",), by="me", reason="drill", seconds=60.0)
    page.acting.inbox.silence(silence)
    families = {f.name: f for f in text_string_to_metric_families(page.text())}
    values = [s.value for s in families["collector_alert_firing"].samples]
    assert [0.0] * 1_500 == values
    page.clock.advance(61)
    families = {f.name: f for f in text_string_to_metric_families(page.text())}
    assert 1_500.0 == sum(s.value for s in families["collector_alert_firing"].samples)


def test_a_silenced_page_does_not_fire(page: Page):
    page.send(Writer().steps([0]))
    raise_alert(page, RUN, "StateDamaged", "page", "x")
    (view,) = list_alerts(page.store, now_unix_ns=page.clock.time_ns())
    request = AckRequest(by="me", reason="known", silence_seconds=60.0)
    page.acting.inbox.acknowledge(view.fingerprint, request)
    about = {"run": RUN, "alert": "StateDamaged", "severity": "page", "cause": "x"}
    assert 0.0 == page.value("collector_alert_firing", **about)
    page.clock.advance(61)
    assert 1.0 == page.value("collector_alert_firing", **about)


def test_nothing_is_registered_globally():
    from prometheus_client import REGISTRY

    names = {name for name in REGISTRY._names_to_collectors if name.startswith("collector_")}
    assert set() == names


@pytest.mark.servers
def test_promtool_has_nothing_to_object_to(page: Page):
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool on this machine")
    a_busy_run(page)
    checked = subprocess.run(
        [promtool, "check", "metrics"], input=page.text(), text=True, capture_output=True
    )
    assert (0, "", "") == (checked.returncode, checked.stdout, checked.stderr)
