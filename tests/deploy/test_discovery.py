"""A real Prometheus, set up by `vitals deploy`, finds an agent through the collector."""

import json
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import ClassVar
from urllib.parse import urlsplit

import pytest

from tests.agent.builders import RUN
from tests.agent.conftest import world  # noqa: F401 - a fixture
from tests.support.served import Served
from trainvitals.identity import safe_node_id
from trainvitals.io.client import CollectorTokens
from vitals_collector.api.app import CollectorSettings
from vitals_deploy import prometheus
from vitals_deploy.cli import write_files

DEADLINE_SECONDS = 60.0
HERE = safe_node_id(socket.gethostname())


def until_up(url: str) -> dict[str, str]:
    """Return the labels of the agents' target once it was scraped."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{url}/api/v1/targets", timeout=5) as answer:
                targets = json.load(answer)["data"]["activeTargets"]
        except OSError:
            targets = []
        up = [t["labels"] for t in targets if t["health"] == "up"]
        agents = [labels for labels in up if labels["job"] == "vitals-agent"]
        if agents:
            return agents[0]
        time.sleep(0.1)
    pytest.fail(f"no agent was scraped within {DEADLINE_SECONDS:g} s: {targets}")


@pytest.mark.servers("prometheus")
def test_prometheus_finds_and_scrapes_an_agent_that_ships_to_the_collector(
    tmp_path,
    world,  # noqa: F811 - the fixture that was imported
):
    world.clock.now_ns = time.time_ns()
    world.rank(node=HERE).step(0, 1)
    settings = CollectorSettings(data=tmp_path / "data", commit_seconds=0.0)
    with Served(settings, tls=True) as served:
        with served.client("ingest") as client:
            agent = world.agent(client=client, node=HERE, scrape_token=served.tokens.scrape)
            agent.cycle(0.0)
        labels = scraped(tmp_path, served)
    address = agent.info.url.removeprefix("http://")
    expected = {"instance": address, "job": "vitals-agent", "node": HERE, "run": RUN}
    assert expected == labels


def scraped(tmp_path, served: Served) -> dict[str, str]:
    """Return the labels of the agent that a Prometheus finds, which knows the collector by TLS."""
    collector = urlsplit(served.url).netloc
    tls = served.tokens.tls
    made = prometheus.prometheus_files(collector=collector, alertmanager="127.0.0.1:9", tls=tls)
    folder = tmp_path / "prometheus"
    write_files(folder, {n: t.replace("30s", "1s").replace("15s", "1s") for n, t in made.items()})
    (folder / prometheus.TOKEN_FILE).write_text(served.tokens.read)
    (folder / prometheus.AGENTS_TOKEN_FILE).write_text(served.tokens.scrape)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = (
        "prometheus",
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    )
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen(command, stdout=log, stderr=log) as run,
    ):
        try:
            return until_up(f"http://127.0.0.1:{port}")
        finally:
            run.terminate()


class Planted(BaseHTTPRequestHandler):
    """A target that speaks for others, beside what an agent says, and keeps what it is shown."""

    heard: ClassVar[set[str]] = set()

    def do_GET(self) -> None:
        self.heard.add(self.headers["Authorization"])
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write(
            b'collector_alert_firing{run="R",alert="RunLost",severity="page"} 0\n'
            b'up{job="vitals-collector"} 1\ntrain_run_state{run="R",state="finished"} 1\n'
            b'agent_cycle_age_seconds 5\ntrain_step{run="R"} 7\n'
        )

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.mark.servers("prometheus")
def test_a_planted_target_speaks_for_nobody_else_and_gets_no_token_to_read_with(tmp_path):
    with (
        HTTPServer(("127.0.0.1", 0), Planted) as planted,
        socket.create_server(("127.0.0.1", 0)) as free,
    ):
        threading.Thread(target=planted.serve_forever, daemon=True).start()
        port = free.getsockname()[1]
        targets = [{"targets": [f"127.0.0.1:{planted.server_port}"], "labels": {}}]
        made = prometheus.prometheus_files(collector="127.0.0.1:9", agents=targets)
        write_files(tmp_path, {n: t.replace("15s", "1s") for n, t in made.items()})
        tokens = CollectorTokens(read="r3ad")
        (tmp_path / prometheus.TOKEN_FILE).write_text(tokens.read)
        (tmp_path / prometheus.AGENTS_TOKEN_FILE).write_text(tokens.scrape)
        free.close()
        command = (
            "prometheus",
            f"--config.file={tmp_path / 'prometheus.yml'}",
            f"--storage.tsdb.path={tmp_path / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        )
        with (
            (tmp_path / "log").open("w") as log,
            subprocess.Popen(command, stdout=log, stderr=log) as run,
        ):
            try:
                until_up(f"http://127.0.0.1:{port}")
                names = stored_names(f"http://127.0.0.1:{port}")
            finally:
                run.terminate()
                planted.shutdown()
    told = {name for name in names if not name.startswith(("scrape_", "ALERTS"))}
    assert {"up", "agent_cycle_age_seconds", "train_step"} == told
    assert {f"Bearer {tokens.scrape}"} == Planted.heard


def stored_names(url: str) -> list[str]:
    """Return the names of all series, once those of the planted target are there."""
    query = urllib.parse.quote('{job=~".+"}')
    for _ in range(200):
        with urllib.request.urlopen(f"{url}/api/v1/series?match[]={query}", timeout=5) as answer:
            series = json.load(answer)["data"]
        if any(each["__name__"] == "train_step" for each in series):
            return sorted({each["__name__"] for each in series})
        time.sleep(0.1)
    pytest.fail("the target's series were not stored")
