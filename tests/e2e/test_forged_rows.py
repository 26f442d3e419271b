"""Another holder of the ingest token writes one row to a stream of a job, far ahead."""

import contextlib
import secrets
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator

import msgspec
import pytest

from tests.e2e.lab import PROGRAM, Lab, free_port, open_lab, until
from trainvitals.catalog import steps_schema
from trainvitals.errors import ForeignBatchError, WriterKeyError
from trainvitals.io.client import CollectorClient, read_tokens
from trainvitals.io.spool import read_batches
from trainvitals.views import AlertsQuestion, RunQuestion, RunsQuestion
from trainvitals.wire import BatchHeader, decode_batch, encode_batch

pytestmark = [pytest.mark.servers, pytest.mark.nightly]
STEPS = steps_schema()
_LASTING = PROGRAM.replace("range(30)", "range(100_000)").replace(
    "monitor.step()", "monitor.step(); __import__('time').sleep(0.02)"
)


def test_a_forged_row_with_the_ingest_token_is_refused_and_the_stream_continues(tmp_path):
    with _training(tmp_path) as (lab, port, run_id, agent), _patient(lab, port) as client:
        (key,) = (lab.runs / run_id / "agents").glob("*/writer.key")
        assert 0o600 == stat.S_IMODE(key.stat().st_mode)
        for stolen in ("", secrets.token_hex(32)):
            with pytest.raises(ForeignBatchError, match="another writer key") as refused:
                _forge(lab, port, run_id, writer_key=stolen)
            assert WriterKeyError.code == refused.value.code
        before = _times(client, run_id)
        _until_both_arrive(client, run_id, before)
        # A killed agent is replaced by another process, which has the same key.
        agent.send_signal(signal.SIGKILL)
        agent.wait()
        lab.agent(port)
        _until_both_arrive(client, run_id, _times(client, run_id))
        assert "StreamStopped" not in _firing(client)
        assert "critical" != client.ask(RunsQuestion())[0].health


def test_an_agent_that_lost_its_key_pages_at_once_and_sends_everything_else(tmp_path):
    with _training(tmp_path) as (lab, port, run_id, agent), _patient(lab, port) as client:
        (key,) = (lab.runs / run_id / "agents").glob("*/writer.key")
        agent.send_signal(signal.SIGKILL)
        agent.wait()
        kept = key.read_text()
        key.write_text(secrets.token_hex(32))
        second = lab.agent(port)
        until(lambda: "StreamStopped" in _firing(client), "it pages")
        assert "critical" == client.ask(RunsQuestion())[0].health
        before = _times(client, run_id)
        until(
            lambda: _times(client, run_id)["node"] > before["node"] + 5 * 10**9,
            "rows of the node arrive all the same",
            30.0,
        )
        done = lab.vitals("command", run_id, "halt", "--reason", "a wrong key", *_where(lab))
        assert 0 == done.returncode, done.stderr
        until(lambda: lab.processes[2].poll() == 1, "the halt arrives")
        assert "a wrong key" in lab.log("training").read_text()
        assert before["rank"] == _times(client, run_id)["rank"]
        second.send_signal(signal.SIGKILL)
        second.wait()
        key.write_text(kept)
        lab.agent(port)
        until(lambda: _times(client, run_id)["rank"] > before["rank"], "the kept rows arrive")


@contextlib.contextmanager
def _training(folder) -> Iterator[tuple[Lab, int, str, subprocess.Popen[bytes]]]:
    """Give a lab with a collector, an agent, and a training whose rows arrive."""
    with open_lab(folder) as lab:
        port = free_port()
        lab.collector(port)
        agent = lab.agent(port)
        settings = {"VITALS_AGENT": "off", "VITALS_TOKEN_FILE": str(lab.tokens)}
        lab.start("training", sys.executable, "-c", _LASTING, **settings)
        run_id = lab.run_id()
        with _patient(lab, port) as client:
            until(lambda: client.ask(RunsQuestion()), "the run is known")
            until(lambda: "rank" in _times(client, run_id), "rows of the rank arrive")
        yield lab, port, run_id, agent


def _until_both_arrive(client, run_id: str, before: dict[str, int]) -> None:
    until(
        lambda: all(now > before[kind] + 3 * 10**9 for kind, now in _times(client, run_id).items()),
        "rows of the rank and of the node arrive",
        60.0,
    )


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


def _forge(lab, port: int, run_id: str, *, writer_key: str) -> None:
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
        thief.ingest_all([encode_batch(header, STEPS.pack(ahead, row))], writer_key=writer_key)


def _steps_in(spool) -> list[BatchHeader]:
    headers = [decode_batch(raw).header for _, raw in read_batches(spool)]
    return [header for header in headers if header.stream == "steps"]


def _patient(lab, port: int) -> CollectorClient:
    tokens = read_tokens(lab.tokens)
    url = f"https://127.0.0.1:{port}"
    return CollectorClient(url, tokens.read, tls=tokens.tls, timeout=60.0)
