"""Memory that the ranks of one node share: a copy of their replicas, of which each writes a part.

It is a memfd, so it never fills /dev/shm and is freed with the last process that has it. Every rank
maps it itself: its content stays readable when other processes die, including its creator.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import resource
import weakref
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from trainer_hooks.exchange.reduce_vector import MAX_SLOTS
from trainer_hooks.ranks import Ranks
from trainer_hooks.tensors.finite import is_readable
from trainer_hooks.tensors.pinned import register_with_cuda

_HEADER_BYTES = 4096
_MAX_RANKS = _HEADER_BYTES // 8
_ALIGNMENT = 64
_CPU = torch.device("cpu")
UNIT_BYTES = 1 << 22
"""Unit of the ranks' shares: one rank copies it."""


class Unit(NamedTuple):
    """A range of one tensor's elements, and whether this rank copies it."""

    key: str
    begin: int
    end: int
    is_mine: bool


class SharedLayout:
    """Position of each tensor in shared memory: a function of names, shapes and types only."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.offsets: dict[str, int] = {}
        self._sizes: dict[str, tuple[int, int]] = {}
        """Number of elements, and bytes per element."""
        end, layout_words = _HEADER_BYTES, []
        for key, tensor in tensors.items():
            self.offsets[key] = end
            self._sizes[key] = tensor.numel(), tensor.element_size()
            end += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
            layout_words.append((key, tuple(tensor.shape), str(tensor.dtype)))
        self.size = end
        self.digest = zlib.crc32(repr(layout_words).encode())

    def units(self, index: int, count: int) -> list[Unit]:
        """Return all ranges in order; those of the ``index``-th of ``count`` ranks are marked.

        The ranges are the same on every rank, each marked on exactly one: the ranks' shares differ
        by at most one range.
        """
        cut = [
            (key, begin, min(begin + step, numel), itemsize)
            for key, (numel, itemsize) in self._sizes.items()
            for step in [UNIT_BYTES // itemsize]
            for begin in range(0, numel, step)
        ]
        total = sum((end - begin) * itemsize for _, begin, end, itemsize in cut)
        units, before = [], 0
        for key, begin, end, itemsize in cut:
            units.append(Unit(key, begin, end, before * count // total == index))
            before += (end - begin) * itemsize
        return units


def can_be_shared(tensor: Tensor) -> bool:
    """Return whether a tensor's snapshot can be shared: only its bytes, in its elements' order."""
    return (
        tensor.layout == torch.strided
        and tensor.numel() > 0
        and tensor.is_contiguous()
        and not (tensor.is_conj() or tensor.is_neg())
        and is_readable(tensor.dtype)
    )


class SharedRegion:
    """One slot's shared memory, mapped by this rank."""

    def __init__(
        self, fd: int, group: NodeGroup, number: int = 0, *, device: torch.device = _CPU
    ) -> None:
        self.group = group
        self.number = number
        self.fd = fd
        self._device = device
        self._bytes: Tensor | None = None
        weakref.finalize(self, os.close, fd)

    def views(self, layout: SharedLayout, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a view of the shared snapshot for each tensor, after reserving memory for all.

        Raises:
            OSError: there is not enough memory. It is reserved first: a write to missing memory
                would end the process by SIGBUS.
        """
        memory = self._map_memory(layout.size)
        views = {}
        for key, tensor in tensors.items():
            begin = layout.offsets[key]
            raw = memory[begin : begin + tensor.numel() * tensor.element_size()]
            views[key] = raw.view(tensor.dtype).view(tensor.shape)
        return views

    def _map_memory(self, size: int) -> Tensor:
        """Map at least this many bytes of the shared snapshot, and page-lock them for a GPU."""
        if self._bytes is None or self._bytes.numel() < size:
            os.posix_fallocate(self.fd, 0, size)
            self._bytes = torch.frombuffer(mmap.mmap(self.fd, size), dtype=torch.uint8)
            if self._device.type == "cuda":
                register_with_cuda(self._bytes, self._device)
        return self._bytes

    def mark_incomplete(self, generation: int) -> None:
        """Mark this rank's part of a snapshot as being overwritten; call before any write."""
        self._generation_header()[self.group.index] = generation

    def holds(self, generation: int) -> bool:
        """Return whether no rank has started to overwrite the snapshot of ``generation``."""
        return bool((self._generation_header()[: self.group.count] == generation).all())

    def _generation_header(self) -> Tensor:
        """Return the generation of each rank's part of the shared snapshot, as a view."""
        return self._map_memory(_HEADER_BYTES)[:_HEADER_BYTES].view(torch.int64)


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """This rank within the group that shares a copy."""

    index: int
    count: int


class NodeRegions(NamedTuple):
    """Result of ``join_node`` on this rank."""

    regions: tuple[SharedRegion, ...] | None
    """None if each rank of this node keeps a complete copy."""
    failures: tuple[str, ...]
    """Reason why the ranks of one node do not share, one for each such node."""

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks that share this rank's snapshot."""
        return 1 if self.regions is None else self.regions[0].group.count


def join_node(
    ranks: Ranks, *, num_regions: int, has_replicas: bool, device: torch.device = _CPU
) -> NodeRegions:
    """Open memory shared by all ranks of this node, if possible. Collective; it never raises.

    Ranks are on one node if they see the same kernel and the same process ids. No memory is used
    yet. If one of them cannot open it, no rank of that node shares. ``has_replicas``: this rank has
    data that others have too. ``device`` is where the data is copied from.
    """
    if ranks.world_size == 1:
        return NodeRegions(None, ())
    key = _node_key() if has_replicas and ranks.world_size <= MAX_SLOTS else ""
    keys = ranks.gather(key)
    peers = [rank for rank, other in enumerate(keys) if key and other == key]
    shares = 1 < len(peers) <= _MAX_RANKS
    leads = shares and peers[0] == ranks.rank
    offers = ranks.gather(_create_region_offer(num_regions) if leads else None)
    fds, failure = _open_region_offer(offers[peers[0]], leads=leads) if shares else (None, "")
    outcomes = ranks.gather(failure)
    failures = {keys[r]: f"rank {r}: {text}" for r, text in enumerate(outcomes) if text}
    if fds is None or key in failures:
        for fd in fds or ():
            os.close(fd)
        return NodeRegions(None, tuple(failures.values()))
    group = NodeGroup(peers.index(ranks.rank), len(peers))
    regions = tuple(SharedRegion(fd, group, i, device=device) for i, fd in enumerate(fds))
    return NodeRegions(regions, tuple(failures.values()))


class _RegionOffer(NamedTuple):
    pid: int
    fds: tuple[int, ...]
    identities: tuple[tuple[int, int], ...]
    """Device and inode of each."""
    failure: str = ""


def _create_region_offer(count: int) -> _RegionOffer:
    """Create the memory of shared snapshots on the node's first rank, or return the reason."""
    fds: list[int] = []
    try:
        if resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY:
            raise OSError("the size of files is limited (ulimit -f)")
        for _ in range(count):
            fds.append(os.memfd_create("vitals-snapshot", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
            # No process can remove memory that others have mapped.
            fcntl.fcntl(fds[-1], fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    except (OSError, AttributeError) as error:
        for fd in fds:
            os.close(fd)
        return _RegionOffer(os.getpid(), (), (), f"no shared memory: {error}")
    return _RegionOffer(os.getpid(), tuple(fds), tuple(map(_file_identity, fds)))


def _open_region_offer(
    offer: _RegionOffer | None, *, leads: bool
) -> tuple[Sequence[int] | None, str]:
    """Open the memory offered by the node's first rank; return its descriptors, or the reason."""
    assert offer is not None, "the first rank of a node makes an offer"
    if offer.failure or leads:
        return (None if offer.failure else offer.fds), (offer.failure if leads else "")
    fds: list[int] = []
    try:
        for fd, identity in zip(offer.fds, offer.identities, strict=True):
            fds.append(os.open(f"/proc/{offer.pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC))
            if _file_identity(fds[-1]) != identity:
                raise OSError(f"/proc/{offer.pid} is another process here")
    except OSError as error:
        for fd in fds:
            os.close(fd)
        return None, str(error)
    return fds, ""


def _file_identity(fd: int) -> tuple[int, int]:
    """Return device and inode of a shared snapshot's memory."""
    stat = os.fstat(fd)
    return stat.st_dev, stat.st_ino


def _node_key() -> str:
    """Return a key for sharing snapshots in one kernel and process id namespace, or nothing."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()} {os.getuid()}"
    except OSError:
        return ""
