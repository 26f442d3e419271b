"""What moved first: each series against its own quiet steps."""

import math
from copy import deepcopy
from functools import cache

import msgspec
import numpy as np
import pytest

from trainvitals.detect.fleet.base import MergedStep
from trainvitals.detect.fleet.origin.onsets import Onset, find_origin_onset
from trainvitals.detect.fleet.origin.tracker import MOST_ONSETS, OnsetTracker

LAYERS = ("h.0", "h.1", "h.2", "h.3", "h.4", "h.5", "head")
BAD = 450


@cache
def healthy(step: int, *, every: int = 1, attempt: int = 1) -> MergedStep:
    """Return a step of four ranks with everything that can be measured."""
    draws = np.random.default_rng([step, 7])
    noise = lambda scale: float(np.exp(scale * draws.standard_normal()))  # noqa: E731
    layers = {}
    for i, name in enumerate(LAYERS if step % every == 0 else ()):
        layers[name] = {
            "grad_norm": (1.0 + i) * noise(0.2), "weight_norm": 10.0 + 0.001 * step,
            "update_norm": 0.1 * noise(0.05), "activation_rms": 2.0 * noise(0.05),
            "weight_written_ratio": 0.0, "moment_written_ratio": 0.0,
        }  # fmt: skip
    return MergedStep(
        step=step,
        attempt=attempt,
        time_unix_ns=step,
        run={
            "learning_rate": 1e-3, "lr_factor": 1.0, "grad_norm": 5.0 * noise(0.2),
            "max_norm": 1.0, "weight_decay": 0.1,
        },
        ranks={
            "rank_loss": [2.0 + 0.05 * draws.standard_normal() for _ in range(4)],
            "rank_grad_norm": [5.0 * noise(0.1) for _ in range(4)],
            "data_wait_seconds": [0.01 * noise(0.3) for _ in range(4)],
            "step_duration_seconds": [0.1] * 4,
        },
        layers=layers,
    )  # fmt: skip


def change(step: MergedStep, **parts) -> MergedStep:
    """Return a step with some columns replaced: ``run``, ``ranks`` by rank, ``layers`` by layer."""
    run = {**step.run, **parts.get("run", {})}
    ranks = {name: list(values) for name, values in step.ranks.items()}
    for (name, rank), value in parts.get("ranks", {}).items():
        ranks[name][rank] = value
    layers = {name: dict(row) for name, row in step.layers.items()}
    for (layer, name), value in parts.get("layers", {}).items():
        layers[layer][name] = value
    return MergedStep(
        step=step.step, attempt=step.attempt, time_unix_ns=0, run=run, ranks=ranks, layers=layers
    )


@cache
def before(bad: int, every: int) -> OnsetTracker:
    tracker = OnsetTracker()
    for number in range(bad):
        tracker.update(healthy(number, every=every))
    return tracker


def seen(damage, *, bad=BAD, last=BAD + 20, every=1) -> OnsetTracker:
    """Return a tracker that saw a run, with ``damage`` done to the steps from ``bad`` on."""
    tracker = deepcopy(before(bad, every))
    for number in range(bad, last):
        tracker.update(damage(healthy(number, every=every), number - bad))
    return tracker


def named(tracker: OnsetTracker, step: int = BAD + 5, **options) -> tuple | None:
    onset = find_origin_onset(tracker.onsets, attempt=1, step=step, **options)
    return None if onset is None else (onset.step, onset.subject, onset.where, onset.series)


def all_layers(name, value):
    return {(layer, name): value for layer in LAYERS}


