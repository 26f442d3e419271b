"""A small model and its averaged weights, for the tests of EMA."""

import torch
from torch import nn


def small(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).to(dtype)


def batch(step, size=5):
    return torch.randn(size, 3, generator=torch.Generator().manual_seed(step))


def bits(ema):
    return {name: tensor.clone() for name, tensor in ema.state_dict().items()}


def assert_same_bits(left, right):
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype
        one, other = (t.contiguous().view(-1).view(torch.uint8) for t in (tensor, right[name]))
        assert torch.equal(one, other), name


def moved(model, step):
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator))
