"""Starts the Streamlit process, and a collector for a directory of runs; stops both.

The processes have their own sessions, so that a Ctrl-C in the terminal reaches only the launcher,
which then stops them in order.
"""

import errno
import fcntl
import hashlib
import hmac
import os
import secrets
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, TypeVar

import httpx

from trainvitals.cli.supervise import stop_process
from trainvitals.errors import StorageError, TransportError, UnauthorizedError, UsageError
from trainvitals.io.client import (
    COLLECTOR_FILE,
    collector_on,
    open_collector_client,
    read_tokens,
    url_in,
)
from trainvitals.io.control_key import read_control_key
from trainvitals.io.private import ensure_private_dir
from trainvitals.io.setting_paths import collector_folder, default_data_dir
from vitals_dashboard.auth import HEALTH_PATH, NONCE_HEADER, PROOF_HEADER, proof
from vitals_dashboard.settings import (
    SETTINGS_VARIABLE,
    DashboardSettings,
    SignOn,
    write_private,
    write_secrets,
    write_settings,
)

T = TypeVar("T")

HOST = "127.0.0.1"
START_SECONDS = 60.0
POLL_SECONDS = 0.1

STREAMLIT_CONFIG: dict[str, str | bool] = {
    "server.address": HOST,
    "server.headless": True,
    "server.enableAgentApi": False,
    "server.enableXsrfProtection": True,
    "server.enableCORS": True,
    "server.enableWebsocketCompression": True,
    "server.fileWatcherType": "none",
    "server.runOnSave": False,
    "browser.gatherUsageStats": False,
    "client.showErrorDetails": "none",
    "client.toolbarMode": "viewer",
    "global.developmentMode": False,
    "runner.postScriptGC": False,  # all of memory after each refresh: a third of its time
    "logger.enableRich": False,
    "theme.light.primaryColor": "#0072B2",
    "theme.dark.primaryColor": "#56B4E9",
}
"""Shipped defaults: loopback only, no telemetry, no traceback shown to users. The middleware checks
host names: one of them is secret, and every user can read a process's arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectorLocation:
    """Source of the runs."""

    url: str
    token_file: str
    collector_data: str = ""
    of_folder: bool = False
    """A collector of this dashboard, over a directory."""


@dataclass(slots=True)
class DashboardProgram:
    """A process that was started, and its log."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def log_tail(self) -> str:
        """Return the end of the log of a process that `vitals dashboard` started."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-12:])

    def raise_if_ended(self) -> None:
        """Raise TransportError if a process that `vitals dashboard` needs has ended."""
        code = self.process.poll()
        if code is not None:
            raise TransportError(
                f"the {self.name} ended with exit code {code}:\n{self.log_tail()}",
                hint="start `vitals dashboard` again; nothing that was recorded is lost",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessOptions:
    """Authentication and roles of users."""

    control: bool = False
    """Whether a session may get control, with a code that the terminal shows."""
    public_url: str = ""
    """URL of a TLS proxy in front of the pages; "" without one."""
    sign_on: SignOn | None = None
    """Sign-on provider of the public URL; None: the token is used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pages:
    """The Streamlit process, and the ways to it."""

    program: DashboardProgram
    address: str
    """The one-click URL, with its own host name."""
    look_address: str
    """The same under a name that every browser and tunnel resolves; read-only."""
    public_address: str
    """The proxy's URL, with the token unless users sign in there; "" without one."""
    redirect_file: Path
    """A page, readable only by this user, that redirects a browser to the URL."""
    codes: int
    """Read end of the pipe with the codes that are to be shown."""


def streamlit_command(port: int) -> list[str]:
    """Return the command that starts the dashboard's Streamlit process; it holds no secret."""
    flags = [f"--server.port={port}"]
    for name, value in STREAMLIT_CONFIG.items():
        text = str(value).lower() if isinstance(value, bool) else value
        flags.append(f"--{name}={text}")
    entry = Path(__file__).parent / "entry" / "vitals_door.py"
    return [sys.executable, "-m", "streamlit", "run", str(entry), *flags]


def collector_command(folder: Path, data: Path) -> list[str]:
    """Return the command that `vitals dashboard` starts to read a directory of runs."""
    options = ["--folder", str(folder), "--data", str(data), "--listen", f"{HOST}:0"]
    return [sys.executable, "-m", "trainvitals", "collector", *options]


