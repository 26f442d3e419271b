"""A server proves its identity before it gets a token: anyone may listen on a port.

On one machine it is reached by a Unix socket in its data directory, which only this user can
access; from other machines by TLS, with exactly the certificate in the token file. Both are checked
at every connect.
"""

import contextlib
import hashlib
import os
import socket
import ssl
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from trainvitals.errors import ConfigError, ServerIdentityError, TransportError, UsageError

UNIX = "unix:"
"""Scheme of a server that listens on a Unix socket, before its path."""
UNPROVEN = "insecure+"
"""Before ``http://``: another mechanism protects the connection, such as a TLS proxy on this
machine, or a mesh."""

SERVER_NAME = "vitals-collector"
"""In every certificate of a collector: for clients that check a name, like Prometheus."""

_TLS_ENDED = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError)
_BY_FD = Path("/proc/self/fd")


class TlsTrust(msgspec.Struct, frozen=True, kw_only=True):
    """Identifies a server over TLS; if it is empty, the system's CAs do."""

    certificates: tuple[str, ...] = ()
    """PEM. The server's certificate must be one of these, whatever its name and issuer."""
    ca: str = ""
    """PEM of a private CA; the server's name is checked."""
    client_cert: str = ""
    """File with the client certificate, if the server requires one."""
    client_key: str = ""
    """File with its private key, if that is separate."""


class ServerUrl(NamedTuple):
    """An address that a server can prove."""

    base: str
    """``http://`` or ``https://``, for HTTP libraries."""
    socket: Path | None = None
    """The Unix socket to which requests go instead of the host in ``base``."""

    @property
    def is_tls(self) -> bool:
        """Return whether the server's socket is reached by TLS."""
        return self.base.startswith("https:")


def parse_url(url: str) -> ServerUrl:
    """Return the parts of a server's URL: the base for HTTP and, for ``unix:``, the socket.

    Raises:
        UsageError: the URL is invalid, or its server could not be verified.
    """
    if url.startswith(UNIX + "/"):
        return ServerUrl("http://localhost", Path(url.removeprefix(UNIX)))
    base = url.removeprefix(UNPROVEN).rstrip("/")
    try:
        parts = urlsplit(base)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname)
        _ = parts.port
    except ValueError:
        is_address = False
    if not is_address:
        raise UsageError(
            f"the collector's address is {url!r}; it must be https://host:port, or a folder",
            hint="`vitals collector` prints its address when it starts; write a data folder "
            "with a slash, such as ./collector",
        )
    if parts.scheme == "http" and not url.startswith(UNPROVEN):
        raise UsageError(
            f"{url} is plain HTTP: whoever holds that port would get the token, and everybody on "
            "the way can read it",
            hint=f"on the collector's machine give its data folder; elsewhere https:// with a copy "
            "of its tokens.json (--token-file), which has its certificate. An older version of the "
            f"collector has none: update it. Write {UNPROVEN}{url} only where "
            "something else keeps others out, such as a TLS proxy",
        )
    return ServerUrl(base)


# ------------------------------------------------------------------------------------- Unix socket


