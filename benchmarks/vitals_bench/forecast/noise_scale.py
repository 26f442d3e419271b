"""Three small trainings: the noise scale estimated by the hooks, compared with the direct one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from trainer_hooks.measures.noise import NoiseScale
from vitals_bench.rows import Cell, Grid, Row, at_most

_LIMIT = 25.0
_NUM_RANKS = 4
_STEPS = 100
"""Of the estimate: as many as the hooks average over."""
_BATCHES = 1_000
"""Of the direct one: each is as large as a rank's."""


class _Task(NamedTuple):
    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]
    size: int
    """Of a rank's batch."""
    before: int
    """Steps that are trained before it is measured."""


def measure_noise_scale(*, quick: bool) -> Iterator[Row | Grid]:
    """Yield how far the hooks' noise scale is from that of many batches' gradients."""
    cells: list[tuple[Cell, ...]] = []
    worst = 0.0
    for task in _tasks()[: 1 if quick else None]:
        estimate, direct = _measure(task)
        off = estimate / direct - 1
        worst = max(worst, abs(off))
        cells.append((task.name, f"{estimate:.3g}", f"{direct:.3g}", f"{100 * off:+.1f}"))
    yield Row(
        name="the noise scale is off by at most",
        ours=100 * worst,
        unit="%",
        goal=at_most(_LIMIT),
        note=f"{len(cells)} small trainings",
    )
    yield Grid(
        title="The gradient noise scale, in examples",
        columns=("training", "by the ranks' norms", "direct", "off, %"),
        rows=tuple(cells),
        note=f"By the norms of {_NUM_RANKS} ranks' gradients and of their mean over {_STEPS} steps "
        "of training at a small rate, as the hooks take them; and the variance of "
        f"{_BATCHES:,} batches' gradients over the square of their mean, in the middle of these "
        "steps.",
    )


def _tasks() -> list[_Task]:
    torch.manual_seed(0)
    centers = torch.randn(10, 20)
    teacher = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
    table = torch.randn(32, 32).mul(1.5).softmax(-1)

    def classes(num: int) -> tuple[Tensor, Tensor]:
        label = torch.randint(10, (num,))
        return centers[label] + 2.0 * torch.randn(num, 20), label

    def numbers(num: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(num, 16)
        with torch.no_grad():
            return x, teacher(x) + 0.5 * torch.randn(num, 1)

    def words(num: int) -> tuple[Tensor, Tensor]:
        word = torch.randint(32, (num,))
        return word, torch.multinomial(table[word], 1).squeeze(1)

    cross_entropy = nn.functional.cross_entropy
    return [
        _Task(
            "classification",
            lambda: nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 10)),
            classes, cross_entropy, 16, 20,
        ),
        _Task(
            "regression",
            lambda: nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)),
            numbers, nn.functional.mse_loss, 8, 20,
        ),
        _Task(
            "language",
            lambda: nn.Sequential(nn.Embedding(32, 32), nn.Linear(32, 64), nn.GELU(),
                                  nn.Linear(64, 32)),
            words, cross_entropy, 32, 50,
        ),
    ]  # fmt: skip


def _measure(task: _Task) -> tuple[float, float]:
    """Return the noise scale in examples: the hooks', and the direct one."""
    torch.manual_seed(1)
    model = task.make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def gradient() -> Tensor:
        x, y = task.batch(task.size)
        grads = torch.autograd.grad(task.loss(model(x), y), list(model.parameters()))
        return torch.cat([grad.flatten() for grad in grads]).double()

    def apply(mean: Tensor) -> None:
        places = 0
        for p in model.parameters():
            p.grad = mean[places : places + p.numel()].view_as(p).float()
            places += p.numel()
        optimizer.step()

    def ranks() -> Tensor:
        return torch.stack([gradient() for _ in range(_NUM_RANKS)])

    for _ in range(task.before):
        apply(ranks().mean(0))
    optimizer.param_groups[0]["lr"] = 1e-3  # so that the scale is one while it is measured
    scale, direct = NoiseScale(_NUM_RANKS), 0.0
    for step in range(_STEPS):
        if step == _STEPS // 2:
            direct = _direct(torch.stack([gradient() for _ in range(_BATCHES)])) * task.size
        own = ranks()
        mean = own.mean(0)
        scale.add(
            small_square=float(own.square().sum(1).mean()), big_square=float(mean.square().sum())
        )
        apply(mean)
    ratio = scale.ratio()
    return (float("nan") if ratio is None else ratio * _NUM_RANKS * task.size), direct


def _direct(gradients: Tensor) -> float:
    """Return the trace of one batch's covariance over the square of the true gradient."""
    noise = float(gradients.var(0).sum())
    signal = float(gradients.mean(0).square().sum()) - noise / len(gradients)
    return noise / signal
