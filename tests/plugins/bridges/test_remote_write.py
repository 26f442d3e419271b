"""Run metrics pushed to a Prometheus-compatible store: when, again, and what comes there."""

import asyncio
import json
import math
import socket
import struct
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import cramjam
import httpx
import pytest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tests.collector.rows import RUN, Writer
from tests.support.receivers import receiver
from tests.support.served import Served
from trainvitals.errors import ConfigError, MissingDependencyError
from trainvitals.records import RunInfo, RunStarted
from vitals_collector.alerts.receivers import NotifierSettings
from vitals_collector.api.app import CollectorSettings
from vitals_collector.storage.store import IngestCounters
from vitals_plugins.bridges import remote_write
from vitals_plugins.bridges.protobuf import read_fields
from vitals_plugins.bridges.remote_write import MAX_WAITING, RemoteWriter, remote_writer

URL = "http://store.example.org/api/v1/write"


class Clock:
    """Stands still until it is told to go on."""

    def __init__(self) -> None:
        self.seconds = 1_000.0

    def time_ns(self) -> int:
        return int(self.seconds * 1e9)

    def monotonic_ns(self) -> int:
        return int(self.seconds * 1e9)


class Runs(Collector):
    """What ``/metrics`` would say."""

    def __init__(self) -> None:
        self.loss: dict[str, float] = {"a": 2.5}

    def collect(self) -> Iterator[Metric]:
        loss = GaugeMetricFamily("train_loss", "Loss.", labels=["run"])
        for run, value in self.loss.items():
            loss.add_metric([run], value)
        yield loss
        skips = CounterMetricFamily("train_skipped_steps", "Skips.", labels=["run", "reason"])
        skips.add_metric(["a", ""], 3.0)
        yield skips
        yield GaugeMetricFamily("collector_runs_over_cap", "Of no run.", value=1.0)


class Far:
    """The store at the other side: keeps what it takes, answers what it is told to."""

    def __init__(self) -> None:
        self.status = 204
        self.text: bytes | AsyncIterator[bytes] = b"said so"
        self.taken: list[dict[tuple[str, ...], tuple[float, int]]] = []
        self.num_asked = 0

    def answer(self, request: httpx.Request) -> httpx.Response:
        self.num_asked += 1
        if self.status == 0:
            raise httpx.ConnectError("nobody is there")
        if self.status == 204:
            assert "snappy" == request.headers["Content-Encoding"]
            self.taken.append(decoded(request.content))
        return httpx.Response(self.status, content=self.text)


def decoded(content: bytes) -> dict[tuple[str, ...], tuple[float, int]]:
    """Return value and milliseconds by the series' labels, in the order they lie."""
    raw = memoryview(bytes(cramjam.snappy.decompress_raw(content)))
    series = {}
    for _, message in read_fields(raw):
        parts = list(read_fields(message))
        labels = [dict(read_fields(part)) for number, part in parts if number == 1]
        names = tuple(f"{bytes(each[1]).decode()}={bytes(each[2]).decode()}" for each in labels)
        (sample,) = [dict(read_fields(part)) for number, part in parts if number == 2]
        (value,) = struct.unpack("<d", sample[1].to_bytes(8, "little"))
        series[names] = (value, sample[2])
    return series


class Pushing:
    """A writer over runs and a store at the other side, with a clock."""

    def __init__(self) -> None:
        self.far, self.runs, self.clock = Far(), Runs(), Clock()
        self.counters = IngestCounters()
        self.leads = True
        self.writer = RemoteWriter(
            URL,
            self.runs,
            self.counters,
            clock=self.clock,
            leads=lambda: self.leads,
            transport=httpx.MockTransport(self.far.answer),
        )

    def after(self, seconds: float) -> None:
        self.clock.seconds += seconds
        self.writer.push_if_due()

    def counted(self) -> dict[str, int]:
        return {name: num for name, num in self.counters.remote_writes.items() if num}


@pytest.fixture
def pushing() -> Iterator[Pushing]:
    made = Pushing()
    yield made
    made.writer.close()


LOSS = ("__name__=train_loss", "job=vitals-collector", "run=a")


