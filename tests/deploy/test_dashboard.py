import json
import os
import re
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
import numpy as np
import pytest

from tests.collector.rows import Writer
from tests.support.served import Served
from trainvitals.catalog import CATALOG
from trainvitals.identity import new_run_id
from trainvitals.records import AttemptStarted, Decision, DecisionMade, RunInfo, RunStarted
from trainvitals.views import RunState
from vitals_collector.api.app import CollectorSettings
from vitals_collector.ingest.ingest import ingest
from vitals_deploy import prometheus
from vitals_deploy.cli import write_files
from vitals_deploy.templates import read_dashboard

VARIABLES = {
    "$__rate_interval": "1m",
    "$__range": "5m",
    "$run": ".*",
    "$node": ".*",
}
NAME = "pretrain-7b"


def panels() -> list[dict[str, Any]]:
    """Return every panel, those in closed rows too."""
    every = read_dashboard()["panels"]
    of_rows = [panel for row in every for panel in row.get("panels", ())]
    return [panel for panel in (*every, *of_rows) if panel["type"] != "row"]


def stat_queries() -> dict[str, str]:
    """Return the queries of the panels that show a number, by legend."""
    stats = [panel for panel in panels() if panel["type"] == "stat"]
    return {each["legendFormat"]: each["expr"] for panel in stats for each in panel["targets"]}


def sent(query: str) -> str:
    """Return the query as Grafana would send it."""
    for name, value in VARIABLES.items():
        query = query.replace(name, value)
    return query


def queries() -> list[str]:
    """Return every query of the dashboard as Grafana would send it."""
    found = [target["expr"] for panel in panels() for target in panel["targets"]]
    found += [annotation["expr"] for annotation in read_dashboard()["annotations"]["list"]]
    for variable in read_dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            asked = variable["query"]["query"].partition("(")[2].removesuffix(")")
            found.append(asked.removesuffix(", node"))
    return [sent(query) for query in found]


def metrics_in(text: str) -> set[str]:
    return set(re.findall(r"\b(?:train|gpu|node|agent|collector)_\w+", text))


def test_no_query_names_a_metric_that_there_is_not():
    known = {metric.name for metric in CATALOG}
    assert set() == metrics_in(" ".join(queries())) - known


def test_it_is_a_board_a_person_would_keep():
    assert 18 <= len(panels()) <= 24
    assert {"stat", "state-timeline", "heatmap", "timeseries"} == {p["type"] for p in panels()}
    rows = [panel for panel in read_dashboard()["panels"] if panel["type"] == "row"]
    titles = ["Now", "Training", "Ranks", "GPUs", "Nodes", "Vitals itself"]
    assert titles == [row["title"] for row in rows]
    assert [False, False, True, True, True, True] == [row["collapsed"] for row in rows]
    assert all(bool(row["panels"]) == row["collapsed"] for row in rows)


def test_no_legend_is_a_run_s_id():
    for panel in panels():
        for target in panel["targets"]:
            assert "{{run}}" not in target["legendFormat"]
            assert ("group_left (name)" in target["expr"]) == ("{{name}}" in target["legendFormat"])


@pytest.mark.parametrize("is_open", [True, False])
def test_panels_have_ids_titles_and_places_of_their_own(is_open: bool):
    every = read_dashboard()["panels"]
    rows = [row for row in every if row["type"] == "row"]
    everything = [*panels(), *rows]
    assert len(everything) == len({panel["id"] for panel in everything})
    assert len(panels()) == len({panel["title"] for panel in panels()})
    for shown in [every] if is_open else [row["panels"] for row in rows]:
        taken: set[tuple[int, int]] = set()
        for panel in shown:
            place = panel["gridPos"]
            cells = {
                (x, y)
                for x in range(place["x"], place["x"] + place["w"])
                for y in range(place["y"], place["y"] + place["h"])
            }
            assert set() == cells & taken, panel["title"]
            assert all(x < 24 for x, _ in cells)
            taken |= cells


def test_every_variable_in_a_query_is_defined():
    defined = {variable["name"] for variable in read_dashboard()["templating"]["list"]}
    used = set(re.findall(r"\$\{?([A-Za-z_]\w*)", json.dumps(read_dashboard()))) - {"__all"}
    assert {"__rate_interval", "__range"} == used - defined


