"""Names of other libraries, and the kind of run."""

import math
from pathlib import Path

import pytest

from trainvitals.detect.posttraining import names
from trainvitals.detect.posttraining.names import (
    NAMES,
    TASKS,
    is_read,
    is_task,
    loss_kind_of_task,
    read_quantities,
    task_of_class,
)


def trainer_class(name: str, *bases: type, module: str = "trl.trainer.some_trainer") -> type:
    return type(name, bases, {"__module__": module})


SFT, GRPO = trainer_class("SFTTrainer"), trainer_class("GRPOTrainer")
MINI_LLM = trainer_class("MiniLLMTrainer", GRPO, module="trl.experimental.minillm")
OWN = "my_project.train"


@pytest.mark.parametrize(
    ("trainer", "task"),
    [
        (SFT, "sft"),
        (trainer_class("GKDTrainer", SFT), "sft"),
        (trainer_class("MyTrainer", GRPO, module=OWN), "grpo"),
        (trainer_class("UnslothGRPOTrainer", module="UnslothGRPOTrainer"), "grpo"),
        (trainer_class("_UnslothDPOTrainer", module="unsloth_compiled_cache.dpo"), "dpo"),
        (MINI_LLM, None),
        (trainer_class("MyDistillation", MINI_LLM, module=OWN), None),
        (trainer_class("PPOTrainer", module=OWN), None),
        (trainer_class("RewardTrainer", module="trlx.trainer"), None),
        (dict, None),
    ],
)
def test_a_trainer_of_trl_or_a_base_of_it_names_the_kind_of_run(trainer, task):
    assert task == task_of_class(trainer)


def test_a_policy_loss_is_not_minimized_and_a_preference_loss_is():
    kinds = {task: loss_kind_of_task(task) for task in ("grpo", "rloo", "ppo", "dpo", "sft")}
    assert kinds == {"grpo": "rl", "rloo": "rl", "ppo": "rl", "dpo": "minimize", "sft": "minimize"}
    assert [None, None, None] == [loss_kind_of_task(task) for task in ("gro", None, ["grpo"])]
    assert all(is_task(task) for task in TASKS)


@pytest.mark.parametrize(
    ("library", "values"),
    [
        (
            "trl",
            {
                "entropy": 1.0,
                "kl": 0.5,
                "reward": 0.25,
                "frac_reward_zero_std": 0.75,
                "completions/clipped_ratio": 0.125,
                "clip_ratio/region_mean": 0.0625,
                "eval/reward": 2.0,
            },
        ),
        (
            "verl",
            {
                "actor/entropy": 1.0,
                "actor/entropy_loss": 7.0,
                "actor/kl_loss": 0.5,
                "critic/score/mean": 0.25,
                "critic/rewards/mean": 7.0,
                "response_length/clip_ratio": 0.125,
                "actor/pg_clipfrac": 0.0625,
            },
        ),
        ("openrlhf", {"entropy_loss": 1.0, "kl": 0.5, "reward": 0.25, "ppo_clip_ratio": 0.0625}),
        (
            "openrlhf rollouts",
            {
                "kl": 0.5,
                "rollout/reward_mean": 0.25,
                "rollout/truncated_rate": 0.125,
                "ppo_clip_ratio": 0.0625,
            },
        ),
        ("torchtune", {"kl_loss": 0.5, "rewards": 0.25, "clipfrac": 0.0625, "ratios": 3.0}),
        (
            "nemo",
            {
                "train/approx_entropy": 1.0,
                "train/kl_penalty": 0.5,
                "train/reward": 0.25,
                "baseline_reward/pct_mixed": 25.0,
                "truncation_rate": 0.125,
                "validation/accuracy": 2.0,
            },
        ),
    ],
)
def test_every_library_gives_the_same_quantities(library: str, values: dict[str, float]):
    expected = {
        names.ENTROPY: 1.0,
        names.KL: 0.5,
        names.REWARD: 0.25,
        names.DEAD_SHARE: 0.75,
        names.CUT_SHARE: 0.125,
        names.CLIP_SHARE: 0.0625,
        names.HELD_OUT_REWARD: 2.0,
        names.RATIO: 3.0,
    }
    read = read_quantities(values | {"learning_rate": 1e-6, "num_tokens": 100.0})
    assert read == {quantity: expected[quantity] for quantity in read}
    assert len(read) >= 4


@pytest.mark.parametrize("name", ["rlhf_reward", "kl_reward"])
def test_the_kl_of_torchtunes_ppo_is_summed_over_the_tokens(name: str):
    read = read_quantities({"scores": 1.0, name: 0.5, "kl": 20.0})
    assert {names.REWARD: 1.0, names.KL_OF_SEQUENCE: 20.0} == read
    assert {names.REWARD: 1.0, names.KL: 0.2} == read_quantities({"scores": 1.0, "kl": 0.2})


def test_every_scalar_that_matters_is_read():
    assert all(is_read(name) and is_read(f"train/{name}") for name in NAMES)
    assert is_read("kl_reward") and is_read("rlhf_reward")
    assert not is_read("learning_rate")


def test_a_ratio_of_probabilities_is_read_as_a_difference():
    assert read_quantities({"token_mult_prob_error": 1.02})[names.SAMPLER_GAP] == pytest.approx(
        0.02
    )


def test_nonfinite_and_unknown_scalars_are_left_out():
    values = {"entropy": math.nan, "kl": math.inf, "reward": 1.0, "steps": 3.0}
    assert {names.REWARD: 1.0} == read_quantities(values)
    assert {} == read_quantities({"baseline_reward/pct_mixed": 1e308 * 10})


def test_every_name_reads_a_quantity_of_the_module():
    constants = {value for value in vars(names).values() if isinstance(value, str)}
    assert {reading.quantity for reading in NAMES.values()} <= constants


def test_the_guide_lists_every_name():
    guide = Path(__file__).parents[3] / "docs/guides/post-training.md"
    text = guide.read_text(encoding="utf-8")
    assert [] == [name for name in (*NAMES, *TASKS) if f"`{name}`" not in text]
