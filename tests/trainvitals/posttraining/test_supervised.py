"""SFT, LoRA and margins: faults, and healthy runs that look alike."""

import json
import random
from collections.abc import Iterable, Mapping, Sequence

import pytest

from trainvitals.detect.posttraining.set import PostTrainingDetectors
from trainvitals.records import Finding

Rows = Sequence[Mapping[str, float]]


def judged(
    rows: Iterable[Mapping[str, float]], task: str = "sft", *, first: int = 0, change: int = -1
) -> list[tuple[int, str]]:
    """Return step and cause of each finding; the state is stored and restored before each step."""
    detectors, causes = PostTrainingDetectors(task), []
    for step, values in enumerate(rows, first):
        if step == change:
            detectors.expect_change()
        restored = PostTrainingDetectors(task)
        restored.load_state_dict(json.loads(json.dumps(detectors.state_dict())))
        detectors = restored
        findings = detectors.update(values, step=step, attempt=1, time_unix_ns=step)
        causes += [(finding.step, finding.cause) for finding in findings]
    return causes


def noise(seed: int, scale: float = 0.02) -> float:
    return scale * random.Random(seed).uniform(-1.0, 1.0)


def tuned(
    last: float, evaluated: Sequence[float], *, num: int = 100, start: float = 2.0
) -> list[dict[str, float]]:
    """A loss that falls to a level, with evaluations at equal distances."""
    rows: list[dict[str, float]] = []
    for n in range(num):
        level = start + (last - start) * min(n / 50, 1.0)
        rows.append({"loss": level * (1.0 + noise(n, 0.1)), "epoch": (n + 1) / num})
    for n, value in enumerate(evaluated):
        rows[(n + 1) * num // len(evaluated) - 1]["eval/loss"] = value
    return rows


def test_a_training_loss_near_0_while_the_evaluation_rises():
    rows = tuned(0.3, (1.5, 0.7, 0.8, 0.9))
    assert [(74, "memorized")] == judged(rows)


def test_a_training_loss_that_leaves_the_evaluation_behind_is_reported_before_that_rises():
    assert [(49, "memorized")] == judged(tuned(0.02, (1.5, 1.45, 1.6, 2.0)))
    # At step 49 the evaluation had just improved.
    assert [(74, "memorized")] == judged(tuned(0.02, (1.5, 1.2, 1.19, 1.18)))
    # Between evaluations it is reported only if the one before was already left behind.
    levels, evaluated = [2.0, 1.4, 0.4, 0.3], [2.0, 1.95, 1.9, 1.85]
    rows = by_epochs(levels, evaluated)
    assert [(45, "memorized")] == judged([row | {"epoch": 0.5} for row in rows])
    proportional = by_epochs(levels, [2.0, 1.5, 0.6, 0.5])
    assert [] == judged([row | {"epoch": 0.5} for row in proportional])


def test_it_holds_until_the_evaluation_improves():
    def ends(evaluated: float) -> bool:
        rows = by_epochs([2.0, 1.4, 0.4, 0.4, 0.4], [2.0, 1.95, 1.9, evaluated, evaluated])
        detectors, findings = PostTrainingDetectors("sft"), list[Finding]()
        for step, values in enumerate(rows):
            values |= {"epoch": 0.5}
            findings += detectors.update(values, step=step, attempt=1, time_unix_ns=step)
        (finding,) = findings
        return not detectors.holds(finding)

    assert not ends(1.9)
    assert ends(1.2)


@pytest.mark.parametrize(
    ("last", "evaluated"),
    [
        (0.02, (1.5, 0.2, 0.05, 0.1)),  # an easy task
        (0.3, (1.5, 1.0, 0.8, 0.79)),  # the evaluation is at its best
        (0.8, (1.5, 1.2, 1.3, 1.4)),  # some overfitting, as in most runs
        (0.02, ()),  # nothing shows that it is not an easy task
    ],
)
def test_an_easy_task_and_mild_overfitting_are_silent(last, evaluated):
    assert [] == judged(tuned(last, evaluated) if evaluated else tuned(last, (9.0,))[:-1])


def test_a_training_loss_far_below_an_evaluation_that_rises():
    assert [(74, "memorized")] == judged(tuned(0.5, (1.5, 1.2, 1.6, 2.0)))
    assert [] == judged(tuned(0.7, (1.5, 1.2, 1.6, 1.7)))


def test_the_order_of_the_causes_follows_from_the_epoch():
    def reason(epochs: int) -> str:
        detectors = PostTrainingDetectors("sft")
        for step, row in enumerate(tuned(0.02, (1.5, 1.2, 1.6, 2.0))):
            values = row | {"epoch": row["epoch"] * epochs}
            for finding in detectors.update(values, step=step, attempt=1, time_unix_ns=0):
                return finding.reason
        return ""

    assert "causes: training rows that contain their answer" in reason(1)
    assert "causes: rows that are memorized" in reason(8)


def by_epochs(
    levels: Sequence[float], evaluated: Sequence[float], *, num: int = 20
) -> list[dict[str, float]]:
    """Losses that are flat within each epoch, with an evaluation after it."""
    rows: list[dict[str, float]] = []
    for index, level in enumerate(levels):
        rows += [
            {"loss": level + noise(100 * index + n), "epoch": index + (n + 1) / num}
            for n in range(num)
        ]
        rows[-1]["eval/loss"] = evaluated[index]
    return rows


def test_a_loss_that_falls_only_at_the_start_of_an_epoch_while_the_evaluation_rises():
    rows = by_epochs((2.0, 1.6, 1.2, 0.8), (1.9, 2.1, 2.4, 2.8))
    assert [(44, "epochs_repeated")] == judged(rows)
    numbered = [row | {"epoch": float(n // 20)} for n, row in enumerate(rows)]
    assert [(44, "epochs_repeated")] == judged(numbered)


def test_a_single_drop_that_only_memory_explains():
    assert [(39, "epochs_repeated")] == judged(by_epochs((2.0, 1.0, 0.9), (1.9, 1.95, 2.4)))
    assert [] == judged(by_epochs((2.0, 1.0, 0.9), (1.9, 1.7, 1.5)))
    assert [] == judged(by_epochs((2.0, 1.3, 1.2), (1.9, 1.95, 1.9)))
    # Sorted rows: the loss rises within each epoch, and the evaluation falls with some noise.
    rows = [{"loss": 1.2 + 0.8 * (n % 50) / 50, "epoch": n / 50} for n in range(200)]
    for n, value in enumerate((1.402, 1.4, 1.401, 1.39, 1.4, 1.38, 1.43, 1.37), 1):
        rows[25 * n - 1]["eval/loss"] = value
    assert [] == judged(rows)


@pytest.mark.parametrize(
    ("levels", "evaluated"),
    [
        ((2.0, 1.6, 1.2, 0.8), (1.9, 1.8, 1.75, 1.74)),
        ((2.0, 1.95, 1.9, 1.85), (1.9, 2.1, 2.4, 2.8)),
        ((2.0, 1.6, 1.6, 1.2), (1.9, 2.1, 2.4, 2.8)),
    ],
)
def test_epochs_that_help_and_small_or_single_drops_are_silent(levels, evaluated):
    assert [] == judged(by_epochs(levels, evaluated))


def test_a_loss_that_falls_steadily_has_no_drops():
    rows = [
        {"loss": 2.0 - 0.02 * n, "epoch": (n + 1) / 20, "eval/loss": 1.0 + 0.01 * n}
        for n in range(60)
    ]
    assert [] == judged(rows)


def losses(*values: float) -> Rows:
    return [{"loss": value} for value in values]


def test_a_loss_near_0_from_the_start():
    assert [(4, "known_rows")] == judged(losses(*[0.01] * 30))
    assert [] == judged(losses(0.3, *[0.01] * 30))
    assert [] == judged(losses(*[0.01] * 30), first=500)  # resumed


def test_first_updates_that_destroy_the_base_model():
    destroyed = losses(1.5, 4.0, *[6.0 - 0.03 * n for n in range(60)])
    assert [(6, "forgetting")] == judged(destroyed)
    assert [(10, "forgetting")] == judged(losses(1.5, *[4.0] * 60))
    assert [] == judged(losses(1.5, *[6.0] * 4, *[1.5] * 60))
    assert [] == judged(destroyed, first=500)
    assert [] == judged(destroyed, change=5)
    assert [] == judged(losses(1.5, 4.0, 6.0, *[2.4] * 60))
    assert [] == judged(losses(10.5, *[12.0] * 60))
    uneven = losses(1.5, *[[4.0, 16.0][n % 2] for n in range(60)])
    assert [(10, "forgetting")] == judged(uneven)
    wide = losses(1.0, *[[0.5, 5.5][n % 2] for n in range(60)])
    assert [] == judged(wide)


@pytest.mark.parametrize(
    ("name", "bad", "good", "cause"),
    [
        ("labels/padding_share", 0.3, 0.0, "padding_labels"),
        ("labels/end_share", 0.0, 0.25, "no_end_label"),
        ("labels/prompt_share", 1.0, 0.0, "prompt_labels"),
        ("lora/optimizer_share", 0.0, 0.5, "adapter"),
        ("lora/has_gradient", 0.0, 1.0, "adapter"),
        ("lora/base_share", 0.1, 0.0, "base_trained"),
    ],
)
def test_counts_of_labels_and_adapters_are_reported_once(name, bad, good, cause):
    assert [(3, cause)] == judged([{}, {}, {}, {name: bad}, {name: bad}])
    assert [] == judged([{name: good}] * 3)


def test_a_count_holds_until_another_process_counts_again():
    detectors, findings = PostTrainingDetectors("sft"), list[Finding]()
    counts = {"lora/optimizer_share": 0.0, "lora/base_share": 1.0}
    for step, row in enumerate([counts, *[{"loss": 2.0}] * 50]):
        findings += detectors.update(row, step=step, attempt=1, time_unix_ns=step)
        assert [True, True] == [detectors.holds(finding) for finding in findings]
    counts = {"lora/optimizer_share": 1.0, "lora/base_share": 1.0}
    detectors.update(counts, step=60, attempt=2, time_unix_ns=60)
    held = [finding.cause for finding in findings if detectors.holds(finding)]
    assert ["base_trained"] == held


def test_leaked_pairs_and_known_rows_hold_to_the_end():
    for task, row in (("dpo", {"rewards/accuracies": 1.0}), ("sft", {"loss": 0.01})):
        detectors, findings = PostTrainingDetectors(task), list[Finding]()
        for step in range(300):
            attempt = 1 + (step >= 150)
            findings += detectors.update(row, step=step, attempt=attempt, time_unix_ns=step)
        assert [True] == [detectors.holds(finding) for finding in findings]
        detectors.update(row, step=0, attempt=3, time_unix_ns=300)
        assert not detectors.holds(findings[0])


def test_adapters_are_judged_in_each_kind_of_run_and_labels_only_in_sft():
    both = [{"lora/base_share": 1.0, "labels/end_share": 0.0}]
    assert {"base_trained", "no_end_label"} == {cause for _, cause in judged(both)}
    assert ["base_trained"] == [cause for _, cause in judged(both, "grpo")]
    assert [] == judged(both, "")


def pairs(
    margin: float, evaluated: Sequence[Mapping[str, float]], num: int = 100
) -> list[dict[str, float]]:
    rows: list[dict[str, float]] = [
        {"margin": margin * n / num, "accuracy": 0.9 if n else 0.5} for n in range(num)
    ]
    for n, values in enumerate(evaluated):
        rows[(n + 1) * num // len(evaluated) - 1] |= values
    return rows


def accuracies(*values: float) -> list[Mapping[str, float]]:
    return [{"eval/accuracy": value} for value in values]


def evaluation_losses(*values: float) -> list[Mapping[str, float]]:
    return [{"eval/loss": value} for value in values]


def test_margins_that_grow_while_an_evaluation_becomes_worse():
    worse = accuracies(0.7, 0.75, 0.74, 0.72, 0.7, 0.68, 0.66, 0.62, 0.6, 0.58)
    assert [(59, "overconfidence")] == judged(pairs(10.0, worse), "reward_model")
    named = [
        {{"margin": "rewards/margins", "eval/accuracy": "eval/rewards/accuracies"}.get(k, k): v
         for k, v in row.items()} for row in pairs(10.0, worse)
    ]  # fmt: skip
    assert [(59, "overconfidence")] == judged(named, "dpo")
    assert [] == judged(pairs(1.0, worse), "reward_model")
    loss = evaluation_losses(0.6, 0.5, 0.55, 0.65, 0.75, 0.9, 1.1, 1.2)
    assert [(74, "overconfidence")] == judged(pairs(10.0, loss), "reward_model")
    assert [] == judged(pairs(10.0, loss), "dpo")


def test_margins_that_grow_with_a_steady_evaluation_are_silent():
    steady = accuracies(0.7, 0.8, 0.9, 0.88, 0.91, 0.87, 0.9, 0.89)
    assert [] == judged(pairs(10.0, steady), "reward_model")
    noisy = accuracies(0.7, 0.9, 0.78, 0.9, 0.8, 0.92, 0.82, 0.83, 0.9)
    assert [] == judged(pairs(10.0, noisy), "reward_model")
    below = evaluation_losses(0.6, 0.3, 0.32, 0.35, 0.4, 0.45)
    assert [] == judged(pairs(10.0, below), "reward_model")


def test_kto_reports_chosen_completions_that_become_improbable():
    rows = [
        {"logps/chosen": -200.0 - 5.0 * n, "logps/rejected": -220.0 - 8.0 * n,
         "rewards/chosen": -0.5 * n, "rewards/margins": 0.3 * n} for n in range(80)
    ]  # fmt: skip
    assert ["preference"] == [cause for _, cause in judged(rows, "kto")]