NAN = math.nan
CASES = {
    "a layer's gradients explode": (
        lambda s, k: change(s, layers={("h.2", "grad_norm"): 300.0}) if k == 0 else s,
        (BAD, "layer", "h.2", "grad_norm"),
    ),
    "weights are written from outside, and all else follows": (
        lambda s, k: change(
            s,
            layers={("h.1", "weight_written_ratio"): 0.5 if k == 0 else 0.0}
            | all_layers("grad_norm", 80.0),
            ranks={("rank_loss", rank): 9.0 for rank in range(4)},
        ),
        (BAD, "layer", "h.1", "weight_written_ratio"),
    ),
    "the optimizer's state is written from outside": (
        lambda s, k: change(s, layers={("h.3", "moment_written_ratio"): 1.0}) if k == 0 else s,
        (BAD, "optimizer", "h.3", "moment_written_ratio"),
    ),
    "one layer's weights, of which only the other layers' gradients tell": (
        lambda s, k: change(
            s,
            layers={
                (n, "grad_norm"): 20.0 * s.layers[n]["grad_norm"] for n in LAYERS if n != "h.4"
            },
        ),
        (BAD, "layer", "h.4", "weights"),
    ),
    "one layer's weights, so large that all other gradients overflow": (
        lambda s, k: change(s, layers={(n, "grad_norm"): math.inf for n in LAYERS if n != "h.4"}),
        (BAD, "layer", "h.4", "weights"),
    ),
    "the last of the layers that turned is where backward began": (
        lambda s, k: change(s, layers={(n, "grad_norm"): NAN for n in LAYERS[:4]}),
        (BAD, "layer", "h.3", "grad_norm"),
    ),
    "of outputs that turned the first is where forward began": (
        lambda s, k: change(
            s,
            layers={(n, "activation_rms"): math.inf for n in LAYERS[2:]},
            ranks={("rank_loss", 0): NAN},
        ),
        (BAD, "layer", "h.2", "activation_rms"),
    ),
    "one rank's data": (
        lambda s, k: change(s, ranks={("rank_loss", 2): 6.0}, layers=all_layers("grad_norm", 90.0)),
        (BAD, "data", "rank:2", "rank_loss"),
    ),
    "the data of all": (
        lambda s, k: change(s, ranks={("rank_loss", rank): 5.0 for rank in range(4)}),
        (BAD, "data", "", "loss"),
    ),
    "the outputs of one layer, and of those after it": (
        lambda s, k: change(s, layers={(n, "activation_rms"): 60.0 for n in LAYERS[2:]}),
        (BAD, "layer", "h.2", "activation_rms"),
    ),
    "the outputs of all layers, and so the inputs": (
        lambda s, k: change(s, layers=all_layers("activation_rms", 60.0)),
        (BAD, "data", "", "activation_rms"),
    ),
    "the loss itself": (
        lambda s, k: change(s, ranks={("rank_loss", rank): math.inf for rank in range(4)}),
        (BAD, "loss", "", "loss"),
    ),
    "one rank's own gradients": (
        lambda s, k: change(s, ranks={("rank_grad_norm", 1): 100.0}),
        (BAD, "rank", "rank:1", "rank_grad_norm"),
    ),
    "the learning rate": (
        lambda s, k: change(s, run={"learning_rate": 0.03}),
        (BAD, "lr", "", "learning_rate"),
    ),
    "a rate that nobody recorded, known one step later": (
        lambda s, k: change(s, layers=all_layers("update_norm", 3.0)) if k else s,
        (BAD, "lr", "", "update_norm"),
    ),
    "the clip": (lambda s, k: change(s, run={"max_norm": 1e9}), (BAD, "config", "", "max_norm")),
    "weight decay": (
        lambda s, k: change(s, run={"weight_decay": 0.0}),
        (BAD, "config", "", "weight_decay"),
    ),
    "the loader": (
        lambda s, k: change(s, ranks={("data_wait_seconds", r): 5.0 for r in range(4)}),
        (BAD, "loader", "", "data_wait_seconds"),
    ),
    "a layer that learns no more": (
        lambda s, k: change(s, layers={("h.4", "grad_norm"): 0.0}),
        (BAD, "layer", "h.4", "grad_norm"),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_moved_first_is_named(case):
    damage, expected = CASES[case]
    assert expected == named(seen(damage))


def test_weight_decay_is_named_in_a_run_without_a_clip():
    def damage(step, age):
        step = change(step, run={"weight_decay": 0.0})
        del step.run["max_norm"]
        return step

    assert (BAD, "config", "", "weight_decay") == named(seen(damage))


def test_a_quiet_run_names_nothing():
    assert () == seen(lambda s, k: s, last=BAD + 300).onsets


def test_with_layers_at_every_tenth_step_the_layer_is_still_named():
    def damage(step, age):
        near = healthy(step.step)  # after a finding they are written at every step
        return change(near, layers={("h.2", "grad_norm"): 400.0}) if age == 0 else near

    assert (BAD + 3, "layer", "h.2", "grad_norm") == named(seen(damage, bad=BAD + 3, every=10))


@pytest.mark.parametrize(("bad", "where"), [(241, ""), (251, "h.2")])
def test_layers_at_every_tenth_step_are_judged_from_their_26th_row(bad, where):
    def damage(step, age):
        near = healthy(step.step)
        return change(near, layers={("h.2", "grad_norm"): 400.0}) if age == 0 else near

    first = named(seen(damage, bad=bad, last=bad + 5, every=10), bad)
    assert where == ("" if first is None else first[2])


def test_a_rate_that_jumps_among_bad_batches_is_an_onset_of_its_own():
    def damage(step, age):
        if age < 5:
            step = change(step, ranks={("rank_loss", rank): 9.0 for rank in range(4)})
        return change(step, run={"learning_rate": 0.03}) if age >= 2 else step

    tracker = seen(damage)
    assert (BAD + 2, "lr", "", "learning_rate") == named(tracker, BAD + 2, is_of_setting=True)
    assert (BAD, "data") == named(tracker, BAD + 1)[:2]
    assert None is named(seen(CASES["the data of all"][0]), BAD + 2, is_of_setting=True)


def test_a_layer_that_freezes_among_bad_batches_is_an_onset_of_its_own():
    def damage(step, age):
        if age < 5:
            step = change(step, ranks={("rank_loss", rank): 9.0 for rank in range(4)})
        return change(step, layers={("h.2", "grad_norm"): 0.0}) if age >= 2 else step

    tracker = seen(damage)
    assert (BAD + 2, "layer", "h.2", "grad_norm") == named(tracker, BAD + 2)
    assert (BAD, "data") == named(tracker, BAD + 1)[:2]


def _bad_batches(step: MergedStep, age: int, factors: dict[str, float]) -> MergedStep:
    """Return five steps of bad data, whose gradients are larger; ``factors`` from the third on."""
    of_data = 4.0 if age < 5 else 1.0
    if age < 5:
        step = change(step, ranks={("rank_loss", rank): 9.0 for rank in range(4)})
    factor_of = {
        layer: of_data * (factors.get(layer, 1.0) if age >= 2 else 1.0) for layer in LAYERS
    }
    rows = {
        (layer, "grad_norm"): factor * step.layers[layer]["grad_norm"]
        for layer, factor in factor_of.items()
        if layer in step.layers
    }
    return change(step, layers=rows)


def _without_h2(factor: float) -> dict[str, float]:
    return dict.fromkeys(LAYERS, factor) | {"h.2": 1.0}


@pytest.mark.parametrize(
    ("factors", "second"),
    [
        ({"h.2": 100.0}, ("h.2", "grad_norm")),
        (_without_h2(12.0), ("h.2", "weights")),
        (dict.fromkeys(LAYERS, 12.0), None),
        ({"h.2": 3.0}, None),
        (_without_h2(3.0), None),
        ({}, None),
    ],
)
def test_what_no_bad_batch_does_to_one_layer_is_an_onset_of_its_own(factors, second):
    tracker = seen(lambda step, age: _bad_batches(step, age, factors))
    apart = [(each.step, each.where, each.series) for each in tracker.onsets if each.is_apart]
    assert ([] if second is None else [(BAD + 2, *second)]) == apart
    assert (BAD, "data") == named(tracker, BAD + 1)[:2]
    if second is not None:
        assert (BAD + 2, "layer", *second) == named(tracker, BAD + 2)


def test_weights_among_bad_batches_are_an_onset_also_if_the_step_before_had_no_layers():
    def damage(step, age):
        step = _bad_batches(step, age, _without_h2(1e6))
        if age == 1:
            return msgspec.structs.replace(step, layers={})
        return change(step, run={"grad_norm": 1e7}) if age >= 2 else step

    apart = [(each.step, each.where) for each in seen(damage).onsets if each.is_apart]
    assert [(BAD + 2, "h.2")] == apart


def test_without_layers_only_the_total_is_named():
    def damage(step, age):
        return change(step, run={"grad_norm": 400.0}) if age == 0 else step

    tracker = seen(damage, every=10**9)
    assert (BAD, "gradients", "", "grad_norm") == named(tracker, BAD + 5)


@pytest.mark.parametrize("asked", [BAD, BAD + 5, BAD + 60])
def test_the_onset_is_the_same_whenever_somebody_asks(asked):
    drift = seen(
        lambda s, k: change(s, layers={("h.1", "weight_written_ratio"): 0.01}), last=BAD + 62
    )
    assert (BAD, "layer", "h.1", "weight_written_ratio") == named(drift, asked)


def test_without_what_would_tell_data_from_weights_no_cause_is_named():
    for loss in (5.0, NAN):
        tracker = OnsetTracker()
        for number in range(BAD + 5):
            step = bare(healthy(number))
            losses = {("rank_loss", rank): loss for rank in range(4)}
            tracker.update(change(step, ranks=losses) if number >= BAD else step)
        assert (BAD, "losses", "", "loss") == named(tracker)
        assert not tracker.onsets[-1].is_cause


def bare(step: MergedStep) -> MergedStep:
    """Return a step with the default signals."""
    layers = {name: {"grad_norm": row["grad_norm"]} for name, row in step.layers.items()}
    return MergedStep(
        step=step.step, attempt=1, time_unix_ns=0, run=step.run, ranks=step.ranks, layers=layers
    )


@pytest.mark.parametrize(
    ("layers", "skipped", "expected"),
    [
        (["h.1"], 1, (BAD, "layer", "h.1", "weight_norm")),
        (["h.1", "h.3"], 1, (BAD, "layer", "", "weight_norm")),
        (LAYERS, 0, (BAD, "losses", "", "loss")),
    ],
)
def test_weights_that_the_check_finds_moved_first_if_no_update_wrote_them(
    layers, skipped, expected
):
    tracker = OnsetTracker()
    for number in range(BAD + 3):
        step = bare(healthy(number))
        if number >= BAD:
            losses = {("rank_loss", rank): NAN for rank in range(4)}
            step = change(
                step, run={"skipped": skipped}, ranks=losses, layers=all_layers("grad_norm", NAN)
            )
        if number == BAD + 2:
            norms = {(layer, "weight_norm"): NAN for layer in layers}
            step = change(step, run={"nonfinite_params": 4}, layers=norms)
        tracker.update(step)
    assert expected == named(tracker, BAD + 2)


@pytest.mark.parametrize(
    ("huge", "loss", "expected"),
    [
        (["h.1"], NAN, (BAD, "layer", "h.1", "largest_weight")),
        (["h.1", "h.3"], NAN, (BAD, "losses", "", "loss")),
        (["h.1"], 2.0, None),
    ],
)
def test_a_weight_that_is_huge_in_a_row_of_nan_losses_was_damaged_before_the_first(
    huge, loss, expected
):
    tracker = OnsetTracker()
    for number in range(BAD + 3):
        step = bare(healthy(number))
        if number >= BAD:
            losses = {("rank_loss", rank): loss for rank in range(4)}
            step = change(step, run={"skipped": 1}, ranks=losses)
        if number == BAD + 1:
            step = change(step, layers={(layer, "weight_norm"): 3e37 for layer in huge})
        tracker.update(step)
    assert expected == named(tracker, BAD + 2)


def test_optimizer_state_that_was_written_is_named():
    """Also if only few layers have a ratio: modules without parameters have rows too."""
    tracker = OnsetTracker()
    for number in range(BAD + 1):
        step = bare(healthy(number))
        if number == BAD:
            ratios = {"weight_written_ratio": 0.0, "moment_written_ratio": 0.98}
            step = change(step, layers={("h.1", name): value for name, value in ratios.items()})
        tracker.update(step)
    assert (BAD, "optimizer", "h.1", "moment_written_ratio") == named(tracker)


@pytest.mark.parametrize(
    ("losses", "subject"),
    [
        ([6.0, 5.0, 7.0], "data"),
        ([6.0, 5.0, 4.0, 3.4, 3.0, 2.7, 2.5, 2.4, 2.3, 2.2, 2.2], "losses"),
        ([6.0] * 11, "losses"),
        ([2.25, 2.3, 2.35, 2.4], "data"),
    ],
)
def test_a_loss_that_is_back_at_once_was_due_to_its_data_and_one_that_heals_was_not(
    losses: list[float], subject: str
):
    tracker = OnsetTracker()
    for number in range(BAD + 25):
        step = bare(healthy(number))
        if BAD <= number < BAD + len(losses):
            high = losses[number - BAD]
            step = change(step, ranks={("rank_loss", rank): high for rank in range(4)})
        tracker.update(step)
    assert (BAD, subject) == named(tracker)[:2]


@pytest.mark.parametrize("has_written_ratios", [True, False])
def test_bad_data_of_a_run_of_one_rank_are_those_of_rank_0(has_written_ratios: bool):
    tracker = OnsetTracker()
    for number in range(BAD + 25):
        step = healthy(number) if has_written_ratios else bare(healthy(number))
        losses = [9.0 if BAD <= number < BAD + 5 else step.ranks["rank_loss"][0]]
        tracker.update(msgspec.structs.replace(step, ranks={"rank_loss": losses}))
    assert (BAD, "data", "rank:0", "loss") == named(tracker)


def _high(num: int, *ranks: int, norm: float = 5.0) -> list[tuple[tuple[int, ...], float]]:
    """Return steps in which these ranks have a high loss, with the gradient norm."""
    return [(ranks, norm)] * num


_ALL = (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("steps", "second"),
    [
        (_high(2, 1) + _high(3, *_ALL), (BAD + 2, "data", "", "loss")),
        (_high(2, *_ALL) + _high(3, 1), (BAD + 2, "data", "rank:1", "rank_loss")),
        (_high(2, *_ALL) + _high(4, *_ALL, norm=30.0), (BAD + 2, "data", "", "loss")),
        (_high(1, 1) + _high(3, *_ALL), None),
        (_high(4, *_ALL) + _high(1, 1), None),
        (_high(2, 1) + _high(2, *_ALL) + _high(2, 1), None),
        (_high(5, 1), None),
        (_high(5, *_ALL), None),
        (_high(3, *_ALL) + _high(1, *_ALL, norm=30.0), None),
        (_high(2, *_ALL, norm=30.0) + _high(3, *_ALL), None),
        (_high(2, *_ALL, norm=3.0) + _high(2, *_ALL, norm=7.0) + _high(1, *_ALL, norm=40.0), None),
        (_high(2, *_ALL, norm=0.0) + _high(3, *_ALL), None),
        (_high(2, 1) + _high(60, *_ALL), None),
    ],
)
def test_a_second_problem_of_the_data_is_an_onset_of_its_own(steps, second):
    def damage(step, age):
        if age >= len(steps):
            return bare(step)
        ranks, norm = steps[age]
        losses = {("rank_loss", rank): 9.0 for rank in ranks}
        return change(bare(step), run={"grad_norm": norm}, ranks=losses)

    tracker = OnsetTracker()
    for number in range(BAD + 25):
        tracker.update(
            damage(healthy(number), number - BAD) if number >= BAD else bare(healthy(number))
        )
    apart = [(o.step, o.subject, o.where, o.series) for o in tracker.onsets if o.is_apart]
    assert ([] if second is None else [second]) == apart
    assert BAD == named(tracker, BAD + 1)[0]
    if second is not None:
        assert second == named(tracker, second[0])


def test_a_rollback_during_a_high_loss_does_not_show_that_its_data_were_bad():
    tracker = OnsetTracker()
    for number in range(BAD + 5):
        step = bare(healthy(number))
        if number >= BAD:
            step = change(step, ranks={("rank_loss", rank): 9.0 for rank in range(4)})
        tracker.update(step)
    for number in range(BAD - 20, BAD + 20):
        step = msgspec.structs.replace(bare(healthy(number)), attempt=2)
        if BAD <= number < BAD + 3:  # again, with larger gradients
            ranks = {("rank_loss", rank): 9.0 for rank in range(4)}
            step = change(step, run={"grad_norm": 50.0}, ranks=ranks)
        tracker.update(step)
    seen_onsets = [(o.attempt, o.step, o.subject) for o in tracker.onsets]
    assert [(1, BAD, "losses"), (2, BAD, "data")] == seen_onsets


def test_a_nan_after_a_huge_update_has_the_update_as_its_cause():
    tracker = OnsetTracker()
    for number in range(BAD + 3):
        step = healthy(number)
        if number == BAD + 1:
            step = change(step, layers={("h.2", "update_norm"): 1e5})
        if number >= BAD + 1:
            step = change(step, ranks={("rank_loss", rank): math.nan for rank in range(4)})
        tracker.update(step)
    assert (BAD, "h.2") == (named(tracker, BAD + 1)[0], named(tracker, BAD + 1)[2])


def test_a_layer_that_freezes_while_a_loss_is_only_becoming_an_outlier_has_its_own_onset():
    """The third high loss in a row makes the first the onset; the layer changed in the third."""

    def damage(step, age):
        step = bare(step)
        if age < 5:
            step = change(step, ranks={("rank_loss", rank): 2.25 for rank in range(4)})
        return change(step, layers={("h.2", "grad_norm"): 0.0}) if age >= 2 else step

    tracker = OnsetTracker()
    for number in range(BAD + 6):
        tracker.update(
            damage(healthy(number), number - BAD) if number >= BAD else bare(healthy(number))
        )
    assert (BAD, "losses", "", "loss") == named(tracker, BAD + 1)
    assert (BAD + 2, "layer", "h.2", "grad_norm") == named(tracker, BAD + 2)


@pytest.mark.parametrize(
    ("norms", "expected"),
    [
        ({}, 460),
        (dict.fromkeys(range(454, 461), 1e-6), 454),
        (dict.fromkeys(range(456, 461), 60.0), 456),
        (dict.fromkeys(range(452, 456), 0.5) | dict.fromkeys(range(456, 461), 1e6), 456),
        ({451: 1e-3} | dict.fromkeys(range(459, 461), 1e-6), 459),
    ],
)
def test_weights_inferred_between_two_rows_of_layers_moved_when_the_gradient_norm_did(
    norms, expected
):
    """A layer is written at each 10th step: the total shows the steps between."""
    tracker = OnsetTracker()
    for number in range(500):
        step = bare(healthy(number, every=10))
        if number in norms:
            step = change(step, run={"grad_norm": norms[number]})
        if number >= 460 and step.layers:
            rows = {
                (n, "grad_norm"): 20.0 * step.layers[n]["grad_norm"] for n in LAYERS if n != "h.4"
            }
            step = change(step, layers=rows)
        tracker.update(step)
    assert (expected, "layer", "h.4", "weights") == named(tracker, 465)


def test_a_nan_among_bad_batches_is_not_due_to_them():
    tracker = OnsetTracker()
    for number in range(BAD + 25):
        step = bare(healthy(number))
        if BAD <= number < BAD + 5:
            high = NAN if number == BAD + 2 else 6.0
            step = change(step, ranks={("rank_loss", rank): high for rank in range(4)})
        tracker.update(step)
    assert (BAD, "data", "", "loss") == named(tracker, BAD)
    assert (BAD + 2, "losses", "", "loss") == named(tracker, BAD + 2)


def test_a_layer_stands_out_among_layers_that_are_noisy_together():
    """A batch moves all layers' gradients by as much as the fault moves one: the share tells."""
    tracker = OnsetTracker()
    for number in range(BAD + 3):
        draws = np.random.default_rng([number, 3])
        common, step = float(np.exp(1.2 * draws.standard_normal())), bare(healthy(number))
        norms = {n: common * step.layers[n]["grad_norm"] for n in LAYERS}
        if number == BAD:
            norms["h.2"] *= 40.0
        tracker.update(change(step, layers={(n, "grad_norm"): v for n, v in norms.items()}))
    assert (BAD, "layer", "h.2", "grad_norm") == named(tracker)


def test_a_value_that_turned_nan_at_the_step_outranks_a_series_that_was_high_before():
    def damage(step, age):
        if age == 5:
            return change(step, layers={("h.4", "grad_norm"): NAN})
        return change(step, layers={("h.2", "grad_norm"): 300.0}) if age < 5 else step

    tracker = seen(damage)
    assert (BAD, "layer", "h.2", "grad_norm") == named(tracker, BAD + 4)
    assert (BAD + 5, "layer", "h.4", "grad_norm") == named(tracker, BAD + 5)


def test_a_learning_rate_that_jumped_outranks_the_nan_that_followed():
    def damage(step, age):
        step = change(step, run={"learning_rate": 0.03})
        return change(step, layers={("h.4", "grad_norm"): NAN}) if age == 5 else step

    assert (BAD, "lr", "", "learning_rate") == named(seen(damage), BAD + 5)


def test_what_has_clean_steps_behind_it_is_no_cause_unless_it_lasts():
    tracker = seen(CASES["a layer's gradients explode"][0], last=BAD + 100)
    assert named(tracker, BAD + 9) is not None
    assert None is named(tracker, BAD + 10)
    written = seen(CASES["the optimizer's state is written from outside"][0], last=BAD + 100)
    assert named(written, BAD + 39) is not None
    assert None is named(written, BAD + 41)


def test_what_was_announced_is_no_origin():
    tracker = seen(CASES["the data of all"][0])
    assert None is named(tracker, planned=[(BAD - 2, 100)])
    assert None is not named(tracker, planned=[(BAD + 1, 100)])


def test_what_is_slow_has_another_origin_than_what_is_wrong():
    def both(step, age):
        step = change(step, ranks={("data_wait_seconds", 0): 5.0}) if age == 0 else step
        return change(step, layers={("h.2", "grad_norm"): 300.0}) if age == 5 else step

    tracker = seen(both)
    assert "loader" == named(tracker, is_of_speed=True)[1]
    assert "layer" == named(tracker, is_of_speed=False)[1]
    assert "loader" == named(tracker)[1]


def test_a_schedule_that_restarts_or_decays_names_nothing():
    def restart(step, age):
        return change(step, run={"learning_rate": 1e-3})

    tracker = OnsetTracker()
    for number in range(BAD + 20):
        rate = 1e-3 if number < 200 else 1e-4  # a decay, and at BAD a warm restart
        step = change(healthy(number), run={"learning_rate": rate})
        layers = {(n, "update_norm"): 100.0 * rate for n in LAYERS}
        step = change(step, layers=layers)
        tracker.update(restart(step, 0) if number >= BAD else step)
    assert None is named(tracker)


def test_weights_that_the_loop_itself_writes_at_every_step_are_no_news():
    tracker = OnsetTracker()
    for number in range(BAD + 20):
        tracker.update(change(healthy(number), layers={("h.0", "weight_written_ratio"): 0.01}))
    assert None is named(tracker)


def test_nobody_can_tell_before_there_is_a_reference():
    tracker = seen(CASES["a layer's gradients explode"][0], bad=60, last=80)
    assert not tracker.is_judging
    assert () == tracker.onsets


def test_it_goes_on_judging_after_a_rollback():
    tracker = seen(CASES["one rank's data"][0])
    for number in range(BAD - 50, BAD + 60):
        step = healthy(number, attempt=2)
        tracker.update(change(step, ranks={("rank_loss", 3): 7.0}) if number == BAD + 50 else step)
    onset = find_origin_onset(tracker.onsets, attempt=2, step=BAD + 55)
    assert onset is not None
    assert (BAD + 50, "rank:3") == (onset.step, onset.where)
    assert "rank:2" == find_origin_onset(tracker.onsets, attempt=1, step=BAD + 15).where


def test_onsets_are_bounded_and_outlive_a_restart():
    onsets = [
        Onset(attempt=1, step=i, last_step=i, subject="layer", where="h.0", series="grad_norm")
        for i in range(MOST_ONSETS)
    ]
    tracker = OnsetTracker(msgspec.msgpack.decode(msgspec.msgpack.encode(onsets), type=list[Onset]))
    assert tuple(onsets) == tracker.onsets
    damage = CASES["a layer's gradients explode"][0]
    for number in range(BAD + 5):
        step = healthy(number)
        tracker.update(damage(step, number - BAD) if number >= BAD else step)
    assert MOST_ONSETS == len(tracker.onsets)
    assert "h.2" == tracker.onsets[-1].where
    msgspec.msgpack.encode(tracker.onsets)
