import json
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import httpx
import msgspec
import pytest
import typer
from typer.testing import CliRunner

from tests.support.receivers import RUN, SECOND, alert, receiver
from tests.support.served import Served
from trainvitals.alerting import ALERTS_BY_NAME
from trainvitals.clock import SystemClock
from trainvitals.errors import ConfigError, UsageError
from trainvitals.testing import ManualClock
from trainvitals.views import AlertView
from vitals_collector.alerts import notifiers
from vitals_collector.alerts.deliveries import DeliveryCheck
from vitals_collector.alerts.delivery import DispatchConfig, Dispatcher
from vitals_collector.alerts.messages import AlertLinks, alert_details
from vitals_collector.alerts.notifiers import (
    DELIVERED,
    AlertmanagerNotifier,
    DeliveryResult,
    LogNotifier,
    WebhookNotifier,
    check_url,
    delivery_id,
    redacted,
    sign_webhook,
)
from vitals_collector.alerts.receivers import (
    NotifierSettings,
    ReceiverSettings,
    notifier_settings,
)
from vitals_collector.alerts.worker import WorkerNotifier, build_notifiers
from vitals_collector.api.app import CollectorSettings
from vitals_collector.cli import collector as command


@contextmanager
def webhook(url: str, secret: str = "") -> Iterator[WebhookNotifier]:
    notifier = WebhookNotifier(url, clock=ManualClock(), secret=secret, timeout=5.0)
    try:
        yield notifier
    finally:
        notifier.close()


# ------------------------------------------------------------------------------------ webhook


def test_a_webhook_gets_the_alerts_as_documented():
    with receiver() as server, webhook(server.url) as hook:
        assert DELIVERED == hook.notify([alert()])
        path, host, body = server.posted[0]
    assert "/hook?key=s3cret" == path
    assert host.startswith("127.0.0.1:")
    document = json.loads(body)
    assert {"version", "alerts"} == set(document)
    assert alert() == msgspec.convert(document["alerts"][0], AlertView)


def test_a_delivery_has_one_id_in_its_body_and_header_on_every_try():
    with receiver(503) as server, webhook(server.url) as hook:
        for _ in range(2):
            hook.notify([alert()])
    expected = delivery_id(alert(), "webhook")
    bodies = [json.loads(body) for _, _, body in server.posted]
    assert [expected] * 2 == [body["alerts"][0]["delivery_id"] for body in bodies]
    assert [expected] * 2 == [headers["Vitals-Delivery-Id"] for headers in server.headers]
    states = {delivery_id(alert(state=state), "webhook") for state in ("firing", "resolved")}
    assert 3 == len(states | {delivery_id(alert(), "other")})


LINKS = AlertLinks(public_url="https://v.example", runbook_url="https://w.example/RUNBOOK")


LOST = ALERTS_BY_NAME["RunLost"]


def test_a_body_says_what_vitals_did_what_to_do_and_where_to_look():
    lost, other = alert(name="RunLost"), alert("f2", name="OfANewerVersion", run_id="")
    with receiver() as server:
        hook = WebhookNotifier(server.url, clock=ManualClock(), links=LINKS)
        assert DELIVERED == hook.notify([lost, other])
        hook.close()
    known, unknown = json.loads(server.posted[0][2])["alerts"]
    assert {
        "description": LOST.help,
        "action_taken": f"Vitals {LOST.did}",
        "to_do": LOST.to_do,
        "runbook_url": "https://w.example/RUNBOOK#runlost",
        "dashboard_url": f"https://v.example/?run={RUN}",
    }.items() <= known.items()
    assert not {"description", "action_taken", "runbook_url", "dashboard_url"} & set(unknown)


def test_a_command_in_a_message_has_the_runs_id():
    assert f"`vitals resume {RUN}`" in alert_details(alert(name="TrainingHalted"), LINKS)["to_do"]


