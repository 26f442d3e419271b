"""What each rank does in ``test_features``: a training with a feature that is not one of ours."""

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import trainer_hooks
from tests.support.inside import feature_of
from trainer_hooks.exchange.reduce_vector import Slots
from trainer_hooks.features import FEATURES
from trainer_hooks.step.feature import StepFeature

STEPS = 12


class Samples(StepFeature):
    """Counts the samples of all ranks, by a number on the host and one on the device."""

    slots = Slots(rank0=("samples_wanted",), rank=("samples", "longest"), exact=("longest",))
    state_key = "samples"

    def __init__(self, run):
        super().__init__(run)
        self.rank = run.ranks.rank
        self.steps, self.total, self.restored = [], 0.0, None

    def rank0_values(self, step):
        return {"samples_wanted": 100.0 + step.step}

    def contribute_always(self, step):
        return {"samples": 8.0 * (self.rank + 1)}

    def contribute(self, step):
        return {"longest": torch.tensor(float(step.step + self.rank))}

    def on_reduced(self, step):
        self.total += step.reduced.total("samples")
        wanted = step.reduced.root["samples_wanted"]
        self.steps.append([step.step, wanted, self.total, step.reduced.by_rank("longest")])
        step.columns = {"mfu": self.total}  # of the catalog, and nothing else writes it here

    def on_row_written(self, step):
        self.steps[-1].append(step.columns["mfu"])

    def state_dict(self):
        return {"total": self.total}

    def load_state_dict(self, state, *, step):
        self.restored, self.total = [step, state], 0.0 if state is None else state["total"]


def main(rank, folder):
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    FEATURES.append(Samples)  # the one line of registration
    os.environ["VITALS_RUN_ID"] = "01JABCDEFGHJKMNPQRSTVWXYZ0"  # the second start resumes
    left = {}
    for start in ("first", "second"):
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Linear(4, 1))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        checkpoints = trainer_hooks.CheckpointSettings(
            directory=Path(folder) / "checkpoints", healthy_after=2, snapshot_every=2, save_every=2
        )
        with trainer_hooks.watch(model, optimizer, mode="heal", checkpoints=checkpoints) as monitor:
            feature = feature_of(monitor, Samples)
            left[f"{start} restored"] = feature.restored
            while monitor.step_index < STEPS + 2 * (start == "second"):
                model(torch.randn(8, 4)).square().mean().backward()
                monitor.step()
            left[f"{start} faults"] = monitor.swallowed_errors
        left[start] = feature.steps
    (Path(folder) / f"{rank}.json").write_text(json.dumps(left))
    dist.destroy_process_group()
