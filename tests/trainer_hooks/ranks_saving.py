"""What each rank does in ``test_checkpoints``: two ranks save to one folder."""

import json
from pathlib import Path

import torch
import torch.distributed as dist

from tests.trainer_hooks.saving import load_newest
from trainer_hooks.ranks import Ranks
from trainer_hooks.recovery.checkpoints.store import CheckpointStore
from trainer_hooks.recovery.manager import SnapshotRing
from trainer_hooks.recovery.state import TrainingState


def main(rank, folder):
    """Train two ranks with DDP, save, spoil, load: each gets its own part back."""
    folder = Path(folder)
    torch.set_num_threads(1)
    meet = f"file://{folder}/meet"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=2)
    ranks = Ranks(rank, 2, rank, dist.new_group(backend="gloo"))

    checkpoints = folder / "checkpoints"

    def make():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        ddp = torch.nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.1)
        state = TrainingState(ddp, [optimizer])
        return ddp, optimizer, state, CheckpointStore(state, checkpoints, run_id="run", ranks=ranks)

    def train(ddp, optimizer, steps):
        for _ in range(steps):
            optimizer.zero_grad()
            ddp(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
        return {k: t.clone() for k, t in state.tensors().items()}

    ddp, optimizer, state, store = make()
    if rank == 0:
        store.prepare()
    dist.barrier()
    torch.manual_seed(100 + rank)
    train(ddp, optimizer, 2)
    ring = SnapshotRing(state, num_slots=2, interval=2, healthy_after=0)
    ring.capture(2, 7, {"rank": rank}, trusted=True)
    ring.commit(2, True)
    store.save(ring.newest_healthy())
    expected = train(ddp, optimizer, 2)
    assert store.wait()
    assert 0 == store.num_failed, store.take_changes()
    dist.barrier()

    ddp, optimizer, state, store = make()
    restored = load_newest(store)
    assert ("step-00000002-7", {"rank": rank}, True) == (restored.id, restored.meta, restored.exact)
    found = train(ddp, optimizer, 2)
    assert all(torch.equal(expected[key], found[key]) for key in expected | found)

    failing = ring.newest_healthy()
    failing.step = 3
    if rank == 1:
        failing.host["extra"]["odd"] = {"path": checkpoints}  # only this rank cannot write its part
    store.save(failing)
    assert store.wait(60)
    assert 1 == store.num_failed
    if rank == 1:
        assert "'odd'" in store.take_changes()[-1].detail
    dist.barrier()
    (folder / f"{rank}.json").write_text(json.dumps({"folder": str(checkpoints)}))
    dist.destroy_process_group()
