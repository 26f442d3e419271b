"""The lake's files on S3, against a server that speaks its interface over HTTP."""

import contextlib
import itertools
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import typer
from typer.testing import CliRunner

from tests.collector.numbers.written import OTHER_RUN, RUN, batch, identity
from tests.collector.rows import Writer, num_stored
from tests.support import levels
from tests.support.damage import answers, sent
from tests.support.forked import COMMANDS
from tests.support.lake_writer import WRITER
from tests.support.numbers import losses
from tests.support.rolled_memory import RolledMemory
from trainvitals.cli.groups import add_commands
from trainvitals.errors import MissingDependencyError, StorageError, UsageError
from vitals_collector.cli import sql
from vitals_collector.ingest.ingest import ingest
from vitals_collector.numbers import lake_engine
from vitals_collector.numbers.interface import RowSpan
from vitals_collector.numbers.lake import Lake
from vitals_collector.numbers.lake_engine import S3FileStore
from vitals_collector.numbers.lake_sql import LakeReader
from vitals_collector.numbers.memory import MemoryNumberStore
from vitals_collector.retention.backup import copy_lake
from vitals_collector.storage.store import open_data_store

pytestmark = pytest.mark.servers
KEYS = {
    "AWS_ACCESS_KEY_ID": "AKIDNOBODY",
    "AWS_SECRET_ACCESS_KEY": "se'cret/of+nobody",
    "AWS_SESSION_TOKEN": "token-of-nobody",
    "AWS_REGION": "us-east-1",
}
_SIGNED = {
    "Authorization": "AWS4-HMAC-SHA256 Credential=x/20250101/us-east-1/s3/aws4_request,"
    " SignedHeaders=host, Signature=x"
}
_NUMBERS = itertools.count()


class S3:
    """A server of buckets that can be away for a while."""

    def __init__(self) -> None:
        server = pytest.importorskip("moto.server")
        self._make = lambda port: server.ThreadedMotoServer("127.0.0.1", port, verbose=False)
        self._server = self._make(0)
        self._server.start()
        self.port = int(self._server.get_host_and_port()[1])
        self.url = f"http://127.0.0.1:{self.port}"

    def bucket(self) -> str:
        """Return the address of a new bucket's prefix."""
        name = f"bucket-{next(_NUMBERS)}"
        self.request("PUT", name)
        return f"s3://{name}/lakes/one"

    def request(self, method: str, path: str, content: bytes = b"") -> bytes:
        """Return what is answered."""
        answer = httpx.request(
            method, f"{self.url}/{path}", content=content, headers=_SIGNED, trust_env=False
        )
        answer.raise_for_status()
        return answer.content

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        """Refuse connections meanwhile."""
        self._server.stop()
        yield
        self._server = self._make(self.port)
        self._server.start()

    @contextlib.contextmanager
    def asking_for_keys(self) -> Iterator[None]:
        """Refuse keys meanwhile that are nobody's."""
        self.request("POST", "moto-api/reset-auth", b"0")
        yield
        self.request("POST", "moto-api/reset-auth", b"inf")

    def close(self) -> None:
        """End it."""
        self._server.stop()


@pytest.fixture(scope="module")
def server() -> Iterator[S3]:
    with contextlib.closing(S3()) as server:
        yield server


@pytest.fixture
def s3(server: S3, monkeypatch: pytest.MonkeyPatch) -> S3:
    """Give the server, its address and keys in the environment."""
    for name, value in (KEYS | {"AWS_ENDPOINT_URL": server.url}).items():
        monkeypatch.setenv(name, value)
    return server


def test_a_lake_on_s3_answers_as_memory_does_and_leaves_no_file_here(
    s3: S3, tmp_path: Path
) -> None:
    bucket = s3.bucket()
    memory, lake = MemoryNumberStore(), Lake(tmp_path, bucket=bucket)
    batches = sent()
    for first in range(0, len(batches), 4):
        assert lake.append(batches[first : first + 4]) == memory.append(batches[first : first + 4])
        assert lake.append(batches[first : first + 4]) == [0] * 4
    assert answers(lake, RUN) == answers(memory, RUN)
    assert lake.merge()
    assert lake.check() == []
    aside = lake.engine._place.deferred_checksums()
    assert {path.split("/")[0] for path, _ in aside} >= {"steps"}
    lake.merge()  # now they are beside the others
    assert not set(aside) & set(lake.engine._place.deferred_checksums())
    assert lake.check() == []
    lake.delete(OTHER_RUN)
    lake.close()
    assert not list(tmp_path.rglob("*.parquet"))

    again = Lake(tmp_path)  # the catalogue says where its files are
    assert answers(again, RUN) == answers(memory, RUN)
    assert again.num_rows(RowSpan(OTHER_RUN, "steps")) == 0
    assert again.append(batches[:4]) == [0] * 4
    assert again.check() == []
    again.close()
    with pytest.raises(StorageError, match="is not the lake of this database"):
        Lake(tmp_path, bucket=s3.bucket())
    with pytest.raises(UsageError, match=bucket) as caught:
        copy_lake(tmp_path, tmp_path / "copy")
    assert "versions" in caught.value.hint


