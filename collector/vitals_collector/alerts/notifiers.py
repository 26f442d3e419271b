"""Destinations of alerts: notifiers with one method that returns a ``DeliveryResult``.

URLs come from the local configuration or the command line only, never from the network; the address
of a host name is checked at each delivery and redirects are not followed, so no receiver can direct
the collector at its own network. All but the log run in ``worker``'s process.

The webhook's body, documented and versioned::

    {"version": 1, "alerts": [AlertView and more, ...]}

AlertView is in ``trainvitals.views``; other fields are ``delivery_id``, ``ack_url`` if a link to
acknowledge is possible, and ``messages.details_of``.
"""

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import logging
import re
import socket
from collections.abc import Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import NamedTuple, Protocol
from urllib.parse import urlsplit

import httpx
import msgspec

from trainvitals.clock import Clock
from trainvitals.errors import ConfigError
from trainvitals.views import AlertView
from vitals_collector.alerts.messages import AlertLinks, alert_details

WEBHOOK_VERSION = 1
UNREADABLE = 3
"""Exit code of ``apprise_notifier`` if apprise cannot parse a URL."""
_LOG = logging.getLogger("vitals.collector.notify")
_METADATA = frozenset(
    ipaddress.ip_address(a) for a in ("169.254.169.254", "100.100.100.200", "fd00:ec2::254")
)


class DeliveryResult(NamedTuple):
    """Result of one delivery; an empty ``error`` is success."""

    recoverable: bool
    """False if the receiver refused rather than was unavailable: an operator has to fix it."""
    error: str
    retry_after: float = 0.0
    """Pause in seconds that the receiver requested."""


DELIVERED = DeliveryResult(recoverable=False, error="")


class Notifier(Protocol):
    """One destination of alerts.

    For a receiver with its own process, the dispatcher reads ``reposts``, ``takes_log`` and the
    optional ``one_by_one`` from ``worker.WorkerNotifier``, not from the class that posts.
    """

    name: str
    reposts: bool
    """Whether firing alerts are posted again at every interval."""
    takes_log: bool
    """Whether alerts of severity ``log`` are for it too."""

    def notify(self, alerts: Sequence[AlertView]) -> DeliveryResult:
        """Deliver the alerts; never raises for errors of the receiver."""
        ...


def delivery_id(alert: AlertView, receiver: str) -> str:
    """Return the id of a state's delivery to a receiver: the same for every try, by any process."""
    text = f"{alert.fingerprint}/{alert.started_unix_ns}/{alert.state}/{receiver}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class LogNotifier:
    """Writes one line for each change."""

    name = "log"
    reposts = False
    takes_log = True

    def notify(self, alerts: Sequence[AlertView]) -> DeliveryResult:
        """Log each alert: a page as an error, the rest as warning or information."""
        levels = {"page": logging.ERROR, "notify": logging.WARNING, "log": logging.INFO}
        for a in alerts:
            _LOG.log(
                levels[a.severity],
                "alert %s %s run=%s step=%d severity=%s: %s",
                a.name, a.state, a.run_id, a.step, a.severity, a.summary,
            )  # fmt: skip
        return DELIVERED


