"""Saves snapshots to a run's directory in the background, and loads them, on all ranks together."""

import logging
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from trainer_hooks.agreement import RankAgreement, catch_error
from trainer_hooks.ranks import Ranks
from trainer_hooks.recovery.checkpoints import emergency_save, payload
from trainer_hooks.recovery.checkpoints import manifest as manifests
from trainer_hooks.recovery.checkpoints.folder import CheckpointFolder
from trainer_hooks.recovery.checkpoints.index import OnBranch
from trainer_hooks.recovery.checkpoints.layout import RankShardLayout
from trainer_hooks.recovery.checkpoints.manifest import FileEntry, Manifest
from trainer_hooks.recovery.checkpoints.planner import TensorBox
from trainer_hooks.recovery.manager import Meta, Restored, Snapshot
from trainer_hooks.recovery.state import HostState, TensorSpec, TrainingState
from trainer_hooks.tensors.finite import bytes_of, is_finite
from trainer_hooks.tensors.shard_layout import LocalShard, split_box
from trainvitals.errors import CheckpointCorruptError, CheckpointError, UsageError, VitalsError
from trainvitals.policy.state import CheckpointRef
from trainvitals.records import CheckpointChanged

# ----------------------------------------------------------------------- background jobs


class CheckpointThread:
    """Runs jobs one after another in the background; a job handles its own errors.

    Its caller bounds the queue: a save holds a slot of the snapshots, and each start has one mark.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: deque[Callable[[], None]] = deque()
        self._guard = threading.Condition()
        self._worker: threading.Thread | None = None

    def add(self, job: Callable[[], None]) -> None:
        """Queue a job that saves or marks a checkpoint; does not wait."""
        with self._guard:
            self._jobs.append(job)
            if self._worker is None:
                self._worker = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._worker.start()

    def wait(self, timeout: float | None) -> bool:
        """Wait until all jobs on checkpoints are done; return False on a timeout."""
        with self._guard:
            return self._guard.wait_for(lambda: self._worker is None, timeout)

    def _work(self) -> None:
        """Process the queue of saves, then end: a run that saves nothing leaves no thread."""
        while True:
            with self._guard:
                if not self._jobs:
                    self._worker = None
                    self._guard.notify_all()
                    return
                job = self._jobs.popleft()
            job()


# ------------------------------------------------------------- the checkpoints of a run


_LOG = logging.getLogger("trainvitals")
_PARTS_OF_THE_MODEL = re.compile(r"rank\.\d+\.((model|optim)\..*)")


class CheckpointStore:
    """Checkpoints of one run in one directory, which all ranks see.

    ``save`` and the loads are collective: call them on all ranks, in the same order. A save runs in
    one background thread, on the side group; a load must not run during a save. A failure is
    logged, counted and reported by ``take_changes``; it never reaches the training.

    The directory's content is this rank's view of a disk: other ranks may see another one.
    """

    is_on_disk = True

    def __init__(
        self,
        state: TrainingState,
        directory: Path,
        *,
        run_id: str,
        ranks: Ranks,
        keep: int = 3,
        keep_every: int = 0,
        on_branch: OnBranch | None = None,
        key: bytes = b"",
    ) -> None:
        self._state = state
        self.folder = CheckpointFolder(
            directory, run_id=run_id, keep=keep, keep_every=keep_every, key=key
        )
        self._on_branch = on_branch
        self._run_id = run_id
        self._ranks = ranks
        self._agree = RankAgreement(ranks)
        tensors = state.shard_positions(rank=ranks.rank, world_size=ranks.world_size)
        self._layout = RankShardLayout(tensors, state.split_optimizers)
        self._background = CheckpointThread("vitals-save")
        self.num_saved = 0
        self.num_failed = 0

    def prepare(self) -> None:
        """Prepare the directory, and merge parts of emergency saves into checkpoints. Rank 0 only.

        Call before anything is loaded, when no rank of an earlier start writes any longer.

        Raises:
            StorageError: it cannot be created or written.
        """
        self.folder.prepare()
        emergency_save.merge_emergency_parts(self.folder, self._run_id)

    # -------------------------------------------------------------------------------- saving

    def save(self, snapshot: Snapshot) -> str:
        """Start writing a snapshot to disk and return its id there; does not wait.

        The snapshot's memory is held until it is written. Saves queue up; since each holds a slot
        of the ring, there are never more of them than slots.
        """
        snapshot.hold()
        self._background.add(lambda: self._save_held(snapshot))
        return manifests.checkpoint_id(snapshot.step, snapshot.attempt)

    def wait(self, timeout: float | None = 60.0) -> bool:
        """Wait until all saves are done; return False on a timeout."""
        return self._background.wait(timeout)

    def _save_held(self, snapshot: Snapshot) -> None:
        """Save a snapshot to disk; report an error, discard its files, and release it."""
        try:
            self._save(snapshot)
        except BaseException as error:  # noqa: BLE001 - CheckpointException is not an Exception
            self._tell_failure(snapshot, error)
            if self._is_rank0:
                self.folder.discard(manifests.checkpoint_id(snapshot.step, snapshot.attempt))
        finally:
            snapshot.release()

    def _save(self, snapshot: Snapshot) -> None:
        """Write, read back, seal and rename; each stage ends in one verdict for all ranks.

        A rank reads back and measures its own data; rank 0 gets the checksums.
        """
        name = manifests.checkpoint_id(snapshot.step, snapshot.attempt)
        if self._ranks.broadcast(self._is_rank0 and (self.folder.path / name).exists()):
            self._mark(name, snapshot)
            return
        partial = self.folder.partial(name)
        boxes: list[TensorBox] = []
        self._agree.on_all(lambda: boxes.extend(self._boxes(snapshot)))
        written = payload.write(
            partial,
            boxes,
            self._agree,
            make_room=lambda size: self.folder.make_room(name, size),
        )
        rank_files: dict[str, FileEntry] = {}

        def read_back() -> None:
            rank_files.update(self._read_back(partial, written.boxes))
            snapshot.check_whole()

        self._agree.on_all(read_back)
        files = {
            name: entry for part in self._ranks.gather(rank_files) for name, entry in part.items()
        }
        size = self._ranks.broadcast(written.num_bytes)
        self._agree.on_root(
            lambda: self.folder.publish(self._build_manifest(snapshot, size, files))
        )
        self._mark(name, snapshot)
        self.num_saved += 1
        self.folder.note(name, snapshot.state, num_bytes=size)
        if not self._is_rank0:
            return
        problem = catch_error(lambda: self.folder.rotate(self._on_branch))
        if problem is not None:  # logged, but the new checkpoint exists anyway
            self.num_failed += 1
            _LOG.warning("vitals: old checkpoints were not removed: %s", problem.text)

    def _mark(self, name: str, snapshot: Snapshot) -> None:
        """Mark the state of an existing checkpoint; a failure leaves it unchanged."""
        if self._is_rank0:
            self._try_mark(name, lambda of: self._write_marks(of, snapshot))

    def _try_mark(self, name: str, mark: Callable[[str], None]) -> None:
        """Mark a checkpoint; count and log an error."""
        problem = catch_error(lambda: mark(name))
        if problem is not None:
            self.num_failed += 1
            _LOG.warning("vitals: checkpoint %s was not marked: %s", name, problem.text)

    def _write_marks(self, name: str, snapshot: Snapshot) -> None:
        """Write the marks. The same state may be saved twice: as the best, and later as healthy."""
        if snapshot.best is not None:
            self.folder.mark_best(name, *snapshot.best)
        unproven = [ref.id for ref in self.folder.refs() if ref.state == "verified"]
        if snapshot.state == "healthy" and name in unproven:
            self.folder.mark_healthy(name)

    def _boxes(self, snapshot: Snapshot, *, alone: bool = False) -> Iterator[TensorBox]:
        """Yield this rank's boxes to write to a checkpoint, from the snapshot.

        ``alone`` leaves out data that this rank need not write without communication.
        """
        rank_prefix = f"rank.{self._ranks.rank}."
        host = {**snapshot.host, "moments": self._layout.spread(snapshot.host["moments"])}
        yield TensorBox.all_of(f"{rank_prefix}host", payload.pack_host(host, snapshot.meta))
        for key, tensor in snapshot.tensors().items():
            shard = self._layout.find_writable(key, tuple(tensor.shape))
            whole = [TensorBox.all_of(rank_prefix + key, tensor)]
            for box in whole if shard is None else _shard_boxes(shard, tensor):
                for part in _split_large_box(box):
                    if not alone or shard is None or shard.writes(part.name, part.offsets):
                        yield part

    def _read_back(self, partial: Path, written: list[TensorBox]) -> dict[str, FileEntry]:
        """Compare this rank's files with the snapshot; return their measurements."""
        expected = {box.key: box.tensor for box in written}

        def check(index: MetadataIndex, tensor: Tensor) -> None:
            if not _same_bits(tensor, expected[index]):
                raise CheckpointCorruptError(f"{index.fqn} reads back differently than written")
            self._check_finite(index.fqn, tensor)

        payload.scan(partial, check, list(expected))
        rank, world_size = self._ranks.rank, self._ranks.world_size
        names = [path.name for path in partial.iterdir()]
        share = manifests.files_to_verify(names, rank, world_size)
        metadata = [manifests.METADATA] if rank == 0 else []
        return manifests.measure(partial, [*share, *metadata])

    def _check_finite(self, key: str, tensor: Tensor) -> None:
        """Raise if a checkpoint's tensor that must be finite is not."""
        if key.endswith(".host") or not self._state.must_be_finite(_strip_rank_prefix(key)):
            return
        if not is_finite(tensor):
            raise CheckpointCorruptError(f"{key} is not finite")

    def _build_manifest(
        self, snapshot: Snapshot, size: int = 0, files: dict[str, FileEntry] | None = None
    ) -> Manifest:
        """Return the manifest of a snapshot's checkpoint."""
        return Manifest(
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
            files=files or {},
        )

    def _tell_failure(self, snapshot: Snapshot, error: BaseException) -> None:
        """Count, log and record that a checkpoint was not saved."""
        name = manifests.checkpoint_id(snapshot.step, snapshot.attempt)
        self.num_failed += 1
        text = error.text if isinstance(error, VitalsError) else f"{type(error).__name__}: {error}"
        _LOG.warning("vitals: checkpoint %s was not saved, training continues: %s", name, text)
        self.folder.note(name, "bad", detail=f"not saved: {text}")

    def write_alone(self, snapshot: Snapshot) -> bool:
        """Write this rank's part of a snapshot, without any collective; return whether it exists.

        For an end without time for collectives: ``prepare`` makes a checkpoint of the parts
        once all ranks have written theirs. Waits for the disk; a failure is logged, counted and
        reported.
        """
        snapshot.hold()
        try:
            boxes = list(self._boxes(snapshot, alone=True))
            for box in boxes:
                self._check_finite(box.name, box.tensor)
            content = self._build_manifest(snapshot)
            emergency_save.write_part(
                self.folder.path,
                content,
                self._ranks.rank,
                boxes,
                snapshot.check_whole,
                self.folder.key,
            )
        except BaseException as error:  # noqa: BLE001 - CheckpointException is not an Exception
            self._tell_failure(snapshot, error)
            return False
        finally:
            snapshot.release()
        return True

    def mark_healthy(self, checkpoint_id: str) -> None:
        """Start recording that a verified checkpoint was proven healthy. Rank 0 only."""
        self._background.add(lambda: self._try_mark(checkpoint_id, self.folder.mark_healthy))

    def take_changes(self) -> list[CheckpointChanged]:
        """Return the changes since the last call, for the events stream; call after each step."""
        return self.folder.take_changes()

    # ------------------------------------------------------------------------------- loading

    def verify_share(self, content: Manifest) -> None:
        """Verify this rank's share of the files, and the metadata, which all ranks read.

        The bytes come first and then their content, so that only unchanged files are opened; the
        second pass finds them in the page cache if they fit.

        Raises:
            CheckpointCorruptError: a check failed.
            CheckpointError: they cannot be read here, so the checkpoint's state is unknown.
        """
        folder, exempt = self.folder.path / content.id, set(content.may_be_nonfinite)

        def check(index: MetadataIndex, tensor: Tensor) -> None:
            if _strip_rank_prefix(index.fqn) not in exempt and not is_finite(tensor):
                raise CheckpointCorruptError(f"{content.id}: {index.fqn} is not finite")

        names = manifests.files_to_verify(content.files, self._ranks.rank, self._ranks.world_size)
        try:
            manifests.check_files(folder, content, [manifests.METADATA, *names])
        except OSError as error:
            raise CheckpointError(
                f"{error.filename or folder} cannot be read: {error.strerror}",
                hint="look at who may read it: ls -la, and at the disk",
            ) from error
        payload.scan(folder, check, payload.stored_in(folder, names))

    def load(self, checkpoint_id: str) -> Restored:
        """Verify a checkpoint and make the live state equal to it, bit for bit. Collective.

        Each file is verified by one rank, in parallel, before any rank uses it.

        Raises:
            CheckpointCorruptError: it is damaged; nothing has changed, and it is quarantined.
            CheckpointError: it does not fit this training, or could not be read on some rank.
            UsageError: there is no such checkpoint.
        """
        try:
            content: list[Manifest] = []
            self._agree.on_root(lambda: content.append(self.folder.examine(checkpoint_id)))
            manifest = self._ranks.broadcast(content[0] if content else None)
            assert manifest is not None, "rank 0 raised, and so did all"
            self._agree.on_all(lambda: self.verify_share(manifest))
        except CheckpointCorruptError as error:
            reason = error.text
            self._agree.on_root(lambda: self.folder.quarantine_damaged(checkpoint_id, reason))
            raise
        restored: list[Restored] = []
        self._agree.on_all(lambda: restored.append(self._restore_checkpoint(checkpoint_id)))
        return restored[0]

    def loadable_refs(self) -> tuple[CheckpointRef, ...]:
        """Return rank 0's loadable checkpoints, oldest first: the same on all ranks. Collective."""
        here = self.folder.loadable_refs(self._on_branch) if self._is_rank0 else ()
        return tuple(self._ranks.broadcast(here))

    def load_newest(self, refs: Sequence[CheckpointRef]) -> Restored | None:
        """Load the latest valid one; skip damaged and missing checkpoints. Collective.

        None if there are none.

        Raises:
            CheckpointError: there are some, and all are invalid; or it does not fit this training.
        """
        for ref in reversed(refs):
            try:
                return self.load(ref.id)
            except (CheckpointCorruptError, UsageError) as error:
                _LOG.warning("vitals: checkpoint %s failed, trying an older one: %s", ref.id, error)
        if refs:
            raise CheckpointError(
                f"no checkpoint in {self.folder.path} can be loaded (tried {len(refs)})",
                hint="`vitals checkpoints list` says why; damaged ones are kept there as bad-*. To "
                "start from step 0, move all checkpoints away",
            )
        return None

    def _restore_checkpoint(self, checkpoint_id: str) -> Restored:
        folder = self.folder.path / checkpoint_id
        step, attempt = manifests.parse_id(checkpoint_id)
        stored, saved_by = payload.specs(folder), manifests.read(folder).world_size
        same_world = saved_by == self._ranks.world_size
        if not same_world:
            _refuse_parts(stored, saved_by)
        rank_prefix = f"rank.{self._ranks.rank if same_world else 0}."
        names = {
            _strip_rank_prefix(k): k
            for k in stored
            if k.startswith(rank_prefix) or not k.startswith("rank.")
        }
        rank_keys = {plain for plain, name in names.items() if plain != name}
        del names["host"]
        host, meta = self._read_host_state(folder, stored, saved_by)
        specs = self._layout.local_specs({k: stored[name] for k, name in names.items()}, rank_keys)
        self._check_alike(folder, specs, names)
        self._state.conform(specs, host)
        payload.read(folder, list(self._target_boxes(specs, names, stored)))
        own_host = f"rank.{self._ranks.rank}.host" in stored
        self._state.load_host_state(host, rng=own_host)
        return Restored(checkpoint_id, step, attempt, meta, same_world)

    def _read_host_state(
        self, folder: Path, stored: Mapping[str, TensorSpec], saved_by: int
    ) -> tuple[HostState, Meta]:
        """Return this rank's host state, or rank 0's; state of parameters from all ranks' ones."""
        rank = self._ranks.rank if f"rank.{self._ranks.rank}.host" in stored else 0
        host, meta = payload.read_host(folder, key := f"rank.{rank}.host", stored[key])
        if saved_by != self._ranks.world_size or self._layout.is_missing_scalars(host["moments"]):
            for other in range(saved_by):
                theirs, _ = payload.read_host(folder, key := f"rank.{other}.host", stored[key])
                for ours, more in zip(host["moments"], theirs["moments"], strict=True):
                    ours |= {param: values for param, values in more.items() if param not in ours}
        host["moments"] = self._layout.collect(host["moments"])
        return host, meta

    def _check_alike(
        self, folder: Path, specs: Mapping[str, TensorSpec], names: Mapping[str, str]
    ) -> None:
        """Refuse step counts that differ if one counter here covers several parameters."""
        groups: list[list[TensorBox]] = []
        for key, spec in specs.items():
            tensor = self._layout.find(key, spec.shape)
            piece_names = (
                [p.name for p in tensor.pieces if p.start is None] if tensor is not None else []
            )
            if len(piece_names) > 1:
                there = [names[name] for name in piece_names if name in names]
                groups.append(
                    [TensorBox.all_of(n, torch.empty(spec.shape, dtype=spec.dtype)) for n in there]
                )
        if groups:
            payload.read(folder, [box for group in groups for box in group])
        for group in groups:
            for box in group[1:]:
                if not _same_bits(box.tensor, group[0].tensor):
                    raise CheckpointError(
                        f"{box.name} and {group[0].name} differ; here they are one",
                        hint="use FullyShardedDataParallel(..., use_orig_params=True)",
                    )

    def _target_boxes(
        self,
        specs: Mapping[str, TensorSpec],
        names: Mapping[str, str],
        stored: Mapping[str, TensorSpec],
    ) -> Iterator[TensorBox]:
        """Yield the memory of the live tensors; tensors missing in the checkpoint are zeroed."""
        live = self._state.tensors()
        for key, spec in specs.items():
            tensor = self._layout.find(key, spec.shape)
            whole = [TensorBox.all_of(key, live[key])]
            boxes = whole if tensor is None else list(_shard_boxes(tensor, live[key]))
            boxes = [box._replace(name=names[box.name]) for box in boxes if box.name in names]
            if sum(box.tensor.numel() for box in boxes) < live[key].numel():
                live[key].zero_()
            yield from boxes

    # --------------------------------------------------------------------------------- ranks

    @property
    def _is_rank0(self) -> bool:
        """Return whether this is rank 0, which publishes and marks checkpoints for all."""
        return self._ranks.rank == 0


