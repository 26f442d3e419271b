"""Receivers as they are: real processes, HTTP and SMTP; those that hang, and a collector killed."""

import email.policy
import http.client
import json
import logging
import os
import random
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import psutil
import pytest
import requests
import typer
from typer.testing import CliRunner

from tests.collector.rows import Writer
from tests.support.forked import COMMANDS
from tests.support.receivers import alert, receiver
from trainvitals.alerting import ALERTS_BY_NAME
from trainvitals.errors import ConfigError
from trainvitals.testing import ManualClock
from vitals_collector.alerts.apprise_notifier import AppriseNotifier
from vitals_collector.alerts.delivery import Dispatcher
from vitals_collector.alerts.messages import AlertLinks
from vitals_collector.alerts.notifiers import DELIVERED, delivery_id
from vitals_collector.alerts.receivers import (
    ReceiverSettings,
    load_notifier_settings,
    notifier_settings,
)
from vitals_collector.alerts.worker import WorkerNotifier, send_test
from vitals_collector.cli import control
from vitals_collector.ingest.ingest import ingest
from vitals_collector.storage.store import open_data_store


@contextmanager
def tcp(handle) -> Iterator[int]:
    """Serve each connection by ``handle(socket)``; gives the port."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            handle(self.request)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        block_on_close = False

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def drip(connection: socket.socket) -> None:
    """Answer one byte at a time, forever: no single read ever times out."""
    try:
        connection.sendall(b"HTTP/1.1 200 OK\r\nX-Long: ")
        while True:
            connection.sendall(b"a")
            time.sleep(0.05)
    except OSError:
        pass


def hang(connection: socket.socket) -> None:
    """Take everything and say nothing."""
    while connection.recv(65536):
        pass


@contextmanager
def worker(
    url: str, *, kind: str = "apprise", deadline: float = 30.0, name: str = "team"
) -> Iterator[WorkerNotifier]:
    settings = ReceiverSettings(name=name, kind=kind, url=url)
    links = AlertLinks(public_url="http://vitals.example")
    notifier = WorkerNotifier(settings, links=links, deadline_seconds=deadline)
    try:
        yield notifier
    finally:
        notifier.close()


def children() -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process().children()
        if any("alerts.worker" in word for word in child.cmdline())
    ]


# ------------------------------------------------------------------------------------ processes


def test_a_receiver_that_drips_bytes_is_cut_off_at_the_deadline_and_can_be_tried_again():
    with (
        tcp(drip) as port,
        worker(f"http://127.0.0.1:{port}/", kind="webhook", deadline=2.0) as hook,
    ):
        for _ in range(2):
            result = hook.notify([alert()])
            assert (True, "no answer in 2 s") == (result.recoverable, result.error)
        assert [] == children()


def test_one_receiver_that_hangs_delays_no_other():
    with (
        tcp(hang) as port,
        receiver() as server,
        worker(f"http://127.0.0.1:{port}/", kind="webhook", name="stuck") as stuck,
        worker(server.url, kind="webhook", name="good") as good,
    ):
        settled = threading.Event()
        dispatcher = Dispatcher([stuck, good], clock=ManualClock())
        dispatcher.start()
        dispatcher.submit(alert())
        for _ in range(1_200):
            if server.posted:
                settled.set()
                break
            time.sleep(0.05)
        dispatcher.close(timeout=0.5)
        assert settled.is_set()
    assert [] == children()


def test_the_process_starts_at_first_need_stays_for_the_next_and_shows_no_address():
    with receiver() as server, worker(server.url, kind="webhook") as hook:
        assert [] == children()
        assert DELIVERED == hook.notify([alert()])
        (first,) = children()
        assert "s3cret" not in " ".join(first.cmdline())
        assert DELIVERED == hook.notify([alert("f2")])
        assert [first.pid] == [child.pid for child in children()]
        first.kill()
        assert DELIVERED == hook.notify([alert("f3")])
        assert 3 == len(server.posted)


def test_closing_ends_a_delivery_that_hangs_and_starts_no_other():
    reached = threading.Event()

    def note_and_hang(connection: socket.socket) -> None:
        reached.set()
        hang(connection)

    with tcp(note_and_hang) as port, worker(f"http://127.0.0.1:{port}/", kind="webhook") as hook:
        hook._ensure_process()  # as after an earlier delivery
        thread = threading.Thread(target=hook.notify, args=([alert()],))
        thread.start()
        assert reached.wait(60)
        hook.close()
        thread.join(60)
        assert not thread.is_alive()
    assert [] == children()


HANGING = """
import sys
from tests.support.receivers import alert
from vitals_collector.alerts.receivers import ReceiverSettings
from vitals_collector.alerts.worker import WorkerNotifier
settings = ReceiverSettings(name="x", kind="webhook", url=sys.argv[1])
WorkerNotifier(settings).notify([alert()])
"""


def test_the_process_dies_with_the_collector_also_within_a_call():
    reached = threading.Event()

    def note_and_hang(connection: socket.socket) -> None:
        reached.set()
        hang(connection)

    with tcp(note_and_hang) as port:
        command = [sys.executable, "-c", HANGING, f"http://127.0.0.1:{port}/"]
        with COMMANDS.Popen(command) as collector:
            assert reached.wait(60)
            (process,) = psutil.Process(collector.pid).children()
            collector.send_signal(signal.SIGKILL)
        process.wait(5)


LOST = ALERTS_BY_NAME["RunLost"]


# ------------------------------------------------------------------------------------- channels


@pytest.mark.parametrize(
    "schema",
    [
        "json",
        pytest.param("ntfy", marks=pytest.mark.nightly),
        pytest.param("mmost", marks=pytest.mark.nightly),
    ],
)
def test_a_message_says_what_happened_what_was_done_and_what_to_do(schema: str):
    path = {"json": "", "ntfy": "topic", "mmost": "3ccdd113474722377935511fc85d3dd4"}[schema]
    view = alert(name="RunLost", summary="rank 1 is silent")
    with receiver() as server:
        port = server.server_address[1]
        with worker(f"{schema}://127.0.0.1:{port}/{path}") as team:
            assert DELIVERED == team.notify([view])
        text = json.dumps(json.loads(server.posted[0][2]))
    for words in (
        "Page: RunLost",
        "rank 1 is silent",
        f"Vitals {LOST.did}",
        f"To do: {LOST.to_do}",
        "docs/RUNBOOK.md#runlost",
        f"http://vitals.example/?run={view.run_id}",
        delivery_id(view, "team"),
    ):
        assert words in text


@pytest.mark.parametrize(
    ("status", "recoverable"), [(403, False), pytest.param(503, True, marks=pytest.mark.nightly)]
)
def test_what_a_channel_answers_is_told_without_its_address(status: int, recoverable: bool):
    with receiver(status) as server:
        port = server.server_address[1]
        with worker(f"json://user:s3cret@127.0.0.1:{port}/s3cret") as team:
            result = team.notify([alert()])
    assert (recoverable, True) == (result.recoverable, str(status) in result.error)
    assert "s3cret" not in result.error


class Service(NamedTuple):
    """What a service's documentation says of the request, and of its answer."""

    address: str
    host: str
    path: str
    """How it begins."""
    needs: tuple[str, ...]
    """Fields that the body must have, by their path; the last one's text is the message."""
    answer: tuple[int, bytes]