class WebhookNotifier:
    """Posts alerts as JSON to one address from the local configuration.

    With a secret, ``Vitals-Signature: t=SECONDS,v1=HEX`` is the HMAC-SHA256 of ``SECONDS.BODY``:
    the receiver can verify the sender and the time.
    """

    reposts = False
    takes_log = False

    def __init__(
        self,
        url: str,
        *,
        clock: Clock,
        name: str = "webhook",
        secret: str = "",
        links: AlertLinks | None = None,
        timeout: float = 10.0,
    ) -> None:
        self.name = name
        self._links = links or AlertLinks()
        self._url = check_url(url)
        self._clock = clock
        self._secret = secret
        self._client = _build_client(timeout)
        self.ack_links: dict[str, str] = {}

    def notify(self, alerts: Sequence[AlertView]) -> DeliveryResult:
        """POST ``{"version": 1, "alerts": [...]}`` to the webhook."""
        ids = [delivery_id(alert, self.name) for alert in alerts]
        views = [self._webhook_body(a, i) for a, i in zip(alerts, ids, strict=True)]
        body = msgspec.json.encode({"version": WEBHOOK_VERSION, "alerts": views})
        headers = {"Vitals-Delivery-Id": ",".join(ids)}
        if self._secret:
            time = str(self._clock.time_ns() // 10**9)
            headers["Vitals-Signature"] = f"t={time},v1={sign_webhook(self._secret, time, body)}"
        return _post(self._client, self._url, body, headers)

    def _webhook_body(self, alert: AlertView, delivery: str) -> dict[str, object]:
        """Return an alert as the webhook gets it, with its delivery's id and link."""
        link = self.ack_links.get(alert.fingerprint, "")
        extra = {"delivery_id": delivery} | ({"ack_url": link} if link else {})
        return {**msgspec.to_builtins(alert), **alert_details(alert, self._links), **extra}

    def close(self) -> None:
        """Close persistent connections to the webhook."""
        self._client.close()


def sign_webhook(secret: str, time: str, body: bytes) -> str:
    """Return the signature of alerts in a webhook's body, sent at ``time``."""
    return hmac.new(secret.encode(), time.encode() + b"." + body, hashlib.sha256).hexdigest()


class AlertmanagerNotifier:
    """Posts alerts to an Alertmanager (API v2), which then alone routes, groups and inhibits."""

    name = "alertmanager"
    reposts = True
    takes_log = False

    def __init__(
        self,
        url: str,
        *,
        clock: Clock,
        links: AlertLinks | None = None,
        hold_seconds: float = 86_400.0,
        timeout: float = 10.0,
    ) -> None:
        self._url = check_url(url).rstrip("/") + "/api/v2/alerts"
        self._links = links or AlertLinks()
        self._client = _build_client(timeout)
        self._clock = clock
        self._hold_ns = int(hold_seconds * 1e9)

    def notify(self, alerts: Sequence[AlertView]) -> DeliveryResult:
        """POST the alerts; one that fires ends ``hold_seconds`` from now unless posted again.

        That is long: an end is posted explicitly, and a collector that died must not resolve a
        page.
        """
        until = self._clock.time_ns() + self._hold_ns
        posted = [
            _alertmanager_alert(a, until, alert_details(a, self._links))
            for a in alerts
            if a.state != "pending"
        ]
        return (
            _post(self._client, self._url, msgspec.json.encode(posted), {}) if posted else DELIVERED
        )

    def close(self) -> None:
        """Close persistent connections to the Alertmanager."""
        self._client.close()


def _alertmanager_alert(
    alert: AlertView, until_unix_ns: int, details: dict[str, str]
) -> dict[str, object]:
    """Return an alert as Alertmanager's API accepts it."""
    ended = alert.ended_unix_ns if alert.state == "resolved" else None
    labels = {"alertname": alert.name, "run": alert.run_id, "severity": alert.severity}
    step = {"step": str(alert.step)} if alert.step >= 0 else {}
    # The source link on Alertmanager's pages and in its messages.
    source = {"generatorURL": details["dashboard_url"]} if "dashboard_url" in details else {}
    return {
        "labels": {k: v for k, v in {**alert.labels, **labels}.items() if v},
        "annotations": {"summary": alert.summary, **details, **step},
        "startsAt": _alertmanager_time(alert.started_unix_ns),
        "endsAt": _alertmanager_time(until_unix_ns if ended is None else ended),
        **source,
    }


def _alertmanager_time(unix_ns: int) -> str:
    return datetime.fromtimestamp(unix_ns / 1e9, tz=UTC).isoformat(timespec="milliseconds")


# ---------------------------------------------------------------------------------- addresses


def check_url(url: str) -> str:
    """Return ``url`` if alerts may be posted there.

    Raises:
        ConfigError: not http(s), no host, or an address that is never a receiver.
    """
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:  # its message may contain a part of a password
        raise ConfigError(
            f"notifier URL {redacted(url)!r} is not a valid URL",
            hint="in a user or a password, write / ? # @ and : as %2F %3F %23 %40 and %3A",
        ) from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"notifier address {redacted(url)!r} must be http://HOST/... or https://HOST/..."
        )
    with contextlib.suppress(ValueError):  # a host name is resolved when it is used
        refuse_address(str(ipaddress.ip_address(parts.hostname)))
    return url


