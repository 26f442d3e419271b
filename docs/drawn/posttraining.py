"""Examples of the detectors over the scalars of post-training runs."""

import random
from collections.abc import Callable, Sequence

from docs.drawn.entry import Entry
from docs.drawn.runs import logged
from docs.drawn.svg import Panel
from trainvitals.detect.posttraining import adapters, policy, preference, sampling, supervised
from trainvitals.detect.posttraining.settings import PostTrainingConfig

Rows = Sequence[dict[str, float]]
_STEPS = 140


def _rows(num: int = _STEPS, **scalars: Callable[[int], float]) -> Rows:
    """Return scalars as functions of the step; ``__`` in a name is a slash."""
    return [{name.replace("__", "/"): of(n) for name, of in scalars.items()} for n in range(num)]


def _noisy(seed: int, of: Callable[[int], float], scale: float = 0.02) -> Callable[[int], float]:
    values = random.Random(seed).choices(range(-100, 101), k=_STEPS)
    return lambda n: of(n) + scale * values[n] / 100.0


def _rise(first: float, last: float, num: int = 60, since: int = 0) -> Callable[[int], float]:
    """Return a course from one level to another."""
    return lambda n: first + (last - first) * min(max(n - since, 0) / num, 1.0)


def _decay(first: float, last: float, num: int = 60, since: int = 0) -> Callable[[int], float]:
    """Return the same as a constant factor per step."""
    return lambda n: first * (last / first) ** min(max(n - since, 0) / num, 1.0)


_RISES = _noisy(1, _rise(0.1, 0.95))
_LOST = _noisy(2, lambda n: _rise(0.1, 0.6, 40)(n) - _rise(0.0, 0.45, 30, 60)(n))
_ENTROPY = {"entropy": "entropy", "reward": "reward"}


def policy_collapse() -> list[Panel]:
    """A policy that loses its reward with its entropy; a task that is solved."""
    entropy = _noisy(3, _decay(2.0, 0.02, 50, 40), 0.005)
    return [
        logged("entropy falls to a hundredth, and the reward is lost",
               _rows(entropy=entropy, reward=_LOST), "policy_collapse",
               lines=_ENTROPY, y_label="nats, reward"),
        logged("silent: the same entropy, and the task is solved",
               _rows(entropy=entropy, reward=_RISES), lines=_ENTROPY, y_label="nats, reward"),
    ]  # fmt: skip


def dead_reward() -> list[Panel]:
    """A reward whose parser breaks; a solved task."""
    lines = {"share of groups without gradient": "frac_reward_zero_std", "reward": "reward"}
    broken = _rows(
        frac_reward_zero_std=_noisy(4, lambda n: 0.2 if n < 70 else 0.98),
        reward=lambda n: _RISES(n) if n < 70 else 0.0,
    )
    solved = _rows(frac_reward_zero_std=_noisy(5, _rise(0.1, 0.97, 80)), reward=_RISES)
    return [
        logged("the reward is 0 for all from step 70 on", broken, "dead_reward", lines=lines,
               y_label="share, reward"),
        logged("silent: equal rewards, as the task is solved", solved, lines=lines,
               y_label="share, reward"),
    ]  # fmt: skip


def kl_runaway() -> list[Panel]:
    """A divergence that grows while the reward is lost; one that a gain explains."""
    lines = {"KL divergence": "kl", "reward": "reward"}
    kl = _noisy(6, _decay(0.02, 2.0, 100, 20), 0.002)
    return [
        logged("the policy moves away, and the reward is lost", _rows(kl=kl, reward=_LOST),
               "kl_runaway", lines=lines, y_label="KL, reward"),
        logged("silent: the same divergence, with a gain",
               _rows(kl=kl, reward=_noisy(1, _rise(0.1, 0.95, 120))), lines=lines,
               y_label="KL, reward"),
    ]  # fmt: skip


