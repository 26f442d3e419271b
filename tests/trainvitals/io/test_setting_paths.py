"""A relative path in a setting means the same for all who read it, wherever they run."""

import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from tests.support.forked import COMMANDS
from trainer_hooks.agent_starter import AgentStarter
from trainvitals.cli.supervise import ProgramStack
from trainvitals.errors import UsageError
from trainvitals.identity import new_run_id
from trainvitals.io.lookup import find_collector, known_collector
from trainvitals.io.private import private_base
from trainvitals.io.rundir import RunDir
from trainvitals.io.setting_paths import collector_folder, with_absolute_paths
from vitals_agent.collector_endpoint import make_collector_finder
from vitals_dashboard import launch


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a collector's data folder in it."""
    data = tmp_path / "data"
    data.mkdir()
    (data / "collector.json").write_bytes(
        msgspec.json.encode({"url": "https://127.0.0.1:5", "pid": os.getpid()})
    )
    (data / "collector.json").chmod(0o600)
    (data / "tokens.json").write_text('{"read": "r", "ingest": "i", "control": "c"}')
    (data / "tokens.json").chmod(0o600)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "own"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("named", ["data", "./data", "elsewhere/../data", "data/"])
def test_a_relative_folder_of_a_collector_is_a_folder_everywhere(
    here: Path, monkeypatch: pytest.MonkeyPatch, named: str
):
    find = make_collector_finder(named, None, {})
    place = launch.find_collector_location({"VITALS_COLLECTOR_URL": named, "HOME": str(here)})
    monkeypatch.setenv("VITALS_COLLECTOR_URL", named)
    assert "https://127.0.0.1:5" == known_collector(named).url == find_collector().url
    monkeypatch.chdir(here / "elsewhere")  # what was resolved stays what it was
    assert ("https://127.0.0.1:5", "i") == (find().url, find().tokens.ingest)
    assert place.collector_data == str(here / "data") or ".." in named


@pytest.mark.parametrize("named", ["http://host:1", "https://host", "", "host:8765", "nonsense"])
def test_an_address_is_no_folder(here: Path, named: str):
    assert collector_folder(named) is None


def test_a_path_is_one_before_it_is_there(here: Path):
    assert here / "later" == collector_folder("./later")
    assert here / "a" / "b" == collector_folder("a/b")
    assert make_collector_finder("./later", None, {})() is None
    with pytest.raises(UsageError, match=f"--collector is {here}/later, and no collector runs"):
        known_collector("./later")


def test_the_setting_that_names_a_folder_without_a_collector_is_named(
    here: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("VITALS_COLLECTOR_URL", "elsewhere")
    with pytest.raises(UsageError, match=f"VITALS_COLLECTOR_URL is {here}/elsewhere, and no"):
        find_collector()


def test_a_word_that_is_neither_says_how_a_folder_is_written(here: Path):
    with pytest.raises(UsageError, match="must be https://host:port, or a folder") as caught:
        make_collector_finder("nonsense", None, {})
    assert "./collector" in caught.value.hint


def test_all_paths_among_the_settings_become_absolute(here: Path):
    environ = {
        "VITALS_DIR": "runs",
        "VITALS_SHM": "shm",
        "VITALS_TOKEN_FILE": "tokens",
        "VITALS_CONFIG": "vitals.toml",
        "VITALS_COLLECTOR_URL": "data",
        "XDG_DATA_HOME": "own",
    }
    assert {name: str(here / path) for name, path in environ.items()} == with_absolute_paths(
        environ
    )
    others = {"VITALS_COLLECTOR_URL": "http://host:1", "VITALS_DIR": "", "VITALS_MODE": "heal"}
    assert others == with_absolute_paths(others)


def test_vitals_run_hands_on_absolute_paths(here: Path):
    environ = ProgramStack(Path("home"), {"VITALS_CONFIG": "vitals.toml"}).training_environ()
    assert str(here / "home" / "runs") == environ["VITALS_DIR"]
    assert str(here / "vitals.toml") == environ["VITALS_CONFIG"]


def test_an_agent_started_after_a_change_of_folder_finds_the_same_collector_and_runs(
    here: Path, monkeypatch: pytest.MonkeyPatch
):
    run_dir = RunDir.create(Path("runs"), new_run_id(1))
    (here / "shm").mkdir()
    relative = {"VITALS_DIR": "runs", "VITALS_SHM": "shm", "VITALS_COLLECTOR_URL": "data"}
    environ = {**os.environ, **relative, "PYTHONPATH": os.pathsep.join(sys.path)}
    folder = private_base(environ) / run_dir.run_id / "rank-0"
    place = SimpleNamespace(run_dir=run_dir, node="n", folder=folder.parent)
    start = AgentStarter(place, environ)
    monkeypatch.chdir(here / "elsewhere")
    pid = start()
    try:
        info = run_dir.path / "agents" / "n" / "agent.json"
        until = time.monotonic() + 60
        while not info.exists() and time.monotonic() < until:
            time.sleep(0.05)
        seen = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        start.close()
    assert info.exists(), (info.parent / "agent.log").read_text()
    assert f"VITALS_COLLECTOR_URL={here / 'data'}".encode() in seen
    assert [] == list((here / "elsewhere").iterdir())  # no second folder
    assert "nothing is shipped" not in (info.parent / "agent.log").read_text()


def test_commands_read_a_relative_folder_from_the_environment(here: Path):
    RunDir.create(here / "runs", new_run_id(2))
    code = "import sys; from trainvitals.cli.main import main; sys.exit(main())"
    done = COMMANDS.run(
        [sys.executable, "-c", code, "runs"],
        capture_output=True,
        text=True,
        env={**os.environ, "VITALS_DIR": "runs", "PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=here,
        timeout=60,
    )
    assert (0, 2) == (done.returncode, len(done.stdout.splitlines())), done.stderr
