"""A loop as CleanRL's PPO: several epochs over each rollout, the rate annealed, a stop by KL."""

import torch
from torch import nn

from tests.real_programs.data import Walk
from tests.real_programs.models import Agent

num_envs, num_steps, num_updates, update_epochs, num_minibatches = 4, 32, 8, 3, 4
learning_rate, gamma, gae_lambda, clip_coef, target_kl = 1e-2, 0.99, 0.95, 0.2, 0.05
ent_coef, vf_coef, max_grad_norm = 0.01, 0.5, 0.5
batch_size = num_envs * num_steps
minibatch_size = batch_size // num_minibatches

torch.manual_seed(1)
envs = Walk(num_envs)
agent = Agent()
optimizer = torch.optim.Adam(agent.parameters(), lr=learning_rate, eps=1e-5)
log = []
next_obs, next_done = envs.reset(), torch.zeros(num_envs)
for update in range(num_updates):
    optimizer.param_groups[0]["lr"] = (1.0 - update / num_updates) * learning_rate
    obs, actions = torch.zeros(num_steps, num_envs, 1), torch.zeros(num_steps, num_envs)
    logprobs, rewards, dones, values = torch.zeros(4, num_steps, num_envs).unbind()
    for step in range(num_steps):
        obs[step], dones[step] = next_obs, next_done
        with torch.no_grad():
            action, logprobs[step], _, value = agent.get_action_and_value(next_obs)
        values[step], actions[step] = value.flatten(), action
        next_obs, rewards[step], next_done = envs.step(action)
    with torch.no_grad():
        following, advantages, last = agent.get_value(next_obs).flatten(), rewards * 0, 0.0
        for t in reversed(range(num_steps)):
            alive = 1.0 - (next_done if t == num_steps - 1 else dones[t + 1])
            bootstrap = following if t == num_steps - 1 else values[t + 1]
            delta = rewards[t] + gamma * bootstrap * alive - values[t]
            advantages[t] = last = delta + gamma * gae_lambda * alive * last
        returns = advantages + values
    b_obs, b_actions, b_logprobs = obs.view(-1, 1), actions.view(-1), logprobs.view(-1)
    b_advantages, b_returns = advantages.view(-1), returns.view(-1)
    for _epoch in range(update_epochs):
        b_inds = torch.randperm(batch_size)
        for start in range(0, batch_size, minibatch_size):
            mb = b_inds[start : start + minibatch_size]
            _, newlogprob, entropy, newvalue = agent.get_action_and_value(b_obs[mb], b_actions[mb])
            logratio = newlogprob - b_logprobs[mb]
            ratio = logratio.exp()
            with torch.no_grad():
                approx_kl = ((ratio - 1) - logratio).mean()
            adv = (b_advantages[mb] - b_advantages[mb].mean()) / (b_advantages[mb].std() + 1e-8)
            pg_loss = torch.max(-adv * ratio, -adv * ratio.clamp(1 - clip_coef, 1 + clip_coef))
            v_loss = 0.5 * (newvalue.view(-1) - b_returns[mb]).square().mean()
            loss = pg_loss.mean() - ent_coef * entropy.mean() + vf_coef * v_loss
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), max_grad_norm)
            optimizer.step()
        if approx_kl > target_kl:
            break
    log.append((rewards.mean().item(), v_loss.item(), approx_kl.item()))
