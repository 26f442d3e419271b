"""Runs the app: one per data directory, its addresses in a file, a clean end.

It listens on a Unix socket in the data directory, for programs of the same user on this machine,
and on a port, by TLS.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import logging
import os
import resource
import signal
import socket
import ssl
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import msgspec
import uvicorn
from fastapi import FastAPI

import trainvitals
from trainvitals.errors import StorageError, UsageError, VitalsError
from trainvitals.io.client import COLLECTOR_FILE, CollectorFile, read_collector_file
from trainvitals.io.private import replace_file
from trainvitals.io.server_identity import socket_in_own_folder
from trainvitals.printable import LineFormatter
from vitals_collector.api.auth import HEAD_SECONDS, PatientProtocol
from vitals_collector.storage.store import ensure_data_dir

SOCKET_FILE = "collector.sock"
LOCK_FILE = "collector.lock"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_SHUTDOWN_SECONDS = 3
_BACKLOG = 2_048
"""Connections that wait to be accepted: all agents of a fleet, after an outage."""
_TICKS = 50
"""Ticks of the server, ten per second, between retries of writing the address file."""
_TICKS_PER_SECOND = 10
"""uvicorn's. It wakes up for each, which is half of the CPU of an idle collector, and has something
to do in every tenth: the date in the headers of responses."""
_KEEP_ALIVE_SECONDS = 75
"""Longer than an agent is silent, so that it need not connect again for every body."""


_LOG = logging.getLogger("vitals.collector.serve")


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenSettings:
    """Address and certificate of the server."""

    host: str = "127.0.0.1"
    port: int = 0
    """0 selects a free one."""
    tls_cert: Path | None = None
    """PEM, with its key inside or in ``tls_key``; None serves plain HTTP at the port."""
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    """PEM; TLS clients must show a certificate signed by one of these CAs."""


def parse_listen(text: str) -> tuple[str, int]:
    """Return the HTTP server's host and port of ``HOST:PORT``; IPv6 hosts are in brackets.

    Raises:
        UsageError: it is not of that form.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65_535:
        raise UsageError(
            f"--listen is {text!r}; it must be HOST:PORT", hint="for example 127.0.0.1:8765"
        )
    return host.removeprefix("[").removesuffix("]"), int(port)


@contextlib.contextmanager
def lock_data_dir(data: Path) -> Iterator[str]:
    """Hold the lock of the server's data directory; it ends with the process, however it ends.

    Identifies the lock: of two processes with the same value, one has ended. A copy of the
    directory has another value, and so has the same directory after a reboot, or seen from another
    machine; "" if the system provides none.

    Raises:
        StorageError: another collector has it.
    """
    ensure_data_dir(data)
    with (data / LOCK_FILE).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise StorageError(
                f"another collector runs on {data}{_describe_running_collector(data)}",
                hint="use that one, stop it, or give another directory with --data",
            ) from error
        yield _lock_identity(file.fileno())


def _lock_identity(lock: int) -> str:
    """Return the identity of the lock of the server's data directory: boot, disk and file."""
    try:
        boot = _BOOT_ID.read_text()
    except OSError:  # not Linux
        return ""
    of_file = os.fstat(lock)
    boot_and_file = f"{boot}/{of_file.st_dev}/{of_file.st_ino}"
    return hashlib.sha256(boot_and_file.encode()).hexdigest()[:16]


def bind(listen: ListenSettings) -> socket.socket:
    """Return a listening socket for the HTTP server; the caller closes it.

    Raises:
        UsageError: the address is not this machine's, or the port is in use or not allowed.
    """
    try:
        family = socket.getaddrinfo(listen.host, listen.port, type=socket.SOCK_STREAM)[0][0]
        # With an explicit protocol, asyncio turns Nagle off; otherwise each response waits 40 ms.
        bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    except OSError as error:
        raise UsageError(f"--listen {listen.host}:{listen.port}: {error.strerror}") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((listen.host, listen.port))
        bound.listen(_BACKLOG)
    except OSError as error:
        bound.close()
        raise UsageError(
            f"cannot listen on {listen.host}:{listen.port}: {error.strerror}",
            hint="another program may have the port; --listen 127.0.0.1:0 takes a free one",
        ) from error
    return bound


def url_of(bound: socket.socket, listen: ListenSettings, *, of_this_machine: bool = False) -> str:
    """Return the HTTP server's address that programs use.

    If it listens everywhere, ``of_this_machine`` names the machine, for programs on others.
    """
    everywhere = {"0.0.0.0": "127.0.0.1", "::": "::1"}
    host = everywhere.get(listen.host, listen.host)
    if of_this_machine and listen.host in everywhere:
        host = socket.gethostname()
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if listen.tls_cert else 'http'}://{shown}:{bound.getsockname()[1]}"