@contextlib.contextmanager
def socket_in_own_folder(path: Path) -> Iterator[str]:
    """Yield a path of the socket through the directory that was checked.

    Raises:
        ServerIdentityError: another user could have put the socket there.
        OSError: there is no such directory.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        folder = os.open(path.parent, flags)
    except NotADirectoryError as error:
        raise ServerIdentityError(
            f"{path.parent} is a link or no folder; the collector's folder must be one itself",
            hint="give the folder's own path",
        ) from error
    try:
        status = os.fstat(folder)
        mode = stat.S_IMODE(status.st_mode)
        if status.st_uid != os.geteuid() or mode & 0o077:
            raise ServerIdentityError(
                f"{path.parent} belongs to user {status.st_uid} and has mode {mode:04o}: another "
                "user may listen there in the collector's place",
                hint="the data folder must be yours alone (0700): `vitals collector` makes it so",
            )
        # Through the descriptor: the path may lead to another directory by now, and may be longer
        # than the 107 bytes of a socket's name.
        yield f"{_BY_FD / str(folder)}/{path.name}" if _BY_FD.is_dir() else str(path)
    finally:
        os.close(folder)


def check_peer(connected: socket.socket) -> None:
    """Check that the program that listens on a Unix socket is this user's, or root's.

    Raises:
        ServerIdentityError: it is another user's.
    """
    if not hasattr(socket, "SO_PEERCRED"):
        return  # not Linux: only the directory is checked
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    if uid not in (os.geteuid(), 0):
        raise ServerIdentityError(
            f"user {uid} listens on the collector's socket, not {os.geteuid()}",
            hint="start your own collector again; if it runs as that user, give its https:// "
            "address and a copy of its tokens.json",
        )


def connect_unix(path: Path, timeout: float | None) -> socket.socket:
    """Connect to the Unix socket of a server that this user, or root, runs.

    Raises:
        ServerIdentityError: it may be another user's.
        OSError: no process listens.
    """
    with socket_in_own_folder(path) as name, contextlib.ExitStack() as on_error:
        connected = on_error.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        connected.settimeout(timeout)
        connected.connect(name)
        check_peer(connected)
        on_error.pop_all()
        return connected


# --------------------------------------------------------------------------------------------- TLS


class _PinnedSocket(ssl.SSLSocket):
    context: "_PinnedContext"

    def do_handshake(self, block: bool = False) -> None:
        """Shake hands, and go no further unless the certificate is the very one."""
        super().do_handshake(block)
        presented = self.getpeercert(binary_form=True)
        if presented is None or hashlib.sha256(presented).digest() not in self.context.pins:
            raise ssl.SSLCertVerificationError("it is not the certificate that is trusted")


class _PinnedContext(ssl.SSLContext):
    sslsocket_class = _PinnedSocket
    pins: frozenset[bytes] = frozenset()


def tls_context(trust: TlsTrust) -> ssl.SSLContext:
    """Return a TLS context for sockets that connect only to the server that is trusted.

    Raises:
        ConfigError: a certificate or a key cannot be read.
    """
    try:
        if trust.certificates:
            context: ssl.SSLContext = _pinned_context(trust.certificates)
        else:
            context = ssl.create_default_context(cadata=trust.ca or None)
        if trust.client_cert:
            context.load_cert_chain(trust.client_cert, trust.client_key or None)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the token file's entry `tls` cannot be used: {error}",
            hint="copy the collector's tokens.json again; client_cert and client_key name PEM "
            "files on this machine",
        ) from error
    return context


def _pinned_context(certificates: tuple[str, ...]) -> _PinnedContext:
    """Return a TLS context for sockets that trusts exactly these certificates."""
    context = _PinnedContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # the key matters, not the name
    # A certificate that a CA signed is trusted itself: without this flag, only together with that
    # CA.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(cadata="\n".join(certificates))
    context.pins = frozenset(bytes.fromhex(fingerprint(pem)) for pem in certificates)
    return context


def fingerprint(pem: str) -> str:
    """Return the SHA-256 of a TLS certificate in hex; ValueError if it is invalid."""
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem)).hexdigest()


def not_connected(url: str, trust: TlsTrust, error: BaseException) -> TransportError:
    """Return the error for a socket that could not connect, or whose server proved nothing."""
    cause: Any = error
    while cause is not None and not isinstance(cause, ssl.SSLError):
        cause = cause.__cause__ or cause.__context__
    if isinstance(cause, _TLS_ENDED):
        cause = None
    if isinstance(cause, ssl.SSLCertVerificationError):
        pins = ", ".join(fingerprint(pem)[:16] for pem in trust.certificates)
        expected = f"the one in the token file (SHA-256 {pins}...)" if pins else "a trusted one"
        hint = (
            "another program may hold that address. If the collector was reinstalled, "
            "copy its tokens.json here again"
        )
        if not pins:
            hint = "give a copy of the collector's tokens.json, which has its certificate, with "
            hint += "--token-file or VITALS_TOKEN_FILE"
        return ServerIdentityError(
            f"the server at {url} does not prove that it is the collector: its certificate is not "
            f"{expected}; nothing was sent to it",
            hint=hint,
        )
    if cause is not None:
        return ServerIdentityError(
            f"the server at {url} cannot prove that it is the collector, as TLS fails: "
            f"{cause.reason or cause}",
            hint="it may be an older version of the collector (update it), one started with "
            "--allow-plain (ask the proxy in front), one with --tls-client-ca (put client_cert and "
            "client_key into the token file), or another program",
        )
    hint = "start one with `vitals collector`, or give its address with --collector"
    if url.startswith("https:") and not trust.client_cert:
        # The server closes the connection silently if a certificate is missing.
        hint += "; one with --tls-client-ca wants client_cert and client_key in the token file"
    return TransportError(
        f"the collector at {url} cannot be reached: {error or type(error).__name__}", hint=hint
    )
