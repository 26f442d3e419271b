"""Copies of the training state in memory, and which of them is proven healthy.

Every method that decides something is a pure function of its arguments and of the calls before it,
never of this rank's memory, disk or time: the ranks' lists stay equal (I2). What can go wrong on
one rank alone becomes a number that travels in the pack, and ``commit`` gets the ranks' verdict.
"""

import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer_hooks.recovery.copying import Pair, copy_and_count
from trainer_hooks.recovery.memory import host_memory_left
from trainer_hooks.recovery.state import HostState, Spec, TrainingState
from trainvitals.errors import CheckpointError, ConfigError
from trainvitals.policy.state import CheckpointRef, CheckpointState
from trainvitals.records import CheckpointChanged

Meta = dict[str, Any]
"""What the caller keeps beside the state: detectors, data position. Plain values only."""


def num_slots(*, healthy_after: int, lag: int, interval: int) -> int:
    """Return how many snapshots must be kept so that a healthy one is always among them."""
    return max(2, 1 + math.ceil((healthy_after + lag) / interval))


def is_proven(
    step: int, *, healthy_after: int, current_step: int, last_unhealthy_step: int
) -> bool:
    """Return whether a state is healthy: enough steps in a row went well after it.

    Args:
        step: the step that is trained next from the state.
        healthy_after: how many steps in a row must have been healthy.
        current_step: the last step that was judged.
        last_unhealthy_step: the last step with a bad verdict or finding; -1 for none.
    """
    return current_step + 1 - max(step, last_unhealthy_step + 1) >= healthy_after


class Restored(NamedTuple):
    """Where training goes on after a restore."""

    id: str
    step: int
    attempt: int
    meta: Meta
    exact: bool = True
    """False where the checkpoint held no generators of this rank (another world size)."""


class _Slot:
    """One preallocated copy; not reused while a reader in another thread holds it."""

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._buffers: dict[str, Tensor] = {}
        self._lock = threading.Lock()
        self._holders = 0
        self._filled: list[str] = []
        self._copied: torch.cuda.Event | None = None
        self.owned = False

    @property
    def free(self) -> bool:
        return not self.owned and not self._holders

    def hold(self, change: int) -> None:
        with self._lock:
            self._holders += change

    def fill(self, live: Mapping[str, Tensor], must_be_finite: Callable[[str], bool]) -> int:
        """Copy, and return how many of those that must be finite hold a NaN or Inf."""
        self._filled = list(live)
        return copy_and_count(
            [Pair(self._buffer(k, t), t, checked=must_be_finite(k)) for k, t in live.items()]
        )

    def fill_beside(self, live: Mapping[str, Tensor], side: torch.cuda.Stream) -> torch.cuda.Event:
        """Copy on the side stream; what the next forward writes is copied on the main one first."""
        main = torch.cuda.current_stream(side.device)
        self._begin({k: t for k, t in live.items() if k.startswith("buffer.")})
        side.wait_stream(main)
        with torch.cuda.stream(side):
            self._begin({k: t for k, t in live.items() if not k.startswith("buffer.")})
            self._copied = side.record_event()
        self._filled = list(live)
        return self._copied

    def _begin(self, live: Mapping[str, Tensor]) -> None:
        for key, tensor in live.items():
            self._buffer(key, tensor).copy_(tensor, non_blocking=True)

    def _buffer(self, key: str, tensor: Tensor) -> Tensor:
        kept = self._buffers.get(key)
        if kept is None or Spec.of(kept) != Spec.of(tensor):
            kept = torch.empty_like(tensor, device="cpu", pin_memory=self._pinned)
            self._buffers[key] = kept
        return kept

    @property
    def num_bytes(self) -> int:
        return sum(self._buffers[key].nbytes for key in self._filled)

    def tensors(self) -> dict[str, Tensor]:
        """Return what was copied, once the copy is complete."""
        if self._copied is not None:
            self._copied.synchronize()
        return {key: self._buffers[key] for key in self._filled}


@dataclass(slots=True, kw_only=True)
class Snapshot:
    """A state in memory. ``hold`` it before another thread reads it, ``release`` it afterwards."""

    id: str
    step: int
    attempt: int
    meta: Meta
    state: CheckpointState = "candidate"
    trusted: bool = False
    host: HostState = field(default_factory=dict)
    failure: str = ""
    best: tuple[str, float] | None = None
    """The metric and its value, where this is the best state that was evaluated."""
    _slot: _Slot | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Return the copied tensors by name; they are the snapshot's own: do not write to them."""
        if self._slot is None:
            raise CheckpointError(f"{self.id} holds no state: {self.failure}")
        return self._slot.tensors()

    def hold(self) -> None:
        """Keep the copy from being overwritten until ``release``, even if the ring evicts it."""
        if self._slot is not None:
            self._slot.hold(+1)

    def release(self) -> None:
        """Give the copy back; any thread may."""
        if self._slot is not None:
            self._slot.hold(-1)

    def give_up(self) -> None:
        """Let the copy be overwritten once nobody holds it any more."""
        if self._slot is not None:
            self._slot.owned = False

    @property
    def num_bytes(self) -> int:
        """Size of the copied tensors."""
        if self._slot is None:
            return 0
        return self._slot.num_bytes


