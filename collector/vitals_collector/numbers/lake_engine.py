"""DuckDB with a DuckLake attached: connections, transactions, questions, files made durable.

DuckDB's SQLite catalogue is synced at each commit; its Parquet files are not, so a transaction
syncs them itself before it ends (seen with strace). On S3 what was written is there.
"""

import ctypes
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

import duckdb
import pyarrow as pa

from trainvitals.errors import MissingDependencyError, StorageError
from vitals_collector.numbers.full_disk import full_error, is_full
from vitals_collector.numbers.lake_files import CHECKSUM_COLUMNS, CHECKSUMS, Files
from vitals_collector.numbers.lake_place import (
    Bucket,
    Folder,
    Place,
    known_bucket,
    s3_hint,
    without_keys,
)

_INLINED_ROWS = 2_000
"""More of them lie in a file, which is quicker."""
_PASSWORD = re.compile(r"password=.*")
"""To the end of the line: it is the last of the words for libpq, and may have spaces and quotes."""
_MOST_COMMITS = 50
"""After which upkeep opens the database anew, for .3 s of CPU."""


class Engine:
    """One process's way to a lake: one connection that writes, others that read."""

    def __init__(self, folder: Path, catalogue: str, memory_limit: str, bucket: str = "") -> None:
        """Attach the lake; see ``Lake``."""
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.lock = threading.RLock()
        """Held by who changes the lake: of one process, two at once would refuse each other."""
        self.is_unsure = False
        """Whether a commit ended without an answer: what is remembered may not hold any more."""
        self._statements: list[str] = []
        """Of the transaction under way."""
        bucket = bucket or ("" if catalogue else known_bucket(folder / "catalogue.sqlite"))
        self._place: Place = Bucket(bucket, self.ask) if bucket else Folder(folder)
        self._readers: list[tuple[duckdb.DuckDBPyConnection, duckdb.DuckDBPyConnection]] = []
        """Each with the connection that it came from."""
        self._catalogue, self._memory_limit = catalogue, memory_limit
        self._num_commits = 0
        self._kept_checksums: list[tuple[str, int]] = []
        self.files = Files(self._place, self.ask)
        with translated():
            self._root = self._attached()
            self._place.prepare()
        self.execute(f"CREATE TABLE IF NOT EXISTS {CHECKSUMS} ({CHECKSUM_COLUMNS})")
        self.inline(CHECKSUMS)

    def _attached(self) -> duckdb.DuckDBPyConnection:
        # Nothing is downloaded, and nothing is copied into somebody's home. What is loaded lies
        # beside this program's own code; to hash it each time takes .2 s of CPU.
        root = duckdb.connect(
            config={
                "autoinstall_known_extensions": False,
                "autoload_known_extensions": False,
                "allow_unsigned_extensions": True,
            }
        )
        catalogue, folder = self._catalogue, self.folder
        scanner = "postgres_scanner" if catalogue else "sqlite_scanner"
        uri = (
            f"postgres:{escaped(catalogue)}"
            if catalogue
            else f"sqlite:{folder / 'catalogue.sqlite'}"
        )
        # A folder may be moved with the catalogue in it; one beside it must be the lake's own, or
        # what another collector has stored there would be missing. SQLite's log lets one read while
        # another writes; who has to wait does, for so long.
        of_catalogue = "" if catalogue else ", META_JOURNAL_MODE 'WAL', META_BUSY_TIMEOUT 10000"
        if not catalogue and isinstance(self._place, Folder):
            of_catalogue += ", OVERRIDE_DATA_PATH true"
        for name in ("ducklake", scanner, *self._place.extensions):
            root.execute(f"LOAD '{extension(name)}'")
        root.execute(f"SET memory_limit = '{self._memory_limit}'")
        root.execute("SET threads = 1")  # the cores belong to the training
        self._place.enter(root)
        root.execute(f"SET temp_directory = '{folder / 'spill'}'")
        # Several collectors commit at once: a conflict is tried again.
        root.execute("SET ducklake_max_retry_count = 100")
        try:
            root.execute(
                f"ATTACH 'ducklake:{uri}' AS lake"
                f" (DATA_PATH '{self._place.root}', DATA_INLINING_ROW_LIMIT 0{of_catalogue})"
            )
        except duckdb.Error as error:
            if "does not match existing data path" not in str(error):
                raise
            raise StorageError(
                f"{self._place.root} is not the lake of this database:"
                f" {str(error).splitlines()[0]}",
                hint="give that place with --lake, the same one to all collectors",
            ) from error
        root.execute("USE lake")
        return root

    def give_back_memory(self) -> None:
        """Return to the system what was needed for a moment.

        DuckLake 1.5.5 remembers something of every commit, 20 to 200 KB, until its database is
        closed: so another one is opened, and questions under way end on the one before.
        """
        if self._num_commits >= _MOST_COMMITS:
            with self.lock, translated():
                before, self._root = self._root, self._attached()
                before.close()
                self._num_commits = 0
                kept, self._readers = self._readers, []
                for _, reader in kept:
                    reader.close()
        pa.default_memory_pool().release_unused()
        with suppress(AttributeError):  # not glibc
            ctypes.CDLL(None).malloc_trim(0)

    def close(self) -> None:
        """End what is under way and let the catalogue go."""
        with self.lock:
            for connection in (*(reader for _, reader in self._readers), self._root):
                connection.close()

    # --------------------------------------------------------------------------------- writing

    @contextmanager
    def transaction(self, *, is_merge: bool = False) -> Iterator[None]:
        """Make one commit of what ``execute`` is given meanwhile, durable when it ends.

        A commit that merges files cannot hold their checksums as well (DuckLake refuses that):
        they lie in files of their own until ``keep_checksums``.

        Raises:
            StorageError: nothing was changed, or (``is_unsure``) nobody knows.
        """
        with self.lock, translated():
            self._root.execute("BEGIN")
            self._statements.clear()
            self._place.begin()
            try:
                yield
                # A file of another collector may be among them: its own checksum counts beside
                # this one.
                paths = self._place.written(self._statements)
                checksums = [self.files.written(path) for path in paths]
                if is_merge:
                    self._place.set_aside(checksums)
                elif checksums:
                    self._insert_checksums(checksums)
                self._commit()
            except BaseException:
                # Whether a commit that failed was one is known to the catalogue alone, and another
                # collector may have made what this one was about to make.
                self.is_unsure = True
                with suppress(duckdb.Error):  # a commit that failed has ended it already
                    self._root.execute("ROLLBACK")
                raise

    @contextmanager
    def catalogue_transaction(self) -> Iterator[None]:
        """Change the catalogue's own tables together, which no transaction of the lake can."""
        with self.lock, translated():
            self._root.execute("BEGIN")
            try:
                yield
                self._root.execute("COMMIT")
            except BaseException:
                with suppress(duckdb.Error):
                    self._root.execute("ROLLBACK")
                raise

    def execute(
        self, sql: str, values: Sequence[object] = (), rows: pa.Table | None = None
    ) -> None:
        """Run a statement on the writing connection; ``rows`` is a table of that name in it.

        Raises:
            StorageError: DuckDB refused.
        """
        with self.lock, translated():  # "rows" is found by its name
            self._statements.append(sql)
            self._root.execute(sql, list(values))

    def read(self, sql: str) -> pa.Table:
        """Return a question's answer as the transaction under way sees the lake.

        Raises:
            StorageError: DuckDB refused.
        """
        with self.lock, translated():
            self._statements.append(sql)
            return self._root.execute(sql).to_arrow_table()

    def insert(self, table: str, rows: pa.Table) -> None:
        """Add rows to a table, by the names of their columns."""
        self.execute(f"INSERT INTO {table} BY NAME SELECT * FROM rows", rows=rows)

    def _commit(self) -> None:
        self._root.execute("COMMIT")
        self._num_commits += 1

    def keep_checksums(self) -> None:
        """Put the checksums of merged files beside the others.

        Their own files stay until the next time: who copies the lake finds one or the other.
        """
        self._place.clear_aside(self._kept_checksums)
        self._kept_checksums = self._place.aside()
        if self._kept_checksums:
            with self.transaction():
                self._insert_checksums(self._kept_checksums)

    def _insert_checksums(self, checksums: Sequence[tuple[str, int]]) -> None:
        paths, crcs = zip(*checksums, strict=True)
        self.insert(CHECKSUMS, pa.table({"path": list(paths), "crc": list(crcs)}))

    def inline(self, table: str) -> None:
        """Let few rows at a time of this table lie in the catalogue itself."""
        inlined = self.ask(
            "SELECT scope_entry FROM ducklake_options('lake')"
            " WHERE option_name = 'data_inlining_row_limit'"
        )["scope_entry"].to_pylist()
        if f"main.{table}" not in inlined:
            self.execute(
                f"CALL lake.set_option('data_inlining_row_limit', {_INLINED_ROWS},"
                f" table_name => '{table}')"
            )

    # --------------------------------------------------------------------------------- reading

    def ask(
        self, sql: str, values: Sequence[object] = (), tables: Mapping[str, pa.Table] | None = None
    ) -> pa.Table:
        """Return a question's answer; ``tables`` can be read in it by their names.

        Raises:
            StorageError: DuckDB refused.
        """
        with translated(), self._cursor() as reader:
            for name, table in (tables or {}).items():
                reader.register(name, table)
            try:
                return reader.execute(sql, list(values)).to_arrow_table()
            finally:
                for name in tables or {}:
                    reader.unregister(name)

    @contextmanager
    def _cursor(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """Give a way of its own to the lake, for one reader at a time.

        They are kept: a new one costs a third of a small question.
        """
        root, reader = self._root, None
        while self._readers and reader is None:
            with suppress(IndexError):  # another thread took it
                of_root, kept = self._readers.pop()
                if of_root is root:
                    reader = kept
                else:
                    kept.close()
        if reader is None:
            reader = root.cursor()
            reader.execute("USE lake")
        yield reader
        self._readers.append((root, reader))  # but for one that failed


def extension(name: str) -> Path:
    """Return the file of an extension, which comes as a package of DuckDB's own version.

    Raises:
        MissingDependencyError: it is not installed.
    """
    spec = find_spec(f"duckdb_extension_{name}")
    places = [] if spec is None else spec.submodule_search_locations or []
    for place in places:
        for path in Path(place).glob(f"extensions/v{duckdb.__version__}/{name}.duckdb_extension"):
            return path
    extra = {"postgres_scanner": "postgresql", "httpfs": "s3"}.get(name, "collector")
    raise MissingDependencyError(
        f"DuckDB {duckdb.__version__} lacks its extension {name}",
        hint=f"pip install 'trainvitals[{extra}]'",
    )


def escaped(text: str) -> str:
    """Return a text as it stands between SQL's quotes."""
    return text.replace("'", "''")


@contextmanager
def translated() -> Iterator[None]:
    """Raise what DuckDB and the disk refuse as StorageError."""
    try:
        yield
    except (duckdb.Error, OSError) as error:
        # What could not be attached is named with all it was given.
        text = without_keys(_PASSWORD.sub("password=***", str(error).strip()))
        if is_full(text):
            raise full_error("the lake", text) from error
        what = "files cannot be kept" if isinstance(error, OSError) else "engine refused"
        raise StorageError(f"the lake's {what}: {text}", hint=s3_hint(text)) from error
