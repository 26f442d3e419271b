"""Servers as an assistant reaches them: a process over stdio, and HTTP with tokens."""

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp", reason="the MCP SDK is not installed")

import httpx2
from mcp import Client, MCPError
from mcp.client.stdio import StdioServerParameters
from mcp.client.streamable_http import streamable_http_client

from tests.collector.rows import RUN, Writer
from tests.house.pages import ROOT, block
from tests.plugins.bridges.assistants.runs import (
    CALLS,
    body_of,
    call_all,
    call_when_read,
    folder_source,
    text_of,
    write_log,
    write_story,
)
from tests.support.served import Served
from tests.support.story import story
from tests.support.tokens import token
from trainvitals.errors import StorageError, UsageError, VitalsError
from trainvitals.io.client import CollectorAddress
from trainvitals.records import RunInfo, RunStarted
from vitals_collector.api.app import CollectorSettings
from vitals_plugins.bridges.assistants.http import TokenGate, build_app, parse_listen
from vitals_plugins.bridges.assistants.server import build_server
from vitals_plugins.bridges.assistants.sources import TokenSource
from vitals_plugins.bridges.assistants.tools import RunTools, run_sql

GUIDE = ROOT / "docs" / "guides" / "assistants.md"
URL = "http://127.0.0.1:8765/mcp"
COMMAND = [sys.executable, "-m", "trainvitals", "mcp"]

Conversation = Callable[[Client], Awaitable[Any]]


def over_http(tools: RunTools, secret: str, bearer: str, asks: Conversation) -> Any:
    """Run a conversation with the HTTP app in this process; return its result."""

    async def talk() -> Any:
        server = build_server(tools)
        app = build_app(server, secret)
        headers = {"Authorization": f"Bearer {bearer}"} if bearer else {}
        transport = httpx2.ASGITransport(app=app)
        async with (
            server.session_manager.run(),
            httpx2.AsyncClient(transport=transport, headers=headers) as http,
            Client(streamable_http_client(URL, http_client=http)) as client,
        ):
            return await asks(client)

    return asyncio.run(talk())


def test_a_process_as_the_guide_shows_it_answers_with_every_tool(tmp_path):
    runs = write_story(tmp_path)
    shown = json.loads(block(GUIDE, "test: server").body)["mcpServers"]["vitals"]
    assert ("vitals", ["mcp", "/data/vitals_runs"]) == (shown["command"], shown["args"])
    options = [str(runs), "--logs", str(tmp_path)]
    parameters = StdioServerParameters(command=COMMAND[0], args=[*COMMAND[1:], *options])

    async def talk() -> dict[str, Any]:
        async with Client(parameters) as client:
            return await call_all(client)

    results = asyncio.run(talk())
    assert CALLS.keys() == results.keys()
    for name, result in results.items():
        assert body_of(result), name


def test_every_tool_answers_over_http_with_the_token(tmp_path):
    source = folder_source(write_story(tmp_path))
    results = over_http(RunTools(source=source, logs=tmp_path), "secret", "secret", call_all)
    source.close()
    assert CALLS.keys() == results.keys()
    for name, result in results.items():
        assert body_of(result), name


@pytest.mark.parametrize(
    "header",
    [b"Bearer \xff", b"Bearer a b", b"Bearer", b"Basic secret", b"", b"Bearer " + b"a" * 600],
)
def test_a_malformed_token_reaches_no_tool(header):
    reached, sent = [], []

    async def app(*_: object) -> None:
        reached.append(True)

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("the body is not read")

    scope = {"type": "http", "headers": [(b"authorization", header)]}
    asyncio.run(TokenGate(app, "")(scope, receive, send))
    assert [] == reached
    assert 401 == sent[0]["status"]


@pytest.mark.parametrize("bearer", ["", "wrong", "secret2"])
def test_http_refuses_a_request_without_the_token(tmp_path, bearer):
    tools = RunTools(source=folder_source(tmp_path))
    with pytest.raises((httpx2.HTTPStatusError, MCPError, ExceptionGroup)):
        over_http(tools, "secret", bearer, lambda client: client.list_tools())


def test_http_refuses_a_page_of_another_host(tmp_path):
    async def post() -> int:
        server = build_server(RunTools(source=folder_source(tmp_path)))
        transport = httpx2.ASGITransport(app=build_app(server, "secret"))
        headers = {"Authorization": "Bearer secret", "Host": "evil.example:8765"}
        async with (
            server.session_manager.run(),
            httpx2.AsyncClient(transport=transport, headers=headers) as http,
        ):
            return (await http.post(URL, json={})).status_code

    assert 421 == asyncio.run(post())


