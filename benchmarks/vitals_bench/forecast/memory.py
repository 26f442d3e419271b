"""Small transformers trained on the CPU: allocated memory, compared with the plan."""

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from vitals_bench.rows import Cell, Grid, Row, at_most
from vitals_plugins.lab.plan.training_plan import (
    GpuMemoryNeed,
    Shape,
    Strategy,
    TrainingType,
    peak_gpu_memory,
)

_LIMIT = 0.10
_NUM_RANKS = 4


class _Case(NamedTuple):
    strategy: Strategy
    num_gpus: int
    training_type: TrainingType
    checkpointing: bool
    shape: Shape = Shape(6, 256, 512)
    sequence_length: int = 128
    micro_batch: int = 4

    @property
    def name(self) -> str:
        where = f"{self.strategy} of {self.num_gpus}" if self.num_gpus > 1 else "one process"
        saved = ", checkpointed" if self.checkpointing else ""
        return f"{where}, {self.training_type}{saved}"


_CASES = (
    _Case("DDP", 1, "fp32", checkpointing=False),
    _Case("DDP", 1, "bf16", checkpointing=False),
    _Case("DDP", 1, "fp32", checkpointing=True),
    _Case("DDP", 1, "fp32", checkpointing=False, shape=Shape(3, 384, 2048), micro_batch=2),
    _Case("DDP", _NUM_RANKS, "fp32", checkpointing=False),
    _Case("ZeRO-1", _NUM_RANKS, "fp32", checkpointing=False),
    _Case("FSDP", _NUM_RANKS, "fp32", checkpointing=False),
    _Case("FSDP", _NUM_RANKS, "bf16", checkpointing=True),
)


def measure_plan(*, quick: bool) -> Iterator[Row | Grid]:
    """Yield how far the planned memory is from what a rank of a small training allocates."""
    cells: list[tuple[Cell, ...]] = []
    worst = 0.0
    for case in _CASES[: 2 if quick else None]:
        planned, allocated = _held(case)
        off = planned.total / allocated - 1
        worst = max(worst, abs(off))
        cells.append(
            (case.name, f"{planned.total / 2**20:.1f}", f"{allocated / 2**20:.1f}",
             f"{100 * off:+.1f}")
        )  # fmt: skip
    yield Row(
        name="planned memory is off by at most",
        ours=100 * worst,
        unit="%",
        goal=at_most(100 * _LIMIT),
        note=f"{len(cells)} small trainings on the CPU",
    )
    yield Grid(
        title="Memory of a rank: planned, and allocated at most",
        columns=("training", "planned, MiB", "allocated, MiB", "off, %"),
        rows=tuple(cells),
        note="Transformers of 5 to 6 million parameters with AdamW, whose tensors are counted as "
        "they are made and freed, in a step whose gradients are added to those of the one before. "
        "Of more than one rank, rank 0 is real and the others are not there (torch's fake process "
        "group): what is allocated is the same. ZeRO-2 is DeepSpeed's, and was not run.",
    )


class _Block(nn.Module):
    """GPT-2's, without dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = (
            part.view(batch, length, -1, 64).transpose(1, 2)
            for part in self.qkv(self.before(x)).split(width, dim=2)
        )
        seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        added: Tensor = self.narrow(nn.functional.gelu(self.wide(self.between(x))))
        return x + added


class _Model(nn.Module):
    def __init__(self, shape: Shape, length: int, *, checkpointing: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(shape.vocab, shape.width)
        self.places = nn.Embedding(length, shape.width)
        self.blocks = nn.ModuleList(_Block(shape.width) for _ in range(shape.layers))
        self.last = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocab, bias=False)
        self._checkpointing = checkpointing

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) + self.places(torch.arange(words.shape[1]))
        for block in self.blocks:
            run = partial(checkpoint, block, use_reentrant=False) if self._checkpointing else block
            x = run(x)
        scores: Tensor = self.head(self.last(x))
        return scores


def _held(case: _Case) -> tuple[GpuMemoryNeed, float]:
    """Return what is planned for a rank of it, and the most bytes of tensors it had at once."""
    torch.manual_seed(0)
    with _ranks(case.num_gpus):
        model = _Model(case.shape, case.sequence_length, checkpointing=case.checkpointing)
        if case.training_type == "bf16":
            model = model.bfloat16()
        num_params = sum(p.numel() for p in model.parameters())
        trained: Any = model
        if case.num_gpus > 1 and case.strategy == "FSDP":
            for block in model.blocks:
                fully_shard(block)
            fully_shard(model)
        elif case.num_gpus > 1:
            trained = DistributedDataParallel(model)
            trained.register_comm_hook(None, _as_if_averaged)
        optimizer: Any
        if case.strategy == "ZeRO-1":
            optimizer = ZeroRedundancyOptimizer(trained.parameters(), torch.optim.AdamW, lr=1e-4)
        else:
            optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-4, foreach=False)
        words = torch.randint(case.shape.vocab, (case.micro_batch, case.sequence_length))
        _step(trained, words)
        optimizer.step()  # so that its states are there
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        with tracker:
            _step(trained, words)
        (peak,) = tracker.get_tracker_snapshot("peak").values()
    planned = peak_gpu_memory(
        case.strategy,
        num_params=num_params,
        shape=case.shape,
        num_gpus=case.num_gpus,
        num_tokens=words.numel(),
        training_type=case.training_type,
        checkpointing=case.checkpointing,
    )
    return planned, float(sum(size for kind, size in peak.items() if str(kind) != "Total"))


def _step(model: nn.Module, words: Tensor) -> None:
    """Add the gradients of one micro-batch."""
    scores = model(words).flatten(0, 1)
    nn.functional.cross_entropy(scores, words.flatten()).backward()


def _as_if_averaged(_: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Return the bucket as it is: nobody is there to average it with."""
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


@contextlib.contextmanager
def _ranks(num: int) -> Iterator[None]:
    """Make this process rank 0 of ``num`` ranks that do not exist."""
    if num < 2:
        yield
        return
    dist.init_process_group("fake", rank=0, world_size=num, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