def test_each_state_of_a_run_has_a_number_and_a_color():
    (panel,) = [panel for panel in panels() if "State of each run" == panel["title"]]
    (mapping,) = panel["fieldConfig"]["defaults"]["mappings"]
    names = {number: each["text"] for number, each in mapping["options"].items()}
    (query,) = [target["expr"] for target in panel["targets"]]
    assert set(get_args(RunState)) == set(names.values())
    assert all(f'state="{name}"}}) * {number}' in query for number, name in names.items())


# ----------------------------------------------------------- what Grafana's schema says of a board


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Takes the fields it names alone: a misspelt one would be ignored by Grafana, in silence."""


class Place(_Strict):
    h: int
    w: int
    x: int
    y: int


class DataSource(_Strict):
    type: Literal["prometheus"]
    uid: str


class Target(_Strict):
    refId: str  # noqa: N815 - Grafana's names, here and below
    datasource: DataSource
    expr: str
    legendFormat: str  # noqa: N815


class Step(_Strict):
    value: float | None
    color: str


class Thresholds(_Strict):
    mode: Literal["absolute", "percentage"]
    steps: list[Step]


class Word(_Strict):
    text: str
    color: str
    index: int


class Mapping(_Strict):
    type: Literal["value"]
    options: dict[str, Word]


class Custom(_Strict):
    lineWidth: int = 1  # noqa: N815
    fillOpacity: int = 0  # noqa: N815
    spanNulls: bool = False  # noqa: N815
    drawStyle: Literal["line", "bars", "points"] = "line"  # noqa: N815
    stacking: dict[Literal["mode", "group"], str] = {}
    scaleDistribution: dict[Literal["type", "log"], str | int] = {}  # noqa: N815
    thresholdsStyle: dict[Literal["mode"], str] = {}  # noqa: N815


class Defaults(_Strict):
    unit: str
    custom: Custom = Custom()
    thresholds: Thresholds | None = None
    color: dict[Literal["mode"], str] = {}
    mappings: list[Mapping] = []


class Matcher(_Strict):
    id: Literal["byName", "byRegexp"]
    options: str


class Property(_Strict):
    id: str
    value: dict[str, Any]


class Override(_Strict):
    matcher: Matcher
    properties: list[Property]


class FieldConfig(_Strict):
    defaults: Defaults
    overrides: list[Override]


class BoardPanel(_Strict):
    id: int
    type: Literal["stat", "state-timeline", "timeseries", "heatmap"]
    title: str
    description: str
    datasource: DataSource
    gridPos: Place  # noqa: N815
    fieldConfig: FieldConfig  # noqa: N815
    options: dict[str, Any]
    targets: list[Target]


def test_a_panel_has_the_fields_that_grafana_s_schema_has_and_no_others():
    for panel in panels():
        shaped = msgspec.convert(panel, BoardPanel)
        steps = shaped.fieldConfig.defaults.thresholds
        assert steps is None or (steps.steps[0].value is None and len(steps.steps) > 1)
        assert len(shaped.targets) == len({target.refId for target in shaped.targets})
        assert shaped.description


def test_every_state_of_a_run_has_a_word_and_a_colour():
    (states,) = [panel for panel in panels() if panel["title"] == "State of each run"]
    words = states["fieldConfig"]["defaults"]["mappings"][0]["options"]
    numbered = re.findall(r'state="(\w+)"\}\) \* (\d+)', states["targets"][0]["expr"])
    assert {number: word["text"] for number, word in words.items()} == {
        number: state for state, number in numbered
    }


# ------------------------------------------------------------------------------ a real Prometheus


@contextmanager
def serving(directory: Path) -> Iterator[str]:
    """Run a Prometheus with the configuration of a folder and give its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        "prometheus",
        f"--config.file={directory / 'prometheus.yml'}",
        f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (directory / "log").open("w") as output:
        server = subprocess.Popen(command, stdout=output, stderr=output, env=os.environ)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_ready(url, server)
        yield url
    finally:
        server.terminate()
        server.wait(timeout=30)


