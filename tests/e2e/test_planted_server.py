"""Nobody gets a token by taking the place of a collector, and nobody is believed there.

The planted server is another user's where the tests run as root, as in CI.
"""

import contextlib
import datetime
import json
import os
import random
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from tests.collector.rows import RUN, Writer
from tests.e2e.lab import free_port, until
from tests.e2e.planted import NOBODY, Planted, planted
from tests.support.agent_clients import patient_client
from tests.support.examples import one_in
from tests.support.forked import COMMANDS
from trainvitals.cli.main import main
from trainvitals.client import Client
from trainvitals.errors import (
    ServerIdentityError,
    TransportError,
    UsageError,
    VitalsError,
)
from trainvitals.io.client import CollectorClient, collector_on, read_tokens
from trainvitals.io.server_identity import UNPROVEN, connect_unix
from trainvitals.io.spool import Spool
from trainvitals.views import RunsQuestion
from vitals_agent.backoff import Backoff
from vitals_agent.collector_endpoint import CollectorEndpoint, make_collector_finder
from vitals_agent.faults import Faults
from vitals_agent.shipper import Shipper
from vitals_collector.api.certificate import load_or_create_certificate
from vitals_dashboard.settings import DashboardSettings

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as a second user")


class Real:
    """A collector at a port that it keeps, its data folder, and a copy of its token file."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.data = folder, folder / "data"
        self.shipping: list[Shipping] = []
        self.port = free_port()
        self.url = f"https://127.0.0.1:{self.port}"
        self.tokens = folder / "copied.json"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *options: str) -> None:
        address = self.data / "collector.json"
        address.unlink(missing_ok=True)
        listen = ("--data", str(self.data), "--listen", f"127.0.0.1:{self.port}", *options)
        with (self.folder / "collector.log").open("ab") as log:
            self._process = COMMANDS.Popen(
                [sys.executable, "-m", "vitals_collector", "collector", *listen], stderr=log
            )
        until(lambda: address.exists() or self._process.poll() is not None, "it answers")
        assert self._process.poll() is None, (self.folder / "collector.log").read_text()

    def copy_tokens(self) -> None:
        """Bring the token file to another node."""
        shutil.copy(self.data / "tokens.json", self.tokens)

    def kill(self) -> None:
        """End it as a crash does: its files stay."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    @contextlib.contextmanager
    def replaced(self, *, tls: bool) -> Iterator[Planted]:
        """Have somebody else take its port."""
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", self.port))
            certificate = load_or_create_certificate(_made(self.folder / "theirs")) if tls else None
            with planted(listener, self.folder, certificate) as server:
                yield server


def _made(folder: Path) -> Path:
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


@pytest.fixture
def real(tmp_path: Path) -> Iterator[Real]:
    collector = Real(tmp_path)
    collector.start()
    collector.copy_tokens()
    yield collector
    for shipping in collector.shipping:
        shipping.close()
    collector.kill()


# ------------------------------------------------------------------------------ each of the clients


class Shipping:
    """An agent's way to the collector, with a spool that has a batch more at each call."""

    def __init__(self, real: Real, where: str) -> None:
        token_file = None if where == str(real.data) else real.tokens
        self._writer, self._num = Writer(), 0
        folder = real.folder / f"spool-{len(list(real.folder.iterdir()))}"
        self.spool = Spool(folder, max_bytes=1 << 20, keep=False)
        self.endpoint = CollectorEndpoint(
            make_collector_finder(where, token_file, {}), connect=patient_client
        )
        self.faults = Faults()
        backoff = Backoff(max_seconds=0.01, rng=random.Random(1))
        self._shipper = Shipper(self.endpoint, backoff=backoff, faults=self.faults)
        self._now = 0.0
        real.shipping.append(self)

    def __call__(self) -> None:
        self.spool.append(self._writer.steps([self._num]))
        self.spool.sync()
        self._num += 1
        self._now += 100.0
        num_errors = self._shipper.num_errors
        if self.endpoint.reachable(self._now):
            self._shipper.ship(RUN, self.spool, self._now)
        if self._shipper.num_errors > num_errors or self.spool.pending(1):
            raise TransportError("not shipped")

    def close(self) -> None:
        self.endpoint.close()
        self.spool.close()


def agent(real: Real, where: str) -> Callable[[], object]:
    return Shipping(real, where)


def follower(real: Real, where: str) -> Callable[[], object]:
    """An agent that knows several collectors, of which the others are away."""
    shipping = Shipping(real, f"{real.url},https://127.0.0.1:{free_port()}")
    with contextlib.suppress(TransportError):
        shipping()  # the other may have the first turn
    return shipping


def reader(real: Real, where: str) -> Callable[[], object]:
    def ask() -> None:
        with Client() as client:  # where the environment says
            client.runs()

    return ask


def run_main(*arguments: str) -> None:
    try:
        code = main(arguments)
    except SystemExit as end:
        code = end.code
    if code:
        raise TransportError("it failed")


