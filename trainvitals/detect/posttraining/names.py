"""Kinds of post-training runs, and the names that libraries give to the same quantity.

A run is judged only if its kind is known: from the class of its trainer, or from
``watch(task=...)``. Names such as ``kl`` and ``entropy`` also occur in other kinds of training,
where the same value is healthy, so the kind is never guessed from them.
"""

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

import msgspec

from trainvitals.detect.outliers import LossKind

Task = Literal["sft", "dpo", "cpo", "orpo", "kto", "reward_model", "grpo", "rloo", "ppo"]
"""Kind of a post-training run."""
OnCollapse = Literal["report", "stop"]
"""Reaction to a policy that is lost: ``watch(on_collapse=...)``."""
COLLAPSES = ("policy_collapse", "kl_runaway")
"""Kinds of findings after which the policy is lost, so that ``stop`` halts. With others, such as
equal rewards, the weights are as good as before."""


class TaskSpec(msgspec.Struct, frozen=True):
    """Properties of one kind of run."""

    loss_kind: LossKind
    """Meaning of its loss, unless the run declares another one."""
    supervised: bool = False
    """Whether the loss is that of given completions, as in SFT."""
    samples: bool = False
    """Whether the policy is trained on completions that it samples itself."""
    compares: bool = False
    """Whether the loss raises chosen completions and lowers rejected ones, in pairs or not."""
    has_reference: bool = False
    """Whether the reward of a completion is its log-probability compared with a reference model."""
    starts_undecided: bool = False
    """Whether the pairs are ranked at random before the first update. Without a reference model
    they are ranked as the base model prefers."""


_COMPARES = TaskSpec("minimize", compares=True)
_SAMPLES = TaskSpec("rl", samples=True)

TASKS: Mapping[str, TaskSpec] = {
    "sft": TaskSpec("minimize", supervised=True),
    "dpo": TaskSpec("minimize", compares=True, has_reference=True, starts_undecided=True),
    "cpo": _COMPARES,
    "orpo": _COMPARES,
    "kto": TaskSpec("minimize", compares=True, has_reference=True),
    "reward_model": TaskSpec("minimize", compares=True, starts_undecided=True),
    "grpo": _SAMPLES,
    "rloo": _SAMPLES,
    "ppo": _SAMPLES,
}


def is_task(value: object) -> bool:
    """Return whether a value is the name of a kind of post-training, such as "dpo" or "grpo"."""
    return isinstance(value, str) and value in TASKS


def loss_kind_of_task(task: object) -> LossKind | None:
    """Return the meaning of the loss in such a post-training run; None without a valid kind."""
    return TASKS[task].loss_kind if isinstance(task, str) and task in TASKS else None


_OF_CLASSES: Mapping[str, Task | None] = {
    "MiniLLMTrainer": None,  # derived from GRPOTrainer, but distills with a constant reward
    "SFTTrainer": "sft",
    "DPOTrainer": "dpo",
    "CPOTrainer": "cpo",
    "ORPOTrainer": "orpo",
    "KTOTrainer": "kto",
    "BCOTrainer": "kto",
    "RewardTrainer": "reward_model",
    "GRPOTrainer": "grpo",
    "AsyncGRPOTrainer": "grpo",
    "RLOOTrainer": "rloo",
    "PPOTrainer": "ppo",
}
"""Trainers of TRL 1.16, of versions up to 1.12 for PPO, and up to 1.9 for BCO."""


_MODULES = ("trl.", "unsloth")
"""Modules of the known trainers, in lower case. Unsloth compiles TRL's under names of its own."""


def task_of_class(trainer_class: type) -> Task | None:
    """Return the kind of post-training of a trainer's class, by its name or a base's; or None.

    Only classes of TRL and Unsloth count: others with the same name may be anything.
    """
    for base in trainer_class.__mro__:
        name = base.__name__.lstrip("_").removeprefix("Unsloth")
        if name in _OF_CLASSES and base.__module__.lower().startswith(_MODULES):
            return _OF_CLASSES[name]
    return None


class Reading(NamedTuple):
    """Conversion of one scalar to a quantity: ``offset + factor * value``."""

    quantity: str
    factor: float = 1.0
    offset: float = 0.0

    @property
    def is_converted(self) -> bool:
        """Whether the detectors' quantity is another number than the library's scalar."""
        return (self.factor, self.offset) != (1.0, 0.0)


