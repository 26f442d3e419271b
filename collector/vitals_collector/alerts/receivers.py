"""Settings of the receivers of alerts, from the environment and from a file.

Never from a command line, which every user of the machine can read: URLs are secrets. For the same
reason no other user may be able to read the file::

    public_url = "https://vitals.example"     # the dashboard: messages link the run's page
    collector_url = "https://collector.example"     # the collector: messages link to acknowledge
    runbook_url = "https://wiki.example/RUNBOOK"

    [[receivers]]
    name = "team"
    url = "slack://TOKEN_A/TOKEN_B/TOKEN_C/#training"     # any address that apprise knows

    [[receivers]]
    name = "manager"
    env = "MANAGER_ADDRESS"     # the address is in this variable
    after_minutes = 15          # only pages that nobody acknowledged for so long

    [[receivers]]
    name = "own"
    kind = "webhook"
    url = "https://hooks.example/vitals"
    secret = "..."              # signs the bodies

    [remote_write]
    url = "https://user:password@prometheus.example/api/v1/write"     # or env
"""

import importlib.util
import os
import stat
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from trainvitals.alerting import RUNBOOK
from trainvitals.errors import ConfigError
from vitals_collector.alerts.messages import AlertLinks
from vitals_collector.alerts.notifiers import UNREADABLE, check_url, redacted


class ReceiverSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One receiver."""

    name: str
    """Its name in the log, in /metrics and in deliveries' ids."""
    kind: Literal["apprise", "webhook", "alertmanager"] = "apprise"
    """How alerts are sent: by apprise, as our own JSON, or to an Alertmanager."""
    url: str = ""
    """Its address: a secret."""
    env: str = ""
    """The environment variable that holds the address, instead of ``url``."""
    secret: str = ""
    """Key of the signatures of a webhook's bodies; "" signs none."""
    after_minutes: float = 0.0
    """It gets only pages that were not acknowledged for this long; 0 sends it everything at
    once."""

    def __repr__(self) -> str:
        """Return the name of the receiver, without secrets."""
        return f"ReceiverSettings({self.kind} {self.name!r} at {redacted(self.url)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class NotifierSettings:
    """Destinations of alerts, in addition to the log."""

    receivers: tuple[ReceiverSettings, ...] = ()
    """The receivers. With an Alertmanager among them, it alone routes."""
    links: AlertLinks = field(default_factory=AlertLinks)
    """Targets of the links in messages."""
    remote_write: str = field(default="", repr=False)
    """URL for pushes of run metrics, also a secret; "" pushes nothing."""


class _RemoteWrite(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Table ``[remote_write]`` of the file of receivers."""

    url: str = ""
    env: str = ""


class _NotifierFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of the TOML file of receivers."""

    public_url: str = ""
    collector_url: str = ""
    runbook_url: str = RUNBOOK
    receivers: tuple[ReceiverSettings, ...] = ()
    remote_write: _RemoteWrite = _RemoteWrite()


def load_notifier_settings(file: Path | None) -> NotifierSettings:
    """Return the receivers' addresses of the environment and of the file together.

    Raises:
        ConfigError: an address, a name or the file is wrong, or others may read the file.
    """
    return notifier_settings(
        webhooks=os.environ.get("VITALS_COLLECTOR_WEBHOOK", "").split(),
        alertmanager=os.environ.get("VITALS_COLLECTOR_ALERTMANAGER", ""),
        remote_write=os.environ.get("VITALS_REMOTE_WRITE", ""),
        file=file,
    )


def notifier_settings(
    *,
    webhooks: Sequence[str] = (),
    alertmanager: str = "",
    remote_write: str = "",
    file: Path | None = None,
) -> NotifierSettings:
    """Return these addresses of receivers and those of the file together.

    Raises:
        ConfigError: an address, a name or the file is wrong, or others may read the file.
    """
    content = _NotifierFile() if file is None else _read_settings_file(file)
    receivers = [
        ReceiverSettings(name="webhook" if i == 0 else f"webhook-{i + 1}", kind="webhook", url=url)
        for i, url in enumerate(webhooks)
    ]
    receivers += [_resolve_receiver(receiver) for receiver in content.receivers]
    if alertmanager:
        url = alertmanager
        receivers.append(ReceiverSettings(name="alertmanager", kind="alertmanager", url=url))
    names = [receiver.name for receiver in receivers]
    for receiver in receivers:
        _check_receiver(receiver, names)
    for url in filter(None, (content.public_url, content.collector_url)):
        check_url(url)
    links = AlertLinks(
        public_url=content.public_url.rstrip("/"),
        collector_url=content.collector_url.rstrip("/"),
        runbook_url=content.runbook_url,
    )
    stored = content.remote_write
    pushed_to = remote_write or _resolve_url("remote_write", stored.url, stored.env)
    return NotifierSettings(receivers=tuple(receivers), links=links, remote_write=pushed_to)


def _read_settings_file(file: Path) -> _NotifierFile:
    """Read the TOML file of receivers, which others must not be able to read."""
    try:
        mode = file.stat().st_mode
        content = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}", hint="give --receivers FILE") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(
            f"{file} has mode {stat.S_IMODE(mode):04o}, so others can read the addresses in it",
            hint=f"chmod 600 {file}",
        )
    try:
        return msgspec.convert(tomllib.loads(content.decode()), _NotifierFile)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{file} is not valid TOML: {type(error).__name__}") from None
    except msgspec.ValidationError as error:
        raise ConfigError(f"{file}: {error}", hint="see docs/guides/alerts.md") from None


