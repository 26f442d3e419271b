"""Mirrors with a tracker of our own: each row once whatever dies, and nothing reaches the run."""

import hashlib
import os
import pickle
import sys
import time
import types
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.collector.rows import RUN
from tests.plugins.bridges.mirrors.scene import FORK, SECRET, Scene, same
from tests.support.served import Served
from trainvitals.errors import FormatError, MissingDependencyError, UsageError
from trainvitals.records import NamesDefined
from vitals_collector.ingest.folder import FolderIngest
from vitals_collector.queries.open import OpenedReader, open_folder
from vitals_plugins.bridges.mirrors import supervise as supervising
from vitals_plugins.bridges.mirrors import trackers
from vitals_plugins.bridges.mirrors.cli import MAX_POLL_SECONDS, Pause
from vitals_plugins.bridges.mirrors.follow import (
    ATTEMPT,
    ActionNote,
    Cursor,
    Entry,
    Fork,
    RunFollower,
    TrackerRow,
)
from vitals_plugins.bridges.mirrors.supervise import HELD, USAGE, supervise
from vitals_plugins.bridges.mirrors.trackers import open_tracker
from vitals_plugins.bridges.mirrors.worker import (
    HeldError,
    MirrorStateFile,
    RunDescription,
    TrackerTarget,
    mirror_run,
    state_folder,
)

TARGET = TrackerTarget("tensorboard", "/tb")


class Killed(BaseException):
    """As a SIGKILL: nothing goes on after it."""


class Notebook:
    """A tracker: a file of lines. What was not saved as written is cut off, as TensorBoard's."""

    def __init__(self, path: Path, *, die_at: Sequence[int] = ()) -> None:
        self._path, self._die_at, self._num = path, set(die_at), 0
        self.about: RunDescription | None = None

    def open(
        self, target: TrackerTarget, about: RunDescription, kept: dict[str, Any], unclean: bool
    ) -> "Notebook":
        self.about = about
        self.kept = {"size": kept.get("size", 0)}
        with self._path.open("ab") as file:
            assert unclean or file.tell() == self.kept["size"]
            file.truncate(self.kept["size"])
        return self

    def write(self, entries: Sequence[Entry]) -> None:
        with self._path.open("a") as file:
            for entry in entries:
                self._num += 1
                file.write(pickle.dumps(entry).hex() + "\n")
                if self._num in self._die_at:
                    file.flush()
                    raise Killed
        self.kept = {"size": self._path.stat().st_size}

    def close(self, state: str) -> None:
        pass

    def entries(self) -> list[Entry]:
        return [pickle.loads(bytes.fromhex(line)) for line in self._path.read_text().splitlines()]

    def values(self) -> list[tuple[tuple[int, int, str], float]]:
        return [
            ((row.attempt, row.step, name), value)
            for row in self.entries()
            if isinstance(row, TrackerRow)
            for name, value in row.values.items()
            if not name.startswith("vitals/")
        ]


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path / "runs")


def played(scene: Scene, tracker: Notebook, *scenes, states: Path) -> None:
    """Mirror the run; before each further look one scene is played, and the last one ends it."""
    left = list(scenes)
    states.mkdir(exist_ok=True)
    with open_folder(scene.run_dir.path) as opened:
        mirror_run(
            opened,
            RUN,
            TARGET,
            MirrorStateFile(states, RUN, TARGET),
            tracker.open,
            is_over=lambda summary: summary.state == "finished",
            alive=lambda num_rows: None,
            sleep=lambda: left.pop(0)(),
            say=lambda text: None,
        )


def test_each_value_of_each_attempt_is_written_once(scene: Scene, tmp_path: Path):
    tracker = Notebook(tmp_path / "out")
    scene.first()
    played(scene, tracker, scene.back, scene.then, scene.end, states=tmp_path / "states")
    values = tracker.values()
    assert len(values) == len(dict(values))
    assert same(scene.values, dict(values))


