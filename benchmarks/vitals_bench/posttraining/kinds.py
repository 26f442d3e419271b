"""Kinds of trainings: faults with the detectors that name them, and healthy look-alikes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from trainvitals.detect.posttraining.names import Task
from vitals_bench.posttraining.pairs import Compared
from vitals_bench.posttraining.policy import (
    Sampled,
    constant,
    ended,
    exact,
    longer,
    matches,
    noise,
    noisy,
    plus,
    repeats,
    switched,
    wandering,
)
from vitals_bench.posttraining.supervised import Tuned
from vitals_bench.posttraining.with_trl import TrlRun

ONSET = 80
"""First step of faults that begin later."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of training."""

    task: Task
    run: Sampled | Compared | Tuned | TrlRun
    steps: int = 200
    detectors: tuple[str, ...] = ()
    """Detectors of which one names the fault; none: the training is healthy."""
    onset: int = 0
    """First step of the fault."""


def _sampled(run: Sampled, *detectors: str, onset: int = 0, steps: int = 200) -> Kind:
    return Kind(task=run.algorithm, run=run, detectors=detectors, onset=onset, steps=steps)


def _compared(run: Compared, *detectors: str, steps: int = 120) -> Kind:
    return Kind(task=run.algorithm, run=run, detectors=detectors, steps=steps)


def _tuned(run: Tuned, *detectors: str, steps: int = 200) -> Kind:
    return Kind(task=run.algorithm, run=run, detectors=detectors, steps=steps)


_RANKS = Tuned(algorithm="reward_model", base_steps=0)
_SOLVED = matches(6)
_LOST = ("policy_collapse", "kl_runaway")

FAULTS: Mapping[str, Kind] = {
    "reward without signal": _sampled(
        Sampled(rewards=noise, learning_rate=0.1, beta=0.0), *_LOST, steps=240
    ),
    "signal lost": _sampled(
        Sampled(
            rewards=switched(_SOLVED, noise, ONSET), truth=_SOLVED, learning_rate=0.03, beta=0.0
        ),
        *_LOST, onset=ONSET, steps=240,
    ),
    "parser breaks": _sampled(
        Sampled(rewards=switched(_SOLVED, constant(0.0), ONSET), truth=_SOLVED),
        "dead_reward", onset=ONSET,
    ),
    "constant reward": _sampled(Sampled(rewards=constant(0.5)), "dead_reward"),
    "task too hard": _sampled(Sampled(rewards=exact(matches(9))), "dead_reward"),
    "learning rate x100": _sampled(
        Sampled(rewards=_SOLVED, beta=0.0, rate_factor=100.0, onset=ONSET),
        *_LOST, "truncation", "dead_reward", "sampler_gap", onset=ONSET,
    ),
    "prefers length": _sampled(
        Sampled(rewards=switched(_SOLVED, longer, ONSET), held_out=_SOLVED),
        *_LOST, "truncation", "reward_hacking", onset=ONSET, steps=220,
    ),
    "flaw of the reward": _sampled(
        Sampled(
            rewards=switched(_SOLVED, plus(_SOLVED, repeats, 4.0), ONSET), held_out=_SOLVED
        ),
        "reward_hacking", "reward_jump", *_LOST, "truncation", onset=ONSET, steps=220,
    ),
    "repeats one token": _sampled(
        Sampled(rewards=repeats, beta=0.0, end_bias=1.0), "policy_collapse", "truncation"
    ),
    "no end of text": _sampled(
        Sampled(rewards=ended(_SOLVED), has_no_end=True, onset=ONSET),
        "truncation", "policy_collapse", onset=ONSET, steps=220,
    ),
    "stale sampler": _sampled(
        Sampled(rewards=_SOLVED, has_stale_sampler=True, onset=20), "sampler_gap", onset=20
    ),
    "sampler's temperature": _sampled(
        Sampled(rewards=_SOLVED, temperature=1.6, onset=ONSET), "sampler_gap", onset=ONSET
    ),
    "PPO, too many updates": _sampled(
        Sampled(rewards=_SOLVED, algorithm="ppo", updates=8, learning_rate=0.05),
        "policy_ratio", steps=400,
    ),
    "RLOO, parser breaks": _sampled(
        Sampled(
            rewards=switched(_SOLVED, constant(0.0), ONSET), truth=_SOLVED, algorithm="rloo"
        ),
        "dead_reward", onset=ONSET,
    ),
    "DPO, equal pairs": _compared(
        Compared(difference=0.1, label_noise=0.4, beta=0.05, learning_rate=0.03), "preference"
    ),
    "DPO, leak": _compared(Compared(has_leak=True, learning_rate=3e-3), "preference"),
    "reward model, leak": _compared(
        Compared(algorithm="reward_model", has_leak=True, learning_rate=3e-2), "preference"
    ),
    "reward model, few pairs": _tuned(
        replace(_RANKS, rows=96, label_noise=0.3, learning_rate=0.01), "overconfidence"
    ),
    "SFT, few rows": _tuned(Tuned(rows=48, learning_rate=0.01), "memorized"),
    "SFT, answer in the prompt": _tuned(
        Tuned(has_answer=True, noise=0.0, learning_rate=0.01), "memorized"
    ),
    "SFT, epochs repeated": _tuned(Tuned(rows=320, noise=0.7, memory_rate=0.3), "memorized"),
    "SFT, rows known before": _tuned(
        Tuned(noise=0.0, has_same_base=True, base_steps=300), "memorized"
    ),
    "SFT, rate of pre-training": _tuned(
        Tuned(has_same_base=True, learning_rate=0.3), "forgetting"
    ),
    "SFT, labels of padding": _tuned(Tuned(labels="padded"), "labels", steps=60),
    "SFT, labels of prompts": _tuned(Tuned(labels="all"), "labels", steps=60),
    "SFT, no end": _tuned(Tuned(labels="without end"), "labels", steps=60),
    "LoRA, not in the optimizer": _tuned(Tuned(lora="not in optimizer"), "adapter", steps=60),
    "LoRA, not active": _tuned(Tuned(lora="inactive"), "adapter", steps=60),
    "LoRA, base not frozen": _tuned(Tuned(lora="base trained"), "adapter", steps=60),
}  # fmt: skip

