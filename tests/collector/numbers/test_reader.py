"""People ask the lake in SQL: live, and nothing but questions about it is answered."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.collector.numbers.written import OTHER_RUN, RUN, batch, identity
from tests.support.forked import COMMANDS
from trainvitals.errors import StorageError, UsageError
from vitals_collector.numbers.lake import Lake
from vitals_collector.numbers.lake_sql import LakeReader


@pytest.fixture
def lake(tmp_path: Path) -> Iterator[Lake]:
    """Give a lake with rows of two runs."""
    with filled(tmp_path) as lake:
        yield lake


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Lake, LakeReader, Path]]:
    """Give a lake that no test may change, its reader and its folder."""
    folder = tmp_path_factory.mktemp("attacked")
    with filled(folder) as lake, LakeReader(folder) as reader:
        yield lake, reader, folder


@contextmanager
def filled(folder: Path) -> Iterator[Lake]:
    """Give a lake with rows of two runs."""
    lake = Lake(folder)
    for run in (RUN, OTHER_RUN):
        for rank in (0, 1):
            rows = [{"loss": float(rank * 10 + i), "epoch": 3.0} for i in range(3)]
            lake.append([batch(identity(run, rank=rank), rows)])
    kinds = {"layer": "i8", "norm": "f8"}
    lake.append([batch(identity(), [{"layer": 1, "norm": 2.0}], kinds=kinds, stream="layers")])
    yield lake
    lake.close()


@pytest.fixture
def reader(lake: Lake, tmp_path: Path) -> Iterator[LakeReader]:
    """Give a reader of that lake."""
    with LakeReader(tmp_path) as reader:
        yield reader


def test_views_name_runs_and_see_what_was_committed_last(lake: Lake, reader: LakeReader) -> None:
    assert sorted(reader.ask("FROM runs").rows) == [(RUN,), (OTHER_RUN,)]
    losses = f"SELECT step, loss FROM steps WHERE run_id = '{RUN}' ORDER BY step"
    assert reader.ask(losses) == (("step", "loss"), [(0, 0.0), (1, 1.0), (2, 2.0)], False)
    lake.append([batch(identity(), [{"loss": 9.0}], first_seq=3)])
    assert reader.ask(losses).rows[-1] == (3, 9.0)
    lake.merge()
    assert len(reader.ask(losses).rows) == 4
    ranks = "SELECT rank, max(loss) FROM ranks GROUP BY rank ORDER BY rank"
    assert reader.ask(ranks).rows == [(0, 9.0), (1, 12.0)]
    assert reader.ask("SELECT layer, norm FROM layers").rows == [(1, 2.0)]
    assert reader.ask("SELECT epoch FROM steps LIMIT 1").rows == [(3.0,)]
    assert "run" not in reader.ask("FROM steps").names
    assert reader.ask("EXPLAIN SELECT loss FROM steps").rows
    assert reader.ask("SELECT sum(i) FROM range(5) t(i)").rows == [(10,)]


ASKING = """
import sys, time
from pathlib import Path
from vitals_collector.numbers.lake_sql import LakeReader

counts, end = [], time.monotonic() + 60.0
with LakeReader(Path(sys.argv[1])) as reader:
    while len(set(counts)) < 5 and time.monotonic() < end:
        counts.append(reader.ask("SELECT count(*) FROM ranks").rows[0][0])
        print(counts[-1], flush=True)
