"""Somebody who has the ingest token writes one row of another job's stream, far ahead."""

import sys
import time

import msgspec
import pytest

from tests.e2e.lab import PROGRAM, free_port, open_lab, until
from trainvitals.catalog import steps_schema
from trainvitals.io.client import CollectorClient, read_tokens
from trainvitals.io.spool import read_batches
from trainvitals.views import AlertsQuestion, RunQuestion, RunsQuestion
from trainvitals.wire import BatchHeader, decode_batch, encode_batch

pytestmark = [pytest.mark.servers, pytest.mark.nightly]
STEPS = steps_schema()


def test_a_forged_row_stops_one_stream_pages_at_once_and_keeps_nothing_else_back(tmp_path):
    with open_lab(tmp_path) as lab:
        port = free_port()
        lab.collector(port)
        lab.agent(port)
        lasting = PROGRAM.replace("range(30)", "range(100_000)").replace(
            "monitor.step()", "monitor.step(); __import__('time').sleep(0.02)"
        )
        settings = {"VITALS_AGENT": "off", "VITALS_TOKEN_FILE": str(lab.tokens)}
        training = lab.start("training", sys.executable, "-c", lasting, **settings)
        run_id = lab.run_id()
        with _patient(lab, port) as client:
            until(lambda: client.ask(RunsQuestion()), "the run is known")
            until(lambda: "rank" in _times(client, run_id), "rows of the rank arrive")
            _forge(lab, port, run_id)
            until(lambda: "StreamStopped" in _firing(client), "it pages")
            assert "critical" == client.ask(RunsQuestion())[0].health
            before = _times(client, run_id)
            until(
                lambda: _times(client, run_id)["node"] > before["node"] + 5 * 10**9,
                "rows of the node arrive all the same",
                30.0,
            )
            done = lab.vitals("command", run_id, "halt", "--reason", "a forged row", *_where(lab))
            assert 0 == done.returncode, done.stderr
            until(lambda: training.poll() == 1, "the halt arrives")
            assert "a forged row" in lab.log("training").read_text()


def _where(lab) -> tuple[object, ...]:
    return "--collector", lab.data, "--token-file", lab.tokens


def _firing(client) -> set[str]:
    return {alert.name for alert in client.ask(AlertsQuestion(state="firing"))}


def _times(client, run_id: str) -> dict[str, int]:
    """Return by kind of source when it was last seen."""
    newest: dict[str, int] = {}
    for one in client.ask(RunQuestion(run_id=run_id)).sources:
        kind = one.source.partition(":")[0]
        newest[kind] = max(newest.get(kind, 0), one.last_seen_unix_ns)
    return newest


def _forge(lab, port: int, run_id: str) -> None:
    (spool,) = (lab.runs / run_id / "agents").glob("*/spool")
    until(lambda: _steps_in(spool), "steps are in the spool")
    genuine = _steps_in(spool)[-1]
    ahead = genuine.last_seq + 1_000_000
    row = [ahead, 1, time.time_ns(), time.monotonic_ns(), *[None] * (len(STEPS.columns) - 4)]
    header = BatchHeader(
        identity=msgspec.structs.replace(genuine.identity, pid=1),
        stream_schema=STEPS,
        first_seq=ahead,
        num_rows=1,
    )
    tokens = read_tokens(lab.tokens)
    url = f"https://127.0.0.1:{port}"
    with CollectorClient(url, tokens.ingest, tls=tokens.tls, timeout=60.0) as thief:
        thief.ingest(encode_batch(header, STEPS.pack(ahead, row)))


def _steps_in(spool) -> list[BatchHeader]:
    headers = [decode_batch(raw).header for _, raw in read_batches(spool)]
    return [header for header in headers if header.stream == "steps"]


def _patient(lab, port: int) -> CollectorClient:
    tokens = read_tokens(lab.tokens)
    url = f"https://127.0.0.1:{port}"
    return CollectorClient(url, tokens.read, tls=tokens.tls, timeout=60.0)
