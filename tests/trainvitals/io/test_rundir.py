import os
import stat
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.trainvitals.io.builders import a_command
from trainvitals.errors import FormatError, InsecurePathError, StorageError, UsageError
from trainvitals.io.rundir import HaltMarker, RunDir, replace_file
from trainvitals.records import RunInfo


@pytest.fixture
def run_dir(tmp_path: Path, run_id: str) -> RunDir:
    return RunDir.create(tmp_path / "runs", run_id)


def test_a_run_directory_is_made_once_and_found_again(tmp_path: Path, run_id: str) -> None:
    made = RunDir.create(tmp_path / "a" / "b", run_id)
    assert made.path == RunDir.create(tmp_path / "a" / "b", run_id).path
    assert run_id == RunDir.open(made.path).run_id
    assert made.path == tmp_path / "a" / "b" / run_id


@pytest.mark.parametrize(("share", "mode"), [("", 0o700), ("none", 0o700), ("group", 0o750)])
def test_only_the_group_of_a_shared_run_may_read_its_directory(
    tmp_path: Path, run_id: str, share: str, mode: int
) -> None:
    run_dir = RunDir.create(tmp_path, run_id, share=share)
    assert mode == stat.S_IMODE(run_dir.path.stat().st_mode) & 0o777


@pytest.mark.parametrize("name", ["../evil", "", "my run", "a/b", "x" * 26])
def test_a_run_id_that_is_no_ulid_is_never_a_path(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="must be a ULID"):
        RunDir.create(tmp_path, name)
    assert [] == list(tmp_path.iterdir())


