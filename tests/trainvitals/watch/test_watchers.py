"""What each watcher says, as timelines."""

import math

import pytest
from msgspec.structs import replace

from tests.trainvitals.watch.worlds import GIB, memory_watcher
from trainvitals.detect.fleet import FleetDetectors
from trainvitals.detect.fleet.base import NodeSample
from trainvitals.detect.fleet.layers import ActivationWatcher, LayerGradientWatcher
from trainvitals.detect.fleet.optimizer import (
    LearningRateWatcher,
    LossScaleWatcher,
    WeightDecayWatcher,
)
from trainvitals.detect.fleet.ranks import STALL, DataBoundWatcher, RankLossWatcher
from trainvitals.detect.fleet.speed import SlowStepFilter, ThroughputWatcher
from trainvitals.detect.fleet.weights import WeightNormConfig, WeightNormWatcher
from trainvitals.records import CHANGE_EXPECTED, RATE_DECLARED
from trainvitals.testing.merged import causes, merged_series, watched

# -------------------------------------------------------------------------- learning rate


def test_a_jump_of_the_rate_is_told_at_its_step_with_its_numbers() -> None:
    (finding,) = watched(LearningRateWatcher(), "learning_rate 0.001x50 0.01x50")
    assert (50, 0.01, 0.002, "lr_jump") == (
        finding.step, finding.value, finding.limit, finding.cause,
    )  # fmt: skip
    assert (
        "the learning rate jumped from 0.001 to 0.01 in one step, 10x; "
        "the schedule's highest so far was 0.001"
    ) == finding.reason


def test_the_policys_own_cut_that_comes_back_is_told_nothing_of() -> None:
    """After a rollback the rate is halved, held, and comes back by itself: x1, x0.5, x1."""
    first = merged_series("learning_rate 0.001x60 0.001..0.0008x60; lr_factor 1x120")
    cut = "learning_rate 0.0005x40 0.0005..0.001x20 0.001x60; lr_factor 0.5x40 0.5..1x20 1x60"
    at_once = "learning_rate 0.0005x40 0.001x60; lr_factor 0.5x40 1x60"
    for again in (cut, at_once):
        rows = first + merged_series(again, attempt=2, first_step=40)
        assert {} == causes(watched(LearningRateWatcher(), rows)), again
    rows = first + merged_series("learning_rate 0.0005x40 0.001x60", attempt=2, first_step=40)
    assert {40: ["lr_forgotten"]} == causes(watched(LearningRateWatcher(), rows))


def test_a_jump_that_the_policy_holds_is_told_once_and_not_as_a_forgotten_schedule() -> None:
    rows = merged_series("learning_rate 0.001x60 0.03x20; lr_factor 1x80")
    held = "learning_rate 0.001x20 0.001x100; lr_factor 1x20 0.0333333x100"
    rows += merged_series(held, attempt=2, first_step=40)
    assert {60: ["lr_jump"]} == causes(watched(LearningRateWatcher(), rows))


def test_a_fall_by_ten_is_a_schedule() -> None:
    assert [] == watched(LearningRateWatcher(), "learning_rate 0.1x50 0.01x50 0.001x50")


def test_a_jump_that_the_run_declared_is_told_nothing_of_and_the_next_one_is() -> None:
    course = f"learning_rate 1x50 10x100 100x50; verdict 0x50 {RATE_DECLARED} 0x149"
    assert {150: ["lr_jump"]} == causes(watched(LearningRateWatcher(), course))


@pytest.mark.parametrize("peak", [1, 0.5, 0.11])
def test_a_rate_that_was_trained_with_before_is_no_jump_however_often(peak: float) -> None:
    course = "learning_rate 1..0.01x60 " + f"{peak}..0.01x200 " * 4
    assert {} == causes(watched(LearningRateWatcher(), course))


def test_two_jumps_far_apart_are_told_twice() -> None:
    course = "learning_rate 1x200 3x200 20x200"
    assert {200: ["lr_jump"], 400: ["lr_jump"]} == causes(watched(LearningRateWatcher(), course))


def test_a_glitch_of_one_step_does_not_hide_the_next_jump() -> None:
    course = "learning_rate 1x50 1e9 1x200 5x50"
    assert {50: ["lr_jump"], 251: ["lr_jump"]} == causes(watched(LearningRateWatcher(), course))