def test_an_alertmanager_gets_the_same_as_annotations_and_the_runs_page_as_source():
    with receiver() as server:
        for links in (LINKS, AlertLinks()):
            url = f"http://127.0.0.1:{server.server_address[1]}"
            notifier = AlertmanagerNotifier(url, clock=ManualClock(), links=links)
            assert DELIVERED == notifier.notify([alert(name="RunLost", step=-1)])
            notifier.close()
    linked, plain = (json.loads(body)[0] for _, _, body in server.posted)
    assert "https://w.example/RUNBOOK#runlost" == linked["annotations"]["runbook_url"]
    assert f"Vitals {LOST.did}" == linked["annotations"]["action_taken"]
    page = f"https://v.example/?run={RUN}"
    assert [page] * 2 == [linked["annotations"]["dashboard_url"], linked["generatorURL"]]
    assert "docs/RUNBOOK.md#runlost" == plain["annotations"]["runbook_url"]
    assert not {"dashboard_url", "step"} & set(plain["annotations"])
    assert "generatorURL" not in plain


def test_a_body_links_to_acknowledge_what_can_be_and_only_that():
    def ack_link(view: AlertView) -> str:
        return f"https://c.example/ack/{view.fingerprint}" if view.state == "firing" else ""

    with receiver() as server:
        hook = ReceiverSettings(name="own", kind="webhook", url=server.url)
        for linked in (ack_link, None):
            notifier = WorkerNotifier(hook, ack_link=linked)
            assert DELIVERED == notifier.notify([alert(), alert("f2", "resolved")])
            notifier.close()
    posted = [json.loads(body)["alerts"] for _, _, body in server.posted]
    links = [[view.get("ack_url") for view in views] for views in posted]
    assert [["https://c.example/ack/f1", None], [None, None]] == links


def test_a_body_is_signed_with_its_time_where_there_is_a_secret():
    with receiver() as server, webhook(server.url, secret="k3y") as hook:
        hook.notify([alert()])
    time, signature = server.headers[0]["Vitals-Signature"].split(",")
    body = server.posted[0][2]
    assert f"v1={sign_webhook('k3y', time.removeprefix('t='), body)}" == signature
    assert (
        sign_webhook("k3y", "1", body)
        != sign_webhook("other", "1", body)
        != sign_webhook("other", "2", body)
    )


@pytest.mark.parametrize(
    ("words", "seconds"),
    [("120", 120.0), ("soon", 0.0), ("", 0.0), ("Fri, 01 Jan 1999 00:00:00 GMT", 0.0)],
)
def test_a_receiver_may_say_when_to_come_again(words: str, seconds: float):
    with receiver(429, Retry_After=words) as server, webhook(server.url) as hook:
        assert seconds == hook.notify([alert()]).retry_after


def test_a_webhook_reached_by_name_sees_its_name():
    with receiver() as server:
        port = server.server_address[1]
        with webhook(f"http://localhost:{port}/x") as hook:
            assert DELIVERED == hook.notify([alert()])
        assert f"localhost:{port}" == server.posted[0][1]


@pytest.mark.parametrize(
    ("status", "recoverable"),
    [(400, False), (404, False), (408, True), (429, True), (500, True), (503, True)],
)
def test_an_answer_says_whether_another_try_makes_sense(status: int, recoverable: bool):
    with receiver(status) as server, webhook(server.url) as hook:
        result = hook.notify([alert()])
    assert recoverable == result.recoverable
    assert str(status) in result.error
    assert "s3cret" not in result.error


def test_a_redirect_is_an_error_and_is_not_followed():
    with (
        receiver() as trap,
        receiver(302, Location=trap.url) as server,
        webhook(server.url) as hook,
    ):
        result = hook.notify([alert()])
        assert [] == trap.posted
    assert (False, True) == (result.recoverable, "302" in result.error)


def test_a_receiver_that_is_down_is_recoverable():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with webhook(f"http://127.0.0.1:{port}/?key=s3cret") as hook:
        result = hook.notify([alert()])
    assert result.recoverable
    assert "s3cret" not in result.error


