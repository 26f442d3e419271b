"""Names of other libraries, and the kind of run."""

import math
from pathlib import Path

import pytest

from trainvitals.detect.posttraining import names
from trainvitals.detect.posttraining.names import (
    NAMES,
    TASKS,
    is_task,
    loss_kind_of_task,
    read_quantities,
    task_of_class,
)


class SFTTrainer:
    pass


class GKDTrainer(SFTTrainer):
    pass


class GRPOTrainer:
    pass


class MyTrainer(GRPOTrainer):
    pass


@pytest.mark.parametrize(
    ("trainer", "task"),
    [(SFTTrainer, "sft"), (GKDTrainer, "sft"), (MyTrainer, "grpo"), (dict, None)],
)
def test_a_trainers_class_or_a_base_of_it_names_the_kind_of_run(trainer, task):
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
