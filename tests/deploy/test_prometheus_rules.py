"""Rules and configuration against Debian's promtool, where it is installed."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.examples import one_in
from trainvitals.alerting import ALERTS
from trainvitals.catalog import CATALOG
from vitals_deploy import prometheus
from vitals_deploy.cli import write_files

RULES = [rule for _, rules in prometheus.GROUPS for rule in rules]
FIRING = 'collector_alert_firing{instance="c", job="vitals-collector", run="R", '


LOSSES = (
    ('agent_dropped_rows_total{instance="a"}', "VitalsRowsDropped"),
    ("collector_lost_rows_total", "VitalsRowsLost"),
    ('agent_corrupt_rows_total{instance="a"}', "VitalsSpoolDamaged"),
    ("collector_damaged_stretches_total", "VitalsSpoolDamaged"),
    ("collector_damaged_batches_total", "VitalsStoreDamaged"),
    ('collector_rejected_batches_total{reason="newer"}', "VitalsBatchesRejected"),
    ('collector_refused_requests_total{reason="V413"}', "VitalsAccessRefused"),
    ('collector_rejected_batches_total{reason="V241"}', "VitalsAccessRefused"),
    (
        'collector_notifications_total{notifier="webhook", outcome="failed"}',
        "VitalsNotificationsFailing",
    ),
)
"""A counter of each rule about a loss."""


def promtool(*command: object) -> str:
    """Return what promtool prints; fail where it finds a fault."""
    done = subprocess.run(
        ["promtool", *map(str, command)], capture_output=True, text=True, timeout=60, check=False
    )
    assert 0 == done.returncode, done.stdout + done.stderr
    return done.stdout


def fire(
    tmp_path: Path, series: dict[str, str], at: str, alert: str, *, every: str = "15s"
) -> list[dict[str, str]]:
    """Return the labels of the alerts that fire, asked of promtool's own rule engine."""
    labels = re.findall(r"Labels:\{([^}]*)\}", said_of(tmp_path, series, at, alert, every=every))
    return [dict(re.findall(r'(\w+)="([^"]*)"', text)) for text in labels]


def said_of(
    tmp_path: Path, series: dict[str, str], at: str, alert: str, *, every: str = "15s"
) -> str:
    """Return what promtool says of the alerts that fire; "" of none. A sample comes ``every`` so.

    promtool only says yes or no to an expectation, so it is given none and its answer is read.
    """
    write_files(tmp_path, prometheus.prometheus_files())
    test: dict[str, Any] = {
        "rule_files": ["vitals_rules.yml"],
        "evaluation_interval": every,
        "tests": [
            {
                "interval": every,
                "input_series": [{"series": k, "values": v} for k, v in series.items()],
                "alert_rule_test": [{"eval_time": at, "alertname": alert, "exp_alerts": []}],
            }
        ],
    }
    path = tmp_path / "test.yml"
    path.write_text(json.dumps(test))
    done = subprocess.run(
        ["promtool", "test", "rules", path], capture_output=True, text=True, timeout=60, check=False
    )
    got = done.stderr.rpartition("got:")[2]
    assert (done.returncode != 0) == bool(re.search(r"Labels:\{([^}]*)\}", got)), done.stderr
    return got


@pytest.mark.servers("promtool")
def test_the_scrape_configuration_is_valid(tmp_path):
    write_files(tmp_path, prometheus.prometheus_files())
    assert "SUCCESS" in promtool("check", "config", tmp_path / "prometheus.yml")


@pytest.mark.servers("promtool")
def test_the_rules_are_valid(tmp_path):
    write_files(tmp_path, prometheus.prometheus_files())
    found = promtool("check", "rules", tmp_path / "vitals_rules.yml")
    assert f"{len(RULES)} rules found" in found


def test_a_rule_reads_no_metric_that_the_catalog_does_not_know():
    known = {metric.name for metric in CATALOG}
    for rule in RULES:
        assert metrics_in(rule.expr) <= known, rule.name


def metrics_in(expr: str) -> set[str]:
    return set(re.findall(r"\b(?:train|gpu|node|agent|collector)_\w+", expr))


def test_no_rule_detects_from_scraped_samples():
    read = {name for rule in RULES for name in metrics_in(rule.expr)}
    training = {name for name in read if name.startswith(("train_", "gpu_", "node_"))}
    assert {"train_run_state"} == training


def chosen(template: str, alert: str) -> str:
    """Return what a template of `prometheus._by_alert` says of an alert."""
    cases = re.findall(r"if eq \$labels\.alert ([^}]*) \}\}(.*?)\{\{ (?=else|end)", template)
    (otherwise,) = re.findall(r"\{\{ else \}\}([^{]*)", template)[:1]
    texts = [text for names, text in cases if json.dumps(alert) in names.split()]
    assert len(texts) <= 1
    return texts[0] if texts else otherwise


