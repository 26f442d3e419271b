"""OpenTelemetry metrics in: they become scalars of their run, and what cannot be taken is told."""

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest

from tests.collector.lookback import troubled_run
from tests.collector.rows import OTHER_RUN, RUN
from tests.plugins.bridges.otlp_requests import encoded, gauge, point, request
from tests.support.served import Served
from tests.support.tokens import token as make_token
from trainvitals.errors import FormatError
from trainvitals.views import CurveQuestion, RunQuestion
from vitals_collector.live import run_status
from vitals_collector.queries.open import Reader
from vitals_plugins.bridges import otlp
from vitals_plugins.bridges.otlp import MAX_NAMES, PROTOBUF, decode_otlp_request

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "otlp.md"


@pytest.fixture
def collector(served: Served) -> Served:
    """A collector with a run."""
    troubled_run(served.store)
    return served


def send(collector: Served, body: object, *, token: str = "", kind: str = "application/json"):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {
        "Authorization": f"Bearer {token or collector.tokens.ingest}",
        "Content-Type": kind,
    }
    return collector.request("POST", "/v1/metrics", content=content, headers=headers)


def curve(reader: Reader, metric: str) -> list[tuple[int, float]]:
    reply = reader.ask(CurveQuestion(run_id=RUN, metric=metric, branch="all"))
    steps = struct.unpack(f"<{len(reply.step) // 8}q", reply.step)
    return list(zip(steps, struct.unpack(f"<{len(steps)}d", reply.value), strict=True))


def test_a_gauge_is_a_scalar_of_its_run_at_its_step(collector: Served):
    body = request(gauge("queue.depth", point(3, step=10), point(0.1, step=11)))
    answer = send(collector, body)
    assert (200, {}) == (answer.status_code, answer.json())
    with collector.client() as reader:
        assert [(10, 3.0), (11, 0.1)] == curve(reader, "scalars.queue.depth")
        assert "scalars.queue.depth" in reader.ask(RunQuestion(run_id=RUN)).metrics


def test_without_a_step_it_is_of_the_newest_that_the_run_has(collector: Served):
    assert 200 == send(collector, request(gauge("depth", point(1.5)))).status_code
    with collector.client() as reader:
        newest = reader.ask(RunQuestion(run_id=RUN)).attempts[-1].last_step
        assert [(newest, 1.5)] == curve(reader, "scalars.depth")


def test_labels_are_part_of_the_name_and_a_sum_is_taken_too(collector: Served):
    metric = {"name": "reads", "sum": {"dataPoints": [point(7, step=1, disk="a", kind="ssd")]}}
    assert 200 == send(collector, request(metric)).status_code
    with collector.client() as reader:
        assert [(1, 7.0)] == curve(reader, "scalars.reads{disk=a,kind=ssd}")


def test_later_requests_go_on_with_the_same_series(collector: Served):
    for step in range(3):
        assert 200 == send(collector, request(gauge("depth", point(step, step=step)))).status_code
    with collector.client() as reader:
        assert [(0, 0.0), (1, 1.0), (2, 2.0)] == curve(reader, "scalars.depth")


def test_what_has_no_single_number_and_what_has_no_run_is_counted(collector: Served):
    histogram = {"name": "seconds", "histogram": {"dataPoints": [{}]}}
    body = request(histogram, gauge("depth", point(2.0, step=1), {"timeUnixNano": "1"}))
    body["resourceMetrics"] += request(gauge("x", point(1)), run="mine")["resourceMetrics"]
    answer = send(collector, body)
    assert 200 == answer.status_code
    told = answer.json()["partialSuccess"]
    assert "3" == told["rejectedDataPoints"]
    assert "seconds is neither a gauge nor a sum" in told["errorMessage"]
    with collector.client() as reader:
        assert [(1, 2.0)] == curve(reader, "scalars.depth")


def test_protobuf_holds_the_same_numbers_bit_by_bit(collector: Served):
    values = [0.1 + 0.2, math.inf, math.nan, -3, 5e-324]
    points = [point(value, step=step) for step, value in enumerate(values)]
    answer = send(collector, encoded(request(gauge("depth", *points))), kind=PROTOBUF)
    assert (200, b"", PROTOBUF) == (
        answer.status_code,
        answer.content,
        answer.headers["content-type"],
    )
    with collector.client() as reader:
        read = [value for _, value in curve(reader, "scalars.depth")]
    assert [repr(float(value)) for value in values] == [repr(value) for value in read]


def test_the_program_of_the_guide_is_taken_as_opentelemetry_sends_it(collector: Served):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the OTLP exporter")
    shown = GUIDE.read_text().partition("<!-- test: sent -->")[2]
    program = shown.partition("```python\n")[2].partition("```")[0]
    for word, real in {
        "https://collector.example.org:8765": collector.plain,
        "TOKEN": collector.tokens.ingest,
        '    certificate_file="collector.pem",\n': "",
        "01JD...": RUN,
    }.items():
        assert word in program
        program = program.replace(word, real)
    names: dict[str, Any] = {}
    exec(program, names)
    assert names["provider"].force_flush()
    names["provider"].shutdown()
    with collector.client() as reader:
        assert (300, 12.0) in curve(reader, "scalars.queue.depth")


