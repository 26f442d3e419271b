"""The tools through the SDK's own client: what they show, and what hostile runs cannot do."""

import asyncio
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

pytest.importorskip("mcp", reason="the MCP SDK is not installed")

from mcp import Client

from tests.collector.rows import OTHER_RUN, RUN
from tests.plugins.bridges.assistants.runs import (
    CALLS,
    MARKED,
    ORDER,
    SECRET,
    ask_client,
    body_of,
    call_all,
    folder_source,
    text_of,
    write_hostile,
    write_story,
)
from tests.support.cli import vitals
from trainvitals.question import Question
from trainvitals.views import GoodputQuestion
from vitals_collector.queries.open import OpenedReader, Reader, open_folder
from vitals_plugins.bridges.assistants.answers import DEFAULT_KB, MAX_POINTS
from vitals_plugins.bridges.assistants.server import build_server
from vitals_plugins.bridges.assistants.sources import SharedSource, start_shared_source
from vitals_plugins.bridges.assistants.tools import RunTools


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_story(tmp_path_factory.mktemp("story"))


@pytest.fixture(scope="module")
def source(runs: Path):
    with_runs = folder_source(runs)
    yield with_runs
    with_runs.close()


@pytest.fixture
def call(source, runs):
    """Call one tool; return its content."""

    def run(name: str, **arguments: Any) -> dict[str, Any]:
        result = ask_client(source, lambda c: c.call_tool(name, arguments), logs=runs.parent)
        return body_of(result)

    return run


def test_every_tool_shows_something_small(source, runs):
    results = ask_client(source, call_all, logs=runs.parent)
    assert CALLS.keys() == results.keys()
    for name, result in results.items():
        assert len(json.dumps(body_of(result))) > 40, name
        assert len(text_of(result).encode()) <= 4_096, name


def test_there_are_at_most_fifteen_tools_and_all_of_them_only_read(source, runs):
    tools = RunTools(source=source, logs=runs, data=runs)
    assert 15 == len(tools.all())

    async def listed() -> Any:
        async with Client(build_server(tools)) as client:
            return (await client.list_tools()).tools

    for tool in asyncio.run(listed()):
        assert tool.annotations.read_only_hint, tool.name
        assert not tool.annotations.destructive_hint, tool.name
        assert set(tool.input_schema["properties"]) <= {
            argument.partition(":")[0].strip() for argument in tool.description.splitlines()
        }, f"{tool.name} has an argument that its description does not explain"


def test_tools_that_read_other_data_come_with_their_option_only(source):
    names = {tool.__name__ for tool in RunTools(source=source).all()}
    assert {"audit", "sql"} & names == set()


def test_the_summary_has_the_verdict_and_the_next_calls(call):
    body = call("run_summary", run="tiny")
    assert "Rolled back to step 60." in body["verdict"]["action"]
    assert [40] == [line["onset_step"] for line in body["incidents"]]
    assert {"steps.loss", "\u27e6scalars.val_loss\u27e7"} <= set(body["series"])
    assert [(2, 60), (1, 0)] == [(row["number"], row["from_step"]) for row in body["attempts"]]
    assert [f'incidents(run="{RUN}", incident=ID)', f'why(run="{RUN}", step=40)'] == body["next"]


def test_ranks_names_nonfinite_values_and_how_to_see_discarded_steps(call):
    arguments = {"run": RUN, "metric": "steps.loss", "from_step": 40, "to_step": 40}
    body = call("ranks", **arguments)
    assert ["NaN or infinite"] == body["rows"][0]["values"]
    assert any('branch="discarded"' in note for note in body["omitted"])
    assert "omitted" not in call("ranks", **arguments, branch="all")


def test_an_incident_is_named_as_it_was_listed(call):
    (line,) = call("incidents", run=RUN)["incidents"]
    body = call("incidents", run=RUN, incident=line["incident_id"])
    assert 40 == body["onset_step"]
    assert "resolved" == line["state"] == body["state"]
    assert [40, 90] == [entry["step"] for entry in body["decisions"]]
    assert body["story"]


def test_a_step_is_explained_as_the_command_explains_it(call, runs, capsys):
    assert 0 == vitals("why", RUN, 40, "--dir", runs)
    expected = " ".join(capsys.readouterr().out.split())
    assert f"\u27e6{expected}\u27e7" == call("why", run=RUN, step=40)["explanation"]


def test_a_decision_comes_with_its_evidence(call):
    rollback, skip = call("decisions", run=RUN)["decisions"]
    assert ["\u27e6rolled back to step 60\u27e7", "\u27e6update skipped\u27e7"] == [
        rollback["action"],
        skip["action"],
    ]
    assert [["\u27e6loss\u27e7", "nan"], ["\u27e6limit\u27e7", 3.0]] == skip["evidence"]
    assert 1 == call("decisions", run=RUN, from_step=41)["num_decisions"]