def test_a_restart_and_decisions_are_told_at_their_steps(scene: Scene, tmp_path: Path):
    tracker = Notebook(tmp_path / "out")
    scene.first()
    played(scene, tracker, scene.back, scene.then, scene.end, states=tmp_path / "states")
    entries = tracker.entries()
    notes = [(e.step, e.level, e.text) for e in entries if isinstance(e, ActionNote)]
    assert [
        (40, "info", "step 40: update skipped: loss is nan on rank 1"),
        (40, "warning", "step 40: rolled back to step 20: NaN weights"),
    ] == notes
    (fork,) = [e for e in entries if isinstance(e, Fork)]
    assert (2, FORK) == (fork.attempt, fork.step)
    rows = [entry for entry in entries if isinstance(entry, TrackerRow)]
    assert {1.0, 2.0} == {row.values[ATTEMPT] for row in rows}


def test_rows_that_were_rolled_back_before_they_were_read_say_so(scene: Scene, tmp_path: Path):
    tracker = Notebook(tmp_path / "out")
    scene.whole()
    played(scene, tracker, states=tmp_path / "states")
    rows = [entry for entry in tracker.entries() if isinstance(entry, TrackerRow)]
    left = {(row.attempt, row.step) for row in rows if row.discarded}
    assert {(1, step) for step in range(FORK, 41)} == left


@pytest.mark.parametrize("moment", [1, 20, 41, 42, 45, 46, 90])
def test_what_is_killed_while_it_writes_goes_on_with_the_next_row(
    scene: Scene, tmp_path: Path, moment: int
):
    scene.whole()
    with pytest.raises(Killed):
        played(scene, Notebook(tmp_path / "out", die_at=[moment]), states=tmp_path / "states")
    tracker = Notebook(tmp_path / "out")
    played(scene, tracker, states=tmp_path / "states")
    assert dict.fromkeys(scene.values, 1) == Counter(point for point, _ in tracker.values())


def test_rows_of_an_attempt_that_come_when_the_next_is_on_are_not_missed(
    scene: Scene, tmp_path: Path
):
    """A node that died ships its last rows late."""
    from tests.collector.rows import Writer
    from trainvitals.records import AttemptStarted

    tracker = Notebook(tmp_path / "out")
    scene.first()
    late, scene.rank = scene.rank, Writer(started=time.time_ns())

    def restart() -> None:
        start = AttemptStarted(id=2, parent=1, fork_step=FORK, reason="restart")
        scene.write(scene.rank.events(start, step=FORK, attempt=2))
        scene.steps(FORK, 50, attempt=2)

    def ship_late() -> None:
        scene.rank, rank = late, scene.rank
        scene.steps(41, 45, attempt=1)
        scene.scalars({41: 0.25, 44: 0.5})
        scene.rank = rank

    played(scene, tracker, restart, ship_late, scene.end, states=tmp_path / "states")
    assert dict.fromkeys(scene.values, 1) == Counter(point for point, _ in tracker.values())


def test_a_value_far_ahead_of_the_run_hides_no_other_scalar(scene: Scene, tmp_path: Path):
    """What came over OTLP may name any step."""
    tracker = Notebook(tmp_path / "out")
    scene.first()
    seen_live: list[int] = []

    def ahead() -> None:
        scene.scalars({1_000_000: 1.0}, name=1)

    def later() -> None:
        scene.steps(41, 50)
        scene.scalars({45: 0.5})

    def end() -> None:
        seen_live.extend(step for (_, step, name), _ in tracker.values() if name == "val_loss")
        scene.end()

    played(scene, tracker, ahead, later, end, states=tmp_path / "states")
    assert 45 in seen_live


def test_a_scalar_that_is_called_as_a_curve_of_vitals_stands_beside_it(
    scene: Scene, tmp_path: Path
):
    taken = {7: "train/loss", 8: "vitals/attempt", 9: "train/accuracy"}
    tracker = Notebook(tmp_path / "out")
    scene.steps(0, 3)
    scene.write(scene.rank.events(NamesDefined(stream="scalars", names=taken)))
    for number in taken:
        scene.write(scene.rank.scalars(number, {1: 77.0}))
    scene.end()
    played(scene, tracker, states=tmp_path / "states")
    rows = [entry for entry in tracker.entries() if isinstance(entry, TrackerRow)]
    own = {name for row in rows for name, value in row.values.items() if value == 77.0}
    assert {"scalars/train/loss", "scalars/vitals/attempt", "train/accuracy"} == own
    curves = ("train/loss", "train/grad_norm")
    assert same(scene.values, {key: v for key, v in tracker.values() if key[2] in curves})


