"""A directory of checkpoints as files: its content, the state of each checkpoint, and rotation.

One process writes here: rank 0, or the command line. No torch, no collective, no thread.

    step-<step>-<attempt>/   a checkpoint: ``manifest.json`` was written last, then it got its name
        healthy  best        marks: proven by the steps after it; the best by a metric
    bad-step-.../            quarantined: never loaded, never removed; ``bad`` contains the reason
    index.json               state of each checkpoint, also deleted ones; the above takes precedence
    .partial-RUN-step-...    being written; a killed process leaves it, ``prepare`` clears it
    .doomed-RUN-step-...     being removed; likewise
"""

import errno
import logging
import math
import os
import secrets
import shutil
import stat
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from trainer_hooks.recovery.checkpoints import manifest as manifests
from trainer_hooks.recovery.checkpoints.index import (
    IN_WORK,
    BadMark,
    BestMark,
    CheckpointIndex,
    CheckpointIndexFile,
    IndexEntry,
    OnBranch,
    best_mark,
    removable,
    state_of,
)
from trainer_hooks.recovery.checkpoints.manifest import TEMPORARY, Header, Manifest
from trainvitals.clock import Clock, SystemClock
from trainvitals.errors import (
    CheckpointCorruptError,
    CheckpointError,
    InsecurePathError,
    NewerVersionError,
    StorageError,
    UsageError,
)
from trainvitals.io.private import FileOwner, open_own
from trainvitals.policy.state import CheckpointRef, CheckpointState
from trainvitals.records import CheckpointChanged

_LOG = logging.getLogger("trainvitals")
_PARTIAL, _DOOMED, _BAD = ".partial-", ".doomed-", "bad-"
_MAX_CHANGES = 1000
_ABANDONED_NS = 3600 * 10**9
"""Age of a temporary file of a few bytes after which no process writes it any longer."""


