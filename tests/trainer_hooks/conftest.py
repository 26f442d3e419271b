import gc

import pytest


@pytest.fixture(scope="module", autouse=True)
def out_of_garbage_collection():
    """Keep what the tests before have left out of each walk over all objects (``tests.conftest``).

    ``watch`` looks for optimizers among them, and a training of a few steps begins with it.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def no_read_is_free(monkeypatch):
    """Let everything take the way that it takes on a GPU."""
    for module in ("tensors.gradients", "step.phases", "guard.optimizers"):
        monkeypatch.setattr(f"trainer_hooks.{module}.reads_are_free", lambda device: False)
