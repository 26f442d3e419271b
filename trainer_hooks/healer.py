"""Keeps states to go back to, and goes back: snapshots in memory, checkpoints on disk.

A rollback of a running job comes from memory: its snapshots change at the same step on all ranks.
Checkpoints on disk are written from healthy snapshots, at each rank's own pace, for a relaunch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor, nn

from trainer_hooks.device import Device
from trainer_hooks.emit import Emitter
from trainer_hooks.pack import Reduced
from trainer_hooks.ranks import Ranks
from trainer_hooks.snapshots import Meta, Restored, SnapshotRing, num_slots
from trainer_hooks.state import TrainingState
from trainvitals.errors import CheckpointError, ConfigError
from trainvitals.policy import CheckpointRef
from trainvitals.records import CheckpointChanged, Decision, Note

if TYPE_CHECKING:
    from trainer_hooks.checkpoints.store import CheckpointStore

_CLOSE_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSettings:
    """Where checkpoints go, how often, and how many are kept."""

    directory: Path
    """Folder for checkpoints on disk, seen by all ranks."""
    healthy_after: int = 20
    """Healthy steps after which a verified snapshot is healthy; at least the ladder's margin."""
    snapshot_every: int = 0
    """Steps between snapshots in memory; 0 takes ``healthy_after`` plus the readback lag, so that
    two slots do."""
    save_every: int = 200
    """Steps between checkpoints on disk; each is a snapshot that became healthy."""
    keep: int = 3
    """Checkpoints kept on disk."""

    def __post_init__(self) -> None:
        least = {"healthy_after": 1, "snapshot_every": 0, "save_every": 1, "keep": 1}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ConfigError(
                    f"checkpoints.{name} is {getattr(self, name)}; it must be at least {bound}"
                )


