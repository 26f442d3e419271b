"""Input of a run: one page of shared memory with the latest command.

    magic 4 | version u32 | number i64 | length u32 | crc32 u32 | command as msgpack

The agent writes; rank 0 reads once per step at the price of a memory read. The checksum covers
number, length and command: a torn write has no effect. Commands are signed with the run's key, and
those from a collector with an operator's control key too.
"""

import contextlib
import hashlib
import hmac
import mmap
import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import msgspec

from trainvitals.clock import Clock
from trainvitals.errors import UNREADABLE, FormatError, UnauthorizedError, UsageError, VitalsError
from trainvitals.io.control_key import verify_manual_command
from trainvitals.io.private import open_private
from trainvitals.records import Command, CommandAck
from trainvitals.rows import FORMAT_VERSION, refuse_newer_version

MAGIC = b"TVM1"
MAILBOX_BYTES = 4096
_HEAD = struct.Struct("<4sIqII")
_NUMBER = struct.Struct("<q")
_COVERED = struct.Struct("<qI")
_NUMBER_AT = 8
_MAX_AHEAD_SECONDS = 30.0
"""A command may seem to be from so far in the future: clocks of machines differ a little."""


class ExpiredError(UsageError):
    """A command came too late, or its clock and ours differ."""


class Mailbox:
    """The latest command of a run; one writer, any number of readers."""

    def __init__(self, fd: int, path: Path) -> None:
        self.path = path
        try:
            if os.fstat(fd).st_size != MAILBOX_BYTES:
                raise FormatError(f"{path} is not a mailbox: it must have {MAILBOX_BYTES} bytes")
            self._map = mmap.mmap(fd, MAILBOX_BYTES)
        finally:
            os.close(fd)

    @classmethod
    def create(cls, path: Path) -> "Mailbox":
        """Open the mailbox; the first process creates it empty."""
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        if not path.exists():
            fd = open_private(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            try:
                os.posix_fallocate(fd, 0, MAILBOX_BYTES)
                os.pwrite(fd, _HEAD.pack(MAGIC, FORMAT_VERSION, 0, 0, zlib.crc32(bytes(12))), 0)
                with contextlib.suppress(FileExistsError):
                    os.link(temporary, path)  # unlike a rename, it never replaces one in use
            finally:
                os.close(fd)
                temporary.unlink()
        return cls.open(path)

    @classmethod
    def open(cls, path: Path) -> "Mailbox":
        """Open an existing mailbox.

        Raises:
            FileNotFoundError: there is none.
            FormatError: it is not a mailbox.
            NewerVersionError: it has a later format.
        """
        # Its second name, from its creation, may not be deleted yet.
        box = cls(open_private(path, os.O_RDWR, any_links=True), path)
        magic, version, _, _, _ = _HEAD.unpack_from(box._map)
        if magic == MAGIC and version == FORMAT_VERSION:
            return box
        box.close()
        if magic == MAGIC:
            refuse_newer_version(version, path)
        raise FormatError(f"{path} is not a mailbox: it begins with {magic!r}")

    def put(self, command: Command) -> None:
        """Replace the command. A reader sees the old one, the new one, or a checksum that fails.

        Raises:
            UsageError: the command is too long for the page.
        """
        body = msgspec.msgpack.encode(command)
        if _HEAD.size + len(body) > MAILBOX_BYTES:
            raise UsageError(
                f"the command takes {len(body)} bytes; a mailbox holds"
                f" {MAILBOX_BYTES - _HEAD.size}",
                hint="shorten the reason",
            )
        crc = zlib.crc32(body, zlib.crc32(_COVERED.pack(command.number, len(body))))
        self._map[_HEAD.size : _HEAD.size + len(body)] = body
        self._map[16:24] = struct.pack("<II", len(body), crc)
        self._map[_NUMBER_AT:16] = _NUMBER.pack(command.number)  # last: it is what readers watch

    def number(self) -> int:
        """Return the latest command's number, 0 without one: one memory read."""
        return int(_NUMBER.unpack_from(self._map, _NUMBER_AT)[0])

    def read(self) -> Command:
        """Return the latest command. It is not verified: see ``verify_command``.

        Raises:
            FormatError: empty, torn or damaged; a torn write is whole at the next step.
        """
        raw = bytes(self._map)
        _, _, number, size, crc = _HEAD.unpack_from(raw)
        body = raw[_HEAD.size : _HEAD.size + size]
        if number == 0:
            raise FormatError("the mailbox is empty")
        if len(body) != size or zlib.crc32(body, zlib.crc32(_COVERED.pack(number, size))) != crc:
            raise FormatError("the command in the mailbox is torn or damaged")
        try:
            command = msgspec.msgpack.decode(body, type=Command)
        except UNREADABLE as error:
            raise FormatError(f"the command in the mailbox cannot be read: {error}") from error
        if command.number != number:
            raise FormatError("the command in the mailbox is torn: its number differs")
        return command

    def close(self) -> None:
        """Unmap the page; the mailbox stays."""
        self._map.close()

    def __enter__(self) -> "Mailbox":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@dataclass(slots=True)
class CommandInbox:
    """The executing side: verifies each command, and accepts it at most once."""

    mailbox: Mailbox
    key: bytes
    keys: Path
    """The directory of ``control.pub``; read only if there is a command."""
    run_id: str
    clock: Clock
    last_number: int
    """Highest number applied or expired, from the plan journal: no restart applies one twice."""
    waiting: Command | None = None
    """A valid command, until it is acknowledged."""
    _seen: int = 0
    """The number that was checked last. A forged command changes no other state, so that it cannot
    block genuine ones."""

    def poll(self, *, step: int) -> CommandAck | None:
        """Read a new command from the mailbox; return the refusal of an invalid one."""
        number = self.mailbox.number()
        if number in (self._seen, self.last_number):
            return None
        try:
            command = self.mailbox.read()
        except FormatError:
            return None  # torn: whole at the next step, or never
        if command.number <= self.last_number:
            self._seen = number
            return None
        now, last = self.clock.time_ns(), self.last_number
        self._seen = number
        try:
            verify_command(command, self.key, run_id=self.run_id, now_unix_ns=now, last_number=last)
            if command.control_signature:
                verify_manual_command(command, self.keys)
        except ExpiredError as error:
            self.last_number = number
            return CommandAck(number=number, status="expired", step=step, detail=error.text)
        except VitalsError as error:
            return CommandAck(number=number, status="invalid", step=step, detail=error.text)
        self.last_number = number
        self.waiting = command
        return None


def sign_command(command: Command, key: bytes) -> Command:
    """Sign a command for the mailbox with the run's key: HMAC-SHA256 over all other fields."""
    return msgspec.structs.replace(command, signature=_signature(command, key))


def verify_command(
    command: Command, key: bytes, *, run_id: str, now_unix_ns: int, last_number: int
) -> Command:
    """Return the command if it is genuine, for this run, not expired, and later than the last.

    Raises:
        UnauthorizedError: it is not signed with this run's key.
        ExpiredError: it expired, by this machine's clock, or comes from a clock far ahead of it.
        UsageError: another run's, or applied before.
    """
    if not hmac.compare_digest(_signature(command, key).encode(), command.signature.encode()):
        raise UnauthorizedError(
            f"command {command.number} is not signed with this run's key",
            hint="the agent signs what a control key has signed, and `vitals command` what the"
            " run's owner leaves in its folder, both with command.key",
        )
    check_command(command, run_id, now_unix_ns)
    if command.number <= last_number:
        raise UsageError(
            f"command {command.number} is not newer than {last_number}, the last one accepted"
        )
    return command


def check_command(command: Command, run_id: str, now_unix_ns: int) -> None:
    """Raise an error for a command in a mailbox or file if it is another run's, or expired.

    Raises:
        UsageError: another run's.
        ExpiredError: as ``check_time``.
    """
    if command.run_id != run_id:
        raise UsageError(f"command {command.number} is for run {command.run_id}, not {run_id}")
    check_time(command, now_unix_ns)


def check_time(command: Command, now_unix_ns: int) -> None:
    """Raise an error for a command that is too old for the mailbox, or from the future.

    Raises:
        ExpiredError: states the allowed difference of the clocks.
    """
    age = (now_unix_ns - command.issued_unix_ns) / 1e9
    lives = (command.expires_unix_ns - command.issued_unix_ns) / 1e9
    if now_unix_ns >= command.expires_unix_ns:
        raise ExpiredError(
            f"command {command.number} expired {age - lives:.1f} seconds ago by this machine's"
            f" clock: it was issued {age:.1f} seconds ago, for {lives:g} seconds",
            hint="issue it again; if it was issued just now, the clocks of the machines differ",
        )
    if age < -_MAX_AHEAD_SECONDS:
        raise ExpiredError(
            f"command {command.number} was issued {-age:.1f} seconds in the future by this"
            " machine's clock: the clocks of the machines differ",
            hint="set the clocks (NTP), then issue it again",
        )


def _signature(command: Command, key: bytes) -> str:
    """Return the HMAC of a mailbox command with the run's key."""
    canonical = msgspec.msgpack.encode(msgspec.structs.replace(command, signature=""))
    return hmac.new(key, canonical, hashlib.sha256).hexdigest()