@pytest.mark.parametrize(
    "url",
    [
        "http://169.254.169.254/latest/meta-data",
        "http://[fe80::1]/x",
        "http://[fd00:ec2::254]/",
        "http://[::ffff:169.254.169.254]/",
        "http://0.0.0.0/",
        "http://224.0.0.1/",
        "http://100.100.100.200/",
        "file:///etc/passwd",
        "ftp://host/",
        "http://",
        "http://host:99999/",
        "not a url",
    ],
)
def test_addresses_that_are_never_receivers_are_refused_at_the_door(url: str):
    with pytest.raises(ConfigError):
        check_url(url)


def test_a_refusal_does_not_repeat_the_secret_in_the_address():
    with pytest.raises(ConfigError) as caught:
        check_url("gopher://user:s3cret@host/s3cret?s3cret")
    assert "s3cret" not in str(caught.value)


def test_a_name_that_leads_to_a_metadata_address_is_refused_when_it_is_used(
    monkeypatch: pytest.MonkeyPatch,
):
    def rebound(host, port, **_):
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("169.254.169.254", port))]

    with webhook("http://hooks.example:80/") as hook:
        monkeypatch.setattr(notifiers.socket, "getaddrinfo", rebound)
        result = hook.notify([alert()])
    assert (False, True) == (result.recoverable, "metadata" in result.error)


def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    with receiver() as server, webhook(server.url) as hook:
        assert DELIVERED == hook.notify([alert()])


def test_the_log_has_one_line_per_alert(caplog: pytest.LogCaptureFixture):
    LogNotifier().notify([alert(), alert("f2", "resolved", severity="notify")])
    assert ["ERROR", "WARNING"] == [r.levelname for r in caplog.records]
    assert "RunHalted firing" in caplog.text


# ----------------------------------------------------------------------------------- delivery


class Fake:
    def __init__(self, *results: DeliveryResult, name: str = "fake", reposts: bool = False) -> None:
        self.name = name
        self.reposts = reposts
        self.takes_log = name == "log"
        self.results = list(results)
        self.got: list[list[tuple[str, str]]] = []

    def notify(self, alerts) -> DeliveryResult:
        self.got.append([(a.fingerprint, a.state) for a in alerts])
        return self.results.pop(0) if self.results else DELIVERED


LATER = DeliveryResult(recoverable=True, error="503")
NEVER = DeliveryResult(recoverable=False, error="404")


def test_a_delivery_is_tried_again_with_doubling_waits_until_it_succeeds():
    clock, fake = ManualClock(), Fake(LATER, LATER, LATER)
    dispatcher = Dispatcher([fake], clock=clock)
    dispatcher.submit(alert())
    waits = []
    while (wait := dispatcher.deliver_due()) is not None:
        waits.append(wait)
        clock.advance(wait)
    assert [1.0, 2.0, 4.0] == waits
    assert {("fake", "retried"): 3, ("fake", "delivered"): 1} == dispatcher.outcomes()


def run_for(dispatcher: Dispatcher, clock: ManualClock, seconds: float) -> None:
    """Deliver whatever becomes due within the time."""
    end = clock.monotonic_ns() + int(seconds * 1e9)
    while (
        wait := dispatcher.deliver_due()
    ) is not None and clock.monotonic_ns() + wait * 1e9 <= end:
        clock.advance(wait)
    clock.advance((end - clock.monotonic_ns()) / 1e9)


def test_what_is_refused_is_tried_ever_more_seldom_and_never_given_up():
    clock, fake = ManualClock(), Fake(*[NEVER] * 40)
    dispatcher = Dispatcher([fake], clock=clock)
    dispatcher.submit(alert())
    run_for(dispatcher, clock, 3600)
    assert 41 == len(fake.got)
    assert {("fake", "failed"): 40, ("fake", "delivered"): 1} == dispatcher.outcomes()