def test_the_rule_that_hands_on_says_of_each_alert_what_vitals_did_and_what_to_do():
    (rule,) = prometheus.ENGINE_RULES
    told = [alert for alert in ALERTS if alert.severity != "log"]
    assert len(told) > 30
    for alert in told:
        assert alert.help == chosen(rule.description, alert.name)
        assert alert.did == chosen(rule.did, alert.name)
        pasted = chosen(rule.to_do, alert.name)
        assert alert.to_do == pasted.replace("{{ $labels.run }}", "RUN")
        assert " RUN" not in pasted
    assert "Read the runbook." == chosen(rule.to_do, "OfANewerVersion")
    assert rule.to_do.count("{{ if") == rule.to_do.count("{{ end }}") == 1


def test_every_rule_links_a_section_of_the_runbook_that_there_is():
    runbook = (Path(__file__).parents[2] / "docs" / "RUNBOOK.md").read_text()
    sections = set(re.findall(r"^## (\w+)$", runbook, re.MULTILINE))
    text = prometheus.render_rules(runbook_url="https://w.example/R")
    links = re.findall(r'runbook_url: "https://w.example/R#(.*)"', text)
    assert len(RULES) == len(links)
    assert {"{{ $labels.alert | toLower }}"} == set(links) - {name.lower() for name in sections}
    assert {alert.name for alert in ALERTS} <= sections


def test_a_page_is_linked_only_where_there_is_an_address():
    assert "dashboard_url" not in prometheus.render_rules()
    text = prometheus.render_rules(public_url="https://v.example/")
    page = "https://v.example/{{ if $labels.run }}?run={{ $labels.run }}{{ end }}"
    assert [page] == re.findall(r'dashboard_url: "(.*)"', text)


