"""An alert in the words of a message: what happened, what Vitals did, what to do, and where."""

from typing import NamedTuple

import msgspec

from trainvitals.alerting import ALERTS
from trainvitals.views import AlertView

RUNBOOK = "docs/RUNBOOK.md"
"""Where the runbook lies in this project; each alert has a section of its name."""
_SPECS = {spec.name: spec for spec in ALERTS}
_PREFIXES = {"page": "Page", "notify": "Notice", "log": "Info"}


class Links(msgspec.Struct, frozen=True, kw_only=True):
    """Where messages lead."""

    public_url: str = ""
    """The dashboard's address for people; "" links no run."""
    collector_url: str = ""
    """The collector's address for people; "" offers no link to acknowledge."""
    runbook_url: str = RUNBOOK
    """Where the runbook is published."""


class Message(NamedTuple):
    """A title of one line, and a body of a few."""

    title: str
    body: str


def message_of(alert: AlertView, links: Links, ack_link: str = "") -> Message:
    """Return the alert's message."""
    prefix = "Resolved" if alert.state == "resolved" else _PREFIXES[alert.severity]
    run = f" (run {alert.run_id})" if alert.run_id else ""
    lines = [alert.summary]
    spec = _SPECS.get(alert.name)
    if spec is not None and alert.state != "resolved":
        lines += [f"Vitals: {spec.did}", f"To do: {spec.help}"]
    if alert.step >= 0:
        lines.append(f"Step: {alert.step}")
    if spec is not None:
        lines.append(f"Runbook: {links.runbook_url}#{alert.name.lower()}")
    if links.public_url and alert.run_id:
        lines.append(f"Run: {links.public_url}/?run={alert.run_id}")
    if ack_link:
        lines.append(f"Acknowledge: {ack_link}")
    return Message(f"{prefix}: {alert.title}{run}", "\n".join(lines))


__all__ = ["Links", "Message", "message_of"]