def truncation() -> list[Panel]:
    """Completions that stop ending; a task that needs long ones."""
    lines = {"share of cut completions": "completions/clipped_ratio", "reward": "reward"}
    cut = {"completions__clipped_ratio": _noisy(7, _rise(0.05, 0.95, 50, 30))}
    return [
        logged("completions run into the limit, and the reward is lost",
               _rows(**cut, reward=_LOST), "truncation", lines=lines, y_label="share, reward"),
        logged("silent: as long, with a gain", _rows(**cut, reward=_RISES), lines=lines,
               y_label="share, reward"),
    ]  # fmt: skip


def reward_hacking() -> list[Panel]:
    """A held-out reward that is lost; one that follows."""
    lines = {"held-out reward": "eval/reward", "training reward": "reward"}

    def evaluated(of: Callable[[int], float]) -> Rows:
        rows = _rows(reward=_RISES)
        for n in range(0, _STEPS, 5):
            rows[n]["eval/reward"] = of(n)
        return rows

    lost = _noisy(8, lambda n: _rise(0.1, 0.6, 50)(n) - _rise(0.0, 0.5, 40, 70)(n), 0.01)
    follows = _noisy(9, _rise(0.1, 0.8), 0.01)
    return [
        logged("the held-out reward is lost", evaluated(lost), "reward_hacking", lines=lines,
               y_label="reward"),
        logged("silent: both rise", evaluated(follows), lines=lines, y_label="reward"),
    ]  # fmt: skip


def reward_jump() -> list[Panel]:
    """The reward function is exchanged; a task that is learned fast."""
    lines = {"reward": "reward"}
    jumps = _noisy(14, lambda n: _rise(0.1, 0.6)(n) + (0.5 if n >= 70 else 0.0))
    fast = _noisy(15, _rise(0.1, 0.9, 12, 60))
    return [
        logged("another reward from step 70 on", _rows(reward=jumps), "reward_jump", lines=lines,
               y_label="reward"),
        logged("silent: learned within 12 steps", _rows(reward=fast), lines=lines,
               y_label="reward"),
    ]  # fmt: skip


def policy_ratio() -> list[Panel]:
    """Most tokens are clipped; some are, as usual."""
    lines = {"share of clipped tokens": "clip_ratio/region_mean"}
    high, usual = _noisy(10, _rise(0.1, 0.75, 30, 50)), _noisy(11, lambda n: 0.2, 0.1)
    return [
        logged("most tokens are clipped", _rows(clip_ratio__region_mean=high), "policy_ratio",
               lines=lines, y_label="share"),
        logged("silent: a fifth is clipped", _rows(clip_ratio__region_mean=usual), lines=lines,
               y_label="share"),
    ]  # fmt: skip


def sampler_gap() -> list[Panel]:
    """The sampler keeps old weights; the rounding of other kernels."""
    name = "sampling/sampling_logp_difference/mean"
    lines = {"difference of log-probabilities": name}
    old, usual = _noisy(12, _rise(0.01, 0.5, 50, 60), 0.005), _noisy(13, lambda n: 0.012, 0.005)
    return [
        logged("the sampler no longer gets new weights", _rows(**{name: old}), "sampler_gap",
               lines=lines, y_label="nats"),
        logged("silent: bf16 with other kernels", _rows(**{name: usual}), lines=lines,
               y_label="nats"),
    ]  # fmt: skip


def preference_pairs() -> list[Panel]:
    """Chosen completions that become improbable; the usual fall."""
    lines = {"chosen": "logps/chosen", "rejected": "logps/rejected"}

    def fall(chosen: float, rejected: float) -> Rows:
        return _rows(
            logps__chosen=_noisy(14, _rise(-200.0, chosen, 100), 5.0),
            logps__rejected=_noisy(15, _rise(-220.0, rejected, 100), 5.0),
            rewards__chosen=_noisy(16, _rise(0.0, 0.1 * (chosen + 200.0), 100), 0.5),
        )

    return [
        logged("both fall, the chosen ones to less than half", fall(-500.0, -700.0), "preference",
               lines=lines, task="dpo", y_label="log-probability"),
        logged("silent: both fall somewhat, as in most runs", fall(-240.0, -300.0), lines=lines,
               task="dpo", y_label="log-probability"),
    ]  # fmt: skip