def free_port(port: int) -> int:
    """Return a port for the dashboard's pages: ``port`` if it is free, or any free one for 0.

    Raises:
        UsageError: it is in use, or not allowed.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or "it must be 0 to 65535"
            raise UsageError(
                f"port {port} on {HOST} cannot be used: {why}",
                hint="leave out --port to pick a free one",
            ) from None
        return int(probe.getsockname()[1])


def check_folder(folder: Path) -> Path:
    """Return the directory of runs for `vitals dashboard` as an absolute path.

    Raises:
        UsageError: it is missing, not a directory, or not readable.
    """
    path = folder.expanduser().resolve()  # one directory has one store, whatever path is given
    hint = "give the folder that VITALS_DIR named in training (default: ./vitals_runs)"
    if not path.is_dir():
        what = "is not a folder" if path.exists() else "does not exist"
        raise UsageError(f"{path} {what}", hint=hint)
    if not os.access(path, os.R_OK | os.X_OK):
        raise UsageError(f"{path} cannot be read by this user", hint="ask its owner for access")
    return path


def find_collector_location(environ: Mapping[str, str]) -> CollectorLocation:
    """Return the collector that the dashboard shows: from the environment, or this user's.

    Raises:
        UsageError: there is neither.
    """
    data = default_data_dir(environ)
    url, token_file = environ.get("VITALS_COLLECTOR_URL", ""), environ.get("VITALS_TOKEN_FILE", "")
    if url and collector_folder(url) is None:
        return CollectorLocation(url=url, token_file=token_file)
    return locate_collector(collector_folder(url) or data, token_file)


def locate_collector(data: Path, token_file: str) -> CollectorLocation:
    """Return the collector of a data directory, for the dashboard's pages.

    Raises:
        UsageError: there is none.
    """
    url = url_in(data)
    if not url:
        raise UsageError(
            f"no collector is known: none runs on {data}",
            hint="read a folder of runs with `vitals dashboard DIR`, start `vitals collector`,"
            " or name one with --collector URL --token-file FILE",
        )
    return CollectorLocation(
        url=url, token_file=token_file or str(data / "tokens.json"), collector_data=str(data)
    )


class Slot(NamedTuple):
    """A directory for the store of a directory of runs, and the open file with its lock."""

    path: Path
    lock: int


@contextmanager
def cache_slot(folder: Path) -> Iterator[Slot]:
    """Lock a node-local directory in which `vitals dashboard` stores the runs it reads.

    Two dashboards of the same directory get one each. A child that inherits the lock holds it too.
    """
    base = ensure_private_dir(Path(tempfile.gettempdir()) / f"trainvitals-{os.getuid()}")
    key = hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]
    for slot in range(100):
        path = ensure_private_dir(base / f"dashboard-{key}-{slot}")
        lock = os.open(path / "dashboard.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise StorageError(f"{path}: cannot be locked: {error.strerror}") from error
            continue
        try:
            yield Slot(path, lock)
        finally:
            os.close(lock)
        return
    raise StorageError("a hundred dashboards of this folder run already", hint="stop one of them")


@contextmanager
def run_child_program(
    name: str,
    command: Sequence[str],
    log: Path,
    environ: Mapping[str, str],
    inherits: Collection[int] = (),
) -> Iterator[DashboardProgram]:
    """Run a child process of `vitals dashboard`, with its output in ``log``.

    It ends if this process is killed. ``command`` is an interpreter's ``-m`` with a module and its
    arguments; ``inherits`` are open files that the process gets as well.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command[:2], "vitals_dashboard.die_with_parent", *command[2:]],
            stdin=subprocess.PIPE,  # nothing is written: it ends when this process does
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environ),
            start_new_session=True,
            pass_fds=inherits,
        )
    try:
        yield DashboardProgram(name, process, log)
    finally:
        stop_process(process, 5.0)
        assert process.stdin is not None
        process.stdin.close()


def wait_for_program(child: DashboardProgram, probe: Callable[[], T | None]) -> T:
    """Wait until a child process of `vitals dashboard` responds; return the first result.

    Raises:
        TransportError: the program ended, or did not respond in time.
    """
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        child.raise_if_ended()
        answer = probe()
        if answer is not None:
            return answer
        time.sleep(POLL_SECONDS)
    raise TransportError(
        f"the {child.name} did not answer within {START_SECONDS:.0f} seconds:\n{child.log_tail()}",
        hint="the machine may be very busy; try again",
    )


@contextmanager
def run_folder_collector(
    folder: Path, environ: Mapping[str, str]
) -> Iterator[tuple[DashboardProgram, CollectorLocation]]:
    """Run a collector for the dashboard on a directory of runs until the block ends."""
    # The collector holds the lock too: if this process is killed, the next one uses another
    # directory.
    with cache_slot(folder) as (data, lock):
        (data / COLLECTOR_FILE).unlink(missing_ok=True)
        command = collector_command(folder, data)
        with run_child_program(
            "collector", command, data / "collector.log", environ, (lock,)
        ) as child:
            wait_for_program(child, lambda: _collector_answers(data))
            yield child, replace(locate_collector(data, ""), of_folder=True)


def check_control(location: CollectorLocation) -> None:
    """Check at the start that the dashboard could send and sign commands, before it offers any.

    Raises:
        UnauthorizedError: there is no token to send them with, or no key to sign them with.
        InsecurePathError: others can read one of them.
    """
    if not location.token_file or not read_tokens(location.token_file).control:
        raise UnauthorizedError(
            f"--control needs a control token; {location.token_file or 'no token file'} has none",
            hint="give the collector's tokens.json with --token-file, or one that `vitals token"
            " create NAME --scope control --output FILE` made; leave out --control for read-only "
            "access",
        )
    read_control_key(Path(location.token_file).parent)