_CREEP = " ".join(f"{1e-3 * 1.03**i:.6g}" for i in range(80))
_FOLLOWS_KL = " ".join(f"{1e-5 * 1.5 ** abs(i % 34 - 17):.6g}x3" for i in range(6, 200))
"""A rate between 1e-5 and 1e-2 that is multiplied or divided by 1.5, as in RL for robots."""


@pytest.mark.parametrize(
    ("course", "reported"),
    [
        (f"0..1e-3x50 1e-3x200 {_CREEP}", [288]),
        (f"1e-3..1e-4x200 {_CREEP}", [238]),
        (f"0..1e-3x50 1e-3x200 {_CREEP.replace(' ', 'x2 ')}", [326]),
        (f"0..1e-3x50 1e-3x200 {_CREEP} 1e-3x200 {_CREEP} 1e-3x200", [288]),
        # continued warm-ups, and those that start late
        (f"0..1e-3x50 1e-3x50 {_CREEP}", []),
        (f"1e-3x300 {_CREEP}", []),
        ("1e-5x300 1e-5..1e-3x300 1e-3x100", []),
        ("0x300 1e-5..1e-3x300 1e-3x100; learning_rate.1 0.1x700", []),
        ("2e-4x150 4e-4x150 6e-4x150 8e-4x150 1e-3x150", []),
        ("0..1e-3x50 1e-3x150 2e-3x150 4e-3x150 8e-3x150", []),
        # rates that the run has trained with before
        ("1e-4..1e-3x200 1e-3..1e-4x200 " * 3, []),
        ("0..1e-3x50 1e-3..1e-5x300 1e-5..1e-3x300", []),
        (f"1e-3x50 {_FOLLOWS_KL}", []),
        # announced
        (f"0..1e-3x50 1e-3x200 {_CREEP}; verdict 0x250 {RATE_DECLARED}x80", []),
        (f"0..1e-3x50 1e-3x200 {_CREEP}; verdict 0x280 {CHANGE_EXPECTED}x10 0x40", [327]),
    ],
)
def test_only_a_rate_that_climbs_far_above_all_earlier_ones_is_reported(
    course: str, reported: list[int]
) -> None:
    found = watched(LearningRateWatcher(), f"learning_rate {course}")
    assert [(step, "lr_climb") for step in reported] == [(f.step, f.cause) for f in found]


def test_a_climb_names_its_numbers_and_its_first_step() -> None:
    (finding,) = watched(LearningRateWatcher(), f"learning_rate 0..1e-3x50 1e-3x200 {_CREEP}")
    assert (251, 0.003) == (finding.onset_step, finding.limit)
    assert (
        "the learning rate rose over 38 steps to 0.003075, 3.07x its highest value before, 0.001"
        == finding.reason
    )


def test_a_rate_that_never_leaves_zero_is_told() -> None:
    assert {29: ["lr_zero"]} == causes(watched(LearningRateWatcher(), "learning_rate 0x100"))


@pytest.mark.parametrize(("course", "is_told"), [("1..0.0001x60", False), ("1x60", True)])
def test_a_rate_at_zero_is_told_unless_it_decayed_to_it(course: str, is_told: bool) -> None:
    found = causes(watched(LearningRateWatcher(), f"learning_rate {course} 0x100"))
    assert ({89: ["lr_zero"]} if is_told else {}) == found


def test_a_group_frozen_at_zero_beside_one_that_learns_is_fine() -> None:
    assert [] == watched(LearningRateWatcher(), "learning_rate 0x100; learning_rate.1 0.1x100")


def test_a_rate_that_is_not_a_number_is_told() -> None:
    found = watched(LearningRateWatcher(), "learning_rate 0.1x20 nanx5 0.1x20")
    assert {20: ["lr_nonfinite"]} == causes(found)


@pytest.mark.parametrize(("resumed", "is_told"), [("0.0005x20", False), ("0.001x20", True)])
def test_a_schedule_forgotten_at_a_resume_is_told(resumed: str, is_told: bool) -> None:
    watcher = LearningRateWatcher()
    rows = merged_series("learning_rate 0.001x20 0.001..0.0x101")
    rows += merged_series(f"learning_rate {resumed}", attempt=2, first_step=70)
    found = watched(watcher, rows)
    assert ({70: ["lr_forgotten"]} if is_told else {}) == causes(found)