def _resolve_receiver(receiver: ReceiverSettings) -> ReceiverSettings:
    """Return the receiver with its URL from the environment, if it names a variable."""
    url = _resolve_url(f"receiver {receiver.name!r}", receiver.url, receiver.env)
    return msgspec.structs.replace(receiver, url=url, env="")


def _resolve_url(owner: str, url: str, env: str) -> str:
    """Return a receiver's configured URL, or the value of its variable."""
    if not env:
        return url
    if url or not os.environ.get(env):
        raise ConfigError(
            f"{owner}: env is {env!r}; it must name a variable that is set, and url must not be "
            "set as well"
        )
    return os.environ[env]


def _check_receiver(receiver: ReceiverSettings, names: list[str]) -> None:
    name = receiver.name
    if not 0 < len(name) <= 64 or not name.isprintable() or name == "log" or names.count(name) > 1:
        raise ConfigError(
            f"a receiver is called {name[:64]!r}; each needs a name of its own, of 1 to 64 "
            "printable characters and not 'log'"
        )
    if not 0 <= receiver.after_minutes <= 7 * 24 * 60:
        raise ConfigError(
            f"receiver {name!r}: after_minutes is {receiver.after_minutes}; it must be 0 to 10080"
        )
    if receiver.secret and receiver.kind != "webhook":
        raise ConfigError(
            f"receiver {name!r} has a secret, and its kind is {receiver.kind}: only webhooks' "
            "bodies are signed",
            hint='give it kind = "webhook", or no secret',
        )
    if receiver.kind != "apprise":
        check_url(receiver.url)
    else:
        _check_apprise(receiver)


def _check_apprise(receiver: ReceiverSettings) -> None:
    """Raise a receiver's errors now that would otherwise appear only at the first page."""
    name = receiver.name
    if "://" not in receiver.url:
        raise ConfigError(f"receiver {name!r} has no address such as slack://... in url or env")
    if importlib.util.find_spec("apprise") is None:
        raise ConfigError(
            f"receiver {name!r} needs apprise, which is not installed",
            hint="pip install 'trainvitals[notify]'",
        )
    # In a separate process: apprise takes 40 MB, and its output may contain the URL.
    module = "vitals_collector.alerts.apprise_notifier"
    process = subprocess.run(
        [sys.executable, "-P", "-m", module], input=receiver.url.encode(), capture_output=True
    )
    if process.returncode == UNREADABLE:
        raise ConfigError(
            f"receiver {name!r}: apprise cannot read its address {redacted(receiver.url)}",
            hint='`kind = "webhook"` is for an address of your own',
        )
