"""Finds the checkpoints of a run that a command refers to."""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainer_hooks.recovery.checkpoints import manifest as manifests
from trainer_hooks.recovery.checkpoints.folder import CheckpointFolder
from trainer_hooks.recovery.checkpoints.index import INDEX, IndexEntry
from trainvitals.cli.resume import find_matching_runs
from trainvitals.errors import StorageError, UsageError, VitalsError
from trainvitals.io.rundir import RunDir

RUNS = Path("vitals_runs")


@dataclass(frozen=True, slots=True)
class FoundCheckpoints:
    """A directory of checkpoints, and the selected run; every run in it if that is empty."""

    path: Path
    run_id: str = ""
    vitals_dir: Path = RUNS

    def entries(self) -> list[IndexEntry]:
        """Return the entries of the selected checkpoints, oldest first."""
        every = CheckpointFolder(self.path, run_id=self.run_id).index().entries
        return [entry for entry in every if not self.run_id or entry.run_id in (self.run_id, "")]

    def require(self, checkpoint_id: str) -> IndexEntry:
        """Return the entry of an existing checkpoint."""
        manifests.parse_id(checkpoint_id)
        there = [entry for entry in self.entries() if entry.state in ("verified", "healthy")]
        for entry in there:
            if entry.id == checkpoint_id:
                return entry
        raise UsageError(
            f"there is no checkpoint {checkpoint_id} in {self.path}",
            hint=f"there are: {', '.join(entry.id for entry in there[-8:]) or 'none'}",
        )

    def folder(self, checkpoint_id: str) -> CheckpointFolder:
        """Return the directory that the checkpoint belongs to, as its run sees it."""
        run_id = self.run_id or manifests.peek(self.path / checkpoint_id).run_id
        return CheckpointFolder(self.path, run_id=run_id, key=self._key(run_id))

    def _key(self, run_id: str) -> bytes:
        """Return the key that signs the run's checkpoints; empty if it is not available."""
        for run_dir in (self.path.parent, self.vitals_dir / run_id):
            with suppress(VitalsError, OSError):  # no run directory, or another user's
                return RunDir.open(run_dir).file_key()
        return b""


def find_checkpoints(run: str, vitals_dir: Path) -> FoundCheckpoints:
    """Return the directory of checkpoints that a command selects.

    Raises:
        UsageError: there is none, or the selection is ambiguous.
    """
    folder = Path(run).expanduser()
    if run and _holds_checkpoints(folder):
        return FoundCheckpoints(folder, vitals_dir=vitals_dir)
    fitting = find_matching_runs(run, vitals_dir)
    saved = [run_dir for run_dir in fitting if _holds_checkpoints(run_dir.path / "checkpoints")]
    if len(saved) == 1:
        return FoundCheckpoints(saved[0].path / "checkpoints", saved[0].run_id)
    if not saved:
        raise UsageError(
            f"{fitting[-1].path} holds no checkpoints",
            hint="if the training sets its own folder, watch(..., checkpoints=FOLDER), give that "
            "folder",
        )
    ids = newest_of(run_dir.run_id for run_dir in saved)
    text = f"{len(saved)} matching runs have checkpoints: {ids}"
    raise UsageError(text, hint="give the id of one")


def _holds_checkpoints(folder: Path) -> bool:
    """Return whether a directory contains checkpoints or their index; raise if unreadable."""
    if not folder.is_dir():
        return False
    try:
        names = [path.name for path in folder.iterdir()]
    except OSError as error:
        raise StorageError(
            f"{folder} cannot be read: {error.strerror}",
            hint="check its owner and permissions: ls -ld",
        ) from error
    return any(name == INDEX or manifests.is_id(name.removeprefix("bad-")) for name in names)


def newest_of(names: Iterable[str]) -> str:
    """Return the last three checkpoints' names as a list in a sentence."""
    return ", ".join(list(names)[-3:])
