"""The verdict is a function of summed numbers, equal on every rank that sums the same pack."""

import math

import pytest
import torch
from torch import nn

import trainer_hooks
from tests.support.watched import own_place  # noqa: F401
from tests.trainer_hooks.packs import NO_ROW, ROW, summed
from trainer_hooks.exchange.reduce_vector import (
    Rank0Values,
    ReducedNumbers,
    VerdictFigures,
    clip_divisor,
    culprits,
    judge_on_device,
    step_record,
)
from trainer_hooks.guard.optimizers import OptimizerGuard
from trainer_hooks.ranks import Ranks
from trainer_hooks.tensors.gradients import GradNorms, named_parameters
from trainvitals.detect.outliers import Limits
from trainvitals.errors import UsageError
from trainvitals.policy.state import DeviceRule
from trainvitals.records import (
    BAD_GRADIENTS,
    BAD_LOSS,
    LOSS_OUTLIER,
    NORM_OUTLIER,
    OVERFLOW,
    RANK_FAILED,
    WITHHELD,
    StepRecord,
)

NAN, INF = float("nan"), float("inf")


def verdict_of(*ranks, root=None):
    layout, pack = summed(*ranks, root=root)
    verdict = judge_on_device(layout, pack, NO_ROW)
    return int(verdict.bits), float(verdict.bad), float(verdict.loss), float(verdict.grad_norm)


def test_healthy_ranks_give_the_weighted_mean_loss_and_the_exact_norm():
    bits, bad, loss, norm = verdict_of({"loss": 1.0, "weight": 3.0}, {"loss": 5.0, "weight": 1.0})
    assert (bits, bad) == (0, 0.0)
    assert loss == 2.0
    assert norm == 2.0


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_one_rank_with_a_nonfinite_loss_makes_the_step_bad_for_all(value):
    bits, bad, _, _ = verdict_of({}, {"loss": value}, {}, {})
    assert (bits, bad) == (BAD_LOSS, 1.0)


@pytest.mark.parametrize("value", [NAN, INF])
def test_one_rank_with_nonfinite_gradients_makes_the_step_bad_and_is_named(value):
    layout, pack = summed({}, {"squares": (1.0, value)}, {}, {})
    reduced = ReducedNumbers(layout, pack.tolist())
    assert int(judge_on_device(layout, pack, NO_ROW).bits) == BAD_GRADIENTS
    assert culprits(reduced, reduced.losses()) == (1,)


def test_nobody_is_named_where_all_ranks_hold_the_same_bad_gradients():
    layout, pack = summed({"squares": (NAN, 1.0)}, {"squares": (NAN, 1.0)})
    reduced = ReducedNumbers(layout, pack.tolist())
    assert culprits(reduced, reduced.losses()) == ()


def test_a_nan_loss_names_its_rank_though_all_gradients_are_nan_by_then():
    layout, pack = summed({"squares": (NAN, 1.0)}, {"squares": (NAN, 1.0), "loss": NAN})
    reduced = ReducedNumbers(layout, pack.tolist())
    assert culprits(reduced, reduced.losses()) == (1,)


def test_finite_outliers_are_judged_by_the_limits_of_rank_0():
    root = Rank0Values(loss_limit=4.0, grad_norm_limit=10.0, max_row=2)
    withheld = WITHHELD | LOSS_OUTLIER, 1.0
    assert verdict_of({"loss": 3.9}, {"loss": 3.9}, root=root)[:2] == (0, 0.0)
    assert verdict_of({"loss": 9.0}, {"loss": 0.0}, root=root)[:2] == withheld
    assert verdict_of({"squares": (200.0, 0.0)}, root=root)[:2] == (WITHHELD | NORM_OUTLIER, 1.0)


@pytest.mark.parametrize(
    ("max_row", "row", "is_withheld", "after"),
    [(2, 0, True, 1), (2, 1, True, 2), (2, 2, False, 0), (1, 1, False, 0), (0, 0, False, 0)],
)
def test_an_outlier_is_withheld_unless_as_many_were_right_before_it(
    max_row, row, is_withheld, after
):
    layout, pack = summed({"loss": 9.0}, root=Rank0Values(loss_limit=4.0, max_row=max_row))
    verdict = judge_on_device(layout, pack, NO_ROW + row)
    assert int(verdict.bits) == LOSS_OUTLIER | (WITHHELD if is_withheld else 0)
    assert (float(verdict.bad), float(verdict.row)) == (is_withheld, after)


