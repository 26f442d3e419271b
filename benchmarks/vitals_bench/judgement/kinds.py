"""Healthy trainings of many kinds, each small: the ones that people train and that look unusual.

``worlds.py`` registers them. A task draws everything random from the number of the batch, so that a
skip or a rollback changes nothing else. Networks that are no parameters of the optimizer (targets,
teachers) are part of the model, so that a rollback restores them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from vitals_bench.judgement.patterns import CLASSES, PatternsTask
from vitals_bench.judgement.regression import RegressionTask
from vitals_bench.judgement.tasks import FIRST_EVALUATION, Batch, LossKind, Poison, Task, mlp
from vitals_bench.judgement.text import SYMBOLS, Gpt

EXAMPLES = 32


@dataclass(frozen=True, kw_only=True)
class KindTask(Task):
    """A task whose batch is inputs first and targets last."""

    steps: int = 500

    def poison(self, batch: Batch, kind: Poison, index: int) -> Batch:
        """Return the batch with shuffled targets, constant, far too large or NaN inputs."""
        first, *middle, last = batch
        if kind == "shuffle" or not first.is_floating_point():
            order = torch.randperm(last.numel(), generator=self.generator(index, 9))
            return first, *middle, last.flatten()[order].view_as(last)
        changed = {"nan": first * math.nan, "x50": first * 50, "const": torch.full_like(first, 5.0)}
        return changed[kind], *middle, last


# ----------------------------------------------------------------------- generative models


def _ring(generator: torch.Generator, count: int = EXAMPLES) -> Tensor:
    """Return points around eight places on a ring."""
    angle = torch.randint(0, 8, (count,), generator=generator) * math.pi / 4
    noise = 0.05 * torch.randn(count, 2, generator=generator)
    return torch.stack([angle.cos(), angle.sin()], 1) * 2 + noise


@dataclass(frozen=True, kw_only=True)
class DiffusionTask(KindTask):
    """Predicts the noise that was added to points: the loss depends on the drawn time."""

    def model(self) -> nn.Module:
        """Return the untrained denoiser."""
        return mlp(4, 64, 2)

    def batch(self, index: int) -> Batch:
        """Return noisy points with their time, and the noise."""
        generator = self.generator(index)
        time = torch.rand(EXAMPLES, 1, generator=generator)
        noise = torch.randn(EXAMPLES, 2, generator=generator)
        kept = (0.5 * math.pi * time).cos()
        noisy = kept * _ring(generator) + (1 - kept.square()).clamp(min=0.0).sqrt() * noise
        return torch.cat([noisy, kept, time], 1), noise

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the squared error of each point."""
        return cast(Tensor, (model(batch[0]) - batch[1]).square().mean(1))