ENTROPY = "entropy"
"""Mean entropy per token of the policy, in nats."""
KL = "kl"
"""Divergence of the policy from the reference, per token."""
KL_OF_SEQUENCE = "kl_of_sequence"
"""The same, summed over the tokens of a completion."""
REWARD = "reward"
"""Mean reward of the completions, without the penalty for divergence if both are logged."""
HELD_OUT_REWARD = "held_out_reward"
"""Mean reward of an evaluation: prompts that are not trained on, or a second reward."""
DEAD_SHARE = "dead_share"
"""Share of the groups in which all completions have the same reward: they give no gradient."""
CUT_SHARE = "cut_share"
"""Share of the completions that were cut at the length limit."""
CLIP_SHARE = "clip_share"
"""Share of the tokens whose update the surrogate loss clips."""
RATIO = "ratio"
"""Mean ratio of the probabilities after and before the updates of a batch."""
SAMPLER_GAP = "sampler_gap"
"""Mean absolute difference of the trainer's and the sampler's log-probability of a token."""
CHOSEN = "chosen_logp"
"""Log-probability of the chosen completions."""
REJECTED = "rejected_logp"
"""Log-probability of the rejected completions."""
CHOSEN_REWARD = "chosen_reward"
"""Reward of the chosen completions: beta times the log-probability compared with the reference."""
ACCURACY = "accuracy"
"""Share of the pairs in which the chosen completion has the higher reward."""
MARGIN = "margin"
"""Mean difference of the rewards of chosen and rejected completions."""
EVAL_ACCURACY = "eval_accuracy"
"""Accuracy of the pairs of an evaluation."""
LOSS = "loss"
"""Mean training loss per token."""
EVAL_LOSS = "eval_loss"
"""Loss of an evaluation."""
EPOCH = "epoch"
"""Epochs so far, with a fraction."""
PADDING_LABELS = "padding_labels"
"""Share of the labels that are padding, in the first batches."""
END_LABELS = "end_labels"
"""Share of the rows, of those that are not cut, with an end-of-sequence token among the labels."""
PROMPT_LABELS = "prompt_labels"
"""Share of the prompts' tokens with a label, if the data mark the prompts."""
ADAPTERS_IN_OPTIMIZER = "adapters_in_optimizer"
"""Share of the LoRA adapters' parameters that the optimizer trains."""
ADAPTERS_WITH_GRADIENT = "adapters_with_gradient"
"""1 if one of these has a gradient in the first steps, 0 if only other parameters have one."""
BASE_IN_OPTIMIZER = "base_in_optimizer"
"""Share of the adapted layers whose own weight the optimizer trains."""

# Read from the sources: TRL 1.16.0; trl/experimental of TRL 1.10 for PPO; verl 1dda039 (2026-08),
# OpenRLHF 3c3be62 (2026-08), torchtune bd2a0fc (2026-04), NeMo-RL 7ea279a (2026-08). The first
# name of a quantity that is present counts.
NAMES: Mapping[str, Reading] = {
    # Own loops, with `monitor.observe` and `monitor.evaluate`, and TRL's GRPO, RLOO, DPO, reward.
    "entropy": Reading(ENTROPY),
    "kl": Reading(KL),
    "reward": Reading(REWARD),
    "eval/reward": Reading(HELD_OUT_REWARD),
    "frac_reward_zero_std": Reading(DEAD_SHARE),
    "completions/clipped_ratio": Reading(CUT_SHARE),
    "clip_ratio/region_mean": Reading(CLIP_SHARE),
    "sampling/sampling_logp_difference/mean": Reading(SAMPLER_GAP),
    "logps/chosen": Reading(CHOSEN),
    "logps/rejected": Reading(REJECTED),
    "rewards/chosen": Reading(CHOSEN_REWARD),
    "rewards/accuracies": Reading(ACCURACY),
    "accuracy": Reading(ACCURACY),
    "rewards/margins": Reading(MARGIN),
    "margin": Reading(MARGIN),
    "eval/rewards/accuracies": Reading(EVAL_ACCURACY),
    "eval/accuracy": Reading(EVAL_ACCURACY),
    "loss": Reading(LOSS),
    "eval/loss": Reading(EVAL_LOSS),
    "epoch": Reading(EPOCH),
    # Counted by Vitals.
    "labels/padding_share": Reading(PADDING_LABELS),
    "labels/end_share": Reading(END_LABELS),
    "labels/prompt_share": Reading(PROMPT_LABELS),
    "lora/optimizer_share": Reading(ADAPTERS_IN_OPTIMIZER),
    "lora/has_gradient": Reading(ADAPTERS_WITH_GRADIENT),
    "lora/base_share": Reading(BASE_IN_OPTIMIZER),
    # TRL's PPO.
    "objective/kl": Reading(KL_OF_SEQUENCE),
    "objective/scores": Reading(REWARD),
    "policy/entropy_avg": Reading(ENTROPY),
    "policy/clipfrac_avg": Reading(CLIP_SHARE),
    "val/ratio": Reading(RATIO),
    # verl. `actor/entropy_loss` is the mean entropy too.
    "actor/entropy": Reading(ENTROPY),
    "actor/entropy_loss": Reading(ENTROPY),
    "actor/kl_loss": Reading(KL),
    "actor/reward_kl_penalty": Reading(KL),
    "critic/score/mean": Reading(REWARD),
    "critic/rewards/mean": Reading(REWARD),
    "response_length/clip_ratio": Reading(CUT_SHARE),
    "actor/pg_clipfrac": Reading(CLIP_SHARE),
    # OpenRLHF: `kl` and `reward` as above.
    "rollout/reward_mean": Reading(REWARD),
    "rollout/truncated_rate": Reading(CUT_SHARE),
    "entropy_loss": Reading(ENTROPY),
    "ppo_clip_ratio": Reading(CLIP_SHARE),
    "acc": Reading(ACCURACY),
    # torchtune: GRPO, PPO and DPO recipes.
    "kl_loss": Reading(KL),
    "rewards": Reading(REWARD),
    "scores": Reading(REWARD),
    "clipfrac": Reading(CLIP_SHARE),
    "ratios": Reading(RATIO),
    "log_probs/chosen": Reading(CHOSEN),
    "log_probs/rejected": Reading(REJECTED),
    # NeMo-RL. Its error of token probabilities is the mean of exp(|difference|).
    "approx_entropy": Reading(ENTROPY),
    "kl_penalty": Reading(KL),
    "validation/accuracy": Reading(HELD_OUT_REWARD),
    "baseline_reward/pct_mixed": Reading(DEAD_SHARE, -0.01, 1.0),
    "truncation_rate": Reading(CUT_SHARE),
    "probs_ratio": Reading(RATIO),
    "token_mult_prob_error": Reading(SAMPLER_GAP, 1.0, -1.0),
}

