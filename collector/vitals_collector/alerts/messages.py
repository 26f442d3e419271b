"""Text of an alert's message: what happened, what Vitals did, what to do, and links."""

from typing import NamedTuple
from urllib.parse import quote

import msgspec

from trainvitals.alerting import ALERTS_BY_NAME, RUNBOOK
from trainvitals.views import AlertView

_PREFIXES = {"page": "Page", "notify": "Notice", "log": "Info"}


class AlertLinks(msgspec.Struct, frozen=True, kw_only=True):
    """Targets of the links in messages."""

    public_url: str = ""
    """The dashboard's URL for users; "" links no run."""
    collector_url: str = ""
    """The collector's URL for users; "" offers no link to acknowledge."""
    runbook_url: str = RUNBOOK
    """URL of the runbook."""


class AlertMessage(NamedTuple):
    """A title of one line, and a body of a few."""

    title: str
    body: str


def alert_details(alert: AlertView, links: AlertLinks) -> dict[str, str]:
    """Return the fields of an alert for receivers that are programs; empty ones are omitted.

    The names are a promise: those of a webhook's body and of Alertmanager's annotations.
    """
    details: dict[str, str] = {}
    spec = ALERTS_BY_NAME.get(alert.name)
    if spec is not None:
        details["description"] = spec.help
        details["action_taken"] = f"Vitals {spec.did}"
        # A command that can be pasted: a user on call need not look up the id.
        details["to_do"] = spec.to_do.replace(" RUN", f" {alert.run_id or 'RUN'}")
        details["runbook_url"] = f"{links.runbook_url}#{alert.name.lower()}"
    if links.public_url and alert.run_id:
        details["dashboard_url"] = f"{links.public_url}/?run={quote(alert.run_id, safe='')}"
    return details


def build_alert_message(alert: AlertView, links: AlertLinks, ack_link: str = "") -> AlertMessage:
    """Return the message about an alert for a receiver: title and body."""
    is_over = alert.state == "resolved"
    prefix = "Resolved" if is_over else _PREFIXES[alert.severity]
    run = f" (run {alert.run_id})" if alert.run_id else ""
    details = alert_details(alert, links)
    lines = [f"It is over. It was: {alert.summary}" if is_over else alert.summary]
    if "to_do" in details and not is_over:
        lines += [details["description"], details["action_taken"], f"To do: {details['to_do']}"]
    if alert.step >= 0:
        lines.append(f"Step: {alert.step}")
    if "runbook_url" in details:
        lines.append(f"Runbook: {details['runbook_url']}")
    if "dashboard_url" in details:
        lines.append(f"Run: {details['dashboard_url']}")
    if ack_link:
        lines.append(f"Acknowledge: {ack_link}")
    return AlertMessage(f"{prefix}: {alert.title}{run}", "\n".join(lines))
