"""A training that leaves a digest of each rank's whole state after every step.

Run under torchrun, or a function on spawned ranks. What goes wrong in it, and how often, is told in
``EXACT_FAULTS``; each fault happens once, also over relaunches.
"""

import hashlib
import json
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import trainer_hooks
from tests.support.inside import facts_of
from trainer_hooks.recovery.manager import RecoveryManager
from trainer_hooks.recovery.state import TrainingState

SAMPLES, BATCH = 480, 4


class Samples(Dataset):
    """Regression on noise; a poisoned sample is NaN."""

    def __init__(self, poisoned=()):
        generator = torch.Generator().manual_seed(5)
        self._x = torch.randn(SAMPLES, 16, generator=generator)
        self._x[list(poisoned)] = float("nan")

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return index, self._x[index], self._x[index].nan_to_num(0.0).sum()


def build(kind):
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Linear(16, 64), nn.Dropout(0.1), nn.GELU(), nn.Linear(64, 64), nn.BatchNorm1d(64),
        nn.GELU(), nn.Linear(64, 1),
    )  # fmt: skip
    if kind == "fsdp2":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in (model[0], model[3]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model = DistributedDataParallel(model, bucket_cap_mb=0.01)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.01 * step))
    return model, optimizer, scheduler


class Faults:
    """Each happens once in the folder, whatever is started again."""

    def __init__(self, folder, wanted, rank):
        self._folder, self._wanted, self._rank = folder, wanted, rank

    def now(self, name, step=None):
        wanted = self._wanted.get(name)
        if wanted is None or wanted["rank"] != self._rank:
            return False
        if step is not None and wanted["step"] != step:
            return False
        try:
            (self._folder / f"done-{name}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def kill(self, name, step=None):
        if self.now(name, step):
            os.kill(os.getpid(), signal.SIGKILL)


def killed_in_rollback(faults):
    """Put the crash before, amid and after the restore of a rollback."""
    roll_back, write = RecoveryManager.roll_back, TrainingState.load_host_state

    def wrapped(self, decision):
        faults.kill("kill_before_restore")
        restored = roll_back(self, decision)
        faults.kill("kill_after_restore")
        return restored

    def torn(self, host, *, rng=True):
        if self.rolled:
            faults.kill("kill_amid_restore")
        write(self, host, rng=rng)

    TrainingState.rolled = False
    RecoveryManager.roll_back, TrainingState.load_host_state = wrapped, torn


def digest(model, optimizer):
    """Return a word for each part of the rank's state: weights, buffers, moments, generators."""
    parts = [model.parameters(), model.buffers()]
    moments = [sorted(optimizer.state.get(p, {}).items()) for p in model.parameters()]
    parts += [[tensor for of_one in moments for _, tensor in of_one]]
    return "-".join(_hashed(part) for part in [*parts, [torch.get_rng_state()]])


def _hashed(tensors):
    found = hashlib.sha256()
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        found.update(local.detach().contiguous().numpy().tobytes())
    return found.hexdigest()[:8]


def train(kind, folder, *, steps, wanted=None, leave_out=(), margin=0, stop_at=None, run=None):
    """Train and write ``rank-N.json``: the digest after each step, and the samples it was fed."""
    folder.mkdir(parents=True, exist_ok=True)
    rank, wanted = dist.get_rank(), wanted or {}
    faults = Faults(folder, wanted, rank)
    killed_in_rollback(faults)
    if run is not None:
        os.environ["VITALS_RUN_ID"] = run
    os.environ |= {
        "VITALS_LADDER_MARGIN": "2",
        "VITALS_LADDER_LEAVE_OUT_MARGIN": str(margin),
        "VITALS_LADDER_NONFINITE_IN_A_ROW": "3",
    }
    model, optimizer, scheduler = build(kind)
    data = Samples(wanted.get("poisoned", ()))
    loader = DataLoader(data, BATCH, sampler=DistributedSampler(data, shuffle=True))
    settings = trainer_hooks.CheckpointSettings(
        directory=folder / "checkpoints", healthy_after=3, snapshot_every=4, save_every=4
    )
    path = folder / f"rank-{rank}.json"
    told = json.loads(path.read_text()) if path.exists() else {"digests": {}, "fed": {}, "back": []}
    with trainer_hooks.watch(
        model, optimizer, scheduler, mode="heal", checkpoints=settings, dir=folder / "runs"
    ) as monitor:
        told["run"] = monitor.run_id
        told.setdefault("starts", []).append(monitor.step_index)
        for ids, x, y in monitor.batches(loader, epochs=9, after_rollback="replay"):
            step, place = monitor.step_index, monitor.batch_position
            if (place.epoch, place.batch) in {tuple(p) for p in leave_out}:
                continue
            faults.kill("kill", step)
            loss = (model(x).squeeze(1) - y).square().mean()
            loss.backward()
            outcome = monitor.step(loss, max_norm=1.0)
            TrainingState.rolled = True
            if outcome.next_step == step + 1:
                told["digests"][str(step)] = digest(model, optimizer)
                told["fed"][str(step)] = ids.tolist()
            if outcome.rolled_back_to is not None:
                told["back"].append([step, outcome.rolled_back_to])
            if faults.now("corrupt", step):
                with torch.no_grad():
                    first = next(model.parameters())
                    (first.to_local() if hasattr(first, "to_local") else first).fill_(float("nan"))
            path.write_text(json.dumps(told))
            if monitor.step_index >= (stop_at or steps):
                break
        told["spent"] = [
            facts_of(monitor).num_rollbacks,
            len(facts_of(monitor).causes),
        ]
        told["faults"] = monitor.swallowed_errors
    path.write_text(json.dumps(told))
    return told


def calm_and_corrupted(rank, folder, *, kind, steps):
    """Train undisturbed, then with broken parameters on rank 1: both in one launch, no relaunch."""
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "4"}
    torch.set_num_threads(1)
    meet = f"file://{folder}/meet"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=4)
    calm = train(kind, Path(folder, "calm"), steps=steps)
    wanted = {"corrupt": {"rank": 1, "step": 13}}
    told = train(kind, Path(folder, "run"), steps=steps, wanted=wanted)
    Path(folder, f"{rank}.json").write_text(json.dumps([calm, told]))
    dist.destroy_process_group()


def main():
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    arguments = json.loads(os.environ["EXACT"])
    train(arguments.pop("kind"), Path(arguments.pop("folder")), **arguments)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