def test_a_receiver_that_comes_back_after_half_an_hour_has_the_page_a_minute_later():
    clock, fake = ManualClock(), Fake(*[LATER] * 9_999)
    dispatcher = Dispatcher([fake], clock=clock)
    dispatcher.submit(alert())
    run_for(dispatcher, clock, 1800)
    assert 40 > len(fake.got)
    fake.results.clear()
    run_for(dispatcher, clock, 60)
    assert {("fake", "delivered")} <= set(dispatcher.outcomes())
    assert dispatcher.deliver_due() is None


def test_a_receiver_is_left_alone_for_as_long_as_it_asks():
    clock = ManualClock()
    fake = Fake(DeliveryResult(recoverable=True, error="429", retry_after=120.0))
    dispatcher = Dispatcher([fake], clock=clock)
    dispatcher.submit(alert())
    assert 120.0 == dispatcher.deliver_due()
    dispatcher.submit(alert("f2"))
    assert 120.0 == dispatcher.deliver_due(), "nor is it asked for another alert"


def test_who_asks_for_a_day_is_told_of_after_five_minutes_and_asked_again_after_fifteen():
    clock, day = ManualClock(), DeliveryResult(recoverable=True, error="503", retry_after=86_400.0)
    away, good = Fake(*[day] * 9, name="away"), Fake(name="good")
    dispatcher = Dispatcher([away, good], clock=clock)
    dispatcher.submit(alert())
    run_for(dispatcher, clock, 299)
    assert 1 == len(good.got)
    run_for(dispatcher, clock, 1)
    assert (1, 2) == (len(away.got), len(good.got)), "it is told while nothing is tried"
    run_for(dispatcher, clock, 600)
    assert 2 == len(away.got)


def test_a_receiver_that_takes_all_but_one_alert_is_told_of_until_it_has_that():
    class Picky(Fake):
        is_picky = True

        def notify(self, alerts) -> DeliveryResult:
            super().notify(alerts)
            is_bad = self.is_picky and any(a.fingerprint == "bad" for a in alerts)
            return NEVER if is_bad else DELIVERED

    clock, picky, good = ManualClock(), Picky(name="picky"), Fake(name="good")
    dispatcher = Dispatcher([picky, good], clock=clock)
    dispatcher.submit(alert("bad"))
    for i in range(12):
        dispatcher.submit(alert(f"f{i}"))
        run_for(dispatcher, clock, 30)
    failing = [state for got in good.got for name, state in got if name[0] != "f" and name != "bad"]
    assert ["firing"] == failing
    picky.is_picky = False
    run_for(dispatcher, clock, 60)
    failing = [state for got in good.got for name, state in got if name[0] != "f" and name != "bad"]
    assert ["firing", "resolved"] == failing


def test_one_alert_that_is_refused_does_not_take_the_others_with_it():
    class Picky(Fake):
        def notify(self, alerts) -> DeliveryResult:
            super().notify(alerts)
            return NEVER if any(a.fingerprint == "bad" for a in alerts) else DELIVERED

    clock, fake = ManualClock(), Picky()
    dispatcher = Dispatcher([fake], clock=clock)
    for name in ("bad", "f1", "f2"):
        dispatcher.submit(alert(name))
    run_for(dispatcher, clock, 10)
    assert {"f1", "f2"} == {got[0][0] for got in fake.got if len(got) == 1} - {"bad"}


@pytest.mark.parametrize(
    ("result", "seconds", "told"),
    [(LATER, 240, False), (LATER, 400, True), (NEVER, 200, False), (NEVER, 301, True)],
)
def test_the_others_are_told_of_a_receiver_that_takes_nothing(
    result: DeliveryResult, seconds: float, told: bool
):
    clock, broken, good = ManualClock(), Fake(*[result] * 999, name="broken"), Fake(name="good")
    dispatcher = Dispatcher([broken, good], clock=clock)
    dispatcher.submit(alert())
    run_for(dispatcher, clock, seconds)
    states = [state for got in good.got for name, state in got if name != "f1"]
    assert (["firing"] if told else []) == states
    broken.results.clear()
    run_for(dispatcher, clock, 60)
    states = [state for got in good.got for name, state in got if name != "f1"]
    assert (["firing", "resolved"] if told else []) == states
    assert {"f1"} == {name for got in broken.got for name, _ in got}, "itself it is not told"


