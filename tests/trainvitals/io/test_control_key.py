import os
import stat
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.orders import keys
from tests.trainvitals.io.builders import a_command
from trainvitals.errors import FormatError, InsecurePathError, StorageError, UnauthorizedError
from trainvitals.identity import new_run_id
from trainvitals.io.control_key import (
    control_folder,
    make_control_key,
    sign_manual_command,
    verify_manual_command,
)
from trainvitals.jsonable import from_json, to_json
from trainvitals.records import Command


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_control_key(tmp_path)
    return tmp_path


def test_both_halves_are_made_once_and_for_this_user_alone(folder: Path) -> None:
    halves = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert {"control.key", "control.pub"} == set(halves)
    assert {0o600} == {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    make_control_key(folder)
    assert halves == {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_key_that_cannot_be_written_is_removed_and_made_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(StorageError, match="cannot be created: No space left"):
            make_control_key(tmp_path)
    assert [] == list(tmp_path.iterdir())
    make_control_key(tmp_path)
    assert {"control.key", "control.pub"} == {path.name for path in tmp_path.iterdir()}


def test_a_folder_with_the_public_half_alone_stays_so_and_signs_nothing(folder: Path) -> None:
    (folder / "control.key").unlink()
    make_control_key(folder)
    assert ["control.pub"] == [path.name for path in folder.iterdir()]
    with pytest.raises(UnauthorizedError, match=r"control\.key"):
        sign_manual_command(a_command(), folder)


def test_who_has_the_public_half_alone_verifies(folder: Path) -> None:
    signed = sign_manual_command(a_command(argument=0.25, checkpoint_id="c1"), folder)
    (folder / "control.key").unlink()
    verify_manual_command(signed, folder)
    verify_manual_command(msgspec.structs.replace(signed, signature="the run's own"), folder)


def test_a_signature_survives_the_way_over_the_wire(folder: Path) -> None:
    signed = sign_manual_command(
        a_command(argument=31_219.0, issued_unix_ns=1_764_000_000_123_456_789), folder
    )
    verify_manual_command(from_json(to_json(signed), Command), folder)
    verify_manual_command(
        msgspec.msgpack.decode(msgspec.msgpack.encode(signed), type=Command), folder
    )


CHANGES = {
    "number": st.integers(2, 2**53),
    "run_id": st.integers(1, 2**40).map(new_run_id),
    "action": st.sampled_from(["rollback", "skip", "lr", "accept"]),
    "reason": st.text(max_size=20).filter(lambda text: text != "a test"),
    "issued_by": st.text(max_size=20).filter(lambda text: text != "me"),
    "issued_unix_ns": st.integers(1, 2**62),
    "expires_unix_ns": st.integers(1_001, 2**62),
    "checkpoint_id": st.text(min_size=1, max_size=20),
    "argument": st.floats(min_value=1e-300, allow_nan=False),
    "control_signature": st.one_of(st.text(max_size=10), st.binary(max_size=64).map(bytes.hex)),
}


@given(data=st.data(), name=st.sampled_from(sorted(CHANGES)))
def test_no_change_passes(data: st.DataObject, name: str) -> None:
    signed = sign_manual_command(a_command(), keys())
    changed = msgspec.structs.replace(signed, **{name: data.draw(CHANGES[name])})
    with pytest.raises(UnauthorizedError, match="not signed with the control key"):
        verify_manual_command(changed, keys())


def test_every_field_is_tried_above() -> None:
    assert {*CHANGES, "signature"} == set(Command.__struct_fields__)


def test_a_key_that_others_can_read_or_write_is_not_used(folder: Path) -> None:
    signed = sign_manual_command(a_command(), folder)
    for name in ("control.key", "control.pub"):
        (folder / name).chmod(0o644)
    with pytest.raises(InsecurePathError):
        sign_manual_command(a_command(), folder)
    with pytest.raises(InsecurePathError):
        verify_manual_command(signed, folder)


def test_a_damaged_key_is_said_so(folder: Path) -> None:
    (folder / "control.pub").write_text("x")
    with pytest.raises(FormatError, match=r"control\.pub must hold 64 hexadecimal"):
        verify_manual_command(sign_manual_command(a_command(), folder), folder)


def test_the_key_lies_beside_the_token_file_else_in_the_collectors_folder(tmp_path: Path) -> None:
    tokens = tmp_path / "home" / "tokens.json"
    environ = {"XDG_DATA_HOME": str(tmp_path)}
    assert tmp_path / "trainvitals" == control_folder(environ)
    assert tmp_path == control_folder(environ, None, f"{tmp_path}/")
    assert tmp_path / "trainvitals" == control_folder(environ, None, "http://127.0.0.1:1")
    assert tokens.parent == control_folder(environ, tokens, f"{tmp_path}/")
    assert tokens.parent == control_folder(environ | {"VITALS_TOKEN_FILE": str(tokens)})
    assert tmp_path == control_folder({"VITALS_COLLECTOR_URL": f"{tmp_path}/"})