"""
"""Counts rows until five different counts were seen."""


def test_another_process_reads_while_this_one_commits(lake: Lake, tmp_path: Path) -> None:
    with COMMANDS.Popen(
        [sys.executable, "-c", ASKING, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        counts = [int(other.stdout.readline())]
        seq = 3
        while other.poll() is None:
            lake.append([batch(identity(), [{"loss": 9.0}], first_seq=seq)])
            seq += 1
        counts += [int(line) for line in other.stdout]
    assert other.returncode == 0
    assert counts == sorted(counts)
    assert len(set(counts)) == 5, "it sees commits of another process, each whole"
    assert counts[-1] <= 9 + seq
    with LakeReader(tmp_path) as reader:  # a commit that had to wait was made
        assert reader.ask("SELECT count(*) FROM ranks").rows == [(9 + seq,)]


@pytest.mark.parametrize(
    "sql",
    [
        "COPY steps TO '{folder}/data/x.csv'",
        "EXPLAIN ANALYZE COPY (SELECT 1) TO '{folder}/data/x.csv'",
        "EXPLAIN COPY (SELECT 1) TO '{folder}/data/x.csv'",
        "ATTACH '{folder}/catalogue.sqlite' AS again",
        "PRAGMA database_list",
        "SET memory_limit = '90GB'",
        "RESET memory_limit",
        "INSTALL httpfs",
        "LOAD httpfs",
        "CREATE TABLE lake.mine AS SELECT 1",
        "CREATE TEMP TABLE mine AS SELECT 1",
        "DROP VIEW steps",
        "INSERT INTO lake.runs VALUES ('x', 1)",
        "DELETE FROM lake.steps",
        "WITH a AS (SELECT 1) DELETE FROM lake.steps",
        "SELECT 1; SELECT 2",
        "SELECT 1; DROP VIEW steps",
        "CALL ducklake_cleanup_old_files('lake')",
        "SELECT * FROM ducklake_cleanup_old_files('lake', cleanup_all => true)",
        "SELECT * FROM ducklake_expire_snapshots('lake', versions => [1])",
        "SELECT (SELECT count(*) FROM ducklake_delete_orphaned_files('lake'))",
        "SELECT * FROM lake.set_option('target_file_size', '1MB')",
        "SELECT * FROM read_csv('/etc/passwd')",
        "SELECT * FROM read_text('/etc/passwd')",
        "SELECT * FROM '/etc/passwd'",
        "SELECT * FROM '/etc/passwd.csv'",
        "SELECT * FROM glob('/*')",
        "SELECT * FROM query('SELECT 1')",
        "SELECT * FROM sqlite_scan('{folder}/catalogue.sqlite', 'ducklake_table')",
        "SELECT getenv('HOME')",
        "SELECT system.main.getenv('HOME')",
        "SELECT getenv('HO' || 'ME') FROM steps ORDER BY getenv('HOME')",
        "SELECT list_transform([1], x -> getenv('HOME'))",
        "SELECT current_setting('allowed_directories')",
        "SELECT json_serialize_plan('SELECT * FROM lake.runs')",
        "SELECT sleep_ms(1)",
        "SELECT * FROM lake.runs",
        "SELECT * FROM main.steps",
        "SELECT * FROM __ducklake_metadata_lake.ducklake_data_file",
        'SELECT * FROM "__ducklake_metadata_lake"."ducklake_data_file"',
        'SELECT * FROM "__DUCKLAKE_metadata_lake".main.ducklake_metadata',
        "SELECT 1 WHERE EXISTS (FROM __ducklake_metadata_lake.ducklake_metadata)",
        "SELECT * FROM steps JOIN lake.marks USING (seq)",
        "SELECT * FROM steps, LATERAL (SELECT * FROM lake.marks)",
        "SELECT (WITH b AS (FROM lake.marks) SELECT count(*) FROM b)",
        "SELECT * FROM duckdb_settings",
        "SELECT * FROM duckdb_databases()",
        "SELECT * FROM duckdb_secrets()",
        "SELECT * FROM pragma_database_list",
        "SELECT * FROM sqlite_master",
        "SELECT * FROM information_schema.tables",
        "WITH pragma_database_list AS (SELECT 1) SELECT * FROM pragma_database_list",
        "SELECT (WITH duckdb_settings AS (SELECT 1) SELECT 1) FROM duckdb_settings",
        "DESCRIBE steps",
        "SUMMARIZE steps",
        "FROM (SHOW DATABASES)",
        "SHOW TABLES",
        "PIVOT steps ON rank USING sum(loss)",
        "SELECT * FROM parquet_metadata('{folder}/data/**')",
        "SELECT * FROM read_parquet('{folder}/data/**')",
        "SELECT * FROM postgres_query('db', 'SELECT 1')",
        "SELECT * FROM sqlite_query('db', 'SELECT 1')",
        "SELECT * FROM ducklake_snapshots('lake')",
        "CREATE MACRO f() AS 1",
        "CALL pragma_version()",
        "SET VARIABLE a = 1",
        "COPY (SELECT 1) TO '/dev/stdout'",
        "/* a */ EXPLAIN COPY (SELECT 1) TO '{folder}/data/x.csv'",
        "EXPLAIN EXPLAIN SELECT 1",
        "CREATE SECRET s (TYPE s3)",
        "IMPORT DATABASE '{folder}'",
        "UPDATE EXTENSIONS",
        "BEGIN",
        "SELECT write_log('x')",
        "SELECT 1 WHERE (SELECT write_log('x')) IS NULL",
        "WITH a AS (SELECT * FROM read_blob('/etc/passwd')) SELECT * FROM a",
        "SELECT 1 UNION ALL SELECT count(*) FROM read_text('/etc/passwd')",
        "EXPLAIN SELECT * FROM read_text('/etc/passwd')",
        "PREPARE a AS SELECT 1",
        "EXECUTE a",
        "VACUUM",
        "CHECKPOINT",
        "EXPORT DATABASE '{folder}/data/e'",
        "USE lake",
        "DETACH lake",
        "this is no SQL",
        "",
    ],
)
def test_what_is_no_question_to_the_lake_is_refused(
    attacked: tuple[Lake, LakeReader, Path], sql: str
) -> None:
    _, reader, folder = attacked
    before = {path for path in folder.rglob("*") if path.suffix not in (".sqlite-shm",)}
    with pytest.raises(UsageError) as refused:
        reader.ask(sql.format(folder=folder))
    assert len(str(refused.value)) > 20
    after = {path for path in folder.rglob("*") if path.suffix not in (".sqlite-shm",)}
    assert before == after


def test_the_lake_is_as_it_was_after_all_that(attacked: tuple[Lake, LakeReader, Path]) -> None:
    lake, reader, _ = attacked
    assert lake.check() == []
    assert reader.ask("SELECT count(*) FROM ranks").rows == [(12,)]


def test_a_question_is_bounded_in_time_memory_and_rows(lake: Lake, tmp_path: Path) -> None:
    with LakeReader(tmp_path, max_seconds=0.3, memory_limit="32MB") as reader:
        with pytest.raises(StorageError, match=r"longer than 0\.3 s"):
            reader.ask("SELECT count(*) FROM range(10000000000) a(i), range(9) b(j)")
        with pytest.raises(StorageError, match=r"longer than 0\.3 s"):
            reader.ask("WITH RECURSIVE t(i) AS (SELECT 1 UNION ALL SELECT i FROM t) FROM t")
        answer = reader.ask("SELECT * FROM range(100)", max_rows=7)
        assert (len(answer.rows), answer.is_cut) == (7, True)
        assert not reader.ask("SELECT * FROM range(7)", max_rows=7).is_cut
    with LakeReader(tmp_path, max_seconds=60.0, memory_limit="32MB") as reader:
        with pytest.raises(StorageError, match="more than 32MB"):
            reader.ask("SELECT list(i) FROM range(100000000) t(i)")
        with pytest.raises(StorageError, match="more than 32MB"):
            reader.ask("SELECT a.loss FROM ranks a, ranks b, ranks c, range(10000000) ORDER BY 1")


def test_with_gives_parts_of_a_question_names(reader: LakeReader) -> None:
    sql = "WITH a AS (SELECT loss FROM steps) SELECT count(*) FROM A"
    assert reader.ask(sql).rows == [(6,)]
    assert reader.ask("FROM (VALUES (1), (2)) t(i) SELECT sum(i)").rows == [(3,)]
    # A name that reaches no further than its own part opens nothing.
    with pytest.raises(UsageError, match="DuckDB refuses"):
        reader.ask('SELECT (WITH "/etc/passwd" AS (SELECT 1) SELECT 1) FROM "/etc/passwd"')
    with pytest.raises(UsageError, match="DuckDB refuses"):
        reader.ask('SELECT (WITH "/etc/a.csv" AS (SELECT 1) SELECT 1) FROM "/etc/a.csv"')
