"""One process per receiver that makes the calls, so that a hanging one can be killed.

The collector writes requests to its standard input and reads responses, one JSON line each; the
receiver's URL is sent that way too, never on the command line. The process starts when it is first
needed, ends after a long idle time, and ends at once when the collector does: its input closes.
"""

import contextlib
import logging
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Protocol, runtime_checkable

import msgspec

from trainvitals.clock import SystemClock
from trainvitals.errors import StorageError
from trainvitals.views import AlertView
from vitals_collector.alerts.messages import AlertLinks
from vitals_collector.alerts.notifiers import (
    AlertmanagerNotifier,
    DeliveryResult,
    LogNotifier,
    Notifier,
    WebhookNotifier,
)
from vitals_collector.alerts.receivers import NotifierSettings, ReceiverSettings

DEADLINE_SECONDS = 30.0
"""Longest time of one delivery, all in all."""
_IDLE_SECONDS = 600.0
_LOG = logging.getLogger("vitals.collector.notify")


class _DeliveryRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Alerts that the separate process of a receiver must deliver."""

    receiver: ReceiverSettings
    links: AlertLinks
    ack_links: dict[str, str]
    alerts: tuple[AlertView, ...]


@runtime_checkable
class AckLinkNotifier(Protocol):
    """A notifier whose messages contain links to acknowledge, by fingerprint."""

    ack_links: dict[str, str]


class WorkerNotifier:
    """Delivers to one receiver in a separate process, killed at the deadline."""

    takes_log = False

    def __init__(
        self,
        receiver: ReceiverSettings,
        *,
        links: AlertLinks | None = None,
        ack_link: Callable[[AlertView], str] | None = None,
        deadline_seconds: float = DEADLINE_SECONDS,
    ) -> None:
        self.name = receiver.name
        self.reposts = receiver.kind == "alertmanager"
        self.after_seconds = receiver.after_minutes * 60.0
        self.receiver = receiver
        self.one_by_one = receiver.kind == "apprise"
        self._links = links or AlertLinks()
        self._ack_link = ack_link
        self._deadline_seconds = deadline_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._is_late = False
        self._is_closed = False
        self._lock = threading.Lock()

    def _ack_links(self, alerts: Sequence[AlertView]) -> dict[str, str]:
        """Return the links to acknowledge; if the store accepts no writes now, pages have none."""
        try:
            return {a.fingerprint: self._ack_link(a) for a in alerts} if self._ack_link else {}
        except StorageError as error:
            _LOG.warning("sent without a link to acknowledge: %s", error)
            return {}

    def notify(self, alerts: Sequence[AlertView]) -> DeliveryResult:
        """Let the receiver's process deliver the alerts; return within the deadline."""
        ack_links = self._ack_links(alerts)
        request = _DeliveryRequest(
            receiver=self.receiver, links=self._links, ack_links=ack_links, alerts=tuple(alerts)
        )
        line = msgspec.json.encode(request) + b"\n"
        with self._lock:
            if self._is_closed:
                return DeliveryResult(recoverable=True, error="the collector is stopping")
            was_there = self._process is not None and self._process.poll() is None
            answer = self._send_request(line)
            if not answer and was_there and not self._is_late and not self._is_closed:
                answer = self._send_request(line)  # it ended for being idle just then
        if answer:
            return msgspec.json.decode(answer, type=DeliveryResult)
        if self._is_late:
            return DeliveryResult(
                recoverable=True, error=f"no answer in {self._deadline_seconds:g} s"
            )
        return DeliveryResult(recoverable=True, error="its process ended without an answer")

    def _send_request(self, line: bytes) -> bytes:
        """Return the response of the receiver's process; nothing if it has ended."""
        process = self._ensure_process()
        assert process.stdin is not None and process.stdout is not None
        self._is_late = False
        timer = threading.Timer(self._deadline_seconds, self._kill_late, (process,))
        timer.daemon = True
        timer.start()
        try:
            process.stdin.write(line)
            answer = process.stdout.readline()
        except OSError as error:
            _LOG.debug("receiver %s: %s", self.name, error)
            answer = b""
        finally:
            timer.cancel()
        if not answer.endswith(b"\n"):
            _kill_process(process)
            self._process = None
            return b""
        return answer

    def _ensure_process(self) -> subprocess.Popen[bytes]:
        """Return the receiver's running process, started if needed."""
        if self._process is not None and self._process.poll() is None:
            return self._process
        if self._process is not None:
            _kill_process(self._process)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "vitals_collector.alerts.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # a library's output may contain a URL with secrets
            bufsize=0,
            start_new_session=True,  # Ctrl-C is for the collector, which still has to deliver
        )
        return self._process

    def _kill_late(self, process: subprocess.Popen[bytes]) -> None:
        """Kill the receiver's process at the deadline of a delivery."""
        self._is_late = True
        process.kill()

    def close(self) -> None:
        """End the receiver's process, also within a delivery."""
        self._is_closed = True
        process = self._process
        if process is not None:
            process.kill()
        with self._lock:
            if self._process is not None:
                _kill_process(self._process)
                self._process = None


