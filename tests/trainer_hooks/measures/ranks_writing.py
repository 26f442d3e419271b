"""What each of two ranks does while its weights are written to; results go to a file by rank."""

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import trainer_hooks
from tests.trainer_hooks.measures.journal import Journal
from trainvitals.records import FindingRaised, StateRead

WRITTEN, STEPS = 90, 150


def train(rank):
    """Train with a probe; something scales a layer, alike on both ranks."""
    torch.manual_seed(0)
    layers = [part for _ in range(5) for part in (nn.Linear(8, 8), nn.Tanh())]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.randn(STEPS, 16, 8, generator=torch.Generator().manual_seed(rank))
    probed = []

    def loss_of(batch):
        return (model(batch) - 0.5 * batch).square().mean()

    def probe(batch):
        probed.append(monitor.step_index)
        return loss_of(batch)

    with trainer_hooks.watch(model, optimizer) as monitor:
        for step, batch in enumerate(monitor.batches(data, probe=probe)):
            if step == WRITTEN:
                with torch.no_grad():
                    layers[4].weight.mul_(30.0)
            loss = loss_of(batch)
            loss.backward()
            monitor.step(loss, max_norm=1.0)
        faults = monitor.swallowed_errors
    events = Journal(Path(os.environ["VITALS_SHM"]), rank).events
    findings = [e.finding for e in events if isinstance(e, FindingRaised)]
    return {
        "probed": probed,
        "faults": faults,
        "weights": [p.double().sum().item().hex() for p in model.parameters()],
        "written": [[f.layer, f.onset_step] for f in findings if f.detector == "weights"],
        "read": [[e.trigger, e.onset_step] for e in events if isinstance(e, StateRead)],
    }


def main(rank, folder):
    """Run the training; each rank writes what it found."""
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(train(rank)))
    dist.barrier()
    dist.destroy_process_group()
