"""States for rollbacks: snapshots in memory, checkpoints on disk, and their restore.

Both lists must be equal on all ranks, because all choose the same state: snapshots change at the
same step on all ranks, and rank 0 reports a complete checkpoint on disk with the numbers of a step.
A rank's own memory, disk or clock never decides (docs/ARCHITECTURE.md): a problem of one rank
becomes a number in the reduce vector, and ``commit`` receives the verdict of all ranks.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, cast

import msgspec
import torch
from msgspec.structs import replace
from torch import Tensor

from trainer_hooks.exchange.device import DeviceParts
from trainer_hooks.exchange.emit import Emitter
from trainer_hooks.exchange.reduce_vector import ReducedNumbers
from trainer_hooks.ranks import Ranks
from trainer_hooks.recovery.memory import host_memory_left
from trainer_hooks.recovery.node_memory import (
    NodeRegions,
    SharedLayout,
    SharedRegion,
    can_be_shared,
    join_node,
)
from trainer_hooks.recovery.plan_journal import PlanJournal
from trainer_hooks.recovery.replicas import Groups, Replicas
from trainer_hooks.recovery.state import HostState, TensorSpec, TrainingState
from trainer_hooks.tensors.copying import (
    CopyCheck,
    CopyPlan,
    Pair,
    PendingCopy,
    SideStream,
    as_int64,
    fingerprint_on_device,
    signature_of,
    word_of,
)
from trainer_hooks.tensors.finite import is_finite
from trainer_hooks.tensors.optimizer_state import nonfinite_count
from trainer_hooks.tensors.pinned import PinnedBlock
from trainvitals.clock import Clock
from trainvitals.config import AtLeastOne, Count, NotNegative, Settings
from trainvitals.detect.replicas import format_ranks, vote_on_fingerprints
from trainvitals.errors import CheckpointError, ConfigError
from trainvitals.policy.state import CheckpointRef, CheckpointState
from trainvitals.records import CheckpointChanged, Decision
from trainvitals.units import humanize_bytes, humanize_count

if TYPE_CHECKING:
    from trainer_hooks.agreement import RankAgreement
    from trainer_hooks.recovery.checkpoints.store import CheckpointStore

Meta = dict[str, Any]
"""Data stored with the state: detectors, data position. Plain values and tensors only."""
IsReplica = Callable[[str], bool]
"""Returns whether every rank holds the tensor of this name with equal values."""


def kept_steps(*, healthy_after: int, lag: int) -> int:
    """Return how old the oldest snapshot must be when the next one has just been taken.

    A rollback needs a snapshot ``healthy_after`` steps before the onset, and a fault may be
    reported up to half as many steps after its onset.
    """
    return healthy_after + healthy_after // 2 + lag


def num_slots(*, healthy_after: int, lag: int, interval: int) -> int:
    """Return the number of snapshots to keep so that a rollback finds a healthy one among them."""
    return max(2, 1 + math.ceil(kept_steps(healthy_after=healthy_after, lag=lag) / interval))


def is_proven(
    step: int, *, healthy_after: int, current_step: int, last_unhealthy_step: int
) -> bool:
    """Return whether a snapshot is healthy: enough healthy steps in a row followed it.

    ``step`` is trained next from the state. ``current_step`` was judged last,
    ``last_unhealthy_step`` had a bad verdict or finding; -1 for none.
    """
    return current_step + 1 - max(step, last_unhealthy_step + 1) >= healthy_after


class Restored(NamedTuple):
    """Position from which training continues after a restore."""

    id: str
    step: int
    attempt: int
    meta: Meta
    exact: bool = True
    """False if the checkpoint has no RNG state of this rank (another world size)."""


class _SnapshotSlot:
    """One preallocated copy; not reused while a reader in another thread holds it.

    With a region, replicas are stored in memory that the node's ranks share, and each rank copies
    its part of them; everything else belongs to this rank.
    """

    def __init__(self, *, pinned: bool, region: SharedRegion | None = None) -> None:
        self._pinned = pinned
        self.region = region
        self.generation = 0
        """Counts how often it was filled; equal on all ranks that share it."""
        self._buffers: dict[str, Tensor] = {}
        self._block: PinnedBlock | None = None
        """Memory of the buffers, as far as it goes; None: each is allocated by itself."""
        self._targets: dict[str, Tensor] = {}
        """Targets of ``pairs``, by name: own buffers, and views of the region."""
        self._signature: list[object] = []
        """Signature of the live tensors that ``pairs`` were made for."""
        self.pairs: list[Pair] = []
        self._plan: CopyPlan | None = None
        self._layout_digest = 0
        self._lock = threading.Lock()
        self._holders = 0
        self._copied: Callable[[], None] | None = None
        """Makes the host wait for a copy on the side stream."""
        self.owned = False
        self.is_compared = False
        """Whether any of its tensors must be equal on other ranks."""
        self.being_saved = False
        """For a shared slot, whether some rank may be writing it to disk: agreed by all ranks."""

    @property
    def free(self) -> bool:
        """Return whether a snapshot may fill it; if shared, the same on all ranks that share it."""
        if self.region is not None:
            return not self.owned and not self.being_saved
        return not self.owned and not self._holders

    def hold(self, change: int) -> None:
        """Count the threads that read this snapshot's copy: ``change`` is 1 or -1."""
        with self._lock:
            self._holders += change

    def reserve(self, size: int, num_buffers: int, device: torch.device) -> None:
        """Allocate the memory of all buffers of a snapshot in one block."""
        self._block = PinnedBlock(size, num_buffers, device)

    def forget_plan(self) -> None:
        """Compute again, at the next snapshot, which tensors must be finite."""
        self._signature = []

    def prepare(
        self,
        live: Mapping[str, Tensor],
        state: TrainingState,
        is_replica: IsReplica,
        is_compared: IsReplica,
    ) -> None:
        """Create a target for each tensor of a snapshot, and determine the rank that copies it.

        Computed once, and again when a live tensor has another address, shape or type.
        """
        signature = signature_of(live)
        if self._signature == signature:
            return
        self._signature, self.pairs, self._plan, self._targets = [], [], None, {}
        state.forget_replaced(live)
        shared = {}
        if self.region is not None:
            shared = {
                k: t
                for k, t in live.items()
                if is_replica(k) and can_be_shared(t) and (self._pinned or t.device.type == "cpu")
            }
        unshared = {k: t for k, t in live.items() if k not in shared}
        targets = {k: self._get_or_create_buffer(k, t) for k, t in unshared.items()}
        # Numbered after the shared units: each has a different weight.
        units = {key: (1 << 20) + i for i, key in enumerate(filter(is_compared, unshared))}
        pairs = [
            Pair(targets[k], t, state.must_be_finite(k), k, units.get(k, -1))
            for k, t in unshared.items()
        ]
        self.is_compared = bool(units) or self.region is not None
        if self.region is not None:
            layout, group = SharedLayout(shared), self.region.group
            targets |= self.region.views(layout, shared)
            for number, unit in enumerate(layout.units(group.index, group.count)):
                source = shared[unit.key].view(-1)[unit.begin : unit.end]
                into = targets[unit.key].view(-1)[unit.begin : unit.end] if unit.is_mine else None
                checked = state.must_be_finite(unit.key)
                pairs.append(Pair(into, source, checked, unit.key, number))
            self._layout_digest = layout.digest
        self._targets = {k: targets[k] for k in live}
        self.pairs, self._signature = pairs, signature

    def fill(self) -> CopyCheck:
        """Copy the state into the snapshot, and return the results of the checks."""
        self._mark_incomplete()
        if self._plan is None:
            self._plan = CopyPlan(self.pairs)
        return self._mixed(self._plan.run())

    def fill_on_side_stream(
        self,
        live: Mapping[str, Tensor],
        must_be_finite: Callable[[str], bool],
        side: SideStream,
        device: torch.device,
    ) -> tuple[Tensor, Tensor, torch.cuda.Event]:
        """Copy a snapshot on the side stream.

        Buffers are copied on the training's stream, because the next forward writes them.
        Everything else is checked on the stream where it is copied, so that no write comes in
        between.

        Returns:
            The number of non-finite tensors among those that must be finite, the fingerprint of the
            replicas, and a marker of the end of the copy.
        """
        self._mark_incomplete()
        # Not kept until the next snapshot: that would keep device memory of replaced tensors.
        pairs, self.pairs, self._signature = self.pairs, [], []
        early = {k: t for k, t in live.items() if k.startswith("buffer.")}
        late = {k: t for k, t in live.items() if k not in early}
        _queue_copies(pairs, early)
        wrong = nonfinite_count([t for k, t in early.items() if must_be_finite(k)], device)
        fingerprint = torch.zeros((), dtype=torch.int64, device=device)
        extra = self._mixed(CopyCheck(0, 0)).fingerprint

        def copy_late() -> None:
            _queue_copies(pairs, late)
            checked = [t for k, t in late.items() if must_be_finite(k)]
            wrong.add_(nonfinite_count(checked, device))
            if self.is_compared:
                late_fingerprint = fingerprint_on_device(pairs, device)
                fingerprint.copy_(late_fingerprint + extra)

        end = side.run(copy_late)
        self._copied = partial(side.join, end)
        return wrong, fingerprint, end

    def _mark_incomplete(self) -> None:
        """Mark this rank's part of a shared snapshot as being overwritten."""
        if self.region is not None:
            self.region.mark_incomplete(self.generation)

    def _mixed(self, copied: CopyCheck) -> CopyCheck:
        """Mix slot and layout into the fingerprint: ranks that filled other slots then differ."""
        number = 0 if self.region is None else self.region.number
        mixed = copied.fingerprint + (number << 58) + (self._layout_digest << 24) + self.generation
        return copied._replace(fingerprint=mixed)

    def _get_or_create_buffer(self, key: str, tensor: Tensor) -> Tensor:
        """Return the snapshot's buffer for a tensor; a new one if its shape or type changed."""
        buffer = self._buffers.get(key)
        if buffer is None or TensorSpec.of(buffer) != TensorSpec.of(tensor):
            buffer = None if self._block is None else self._block.take(tensor)
            if buffer is None:
                buffer = torch.empty_like(tensor, device="cpu", pin_memory=self._pinned)
            self._buffers[key] = buffer
        return buffer

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the tensors in this snapshot."""
        return sum(tensor.nbytes for tensor in self._targets.values())

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the snapshot, once the copy is complete."""
        if self._copied is not None:
            self._copied()
        return dict(self._targets)


