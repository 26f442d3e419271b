"""Records of 20 values as ranks write them: made once, sent in each server's own words."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trainvitals.catalog import ROW_COLUMNS
from trainvitals.identity import Identity
from trainvitals.metrics import STEP_METRICS
from trainvitals.rows import Column, Schema
from trainvitals.wire import PREFIX, BatchHeader, encode_batch, frame_batch

RANKS_PER_NODE = 8
NAMES = tuple(m.column for m in STEP_METRICS if m.dtype == "f8")[:20]
"""The twenty numbers of a record, as the catalog calls them."""
SCHEMA = Schema("steps", (*ROW_COLUMNS, *(Column(name, "f8") for name in NAMES)))
ATTEMPT = 1
_LIKELY = {
    "loss": 2.5,
    "loss_max": 2.6,
    "rank_loss": 2.5,
    "loss_limit": 9.0,
    "grad_norm": 0.8,
    "grad_norm_clipped": 0.8,
    "grad_norm_limit": 4.0,
    "learning_rate": 3e-4,
    "tokens_per_second": 4e5,
    "perplexity": 12.0,
    "mfu_ratio": 0.4,
    "memory_allocated_bytes": 6e10,
    "memory_peak_bytes": 7e10,
    "loss_scale": 65536.0,
    "lr_factor": 1.0,
    "data_wait_seconds": 0.01,
    "monitor_seconds": 0.005,
    "loss_spread": 0.1,
    "overflow_ratio": 0.001,
}
_STEADY = ("loss_scale", "lr_factor", "learning_rate", "memory_peak_bytes", "loss_limit")
"""Numbers that stay as they are from step to step, unless all are to vary."""


class Block(NamedTuple):
    """Consecutive steps of some ranks."""

    first_step: int
    time_unix_ns: npt.NDArray[np.int64]
    """Of each step."""
    values: npt.NDArray[np.float64]
    """By rank, step and name."""

    @property
    def num_steps(self) -> int:
        """Steps of each rank."""
        return len(self.time_unix_ns)

    def parts(self, num_steps: int) -> Iterator[Block]:
        """Yield the same in blocks of ``num_steps`` steps."""
        for start in range(0, self.num_steps, num_steps):
            piece = slice(start, start + num_steps)
            yield Block(self.first_step + start, self.time_unix_ns[piece], self.values[:, piece])


class Numbers:
    """Draws the values of a healthy training, as float32 rounds them unless told otherwise."""

    def __init__(
        self, num_ranks: int, *, seed: int = 0, is_float32: bool = True, has_steady: bool = True
    ) -> None:
        steady = _STEADY if has_steady else ()
        self._rng = np.random.default_rng(seed)
        self._num_ranks = num_ranks
        self._is_float32 = is_float32
        self._middle = np.array([_LIKELY.get(name, 0.5) for name in NAMES])
        self._width = np.array([0.0 if name in steady else 0.01 for name in NAMES])

    def block(self, first_step: int, num_steps: int, *, begin_ns: int, step_ns: int) -> Block:
        """Return the next steps of all ranks; step 0 is at ``begin_ns``."""
        noise = self._rng.standard_normal((self._num_ranks, num_steps, len(NAMES)))
        values = self._middle * (1.0 + self._width * noise)
        if self._is_float32:
            values = values.astype(np.float32).astype(np.float64)
        steps = np.arange(first_step, first_step + num_steps, dtype=np.int64)
        return Block(first_step, begin_ns + steps * step_ns, values)


class Writers:
    """Encodes the batches of some ranks of one run; what never changes is encoded once."""

    def __init__(self, run_id: str, ranks: Sequence[int], *, world_size: int) -> None:
        self.run_id = run_id
        self.num_ranks = len(ranks)
        self._identities = [identity_of(run_id, rank, world_size=world_size) for rank in ranks]
        self._heads = [_head(identity) for identity in self._identities]

    def batches(self, block: Block) -> list[bytes]:
        """Return one batch for each rank."""
        rows = rows_bytes(block)
        return [
            frame_batch(self._header(i, block), head, rows[i]) for i, head in enumerate(self._heads)
        ]

    def _header(self, i: int, block: Block) -> BatchHeader:
        return BatchHeader(
            identity=self._identities[i],
            stream_schema=SCHEMA,
            first_seq=block.first_step,
            num_rows=block.num_steps,
        )


def identity_of(run_id: str, rank: int, *, world_size: int, node: str = "") -> Identity:
    """Return who rank ``rank`` of a simulated run is."""
    return Identity(
        run_id=run_id,
        incarnation=f"{rank:016x}",
        source=f"rank:{rank}",
        node=node or f"node-{rank // RANKS_PER_NODE}",
        pid=1,
        rank=rank,
        local_rank=rank % RANKS_PER_NODE,
        world_size=world_size,
    )


def rows_bytes(block: Block) -> list[bytes]:
    """Return each rank's rows as a journal holds them, checksums and all."""
    num_ranks, num_steps, _ = block.values.shape
    rows = np.zeros((num_ranks, num_steps), SCHEMA.dtype)
    steps = np.arange(block.first_step, block.first_step + num_steps)
    rows["seq"] = steps
    rows["validity"] = (1 << len(SCHEMA.columns)) - 1
    for i, column in enumerate((steps, ATTEMPT, block.time_unix_ns, block.time_unix_ns)):
        rows[f"c{i}"] = column
    for i in range(len(NAMES)):
        rows[f"c{len(ROW_COLUMNS) + i}"] = block.values[:, :, i]
    size = SCHEMA.row_size
    raw = memoryview(rows.tobytes())
    sums = [zlib.crc32(raw[at + 4 : at + size]) for at in range(0, len(raw), size)]
    rows["crc"] = np.array(sums, dtype=np.uint32).reshape(rows.shape)
    return [rows[i].tobytes() for i in range(num_ranks)]


def by_node(bodies: Sequence[bytes]) -> list[bytes]:
    """Return the ranks' batches joined, those of a node together."""
    return [b"".join(bodies[i : i + RANKS_PER_NODE]) for i in range(0, len(bodies), RANKS_PER_NODE)]


def _head(identity: Identity) -> bytes:
    header = BatchHeader(identity=identity, stream_schema=SCHEMA, first_seq=0, num_rows=1)
    raw = encode_batch(header, bytes(SCHEMA.row_size))
    return raw[PREFIX.size : -SCHEMA.row_size]
