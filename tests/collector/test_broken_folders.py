"""What the commands that read a folder say where it, or a run in it, cannot be read."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.collector.rows import OTHER_RUN, RUN, Writer
from tests.support import forked
from tests.support.cli import leave, vitals
from trainvitals.io.rundir import RunDir
from trainvitals.records import RunInfo, RunStarted
from vitals_collector.ingest.folder import FolderIngest
from vitals_collector.storage.store import open_store

COMMANDS = (("runs", "{}"), ("show", "{}"), ("why", "{}", "3"), ("query", "steps", "{}"))


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder with a sound run, and a newer one whose spool's state cannot be read."""
    leave(tmp_path, Writer().events(RunStarted(info=RunInfo(name="tiny"))), Writer().steps([3]))
    broken = RunDir.create(tmp_path, OTHER_RUN).agent_dir("a") / "spool"
    (broken / "state.json").mkdir(parents=True)
    return tmp_path


def test_a_broken_run_is_a_row_beside_the_sound_ones(
    runs: Path, capsys: pytest.CaptureFixture[str]
):
    assert 0 == vitals("runs", runs)
    shown = capsys.readouterr()
    rows = [line.split()[:2] for line in shown.out.splitlines()[1:]]
    assert [[RUN, "tiny"], [OTHER_RUN, "unreadable"]] == rows
    assert f"warning: run {OTHER_RUN} cannot be read: " in shown.err
    assert "state.json: Is a directory" in shown.err
    assert 0 == vitals("runs", runs, "--format", "json")
    assert [RUN] == [run["run_id"] for run in json.loads(capsys.readouterr().out)]


def test_the_newest_sound_run_is_shown_and_the_newer_broken_one_is_named(
    runs: Path, capsys: pytest.CaptureFixture[str]
):
    for command in (("show", runs), ("why", runs, 3), ("tail", runs), ("query", "steps", runs)):
        assert 0 == vitals(*command), command
        shown = capsys.readouterr()
        assert f"warning: run {OTHER_RUN} cannot be read" in shown.err, command
    assert 0 == vitals("show", "tiny", "--dir", runs)
    assert "warning" not in capsys.readouterr().err


def test_a_broken_run_that_is_asked_for_is_an_error(runs: Path, capsys: pytest.CaptureFixture[str]):
    for command in (
        ("show", OTHER_RUN, "--dir", runs),
        ("why", runs / OTHER_RUN, 3),
        ("tail", runs / OTHER_RUN),
        ("postmortem", runs / OTHER_RUN),
        ("replay", OTHER_RUN, "--dir", runs),
    ):
        assert 1 == vitals(*command), command
        said = capsys.readouterr().err
        assert f"error: run {OTHER_RUN} cannot be read: " in said, command
        assert "Traceback" not in said
    assert 1 == vitals("runs", runs / OTHER_RUN)


def test_a_run_without_rows_is_listed_as_such(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    RunDir.create(tmp_path, RUN)
    assert 0 == vitals("runs", tmp_path)
    assert [RUN, "no", "rows"] == capsys.readouterr().out.splitlines()[1].split()
    assert 2 == vitals("show", tmp_path / RUN)
    said = capsys.readouterr().err
    assert "there are no metrics of any run in" in said
    assert "agent.log" in said


def test_an_empty_folder_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert 0 == vitals("runs", tmp_path)
    assert f"there are no runs in {tmp_path}" in capsys.readouterr().err
    assert 2 == vitals("show", "--dir", tmp_path)
    assert f"there are no metrics of any run in {tmp_path}" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_a_file_and_a_path_that_leads_nowhere_are_told_apart(
    tmp_path: Path, command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "train.log"
    file.write_text("")
    assert 2 == vitals(*(word.format(file) for word in command))
    assert f"{file} is a file, not a folder" in capsys.readouterr().err
    assert 2 == vitals(*(word.format(tmp_path / "gone") for word in command))
    assert f"there is no folder {tmp_path / 'gone'}" in capsys.readouterr().err


def test_a_collector_reads_the_sound_runs_beside_one_that_cannot_be_listed(
    runs: Path, monkeypatch: pytest.MonkeyPatch
):
    listed = RunDir.spool_dirs

    def spool_dirs(run_dir: RunDir) -> dict[str, Path]:
        if run_dir.run_id == OTHER_RUN:
            raise PermissionError(13, "Permission denied", str(run_dir.path / "agents"))
        return listed(run_dir)

    monkeypatch.setattr(RunDir, "spool_dirs", spool_dirs)
    store = open_store("sqlite://")
    spools = FolderIngest(store, [runs])
    assert 2 == spools.poll()
    assert [OTHER_RUN] == list(spools.unreadable)
    assert "Permission denied" in spools.unreadable[OTHER_RUN]
    store.close()


AS_NOBODY = """
import contextlib, io, os, sys
from trainvitals.cli.main import main
def run():
    try:
        return main(sys.argv[1:])
    except SystemExit as stop:
        return stop.code
with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    run()  # imports all that it needs: the interpreter may lie where only root can read
os.setgroups([])
os.setgid(NOBODY)
os.setuid(NOBODY)
sys.exit(run())
"""


def as_nobody(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a command as a user who owns nothing; root may read everything."""
    return forked.COMMANDS.run(
        [sys.executable, "-c", AS_NOBODY.replace("NOBODY", "65534"), *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd="/",
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=60,
    )


@pytest.fixture
def shared(runs: Path) -> Iterator[Path]:
    """The same folder where other users can reach it: pytest's own are private."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        folder = Path(shutil.copytree(runs, Path(name) / "runs"))
        for path in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
            path.chmod(0o755)  # as an earlier Vitals made them
        yield folder


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.nightly
def test_what_another_user_may_not_read_is_said(shared: Path):
    (shared / OTHER_RUN).chmod(0o700)
    done = as_nobody("runs", shared)
    assert 0 == done.returncode, done.stderr
    rows = [line.split()[:2] for line in done.stdout.splitlines()[1:]]
    assert [[RUN, "tiny"], [OTHER_RUN, "unreadable"]] == rows
    assert "Permission denied" in done.stderr
    (shared / RUN).chmod(0o700)
    done = as_nobody("runs", shared)
    assert (1, 2) == (done.returncode, done.stdout.count("unreadable")), done.stderr
    shared.chmod(0o700)
    for command in (("runs", shared), ("show", shared), ("why", shared / RUN, 3)):
        done = as_nobody(*command)
        assert 1 == done.returncode, (command, done.stderr)
        assert "cannot be read: Permission denied" in done.stderr, command
        assert "ls -ld" in done.stderr
        assert "Traceback" not in done.stderr
