from pathlib import Path

import msgspec
import pytest
from prometheus_client.openmetrics import parser as openmetrics

from tests.collector.rows import OTHER_RUN, RUN, Writer
from tests.support.served import Served
from tests.support.small_disks import small_file_system
from trainvitals.errors import (
    FormatError,
    NewerVersionError,
    StorageError,
    TransportError,
    UnauthorizedError,
    UsageError,
)
from trainvitals.records import AttemptStarted, NamesDefined, RunInfo, RunStarted
from trainvitals.views import (
    CheckpointsQuestion,
    DecisionsQuestion,
    EventsQuestion,
    FindingsQuestion,
    ManySeriesQuestion,
    Problem,
    RunQuestion,
    RunsQuestion,
    SeriesQuestion,
    SeriesRequest,
    StepQuestion,
)
from vitals_collector.api.app import CollectorSettings, create_app


def problem_of(raw: bytes) -> Problem:
    return msgspec.json.decode(raw, type=Problem)


def test_a_batch_goes_in_over_http_and_every_question_is_answered(served: Served):
    writer = Writer()
    batches = [
        writer.events(RunStarted(info=RunInfo(name="tiny"))),
        writer.events(AttemptStarted(id=1, parent=None, fork_step=0, reason="start")),
        writer.steps(range(20), loss=1.0),
    ]
    with served.client("ingest") as client:
        assert [1, 1, 20] == [client.ingest(raw).num_new for raw in batches]
        assert [0, 0, 0] == [client.ingest(raw).num_new for raw in batches]
    with served.client() as client:
        assert ["tiny"] == [run.name for run in client.ask(RunsQuestion())]
        assert RUN == client.ask(RunQuestion(run_id=RUN)).summary.run_id
        loss = client.ask(SeriesQuestion(run_id=RUN, metric="steps.loss"))
        assert 20 == loss.num_total
        asked = [SeriesRequest(metric=f"steps.{name}") for name in ("loss", "mfu_ratio")]
        both = client.ask(ManySeriesQuestion(run_id=RUN, series=tuple(asked)))
        assert (loss, ()) == (both[0], both[1].step)
        assert 1.0 == client.ask(StepQuestion(run_id=RUN, step=7)).rows[0].values["loss"]
        assert (
            ()
            == client.ask(DecisionsQuestion(run_id=RUN))
            == client.ask(FindingsQuestion(run_id=RUN))
            == client.ask(CheckpointsQuestion(run_id=RUN))
        )
        assert ["RunStarted", "AttemptStarted"] == [
            one.kind for one in client.ask(EventsQuestion(run_id=RUN))
        ]


def test_a_run_that_sends_now_is_running_whatever_its_clock_says(served: Served):
    with served.client("ingest") as client:
        client.ingest(Writer().steps([0]))
    with served.client() as client:
        assert "running" == client.ask(RunsQuestion())[0].state


ASKED = [
    ("GET", "/v1/runs", "", 401),
    ("GET", "/v1/runs", "ingest", 403),
    ("POST", "/v1/ingest", "read", 403),
    ("POST", "/v1/ingest", "control", 403),
    ("GET", "/openapi.json", "", 401),
    ("GET", "/healthz", "", 200),
    ("GET", "/v1/runs", "read", 200),
    ("GET", "/v1/runs", "control", 200),
    ("GET", f"/v1/runs/{OTHER_RUN}", "read", 404),
    ("GET", "/v1/runs/../../etc/passwd", "read", 404),
    ("GET", f"/v1/runs/{RUN}/series", "read", 400),
    ("GET", f"/v1/runs/{RUN}/series?metric=steps.loss&points=1", "read", 400),
    ("GET", f"/v1/runs/{RUN}/series?metric=steps.loss&branch=none", "read", 400),
    ("GET", f"/v1/runs/{RUN}/steps/99999999999999999999", "read", 400),
    ("GET", "/v1/nothing", "read", 404),
    ("DELETE", "/v1/runs", "read", 405),
]


