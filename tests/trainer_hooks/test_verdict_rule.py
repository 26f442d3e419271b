"""The rule of withholding in plain numbers says what the device says, step after step."""

import math
import random

import pytest
import torch

from tests.trainer_hooks.packs import NO_ROW, filled, summed
from trainer_hooks.exchange.reduce_vector import (
    Rank0Values,
    ReducedNumbers,
    VerdictFigures,
    judge_on_device,
    judge_on_host,
    step_record,
)
from trainvitals.detect.outliers import Limits
from trainvitals.policy.state import DeviceRule
from trainvitals.records import BAD_GRADIENTS, BAD_LOSS, OVERFLOW, WITHHELD, StepRecord

ODD = (math.nan, math.inf, -math.inf)
FLAG = torch.tensor(1.0, dtype=torch.float64)


def a_rank(rng: random.Random) -> dict:
    """Return what a rank brings to a step: ordinary, far off, not finite, short, or missing."""
    loss = rng.choice((2.0, 2.0, -0.0, 3.0, 9.0, -9.0, 40.0, None, rng.choice(ODD)))
    square = rng.choice((1.0, 1.0, 1.0, 400.0, 1e30, rng.choice((math.nan, math.inf))))
    given = {"loss": loss, "squares": (1.0, square), "weight": rng.choice((1.0, 3.0))}
    if rng.random() < 0.1:
        given["overflow"] = FLAG
    if rng.random() < 0.08:
        given |= {"failed": True, "loss": None, "squares": (0.0, 0.0)}
    return given


def a_root(rng: random.Random) -> Rank0Values:
    return Rank0Values(
        loss_limit=rng.choice((None, 4.0, 4.0, -1.0)),
        grad_norm_limit=rng.choice((None, 10.0, 10.0)),
        max_row=rng.choice((0, 1, 2, 2, 2)),
    )


def plain(record: StepRecord, root: Rank0Values, rule: DeviceRule, *, acts: bool):
    """Judge by the record's own numbers, as of a log: who was not finite is not in one."""
    return rule.judge(
        StepRecord(
            step=record.step,
            attempt=1,
            loss=record.loss,
            grad_norm=record.grad_norm,
            overflow=record.overflow,
            failed_ranks=record.failed_ranks,
        ),
        Limits(root.loss_limit, root.grad_norm_limit),
        root.max_row,
        acts=acts,
    )


@pytest.mark.parametrize("mode", ["observe", "guard"])
@pytest.mark.parametrize("seed", range(3))
def test_the_rule_in_plain_numbers_says_what_the_device_says(mode, seed):
    rng = random.Random(seed)
    row, rule, seen = NO_ROW, DeviceRule(), set()
    for step in range(300):
        ranks, root = [a_rank(rng) for _ in range(rng.choice((1, 1, 2, 3)))], a_root(rng)
        layout, pack = summed(*ranks, root=root)
        verdict = judge_on_device(layout, pack, row)
        derived = VerdictFigures.of([*torch.cat(verdict.derived()).tolist(), math.nan])
        expected = step_record(
            ReducedNumbers(layout, pack.tolist()),
            derived,
            step=step,
            attempt=1,
            skipped=derived.blocked(mode),
            learning_rate=None,
        )
        judged, rule = plain(expected, root, rule, acts=mode == "guard")
        row = verdict.row
        what = f"step {step}: {ranks} under {root}"
        assert (expected.withheld, expected.skipped) == (judged.withheld, judged.skipped), what
        assert int(row) == rule.row, what
        assert (expected.loss_limit, expected.grad_norm_limit) == (
            judged.loss_limit, judged.grad_norm_limit,
        )  # fmt: skip
        seen.add((expected.withheld, expected.skipped, rule.row))
    # Withheld or not, in a row or not: the course is no calm one.
    rows = {(withheld, row) for withheld, _, row in seen}
    assert {(True, 1), (True, 2), (False, 0), (False, 1)} <= rows


def bits_of(numbers):
    """Return numbers as they are stored: NaN equals NaN, and 0.0 is not -0.0."""
    return torch.tensor(numbers, dtype=torch.float64).view(torch.int64).tolist()


@pytest.mark.parametrize("seed", range(3))
def test_the_host_fills_and_judges_the_vector_of_one_rank_bit_for_bit_as_a_device_does(seed):
    rng = random.Random(seed)
    row, row_on_host, seen = NO_ROW, 0.0, set()
    for step in range(400):
        given, root = a_rank(rng), a_root(rng)
        given |= {"digest": rng.random(), "norm_before_clip": rng.choice((None, FLAG))}
        packer = filled(given, root=root, on_host=True)
        expected = filled(given, root=root)
        numbers = packer.pack.tolist()
        what = f"step {step}: {given} under {root}"
        assert bits_of(expected.pack.tolist()) == bits_of(numbers), what
        device = judge_on_device(packer.layout, expected.pack, row)
        host = judge_on_host(packer.layout, numbers, packer.norm, row_on_host)
        row, row_on_host = device.row, host.row
        names = ["bad", "bits", "grad_norm", "overflow", "row", "num_failed"]
        names += [] if given["loss"] is None else ["loss"]  # without one, no one reads the mean
        judged = [[str(float(getattr(of, name))) for name in names] for of in (device, host)]
        assert judged[0] == judged[1], what
        seen.add(int(host.bits))
    assert {0, BAD_LOSS, BAD_GRADIENTS, OVERFLOW} < seen and any(bits & WITHHELD for bits in seen)


@pytest.mark.parametrize("mode", ["observe", "guard", "heal"])
@pytest.mark.parametrize("bits", [0, BAD_LOSS, BAD_GRADIENTS, WITHHELD, OVERFLOW])
def test_an_update_is_blocked_by_a_fault_in_modes_that_act_and_by_the_scaler_in_all(mode, bits):
    derived = VerdictFigures(bits=bits, loss=1.0, grad_norm=1.0, loss_scale=math.nan)
    assert derived.blocked(mode) == (bits == OVERFLOW or (bits != 0 and mode != "observe"))
