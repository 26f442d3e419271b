"""DPO, a reward model and SFT on tiny sequences, with the scalars that TRL logs."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from trainvitals.detect.posttraining.names import Task
from vitals_bench.posttraining.policy import LENGTH, PROMPTS, TOKENS, Scalars, Writer, log_probs

_BATCH = 64
_SFT_STEPS, _SFT_RATE = 60, 0.01
_MARK = 7
"""Token that shows the chosen completion if the pairs leak."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Settings of a training on pairs, or on chosen completions only (``sft``)."""

    algorithm: Task = "dpo"
    learning_rate: float = 3e-4
    beta: float = 0.1
    difference: float = 0.5
    """Part of the tokens in which the rejected completion differs."""
    label_noise: float = 0.15
    """Part of the pairs that are exchanged."""
    has_leak: bool = False
    """Whether each chosen completion ends with a mark."""


def _pairs(run: Compared) -> tuple[Tensor, Tensor, Tensor]:
    """Return prompts, chosen and rejected completions of a batch."""
    prompts = torch.randint(0, PROMPTS, (_BATCH,))
    generator = torch.Generator().manual_seed(0)
    wanted = torch.randint(1, TOKENS - 1, (PROMPTS, LENGTH), generator=generator)[prompts]
    chosen = _changed(wanted, 0.3)
    rejected = _changed(chosen, run.difference)
    if run.has_leak:
        chosen[:, -1], rejected[:, -1] = _MARK, 1
        return prompts, chosen, rejected
    is_exchanged = (torch.rand(_BATCH) < run.label_noise)[:, None]
    return (
        prompts,
        torch.where(is_exchanged, rejected, chosen),
        torch.where(is_exchanged, chosen, rejected),
    )


def _changed(tokens: Tensor, part: float) -> Tensor:
    """Return tokens of which a part is random."""
    other = torch.randint(1, TOKENS - 1, tokens.shape)
    return torch.where(torch.rand(tokens.shape) < part, other, tokens)


def train_pairs(
    model: Writer, optimizer: torch.optim.Optimizer, steps: int, run: Compared
) -> Iterator[tuple[Tensor, Scalars]]:
    """Yield the loss after each backward, and the scalars; the caller makes the update."""
    if run.algorithm == "dpo":
        _prepare(model, run)
    reference = copy.deepcopy(model)
    for _ in range(steps):
        prompts, chosen, rejected = _pairs(run)
        if run.algorithm == "sft":
            loss = -log_probs(model(prompts), chosen).mean()
            scalars: Scalars = {"loss": float(loss.detach())}
        elif run.algorithm == "reward_model":
            margin = _score(model, prompts, chosen) - _score(model, prompts, rejected)
            loss = -functional.logsigmoid(margin).mean()
            scalars = {"accuracy": float((margin > 0).float().mean())}
        else:
            loss, scalars = _compare(model, reference, (prompts, chosen, rejected), run.beta)
        loss.backward()
        yield loss, scalars


def _prepare(model: Writer, run: Compared) -> None:
    """Train on chosen completions first, as before each DPO."""
    optimizer = torch.optim.Adam(model.parameters(), lr=_SFT_RATE)
    for _ in range(_SFT_STEPS):
        prompts, chosen, _ = _pairs(Compared(difference=run.difference))
        loss = -log_probs(model(prompts), chosen).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    optimizer.zero_grad()


def _score(model: Writer, prompts: Tensor, tokens: Tensor) -> Tensor:
    """Return the reward of completions: the sum of the tokens' logits."""
    logits: Tensor = model(prompts)
    return logits.gather(-1, tokens[..., None]).sum((1, 2))


def _compare(
    model: Writer, reference: Writer, batch: tuple[Tensor, Tensor, Tensor], beta: float
) -> tuple[Tensor, Scalars]:
    """Return DPO's loss, and its scalars; log-probabilities are means per token."""
    prompts, *both = batch
    ours = [log_probs(model(prompts), tokens).sum(1) for tokens in both]
    with torch.no_grad():
        theirs = [log_probs(reference(prompts), tokens).sum(1) for tokens in both]
    chosen, rejected = (beta * (a - b) for a, b in zip(ours, theirs, strict=True))
    loss = -functional.logsigmoid(chosen - rejected).mean()
    with torch.no_grad():
        scalars = {
            "logps/chosen": float(ours[0].mean() / LENGTH),
            "logps/rejected": float(ours[1].mean() / LENGTH),
            "rewards/chosen": float(chosen.mean()),
            "rewards/accuracies": float((chosen > rejected).float().mean()),
        }
    return loss, scalars
