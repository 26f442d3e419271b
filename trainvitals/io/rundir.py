"""The run directory: files of a run on a shared disk, with or without a server.

    VITALS_DIR/<run_id>/   0700, or 0750 with VITALS_SHARE=group; no other user may write it
        run.json       attributes, for users
        command.key    0600; signs commands, and files that are verified when read
        HALTED         the policy halted this run; a relaunch ends before training
        plan.jsonl     state that no restore may reset: budgets, attempts, applied commands
        restarts.json  times of restarts of hung jobs
        checkpoints/   agents/<node>/   commands/   profiles/   mirrors/

The disk is often NFS or Lustre: files are appended and fsynced or replaced whole, never mapped.
Others, such as a lab's group, may be able to write the parent directory: files are verified when
they are read (``private``).
"""

import contextlib
import errno
import hmac
import logging
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from trainvitals.errors import (
    UNREADABLE,
    ConfigError,
    FormatError,
    InsecurePathError,
    StorageError,
    UsageError,
)
from trainvitals.identity import check_run_id
from trainvitals.io.private import (
    MAX_BYTES,
    FileOwner,
    decode_key,
    ensure_own_dir,
    mac_of,
    open_own,
    open_private,
    read_own,
    read_whole,
    replace_file,
    sync_folder,
    write_all,
    write_new_private,
)
from trainvitals.records import Command, RunInfo

_LOG = logging.getLogger("trainvitals")

_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}\Z")
_COMMAND_FILE = re.compile(r"\d{1,19}\.json\Z")
_KEY_BYTES = 32
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_SHARES = {"": 0, "none": 0, "group": 0o050}
_OURS = (
    *("run.json", "command.key", "HALTED", "plan.jsonl", "restarts.json"),
    *("checkpoints", "agents", "commands", "profiles", "mirrors"),
)
_MAX_PLAN_BYTES = 64 << 20
_MAC = "mac"
_RESTARTS = "restarts.json"


class HaltMarker(msgspec.Struct, frozen=True, kw_only=True):
    """Why a run was halted."""

    reason: str
    step: int = -1
    attempt: int = 0
    time_unix_ns: int = 0