@pytest.fixture(scope="module")
def prometheus_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run a Prometheus with our configuration and yield its address."""
    directory = tmp_path_factory.mktemp("prometheus")
    write_files(
        directory, prometheus.prometheus_files(collector="127.0.0.1:9", alertmanager="127.0.0.1:9")
    )
    (directory / "vitals-read.token").write_text("token")
    with serving(directory) as url:
        yield url


def wait_until_ready(url: str, server: subprocess.Popen[bytes]) -> None:
    for _ in range(300):
        assert server.poll() is None, "prometheus ended"
        try:
            with urllib.request.urlopen(f"{url}/-/ready", timeout=5):
                return
        except OSError:
            time.sleep(0.1)
    pytest.fail("prometheus is not ready after 30 s")


def get(url: str) -> dict[str, Any]:
    try:
        with urllib.request.urlopen(url, timeout=30) as reply:
            return json.load(reply)
    except urllib.error.HTTPError as error:
        return json.load(error)


@pytest.mark.servers("prometheus")
class TestRealPrometheus:
    def test_a_query_that_is_not_valid_would_be_found(self, prometheus_url):
        reply = get(f"{prometheus_url}/api/v1/query?query=rate(train_loss)")
        assert "error" == reply["status"]

    def test_the_rules_are_loaded_and_healthy(self, prometheus_url):
        groups = get(f"{prometheus_url}/api/v1/rules")["data"]["groups"]
        loaded = {rule["name"] for group in groups for rule in group["rules"]}
        assert {rule.name for _, rules in prometheus.GROUPS for rule in rules} == loaded
        assert {""} == {rule.get("lastError", "") for group in groups for rule in group["rules"]}


# --------------------------------------------------------- a real collector behind the Prometheus


COLUMNS = {
    metric.column: 0.5 for metric in CATALOG if metric.stream == "steps" and metric.dtype == "f8"
}
MAY_BE_EMPTY = ("> 0", "== 1")
"""Of what there is only where something is wrong."""


def decided(seq: int, action: str, cause: str, **how: int) -> DecisionMade:
    made: dict[str, Any] = {
        "ledger_seq": seq, "action": action, "step": 40 + seq, "decided_at_step": 41 + seq,
        "attempt": 1, "reason": "because", "rule": "nonfinite", "cause": cause,
    }  # fmt: skip
    return DecisionMade(decision=Decision(**made, **how))


def samples_of_an_agent(runs: Sequence[str]) -> bytes:
    """Return what an agent would tell of its node, GPUs and ranks; counters grow with the time."""
    lines = []
    for metric in CATALOG:
        if metric.scope not in ("gpu", "node", "agent", "rank", "process"):
            continue
        value = time.time() if metric.kind == "counter" else 0.5
        for run in runs if "run" in metric.labels else ("",):
            values = {"node": "node-a", "gpu": "GPU-1", "rank": "0", "run": run, "part": "ship"}
            labels = ",".join(f'{label}="{values[label]}"' for label in metric.labels)
            lines.append(f"{metric.name}{{{labels}}} {value}")
    return ("\n".join(lines) + "\n").encode()


@contextmanager
def agent(runs: Sequence[str]) -> Iterator[int]:
    """Serve samples as an agent does; gives the port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(samples_of_an_agent(runs))

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@dataclass
class Live:
    """A Prometheus that scrapes a collector with two runs, one of them without a name."""

    url: str
    named: str
    nameless: str
    at: dict[str, float] = field(default_factory=dict)
    """Evaluation time of every query, as its parameter; empty: now."""

    def ask(self, query: str) -> list[dict[str, Any]]:
        """Return the series of an instant query."""
        parameters = urllib.parse.urlencode({"query": query} | self.at)
        reply = get(f"{self.url}/api/v1/query?{parameters}")
        assert "success" == reply["status"], (query, reply)
        result: list[dict[str, Any]] = reply["data"]["result"]
        return result

    def wait(self, query: str, least: float) -> float:
        """Return the sum of a query's values, as soon as it is so much."""
        total = -1.0
        for _ in range(300):
            total = sum(float(series["value"][1]) for series in self.ask(query))
            if total >= least and self.ask(query):
                return total
            time.sleep(0.2)
        pytest.fail(f"{query} is {total}")

    def hold(self) -> None:
        """Evaluate later queries at the last scrape, once one of both targets has succeeded.

        A scrape that takes longer than its second ends every series until the next one, so on a
        busy machine a query of now may find nothing.
        """
        for _ in range(300):
            scraped = {
                name: sorted(float(series["value"][1]) for series in self.ask(query))
                for name, query in (("up", "up"), ("time", "timestamp(up)"))
            }
            is_recent = len(scraped["time"]) == 2 and np.ptp(scraped["time"]) < 1.0
            if is_recent and [1.0, 1.0] == scraped["up"]:
                self.at["time"] = scraped["time"][-1]
                return
            time.sleep(0.2)
        pytest.fail(f"no second in which both were scraped: {scraped}")


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Start all of it, and let the first rollback of a run come behind its first scrape."""
    directory = tmp_path_factory.mktemp("live")
    settings = CollectorSettings(data=directory / "data", commit_seconds=0.0)
    started = time.time_ns() - 60 * 10**9  # not when the file was read: minutes ago, in a suite
    runs = [new_run_id(started + i) for i in range(2)]
    heads = [Writer(run=run, started=started, world_size=1) for run in runs]
    with Served(settings) as served, agent(runs) as port:
        for head, name in zip(heads, (NAME, ""), strict=True):
            begun = AttemptStarted(id=1, parent=None, fork_step=0, reason="start")
            ingest(served.store, head.events(RunStarted(info=RunInfo(name=name)), begun))
            ingest(served.store, head.steps(range(60), **COLUMNS))
        (directory / "token").write_text(served.tokens.read)
        (directory / "prometheus.yml").write_text(
            f"""global: {{scrape_interval: 1s}}