def test_a_missing_run_directory_is_a_users_error_with_a_way_out(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a folder") as caught:
        RunDir.open(tmp_path / "nothing")
    assert "vitals runs" in caught.value.hint


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path, run_id: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot be created") as caught:
        RunDir.create(tmp_path / "file", run_id)
    assert "VITALS_DIR" in caught.value.hint


def test_only_runs_are_found_below_a_folder(tmp_path: Path, run_dir: RunDir) -> None:
    (run_dir.path.parent / "other").mkdir()
    assert [run_dir.path] == [found.path for found in RunDir.find_all(run_dir.path.parent)]
    assert [] == RunDir.find_all(tmp_path / "missing")


def test_odd_names_are_attributes_and_come_back(run_dir: RunDir) -> None:
    assert run_dir.info() is None
    info = RunInfo(
        name="../../etc/passwd\n<b>\u00e9", tags=("a", ""), config={"lr": 0.1, "x": None}
    )
    run_dir.write_info(info)
    assert info == run_dir.info()
    run_dir.write_info(RunInfo(name="second"))
    assert RunInfo(name="second") == run_dir.info()
    assert ["run.json"] == [path.name for path in run_dir.path.iterdir()]


def test_a_damaged_run_json_is_named(run_dir: RunDir) -> None:
    (run_dir.path / "run.json").write_text("{torn")
    with pytest.raises(FormatError, match=r"run\.json cannot be read"):
        run_dir.info()


# ---------------------------------------------------------------------------------- key


def test_the_key_is_made_once_for_us_alone(run_dir: RunDir) -> None:
    with pytest.raises(StorageError, match="is missing"):
        run_dir.command_key()
    key = run_dir.command_key(create=True)
    assert 32 == len(key)
    assert key == run_dir.command_key() == run_dir.command_key(create=True)
    assert 0o600 == stat.S_IMODE((run_dir.path / "command.key").stat().st_mode)


def test_a_key_that_others_can_read_is_not_used(run_dir: RunDir) -> None:
    run_dir.command_key(create=True)
    (run_dir.path / "command.key").chmod(0o644)
    with pytest.raises(InsecurePathError):
        run_dir.command_key()


def test_a_planted_link_is_not_followed(run_dir: RunDir, tmp_path: Path) -> None:
    (tmp_path / "theirs").touch(mode=0o600)
    (run_dir.path / "command.key").symlink_to(tmp_path / "theirs")
    with pytest.raises(InsecurePathError):
        run_dir.command_key(create=True)
    assert b"" == (tmp_path / "theirs").read_bytes()


@pytest.mark.parametrize("content", [b"", b"ab", b"zz" * 32, b"\xff" * 64, b"ab" * 31, b"ab" * 40])
def test_a_damaged_key_is_said_and_never_used(run_dir: RunDir, content: bytes) -> None:
    replace_file(run_dir.path / "command.key", content, mode=0o600)
    with pytest.raises(FormatError, match="64 hexadecimal characters"):
        run_dir.command_key(create=True)


# ----------------------------------------------------------------------------- commands


def test_commands_are_taken_once_and_in_order(run_dir: RunDir) -> None:
    assert [] == run_dir.take_commands()
    for number in (20, 3, 100):
        run_dir.put_command(a_command(number=number))
    assert [3, 20, 100] == [command.number for command in run_dir.take_commands()]
    assert [] == run_dir.take_commands()


def test_a_damaged_command_is_put_aside_and_others_are_taken(run_dir: RunDir) -> None:
    run_dir.put_command(a_command(number=2))
    (run_dir.path / "commands" / "1.json").write_text("{torn")
    (run_dir.path / "commands" / "notes.txt").write_text("not ours")
    assert [2] == [command.number for command in run_dir.take_commands()]
    names = {path.name for path in (run_dir.path / "commands").iterdir()}
    assert {"1.bad", "notes.txt"} == names


# --------------------------------------------------------------------------------- halt


def test_a_halt_is_marked_and_taken_back(run_dir: RunDir) -> None:
    assert run_dir.halted() is None
    marker = HaltMarker(reason="budgets are spent", step=7, attempt=1, time_unix_ns=5)
    run_dir.write_halted(marker)
    assert marker == run_dir.halted()
    run_dir.clear_halted()
    run_dir.clear_halted()
    assert run_dir.halted() is None


def test_a_halt_is_durable_when_it_returns(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def watch(fd: int) -> None:
        target = Path(f"/proc/self/fd/{fd}").readlink()
        synced.append("folder" if target == run_dir.path else "file")
        fsync(fd)

    monkeypatch.setattr(os, "fsync", watch)
    run_dir.write_halted(HaltMarker(reason="x"))
    assert ["file", "folder"] == synced


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"reason": 5}'])
def test_a_damaged_halt_marker_still_halts(run_dir: RunDir, content: bytes) -> None:
    (run_dir.path / "HALTED").write_bytes(content)
    marker = run_dir.halted()
    assert marker is not None
    assert "damaged" in marker.reason


# --------------------------------------------------------------------------------- plan


def test_the_plan_journal_gives_back_what_was_appended(run_dir: RunDir) -> None:
    assert [] == run_dir.read_plan()
    entries: list[dict[str, object]] = [{"budget": 2}, {"attempt": 2**52, "text": "a\nb"}]
    for entry in entries:
        run_dir.append_plan(entry)
    assert entries == run_dir.read_plan()


@settings(max_examples=examples(30))
@given(cut=st.integers(1, 12))
def test_a_torn_last_line_is_passed_over_and_overwritten(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    run_dir = RunDir.create(tmp_path_factory.mktemp("plan"), "01ARZ3NDEKTSV4RRFFQ69G5FAV")
    run_dir.append_plan({"budget": 2})
    run_dir.append_plan({"budget": 1})
    path = run_dir.path / "plan.jsonl"
    os.truncate(path, path.stat().st_size - cut)
    assert [{"budget": 2}] == run_dir.read_plan()
    run_dir.append_plan({"budget": 0})
    assert [{"budget": 2}, {"budget": 0}] == run_dir.read_plan()


def test_a_damaged_line_in_the_middle_is_never_guessed(run_dir: RunDir) -> None:
    run_dir.append_plan({"budget": 2})
    run_dir.append_plan({"budget": 1})
    path = run_dir.path / "plan.jsonl"
    path.write_bytes(b"x" + path.read_bytes()[1:])
    with pytest.raises(FormatError, match=r"plan\.jsonl:1 is damaged"):
        run_dir.read_plan()


def test_a_long_torn_line_is_found_too(run_dir: RunDir) -> None:
    run_dir.append_plan({"budget": 2})
    with (run_dir.path / "plan.jsonl").open("ab") as file:
        file.write(b"x" * 10_000)
    run_dir.append_plan({"budget": 1})
    assert [{"budget": 2}, {"budget": 1}] == run_dir.read_plan()


# ------------------------------------------------------------------------------ folders


def test_each_node_has_its_own_folder(run_dir: RunDir) -> None:
    spool = run_dir.agent_dir("node-a") / "spool"
    spool.mkdir()
    run_dir.agent_dir("node-b")
    assert {"node-a": spool} == run_dir.spool_dirs()
    assert run_dir.checkpoints_dir.is_dir()


@pytest.mark.parametrize("node", ["", "..", "a/b", ".hidden", "x" * 200])
def test_a_node_with_an_odd_name_is_refused(run_dir: RunDir, node: str) -> None:
    with pytest.raises(UsageError, match="node is"):
        run_dir.agent_dir(node)


def test_a_file_that_cannot_be_replaced_is_left_as_it_was(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run_dir.path / "file"
    replace_file(path, b"old")

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        replace_file(path, b"new")
    assert b"old" == path.read_bytes()
    assert ["file"] == [found.name for found in run_dir.path.iterdir()]