class RunDir:
    """One run's directory; from ``create`` or ``open``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run_id = check_run_id(path.name)
        self._was_open = False
        """Whether others could write here until ``create`` closed it."""

    @classmethod
    def create(cls, vitals_dir: Path, run_id: str, *, share: str = "") -> "RunDir":
        """Create the directory if it is missing; an existing one is reused.

        No other user may write there afterwards. Files of another user are renamed and reported.

        Args:
            vitals_dir: the directory of all runs, which others may write.
            run_id: the run.
            share: who else may read a new one: no one ("" or "none"), or its "group".

        Raises:
            ConfigError: ``share`` has another value.
            InsecurePathError: it is another user's.
            StorageError: it cannot be created.
        """
        if share not in _SHARES:
            raise ConfigError(
                f"VITALS_SHARE is {share!r}; it must be none or group",
                hint="with VITALS_SHARE=group the run's group may read its files",
            )
        path = vitals_dir.absolute() / check_run_id(run_id)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            run_dir = cls(path)
            run_dir._was_open = path.is_dir() and FileOwner.current_user().is_writable_by_others(
                path.stat()
            )
            ensure_own_dir(path, read=_SHARES[share])
            run_dir._rename_foreign_files()
        except OSError as error:
            raise StorageError(
                f"{path}: the run directory cannot be created: {error.strerror}",
                hint="set VITALS_DIR to a writable folder",
            ) from error
        return run_dir

    def _rename_foreign_files(self) -> None:
        """Rename files that another user created under our names; they are not read."""
        for name in _OURS:
            try:
                status = (self.path / name).lstat()
            except FileNotFoundError:
                continue  # nothing is there to be judged
            if not FileOwner.current_user().owns(status):
                aside = f".refused-{name}-{secrets.token_hex(4)}"
                (self.path / name).rename(self.path / aside)
                _LOG.warning(
                    "vitals: %s belongs to user %d; it is refused, and kept as %s",
                    self.path / name,
                    status.st_uid,
                    aside,
                )

    @classmethod
    def open(cls, path: Path) -> "RunDir":
        """Return the run directory at ``path``.

        Raises:
            UsageError: there is none.
        """
        path = path.absolute()
        if not path.is_dir():
            raise UsageError(
                f"{path} is not a folder", hint="`vitals runs DIR` lists the runs below a folder"
            )
        return cls(path)

    @staticmethod
    def find_all(vitals_dir: Path) -> list["RunDir"]:
        """Return the run directories below ``vitals_dir``, oldest first.

        Raises:
            StorageError: the directory exists, and cannot be listed.
        """
        try:
            paths = sorted(vitals_dir.absolute().iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise _unreadable_error(vitals_dir, error) from error
        return [RunDir(path) for path in paths if is_run_id(path.name) and path.is_dir()]

    @property
    def is_ours(self) -> bool:
        """Return whether the run directory belongs to this process's user."""
        return self.path.stat().st_uid == os.geteuid()

    # ------------------------------------------------------------------------- attributes

    def info(self) -> RunInfo | None:
        """Read the run's attributes from its directory; None if rank 0 has not written them."""
        raw = self._read_file("run.json")
        if raw is None:
            return None
        try:
            return msgspec.json.decode(raw, type=RunInfo)
        except UNREADABLE as error:
            raise FormatError(f"{self.path / 'run.json'} cannot be read: {error}") from error

    def write_info(self, info: RunInfo) -> None:
        """Replace the file with the run's attributes in full."""
        body = {"run_id": self.run_id, **msgspec.to_builtins(info)}
        self._write_json("run.json", body)

    @property
    def checkpoints_dir(self) -> Path:
        """The directory of checkpoints, created if needed; only this user may write it.

        A link to a directory that others may write is allowed: checkpoints are verified when
        loaded.
        """
        path = self.path / "checkpoints"
        return path if path.is_symlink() else self._ensure_directory(path.name)

    @property
    def profiles_dir(self) -> Path:
        """Return the run directory's path for traces of ``torch.profiler``."""
        return self.path / "profiles"

    def agent_path(self, node: str) -> Path:
        """Return the path of one node's agent directory."""
        if not _NODE.match(node):
            raise UsageError(f"node is {node!r}; use letters, digits and ._:- (at most 128)")
        return self.path / "agents" / node

    def agent_dir(self, node: str) -> Path:
        """Return the directory of one node's agent, created if needed."""
        path = self.agent_path(node)
        self._ensure_directory("agents")
        return ensure_own_dir(path)

    def spool_dirs(self) -> dict[str, Path]:
        """Return each node's spool directory that exists.

        Raises:
            OSError: the directory cannot be read.
        """
        try:
            nodes = sorted((self.path / "agents").iterdir())
        except FileNotFoundError:
            return {}
        spools = [node / "spool" for node in nodes]
        return {path.parent.name: path for path in spools if path.is_dir()}

    # --------------------------------------------------------------------------- commands

    def command_key(self, *, create: bool = False) -> bytes:
        """Return the key that signs this run's commands; ``create`` generates it once.

        Raises:
            StorageError: there is none.
            InsecurePathError: others may read it.
            FormatError: it is damaged.
        """
        path = self.path / "command.key"
        if create:
            with contextlib.suppress(FileExistsError):
                write_new_private(path, secrets.token_hex(_KEY_BYTES).encode())
                sync_folder(self.path)
        try:
            fd = open_private(path)
        except FileNotFoundError:
            raise StorageError(
                f"{path} is missing; commands for this run cannot be signed or verified",
                hint="it is created when the run starts; was the folder copied without it?",
            ) from None
        hint = "remove it and start the run again"
        return decode_key(read_whole(fd, path), path, _KEY_BYTES, hint)

    def file_key(self, *, create: bool = False) -> bytes:
        """Return the key that signs the run's plan and checkpoints; it signs no command.

        Raises:
            StorageError, InsecurePathError, FormatError: as ``command_key``.
        """
        return bytes.fromhex(mac_of(self.command_key(create=create), b"files"))

    def put_command(self, command: Command) -> Path:
        """Write a signed command to a file in the run directory, for the agent to take."""
        path = self._ensure_directory("commands") / f"{command.number}.json"
        replace_file(path, msgspec.json.encode(command))
        return path

    def take_commands(self) -> list[Command]:
        """Return the commands that were left, oldest first, each once; damaged ones are renamed."""
        folder = self.path / "commands"
        taken: list[Command] = []
        entries = folder.iterdir() if folder.is_dir() else ()
        paths = [path for path in entries if _COMMAND_FILE.match(path.name) and path.is_file()]
        for path in sorted(paths, key=lambda p: int(p.stem)):
            try:
                raw = self._read_file(f"commands/{path.name}")
                if raw is None:
                    continue
                command = msgspec.json.decode(raw, type=Command)
            except (InsecurePathError, FormatError, *UNREADABLE):
                path.rename(path.with_suffix(".bad"))
                continue
            path.unlink(missing_ok=True)  # before it is acted on: at most once
            taken.append(command)
        return taken

    # ------------------------------------------------------------------------------- halt

    def halted(self) -> HaltMarker | None:
        """Read the halt marker in the run directory; None without one. A damaged one halts too.

        One of another user does not count: it is reported and ignored.
        """
        path = self.path / "HALTED"
        try:
            raw = self._read_file(path.name)
            return None if raw is None else msgspec.json.decode(raw, type=HaltMarker)
        except InsecurePathError as error:
            if not self._owner().owns(path.lstat()):
                _LOG.warning("vitals: the halt marker is refused: %s", error.text)
                return None
            return HaltMarker(reason=f"the halt marker is refused: {error.text}")
        except (FormatError, *UNREADABLE):
            return HaltMarker(reason="the halt marker is damaged; its reason is lost")

    def write_halted(self, marker: HaltMarker) -> None:
        """Mark the run as stopped; durable when this returns. A halt does this first."""
        self._write_json("HALTED", marker)

    def clear_halted(self) -> None:
        """Delete the halt marker from the run directory: an operator lets the run continue."""
        (self.path / "HALTED").unlink(missing_ok=True)
        sync_folder(self.path)

    # ---------------------------------------------------------------------------- restarts

    def restarts(self) -> list[int]:
        """Read the times (Unix nanoseconds) at which a hung job of this run was ended.

        Raises:
            FormatError: the file is damaged; a guess would restore the budget.
            InsecurePathError: it is a link, or another user's.
        """
        try:
            raw = self._read_file(_RESTARTS)
            return [] if raw is None else msgspec.json.decode(raw, type=list[int])
        except UNREADABLE as error:
            raise FormatError(f"{self.path / _RESTARTS} is damaged: {error}") from error

    def write_restarts(self, times_unix_ns: Sequence[int]) -> None:
        """Store the times of restarts durably. Call before the restart."""
        replace_file(self.path / _RESTARTS, msgspec.json.encode(list(times_unix_ns)), mode=0o600)

    # ------------------------------------------------------------------------------- plan

    def append_plan(self, entry: Mapping[str, object]) -> None:
        """Add a line to the plan journal; durable when this returns. For global rank 0 only.

        It is signed with the run's key, as a line of this run at this position in the file.

        Raises:
            InsecurePathError: the journal is a link, another user's, or has a second name.
            OSError: it cannot be written.
        """
        key = self.file_key(create=True)
        path = self.path / "plan.jsonl"
        is_new = not path.exists()
        fd = open_own(path, os.O_RDWR | os.O_CREAT, owner=self._owner())
        try:
            end = _end_of_lines(fd)
            os.ftruncate(fd, end)  # a torn line was never durable, so it had no effect
            signed = {**entry, _MAC: self._line_mac(key, end, entry)}
            write_all(fd, msgspec.json.encode(signed) + b"\n", end)
            os.fsync(fd)
        finally:
            os.close(fd)
        if is_new:
            sync_folder(self.path)

    def read_plan(self) -> list[dict[str, object]]:
        """Return the plan journal's entries; a torn last line is skipped.

        Signatures are verified if others could write the directory until now. Lines of earlier
        versions have none.

        Raises:
            FormatError: a line before the last is damaged. A guess could restore budgets.
            InsecurePathError: the journal does not belong to this run's user, or its signature is
                wrong.
        """
        path = self.path / "plan.jsonl"
        raw = self._read_file(path.name, max_bytes=_MAX_PLAN_BYTES) or b""
        key = self.file_key(create=True) if self._was_open else b""
        entries: list[dict[str, object]] = []
        offset = 0
        for number, line in enumerate(raw.split(b"\n")[:-1], start=1):
            try:
                entry = msgspec.json.decode(line, type=dict[str, object])
            except UNREADABLE as error:
                raise FormatError(
                    f"{path}:{number} is damaged: {error}",
                    hint="restore the file from a backup, or start a new run",
                ) from error
            mac = entry.pop(_MAC, None)
            genuine = (
                mac is None or not key or _is_same_mac(mac, self._line_mac(key, offset, entry))
            )
            if not genuine:
                raise InsecurePathError(
                    f"{path}:{number} is not signed with this run's key, and other users could "
                    f"write {self.path}",
                    hint="if you trust the file, start again: the folder is closed to them now",
                )
            entries.append(entry)
            offset += len(line) + 1
        return entries

    def _line_mac(self, key: bytes, offset: int, entry: Mapping[str, object]) -> str:
        """Return the signature of one line of the plan journal."""
        line = msgspec.json.encode(dict(entry))
        return mac_of(key, b"plan", self.run_id.encode(), b"%d" % offset, line)

    def _owner(self) -> FileOwner:
        """Return the run directory's owner, whose files are trusted; a reader may be another."""
        return FileOwner(self.path.stat().st_uid)

    def _read_file(self, name: str, *, max_bytes: int = MAX_BYTES) -> bytes | None:
        """Read a file of the run directory that its owner wrote; None if it does not exist."""
        try:
            return read_own(self.path / name, owner=self._owner(), max_bytes=max_bytes)
        except FileNotFoundError:
            return None

    def _write_json(self, name: str, body: object) -> None:
        raw = msgspec.json.format(msgspec.json.encode(body), indent=2)
        replace_file(self.path / name, raw + b"\n")

    def _ensure_directory(self, name: str) -> Path:
        """Create a directory in the run directory, which only this user may write."""
        return ensure_own_dir(self.path / name)