scrape_configs:
- job_name: vitals-collector
  authorization: {{credentials_file: {directory / "token"}}}
  static_configs: [{{targets: ["{served.plain.removeprefix("http://")}"]}}]
- job_name: vitals-agent
  honor_labels: true
  static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""
        )
        with serving(directory) as url:
            live = Live(url, *runs)
            live.wait('train_rollbacks_total{reason="nonfinite_loss"} == 0', 0.0)
            for counted in ("train_rollbacks_total", "agent_spool_bytes"):
                live.wait(f"min(count_over_time({counted}[1m]))", 2.0)  # a rate needs two samples
            first = decided(1, "skip_step", "nonfinite_loss")
            back = decided(
                2, "rollback", "nonfinite_loss", rollback_to_step=30, skip_batches=7, cost_steps=14
            )
            unforeseen = decided(3, "skip_step", "an alert of one's own")
            ingest(served.store, heads[0].events(first, back, unforeseen, step=44))
            live.wait('train_skipped_steps_total{reason="other"}', 1.0)
            running = stat_queries()["runs"]
            assert 2.0 == live.wait(sent(running), 2.0)
            live.hold()
            yield live


@pytest.mark.servers("prometheus")
class TestRealCollector:
    def test_every_query_of_the_dashboard_is_valid_and_has_an_answer(self, live: Live):
        for query in queries():
            answer = live.ask(query)
            assert answer or any(words in query for words in MAY_BE_EMPTY), query

    def test_runs_are_told_apart_by_name_and_one_without_by_its_id(self, live: Live):
        targets = [target for panel in panels() for target in panel["targets"]]
        asked = [each["expr"] for each in targets if "{{name}}" in each["legendFormat"]]
        assert len(asked) > 10
        for query in asked:
            if any(words in query for words in MAY_BE_EMPTY) or "alert_firing" in query:
                continue
            names = {series["metric"].get("name") for series in live.ask(sent(query))}
            assert {NAME, live.nameless} == names, query

    def test_a_first_rollback_and_a_cause_nobody_foresaw_are_counted(self, live: Live):
        by_legend = {
            legend: sum(float(series["value"][1]) for series in live.ask(sent(query)))
            for legend, query in stat_queries().items()
        }
        pages = by_legend.pop("pages")
        assert pages == int(pages)
        by_legend.pop("runs")  # by their silence; the fixture has counted them
        assert {
            "updates skipped": 2,
            "rollbacks": 1,
            "steps lost": 14,
            "batches dropped": 7,
        } == by_legend, "both skips lie among the steps from 30 to 43"

    def test_a_run_is_chosen_by_its_name(self, live: Live):
        (variable,) = [v for v in read_dashboard()["templating"]["list"] if v["name"] == "run"]
        query = variable["query"]["query"].removeprefix("query_result(").removesuffix(")")
        pattern = variable["regex"].strip("/").replace("?<", "?P<")
        choices = {}
        for series in live.ask(sent(query)):
            labels = ",".join(f'{key}="{value}"' for key, value in sorted(series["metric"].items()))
            found = re.search(pattern, f"{{{labels}}} 1 1")
            assert found is not None
            choices[found["text"]] = found["value"]
        assert {NAME: live.named, live.nameless: live.nameless} == choices
