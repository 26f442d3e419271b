"""The heartbeat: one page next to a rank's journal that shows its training thread's activity.

    magic 4 | version u32 | beat u64 | length u32 | crc32 u32 | the word as msgpack

A side thread of the rank writes it, the node's agent reads it. It outlives the rank: its last
content stays, also while the rank is stopped. The checksum covers beat, length and content: a torn
write is detected.
"""

import mmap
import os
import struct
import zlib
from pathlib import Path

import msgspec

from trainvitals.errors import UNREADABLE, FormatError, UsageError
from trainvitals.io.private import is_memory_backed, open_private
from trainvitals.io.segments import read_bytes
from trainvitals.records import Heartbeat
from trainvitals.rows import FORMAT_VERSION, refuse_newer_version

MAGIC = b"TVH1"
HEARTBEAT_BYTES = 4096
HEARTBEAT_FILE = "heartbeat"
STACKS_FILE = "stacks"
"""File for the rank's stacks after its signal."""
COLLECTIVES_FILE = "collectives.json"
"""The last collectives of each process group, from torch's flight recorder."""
_HEAD = struct.Struct("<4sIQII")
_COVERED = struct.Struct("<QI")
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Heartbeat).decode


class HeartbeatWriter:
    """The writer's side; for one thread. Mapped if the journal is in memory, otherwise written.

    Args:
        directory: the rank's journal directory.

    Raises:
        OSError: the page cannot be had.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / HEARTBEAT_FILE
        self._map: mmap.mmap | None = None
        self._fd = open_private(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            # Before the map: no page to be had is an OSError here, and would be a SIGBUS later.
            os.posix_fallocate(self._fd, 0, HEARTBEAT_BYTES)
            if is_memory_backed(directory):
                self._map = mmap.mmap(self._fd, HEARTBEAT_BYTES)
        except BaseException:
            os.close(self._fd)
            raise

    def write(self, word: Heartbeat) -> None:
        """Replace the content of the heartbeat's file, one page.

        Raises:
            UsageError: it is too long for the page.
            OSError: the disk refuses.
        """
        body = _encode(word)
        if _HEAD.size + len(body) > HEARTBEAT_BYTES:
            raise UsageError(
                f"the heartbeat takes {len(body)} bytes; its page holds "
                f"{HEARTBEAT_BYTES - _HEAD.size}"
            )
        crc = zlib.crc32(body, zlib.crc32(_COVERED.pack(word.beat, len(body))))
        raw = _HEAD.pack(MAGIC, FORMAT_VERSION, word.beat, len(body), crc) + body
        if self._map is not None:
            self._map[: len(raw)] = raw
        else:
            os.pwrite(self._fd, raw, 0)

    def close(self) -> None:
        """Unmap the file of the heartbeat; its last content stays."""
        if self._map is not None:
            self._map.close()
        os.close(self._fd)


def read_heartbeat(directory: Path) -> Heartbeat:
    """Read the latest heartbeat from the file next to a rank's journal in ``directory``.

    Raises:
        FileNotFoundError: it has none, as ranks of earlier versions.
        InsecurePathError: it is a link, or belongs to another user.
        FormatError: empty, torn or damaged; a torn one is complete at the next read.
        NewerVersionError: a newer version writes it.
    """
    path = directory / HEARTBEAT_FILE
    raw = read_bytes(path, 0, HEARTBEAT_BYTES)
    if len(raw) != HEARTBEAT_BYTES:
        raise FormatError(f"{path} has {len(raw)} bytes; a heartbeat has {HEARTBEAT_BYTES}")
    magic, version, beat, size, crc = _HEAD.unpack_from(raw)
    if magic != MAGIC:
        raise FormatError(f"{path} is not a heartbeat: it begins with {magic!r}")
    refuse_newer_version(version, path)
    body = raw[_HEAD.size : _HEAD.size + size]
    if len(body) != size or zlib.crc32(body, zlib.crc32(_COVERED.pack(beat, size))) != crc:
        raise FormatError(f"{path}: the heartbeat is torn or damaged")
    try:
        return _decode(body)
    except UNREADABLE as error:
        raise FormatError(f"{path}: the heartbeat cannot be read: {error}") from error
