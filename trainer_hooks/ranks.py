"""Which rank this is, and the few collectives that are allowed: at set-up, and one per step.

At the start all ranks succeed, or all raise: none is left waiting in a collective.
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

    ``side`` is a gloo group of our own for set-up and checkpoints: on the training's group a
    background collective hangs the job. It is None in a single process.
    """

    rank: int
    world_size: int
    local_rank: int
    side: dist.ProcessGroup | None
    reduces_on_host: bool = True
    """Whether the training's own group can sum tensors in host memory; NCCL alone cannot."""

    @classmethod
    def join(cls) -> Ranks:
        """Return this process's place; collective when ``torch.distributed`` is initialised."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls(0, 1, 0, None)
        side = dist.new_group(backend="gloo")
        local = int(os.environ.get("LOCAL_RANK", dist.get_rank()))
        on_host = torch.device("cpu") in dist.distributed_c10d._get_default_group()._device_types
        side = cast(dist.ProcessGroup, side)
        return cls(dist.get_rank(), dist.get_world_size(), local, side, on_host)

    def apart(self) -> Ranks:
        """Return the same ranks with another group: two threads on one abort it. Collective."""
        if self.side is None:
            return self
        return replace(self, side=cast(dist.ProcessGroup, dist.new_group(backend="gloo")))

    def broadcast(self, value: T) -> T:
        """Return rank 0's value on every rank. Set-up only: it waits."""
        if self.side is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.side)
        return box[0]

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, in rank order. Set-up only: it waits."""
        if self.side is None:
            return [value]
        out: list[T] = [value] * self.world_size
        dist.all_gather_object(out, value, group=self.side)
        return out

    def gather_on_root(self, value: T) -> list[T] | None:
        """Return every rank's value on rank 0, in rank order, and None elsewhere."""
        if self.side is None:
            return [value]
        out: list[T] | None = [value] * self.world_size if self.rank == 0 else None
        dist.gather_object(value, out, dst=0, group=self.side)
        return out

    def scatter(self, values: Sequence[T] | None) -> T:
        """Return this rank's one of the values that rank 0 has for each."""
        if self.side is None:
            assert values is not None, "a single process is rank 0"
            return values[0]
        out: list[T | None] = [None]
        dist.scatter_object_list(out, None if values is None else [*values], 0, self.side)
        return cast(T, out[0])

    def reduce(self, pack: torch.Tensor) -> None:
        """Sum ``pack`` over the ranks, in place: the one collective of a step.

        Over the training's own group, or ours if that cannot: FSDP2's parameters that are offloaded
        to the host, over plain NCCL.
        """
        if self.world_size > 1:
            is_on_side = pack.device.type == "cpu" and not self.reduces_on_host
            dist.all_reduce(pack, op=dist.ReduceOp.SUM, group=self.side if is_on_side else None)


# ---------------------------------------------------------------- agreeing at the start


def on_every_rank(ranks: Ranks, call: Callable[[], T]) -> list[T]:
    """Run the call on every rank and return what each returned, in rank order. Collective.

    Raises:
        Exception: this rank's own error; elsewhere the first failing rank's, as a VitalsError. What
            not all ranks met names those that did.
    """
    value: T | None = None
    failure: Exception | None = None
    try:
        value = call()
    except Exception as error:  # noqa: BLE001 - raised below, once all ranks know
        failure = error
    outcomes = ranks.gather((value, _to_tell(failure, ranks.rank)))
    failed = [rank for rank, (_, error) in enumerate(outcomes) if error is not None]
    if failure is not None:
        raise named(failure, failed, ranks.world_size)
    for _, elsewhere in outcomes:
        if elsewhere is not None:
            raise named(elsewhere, failed, ranks.world_size)
    return [value for value, _ in outcomes]  # type: ignore[misc]


def named(error: Exception, failed: Sequence[int], world_size: int) -> Exception:
    """Say on which ranks it happened, where that is not all of them."""
    if not isinstance(error, VitalsError) or isinstance(error, TrainingHalted):
        return error
    if len(failed) == world_size or error.text.startswith("rank "):
        return error
    number = "rank" if len(failed) == 1 else "ranks"
    shown = ", ".join(map(str, failed[:8])) + (", ..." if len(failed) > 8 else "")
    error.text = f"{number} {shown}: {error.text}"
    return error


def _to_tell(error: Exception | None, rank: int) -> VitalsError | None:
    if error is None or isinstance(error, VitalsError):
        return error
    return UsageError(
        f"rank {rank} could not start: {type(error).__name__}: {error}",
        hint="that rank's own output shows where",
    )


def check_same(what: str, values: Sequence[object], hint: str) -> None:
    """Refuse, on all ranks alike, what differs between them.

    Raises:
        UsageError: it does; the first rank that differs is named.
    """
    for rank, value in enumerate(values):
        if value != values[0]:
            raise UsageError(f"{what}: {value} on rank {rank}, {values[0]} on rank 0", hint=hint)