def overconfidence() -> list[Panel]:
    """Margins that grow while an evaluation becomes worse; with a steady one."""
    lines = {"margin": "margin", "loss of the evaluation": "eval/loss"}

    def evaluated(of: Callable[[int], float]) -> Rows:
        rows = _rows(margin=_noisy(17, _rise(0.0, 6.0, 100), 0.5))
        for n in range(9, _STEPS, 10):
            rows[n]["eval/loss"] = of(n)
        return rows

    worse = _noisy(18, lambda n: 0.65 - _rise(0.0, 0.2, 30)(n) + _rise(0.0, 1.2, 100, 40)(n))
    steady = _noisy(19, _decay(0.65, 0.35, 80))
    return [
        logged("the evaluation becomes worse than guessing", evaluated(worse), "overconfidence",
               lines=lines, task="reward_model", y_label="nats"),
        logged("silent: the same margins, and a better evaluation", evaluated(steady),
               lines=lines, task="reward_model", y_label="nats"),
    ]  # fmt: skip


_TUNED = {"training": "loss", "evaluation": "eval/loss"}


def _tuned(training: Callable[[int], float], evaluated: Callable[[int], float]) -> Rows:
    """Return the losses of an SFT with an epoch per 30 steps."""
    rows = _rows(loss=training, epoch=lambda n: (n + 1) / 30)
    for n in range(9, _STEPS, 10):
        rows[n]["eval/loss"] = evaluated(n)
    return rows