def redacted(url: str) -> str:
    """Return ``url`` without user, password, path and query, which may be secret.

    For schemes other than http(s) only the scheme: the host may be a token.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        return "..."
    if scheme.lower() not in ("http", "https"):
        return f"{scheme}://..."
    authority, *others = re.split(r"[/?#\\]", rest, maxsplit=1)
    if "@" in "".join(others):  # a password may contain "@": its end is ambiguous
        return f"{scheme}://..."
    return f"{scheme}://{authority.rpartition('@')[2]}"


def refuse_address(text: str) -> None:
    """Raise ConfigError for an address that no receiver has: link-local or metadata."""
    address = ipaddress.ip_address(text.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None) or address
    if (
        mapped in _METADATA
        or mapped.is_link_local
        or mapped.is_multicast
        or mapped.is_unspecified
        or (mapped.is_reserved and not mapped.is_loopback)
    ):
        raise ConfigError(f"the address leads to {text}: link-local and metadata are refused")


def _resolve_allowed_addresses(request: httpx.Request) -> list[str]:
    """Resolve a receiver's host and return its addresses, without forbidden ones.

    Raises:
        ConfigError: one is.
        httpx.ConnectError: it has none.
    """
    host = request.url.host
    try:
        infos = socket.getaddrinfo(host, request.url.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise httpx.ConnectError(f"{host}: {error}", request=request) from error
    addresses = list(dict.fromkeys(str(info[4][0]) for info in infos))
    for address in addresses:
        refuse_address(address)
    # The Host header is already set from the name; certificates are checked against it too.
    request.extensions = {**request.extensions, "sni_hostname": host}
    return addresses


class _PinnedTransport(httpx.HTTPTransport):
    """Connects to the very address that was checked, so that a name cannot change in between."""

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send an alert to the first checked address that accepts it."""
        *others, last = _resolve_allowed_addresses(request)
        for address in others:
            request.url = request.url.copy_with(host=address)
            with contextlib.suppress(httpx.ConnectError):
                return super().handle_request(request)
        request.url = request.url.copy_with(host=last)
        return super().handle_request(request)


class AsyncPinnedTransport(httpx.AsyncHTTPTransport):
    """Async transport that connects to the checked address, for pushes of run metrics."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request to the first of a receiver's checked addresses that accepts it."""
        *others, last = await asyncio.to_thread(_resolve_allowed_addresses, request)
        for address in others:
            request.url = request.url.copy_with(host=address)
            with contextlib.suppress(httpx.ConnectError):
                return await super().handle_async_request(request)
        request.url = request.url.copy_with(host=last)
        return await super().handle_async_request(request)


def _build_client(timeout: float) -> httpx.Client:
    """Return the HTTP client for a receiver: checked addresses, no redirects."""
    return httpx.Client(transport=_PinnedTransport(), timeout=timeout, follow_redirects=False)


def _post(client: httpx.Client, url: str, body: bytes, headers: dict[str, str]) -> DeliveryResult:
    """POST a body to a receiver; return whether it accepted the alerts."""
    headers = {"Content-Type": "application/json", **headers}
    try:
        # The response's body is never read: a receiver cannot fill our memory.
        with client.stream("POST", url, content=body, headers=headers) as answer:
            status, retry_after = answer.status_code, answer.headers.get("Retry-After", "")
    except httpx.HTTPError as error:
        return DeliveryResult(
            recoverable=True, error=f"{redacted(url)}: {type(error).__name__}: {error}"
        )
    except ConfigError as error:
        return DeliveryResult(recoverable=False, error=error.text)
    if 200 <= status < 300:
        return DELIVERED
    return DeliveryResult(
        recoverable=status >= 500 or status in (408, 429),
        error=f"{redacted(url)} answered {status}",
        retry_after=_parse_retry_after(retry_after),
    )


def _parse_retry_after(retry_after: str) -> float:
    """Return the seconds of a receiver's ``Retry-After``, which may be a date; 0 without one."""
    try:
        if retry_after.isascii() and retry_after.isdigit():
            return float(retry_after)
        moment = parsedate_to_datetime(retry_after)
        return max(0.0, (moment - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):
        return 0.0