@pytest.mark.parametrize(
    ("resumed", "is_told"), [("0.1", True), ("0.0001", False), ("0.001", False), ("0.5", True)]
)
def test_a_resume_where_the_last_attempt_ended_may_fall_and_not_begin_again(
    resumed: str, is_told: bool
) -> None:
    rows = merged_series("learning_rate 0.1x50 0.01x50 0.001x50")
    rows += merged_series(f"learning_rate {resumed}x20", attempt=2, first_step=150)
    found = watched(LearningRateWatcher(), rows)
    assert ({150: ["lr_forgotten"]} if is_told else {}) == causes(found)


def test_a_resume_that_warms_up_again_is_told_once() -> None:
    rows = merged_series("learning_rate 0..0.001x50 0.001x50")
    rows += merged_series("learning_rate 1e-5..0.001x50 0.001x50", attempt=2, first_step=100)
    assert {100: ["lr_forgotten"]} == causes(watched(LearningRateWatcher(), rows))


def test_the_course_is_kept_in_bounded_memory_and_still_known_early_on() -> None:
    watcher = LearningRateWatcher()
    rows = merged_series("learning_rate 1..0.1x9000")
    watched(watcher, rows)
    assert len(watcher.state_dict()["steps"]) <= 2048
    wrong = merged_series("learning_rate 0.5", attempt=2, first_step=1000)
    assert {1000: ["lr_forgotten"]} == causes(watched(watcher, wrong))


# -------------------------------------------------------------------------- weight decay


def test_a_jump_of_the_weight_decay_names_both_values() -> None:
    (finding,) = watched(WeightDecayWatcher(), "weight_decay 0.01x50 3x50")
    assert (50, 3.0, 0.05, "weight_decay") == (
        finding.step, finding.value, finding.limit, finding.cause,
    )  # fmt: skip
    assert (
        "the weight decay jumped from 0.01 to 3 in one step: 300x its highest value so far, 0.01"
        == finding.reason
    )


_COSINE = " ".join(f"{0.22 - 0.18 * math.cos(math.pi * i / 30):.4f}x20" for i in range(31))
"""DINO's schedule, set once per epoch of 20 steps."""


@pytest.mark.parametrize(
    ("course", "reported"),
    [
        # schedules
        ("0.04..0.4x300", []),
        (_COSINE, []),
        ("0..0.05x100 0.05x100", []),
        ("1e-5 5e-4..0.05x99 0.05x100", []),
        ("1e-8x50 1e-4x50 2e-4x50 4e-4x50", []),
        ("0.05x50 0.1x50 0.4x50", []),
        ("0.1x50 0.01x50 0.001x50", []),
        # values that the run has trained with before
        ("0.1x50 0x50 0.1x50 0x50 0.11x50", []),
        ("0.1..0.001x60 0.1..0.001x60", []),
        # from none: a warm-up or a stage may start like this
        ("0x100 0.1x100", []),
        ("-x100 0.1x50", []),
        # jumps
        ("0.1x50 1x50", [50]),
        ("0.1x50 0x50 3x50", [100]),
        ("0..0.05x50 0.05x20 15x50", [70]),
        ("0.01x50 0.1x200 1x50", [50, 250]),
        ("0.01x50 3 0.01x150 3x50", [50, 201]),
        ("0.01x50 3x2 0.01x150 3x50", [50]),
        ("0.01x5 3x50", []),
        ("0.01x50 3x50; verdict 0x50 65536x50", []),
        ("0.01x50 3x50; verdict 0x40 65536x5 0x55", [50]),
        ("0.01x50 3x150 90x50; verdict 0x45 65536x10 0x195", [200]),
        ("0.01x50 nan infx2 -1 0.01x50", []),
    ],
)
def test_only_a_jump_above_all_earlier_values_is_reported(course: str, reported: list[int]) -> None:
    found = watched(WeightDecayWatcher(), f"weight_decay {course}")
    assert reported == [finding.step for finding in found]


@pytest.mark.parametrize(
    ("resumed", "reported"),
    [("0.01x50", []), ("0.02x50", []), ("0x50", []), ("0.001x50", []), ("3x50", [40])],
)
def test_a_resume_with_a_far_larger_weight_decay_is_reported(
    resumed: str, reported: list[int]
) -> None:
    rows = merged_series("weight_decay 0.01x50")
    rows += merged_series(f"weight_decay {resumed}", attempt=2, first_step=40)
    found = watched(WeightDecayWatcher(), rows)
    assert reported == [finding.step for finding in found]
    assert all("from 0.01 to 3 at a resume: 300x" in finding.reason for finding in found)