def command_line(real: Real, where: str) -> Callable[[], object]:
    tokens = () if where == str(real.data) else ("--token-file", str(real.tokens))

    def run() -> None:
        run_main("runs", "--collector", where, *tokens)

    return run


def operator(real: Real, where: str) -> Callable[[], object]:
    tokens = () if where == str(real.data) else ("--token-file", str(real.tokens))
    matcher, why = f"run={RUN}", "a test"

    def run() -> None:
        run_main(
            "alerts", "silence", "--match", matcher, "--reason", why, "--collector", where, *tokens
        )

    return run


def dashboard(real: Real, where: str) -> Callable[[], object]:
    is_here = where == str(real.data)
    settings = DashboardSettings(
        door_token="t",
        collector_url=real.url,
        token_file=str(real.tokens),
        collector_data=where if is_here else "",
        control=True,
    )

    def ask() -> None:
        collector = settings.collector()
        tokens = collector.tokens
        with CollectorClient(collector.url, tokens.control, tls=tokens.tls, timeout=60.0) as client:
            client.ask(RunsQuestion())

    return ask


CLIENTS = [agent, follower, reader, command_line, operator, dashboard]


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("where", one_in(2, ["folder", "address"]))
def test_who_takes_a_dead_collectors_port_gets_no_token_and_is_not_believed(
    real: Real, monkeypatch: pytest.MonkeyPatch, capsys, where: str, tls: bool
):
    named = str(real.data) if where == "folder" else real.url
    monkeypatch.setenv("VITALS_TOKEN_FILE", str(real.tokens))
    monkeypatch.setenv("VITALS_COLLECTOR_URL", named)
    calls = {}
    for make in CLIENTS:
        calls[make.__name__] = call = make(real, named)
        call()  # the real one is served, also over the connection that is kept
    tokens = read_tokens(real.tokens)
    real.kill()
    with real.replaced(tls=tls) as other:
        for name, call in calls.items():
            for _ in range(3):
                try:
                    call()
                except VitalsError:
                    continue
                pytest.fail(f"{name} believed it")
        if where == "address":
            assert other.is_visited
        heard = other.heard
    for secret in (b"Authorization", b"Bearer", *map(str.encode, _texts(tokens))):
        assert secret not in heard
    capsys.readouterr()


def _texts(tokens: object) -> list[str]:
    return [getattr(tokens, scope) for scope in ("read", "ingest", "control")]


def test_the_spool_keeps_what_a_planted_server_acknowledges(real: Real):
    ship = Shipping(real, real.url)
    ship()
    real.kill()
    with real.replaced(tls=True) as other:
        for _ in range(3):
            with pytest.raises(TransportError):
                ship()
        assert other.is_visited
    assert 3 == len(ship.spool.pending(9))
    real.start()
    ship()
    assert [] == ship.spool.pending(1)
    with _client(real) as client:
        assert [4] == [run.last_step for run in client.ask(RunsQuestion())]


def test_a_health_probe_carries_no_token(tmp_path: Path):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        url = f"{UNPROVEN}http://127.0.0.1:{listener.getsockname()[1]}"
        with planted(listener, tmp_path) as server, CollectorClient(url, "s3cret") as client:
            assert client.answers()
            assert b"GET /healthz" in server.heard
            assert b"s3cret" not in server.heard


# ----------------------------------------------------------------------------------- certificates


def test_a_certificate_that_changed_is_refused_until_the_token_file_is_copied_again(
    real: Real,
):
    with _client(real) as client:
        assert () == client.ask(RunsQuestion())
    real.kill()
    shutil.rmtree(real.data)
    real.start()
    with _client(real) as client, pytest.raises(ServerIdentityError) as caught:
        client.ask(RunsQuestion())
    assert "its certificate is not the one in the token file (SHA-256 " in caught.value.text
    assert "copy its tokens.json here again" in caught.value.hint
    real.copy_tokens()
    with _client(real) as client:
        assert () == client.ask(RunsQuestion())


def _client(real: Real) -> CollectorClient:
    tokens = read_tokens(real.tokens)
    return CollectorClient(real.url, tokens.read, tls=tokens.tls, timeout=60.0)


def test_collectors_of_one_token_file_add_their_certificates(real: Real, tmp_path: Path):
    other = Real(_made(tmp_path / "second"))
    _made(other.data)
    shutil.copy(real.tokens, other.data / "tokens.json")
    other.start()
    try:
        shutil.copy(other.data / "tokens.json", real.tokens)
        for url in (real.url, other.url):
            tokens = read_tokens(real.tokens)
            with CollectorClient(url, tokens.read, tls=tokens.tls, timeout=60.0) as client:
                assert () == client.ask(RunsQuestion())
    finally:
        other.kill()


def test_a_collector_older_than_its_clients_is_refused_in_words(tmp_path: Path):
    data = _made(tmp_path / "data")
    old = {"url": "http://127.0.0.1:9", "pid": os.getpid(), "node": socket.gethostname()}
    (data / "collector.json").write_text(json.dumps(old))
    (data / "collector.json").chmod(0o600)
    found = collector_on(data)
    assert found is not None
    with pytest.raises(UsageError, match="plain HTTP") as caught:
        CollectorClient(found.url, "token")
    assert "An older version of the collector has none: update it." in caught.value.hint


