"""The agent's folder: the lock that lets one agent in, its address, and the token to read it."""

import errno
import fcntl
import hashlib
import logging
import os
import secrets
from pathlib import Path

import msgspec

from trainvitals.errors import StorageError, UsageError, VitalsError
from trainvitals.io.private import open_private

TOKEN_FILE = "read.token"
_NO_LOCKS = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL})

log = logging.getLogger("vitals_agent")


class AgentInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What ``agent.json`` says: how to reach the agent that serves the folder."""

    pid: int
    node: str
    url: str
    token_file: str


class AgentStateDir:
    """``.../agents/<node>``, held by one agent at a time through a lock that dies with it.

    Args:
        path: the folder.
        local: a private folder of this node. The lock lies there where the folder's file system has
            none (Lustre without ``flock``): then only agents of this node keep out of each other's
            way, and no two nodes may have one name.
    """

    def __init__(self, path: Path, local: Path | None = None) -> None:
        self.path = path
        self._local = local
        self._lock_fd: int | None = None

    def acquire(self) -> None:
        """Take the lock.

        Raises:
            UsageError: another agent holds it.
            StorageError: the folder cannot be made or written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            fd = open_private(self.path / "agent.lock", os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise StorageError(
                f"{self.path}: cannot be used: {error.strerror}",
                hint="give --dir a folder that this user may write",
            ) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            if error.errno not in _NO_LOCKS or self._local is None:
                raise self._refusal(error) from error
            log.warning("%s: no locks (%s); the node's own is taken", self.path, error.strerror)
            fd = self._lock_here(self._local)
        self._lock_fd = fd

    def _lock_here(self, local: Path) -> int:
        try:
            fd = open_private(self._lock_in(local), os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise self._refusal(error) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            raise self._refusal(error) from error
        return fd

    def _lock_in(self, local: Path) -> Path:
        name = hashlib.sha256(str(self.path).encode()).hexdigest()[:16]
        return local / f"agent-{name}.lock"

    def is_held_by_another(self) -> bool:
        """Return whether an agent has the folder, or it cannot be told; changes nothing there."""
        paths = [self.path / "agent.lock"]
        if self._local is not None:
            paths.append(self._lock_in(self._local))
        for path in paths:
            try:
                return _is_locked(path)
            except VitalsError:
                return True  # it is a stranger's
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    return True
        return True

    def _refusal(self, error: OSError) -> VitalsError:
        if isinstance(error, BlockingIOError):
            return UsageError(
                f"{self.path.parent.parent}: {self._holder()} serves this folder on this node",
                hint="one agent per folder and node: use that one, or stop it first",
            )
        return StorageError(
            f"{self.path}: its file system has no locks: {error.strerror}",
            hint="put --dir on a file system with flock",
        )

    @property
    def held(self) -> bool:
        """Whether this agent holds the folder."""
        return self._lock_fd is not None

    def load_or_create_token(self, given: str = "") -> str:
        """Return the token for ``/metrics``: the one given, else one made once; keep it here."""
        path = self.path / TOKEN_FILE
        try:
            fd = open_private(path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise StorageError(f"{path}: cannot be opened: {error.strerror}") from error
        with os.fdopen(fd, "r+") as file:
            kept = file.read().strip()
            token = given or kept or secrets.token_urlsafe(32)
            if token != kept:
                file.seek(0)
                file.write(token + "\n")
                file.truncate()
        return token

    def publish(self, info: AgentInfo) -> None:
        """Write ``agent.json``, whole or not at all."""
        part = self.path / "agent.json.part"
        fd = open_private(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        with os.fdopen(fd, "wb") as file:
            file.write(msgspec.json.encode(info) + b"\n")
        part.rename(self.path / "agent.json")

    def release(self) -> None:
        """Give the folder back; the lock file stays: removing it would let two agents in."""
        if self._lock_fd is not None:
            (self.path / "agent.json").unlink(missing_ok=True)
            os.close(self._lock_fd)
            self._lock_fd = None

    def _holder(self) -> str:
        try:
            info = msgspec.json.decode((self.path / "agent.json").read_bytes(), type=AgentInfo)
        except (OSError, msgspec.MsgspecError):
            return "another agent"  # it starts just now
        return f"an agent (pid {info.pid}, {info.url or 'no address'})"


def _is_locked(path: Path) -> bool:
    """Return whether somebody holds the lock; what is not there is held by nobody."""
    try:
        fd = open_private(path, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # closed, and so let go, right below
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
