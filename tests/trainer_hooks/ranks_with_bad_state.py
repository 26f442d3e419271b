"""What each of two real ranks does in ``test_bad_snapshots``; results go to a file by rank."""

import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import trainer_hooks
from tests.support.inside import events_of, refs_of
from trainvitals.records import DecisionMade, Note


def main(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    checkpoints = trainer_hooks.CheckpointSettings(directory=Path(folder) / "kept")
    watch = trainer_hooks.watch(model, optimizer, mode="heal", checkpoints=checkpoints)
    events, back, is_broken = events_of(watch), [], False
    with watch as monitor:
        while monitor.step_index < 120:
            step = monitor.step_index
            if (step, rank, is_broken) == (52, 1, False):
                is_broken = True
                optimizer.state[model.module[0].weight]["exp_avg_sq"][2, 2] = float("inf")
            generator = torch.Generator().manual_seed(2 * step + rank)
            loss = model(torch.randn(16, 8, generator=generator)).square().mean()
            loss.backward()
            outcome = monitor.step(loss)
            back += [] if outcome.rolled_back_to is None else [outcome.rolled_back_to]
        refs = [[ref.step, ref.state] for ref in refs_of(monitor)]
        faults = monitor.swallowed_errors
    result = {
        "back": back,
        "refs": refs,
        "faults": faults,
        "notes": [e.text for e in events if isinstance(e, Note) and e.code == "nonfinite_state"],
        "ranks": [e.decision.rank for e in events if isinstance(e, DecisionMade)],
        "weights": [p.double().sum().item().hex() for p in model.parameters()],
    }
    (Path(folder) / f"{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()