def serve(app: FastAPI, bound: socket.socket, listen: ListenSettings, data: Path) -> None:
    """Serve HTTP until SIGINT or SIGTERM; write the address file once requests are handled."""
    config = uvicorn.Config(
        app,
        http=PatientProtocol,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # clients are identified by a token, not by an address
        ws="none",
        backlog=_BACKLOG,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
        ssl_certfile=listen.tls_cert,
        ssl_keyfile=listen.tls_key,
        ssl_ca_certs=None if listen.tls_client_ca is None else str(listen.tls_client_ca),
        ssl_cert_reqs=ssl.CERT_NONE if listen.tls_client_ca is None else ssl.CERT_REQUIRED,
    )
    try:
        config.load()
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--tls-cert {listen.tls_cert}: certificate or key cannot be used: {error}",
            hint="give PEM files: --tls-cert with the certificate, --tls-key with its private key, "
            "--tls-client-ca with CAs",
        ) from error
    url = url_of(bound, listen)
    _allow_many_files()
    (data / COLLECTOR_FILE).unlink(missing_ok=True)  # of a killed process: no one listens
    # uvicorn raises the signal again after its shutdown: without a handler, that would kill this
    # process here.
    before = signal.signal(signal.SIGTERM, _exit_on_signal)
    try:
        _Server(config, data, url).run(sockets=[bound])
    finally:
        (data / COLLECTOR_FILE).unlink(missing_ok=True)
        (data / SOCKET_FILE).unlink(missing_ok=True)
        signal.signal(signal.SIGTERM, before)


def bind_unix(data: Path) -> socket.socket | None:
    """Return an HTTP socket listening in the data directory; None if its file system has none."""
    path = data / SOCKET_FILE
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with socket_in_own_folder(path.absolute()) as name:
            path.unlink(missing_ok=True)  # of a killed process
            bound.bind(name)
        path.chmod(0o600)
        bound.listen(_BACKLOG)
    except (OSError, VitalsError) as error:
        _LOG.warning("no_unix_socket %s: %s; programs here use TLS as well", path, error)
        bound.close()
        return None
    return bound


def _allow_many_files() -> None:
    """Allow as many HTTP connections as the system does, not the shell's usual 1,024 files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    """Exit the collector: a signal came before the server handles them."""
    raise SystemExit(0)


def log_to_stderr() -> None:
    """Send the HTTP server's log lines to stderr, and the libraries' warnings."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("vitals").setLevel(logging.INFO)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, data: Path, url: str) -> None:
        super().__init__(config)
        self._data = data
        self._url = url
        self._socket = ""
        self._is_told = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._signaled = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to serve, then write the address file: an address must respond when it is read."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets=[])
        if self.should_exit:
            return
        for bound in sockets or ():
            await self._listen(bound)
        await self._listen_here()
        self._write_address()
        print(f"vitals collector: {self._url} (data in {self._data})", file=sys.stderr, flush=True)  # noqa: T201

    def _new_connection(self) -> asyncio.Protocol:
        """Return uvicorn's protocol for a new connection to the HTTP server."""
        return self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )

    async def _listen(self, bound: socket.socket) -> None:
        """Listen for HTTP, with a bound to the TLS handshake: uvicorn leaves a minute for it."""
        loop = asyncio.get_running_loop()
        server = await loop.create_server(
            self._new_connection,
            sock=bound,
            backlog=_BACKLOG,
            ssl=self.config.ssl,
            ssl_handshake_timeout=HEAD_SECONDS if self.config.ssl else None,
        )
        self.servers.append(server)

    async def _listen_here(self) -> None:
        """Serve HTTP on the Unix socket too, without TLS: no other user can read its traffic."""
        bound = bind_unix(self._data)
        if bound is None:
            return
        loop = asyncio.get_running_loop()
        server = await loop.create_unix_server(self._new_connection, sock=bound, backlog=_BACKLOG)
        self.servers.append(server)
        self._socket = SOCKET_FILE

    async def main_loop(self) -> None:
        """Run the HTTP server's periodic work once per second until a signal arrives."""
        counter = 0
        while not await self.on_tick(counter):
            counter += _TICKS_PER_SECOND
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._signaled.wait(), 1.0)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal: end the server's main loop without waiting for its next tick."""
        super().handle_exit(sig, frame)
        if self._loop is not None:  # otherwise the main loop has not started, and will not
            self._loop.call_soon_threadsafe(self._signaled.set)

    async def on_tick(self, counter: int) -> bool:
        """Run the server's periodic work; retry writing the address file."""
        if not self._is_told and counter % _TICKS == 0:
            self._write_address()
        return await super().on_tick(counter)

    def _write_address(self) -> None:
        """Write the address file; on a full disk, retry later and serve stored data."""
        body = msgspec.json.encode(
            CollectorFile(
                url=self._url,
                pid=os.getpid(),
                node=socket.gethostname(),
                socket=self._socket,
                version=trainvitals.__version__,
            )
        )
        try:
            replace_file(self._data / COLLECTOR_FILE, body + b"\n", mode=0o600)
        except OSError as error:
            _LOG.warning(
                "address_not_written: %s; until then give --collector %s", error, self._url
            )
            return
        self._is_told = True


def _describe_running_collector(data: Path) -> str:
    """Return URL and process of the collector that serves a data directory; "" if unknown."""
    file = read_collector_file(data)
    return "" if file is None else f": {file.url}, process {file.pid}"