@pytest.mark.parametrize("verdict", [CHANGE_EXPECTED, RATE_DECLARED])
def test_a_jump_of_the_rate_that_was_announced_is_not_reported(verdict: int) -> None:
    course = f"learning_rate 1x50 10x100; verdict 0x50 {verdict} 0x99"
    assert [] == watched(LearningRateWatcher(), course)


# -------------------------------------------------------------------------- loss scale


def test_one_overflow_in_two_thousand_steps_is_normal() -> None:
    course = "loss_scale 65536x2000 32768x2000 65536x2000; verdict 0x2000 16 0x2000 16 0x1998"
    assert [] == watched(LossScaleWatcher(), course)


def test_overflows_are_seen_in_the_scale_alone() -> None:
    course = "loss_scale 65536x100 32768 16384 8192 4096 2048 1024 512x20"
    (finding,) = watched(LossScaleWatcher(), course)
    assert (104, 100) == (finding.step, finding.onset_step)
    assert "5 overflows in a row: the loss scale fell from 6.554e+04 to 2048" in finding.reason


def test_a_counter_of_overflows_serves_as_well() -> None:
    course = "loss_scale 1024x200; overflow_steps 0x100 0..99x100"
    found = watched(LossScaleWatcher(), course)
    assert {105: ["loss_scale_collapse"], 121: ["overflow_rate"]} == causes(found)
    assert [101, 101] == [finding.onset_step for finding in found]


# ------------------------------------------------------------------------- weight norm


def test_weights_that_shrink_or_grow_fast_are_reported_once_while_they_do() -> None:
    for to, direction in ((40.0, "shrank"), (250.0, "grew")):
        rows = merged_series(f"weight_norm 90..100x60 100..{to}x20 {to}x60")
        (finding,) = watched(WeightNormWatcher(), rows)
        assert 60 <= finding.step <= 80
        assert f"the weight norm {direction} from" in finding.reason
        assert finding.value is not None and finding.limit is not None
        assert finding.value > finding.limit >= WeightNormConfig().change


def test_weights_of_a_small_norm_are_judged_by_the_same_ratio() -> None:
    rows = merged_series("weight_norm 0.09..0.1x60 0.1..0.04x20 0.04x60")
    (finding,) = watched(WeightNormWatcher(), rows)
    assert "the weight norm shrank from" in finding.reason


def test_weights_that_grow_from_their_beginning_are_healthy() -> None:
    assert [] == watched(WeightNormWatcher(), "weight_norm 10..30x20 30..45x60 45..50x200")


def test_a_run_whose_weights_always_move_fast_is_not_reported() -> None:
    assert [] == watched(WeightNormWatcher(), "weight_norm 10..20x40 20..40x40 40..80x40")


def test_without_samples_of_the_weight_norm_nothing_is_said() -> None:
    assert [] == watched(WeightNormWatcher(), "loss 1x300")


def test_another_attempt_begins_with_other_weights() -> None:
    rows = merged_series("weight_norm 100..101x60")
    rows += merged_series("weight_norm 60..61x60", attempt=2, first_step=30)
    assert [] == watched(WeightNormWatcher(), rows)


# -------------------------------------------------------------------------- layers


def test_the_layer_is_named() -> None:
    course = "; ".join(f"h.{i}:grad_norm 1x40 {'500' if i == 2 else '1'}x3" for i in range(6))
    (finding,) = watched(LayerGradientWatcher(), course)
    assert 40 == finding.step
    assert (
        "the gradient norm of layer h.2 is 500: 500x its usual 1, after dividing out what all "
        "6 layers share" == finding.reason
    )


@pytest.mark.parametrize(
    ("course", "reported", "lasting"),
    [
        ("500x1 1x9", [40], [True] * 3 + [False] * 7),
        ("500x2 1x2 500x1 1x5", [40], [True] * 7 + [False] * 3),
        ("500x1 1x5 500x4", [40, 46], [True] * 3 + [False] * 3 + [True] * 4),
        ("500x10", [40], [True] * 10),
    ],
)
def test_a_layer_that_no_longer_stands_out_is_over_and_reported_again(
    course: str, reported: list[int], lasting: list[bool]
) -> None:
    rows = merged_series(
        "; ".join(f"h.{i}:grad_norm 1x40 {course if i == 2 else '1x10'}" for i in range(6))
    )
    watcher, goes_on, findings = LayerGradientWatcher(), [], []
    for row in rows:
        findings += watcher.update(row)
        goes_on.append(watcher.goes_on)
    assert reported == [finding.step for finding in findings]
    assert lasting == goes_on[40:]