def test_who_may_ask_what(served: Served):
    for method, path, scope, status in ASKED:
        content = {"content": b"x"} if method == "POST" else {}
        headers = {"Content-Type": "application/octet-stream"} if method == "POST" else {}
        answer = served.request(method, path, scope, headers=headers, **content)
        assert status == answer.status_code, (method, path, scope, answer.text)
        if status >= 400:
            assert problem_of(answer.content).text


def test_who_scrapes_in_openmetrics_gets_it_and_all_others_get_text(served: Served):
    accept = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
    answer = served.request("GET", "/metrics", headers={"Accept": accept})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    names = {family.name for family in openmetrics.text_string_to_metric_families(answer.text)}
    assert {"collector_lost_rows", "collector_alert_firing"} <= names
    plain = served.request("GET", "/metrics")
    assert plain.headers["content-type"].startswith("text/plain")


def test_every_route_has_a_schema_of_what_it_answers(served: Served):
    document = served.request("GET", "/openapi.json").json()
    without = [
        f"{method} {path}"
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
        if path != "/metrics"  # text, in Prometheus' own format
        and not operation["responses"]["200"]["content"]["application/json"].get("schema")
    ]
    assert [] == without
    assert {
        "/v1/ingest",
        "/v1/metrics",
        "/v1/runs",
        "/v1/runs/{run_id}",
        "/v1/runs/{run_id}/series",
        "/v1/runs/{run_id}/curve",
        "/v1/runs/{run_id}/difference",
        "/v1/runs/{run_id}/cells",
        "/v1/runs/{run_id}/movers",
        "/v1/runs/{run_id}/stacks",
        "/v1/runs/{run_id}/verdict",
        "/v1/runs/{run_id}/goodput",
        "/v1/runs/{run_id}/forecast",
        "/v1/configs",
        "/v1/failing_nodes",
        "/v1/runs/{run_id}/incidents",
        "/v1/runs/{run_id}/annotations",
        "/v1/tables",
        "/v1/runs/{run_id}/steps/{step}",
        "/v1/runs/{run_id}/decisions",
        "/v1/runs/{run_id}/findings",
        "/v1/runs/{run_id}/checkpoints",
        "/v1/runs/{run_id}/events",
        "/v1/runs/{run_id}/commands",
        "/v1/runs/{run_id}/commands/{number}/delivered",
        "/v1/alerts",
        "/v1/alerts/{fingerprint}/ack",
        "/v1/silences",
        "/v1/silences/{silence_id}/end",
        "/v1/sd/agents",
        "/healthz",
        "/metrics",
    } == set(document["paths"])


@pytest.mark.parametrize("field", ["number", "issued_unix_ns", "expires_unix_ns"])
@pytest.mark.parametrize("number", [2**63, -(2**63) - 1])
def test_a_command_with_a_number_that_cannot_be_signed_is_refused(
    served: Served, field: str, number: int
):
    sent: dict[str, object] = {"run_id": RUN, "action": "halt", "reason": "", "issued_by": "me"}
    sent |= {"number": 1, "issued_unix_ns": 1, "expires_unix_ns": 1} | {field: number}
    answer = served.request("POST", f"/v1/runs/{RUN}/commands", "control", json=sent)
    assert answer.status_code == 400
    assert field in answer.text


def test_every_reference_in_the_document_leads_somewhere(served: Served):
    document = served.request("GET", "/openapi.json").json()
    known = set(document["components"]["schemas"])
    named: set[str] = set()

    def walk(node: object) -> None:
        if isinstance(node, dict):
            if isinstance(node.get("$ref"), str):
                named.add(node["$ref"].rpartition("/")[2])
            for child in node.values():
                walk(child)
        elif isinstance(node, list):
            for child in node:
                walk(child)

    walk(document)
    assert set() == named - known
    assert {"RunDetail", "SeriesReply", "StepView", "IngestReply", "Problem"} <= known


