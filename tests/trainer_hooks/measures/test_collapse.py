"""ReLUs that die in a real training are told; those of healthy trainings are not."""

import torch
from torch import nn

from trainer_hooks.failopen import FaultCounter
from trainer_hooks.measures.activations import Activations, choose
from trainvitals.detect.fleet.base import MergedStep
from trainvitals.detect.fleet.layers import ActivationConfig, ActivationWatcher
from trainvitals.records import Finding

STEPS, EVERY, BURST = 500, 10, 350


def train(*, burst_lr: float) -> list[Finding]:
    """Train a classifier, of which 20 steps have another learning rate; return what was told."""
    torch.manual_seed(0)
    centers = torch.randn(10, 20)
    model = nn.Sequential(
        nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    )
    activations = Activations(choose(model, ("*",)), torch.device("cpu"), FaultCounter())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    watcher = ActivationWatcher(ActivationConfig(warm_up=20))
    findings: list[Finding] = []
    for step in range(STEPS):
        in_burst = BURST <= step < BURST + 20
        optimizer.param_groups[0]["lr"] = burst_lr if in_burst else 1e-3
        label = torch.randint(10, (64,))
        activations.begin(sampled=step % EVERY == 0)
        scores = model(centers[label] + 1.5 * torch.randn(64, 20))
        optimizer.zero_grad()
        nn.functional.cross_entropy(scores, label).backward()
        optimizer.step()
        if step % EVERY == 0:
            layers = {
                name: {
                    "activation_rms": activation.rms,
                    "activation_max": activation.max_abs,
                    "activation_dead_ratio": activation.dead_ratio,
                }
                for name, activation in activations.read(activations.numbers().tolist()).items()
            }
            merged = MergedStep(step=step, attempt=1, time_unix_ns=step, layers=layers)
            findings += watcher.update(merged)
    activations.release()
    return findings


def test_a_healthy_training_with_relus_is_silent() -> None:
    assert [] == train(burst_lr=1e-3)


def test_relus_that_die_are_told_where_they_die() -> None:
    (collapse,) = (f for f in train(burst_lr=1.0) if f.kind == "activation_collapse")
    assert BURST < collapse.step <= BURST + 10 * EVERY
    assert "are dead (0 for the whole batch)" in collapse.reason