def test_each_push_has_the_series_of_runs_with_sorted_labels_and_the_time(pushing):
    pushing.after(0)
    skips = ("__name__=train_skipped_steps_total", "job=vitals-collector", "run=a")
    assert [{LOSS: (2.5, 1_000_000), skips: (3.0, 1_000_000)}] == pushing.far.taken
    pushing.runs.loss["a"] = math.nan
    pushing.after(15)
    value, unix_ms = pushing.far.taken[1][LOSS]
    assert (True, 1_015_000) == (math.isnan(value), unix_ms)
    assert {"delivered": 2} == pushing.counted()


def test_a_series_that_is_gone_is_ended_once(pushing):
    pushing.after(0)
    pushing.runs.loss.clear()
    pushing.after(15)
    ended = struct.pack("<d", pushing.far.taken[1][LOSS][0])
    assert 0x7FF0000000000002 == int.from_bytes(ended, "little")
    pushing.after(15)
    assert LOSS not in pushing.far.taken[2]


@pytest.mark.parametrize("status", [0, 429, 500, 503])
def test_what_was_not_taken_comes_later_in_its_order_with_growing_pauses(pushing, status):
    pushing.far.status = status
    for _ in range(12):
        pushing.after(15)
    assert 2 <= pushing.far.num_asked <= 4  # after 15, 30, 60 and 120 seconds
    pushing.far.status = 204
    for _ in range(8):
        pushing.after(15)
    times = [each[LOSS][1] for each in pushing.far.taken]
    assert list(range(1_015_000, 1_315_000, 15_000)) == times
    assert 20 == pushing.counted()["delivered"]


def test_what_is_refused_for_good_is_not_sent_again(pushing, caplog):
    pushing.far.status = 400
    pushing.after(15)
    pushing.far.status = 204
    pushing.after(15)
    assert {"failed": 1, "delivered": 1} == pushing.counted()
    assert 2 == pushing.far.num_asked
    assert "status=400: said so" in caplog.text


def test_of_what_waits_too_long_the_oldest_goes_and_is_counted(pushing):
    pushing.far.status = 503
    for _ in range(MAX_WAITING + 5):
        pushing.after(15)
    pushing.far.status = 204
    pushing.after(600)
    assert (6, MAX_WAITING) == (pushing.counted()["dropped"], len(pushing.far.taken))


def test_of_several_collectors_only_the_one_that_leads_pushes(pushing):
    pushing.leads = False
    pushing.after(0)
    assert 0 == pushing.far.num_asked
    pushing.leads = True
    pushing.after(15)
    assert 1 == len(pushing.far.taken)


def test_without_an_address_nothing_is_pushed_and_a_wrong_one_is_said_without_its_password():
    made = {"clock": Clock(), "leads": lambda: True}
    assert remote_writer("", Runs(), IngestCounters(), **made) is None
    with pytest.raises(ConfigError, match="it must be http://HOST") as caught:
        remote_writer("ftp://me:secret@host", Runs(), IngestCounters(), **made)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("port", ["x", "99999999", "-1"])
def test_a_port_that_is_none_is_said_at_the_start(port):
    with pytest.raises(ConfigError, match="it must be http://HOST"):
        remote_writer(
            f"http://host:{port}/", Runs(), IngestCounters(), clock=Clock(), leads=lambda: True
        )


def test_what_the_other_side_answers_is_one_line_of_the_log(pushing, caplog):
    pushing.far.status, pushing.far.text = 400, b"no\nWARNING forged\x1b[2J"
    pushing.after(15)
    (record,) = caplog.records
    assert "no WARNING forged [2J" in record.getMessage()


def test_an_answer_that_comes_byte_by_byte_is_waited_for_as_a_whole_for_a_while(
    pushing, monkeypatch
):
    async def dripping():
        while True:
            await asyncio.sleep(0.01)
            yield b"x"

    monkeypatch.setattr(remote_write, "_PUSH_TIMEOUT_SECONDS", 0.1)
    monkeypatch.setattr(remote_write, "MAX_REASON_BYTES", 1 << 30)
    pushing.far.text = dripping()
    pushing.far.status = 500
    pushing.after(15)
    assert {"retried": 1} == pushing.counted()


def test_without_its_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(remote_write, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match="cramjam") as caught:
        remote_writer(URL, Runs(), IngestCounters(), clock=Clock(), leads=lambda: True)
    assert "trainvitals[remote-write]" in caught.value.hint


def leading_to(*addresses: str, asked: list[str]):
    """Return what looks a name up: another address each time."""

    def look_up(host, port, *_, **__):
        address = addresses[min(len(asked), len(addresses) - 1)]
        asked.append(str(host))
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

    return look_up