def _queue_copies(pairs: Sequence[Pair], live: Mapping[str, Tensor]) -> None:
    """Queue copies of the live tensors into a snapshot's slot."""
    for pair in pairs:
        if pair.into is not None and pair.name in live:
            pair.into.copy_(pair.source, non_blocking=True)


@dataclass(slots=True, kw_only=True)
class Snapshot:
    """A state in memory. ``hold`` it before another thread reads it, then ``release`` it."""

    id: str
    step: int
    attempt: int
    meta: Meta
    state: CheckpointState = "candidate"
    trusted: bool = False
    host: HostState = field(default_factory=dict)
    failure: str = ""
    best: tuple[str, float] | None = None
    """The metric and its value, if this is the best evaluated state."""
    generation: int = 0
    """Number of its fill of the slot."""
    _slot: _SnapshotSlot | None = None

    def check_whole(self) -> None:
        """Refuse tensors that another rank of this node has started to overwrite.

        Call after they were read, before the data is trusted.
        """
        region = None if self._slot is None else self._slot.region
        if region is not None and not region.holds(self.generation):
            raise CheckpointError(f"{self.id} was overwritten by another rank while it was read")

    def tensors(self) -> dict[str, Tensor]:
        """Return the copied tensors by name; they belong to the snapshot: do not write to them."""
        if self._slot is None:
            raise CheckpointError(f"{self.id} holds no state: {self.failure}")
        return self._slot.tensors()

    def hold(self) -> None:
        """Keep the copy from being overwritten until ``release``, even if the ring evicts it."""
        if self._slot is not None:
            self._slot.hold(+1)

    def release(self) -> None:
        """Release the copy; any thread may call this."""
        if self._slot is not None:
            self._slot.hold(-1)

    def give_up(self) -> None:
        """Allow the copy to be overwritten once no thread holds it."""
        if self._slot is not None:
            self._slot.owned = False

    @property
    def num_bytes(self) -> int:
        """Size of the copied tensors."""
        return 0 if self._slot is None else self._slot.num_bytes