@pytest.mark.nightly
def test_levels_on_s3_are_those_of_memory(s3: S3, tmp_path: Path) -> None:
    memory, lake = RolledMemory(), Lake(tmp_path, bucket=s3.bucket())
    for numbers in (memory, lake):
        levels.fill(numbers, num_ranks=6, num=300)
    assert lake.roll_up(RUN, levels.FIRST, 2) == memory.roll_up(RUN, levels.FIRST, 2)
    assert levels.kept_rows(lake) == levels.kept_rows(memory)
    assert lake.check() == []
    lake.close()


@pytest.mark.nightly
def test_a_flipped_bit_in_a_bucket_is_told_and_its_rows_are_taken_again_once(
    s3: S3, tmp_path: Path
) -> None:
    bucket = s3.bucket()
    memory, lake = MemoryNumberStore(), Lake(tmp_path, bucket=bucket)
    lake.append(sent())
    memory.append(sent())
    lake.close()
    lake = Lake(tmp_path)
    (path,) = lake.engine._place.paths("steps")
    name = f"{bucket.removeprefix('s3://')}/data/main/{path}"
    content = bytearray(s3.request("GET", name))
    content[len(content) // 3] ^= 4
    s3.request("PUT", name, bytes(content))
    with pytest.raises(StorageError, match=f"{path} is damaged"):
        answers(lake, RUN)
    assert [file.path for file in lake.check()] == [path]
    assert [file.path for file in lake.drop_damaged_files()] == [path]
    assert sum(lake.append(sent())) == sum(b.header.num_rows for b in sent())
    assert answers(lake, RUN) == answers(memory, RUN)

    (path, *_) = [
        path for path, is_live, _ in lake.engine.files.list_table_files("steps") if is_live
    ]
    lake.close()
    lake = Lake(tmp_path)
    s3.request("DELETE", f"{bucket.removeprefix('s3://')}/data/main/{path}")
    assert path in [file.path for file in lake.check()]
    lake.close()


@pytest.mark.parametrize("num_kills", [2, pytest.param(10, marks=pytest.mark.slow)])
@pytest.mark.nightly
def test_what_was_stored_on_s3_is_there_once_after_a_kill_at_any_moment(
    s3: S3, tmp_path: Path, num_kills: int
) -> None:
    bucket, rng, told = s3.bucket(), random.Random(7), -1
    Lake(tmp_path, bucket=bucket).close()
    for _ in range(num_kills):
        with COMMANDS.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
        ) as writer:
            assert writer.stdout is not None
            assert int(writer.stdout.readline().split()[1]) >= told
            for _ in range(rng.randint(3, 9)):
                told = int(writer.stdout.readline().split()[1])
            time.sleep(rng.uniform(0.0, 0.1))  # anywhere in a commit or a merge
            writer.kill()
            for line in writer.stdout:
                told = int(line.split()[1])
    lake = Lake(tmp_path)
    last = lake.mark((RUN, identity().incarnation, "steps"))
    assert last >= told > 10
    assert losses(lake) == [float(i) for i in range(last + 1)]
    assert lake.check() == []
    lake.close()


@pytest.mark.nightly
def test_collectors_on_one_postgresql_and_one_bucket_answer_the_same(
    s3: S3, postgres: str, tmp_path: Path
) -> None:
    bucket = s3.bucket()
    writers = Writer(), Writer("rank:1")
    with (
        contextlib.closing(open_data_store(tmp_path / "a", postgres, lake=bucket)) as first,
        contextlib.closing(open_data_store(tmp_path / "b", postgres)) as second,
    ):
        for _ in range(2):
            for store, writer in zip((first, second), writers, strict=True):
                ingest(store, writer.steps(range(3)))
        first.numbers.merge()
        ingest(second, writers[1].steps(range(3)))
        assert 15 == num_stored(first) == num_stored(second)
    app = typer.Typer()
    add_commands(app, {"sql": (sql.sql, "vitals sql QUERY")})
    asked = ["SELECT count(*) AS num FROM ranks", "--database", postgres, "--format", "json"]
    answer = CliRunner().invoke(app, [*asked, "--data", str(tmp_path / "elsewhere")])
    assert '"num": 15' in answer.output, answer.output


