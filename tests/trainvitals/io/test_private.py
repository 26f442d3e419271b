import os
import stat
from pathlib import Path

import pytest

from trainvitals.errors import InsecurePathError, StorageError, VitalsError
from trainvitals.io import private
from trainvitals.io.private import (
    ensure_private_dir,
    is_memory_backed,
    open_private,
    private_base,
    private_bases,
)


def test_the_base_lies_where_the_environment_says_and_only_we_may_enter(tmp_path: Path) -> None:
    base = private_base({"VITALS_SHM": str(tmp_path)})
    assert tmp_path / f"trainvitals-{os.getuid()}" == base
    assert 0o700 == stat.S_IMODE(base.stat().st_mode)


def test_a_base_that_is_there_is_used_again(tmp_path: Path) -> None:
    environ = {"VITALS_SHM": str(tmp_path)}
    assert private_base(environ) == private_base(environ)


def test_a_missing_folder_for_the_base_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"VITALS_SHM is .*/nowhere"):
        private_base({"VITALS_SHM": str(tmp_path / "nowhere")})


def test_a_folder_that_is_refused_is_passed_over_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("shm", "tmp", "elsewhere"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(private, "_SHARED_MEMORY", tmp_path / "shm")
    monkeypatch.setattr(private, "_TEMPORARY", (tmp_path / "elsewhere",))
    name = f"trainvitals-{os.getuid()}"
    (tmp_path / "shm" / name).symlink_to(tmp_path)
    refused: list[VitalsError] = []
    environ = {"TMPDIR": str(tmp_path / "tmp")}
    expected = [tmp_path / "tmp" / name, tmp_path / "elsewhere" / name]
    assert expected == list(private_bases(environ, refused))
    assert [InsecurePathError] == [type(error) for error in refused]
    for folder in ("tmp", "elsewhere"):
        (tmp_path / folder / name).rmdir()
        (tmp_path / folder / name).touch()
    with pytest.raises(
        StorageError, match=r"no usable folder for journals.*is a symbolic link.*is not a folder"
    ):
        private_base(environ)


def test_what_the_environment_says_has_no_second_best(tmp_path: Path) -> None:
    (tmp_path / f"trainvitals-{os.getuid()}").touch()
    with pytest.raises(InsecurePathError, match="must be a folder"):
        private_base({"VITALS_SHM": str(tmp_path)})


def test_a_link_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(InsecurePathError, match="is a symbolic link"):
        ensure_private_dir(tmp_path / "link")


def test_a_folder_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    with pytest.raises(InsecurePathError, match="mode 0755") as caught:
        ensure_private_dir(tmp_path / "open")
    assert "chmod go-rwx" in caught.value.hint


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_someone_elses_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir(mode=0o700)
    os.chown(tmp_path / "theirs", 12345, 12345)
    with pytest.raises(InsecurePathError, match="belongs to user 12345"):
        ensure_private_dir(tmp_path / "theirs")


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch(mode=0o600)
    with pytest.raises(InsecurePathError, match="must be a folder"):
        ensure_private_dir(tmp_path / "file")


def test_a_folder_that_cannot_be_made_is_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot be created"):
        ensure_private_dir(tmp_path / "no" / "such" / "parent")


def test_a_new_private_file_is_for_us_alone(tmp_path: Path) -> None:
    os.close(open_private(tmp_path / "file", os.O_WRONLY | os.O_CREAT))
    assert 0o600 == stat.S_IMODE((tmp_path / "file").stat().st_mode)


def test_a_link_in_place_of_a_private_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").touch(mode=0o600)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(InsecurePathError, match="is a symbolic link"):
        open_private(tmp_path / "link")


def test_a_file_that_others_may_read_is_refused_and_not_left_open(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "file").chmod(0o644)
    with pytest.raises(InsecurePathError, match="mode 0644"):
        open_private(tmp_path / "file")
    # Of a worker of many tests other files may be closed meanwhile.
    is_open = [fd.samefile(tmp_path / "file") for fd in _open_files()]
    assert is_open and not any(is_open)


def _open_files() -> list[Path]:
    return [fd for fd in Path("/proc/self/fd").iterdir() if fd.exists()]


def test_a_pipe_in_place_of_a_private_file_neither_blocks_nor_passes(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(InsecurePathError, match="must be a file"):
        open_private(tmp_path / "pipe")


def test_shared_memory_is_known_from_a_disk(shm: Path) -> None:
    assert is_memory_backed(shm)
    assert not is_memory_backed(Path("/proc"))
    assert not is_memory_backed(shm / "missing")
