"""Training on two ranks that uses workers, shared memory and temporary files; run by torchrun."""

import multiprocessing
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    data = TensorDataset(torch.randn(32, 8), torch.randn(32, 1))
    # A process with threads of gloo and autograd may hang after a fork, also outside of a sandbox.
    with multiprocessing.get_context("fork").Manager() as manager:
        assert [] == list(manager.list())
    assert 4 == len(list(DataLoader(data, 8, num_workers=1, multiprocessing_context="fork")))
    dist.init_process_group("gloo")
    model = nn.Linear(8, 1)
    ranks = nn.parallel.DistributedDataParallel(model)
    for inputs, targets in DataLoader(data, 8, num_workers=1, multiprocessing_context="spawn"):
        (ranks(inputs) - targets).square().mean().backward()
    assert torch.ones(1000).share_memory_().is_shared()
    with tempfile.NamedTemporaryFile() as file:
        torch.save(model.state_dict(), file)
    if sys.argv[1:] == ["compiled"]:
        torch.compile(model)(data[0][0])
    if dist.get_rank() == 0:
        Path("out").mkdir()
        torch.save(model.state_dict(), "model.tmp")
        os.replace("model.tmp", "out/model.pt")  # noqa: PTH105
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
