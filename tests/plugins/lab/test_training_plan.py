"""What a training will take: known figures of others, and how the parts add up."""

import json

import pytest

from tests.support.cli import vitals
from trainvitals.errors import UsageError
from vitals_plugins.lab.plan.training_plan import (
    STRATEGIES,
    PlanInput,
    Shape,
    batch_size_cost,
    critical_batch,
    peak_gpu_memory,
    plan_training,
    shape_of,
    state_bytes,
)

SEVEN = {"num_params": 7.5e9, "tokens": 1e12, "gpu": "a100", "num_gpus": 64}


def test_model_states_are_those_of_the_zero_paper():
    """Its figure 1: 7.5 billion parameters on 64 GPUs, in GB."""
    sums = [sum(state_bytes(strategy, 7.5e9, 64, "mixed")) / 1e9 for strategy in STRATEGIES]
    assert sums == pytest.approx([120, 31.4, 16.6, 1.9], abs=0.1)


def test_the_usual_shape_has_the_parameters_it_was_asked_for():
    for num_params in (1.2e8, 1.3e9, 6.7e9, 1.75e11):
        shape = shape_of(num_params)
        assert 12 * shape.layers * shape.width**2 == pytest.approx(num_params, rel=0.1)


def test_time_is_flops_over_what_the_gpus_do():
    """GPT-3 on 1,024 A100s at 45 %: 34 days (Narayanan et al., 2021, section 5.1)."""
    made = plan_training(
        PlanInput(
            num_params=175e9, tokens=300e9, gpu="a100", num_gpus=1024, mfu=0.45,
            shape=Shape(96, 12_288), gpu_hour_price=2.0,
        )
    )  # fmt: skip
    # They count the forward pass of a checkpointed block once more: 8 N D instead of 6 N D.
    assert made.days * 8 / 6 == pytest.approx(34, rel=0.05)
    assert made.flops == pytest.approx(6 * 175e9 * 300e9 + made.attention_flops)
    assert made.price == pytest.approx(made.days * 24 * 1024 * 2.0)


def test_checkpointing_and_sharding_hold_less():
    made = plan_training(PlanInput(**SEVEN, micro_batch=4))  # type: ignore[arg-type]
    by_kind = {(fit.strategy, fit.checkpointing): fit for fit in made.fits}
    for strategy in STRATEGIES:
        plain, saved = by_kind[strategy, False], by_kind[strategy, True]
        assert saved.memory.activations < plain.memory.activations / 4
    totals = [by_kind[strategy, True].memory.total for strategy in STRATEGIES]
    assert totals == sorted(totals, reverse=True)
    assert not by_kind["DDP", True].fits
    assert by_kind["FSDP", True].fits


def test_one_gpu_has_no_use_for_sharding():
    def held(strategy: str) -> float:
        return peak_gpu_memory(
            strategy,  # type: ignore[arg-type]
            num_params=1e9, shape=Shape(20, 2048), num_gpus=1, num_tokens=2048,
            training_type="mixed", checkpointing=False,
        ).total  # fmt: skip

    assert len({held(strategy) for strategy in STRATEGIES}) == 1


def test_a_batch_as_large_as_the_noise_scale_costs_twice_the_least_of_both():
    assert batch_size_cost(1e9, 1e6)[1:] == (1_000, 2, 2)
    small, large = batch_size_cost(1e9, 1e6, 1e5), batch_size_cost(1e9, 1e6, 1e7)
    assert (small.more_steps, small.more_tokens) == pytest.approx((11, 1.1))
    assert (large.more_steps, large.more_tokens) == pytest.approx((1.1, 11))
    assert critical_batch(2.0) > critical_batch(3.0), "it grows as the loss falls"


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"num_params": 1}, "parameters is 1; it must be from 1,000 to 1e.16"),
        ({"num_params": -7e9}, "parameters is -7e.09; it must be"),
        ({"tokens": float("nan")}, "the number of tokens is nan"),
        ({"num_gpus": 10**21}, "the number of GPUs is 1e.21; it must be from 1 to 1e.07"),
        ({"num_gpus": -1}, "the number of GPUs is -1"),
        ({"micro_batch": 0}, "the micro-batch is 0"),
        ({"sequence_length": 10**30}, "the sequence length is 1e.30"),
        ({"noise_scale": 1e-9}, "the noise scale is 1e-09 tokens; it must be at least 1"),
        ({"noise_scale": -1}, "the noise scale is -1 tokens"),
        ({"shape": Shape(100, 100_000)}, "about 1.2e.13 parameters .* 7.5e.09 were given"),
        ({"shape": Shape(1, 1)}, "layers 1 and width 1 make about 12 parameters"),
        ({"gpu": "h1000"}, "the GPU is 'h1000', which is not known"),
        ({"mfu": 40}, "mfu is 40; it must be above 0 and at most 1"),
        ({"gpu_hour_price": -1}, "price is -1; it must be 0 or more"),
    ],
)
def test_what_cannot_be_planned_is_said(changes: dict[str, object], error: str):
    with pytest.raises(UsageError, match=error):
        PlanInput(**{**SEVEN, **changes})  # type: ignore[arg-type]


def test_a_gpu_without_bf16_is_planned_in_fp32_only():
    asked = {**SEVEN, "gpu": "v100"}
    with pytest.raises(UsageError, match="no tensor peak for mixed"):
        plan_training(PlanInput(**asked))  # type: ignore[arg-type]
    assert plan_training(PlanInput(**asked, training_type="fp32")).days > 0  # type: ignore[arg-type]


def test_the_command_names_the_source_of_each_formula(capsys: pytest.CaptureFixture[str]):
    given = ("plan", "--params", "7e9", "--tokens", "1e12", "--gpus", "64", "--gpu", "H100")
    assert 0 == vitals(*given, "--gpu-hour-price", "2")
    shown = capsys.readouterr().out
    assert "GPU-hours" in shown and "at 2 a GPU-hour" in shown
    for source in ("Kaplan", "PaLM", "ZeRO", "Korthikanti", "McCandlish"):
        assert source in shown
    assert 0 == vitals(*given, "--format", "json")
    assert len(json.loads(capsys.readouterr().out)["plan"]["fits"]) == 2 * len(STRATEGIES)
    assert 2 == vitals(*given, "--layers", "32")
    assert "--layers and --width go together" in capsys.readouterr().err
    for size in ("nan", "inf", "0"):
        assert 2 == vitals("plan", "--params", size, "--tokens", "1e12")
        assert f"the number of parameters is {size}; it must be" in capsys.readouterr().err


def test_what_the_estimate_does_not_hold_for_is_said(capsys: pytest.CaptureFixture[str]):
    assert 0 == vitals("plan", "--params", "1e5", "--tokens", "1e6")
    shown = capsys.readouterr().out
    assert "100,000 parameters, 1 block of width 91" in shown
    assert "the estimate is below one sequence" in shown and "steps [4]" not in shown
    assert 0 == vitals("plan", "--params", "7e9", "--tokens", "1e12", "--gpus", "8192")
    assert "8,192 GPUs train on no fewer than 16.78 M a step" in capsys.readouterr().out