class SnapshotRing:
    """The latest states; the latest healthy one is never discarded.

    Order of calls: ``capture(0, trusted=True)`` and ``commit`` before the first step; then after
    each step: ``capture`` if ``due``, ``commit`` when the flags came back, ``promote`` when a step
    was judged; ``before_update`` before each ``optimizer.step()``.
    """

    def __init__(
        self,
        state: TrainingState,
        *,
        num_slots: int,
        interval: int,
        healthy_after: int,
        keep_evaluated: bool = False,
        overlap: bool = False,
        side: SideStream | None = None,
        joined: NodeRegions | None = None,
        is_replica: IsReplica = lambda key: False,
        is_compared: IsReplica = lambda key: False,
    ) -> None:
        """``overlap``: writes of the loop between two steps need not wait for a copy.

        ``side`` is where copies run; None is a GPU's own, and on the CPU there is none. ``joined``
        is memory shared with the node's other ranks, one region a slot and one more to lend, for
        the tensors that ``is_replica`` names. ``is_compared`` names those that other ranks must
        have the same, shared or not.
        """
        if num_slots < 2 or interval < 1 or healthy_after < 0:
            raise ConfigError(
                f"snapshots: {num_slots} slots, interval {interval}, healthy after {healthy_after};"
                " there must be at least 2 slots and an interval of at least 1"
            )
        self._state = state
        self.num_slots = num_slots
        self._interval = interval
        self._healthy_after = healthy_after
        self._pinned = state.device.type == "cuda"
        self.side = SideStream(state.device) if side is None and self._pinned else side
        self.overlap = overlap
        self._joined = NodeRegions(None, ()) if joined is None else joined
        self._is_replica = is_replica
        self._is_compared = is_compared
        self._unused = list(self._joined.regions or ())
        self._generation = 0
        self._is_reserved = False
        self.slots = [self._new_slot() for _ in range(num_slots)]
        self._evaluated_slot = _SnapshotSlot(pinned=self._pinned) if keep_evaluated else None
        self._entries: list[Snapshot] = []
        self._changes: list[CheckpointChanged] = []
        self._pending: PendingCopy | None = None
        self._last_taken = 0
        self.may_lend = False
        """Whether half of the memory has room for another slot; if shared, on all ranks."""
        self._last_bad: Snapshot | None = None
        self._ranks_on_node = 1
        self.fingerprint: Tensor | None = None
        """That of the latest snapshot's replicas, an int64 on the device: read it after
        ``before_update``. None without replicas, or if the snapshot could not be taken."""
        self.num_missed = 0
        """Snapshots this rank could not take; all ranks then drop the snapshot together."""
        self.failure = ""
        """Reason for the latest of them."""

    # -------------------------------------------------------------------------------- memory

    def bytes(self) -> int:
        """Return this rank's memory for all slots once the optimizer state exists."""
        whole = self._state.bytes_when_warm()
        beside = 0 if self._evaluated_slot is None else whole
        return self.num_slots * self._bytes_of_slot() + beside

    def _bytes_of_slot(self) -> int:
        """Return the node's memory for one slot, per rank."""
        whole, count = self._state.bytes_when_warm(), self._joined.num_ranks
        if count == 1:
            return whole
        shared = self._state.replica_bytes_when_warm(self._is_replica)
        return whole - shared + -(-shared // count)

    def check_memory(self, *, ranks_on_node: int = 1, free: int | None = None) -> None:
        """Refuse a ring that needs more than half of the memory that the job may still use.

        Rank-local: agree on it before the next collective.
        """
        free = host_memory_left() if free is None else free
        self._ranks_on_node = ranks_on_node
        needed = self.bytes() * ranks_on_node
        one_more = self._bytes_of_slot() * ranks_on_node
        self.may_lend = free is None or needed + one_more <= free // 2
        if free is not None and needed > free // 2:
            raise CheckpointError(
                f"snapshots need {_format_gib(needed)} on this node ({self.describe_slots()}, "
                f"{humanize_count(ranks_on_node, 'rank')}); half of the memory left to the job is "
                f"{_format_gib(free // 2)}",
                hint="a longer snapshot interval needs fewer slots (2 at least); or give the job "
                "more memory; or use mode 'guard', which skips but does not roll back",
            )

    def describe_slots(self) -> str:
        """Return a description of the snapshots' use of memory.

        Another slot is lent while a save holds one, if half of the memory has room for it.
        """
        beside = "" if self._evaluated_slot is None else " and one for the state that was evaluated"
        return f"{self.num_slots} slots{beside}"

    # -------------------------------------------------------------------------------- taking

    def due(self, step: int) -> bool:
        """Return whether ``capture(step)`` should follow: an interval has passed since the last."""
        return not self._entries or step - self._last_taken >= self._interval

    def capture(
        self, step: int, attempt: int, meta: Meta | None = None, *, trusted: bool = False
    ) -> Tensor:
        """Copy the live state; return, on the device, the number of problems with it.

        Put the number into the next reduce vector, and pass the ranks' verdict to ``commit``. It
        never raises: a rank that could not copy returns 1.0. On a GPU the host never waits; work
        queued after this call runs after the copy. With ``overlap`` this is only true from the next
        ``before_update`` or ``wait_for_copies`` on: call one of them before the number is read.

        ``step`` is trained next from this state; ``restore`` returns ``meta``. A ``trusted`` state
        is healthy as soon as it is committed: the one before the first step.
        """
        name = f"memory-{step:08d}-{attempt}"
        entry = Snapshot(id=name, step=step, attempt=attempt, meta=meta or {}, trusted=trusted)
        self._drop_snapshots([e for e in self._entries if e.id == name], "taken again")
        while len(self._entries) >= self.num_slots:
            self._evict()
        self._entries.append(entry)
        self._last_taken = step
        self._record_change(entry)
        self.fingerprint = None
        try:
            wrong, self.fingerprint = self._copy(entry, self._free_slot())
        except Exception as error:  # noqa: BLE001 - becomes this rank's flag in the vector
            self.num_missed += 1
            self.failure = entry.failure = f"{type(error).__name__}: {error}"
            return torch.ones((), device=self._state.device)
        return wrong

    def _free_slot(self) -> _SnapshotSlot:
        """Return the slot to fill. For shared slots, every rank of the node chooses the same.

        The state of a shared slot is the same on all ranks: the existing entries, and whether
        rank 0 reported that it is being saved; never whether a thread of this rank holds it.

        So no rank overwrites data that another rank reads. A restore ends on each rank before it
        enters the next exchange, and no other rank reaches its next snapshot without that exchange.
        A save holds its slot until rank 0 reported its end in a vector that was filled after the
        save's start; from then on no rank reads the tensors. As a precaution, and for a rank that
        writes its last snapshot separately, each rank marks its part of a slot before it writes,
        and a reader checks the marks before it uses the data (``Snapshot.check_whole``).
        """
        if self._joined.regions is None:
            self._replace_shared()
        free = [slot for slot in self.slots if slot.free]
        if not free and self.may_lend and len(self.slots) == self.num_slots:
            # A save holds one as long as the disk takes; otherwise no later state would be kept.
            free = [self._new_slot()]
            self.slots += free
        if not free:
            raise CheckpointError("all slots are still being written to disk")
        return free[0]

    def _new_slot(self) -> _SnapshotSlot:
        """Return a slot for a snapshot, in shared memory if some is unused."""
        region = self._unused.pop(0) if self._unused else None
        slot = _SnapshotSlot(pinned=self._pinned, region=region)
        if self._is_reserved:
            self._reserve(slot)
        return slot

    def reserve(self) -> None:
        """Allocate the memory of all slots at once, page-locked if the state is on a GPU."""
        self._is_reserved = True
        for slot in (*self.slots, self._evaluated_slot):
            if slot is not None:
                self._reserve(slot)

    def _reserve(self, slot: _SnapshotSlot) -> None:
        """Allocate a slot's own part; a region has allocated what the ranks share."""
        state = self._state
        shared = 0
        if slot.region is not None:
            shared = state.replica_bytes_when_warm(self._is_replica)
        num_buffers = state.num_tensors_when_warm()
        slot.reserve(state.bytes_when_warm() - shared, num_buffers, state.device)

    def _replace_shared(self) -> None:
        """Replace free shared slots by complete copies, if there is enough memory."""
        remaining_slots = [slot for slot in self.slots if slot.region is None or slot.owned]
        if len(remaining_slots) >= self.num_slots:
            self.slots = remaining_slots
            return
        needed = self._state.bytes_when_warm() * self._ranks_on_node
        free_bytes = host_memory_left()
        if free_bytes is not None and needed > free_bytes // 2:
            raise CheckpointError(
                f"a copy for each of {humanize_count(self._ranks_on_node, 'rank')} needs "
                f"{_format_gib(needed)}; half of the memory left to the job is "
                f"{_format_gib(free_bytes // 2)}"
            )
        self.slots = [*remaining_slots, _SnapshotSlot(pinned=self._pinned)]

    def _copy(self, entry: Snapshot, slot: _SnapshotSlot) -> tuple[Tensor, Tensor | None]:
        """Fill the slot; return the number of problems, and the fingerprint of any replicas."""
        # Taken before anything can fail: all ranks must agree on which shared slots are taken.
        entry._slot, slot.owned = slot, True
        if slot.region is not None:
            self._generation += 1
            entry.generation = slot.generation = self._generation
        # Tensors created in inference mode, as in a validation, could not be written again.
        with torch.inference_mode(False), torch.no_grad():
            entry.host = self._state.host_state()
            live = self._state.tensors()
            slot.prepare(live, self._state, self._is_replica, self._is_compared)
            device = self._state.device
            if self.side is None:
                copied = slot.fill()
                wrong = torch.tensor(float(copied.num_wrong), device=device)
                fingerprint = as_int64(copied.fingerprint)
            else:
                wrong, fingerprint, end = slot.fill_on_side_stream(
                    live, self._state.must_be_finite, self.side, device
                )
                self._pending = PendingCopy(self.side, end, (wrong, fingerprint))
                if not self.overlap:
                    self.before_update()
        return wrong, fingerprint if slot.is_compared else None

    def before_update(self) -> None:
        """Make the coming ``optimizer.step()`` wait, on the device, for a copy in flight."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def take_evaluated(self, step: int, attempt: int, meta: Meta) -> Snapshot:
        """Copy the live state into the separate slot; ``give_up`` the copy when settled.

        Raises:
            CheckpointError: the previous copy was not given up, or is still being written to disk.
        """
        if self._evaluated_slot is None or not self._evaluated_slot.free:
            raise CheckpointError("the state that was evaluated before is still being kept")
        name = f"evaluated-{step:08d}-{attempt}"
        entry = Snapshot(id=name, step=step, attempt=attempt, meta=meta)
        try:
            self._copy(entry, self._evaluated_slot)
        except BaseException:
            self._evaluated_slot.owned = False
            raise
        return entry

    @property
    def shares(self) -> bool:
        """Whether the node's ranks share one snapshot of the replicas."""
        return self._joined.regions is not None

    @property
    def ranks_per_copy(self) -> int:
        """Number of ranks that share one copy of the replicas."""
        return self._joined.num_ranks

    def word(self) -> Tensor | None:
        """Return 52 bits of the fingerprint of a snapshot."""
        return None if self.fingerprint is None else word_of(self.fingerprint)

    def stop_sharing(self) -> None:
        """Keep complete copies from the next snapshot on: the ranks' replicas are not equal.

        Committed snapshots stay: their replicas were equal.
        """
        self._joined = NodeRegions(None, ())
        self._unused.clear()

    def save_begins(self, entry: Snapshot) -> None:
        """Keep a shared snapshot slot that some rank may be writing to disk."""
        if entry._slot is not None:
            entry._slot.being_saved = True

    def saves_ended(self) -> None:
        """Allow the slots of finished saves to be filled again; called on all ranks together."""
        for slot in self.slots:
            slot.being_saved = False

    # ----------------------------------------------------------------------------- life cycle

    def commit(self, step: int, ok: bool, why: str = "not finite, or missing on a rank") -> None:
        """Settle the snapshot taken before ``step``: verified, or dropped as bad, on all ranks.

        Has no effect if no snapshot waits for that verdict.
        """
        for entry in [e for e in self._entries if e.step == step and e.state == "candidate"]:
            if not ok:
                self._last_bad = entry
                self._drop_snapshots([entry], entry.failure or why, "bad")
            else:
                assert entry._slot is not None, "the ranks agreed on a snapshot that is not there"
                entry.state = "healthy" if entry.trusted else "verified"
                self._record_change(entry)

    def accept(self, names: Sequence[str]) -> bool:
        """Accept non-finite values in snapshots: see ``RecoveryManager.accept``.

        For values that no rollback fixed: the model writes them itself, and otherwise there would
        be no further snapshot. If a trained tensor is among the names, none is accepted.
        """
        if not names or any(self._state.is_trained(name) for name in names):
            return False
        self._state.accept(names)
        self.forget_plans()
        return True

    def forget_plans(self) -> None:
        """Compute again which tensors of a snapshot must be finite, and which are compared."""
        for slot in self.slots:
            slot.forget_plan()

    def nonfinite_names(self) -> list[str]:
        """Return the non-finite tensors in the copy that was dropped, before the next is taken.

        Waits for that copy.
        """
        bad, self._last_bad = self._last_bad, None
        if bad is None or bad.failure or bad._slot is None:
            return []
        # The shared copy may be another rank's; this rank's live state is unchanged, or worse.
        live = set() if bad._slot.region is None else set(self._state.nonfinite())
        return [
            key
            for key, tensor in bad.tensors().items()
            if self._state.must_be_finite(key)
            and (key in live if live and self._is_replica(key) else not is_finite(tensor))
        ]

    def why_bad(self) -> str:
        """Return the reason why this rank's copy was dropped as bad; waits for that copy."""
        names = self.nonfinite_names()
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        named = f"NaN or infinite: {', '.join(names[:4])}{more}"
        return named if names else self.failure or "the copy failed on another rank"

    def promote(self, current_step: int, last_unhealthy_step: int) -> list[Snapshot]:
        """Mark snapshots healthy that the judged steps prove (``is_proven``), and return them."""
        proven = []
        for entry in self._entries:
            if entry.state == "verified" and is_proven(
                entry.step,
                healthy_after=self._healthy_after,
                current_step=current_step,
                last_unhealthy_step=last_unhealthy_step,
            ):
                entry.state = "healthy"
                self._record_change(entry)
                proven.append(entry)
        return proven

    def forget(self, detail: str) -> None:
        """Discard every snapshot: the loop has loaded another state."""
        self._drop_snapshots(list(self._entries), detail, "retired")

    def follow_groups(self) -> None:
        """Include added parameter groups in the next snapshots; ``forget`` the earlier ones."""
        self._state.follow_groups()
        self.forget_plans()

    def _evict(self) -> None:
        """Discard the oldest snapshot, except the latest healthy one."""
        protected = self.newest_healthy()
        victim = next(e for e in self._entries if e is not protected)
        self._drop_snapshots([victim], "made room", "retired")

    def _drop_snapshots(
        self, entries: list[Snapshot], detail: str, state: CheckpointState = "retired"
    ) -> None:
        """Discard these snapshots, record the change, and release their memory."""
        for entry in entries:
            self._entries.remove(entry)
            entry.state = state
            self._record_change(entry, detail)
            if entry._slot is not None:
                entry._slot.owned = False

    def _record_change(self, entry: Snapshot, detail: str = "") -> None:
        """Record the state of a snapshot for the events stream."""
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
        """Return the changes since the last call, for the events stream; call after each step."""
        changes, self._changes = self._changes, []
        return changes

    # -------------------------------------------------------------------- queries and restores

    def refs(self) -> tuple[CheckpointRef, ...]:
        """Return the snapshots, oldest first, for the escalation policy: equal on all ranks."""
        return tuple(
            CheckpointRef(id=e.id, step=e.step, attempt=e.attempt, state=e.state, where="memory")
            for e in self._entries
        )

    def newest_healthy(self) -> Snapshot | None:
        """Return the latest healthy snapshot, the one to write to disk."""
        healthy = [e for e in self._entries if e.state == "healthy"]
        return healthy[-1] if healthy else None

    def newest_committed(self) -> Snapshot | None:
        """Return the latest snapshot that is at least verified: the one to write at SIGTERM."""
        committed = [e for e in self._entries if e.state != "candidate"]
        return committed[-1] if committed else None

    def restore(self, checkpoint_id: str) -> Restored:
        """Make the live state equal that snapshot bit for bit, and drop all later ones.

        Gradients are left: clear them. Readbacks in flight belong to the discarded attempt.

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
        entry.check_whole()
        self._state.conform({k: TensorSpec.of(t) for k, t in saved.items()}, entry.host)
        self._state.write(saved)
        self._state.load_host_state(entry.host)
        if self.side is not None:
            self.side.drain()
        self._drop_snapshots(
            self._entries[self._entries.index(entry) + 1 :], "newer than a rollback"
        )
        self._last_taken = entry.step
        return Restored(entry.id, entry.step, entry.attempt, entry.meta)

    def drop_newer(self, step: int) -> None:
        """Drop snapshots taken after ``step``: the state has been restored from disk instead."""
        self._drop_snapshots([e for e in self._entries if e.step > step], "newer than a rollback")
        self._last_taken = step


def _format_gib(size: int) -> str:
    """Return the size of snapshots as text, in GiB."""
    return f"{size / 2**30:.2f} GiB"


# ------------------------------------------------------ schedule of snapshots, saves, rollbacks


_LOG = logging.getLogger("trainvitals")
_CLOSE_SECONDS = 30.0
_LOAD_SECONDS = 600.0
"""Time that a rollback from disk waits for a save in progress."""


class CheckpointSettings(Settings, frozen=True, kw_only=True):
    """Where checkpoints are stored, how often, and how many are kept."""

    section = "checkpoints"

    directory: Path
    """Directory on disk that all ranks reach. A relative path is resolved against the working
    directory of the process when the settings are created.
    """
    healthy_after: AtLeastOne = 20
    """Healthy steps after which a verified snapshot is healthy; at least ``[ladder] margin``."""
    snapshot_every: Count = 0
    """Steps between snapshots in memory; 0: one and a half times ``healthy_after`` plus the
    readback lag, so that two slots suffice.
    """
    overlap_copy: bool = False
    """On a GPU, copy a snapshot in parallel with the next forward and backward, which otherwise
    start after it. Use it only if no one except Vitals writes parameters, optimizer state or EMA
    weights between two steps.
    """
    save_every: AtLeastOne = 200
    """Steps between checkpoints on disk; each is a snapshot that became healthy."""
    save_seconds: NotNegative = 0.0
    """Seconds after which a checkpoint is written even earlier; 0: count steps only."""
    keep: AtLeastOne = 3
    """Number of latest checkpoints kept on disk; the latest healthy and the best always stay."""
    keep_every: Count = 0
    """Steps between checkpoints that are kept permanently; 0: none."""
    grace_seconds: NotNegative = 25.0
    """Seconds between SIGTERM and SIGKILL. After a third of them, ranks that did not meet at the
    end of a step write their last snapshot alone.
    """

    def __post_init__(self) -> None:
        """Resolve the directory against the current one, and refuse invalid values."""
        msgspec.structs.force_setattr(self, "directory", Path(self.directory).absolute())
        super().__post_init__()


def _open_store(
    state: TrainingState,
    settings: CheckpointSettings,
    ranks: Ranks,
    plan: PlanJournal,
    agreement: RankAgreement,
) -> CheckpointStore:
    """Open the store of a run's checkpoints. Collective."""
    # Importing torch.distributed.checkpoint takes half a second: only for checkpoints.
    from trainer_hooks.recovery.checkpoints.store import CheckpointStore

    # Every rank signs its parts of a checkpoint, and its node may lack the run directory.
    keys: list[bytes] = []
    agreement.on_root(lambda: keys.append(plan.run_dir.file_key(create=True)))
    return CheckpointStore(
        state,
        settings.directory,
        run_id=plan.run_dir.run_id,
        ranks=ranks.with_new_group(),  # a save is collective, and runs during the steps
        keep=settings.keep,
        keep_every=settings.keep_every,
        on_branch=lambda step, attempt: plan.plan.is_in_lineage(step, attempt),
        key=ranks.broadcast(keys[0] if keys else b""),
    )


class _NoStore:
    """Place of the store if the loop saves its own checkpoints: nothing is on disk."""

    is_on_disk = False

    def wait(self, timeout: float | None) -> bool:
        """Return at once: no checkpoint is being saved."""
        return True

    def write_alone(self, snapshot: Snapshot) -> None:
        """Leave the snapshot in memory: a restart loads the loop's own checkpoint."""


class RecoveryManager:
    """States of one rank for rollbacks, driven at the same steps on all ranks."""

    def __init__(
        self,
        settings: CheckpointSettings,
        ring: SnapshotRing,
        store: CheckpointStore,
        ranks: Ranks,
        emitter: Emitter,
        plan: PlanJournal,
        clock: Clock,
        *,
        lag: int = 1,
        groups: Groups = (),
    ) -> None:
        """``groups``: ranks whose replicas must be equal; empty: all of them."""
        self.settings = settings
        self.ring = ring
        self.store = store
        self._ranks = ranks
        self._emitter = emitter
        self._plan = plan
        self._clock = clock
        self._saved_at = 0
        self._saved_ns = clock.monotonic_ns()
        self._time_is_up = self._was_due = False
        self.newest_saved: tuple[int, int] = (0, 0)
        """Step and attempt of the latest complete checkpoint, sent by rank 0; (0, 0): none."""
        self._on_disk: tuple[CheckpointRef, ...] = ()
        self._wrong: tuple[int, Tensor | None] | None = None
        """Step of the latest snapshot, and its number of problems; None: it could not be taken."""
        self._may_be_saving = False
        """Whether the latest save of this rank may still be in progress."""
        self._is_saving = False
        """Whether rank 0 reported, with the latest step, that it is saving."""
        self._lag = lag
        self._groups = groups or (tuple(range(ranks.world_size)),)
        self._has_differed = False
        self._first_restorable = 0
        """Step from which checkpoints have the current parameter groups."""
        self._trusts_next = False
        """Whether the next snapshot is healthy as soon as it is committed."""
        self._packs_before_save = 0
        """Reduce vectors that may have been filled before the latest save started."""

    @classmethod
    def make(
        cls,
        settings: CheckpointSettings,
        *,
        device: DeviceParts,
        ranks: Ranks,
        plan: PlanJournal,
        emitter: Emitter,
        clock: Clock,
        state: TrainingState,
        replicas: Replicas | None = None,
        keep_evaluated: bool = False,
        is_on_disk: bool = True,
    ) -> Self:
        """Create the snapshots, and with ``is_on_disk`` the directory of checkpoints. Collective.

        Raises:
            CheckpointError: on some rank the snapshots do not fit into memory; raised on all.
            StorageError: the directory cannot be written; raised on all.
        """
        from trainer_hooks.agreement import RankAgreement

        lag = device.readback.lag
        interval = settings.snapshot_every or kept_steps(
            healthy_after=settings.healthy_after, lag=lag
        )
        slots = num_slots(healthy_after=settings.healthy_after, lag=lag, interval=interval)
        # Shared data is compared: each rank copies its part of data that must be equal on all.
        num_alike = 1 if replicas is None else ranks.world_size
        is_replica = state.replicas(num_alike)
        joined = join_node(
            ranks,
            num_regions=slots + 1,
            has_replicas=any(map(is_replica, state.tensors())),
            device=state.device,
        )
        ring = SnapshotRing(
            state,
            num_slots=slots,
            interval=interval,
            healthy_after=settings.healthy_after,
            keep_evaluated=keep_evaluated,
            overlap=settings.overlap_copy,
            joined=joined,
            is_replica=is_replica,
            is_compared=(lambda key: False) if replicas is None else replicas.compares,
        )
        agreement = RankAgreement(ranks)
        store = _open_store(state, settings, ranks, plan, agreement) if is_on_disk else _NoStore()
        local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world_size))
        agreement.on_all(lambda: ring.check_memory(ranks_on_node=local))
        if state.device.type == "cuda":
            ring.reserve()
        ring.may_lend = all(ranks.gather(ring.may_lend))
        if not isinstance(store, _NoStore):
            agreement.on_root(store.prepare)
            agreement.on_all(store.folder.reach)
        text = (
            f"{ring.describe_slots()}, {humanize_bytes(ring.bytes())} per rank, a snapshot every "
            f"{humanize_count(interval, 'step')}"
        )
        if ring.shares:
            text += (
                f"; {ring.ranks_per_copy} ranks share one copy of parameters and optimizer state"
            )
        emitter.note("snapshots", text, step=0, attempt=0)
        if joined.failures:
            text = (
                "ranks of one node cannot share a snapshot, so each keeps a whole one "
                f"({'; '.join(joined.failures[:4])})"
            )
            if ranks.rank == 0:
                _LOG.warning("vitals: %s", text)
            emitter.note("snapshot_not_shared", text, "warning", step=0, attempt=0)
        groups = () if replicas is None else replicas.groups
        # Without a disk, no method is called that only the store has.
        store = cast("CheckpointStore", store)
        return cls(settings, ring, store, ranks, emitter, plan, clock, lag=lag, groups=groups)

    @property
    def is_on_disk(self) -> bool:
        """Whether checkpoints are saved; otherwise the loop saves its own."""
        return self.store.is_on_disk

    # ------------------------------------------------------------------------------ at the start

    def resume(self) -> Restored | None:
        """Load the latest intact checkpoint of the run's current lineage, if any. Collective.

        Raises:
            CheckpointError: there are checkpoints, and none can be loaded.
        """
        if not self.is_on_disk:
            return None
        refs = self.store.loadable_refs()
        restored = self.store.load_newest(refs)
        if restored is None and self._plan.plan.branches and self._is_rank0:
            text = (
                f"{self.store.folder.path.absolute()} holds no checkpoint of this run, which was "
                "started before: it begins at step 0"
            )
            _LOG.warning("vitals: %s", text)
            self._emitter.note("nothing_to_resume", text, "warning", step=0, attempt=0)
        # Later ones could not be loaded.
        ids = [ref.id for ref in refs]
        self._on_disk = refs[: ids.index(restored.id) + 1] if restored is not None else ()
        return restored

    def take_first_snapshot(self, step: int, attempt: int, meta: Meta) -> None:
        """Take the state before the first step, so that protection starts at once. Collective.

        It is healthy, except for an unproven checkpoint of a stopped run. All other snapshots are
        discarded: a loop may have loaded another state since the first call.

        Raises:
            CheckpointError: on some rank it is non-finite, or could not be copied; raised on all.
        """
        self.ring.forget("the loop loaded its own state")
        unproven = any(ref.step == step and ref.state == "verified" for ref in self._on_disk)
        bad, differ = self._take_now(step, attempt, meta, trusted=not unproven)
        if differ and not bad:
            self._stop_sharing(differ, step, attempt)
            bad, _ = self._take_now(step, attempt, meta, trusted=not unproven)
        if bad:
            self.ring.commit(step, ok=False)
            why = self._ranks.gather(self.ring.why_bad())
            on_ranks = "; ".join(f"rank {rank}: {why[rank]}" for rank in bad[:8])
            raise CheckpointError(
                f"there is no healthy state to roll back to before step {step}: {on_ranks}",
                hint="check the model's initialization, or remove untrained parameters from the "
                "optimizer; mode 'guard' needs no snapshots",
            )
        self.ring.commit(step, ok=True)
        self._saved_at = step
        self._emit_checkpoint_changes()

    def _take_now(
        self, step: int, attempt: int, meta: Meta, *, trusted: bool = False
    ) -> tuple[list[int], tuple[int, ...]]:
        """Take a snapshot outside of a step. Collective.

        Returns the ranks on which it is invalid, and those whose replicas differ.
        """
        wrong = self.ring.capture(step, attempt, meta, trusted=trusted)
        self.ring.before_update()
        word = self.ring.word()
        counts, rank_words = zip(
            *self._ranks.gather((float(wrong), 0.0 if word is None else float(word))), strict=True
        )
        bad = [rank for rank, count in enumerate(counts) if count]
        return bad, vote_on_fingerprints(rank_words, self._groups).apart

    def _stop_sharing(self, differ: tuple[int, ...], step: int, attempt: int) -> None:
        """Report once that replicas are not equal; each rank keeps its own from now on."""
        self.ring.stop_sharing()
        if self._has_differed:  # from a snapshot in flight at the time of the report
            return
        self._has_differed = True
        text = (
            f"parameters or optimizer state differ between ranks at step {step}: "
            f"{format_ranks(differ)} from the others; that snapshot was dropped, and from now on "
            "each rank keeps a whole copy of its own"
        )
        if self._is_rank0:
            _LOG.warning("vitals: %s", text)
        self._emitter.note("replicas_differ", text, "warning", step=step, attempt=attempt)

    def drop_targets(self, step: int) -> None:
        """Make no state from before ``step`` a target: it lacks added parameter groups.

        Checkpoints on disk are kept, but this start does not roll back to them.
        """
        self.ring.before_update()
        self.ring.forget("a parameter group was added")
        self._wrong, self._on_disk = None, ()
        self._first_restorable, self._saved_at = step + 1, step
        self._emit_checkpoint_changes()

    def follow_groups(self, *, trusted: bool) -> None:
        """Take the next snapshot, at the end of the step, with the added parameter groups.

        ``trusted``: it is healthy as soon as it is committed, because the steps before were.
        """
        self.ring.follow_groups()
        self._trusts_next = trusted

    # ------------------------------------------------------------------------------- each step

    def after_step(self, next_step: int, attempt: int, meta: Callable[[], Meta]) -> None:
        """Take a snapshot if one is due."""
        if self.ring.due(next_step):
            num_missed = self.ring.num_missed
            trusted, self._trusts_next = self._trusts_next, False
            wrong = self.ring.capture(next_step, attempt, meta(), trusted=trusted)
            is_missed = self.ring.num_missed > num_missed
            self._wrong = (next_step, None if is_missed else wrong)

    def nonfinite_count(self, step: int) -> Tensor | None:
        """Return the number of non-finite tensors in ``step``'s snapshot; None: no snapshot."""
        if self._wrong is None or self._wrong[0] != step:
            return None
        self.ring.before_update()  # the check is on the stream of the copy
        return self._wrong[1]

    def fingerprint(self, step: int) -> Tensor | None:
        """Return the fingerprint of the replicas in ``step``'s snapshot; None: no replicas."""
        if self._wrong is None or self._wrong[0] != step:
            return None
        self.ring.before_update()
        return self.ring.fingerprint

    def missed(self, step: int) -> bool:
        """Return whether this rank could not take a snapshot that was due at a step."""
        return self._wrong == (step, None)

    @property
    def is_saving(self) -> bool:
        """Whether this rank is writing a checkpoint: rank 0 reports it, and the next one waits."""
        self._may_be_saving = self._may_be_saving and not self.store.wait(0.0)
        return self._may_be_saving

    @property
    def save_due(self) -> bool:
        """Whether the time between two checkpoints has passed, by this rank's clock."""
        seconds = self.settings.save_seconds
        return 0 < seconds * 1e9 <= self._clock.monotonic_ns() - self._saved_ns

    def save_soon(self) -> None:
        """Write the next proven snapshot. Call on all ranks with the same step's numbers."""
        self._time_is_up = True

    def returned(
        self,
        reduced: ReducedNumbers,
        *,
        step: int,
        attempt: int,
        differ: tuple[int, ...] = (),
        is_shared: bool = True,
    ) -> None:
        """Settle a step's snapshot by the reduced numbers; apply rank 0's save flags.

        The ranks in ``differ`` differ in this step where they must be equal. ``is_shared``: ranks
        may still share a copy.
        """
        # A rank that could not measure the step could not report about its copy either.
        wrong = reduced.total("nonfinite_state") + reduced.total("snapshot_missed")
        is_sound = wrong + reduced.total("failed") == 0.0
        if differ and is_sound:
            if not is_shared:
                self._stop_sharing(differ, step, attempt)
                self.ring.forget_plans()
            self.ring.commit(step, ok=False, why=f"replicas differ: {format_ranks(differ)}")
        else:
            self.ring.commit(step, ok=is_sound)
        self._is_saving = bool(reduced.root["saving"])
        self._packs_before_save = max(0, self._packs_before_save - 1)
        if not self._is_saving and not self._packs_before_save:
            self.ring.saves_ended()
        due = bool(reduced.root["save_due"])
        # Steps in flight when a save started repeat the flag.
        self._time_is_up = self._time_is_up or (due and not self._was_due)
        self._was_due = due
        self._add_saved_checkpoint(
            int(reduced.root["saved_step"]), int(reduced.root["saved_attempt"])
        )

    def _add_saved_checkpoint(self, step: int, attempt: int) -> None:
        """Add a checkpoint that is now complete to the possible targets of a rollback."""
        is_listed = any((ref.step, ref.attempt) == (step, attempt) for ref in self._on_disk)
        is_usable = attempt and step >= self._first_restorable
        if is_usable and not is_listed and self._plan.plan.is_in_lineage(step, attempt):
            from trainer_hooks.recovery.checkpoints.manifest import checkpoint_id

            name = checkpoint_id(step, attempt)
            ref = CheckpointRef(id=name, step=step, attempt=attempt, state="healthy", where="disk")
            self._on_disk = (*self._on_disk, ref)[-self.settings.keep :]

    def promote(self, step: int, last_unhealthy_step: int) -> None:
        """Mark proven snapshots healthy, start a save if one is due, and report the changes."""
        for proven in self.ring.promote(step, last_unhealthy_step):
            self._prove_on_disk(proven.step)
        newest = self.ring.newest_healthy()
        if newest is not None and self._is_due(newest.step - self._saved_at):
            self._saved_at, self._saved_ns = newest.step, self._clock.monotonic_ns()
            self._time_is_up = False
            self.ring.save_begins(newest)
            self._packs_before_save = self._lag + 1
            self.store.save(newest)
            self._may_be_saving = True
        self._emit_checkpoint_changes()

    def _is_due(self, steps: int) -> bool:
        """Return whether to save a snapshot this many steps after the last save."""
        # Each save holds a slot: another one would starve the ring.
        if self._is_saving or not self.is_on_disk:
            return False
        return steps >= self.settings.save_every or (self._time_is_up and steps > 0)

    def _prove_on_disk(self, step: int) -> None:
        """Mark an unproven checkpoint healthy that this start loaded and has proven by now."""
        for ref in self._on_disk:
            if ref.step == step and ref.state == "verified":
                proven = replace(ref, state="healthy")
                self._on_disk = tuple(proven if r is ref else r for r in self._on_disk)
                if self._is_rank0:
                    self.store.mark_healthy(ref.id)

    def refs(self) -> tuple[CheckpointRef, ...]:
        """Return the possible targets of a rollback: equal on all ranks."""
        return (*self._on_disk, *self.ring.refs())

    def step_of(self, checkpoint_id: str) -> int:
        """Return the step of a checkpoint by its id; -2, which no checkpoint has, if unknown."""
        return next((r.step for r in self.refs() if r.id == checkpoint_id), -2)

    # -------------------------------------------------------------------------------- rollbacks

    def roll_back(self, decision: Decision) -> Restored:
        """Restore the decision's checkpoint, or the next older one if it cannot be read.

        If there is no older one, the oldest of the others that are before the onset by the margin.

        From memory this is local to the rank; from disk it is collective.

        Raises:
            CheckpointError: nothing could be restored.
        """
        self.ring.before_update()
        self._wrong = None
        target = next(ref for ref in self.refs() if ref.id == decision.checkpoint_id)
        if target.where == "memory":
            restored = self.ring.restore(target.id)
        else:
            restored = self._restore_from_disk(target.step, commanded=decision.command_number > 0)
        self._on_disk = tuple(ref for ref in self._on_disk if ref.step <= restored.step)
        self._saved_at = min(self._saved_at, restored.step)
        self._emit_checkpoint_changes()
        return restored

    def _restore_from_disk(self, latest: int, *, commanded: bool) -> Restored:
        """Restore the latest healthy checkpoint that can be read, or an older state."""
        if not self.store.wait(_LOAD_SECONDS):
            raise CheckpointError(
                f"a save has been running for {_LOAD_SECONDS:.0f} s, so nothing can be loaded",
                hint="look at the disk of the checkpoints",
            )
        healthy = [r for r in self._on_disk if r.state == "healthy" and r.step <= latest]
        try:
            restored = self.store.load_newest(healthy)
        except CheckpointError:
            # Deleted since rank 0 reported it, or damaged. The same on all ranks.
            self._on_disk = tuple(r for r in self._on_disk if r.step > latest)
            newer = None if commanded else self._oldest_before_onset()
            if newer is None:
                raise
            if newer.where == "memory":
                return self.ring.restore(newer.id)
            restored = self.store.load_newest([newer])
        assert restored is not None, "the policy chose one of them"
        self.ring.drop_newer(restored.step)
        return restored

    def _oldest_before_onset(self) -> CheckpointRef | None:
        """Return the oldest healthy state before the onset, or None."""
        cause = self._plan.plan.facts.cause
        latest = -1 if cause is None else cause.onset_step
        usable = [r for r in self.refs() if r.state == "healthy" and r.step <= latest]
        return min(usable, key=lambda r: (r.step, r.where == "disk"), default=None)

    def restart(self) -> None:
        """Restore this rank's state from before the first step."""
        self.ring.restore(self.ring.refs()[-1].id)

    # ------------------------------------------------------------------------------- the end

    def save_now(self, step: int, attempt: int, meta: Meta) -> str:
        """Write the live state and wait for it; if it is invalid or not equal, a healthy one.

        Collective: for a run that received SIGTERM. Returns the id; empty if nothing later than the
        checkpoints on disk could be written.
        """
        self.store.wait(None)
        self.ring.saves_ended()
        wrong, differ = self._take_now(step, attempt, meta)
        bad = bool(wrong or differ)
        self.ring.commit(step, ok=not bad)
        last = self.ring.newest_healthy() if bad else self.ring.newest_committed()
        if last is None or any(
            (r.step, r.attempt) == (last.step, last.attempt) for r in self._on_disk
        ):
            return ""
        name = self.store.save(last)
        self.store.wait(None)
        self._emit_checkpoint_changes()
        return name if (self.store.folder.path / name).is_dir() else ""

    def save_alone(self) -> None:
        """Write this rank's part of the last snapshot that all ranks have, without collectives.

        For a rank that is about to be killed while the others are unreachable. Any thread may call.
        """
        last = self.ring.newest_committed()
        if last is not None:
            self.store.write_alone(last)

    def close(self) -> None:
        """Wait for a save in progress, for a limited time."""
        self.store.wait(_CLOSE_SECONDS)
        self._emit_checkpoint_changes()

    @property
    def _is_rank0(self) -> bool:
        """Return whether this is rank 0, which reports on snapshots and checkpoints."""
        return self._ranks.rank == 0

    def _emit_checkpoint_changes(self) -> None:
        """Write the changes of snapshots and checkpoints as events."""
        # Read only if there are changes: this runs in every step.
        has_changes = self.is_on_disk and self.store.folder.changes
        stored = self.store.take_changes() if has_changes else []
        for change in stored:
            if change.state == "healthy":  # the best is unproven at first, so no rollback target
                attempt = int(change.checkpoint_id.rpartition("-")[2])
                self.newest_saved = change.checkpoint_step, attempt
        for change in self.ring.take_changes() + stored:
            attempt = int(change.checkpoint_id.rpartition("-")[2])
            self._emitter.run_event(change, step=change.checkpoint_step, attempt=attempt)