@dataclass(frozen=True, kw_only=True)
class VaeTask(KindTask):
    """A variational autoencoder whose KL term grows over the first half."""

    def model(self) -> nn.Module:
        """Return encoder and decoder."""
        return nn.ModuleList([mlp(16, 64, 8), mlp(4, 64, 16)])

    def batch(self, index: int) -> Batch:
        """Return binary rows, the latent noise, the weight of the KL term, and the rows again."""
        generator = self.generator(index)
        parts = torch.rand(EXAMPLES, 4, generator=generator) < 0.5
        rows = parts.float().repeat_interleave(4, 1)
        flips = (torch.rand(EXAMPLES, 16, generator=generator) < 0.05).float()
        noise = torch.randn(EXAMPLES, 4, generator=generator)
        weight = min(1.0, index / (self.steps // 2))
        rows = (rows - flips).abs()
        return rows, noise, torch.full((EXAMPLES,), weight), rows

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the negative evidence bound of each row."""
        encoder, decoder = cast("nn.ModuleList", model)
        mean, log_variance = encoder(batch[0]).chunk(2, 1)
        latent = mean + (0.5 * log_variance).exp() * batch[1]
        logits = decoder(latent)
        rebuilt = functional.binary_cross_entropy_with_logits(
            logits, batch[3].clamp(0.0, 1.0), reduction="none"
        ).sum(1)
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1)
        return cast(Tensor, rebuilt + batch[2] * divergence)


class _Coupling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(mlp(1, 32, 2) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first, second = x[:, :1], x[:, 1:]
        total = torch.zeros(len(x))
        for net in self.nets:
            log_scale, shift = net(first).chunk(2, 1)
            log_scale = 2 * torch.tanh(log_scale)
            second = second * log_scale.exp() + shift
            total = total + log_scale.squeeze(1)
            first, second = second, first
        return torch.cat([first, second], 1), total


@dataclass(frozen=True, kw_only=True)
class FlowTask(KindTask):
    """A normalizing flow on a thin curve: the loss falls below 0."""

    lr: float = 3e-3

    def model(self) -> nn.Module:
        """Return the untrained flow."""
        return _Coupling()

    def batch(self, index: int) -> Batch:
        """Return points of the curve, twice: there is no target."""
        generator = self.generator(index)
        x = torch.randn(EXAMPLES, 1, generator=generator)
        noise = 0.02 * torch.randn(EXAMPLES, 1, generator=generator)
        points = torch.cat([x, x.square() / 2 + noise], 1)
        return points, points

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the negative log likelihood of each point."""
        latent, log_volume = model(batch[0])
        return cast(Tensor, 0.5 * latent.square().sum(1) + math.log(2 * math.pi) - log_volume)

    def evaluate(self, model: nn.Module) -> float:
        """Return e to the power of the mean loss, which has a ratio below 0 too."""
        return math.exp(min(super().evaluate(model), 50.0))


@dataclass(frozen=True, kw_only=True)
class WganTask(KindTask):
    """A Wasserstein GAN with a gradient penalty: its loss has no direction."""

    lr: float = 2e-3
    loss_kind: LossKind = "adversarial"

    def optimizer(self, parameters: list[nn.Parameter]) -> Optimizer:
        """Return Adam as the paper sets it."""
        return torch.optim.Adam(parameters, lr=self.lr, betas=(0.5, 0.9), fused=True)

    def model(self) -> nn.Module:
        """Return generator and critic."""
        return nn.ModuleList([mlp(4, 32, 2), mlp(2, 32, 1)])

    def batch(self, index: int) -> Batch:
        """Return real points, the generator's inputs, and places between real and made points."""
        generator = self.generator(index)
        mixed = torch.rand(EXAMPLES, 1, generator=generator)
        return _ring(generator), mixed, torch.randn(EXAMPLES, 4, generator=generator)

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the sum of both networks' losses; each learns from its own alone."""
        generator, critic = cast("nn.ModuleList", model)
        real, mixed, inputs = batch
        made = generator(inputs)
        between = (mixed * real + (1 - mixed) * made.detach()).requires_grad_()
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        penalty = 10 * (slope.norm(dim=1) - 1).square()
        frozen = {name: p.detach() for name, p in critic.named_parameters()}
        believed = torch.func.functional_call(critic, frozen, (made,))
        difference = (critic(made.detach()) - critic(real)).squeeze(1)
        return cast(Tensor, difference + penalty - believed.squeeze(1))

    def evaluate(self, model: nn.Module) -> float:
        """Return how far made points are from the ring's, and the ring's from made ones."""
        (generator, _) = cast("nn.ModuleList", model)
        with torch.no_grad():
            made = generator(torch.randn(512, 4, generator=torch.Generator().manual_seed(1)))
        angle = torch.arange(8) * math.pi / 4
        distance = torch.cdist(made, torch.stack([angle.cos(), angle.sin()], 1) * 2)
        return (distance.min(1).values.mean() + distance.min(0).values.mean()).item()


# ------------------------------------------------------------------ representation learning


@dataclass(frozen=True, kw_only=True)
class ContrastiveTask(KindTask):
    """InfoNCE between two views, with a learned temperature."""

    def model(self) -> nn.Module:
        """Return the encoder, and the logarithm of one over the temperature."""
        model = nn.ModuleList([mlp(12, 64, 16)])
        model.register_parameter("log_scale", nn.Parameter(torch.tensor(math.log(10.0))))
        return model

    def batch(self, index: int) -> Batch:
        """Return two views of the same things."""
        generator = self.generator(index)
        things = torch.randn(EXAMPLES, 12, generator=generator)
        noise = 0.3 * torch.randn(2, EXAMPLES, 12, generator=generator)
        return things + noise[0], things + noise[1]

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the cross-entropy of each thing among all of the batch."""
        (encoder,) = cast("nn.ModuleList", model)
        one, other = (functional.normalize(encoder(view), dim=1) for view in batch)
        logits = one @ other.T * cast(Tensor, model.log_scale).clamp(max=math.log(100.0)).exp()
        return functional.cross_entropy(logits, torch.arange(len(one)), reduction="none")


@dataclass(frozen=True, kw_only=True)
class ByolTask(KindTask):
    """Predicts an averaged copy of itself: no negatives, and a target that moves."""

    lr: float = 3e-3

    def model(self) -> nn.Module:
        """Return the encoder, the predictor and the averaged encoder."""
        model = nn.ModuleList([mlp(12, 64, 16), mlp(16, 32, 16, layers=1), mlp(12, 64, 16)])
        model[2].load_state_dict(model[0].state_dict())
        model[2].requires_grad_(requires_grad=False)
        return model

    def batch(self, index: int) -> Batch:
        """Return two views of the same things."""
        generator = self.generator(index)
        things = torch.randn(EXAMPLES, 12, generator=generator)
        noise = 0.3 * torch.randn(2, EXAMPLES, 12, generator=generator)
        return things + noise[0], things + noise[1]

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return one minus the cosine for each thing; the average moves with each training call."""
        encoder, predictor, target = cast("nn.ModuleList", model)
        if model.training and torch.is_grad_enabled():
            with torch.no_grad():
                pairs = zip(target.parameters(), encoder.parameters(), strict=True)
                for average, parameter in pairs:
                    average.lerp_(parameter, 0.02)
        with torch.no_grad():
            goal = target(batch[1])
        return 1 - functional.cosine_similarity(predictor(encoder(batch[0])), goal, dim=1)


@dataclass(frozen=True, kw_only=True)
class TripletTask(KindTask):
    """Triplets with the hardest negative and a margin: most losses are 0 later on."""

    def model(self) -> nn.Module:
        """Return the untrained embedding."""
        return mlp(8, 64, 8)

    def batch(self, index: int) -> Batch:
        """Return points and their classes."""
        generator = self.generator(index)
        centers = torch.randn(8, 8, generator=torch.Generator().manual_seed(self.seed + 31))
        classes = torch.randint(0, 8, (EXAMPLES,), generator=generator)
        return centers[classes] + 0.5 * torch.randn(EXAMPLES, 8, generator=generator), classes

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return how far each point's hardest negative is within the margin."""
        placed = functional.normalize(model(batch[0]), dim=1)
        apart = torch.cdist(placed, placed)
        same = batch[1][:, None] == batch[1][None, :]
        positive = (apart * same).max(1).values
        negative = (apart + 10.0 * same).min(1).values
        return (positive - negative + 0.2).clamp(min=0.0)


# ----------------------------------------------------------------------------- architectures


class _Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(12, 4)
        self.experts = nn.ModuleList(mlp(12, 24, 1, layers=1) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shares = self.gate(x).softmax(1)
        chosen = shares.argmax(1)
        each = torch.cat([expert(x) for expert in self.experts], 1)
        out = each.gather(1, chosen[:, None]) * shares.gather(1, chosen[:, None])
        load = functional.one_hot(chosen, 4).float().mean(0)
        return out.squeeze(1), 4 * (load * shares.mean(0)).sum()


@dataclass(frozen=True, kw_only=True)
class ExpertsTask(KindTask):
    """A mixture of four experts, one for each example, with a loss for an even load."""

    def model(self) -> nn.Module:
        """Return the untrained mixture."""
        return _Experts()

    def batch(self, index: int) -> Batch:
        """Return inputs, and targets that have another rule in each quadrant."""
        x = torch.randn(EXAMPLES, 12, generator=self.generator(index))
        sign = (x[:, 0] > 0).float() * 2 - 1
        return x, sign * x[:, 2:6].sum(1) + (x[:, 1] > 0).float() * x[:, 6:9].prod(1)

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return squared errors, with the batch's load loss added to each."""
        out, load = model(batch[0])
        return cast(Tensor, (out - batch[1]).square() + 0.01 * load)


class _Seq2seq(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.symbols = nn.Embedding(12, 24)
        self.encoder, self.decoder = (nn.GRU(24, 48, batch_first=True) for _ in range(2))
        self.head = nn.Linear(48, 12)

    def forward(self, source: Tensor, shifted: Tensor) -> Tensor:
        _, state = self.encoder(self.symbols(source))
        return cast(Tensor, self.head(self.decoder(self.symbols(shifted), state)[0]))


@dataclass(frozen=True, kw_only=True)
class Seq2seqTask(KindTask):
    """Reverses sequences of changing length with two GRUs and teacher forcing."""

    lr: float = 4e-3
    steps: int = 400

    def model(self) -> nn.Module:
        """Return the untrained encoder and decoder."""
        return _Seq2seq()

    def batch(self, index: int) -> Batch:
        """Return sequences, the reversed ones shifted, and the reversed ones."""
        generator = self.generator(index)
        length = int(torch.randint(3, 9, (1,), generator=generator))
        source = torch.randint(2, 12, (16, length), generator=generator)
        target = source.flip(1)
        return source, torch.cat([torch.ones(16, 1).long(), target[:, :-1]], 1), target

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean cross-entropy of each sequence."""
        logits = model(batch[0], batch[1])
        each = functional.cross_entropy(logits.flatten(0, 1), batch[2].flatten(), reduction="none")
        return each.view(len(batch[0]), -1).mean(1)


@dataclass(frozen=True, kw_only=True)
class RnnTask(KindTask):
    """The adding problem over 40 steps of a plain RNN: gradients spike by themselves."""

    lr: float = 2e-3
    steps: int = 400

    def model(self) -> nn.Module:
        """Return the untrained RNN and its head."""
        return nn.ModuleList([nn.RNN(2, 32, batch_first=True, nonlinearity="relu"),
                              nn.Linear(32, 1)])  # fmt: skip

    def batch(self, index: int) -> Batch:
        """Return numbers with two of them marked, and the sum of those."""
        generator = self.generator(index)
        numbers = torch.rand(16, 40, generator=generator)
        marks = torch.zeros(16, 40)
        marks.scatter_(1, torch.rand(16, 40, generator=generator).topk(2, 1).indices, 1.0)
        return torch.stack([numbers, marks], 2), (numbers * marks).sum(1)

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return squared errors."""
        rnn, head = cast("nn.ModuleList", model)
        return cast(Tensor, (head(rnn(batch[0])[0][:, -1]).squeeze(1) - batch[1]).square())


@dataclass(frozen=True, kw_only=True)
class SegmentationTask(KindTask):
    """Dice and cross-entropy on small masks, a third of which are empty."""

    lr: float = 4e-3
    steps: int = 400

    def model(self) -> nn.Module:
        """Return the untrained convolutions."""
        return nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
            nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 1),
        )  # fmt: skip

    def batch(self, index: int) -> Batch:
        """Return noisy squares and their masks."""
        generator = self.generator(index)
        masks = torch.zeros(8, 1, 16, 16)
        for i in range(8):
            size = int(torch.randint(0, 7, (1,), generator=generator))
            x, y = torch.randint(0, 10, (2,), generator=generator).tolist()
            if torch.rand(1, generator=generator) > 0.33:
                masks[i, 0, x : x + size, y : y + size] = 1.0
        return masks + 0.6 * torch.randn(masks.shape, generator=generator), masks

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return one minus dice, plus the cross-entropy, of each picture."""
        logits, masks = model(batch[0]), batch[1]
        shares = logits.sigmoid()
        both = (shares * masks).sum((1, 2, 3))
        dice = (2 * both + 1e-3) / (shares.sum((1, 2, 3)) + masks.sum((1, 2, 3)) + 1e-3)
        each = functional.binary_cross_entropy_with_logits(logits, masks, reduction="none")
        return cast(Tensor, 1 - dice + each.mean((1, 2, 3)))


@dataclass(frozen=True, kw_only=True)
class PhysicsTask(KindTask):
    """A network that solves an oscillator: the loss falls by orders of magnitude, and jumps."""

    lr: float = 5e-3

    def model(self) -> nn.Module:
        """Return the untrained solution."""
        return mlp(1, 32, 1)

    def batch(self, index: int) -> Batch:
        """Return times within the interval, and the exact solution there for evaluation."""
        time = 3.0 * torch.rand(EXAMPLES, 1, generator=self.generator(index))
        return time, (2 * time).cos()

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the squared residual of u'' + 4u = 0, and of u(0) = 1, u'(0) = 0."""
        time = batch[0].detach().requires_grad_()
        start = torch.zeros(1, 1, requires_grad=True)
        with torch.enable_grad():
            u, u0 = model(time), model(start)
            (speed,) = torch.autograd.grad(u.sum(), time, create_graph=True)
            (change,) = torch.autograd.grad(speed.sum(), time, create_graph=True)
            (speed0,) = torch.autograd.grad(u0.sum(), start, create_graph=True)
        residual = (change + 4 * u).square().squeeze(1)
        return cast(Tensor, residual + 10 * ((u0 - 1).square() + speed0.square()).sum())

    def evaluate(self, model: nn.Module) -> float:
        """Return the mean squared distance from the exact solution."""
        with torch.no_grad():
            batches = [self.batch(FIRST_EVALUATION + i) for i in range(4)]
            errors = [(model(time) - exact).square().mean() for time, exact in batches]
        return torch.stack(errors).mean().item()


@dataclass(frozen=True, kw_only=True)
class CountingTask(KindTask):
    """A GPT on counting sequences: from chance to almost 0 within a hundred steps."""

    lr: float = 4e-3
    steps: int = 400

    def model(self) -> nn.Module:
        """Return the untrained GPT."""
        return Gpt(dropout=0.0, tied=False)

    def batch(self, index: int) -> Batch:
        """Return symbols and the symbols after them."""
        generator = self.generator(index)
        first = torch.randint(0, SYMBOLS, (8, 1), generator=generator)
        stride = torch.randint(1, 4, (8, 1), generator=generator)
        window = (first + stride * torch.arange(33)) % SYMBOLS
        return window[:, :-1].contiguous(), window[:, 1:].contiguous()

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean cross-entropy of each sequence."""
        logits = model(batch[0])
        each = functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten(), reduction="none")
        return each.view(len(batch[0]), -1).mean(1)


# ------------------------------------------------------------------------ how it is trained


@dataclass(frozen=True, kw_only=True)
class ScheduledTask(RegressionTask):
    """A regression whose rate goes up and down by a large factor."""

    shape: str = "cyclic"

    def learning_rate(self, index: int) -> float:
        """Return the schedule's rate."""
        if self.shape == "cyclic":
            way = index % 100 / 100
            return self.lr * (0.1 + 3.9 * (1 - abs(2 * way - 1)))
        way = index / self.steps
        if way < 0.3:
            return self.lr * (0.04 + 3.96 * way / 0.3)
        return self.lr * (0.0004 + 3.9996 * 0.5 * (1 + math.cos(math.pi * (way - 0.3) / 0.7)))


@dataclass(frozen=True, kw_only=True)
class LongTailTask(PatternsTask):
    """Classes by Zipf's law, weighted by inverse frequency: rare ones have large gradients."""

    steps: int = 500

    def batch(self, index: int) -> Batch:
        """Return pictures, labels and weights."""
        generator, examples = self.generator(index), self.examples
        shares = 1.0 / torch.arange(1, CLASSES + 1).float().square()
        if self.is_evaluation(index):
            shares = torch.ones(CLASSES)
        y = torch.multinomial(shares, examples, replacement=True, generator=generator)
        noise = torch.randn(examples, 1, 12, 12, generator=generator)
        weights = (shares.mean() / shares)[y].clamp(max=20.0)
        return self._patterns()[y] + self.noise * noise, y, weights


@dataclass(frozen=True, kw_only=True)
class EdgeTask(RegressionTask):
    """Gradient descent on one fixed batch, at a rate where the sharpness stays at its bound."""

    lr: float = 0.25
    examples: int = 64
    fixed: int = 1
    steps: int = 800

    def optimizer(self, parameters: list[nn.Parameter]) -> Optimizer:
        """Return plain gradient descent."""
        return torch.optim.SGD(parameters, lr=self.lr, fused=True)


class _LowRank(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.base = nn.Linear(size, size)
        self.base.requires_grad_(requires_grad=False)
        self.down, self.up = nn.Linear(size, 2, bias=False), nn.Linear(2, size, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + 4 * self.up(self.down(x)))


@dataclass(frozen=True, kw_only=True)
class LowRankTask(RegressionTask):
    """Low-rank adapters on frozen layers: half of the matrices begin at 0."""

    lr: float = 4e-3
    steps: int = 500

    def model(self) -> nn.Module:
        """Return frozen layers with adapters, and a trained head."""
        return nn.Sequential(_LowRank(16), _LowRank(16), nn.Linear(16, 1))


class _Quantized(nn.Module):
    """A network whose weights are rounded to 4 bits in forward; gradients go straight through."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 64), nn.Linear(64, 64), nn.Linear(64, 1)])
        self.rounds = False

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            linear = cast("nn.Linear", layer)
            weight = linear.weight
            if self.rounds:
                step = weight.detach().abs().max() / 7
                weight = weight + ((weight / step).round() * step - weight).detach()
            x = functional.linear(x, weight, linear.bias)
            x = torch.tanh(x) if i < 2 else x
        return x


@dataclass(frozen=True, kw_only=True)
class QuantizedTask(RegressionTask):
    """Quantization-aware training: rounding begins in the middle, and the loss rises at once."""

    steps: int = 600

    def model(self) -> nn.Module:
        """Return the untrained network."""
        return _Quantized()

    @property
    def changes(self) -> tuple[int, ...]:
        """Rounding begins here."""
        return (self.steps // 2,)

    def batch(self, index: int) -> Batch:
        """Return inputs, targets, and whether weights are rounded."""
        rounds = self.is_evaluation(index) or index >= self.steps // 2
        return *super().batch(index), torch.full((self.examples,), 1.0), torch.tensor(rounds)

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return squared errors."""
        model.rounds = bool(batch[3])  # type: ignore[assignment]
        return super().losses(model, batch[:3])


@dataclass(frozen=True, kw_only=True)
class SharpnessTask(RegressionTask):
    """Sharpness-aware minimization: the gradient is taken at the worst point nearby."""

    steps: int = 500

    def backward(self, model: nn.Module, loss: Tensor, batch: Batch) -> None:
        """Leave the gradients of the perturbed weights."""
        loss.backward()
        parameters = [p for p in model.parameters() if p.grad is not None]
        weights: list[Tensor] = list(parameters)
        norm = torch.stack([cast(Tensor, p.grad).norm() for p in parameters]).norm() + 1e-12
        with torch.no_grad():
            moves = [0.05 * cast(Tensor, p.grad) / norm for p in parameters]
            torch._foreach_add_(weights, moves)
        for parameter in parameters:
            parameter.grad = None
        self.loss(model, batch).backward()
        with torch.no_grad():
            torch._foreach_sub_(weights, moves)


@dataclass(frozen=True, kw_only=True)
class AccumulatedTask(RegressionTask):
    """Four micro-batches to one update, their gradients added up."""

    steps: int = 500
    examples: int = 32

    def backward(self, model: nn.Module, loss: Tensor, batch: Batch) -> None:
        """Add up the gradients of the micro-batches."""
        parts = [part.chunk(4) for part in batch]
        for micro in zip(*parts, strict=True):
            (self.loss(model, micro) / 4).backward()


@dataclass(frozen=True, kw_only=True)
class MultitaskTask(RegressionTask):
    """Three alternating tasks, with losses of different sizes: 1, 30 and 0.03."""

    steps: int = 600

    def model(self) -> nn.Module:
        """Return one body with three heads."""
        return mlp(16, 64, 3)

    def batch(self, index: int) -> Batch:
        """Return inputs, targets, and which task it is."""
        x, y = super().batch(index)[:2]
        task = index % 3
        y = (y, 5.5 * y.square(), 0.17 * y.sin())[task]
        return x, y, torch.full((len(x),), task)

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return squared errors of the task's own head."""
        out = model(batch[0]).gather(1, batch[2][:, None])
        return cast(Tensor, (out - batch[1]).square().squeeze(1))


# --------------------------------------------------------------------- reinforcement learning


GRID, GOAL = 5, 24


def _moved(place: Tensor, action: Tensor) -> Tensor:
    """Return where each of the walkers on a grid is after its action."""
    row, column = place // GRID, place % GRID
    row = (row + (action == 0).long() - (action == 1).long()).clamp(0, GRID - 1)
    column = (column + (action == 2).long() - (action == 3).long()).clamp(0, GRID - 1)
    return row * GRID + column


@dataclass(frozen=True, kw_only=True)
class DqnTask(KindTask):
    """Q-learning with replay and a target network that is copied every 20 steps."""

    lr: float = 5e-3
    steps: int = 600
    loss_kind: LossKind = "rl"
    _replay: list[Batch] = field(default_factory=list, repr=False)

    @property
    def is_on_policy(self) -> bool:
        """Its experience is made by the current model."""
        return True

    def model(self) -> nn.Module:
        """Return the Q network and its target."""
        model = nn.ModuleList([mlp(25, 48, 4), mlp(25, 48, 4)])
        model[1].load_state_dict(model[0].state_dict())
        model[1].requires_grad_(requires_grad=False)
        return model

    def batch(self, index: int) -> Batch:
        """Return nothing: a batch is drawn from the replay, see ``collect``."""
        return (torch.tensor(index),)

    def collect(self, model: nn.Module, index: int) -> Batch:
        """Walk once with eight walkers, and return a draw from all that was walked."""
        network, target = cast("nn.ModuleList", model)
        generator = self.generator(index)
        if index % 20 == 0:
            target.load_state_dict(network.state_dict())
        place = torch.randint(0, 25, (8,), generator=generator)
        with torch.no_grad():
            best = network(functional.one_hot(place, 25).float()).argmax(1)
        explores = torch.rand(8, generator=generator) < max(0.1, 1 - index / 200)
        action = torch.where(explores, torch.randint(0, 4, (8,), generator=generator), best)
        after = _moved(place, action)
        reward = (after == GOAL).float() * 10 - 0.1
        self._replay.append((place, action, reward, after))
        del self._replay[:-200]
        chosen = torch.randint(0, len(self._replay), (8,), generator=generator).tolist()
        drawn = [self._replay[i] for i in chosen]
        return tuple(torch.cat([row[k] for row in drawn]) for k in range(4))

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return each transition's squared temporal difference."""
        network, target = cast("nn.ModuleList", model)
        place, action, reward, after = batch
        with torch.no_grad():
            ahead = target(functional.one_hot(after, 25).float()).max(1).values
            goal = reward + 0.95 * ahead * (after != GOAL).float()
        value = network(functional.one_hot(place, 25).float()).gather(1, action[:, None])
        return cast(Tensor, (value.squeeze(1) - goal).square())

    def evaluate(self, model: nn.Module) -> float:
        """Return how many steps the greedy walkers of all places need, plus 1."""
        (network, _) = cast("nn.ModuleList", model)
        place, steps = torch.arange(25), torch.zeros(25)
        with torch.no_grad():
            for _ in range(16):
                steps += (place != GOAL).float()
                action = network(functional.one_hot(place, 25).float()).argmax(1)
                place = torch.where(place == GOAL, place, _moved(place, action))
        return 1.0 + steps.mean().item()


@dataclass(frozen=True, kw_only=True)
class GrpoTask(KindTask):
    """Group-relative policy optimization: eight answers to each prompt, judged among themselves."""

    lr: float = 2e-3
    steps: int = 400
    loss_kind: LossKind = "rl"

    @property
    def is_on_policy(self) -> bool:
        """The answers are drawn from the current model."""
        return True

    def model(self) -> nn.Module:
        """Return the untrained policy: logits of 10 answers at 4 places."""
        return mlp(10, 48, 40)

    def batch(self, index: int) -> Batch:
        """Return nothing: answers are drawn, see ``collect``."""
        return (torch.tensor(index),)

    def collect(self, model: nn.Module, index: int) -> Batch:
        """Return prompts, drawn answers, their log probabilities and advantages."""
        generator = self.generator(index)
        prompt = torch.randint(0, 10, (4,), generator=generator).repeat_interleave(8)
        coded = functional.one_hot(prompt, 10).float()
        with torch.no_grad():
            shares = model(coded).view(32, 4, 10).softmax(2)
        answer = torch.multinomial(shares.flatten(0, 1), 1, generator=generator).view(32, 4)
        wanted = (prompt[:, None] + torch.arange(4)) % 10
        reward = (answer == wanted).float().mean(1).view(4, 8)
        spread = reward.std(1, keepdim=True, unbiased=False)
        advantage = ((reward - reward.mean(1, keepdim=True)) / (spread + 1e-4)).flatten()
        chosen = shares.gather(2, answer[:, :, None]).squeeze(2).clamp(min=1e-9).log()
        return coded, answer, chosen, advantage

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return each answer's clipped policy loss."""
        coded, answer, before, advantage = batch
        logp = model(coded).view(32, 4, 10).log_softmax(2)
        ratio = (logp.gather(2, answer[:, :, None]).squeeze(2) - before).exp()
        gain = advantage[:, None]
        each = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
        return -each.mean(1)

    def evaluate(self, model: nn.Module) -> float:
        """Return the share of wrong greedy answers, plus 0.01."""
        coded = torch.eye(10)
        with torch.no_grad():
            answer = model(coded).view(10, 4, 10).argmax(2)
        wanted = (torch.arange(10)[:, None] + torch.arange(4)) % 10
        wrong: float = (answer != wanted).float().mean().item()
        return 0.01 + wrong


def single(**settings: Any) -> RegressionTask:
    """Return a regression on batches of one example."""
    return RegressionTask(examples=1, **settings)
