"""What the lake promises beyond every store of numbers: after a kill, with others, on disk."""

import os
import random
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import duckdb
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.collector.numbers.written import OTHER_RUN, RUN, batch, identity
from tests.support.examples import examples
from tests.support.forked import COMMANDS
from tests.support.lake_writer import WRITER
from tests.support.numbers import losses, new_lake, plain
from trainvitals.errors import InsecurePathError, StorageError
from vitals_collector.numbers import lake_engine, lake_maintenance
from vitals_collector.numbers.interface import RowSpan
from vitals_collector.numbers.lake import Lake
from vitals_collector.numbers.memory import MemoryNumberStore

NAMES = ("loss", "Loss", "z")
_SENT = st.tuples(
    st.sampled_from([RUN, OTHER_RUN]),
    st.integers(0, 2),
    st.integers(0, 6),
    st.lists(
        # Parquet's dictionaries take -0.0 for 0.0.
        st.dictionaries(
            st.sampled_from(NAMES), st.floats(width=64).map(lambda x: x + 0.0), max_size=3
        ),
        min_size=1,
        max_size=5,
    ),
)
_DONE = st.one_of(
    st.tuples(st.just("append"), st.lists(_SENT, min_size=1, max_size=4)),
    st.tuples(st.sampled_from(["merge", "open again"]), st.none()),
    st.tuples(st.just("delete"), st.sampled_from([RUN, OTHER_RUN])),
)


def test_rows_in_a_folder_of_many_users_are_closed_to_all_others(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o2777)
    lake = Lake(tmp_path / "shared")
    lake.append([batch(identity(RUN, rank=0), [{"loss": 1.0}], kinds={"loss": "f8"})])
    lake.close()
    inside = [path for path in (tmp_path / "shared").iterdir() if path.is_dir()]
    assert {"data", "checksums"} == {path.name for path in inside}
    assert {0o700} == {path.stat().st_mode & 0o777 for path in inside}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a folder another user's")
def test_a_folder_that_another_user_put_in_the_rows_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    os.chown(tmp_path / "data", 65534, 65534)
    with pytest.raises(InsecurePathError, match="belongs to user 65534"):
        Lake(tmp_path)


