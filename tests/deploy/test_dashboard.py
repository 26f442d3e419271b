import json
import os
import re
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from trainvitals.catalog import CATALOG
from vitals_deploy import prometheus
from vitals_deploy.cli import write_files
from vitals_deploy.dashboard import NOT_DRAWN, TOGETHER, dashboard, files

VARIABLES = {
    "$__rate_interval": "1m",
    "$__interval": "15s",
    "$run": ".*",
    "$node": ".*",
}


def panels() -> list[dict[str, Any]]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def queries() -> list[str]:
    """Return every query of the dashboard as Grafana would send it."""
    found = [target["expr"] for panel in panels() for target in panel["targets"]]
    found += [annotation["expr"] for annotation in dashboard()["annotations"]["list"]]
    for name, value in VARIABLES.items():
        found = [query.replace(name, value) for query in found]
    return found


def metrics_in(text: str) -> set[str]:
    return set(re.findall(r"\b(?:train|gpu|node|agent|collector)_\w+", text))


def test_every_metric_of_the_catalog_is_drawn_once_or_named_as_not_drawn():
    drawn = [name for panel in panels() for t in panel["targets"] for name in metrics_in(t["expr"])]
    assert len(drawn) == len(set(drawn))
    assert {metric.name for metric in CATALOG} - NOT_DRAWN == set(drawn)


def test_no_query_names_a_metric_that_there_is_not():
    known = {metric.name for metric in CATALOG}
    assert set() == metrics_in(" ".join(queries())) - known
    assert set() == (NOT_DRAWN | {name for names in TOGETHER.values() for name in names}) - known


def test_metrics_on_one_panel_have_one_unit():
    units = {metric.name: metric.unit for metric in CATALOG}
    for panel in panels():
        found = {units[n] for target in panel["targets"] for n in metrics_in(target["expr"])}
        assert 1 == len(found), panel["title"]


def test_panels_have_ids_titles_and_places_of_their_own():
    everything = dashboard()["panels"]
    assert len(everything) == len({panel["id"] for panel in everything})
    assert [] == [title for title, n in Counter(p["title"] for p in panels()).items() if n > 1]
    taken: set[tuple[int, int]] = set()
    for panel in everything:
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
    defined = {variable["name"] for variable in dashboard()["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(dashboard()))) - {"__all"}
    assert {"__rate_interval"} == used - defined


def test_the_file_is_the_dashboard():
    assert dashboard() == json.loads(files()["vitals.json"])


@pytest.fixture(scope="module")
def prometheus_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run a Prometheus with our configuration and yield its address."""
    directory = tmp_path_factory.mktemp("prometheus")
    write_files(directory, prometheus.files(collector="127.0.0.1:9", alertmanager="127.0.0.1:9"))
    (directory / "vitals-read.token").write_text("token")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        "prometheus",
        f"--config.file={directory / 'prometheus.yml'}",
        f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    log = directory / "log"
    with log.open("w") as output:
        server = subprocess.Popen(command, stdout=output, stderr=output, env=os.environ)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_ready(url, server)
        yield url
    finally:
        server.terminate()
        server.wait(timeout=30)


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
    @pytest.mark.parametrize("query", queries())
    def test_a_query_of_the_dashboard_is_valid(self, prometheus_url, query):
        reply = get(f"{prometheus_url}/api/v1/query?{urllib.parse.urlencode({'query': query})}")
        assert "success" == reply["status"], reply

    def test_a_query_that_is_not_valid_would_be_found(self, prometheus_url):
        reply = get(f"{prometheus_url}/api/v1/query?query=rate(train_loss)")
        assert "error" == reply["status"]

    def test_the_rules_are_loaded_and_healthy(self, prometheus_url):
        groups = get(f"{prometheus_url}/api/v1/rules")["data"]["groups"]
        loaded = {rule["name"] for group in groups for rule in group["rules"]}
        assert {rule.name for _, rules in prometheus.GROUPS for rule in rules} == loaded
        assert {""} == {rule.get("lastError", "") for group in groups for rule in group["rules"]}