def test_a_layer_that_cannot_matter_is_not_told() -> None:
    course = "; ".join(f"h.{i}:grad_norm 1x40 1x9" for i in range(6))
    assert [] == watched(LayerGradientWatcher(), f"{course}; ln:grad_norm 1e-5x40 1e-3x9")


def test_with_three_layers_there_are_no_others() -> None:
    course = "; ".join(f"h.{i}:grad_norm 1x40 {10**i}x9" for i in range(3))
    assert [] == watched(LayerGradientWatcher(), course)


@pytest.mark.parametrize(("num_samples", "reported_at"), [(4, 22), (16, 22), (20, 22), (40, 42)])
def test_a_layer_that_stays_at_zero_before_its_warm_up_must_do_so_for_longer(
    num_samples: int, reported_at: int
) -> None:
    course = "; ".join(f"h.{i}:grad_norm 1x{num_samples} {0 if i == 2 else 1}x60" for i in range(6))
    (finding,) = watched(LayerGradientWatcher(), course)
    assert (reported_at, num_samples) == (finding.step, finding.onset_step)


def test_a_layer_at_zero_is_reported_with_the_first_step_that_was_measured() -> None:
    course = "; ".join(f"h.{i}:grad_norm 1x30 {0 if i == 2 else 1}x60" for i in range(6))
    rows = [replace(row, step=row.step * 10) for row in merged_series(course)]
    (finding,) = watched(LayerGradientWatcher(), rows)
    assert (300, True) == (finding.onset_step, "0 since step 300, " in finding.reason)


@pytest.mark.parametrize("course", ["1x3 0x80", "1x8 0x14 1x60 0x60"])
def test_a_layer_with_few_gradients_or_whose_gradient_returned_is_not_told(course: str) -> None:
    others = "; ".join(f"h.{i}:grad_norm 1x200" for i in range(5))
    assert [] == watched(LayerGradientWatcher(), f"{others}; moe:grad_norm {course}")


def test_activations_are_told_once_per_order_of_magnitude() -> None:
    course = "mlp:activation_rms 1x60 20x100 2000x100"
    found = watched(ActivationWatcher(), course)
    assert {62: ["activation"], 162: ["activation"]} == causes(found)
    assert found[0].reason.startswith("the output of mlp has a root mean square of 20, 20x")


def test_one_report_counts_all_outputs_that_grew() -> None:
    course = "; ".join(f"h.{i}:activation_rms 1x60 {20 + i}x9" for i in range(3))
    (finding,) = watched(ActivationWatcher(), course)
    assert finding.reason.startswith("the output of h.2 has a root mean square of 22, 22x")
    assert finding.reason.endswith("; 2 more grew as much")


def test_activations_that_collapse_are_told_once() -> None:
    fell = watched(ActivationWatcher(), "mlp:activation_rms 1x60 0.05x100")
    assert {62: ["activation_collapse"]} == causes(fell)
    assert fell[0].reason.startswith(
        "the output of mlp has a root mean square of 0.05, a 20th of the 1 after warm-up"
    )
    died = watched(ActivationWatcher(), "mlp:activation_dead_ratio 0.1x60 1x100")
    assert {62: ["activation_collapse"]} == causes(died)
    assert "100 % of the features of mlp are dead (0 for the whole batch), 10 % after" in (
        died[0].reason
    )


def test_few_dead_features_and_those_that_always_were_are_not_told() -> None:
    assert [] == watched(ActivationWatcher(), "mlp:activation_dead_ratio 0.05x60 0.6x100")
    assert [] == watched(ActivationWatcher(), "mlp:activation_dead_ratio 0.95x60 1x100")
    assert [] == watched(ActivationWatcher(), "mlp:activation_dead_ratio 0x49 1x100")
    switched = "mlp:activation_dead_ratio 0x60 1x2 0x3 1x1 0x50 1x9 0x3 1x40"
    assert [] == watched(ActivationWatcher(), switched)
    once = "mlp:activation_dead_ratio 0x60 1x2 0x50 1x40"
    assert {114: ["activation_collapse"]} == causes(watched(ActivationWatcher(), once))
    single = "mlp:activation_dead_ratio 0x60 1x2 0x50; a:activation_rms 1x60 0.01x2 1x50"
    assert [] == watched(ActivationWatcher(), single)