def test_ten_refusals_in_a_row_are_told_at_once():
    clock, broken, good = ManualClock(), Fake(*[NEVER] * 999, name="broken"), Fake(name="good")
    dispatcher = Dispatcher([broken, good], clock=clock)
    for i in range(10):
        dispatcher.submit(alert(f"f{i}"))
    run_for(dispatcher, clock, 30)
    assert 1 == sum(not name.startswith("f") or len(name) > 2 for g in good.got for name, _ in g)


def test_where_another_collector_pages_nothing_is_sent_here():
    clock, fake, is_pager = ManualClock(), Fake(LATER), [True]
    dispatcher = Dispatcher([fake], clock=clock, is_pager=lambda: is_pager[0])
    dispatcher.submit(alert())
    dispatcher.deliver_due()
    is_pager[0] = False
    dispatcher.submit(alert("f2"))
    run_for(dispatcher, clock, 60)
    assert ([[("f1", "firing")]], None) == (fake.got, dispatcher.deliver_due())


def test_the_newest_state_replaces_the_one_that_waits():
    clock, fake = ManualClock(), Fake(LATER)
    dispatcher = Dispatcher([fake], clock=clock)
    dispatcher.submit(alert())
    dispatcher.deliver_due()
    dispatcher.submit(alert(state="resolved"))
    run_for(dispatcher, clock, 1)
    assert [[("f1", "firing")], [("f1", "resolved")]] == fake.got


def test_information_never_pushes_a_page_out_and_pages_go_first():
    fake = Fake()
    fake.takes_log = True
    dispatcher = Dispatcher([fake], clock=ManualClock(), config=DispatchConfig(max_pending=3))
    dispatcher.submit(alert("l", severity="log"))
    dispatcher.submit(alert("p"))
    for i in range(5):
        dispatcher.submit(alert(f"l{i}", severity="log"))
    dispatcher.deliver_due()
    assert ("p", "firing") == fake.got[0][0]
    assert 3 == len(fake.got[0])


def test_where_pages_alone_wait_a_notice_is_what_is_dropped():
    fake = Fake()
    fake.takes_log = True
    dispatcher = Dispatcher([fake], clock=ManualClock(), config=DispatchConfig(max_pending=2))
    for name in ("p", "q"):
        dispatcher.submit(alert(name))
    dispatcher.submit(alert("l", severity="log"))
    dispatcher.deliver_due()
    assert [[("p", "firing"), ("q", "firing")]] == fake.got


