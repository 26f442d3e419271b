"""The run directory: what a run leaves on a shared disk, with or without any server.

    VITALS_DIR/<run_id>/
        run.json       attributes, for people
        command.key    0600; signs commands
        HALTED         the ladder stopped this run; a relaunch stops before training
        plan.jsonl     what no restore may give back: budgets, attempts, commands applied
        checkpoints/   agents/<node>/   commands/

The disk is often NFS or Lustre: files are appended and fsynced or replaced whole, never mapped.
"""

import contextlib
import errno
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path

import msgspec

from trainvitals.errors import UNREADABLE, FormatError, StorageError, UsageError
from trainvitals.identity import check_run_id
from trainvitals.io.private import open_private
from trainvitals.records import Command, RunInfo

_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}\Z")
_COMMAND_FILE = re.compile(r"\d{1,19}\.json\Z")
_KEY_BYTES = 32
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class HaltMarker(msgspec.Struct, frozen=True, kw_only=True):
    """Why a run was stopped for good."""

    reason: str
    step: int = -1
    attempt: int = 0
    time_unix_ns: int = 0


class RunDir:
    """One run's directory; made by ``create`` or found by ``open``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run_id = check_run_id(path.name)

    @classmethod
    def create(cls, vitals_dir: Path, run_id: str) -> "RunDir":
        """Make the directory where it is missing; one that is there is gone on with."""
        path = vitals_dir.absolute() / check_run_id(run_id)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(
                f"{path}: the run directory cannot be created: {error.strerror}",
                hint="set VITALS_DIR to a writable folder",
            ) from error
        return cls(path)

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
            StorageError: the folder is there, and cannot be listed.
        """
        try:
            paths = sorted(vitals_dir.absolute().iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise _unreadable(vitals_dir, error) from error
        return [RunDir(path) for path in paths if is_run_id(path.name) and path.is_dir()]

    # ------------------------------------------------------------------------- attributes

    def info(self) -> RunInfo | None:
        """Return the run's attributes, or None where rank 0 has not written them."""
        raw = _read(self.path / "run.json")
        if raw is None:
            return None
        try:
            return msgspec.json.decode(raw, type=RunInfo)
        except UNREADABLE as error:
            raise FormatError(f"{self.path / 'run.json'} cannot be read: {error}") from error

    def write_info(self, info: RunInfo) -> None:
        """Replace the run's attributes whole."""
        body = {"run_id": self.run_id, **msgspec.to_builtins(info)}
        raw = msgspec.json.format(msgspec.json.encode(body), indent=2)
        replace_file(self.path / "run.json", raw + b"\n")

    @property
    def checkpoints_dir(self) -> Path:
        """The folder for checkpoints, made if need be."""
        return self._folder("checkpoints")

    def agent_path(self, node: str) -> Path:
        """Return where the folder of one node's agent is, or will be."""
        if not _NODE.match(node):
            raise UsageError(f"node is {node!r}; use letters, digits and ._:- (at most 128)")
        return self.path / "agents" / node

    def agent_dir(self, node: str) -> Path:
        """Return the folder of one node's agent, made if need be."""
        path = self.agent_path(node)
        path.mkdir(parents=True, exist_ok=True)
        return path

    def spool_dirs(self) -> dict[str, Path]:
        """Return each node's folder of spooled batches, as far as there are any.

        Raises:
            OSError: the folder cannot be read.
        """
        try:
            nodes = sorted((self.path / "agents").iterdir())
        except FileNotFoundError:
            return {}
        spools = [node / "spool" for node in nodes]
        return {path.parent.name: path for path in spools if path.is_dir()}

    # --------------------------------------------------------------------------- commands

    def command_key(self, *, create: bool = False) -> bytes:
        """Return the key that signs this run's commands; with ``create`` it is made once.

        Raises:
            StorageError: there is none.
            InsecurePathError: others may read it.
            FormatError: it is damaged.
        """
        path = self.path / "command.key"
        if create:
            with contextlib.suppress(FileExistsError):
                fd = open_private(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
                _write_and_close(fd, secrets.token_hex(_KEY_BYTES).encode())
                sync_folder(self.path)
        try:
            fd = open_private(path)
        except FileNotFoundError:
            raise StorageError(
                f"{path} is missing; commands for this run cannot be signed or verified",
                hint="it is created when the run starts; was the folder copied without it?",
            ) from None
        try:
            raw = os.read(fd, 4 * _KEY_BYTES)
        finally:
            os.close(fd)
        try:
            key = bytes.fromhex(raw.decode("ascii"))
        except ValueError:
            key = b""
        if len(key) != _KEY_BYTES:
            raise FormatError(
                f"{path} must hold {2 * _KEY_BYTES} hexadecimal characters",
                hint="remove it and start the run again",
            )
        return key

    def put_command(self, command: Command) -> Path:
        """Leave a signed command for this run's agent."""
        path = self._folder("commands") / f"{command.number}.json"
        replace_file(path, msgspec.json.encode(command))
        return path

    def take_commands(self) -> list[Command]:
        """Return the commands that were left, oldest first, each once; damaged ones are renamed."""
        folder = self.path / "commands"
        taken: list[Command] = []
        entries = folder.iterdir() if folder.is_dir() else ()
        paths = [path for path in entries if _COMMAND_FILE.match(path.name) and path.is_file()]
        for path in sorted(paths, key=lambda p: int(p.stem)):
            raw = _read(path)
            if raw is None:
                continue
            try:
                command = msgspec.json.decode(raw, type=Command)
            except UNREADABLE:
                path.rename(path.with_suffix(".bad"))
                continue
            path.unlink(missing_ok=True)  # before it is acted on: at most once
            taken.append(command)
        return taken

    # ------------------------------------------------------------------------------- halt

    def halted(self) -> HaltMarker | None:
        """Return why the run was stopped, or None. A damaged marker still stops it."""
        raw = _read(self.path / "HALTED")
        if raw is None:
            return None
        try:
            return msgspec.json.decode(raw, type=HaltMarker)
        except UNREADABLE:
            return HaltMarker(reason="the halt marker is damaged; its reason is lost")

    def write_halted(self, marker: HaltMarker) -> None:
        """Mark the run as stopped; durable when this returns. A halt does this first."""
        raw = msgspec.json.format(msgspec.json.encode(marker), indent=2)
        replace_file(self.path / "HALTED", raw + b"\n")

    def clear_halted(self) -> None:
        """Take the mark away: a person said that the run may go on."""
        (self.path / "HALTED").unlink(missing_ok=True)
        sync_folder(self.path)

    # ------------------------------------------------------------------------------- plan

    def append_plan(self, entry: Mapping[str, object]) -> None:
        """Add a line to the plan journal; durable when this returns. For global rank 0 only."""
        line = msgspec.json.encode(dict(entry)) + b"\n"
        path = self.path / "plan.jsonl"
        is_new = not path.exists()
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            end = _end_of_lines(fd)
            os.ftruncate(fd, end)  # a torn line was never durable, so nobody acted on it
            write_all(fd, line, end)
            os.fsync(fd)
        finally:
            os.close(fd)
        if is_new:
            sync_folder(self.path)

    def read_plan(self) -> list[dict[str, object]]:
        """Return the plan journal's entries; a torn last line is passed over.

        Raises:
            FormatError: a line before the last is damaged. A guess could give budgets back.
        """
        raw = _read(self.path / "plan.jsonl") or b""
        entries: list[dict[str, object]] = []
        for number, line in enumerate(raw.split(b"\n")[:-1], start=1):
            try:
                entries.append(msgspec.json.decode(line, type=dict[str, object]))
            except UNREADABLE as error:
                raise FormatError(
                    f"{self.path / 'plan.jsonl'}:{number} is damaged: {error}",
                    hint="restore the file from a backup, or start a new run",
                ) from error
        return entries

    def _folder(self, name: str) -> Path:
        path = self.path / name
        path.mkdir(parents=True, exist_ok=True)
        return path


def is_run_id(text: str) -> bool:
    """Return whether this is a run's id, and a folder of that name a run directory."""
    try:
        check_run_id(text)
    except UsageError:
        return False
    return True


def check_folder(folder: Path) -> None:
    """Return if the folder can be listed.

    Raises:
        UsageError: there is no such folder.
        StorageError: it may not be read, or the disk does not answer.
    """
    hint = "give the folder that holds the runs (VITALS_DIR), or the folder of one run"
    try:
        os.scandir(folder).close()
    except FileNotFoundError:
        raise UsageError(f"there is no folder {folder}", hint=hint) from None
    except NotADirectoryError:
        raise UsageError(f"{folder} is a file, not a folder", hint=hint) from None
    except OSError as error:
        raise _unreadable(folder, error) from error


def _unreadable(folder: Path, error: OSError) -> StorageError:
    return StorageError(
        f"{folder} cannot be read: {error.strerror}",
        hint=f"`ls -ld {folder}` shows its owner and permissions",
    )


def is_full(error: BaseException) -> bool:
    """Return whether it says that the disk, or a quota on it, is full."""
    cause = error if isinstance(error, OSError) else error.__cause__
    return isinstance(cause, OSError) and cause.errno in _FULL


def replace_file(path: Path, raw: bytes, *, mode: int = 0o644) -> None:
    """Replace the file whole, durably: after a crash it holds the old bytes or the new."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        _write_and_close(fd, raw)
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make names in the folder durable, where its file system can."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # some network file systems refuse to
            os.fsync(fd)
    finally:
        os.close(fd)


def write_all(fd: int, raw: bytes, offset: int) -> None:
    """Write all of it at the offset, in as many calls as the system takes."""
    view = memoryview(raw)
    while view:
        num = os.pwrite(fd, view, offset)
        view, offset = view[num:], offset + num


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _write_and_close(fd: int, raw: bytes) -> None:
    try:
        write_all(fd, raw, 0)
        os.fsync(fd)
    finally:
        os.close(fd)


def _end_of_lines(fd: int) -> int:
    """The offset after the last newline."""
    end = os.fstat(fd).st_size
    while end > 0:
        start = max(0, end - 4096)
        newline = os.pread(fd, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0