@pytest.mark.parametrize("option", ["--tls-key", "--tls-ca"])
def test_half_of_a_certificate_is_a_clear_error(tmp_path: Path, capsys, option: str):
    (tmp_path / "x.pem").touch()
    arguments = ["--data", str(tmp_path / "data"), option, str(tmp_path / "x.pem")]
    assert 2 == main(["collector", *arguments])
    assert f"{option} is given without --tls-cert" in capsys.readouterr().err


def issued(folder: Path, name: str, ca: tuple | None = None) -> tuple:
    """Make a CA, or a certificate for a name that it signed: key, certificate, PEM file of both."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    issuer_key, issuer = (key, subject) if ca is None else (ca[0], ca[1].subject)
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=ca is None, path_length=None), critical=True)
        .sign(issuer_key, hashes.SHA256())
    )
    pem = certificate.public_bytes(Encoding.PEM)
    path = folder / f"{name}.pem"
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    path.write_bytes(pem if ca is None else secret + pem)
    return key, certificate, path


def test_a_ca_of_ones_own_and_clients_that_show_a_certificate(tmp_path: Path):
    """With --tls-ca the certificate may change and the name may not; --tls-client-ca asks back."""
    ca, clients = issued(tmp_path, "our-ca"), issued(tmp_path, "client-ca")
    server, client = issued(tmp_path, "localhost", ca), issued(tmp_path, "node-7", clients)
    real = Real(tmp_path)
    options = ("--tls-cert", str(server[2]), "--tls-ca", str(ca[2]))
    real.start(*options, "--tls-client-ca", str(clients[2]))
    try:
        real.copy_tokens()
        url = f"https://localhost:{real.port}"
        tokens = read_tokens(real.tokens)
        assert () == tokens.tls.certificates
        asks = CollectorClient(url, tokens.read, tls=tokens.tls, timeout=60.0)
        with asks, pytest.raises(TransportError) as caught:
            asks.ask(RunsQuestion())
        assert "client_cert" in caught.value.hint
        tls = msgspec.structs.replace(tokens.tls, client_cert=str(client[2]))
        with CollectorClient(url, tokens.read, tls=tls, timeout=60.0) as asks:
            assert () == asks.ask(RunsQuestion())
        asks = CollectorClient(real.url, tokens.read, tls=tls, timeout=60.0)
        with asks, pytest.raises(ServerIdentityError, match="not a trusted one"):
            asks.ask(RunsQuestion())  # 127.0.0.1 is not its name
        found = collector_on(real.data)
        assert found is not None
        with CollectorClient(found.url, tokens.read) as asks:  # by the socket none is needed
            assert () == asks.ask(RunsQuestion())
    finally:
        real.kill()


# ---------------------------------------------------------------------------- the socket's folder


@contextlib.contextmanager
def listening(folder: Path) -> Iterator[Path]:
    path = folder / "collector.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        yield path


def test_a_socket_is_only_used_in_a_folder_that_is_ours_alone(tmp_path: Path):
    folder = _made(tmp_path / "own")
    with listening(folder) as path:
        connect_unix(path, 1.0).close()
        (tmp_path / "link").symlink_to(folder)
        with pytest.raises(ServerIdentityError, match="is a link or no folder"):
            connect_unix(tmp_path / "link" / path.name, 1.0)
        folder.chmod(0o770)
        with pytest.raises(ServerIdentityError, match="mode 0770: another user may listen"):
            connect_unix(path, 1.0)


@as_root
def test_the_folder_of_another_user_is_refused(tmp_path: Path):
    folder = _made(tmp_path / "own")
    with listening(folder) as path:
        os.chown(folder, NOBODY, NOBODY)
        with pytest.raises(ServerIdentityError, match=f"belongs to user {NOBODY}"):
            connect_unix(path, 1.0)


@as_root
def test_another_users_program_behind_a_socket_of_ours_is_refused(tmp_path: Path):
    path = _made(tmp_path / "own") / "collector.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        with planted(listener, tmp_path) as server:
            with pytest.raises(ServerIdentityError, match=f"user {NOBODY} listens"):
                connect_unix(path, 1.0)
            client = CollectorClient(f"unix:{path}", "s3cret")
            with client, pytest.raises(ServerIdentityError, match=f"user {NOBODY} listens"):
                client.ask(RunsQuestion())
        assert b"s3cret" not in server.heard


def test_a_path_too_long_for_a_socket_is_reached_all_the_same(tmp_path: Path):
    folder = tmp_path
    for _ in range(8):
        folder = _made(folder / ("x" * 30))
    collector = Real(folder)
    collector.start()
    try:
        found = collector_on(collector.data)
        assert found is not None
        assert found.url == f"unix:{collector.data}/collector.sock"
        with CollectorClient(found.url, found.tokens.read) as client:
            assert () == client.ask(RunsQuestion())
    finally:
        collector.kill()
