"""Group-relative policy gradients on a table of logits, with the scalars that TRL logs.

A policy is a table of logits by prompt, position and token; token 0 ends a completion. The steps
are those of GRPO with one update per batch: sampling, rewards, advantages within a group, a
gradient with a penalty for divergence, and Adam. It takes milliseconds per hundred steps, and its
curves have the shapes of real runs: noise of the samples, saturation, drift and collapse.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Rewards = Callable[[Ints, Ints, int, np.random.Generator], Floats]
"""Rewards of completions [prompt, sample, position], with their lengths, at a step."""


@dataclass(frozen=True, kw_only=True)
class Course:
    """Settings of one run."""

    rewards: Rewards
    steps: int = 200
    prompts: int = 8
    group: int = 8
    length: int = 12
    tokens: int = 8
    learning_rate: float = 0.05
    beta: float = 0.02
    end_bias: float = 0.0
    """Added to the logit of the token that ends a completion."""
    has_end: bool = True
    held_out: Rewards | None = None
    """Reward of the evaluation, every 10 steps."""


def train(course: Course, seed: int) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield the scalars of each step."""
    rng = np.random.default_rng(seed)
    shape = (course.prompts, course.length, course.tokens)
    logits = rng.normal(0.0, 0.5, shape)
    logits[:, :, 0] += course.end_bias if course.has_end else -1e9
    reference, first, second = _log_softmax(logits), np.zeros(shape), np.zeros(shape)
    for step in range(course.steps):
        logp = _log_softmax(logits)
        probs = np.exp(logp)
        tokens, lengths, mask = _sample(probs, course, rng)
        rewards = course.rewards(tokens, lengths, step, rng)
        scalars = _scalars(logp, reference, tokens, lengths, mask, rewards, course)
        if course.held_out is not None and step % 10 == 0:
            scalars["eval/reward"] = float(course.held_out(tokens, lengths, step, rng).mean())
        yield step, scalars
        centered = rewards - rewards.mean(axis=1, keepdims=True)
        advantages = centered / (rewards.std(axis=1, keepdims=True) + 1e-4)
        gradient = _gradient(probs, logp, reference, tokens, mask, advantages, course.beta)
        first, second = 0.9 * first + 0.1 * gradient, 0.99 * second + 0.01 * gradient**2
        logits = logits + course.learning_rate * first / (np.sqrt(second) + 1e-8)


def _log_softmax(logits: Floats) -> Floats:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    result: Floats = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def _sample(probs: Floats, course: Course, rng: np.random.Generator) -> tuple[Ints, Ints, Floats]:
    """Return tokens, lengths, and 1 for each token that was generated."""
    cumulative = probs.cumsum(axis=-1)[:, None]
    draws = rng.random((course.prompts, course.group, course.length, 1))
    tokens = np.minimum((draws > cumulative).sum(axis=-1), course.tokens - 1)
    ends = (tokens == 0) if course.has_end else np.zeros(tokens.shape, dtype=bool)
    before = np.cumsum(ends, axis=-1) - ends
    mask = (before == 0).astype(np.float64)
    return tokens, mask.sum(axis=-1).astype(np.int64), mask


def _scalars(
    logp: Floats,
    reference: Floats,
    tokens: Ints,
    lengths: Ints,
    mask: Floats,
    rewards: Floats,
    course: Course,
) -> dict[str, float]:
    entropy = -(np.exp(logp) * np.where(np.isfinite(logp), logp, 0.0)).sum(axis=-1)
    ours, theirs = (_of_tokens(table, tokens) for table in (logp, reference))
    gap = theirs - ours
    ended = (tokens == 0).any(axis=-1) if course.has_end else np.zeros(rewards.shape, dtype=bool)
    return {
        "entropy": float((entropy[:, None] * mask).sum() / mask.sum()),
        "kl": float(((np.exp(gap) - gap - 1.0) * mask).sum() / mask.sum()),
        "reward": float(rewards.mean()),
        "reward_std": float(rewards.std(axis=1).mean()),
        "frac_reward_zero_std": float((rewards.std(axis=1) < 1e-9).mean()),
        "completions/clipped_ratio": float(1.0 - ended.mean()),
        "completions/mean_length": float(lengths.mean()),
    }


def _of_tokens(table: Floats, tokens: Ints) -> Floats:
    taken: Floats = np.take_along_axis(table[:, None], tokens[..., None], axis=-1)[..., 0]
    return taken


def _gradient(
    probs: Floats,
    logp: Floats,
    reference: Floats,
    tokens: Ints,
    mask: Floats,
    advantages: Floats,
    beta: float,
) -> Floats:
    weights = advantages[..., None] * mask / mask.sum()
    picked = np.zeros((*tokens.shape, probs.shape[-1]))
    np.put_along_axis(picked, tokens[..., None], 1.0, axis=-1)
    gradient: Floats = (weights[..., None] * (picked - probs[:, None])).sum(axis=1)
    if beta:
        gap = logp - reference
        kl = (probs * gap).sum(axis=-1, keepdims=True)
        share = (mask.sum(axis=1) / mask.sum())[..., None]
        gradient -= beta * share * probs * (gap - kl)
    return gradient


