"""Copies of a project for a drill: what they contain, and that the source stays unchanged."""

import os
import socket
import stat
import threading

import pytest

from tests.plugins.lab.drill.fingerprints import fingerprint
from tests.support.small_disks import small_file_system
from trainvitals.errors import StorageError, UsageError
from trainvitals.identity import new_run_id
from vitals_plugins.lab.drill import copying
from vitals_plugins.lab.drill.copying import copy_project, mirror_cache, translate_path


@pytest.fixture
def source(tmp_path):
    directory = tmp_path / "project"
    directory.mkdir()
    return directory


def write(path, text="x"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def files_of(directory):
    paths = directory.rglob("*")
    return sorted(str(p.relative_to(directory)) for p in paths if p.is_symlink() or p.is_file())


def test_content_mode_and_time_are_copied_and_the_source_stays_unchanged(source, tmp_path):
    script = write(source / "pkg" / "run.sh", "echo")
    script.chmod(0o755)
    os.utime(script, (1, 2))
    os.utime(source / "pkg", (3, 4))
    write(source / "train.py").chmod(0o444)
    before = fingerprint(source)

    result = copy_project(source, tmp_path / "copy")

    assert before == fingerprint(source)
    copied = (tmp_path / "copy" / "pkg" / "run.sh").stat()
    assert (0o755, 2) == (stat.S_IMODE(copied.st_mode), copied.st_mtime)
    assert 4 == (tmp_path / "copy" / "pkg").stat().st_mtime
    assert 0o600 == (tmp_path / "copy" / "train.py").stat().st_mode & 0o600
    assert (2, 5, {}, []) == (result.num_files, result.num_bytes, result.omitted, result.linked)


def test_what_a_training_does_not_need_is_omitted_with_the_reason(source, tmp_path):
    run = source / "vitals_runs" / new_run_id(1)
    write(run / "run.json")
    write(run / "checkpoints" / "step-1" / "rank0.pt")
    write(source / "wandb" / "run-1" / "log")
    write(source / "pkg" / "wandb" / "__init__.py")  # not a tracker's
    write(source / "cache" / "CACHEDIR.TAG")
    write(source / ".git" / "HEAD")
    write(source / ".ssh" / "id")
    write(source / "__pycache__" / "a.pyc")
    write(source / "out" / "last.pt")
    write(source / "train.py")

    result = copy_project(source, tmp_path / "copy", exclude=[source / "out"])

    assert ["pkg/wandb/__init__.py", "train.py"] == files_of(tmp_path / "copy")
    assert {
        f"vitals_runs/{run.name}": "run directory of Vitals",
        "wandb": "files of an experiment tracker",
        "cache": "cache",
        ".git": "version control",
        ".ssh": "credentials",
        "__pycache__": "cache",
        "out": "excluded",
    } == result.omitted


def test_large_files_data_and_environments_are_linked(source, tmp_path):
    with write(source / "weights.pt").open("wb") as file:
        file.truncate(copying.LARGE_BYTES + 1)
    for number in range(copying.MAX_DATA_FILES + 1):
        write(source / "data" / f"{number}.txt")
        write(source / "code" / f"{number}.txt")
    write(source / "code" / "a.py")
    write(source / ".venv" / "pyvenv.cfg")

    result = copy_project(source, tmp_path / "copy")

    assert [".venv", "data", "weights.pt"] == result.linked
    assert source / "weights.pt" == (tmp_path / "copy" / "weights.pt").readlink()
    assert copying.MAX_DATA_FILES + 2 == result.num_files


def test_links_name_the_copy_inside_and_the_same_file_outside(source, tmp_path):
    outside, copy = write(tmp_path / "outside.txt"), tmp_path / "elsewhere" / "copy"
    copy.parent.mkdir()
    write(source / "a" / "b.txt")
    write(source / ".git" / "HEAD")
    (source / "relative").symlink_to("a/b.txt")
    (source / "absolute").symlink_to(source / "a")
    (source / "out").symlink_to("../outside.txt")
    (source / "broken").symlink_to("nothing")
    (source / "loop").symlink_to("loop")
    (source / "head").symlink_to(".git/HEAD")

    result = copy_project(source, copy)

    assert (copy / "a" / "b.txt").samefile(copy / "relative")
    assert (copy / "a").samefile(copy / "absolute")
    assert outside == (copy / "out").readlink()
    assert {"nothing", "loop"} == {str((copy / name).readlink()) for name in ("broken", "loop")}
    assert ["out"] == result.linked
    assert {"a link to .git/HEAD, which is not copied", "version control"} == set(
        result.omitted.values()
    )


def test_special_and_unreadable_files_are_omitted(source, tmp_path):
    os.mkfifo(source / "fifo")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(source / "s"))
    write(source / "train.py")
    secret = write(source / "secret")
    secret.chmod(0)
    expected = {"fifo": "not a regular file", "s": "not a regular file"}
    if os.geteuid():
        expected["secret"] = "cannot be read: Permission denied"

    result = copy_project(source, tmp_path / "copy")

    assert expected == result.omitted
    assert "train.py" in files_of(tmp_path / "copy")