def test_many_steps_come_in_pages(scene: Scene, tmp_path: Path):
    tracker = Notebook(tmp_path / "out")
    scene.steps(0, 4_500)
    scene.scalars({step: float(step) for step in range(0, 4_500, 7)})
    scene.end()
    played(scene, tracker, states=tmp_path / "states")
    assert dict.fromkeys(scene.values, 1) == Counter(point for point, _ in tracker.values())


def test_a_tracker_is_told_no_secret(scene: Scene, tmp_path: Path):
    tracker = Notebook(tmp_path / "out")
    scene.whole()
    played(scene, tracker, states=tmp_path / "states")
    assert tracker.about is not None
    assert SECRET not in repr(tracker.about)
    assert 3e-4 == tracker.about.config["lr"]


def test_a_second_mirror_of_the_same_run_to_the_same_place_is_refused(tmp_path: Path):
    state = MirrorStateFile(tmp_path, RUN, TARGET)
    with state.lock(), pytest.raises(HeldError, match="by another process"), state.lock():
        pass
    with (
        MirrorStateFile(tmp_path, RUN, TrackerTarget("tensorboard", "/other")).lock(),
        state.lock(),
    ):
        pass


def test_a_damaged_state_is_said_and_not_overwritten(tmp_path: Path):
    state = MirrorStateFile(tmp_path, RUN, TARGET)
    state.path.write_text("{")
    with pytest.raises(FormatError, match="cannot be read") as failure:
        state.load()
    assert "the mirror then starts over" in failure.value.hint
    assert "{" == state.path.read_text()


def test_the_state_lies_in_the_runs_own_folder_where_there_is_one(scene: Scene, tmp_path: Path):
    assert scene.run_dir.path / "mirrors" == state_folder(scene.run_dir.path, tmp_path, RUN)
    assert tmp_path / "mirrors" / RUN == state_folder(None, tmp_path, RUN)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("comet:x", "must be tensorboard:DIR, wandb"),
        ("tensorboard", "does not say where"),
        ("wandb:", "must be tensorboard:DIR, wandb"),
        ("mlflow", "does not say where"),
        ("mlflow:https://me:secret@host/", "holds a user or a password"),
        ("otlp:http://token@host:4318", "holds a user or a password"),
    ],
)
def test_a_target_that_is_none_is_refused_with_the_way_out(text: str, said: str):
    with pytest.raises(UsageError, match=said) as failure:
        TrackerTarget.parse(text)
    assert failure.value.hint


@pytest.mark.parametrize("kind", ["tensorboard", "wandb", "mlflow", "trackio", "otlp"])
def test_a_tracker_that_is_not_installed_is_named_with_what_to_install(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, kind: str
):
    for package in ("tensorboard", "wandb", "mlflow", "trackio", "opentelemetry"):
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setitem(sys.modules, "mlflow.entities", None)
    scene.whole()
    with open_folder(scene.run_dir.path) as opened:
        about = RunDescription.from_detail(RunFollower(opened.reader, RUN, Cursor()).detail())
    with pytest.raises(MissingDependencyError, match="is not installed") as failure:
        open_tracker(TrackerTarget(kind, "/x"), about, {}, False)
    assert f"pip install 'trainvitals[{kind}]'" == failure.value.hint


def test_from_a_collector_a_run_is_mirrored_as_from_its_folder(
    served: Served, scene: Scene, tmp_path: Path
):
    """Numbers that are not finite come as words there."""
    tracker = Notebook(tmp_path / "out")
    scene.whole()
    folder = FolderIngest(served.store, [scene.run_dir.path])
    folder.poll()
    with served.client() as client:
        mirror_run(
            OpenedReader(client, lambda: None),
            RUN,
            TARGET,
            MirrorStateFile(tmp_path, RUN, TARGET),
            tracker.open,
            is_over=lambda summary: summary.state == "finished",
            alive=lambda num_rows: None,
            sleep=lambda: None,
            say=lambda text: None,
        )
    assert same(scene.values, dict(tracker.values()))