def test_an_error_of_ours_ends_no_receivers_thread(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("vitals_collector.alerts.delivery._ERROR_SECONDS", 0.01)
    failed, delivered = threading.Event(), threading.Event()

    class Broken:
        def check(self, receiver, asked, *, reposts):
            if not failed.is_set():
                failed.set()
                raise TimeoutError("no free connection")
            return DeliveryCheck(frozenset(view.fingerprint for view in asked), frozenset())

        def record(self, receiver, alerts):
            delivered.set()

        def heard_by(self, alert):
            return frozenset()

    dispatcher = Dispatcher([Fake()], clock=SystemClock(), ledger=Broken())
    dispatcher.start()
    dispatcher.submit(alert("p"))
    assert failed.wait(10)
    dispatcher.resume(alert("p"))  # as the engine does with what is not settled
    assert delivered.wait(10)
    dispatcher.close()


def test_the_queue_is_bounded_and_counts_what_it_drops():
    fake = Fake()
    dispatcher = Dispatcher([fake], clock=ManualClock(), config=DispatchConfig(max_pending=3))
    for i in range(5):
        dispatcher.submit(alert(f"f{i}"))
    dispatcher.deliver_due()
    assert [[("f2", "firing"), ("f3", "firing"), ("f4", "firing")]] == fake.got
    assert {("fake", "dropped"): 2, ("fake", "delivered"): 3} == dispatcher.outcomes()


def test_a_firing_alert_is_posted_again_until_it_resolves_where_that_is_wanted():
    clock, fake = ManualClock(), Fake(reposts=True)
    dispatcher = Dispatcher([fake], clock=clock, config=DispatchConfig(repost_seconds=60))
    dispatcher.submit(alert())
    assert 60.0 == dispatcher.deliver_due()
    clock.advance(60)
    dispatcher.deliver_due()
    dispatcher.submit(alert(state="resolved"))
    assert dispatcher.deliver_due() is None
    assert [[("f1", "firing")]] * 2 + [[("f1", "resolved")]] == fake.got


def test_a_state_is_settled_once_every_notifier_has_had_it():
    clock, settled = ManualClock(), []
    slow = Fake(LATER, name="slow")
    reposting = Fake(name="am", reposts=True)
    dispatcher = Dispatcher(
        [reposting, slow], clock=clock, on_settled=lambda a: settled.append(a.state)
    )
    dispatcher.submit(alert())
    dispatcher.deliver_due()
    assert [] == settled
    clock.advance(1.0)
    dispatcher.deliver_due()
    assert ["firing"] == settled


def test_one_skipped_step_is_written_to_the_log_and_sent_to_nobody():
    log, hook = Fake(name="log"), Fake(name="hook", reposts=True)
    dispatcher = Dispatcher([log, hook], clock=ManualClock())
    dispatcher.submit(alert(severity="log"))
    dispatcher.keep_posting(alert(severity="log"))
    assert dispatcher.deliver_due() is None
    assert (1, 0) == (len(log.got), len(hook.got))


def test_what_is_on_its_way_is_not_queued_a_second_time():
    clock, fake = ManualClock(), Fake(LATER)
    dispatcher = Dispatcher([fake], clock=clock)
    dispatcher.submit(alert())
    dispatcher.deliver_due()
    dispatcher.resume(alert())
    assert dispatcher.deliver_due() == 1.0


def test_after_a_restart_only_those_are_told_again_who_want_that():
    once, again = Fake(name="once"), Fake(name="again", reposts=True)
    dispatcher = Dispatcher([once, again], clock=ManualClock())
    for _ in range(2):
        dispatcher.keep_posting(alert())
        dispatcher.deliver_due()
    assert ([], [[("f1", "firing")]]) == (once.got, again.got)


def test_what_is_silenced_is_withdrawn():
    clock, fake = ManualClock(), Fake(reposts=True)
    dispatcher = Dispatcher([fake], clock=clock)
    dispatcher.submit(alert())
    dispatcher.deliver_due()
    dispatcher.withdraw("f1")
    assert dispatcher.deliver_due() is None


def test_a_notifier_that_raises_is_counted_and_does_not_stop_the_others():
    class Broken(Fake):
        def notify(self, alerts) -> DeliveryResult:
            raise RuntimeError("bug")

    good = Fake(name="good")
    dispatcher = Dispatcher([Broken(name="broken"), good], clock=ManualClock())
    dispatcher.submit(alert())
    dispatcher.deliver_due()
    assert [[("f1", "firing")]] == good.got
    assert 1 == dispatcher.outcomes()["broken", "failed"]


def test_the_thread_delivers_and_stops():
    delivered = threading.Event()
    clock = ManualClock()
    dispatcher = Dispatcher([Fake()], clock=clock, on_settled=lambda a: delivered.set())
    dispatcher.start()
    dispatcher.submit(alert())
    assert delivered.wait(5.0)
    dispatcher.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("vitals-notify")]


# ------------------------------------------------------------------------------- Alertmanager


