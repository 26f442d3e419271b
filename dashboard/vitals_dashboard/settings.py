"""What the launcher tells the Streamlit process: one private file, its path in the environment.

No secret is ever an argument or an environment value; both can be read by others of the machine.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from trainvitals.errors import UNREADABLE, UsageError
from trainvitals.io.client import Tokens, read_tokens

SETTINGS_VARIABLE = "VITALS_DASHBOARD_SETTINGS"


class CollectorFile(msgspec.Struct, frozen=True):
    """The part of ``collector.json`` that is read here."""

    url: str
    pid: int = 0


def read_collector_file(path: Path) -> CollectorFile | None:
    """Return where a collector says it is, or None where it has not said so yet."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=CollectorFile)
    except (OSError, *UNREADABLE):
        return None


class DashboardSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the pages need to know."""

    door_token: str
    """Who shows this may read; made anew by every ``vitals dashboard``."""
    collector_url: str
    token_file: str
    """Json file of the collector's tokens; re-read, so that a new token needs no restart."""
    collector_file: str = ""
    """``collector.json``, where the collector's present address is; "" for a fixed address."""
    of_folder: bool = False
    """The collector is this dashboard's own, over a folder, and its store a temporary one."""

    def url(self) -> str:
        """Return the collector's present address: a restarted one may have another port."""
        place = read_collector_file(Path(self.collector_file)) if self.collector_file else None
        return place.url if place else self.collector_url

    def tokens(self) -> Tokens:
        """Return the tokens in force; none where no file was given."""
        return read_tokens(self.token_file) if self.token_file else Tokens()


def write_settings(settings: DashboardSettings, path: Path) -> None:
    """Write the file so that nobody else can read it; it must not exist yet."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(msgspec.json.encode(settings))


def load_settings(environ: Mapping[str, str]) -> DashboardSettings:
    """Return the settings of the file that the environment names.

    Raises:
        UsageError: there is none, so the app was not started by ``vitals dashboard``.
    """
    path = environ.get(SETTINGS_VARIABLE, "")
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=DashboardSettings)
    except (OSError, *UNREADABLE):
        raise UsageError(
            f"{SETTINGS_VARIABLE} is {path!r}; it must name the settings file of a dashboard",
            hint="start it with `vitals dashboard`, not with `streamlit run`",
        ) from None
