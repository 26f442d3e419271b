"""Which quantities of a post-training run are drawn, under which names, and before the loss."""

import pytest

from trainvitals.detect.posttraining.charts import quantity_charts


def titles(task: str, *scalars: str) -> list[str]:
    metrics = ["steps.loss", *(f"scalars.{name}" for name in scalars)]
    return [chart.title for chart in quantity_charts(task, metrics)]


TRL = (
    *("completions/mean_length", "completions/clipped_ratio", "frac_reward_zero_std", "kl"),
    *("clip_ratio/region_mean", "entropy", "reward", "eval/reward"),
)
ORDER = [
    *("Reward", "KL divergence", "Entropy", "Length", "Clip ratio", "Cut completions"),
    "Equal rewards",
]


@pytest.mark.parametrize("task", ["grpo", "rloo", "ppo"])
def test_reward_divergence_entropy_length_and_clip_ratio_come_first(task: str):
    assert ORDER == titles(task, *TRL)


def test_a_quantity_is_drawn_under_the_first_name_that_the_run_recorded():
    charts = quantity_charts(
        "grpo", ["scalars.train/critic/rewards/mean", "scalars.train/critic/score/mean"]
    )
    assert [("Reward", (("critic/score/mean", "scalars.train/critic/score/mean"),))] == charts_of(
        charts
    )
    assert "scalars.train/critic/score/mean" == charts[0].metric


def charts_of(charts: object) -> list[tuple[object, ...]]:
    return [tuple(chart) for chart in charts]  # type: ignore[attr-defined]


def test_a_held_out_reward_is_in_the_chart_of_the_reward():
    (chart,) = quantity_charts("ppo", ["scalars.eval/reward", "scalars.reward"])
    assert [("reward", "scalars.reward"), ("eval/reward", "scalars.eval/reward")] == [*chart.lines]


def test_a_scalar_in_another_unit_than_its_quantity_is_left_out():
    assert ["Reward"] == titles("grpo", "reward", "baseline_reward/pct_mixed")


def test_pairs_have_their_log_probabilities_first():
    found = titles("dpo", "rewards/accuracies", "rewards/chosen", "logps/chosen", "logps/rejected")
    assert ["Log-probability", "Reward of the chosen", "Accuracy"] == found
    assert [] == titles("dpo", "reward", "entropy", "kl")


@pytest.mark.parametrize("task", ["", "sft", "unknown"])
def test_in_other_runs_the_loss_comes_first(task: str):
    assert [] == titles(task, *TRL)


def test_scalars_of_other_streams_and_unknown_names_are_no_quantities():
    assert () == quantity_charts("grpo", ["steps.reward", "scalars.mine", "layers.entropy"])
