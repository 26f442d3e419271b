"""Keeps states to go back to, and goes back: snapshots in memory, checkpoints on disk.

Both lists are the same on all ranks, or no rank could choose from them: snapshots change at the
same step everywhere, and of a checkpoint that is complete on disk rank 0 tells with the numbers of
a step. What a rank's own disk shows decides nothing.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from msgspec.structs import replace
from torch import Tensor, nn

from trainer_hooks.ranks import Ranks
from trainer_hooks.recovery.plan_journal import PlanJournal
from trainer_hooks.recovery.snapshots import Meta, Restored, SnapshotRing, num_slots
from trainer_hooks.recovery.state import TrainingState
from trainer_hooks.step.device import Device
from trainer_hooks.step.emit import Emitter
from trainer_hooks.step.reduce_vector import Reduced
from trainvitals.clock import Clock
from trainvitals.errors import CheckpointError, ConfigError
from trainvitals.policy import CheckpointRef
from trainvitals.records import CheckpointChanged, Decision

if TYPE_CHECKING:
    from trainer_hooks.recovery.checkpoints.store import CheckpointStore

_LOG = logging.getLogger("trainvitals")
_CLOSE_SECONDS = 30.0
_LOAD_SECONDS = 600.0
"""How long a rollback from disk waits for the save that is under way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSettings:
    """Where checkpoints go, how often, and how many are kept."""

    directory: Path
    """Folder for checkpoints on disk, seen by all ranks; a word will do. What is relative is taken
    from where the process is now: a loop may go elsewhere."""
    healthy_after: int = 20
    """Healthy steps after which a verified snapshot is healthy; at least the ladder's margin."""
    snapshot_every: int = 0
    """Steps between snapshots in memory; 0 takes ``healthy_after`` plus the readback lag, so that
    two slots do."""
    save_every: int = 200
    """Steps between checkpoints on disk; each is a snapshot that became healthy."""
    save_seconds: float = 0.0
    """Seconds, by rank 0's clock, after which one is written even so; 0 counts steps alone."""
    keep: int = 3
    """Newest checkpoints kept on disk; the newest healthy one and the best always are."""
    keep_every: int = 0
    """Steps of which one checkpoint is kept for good; 0 keeps none of them."""
    grace_seconds: float = 25.0
    """Seconds between SIGTERM and SIGKILL, of which a third may pass until all ranks meet at the
    end of a step; then each writes its last snapshot alone."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "directory", Path(self.directory).absolute())
        least = {
            "healthy_after": 1, "snapshot_every": 0, "save_every": 1, "save_seconds": 0, "keep": 1,
            "keep_every": 0, "grace_seconds": 0,
        }  # fmt: skip
        for name, bound in least.items():
            if not getattr(self, name) >= bound:
                raise ConfigError(
                    f"checkpoints.{name} is {getattr(self, name)}; it must be at least {bound}"
                )


class RecoveryManager:
    """One rank's states to go back to, driven at the same steps on all ranks."""

    def __init__(
        self,
        settings: CheckpointSettings,
        ring: SnapshotRing,
        store: CheckpointStore,
        ranks: Ranks,
        emitter: Emitter,
        plan: PlanJournal,
        clock: Clock,
    ) -> None:
        self.settings = settings
        self._ring = ring
        self._store = store
        self._ranks = ranks
        self._emitter = emitter
        self._plan = plan
        self._clock = clock
        self._saved_at = 0
        self._saved_ns = clock.monotonic_ns()
        self._time_is_up = self._was_due = False
        self._newest_saved: tuple[int, int] = (0, 0)
        """Step and attempt of the newest checkpoint that is complete; of rank 0 alone."""
        self._on_disk: tuple[CheckpointRef, ...] = ()
        self._wrong: tuple[int, Tensor] | None = None

    @classmethod
    def make(
        cls,
        settings: CheckpointSettings,
        *,
        model: nn.Module,
        device: Device,
        ranks: Ranks,
        plan: PlanJournal,
        emitter: Emitter,
        clock: Clock,
        keep_evaluated: bool = False,
    ) -> Self:
        """Lay out the snapshots and the folder for checkpoints. Collective.

        Raises:
            CheckpointError: on some rank the snapshots do not fit into memory; raised on all.
            StorageError: the folder cannot be written; raised on all.
        """
        # Half a second of torch.distributed.checkpoint: paid by those who heal.
        from trainer_hooks.recovery.checkpoints.store import Agreement, CheckpointStore

        state = TrainingState(
            model, device.optimizers, device.schedulers, scaler=device.scaler, extra=device.extra
        )
        lag = device.readback.lag
        interval = settings.snapshot_every or settings.healthy_after + lag
        slots = num_slots(healthy_after=settings.healthy_after, lag=lag, interval=interval)
        ring = SnapshotRing(
            state,
            num_slots=slots,
            interval=interval,
            healthy_after=settings.healthy_after,
            keep_evaluated=keep_evaluated,
        )
        store = CheckpointStore(
            state,
            settings.directory,
            run_id=plan.run_dir.run_id,
            ranks=ranks,
            keep=settings.keep,
            keep_every=settings.keep_every,
            on_branch=lambda step, attempt: plan.plan.holds(step, attempt),
        )
        agreement = Agreement(ranks)
        local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world_size))
        agreement.on_all(lambda: ring.check_memory(ranks_on_node=local))
        agreement.on_root(store.prepare)
        text = (
            f"{ring.slots_in_words()}, {ring.bytes() / 2**20:.1f} MiB a rank, a snapshot every "
            f"{interval} steps"
        )
        emitter.note("snapshots", text, step=0, attempt=0)
        return cls(settings, ring, store, ranks, emitter, plan, clock)

    def keepers(self) -> tuple[SnapshotRing, CheckpointStore]:
        """Return what keeps the best state that was evaluated: in memory, and on disk."""
        return self._ring, self._store

    # ------------------------------------------------------------------------------ at the start

    def resume(self) -> Restored | None:
        """Load the newest sound checkpoint of the run's present branch, if any. Collective.

        Raises:
            CheckpointError: there are some, and none can be loaded.
        """
        refs = self._store.loadable_refs()
        restored = self._store.load_newest(refs)
        if restored is None and self._plan.plan.branches and self._is_rank0:
            text = (
                f"{self._store.folder.path.absolute()} holds no checkpoint of this run, which was "
                "started before: it begins at step 0"
            )
            _LOG.warning("vitals: %s", text)
            self._emitter.note("nothing_to_resume", text, "warning", step=0, attempt=0)
        # Those after it could not be loaded.
        ids = [ref.id for ref in refs]
        self._on_disk = refs[: ids.index(restored.id) + 1] if restored is not None else ()
        return restored

    def first(self, step: int, attempt: int, meta: Meta) -> None:
        """Take the state before the first step, so that protection starts at once. Collective.

        It is healthy, but for a checkpoint which a stopped run wrote before it was proven. It is
        the only one then: a loop may have loaded another state since it was first called.

        Raises:
            CheckpointError: on some rank it is not finite, or could not be copied; raised on all.
        """
        self._ring.forget("the loop has loaded a state of its own")
        unproven = any(ref.step == step and ref.state == "verified" for ref in self._on_disk)
        wrong = self._ring.take(step, attempt, meta, trusted=not unproven)
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

    # ------------------------------------------------------------------------------- each step

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

    @property
    def newest_saved(self) -> tuple[int, int]:
        """Step and attempt of the newest complete checkpoint, for rank 0's words; (0, 0): none."""
        return self._newest_saved

    @property
    def save_due(self) -> bool:
        """Whether the time between two checkpoints is over, by this rank's clock."""
        seconds = self.settings.save_seconds
        return 0 < seconds * 1e9 <= self._clock.monotonic_ns() - self._saved_ns

    def returned(self, reduced: Reduced, *, step: int) -> None:
        """Take in what all ranks said with ``step``: of its snapshot, and rank 0 of the disk."""
        # A rank that could not measure the step could not speak for its copy either.
        silent = sum(reduced.by_rank("failed"))
        self._ring.commit(step, ok=sum(reduced.by_rank("snapshot_wrong")) + silent == 0.0)
        due = bool(reduced.root["save_due"])
        # Steps that were under way when a save began say it once more.
        self._time_is_up = self._time_is_up or (due and not self._was_due)
        self._was_due = due
        self._saved(int(reduced.root["saved_step"]), int(reduced.root["saved_attempt"]))

    def _saved(self, step: int, attempt: int) -> None:
        """Put a checkpoint that is complete now among those to go back to."""
        is_listed = any((ref.step, ref.attempt) == (step, attempt) for ref in self._on_disk)
        if attempt and not is_listed and self._plan.plan.holds(step, attempt):
            from trainer_hooks.recovery.checkpoints.manifest import checkpoint_id

            name = checkpoint_id(step, attempt)
            ref = CheckpointRef(id=name, step=step, attempt=attempt, state="healthy", where="disk")
            self._on_disk = (*self._on_disk, ref)[-self.settings.keep :]

    def promote(self, step: int, last_unhealthy_step: int) -> None:
        """Let snapshots become healthy, begin to write one where that is due, say what changed."""
        for proven in self._ring.promote(step, last_unhealthy_step):
            self._prove_on_disk(proven.step)
        newest = self._ring.newest_healthy()
        if newest is not None and self._is_due(newest.step - self._saved_at):
            self._saved_at, self._saved_ns = newest.step, self._clock.monotonic_ns()
            self._time_is_up = False
            self._store.save(newest)
        self._say()

    def _is_due(self, steps: int) -> bool:
        return steps >= self.settings.save_every or (self._time_is_up and steps > 0)

    def _prove_on_disk(self, step: int) -> None:
        """A checkpoint that this start began from, unproven, is proven healthy by now."""
        for ref in self._on_disk:
            if ref.step == step and ref.state == "verified":
                proven = replace(ref, state="healthy")
                self._on_disk = tuple(proven if r is ref else r for r in self._on_disk)
                if self._is_rank0:
                    self._store.mark_healthy(ref.id)

    def refs(self) -> tuple[CheckpointRef, ...]:
        """Return what the ladder may go back to: equal on all ranks."""
        return (*self._on_disk, *self._ring.refs())

    def step_of(self, checkpoint_id: str) -> int:
        """Return the step of a checkpoint by its id; -2, which none has, if unknown."""
        return next((r.step for r in self.refs() if r.id == checkpoint_id), -2)

    # ------------------------------------------------------------------------------- going back

    def roll_back(self, decision: Decision) -> Restored:
        """Restore the decision's checkpoint, or the next older one where it cannot be read.

        Where there is none older, the oldest of all others that lie far enough back.

        From memory it is this rank's own deed; from disk it is collective.

        Raises:
            CheckpointError: nothing could be restored.
        """
        self._wrong = None
        target = next(ref for ref in self.refs() if ref.id == decision.checkpoint_id)
        if target.where == "memory":
            restored = self._ring.restore(target.id)
        else:
            restored = self._from_disk(target.step, commanded=decision.command_number > 0)
        self._on_disk = tuple(ref for ref in self._on_disk if ref.step <= restored.step)
        self._saved_at = min(self._saved_at, restored.step)
        self._say()
        return restored

    def _from_disk(self, latest: int, *, commanded: bool) -> Restored:
        if not self._store.wait(_LOAD_SECONDS):
            raise CheckpointError(
                f"a save has not ended for {_LOAD_SECONDS:.0f} s, so nothing can be loaded",
                hint="look at the disk of the checkpoints",
            )
        healthy = [r for r in self._on_disk if r.state == "healthy" and r.step <= latest]
        try:
            restored = self._store.load_newest(healthy)
        except CheckpointError:
            # Gone since rank 0 told of it, or damaged. The same on all ranks.
            self._on_disk = tuple(r for r in self._on_disk if r.step > latest)
            newer = None if commanded else self._oldest_far_enough_back()
            if newer is None:
                raise
            if newer.where == "memory":
                return self._ring.restore(newer.id)
            restored = self._store.load_newest([newer])
        assert restored is not None, "the ladder chose one of them"
        self._ring.drop_newer(restored.step)
        return restored

    def _oldest_far_enough_back(self) -> CheckpointRef | None:
        """Return what the ladder takes where nothing older is left: it is healthy all the same."""
        cause = self._plan.plan.facts.cause
        latest = -1 if cause is None else max(0, cause.onset_step - self.settings.healthy_after)
        usable = [r for r in self.refs() if r.state == "healthy" and r.step <= latest]
        return min(usable, key=lambda r: (r.step, r.where == "disk"), default=None)

    def restart(self) -> None:
        """Make this rank's state once more what it was before the first step."""
        self._ring.restore(self._ring.refs()[-1].id)

    # ------------------------------------------------------------------------------- the end

    def save_now(self, step: int, attempt: int, meta: Meta) -> str:
        """Write the live state and wait for it; where it is not sound, the newest healthy one.

        Collective: for a run that is told to stop. Returns the id, empty where nothing newer than
        what is on disk could be written.
        """
        self._store.wait(None)
        bad = sum(self._ranks.gather(float(self._ring.take(step, attempt, meta))))
        self._ring.commit(step, ok=not bad)
        last = self._ring.newest_healthy() if bad else self._ring.newest_committed()
        if last is None or any(
            (r.step, r.attempt) == (last.step, last.attempt) for r in self._on_disk
        ):
            return ""
        name = self._store.save(last)
        self._store.wait(None)
        self._say()
        return name if (self._store.folder.path / name).is_dir() else ""

    def save_alone(self) -> None:
        """Write this rank's part of the last snapshot that all ranks have; asks nobody.

        For a rank that is about to be killed while the others cannot be met. Any thread may.
        """
        last = self._ring.newest_committed()
        if last is not None:
            self._store.write_alone(last)

    def close(self) -> None:
        """Wait, for a bounded time, for what is being written."""
        self._store.wait(_CLOSE_SECONDS)
        self._say()

    @property
    def _is_rank0(self) -> bool:
        return self._ranks.rank == 0

    def _say(self) -> None:
        # Asked only where there is something: this is on every step's way.
        stored = self._store.take_changes() if self._store.folder.changes else []
        for change in stored:
            if change.state == "healthy":  # the best is unproven at first, and no way back
                attempt = int(change.checkpoint_id.rpartition("-")[2])
                self._newest_saved = change.checkpoint_step, attempt
        for change in self._ring.take_changes() + stored:
            announce(self._emitter, change)


def announce(emitter: Emitter, change: CheckpointChanged) -> None:
    """Write a checkpoint's change as an event of the branch that the checkpoint lies on."""
    attempt = int(change.checkpoint_id.rpartition("-")[2])
    emitter.of_run(change, step=change.checkpoint_step, attempt=attempt)
