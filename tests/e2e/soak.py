"""A small training for many steps that writes down what its processes hold; started once a rank.

It trains twice: in mode heal with the faults of the plan, NaN batches on one rank and parameters
that turn NaN a few times; then in mode off, without the batches that the first one skipped. Both
must end in the same state.
"""

import hashlib
import json
import os
import sys
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import trainer_hooks

NUM_SAMPLES, BATCH, WIDTH = 800, 4, 32
BATCHES_PER_EPOCH = NUM_SAMPLES // BATCH // 2
NUM_LOOKS = 100
"""How often a process is looked at, evenly over the steps."""


class Plan(NamedTuple):
    """How long a soak is, and what goes wrong in it."""

    num_steps: int
    poisoned_every: int
    """Steps between batches that are NaN on rank 1."""
    broken_at: tuple[int, ...]
    """Steps after which rank 0's first weights are NaN, once each."""

    def is_poisoned(self, batch: int) -> bool:
        """Say it of a batch by its place in the run: a rollback gives it again."""
        return batch % self.poisoned_every == self.poisoned_every // 2

    @property
    def poisoned(self) -> set[int]:
        return set(filter(self.is_poisoned, range(self.num_steps)))


# ---------------------------------------------------------------------------------- what is flat


BYTES_PER_STEP = 100.0
"""A leak of it adds 100 MB over a million steps, which no rank would notice beside its model; each
of our records of a step is larger, so that one that is kept for each step is seen."""
RESOLUTION_BYTES = 4e6
"""What a process may take more over the looks that count, however few their steps: an allocator
takes memory from the system by the megabyte, and keeps it."""
RESOLUTION_COUNT = 1.5
"""Of descriptors, threads and files in memory. One may be added once: the slot that is lent while a
slow disk holds another. If that happens in the middle, the median of the slopes is that of one."""


class Look(NamedTuple):
    """What one process holds at a step."""

    step: int
    rss_bytes: int
    own_bytes: int
    """Of memory that is no file's, and its share of that in memory files: what other programs do
    with the same libraries changes neither."""
    num_descriptors: int
    num_threads: int
    num_memfds: int
    memfd_bytes: int
    journal_bytes: int = 0
    """Of all files in the folder of shared memory."""

    @classmethod
    def at(cls, step: int, pid: int | str, shared: Path | None = None) -> "Look":
        """Look at a process of this user."""
        root = Path(f"/proc/{pid}")
        rollup = dict(
            line.split()[:2] for line in (root / "smaps_rollup").read_text().splitlines()[1:]
        )
        threads = next(
            line.split()[1]
            for line in (root / "status").read_text().splitlines()
            if line.startswith("Threads:")
        )
        descriptors = list((root / "fd").iterdir())
        memfds = [path for path in descriptors if _target(path).startswith("/memfd:")]
        return cls(
            step=step,
            rss_bytes=int(rollup["Rss:"]) * 1024,
            own_bytes=(int(rollup["Pss_Anon:"]) + int(rollup["Pss_Shmem:"])) * 1024,
            num_descriptors=len(descriptors),
            num_threads=int(threads),
            num_memfds=len(memfds),
            memfd_bytes=sum(path.stat().st_size for path in memfds),
            journal_bytes=0 if shared is None else _bytes_in(shared),
        )


def _target(path: Path) -> str:
    try:
        return str(path.readlink())
    except FileNotFoundError:  # the descriptor of the listing itself
        return ""


def _bytes_in(folder: Path) -> int:
    num_bytes = 0
    for at, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):  # the agent removes what it has stored
                num_bytes += Path(at, name).stat().st_size
    return num_bytes


