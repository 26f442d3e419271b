"""Hook, agent and collector of neighbouring versions work together, and are upgraded one by one.

The older ones are those of two named commits, from this repository's own history. The collector of
the first had the rows in tables of its database: to upgrade it is to begin a new data folder. That
of the second has them in a lake, as they are today: its data folder goes on.
"""

import contextlib
import io
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tarfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.agent.builders import NODE, RUN
from tests.e2e.lab import Lab, RowKey, _answers, free_port, open_lab, stored_rows, until
from tests.e2e.mirror import Mirror
from trainvitals.io.client import collector_on, open_collector_client
from trainvitals.io.private import private_base
from trainvitals.io.server_identity import UNPROVEN
from trainvitals.testing.faults import FaultPlan
from trainvitals.views import DecisionsQuestion, RunQuestion, SeriesQuestion

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
OLD_COMMIT = "be5b4b7"
LAKE_COMMIT = "e9a2519"
"""The first landed version after the store's rebuilding: it has no tokens of owners, and no TLS."""
PACKAGES = ("trainvitals", "trainer_hooks", "agent", "collector", "dashboard", "deploy")
ROWS_OF_A_STAGE = 100
TRAINED_STEPS = 90


def path_of(root: Path) -> str:
    """Return the PYTHONPATH by which the programs of a tree are started; tests are always ours."""
    folders = (root, *(root / name for name in ("agent", "collector", "dashboard", "deploy")), ROOT)
    return os.pathsep.join(map(str, folders))


