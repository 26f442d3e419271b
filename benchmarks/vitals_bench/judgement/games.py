"""Trainings whose loss is no measure of how well they do: a GAN, REINFORCE and PPO."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from vitals_bench.judgement.tasks import FIRST_EVALUATION, Batch, LossKind, Task, mlp

MODES = 8
"""Points on a ring that the generator is to cover."""
EPISODES, LENGTH = 16, 50
DISCOUNT = 0.98
CLIP_RATIO, TRACE, EPOCHS, MINI_BATCHES = 0.2, 0.95, 4, 4


@dataclass(frozen=True, kw_only=True)
class GanTask(Task):
    """Two networks in one step: the generator learns a ring of eight points."""

    steps: int = 600
    lr: float = 1e-3
    loss_kind: LossKind = "adversarial"
    tail: float = 0.0
    """Width of Cauchy noise on the real data."""

    def model(self) -> nn.Module:
        """Return generator and discriminator."""
        return nn.ModuleList([mlp(4, 32, 2), mlp(2, 32, 1)])

    def batch(self, index: int) -> Batch:
        """Return real points and the generator's random inputs."""
        generator = self.generator(index)
        angle = torch.randint(0, MODES, (64,), generator=generator) * math.pi / 4
        noise = torch.randn(64, 2, generator=generator)
        if self.tail:
            width = torch.randn(64, 1, generator=generator).abs().clamp(min=1e-3)
            noise = noise / width * self.tail
        real = torch.stack([angle.cos(), angle.sin()], 1) * 2 + 0.05 * noise
        return real, torch.randn(64, 4, generator=generator)

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the sum of both networks' losses; each learns by its own alone."""
        generator, discriminator = cast("nn.ModuleList", model)
        made = generator(batch[1])
        real, fake = discriminator(batch[0]), discriminator(made.detach())
        judged = functional.softplus(-real) + functional.softplus(fake)
        frozen = {name: p.detach() for name, p in discriminator.named_parameters()}
        believed = torch.func.functional_call(discriminator, frozen, (made,))
        return (judged + functional.softplus(-believed)).squeeze(1)

    def evaluate(self, model: nn.Module) -> float:
        """Return how far made points are from the ring's, and the ring's from made ones."""
        (generator, _) = cast("nn.ModuleList", model)
        with torch.no_grad():
            made = generator(torch.randn(512, 4, generator=torch.Generator().manual_seed(1)))
        angle = torch.arange(MODES) * math.pi / 4
        distance = torch.cdist(made, torch.stack([angle.cos(), angle.sin()], 1) * 2)
        return (distance.min(1).values.mean() + distance.min(0).values.mean()).item()


def _balance(state: Tensor, force: Tensor) -> Tensor:
    """Return the state of carts with a pole after a fiftieth of a second."""
    _, speed, angle, turn = state.unbind(1)
    push = (force + 0.05 * turn.square() * angle.sin()) / 1.1
    gravity = 9.8 * angle.sin() - angle.cos() * push
    turning = gravity / (0.5 * (4 / 3 - 0.1 * angle.cos().square() / 1.1))
    moving = push - 0.05 * turning * angle.cos() / 1.1
    change = torch.stack([speed, moving, turn, turning], 1)
    return state + 0.02 * change


def _stands(state: Tensor) -> Tensor:
    return ((state[:, 2].abs() < 0.21) & (state[:, 0].abs() < 2.4)).float()


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """What was seen, done and earned; all of shape (time, episodes, ...)."""

    states: Tensor
    actions: Tensor
    rewards: Tensor
    alive: Tensor
    """1 where the pole stood before the action."""