def test_names_that_are_no_text_are_copied_and_reported_as_text(source, tmp_path):
    name = b"a\xff\n.sock"
    os.mkfifo(os.fsencode(source) + b"/" + name)
    (source / "b\udcff.txt").write_text("x")
    result = copy_project(source, tmp_path / "copy")
    assert {"a  .sock": "not a regular file"} == result.omitted
    assert (tmp_path / "copy" / "b\udcff.txt").exists()


def test_a_file_that_changes_meanwhile_is_reported(source, tmp_path):
    log = write(source / "log", "x" * (8 << 20))
    is_done = threading.Event()

    def append():
        with log.open("a", buffering=1) as file:
            while not is_done.is_set():
                file.write("x")
                file.flush()
                if log.stat().st_size > copying.LARGE_BYTES // 2 + (1 << 20):
                    file.truncate(8 << 20)

    thread = threading.Thread(target=append)
    thread.start()
    try:
        results = (copy_project(source, tmp_path / f"copy{number}") for number in range(50))
        assert any(["log"] == result.changed for result in results)
    finally:
        is_done.set()
        thread.join()


def test_a_full_disk_is_an_error_and_leaves_no_copy(source, tmp_path):
    write(source / "a.bin", "x" * (1 << 20))
    with small_file_system(tmp_path / "disk", "256k") as disk:
        with pytest.raises(StorageError, match="No space left on device") as raised:
            copy_project(source, disk / "copy")
        assert [] == list(disk.iterdir())
    assert "V302" == raised.value.code


@pytest.mark.parametrize("place", ["project/copy", "project", "."])
def test_a_copy_in_the_project_is_refused(source, tmp_path, place):
    before = fingerprint(source)
    with pytest.raises(UsageError, match="overlap"):
        copy_project(source, tmp_path / place)
    assert before == fingerprint(source)


def test_a_project_that_is_too_large_is_refused(source, tmp_path):
    for number in range(copying.MAX_FILES + 1):
        (source / f"{number}.txt").touch()
    with pytest.raises(UsageError, match="more than 20000 files"):
        copy_project(source, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_an_existing_target_is_not_changed(source, tmp_path):
    theirs = write(tmp_path / "copy" / "theirs")
    with pytest.raises(StorageError, match="File exists"):
        copy_project(source, tmp_path / "copy")
    assert theirs.exists()


def test_a_cache_is_mirrored_without_locks_and_tokens(source, tmp_path):
    model = source / "hub" / "models--a"
    write(model / "blobs" / "1")
    (model / "snapshots").mkdir()
    (model / "snapshots" / "config.json").symlink_to("../blobs/1")
    write(source / "token", "secret")
    write(source / "datasets" / "x.lock")

    for number in range(copying.MAX_DATA_FILES + 1):
        write(source / "hub" / "models--b" / f"{number}")

    assert ["hub/models--a/blobs/1", "hub/models--b"] == mirror_cache(
        source, tmp_path / "mirror"
    ).linked

    config = tmp_path / "mirror" / "hub" / "models--a" / "snapshots" / "config.json"
    assert "x" == config.read_text()
    (tmp_path / "mirror" / "hub" / "models--a" / "blobs" / "2").write_text("new")
    (tmp_path / "mirror" / "datasets" / "x.lock").write_text("")
    assert ["hub/models--a/blobs/1", "hub/models--a/blobs/2"] == [
        name for name in files_of(tmp_path / "mirror") if "blobs" in name
    ]
    assert not (tmp_path / "mirror" / "token").exists()
    assert not (model / "blobs" / "2").exists()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/p/train.py", "/c/train.py"),
        ("--out=/p/out", "--out=/c/out"),
        ("/a:/p", "/a:/c"),
        ("/pq/train.py", "/pq/train.py"),
        ("train.py", "train.py"),
        ("x/p/y", "x/p/y"),
    ],
)
def test_absolute_paths_of_the_project_name_the_copy(tmp_path, text, expected):
    assert expected == translate_path(text, copying.Path("/p"), copying.Path("/c"))