def test_where_an_alertmanager_is_configured_it_alone_routes():
    both = notifier_settings(webhooks=["http://127.0.0.1:1/"], alertmanager="http://127.0.0.1:9093")
    assert ["log", "alertmanager"] == [n.name for n in build_notifiers(both)]
    hooks = notifier_settings(webhooks=["http://127.0.0.1:1/", "http://127.0.0.1:2/"])
    assert ["log", "webhook", "webhook-2"] == [n.name for n in build_notifiers(hooks)]


def test_what_file_and_environment_say_of_notifiers_is_what_the_collector_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """An address that nobody hands over, on either way, is found here."""
    started: list[CollectorSettings] = []
    monkeypatch.setattr(command, "_serve", lambda settings, *_, **__: started.append(settings))
    app = typer.Typer()
    command.register(app)
    file = tmp_path / "receivers.toml"
    file.write_text('public_url = "http://v/"\n[[receivers]]\nname = "x"\nurl = "json://h/"\n')
    file.chmod(0o600)
    words = ["collector", "--data", str(tmp_path / "data"), "--receivers", str(file)]
    monkeypatch.setenv("VITALS_COLLECTOR_WEBHOOK", "http://127.0.0.1:1/ http://127.0.0.1:2/")
    for url, names in (("", ["webhook", "webhook-2", "x"]), ("http://h/", None)):
        monkeypatch.setenv("VITALS_COLLECTOR_ALERTMANAGER", url)
        assert 0 == CliRunner().invoke(app, words).exit_code
        settings: NotifierSettings = started[-1].notifiers
        assert "http://v" == settings.links.public_url
        with Served(started[-1]) as served:
            running = served.app.state.acting.dispatcher.notifiers
            assert ["log", *(names or ["alertmanager"])] == [n.name for n in running]


@pytest.mark.parametrize("option", ["--webhook", "--alertmanager", "--remote-write"])
def test_an_address_on_the_command_line_is_refused_with_the_way_that_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
):
    started: list[CollectorSettings] = []
    monkeypatch.setattr(command, "_serve", lambda settings, *_, **__: started.append(settings))
    app = typer.Typer()
    command.register(app)
    words = ["collector", "--data", str(tmp_path / "data"), option, "http://user:s3cret@h/"]
    error = CliRunner().invoke(app, words).exception
    assert isinstance(error, UsageError)
    assert "VITALS_COLLECTOR_WEBHOOK" in error.hint and "--receivers" in error.hint
    assert "s3cret" not in str(error)
    assert [] == started


def test_a_page_of_a_collector_that_died_stays_at_the_alertmanager_for_a_day():
    """Alertmanager takes an alert for over once its ``endsAt`` has passed (its API, "alerts")."""
    clock = ManualClock()

    def ends(body: bytes) -> list[float]:
        posted = [datetime.fromisoformat(each["endsAt"]) for each in json.loads(body)]
        return [moment.timestamp() - clock.time_ns() / SECOND for moment in posted]

    with receiver() as server:
        url = f"http://127.0.0.1:{server.server_address[1]}"
        notifier = AlertmanagerNotifier(url, clock=clock)
        dispatcher = Dispatcher([notifier], clock=clock)
        dispatcher.submit(alert())
        run_for(dispatcher, clock, 600)
        num_posted = len(server.posted)
        assert 11 == num_posted
        clock.advance(23 * 3_600)  # it is dead: nothing more is posted
        assert all(end > 0 for end in ends(server.posted[-1][2]))
        dispatcher.submit(alert(state="resolved"))
        dispatcher.deliver_due()
        assert all(end < 0 for end in ends(server.posted[num_posted][2])), "its own word ends it"
        notifier.close()


AMTOOL = shutil.which("prometheus-alertmanager")