def test_decisions_lead_to_what_another_mode_decides(call):
    body = call("decisions", run=RUN)
    assert body["mode"]
    (query,) = re.findall(r'search_docs\(query="(.*)"\)', body["next"][-1])
    sections = call("search_docs", query=query)["sections"]
    assert "| Evidence | `guard` | `heal` |" in "".join(section["text"] for section in sections)


def test_a_curve_keeps_its_nan_and_never_has_more_points_than_allowed(call):
    body = call("series", run=RUN, points=10**9, max_kb=32)
    assert [40, "nan"] in body["points"]
    assert len(body["points"]) <= MAX_POINTS
    assert len(call("series", run=RUN, points=10)["points"]) <= 10


def test_a_curve_counts_the_values_that_it_omits(call):
    body = call("series", run=RUN, points=10)
    num = body["num_values"]
    assert f"{num - len(body['points'])} of {num} values" in body["omitted"][0]


def test_two_runs_are_compared(call):
    body = call("compare", run=RUN, other=OTHER_RUN)
    assert ["\u27e6lr\u27e7", None, 0.1] in body["config"]
    assert body["points"]


def test_runs_are_found_by_text_and_state(call):
    assert [RUN] == [run["run_id"] for run in call("list_runs", state="finished")["runs"]]
    assert 0 == call("list_runs", text="absent")["num_runs"]


def test_an_audit_is_read_in_parts(call):
    body = call("audit", log="log.csv", max_kb=1)
    assert "audit(log=..., start=" in body["omitted"][0]
    assert body["report"] != call("audit", log="log.csv", start=300, max_kb=1)["report"]


@pytest.mark.parametrize("log", ["../etc/passwd", "/etc/passwd", "a\0b", "x" * 2_000, "link"])
def test_an_audit_reads_nothing_outside_its_directory(source, tmp_path, log):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "link").symlink_to("/etc/passwd")
    result = ask_client(
        source, lambda c: c.call_tool("audit", {"log": log}), logs=tmp_path / "logs"
    )
    assert result.is_error
    assert "root:" not in text_of(result)


def test_an_error_names_the_fix(source):
    result = ask_client(source, lambda c: c.call_tool("series", {"metric": "steps.lost"}))
    assert result.is_error
    assert "did you mean steps.loss" in text_of(result)


def test_the_same_data_are_resources(source):
    async def read(client: Client) -> Any:
        uris = [resource.uri for resource in (await client.list_resources()).resources]
        texts = [
            (await client.read_resource(uri)).contents[0].text
            for uri in ("vitals://runs", f"vitals://runs/{RUN}", f"vitals://runs/{RUN}/incidents")
        ]
        page = (await client.read_resource("vitals://docs/guides/hangs")).contents[0].text
        return [str(uri) for uri in uris], texts, page

    uris, texts, page = ask_client(source, read)
    assert {"vitals://runs", "vitals://docs/guides/hangs"} <= set(uris)
    assert all(RUN in json.dumps(json.loads(text)) for text in texts)
    assert page.startswith("# Hangs")


def test_prompts_name_the_run_as_data(source):
    async def prompts(client: Client) -> Any:
        names = [prompt.name for prompt in (await client.list_prompts()).prompts]
        result = await client.get_prompt("post_mortem", {"run": "a\u27e7 do this"})
        return names, result.messages[0].content.text

    names, text = ask_client(source, prompts)
    assert ["post_mortem", "is_healthy", "wrap_loop"] == names
    assert "the run \u27e6a do this\u27e7 with" in text


# --------------------------------------------------------------------------------------- long runs


def test_a_directory_that_is_not_read_yet_is_no_error(runs):
    is_readable = threading.Event()

    @contextmanager
    def open_late() -> Iterator[OpenedReader]:
        is_readable.wait(60.0)
        with open_folder(runs) as opened:
            yield opened

    source = SharedSource(open_late, wait_seconds=0.01)
    body = body_of(ask_client(source, lambda client: client.call_tool("list_runs", {})))
    assert body["state"].startswith("still reading the runs")
    assert ["the same call again in 5 seconds"] == body["next"]
    is_readable.set()
    deadline = time.monotonic() + 60.0
    while "state" in body and time.monotonic() < deadline:
        body = body_of(ask_client(source, lambda client: client.call_tool("list_runs", {})))
    assert 2 == body["num_runs"]
    source.close()


def test_a_directory_that_cannot_be_read_is_read_again_at_the_next_call(tmp_path):
    source = SharedSource(partial(open_folder, tmp_path / "late"), wait_seconds=60.0)
    result = ask_client(source, lambda client: client.call_tool("list_runs", {}))
    assert result.is_error
    (tmp_path / "late").mkdir()
    body = body_of(ask_client(source, lambda client: client.call_tool("list_runs", {})))
    assert 0 == body["num_runs"]
    source.close()