def test_no_tracker_reports_to_its_maker(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "true")
    monkeypatch.delenv("MLFLOW_DISABLE_TELEMETRY", raising=False)
    monkeypatch.setattr(trackers, "import_module", lambda name: types.SimpleNamespace(Otlp=print))
    open_tracker(TrackerTarget("otlp", "x"), None, {}, False)
    assert ("true", "true") == tuple(
        os.environ[name] for name in ("WANDB_ERROR_REPORTING", "MLFLOW_DISABLE_TELEMETRY")
    )


# -------------------------------------------------------------------------------- supervision

CHILD = """
import os, sys, time
pipe, log, kind = int(sys.argv[1]), sys.argv[2], sys.argv[3]
with open(log, "a") as file:
    file.write(f"{time.monotonic()}\\n")
num = len(open(log).read().split())
os.write(pipe, b".")
if num > 3:
    sys.exit(0)
if kind == "hangs":
    if os.fork() == 0:
        os.setsid()
        with open(log + ".below", "a") as file:
            file.write(f"{os.getpid()}\\n")
    time.sleep(1000)
if kind == "raises":
    raise RuntimeError("the tracker is down")
sys.exit(int(kind))
"""


def supervised(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, list[str], list[float]]:
    monkeypatch.setattr(supervising, "FIRST_PAUSE_SECONDS", 0.1)
    said: list[str] = []
    log = tmp_path / "starts"
    codes = supervise(
        [TARGET],
        lambda target, pipe: [sys.executable, "-c", CHILD, str(pipe), str(log), kind],
        say=said.append,
        hang_seconds=1.5,
        start_seconds=0.0,
    )
    return codes[TARGET], said, [float(word) for word in log.read_text().split()]


@pytest.mark.parametrize(
    ("kind", "why"),
    [("hangs", "shows no sign of life for 1.5 s"), ("raises", "failed (exit code 1")],
)
def test_a_tracker_that_hangs_or_raises_is_told_and_tried_again_later_and_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, why: str
):
    code, said, starts = supervised(tmp_path, kind, monkeypatch)
    assert 0 == code
    assert 4 == len(starts)
    below = tmp_path / "starts.below"
    for pid in below.read_text().split() if kind == "hangs" else ():
        state = Path(f"/proc/{pid}/stat")
        assert not state.exists() or "Z" == state.read_text().rpartition(")")[2].split()[0]
    assert all(why in line and "the training is not affected" in line for line in said)
    assert ["0.1 s", "0.2 s", "0.4 s"] == [
        line.split("Next try in ")[1].split(",")[0] for line in said
    ]


@pytest.mark.parametrize("code", [HELD, USAGE])
def test_what_another_try_cannot_help_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
):
    assert (code, [], 1) == (lambda c, s, t: (c, s, len(t)))(
        *supervised(tmp_path, str(code), monkeypatch)
    )


def test_the_run_is_untouched_by_its_mirrors(scene: Scene, tmp_path: Path):
    """Nothing in the run's folder changes but the mirrors' own."""
    scene.whole()

    def digest() -> dict[str, str]:
        return {
            str(path): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in scene.run_dir.path.rglob("*")
            if path.is_file() and "mirrors" not in path.parts
        }

    before = digest()
    states = state_folder(scene.run_dir.path, tmp_path, RUN)
    with pytest.raises(Killed):
        played(scene, Notebook(tmp_path / "out", die_at=[7]), states=states)
    played(scene, Notebook(tmp_path / "out"), states=states)
    assert before == digest()


def test_a_look_that_took_long_is_followed_by_a_pause():
    clock = [0.0]
    slept: list[float] = []
    pause = Pause(sleep=slept.append, cpu_seconds=lambda: clock[0])
    clock[0] = 50.0
    pause.start_poll()
    for took in (0.01, 0.5, 100.0):
        clock[0] += took
        pause.sleep()
    assert [2.0, 5.0, MAX_POLL_SECONDS] == slept