def of(path: str) -> dict[str, str]:
    """Return the environment of a program of the version at ``path``; no fork of ours is one."""
    return {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


def tree_of(commit: str, folder: Path) -> str:
    """Return the PYTHONPATH of the version of a commit, exported to the folder."""
    command = ["git", "-C", str(ROOT), "archive", commit, *PACKAGES]
    try:
        archived = subprocess.run(command, capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no git on this machine")
    if archived.returncode:
        pytest.skip(f"commit {commit} is not in this tree's history")
    with tarfile.open(fileobj=io.BytesIO(archived.stdout)) as archive:
        archive.extractall(folder, filter="data")
    show = [sys.executable, "-c", "import vitals_agent, trainvitals; print(vitals_agent.__file__)"]
    environ = {**os.environ, "PYTHONPATH": path_of(folder)}
    shown = subprocess.run(
        show, env=environ, capture_output=True, text=True, check=True, cwd=folder
    )
    assert shown.stdout.startswith(str(folder))
    return path_of(folder)


@pytest.fixture(scope="module")
def old(tmp_path_factory) -> str:
    """The PYTHONPATH of the older version."""
    return tree_of(OLD_COMMIT, tmp_path_factory.mktemp("old"))


@pytest.fixture(scope="module")
def with_lake(tmp_path_factory) -> str:
    """The PYTHONPATH of the version whose data folder goes on."""
    return tree_of(LAKE_COMMIT, tmp_path_factory.mktemp("lake"))


class Parts:
    """A collector, an agent and ranks, each of a version of its own, replaced while rows come."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.port = free_port()
        self.mirror = Mirror(lab.shared)
        self.base = private_base(lab.environ())
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self._ended = threading.Event()
        # A part takes seconds to come back, and a segment may be written and freed in that time.
        self._looking = threading.Thread(target=self._look_on)
        self._looking.start()

    def _look_on(self) -> None:
        while not self._ended.wait(0.05):
            self.mirror.look()

    def close(self) -> None:
        """Look at what was written a last time."""
        self._ended.set()
        self._looking.join()

    def stop(self, part: str) -> None:
        """Stop the part as a service manager would."""
        self.running[part].send_signal(signal.SIGTERM)
        self.running.pop(part).wait(30)

    def agent(self, path: str) -> None:
        """Start the agent of the version at ``path``, in place of the one that runs."""
        if "agent" in self.running:
            self.stop("agent")
        scheme = "http" if path != path_of(ROOT) else f"{UNPROVEN}http"
        address = f"{scheme}://127.0.0.1:{self.port}"
        where = (address, "--token-file", self.lab.tokens, "--node", NODE)
        arguments = ("agent", "--dir", self.lab.runs, "--collector", *where)
        self.running["agent"] = self.lab.start_vitals(*arguments, **of(path))

    def collector(self, path: str, data: Path) -> None:
        """Start the collector of the version at ``path``."""
        # Neither knows how the other proves itself; while they are upgraded that is waived.
        plain = ("--allow-plain",) if path == path_of(ROOT) else ()
        listen = ("--data", data, "--listen", f"127.0.0.1:{self.port}", *plain)
        self.running["collector"] = self.lab.start_vitals("collector", *listen, **of(path))
        until(lambda: _answers(self.port), "the collector answers")

    def rank(self, rank: int, path: str) -> subprocess.Popen[bytes]:
        module = ("-m", "tests.agent.rank_main", str(self.base), str(self.lab.runs), str(rank))
        process = subprocess.Popen(
            [sys.executable, *module, "--every", "0.02"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=self.lab.environ(PYTHONPATH=path),
            cwd=self.lab.folder,
        )
        self.lab.processes.append(process)
        return process

    def stored(self) -> Counter[tuple[RowKey, bytes]]:
        """Return the ranks' rows that a collector of this version has."""
        rows = stored_rows(self.lab.data)
        return Counter({row: n for row, n in rows.items() if row[0][0].startswith("rank:")})

    def go_on(self, num_stored: Callable[[], int]) -> None:
        """Wait until more rows are stored."""
        enough = num_stored() + ROWS_OF_A_STAGE
        until(lambda: num_stored() >= enough, "rows go on to be stored")

    def end(self, ranks: Sequence[subprocess.Popen[bytes]]) -> None:
        """Have the ranks say goodbye."""
        for rank in ranks:
            rank.communicate(b"end\n")
        self.close()


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[Parts]:
    with open_lab(tmp_path) as lab:
        lab.runs.mkdir()
        parts = Parts(lab)
        yield parts
        parts.close()


@pytest.mark.timeout(180)
def test_an_old_agent_and_old_ranks_are_served_by_a_new_collector_and_upgraded_in_mid_run(
    old, parts
):
    new = path_of(ROOT)
    parts.collector(new, parts.lab.data)
    parts.agent(old)
    ranks = [parts.rank(0, old), parts.rank(1, new)]
    parts.go_on(lambda: len(parts.stored()))
    parts.agent(new)  # its spool is an old one
    parts.go_on(lambda: len(parts.stored()))
    parts.end(ranks)
    until(
        lambda: parts.mirror.rows.keys() <= {key for key, _ in parts.stored()},
        "all rows are stored",
    )
    stored, linked = parts.stored(), {key[:3] for key in parts.mirror.rows}
    assert {1} == set(stored.values())
    # A segment may come and go before the mirror links it: then none of its rows are in it.
    assert {row for row in stored if row[0][:3] in linked} == set(parts.mirror.rows.items())
    assert len(parts.mirror.rows) > 2 * ROWS_OF_A_STAGE
    assert 0 == parts.mirror.num_lost
    collector = collector_on(parts.lab.data)
    assert collector is not None
    with open_collector_client(collector) as client:
        detail = client.ask(RunQuestion(run_id=RUN))
    assert {0} == {source.num_lost_rows for source in detail.sources}


def marks_of(data: Path) -> dict[tuple[str, str, str], int]:
    """Return how far each stream of a rank is stored by a collector of the old version."""
    query = (
        "SELECT sources.source, streams.incarnation, streams.stream, streams.last_seq"
        " FROM streams JOIN sources USING (run_id, incarnation) WHERE sources.rank >= 0"
    )
    address = f"file:{data / 'vitals.db'}?mode=ro"
    with contextlib.closing(sqlite3.connect(address, uri=True, timeout=30)) as database:
        return {tuple(key): mark for *key, mark in database.execute(query)}


@pytest.mark.timeout(180)
def test_an_old_collectors_data_is_refused_in_words_and_untouched_and_no_row_is_lost(old, parts):
    new, lab = path_of(ROOT), parts.lab
    old_data = lab.data
    parts.collector(old, old_data)
    parts.agent(new)
    ranks = [parts.rank(0, old), parts.rank(1, new)]
    parts.go_on(lambda: sum(marks_of(old_data).values()))  # a new agent and an old collector
    parts.stop("collector")
    before, marks = dump(old_data), marks_of(old_data)
    refused = lab.vitals("collector", "--data", old_data, **of(new))
    assert 0 != refused.returncode
    assert "give another --data" in refused.stderr
    assert before == dump(old_data)

    lab.data = lab.folder / "new"
    lab.data.mkdir(mode=0o700)
    shutil.copy(old_data / "tokens.json", lab.data)
    parts.collector(new, lab.data)  # the agent goes on with what nobody has acknowledged
    parts.go_on(lambda: len(parts.stored()))
    parts.end(ranks)

    def missing() -> set[RowKey]:
        keys = {key for key, _ in parts.stored()}
        return {key for key in parts.mirror.rows.keys() - keys if key[3] > marks.get(key[:3], -1)}

    until(lambda: not missing(), "each row is in one of the two")
    assert {1} == set(parts.stored().values())
    assert 0 == parts.mirror.num_lost
    parts.stop("collector")
    refused = lab.vitals("collector", "--data", lab.data, **of(old))
    assert 0 != refused.returncode
    assert "upgrade this program" in refused.stderr


def ledger(data: Path) -> list[tuple[object, ...]]:
    """Return the decisions in a collector's database, past its own reading."""
    query = (
        "SELECT run_id, action, rule, step, decided_at_step, attempt, rank, acted FROM decisions"
        " ORDER BY run_id, ledger_seq"
    )
    address = f"file:{data / 'vitals.db'}?mode=ro"
    with contextlib.closing(sqlite3.connect(address, uri=True, timeout=30)) as database:
        return database.execute(query).fetchall()


@pytest.mark.dist
@pytest.mark.timeout(300)
def test_a_store_that_an_earlier_version_wrote_goes_on_with_all_its_rows_and_decisions(
    with_lake, parts
):
    new, lab = path_of(ROOT), parts.lab
    parts.collector(with_lake, lab.data)
    parts.agent(with_lake)
    faults = FaultPlan().nan_gradient_at(rank=1, step=20).nan_parameters_at(rank=1, step=60)
    training = lab.train(
        *("--standalone", "--nproc-per-node", "2"),
        steps=TRAINED_STEPS,
        mode="heal",
        faults=faults,
        **of(with_lake),
        VITALS_AGENT="off",
        VITALS_NODE=NODE,
    )
    assert 0 == training.wait(120), lab.log("training").read_text()
    trained = lab.run_id()
    ranks = [parts.rank(0, with_lake), parts.rank(1, with_lake)]  # of a run that lasts
    parts.go_on(lambda: len(parts.stored()))
    parts.stop("collector")
    before, decided = stored_rows(lab.data), ledger(lab.data)
    assert {"skip_step", "rollback"} == {action for _, action, *_ in decided}

    parts.collector(new, lab.data)
    parts.agent(new)
    parts.go_on(lambda: len(parts.stored()))
    parts.end(ranks)
    until(
        lambda: parts.mirror.rows.keys() <= {key for key, _ in stored_rows(lab.data)},
        "all rows are stored",
    )
    after = stored_rows(lab.data)
    assert before <= after
    assert {1} == set(after.values())
    assert 0 == parts.mirror.num_lost
    assert decided == ledger(lab.data)
    collector = collector_on(lab.data)
    assert collector is not None
    with open_collector_client(collector) as client:
        told = [view.decision for view in client.ask(DecisionsQuestion(run_id=trained))]
        assert decided == [
            (trained, d.action, d.rule, d.step, d.decided_at_step, d.attempt, d.rank, d.acted)
            for d in told
        ]
        for run_id in (trained, RUN):
            detail = client.ask(RunQuestion(run_id=run_id))
            assert {0} == {source.num_lost_rows for source in detail.sources}
            assert "finished" == detail.summary.state
        # The steps of the branch that stands, and none of what was rolled back.
        steps = client.ask(SeriesQuestion(run_id=trained, metric="steps.loss", source="rank:0"))
        known = {*steps.step, *(mark.step for mark in steps.nonfinite)}
        assert set(range(TRAINED_STEPS)) == known


def dump(data: Path) -> list[str]:
    """Return all that is in a collector's database."""
    address = f"file:{data / 'vitals.db'}?mode=ro"
    with contextlib.closing(sqlite3.connect(address, uri=True)) as database:
        return list(database.iterdump())