# -------------------------------------------------------------------------- speed


def test_throughput_is_told_in_words() -> None:
    course = "tokens_per_second 50000x400 40000x400; step_duration_seconds[0] 1x400 1.25x400"
    (finding,) = watched(ThroughputWatcher(), course)
    assert (439, 400) == (finding.step, finding.onset_step)
    assert (
        "throughput fell to 40 k tokens/s, 80% of the run's best (50 k tokens/s), over 40 steps "
        "(not counting evaluations and checkpoints)" == finding.reason
    )


def test_without_tokens_the_duration_serves() -> None:
    (finding,) = watched(ThroughputWatcher(), "step_duration_seconds[0] 1x400 1.4x400")
    assert finding.reason.startswith("steps take 1.4 s, 1.4x the run's best (1 s)")


def test_a_fall_by_five_per_cent_is_not_told() -> None:
    assert [] == watched(ThroughputWatcher(), "step_duration_seconds[0] 1x400 1.05x900")


def test_thirty_slow_steps_in_between_are_not_told() -> None:
    assert [] == watched(ThroughputWatcher(), "step_duration_seconds[0] 1x400 1.4x20 1x400")


def test_a_fall_that_stays_becomes_the_level_and_a_second_one_is_told() -> None:
    course = "step_duration_seconds[0] 1x400 1.3x1500 1.7x400"
    assert [439, 1939] == [f.step for f in watched(ThroughputWatcher(), course)]


@pytest.mark.parametrize("onset", [400, 407, 419, 431])
def test_a_fall_within_a_block_is_dated_to_its_first_step(onset: int) -> None:
    course = f"step_duration_seconds[0] 1x{onset} 1.4x{600 - onset}"
    assert [onset] == [f.onset_step for f in watched(ThroughputWatcher(), course)]


def test_a_stall_right_before_a_fall_is_not_its_first_step() -> None:
    course = "step_duration_seconds[0] 1x404 70x3 8x193"
    assert [407] == [f.onset_step for f in watched(ThroughputWatcher(), course)]


def test_a_fall_that_becomes_much_larger_is_told_again() -> None:
    course = "step_duration_seconds[0] 1x400 1.2x107 1.6x20 2.4x200"
    told = [(f.step, f.onset_step) for f in watched(ThroughputWatcher(), course)]
    assert [(439, 400), (559, 527)] == told


def test_a_slow_creep_is_told() -> None:
    assert 1 == len(watched(ThroughputWatcher(), "step_duration_seconds[0] 1..1.25x3000"))


@pytest.mark.parametrize("period", [3, 10, 100, 500])
def test_slow_steps_at_intervals_are_recognised(period: int) -> None:
    pace = SlowStepFilter()
    kinds = [pace.push(step, 9.0 if step % period == 0 else 1.0) for step in range(9 * period + 1)]
    assert ["periodic"] * 3 == [kind for kind in kinds if kind != "ordinary"][-3:]
    assert period == pace.period
    assert 1.0 == pace.typical_seconds


def test_two_periods_at_once_are_recognised() -> None:
    pace = SlowStepFilter()
    kinds = {
        step: pace.push(step, 9.0 if step % 100 == 0 or step % 250 == 0 else 1.0)
        for step in range(1, 3001)
    }
    assert {"periodic"} == {kinds[step] for step in (2400, 2500, 2600, 2700, 2750, 2800, 3000)}


def test_slow_steps_by_chance_are_not_periodic() -> None:
    pace, slow = SlowStepFilter(), {200, 217, 290, 401, 555, 560, 800, 931}
    kinds = [pace.push(step, 9.0 if step in slow else 1.0) for step in range(1000)]
    assert "periodic" not in kinds


# -------------------------------------------------------------------------- waits