@contextmanager
def run_page_server(
    location: CollectorLocation,
    port: int,
    environ: Mapping[str, str],
    entrance: AccessOptions = AccessOptions(),
) -> Iterator[Pages]:
    """Run the dashboard's Streamlit process until the block ends; yield its URLs."""
    if entrance.control:
        check_control(location)
    token, own_host = secrets.token_urlsafe(24), f"{secrets.token_hex(16)}.localhost"
    with ExitStack() as stack:
        _hold_ipv6(stack, port)
        # created with mode 0700
        temporary = tempfile.TemporaryDirectory(prefix="vitals-dashboard-")
        private = Path(stack.enter_context(temporary))
        codes, code_fd = os.pipe()
        stack.callback(os.close, codes)
        address = f"http://{own_host}:{port}/?token={token}"
        redirect_file = private / "open.html"
        write_private(_redirect_page(address), redirect_file)
        settings = DashboardSettings(
            door_token=token,
            own_host=own_host,
            public_url=entrance.public_url,
            sign_on=entrance.sign_on,
            control=entrance.control,
            code_fd=code_fd,
            redirect_file=str(redirect_file),
            collector_url=location.url,
            token_file=location.token_file,
            collector_data=location.collector_data,
            of_folder=location.of_folder,
        )
        write_settings(settings, private / "settings.json")
        page_environ = {**environ, SETTINGS_VARIABLE: str(private / "settings.json")}
        command = streamlit_command(port)
        if entrance.sign_on is not None:
            write_secrets(entrance.sign_on, entrance.public_url, private / "secrets.toml")
            command.append(f"--secrets.files={private / 'secrets.toml'}")
        log = private / "dashboard.log"
        try:
            child = stack.enter_context(
                run_child_program("dashboard", command, log, page_environ, (code_fd,))
            )
        finally:
            os.close(code_fd)
        wait_for_program(child, lambda: _has_proven_token(port, token))
        yield Pages(
            program=child,
            address=address,
            public_address=_public_address(entrance, token),
            look_address=f"http://localhost:{port}/?token={token}",
            redirect_file=redirect_file,
            codes=codes,
        )


def _public_address(entrance: AccessOptions, token: str) -> str:
    """Return the dashboard's URL behind a proxy; with its token without sign-on."""
    if not entrance.public_url or entrance.sign_on is not None:
        return entrance.public_url
    return f"{entrance.public_url.rstrip('/')}/?token={token}"


def _hold_ipv6(stack: ExitStack, port: int) -> None:
    """Bind the dashboard's port on the IPv6 loopback: a browser may try that one first."""
    if not socket.has_ipv6:
        return
    try:
        ipv6_socket = stack.enter_context(socket.socket(socket.AF_INET6))
        ipv6_socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        ipv6_socket.bind(("::1", port))  # never listened on: a browser is refused, and uses IPv4
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UsageError(
                f"port {port} on ::1 is in use by another program, which a browser may reach"
                " instead of this dashboard",
                hint="leave out --port to pick a free one",
            ) from None


def _redirect_page(address: str) -> bytes:
    """Return the page that opens the dashboard in a browser; arguments would expose its token."""
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Vitals</title>'
        '<meta name="referrer" content="no-referrer">'
        f'<meta http-equiv="refresh" content="0; url={address}">'
        f'<a href="{address}">Open the dashboard</a></html>'
    ).encode()


def _has_proven_token(port: int, token: str) -> bool | None:
    """Return True once the dashboard's process, which has the token, responds at the port.

    Raises:
        UsageError: another program responds there, and would get the token.
    """
    nonce = secrets.token_hex(16)
    url = f"http://{HOST}:{port}{HEALTH_PATH}"
    try:
        answer = httpx.get(url, timeout=2.0, trust_env=False, headers={NONCE_HEADER: nonce})
    except httpx.HTTPError:
        return None
    if not hmac.compare_digest(answer.headers.get(PROOF_HEADER, ""), proof(token, nonce)):
        raise UsageError(
            f"another program answers at port {port} on {HOST}",
            hint="leave out --port to pick a free one",
        )
    return answer.is_success or None


def _collector_answers(data: Path) -> bool | None:
    """Return True once the collector that `vitals dashboard` started responds; None before."""
    collector = collector_on(data)
    if collector is None:
        return None
    with open_collector_client(collector, "", timeout=2.0) as client:
        return client.answers() or None


def watch_programs(
    children: Sequence[DashboardProgram], codes: int, show: Callable[[str], None]
) -> None:
    """Show requested codes; never returns.

    Raises:
        TransportError: one of the programs has ended.
    """
    while True:
        for child in children:
            child.raise_if_ended()
        if select.select([codes], [], [], 0.5)[0]:
            for code in os.read(codes, 4096).decode().split():
                show(code)