SERVICES = {
    "slack": Service(
        "slack://T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ",
        "hooks.slack.com",
        "/services/T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ",
        ("attachments.0.text",),
        (200, b"ok"),
    ),
    "discord": Service(
        "discord://4174216298/JHMHI8qBe7bk2ZwO5U711o3dV_js",
        "discord.com",
        "/api/webhooks/4174216298/JHMHI8qBe7bk2ZwO5U711o3dV_js",
        ("content",),
        (204, b""),
    ),
    "telegram": Service(
        "tgram://123456789:abcdefg_hijklmnop/12315544",
        "api.telegram.org",
        "/bot123456789:abcdefg_hijklmnop/sendMessage",
        ("chat_id", "text"),
        (200, b'{"ok": true, "result": {}}'),
    ),
    "teams": Service(
        "workflows://prod-1.logic.azure.com:443/643e69f83c8944/WzbiGvtoGrPFhFFU",
        "prod-1.logic.azure.com",
        "/workflows/643e69f83c8944/triggers/manual/paths/invoke",
        ("type", "attachments.0.contentType", "attachments.0.content.body"),
        (202, b""),
    ),
    "pagerduty": Service(
        "pagerduty://IntegrationKey@ApiKey",
        "events.pagerduty.com",
        "/v2/enqueue",
        ("routing_key", "event_action", "dedup_key", "payload.severity", "payload.summary"),
        (202, b'{"status": "success"}'),
    ),
}


