"""Small trainings with one fault each, and the ``build`` by which it is played: see ``repro``.

A fault is in the code, which the entry builds as the training does, in one batch, or only in the
state of the running training. The expected verdict follows from the meaning of the verdicts: data
if only the batch is the cause, arithmetic if higher precision fixes it.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

from trainer_hooks import CheckpointSettings, watch
from trainvitals.errors import TrainingHalted

BAD_STEP, STEPS = 25, 36
"""A checkpoint is made right before the bad step; it counts once steps behind it were healthy."""
ROWS, LENGTH, WIDTH, CHANNELS, WORDS = 16, 64, 32, 8, 64
Place = Literal["block", "attention", "mlp"]
Batch = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault: its location, and the expected verdict."""

    kind: str
    module: str
    """Which is to be named."""
    verdict: str
    block: int = 0
    place: Place = "block"
    code: Callable[[Tensor, Tensor], Tensor] | None = None
    """What the module does besides; given its activations and the batch's signal."""
    loss: Callable[[Tensor, Tensor, Batch], Tensor] | None = None
    batch: Callable[[Batch], None] | None = None
    """Done to the bad step's batch."""
    state: Callable[[nn.Module, torch.optim.Optimizer], None] | None = None
    """Done to the live training before the bad step's forward."""
    lead: int = 0
    """So many steps before: a moment is in the weights an update later."""
    autocast: torch.dtype | None = None
    is_in_loop: bool = False
    """Whether autocast is entered by the loop, and not by the loss function."""


# -------------------------------------------------------------------------------- the model


class Attention(nn.Module):
    """One head."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.slope = nn.Parameter(torch.ones(()))
        mask = torch.full((LENGTH, LENGTH), -math.inf).triu(1)
        self.register_buffer("mask", mask, persistent=False)
        self.code: Callable[[Tensor, Tensor], Tensor] | None = None

    def forward(self, x: Tensor, signal: Tensor) -> Tensor:
        """Return what the head adds."""
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = q @ k.transpose(1, 2) / WIDTH**0.5
        if self.code is not None:
            scores = self.code(scores, signal * self.slope)
        added: Tensor = self.out((scores + self.mask).softmax(dim=-1) @ v)
        return added


class Mlp(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.code: Callable[[Tensor, Tensor], Tensor] | None = None

    def forward(self, x: Tensor, signal: Tensor) -> Tensor:
        """Return what the layers add."""
        x = F.gelu(self.up(x))
        if self.code is not None:
            x = self.code(x, signal)
        down: Tensor = self.down(x)
        return down


class Block(nn.Module):
    """Attention and MLP, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mlp = Attention(), Mlp()
        self.code: Callable[[Tensor, Tensor], Tensor] | None = None

    def forward(self, x: Tensor, signal: Tensor) -> Tensor:
        """Return the activations behind both."""
        x = x + self.attention(self.norm1(x), signal)
        x = x + self.mlp(F.dropout(self.norm2(x), 0.1, self.training), signal)
        return x if self.code is None else self.code(x, signal)


class Model(nn.Module):
    """Words and measured values in, words out."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.values = nn.Embedding(WORDS, WIDTH), nn.Linear(CHANNELS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits of the next words."""
        x = self.words(batch["tokens"]) + self.values(batch["values"])
        for block in self.blocks:
            x = block(x, batch["signal"])
        logits: Tensor = self.head(x)
        return logits