def test_the_rank_that_waits_for_data_alone_is_named() -> None:
    course = (
        "step_duration_seconds[*] 1x100; data_wait_seconds[*] 0.01x100; "
        "data_wait_seconds[2] 0.4x100"
    )
    (finding,) = watched(DataBoundWatcher(), course, ranks=4)
    assert (2, "data_bound_rank", 49) == (finding.rank, finding.cause, finding.step)
    assert (
        "rank 2 alone spends 40% of the time waiting for batches, 400 ms of 1 s a step, "
        "since step 0" == finding.reason
    )


@pytest.mark.parametrize("num", [3, 20])
def test_a_stall_is_told_once_and_its_block_is_not_bound_by_data(num: int) -> None:
    waits = f"data_wait_seconds[*] 0.01x100 50x{num} 0.01x100"
    course = f"step_duration_seconds[*] 1x100 51x{num} 1x100; {waits}"
    assert [STALL] == [f.cause for f in watched(DataBoundWatcher(), course)]


def test_a_stall_that_does_not_end_is_bound_by_data_too() -> None:
    waits = "data_wait_seconds[*] 0.01x100 50x100"
    course = f"step_duration_seconds[*] 1x100 51x100; {waits}"
    assert [STALL, "data_bound"] == [f.cause for f in watched(DataBoundWatcher(), course)]


@pytest.mark.parametrize("onset", [100, 107, 135])
def test_a_wait_for_data_that_begins_within_a_block_is_dated_to_its_first_step(onset: int) -> None:
    waits = f"data_wait_seconds[*] 0.01x{onset} 0.9x{200 - onset}"
    (finding, *_) = watched(DataBoundWatcher(), f"step_duration_seconds[*] 1x200; {waits}")
    assert (149, onset) == (finding.step, finding.onset_step)
    assert ("in the last 50 steps" in finding.reason) == (onset != 100)


def test_a_wait_of_every_fourth_step_is_dated_to_the_block_in_which_it_begins() -> None:
    course = "step_duration_seconds[*] 1x100; data_wait_seconds[*]" + " 0x3 0.99x1" * 25
    (finding,) = watched(DataBoundWatcher(), course)
    assert finding.onset_step in range(4)


# -------------------------------------------------------------------------- memory, losses


def test_a_leak_is_told_with_the_steps_that_are_left() -> None:
    rows = merged_series(f"memory_allocated_bytes[0] {40 * GIB}..{60 * GIB}x2000")
    (finding,) = watched(memory_watcher(), rows)
    assert finding.value is not None
    assert abs(finding.step + finding.value - 4000) < 50
    assert "rank 0 grows by 10.25 MiB per step" in finding.reason
    assert "80 GiB run out in" in finding.reason


def test_a_slow_leak_is_found_at_a_larger_scale() -> None:
    rows = merged_series(f"memory_allocated_bytes[0] {40 * GIB}..{46 * GIB}x20000")
    (finding,) = watched(memory_watcher(), rows)
    assert 8000 < finding.step < 14000


def test_without_the_devices_size_nothing_is_told() -> None:
    watchers = FleetDetectors()
    assert [] == watched(watchers, f"memory_allocated_bytes[0] {40 * GIB}..{60 * GIB}x2000")


def test_the_size_is_learnt_from_a_nodes_sample() -> None:
    watchers = FleetDetectors()
    gpus = {"GPU-0": {"memory_total_bytes": 80.0 * GIB}}
    watchers.update_node(NodeSample(node="a", time_unix_ns=0, step=0, gpus=gpus))
    found = watched(watchers, f"memory_allocated_bytes[0] {40 * GIB}..{60 * GIB}x2000")
    assert ["memory_creep"] == [finding.kind for finding in found]


def test_the_rank_whose_loss_is_off_is_named() -> None:
    course = "rank_loss[*] 2x200; rank_loss[3] 2.5x200"
    (finding,) = watched(RankLossWatcher(), course, ranks=4)
    assert (3, 84, 0, 2.5, 2.0) == (
        finding.rank, finding.step, finding.onset_step, finding.value, finding.limit,
    )  # fmt: skip


def test_of_two_ranks_nobody_knows_whose_loss_is_off() -> None:
    assert [] == watched(RankLossWatcher(), "rank_loss[0] 2x300; rank_loss[1] 3x300", ranks=2)


def test_a_single_wild_loss_is_not_told() -> None:
    course = "rank_loss[*] 2x200; rank_loss[3] 2x99 900x9 2x92"
    assert [] == watched(RankLossWatcher(), course, ranks=4)