HEALTHY: Mapping[str, Kind] = {
    "solved": _sampled(Sampled(rewards=_SOLVED)),
    "solved fast": _sampled(Sampled(rewards=_SOLVED, learning_rate=0.03)),
    "right or wrong": _sampled(Sampled(rewards=exact(matches(2), 1.0)), steps=240),
    "the length is needed": _sampled(Sampled(rewards=matches(8), end_bias=1.5), steps=240),
    "no penalty": _sampled(Sampled(rewards=_SOLVED, beta=0.0), steps=240),
    "noisy reward model": _sampled(Sampled(rewards=noisy(_SOLVED, 0.3)), steps=240),
    "slow noise": _sampled(Sampled(rewards=wandering(_SOLVED, 0.1)), steps=240),
    "held-out reward": _sampled(Sampled(rewards=noisy(_SOLVED, 0.1), held_out=_SOLVED)),
    "RLOO": _sampled(Sampled(rewards=_SOLVED, algorithm="rloo")),
    "PPO": _sampled(Sampled(rewards=_SOLVED, algorithm="ppo", updates=4), steps=400),
    "DPO": _compared(Compared()),
    "DPO, large rate": _compared(Compared(learning_rate=1e-3)),
    "SFT": _compared(Compared(algorithm="sft", learning_rate=0.01)),
    "reward model": _compared(Compared(algorithm="reward_model", learning_rate=3e-3)),
    "reward model, certain": _tuned(_RANKS),
    "reward model, noisy labels": _tuned(replace(_RANKS, label_noise=0.15, learning_rate=0.005)),
    "SFT, easy": _tuned(Tuned(noise=0.0, learning_rate=0.01)),
    "SFT, several epochs": _tuned(Tuned(rows=512)),
    "SFT, remembers rows": _tuned(Tuned(rows=320, memory_rate=0.03)),
    "SFT, warmup": _tuned(Tuned(warmup=50, learning_rate=0.01)),
    "SFT, large rate": _tuned(Tuned(has_same_base=True, learning_rate=0.02)),
    "LoRA": _tuned(Tuned(lora="all", learning_rate=0.01)),
    "LoRA, head": _tuned(Tuned(lora="with head", learning_rate=0.01)),
}
"""Entropy, groups with a gradient and reward end where those of faults do, because the task is
solved."""

_TRL_ONSET = 60


def _with_trl(task: Task, run: TrlRun, *detectors: str, onset: int = 0, steps: int = 120) -> Kind:
    return Kind(task=task, run=run, detectors=detectors, onset=onset, steps=steps)


_GRPO = TrlRun(trainer="GRPO", data="prompts", reward="first")
_LORA = TrlRun(trainer="SFT", data="texts", lora="trained", learning_rate=1e-3)
_LEAK_STEPS = 150
"""With 16 pairs per step of which all are right, 86 steps show a leak."""

TRL: Mapping[str, Kind] = {
    "TRL: GRPO": _with_trl("grpo", _GRPO),
    "TRL: GRPO graded": _with_trl("grpo", replace(_GRPO, reward="share")),
    "TRL: RLOO": _with_trl("rloo", replace(_GRPO, trainer="RLOO")),
    "TRL: DPO": _with_trl("dpo", TrlRun(trainer="DPO", data="pairs", learning_rate=1e-3)),
    "TRL: reward model": _with_trl(
        "reward_model", TrlRun(trainer="Reward", data="pairs", learning_rate=1e-3)
    ),
    "TRL: SFT": _with_trl("sft", TrlRun(trainer="SFT", data="texts", learning_rate=1e-3)),
    "TRL: SFT of completions": _with_trl("sft", TrlRun(trainer="SFT", data="completions")),
    "TRL: LoRA": _with_trl("sft", _LORA),
    "TRL: GRPO learning rate x100": _with_trl(
        "grpo", replace(_GRPO, rate_factor=100.0), *_LOST, "dead_reward", onset=_TRL_ONSET
    ),
    "TRL: GRPO parser breaks": _with_trl(
        "grpo", replace(_GRPO, breaks=True), "dead_reward", onset=_TRL_ONSET
    ),
    "TRL: GRPO reward without signal": _with_trl(
        "grpo", replace(_GRPO, reward="noise", learning_rate=0.06), *_LOST, steps=200
    ),
    "TRL: DPO leaked pairs": _with_trl(
        "dpo", TrlRun(trainer="DPO", data="marked", learning_rate=1e-3), "preference",
        steps=_LEAK_STEPS,
    ),
    "TRL: SFT without an end": _with_trl(
        "sft", TrlRun(trainer="SFT", data="ids"), "labels", steps=40
    ),
    "TRL: SFT trains prompts": _with_trl(
        "sft",
        TrlRun(trainer="SFT", data="completions", more={"completion_only_loss": False}),
        "labels", steps=40,
    ),
    "TRL: LoRA not trained": _with_trl("sft", replace(_LORA, lora="frozen"), "adapter", steps=40),
    "TRL: LoRA with its base": _with_trl("sft", replace(_LORA, lora="thawed"), "adapter", steps=40),
}  # fmt: skip
"""Trainings with TRL's trainers, which need TRL: `make test-integrations` installs it."""

KINDS: Mapping[str, Kind] = {**FAULTS, **HEALTHY, **TRL}