def test_bad_batches_are_refused_for_good_and_newer_ones_until_the_upgrade(served: Served):
    good = Writer().steps([0])
    with served.client("ingest") as client:
        with pytest.raises(FormatError, match="checksum") as caught:
            client.ingest(good[:-1] + b"\xff")
        assert "V230" == caught.value.code
        with pytest.raises(NewerVersionError):
            client.ingest(_of_the_future(good))
    assert {"V210": 1, "V230": 1} == served.store.counters.rejected


def _of_the_future(raw: bytes) -> bytes:
    from trainvitals.wire import decode_batch, encode_batch

    batch = decode_batch(raw)
    return encode_batch(msgspec.structs.replace(batch.header, version=2), batch.rows)


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (StorageError("no room left", code="V302"), 507, TransportError),
        (StorageError("locked", code="V303"), 503, TransportError),
        (UsageError("there is none", code="V101"), 404, UsageError),
        (UnauthorizedError("no scope"), 403, UnauthorizedError),
        (RuntimeError("a secret in a bug"), 500, TransportError),
    ],
)
def test_an_error_has_the_status_that_says_whether_to_try_again(
    served: Served,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    status: int,
    kind: type[Exception],
):
    def fail(*_args: object, **_how: object) -> None:
        raise error

    monkeypatch.setattr("vitals_collector.ingest.ingest.store_batches", fail)
    raw = Writer().steps([0])
    headers = {"Content-Type": "application/octet-stream"}
    answer = served.request("POST", "/v1/ingest", "ingest", content=raw, headers=headers)
    assert status == answer.status_code
    assert "a secret" not in answer.text
    assert (status in (503, 507)) == ("retry-after" in answer.headers)
    with served.client("ingest") as client, pytest.raises(kind):
        client.ingest(raw)


def test_a_full_disk_answers_507_and_nothing_is_acknowledged(tmp_path: Path):
    with small_file_system(tmp_path / "small", "1200k") as where:
        _fill(where / "data")


def _fill(data: Path) -> None:
    headers = {"Content-Type": "application/octet-stream"}
    writer, answers, acknowledged = Writer(), [], 0
    with Served(CollectorSettings(data=data)) as served:
        for i in range(200):
            raw = writer.steps(range(i * 50, i * 50 + 50), loss=1.0)
            answer = served.request("POST", "/v1/ingest", "ingest", content=raw, headers=headers)
            answers.append(answer.status_code)
            if answer.status_code != 200:
                break
            acknowledged += answer.json()[0]["num_new"]
        with served.client() as client:
            assert acknowledged == client.ask(RunQuestion(run_id=RUN)).sources[0].num_rows
    assert 507 == answers[-1]
    assert acknowledged > 0


def test_named_scalars_can_be_asked_for_by_name(served: Served):
    writer = Writer()
    with served.client("ingest") as client:
        client.ingest(writer.events(NamesDefined(stream="scalars", names={1: "eval/loss (α)"})))
        client.ingest(writer.scalars(1, {3: 0.5}))
    with served.client() as client:
        found = client.ask(SeriesQuestion(run_id=RUN, metric="scalars.eval/loss (α)"))
    assert ([3], [0.5]) == (list(found.step), list(found.value))


def test_a_wrong_folder_is_said_before_anything_starts(tmp_path: Path):
    settings = CollectorSettings(data=tmp_path / "data", folders=(tmp_path / "none",))
    with pytest.raises(UsageError, match="there is no folder"):
        create_app(settings)


def test_a_follower_that_is_told_to_stop_leaves_nothing_running(tmp_path: Path):
    (tmp_path / "runs").mkdir()
    settings = CollectorSettings(
        data=tmp_path / "data", folders=(tmp_path / "runs",), folder_interval_seconds=0.01
    )
    with Served(settings) as served:
        assert 200 == served.request("GET", "/healthz").status_code