def _is_same_mac(mac: object, expected: str) -> bool:
    """Return whether a line of a run directory's file has this signature."""
    return isinstance(mac, str) and hmac.compare_digest(mac.encode(), expected.encode())


def is_run_id(text: str) -> bool:
    """Return whether this is a run's id, which is also the name of its directory."""
    try:
        check_run_id(text)
    except UsageError:
        return False
    return True


def check_folder(folder: Path) -> None:
    """Check that a directory on disk, given for run directories, can be listed.

    Raises:
        UsageError: there is no such directory.
        StorageError: it is not readable, or the disk does not respond.
    """
    hint = "give the folder that holds the runs (VITALS_DIR), or the folder of one run"
    try:
        os.scandir(folder).close()
    except FileNotFoundError:
        raise UsageError(f"there is no folder {folder}", hint=hint) from None
    except NotADirectoryError:
        raise UsageError(f"{folder} is a file, not a folder", hint=hint) from None
    except OSError as error:
        raise _unreadable_error(folder, error) from error


def _unreadable_error(folder: Path, error: OSError) -> StorageError:
    """Return the error for a directory of runs that cannot be read."""
    return StorageError(
        f"{folder} cannot be read: {error.strerror}",
        hint=f"`ls -ld {folder}` shows its owner and permissions",
    )


def is_full(error: BaseException) -> bool:
    """Return whether an error of a file means that the disk, or a quota on it, is full."""
    cause = error if isinstance(error, OSError) else error.__cause__
    return isinstance(cause, OSError) and cause.errno in _FULL


def _end_of_lines(fd: int) -> int:
    """Return the offset after the plan journal's last complete line."""
    end = os.fstat(fd).st_size
    while end > 0:
        start = max(0, end - 4096)
        newline = os.pread(fd, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def holds_runs(folder: Path) -> bool:
    """Return whether the directory is a run directory, or contains run directories."""
    return is_run_id(folder.absolute().name) or bool(RunDir.find_all(folder))
