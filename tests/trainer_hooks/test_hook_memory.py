"""Memory of communication hooks, as far as it can be tested without other ranks."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from trainer_hooks.guard.hook_memory import unregistered_hook_warnings


class ErrorFeedback:
    """State of a hook that adds to each gradient what it could not send of the one before."""

    def __init__(self):
        self.errors = {}

    def __call__(self, state, grad):
        raise NotImplementedError("no test here runs backward")


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`:UserWarning")
def test_a_memory_of_a_hook_of_fsdp1_is_reported_until_it_is_registered(group):
    model, hook = nn.Linear(2, 2), ErrorFeedback()
    model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    assert [] == unregistered_hook_warnings(model, {})
    model.register_comm_hook(hook, hook)
    (text,) = unregistered_hook_warnings(model, {})
    assert "a communication hook keeps tensors in its ErrorFeedback" in text
    assert [] == unregistered_hook_warnings(model, {"hook": hook})