def _cross_entropy(logits: Tensor, labels: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


# ------------------------------------------------------------------------------- the faults


def _over(x: Tensor, weights: Tensor) -> Tensor:
    """Scale by weights that are normalized, and are all 0 in one sample."""
    return x * (weights / weights.sum(dim=1, keepdim=True) * LENGTH)[..., None]


def _log(x: Tensor, signal: Tensor) -> Tensor:
    return x + 0.01 * torch.log(signal)[..., None]


def _root(x: Tensor, signal: Tensor) -> Tensor:
    return x * torch.sqrt(signal)[..., None]


def _standard(x: Tensor, signal: Tensor) -> Tensor:
    """Standardise over the batch, which has no spread once."""
    return x + 0.01 * ((signal - signal.mean()) / signal.std(correction=0))[..., None]


def _root_of_distance(scores: Tensor, signal: Tensor) -> Tensor:
    """Subtract a distance: at 0 its root is finite, and the slope of it is not."""
    return scores - 0.1 * torch.sqrt(signal)[:, None]


def _norm_of_distance(scores: Tensor, signal: Tensor) -> Tensor:
    return scores - 0.1 * (signal * signal).sum(dim=1).sqrt()[:, None, None]


class _OwnBackward(torch.autograd.Function):
    """A backward by hand that divides by what went in."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, signal: Tensor) -> Tensor:
        ctx.save_for_backward(signal)
        return scores * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (signal,) = ctx.saved_tensors
        return gradients[0] * (signal / signal.square())[:, None], None


def _own(scores: Tensor, signal: Tensor) -> Tensor:
    apply: Any = _OwnBackward.apply
    result: Tensor = apply(scores, signal.detach())
    return result


def _power(scores: Tensor, signal: Tensor) -> Tensor:
    return scores - 0.1 * signal.pow(0.25)[:, None]


def _square(x: Tensor, signal: Tensor) -> Tensor:
    """Square in the precision of the activations: above 65,504 in float16 an infinity."""
    scaled = x * signal[..., None].to(x.dtype)
    return x + 1e-5 * (scaled * scaled)


def _exponential(x: Tensor, signal: Tensor) -> Tensor:
    return x + 1e-3 * torch.log(torch.exp(signal) + 1.0)[..., None]


def _scores(scores: Tensor, signal: Tensor) -> Tensor:
    return scores * (signal[:, None] * signal[:, None] * 16.0).to(scores.dtype) / 16.0


def _masked_loss(logits: Tensor, labels: Tensor, batch: Batch) -> Tensor:
    each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    mask = (batch["signal"] > 0).flatten().float()
    return (each * mask).sum() / mask.sum()


def _mean_by_sample(logits: Tensor, labels: Tensor, batch: Batch) -> Tensor:
    each = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    mask = (batch["signal"] > 0).float()
    return ((each * mask).sum(dim=1) / mask.sum(dim=1)).mean()


def _weighted(logits: Tensor, labels: Tensor, batch: Batch) -> Tensor:
    target = batch["signal"].mean(dim=1)
    weight = target / target.max()  # all are 0 once
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) * weight.mean()


def _signal(value: float, *rows: int) -> Callable[[Batch], None]:
    """Set the signal of some samples, or of all."""

    def change(batch: Batch) -> None:
        batch["signal"][list(rows) or slice(None)] = value

    return change


def _values(value: float, row: int, step: int = 7) -> Callable[[Batch], None]:
    def change(batch: Batch) -> None:
        batch["values"][row, step] = value

    return change


def _parameter(model: nn.Module, name: str) -> Tensor:
    return model.get_parameter(name).data


def _weight(name: str, value: float) -> Callable[[nn.Module, torch.optim.Optimizer], None]:
    def change(model: nn.Module, _: torch.optim.Optimizer) -> None:
        _parameter(model, name).view(-1)[5] = value

    return change


def _moment(
    name: str, key: str, value: float
) -> Callable[[nn.Module, torch.optim.Optimizer], None]:
    def change(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.state[model.get_parameter(name)][key].view(-1)[5] = value

    return change


def _once(name: str, value: float) -> Callable[[nn.Module, torch.optim.Optimizer], None]:
    """Spoil one value of a module's next output, as a fault of the machine would."""

    def change(model: nn.Module, _: torch.optim.Optimizer) -> None:
        def spoil(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            handle.remove()
            spoilt = output.clone()
            spoilt.view(-1)[5] = value
            return spoilt

        handle = model.get_submodule(name).register_forward_hook(spoil)

    return change


_HALF = torch.float16
FORWARD, BACKWARD, LOSS = (
    "NaN in a module's forward",
    "Inf in attention's backward",
    "0/0 in the loss",
)
OVERFLOW, ROW, STATE = "overflow", "poisoned sample", "corrupted weight or moment"
TRANSIENT = "once, and nowhere in code, data or state"
IN_LOSS = "the loss function"
FAULTS: dict[str, Fault] = {
    "weights that sum to 0": Fault(
        kind=FORWARD, module="blocks.0", verdict="data", code=_over, batch=_signal(0.0, 4)
    ),
    "log of a negative": Fault(
        kind=FORWARD, module="blocks.2.mlp", verdict="data", block=2, place="mlp", code=_log,
        batch=_signal(-3.0, 9),
    ),
    "root of a negative": Fault(
        kind=FORWARD, module="blocks.3", verdict="data", block=3, code=_root,
        batch=_signal(-1.0, 0, 15),
    ),
    "no spread in the batch": Fault(
        kind=FORWARD, module="blocks.1.mlp", verdict="data", block=1, place="mlp", code=_standard,
        batch=_signal(1.0),
    ),
    "log of 0": Fault(
        kind=FORWARD, module="blocks.1", verdict="data", block=1, code=_log, batch=_signal(0.0, 2)
    ),
    "root of a distance of 0": Fault(
        kind=BACKWARD, module="blocks.1.attention", verdict="data", block=1, place="attention",
        code=_root_of_distance, batch=_signal(0.0, 3),
    ),
    "norm of zeros": Fault(
        kind=BACKWARD, module="blocks.0.attention", verdict="data", place="attention",
        code=_norm_of_distance, batch=_signal(0.0, 11),
    ),
    "a backward by hand": Fault(
        kind=BACKWARD, module="blocks.3.attention", verdict="data", block=3, place="attention",
        code=_own, batch=_signal(0.0, 6),
    ),
    "a power below 1 of 0": Fault(
        kind=BACKWARD, module="blocks.2.attention", verdict="data", block=2, place="attention",
        code=_power, batch=_signal(0.0),
    ),
    "all labels masked": Fault(
        kind=LOSS, module=IN_LOSS, verdict="data", loss=_masked_loss, batch=_signal(0.0)
    ),
    "all labels of a sample masked": Fault(
        kind=LOSS, module=IN_LOSS, verdict="data", loss=_mean_by_sample, batch=_signal(0.0, 8)
    ),
    "all weights 0": Fault(
        kind=LOSS, module=IN_LOSS, verdict="data", loss=_weighted, batch=_signal(0.0)
    ),
    "float16 square in an MLP": Fault(
        kind=OVERFLOW, module="blocks.0.mlp", verdict="arithmetic", place="mlp", code=_square,
        batch=_signal(900.0), autocast=_HALF,
    ),
    "float16 square, autocast in the loop": Fault(
        kind=OVERFLOW, module="blocks.3.mlp", verdict="arithmetic", block=3, place="mlp",
        code=_square, batch=_signal(900.0), autocast=_HALF, is_in_loop=True,
    ),
    "float16 attention scores": Fault(
        kind=OVERFLOW, module="blocks.2.attention", verdict="arithmetic", block=2,
        place="attention", code=_scores, batch=_signal(250.0), autocast=_HALF,
    ),
    "float32 exponential": Fault(
        kind=OVERFLOW, module="blocks.1", verdict="arithmetic", block=1, code=_exponential,
        batch=_signal(95.0),
    ),
    "bfloat16 exponential": Fault(
        kind=OVERFLOW, module="blocks.2.mlp", verdict="arithmetic", block=2, place="mlp",
        code=_exponential, batch=_signal(95.0), autocast=torch.bfloat16,
    ),
    "a NaN": Fault(
        kind=ROW, module="values", verdict="data", batch=_values(math.nan, 5)
    ),
    "an infinity": Fault(
        kind=ROW, module="values", verdict="data", batch=_values(-math.inf, 12)
    ),
    "1e38": Fault(
        kind=ROW, module="values", verdict="data", batch=_values(3e38, 0, 63), autocast=_HALF
    ),
    "a weight's highest bit": Fault(
        kind=STATE, module="blocks.1.mlp.up", verdict="optimizer_state",
        state=_weight("blocks.1.mlp.up.weight", 3e38),
    ),
    "a weight is NaN": Fault(
        kind=STATE, module="head", verdict="optimizer_state", state=_weight("head.bias", math.nan)
    ),
    "a first moment is infinite": Fault(
        kind=STATE, module="blocks.2.attention.qkv", verdict="optimizer_state",
        state=_moment("blocks.2.attention.qkv.weight", "exp_avg", math.inf), lead=1,
    ),
    "a second moment's sign": Fault(
        kind=STATE, module="blocks.3.norm2", verdict="optimizer_state",
        state=_moment("blocks.3.norm2.weight", "exp_avg_sq", -1.0), lead=1,
    ),
    "a NaN in a forward": Fault(
        kind=TRANSIENT, module="", verdict="hardware", state=_once("blocks.1.mlp", math.nan)
    ),
    "an infinity in a forward": Fault(
        kind=TRANSIENT, module="", verdict="hardware", state=_once("blocks.3.norm1", math.inf)
    ),
}  # fmt: skip


# -------------------------------------------------------------------------------- a training


def _made(fault: Fault) -> tuple[Model, Callable[[Batch], Tensor]]:
    """Return model and loss as the user's code makes them."""
    torch.manual_seed(0)
    model = Model()
    if fault.code is not None:
        block: Any = model.blocks[fault.block]
        places = {"block": block, "attention": block.attention, "mlp": block.mlp}
        places[fault.place].code = fault.code
    loss_fn = fault.loss or _cross_entropy

    def loss_of(batch: Batch) -> Tensor:
        enabled = fault.autocast is not None and not fault.is_in_loop
        with torch.autocast("cpu", fault.autocast or torch.bfloat16, enabled=enabled):
            return loss_fn(model(batch).float(), batch["labels"], batch)

    def loss_without(batch: Batch) -> Tensor:
        return loss_fn(model(batch).float(), batch["labels"], batch)

    return model, loss_without if fault.is_in_loop else loss_of


def build() -> tuple[nn.Module, Callable[[Batch], Tensor]]:
    """Return what ``vitals repro --entry`` plays, for the fault that the environment names."""
    return _made(FAULTS[os.environ["VITALS_BENCH_FAULT"]])


def _batches(fault: Fault) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        shape = (ROWS, LENGTH)
        tokens = torch.randint(0, WORDS, (ROWS, LENGTH + 1), generator=generator)
        batch = {
            "tokens": tokens[:, :-1].clone(),
            "labels": tokens[:, 1:].clone(),
            "values": torch.randn(*shape, CHANNELS, generator=generator),
            "signal": 0.5 + torch.rand(shape, generator=generator),
        }
        if step == BAD_STEP and fault.batch is not None:
            fault.batch(batch)
        yield batch


def train(name: str, directory: str) -> None:
    """Train with a fault, watched as anybody's training is."""
    fault = FAULTS[name]
    model, loss_of = _made(fault)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    saved = CheckpointSettings(
        directory=Path(directory, "checkpoints"), healthy_after=4, snapshot_every=5, save_every=5
    )
    with (
        suppress(TrainingHalted),  # a NaN in the weights: nothing is left to train
        watch(model, optimizer, run="faulty", dir=directory, checkpoints=saved) as monitor,
    ):
        for batch in monitor.batches(list(_batches(fault)), keep_batches=True):
            if monitor.step_index == BAD_STEP - fault.lead and fault.state is not None:
                fault.state(model, optimizer)
            in_loop = fault.autocast if fault.is_in_loop else None
            with torch.autocast("cpu", in_loop or torch.bfloat16, enabled=in_loop is not None):
                loss = loss_of(batch)
            loss.backward()
            monitor.step(loss, max_norm=1.0)
            if monitor.step_index > BAD_STEP:
                time.sleep(0.05)  # or the loop is over before the checkpoint is written


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2])