def _kill_process(process: subprocess.Popen[bytes]) -> None:
    """End a receiver's process and close its pipes."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # unwritten data is no longer needed
                pipe.close()


def build_notifiers(
    settings: NotifierSettings, *, ack_link: Callable[[AlertView], str] | None = None
) -> tuple[Notifier, ...]:
    """Return the notifiers of receivers in the settings; an Alertmanager, if any, routes alone."""
    routing = [r for r in settings.receivers if r.kind == "alertmanager"]
    receivers = routing or settings.receivers
    workers = [WorkerNotifier(r, links=settings.links, ack_link=ack_link) for r in receivers]
    return (LogNotifier(), *workers)


_MOST_AT_ONCE = 16
"""Receivers that are tested at once, each in a separate process."""


def send_test(
    settings: NotifierSettings, receiver: str, *, now_unix_ns: int
) -> list[tuple[str, DeliveryResult]]:
    """Send a test message to one receiver of alerts, or to all at once; return each result."""
    # Imported here, because it loads all detectors, and a page must not wait for that.
    from trainvitals.alerting import fingerprint

    alert = AlertView(
        fingerprint=fingerprint("TestMessage", {}),
        name="TestMessage",
        run_id="",
        severity="notify",
        state="firing",
        summary="This is a test of `vitals alerts test`. No action needed.",
        labels={},
        step=-1,
        started_unix_ns=now_unix_ns,
        updated_unix_ns=now_unix_ns,
    )

    def send(one: ReceiverSettings) -> tuple[str, DeliveryResult]:
        notifier = WorkerNotifier(one, links=settings.links)
        try:
            return one.name, notifier.notify([alert])
        finally:
            notifier.close()

    tested = [each for each in settings.receivers if receiver in ("", each.name)]
    with ThreadPoolExecutor(_MOST_AT_ONCE) as at_once:  # one that hangs delays no other
        return list(at_once.map(send, tested))


# --------------------------------------------------------------------------------- the process


def main() -> None:
    """Deliver alerts to one receiver until the collector closes the input."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # a library may print; the output is for responses only
    requests: queue.Queue[bytes] = queue.Queue()
    threading.Thread(target=_read_requests, args=(sys.stdin.buffer, requests), daemon=True).start()
    notifier: Notifier | None = None
    while True:
        try:
            request = msgspec.json.decode(
                requests.get(timeout=_IDLE_SECONDS), type=_DeliveryRequest
            )
        except queue.Empty:
            return
        if notifier is None:
            notifier = make_notifier(request.receiver, request.links)
        if isinstance(notifier, AckLinkNotifier):
            notifier.ack_links = request.ack_links
        answers.write(msgspec.json.encode(_notify_or_failure(notifier, request.alerts)) + b"\n")


def _read_requests(source: IO[bytes], requests: "queue.Queue[bytes]") -> None:
    """Queue the collector's requests; end this process when the input closes."""
    for line in source:
        requests.put(line)
    os._exit(0)  # the collector has ended, and a call may hang


def _notify_or_failure(notifier: Notifier, alerts: Sequence[AlertView]) -> DeliveryResult:
    """Deliver alerts in the receiver's process; an exception is a failed delivery."""
    try:
        return notifier.notify(alerts)
    except Exception as error:  # noqa: BLE001 - a library's fault is an answer; its text may hold an address
        return DeliveryResult(recoverable=False, error=f"it raised {type(error).__name__}")


def make_notifier(receiver: ReceiverSettings, links: AlertLinks) -> Notifier:
    """Return the notifier that posts alerts to the receiver."""
    if receiver.kind == "webhook":
        return WebhookNotifier(
            receiver.url,
            clock=SystemClock(),
            name=receiver.name,
            secret=receiver.secret,
            links=links,
        )
    if receiver.kind == "alertmanager":
        return AlertmanagerNotifier(receiver.url, clock=SystemClock(), links=links)
    from vitals_collector.alerts.apprise_notifier import AppriseNotifier

    return AppriseNotifier(receiver.url, name=receiver.name, links=links)


if __name__ == "__main__":
    main()
