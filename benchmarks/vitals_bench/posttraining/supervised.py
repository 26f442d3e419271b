"""SFT, also with LoRA, and reward models on stored rows, with the scalars that TRL logs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainer_hooks.measures.labels import LabelCounts
from trainvitals.detect.posttraining.names import Task
from vitals_bench.posttraining.policy import TRUTH, Scalars

_TOKENS, _PAD, _END, _FIRST = 16, 0, 1, 2
_PROMPT, _LONGEST, _WIDTH, _BATCH = 4, 8, 64, 16
_IGNORED = -100
_NUM_EVALUATED = 64
_EVAL_EVERY = 10
_LABEL_STEPS = 8
_BASE_STEPS, _BASE_RATE = 100, 0.01
_PLACES = 512
"""Places in the memory of single rows."""


class LowRank(nn.Module):
    """A linear layer with a LoRA adapter."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)
        self.is_active = True

    def forward(self, values: Tensor) -> Tensor:
        """Return the layer's output plus the adapter's."""
        output: Tensor = self.base_layer(values)
        return output + self.lora_B(self.lora_A(values)) if self.is_active else output


class Reader(nn.Module):
    """A GRU that predicts the next token, and scores a text."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_TOKENS, _WIDTH)
        self.gru = nn.GRU(_WIDTH, _WIDTH, batch_first=True)
        self.mix: nn.Module = nn.Linear(_WIDTH, _WIDTH)
        self.head = nn.Linear(_WIDTH, _TOKENS)
        self.score = nn.Linear(_WIDTH, 1)
        self.memory = nn.Embedding(_PLACES, (_LONGEST + 1) * _TOKENS)
        nn.init.zeros_(self.memory.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the hidden states [row, position, width]."""
        hidden, _ = self.gru(self.embedding(tokens))
        mixed: Tensor = hidden + torch.tanh(self.mix(hidden))
        return mixed

    def logits(self, tokens: Tensor) -> Tensor:
        """Return the logits of the token after each one, with those that are remembered."""
        place = (tokens[:, :_PROMPT] * torch.tensor([1, 17, 131, 257])).sum(1) % _PLACES
        logits: Tensor = self.head(self(tokens))
        remembered = self.memory(place).view(-1, _LONGEST + 1, _TOKENS)
        return logits + functional.pad(remembered, (0, 0, _PROMPT - 1, 0))[:, : logits.shape[1]]


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """Settings of a training on stored rows."""

    algorithm: Task = "sft"
    rows: int = 4096
    noise: float = 0.3
    """Share of the tokens that follow no rule: no model can predict them."""
    learning_rate: float = 0.003
    warmup: int = 0
    base_steps: int = _BASE_STEPS
    """Steps of the pre-training on texts that follow another rule."""
    has_same_base: bool = False
    """Whether the base model was trained on the same rule."""
    has_answer: bool = False
    """Whether the prompts of the training rows, and only these, tell which rule holds."""
    memory_rate: float = 0.0
    """Learning rate of a table by prompt: a model with the capacity to remember single rows."""
    labels: Literal["completions", "all", "padded", "without end"] = "completions"
    lora: Literal["", "all", "with head", "not in optimizer", "inactive", "base trained"] = ""
    label_noise: float = 0.0
    """Share of the pairs of a reward model that are exchanged."""


Rows = tuple[Tensor, Tensor]
"""Tokens and labels of rows."""


def _rule(seed: int) -> Tensor:
    return torch.randint(_FIRST, _TOKENS, (_TOKENS, _LONGEST),
                         generator=torch.Generator().manual_seed(seed))  # fmt: skip


def make_rows(num: int, run: Tuned, rule: Tensor, *, is_trained: bool = True) -> Rows:
    """Return rows of a prompt, a completion by the rule and its end, padded."""
    prompts = torch.randint(_FIRST, _TOKENS, (num, _PROMPT))
    code = prompts[:, :1]
    if run.has_answer and not is_trained:
        code = torch.randint(_FIRST, _TOKENS, (num, 1))
    right = rule[code.expand(-1, _LONGEST), torch.arange(_LONGEST)]
    other = torch.randint(_FIRST, _TOKENS, right.shape)
    completions = torch.where(torch.rand(right.shape) < run.noise, other, right)
    lengths, places = _LONGEST // 2 + code % (_LONGEST // 2), torch.arange(_LONGEST + 1)
    completions = functional.pad(completions, (0, 1))
    completions = torch.where(places < lengths, completions, (places == lengths) * _END)
    tokens = torch.cat([prompts, completions], 1)
    labels = tokens.masked_fill(tokens == _PAD, _IGNORED)
    if run.labels == "padded":
        labels = tokens.clone()
    elif run.labels == "without end":
        labels = labels.masked_fill(tokens == _END, _IGNORED)
    if run.labels != "all":
        labels[:, :_PROMPT] = _IGNORED
    return tokens, labels


def loss_of(model: Reader, rows: Rows) -> Tensor:
    """Return the mean loss per label."""
    tokens, labels = rows
    logits = model.logits(tokens[:, :-1])
    return functional.cross_entropy(
        logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=_IGNORED
    )


