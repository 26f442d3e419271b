"""Settings of the Streamlit process: one private file, its path in the environment.

No secret is ever an argument or an environment value; both can be read by others of the machine.
"""

import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import msgspec

from trainvitals.errors import UNREADABLE, UsageError
from trainvitals.io.client import CollectorAddress, CollectorTokens, read_tokens, url_in
from trainvitals.io.private import open_private
from vitals_dashboard.auth import LOOK_HOSTS, DashboardHosts

Role = Literal["", "look", "control"]
"""Role of a session; "" has no access."""

SETTINGS_VARIABLE = "VITALS_DASHBOARD_SETTINGS"


class SignOn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An OpenID Connect provider and its users' roles. Read from a TOML file of mode 0600."""

    server_metadata_url: str
    """The provider's ``.../.well-known/openid-configuration``."""
    client_id: str
    client_secret: str
    look: tuple[str, ...]
    """Values of the claim with read access; ``@example.org`` is every address of that domain."""
    control: tuple[str, ...] = ()
    """Values with control, if the dashboard was started with control."""
    claim: str = "email"
    """Compared claim: ``email``, which must be verified, or ``groups``, ``sub`` etc."""
    hours: float = 12.0
    """Users sign in again after this time."""

    def role(self, claims: Mapping[str, object], *, unix_seconds: float) -> Role:
        """Return the dashboard role of a signed-on user with these claims; "" has no access."""
        issued = claims.get("iat")
        if not isinstance(issued, int | float) or unix_seconds - issued > self.hours * 3600:
            return ""
        if self.claim == "email" and claims.get("email_verified") is not True:
            return ""
        value = claims.get(self.claim)
        values = [v for v in (value if isinstance(value, list) else [value]) if isinstance(v, str)]
        if self._is_listed(self.control, values):
            return "control"
        return "look" if self._is_listed(self.look, values) else ""

    def _is_listed(self, allowed: tuple[str, ...], values: list[str]) -> bool:
        """Return whether the sign-on file gives this role to a claim's values or e-mail domains."""
        if self.claim != "email":
            return not set(allowed).isdisjoint(values)
        lowered = {entry.lower() for entry in allowed}
        return any({v.lower(), "@" + v.lower().rpartition("@")[2]} & lowered for v in values)


def check_public_url(url: str) -> None:
    """Check the URL at which a proxy serves the dashboard's pages.

    Raises:
        UsageError: the URL is invalid or not encrypted.
    """
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname or "", parts.port
    except ValueError:
        host, parts = "", urlsplit("")
    # A name below .localhost needs no proxy: for trying it out.
    is_safe = parts.scheme == "https" or (parts.scheme == "http" and host.endswith(".localhost"))
    is_plain = not (parts.query or parts.fragment or parts.username or parts.password)
    if not host or host in LOOK_HOSTS or not is_plain or not is_safe:
        raise UsageError(
            f"--public-url is {url!r}; it must be https://HOST or https://HOST/PATH",
            hint="let a proxy with TLS serve the pages; docs/guides/dashboard-access.md has one",
        )


def read_sign_on(path: Path) -> SignOn:
    """Read the sign-on provider of the dashboard, and its users' roles, from a TOML file.

    Raises:
        UsageError: it cannot be read, others can read it, or it lacks something.
    """
    hint = "docs/guides/dashboard-access.md shows such a file"
    try:
        handle = open_private(path)
        with os.fdopen(handle, "rb") as file:
            return msgspec.toml.decode(file.read(), type=SignOn)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", hint=hint) from None
    except UNREADABLE as error:
        raise UsageError(f"{path} describes no provider: {error}", hint=hint) from None


def write_secrets(sign_on: SignOn, public_url: str, path: Path) -> None:
    """Write the settings of Streamlit's ``st.login``; only this user can read them."""
    values = {
        "redirect_uri": f"{public_url.rstrip('/')}/oauth2callback",
        "cookie_secret": secrets.token_urlsafe(32),
        "client_id": sign_on.client_id,
        "client_secret": sign_on.client_secret,
        "server_metadata_url": sign_on.server_metadata_url,
    }
    # A JSON string without escapes of surrogates is a TOML string.
    lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in values.items()]
    write_private("\n".join(["[auth]", *lines, ""]).encode(), path)


class DashboardSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the pages."""

    door_token: str
    """Token that grants read access; generated by every start of ``vitals dashboard``."""
    collector_url: str
    token_file: str
    """Json file of the collector's tokens; re-read, so that a new token needs no restart."""
    collector_data: str = ""
    """The collector's data directory, which has its current URL; "" for a fixed URL."""
    of_folder: bool = False
    """The collector belongs to this dashboard, over a directory, and its store is temporary."""
    own_host: str = "vitals.localhost"
    """``NAME.localhost``; NAME is a secret too, generated with the token."""
    public_url: str = ""
    """URL of a TLS proxy in front of the pages."""
    sign_on: SignOn | None = None
    """Sign-on at the public URL, instead of the token."""
    control: bool = False
    """Whether a session may get control; if not, no control token is read."""
    code_fd: int = -1
    """The pipe to the terminal, for codes; -1 without control."""
    redirect_file: str = ""
    """The page that opened the browser, to be deleted once it has."""

    def hosts(self) -> DashboardHosts:
        """Return the host names that the middleware accepts, with their roles."""
        return DashboardHosts(
            token=self.door_token,
            own_host=self.own_host,
            public_url=self.public_url,
            signs_on=self.sign_on is not None,
        )

    def collector(self) -> CollectorAddress:
        """Return the collector's current URL and tokens; none without a file.

        After a restart it may have another port. Without control no control token is kept.
        """
        present = url_in(Path(self.collector_data)) if self.collector_data else ""
        tokens = read_tokens(self.token_file) if self.token_file else CollectorTokens()
        if not self.control:
            read = tokens.read or tokens.control
            tokens = msgspec.structs.replace(tokens, read=read, control="")
        return CollectorAddress(url=present or self.collector_url, tokens=tokens)


def write_settings(settings: DashboardSettings, path: Path) -> None:
    """Write the settings for the Streamlit process, readable only by this user."""
    write_private(msgspec.json.encode(settings), path)


def write_private(content: bytes, path: Path) -> None:
    """Write a new file of mode 0600 with the dashboard's settings, secrets or token."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(content)


def load_settings(environ: Mapping[str, str]) -> DashboardSettings:
    """Load the settings of the Streamlit process from the file that the environment names.

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