def _shard_boxes(shard: LocalShard, tensor: Tensor) -> Iterator[TensorBox]:
    """Yield a box to store in the checkpoint for each piece of a shard."""
    for piece in shard.pieces:
        yield TensorBox(piece.name, piece.shape, piece.offsets, piece.of(tensor))


def _split_large_box(box: TensorBox) -> Iterator[TensorBox]:
    """Yield a checkpoint's box as parts of some MB, split alike on every rank that holds it."""
    most = max(1, payload.BOX_BYTES // box.tensor.element_size())
    for offsets, sizes in split_box(tuple(box.tensor.shape), most):
        part = box.tensor
        for dim, (start, size) in enumerate(zip(offsets, sizes, strict=True)):
            part = part.narrow(dim, start, size)
        global_offsets = tuple(a + b for a, b in zip(box.offsets, offsets, strict=True))
        yield TensorBox(box.name, box.shape, global_offsets, part)


def _refuse_parts(stored: Mapping[str, TensorSpec], saved_by: int) -> None:
    """Refuse a checkpoint's separate data of the ranks if the number of ranks differs."""
    first_match = next((match for k in stored if (match := _PARTS_OF_THE_MODEL.match(k))), None)
    if first_match is not None:
        raise CheckpointError(
            f"{first_match[1]} was saved by each of {saved_by} ranks separately, and cannot be "
            "redistributed to another number of ranks",
            hint=f"resume with {saved_by} ranks; DistributedDataParallel, FullyShardedDataParallel "
            "and fully_shard can be resumed with any number, ZeroRedundancyOptimizer cannot",
        )


def _strip_rank_prefix(key: str) -> str:
    """Return a checkpoint's key without its prefix of the rank."""
    return key.split(".", 2)[2] if key.startswith("rank.") else key


def _same_bits(tensor: Tensor, other: Tensor) -> bool:
    """Return whether a checkpoint's tensor, read back, equals another bit for bit."""
    if TensorSpec.of(tensor) != TensorSpec.of(other):
        return False
    return np.array_equal(bytes_of(tensor.contiguous()), bytes_of(other.contiguous()))