def memorized() -> list[Panel]:
    """Training losses that fall away from the evaluation; an easy task."""
    rises = _noisy(20, lambda n: _rise(2.0, 1.4, 30)(n) + _rise(0.0, 0.9, 90, 40)(n))
    steps = _noisy(21, lambda n: 2.0 - 0.35 * (n // 30), 0.1)
    return [
        logged("the training loss is near 0, and the evaluation rises",
               _tuned(_noisy(22, _decay(2.0, 0.03, 70)), rises), "memorized", lines=_TUNED,
               task="sft", y_label="loss"),
        logged("the training loss falls only at the start of an epoch",
               _tuned(steps, rises), "memorized", lines=_TUNED, task="sft", y_label="loss"),
        logged("silent: an easy task, in which the evaluation falls as far",
               _tuned(_noisy(22, _decay(2.0, 0.05, 70)), _decay(2.0, 0.06, 70)), lines=_TUNED,
               task="sft", y_label="loss"),
    ]  # fmt: skip


def forgetting() -> list[Panel]:
    """First updates that destroy the base model; a loss that rises somewhat."""
    destroyed = _noisy(23, lambda n: _rise(1.5, 6.0, 5)(n) - _rise(0.0, 2.0, 120, 5)(n), 0.3)
    usual = _noisy(24, lambda n: _rise(1.5, 2.0, 10)(n) - _rise(0.0, 0.8, 60, 10)(n), 0.3)
    return [
        logged("the loss rises to four times that of the base model", _rows(loss=destroyed),
               "forgetting", lines={"loss": "loss"}, task="sft", y_label="loss"),
        logged("silent: it rises somewhat, and recovers", _rows(loss=usual),
               lines={"loss": "loss"}, task="sft", y_label="loss"),
    ]  # fmt: skip


def labels() -> list[Panel]:
    """Labels of padding; rows that all have an end."""
    padding, ends = "labels/padding_share", "labels/end_share"
    return [
        logged("a third of the labels is padding", [{}, {padding: 0.33, ends: 1.0}], "labels",
               lines={"share of padding": padding}, task="sft", y_label="share"),
        logged("silent: no padding, and each row has an end", [{}, {padding: 0.0, ends: 1.0}],
               lines={"share of rows with an end": ends}, task="sft", y_label="share"),
    ]  # fmt: skip


def adapter_counts() -> list[Panel]:
    """A base that is trained; one that is frozen."""
    base = "lora/base_share"
    lines = {"share of trained base weights": base}
    return [
        logged("the adapted layers are trained too", [{}, {base: 1.0}], "adapter", lines=lines,
               task="sft", y_label="share"),
        logged("silent: only the adapters are", [{}, {base: 0.0}], lines=lines, task="sft",
               y_label="share"),
    ]  # fmt: skip


ENTRIES = (
    Entry(
        name="policy_collapse",
        title="Policy collapse",
        owner=policy.PolicyCollapseWatcher,
        needs="the entropy, and the reward or the share of cut completions.",
        examples=policy_collapse,
        module=policy,
        bad="A policy that becomes deterministic at a reward between its first and its best "
        "possible one: the best possible reward is unknown, so it looks like a solved task.",
        good="GRPO, RLOO and PPO.",
        config=PostTrainingConfig,
    ),
    Entry(
        name="dead_reward",
        title="Groups without a gradient",
        owner=policy.DeadRewardWatcher,
        needs="the share of groups with equal rewards, and the reward.",
        examples=dead_reward,
    ),
    Entry(
        name="kl_runaway",
        title="Divergence without gain",
        owner=policy.KlRunawayWatcher,
        needs="the KL divergence from the reference, and the reward.",
        examples=kl_runaway,
    ),
    Entry(
        name="truncation",
        title="Cut completions",
        owner=policy.TruncationWatcher,
        needs="the share of cut completions, and the reward.",
        examples=truncation,
    ),
    Entry(
        name="reward_hacking",
        title="Reward hacking",
        owner=policy.RewardHackingWatcher,
        needs="the reward, and evaluations of a held-out one, such as "
        "`monitor.evaluate(reward=...)`.",
        examples=reward_hacking,
    ),
    Entry(
        name="reward_jump",
        title="Reward that jumps",
        owner=policy.RewardJumpWatcher,
        needs="the reward.",
        examples=reward_jump,
    ),
    Entry(
        name="policy_ratio",
        title="Updates that are too large",
        owner=sampling.PolicyRatioWatcher,
        needs="the share of clipped tokens, or the mean probability ratio.",
        examples=policy_ratio,
    ),
    Entry(
        name="sampler_gap",
        title="Sampler that differs",
        owner=sampling.SamplerGapWatcher,
        needs="the difference of log-probabilities between trainer and sampler.",
        examples=sampler_gap,
    ),
    Entry(
        name="preference",
        title="Preference pairs",
        owner=preference.PreferenceWatcher,
        needs="a run that compares pairs: log-probabilities with the chosen reward or as means per "
        "token, or the accuracy from the first step on.",
        examples=preference_pairs,
    ),
    Entry(
        name="overconfidence",
        title="Overconfident rewards",
        owner=preference.OverconfidenceWatcher,
        needs="a reward model or DPO: the margin of the pairs, and evaluations with their accuracy "
        "or, for a reward model, their loss.",
        examples=overconfidence,
    ),
    Entry(
        name="memorized",
        title="Memorized rows",
        owner=supervised.MemorizedWatcher,
        needs="SFT with the training loss and evaluations; for repeated epochs also `epoch`, and "
        "10 logged values per epoch.",
        examples=memorized,
        module=supervised,
    ),
    Entry(
        name="forgetting",
        title="Base model destroyed",
        owner=supervised.ForgettingWatcher,
        needs="SFT with the training loss from the first step on.",
        examples=forgetting,
    ),
    Entry(
        name="labels",
        title="Wrong labels",
        owner=supervised.LabelsWatcher,
        needs="SFT with the shares of labels that the Hugging Face callback counts in the first 8 "
        "batches, or that the loop records.",
        examples=labels,
    ),
    Entry(
        name="adapter",
        title="LoRA adapters",
        owner=adapters.AdapterWatcher,
        needs="a model whose adapters have names that start with `lora_`, as in PEFT and "
        "torchtune.",
        examples=adapter_counts,
        module=adapters,
    ),
)
"""The detectors that are drawn here."""
