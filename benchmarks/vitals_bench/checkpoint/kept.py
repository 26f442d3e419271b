"""A training with moments, its snapshots, and what a peer is given of it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer_hooks.ranks import Ranks
from trainer_hooks.recovery.checkpoints.store import CheckpointStore
from trainer_hooks.recovery.manager import SnapshotRing
from trainer_hooks.recovery.state import TrainingState
from vitals_bench.training import gpt, tokens

RUN_ID = "01JCHECKPOINTBENCH00000000"


class Kept:
    """A GPT and its AdamW after one step, with a ring of two warm slots."""

    def __init__(self, millions: int, *, batch: int = 1, wrap: Any = None) -> None:
        self.bare = gpt(millions)
        self.model: nn.Module = self.bare if wrap is None else wrap(self.bare)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self._batch = tokens(batch)
        self.step()
        self.state = TrainingState(self.model, [self.optimizer])
        self.ring = SnapshotRing(self.state, num_slots=2, interval=1, healthy_after=1)
        self._next = 0
        for _ in range(2):
            self.take()
            self.commit()

    def step(self) -> None:
        """Train one step."""
        self.optimizer.zero_grad()
        loss: Tensor = self.model(self._batch)
        loss.backward()
        self.optimizer.step()

    def take(self) -> None:
        """Take the next snapshot."""
        self._next += 1
        wrong = self.ring.capture(self._next, 1)
        assert not wrong.item(), "the state that is measured is sound"

    def commit(self) -> None:
        """Let the last snapshot be verified, as all ranks' flags would."""
        self.ring.commit(self._next, ok=True)
        self.ring.take_changes()

    def restore(self) -> None:
        """Go back to the newest committed snapshot."""
        newest = self.ring.newest_committed()
        assert newest is not None
        self.ring.restore(newest.id)

    def store(self, folder: Path, ranks: Ranks) -> CheckpointStore:
        """Return a store for its snapshots in a folder."""
        store = CheckpointStore(self.state, folder, run_id=RUN_ID, ranks=ranks)
        if ranks.rank == 0:
            store.prepare()
        return store

    def spoil(self) -> None:
        """Make every parameter NaN."""
        with torch.no_grad():
            for param in self.model.parameters():
                param.fill_(float("nan"))

    def for_peers(self) -> dict[str, Any]:
        """Return what a loop hands to ``torch.save`` and its like."""
        return {"model": self.bare.state_dict(), "optimizer": self.optimizer.state_dict()}

    def size(self) -> str:
        """Return the size of model and moments as text."""
        return f"{sum(t.nbytes for t in self.state.tensors().values()) / 1e6:.0f} MB of state"


def expect_no_dist_warning() -> None:
    """Keep ``dcp`` from saying in each save that there is one process; it says so in a thread."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or")