@pytest.mark.parametrize(
    ("body", "kind", "said"),
    [
        (b"\xff\xff", PROTOBUF, "byte"),
        (b"{", "application/json", "not an OTLP metrics request"),
    ],
)
def test_what_is_no_request_is_refused(collector: Served, body: bytes, kind: str, said: str):
    answer = send(collector, body, kind=kind)
    assert 400 == answer.status_code
    assert said in answer.json()["text"]


def test_a_run_that_is_not_there_is_refused_and_not_begun(collector: Served):
    answer = send(collector, request(gauge("depth", point(1)), run=OTHER_RUN))
    assert answer.status_code in (400, 404)
    with collector.client() as reader:
        assert [RUN] == [summary.run_id for summary in reader.ask(_all())]


def _all():
    from trainvitals.views import RunsQuestion

    return RunsQuestion()


@pytest.mark.parametrize("scope", ["read", "control"])
def test_a_token_of_another_scope_may_not(collector: Served, scope: str):
    token = getattr(collector.tokens, scope)
    assert 403 == send(collector, request(gauge("depth", point(1))), token=token).status_code


def test_a_token_of_another_run_or_owner_writes_nothing_to_it(collector: Served):
    """The run was begun with the token file's own."""
    for secret in (make_token(collector, "eve", run_id=OTHER_RUN), make_token(collector, "eve")):
        answer = send(collector, request(gauge("depth", point(1))), token=secret)
        assert answer.status_code in (400, 403), answer.text
    of_the_run = make_token(collector, "ada", run_id=RUN)
    assert 200 == send(collector, request(gauge("x", point(1))), token=of_the_run).status_code
    with collector.client() as reader:
        metrics = reader.ask(RunQuestion(run_id=RUN)).metrics
    assert {"scalars.x"} == {name for name in metrics if name in ("scalars.x", "scalars.depth")}


def test_a_body_is_bounded_and_compression_refused(collector: Served):
    assert 413 == send(collector, b" " * 70_000).status_code
    headers = {
        "Authorization": f"Bearer {collector.tokens.ingest}",
        "Content-Type": "application/json",
        "Content-Encoding": "gzip",
    }
    answer = collector.request("POST", "/v1/metrics", content=b"x", headers=headers)
    assert 400 == answer.status_code
    assert "OTEL_EXPORTER_OTLP_COMPRESSION=none" in answer.json()["hint"]


def test_a_label_with_a_value_of_its_own_each_time_ends_at_a_bound(collector: Served):
    num_told = 0
    for part in range(4):
        points = [point(1, step=1, id=f"{part}-{n}") for n in range(150)]
        answer = send(collector, request(gauge("d", *points)))
        assert 200 == answer.status_code
        num_told += int(answer.json().get("partialSuccess", {}).get("rejectedDataPoints", "0"))
    assert 600 - MAX_NAMES == num_told


def test_services_of_a_run_end_at_a_bound(collector: Served, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(otlp, "MAX_SERVICES", 2)
    told = [
        send(collector, request(gauge("d", point(1, step=1)), service=f"s{n}")).json()
        for n in (0, 1, 2, 0)
    ]
    refused = [answer.get("partialSuccess", {}).get("rejectedDataPoints", "0") for answer in told]
    assert ["0", "0", "1", "0"] == [str(num) for num in refused]


def test_a_service_that_goes_on_sending_keeps_no_run_alive():
    """What sends metrics beside a job does not die with it."""
    second = 1_000_000_000
    when = run_status.Liveness(now_unix_ns=1_000 * second, lost_after_seconds=60.0)
    rank = run_status.SourceState("rank:0", 0, second, second, 1, "", 1, "a")
    guest = run_status.SourceState(
        "node:otlp.loader", 0, 999 * second, 999 * second, 1, "", 0, "otlp.loader"
    )
    agent = guest._replace(source="node:a", node="a")
    assert "lost" == run_status.run_state([rank, guest], when)
    assert "running" == run_status.run_state([rank, agent], when)


@pytest.mark.parametrize("time", [1, 2**63 - 1])
def test_a_service_does_not_change_when_the_run_was_heard_of(collector: Served, time: int):
    with collector.client() as reader:
        before = reader.ask(RunQuestion(run_id=RUN)).summary
        assert 200 == send(collector, request(gauge("d", point(1, time=time)))).status_code
        detail = reader.ask(RunQuestion(run_id=RUN))
    after = detail.summary
    assert (before.last_seen_unix_ns, before.last_step) == (
        after.last_seen_unix_ns,
        after.last_step,
    )
    (guest,) = [source for source in detail.sources if source.source == "node:otlp.loader"]
    assert guest.last_seen_unix_ns < 2**62  # no clock that is ahead says that it is of the future


def test_secrets_in_labels_are_taken_out():
    body = json.dumps(request(gauge("d", point(1, url="https://me:hunter2@host/")))).encode()
    (made,) = decode_otlp_request(body, is_json=True).points
    assert "hunter2" not in made.name


@pytest.mark.parametrize("cut", range(0, 120, 7))
def test_a_torn_request_is_a_format_error_or_fewer_points(cut: int):
    raw = encoded(request(gauge("depth", point(1.5, step=3))))
    try:
        taken = decode_otlp_request(raw[: len(raw) - 1 - cut % len(raw)], is_json=False)
    except FormatError:
        return
    assert len(taken.points) <= 1