class TestCollector:
    """Over a collector the token of each request counts, and none of this process."""

    @pytest.fixture
    def tools(self, served: Served) -> RunTools:
        with served.client("ingest") as client:
            info = RunInfo(name="tiny", project="speech")
            client.ingest(Writer().events(RunStarted(info=info)))
        address = CollectorAddress(url=served.url, tokens=served.tokens)
        return RunTools(source=TokenSource(address))

    def list_runs(self, tools: RunTools, bearer: str) -> Any:
        return over_http(tools, "", bearer, lambda client: client.call_tool("list_runs", {}))

    def test_a_token_with_the_scope_reads(self, served, tools):
        (run,) = body_of(self.list_runs(tools, token(served, "ann", "read")))["runs"]
        assert RUN == run["run_id"]

    def test_an_unknown_token_reads_nothing(self, tools):
        result = self.list_runs(tools, "wrong")
        assert result.is_error
        assert "[V" in text_of(result)
        assert RUN not in text_of(result)

    def test_a_token_without_the_scope_reads_nothing(self, served, tools):
        result = self.list_runs(tools, token(served, "bob", "ingest"))
        assert result.is_error
        assert RUN not in text_of(result)

    def test_a_log_is_audited_for_a_valid_token_only(self, served, tools, tmp_path):
        write_log(tmp_path)
        with_logs = RunTools(source=tools.source, logs=tmp_path)

        def audit(bearer: str) -> Any:
            arguments = {"log": "log.csv"}
            return over_http(with_logs, "", bearer, lambda c: c.call_tool("audit", arguments))

        assert body_of(audit(token(served, "ann", "read")))["report"]
        for bearer in ("wrong", token(served, "bob", "ingest")):
            assert audit(bearer).is_error

    def test_a_token_of_another_project_sees_no_run(self, served, tools):
        limited = token(served, "eve", "read", project="vision")
        assert 0 == body_of(self.list_runs(tools, limited))["num_runs"]


@pytest.mark.parametrize(
    ("listen", "expected"),
    [("8765", ("127.0.0.1", 8765)), ("localhost:0", ("localhost", 0)), ("[::1]:1", ("::1", 1))],
)
def test_a_port_of_this_machine_is_accepted(listen, expected):
    assert expected == parse_listen(listen)


@pytest.mark.parametrize("listen", ["0.0.0.0:8765", "example.org:80", "x", ":", "-1", "70000"])
def test_another_machine_s_address_is_refused(listen):
    with pytest.raises(UsageError, match="--http is"):
        parse_listen(listen)


def test_the_command_prints_url_and_token_and_serves_with_it(tmp_path):
    runs = write_story(tmp_path)
    process = subprocess.Popen(
        [*COMMAND, str(runs), "--http", "0"], stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        url = re.fullmatch(r"vitals mcp: (\S+)\n", process.stderr.readline())
        secret = re.fullmatch(r"token: (\S{20,})\n", process.stderr.readline())
        assert url is not None
        assert secret is not None

        async def talk() -> Any:
            headers = {"Authorization": f"Bearer {secret[1]}"}
            async with (
                httpx2.AsyncClient(headers=headers) as http,
                Client(streamable_http_client(url[1], http_client=http)) as client,
            ):
                return await call_when_read(client, "list_runs", {})

        assert 2 == body_of(asyncio.run(talk()))["num_runs"]
    finally:
        process.terminate()
        process.communicate()


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    data = tmp_path_factory.mktemp("sql") / "data"
    data.mkdir(mode=0o700)
    settings = CollectorSettings(data=data, commit_seconds=0.0)
    with Served(settings) as collector, collector.client("ingest") as client:
        for raws in story().values():
            client.ingest_all(raws)
    return data


def test_a_query_in_sql_returns_rows(data):
    assert [{"run_id": RUN, "name": "tiny"}] == run_sql(data, "SELECT run_id, name FROM runs", 5)


@pytest.mark.parametrize(
    "query",
    [
        "DROP TABLE runs",
        "SELECT * FROM read_text('/etc/passwd')",
        "SELECT 1; SELECT 2",
        "--data /tmp",
        "",
        "SELECT '" + "x" * 20_000 + "'",
    ],
)
def test_a_statement_that_reads_or_changes_something_else_is_refused(data, query):
    with pytest.raises(VitalsError) as caught:
        run_sql(data, query, 5)
    assert "root:" not in str(caught.value)


def test_the_rows_of_a_query_are_marked_as_data(data):
    tools = RunTools(source=folder_source(data), data=data)
    body = json.loads(tools.sql("SELECT name, CAST(0.5 AS DOUBLE) AS half FROM runs"))
    assert [["\u27e6tiny\u27e7", 0.5]] == body["rows"]


def test_sql_on_a_folder_without_a_store_is_an_error(tmp_path):
    with pytest.raises(StorageError, match="no lake of numbers"):
        run_sql(tmp_path, "SELECT 1", 5)