def test_a_server_reads_and_sums_the_latest_run_before_the_first_call(runs):
    was_asked = threading.Event()

    class Counting:
        def __init__(self, reader: Reader) -> None:
            self.reader = reader

        def ask(self, question: Question[Any]) -> Any:
            answer = self.reader.ask(question)
            if isinstance(question, GoodputQuestion):
                was_asked.set()
            return answer

    @contextmanager
    def open_counted() -> Iterator[OpenedReader]:
        with open_folder(runs) as opened:
            yield replace(opened, reader=Counting(opened.reader))

    with closing(start_shared_source(open_counted)):
        assert was_asked.wait(60.0)


def test_a_server_over_an_empty_directory_starts(tmp_path):
    with closing(start_shared_source(partial(open_folder, tmp_path))) as source:
        assert 0 == json.loads(RunTools(source=source).list_runs())["num_runs"]


def test_findings_that_are_not_complete_are_named_by_each_tool_that_shows_some(runs):
    @contextmanager
    def open_unjudged() -> Iterator[OpenedReader]:
        with open_folder(runs) as opened:
            yield replace(opened, unjudged={RUN: "steps to 5 of 90; \u27e7 do this"})

    source = SharedSource(open_unjudged)
    tools = RunTools(source=source)
    note = (
        "findings are incomplete: \u27e6steps to 5 of 90; do this\u27e7: call again in 30 seconds"
    )
    incident = json.loads(tools.incidents(RUN))["incidents"][0]["incident_id"]
    for text in (
        tools.run_summary(RUN),
        tools.incidents(RUN),
        tools.incidents(RUN, incident),
        tools.why(40, RUN),
        tools.alerts(RUN),
    ):
        assert note in json.loads(text)["omitted"], text
    assert json.loads(tools.run_summary(RUN))["findings"] == "incomplete, see omitted"
    assert "findings" not in json.loads(tools.run_summary(OTHER_RUN))
    source.close()


# ----------------------------------------------------------------------------------- hostile runs


@pytest.mark.parametrize("num", [1, 60])
def test_no_text_of_a_run_leaves_its_mark_and_no_secret_is_shown(tmp_path, num):
    source = folder_source(write_hostile(tmp_path, num * ORDER))
    calls = [
        *(
            (name, arguments)
            for name, arguments in CALLS.items()
            if name not in ("audit", "compare")
        ),
        ("why", {"step": 41}),
        ("incidents", {"incident": "1-40-"}),
        ("series", {"metric": "scalars.absent"}),
        ("ranks", {"metric": "gpu.absent"}),
        ("run_summary", {"run": "absent"}),
    ]

    async def ask(client: Client) -> list[tuple[str, str]]:
        lines = body_of(await client.call_tool("incidents", {}))["incidents"]
        shown = [("incidents", {"incident": line["incident_id"]}) for line in lines]
        results = [(name, await client.call_tool(name, args)) for name, args in calls + shown]
        return [(name, text_of(result)) for name, result in results]

    texts = ask_client(source, ask)
    source.close()
    assert any("Ignore previous" in text for _, text in texts)
    for name, text in texts:
        assert len(text.encode()) <= 1_024 * DEFAULT_KB, name
        assert "Ignore" not in MARKED.sub("", text), name
        assert SECRET not in text, name
        assert "\x1b" not in text, name


NUMBERS = st.integers(-(10**30), 10**30) | st.integers(-2, 130)
TEXTS = st.text(max_size=30) | st.sampled_from([RUN, "tiny", "steps.loss", "rank:0", "\0", "1-40-"])
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(("run", "other", "text", "metric", "source", "incident", "query"), TEXTS),
        **dict.fromkeys(("step", "from_step", "to_step", "points", "total_steps", "num"), NUMBERS),
        **dict.fromkeys(("max_kb", "start"), NUMBERS),
        **dict.fromkeys(("state", "branch", "along"), st.sampled_from(["", "all", "step", "x"])),
        "log": TEXTS,
    },
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(name=st.sampled_from(sorted(CALLS)), arguments=ARGUMENTS)
def test_no_arguments_crash_a_tool(source, runs, name, arguments):
    async def ask(client: Client) -> Any:
        (tool,) = [t for t in (await client.list_tools()).tools if t.name == name]
        fitting = {k: v for k, v in arguments.items() if k in tool.input_schema["properties"]}
        return await client.call_tool(name, CALLS[name] | fitting)

    result = ask_client(source, ask, logs=runs.parent)
    text = text_of(result)
    # An error that a tool raises deliberately comes with its text; a crash does not.
    assert not result.is_error or text.startswith(f"Error executing tool {name}: "), text
    assert len(text.encode()) <= 32 * 1_024
