"""Saves and loads a small checkpoint, for ``vitals doctor``."""

from pathlib import Path

import torch
from torch import nn

from trainer_hooks.ranks import Ranks
from trainer_hooks.recovery.checkpoints.store import CheckpointStore
from trainer_hooks.recovery.manager import SnapshotRing
from trainer_hooks.recovery.state import TrainingState
from trainvitals.errors import CheckpointError


def try_checkpoint(directory: Path) -> None:
    """Save a small model to the directory, like a training, and load it.

    Raises:
        CheckpointError: it was not saved, or the loaded model differs.
    """
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    state = TrainingState(model, [optimizer], [])
    ring = SnapshotRing(state, num_slots=2, interval=1, healthy_after=0)
    store = CheckpointStore(state, directory, run_id="doctor", ranks=Ranks(0, 1, 0, None))
    store.prepare()
    ring.capture(1, 0, {}, trusted=True)
    ring.commit(1, True)
    snapshot = ring.newest_committed()
    assert snapshot is not None, "it was just taken"
    name = store.save(snapshot)
    if not store.wait():
        raise CheckpointError(f"{directory}: a save of some bytes took longer than a minute")
    if store.num_failed:
        reasons = [change.detail for change in store.take_changes() if change.state == "bad"]
        raise CheckpointError("; ".join(reasons) or "not saved")
    saved = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.zero_()
    store.load(name)
    if not torch.equal(saved, model.weight):
        raise CheckpointError("the loaded weights differ from those that were saved")