# ---------------------------------------------------------------------------------------- rewards


def matches(length: int, *, seed: int = 0) -> Rewards:
    """Return the share of positions with the wanted token; the text must end after them."""
    wanted = np.random.default_rng(seed).integers(1, 8, size=64)

    def rewards(tokens: Ints, lengths: Ints, step: int, rng: np.random.Generator) -> Floats:
        num = min(length, tokens.shape[-1])
        prompts = np.arange(tokens.shape[0])[:, None, None]
        target = wanted[(prompts * 7 + np.arange(num)) % 64]
        within = np.arange(num) < lengths[..., None]
        right = ((tokens[..., :num] == target) & within).mean(axis=-1)
        too_long = np.maximum(lengths - num - 1, 0) / tokens.shape[-1]
        result: Floats = right - 0.5 * too_long
        return result

    return rewards


def exact(inner: Rewards, least: float) -> Rewards:
    """Return 1 if the inner reward is at least ``least``, otherwise 0."""

    def rewards(tokens: Ints, lengths: Ints, step: int, rng: np.random.Generator) -> Floats:
        return (inner(tokens, lengths, step, rng) >= least).astype(np.float64)

    return rewards


def noisy(inner: Rewards, sigma: float) -> Rewards:
    """Return the inner reward with noise, as of a reward model."""

    def rewards(tokens: Ints, lengths: Ints, step: int, rng: np.random.Generator) -> Floats:
        result: Floats = inner(tokens, lengths, step, rng)
        return result + rng.normal(0.0, sigma, result.shape)

    return rewards


def pure_noise(tokens: Ints, lengths: Ints, step: int, rng: np.random.Generator) -> Floats:
    """Return a reward without signal."""
    return rng.normal(0.0, 1.0, lengths.shape)


def constant(value: float) -> Rewards:
    """Return the same reward for all, as of a broken parser."""

    def rewards(tokens: Ints, lengths: Ints, step: int, rng: np.random.Generator) -> Floats:
        return np.full(lengths.shape, value)

    return rewards


def longer(tokens: Ints, lengths: Ints, step: int, rng: np.random.Generator) -> Floats:
    """Return a reward that prefers length."""
    result: Floats = lengths / tokens.shape[-1]
    return result


def repeats(tokens: Ints, lengths: Ints, step: int, rng: np.random.Generator) -> Floats:
    """Return the share of one token: a completion that repeats it to the limit satisfies it."""
    within = np.arange(tokens.shape[-1]) < lengths[..., None]
    result: Floats = ((tokens == 1) & within).mean(axis=-1)
    return result


def switched(before: Rewards, after: Rewards, at: int) -> Rewards:
    """Return one reward up to a step, and another from it."""

    def rewards(tokens: Ints, lengths: Ints, step: int, rng: np.random.Generator) -> Floats:
        return (before if step < at else after)(tokens, lengths, step, rng)

    return rewards


HEALTHY: dict[str, Course] = {
    "solved": Course(rewards=matches(6)),
    "solved fast": Course(rewards=matches(6), learning_rate=0.2),
    "solved slowly": Course(rewards=matches(6), learning_rate=0.015, steps=300),
    "right or wrong": Course(rewards=exact(matches(3), 1.0), steps=300, group=16),
    "noisy reward model": Course(rewards=noisy(matches(6), 0.3), steps=300),
    "length grows": Course(rewards=matches(11), end_bias=1.5, steps=300),
    "always full length": Course(rewards=matches(12), has_end=False, steps=300),
    "full length, small rate": Course(
        rewards=noisy(matches(12), 0.3), has_end=False, learning_rate=0.004, steps=400
    ),
    "strong penalty": Course(rewards=matches(6), beta=0.5),
    "no penalty": Course(rewards=matches(6), beta=0.0, steps=400),
    "small rate": Course(rewards=matches(6), learning_rate=0.001),
    "few prompts": Course(rewards=matches(6), prompts=2, steps=300),
    "little signal": Course(
        rewards=noisy(matches(6), 1.0), prompts=2, steps=400, learning_rate=0.03
    ),
    "small groups": Course(rewards=matches(6), group=4, prompts=4, steps=300),
}
"""Runs that work, with low entropy, equal rewards or long completions at their end."""

FAULTY: dict[str, Course] = {
    "reward without signal": Course(rewards=pure_noise, learning_rate=0.1, beta=0.0, steps=400),
    "signal lost": Course(
        rewards=switched(matches(6), pure_noise, 60), learning_rate=0.1, beta=0.0, steps=400
    ),
    "constant reward": Course(rewards=constant(0.0)),
    "parser breaks": Course(rewards=switched(matches(6), constant(0.0), 60)),
    "never right": Course(rewards=exact(matches(11), 1.0)),
    "prefers length": Course(
        rewards=switched(noisy(matches(4), 0.05), longer, 80),
        held_out=matches(4),
        steps=300,
        learning_rate=0.1,
    ),
    "repeats one token": Course(rewards=repeats, learning_rate=0.1),
    "drifts on noise": Course(rewards=pure_noise, learning_rate=0.3, beta=0.0, steps=300),
}