class Healer:
    """One rank's states to go back to, driven at the same steps on all ranks."""

    def __init__(
        self,
        settings: CheckpointSettings,
        ring: SnapshotRing,
        store: CheckpointStore,
        ranks: Ranks,
        emitter: Emitter,
    ) -> None:
        self._settings = settings
        self._ring = ring
        self._store = store
        self._saved_at = 0
        self._ranks = ranks
        self._emitter = emitter
        self._wrong: tuple[int, Tensor] | None = None

    @classmethod
    def make(
        cls,
        settings: CheckpointSettings,
        *,
        model: nn.Module,
        device: Device,
        extra: Mapping[str, Any],
        ranks: Ranks,
        run_id: str,
        emitter: Emitter,
    ) -> Self:
        """Lay out the snapshots and the folder for checkpoints. Collective.

        Raises:
            CheckpointError: on some rank the snapshots do not fit into memory; raised on all.
            StorageError: the folder cannot be written; raised on all.
        """
        # Half a second of torch.distributed.checkpoint: paid by those who heal.
        from trainer_hooks.checkpoints.agree import Agreement
        from trainer_hooks.checkpoints.store import CheckpointStore

        state = TrainingState(
            model, device.optimizers, device.schedulers, scaler=device.scaler, extra=extra
        )
        lag = device.readback.lag
        interval = settings.snapshot_every or settings.healthy_after + lag
        slots = num_slots(healthy_after=settings.healthy_after, lag=lag, interval=interval)
        ring = SnapshotRing(
            state, num_slots=slots, interval=interval, healthy_after=settings.healthy_after
        )
        store = CheckpointStore(
            state, settings.directory, run_id=run_id, ranks=ranks, keep=settings.keep
        )
        agreement = Agreement(ranks)
        local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world_size))
        agreement.on_all(lambda: ring.check_memory(ranks_on_node=local))
        agreement.on_root(store.prepare)
        if ranks.rank == 0:
            text = (
                f"{slots} snapshots, {ring.bytes() / 2**20:.1f} MiB a rank, every {interval} steps"
            )
            emitter.event(Note(code="snapshots", text=text), step=0, attempt=0)
        return cls(settings, ring, store, ranks, emitter)

    def resume(self) -> Restored | None:
        """Load this run's newest sound checkpoint, if there is one. Collective.

        Raises:
            CheckpointError: there are some, and none can be loaded.
        """
        return self._store.load_newest()

    def first(self, step: int, attempt: int, meta: Meta) -> None:
        """Take the state before the first step: healthy, so that protection starts at once.

        It is the only one then: a loop may have loaded another state since it was first called.

        Raises:
            CheckpointError: on some rank it is not finite, or could not be copied; raised on all.
        """
        self._ring.forget("the loop has loaded a state of its own")
        wrong = self._ring.take(step, attempt, meta, trusted=True)
        bad = [rank for rank, count in enumerate(self._ranks.gather(float(wrong))) if count]
        if bad:
            raise CheckpointError(
                f"the state before step {step} is not finite, or could not be copied, on rank(s) "
                f"{', '.join(map(str, bad[:8]))}: there would be nothing sound to go back to",
                hint="look at the model's initialisation and the memory left; mode 'guard' needs "
                "no snapshots",
            )
        self._ring.commit(step, ok=True)
        self._saved_at = step
        self._say()

    def before_update(self) -> None:
        """Make the coming update wait, on the device, for a copy that is still under way."""
        self._ring.before_update()

    def after_step(self, next_step: int, attempt: int, meta: Callable[[], Meta]) -> None:
        """Take a snapshot where one is due."""
        if self._ring.due(next_step):
            self._wrong = (next_step, self._ring.take(next_step, attempt, meta()))

    def flag(self, step: int) -> Tensor | None:
        """Return what is wrong with this rank's snapshot of ``step``; None where none is due."""
        return self._wrong[1] if self._wrong is not None and self._wrong[0] == step else None

    def returned(self, reduced: Reduced, *, step: int) -> None:
        """All ranks' words on the snapshot of ``step`` are in: it is verified, or dropped."""
        # A rank that could not measure the step could not speak for its copy either.
        silent = sum(reduced.by_rank("failed"))
        self._ring.commit(step, ok=sum(reduced.by_rank("snapshot_wrong")) + silent == 0.0)

    def promote(self, step: int, last_unhealthy_step: int) -> None:
        """Let snapshots become healthy, begin to write one where that is due, say what changed."""
        self._ring.promote(step, last_unhealthy_step)
        newest = self._ring.newest_healthy()
        if newest is not None and newest.step - self._saved_at >= self._settings.save_every:
            self._saved_at = newest.step
            self._store.save(newest)
        self._say()

    def refs(self) -> tuple[CheckpointRef, ...]:
        """Return what the ladder may go back to: equal on all ranks."""
        return self._ring.refs()

    def step_of(self, checkpoint_id: str) -> int:
        """Return the step of a snapshot by its id; -2, which no checkpoint has, if unknown."""
        return next((r.step for r in self.refs() if r.id == checkpoint_id), -2)

    def roll_back(self, decision: Decision) -> Meta:
        """Restore the decision's snapshot on this rank and return the meta it was taken with."""
        self._wrong = None
        restored = self._ring.restore(decision.checkpoint_id)
        self._saved_at = min(self._saved_at, restored.step)
        self._say()
        return restored.meta

    def close(self) -> None:
        """Wait, for a bounded time, for what is being written."""
        self._store.wait(_CLOSE_SECONDS)
        self._say()

    def _say(self) -> None:
        for change in self._ring.take_changes() + self._store.take_changes():
            if self._ranks.rank == 0:
                announce(self._emitter, change)


def announce(emitter: Emitter, change: CheckpointChanged) -> None:
    """Write a checkpoint's change as an event of the branch that the checkpoint lies on."""
    attempt = int(change.checkpoint_id.rpartition("-")[2])
    emitter.event(change, step=change.checkpoint_step, attempt=attempt)
