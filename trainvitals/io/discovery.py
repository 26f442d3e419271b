"""Finds the journals on this node, their runs, and which of them are closed."""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from trainvitals.errors import UNREADABLE, StorageError, UsageError, VitalsError
from trainvitals.identity import Identity, check_run_id
from trainvitals.io.private import ensure_private_dir, open_private, read_own, write_all
from trainvitals.io.segments import CLOSED, ClosedMarker

ROOM_BYTES = 64 << 10
"""Size of mailbox, heartbeat and a small segment of each stream, with their directories."""

AWAY_FILE = "collector_away"
"""In the run directory: names the collector while it does not respond. The agent writes it, and the
rank that started the agent reports at its end which data is waiting."""
NOTICE_FILE = "agent_notice"
"""In the run directory: a problem that the agent reports; the rank that started it logs it."""


class JournalRef(msgspec.Struct, frozen=True, order=True):
    """A journal: its directory, its run, and the run directory, if known."""

    run_id: str
    directory: Path
    run_dir: Path | None = None


class _RunPointer(msgspec.Struct, frozen=True):
    run_id: str
    run_dir: str


def announce_run(base: Path, run_id: str, run_dir: Path) -> Path:
    """Create the directory of a run's journals under the private base, and record its run there.

    Raises:
        StorageError: the directory cannot be created or written.
    """
    folder = ensure_private_dir(base / check_run_id(run_id))
    pointer = msgspec.json.encode(_RunPointer(run_id, str(run_dir.absolute())))
    try:
        _write_private_file(folder / "run.json", pointer)
    except OSError as error:
        raise StorageError(
            f"{folder}: cannot write to the journals' folder: {error.strerror}",
            hint="free some shared memory, or set VITALS_SHM to a folder with room",
        ) from error
    return folder


def check_room(folder: Path) -> None:
    """Check that the private base has room for the files of one writer's journal.

    Raises:
        StorageError: it has not.
    """
    path = folder / f".room.{os.getpid()}.tmp"
    try:
        fd = open_private(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            write_all(fd, bytes(ROOM_BYTES), 0)
        finally:
            os.close(fd)
            path.unlink()
    except OSError as error:
        raise StorageError(
            f"{folder}: no room for {ROOM_BYTES} bytes of journal: {error.strerror}",
            hint="free some shared memory, or set VITALS_SHM to a folder with room",
        ) from error


def journal_directory(run_folder: Path, identity: Identity) -> Path:
    """Return the directory of one writer's journal."""
    return run_folder / f"{identity.source.replace(':', '-')}-{identity.incarnation}"


def find_journals(base: Path, run_id: str = "") -> list[JournalRef]:
    """Return the journals under the private base, of all runs or of one; others are skipped.

    An agent of one run lists only that run, twice a second: with 50 other jobs on its node it would
    otherwise list 50 directories each time.
    """
    journals: list[JournalRef] = []
    for folder in [base / run_id] if run_id else _subdirectories(base):
        try:
            check_run_id(folder.name)
        except UsageError:
            continue  # not a run's directory: other files may exist here
        run_dir = _read_run_pointer(folder)
        journals += [JournalRef(folder.name, path, run_dir) for path in _subdirectories(folder)]
    return sorted(journals)


def mark_journal_closed(directory: Path, next_seq: Mapping[str, int] | None = None) -> None:
    """Create the closed marker in a journal's directory, for a writer known to be dead."""
    _write_private_file(
        directory / CLOSED, msgspec.json.encode(ClosedMarker(next_seq=dict(next_seq or {})))
    )


def _subdirectories(path: Path) -> list[Path]:
    """Return the subdirectories in the journals' private base; none if it cannot be read."""
    try:
        with os.scandir(path) as entries:
            return [Path(e.path) for e in entries if e.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def _read_run_pointer(folder: Path) -> Path | None:
    """Return the run directory that is recorded next to a run's journals."""
    with contextlib.suppress(OSError, VitalsError, *UNREADABLE):
        return Path(msgspec.json.decode(read_own(folder / "run.json"), type=_RunPointer).run_dir)
    return None


def write_notice(folder: Path, text: str) -> None:
    """Write a notice to a private file next to the journals, for the rank's log."""
    _write_private_file(folder / NOTICE_FILE, text.encode())


def _write_private_file(path: Path, raw: bytes) -> None:
    """Write a private file next to the journals, in full or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    fd = open_private(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        write_all(fd, raw, 0)
        temporary.rename(path)
    except OSError:
        temporary.unlink()
        raise
    finally:
        os.close(fd)
