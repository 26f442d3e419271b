"""The wrapper of grafana-api, over HTTP, against a fake: no real Grafana was run."""

import sys
from collections.abc import Iterator

import pytest

from tests.deploy import fake_grafana
from tests.deploy.fake_grafana import TOKEN, FakeGrafana
from trainvitals.cli.main import main
from trainvitals.errors import (
    MissingDependencyError,
    TransportError,
    UnauthorizedError,
    UsageError,
)
from vitals_deploy.grafana import GrafanaClient
from vitals_deploy.templates import read_dashboard

pytest.importorskip("grafana_api", reason="not installed: grafana-api")


@pytest.fixture
def grafana() -> Iterator[FakeGrafana]:
    with fake_grafana.serve() as state:
        yield state


@pytest.fixture
def client(grafana: FakeGrafana) -> Iterator[GrafanaClient]:
    client = GrafanaClient(grafana.url, TOKEN)
    yield client
    client.close()


def test_a_dashboard_is_created_and_then_replaced(grafana, client):
    folder = client.ensure_folder()
    for title in ("one", "two"):
        url = client.push_dashboard({**read_dashboard(), "title": title}, folder_uid=folder)
        assert f"{grafana.url}/d/trainvitals/vitals" == url
        assert title == grafana.dashboards["trainvitals"]["dashboard"]["title"]


def test_a_folder_that_is_there_is_left_alone(grafana, client):
    client.ensure_folder()
    grafana.folders["trainvitals"]["title"] = "Renamed by a person"
    client.ensure_folder()
    assert "Renamed by a person" == grafana.folders["trainvitals"]["title"]


def test_a_data_source_is_created_and_then_pointed_elsewhere(grafana, client):
    for url in ("http://one:9090", "http://two:9090"):
        uid = client.ensure_datasource(url)
        assert url == grafana.datasources[uid]["url"]


def test_the_server_says_its_version(client):
    assert "11.2.0" == client.version()


@pytest.mark.parametrize("status", [200, 202, 204])
def test_an_empty_body_is_an_answer(grafana, client, status):
    grafana.broken = (status, b"")
    assert "" == client.version()


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (502, b"<html>a message from your proxy</html>"),
        (404, b"<html>another message</html>"),
        (200, b"<html>please log in</html>"),
    ],
)
def test_a_page_that_is_not_grafanas_is_said_to_be_one(grafana, client, status, body):
    grafana.broken = (status, body)
    with pytest.raises(TransportError, match="a page that is not Grafana's"):
        client.ensure_folder()


def test_a_failing_server_is_an_error_with_its_message(grafana, client):
    grafana.broken = (500, b'{"message": "database is locked"}')
    with pytest.raises(TransportError, match="database is locked"):
        client.ensure_folder()


@pytest.mark.parametrize("status", [401, 403])
def test_a_token_that_may_not_is_an_error_that_names_the_role(grafana, client, status):
    grafana.broken = (status, b'{"message": "permission denied"}')
    with pytest.raises(UnauthorizedError, match="Admin or Editor"):
        client.ensure_folder()


def test_a_server_that_is_not_there_is_an_error_with_a_way_out():
    client = GrafanaClient("http://127.0.0.1:9", TOKEN, timeout_seconds=2)
    with pytest.raises(TransportError, match="is Grafana running"):
        client.version()
    client.close()


@pytest.mark.parametrize("url", ["", "localhost:3000", "ftp://grafana", "http://"])
def test_what_is_no_address_is_refused_before_anything_is_sent(url):
    with pytest.raises(UsageError, match="is not the address of a Grafana"):
        GrafanaClient(url, TOKEN)


def test_a_grafana_below_a_path_is_reached_there(grafana):
    client = GrafanaClient(f"{grafana.url}/monitoring/", TOKEN)
    with pytest.raises(TransportError):
        client.version()
    client.close()
    assert [("GET", "/monitoring/api/health")] == grafana.requests


def test_without_the_library_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "grafana_api.grafana_api", None)
    with pytest.raises(MissingDependencyError, match=r"trainvitals\[grafana\]"):
        GrafanaClient("http://127.0.0.1:9", TOKEN)


def test_the_command_pushes_and_prints_where_the_dashboard_is(grafana, tmp_path, capsys):
    token = tmp_path / "grafana.token"
    token.write_text(f"{TOKEN}\n")
    arguments = ["deploy", "grafana", "--url", grafana.url, "--token-file", str(token)]
    with pytest.raises(SystemExit) as exit_:
        main([*arguments, "--prometheus-url", "http://127.0.0.1:9090"])
    assert 0 == exit_.value.code
    assert f"{grafana.url}/d/trainvitals/vitals\n" == capsys.readouterr().out
    assert {"trainvitals-prometheus"} == set(grafana.datasources)


def test_a_push_without_a_token_file_is_wrong_usage(grafana, capsys):
    assert 2 == main(["deploy", "grafana", "--url", grafana.url])
    assert "--token-file" in capsys.readouterr().err
    assert [] == grafana.requests