def growth(points: Sequence[tuple[float, float]]) -> float:
    """Return the slope after warm-up: the median over all pairs of the last three quarters.

    What goes up and down again, or up once, moves fewer than half of the pairs.
    """
    kept = points[len(points) // 4 :]
    return median(
        (later[1] - earlier[1]) / (later[0] - earlier[0])
        for i, earlier in enumerate(kept)
        for later in kept[i + 1 :]
        if later[0] > earlier[0]
    )


def not_flat(looks: Sequence[Look]) -> list[str]:
    """Return what grows with the steps, in words; empty where all is flat."""
    num_steps = looks[-1].step - looks[len(looks) // 4].step
    told = []
    for name in Look._fields[1:]:
        slope = growth([(look.step, getattr(look, name)) for look in looks])
        is_bytes = name.endswith("_bytes")
        resolution = (RESOLUTION_BYTES if is_bytes else RESOLUTION_COUNT) / num_steps
        bound = max(BYTES_PER_STEP, resolution) if is_bytes else resolution
        if slope >= bound:
            told.append(f"{name} grows by {slope:.4g} a step, {slope * num_steps:.4g} in all")
    return told


# --------------------------------------------------------------------------------- the training


def main() -> None:
    folder, rank, plan = Path(sys.argv[1]), int(sys.argv[2]), Plan(*json.loads(sys.argv[3]))
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    torch.set_num_threads(1)
    healed = train(plan, "heal")
    results = {"heal": healed, "off": train(plan, "off", left_out=healed["skipped"])}
    (folder / f"{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def train(
    plan: Plan, mode: Literal["off", "heal"], left_out: Collection[int] = ()
) -> dict[str, Any]:
    """Train to the end; return what the rank held, what was done, and digests of its state."""
    rank = dist.get_rank()
    torch.manual_seed(1)
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(NUM_SAMPLES, WIDTH, generator=generator)
    data = TensorDataset(x, x.square().sum(dim=1, keepdim=True) / WIDTH)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(WIDTH, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Linear(64, 1))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=plan.num_steps)
    ema = trainer_hooks.EMA(model)
    loader = DataLoader(data, BATCH, sampler=DistributedSampler(data))
    epochs = -(-plan.num_steps // BATCHES_PER_EPOCH)

    def loss_of(batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    looks: dict[str, list[Look]] = {}
    batch_of: dict[int, int] = {}
    skipped: set[int] = set()
    back = []
    unbroken = [] if mode == "off" else list(plan.broken_at)
    with trainer_hooks.watch(
        model, optimizer, scheduler, mode=mode, checkpoints=True, state={"ema": ema}
    ) as monitor:
        probe = {} if mode == "off" else {"probe": loss_of}
        for number, batch in enumerate(monitor.batches(loader, epochs=epochs, **probe)):
            place = monitor.batch_position
            if place is not None:
                number = place.epoch * BATCHES_PER_EPOCH + place.batch
            if number in left_out:  # as if there were no such batch, but for the schedule
                scheduler.step()
                continue
            if mode == "heal" and rank == 1 and plan.is_poisoned(number):
                batch = [batch[0] * float("nan"), batch[1]]
            loss = loss_of(batch)
            loss.backward()
            step = monitor.step_index
            skipped.discard(number)  # a rollback gives it again
            batch_of[step % 100] = number
            outcome = monitor.step(loss)
            if outcome.decision is not None and outcome.decision.action == "skip_step":
                skipped.add(batch_of[outcome.decision.step % 100])
            if outcome.rolled_back_to is not None:
                back.append((step, outcome.rolled_back_to))
            elif unbroken and step == unbroken[0]:
                del unbroken[0]
                if rank == 0:
                    with torch.no_grad():
                        next(model.parameters()).fill_(float("nan"))
            if mode != "off" and not step % (plan.num_steps // NUM_LOOKS):
                _look(looks, step, rank)
        errors = monitor.swallowed_errors
    return {
        "looks": looks,
        "skipped": sorted(skipped),
        "back": back,
        "errors": errors,
        "digests": _digests(model, optimizer, ema),
    }


def _look(looks: dict[str, list[Look]], step: int, rank: int) -> None:
    shared = Path(os.environ["VITALS_SHM"]) if rank == 0 else None
    looks.setdefault(f"rank {rank}", []).append(Look.at(step, "self", shared))
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError):  # a thread that ended since it was listed
            for child in (task / "children").read_text().split():
                looks.setdefault("agent", []).append(Look.at(step, child))


def _digests(model: nn.Module, optimizer: torch.optim.Optimizer, ema: nn.Module) -> dict[str, str]:
    """Return a word for each part of the state."""
    states = [sorted(optimizer.state[param].items()) for param in model.parameters()]
    parts = {
        "weights": model.parameters(),
        "buffers": model.buffers(),
        "moments": [tensor for state in states for _, tensor in state],
        "averages": ema.state_dict().values(),
    }
    return {name: _digest(tensors) for name, tensors in parts.items()}


def _digest(tensors: Iterable[Any]) -> str:
    hashed = hashlib.sha256()
    for tensor in tensors:
        hashed.update(torch.as_tensor(tensor).detach().contiguous().numpy().tobytes())
    return hashed.hexdigest()[:8]


if __name__ == "__main__":
    main()