class CheckpointFolder:
    """The checkpoints of one run in one directory, which other runs may share.

    Rotation keeps the latest ``keep``, at least 1, and permanently one per ``keep_every`` steps; 0
    for none. The run's ``key`` signs manifests, and proves them if others may write the directory;
    if it is empty, nothing there can be proven.
    """

    def __init__(
        self,
        path: Path,
        *,
        run_id: str,
        keep: int = 3,
        keep_every: int = 0,
        key: bytes = b"",
        clock: Clock | None = None,
    ) -> None:
        self.path = path
        self.key = key
        self._run_id = run_id
        self._keep = max(1, keep)
        self._keep_every = max(0, keep_every)
        self._clock = clock or SystemClock()
        self._owner: FileOwner | None = None
        self._reported: set[str] = set()
        self.changes: deque[CheckpointChanged] = deque(maxlen=_MAX_CHANGES)
        """Changes that were not taken yet; any thread may add to it."""
        self._index = CheckpointIndexFile(path)

    def reach(self) -> None:
        """Verify that this rank can write here too, once rank 0 has prepared the directory.

        Raises:
            StorageError: it cannot: it got another directory, or its node does not have it.
        """
        try:
            self.path.mkdir(parents=True, mode=0o700, exist_ok=True)
            writable = os.access(self.path, os.W_OK | os.X_OK)
        except OSError as error:
            raise _unusable_directory_error(self.path, error.strerror or str(error)) from error
        if not writable:
            raise _unusable_directory_error(self.path, os.strerror(errno.EACCES))

    def prepare(self) -> None:
        """Create the directory, and remove incomplete data of a killed process of this run.

        Raises:
            StorageError: it cannot be created or written.
        """
        try:
            self.path.mkdir(parents=True, mode=0o700, exist_ok=True)
            self._owner = self._directory_owner()
            leftovers = list(self.path.iterdir())
        except OSError as error:
            raise _unusable_directory_error(self.path, error.strerror or str(error)) from error
        for path in leftovers:
            try:
                self._delete_leftover(path)
            except FileNotFoundError:
                continue  # another run in the directory was handling it
            except OSError as error:  # costs only disk space: nothing uses its content
                _LOG.warning("vitals: %s cannot be removed: %s", path, error)
        self._index.write()

    def _delete_leftover(self, path: Path) -> None:
        """Delete an incomplete checkpoint or an abandoned temporary file of this run."""
        match = IN_WORK.match(path.name)
        if path.name.startswith(TEMPORARY):
            if self._clock.time_ns() - path.lstat().st_mtime_ns < _ABANDONED_NS:
                return  # another run may be writing it now
            path.unlink() if path.is_symlink() or not path.is_dir() else path.rmdir()
        elif match is not None and match[2] == self._run_id and not path.is_symlink():
            shutil.rmtree(path)
            if path.name.startswith(_DOOMED):
                self.note(match[3], "retired", detail="made room")
            else:
                self.note(match[3], "bad", detail="not saved: the process ended while it wrote")

    # -------------------------------------------------------------------------------- saving

    def partial(self, checkpoint_id: str) -> Path:
        """Return the temporary directory of a checkpoint that is being written."""
        return self.path / f"{_PARTIAL}{self._run_id}-{checkpoint_id}"

    def make_room(self, checkpoint_id: str, size: int) -> None:
        """Create the directory of a checkpoint to be written, if the disk has enough space for it.

        Raises:
            CheckpointError: there is not enough space.
        """
        free, needed = shutil.disk_usage(self.path).free, int(size * 1.05) + (1 << 20)
        if free < needed:
            raise CheckpointError(
                f"the disk of {self.path} has {free >> 20} MiB free; this checkpoint needs "
                f"{needed >> 20} MiB"
            )
        self.partial(checkpoint_id).mkdir(mode=0o700)
        self._index.write()

    def publish(self, content: Manifest) -> None:
        """Seal the written files and give the directory its name: now it is a checkpoint.

        ``content.files`` contains the measurements of those ranks that wrote the files.
        """
        partial = self.partial(content.id)
        manifests.seal(partial, content, self.key)
        partial.rename(self.path / content.id)
        manifests.sync_folder(self.path)
        self._index.write()

    def discard(self, checkpoint_id: str) -> None:
        """Remove the files of a failed save."""
        shutil.rmtree(self.partial(checkpoint_id), ignore_errors=True)
        self._index.write()

    # ------------------------------------------------------------------------------- marking

    def mark_healthy(self, checkpoint_id: str) -> None:
        """Record that a verified checkpoint was proven healthy. Waits for the disk.

        Raises:
            UsageError: there is no such checkpoint.
        """
        folder = self.folder(checkpoint_id)
        os.close(open_own(folder / manifests.HEALTHY_MARK, os.O_WRONLY | os.O_CREAT, mode=0o600))
        manifests.sync_folder(folder)
        self.note(checkpoint_id, "healthy")
        self._index.write()

    def promote(self, checkpoint_id: str) -> None:
        """Mark a checkpoint healthy on an operator's request, once every byte of it matches.

        Raises:
            CheckpointCorruptError, CheckpointError, InsecurePathError, UsageError: as ``check``.
            StorageError: it cannot be marked.
        """
        self.check(checkpoint_id)
        try:
            self.mark_healthy(checkpoint_id)
        except OSError as error:
            raise StorageError(
                f"{self.path / checkpoint_id} cannot be marked: {error.strerror}",
                hint="promoting a checkpoint needs write permission for the folder",
            ) from error

    def mark_best(self, checkpoint_id: str, metric: str, value: float) -> None:
        """Mark a checkpoint as the best by this metric; rotation keeps it. Waits for the disk.

        Raises:
            UsageError: there is no such checkpoint, or the value is non-finite.
        """
        if not math.isfinite(value):
            raise UsageError(f"{metric} is {value}; only a finite value can be the best")
        folder = self.folder(checkpoint_id)
        older = self._best_marks()
        number = 1 + max((mark.number for mark in older.values() if mark is not None), default=0)
        mark = BestMark(metric=metric, value=value, number=number)
        manifests.write_durably(folder / manifests.BEST_MARK, self.path, msgspec.json.encode(mark))
        for name in older.keys() - {checkpoint_id}:
            (self.path / name / manifests.BEST_MARK).unlink(missing_ok=True)
        self._index.write()

    def best(self) -> tuple[str, BestMark] | None:
        """Return the id that was last marked as the best, and its metric; None without one."""
        marks = [(mark.number, name) for name, mark in self._best_marks().items() if mark]
        if not marks:
            return None
        name = max(marks)[1]
        mark = best_mark(self.path / name)
        return None if mark is None else (name, mark)

    # ------------------------------------------------------------------------------- keeping

    def rotate(self, on_branch: OnBranch | None = None) -> None:
        """Remove the result of ``removable``: never the latest healthy one, nor the best.

        Only complete checkpoints count as kept; ``load`` reports damaged ones.
        """
        sound = self._readable_manifests(manifests.read_with_sizes)
        doomed = removable(
            [self._checkpoint_ref(name, content) for name, content in sound.items()],
            keep=self._keep,
            keep_every=self._keep_every,
            best=self._best_marks(),
            on_branch=on_branch,
        )
        try:
            for name in doomed:
                away = self.path / f"{_DOOMED}{self._run_id}-{name}"
                (self.path / name).rename(away)
                self.note(name, "retired", num_bytes=sound[name].num_bytes, detail="made room")
                shutil.rmtree(away)
        finally:
            if doomed:
                self._index.write()

    def quarantine_damaged(self, checkpoint_id: str, reason: str) -> None:
        """Quarantine a damaged checkpoint by a name under which it is not loaded; keep its files.

        If it cannot be renamed, this is logged and it stays: the next load refuses it again.
        """
        _LOG.warning("vitals: checkpoint %s is damaged and set aside: %s", checkpoint_id, reason)
        try:
            self._rename_bad(checkpoint_id, reason)
        except OSError as error:
            _LOG.warning("vitals: checkpoint %s cannot be renamed: %s", checkpoint_id, error)
            self.note(checkpoint_id, "bad", detail=reason)

    def quarantine(self, checkpoint_id: str, reason: str) -> None:
        """Quarantine a checkpoint on an operator's request.

        Raises:
            UsageError: there is no such checkpoint.
            StorageError: it cannot be renamed.
        """
        self.folder(checkpoint_id)
        try:
            self._rename_bad(checkpoint_id, reason)
        except OSError as error:
            raise StorageError(
                f"{self.path / checkpoint_id} cannot be renamed: {error.strerror}",
                hint="quarantining a checkpoint needs write permission for the folder",
            ) from error

    def _rename_bad(self, checkpoint_id: str, reason: str) -> None:
        """Rename a checkpoint so that nothing loads it, and record the reason."""
        bad, number = self.path / f"{_BAD}{checkpoint_id}", 1
        while os.path.lexists(bad):  # the same id again, for example after a relaunch
            number += 1
            bad = self.path / f"{_BAD}{checkpoint_id}.{number}"
        size = manifests.peek(self.path / checkpoint_id).num_bytes
        (self.path / checkpoint_id).rename(bad)
        self.note(checkpoint_id, "bad", num_bytes=size, detail=reason)
        mark = BadMark(reason=reason, time_unix_ns=self._clock.time_ns())
        try:
            manifests.sync_folder(self.path)
            if not bad.is_symlink():
                manifests.write_durably(
                    bad / manifests.BAD_MARK, self.path, msgspec.json.encode(mark)
                )
        except OSError as error:  # the index has it too, and the name alone is sufficient
            _LOG.warning("vitals: cannot save why %s was set aside: %s", bad, error)
        self._index.write()

    # ------------------------------------------------------------------------------- looking

    def names(self) -> list[str]:
        """Return the ids in the folder, oldest first: by step, then by attempt (a time)."""
        if not self.path.is_dir():
            return []
        names = [p.name for p in self.path.iterdir() if manifests.is_id(p.name)]
        return sorted(names, key=manifests.parse_id)

    def refs(self) -> tuple[CheckpointRef, ...]:
        """Return this run's complete checkpoints, oldest first; damaged manifests are left out."""
        return tuple(
            self._checkpoint_ref(name, manifest)
            for name, manifest in self._readable_manifests(manifests.read).items()
        )

    def loadable_refs(self, on_branch: OnBranch | None = None) -> tuple[CheckpointRef, ...]:
        """Return the checkpoints that a load may try, oldest first: not known as another run's.

        One with a damaged manifest is included as verified, so that the load reports and
        quarantines it; one of a newer version of Vitals is included too, so that it is reported and
        not skipped silently. Those of a discarded attempt are excluded by ``on_branch``.
        """
        refs = []
        for name in self.names():
            step, attempt = manifests.parse_id(name)
            if on_branch is not None and not on_branch(step, attempt):
                continue
            if self.is_planted(name):
                _LOG.warning("vitals: checkpoint %s is another user's, and refused", name)
                continue
            manifest: Manifest | Header = manifests.peek(self.path / name)
            if manifest.run_id not in (self._run_id, ""):
                continue
            try:
                manifest = manifests.read(self.path / name)
                ref = self._checkpoint_ref(name, manifest)
            except NewerVersionError:
                ref = self._checkpoint_ref(name, manifest)
            except (CheckpointCorruptError, OSError) as error:
                _LOG.info("vitals: checkpoint %s: %s", name, error)  # load reports and quarantines
                ref = msgspec.structs.replace(
                    self._checkpoint_ref(name, manifest), state="verified"
                )
            refs.append(ref)
        return tuple(refs)

    def folder(self, checkpoint_id: str) -> Path:
        """Return the directory of a stored checkpoint by its id, which is a name, never a path.

        Raises:
            UsageError: it is not an id, or not stored here.
        """
        manifests.parse_id(checkpoint_id)
        if checkpoint_id not in self.names():
            ids = ", ".join(self.names()) or "none"
            raise UsageError(f"there is no checkpoint {checkpoint_id}", hint=f"there are: {ids}")
        return self.path / checkpoint_id

    def check(self, checkpoint_id: str) -> Manifest:
        """Return the manifest once every byte matches it, and it belongs to us and this run.

        Raises:
            CheckpointCorruptError, CheckpointError, InsecurePathError, NewerVersionError,
            UsageError: as ``examine``.
        """
        return self._read_run_manifest(checkpoint_id, manifests.check)

    def examine(self, checkpoint_id: str) -> Manifest:
        """Return the manifest of our and this run's checkpoint whose files have their sizes.

        None of them is read.

        Raises:
            CheckpointCorruptError: a check failed.
            CheckpointError: it belongs to another run.
            InsecurePathError: another user made it, or could have changed it.
            NewerVersionError: a newer version of Vitals wrote it.
            UsageError: there is no such checkpoint.
        """
        return self._read_run_manifest(checkpoint_id, manifests.examine)

    def _read_run_manifest(
        self, checkpoint_id: str, read: Callable[[Path, bytes | None], Manifest]
    ) -> Manifest:
        """Return a checkpoint's manifest with ``read``; refuse another run's."""
        folder = self.folder(checkpoint_id)
        try:
            content = self.proven(folder, read)
        except OSError as error:
            raise CheckpointError(
                f"{folder} cannot be read: {error.strerror}",
                hint="check its permissions (ls -la) and the disk",
            ) from error
        if content.run_id != self._run_id:
            raise CheckpointError(
                f"{checkpoint_id} belongs to run {content.run_id}; this is {self._run_id}",
                hint=f"continue that run with VITALS_RUN_ID={content.run_id}",
            )
        return content

    def proven(
        self, folder: Path, read: Callable[[Path, bytes | None], Manifest] = manifests.examine
    ) -> Manifest:
        """Return the manifest of a checkpoint's directory, or of a part of one, if it is ours.

        Raises:
            InsecurePathError: another user made it; or others could have changed it, and it is not
                signed with this run's key.
            OSError, CheckpointCorruptError, NewerVersionError: as ``read``.
        """
        manifests.check_owner(folder, self.owner())
        where = manifests.open_to_others(folder, self.owner())
        try:
            return read(folder, None if where is None else self.key)
        except InsecurePathError as error:
            assert where is not None, "no signature was asked for"
            status = where.stat()
            why = f"has mode {stat.S_IMODE(status.st_mode):04o}"
            if not self.owner().owns(status):
                why = f"belongs to user {status.st_uid}"
            trust = f"if you trust it: chmod -R go-w {where}"
            if where != folder:
                trust = f"if you trust it: chmod go-w {where}, or move {folder.name} to a "
                trust += "directory that you own"
            raise InsecurePathError(
                f"{where} {why}; other users can write there, and {error.text}, so "
                "its weights cannot be trusted",
                hint=trust,
            ) from error

    def owner(self) -> FileOwner:
        """Return the owner whose files count as ours here."""
        try:
            self._owner = self._owner or self._directory_owner()
        except OSError:  # read only: then use the system's information about this process
            self._owner = FileOwner.current_user()
        return self._owner

    def is_planted(self, name: str) -> bool:
        """Return whether the object with this name in the directory belongs to another user."""
        try:
            return not self.owner().owns((self.path / name).lstat())
        except FileNotFoundError:
            return False

    def _readable_manifests(self, read: Callable[[Path], Manifest]) -> dict[str, Manifest]:
        """Return this run's manifests by id, oldest first; unreadable ones are reported once."""
        by_id = {}
        for name in self.names():
            try:
                content = read(self.path / name)
            except (CheckpointCorruptError, NewerVersionError, OSError) as error:
                if name not in self._reported:
                    self._reported = {name, *(self._reported & set(self.names()))}
                    _LOG.warning("vitals: checkpoint %s is ignored: %s", name, error)
                continue
            if content.run_id == self._run_id:
                by_id[name] = content
        return by_id

    def _checkpoint_ref(self, name: str, content: Manifest | Header) -> CheckpointRef:
        """Return the reference to a checkpoint on disk, with its state."""
        step, attempt = manifests.parse_id(name)
        state = state_of(self.path / name, content)
        return CheckpointRef(id=name, step=step, attempt=attempt, state=state, where="disk")

    def _best_marks(self) -> dict[str, BestMark | None]:
        """Return this run's marks by id; None for a mark that exists and is unreadable."""
        marked = [n for n in self.names() if (self.path / n / manifests.BEST_MARK).is_file()]
        ours = [n for n in marked if manifests.peek(self.path / n).run_id == self._run_id]
        return {name: best_mark(self.path / name) for name in ours}

    def _directory_owner(self) -> FileOwner:
        """Return the owner of a directory that we create here."""
        probe = self.path / f"{TEMPORARY}{secrets.token_hex(8)}"
        probe.mkdir(mode=0o700)
        try:
            return FileOwner.from_status(probe.stat())
        finally:
            probe.rmdir()

    # ------------------------------------------------------------------------- index and changes

    def index(self) -> CheckpointIndex:
        """Return the state of each checkpoint in the directory, of all runs, and deleted ones."""
        return self._index.current()

    def note(
        self, name: str, state: CheckpointState, *, num_bytes: int = 0, detail: str = ""
    ) -> None:
        """Record a checkpoint's change for the events stream; a deletion for the index."""
        self.changes.append(
            CheckpointChanged(
                checkpoint_id=name,
                checkpoint_step=manifests.parse_id(name)[0],
                state=state,
                where="disk",
                num_bytes=num_bytes,
                detail=detail,
            )
        )
        if state in ("retired", "bad"):
            self._index.gone.append(
                IndexEntry(
                    id=name,
                    run_id=self._run_id,
                    state=state,
                    num_bytes=num_bytes,
                    time_unix_ns=self._clock.time_ns(),
                    reason=detail,
                )
            )

    def take_changes(self) -> list[CheckpointChanged]:
        """Return the changes since the last call, for the events stream; call after each step."""
        return [self.changes.popleft() for _ in range(len(self.changes))]


def _unusable_directory_error(path: Path, why: str) -> StorageError:
    """Return the error for a directory in which no checkpoint can be stored."""
    return StorageError(
        f"checkpoints cannot be kept in {path}: {why}",
        hint="name a folder that every rank can write: watch(..., checkpoints=PATH)",
    )