def field(body: object, path: str) -> object:
    for word in path.split("."):
        body = body[int(word)] if isinstance(body, list) else body[word]  # type: ignore[index]
    return body


@contextmanager
def played(service: Service, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, object]]]:
    """Take what is sent to the service's host; a request that it would refuse gets 400.

    The bodies that apprise makes go over real HTTP to this machine; TLS and the service are not
    there.
    """
    bodies: list[dict[str, object]] = []

    def serve(connection: socket.socket) -> None:
        stream = connection.makefile("rb")
        path = stream.readline().split()[1].decode()
        headers = http.client.parse_headers(stream)
        body = json.loads(stream.read(int(headers["Content-Length"])))
        try:
            fields = [field(body, name) for name in service.needs]
            is_good = path.startswith(service.path) and all(fields)
        except (KeyError, IndexError, TypeError):
            is_good = body.get("event_action") == "resolve" and "dedup_key" in body
        bodies.append(body)
        status, text = service.answer if is_good else (400, b"")
        head = f"HTTP/1.1 {status} X\r\nContent-Length: {len(text)}\r\nConnection: close\r\n\r\n"
        connection.sendall(head.encode() + text)

    send = requests.adapters.HTTPAdapter.send

    def send_here(self, request, **how):  # type: ignore[no-untyped-def]
        address = urlsplit(request.url)
        assert ("https", service.host) == (address.scheme, address.hostname)
        request.url = f"http://127.0.0.1:{port}{address.path}"
        return send(self, request, **how)

    with tcp(serve) as port:
        monkeypatch.setattr(requests.adapters.HTTPAdapter, "send", send_here)
        yield bodies


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # all plugins of apprise are loaded
@pytest.mark.parametrize("name", SERVICES)
def test_the_request_for_a_service_has_what_its_documentation_asks_for(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    service = SERVICES[name]
    with played(service, monkeypatch) as bodies:
        team = AppriseNotifier(service.address, name="team", links=AlertLinks())
        assert DELIVERED == team.notify([alert(name="RunLost", summary="rank 1 is silent")])
    assert 1 == len(bodies)
    text = json.dumps(bodies)
    for words in ("Page: RunLost", "rank 1 is silent", f"Vitals {LOST.did}", "To do: "):
        assert words in text


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # all plugins of apprise are loaded
@pytest.mark.parametrize("name", ["slack", "discord", "telegram"])
def test_words_of_a_run_are_no_markup_to_a_service_and_call_no_channel(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    words = "mean(reward) <b 0.9 <!channel> @everyone @here"
    with played(SERVICES[name], monkeypatch) as bodies:
        team = AppriseNotifier(SERVICES[name].address, name="team", links=AlertLinks())
        assert DELIVERED == team.notify([alert(name="RunLost", summary=words)])
    text = json.dumps(bodies, ensure_ascii=False)
    assert "mean(reward)" in text and "@everyone" not in text and "@here" not in text
    if name != "discord":  # there "<" stands for itself
        assert "&lt;b 0.9 &lt;!channel&gt;" in text


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # all plugins of apprise are loaded
def test_to_pagerduty_the_end_of_an_alert_ends_its_incident_and_opens_no_other(
    monkeypatch: pytest.MonkeyPatch,
):
    with played(SERVICES["pagerduty"], monkeypatch) as bodies:
        team = AppriseNotifier(SERVICES["pagerduty"].address, name="team", links=AlertLinks())
        assert DELIVERED == team.notify([alert(), alert(state="resolved"), alert("f2")])
    told = [(body["event_action"], body["dedup_key"]) for body in bodies]
    assert [("trigger", "f1"), ("resolve", "f1"), ("trigger", "f2")] == told


def test_a_channel_follows_no_redirect():
    with receiver() as trap, receiver(302, Location=trap.url) as server:
        with worker(f"json://127.0.0.1:{server.server_address[1]}/") as team:
            assert "302" in team.notify([alert()]).error
        assert (1, []) == (len(server.posted), trap.posted)


def test_an_email_arrives_by_smtp():
    lines: list[bytes] = []

    def smtp(connection: socket.socket) -> None:
        stream = connection.makefile("rwb", buffering=0)
        stream.write(b"220 test\r\n")
        in_data = False
        for line in stream:
            lines.append(line)
            if in_data and line != b".\r\n":
                continue
            in_data = line.upper().startswith(b"DATA")
            stream.write(b"354 go on\r\n" if in_data else b"250 ok\r\n")

    with tcp(smtp) as port:
        url = f"mailto://127.0.0.1:{port}/?from=vitals@example.com&to=me@example.com&mode=insecure"
        with worker(url) as mail:
            assert DELIVERED == mail.notify([alert(name="RunLost", summary="loss <b 4")])
    start = [line.strip().upper() for line in lines].index(b"DATA") + 1
    letter = email.message_from_bytes(b"".join(lines[start:]), policy=email.policy.default)
    assert ("me@example.com", "Page: RunLost") == (letter["To"], letter["Subject"][:13])
    assert "text/plain" == letter.get_content_type()
    first, second, *_ = letter.get_content().splitlines()
    assert ("loss <b 4", "A running job stopped") == (first, second[:21])


# -------------------------------------------------------------------------------------- settings


def written(folder: Path, text: str, mode: int = 0o600) -> Path:
    file = folder / "receivers.toml"
    file.write_text(text)
    file.chmod(mode)
    return file


TEAM = '[[receivers]]\nname = "team"\nurl = "json://user:s3cret@127.0.0.1:9/"\n'
HOOK = '[[receivers]]\nname = "team"\nkind = "webhook"\nurl = "http://127.0.0.1:9/s3cret"\n'
"""Checked here; an address of Apprise is checked in a process of its own."""


def test_a_file_that_others_can_read_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="0640"):
        notifier_settings(file=written(tmp_path, TEAM, 0o640))


@pytest.mark.parametrize(
    "text",
    [
        "s3cret",
        HOOK + HOOK,
        HOOK.replace("team", "log"),
        HOOK + "colour = 's3cret'\n",
        HOOK + "after_minutes = -1\n",
        HOOK + "env = 'NOT_SET'\n",
        TEAM + "kind = 'webhook'\n",
        TEAM + "secret = 'signs'\n",
        '[[receivers]]\nname = "team"\nurl = "slack://s3cret"\n',
        '[[receivers]]\nname = "team"\nurl = "slakc://a/b/s3cret"\n',
        '[[receivers]]\nname = "team"\nurl = "https://hooks.example/s3cret"\n',
        '[[receivers]]\nname = "team"\nurl = "s3cret"\n',
        '[[receivers]]\nname = "team"\nenv = "NOT_SET"\n',
        '[remote_write]\nenv = "NOT_SET"\n',
        '[remote_write]\nurl = "http://u:s3cret@a/"\nenv = "HOME"\n',
    ],
)
def test_a_wrong_file_is_an_error_that_repeats_no_address(tmp_path: Path, text: str):
    with pytest.raises(ConfigError) as caught:
        notifier_settings(file=written(tmp_path, text))
    assert "s3cret" not in str(caught.value)


def test_the_guides_file_is_taken_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    guide = Path(__file__).parents[2] / "docs" / "guides" / "alerts.md"
    text = guide.read_text().partition("<!-- test: receivers -->\n```toml\n")[2].partition("```")[0]
    monkeypatch.setenv("MANAGER_ADDRESS", "pagerduty://KEY@API")
    settings = notifier_settings(file=written(tmp_path, text))
    assert ["team", "manager", "own"] == [r.name for r in settings.receivers]


def test_an_address_may_lie_in_the_environment_and_is_shown_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TEAM_ADDRESS", "json://user:s3cret@h/s3cret")
    text = '[[receivers]]\nname = "team"\nenv = "TEAM_ADDRESS"\n'
    settings = notifier_settings(file=written(tmp_path, text))
    assert "json://user:s3cret@h/s3cret" == settings.receivers[0].url
    assert "s3cret" not in repr(settings)


@pytest.mark.parametrize(
    ("table", "environ", "address"),
    [
        ("", "", ""),
        ('[remote_write]\nurl = "http://u:s3cret@a/"\n', "", "http://u:s3cret@a/"),
        ('[remote_write]\nenv = "PUSHED_TO"\n', "", "http://u:s3cret@b/"),
        ('[remote_write]\nurl = "http://u:s3cret@a/"\n', "http://c/", "http://c/"),
    ],
)
def test_where_metrics_are_pushed_to_lies_in_the_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: str, environ: str, address: str
):
    monkeypatch.setenv("PUSHED_TO", "http://u:s3cret@b/")
    monkeypatch.setenv("VITALS_REMOTE_WRITE", environ)
    settings = load_notifier_settings(written(tmp_path, HOOK + table))
    assert address == settings.remote_write
    assert "s3cret" not in repr(settings)


