"""ReLUs that die in a real training are told; those of healthy trainings are not."""

import pytest
import torch
from torch import nn

from trainer_hooks.failopen import FaultCounter
from trainer_hooks.measures.activations import Activations, choose_modules
from trainer_hooks.ranks import Ranks
from trainvitals.detect.fleet.base import MergedStep
from trainvitals.detect.fleet.layers import ActivationConfig, ActivationWatcher
from trainvitals.records import Finding

STEPS, EVERY, BURST = 500, 10, 350


def train(*, burst_lr: float) -> list[Finding]:
    """Train a classifier, of which 20 steps have another learning rate; return what was told."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    )
    return judged(model, steps=STEPS, every=EVERY, burst_lr=burst_lr)


def judged(
    model: nn.Module, *, steps: int, every: int, batch: int = 64, burst_lr: float = 1e-3
) -> list[Finding]:
    """Train the model to classify; return what was told of its activations."""
    centers = torch.randn(10, 20)
    modules = choose_modules(model.named_modules(), ("*",), Ranks(0, 1, 0, None))
    activations = Activations(modules, torch.device("cpu"), FaultCounter())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    watcher = ActivationWatcher(ActivationConfig(warm_up=20))
    findings: list[Finding] = []
    for step in range(steps):
        in_burst = BURST <= step < BURST + 20
        optimizer.param_groups[0]["lr"] = burst_lr if in_burst else 1e-3
        label = torch.randint(10, (batch,))
        activations.reset(sampled=step % every == 0)
        scores = model(centers[label] + 1.5 * torch.randn(batch, 20))
        optimizer.zero_grad()
        nn.functional.cross_entropy(scores, label).backward()
        optimizer.step()
        if step % every == 0:
            layers = {
                name: {
                    "activation_rms": activation.rms,
                    "activation_max": activation.max_abs,
                    "activation_dead_ratio": activation.dead_ratio,
                }
                for name, activation in activations.unpack(activations.numbers().tolist()).items()
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


class Experts(nn.Module):
    """Eight experts, one for each token; the output of the others is masked out."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(20, 8)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(20, 20), nn.ReLU()) for _ in range(8))
        self.gates = nn.ModuleList(nn.Identity() for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        share = self.router(x).softmax(-1)
        weights = share * nn.functional.one_hot(share.argmax(-1), 8)
        pairs = zip(self.experts, self.gates, weights.unbind(-1), strict=True)
        return x + sum(gate(expert(x) * w.unsqueeze(-1)) for expert, gate, w in pairs)


class Dropped(nn.Module):
    """A block that one step in five leaves out: stochastic depth."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(20, 20), nn.ReLU())
        self.drop = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.inner(x) * float(torch.rand(()) > 0.2))


@pytest.mark.parametrize("kind", [Experts, Dropped])
def test_modules_that_are_switched_off_for_a_batch_are_no_collapse(kind: type[nn.Module]) -> None:
    """Three sampled batches in a row without it are nothing, as it has come back before."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(20, 20), *(kind() for _ in range(2)), nn.Linear(20, 10))
    assert [] == judged(model, steps=300, every=4, batch=8)