class SnapshotRing:
    """The last few states, of which the newest healthy one is never given up (I6).

    Order of calls: ``take(0, trusted=True)`` and ``commit`` before the first step; then after each
    step: ``take`` if ``due``, ``commit`` when the flags came back, ``promote`` when a step was
    judged; ``before_update`` before each ``optimizer.step()``.
    """

    def __init__(
        self,
        state: TrainingState,
        *,
        num_slots: int,
        interval: int,
        healthy_after: int,
        keep_evaluated: bool = False,
    ) -> None:
        if num_slots < 2 or interval < 1 or healthy_after < 0:
            raise ConfigError(
                f"snapshots: {num_slots} slots, interval {interval}, healthy after {healthy_after};"
                " there must be at least 2 slots and an interval of at least 1"
            )
        self._state = state
        self.num_slots = num_slots
        self._interval = interval
        self._healthy_after = healthy_after
        self._side = torch.cuda.Stream(state.device) if state.device.type == "cuda" else None
        self._slots = [_Slot(pinned=self._side is not None) for _ in range(num_slots)]
        self._beside = _Slot(pinned=self._side is not None) if keep_evaluated else None
        self._entries: list[Snapshot] = []
        self._changes: list[CheckpointChanged] = []
        self._pending: torch.cuda.Event | None = None
        self._last_taken = 0
        self.num_missed = 0
        """Snapshots this rank could not take; the ranks then drop that one together."""

    # -------------------------------------------------------------------------------- memory

    def bytes(self) -> int:
        """Return the memory that all slots need once the moments exist."""
        return (self.num_slots + (self._beside is not None)) * self._state.bytes_when_warm()

    def check_memory(self, *, ranks_on_node: int = 1, left: int | None = None) -> None:
        """Refuse a ring that would take more than half of what the job may still take.

        Raises:
            CheckpointError: it would. Rank-local: agree on it before anything else is collective.
        """
        left = host_memory_left() if left is None else left
        needed = self.bytes() * ranks_on_node
        if left is not None and needed > left // 2:
            raise CheckpointError(
                f"snapshots need {_gib(needed)} on this node ({self.slots_in_words()}, "
                f"{ranks_on_node} ranks); half of the memory left to the job is {_gib(left // 2)}",
                hint="a longer snapshot interval needs fewer slots (2 at least); or give the job "
                "more memory; or use mode 'guard', which skips but does not roll back",
            )

    def slots_in_words(self) -> str:
        """Return what the memory is for."""
        beside = "" if self._beside is None else " and one for the state that was evaluated"
        return f"{self.num_slots} slots{beside}"

    # -------------------------------------------------------------------------------- taking

    def due(self, step: int) -> bool:
        """Return whether ``take(step)`` should follow: an interval has passed since the last."""
        return not self._entries or step - self._last_taken >= self._interval

    def take(
        self, step: int, attempt: int, meta: Meta | None = None, *, trusted: bool = False
    ) -> Tensor:
        """Copy the live state; return, on the device, what is wrong with it (0.0: nothing).

        Put the number into the next pack and hand the ranks' verdict to ``commit``. It never
        raises: a rank that could not copy says 1.0. On CUDA nothing waits here, and
        ``before_update`` keeps the next update from overtaking the copy.

        Args:
            step: the step that is trained next from this state.
            attempt: the branch it lies on.
            meta: detectors, data position and the like; given back by ``restore``.
            trusted: healthy as soon as it is committed: the state before the first step.
        """
        name = f"memory-{step:08d}-{attempt}"
        entry = Snapshot(id=name, step=step, attempt=attempt, meta=meta or {}, trusted=trusted)
        self._drop([e for e in self._entries if e.id == name], "taken again")
        while len(self._entries) >= self.num_slots:
            self._evict()
        self._entries.append(entry)
        self._last_taken = step
        self._note(entry)
        try:
            return self._fill(entry)
        except Exception as error:  # noqa: BLE001 - becomes this rank's flag in the pack
            self.num_missed += 1
            entry.failure = f"{type(error).__name__}: {error}"
            return torch.ones((), device=self._state.device)

    def _fill(self, entry: Snapshot) -> Tensor:
        free = [slot for slot in self._slots if slot.free]
        if not free:
            raise CheckpointError("all slots are still being written to disk")
        return self._copy(entry, free[0])

    def _copy(self, entry: Snapshot, slot: _Slot) -> Tensor:
        # What is made within inference mode, as a validation may be, could not be written again.
        with torch.inference_mode(False), torch.no_grad():
            entry.host = self._state.host_state()
            live = self._state.tensors()
            if self._side is None:
                count = slot.fill(live, self._state.must_be_finite)
                wrong = torch.tensor(float(count), device=self._state.device)
            else:
                wrong = self._state.nonfinite_count()
                self._pending = slot.fill_beside(live, self._side)
        entry._slot = slot
        slot.owned = True
        return wrong

    def before_update(self) -> None:
        """Make the coming ``optimizer.step()`` wait, on the device, for a copy in flight."""
        if self._pending is not None:
            torch.cuda.current_stream(self._state.device).wait_event(self._pending)
            self._pending = None

    def take_evaluated(self, step: int, attempt: int, meta: Meta) -> Snapshot:
        """Copy the live state into the one slot beside the ring; ``give_up`` the copy when settled.

        Raises:
            CheckpointError: the copy before it was not given up, or is still being written to disk.
        """
        if self._beside is None or not self._beside.free:
            raise CheckpointError("the state that was evaluated before is still being kept")
        name = f"evaluated-{step:08d}-{attempt}"
        entry = Snapshot(id=name, step=step, attempt=attempt, meta=meta)
        self._copy(entry, self._beside)
        return entry

    # ----------------------------------------------------------------------------- life cycle

    def commit(self, step: int, ok: bool) -> None:
        """Settle the snapshot taken before ``step``: verified, or dropped as bad, on all ranks.

        Where none is waiting for that verdict, nothing happens.
        """
        for entry in [e for e in self._entries if e.step == step and e.state == "candidate"]:
            if not ok:
                self._drop([entry], entry.failure or "not finite, or missing on a rank", "bad")
            else:
                assert entry._slot is not None, "the ranks agreed on a snapshot that is not there"
                entry.state = "healthy" if entry.trusted else "verified"
                self._note(entry)

    def promote(self, current_step: int, last_unhealthy_step: int) -> list[Snapshot]:
        """Make healthy what the steps judged so far prove (see ``is_proven``), and return it."""
        proven = []
        for entry in self._entries:
            if entry.state == "verified" and is_proven(
                entry.step,
                healthy_after=self._healthy_after,
                current_step=current_step,
                last_unhealthy_step=last_unhealthy_step,
            ):
                entry.state = "healthy"
                self._note(entry)
                proven.append(entry)
        return proven

    def forget(self, detail: str) -> None:
        """Give up every snapshot: the loop has loaded another state."""
        self._drop(list(self._entries), detail, "retired")

    def _evict(self) -> None:
        protected = self.newest_healthy()
        victim = next(e for e in self._entries if e is not protected)
        self._drop([victim], "made room", "retired")

    def _drop(
        self, entries: list[Snapshot], detail: str, state: CheckpointState = "retired"
    ) -> None:
        for entry in entries:
            self._entries.remove(entry)
            entry.state = state
            self._note(entry, detail)
            if entry._slot is not None:
                entry._slot.owned = False

    def _note(self, entry: Snapshot, detail: str = "") -> None:
        self._changes.append(
            CheckpointChanged(
                checkpoint_id=entry.id,
                checkpoint_step=entry.step,
                state=entry.state,
                where="memory",
                num_bytes=entry.num_bytes,
                detail=detail,
            )
        )

    def take_changes(self) -> list[CheckpointChanged]:
        """Return what changed since the last call, for the events stream; call after each step."""
        changes, self._changes = self._changes, []
        return changes

    # -------------------------------------------------------------------------- looking, going

    def refs(self) -> tuple[CheckpointRef, ...]:
        """Return the snapshots, oldest first, as the ladder sees them: equal on all ranks."""
        return tuple(
            CheckpointRef(id=e.id, step=e.step, attempt=e.attempt, state=e.state, where="memory")
            for e in self._entries
        )

    def newest_healthy(self) -> Snapshot | None:
        """Return the newest healthy snapshot, the one to write to disk."""
        healthy = [e for e in self._entries if e.state == "healthy"]
        return healthy[-1] if healthy else None

    def newest_committed(self) -> Snapshot | None:
        """Return the newest snapshot that is at least verified: what SIGTERM leaves to write."""
        committed = [e for e in self._entries if e.state != "candidate"]
        return committed[-1] if committed else None

    def restore(self, checkpoint_id: str) -> Restored:
        """Make the live state equal that snapshot bit for bit, and drop all newer ones.

        Gradients are left: clear them. Readbacks in flight belong to the branch that is gone.

        Raises:
            CheckpointError: there is no such snapshot, or the model has changed since.
        """
        entry = next((e for e in self._entries if e.id == checkpoint_id), None)
        if entry is None or entry.state == "candidate":
            ids = ", ".join(e.id for e in self._entries if e.state != "candidate") or "none"
            raise CheckpointError(
                f"snapshot {checkpoint_id!r} is not in memory", hint=f"in memory are: {ids}"
            )
        saved = entry.tensors()
        self.before_update()
        self._state.conform({k: Spec.of(t) for k, t in saved.items()}, entry.host)
        self._state.write(saved)
        self._state.load_host_state(entry.host)
        if self._side is not None:
            torch.cuda.current_stream(self._state.device).synchronize()
        self._drop(self._entries[self._entries.index(entry) + 1 :], "newer than a rollback")
        self._last_taken = entry.step
        return Restored(entry.id, entry.step, entry.attempt, entry.meta)

    def drop_newer(self, step: int) -> None:
        """Drop what was taken after ``step``: the state has been restored from disk instead."""
        self._drop([e for e in self._entries if e.step > step], "newer than a rollback")
        self._last_taken = step


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
