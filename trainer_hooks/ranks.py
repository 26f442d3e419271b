"""This process's rank, and its collectives: at setup, and one per step.

At setup all ranks succeed, or all raise: none is left waiting in a collective.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from trainvitals.errors import TrainingHalted, UsageError, VitalsError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among the ranks of the job.

    ``side`` is a separate gloo group for setup and checkpoints; None in a single process. A
    background collective on the training's group could hang the job.
    """

    rank: int
    world_size: int
    local_rank: int
    side: dist.ProcessGroup | None
    reduces_on_host: bool = True
    """Whether the training's own group can sum tensors in host memory; NCCL alone cannot."""

    @classmethod
    def join(cls) -> Ranks:
        """Return this process's ranks; collective if ``torch.distributed`` is initialized."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls(0, 1, 0, None)
        side = dist.new_group(backend="gloo")
        local = int(os.environ.get("LOCAL_RANK", dist.get_rank()))
        on_host = torch.device("cpu") in dist.distributed_c10d._get_default_group()._device_types
        side = cast(dist.ProcessGroup, side)
        return cls(dist.get_rank(), dist.get_world_size(), local, side, on_host)

    def with_new_group(self) -> Ranks:
        """Return the same ranks with a new group: two threads must not share one. Collective."""
        if self.side is None:
            return self
        return replace(self, side=cast(dist.ProcessGroup, dist.new_group(backend="gloo")))

    def broadcast(self, value: T) -> T:
        """Return rank 0's value on every rank. For setup only, since it waits. Collective."""
        if self.side is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.side)
        return box[0]

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, in rank order. For setup only, since it waits. Collective."""
        if self.side is None:
            return [value]
        out: list[T] = [value] * self.world_size
        dist.all_gather_object(out, value, group=self.side)
        return out

    def gather_on_root(self, value: T) -> list[T] | None:
        """Return every rank's value on rank 0, in rank order; None elsewhere. Collective."""
        if self.side is None:
            return [value]
        out: list[T] | None = [value] * self.world_size if self.rank == 0 else None
        dist.gather_object(value, out, dst=0, group=self.side)
        return out

    def scatter(self, values: Sequence[T] | None) -> T:
        """Return this rank's element of rank 0's list, which has one per rank. Collective."""
        if self.side is None:
            assert values is not None, "a single process is rank 0"
            return values[0]
        out: list[T | None] = [None]
        dist.scatter_object_list(out, None if values is None else [*values], 0, self.side)
        return cast(T, out[0])

    def reduce(self, pack: torch.Tensor) -> None:
        """Sum ``pack`` over the ranks, in place: the only collective of a step.

        It uses the training's own group, or ours if that cannot sum tensors of the host, for
        example with FSDP2's offloaded parameters over plain NCCL.
        """
        if self.world_size > 1:
            is_on_side = pack.device.type == "cpu" and not self.reduces_on_host
            dist.all_reduce(pack, op=dist.ReduceOp.SUM, group=self.side if is_on_side else None)


def on_every_rank(ranks: Ranks, call: Callable[[], T]) -> list[T]:
    """Run ``call`` on every rank and return all results, in rank order. Collective.

    Raises:
        Exception: the error of this rank, or otherwise that of the first failing rank as a
            VitalsError. If not all ranks failed, the message names those that did.
    """
    value: T | None = None
    failure: Exception | None = None
    try:
        value = call()
    except Exception as error:  # noqa: BLE001 - raised below, once all ranks know
        failure = error
    outcomes = ranks.gather((value, _sendable_error(failure, ranks.rank)))
    failed = [rank for rank, (_, error) in enumerate(outcomes) if error is not None]
    if failure is not None:
        raise name_failed_ranks(failure, failed, ranks.world_size)
    for _, elsewhere in outcomes:
        if elsewhere is not None:
            raise name_failed_ranks(elsewhere, failed, ranks.world_size)
    return [value for value, _ in outcomes]  # type: ignore[misc]


def name_failed_ranks(error: Exception, failed: Sequence[int], world_size: int) -> Exception:
    """Add the failed ranks to the error's message, if not all ranks failed."""
    if not isinstance(error, VitalsError) or isinstance(error, TrainingHalted):
        return error
    if len(failed) == world_size or error.text.startswith("rank "):
        return error
    number = "rank" if len(failed) == 1 else "ranks"
    shown = ", ".join(map(str, failed[:8])) + (", ..." if len(failed) > 8 else "")
    error.text = f"{number} {shown}: {error.text}"
    return error


def _sendable_error(error: Exception | None, rank: int) -> VitalsError | None:
    """Return a rank's error as one that other ranks can raise."""
    if error is None or isinstance(error, VitalsError):
        return error
    return UsageError(
        f"rank {rank} could not start: {type(error).__name__}: {error}",
        hint="that rank's own output shows where",
    )


def check_same(what: str, values: Sequence[object], hint: str) -> None:
    """Refuse values that differ between ranks, on all ranks together; name the first one."""
    for rank, value in enumerate(values):
        if value != values[0]:
            raise UsageError(f"{what}: {value} on rank {rank}, {values[0]} on rank 0", hint=hint)
