"""A skip leaves no trace, and a step that is not skipped is the optimizer's own."""

import copy

import pytest
import torch
from torch import nn

from tests.trainer_hooks.counting import Counted
from trainer_hooks.guard import optimizers
from trainer_hooks.guard.optimizers import BufferShadow, OptimizerGuard, takes_found_inf

FACTORIES = {
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "adam-fused": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "adagrad-fused": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "sgd-dampening-fused": lambda p: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, dampening=0.5, fused=True
    ),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
}


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def _gradients(model, fill=None):
    torch.manual_seed(1)
    model.zero_grad()
    model(torch.randn(6, 4)).square().mean().backward()
    if fill is not None:
        next(model.parameters()).grad[0, 0] = fill


def _apply(guard, bad, **keywords):
    flag = torch.tensor(float(bad), dtype=torch.float64)
    on_host = None if guard.on_device else bad
    guard.apply(flag, skip_on_host=on_host, lr_factor=keywords.get("lr_factor", 1.0))


def _state(model, optimizer):
    return copy.deepcopy((model.state_dict(), optimizer.state_dict()))


def _assert_equal(left, right):
    assert left.keys() == right.keys()
    for key, value in left.items():
        if isinstance(value, dict):
            _assert_equal(value, right[key])
        elif isinstance(value, torch.Tensor):
            assert torch.equal(value, right[key]), key
        else:
            assert value == right[key], key


@pytest.mark.parametrize("name", FACTORIES)
@pytest.mark.parametrize("bad_value", [float("nan"), float("inf"), 1e30])
def test_a_skipped_step_changes_no_bit_of_parameters_or_state(name, bad_value):
    model = _model()
    optimizer = FACTORIES[name](model.parameters())
    guard = OptimizerGuard(optimizer, None)
    for _ in range(3):
        _gradients(model)
        _apply(guard, bad=False)
    weights, state = _state(model, optimizer)
    _gradients(model, fill=bad_value)
    _apply(guard, bad=True)
    after_weights, after_state = _state(model, optimizer)
    _assert_equal(weights, after_weights)
    _assert_equal(state["state"], after_state["state"])


@pytest.mark.parametrize("name", FACTORIES)
def test_a_skipped_first_step_leaves_the_run_as_if_it_had_not_been(name):
    ours, plain = _model(), _model()
    guarded, bare = FACTORIES[name](ours.parameters()), FACTORIES[name](plain.parameters())
    guard = OptimizerGuard(guarded, None)
    _gradients(ours, fill=float("nan"))
    _apply(guard, bad=True)
    for _ in range(3):
        _gradients(ours)
        _apply(guard, bad=False)
        _gradients(plain)
        bare.step()
    _assert_equal(plain.state_dict(), ours.state_dict())


def test_only_classes_known_to_honour_the_flag_are_given_it():
    params = [nn.Parameter(torch.zeros(2))]

    class Mine(torch.optim.AdamW):
        pass

    assert takes_found_inf(torch.optim.AdamW(params, fused=True))
    assert not takes_found_inf(torch.optim.AdamW(params))
    assert not takes_found_inf(Mine(params, fused=True))
    assert not takes_found_inf(torch.optim.RMSprop(params))


def test_a_lowered_rate_is_seen_by_the_step_alone():
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    _gradients(model)
    grads = [p.grad.clone() for p in model.parameters()]
    _apply(OptimizerGuard(optimizer, None), bad=False, lr_factor=0.5)
    for old, grad, new in zip(before, grads, model.parameters(), strict=True):
        assert torch.allclose(new, old - 0.05 * grad)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_group_without_a_rate_is_stepped_as_it_is_while_rates_are_lowered():
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stepped = []
    optimizer.step = lambda: stepped.append([group.get("lr") for group in optimizer.param_groups])
    optimizer.param_groups.append({"params": []})
    _gradients(model)
    _apply(OptimizerGuard(optimizer, None), bad=False, lr_factor=0.5)
    assert [[0.05, None]] == stepped
    assert [0.1, None] == [group.get("lr") for group in optimizer.param_groups]


def test_running_statistics_of_a_bad_step_are_put_back_bit_for_bit():
    norm = nn.BatchNorm1d(3)
    shadow = BufferShadow(norm)
    norm(torch.randn(8, 3))
    shadow.put_back(torch.tensor(0.0))
    shadow.keep()
    kept = copy.deepcopy(norm.state_dict())
    norm(torch.full((8, 3), float("nan")))
    assert not torch.isfinite(norm.running_mean).all()
    shadow.put_back(torch.tensor(1.0))
    _assert_equal(kept, norm.state_dict())


NOT_DENSE = {
    "coo": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2)] * 2, layout=torch.jagged),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
@pytest.mark.parametrize("make", NOT_DENSE.values(), ids=NOT_DENSE)
def test_a_sparse_or_nested_buffer_is_left_and_the_others_are_put_back(make):
    module = nn.Module()
    module.register_buffer("adjacency", make())
    module.register_buffer("late", torch.zeros(2))
    module.register_buffer("mean", torch.zeros(2))
    shadow = BufferShadow(module)
    for late in (make(), torch.ones(2)):
        module.late = late
        module.mean += 1
        shadow.put_back(torch.tensor(1.0))
        shadow.keep()
        assert module.mean.tolist() == [0.0] * 2
        assert module.late is late


