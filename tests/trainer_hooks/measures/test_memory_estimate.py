"""The memory a training's state needs, against sums made by hand."""

import torch
from torch import nn

from trainer_hooks.measures.host import MemoryEstimate

CPU = torch.device("cpu")


def test_parameters_gradients_moments_and_buffers_are_counted_once():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    model.frozen = nn.Linear(3, 3, bias=False).requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    estimate = MemoryEstimate(model, [optimizer], CPU)
    trained = (4 * 8 + 8 + 8 + 8) * 4
    others = 9 * 4 + (8 + 8) * 4 + 8  # frozen, running statistics, their counter
    assert estimate.count_step() == 2 * trained + others
    model[1](model[0](torch.ones(2, 4))).sum().backward()
    optimizer.step()
    moments = 2 * trained + 4 * 4  # and a float32 step counter for each of four parameters
    assert estimate.count_step() == 2 * trained + others + moments


def test_a_sparse_buffer_does_not_count():
    model = nn.Linear(4, 4, bias=False)
    model.register_buffer("adjacency", torch.eye(4).to_sparse())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert MemoryEstimate(model, [optimizer], CPU).count_step() == 2 * 64


def test_a_shared_parameter_counts_once():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert MemoryEstimate(model, [optimizer], CPU).count_step() == 2 * 64


def test_state_that_comes_late_is_found_at_a_power_of_two():
    weight = nn.Parameter(torch.ones(2))
    model = nn.ParameterList([weight])
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    estimate = MemoryEstimate(model, [optimizer], CPU)
    found = [estimate.count_step(), estimate.count_step()]
    weight.grad = torch.ones(2)
    optimizer.step()
    found += [estimate.count_step() for _ in range(3)]
    assert found == [16, 16, 16, 24, 24]


def test_what_lies_elsewhere_is_not_counted():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert MemoryEstimate(model, [optimizer], torch.device("meta")).count_step() == 0