@pytest.mark.servers("promtool")
class TestAlerts:
    def test_an_alert_of_no_run_is_told_without_one_and_with_all_that_is_known_of_it(
        self, tmp_path
    ):
        labels = 'alert="ReceiverFailing", severity="page"}'
        series = {FIRING.replace('run="R", ', "") + labels: "1x20"}
        text = said_of(tmp_path, series, "2m", "VitalsAlert")
        for words in (
            'summary="ReceiverFailing"',
            "Vitals keeps trying, and alerts all other receivers.",
            "Check its URL and its token",
            "docs/RUNBOOK.md#receiverfailing",
        ):
            assert words in text, text

    def test_an_alert_of_a_run_names_it_and_links_its_section(self, tmp_path):
        series = {FIRING + 'alert="TrainingHalted", severity="page"}': "1x20"}
        text = said_of(tmp_path, series, "2m", "VitalsAlert")
        for words in (
            "TrainingHalted on run R",
            "Vitals halted the run.",
            "Read `vitals postmortem R`, fix the cause, then run `vitals resume R`",
            "docs/RUNBOOK.md#traininghalted",
        ):
            assert words in text, text

    def test_what_the_engine_says_is_handed_on_with_its_severity(self, tmp_path):
        series = {FIRING + 'alert="RunHalted", severity="page"}': "0x4 1x20"}
        assert [] == fire(tmp_path, series, "45s", "VitalsAlert")
        expected = {
            "alertname": "VitalsAlert",
            "run": "R",
            "alert": "RunHalted",
            "severity": "page",
        }
        assert [expected] == fire(tmp_path, series, "2m", "VitalsAlert")

    def test_a_second_alert_of_one_name_fires_and_resolves_by_itself(self, tmp_path):
        node = FIRING + 'alert="NodeLost", severity="page", cause='
        series = {node + '"node-a"}': "1x8 0x40", node + '"node-b"}': "_x4 1x16 0x40"}

        def nodes(at: str) -> list[str]:
            return sorted(alert["cause"] for alert in fire(tmp_path, series, at, "VitalsAlert"))

        assert ["node-a"] == nodes("45s")
        assert ["node-a", "node-b"] == nodes("1m45s")
        assert ["node-b"] == nodes("4m")
        assert [] == nodes("7m")
        text = said_of(tmp_path, series, "4m", "VitalsAlert")
        assert 'summary="NodeLost (node-b) on run R"' in text

    def test_it_resolves_when_the_engine_says_so(self, tmp_path):
        series = {FIRING + 'alert="RolledBack", severity="notify"}': "1x8 0x20"}
        assert 1 == len(fire(tmp_path, series, "2m", "VitalsAlert"))
        assert [] == fire(tmp_path, series, "4m", "VitalsAlert")

    def test_one_skipped_step_disturbs_nobody(self, tmp_path):
        series = {FIRING + 'alert="StepSkipped", severity="log"}': "1x20"}
        assert [] == fire(tmp_path, series, "2m", "VitalsAlert")

    def test_a_collector_that_restarts_does_not_fire_it_again(self, tmp_path):
        series = {FIRING + 'alert="RunHalted", severity="page"}': "1x8 stale _x2 1x8"}
        for at in ("2m", "2m15s", "2m30s", "2m45s", "3m"):
            assert 1 == len(fire(tmp_path, series, at, "VitalsAlert")), at

    @pytest.mark.slow
    @pytest.mark.parametrize("death", ["_x1500", "stale _x1500"])
    def test_a_collector_that_died_resolves_nothing_for_a_day(self, death, tmp_path):
        series = {FIRING + 'alert="RunHalted", severity="page"}': f"1x2 {death}"}
        for at in ("3m", "10m", "24h"):
            assert 1 == len(fire(tmp_path, series, at, "VitalsAlert", every="1m")), at
        assert [] == fire(tmp_path, series, "24h10m", "VitalsAlert", every="1m")

    def test_a_collector_that_comes_back_resolves_by_its_own_word_alone(self, tmp_path):
        series = {FIRING + 'alert="RunHalted", severity="page"}': "1x8 stale _x40 1x8 0x40"}
        assert 1 == len(fire(tmp_path, series, "14m", "VitalsAlert"))
        assert [] == fire(tmp_path, series, "15m", "VitalsAlert")

    def test_another_collector_over_the_same_database_resolves_what_a_dead_one_said(self, tmp_path):
        labels = 'alert="RunHalted", severity="page"}'
        dead, other = FIRING + labels, (FIRING + labels).replace('"c"', '"d"')
        series = {dead: "1x8 stale _x100", other: "1x20 0x100"}
        assert 1 == len(fire(tmp_path, series, "5m", "VitalsAlert"))
        assert [] == fire(tmp_path, series, "6m", "VitalsAlert")

    @pytest.mark.parametrize("alert", [rule.name for rule in RULES])
    def test_a_nan_fires_nothing(self, alert, tmp_path):
        nan = " ".join(["NaN"] * 60)
        series = {
            FIRING + 'alert="RunHalted", severity="page"}': nan,
            'up{job="vitals-collector", instance="c"}': "1x60",
            'up{job="vitals-agent", instance="a", run="R"}': nan,
            'train_run_state{run="R", state="running"}': nan,
            'agent_cycle_age_seconds{instance="a"}': nan,
            'agent_dropped_rows_total{instance="a"}': nan,
            "collector_lost_rows_total": nan,
            'collector_rejected_batches_total{reason="corrupt"}': nan,
            'collector_refused_requests_total{reason="V413"}': nan,
            'collector_notifications_total{notifier="log", outcome="failed"}': nan,
        }
        assert [] == fire(tmp_path, series, "10m", alert)

    def test_a_notification_that_got_through_is_no_news(self, tmp_path):
        series = {'collector_notifications_total{notifier="log", outcome="delivered"}': "0+5x40"}
        assert [] == fire(tmp_path, series, "5m", "VitalsNotificationsFailing")

    @pytest.mark.parametrize("values", ["0x40", "_x40"])
    def test_without_a_collector_there_is_a_page(self, values, tmp_path):
        series = {'up{job="vitals-collector", instance="c"}': values}
        (alert,) = fire(tmp_path, series, "5m", "VitalsCollectorDown")
        assert "page" == alert["severity"]

    def test_a_collector_that_dies_pages_within_a_minute_and_one_missed_scrape_does_not(
        self, tmp_path
    ):
        # Up at 30 s for the last time: it died at once after.
        dead = {'up{job="vitals-collector", instance="c"}': "1x2 0x40"}
        assert [] == fire(tmp_path, dead, "45s", "VitalsCollectorDown")
        assert 1 == len(fire(tmp_path, dead, "75s", "VitalsCollectorDown"))
        missed = {'up{job="vitals-collector", instance="c"}': "1x2 0 1x40"}
        for at in ("45s", "60s", "75s"):
            assert [] == fire(tmp_path, missed, at, "VitalsCollectorDown")

    @pytest.mark.parametrize("at", ["15s", "30s", "45s"])
    def test_a_new_prometheus_that_has_not_scraped_yet_pages_nobody(self, at, tmp_path):
        series = {'up{job="vitals-collector", instance="c"}': "_x2 1x40"}
        assert [] == fire(tmp_path, series, at, "VitalsCollectorDown")

    def test_one_of_two_collectors_is_enough(self, tmp_path):
        series = {
            'up{job="vitals-collector", instance="c"}': "0x40",
            'up{job="vitals-collector", instance="d"}': "1x40",
        }
        assert [] == fire(tmp_path, series, "5m", "VitalsCollectorDown")

    def test_an_agent_that_is_gone_counts_only_while_its_run_is_running(self, tmp_path):
        series = {
            'up{job="vitals-agent", instance="a", run="RUNNING", node="n"}': "0x60",
            'up{job="vitals-agent", instance="b", run="FINISHED", node="n"}': "0x60",
            'train_run_state{run="RUNNING", state="running"}': "1x60",
            'train_run_state{run="FINISHED", state="finished"}': "1x60",
        }
        (alert,) = fire(tmp_path, series, "10m", "VitalsAgentDown")
        assert ("RUNNING", "notify") == (alert["run"], alert["severity"])

    def test_the_agent_of_a_node_has_no_run_and_counts_always(self, tmp_path):
        series = {'up{job="vitals-agent", instance="a"}': "0x60"}
        assert 1 == len(fire(tmp_path, series, "10m", "VitalsAgentDown"))

    def test_an_agent_that_restarts_within_five_minutes_is_no_news(self, tmp_path):
        series = {
            'up{job="vitals-agent", instance="a", run="R", node="n"}': "1x8 0x4 1x60",
            'train_run_state{run="R", state="running"}': "1x80",
        }
        for at in ("3m", "8m", "12m"):
            assert [] == fire(tmp_path, series, at, "VitalsAgentDown"), at

    def test_a_collector_that_restarts_or_dies_ends_no_word_about_an_agent(self, tmp_path):
        gone = {'up{job="vitals-agent", instance="a", run="R", node="n"}': "1x8 0x400"}
        for states in ("1x30 stale _x2 1x300", "1x40 stale _x300"):
            series = gone | {'train_run_state{run="R", state="running"}': states}
            for at in ("8m", "20m"):
                (alert,) = fire(tmp_path, series, at, "VitalsAgentDown")
                assert "R" == alert["run"]

    def test_an_agent_that_ends_with_its_run_is_no_news(self, tmp_path):
        series = {
            'up{job="vitals-agent", instance="a", run="R", node="n"}': "1x40 0x300",
            'train_run_state{run="R", state="running"}': "1x40 stale",
            'train_run_state{run="R", state="finished"}': "_x41 1x300",
        }
        for at in ("12m", "20m", "70m"):
            assert [] == fire(tmp_path, series, at, "VitalsAgentDown"), at

    def test_a_stall_ends_with_the_agents_restart_and_not_with_its_death(self, tmp_path):
        stalled = 'agent_cycle_age_seconds{instance="a", job="vitals-agent"}'
        died = {stalled: "1x4 15+15x20 stale _x100"}
        assert 1 == len(fire(tmp_path, died, "10m", "VitalsAgentStalled"))
        assert [] == fire(tmp_path, died, "25m", "VitalsAgentStalled")
        restarted = {stalled: "1x4 15+15x20 stale _x2 0x100"}
        assert [] == fire(tmp_path, restarted, "8m", "VitalsAgentStalled")

    def test_an_agent_that_answers_but_hangs_is_noticed(self, tmp_path):
        series = {'agent_cycle_age_seconds{instance="a", job="vitals-agent"}': "1x4 15+15x60"}
        assert [] == fire(tmp_path, series, "2m", "VitalsAgentStalled")
        assert 1 == len(fire(tmp_path, series, "5m", "VitalsAgentStalled"))

    @pytest.mark.parametrize(("series", "alert"), LOSSES)
    def test_the_first_loss_is_told_and_forgotten_a_quarter_of_an_hour_later(
        self, series, alert, tmp_path
    ):
        assert 1 == len(fire(tmp_path, {series: "0x4 1x100"}, "3m", alert))
        assert [] == fire(tmp_path, {series: "0x4 1x100"}, "20m", alert)

    @pytest.mark.parametrize(("series", "alert"), one_in(3, LOSSES))
    def test_a_restart_is_no_loss_and_hides_none(self, series, alert, tmp_path):
        assert [] == fire(tmp_path, {series: "7x100 stale _x2 0x40"}, "30m", alert)
        assert 1 == len(fire(tmp_path, {series: "7x100 stale _x2 0x4 1x40"}, "30m", alert))

    @pytest.mark.parametrize(("series", "alert"), LOSSES)
    def test_a_loss_stays_told_when_who_told_of_it_dies(self, series, alert, tmp_path):
        assert 1 == len(fire(tmp_path, {series: "0x4 1x4 stale _x100"}, "10m", alert))

    def test_every_rule_about_a_loss_is_tried(self):
        assert {alert for _, alert in LOSSES} == {
            rule.name for rule in prometheus.LOSS_RULES + prometheus.ACCESS_RULES
        }