@pytest.mark.parametrize("given", [{"loss": NAN}, {"squares": (INF, 1.0)}, {"failed": True}])
def test_what_is_not_finite_or_not_whole_neither_counts_in_a_row_nor_ends_it(given):
    layout, pack = summed({}, given, root=Rank0Values(loss_limit=4.0, max_row=2))
    assert float(judge_on_device(layout, pack, NO_ROW).row) == 0.0
    assert float(judge_on_device(layout, pack, ROW).row) == 1.0
    layout, pack = summed({}, {}, root=Rank0Values(loss_limit=4.0, max_row=2))
    assert float(judge_on_device(layout, pack, ROW).row) == 0.0


def test_no_limit_is_no_outlier_however_large():
    assert verdict_of({"loss": 1e300, "squares": (1e300, 0.0)})[:2] == (0, 0.0)


def test_a_rank_that_failed_to_prepare_silences_the_finite_rules_only():
    root = Rank0Values(loss_limit=1.0)
    failed = {"failed": True, "loss": None}
    assert verdict_of({"loss": 9.0}, failed, root=root)[:2] == (RANK_FAILED, 0.0)
    assert verdict_of({"loss": NAN}, failed, root=root)[:2] == (RANK_FAILED | BAD_LOSS, 1.0)


def test_a_scaler_overflow_blocks_the_update_and_is_no_fault():
    overflow = torch.tensor(1.0, dtype=torch.float64)
    bits, bad, _, _ = verdict_of({"overflow": overflow, "squares": (INF, 1.0)}, {})
    assert (bits, bad) == (OVERFLOW, 1.0)


@pytest.mark.parametrize("row", [NO_ROW, ROW])
def test_the_norm_of_an_overflow_is_no_outlier_to_the_device_as_it_is_none_to_the_ladder(row):
    overflow = torch.tensor(1.0, dtype=torch.float64)
    root = Rank0Values(grad_norm_limit=1.5, clips=True, max_row=2)
    layout, pack = summed({"overflow": overflow}, {}, root=root)
    verdict = judge_on_device(layout, pack, row)
    rule = DeviceRule(int(row))
    record = StepRecord(step=3, attempt=1, loss=2.0, grad_norm=2.0, overflow=True)
    judged, after = rule.judge(record, Limits(grad_norm=1.5), 2, acts=True)
    assert (OVERFLOW, int(row)) == (int(verdict.bits), int(verdict.row))
    assert (False, int(row)) == (judged.withheld, after.row)


def test_missing_is_not_zero():
    layout, pack = summed({"loss": None}, {"loss": None})
    reduced = ReducedNumbers(layout, pack.tolist())
    derived = VerdictFigures.of(
        [*torch.cat(judge_on_device(layout, pack, NO_ROW).derived()).tolist(), NAN]
    )
    record = step_record(reduced, derived, step=3, attempt=1, skipped=False, learning_rate=None)
    assert record.loss is None
    assert record.loss_limit is None
    assert record.grad_norm == 2.0


def test_the_clip_divisor_is_that_of_clip_grad_norm():
    grad = torch.tensor([3.0, 4.0])
    param = nn.Parameter(torch.zeros(2))
    param.grad = grad.clone()
    norm = nn.utils.clip_grad_norm_([param], 1.0)
    assert torch.allclose(grad / clip_divisor(norm, 1.0), param.grad)
    assert float(clip_divisor(torch.tensor(0.5), 1.0)) == 1.0
    assert float(clip_divisor(torch.tensor(1e-6, dtype=torch.float64), 1e-6)) == 2.0


@pytest.mark.parametrize("mode", ["observe", "guard", "attach"])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("values", [[1e30], [1e30, -1e30], [1e18] * 3000, [-1e25, 1e25] * 1000])
def test_nothing_is_left_of_gradients_whose_norm_float32_cannot_hold(values, fused, mode):
    """Before the limits are warm, a norm that is short of the truth must not clip by it."""
    weights = {}
    for how in ("bare", mode):
        torch.manual_seed(0)
        model = nn.Linear(100, 100)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
        model(torch.ones(1, 100)).sum().backward()
        model.weight.grad.view(-1)[: len(values)] = torch.tensor(values)
        if how == "bare":
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        elif how == "attach":
            with trainer_hooks.attach(model, optimizer, max_norm=1.0):
                optimizer.step()
        else:
            with trainer_hooks.watch(model, optimizer, mode=how) as monitor:
                monitor.step(max_norm=1.0)
        weights[how] = model.weight.detach()
    assert torch.equal(weights["bare"], weights[mode])


