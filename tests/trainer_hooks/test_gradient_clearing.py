"""Gradients that a captured CUDA graph owns, emulated on the CPU by writes to fixed memory."""

import pytest
import torch
from torch import nn

import trainer_hooks
from tests.support.watched import own_place  # noqa: F401
from trainer_hooks.tensors import clearing


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", list)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def own(monkeypatch, *tensors):
    """Let the tensors lie in the private pool of a graph; return the calls that look there."""
    calls = []

    def snapshot():
        calls.append(len(calls))
        return [
            {"address": t.data_ptr(), "total_size": t.nbytes, "segment_pool_id": (0, 7)}
            for t in tensors
        ]

    monkeypatch.setattr(torch.cuda, "memory_snapshot", snapshot)
    return calls


class Graph:
    """A captured backward: its replays write to the gradients' memory and call no hooks."""

    def __init__(self, model, monkeypatch):
        self._params = list(model.parameters())
        self._model = model
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            self._loss().backward()
        self._params = [param for param in self._params if param.grad is not None]
        self._static = [param.grad for param in self._params]
        own(monkeypatch, *self._static)

    def _loss(self):
        return self._model(torch.ones(4, 3)).square().mean()

    def replay(self):
        loss = self._loss()
        for static, grad in zip(self._static, torch.autograd.grad(loss, self._params), strict=True):
            static.copy_(grad)
        return loss.detach()


@pytest.mark.parametrize("mode", ["guard", "off"])
def test_each_replay_of_a_graph_trains(mode, monkeypatch):
    models = []
    for is_watched in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        graph = Graph(model, monkeypatch)
        if is_watched:
            with trainer_hooks.watch(model, optimizer, mode=mode) as monitor:
                for _ in range(4):
                    monitor.step(graph.replay())
        else:
            for _ in range(4):
                graph.replay()
                optimizer.step()
        models.append(model)
    plain, watched = models
    assert torch.equal(plain.weight, watched.weight)
    assert torch.equal(plain.bias, watched.bias)


def test_gradients_of_a_compiled_backward_are_set_to_none(monkeypatch):
    model = nn.Linear(3, 2)
    gradients = clearing.GradientClearing([torch.optim.SGD(model.parameters(), lr=0.1)])
    for _ in range(2):
        model(torch.ones(4, 3)).sum().backward()
        calls = own(monkeypatch, *(param.grad for param in model.parameters()))
        gradients.clear()
        assert not calls
        assert [param.grad for param in model.parameters()] == [None] * 2


def test_gradients_that_are_set_without_hooks_are_looked_at_once(monkeypatch):
    calls = own(monkeypatch)
    param = nn.Parameter(torch.ones(3))
    gradients = clearing.GradientClearing([torch.optim.SGD([param], lr=0.1)])
    for _ in range(3):
        param.grad = torch.ones(3)  # as FSDP does
        gradients.clear()
        assert param.grad is None
    assert len(calls) == 1


def test_a_released_clearing_is_no_longer_called(monkeypatch):
    param = nn.Parameter(torch.ones(3))
    gradients = clearing.GradientClearing([torch.optim.SGD([param], lr=0.1)])
    gradients.release()
    calls = own(monkeypatch, param)
    param.grad = torch.ones(3)
    gradients.clear()
    assert param.grad is None and not calls


def moves(gradients, model, graph, num=3):
    """Return whether each of some replayed steps moves the first weight."""
    optimizer, moved = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(num):
        graph.replay()
        before = model.weight.detach().clone()
        optimizer.step()
        moved.append(not torch.equal(before, model.weight))
        gradients.clear()
    return moved


def test_a_warm_up_before_the_capture_does_not_hide_the_graph(monkeypatch):
    model = nn.Linear(3, 2)
    gradients = clearing.GradientClearing([torch.optim.SGD(model.parameters(), lr=0.1)])
    model(torch.ones(4, 3)).sum().backward()
    for param in model.parameters():
        param.grad = None
    assert [True] * 3 == moves(gradients, model, Graph(model, monkeypatch))


def test_a_parameter_that_was_frozen_does_not_hide_the_graph(monkeypatch):
    model = nn.Linear(3, 2)
    gradients = clearing.GradientClearing([torch.optim.SGD(model.parameters(), lr=0.1)])
    model.bias.requires_grad_(False)
    assert [True] * 3 == moves(gradients, model, Graph(model, monkeypatch))


def test_another_optimizer_s_backward_does_not_hide_the_graph(monkeypatch):
    captured, eager = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (captured, eager)]
    gradients = clearing.GradientClearing(optimizers)
    graph = Graph(captured, monkeypatch)
    for _ in range(3):
        eager(torch.ones(4, 3)).sum().backward()
        graph.replay()
        gradients.clear()
        assert captured.weight.grad is not None
        assert eager.weight.grad is None


def test_a_loop_that_changes_its_parameters_looks_at_memory_a_few_times_only(monkeypatch):
    params = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    gradients = clearing.GradientClearing([torch.optim.SGD(params, lr=0.1)])
    calls = own(monkeypatch)
    for step in range(60):
        params[step % 2].grad = torch.ones(3)
        gradients.clear()
    assert len(calls) <= 16


class CountingSGD(torch.optim.SGD):
    num_calls = 0

    def zero_grad(self, set_to_none=True):
        self.num_calls += 1
        super().zero_grad(set_to_none)


@pytest.mark.parametrize(("kind", "num_calls"), [(torch.optim.SGD, 0), (CountingSGD, 1)])
def test_all_gradients_are_cleared_by_an_optimizer_s_own_method_if_it_has_one(kind, num_calls):
    model = nn.Linear(3, 2)
    optimizer = kind([model.weight], lr=0.1)
    optimizer.add_param_group({"params": [model.bias]})
    gradients = clearing.GradientClearing([optimizer])
    model(torch.ones(4, 3)).square().mean().backward()
    gradients.clear()
    assert [None, None] == [param.grad for param in model.parameters()]
    assert num_calls == getattr(optimizer, "num_calls", 0)