def test_vitals_alerts_test_says_per_receiver_what_happened(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    caplog.set_level(logging.DEBUG)
    app = typer.Typer()
    control.register(app)
    with receiver() as server:
        port = server.server_address[1]
        good = HOOK.replace("team", "good").replace(":9/", f":{port}/")
        file = written(tmp_path, HOOK + good)
        words = ["alerts", "test", "--receivers", str(file), "--format", "json"]
        result = CliRunner().invoke(app, words)
        assert 1 == result.exit_code
        outcomes = {row["receiver"]: row["outcome"] for row in json.loads(result.stdout)}
        assert {"team": "failed", "good": "delivered"} == outcomes
        only = CliRunner().invoke(app, [*words, "--receiver", "good"])
        assert (0, 2) == (only.exit_code, len(server.posted))
    assert "s3cret" not in result.output + caplog.text


def test_test_messages_go_to_all_receivers_at_once_and_results_keep_their_order():
    both = threading.Barrier(2)

    def answer(connection: socket.socket) -> None:
        connection.recv(65536)
        both.wait(60)  # the other one is asked meanwhile
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    with tcp(answer) as first, tcp(answer) as second:
        urls = [f"http://127.0.0.1:{port}/" for port in (first, second)]
        settings = notifier_settings(webhooks=urls)
        results = send_test(settings, "", now_unix_ns=1)
    names = [each.name for each in settings.receivers]
    assert [(name, DELIVERED) for name in names] == results
    assert [] == children()


# ------------------------------------------------------------------------------------- kill -9


PAGING = """
import sys, time
from pathlib import Path
from tests.collector.rows import RUN
from trainvitals.alerting import Alert
from trainvitals.clock import SystemClock
from vitals_collector.alerts.inbox import AlertOccurrence
from vitals_collector.alerts.receivers import notifier_settings
from vitals_collector.alerts.worker import build_notifiers
from vitals_collector.live.engine import build_alert_service
from vitals_collector.storage.store import open_data_store

data, url, number = sys.argv[1:]
clock = SystemClock()
store = open_data_store(Path(data))
acting = build_alert_service(store, build_notifiers(notifier_settings(webhooks=[url])), clock=clock)
acting.dispatcher.start()
acting.engine._resend_undelivered()
labels = {"run": RUN, "cause": number}
page = Alert(name="StateDamaged", severity="page", labels=labels, summary="x", step=1, point=True)
acting.inbox.raise_alerts([AlertOccurrence(RUN, clock.time_ns(), page)], cursors={})
print(flush=True)
time.sleep(60)
"""


@pytest.mark.slow
def test_thirty_kills_lose_no_page_and_repeat_none_more_than_once(tmp_path: Path):
    rng = random.Random(21)
    store = open_data_store(tmp_path / "data")
    ingest(store, Writer().steps([0]))
    store.close()
    with receiver() as server:
        for number in range(31):
            arguments = [str(tmp_path / "data"), server.url, str(number)]
            command = [sys.executable, "-c", PAGING, *arguments]
            with COMMANDS.Popen(command, stdout=subprocess.PIPE, env=os.environ) as process:
                assert process.stdout is not None
                assert process.stdout.readline(), "its page is stored: it must arrive"
                time.sleep(5.0 if number == 30 else rng.uniform(0.0, 1.2))
                process.kill()
        posted = [a for _, _, body in server.posted for a in json.loads(body)["alerts"]]
    by_page = Counter(a["labels"]["cause"] for a in posted)
    assert {str(number) for number in range(31)} == set(by_page), "none is lost"
    assert {1, 2} >= set(by_page.values())
    assert 31 == len({a["delivery_id"] for a in posted})