_OF_ANY_RUN = frozenset(
    (
        *(LOSS, EVAL_LOSS, EPOCH, PADDING_LABELS, END_LABELS, PROMPT_LABELS),
        *(ADAPTERS_IN_OPTIMIZER, ADAPTERS_WITH_GRADIENT, BASE_IN_OPTIMIZER),
    )
)
_SHARES = frozenset((DEAD_SHARE, CUT_SHARE, CLIP_SHARE, ACCURACY, EVAL_ACCURACY))
"""Quantities between 0 and 1. One in percent is not read: a share of 12 would count as 1."""
_SHARE_ERROR = 0.01
"""Rounding error of a share."""
_PREFIX = "train/"
_OF_SUMMED_KL = (("scores", "kl_reward"), ("scores", "rlhf_reward"))
"""Names that show torchtune's PPO: its ``kl`` is summed over the tokens, that of others is not."""


def plain_name(name: str) -> str:
    """Return the name of a library's scalar as in ``NAMES``, without a prefix."""
    return name.removeprefix(_PREFIX)


def read_quantities(values: Mapping[str, float]) -> dict[str, float]:
    """Return the quantities among a step's scalars, by the names of TRL and other libraries."""
    plain = {plain_name(name): value for name, value in values.items()}
    is_kl_summed = any(all(name in plain for name in both) for both in _OF_SUMMED_KL)
    quantities: dict[str, float] = {}
    for name, reading in NAMES.items():
        is_summed = name == "kl" and is_kl_summed
        read = KL_OF_SEQUENCE if is_summed else reading.quantity
        if name not in plain or read in quantities:
            continue
        value = reading.offset + reading.factor * plain[name]
        is_share = read not in _SHARES or -_SHARE_ERROR <= value <= 1.0 + _SHARE_ERROR
        if math.isfinite(value) and is_share:
            quantities[read] = value
    return quantities


def known_names() -> tuple[str, ...]:
    """Return all names of post-training scalars that ``read_quantities`` uses."""
    return tuple(dict.fromkeys((*NAMES, *(name for both in _OF_SUMMED_KL for name in both))))


def is_read(name: str) -> bool:
    """Return whether ``read_quantities`` uses a scalar with this name in another library."""
    plain = plain_name(name)
    return plain in NAMES or any(plain in both for both in _OF_SUMMED_KL)


def is_of_policy(name: str) -> bool:
    """Return whether a scalar that is read shows success or failure of a policy, not any loss."""
    reading = NAMES.get(plain_name(name))
    return reading is None or reading.quantity not in _OF_ANY_RUN


def is_reward(name: str) -> bool:
    """Return whether a scalar is the reward of a policy's completions, in any library."""
    reading = NAMES.get(plain_name(name))
    return reading is not None and reading.quantity == REWARD