@pytest.mark.nightly
def test_sql_reads_a_bucket_and_nothing_beside_it(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    bucket = s3.bucket()
    with contextlib.closing(Lake(tmp_path, bucket=bucket)) as lake:
        lake.append(sent())
    with LakeReader(tmp_path, bucket=bucket) as reader:
        assert reader.ask("SELECT count(*), max(loss) FROM ranks").rows == [(120, 129.0)]
        for question in (
            f"SELECT * FROM read_text('{s3.bucket()}/x')",
            "SELECT * FROM duckdb_secrets()",
            "SELECT * FROM duckdb_settings()",
        ):
            with pytest.raises(UsageError):
                reader.ask(question)
    assert list(home.rglob("*")) == []  # no keys are kept there


@pytest.mark.nightly
def test_while_s3_is_away_commits_are_refused_and_later_all_rows_are_there_once(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.closing(S3()) as alone:
        monkeypatch.setenv("AWS_ENDPOINT_URL", alone.url)
        _lose_for_a_while(alone, tmp_path)


def _lose_for_a_while(s3: S3, tmp_path: Path) -> None:
    lake = Lake(tmp_path, bucket=s3.bucket())
    rows = [batch(identity(), [{"loss": float(i)}], first_seq=i) for i in range(3)]
    lake.append(rows[:1])
    with s3.away():
        with pytest.raises(StorageError) as caught:
            lake.append(rows[:2])
        assert "AWS_ENDPOINT_URL" in caught.value.hint
        with pytest.raises(StorageError):  # and not taken for damage, which would remove rows
            lake.drop_damaged_files()
        with pytest.raises(StorageError, match="Could not connect"):
            Lake(tmp_path)
    assert lake.append(rows) == [0, 1, 1]
    assert losses(lake) == [0.0, 1.0, 2.0]
    assert lake.drop_damaged_files() == []
    lake.close()


def test_what_is_wrong_with_a_bucket_is_said_without_its_keys(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket, messages = s3.bucket(), []

    def refused(kind: type[Exception], match: str, where: str = bucket) -> str:
        with pytest.raises(kind, match=match) as caught:
            Lake(tmp_path / str(len(messages)), bucket=where)
        text = f"{caught.value} {getattr(caught.value, 'hint', '')}"
        messages.append(text)
        return text

    assert "make it" in refused(StorageError, "NoSuchBucket", "s3://nobodys/lake")
    with s3.asking_for_keys():
        assert "AWS_ACCESS_KEY_ID" in refused(StorageError, "403")
    refused(UsageError, "s3://BUCKET", "s3://bucket/with*star")
    with monkeypatch.context() as patch:
        find = lake_engine.find_spec
        patch.setattr(lake_engine, "find_spec", lambda n: None if "httpfs" in n else find(n))
        assert "trainvitals[s3]" in refused(MissingDependencyError, "httpfs")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    refused(UsageError, "AWS_SECRET_ACCESS_KEY not set")
    for text in messages:
        assert not any(KEYS[name] in text for name in KEYS if name != "AWS_REGION")


def test_files_are_looked_for_by_their_time_however_the_clock_is_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    class _Nothing:
        def column(self, index: int) -> "_Nothing":
            return self

        def to_pylist(self) -> list[str]:
            return []

    def ask(question: str) -> _Nothing:
        asked.append(question)
        return _Nothing()

    place, now = S3FileStore("s3://bucket", ask), [0x0199_0000_0F80 / 1000]
    monkeypatch.setattr("time.time", lambda: now[0])
    statements = ["INSERT INTO steps BY NAME SELECT * FROM rows", "SELECT * FROM marks"]
    for jump, prefix in ((0.0, "01990000-0f"), (3.0, "01990000*"), (-90.0, "01")):
        place.on_transaction_start()
        now[0] += jump
        place.written(statements)
        assert f"/steps/ducklake-{prefix}" in asked[-1], asked
        assert "marks" not in asked[-1]