@dataclass(frozen=True, kw_only=True)
class ReinforceTask(Task):
    """Policy gradients with a learnt baseline; a new set of episodes for each update."""

    steps: int = 250
    lr: float = 5e-3
    loss_kind: LossKind = "rl"
    jackpot: float = 0.0
    """Chance of a reward of 60 at a step."""
    tail: bool = False
    """Whether each episode's rewards have a scale of Cauchy's distribution."""

    @property
    def is_on_policy(self) -> bool:
        """Each batch is played by the present model."""
        return True

    def model(self) -> nn.Module:
        """Return policy (two numbers) and value (one) in one network."""
        return mlp(4, 32, 3)

    def batch(self, index: int) -> Batch:
        """Return nothing: a batch is played, see ``collect``."""
        return (torch.tensor(index),)

    def play(self, model: nn.Module, generator: torch.Generator, episodes: int) -> Rollout:
        """Return episodes that the model played."""
        state = (torch.rand(episodes, 4, generator=generator) - 0.5) * 0.1
        alive = torch.ones(episodes)
        states, actions, rewards, lived = [], [], [], []
        for _ in range(LENGTH):
            with torch.no_grad():
                right = torch.softmax(model(state)[:, :2], 1)[:, 1]
            action = (torch.rand(episodes, generator=generator) < right).long()
            states.append(state)
            actions.append(action)
            lived.append(alive)
            state = _balance(state, (action * 2 - 1).float() * 10)
            alive = alive * _stands(state)
            rewards.append(alive)
        return Rollout(
            states=torch.stack(states),
            actions=torch.stack(actions),
            rewards=torch.stack(rewards),
            alive=torch.stack(lived),
        )

    def _earned(self, rollout: Rollout, generator: torch.Generator) -> Tensor:
        rewards = rollout.rewards
        if self.jackpot:
            hits = torch.rand(rewards.shape, generator=generator) < self.jackpot
            rewards = rewards * (1 + 60 * hits.float())
        if self.tail:
            above, below = torch.randn(2, rewards.shape[1], generator=generator).abs()
            rewards = rewards * (above / below.clamp(min=0.03))
        returns, total = torch.zeros_like(rewards), torch.zeros(rewards.shape[1])
        for t in reversed(range(LENGTH)):
            total = rewards[t] + DISCOUNT * total
            returns[t] = total
        return returns

    def collect(self, model: nn.Module, index: int) -> Batch:
        """Return states, actions, returns, and which of them count."""
        generator = self.generator(index)
        rollout = self.play(model, generator, EPISODES)
        returns = self._earned(rollout, generator)
        return rollout.states, rollout.actions, returns, rollout.alive

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return each episode's loss of policy and value."""
        states, actions, returns, alive = batch
        out = model(states.flatten(0, 1))
        value, goal = out[:, 2], returns.flatten() / 10
        taken = functional.log_softmax(out[:, :2], 1).gather(1, actions.view(-1, 1))[:, 0]
        each = -(taken * (goal - value.detach())) + 0.5 * (goal - value).square()
        each = (each * alive.flatten()).view(alive.shape)
        mean: Tensor = each.sum(0) / alive.sum(0).clamp(min=1)
        return mean

    def evaluate(self, model: nn.Module) -> float:
        """Return how many of 50 moments the pole did not stand, plus 1."""
        stood = [
            self.play(model, self.generator(FIRST_EVALUATION + k), 32).rewards.sum(0).mean().item()
            for k in range(2)
        ]
        return LENGTH + 1 - statistics.fmean(stood)


@dataclass(frozen=True, kw_only=True)
class PpoTask(ReinforceTask):
    """PPO: four epochs of four mini-batches over each set of episodes, clipped, with entropy."""

    steps: int = 640
    lr: float = 3e-3
    _memory: dict[int, Batch] = field(default_factory=dict, repr=False)

    def collect(self, model: nn.Module, index: int) -> Batch:
        """Return a mini-batch of the newest episodes; every sixteenth asks for new ones."""
        updates = EPOCHS * MINI_BATCHES
        iteration, at = divmod(index, updates)
        if at == 0 or iteration not in self._memory:
            self._memory.clear()
            self._memory[iteration] = self._episodes(model, iteration)
        epoch, part = divmod(at, MINI_BATCHES)
        whole = self._memory[iteration]
        order = torch.randperm(len(whole[0]), generator=self.generator(iteration, 20 + epoch))
        size = -(-len(order) // MINI_BATCHES)
        chosen = order[part * size : (part + 1) * size]
        return tuple(tensor[chosen] for tensor in whole)

    def _episodes(self, model: nn.Module, iteration: int) -> Batch:
        generator = self.generator(iteration)
        rollout = self.play(model, generator, EPISODES)
        rewards = rollout.rewards / 10
        with torch.no_grad():
            out = model(rollout.states)
        value = out[..., 2] * rollout.alive
        logp = functional.log_softmax(out[..., :2], -1).gather(-1, rollout.actions[..., None])
        advantage, following = torch.zeros_like(value), torch.zeros(EPISODES)
        after = torch.zeros(EPISODES)
        for t in reversed(range(LENGTH)):
            surprise = rewards[t] + DISCOUNT * after * rewards[t].sign() - value[t]
            following = surprise + DISCOUNT * TRACE * following * rewards[t].sign()
            advantage[t], after = following, value[t]
        lived = rollout.alive.flatten() > 0
        flat = (rollout.states.flatten(0, 1), rollout.actions.flatten(), logp.flatten())
        goals = (advantage + value).flatten()
        return tuple(x[lived] for x in (*flat, advantage.flatten(), goals))

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return each moment's clipped loss of the policy, of the value, and its entropy."""
        states, actions, before, advantage, goals = batch
        out = model(states)
        logp = functional.log_softmax(out[:, :2], 1)
        ratio = (logp.gather(1, actions[:, None])[:, 0] - before).exp()
        gain = (advantage - advantage.mean()) / (advantage.std(unbiased=False) + 1e-8)
        kept = torch.minimum(ratio * gain, ratio.clamp(1 - CLIP_RATIO, 1 + CLIP_RATIO) * gain)
        entropy = -(logp.exp() * logp).sum(1)
        each: Tensor = -kept + 0.5 * (out[:, 2] - goals).square() - 0.01 * entropy
        return each
