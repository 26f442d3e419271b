"""A folder of checkpoints as files: what is in it, what each is worth, and what is removed.

One process writes here: rank 0, or the command line. No torch, no collective, no thread.
"""

import logging
import shutil
from collections import deque
from pathlib import Path

from trainer_hooks.checkpoints import manifest as manifests
from trainer_hooks.checkpoints.manifest import Manifest
from trainvitals.errors import (
    CheckpointCorruptError,
    CheckpointError,
    StorageError,
    UsageError,
    VitalsError,
)
from trainvitals.policy.state import CheckpointRef, CheckpointState
from trainvitals.records import CheckpointChanged

_LOG = logging.getLogger("trainvitals")
_PARTIAL, _DOOMED, _BAD = ".partial-", ".doomed-", "bad-"
_MAX_CHANGES = 1000


class CheckpointFolder:
    """The checkpoints of one run in one folder."""

    def __init__(self, path: Path, *, run_id: str, keep: int = 3) -> None:
        self.path = path
        self._run_id = run_id
        self._keep = max(1, keep)
        self._changes: deque[CheckpointChanged] = deque(maxlen=_MAX_CHANGES)

    def prepare(self) -> None:
        """Make the folder, and clear what a killed process left half written.

        Raises:
            StorageError: it cannot be made or written.
        """
        try:
            self.path.mkdir(parents=True, mode=0o700, exist_ok=True)
            for path in self.path.iterdir():
                if path.name.startswith((_PARTIAL, _DOOMED)) and not path.is_symlink():
                    shutil.rmtree(path)
            probe = self.path / f"{_PARTIAL}probe"
            probe.mkdir()
            probe.rmdir()
        except OSError as error:
            raise StorageError(
                f"checkpoints cannot be kept in {self.path}: {error.strerror}",
                hint="name a folder that can be written: watch(..., checkpoints=PATH)",
            ) from error

    # -------------------------------------------------------------------------------- saving

    def partial(self, checkpoint_id: str) -> Path:
        """Return where a checkpoint is written before it is complete."""
        return self.path / f"{_PARTIAL}{checkpoint_id}"

    def make_room(self, checkpoint_id: str, size: int) -> None:
        """Make the folder of a checkpoint to be written, where the disk has room for it.

        Raises:
            CheckpointError: it has not.
        """
        free, needed = shutil.disk_usage(self.path).free, int(size * 1.05) + (1 << 20)
        if free < needed:
            raise CheckpointError(
                f"the disk of {self.path} has {free >> 20} MiB free; this checkpoint needs "
                f"{needed >> 20} MiB"
            )
        self.partial(checkpoint_id).mkdir(mode=0o700)

    def publish(self, content: Manifest) -> None:
        """Seal what was written and give it its name: only now it is a checkpoint."""
        partial = self.partial(content.id)
        manifests.seal(partial, content)
        partial.rename(self.path / content.id)
        manifests.sync_folder(self.path)

    def discard(self, checkpoint_id: str) -> None:
        """Remove what a failed save left."""
        shutil.rmtree(self.partial(checkpoint_id), ignore_errors=True)

    # ------------------------------------------------------------------------------- keeping

    def mark_healthy(self, checkpoint_id: str) -> None:
        """Record that a verified checkpoint was proven healthy."""
        folder = self.folder(checkpoint_id)
        (folder / manifests.HEALTHY_MARK).touch(mode=0o600)
        manifests.sync_folder(folder)
        self.note(checkpoint_id, "healthy")

    def rotate(self) -> None:
        """Remove the oldest beyond ``keep``, and never the newest healthy one."""
        refs = self.refs()
        newest_healthy = [ref.id for ref in refs if ref.state == "healthy"][-1:]
        for ref in refs[: -self._keep]:
            if ref.id not in newest_healthy:
                doomed = self.path / f"{_DOOMED}{ref.id}"
                (self.path / ref.id).rename(doomed)
                shutil.rmtree(doomed)
                self.note(ref.id, "retired", detail="made room")

    def set_aside(self, checkpoint_id: str, reason: str) -> None:
        """Give a damaged checkpoint a name under which nothing loads it; it is not deleted."""
        _LOG.warning("vitals: checkpoint %s is damaged and set aside: %s", checkpoint_id, reason)
        (self.path / checkpoint_id).rename(self.path / f"{_BAD}{checkpoint_id}")
        self.note(checkpoint_id, "bad", detail=reason)

    # ------------------------------------------------------------------------------- looking

    def names(self) -> list[str]:
        """Return the ids in the folder, oldest first: by step, then by attempt (a time)."""
        if not self.path.is_dir():
            return []
        names = [p.name for p in self.path.iterdir() if manifests.is_id(p.name)]
        return sorted(names, key=manifests.parse_id)

    def refs(self) -> tuple[CheckpointRef, ...]:
        """Return this run's complete checkpoints, oldest first; damaged manifests are left out."""
        found = []
        for name in self.names():
            try:
                content = manifests.read(self.path / name)
            except (VitalsError, OSError) as error:
                _LOG.warning("vitals: checkpoint %s is left out: %s", name, error)
                continue
            if content.run_id != self._run_id:
                continue
            proven = content.state == "healthy" or self._marked(name)
            state: CheckpointState = "healthy" if proven else "verified"
            found.append(
                CheckpointRef(
                    id=name, step=content.step, attempt=content.attempt, state=state, where="disk"
                )
            )
        return tuple(found)

    def loadable(self) -> list[str]:
        """Return what may be loaded: all but the sound ones of other runs in the same folder."""
        found = []
        for name in self.names():
            try:
                if manifests.read(self.path / name).run_id != self._run_id:
                    continue
            except (CheckpointCorruptError, OSError) as error:
                _LOG.info("vitals: checkpoint %s: %s", name, error)  # told and set aside by load
            found.append(name)
        return found

    def folder(self, checkpoint_id: str) -> Path:
        """Return the folder of an id that is in the store; an id is a name, never a path.

        Raises:
            UsageError: it is no id, or not there.
        """
        manifests.parse_id(checkpoint_id)
        if checkpoint_id not in self.names():
            known = ", ".join(self.names()) or "none"
            raise UsageError(f"there is no checkpoint {checkpoint_id}", hint=f"there are: {known}")
        return self.path / checkpoint_id

    def check(self, checkpoint_id: str) -> Manifest:
        """Return the manifest once every byte matches it and it is this run's.

        Raises:
            CheckpointCorruptError: something does not hold.
            CheckpointError: it is another run's.
            UsageError: there is no such checkpoint.
        """
        content = manifests.check(self.folder(checkpoint_id))
        if content.run_id != self._run_id:
            raise CheckpointError(
                f"{checkpoint_id} belongs to run {content.run_id}; this is {self._run_id}",
                hint=f"continue that run with VITALS_RUN_ID={content.run_id}",
            )
        return content

    def _marked(self, name: str) -> bool:
        return (self.path / name / manifests.HEALTHY_MARK).is_file()

    # --------------------------------------------------------------------------------- words

    def note(
        self, name: str, state: CheckpointState, *, num_bytes: int = 0, detail: str = ""
    ) -> None:
        """Remember a change, for the events stream."""
        self._changes.append(
            CheckpointChanged(
                checkpoint_id=name,
                checkpoint_step=manifests.parse_id(name)[0],
                state=state,
                where="disk",
                num_bytes=num_bytes,
                detail=detail,
            )
        )

    def take_changes(self) -> list[CheckpointChanged]:
        """Return what changed since the last call, for the events stream; call after each step."""
        return [self._changes.popleft() for _ in range(len(self._changes))]
