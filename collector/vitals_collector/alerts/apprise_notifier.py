"""Sends alerts as messages with apprise: Slack, e-mail, PagerDuty, Teams and many more.

Imported only in ``worker``'s process. Apprise returns only success or failure; the reason is in its
log, of which only the HTTP status is repeated: the rest may contain a URL. It follows no redirect;
its libraries resolve names, so addresses are not checked as those of our own webhook are.
"""

import logging
import re
import sys
from collections.abc import Sequence

import apprise

from trainvitals.views import AlertView
from vitals_collector.alerts.messages import AlertLinks, build_alert_message
from vitals_collector.alerts.notifiers import (
    DELIVERED,
    UNREADABLE,
    DeliveryResult,
    delivery_id,
    redacted,
)

_TYPES = {
    "page": apprise.NotifyType.FAILURE,
    "notify": apprise.NotifyType.WARNING,
    "log": apprise.NotifyType.INFO,
}


class AppriseNotifier:
    """Sends each alert as one message to one address."""

    reposts = False
    takes_log = False

    def __init__(self, url: str, *, name: str, links: AlertLinks) -> None:
        self.name = name
        self._url = url
        self._links = links
        self.ack_links: dict[str, str] = {}

    def notify(self, alerts: Sequence[AlertView]) -> DeliveryResult:
        """Send one message per alert through apprise, until one fails."""
        for alert in alerts:
            service = apprise.Apprise(asset=apprise.AppriseAsset(http_redirects=False))
            if not service.add(_address_for(self._url, alert)):
                scheme = redacted(self._url).partition(":")[0]
                error = f"apprise cannot read its {scheme}:// address"
                return DeliveryResult(recoverable=False, error=error)
            message = build_alert_message(
                alert, self._links, self.ack_links.get(alert.fingerprint, "")
            )
            is_over = alert.state == "resolved"
            kind = apprise.NotifyType.SUCCESS if is_over else _TYPES[alert.severity]
            body = f"{message.body}\nDelivery: {delivery_id(alert, self.name)}"
            with apprise.LogCapture(level=logging.WARNING) as log:  # type: ignore[no-untyped-call]
                is_sent = service.notify(
                    title=_without_mentions(message.title),
                    body=_without_mentions(body),
                    notify_type=kind,
                    body_format=_format_for(service),
                )
                log_text = log.getvalue()
            if not is_sent:
                return _failure_result(log_text)
        return DELIVERED


def _address_for(url: str, alert: AlertView) -> str:
    """Return the receiver's URL with this alert's identity, for services that use one.

    For PagerDuty every message is a new incident, even the end of an alert, unless it names the
    incident.
    """
    if not url.startswith("pagerduty://") or re.search("[?&](action|dedup)=", url):
        return url
    return f"{url}{'&' if '?' in url else '?'}action=map&dedup={alert.fingerprint}"


def _format_for(service: apprise.Apprise) -> apprise.NotifyFormat | None:
    """Return the format of an alert's message: text, with line breaks kept and "<" escaped.

    Telegram permanently refuses a message in which "<" does not start one of its tags. A service
    that takes only Markdown gets the body unchanged: escapes would break its links.
    """
    is_markdown = all(s.notify_format == apprise.NotifyFormat.MARKDOWN for s in service)
    return None if is_markdown else apprise.NotifyFormat.TEXT


def _without_mentions(text: str) -> str:
    """Return an alert's text without mentions of a whole channel: it may come from a run."""
    return re.sub("@(?=everyone|here|channel)", "@\u200b", text)


def _failure_result(text: str) -> DeliveryResult:
    """Return the result of a failed delivery from the lines that apprise logged."""
    status = re.search(r"error\s*=\s*(\d{3})\b", text)
    if status is None:
        return DeliveryResult(recoverable=True, error="the message was not taken")
    code = int(status[1])
    is_refusal = 400 <= code < 500 and code not in (408, 429)
    return DeliveryResult(
        recoverable=not is_refusal, error=f"the message was not taken: status {code}"
    )


def main() -> None:
    """Exit with ``UNREADABLE`` if apprise cannot parse a receiver's URL on standard input."""
    if not apprise.Apprise().add(sys.stdin.read()):
        sys.exit(UNREADABLE)


if __name__ == "__main__":
    main()
