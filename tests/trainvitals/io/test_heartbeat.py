from pathlib import Path

import pytest

from trainvitals.errors import FormatError, InsecurePathError, NewerVersionError
from trainvitals.io.heartbeat import (
    HEARTBEAT_BYTES,
    HEARTBEAT_FILE,
    HeartbeatWriter,
    read_heartbeat,
)
from trainvitals.records import Heartbeat


def a_word(beat: int = 1, **fields: object) -> Heartbeat:
    return Heartbeat(beat=beat, monotonic_ns=beat * 10**9, step=7, phase="data", **fields)


def test_what_a_rank_says_its_agent_reads(shm: Path) -> None:
    writer = HeartbeatWriter(shm)
    word = a_word(sequences={"0": 12, "tp": 7}, where="train.py:33 (load)", stack_signal=60)
    writer.write(word)
    assert word == read_heartbeat(shm)
    writer.write(a_word(2))
    writer.close()
    assert a_word(2) == read_heartbeat(shm), "the last word outlives its writer"
    assert HEARTBEAT_BYTES == (shm / HEARTBEAT_FILE).stat().st_size


def test_on_a_disk_it_is_written_and_never_mapped(tmp_path: Path) -> None:
    writer = HeartbeatWriter(tmp_path)
    writer.write(a_word(3))
    writer.close()
    assert a_word(3) == read_heartbeat(tmp_path)


def test_a_torn_word_is_not_believed(shm: Path) -> None:
    writer = HeartbeatWriter(shm)
    with pytest.raises(FormatError):  # empty: the first word is yet to come
        read_heartbeat(shm)
    writer.write(a_word(1, where="a" * 100))
    path = shm / HEARTBEAT_FILE
    whole = path.read_bytes()
    for place in (9, 30, 90):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(FormatError, match="torn or damaged"):
            read_heartbeat(shm)
    path.write_bytes(whole[:200])
    with pytest.raises(FormatError, match="200 bytes"):
        read_heartbeat(shm)
    path.write_bytes(whole[:4] + b"\xff\0\0\0" + whole[8:])
    with pytest.raises(NewerVersionError):
        read_heartbeat(shm)


def test_a_link_in_its_place_is_refused(shm: Path, tmp_path: Path) -> None:
    (tmp_path / "else").write_bytes(bytes(HEARTBEAT_BYTES))
    (shm / HEARTBEAT_FILE).symlink_to(tmp_path / "else")
    with pytest.raises(InsecurePathError):
        read_heartbeat(shm)