@pytest.fixture
def alertmanager(tmp_path: Path) -> Iterator[str]:
    if AMTOOL is None:
        pytest.skip("no prometheus-alertmanager binary on this machine")
    config = tmp_path / "am.yml"
    config.write_text("route: {receiver: none}\nreceivers: [{name: none}]\n")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    arguments = [
        AMTOOL,
        f"--config.file={config}",
        f"--storage.path={tmp_path / 'data'}",
        f"--web.listen-address={address}",
        "--cluster.listen-address=",
    ]
    with subprocess.Popen(arguments, stderr=subprocess.DEVNULL) as process:
        try:
            transport = httpx.HTTPTransport(retries=8)  # waits 0, 0.5, 1, 2 ... for the port
            with httpx.Client(transport=transport) as http:
                assert 200 == http.get(f"http://{address}/-/ready").status_code
            yield f"http://{address}"
        finally:
            process.terminate()
            process.wait(10)


@pytest.mark.servers
def test_a_real_alertmanager_takes_firing_and_resolved(alertmanager: str):
    clock = ManualClock(time_ns=time.time_ns())
    notifier = AlertmanagerNotifier(alertmanager, clock=clock)
    started = clock.time_ns() - 10 * SECOND
    hostile = {"rank": "1", "note": '<script>"\n{{ template }}', "empty": ""}
    firing = alert(started_unix_ns=started, labels=hostile)
    try:
        assert DELIVERED == notifier.notify([firing])
        with httpx.Client() as http:
            (shown,) = http.get(f"{alertmanager}/api/v2/alerts").json()
            assert {
                "alertname": "RunHalted",
                "run": RUN,
                "severity": "page",
                "rank": "1",
                "note": hostile["note"],
            } == shown["labels"]
            assert "out of budget" == shown["annotations"]["summary"]
            ended = msgspec.structs.replace(
                firing, state="resolved", ended_unix_ns=clock.time_ns() - SECOND
            )
            assert DELIVERED == notifier.notify([ended])
            assert [] == http.get(f"{alertmanager}/api/v2/alerts").json()
    finally:
        notifier.close()


@pytest.mark.servers
def test_a_real_alertmanager_keeps_a_page_whose_collector_is_gone_for_as_long_as_it_was_told(
    alertmanager: str,
):
    """Two collectors die at once; one had asked for two seconds, the other for the usual day."""

    def active() -> set[str]:
        with httpx.Client() as http:
            shown = http.get(f"{alertmanager}/api/v2/alerts").json()
        return {each["labels"]["alertname"] for each in shown}

    clock = SystemClock()
    for name, hold in (("Brief", {"hold_seconds": 2.0}), ("Usual", {})):
        notifier = AlertmanagerNotifier(alertmanager, clock=clock, **hold)
        assert DELIVERED == notifier.notify([alert(name=name, started_unix_ns=clock.time_ns())])
        notifier.close()
    assert {"Brief", "Usual"} == active()
    deadline = time.monotonic() + 60.0
    while "Brief" in active():
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert {"Usual"} == active()


@pytest.mark.parametrize(
    "url",
    [
        "https://user:pa/ss@host/x",
        "https://user:pa?ss@host/x",
        "https://user:pa#ss@host/x",
        "https://user:pa\\ss@host/x",
        "https://user:p@ss@host/x",
        "https://host?pa=ss",
        "https://host#pa-ss",
        "https://host/pa/ss",
        "user:pass@host",
        "slack://pa/ss/x",
        "tgram://1:pass/2",
    ],
)
def test_a_shown_address_has_no_part_of_a_password_wherever_marks_are(url: str):
    assert "pa" not in redacted(url) and "ss" not in redacted(url)


def test_the_refusal_of_an_address_has_no_part_of_its_password():
    with pytest.raises(ConfigError) as caught:
        check_url("https://user:pa/ss@host")
    assert "'https://...'" in str(caught.value)
    assert ":pa" not in str(caught.value) and "'pa'" not in str(caught.value)


def test_a_shown_address_says_whose_it_is():
    assert "https://host:8443" == redacted("https://user:pass@host:8443/x?y#z")
