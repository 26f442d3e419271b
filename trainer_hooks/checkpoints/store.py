"""Saves snapshots to a run's folder in the background, and loads them: on all ranks together."""

import logging
import threading
from collections import deque
from pathlib import Path

import torch
from torch import Tensor

from trainer_hooks.checkpoints import manifest as manifests
from trainer_hooks.checkpoints import payload
from trainer_hooks.checkpoints.agree import Agreement, caught
from trainer_hooks.checkpoints.folder import CheckpointFolder
from trainer_hooks.checkpoints.manifest import Manifest
from trainer_hooks.moments import nonfinite_count
from trainer_hooks.ranks import Ranks
from trainer_hooks.snapshots import Restored, Snapshot
from trainer_hooks.state import Spec, TrainingState
from trainvitals.errors import CheckpointCorruptError, CheckpointError, VitalsError
from trainvitals.policy.state import CheckpointRef
from trainvitals.records import CheckpointChanged

_LOG = logging.getLogger("trainvitals")
_SHARED = ("model.", "optim.", "group.")
"""Names that are the same on every rank of a replicated training; rank 0 writes them."""


class CheckpointStore:
    """Checkpoints of one run in one folder, which all ranks see.

    ``save`` and the loads are collective: called on all ranks, in the same order. A save runs in
    one background thread, on the side group; a load must not run while a save does. A failure is
    logged, counted and told through ``take_changes``; it never reaches the training.

    What is in the folder is this rank's view of a disk: never let it decide anything by itself.
    """

    def __init__(
        self, state: TrainingState, directory: Path, *, run_id: str, ranks: Ranks, keep: int = 3
    ) -> None:
        self._state = state
        self.folder = CheckpointFolder(directory, run_id=run_id, keep=keep)
        self._run_id = run_id
        self._ranks = ranks
        self._agree = Agreement(ranks)
        self._replicated = ranks.world_size == 1 or state.replicated
        self._jobs: deque[Snapshot] = deque()
        self._guard = threading.Condition()
        self._worker: threading.Thread | None = None
        self.num_saved = 0
        self.num_failed = 0

    def prepare(self) -> None:
        """Make the folder ready. Rank 0 only.

        Raises:
            StorageError: it cannot be made or written.
        """
        self.folder.prepare()

    # -------------------------------------------------------------------------------- saving

    def save(self, snapshot: Snapshot) -> str:
        """Begin to write a snapshot to disk and return its id there; does not wait.

        The snapshot's memory is held until it is written. Saves queue up; since each holds a slot
        of the ring, there are never more of them than slots.
        """
        snapshot.hold()
        with self._guard:
            self._jobs.append(snapshot)
            if self._worker is None:
                self._worker = threading.Thread(target=self._work, name="vitals-save", daemon=True)
                self._worker.start()
        return manifests.checkpoint_id(snapshot.step, snapshot.attempt)

    def wait(self, timeout: float | None = 60.0) -> bool:
        """Wait until all saves are done; return False if the time ran out before."""
        with self._guard:
            return self._guard.wait_for(lambda: self._worker is None, timeout)

    def _work(self) -> None:
        """Save what is queued, then end: no thread is left behind by a run that saves nothing."""
        while True:
            with self._guard:
                if not self._jobs:
                    self._worker = None
                    self._guard.notify_all()
                    return
                snapshot = self._jobs.popleft()
            try:
                self._save(snapshot)
            except BaseException as error:  # noqa: BLE001 - torch's CheckpointException is no Exception
                self._failed(snapshot, error)
            finally:
                snapshot.release()

    def _save(self, snapshot: Snapshot) -> None:
        """Write, read back, seal and rename; each stage ends in one verdict for all ranks."""
        name = manifests.checkpoint_id(snapshot.step, snapshot.attempt)
        if self._ranks.broadcast(self._is_root and (self.folder.path / name).exists()):
            return
        partial = self.folder.partial(name)
        own: dict[str, Tensor] = {}
        self._agree.on_all(lambda: own.update(self._share(snapshot)))
        size = sum(self._ranks.gather(sum(t.nbytes for t in own.values())))
        self._agree.on_root(lambda: self.folder.make_room(name, size))
        payload.write(partial, own, self._ranks.side)
        self._agree.on_all(lambda: self._read_back(partial, own))
        self._agree.on_root(lambda: self._publish(snapshot, size))
        self.num_saved += 1
        self.folder.note(name, snapshot.state, num_bytes=size)
        problem = caught(self.folder.rotate) if self._is_root else None
        if problem is not None:  # told, but the new checkpoint is there all the same
            self.num_failed += 1
            _LOG.warning("vitals: old checkpoints were not removed: %s", problem.text)

    def _share(self, snapshot: Snapshot) -> dict[str, Tensor]:
        """Return what this rank writes: under its own prefix what is, or may be, its own alone."""
        mine = f"rank.{self._ranks.rank}."
        own = {f"{mine}host": payload.pack_host(snapshot.host, snapshot.meta)}
        for key, tensor in snapshot.tensors().items():
            if not (self._replicated and key.startswith(_SHARED)):
                own[mine + key] = tensor
            elif self._is_root:
                own[key] = tensor
        return own

    def _read_back(self, partial: Path, own: dict[str, Tensor]) -> None:
        for part in payload.read(partial, list(own)):
            for key, found in part.items():
                if not _same_bits(found, own[key]):
                    raise CheckpointCorruptError(f"{key} reads back otherwise than written")
                if self._must_be_finite(key) and nonfinite_count([found], found.device).item():
                    raise CheckpointCorruptError(f"{key} is not finite")

    def _publish(self, snapshot: Snapshot, size: int) -> None:
        content = Manifest(
            id=manifests.checkpoint_id(snapshot.step, snapshot.attempt),
            run_id=self._run_id,
            step=snapshot.step,
            attempt=snapshot.attempt,
            state="healthy" if snapshot.state == "healthy" else "verified",
            world_size=self._ranks.world_size,
            torch_version=str(torch.__version__),
            num_bytes=size,
            may_be_nonfinite=tuple(
                sorted(k for k in snapshot.tensors() if not self._state.must_be_finite(k))
            ),
            files={},
        )
        self.folder.publish(content)

    def _failed(self, snapshot: Snapshot, error: BaseException) -> None:
        name = manifests.checkpoint_id(snapshot.step, snapshot.attempt)
        self.num_failed += 1
        text = error.text if isinstance(error, VitalsError) else f"{type(error).__name__}: {error}"
        _LOG.warning("vitals: checkpoint %s was not saved, training goes on: %s", name, text)
        self.folder.note(name, "bad", detail=f"not saved: {text}")
        if self._is_root:
            self.folder.discard(name)

    def mark_healthy(self, checkpoint_id: str) -> None:
        """Record that a verified checkpoint was proven healthy. Rank 0 only."""
        self.folder.mark_healthy(checkpoint_id)

    def refs(self) -> tuple[CheckpointRef, ...]:
        """Return this run's complete checkpoints, oldest first."""
        return self.folder.refs()

    def take_changes(self) -> list[CheckpointChanged]:
        """Return what changed since the last call, for the events stream; call after each step."""
        return self.folder.take_changes()

    # ------------------------------------------------------------------------------- loading

    def verify(self, checkpoint_id: str) -> Manifest:
        """Return the manifest after reading everything back: checksums, then finiteness.

        Raises:
            CheckpointCorruptError: something does not hold.
            CheckpointError: it is another run's.
            UsageError: there is no such checkpoint.
        """
        content = self.folder.check(checkpoint_id)
        folder = self.folder.folder(checkpoint_id)
        exempt = set(content.may_be_nonfinite)
        for part in payload.read(folder, list(payload.specs(folder))):
            for key, tensor in part.items():
                if _plain(key) not in exempt and nonfinite_count([tensor], tensor.device).item():
                    raise CheckpointCorruptError(f"{checkpoint_id}: {key} is not finite")
        return content

    def load(self, checkpoint_id: str) -> Restored:
        """Verify a checkpoint and make the live state equal to it, bit for bit. Collective.

        Raises:
            CheckpointCorruptError: it is damaged; nothing has changed, and it is set aside.
            CheckpointError: it does not fit this training, or could not be read on some rank.
            UsageError: there is no such checkpoint.
        """
        try:
            self._agree.on_root(lambda: self.verify(checkpoint_id))
        except CheckpointCorruptError as error:
            reason = error.text
            self._agree.on_root(lambda: self.folder.set_aside(checkpoint_id, reason))
            raise
        restored: list[Restored] = []
        self._agree.on_all(lambda: restored.append(self._apply(checkpoint_id)))
        return restored[0]

    def load_newest(self) -> Restored | None:
        """Load the newest sound checkpoint, past damaged ones; None if there is none. Collective.

        Raises:
            CheckpointError: there are some, and none is sound; or it does not fit this training.
        """
        names = self._ranks.broadcast(self.folder.loadable() if self._is_root else [])
        for name in reversed(names):
            try:
                return self.load(name)
            except CheckpointCorruptError as error:
                _LOG.warning("vitals: checkpoint %s is damaged, trying an older: %s", name, error)
        if names:
            raise CheckpointError(
                f"all {len(names)} checkpoints in {self.folder.path} are damaged",
                hint="they are kept as bad-*; move them away to start from the beginning",
            )
        return None

    def _apply(self, checkpoint_id: str) -> Restored:
        folder = self.folder.path / checkpoint_id
        step, attempt = manifests.parse_id(checkpoint_id)
        known, saved_by = payload.specs(folder), manifests.read(folder).world_size
        same_world = saved_by == self._ranks.world_size
        if not same_world and any(k.startswith("rank.0.model.") for k in known):
            raise CheckpointError(
                f"{checkpoint_id} holds a part of the model for each of {saved_by} ranks",
                hint=f"resume with {saved_by} ranks",
            )
        own_host = f"rank.{self._ranks.rank}.host" in known
        mine = f"rank.{self._ranks.rank if own_host else 0}."
        keys = {_plain(k): k for k in known if k.startswith(mine) or not k.startswith("rank.")}
        host_key = keys.pop("host")
        host, meta = payload.unpack_host(next(payload.read(folder, [host_key]))[host_key])
        self._state.conform({key: known[name] for key, name in keys.items()}, host)
        for part in payload.read(folder, list(keys.values())):
            self._state.write({_plain(name): tensor for name, tensor in part.items()})
        self._state.load_host_state(host, rng=own_host)
        return Restored(checkpoint_id, step, attempt, meta, same_world)

    # --------------------------------------------------------------------------------- ranks

    @property
    def _is_root(self) -> bool:
        return self._ranks.rank == 0

    def _must_be_finite(self, key: str) -> bool:
        return not key.endswith(".host") and self._state.must_be_finite(_plain(key))


def _plain(key: str) -> str:
    """Return the name without the rank it was written for."""
    return key.split(".", 2)[2] if key.startswith("rank.") else key


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if Spec.of(one) != Spec.of(other):
        return False
    # clone: a view of one element may have stride 0, which no other type can view
    raw = [t.clone(memory_format=torch.contiguous_format).view(-1) for t in (one, other)]
    raw = [t.view(torch.uint8) for t in raw]
    return torch.equal(*raw)