def test_a_clip_to_infinity_clips_nothing():
    weights = []
    for max_norm in (None, float("inf")):
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-20, fused=True)
        (model(torch.ones(1, 2)).sum() * 1e25).backward()
        with trainer_hooks.watch(model, optimizer) as monitor:
            monitor.step(max_norm=max_norm)
        weights.append(model.weight.detach())
    assert torch.equal(*weights)


def test_norms_match_torch_and_survive_a_finite_1e30():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norms = GradNorms(named_parameters(model, [optimizer]), Ranks(0, 1, 0, None))
    model(torch.randn(4, 3)).sum().backward()
    out = torch.zeros(2, dtype=torch.float64)
    norms.squares_into(out, *norms.gradients())
    expected = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert math.isclose(float(out.sum().sqrt()), float(expected), rel_tol=1e-6)
    model.weight.grad.fill_(1e30)
    norms.squares_into(out, *norms.gradients())
    assert math.isclose(float(out.sum().sqrt()), 1e30 * math.sqrt(6), rel_tol=1e-6)


def test_parameters_without_gradients_count_as_missing():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norms = GradNorms(named_parameters(model, [optimizer]), Ranks(0, 1, 0, None))
    model[1](torch.ones(1, 2)).sum().backward()
    where, grads = norms.gradients()
    out = torch.zeros(4, dtype=torch.float64)
    norms.squares_into(out, where, grads)
    assert where == [2, 3]
    assert out[:2].tolist() == [0.0, 0.0]
    assert (out[2:] > 0).all()


def test_whichever_gradients_are_missing_each_square_is_its_parameter_s_share():
    """Parameters are frozen and freed again in a run; of replicas each brings its part."""
    model = nn.ParameterList([torch.ones(1) for _ in range(3)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norms = GradNorms(named_parameters(model, [optimizer]), Ranks(0, 1, 0, None))
    norms.share = torch.tensor([1.0, 0.5, 0.25], dtype=torch.float64)
    for given in ([0, 2], [0, 1], [1], [0, 1, 2], [1, 2]):
        for i, param in enumerate(model):
            param.grad = torch.full((1,), 2.0) if i in given else None
        out = torch.zeros(3, dtype=torch.float64)
        norms.squares_into(out, *norms.gradients())
        assert out.tolist() == [4.0 / 2**i if i in given else 0.0 for i in range(3)]


def test_a_gradient_that_is_missing_is_not_the_one_of_the_step_before():
    model = nn.ParameterList([torch.ones(1) for _ in range(2)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, fused=True)
    with trainer_hooks.watch(model, optimizer) as monitor:
        for bad in (True, False):
            model[0].grad = torch.full((1,), NAN) if bad else None
            model[1].grad = torch.ones(1)
            monitor.step()
    assert [float(param.detach()) for param in model] == [1.0, 0.5]


def test_sparse_gradients_are_coalesced_before_they_are_squared():
    table = nn.Embedding(5, 2, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    norms = GradNorms(named_parameters(table, [optimizer]), Ranks(0, 1, 0, None))
    table(torch.tensor([1, 1, 3])).sum().backward()
    out = torch.zeros(1, dtype=torch.float64)
    norms.squares_into(out, *norms.gradients())
    expected = float(table.weight.grad.to_dense().square().sum())
    assert math.isclose(expected, float(out), rel_tol=1e-12)


def test_a_parameter_in_two_optimizers_is_refused():
    model = nn.Linear(2, 2)
    both = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2)]
    with pytest.raises(UsageError, match="two optimizers"):
        named_parameters(model, both)


FUSED = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "adamw-amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True, fused=True),
    "adamw-maximize": lambda p: torch.optim.AdamW(p, lr=0.1, maximize=True, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
}


@pytest.mark.parametrize("name", FUSED)
def test_a_clip_folded_into_the_step_is_the_clip_before_it(name):
    trained = []
    for folded in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(5, 3)
        optimizer = FUSED[name](model.parameters())
        guard = OptimizerGuard(optimizer, None)
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(4, 5)).square().sum().backward()
            divisor = None
            if folded:
                norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
                divisor = clip_divisor(norm, 0.5)
            else:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            guard.apply(torch.zeros(()), skip_on_host=None, lr_factor=1.0, divisor=divisor)
        trained.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        assert not hasattr(optimizer, "grad_scale")
    torch.testing.assert_close(*trained, rtol=1e-6, atol=1e-7)
