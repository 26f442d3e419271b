"""What the launcher tells the Streamlit process: one private file, its path in the environment.

No secret is ever an argument or an environment value; both can be read by others of the machine.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from trainvitals.errors import UNREADABLE, UsageError
from trainvitals.io.client import CollectorAddress, Tokens, read_tokens, url_in

SETTINGS_VARIABLE = "VITALS_DASHBOARD_SETTINGS"


class DashboardSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the pages need to know."""

    door_token: str
    """Who shows this may read; made anew by every ``vitals dashboard``."""
    collector_url: str
    token_file: str
    """Json file of the collector's tokens; re-read, so that a new token needs no restart."""
    collector_data: str = ""
    """The collector's data folder, which has its present address; "" for a fixed address."""
    of_folder: bool = False
    """The collector is this dashboard's own, over a folder, and its store a temporary one."""

    def collector(self) -> CollectorAddress:
        """Return where the collector is now, and the tokens in force; none without a file.

        One that was started again may have another port.
        """
        present = url_in(Path(self.collector_data)) if self.collector_data else ""
        tokens = read_tokens(self.token_file) if self.token_file else Tokens()
        return CollectorAddress(url=present or self.collector_url, tokens=tokens)


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