def test_a_buffer_that_grows_is_left_and_then_kept_as_it_is():
    module = nn.Module()
    module.register_buffer("seen", torch.zeros(2))
    module.register_buffer("mean", torch.zeros(2))
    shadow = BufferShadow(module)
    module.seen = torch.ones(3)
    module.mean += 1
    shadow.put_back(torch.tensor(1.0))
    shadow.keep()
    assert (module.seen.tolist(), module.mean.tolist()) == ([1.0] * 3, [0.0] * 2)
    module.seen = module.seen * 5
    module.mean.data = torch.full((2,), 7.0)
    shadow.put_back(torch.tensor(1.0))
    assert (module.seen.tolist(), module.mean.tolist()) == ([1.0] * 3, [0.0] * 2)


def _counting():
    module = nn.Module()
    module.register_buffer("seen", torch.zeros(4, dtype=torch.int64))
    module.register_buffer("mask", torch.ones(3, 3, dtype=torch.bool))
    module.register_buffer("mean", torch.zeros(2))
    return module


def test_a_scalar_counter_is_put_back_also_if_its_version_shows_no_write():
    module = nn.Module()
    module.register_buffer("num_batches", torch.tensor(3))
    shadow = BufferShadow(module)
    module.num_batches.data.add_(1)
    shadow.put_back(torch.tensor(1.0))
    assert 3 == module.num_batches


def test_integers_that_a_bad_forward_wrote_are_put_back():
    module = _counting()
    shadow = BufferShadow(module)
    for bad in (1.0, 0.0, 1.0, 0.0):
        before = copy.deepcopy(module.state_dict())
        module.seen[1] += 5
        module.mean += 1
        if bad:
            module.mask.logical_not_()
        written = copy.deepcopy(module.state_dict())
        shadow.put_back(torch.tensor(bad))
        shadow.keep()
        _assert_equal(before if bad else written, dict(module.state_dict()))


def test_integers_that_nobody_writes_are_not_copied_again(monkeypatch):
    module = _counting()
    shadow = BufferShadow(module)
    copied = []
    foreach_copy = torch._foreach_copy_
    monkeypatch.setattr(
        torch, "_foreach_copy_", lambda to, of: (copied.append(len(to)), foreach_copy(to, of))
    )
    for write in (False, True, False):
        if write:
            module.seen += 1
        shadow.put_back(torch.tensor(0.0))
        shadow.keep()
    assert copied == [1]


def test_an_integer_buffer_that_is_replaced_is_put_back():
    module = _counting()
    shadow = BufferShadow(module)
    module.seen = module.seen + 1
    shadow.put_back(torch.tensor(1.0))
    assert module.seen.tolist() == [0] * 4


def _of_all_kinds():
    module = nn.Module()
    wide = torch.randn(4, 6)
    kinds = {
        "mean": torch.randn(3),
        "count": torch.tensor(7),
        "bf16": torch.randn(5).bfloat16(),
        "flag": torch.tensor(True),
        "f64": torch.randn(2, 2, dtype=torch.float64),
        "spectrum": torch.randn(3, dtype=torch.complex64),
        "wide_spectrum": torch.randn(3, dtype=torch.complex128),
        "transposed": wide.T,
        "every_other": wide[:, ::2],
        "expanded": torch.randn(3, 1).expand(3, 4),
        "empty": torch.zeros(0),
        "positions": torch.arange(5),
        "table": torch.randn(600, 512),
    }
    for name, buffer in kinds.items():
        module.register_buffer(name, buffer)
    return module


def _spoil(module):
    for buffer in module.buffers():
        inner = buffer[:, :1] if 0 in buffer.stride() else buffer
        inner.fill_(float("nan") if buffer.is_floating_point() or buffer.is_complex() else 0)


@pytest.mark.parametrize("on_device", [False, True])
def test_buffers_of_every_kind_are_put_back_bit_for_bit_where_they_are(monkeypatch, on_device):
    if on_device:
        monkeypatch.setattr(optimizers, "reads_are_free", lambda device: False)
    module = _of_all_kinds()
    shadow = BufferShadow(module)
    places = {name: (id(b), b.data_ptr()) for name, b in module.named_buffers()}
    for step in range(6):
        before = copy.deepcopy(dict(module.named_buffers()))
        if step == 3:
            module.mean = module.mean + 1  # a forward that replaces it
            before["mean"], places["mean"] = before["mean"], None
        _spoil(module)
        spoiled = copy.deepcopy(dict(module.named_buffers()))
        is_bad = step != 4
        shadow.settle(torch.tensor(float(is_bad), dtype=torch.float64))
        for name, expected in (before if is_bad else spoiled).items():
            now = module.get_buffer(name)
            assert now.dtype == expected.dtype
            assert torch.equal(now.nan_to_num(9.0), expected.nan_to_num(9.0)), (step, name)
            if places[name] is not None:
                assert places[name] == (id(now), now.data_ptr())


def test_where_no_read_is_free_hundreds_of_buffers_take_four_operations(monkeypatch):
    monkeypatch.setattr(optimizers, "reads_are_free", lambda device: False)
    module = nn.Sequential(*(nn.BatchNorm1d(3) for _ in range(100)))
    shadow, good = BufferShadow(module), torch.zeros((), dtype=torch.float64)
    shadow.settle(good)
    shadow.settle(good)
    with Counted() as counted:
        shadow.settle(good)
    assert sorted(counted.names) == ["_foreach_copy_", "cat", "ne", "where"]


def test_what_the_loop_itself_writes_between_two_steps_is_undone_by_a_skip():
    """Known: it cannot be told from what forward writes."""
    module = _counting()
    shadow = BufferShadow(module)
    module.mean.fill_(0.5)  # a schedule of the loop's own, before forward
    shadow.put_back(torch.tensor(1.0))
    assert module.mean.tolist() == [0.0, 0.0]
