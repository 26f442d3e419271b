"""The agent's directory: the lock for a single agent, its URL, and the token for its metrics.

All of it is stored in the node's memory instead while the directory's disk is full.
"""

import errno
import fcntl
import hashlib
import logging
import os
import secrets
from pathlib import Path

import msgspec

from trainvitals.errors import UNREADABLE, StorageError, UsageError, VitalsError
from trainvitals.io.private import (
    ensure_own_dir,
    ensure_private_dir,
    open_private,
    read_own,
    read_whole,
    replace_file,
)
from trainvitals.io.rundir import is_full
from trainvitals.io.spool import read_unacknowledged_headers

TOKEN_FILE = "read.token"
WRITER_KEY_FILE = "writer.key"
DESTINATION_FILE = "collector"
_NO_LOCKS = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL})

log = logging.getLogger("vitals_agent")


class AgentInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Content of ``agent.json``: how to reach the agent that serves the directory."""

    pid: int
    node: str
    url: str
    token_file: str


class AgentStateDir:
    """``.../agents/<node>``, held by one agent at a time through a lock that dies with it.

    Args:
        path: the directory.
        local: a private directory of this node. It contains the lock if the directory's file system
            has no locks (Lustre without ``flock``) or is full: then only agents of this node
            exclude each other, and two nodes must not have the same name.
    """

    def __init__(self, path: Path, local: Path) -> None:
        self.path = path
        self.in_memory = False
        """Whether the lock, or a file, is in the node's memory, because the disk was full."""
        self._is_lock_local = False
        self._local = local
        self._lock_fd: int | None = None

    def acquire(self) -> None:
        """Lock the directory for this agent; in the node's memory if the disk is full.

        Raises:
            UsageError: another agent holds it.
            StorageError: the directory cannot be created or written.
        """
        try:
            fd = self._open_lock_file()
        except StorageError as error:
            if not is_full(error):
                raise
            self._lock_fd = self._lock_in_memory()
            self._is_lock_local = self.in_memory = True
            return
        try:
            if _is_locked(self._memory_lock_path):
                raise self._lock_error(BlockingIOError())  # it started while the disk was full
        except BaseException:
            os.close(fd)
            raise
        self._lock_fd = self._lock_or_take_local(fd)

    def return_to_disk(self) -> None:
        """Take the lock on the disk, which has space again; later writes go to the disk.

        Raises:
            UsageError: another agent was first.
            StorageError: the directory still cannot be written.
        """
        if self._is_lock_local:
            fd = self._lock_or_take_local(self._open_lock_file())
            if self._lock_fd is not None and self._lock_fd != fd:
                self.release()
            self._lock_fd = fd
        self._is_lock_local = self.in_memory = False

    @property
    def memory_path(self) -> Path:
        """Return the directory in the node's memory that the agent uses while the disk is full."""
        return self._memory_lock_path.with_suffix("")

    @property
    def _memory_lock_path(self) -> Path:
        """Return the lock file in the node's memory that stands for the directory's."""
        name = hashlib.sha256(str(self.path).encode()).hexdigest()[:16]
        return self._local / f"agent-{name}.lock"

    def _open_lock_file(self) -> int:
        """Create the agent's directory, and open the file that it locks."""
        try:
            self.path.parent.parent.mkdir(parents=True, exist_ok=True)
            ensure_own_dir(ensure_own_dir(self.path.parent) / self.path.name)
            return open_private(self.path / "agent.lock", os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise StorageError(
                f"{self.path}: cannot be used: {error.strerror}",
                hint="give --dir a folder that this user may write",
            ) from error

    def _lock_or_take_local(self, fd: int) -> int:
        """Lock the agent's file; lock one in memory if the file system has no locks."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            if error.errno not in _NO_LOCKS:
                raise self._lock_error(error) from error
            log.warning("%s: no locks (%s); the node's own is taken", self.path, error.strerror)
            return self._lock_in_memory() if self._lock_fd is None else self._lock_fd
        return fd

    def _lock_in_memory(self) -> int:
        """Lock a file in the node's memory for this agent; return its descriptor."""
        try:
            fd = open_private(self._memory_lock_path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise self._lock_error(error) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            raise self._lock_error(error) from error
        return fd

    def is_held_by_another(self) -> bool:
        """Return whether another agent has the directory, or may have it; changes nothing."""
        num_free = 0
        for path in (self.path / "agent.lock", self._memory_lock_path):
            try:
                if _is_locked(path):
                    return True
                num_free += 1
            except VitalsError:
                return True  # it belongs to another user
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    return True
        return not num_free

    def _lock_error(self, error: OSError) -> VitalsError:
        """Return the error if another agent serves the directory, or it has no locks."""
        if isinstance(error, BlockingIOError):
            return UsageError(
                f"{self.path.parent.parent}: {self._describe_lock_holder()} serves this "
                f"folder on this node",
                hint="one agent per folder and node: use that one, or stop it first",
            )
        return StorageError(
            f"{self.path}: its file system has no locks: {error.strerror}",
            hint="put --dir on a file system with flock",
        )

    def load_or_create_token(self, configured: str = "") -> str:
        """Return the token for the agent's ``/metrics``: configured, stored or new."""
        path = self.path / TOKEN_FILE
        try:
            stored = _read_private(self.token_file).strip()
        except OSError as error:
            raise StorageError(f"{path}: cannot be opened: {error.strerror}") from error
        token = configured or stored or secrets.token_urlsafe(32)
        if token != stored or path != self.token_file:
            self._write(TOKEN_FILE, f"{token}\n".encode())
        return token

    def load_or_create_writer_key(self) -> str:
        """Return the key that the agent sends with its batches, so that no other writer can.

        Stored with the spool: an agent that continues the spool must send the same key.
        """
        try:
            disk_key = _read_private(self.path / WRITER_KEY_FILE).strip()
            key = disk_key or _read_private(self.memory_path / WRITER_KEY_FILE).strip()
        except OSError as error:
            raise StorageError(f"{self.path}: cannot be read: {error.strerror}") from error
        key = key or secrets.token_hex(32)
        if key != disk_key:
            self._write(WRITER_KEY_FILE, f"{key}\n".encode())
        return key

    @property
    def token_file(self) -> Path:
        """Return the file with the token for the agent's ``/metrics``."""
        path = self.path / TOKEN_FILE
        return path if path.exists() else self.memory_path / TOKEN_FILE

    def destination(self) -> str:
        """Return the collector that the rows here are for; empty if our agents stored none."""
        try:
            return (
                _read_private(self.path / DESTINATION_FILE)
                or _read_private(self.memory_path / DESTINATION_FILE)
            ).strip()
        except (OSError, VitalsError):
            return ""

    def set_destination(self, collector: str) -> None:
        """Record the collector: another agent may have to send the rows of this spool."""
        if self.destination() != collector:
            self._write(DESTINATION_FILE, f"{collector}\n".encode())

    def num_waiting(self, most: int | None = None) -> int:
        """Return how many spooled rows the collector has not acknowledged; needs no lock.

        ``most`` is the number at which counting stops.

        Raises:
            OSError: the spool cannot be read.
        """
        num_rows = 0
        for folder in (self.path, self.memory_path):
            for header in read_unacknowledged_headers(folder / "spool"):
                num_rows += header.num_rows
                if most is not None and num_rows >= most:
                    return num_rows
        return num_rows

    def publish(self, info: AgentInfo) -> None:
        """Write ``agent.json`` atomically: how to reach this node's agent."""
        self._write("agent.json", msgspec.json.encode(info) + b"\n")

    def _write(self, name: str, raw: bytes) -> None:
        """Replace a file of the agent's state; in memory if the disk is full."""
        if not self.in_memory:
            try:
                replace_file(self.path / name, raw, mode=0o600)
            except OSError as error:
                if not is_full(error):
                    raise StorageError(f"{self.path / name}: {error.strerror}") from error
                self.in_memory = True
        if self.in_memory:
            replace_file(ensure_private_dir(self.memory_path) / name, raw, mode=0o600)

    def release(self) -> None:
        """Release the agent's lock; its file stays: removing it would let two agents in."""
        if self._lock_fd is not None:
            for folder in (self.path, self.memory_path):
                (folder / "agent.json").unlink(missing_ok=True)
            os.close(self._lock_fd)
            self._lock_fd = None

    def _describe_lock_holder(self) -> str:
        """Describe the agent that already serves the directory on this node."""
        try:
            path = self.path / "agent.json"
            path = path if path.exists() else self.memory_path / "agent.json"
            info = msgspec.json.decode(read_own(path), type=AgentInfo)
        except (OSError, VitalsError, *UNREADABLE):
            return "another agent"  # it is just starting
        return f"an agent (pid {info.pid}, {info.url or 'no address'})"


def _read_private(path: Path) -> str:
    """Read a file of the agent's state; "" if it does not exist."""
    try:
        fd = open_private(path)
    except FileNotFoundError:
        return ""
    return read_whole(fd, path).decode(errors="replace")


def _is_locked(path: Path) -> bool:
    """Return whether a living agent holds this lock; a missing file is not locked."""
    try:
        fd = open_private(path, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released by the close below
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
