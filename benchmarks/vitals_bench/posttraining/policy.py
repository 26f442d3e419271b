"""GRPO, RLOO and PPO on a tiny network that writes tokens, with the scalars that TRL logs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainvitals.detect.posttraining.names import Task

Scalars = dict[str, float]
Rewards = Callable[[Tensor, Tensor, int], Tensor]
"""Rewards of completions [completion, position], with their lengths, at a step."""

PROMPTS, GROUP, LENGTH, TOKENS = 8, 8, 10, 8
_WIDTH = 32
_CLIP = 0.2
_EVAL_EVERY = 5
TRUTH = "truth"
"""Name of the success that the training is for; it is not logged, and higher is better."""


class Writer(nn.Module):
    """Logits of each token by prompt and position; token 0 ends a completion."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt = nn.Embedding(PROMPTS, _WIDTH)
        self.position = nn.Embedding(LENGTH, _WIDTH)
        self.hidden = nn.Linear(_WIDTH, _WIDTH)
        self.head = nn.Linear(_WIDTH, TOKENS)
        self.value = nn.Embedding(PROMPTS, 1)
        nn.init.zeros_(self.value.weight)

    def forward(self, prompts: Tensor) -> Tensor:
        """Return the logits [completion, position, token]."""
        added = self.prompt.weight[:, None] + self.position.weight
        logits: Tensor = self.head(torch.tanh(self.hidden(torch.tanh(added))))
        return logits[prompts]


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """Settings of a policy trained on its own completions; faults hold from ``onset`` on."""

    rewards: Rewards
    truth: Rewards | None = None
    """The reward that is meant, if a fault changes the one that is trained."""
    held_out: Rewards | None = None
    algorithm: Task = "grpo"
    learning_rate: float = 0.01
    beta: float = 0.02
    updates: int = 1
    """Updates per batch of completions."""
    end_bias: float = 0.0
    onset: int = 1 << 30
    rate_factor: float = 1.0
    temperature: float = 1.0
    """Temperature of the sampler; the trainer assumes 1."""
    has_stale_sampler: bool = False
    has_no_end: bool = False
    """Whether completions cannot end."""


def sample(logits: Tensor, temperature: float, *, has_end: bool) -> Tensor:
    """Return completions of the policy."""
    if not has_end:
        logits = logits.index_fill(-1, torch.tensor(0), -1e9)
    probs = (logits / temperature).softmax(-1)
    return torch.multinomial(probs.flatten(0, 1), 1).view(probs.shape[:2])


def mask_of(tokens: Tensor) -> Tensor:
    """Return 1 for each token up to the one that ends."""
    ends = (tokens == 0).long()
    return ((ends.cumsum(1) - ends) == 0).float()


def log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the log-probability of each token."""
    return logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]


def train_policy(
    model: Writer, optimizer: torch.optim.Optimizer, steps: int, run: Sampled
) -> Iterator[tuple[Tensor, Scalars]]:
    """Yield the loss after each backward, and the scalars; the caller makes the update."""
    with torch.no_grad():
        model.head.bias[0] += run.end_bias
    reference, sampler = copy.deepcopy(model), copy.deepcopy(model)
    prompts = torch.arange(PROMPTS).repeat_interleave(GROUP)
    for step in range(0, steps, run.updates):
        is_faulty = step >= run.onset
        if is_faulty:
            optimizer.param_groups[0]["lr"] = run.learning_rate * run.rate_factor
        if not (is_faulty and run.has_stale_sampler):
            sampler.load_state_dict(model.state_dict())
        temperature = run.temperature if is_faulty else 1.0
        with torch.no_grad():
            logits = sampler(prompts)
            tokens = sample(logits, temperature, has_end=not (is_faulty and run.has_no_end))
            mask = mask_of(tokens)
            lengths = mask.sum(1)
            rewards = run.rewards(tokens, lengths, step)
            old = log_probs(model(prompts), tokens)
            gap = old - log_probs(logits / temperature, tokens)
            theirs = log_probs(reference(prompts), tokens)
        advantages = _advantages(rewards, model, prompts, run.algorithm)[:, None]
        for update in range(run.updates):
            logits = model(prompts)
            ours = log_probs(logits, tokens)
            ratio = (ours - old).exp()
            clipped = ratio.clamp(1.0 - _CLIP, 1.0 + _CLIP)
            kl = (theirs - ours).exp() - (theirs - ours) - 1.0
            gain = torch.minimum(ratio * advantages, clipped * advantages) - run.beta * kl
            loss = -(gain * mask).sum() / mask.sum()
            if run.algorithm == "ppo":
                loss = loss + 0.1 * functional.mse_loss(model.value(prompts)[:, 0], rewards)
            loss.backward()
            scalars: Scalars = {}
            if update == run.updates - 1:
                means = _means(logits.detach(), mask, ratio.detach(), kl.detach(), gap)
                scalars = _named(run.algorithm, means, tokens, rewards)
                if run.held_out is not None and step // run.updates % _EVAL_EVERY == 0:
                    scalars["eval/reward"] = float(run.held_out(tokens, lengths, step).mean())
                meant = run.truth or run.held_out
                success = rewards if meant is None else meant(tokens, lengths, step)
                scalars[TRUTH] = float(success.mean())
            yield loss, scalars


def _advantages(rewards: Tensor, model: Writer, prompts: Tensor, algorithm: str) -> Tensor:
    """Return the advantages of the algorithm."""
    if algorithm == "ppo":
        centered = rewards - model.value(prompts)[:, 0].detach()
        normalized: Tensor = (centered - centered.mean()) / (centered.std() + 1e-4)
        return normalized
    groups = rewards.view(PROMPTS, GROUP)
    centered = groups - groups.mean(1, keepdim=True)
    if algorithm == "rloo":
        return (centered * GROUP / (GROUP - 1)).flatten()
    return (centered / (groups.std(1, keepdim=True) + 1e-4)).flatten()


def _means(logits: Tensor, mask: Tensor, ratio: Tensor, kl: Tensor, gap: Tensor) -> Scalars:
    """Return means over the tokens."""
    entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    is_clipped = ((ratio - 1.0).abs() > _CLIP).float()
    values = {"entropy": entropy, "ratio": ratio, "kl": kl, "clip": is_clipped, "gap": gap.abs()}
    return {name: float((value * mask).sum() / mask.sum()) for name, value in values.items()}


def _named(algorithm: str, means: Scalars, tokens: Tensor, rewards: Tensor) -> Scalars:
    """Return the scalars under the names of TRL's trainer."""
    groups = rewards.view(PROMPTS, GROUP)
    if algorithm == "ppo":
        return {
            "policy/entropy_avg": means["entropy"],
            "objective/kl": means["kl"] * float(mask_of(tokens).sum(1).mean()),
            "objective/scores": float(rewards.mean()),
            "policy/clipfrac_avg": means["clip"],
            "val/ratio": means["ratio"],
        }
    return {
        "entropy": means["entropy"],
        "kl": means["kl"],
        "reward": float(rewards.mean()),
        "frac_reward_zero_std": float((groups.std(1) < 1e-6).float().mean()),
        "completions/clipped_ratio": float((tokens != 0).all(1).float().mean()),
        "clip_ratio/region_mean": means["clip"],
        "sampling/sampling_logp_difference/mean": means["gap"],
    }