@settings(
    max_examples=examples(15),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(done=st.lists(_DONE, max_size=8))
def test_the_lake_gives_what_memory_gives(
    tmp_path_factory: pytest.TempPathFactory, done: list[tuple[str, object]]
) -> None:
    folder = tmp_path_factory.mktemp("lake")
    lake, memory = new_lake(folder), MemoryNumberStore()
    for what, how in done:
        if what == "append":
            assert isinstance(how, list)
            kinds = dict.fromkeys(NAMES, "f8")
            batches = [
                batch(identity(run, rank=rank), rows, first_seq=first, kinds=kinds)
                for run, rank, first, rows in how
            ]
            assert lake.append(batches) == memory.append(batches)
        elif what == "delete":
            lake.delete(str(how))
            memory.delete(str(how))
        elif what == "merge":
            lake.merge()
        else:
            lake.close()
            lake = Lake(folder)
    names = ("seq", "rank", "incarnation", *NAMES)
    for run in (RUN, OTHER_RUN):
        mine, expected = (store.scan(RowSpan(run, "steps"), names) for store in (lake, memory))
        assert {n: list(map(repr, plain(c))) for n, c in mine.items()} == {
            n: list(map(repr, plain(c))) for n, c in expected.items()
        }
    lake.close()


@pytest.mark.parametrize("num_kills", [3, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.nightly
def test_what_was_stored_is_there_once_after_a_kill_at_any_moment(
    tmp_path: Path, num_kills: int
) -> None:
    rng, told = random.Random(3), -1
    for _ in range(num_kills):
        with COMMANDS.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
        ) as writer:
            assert writer.stdout is not None
            assert int(writer.stdout.readline().split()[1]) >= told
            for _ in range(rng.randint(3, 9)):
                told = int(writer.stdout.readline().split()[1])
            time.sleep(rng.uniform(0.0, 0.05))  # anywhere in a commit or a merge
            writer.kill()
            for line in writer.stdout:
                told = int(line.split()[1])
    lake = Lake(tmp_path)
    last = lake.mark((RUN, identity().incarnation, "steps"))
    assert last >= told > 20
    assert losses(lake) == [float(i) for i in range(last + 1)]
    assert lake.check() == []  # every file has its checksum, whenever its writer was killed
    lake.close()


def test_files_are_synced_before_the_commit_that_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit that outlives a power loss must not name files that do not."""
    synced: set[str] = set()
    monkeypatch.setattr(lake_engine, "sync_path", lambda path: synced.add(str(path)))
    lake = new_lake(tmp_path)
    lake.append([batch(identity(), [{"loss": 1.0}])])
    for table in ("steps", "new_marks"):
        folder = tmp_path / "data" / "main" / table
        assert synced.issuperset({str(folder), *map(str, folder.iterdir())})

    lake.append([batch(identity(), [{"loss": 2.0}], first_seq=1)])
    before = set((tmp_path / "data" / "main" / "steps").iterdir())
    synced.clear()
    lake.merge()
    merged = set((tmp_path / "data" / "main" / "steps").iterdir()) - before
    assert merged
    assert synced.issuperset(map(str, merged))

    def refuse(path: Path) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(lake_engine, "sync_path", refuse)
    with pytest.raises(StorageError, match="No space left"):
        lake.append([batch(identity(), [{"loss": 3.0}], first_seq=2)])
    assert losses(lake) == [1.0, 2.0]
    monkeypatch.setattr(lake_engine, "sync_path", lambda path: None)
    assert lake.append([batch(identity(), [{"loss": 3.0}], first_seq=2)]) == [1]
    assert losses(lake) == [1.0, 2.0, 3.0]
    lake.close()


def test_a_commit_whose_end_was_not_heard_of_is_not_stored_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = new_lake(tmp_path)
    lake.append([batch(identity(), [{"loss": 1.0}])])

    commit = lake.engine._commit

    def commit_and_lose_the_answer() -> None:
        commit()
        raise duckdb.IOException("connection lost")

    monkeypatch.setattr(lake.engine, "_commit", commit_and_lose_the_answer)
    second = batch(identity(), [{"loss": 2.0}], first_seq=1)
    with pytest.raises(StorageError, match="connection lost"):
        lake.append([second])
    monkeypatch.setattr(lake.engine, "_commit", commit)
    assert lake.append([second]) == [0]
    assert losses(lake) == [1.0, 2.0]
    lake.close()


def test_two_writers_see_what_the_other_has_added(tmp_path: Path) -> None:
    """Two connections to one catalogue, as two collectors have them."""
    mine, theirs = new_lake(tmp_path), Lake(tmp_path)
    mine.append([batch(identity(rank=0), [{"loss": 1.0}])])
    # Theirs was opened before the table was there, and makes it too: refused, then it knows.
    other = batch(identity(OTHER_RUN, rank=1), [{"loss": 2.0, "z": 3.0}])
    for _ in range(3):
        try:
            assert theirs.append([other]) == [1]
            break
        except StorageError:
            continue
    assert plain(mine.scan(RowSpan(OTHER_RUN, "steps"), ["z"])["z"]) == [3.0]
    assert losses(theirs) == [1.0]
    mine.close()
    theirs.close()


def test_rows_are_stored_and_read_while_files_are_merged(tmp_path: Path) -> None:
    lake = new_lake(tmp_path)
    over, errors = threading.Event(), []

    def merge() -> None:
        while not over.is_set():
            try:
                lake.merge()
            except StorageError as error:
                errors.append(error)
            time.sleep(0.01)

    merging = threading.Thread(target=merge)
    merging.start()
    for step in range(6):
        lake.append([batch(identity(), [{"loss": float(step)}], first_seq=step)])
        assert losses(lake) == [float(i) for i in range(step + 1)]
    over.set()
    merging.join()
    lake.merge()
    assert losses(lake) == [float(i) for i in range(6)]
    assert errors == []
    lake.close()


def test_upkeep_that_ran_out_of_time_is_taken_up_again(tmp_path: Path) -> None:
    lake = new_lake(tmp_path)
    for step in range(3):
        lake.append([batch(identity(), [{"loss": float(step)}], first_seq=step)])
    assert not lake.merge(max_seconds=0.0)
    assert len(list((tmp_path / "data" / "main" / "steps").iterdir())) == 3
    assert lake.merge()
    assert not lake.catalogue.changed()
    assert losses(lake) == [0.0, 1.0, 2.0]
    lake.close()


def test_marks_stay_few_however_many_commits_there_were(tmp_path: Path) -> None:
    lake = new_lake(tmp_path)
    for step in range(6):
        ranks = [batch(identity(rank=r), [{"loss": 1.0}], first_seq=step) for r in range(4)]
        lake.append(ranks)
        if step % 3 == 2:
            lake.merge()
    num = lake.engine.ask("SELECT (SELECT count(*) FROM marks) + (SELECT count(*) FROM new_marks)")
    assert num.to_pydict() == {num.column_names[0]: [4]}
    lake.close()
    lake = Lake(tmp_path)
    assert lake.append(ranks) == [0, 0, 0, 0]
    lake.close()


def test_a_deleted_run_gives_its_room_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lake_maintenance, "_KEPT_SECONDS", 0)
    lake, rng = new_lake(tmp_path), random.Random(1)
    for run, num in ((RUN, 20_000), (OTHER_RUN, 5_000)):
        lake.append([batch(identity(run), [{"loss": rng.random()} for _ in range(num)])])
    lake.merge()
    shares = [lake.num_bytes(run) for run in (RUN, OTHER_RUN)]
    assert shares[0] == pytest.approx(4 * shares[1], rel=0.01)
    assert sum(shares) == pytest.approx(_num_bytes(tmp_path), rel=0.01)
    lake.delete(RUN)
    lake.merge()
    lake.merge()
    assert lake.num_bytes(RUN) == 0
    assert _num_bytes(tmp_path) < 0.4 * sum(shares)
    assert len(losses(lake, RowSpan(OTHER_RUN, "steps"))) == 5_000
    assert lake.check() == []
    lake.close()


def _num_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in (folder / "data" / "main" / "steps").iterdir())


IDLE = """
import gc, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tests.collector.numbers.written import batch, identity
from vitals_collector.numbers.interface import AttemptRow, CurveRequest, RowSpan
from vitals_collector.numbers.lake import Lake

def resident() -> int:
    # Without the files that are mapped: they are the libraries' code, and how much of it is
    # resident is the kernel's choice (it was 130 MB on one machine, 210 MB on another).
    resident, of_files = Path("/proc/self/statm").read_text().split()[1:3]
    return (int(resident) - int(of_files)) * 4096 // 1_000_000

lake, columns = Lake(Path(sys.argv[1])), [f"m{i}" for i in range(50)]
span = RowSpan(identity().run_id, "steps", ("rank:0",))
for second in range(int(sys.argv[2])):
    row = dict.fromkeys(columns, float(second))
    lake.append([batch(identity(rank=r), [row], first_seq=second) for r in range(64)])
    if (second + 1) % (int(sys.argv[2]) // 3) == 0:
        asked = [CurveRequest(span, name, 50) for name in columns]
        lake.curves(asked, [AttemptRow(1, None, 0)], "all")
        lake.merge()
        print(resident(), file=sys.stderr, flush=True)  # on stdout DuckDB may show how far it is
"""


@pytest.mark.slow
def test_memory_stays_flat_over_commits_questions_and_merges(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", IDLE, str(tmp_path), "300"],
        capture_output=True,
        text=True,
        check=True,
    )
    megabytes = [int(line) for line in done.stderr.split()]
    assert max(megabytes) <= 110  # of which 35 are the imports
    assert megabytes[-1] <= megabytes[0] + 15


@pytest.mark.nightly
def test_memory_is_given_back_amid_questions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lake_engine, "_MOST_COMMITS", 0)
    engine = Lake(tmp_path / "lake").engine
    question = "SELECT sum(i * j) AS total FROM range(1000) a(i), range(1000) b(j)"
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(engine.ask, question) for _ in range(40)]
        while not all(answer.done() for answer in answers):
            engine.give_back_memory()
    assert {(499_500 * 499_500,)} == {tuple(a.result()["total"].to_pylist()) for a in answers}
    engine.close()


def test_nothing_is_downloaded_and_no_home_is_written(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from vitals_collector.numbers.lake import Lake;"
        "Lake(Path(sys.argv[1])).close()"
    )
    home = tmp_path / "home"
    home.mkdir()
    environ = {**os.environ, "HOME": str(home), "http_proxy": "http://127.0.0.1:9"}
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "lake")], env=environ, check=False
    )
    assert done.returncode == 0
    assert list(home.rglob("*")) == []


def test_a_question_under_way_ends_though_memory_is_given_back_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A cursor that another thread closed under a question once ended the whole collector."""
    monkeypatch.setattr(lake_engine, "_MOST_COMMITS", 0)
    lake = new_lake(tmp_path)
    lake.append([batch(identity(), [{"loss": 1.0}])])
    with lake.engine._cursor() as reader:
        asked = reader.execute("SELECT count(*) FROM steps")
        lake.give_back_memory()
        assert [(1,)] == asked.fetchall()
        assert [(2,)] == reader.execute("SELECT 2").fetchall()
    with lake.engine._cursor() as another:
        assert another is not reader
    lake.close()


@pytest.mark.nightly
def test_the_catalogues_log_stays_between_commits_and_begins_anew_with_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Who comes while it is taken down sleeps a second."""
    monkeypatch.setattr(lake_engine, "_MOST_COMMITS", 20)
    lake, log = new_lake(tmp_path), tmp_path / "catalogue.sqlite-wal"
    sizes = []
    for step in range(40):
        lake.append([batch(identity(), [{"loss": 1.0}], first_seq=step)])
        sizes.append(log.stat().st_size)
        lake.give_back_memory()
    assert min(sizes) > 0
    assert sizes[-1] < 1.5 * max(sizes[:20])
    lake.close()
    assert not log.exists()


def test_closing_ends_questions_that_are_under_way_and_those_to_come(tmp_path: Path):
    lake = new_lake(tmp_path)
    engine = lake.engine
    long = "SELECT sum(a.range * b.range) FROM range(100000000) a, range(100000000) b"
    with ThreadPoolExecutor(4) as threads:
        questions = [threads.submit(engine.ask, long) for _ in range(4)]
        while not all(asking.reader for asking in engine._asking) or len(engine._asking) < 4:
            time.sleep(0.01)
        lake.close()
        for question in questions:
            with pytest.raises(StorageError, match="INTERRUPT"):
                question.result()
    with pytest.raises(StorageError, match="the lake is closed"):
        engine.ask("SELECT 1")
