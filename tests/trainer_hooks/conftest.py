import pytest


@pytest.fixture
def no_read_is_free(monkeypatch):
    """Let everything take the way that it takes on a GPU."""
    for module in ("step.gradients", "step.phases", "guard.optimizers"):
        monkeypatch.setattr(f"trainer_hooks.{module}.reads_are_free", lambda device: False)