# ---------------------------------------------------------------------------------------- rewards


def matches(length: int) -> Rewards:
    """Return the share of positions with the wanted token; the text must end after them."""
    generator = torch.Generator().manual_seed(0)
    wanted = torch.randint(1, TOKENS, (PROMPTS, LENGTH), generator=generator)
    target = wanted.repeat_interleave(GROUP, 0)[:, :length]

    def rewards(tokens: Tensor, lengths: Tensor, step: int) -> Tensor:
        within = torch.arange(length) < lengths[:, None]
        right = ((tokens[:, :length] == target) & within).float().mean(1)
        return right - 0.5 * (lengths - length - 1).clamp(min=0.0) / LENGTH

    return rewards


def exact(inner: Rewards, least: float = 1.0) -> Rewards:
    """Return 1 if the inner reward is at least ``least``, otherwise 0."""
    return lambda tokens, lengths, step: (inner(tokens, lengths, step) >= least).float()


def noisy(inner: Rewards, sigma: float) -> Rewards:
    """Return the reward with noise, as of a reward model."""
    return lambda tokens, lengths, step: (
        inner(tokens, lengths, step) + sigma * torch.randn(len(tokens))
    )


def wandering(inner: Rewards, sigma: float) -> Rewards:
    """Return the reward with noise that all completions of a step share, and that is slow."""
    level = [0.0]

    def rewards(tokens: Tensor, lengths: Tensor, step: int) -> Tensor:
        before = level[0] if step else 0.0  # each training starts at 0
        level[0] = 0.95 * before + 0.31 * sigma * float(torch.randn(()))
        return inner(tokens, lengths, step) + level[0]

    return rewards


def constant(value: float) -> Rewards:
    """Return the same reward for all, as of a broken parser."""
    return lambda tokens, lengths, step: torch.full((len(tokens),), value)


def noise(tokens: Tensor, lengths: Tensor, step: int) -> Tensor:
    """Return a reward without signal."""
    return torch.randn(len(tokens))


def longer(tokens: Tensor, lengths: Tensor, step: int) -> Tensor:
    """Return a reward that prefers length."""
    return lengths / LENGTH


def repeats(tokens: Tensor, lengths: Tensor, step: int) -> Tensor:
    """Return the share of one token, which a fixed text to the limit satisfies."""
    return ((tokens == 1) & (mask_of(tokens) > 0)).float().sum(1) / LENGTH


def switched(before: Rewards, after: Rewards, at: int) -> Rewards:
    """Return one reward up to a step, and another from it."""
    return lambda tokens, lengths, step: (before if step < at else after)(tokens, lengths, step)


def ended(inner: Rewards) -> Rewards:
    """Return the reward of completions that end, and 0 for those that are cut."""
    return lambda tokens, lengths, step: inner(tokens, lengths, step) * (tokens == 0).any(1).float()


def plus(first: Rewards, second: Rewards, weight: float) -> Rewards:
    """Return a reward with a part that the policy can exploit."""
    return lambda tokens, lengths, step: (
        first(tokens, lengths, step) + weight * second(tokens, lengths, step)
    )