def prepare(run: Tuned) -> tuple[Reader, torch.optim.Optimizer]:
    """Return a pre-trained model, with its adapter, and the optimizer."""
    model = Reader()
    optimizer = torch.optim.Adam(model.parameters(), lr=_BASE_RATE)
    rule = _rule(0 if run.has_same_base else 1)
    plain = Tuned(noise=run.noise)
    for _ in range(run.base_steps):
        optimizer.zero_grad()
        loss_of(model, make_rows(64, plain, rule)).backward()
        optimizer.step()
    optimizer.zero_grad()
    if not run.lora:
        shared = [p for p in model.parameters() if p is not model.memory.weight]
        groups: list[dict[str, Any]] = [
            {"params": shared},
            {"params": [model.memory.weight], "lr": run.memory_rate},
        ]
        return model, torch.optim.AdamW(groups, lr=run.learning_rate, weight_decay=0.0)
    return model, torch.optim.AdamW(_adapt(model, run), lr=run.learning_rate)


def _adapt(model: Reader, run: Tuned) -> list[nn.Parameter]:
    """Add an adapter; return the parameters for the optimizer."""
    before = list(model.parameters())
    adapter = model.mix = LowRank(model.mix)  # type: ignore[arg-type]
    adapter.is_active = run.lora != "inactive"
    has_head = run.lora in ("with head", "inactive", "not in optimizer")
    for name, parameter in model.named_parameters():
        is_adapter, is_head = "lora_" in name, has_head and name.startswith("head.")
        parameter.requires_grad = is_adapter or is_head or run.lora == "base trained"
    if run.lora == "not in optimizer":
        return [parameter for parameter in before if parameter.requires_grad]
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def train_rows(
    model: Reader, optimizer: torch.optim.Optimizer, steps: int, run: Tuned
) -> Iterator[tuple[Tensor, Scalars]]:
    """Yield the loss after each backward, and the scalars; the caller makes the update."""
    rule = _rule(0)
    make: Callable[[int, bool], Rows] = _pairs_maker(run) if run.algorithm == "reward_model" else (
        lambda num, is_trained: make_rows(num, run, rule, is_trained=is_trained)
    )  # fmt: skip
    stored, evaluated = make(run.rows, True), make(_NUM_EVALUATED, False)
    counts = LabelCounts([_END], 0)
    per_epoch = max(run.rows // _BATCH, 1)
    order = torch.randperm(run.rows)
    for step in range(steps):
        if step % per_epoch == 0:
            order = torch.randperm(run.rows)
        at = order[step % per_epoch * _BATCH :][:_BATCH]
        batch = (stored[0][at], stored[1][at])
        if run.warmup:
            rate = run.learning_rate * min(1.0, (step + 1) / run.warmup)
            optimizer.param_groups[0]["lr"] = rate
        scalars: Scalars = {}
        if run.algorithm == "reward_model":
            margin = score(model, batch[0]) - score(model, batch[1])
            loss = -functional.logsigmoid(margin).mean()
            scalars = {"accuracy": float((margin > 0).float().mean()),
                       "margin": float(margin.detach().mean())}  # fmt: skip
        else:
            loss = loss_of(model, batch)
            scalars = {"loss": float(loss.detach())}
            counts.add({"labels": batch[1], "attention_mask": (batch[0] != _PAD).long()})
            if step == _LABEL_STEPS:
                scalars |= counts.shares() | _prompt_share(batch)
        scalars["epoch"] = (step + 1) / per_epoch
        if step % _EVAL_EVERY == 0:
            scalars |= _evaluate(model, evaluated, run)
        loss.backward()
        yield loss, scalars


def _prompt_share(batch: Rows) -> Scalars:
    """Return the share of the prompts' tokens with a label."""
    prompts = batch[1][:, 1:_PROMPT]
    return {"labels/prompt_share": float((prompts != _IGNORED).float().mean())}


@torch.no_grad()
def _evaluate(model: Reader, rows: Rows, run: Tuned) -> Scalars:
    """Return the metrics on rows that are not trained."""
    if run.algorithm != "reward_model":
        loss = float(loss_of(model, rows))
        return {"eval/loss": loss, TRUTH: -loss}
    margin = score(model, rows[0]) - score(model, rows[1])
    accuracy = float((margin > 0).float().mean())
    loss = float(-functional.logsigmoid(margin).mean())
    return {"eval/loss": loss, "eval/accuracy": accuracy, TRUTH: -loss}


def score(model: Reader, tokens: Tensor) -> Tensor:
    """Return the reward of texts."""
    scores: Tensor = model.score(model(tokens)[:, -1])
    return scores[:, 0]


def _pairs_maker(run: Tuned) -> Callable[[int, bool], Rows]:
    """Return a function that makes pairs; the chosen text has more tokens of a kind."""

    def make(num: int, is_trained: bool) -> Rows:
        first, second = torch.randint(_FIRST, _TOKENS, (2, num, _LONGEST))
        quality = [
            (texts < _TOKENS // 2).sum(1) + run.noise * torch.randn(num)
            for texts in (first, second)
        ]
        is_first = quality[0] > quality[1]
        is_exchanged = is_trained & (torch.rand(num) < run.label_noise)
        is_chosen = (is_first ^ is_exchanged)[:, None]
        return torch.where(is_chosen, first, second), torch.where(is_chosen, second, first)

    return make
