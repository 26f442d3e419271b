"""Servers beside ours: who sends what, what is missing is said, and records that are lost void."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from vitals_bench.cli import build_app
from vitals_bench.ingest import cost, servers
from vitals_bench.ingest.asked import Asked
from vitals_bench.ingest.servers import Peer, Request, grouped, version_in

pytestmark = pytest.mark.nightly

TINY = cost.Size(rounds=2, steps={1: 3, 10: 20, 100: 100}, mlflow_steps={1: 2, 10: 10, 100: 100})


def request(name):
    return Request(name, b"", {})


def test_each_agent_posts_its_own_ranks_requests_in_order():
    bodies = [[request(f"{step}-{rank}") for rank in range(4)] for step in range(2)]
    posts = grouped(bodies, 2)
    assert [["0-0", "0-1", "1-0", "1-1"], ["0-2", "0-3", "1-2", "1-3"]] == [
        [one.path for one in agent] for agent in posts
    ]


@pytest.mark.parametrize(
    ("text", "version"),
    [("2.42.0+ds", "2.42.0"), ("1.79.5+ds1-2+b5", "1.79.5"), ("3.17", "3.17"), ("none", "none")],
)
def test_a_version_is_what_looks_like_one(text, version):
    assert version == version_in(text)


def test_a_server_that_lacks_records_makes_its_figure_void():
    class Lacking:
        label = "them 1.0"

        def num_records(self, config):
            return 9.0

    cost.expect_all(Lacking(), "rank-1", 9)
    with pytest.raises(RuntimeError, match=r"them 1.0 has 9 of 10 records of rank-1"):
        cost.expect_all(Lacking(), "rank-1", 10)


def test_what_is_not_installed_is_skipped_with_its_reason(monkeypatch):
    monkeypatch.setattr(servers, "program", lambda name: "")
    assert [
        "VictoriaMetrics: victoria-metrics is not on PATH",
        "Prometheus: prometheus is not on PATH",
        "",
    ] == [peer.missing for peer in servers.peers("/opt/mlflow")]
    monkeypatch.setattr(servers, "program", lambda name: f"/bin/{name}")
    monkeypatch.setattr(servers, "_has", lambda package: package != "cramjam")
    found = servers.peers("")
    assert ["VictoriaMetrics: cramjam not installed", "Prometheus: cramjam not installed", ""] == [
        peer.missing for peer in found
    ]
    assert "/bin/mlflow" == found[2].binary


@pytest.mark.slow
def test_our_collector_takes_the_records_and_a_missing_peer_is_a_row(monkeypatch):
    absent = Peer("Prometheus", "", servers.prometheus, "Prometheus: prometheus is not on PATH")
    monkeypatch.setattr(servers, "peers", lambda mlflow: [absent])
    case = cost.Case(1, per_node=True)
    skipped, ours = cost.measure_cases([case], TINY, asked=Asked(), num_ranks=8)
    assert "skipped: Prometheus: prometheus is not on PATH" == skipped.note
    assert None is skipped.ours
    assert 0.0 < ours.ours


@pytest.mark.slow
@pytest.mark.servers
def test_the_servers_that_are_here_take_the_same_records():
    found = [peer for peer in servers.peers("") if not peer.missing and peer.name != "MLflow"]
    if not found:
        pytest.skip("no victoria-metrics and no prometheus here")
    cases = [cost.Case(10, per_node=True)]
    rows = list(cost.measure_cases(cases, TINY, asked=Asked(), num_ranks=8))
    measured = {row.peer.split()[0]: row for row in rows if row.peer}
    assert {peer.name for peer in found} <= measured.keys()
    assert all(row.ours > 0 and row.theirs > 0 for row in measured.values())
    goals = {name: cost.GOALS[name] for name in measured}
    assert goals == {name: row.goal.limit for name, row in measured.items()}


def test_the_command_hands_its_options_to_every_part(monkeypatch):
    asked = []
    parts = {"one": lambda quick, **how: asked.append((quick, how)) or []}
    monkeypatch.setattr("vitals_bench.ingest.PARTS", parts)
    arguments = ["--quick", "--format", "json", "--mlflow", "/opt/mlflow", "--minutes", "30"]
    done = CliRunner().invoke(build_app(), ["ingest", *arguments])
    assert 0 == done.exit_code, done.output
    assert [] == json.loads(done.stdout)
    assert [(True, {"asked": Asked(mlflow="/opt/mlflow", minutes=30.0)})] == asked


def test_what_ingest_and_query_need_is_not_asked_of_the_other_benches():
    code = "import sys, vitals_bench.ingest, vitals_bench.query; " + (
        "print({'psutil', 'sqlalchemy', 'fastapi', 'httpx'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert "set()\n" == done.stdout, done.stderr