def test_the_address_that_was_checked_is_the_one_that_is_connected_to(monkeypatch):
    asked: list[str] = []
    with receiver() as server:
        port = server.server_address[1]
        writer = RemoteWriter(
            f"http://me:secret@store.example.org:{port}/write",
            Runs(),
            counters := IngestCounters(),
            clock=Clock(),
        )
        look_up = leading_to("127.0.0.1", "169.254.169.254", asked=asked)
        monkeypatch.setattr(socket, "getaddrinfo", look_up)
        writer.push_if_due()
        ((path, host, _),) = server.posted
        assert ("/write", f"store.example.org:{port}") == (path, host)
        assert "Authorization" in server.headers[0]
    assert (["store.example.org"], 1) == (asked, counters.remote_writes["delivered"])


def test_a_name_that_leads_to_a_metadata_address_is_not_pushed_to_until_it_leads_elsewhere(
    monkeypatch, caplog
):
    asked: list[str] = []
    with receiver() as server:
        url = f"http://store.example.org:{server.server_address[1]}/write"
        clock, counters = Clock(), IngestCounters()
        writer = RemoteWriter(url, Runs(), counters, clock=clock)
        look_up = leading_to("169.254.169.254", "127.0.0.1", asked=asked)
        monkeypatch.setattr(socket, "getaddrinfo", look_up)
        writer.push_if_due()
        assert ([], 1) == (server.posted, counters.remote_writes["retried"])
        assert "metadata are refused" in caplog.text
        clock.seconds += 15
        writer.push_if_due()
        assert 2 == len(server.posted)


def test_an_address_that_is_never_a_store_is_refused_at_the_start():
    with pytest.raises(ConfigError, match="metadata are refused"):
        remote_writer(
            "http://169.254.169.254/", Runs(), IngestCounters(), clock=Clock(), leads=lambda: True
        )


# ------------------------------------------------------------------------------ a real Prometheus


def asked(url: str, query: str) -> list[dict]:
    """Return what Prometheus answers to a query now; nothing while it is not there."""
    address = f"{url}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    try:
        with urllib.request.urlopen(address, timeout=5) as answer:
            result: list[dict] = json.load(answer)["data"]["result"]
    except OSError:
        return []
    return result


@pytest.mark.servers("prometheus")
def test_a_real_prometheus_that_comes_late_has_every_push_since_the_collector_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(remote_write, "PUSH_SECONDS", 0.3)
    monkeypatch.setattr(remote_write, "MAX_PAUSE_SECONDS", 0.6)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    (tmp_path / "prometheus.yml").write_text("global: {scrape_interval: 15s}\n")
    command = (
        "prometheus",
        f"--config.file={tmp_path / 'prometheus.yml'}",
        f"--storage.tsdb.path={tmp_path / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--web.enable-remote-write-receiver",
    )
    settings = CollectorSettings(
        data=tmp_path / "data",
        commit_seconds=0.0,
        notifiers=NotifierSettings(remote_write=f"{url}/api/v1/write"),
    )
    with Served(settings) as served:
        writer = Writer()
        with served.client("ingest") as client:
            client.ingest(writer.events(RunStarted(info=RunInfo(name="tiny"))))
            client.ingest(writer.steps(range(20), loss=1.5))
        counts = served.store.counters.remote_writes
        num = counts["retried"] + 1  # the one after it has the steps
        until(lambda: counts["retried"] > num, "nobody is there yet")
        began = time.time()
        with (
            (tmp_path / "log").open("w") as log,
            subprocess.Popen(command, stdout=log, stderr=log) as prometheus,
        ):
            try:
                loss = f'train_loss{{run="{RUN}"}}'
                until(lambda: asked(url, loss), "the run's loss is there")
                (series,) = asked(url, loss)
                (every,) = asked(url, f"{loss}[5m]")
                (state,) = asked(url, f'train_run_state{{run="{RUN}"}}')
            finally:
                prometheus.terminate()
        page = served.request("GET", "/metrics").text
    assert ("1.5", "vitals-collector") == (series["value"][1], series["metric"]["job"])
    assert every["values"][0][0] < began
    assert "running" == state["metric"]["state"]
    assert 'collector_remote_writes_total{outcome="failed"} 0.0' in page


def until(condition, what: str) -> None:
    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline, f"did not happen: {what}"
        time.sleep(0.1)
