"""Pytest plugin that makes CUDA torch's default device: `pytest -p vitals_bench.gpu.cuda_default`.

Import torch only in the hook: the plugin is loaded before the tests choose their environment.
"""

from __future__ import annotations


def pytest_configure() -> None:
    """Create all tensors without an explicit device on the GPU."""
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("torch finds no CUDA device; run these tests on a machine with a GPU")
    torch.set_default_device("cuda")
