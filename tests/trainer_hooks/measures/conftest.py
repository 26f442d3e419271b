"""A place of its own for each test's journal, and a training to measure."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trainer_hooks
from tests.trainer_hooks.measures.journal import Journal
from trainer_hooks import Monitor


class Loop:
    """A small watched regression; ``journal`` is what it wrote."""

    def __init__(self, shm: Path, *, fused: bool = True, **watch: Any) -> None:
        torch.manual_seed(0)
        self._shm = shm
        self.model = watch.pop("model", None) or nn.Sequential(
            nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1)
        )
        make = watch.pop("optimizer", lambda p: torch.optim.AdamW(p, lr=0.01, fused=fused))
        self.optimizer = make(self.model.parameters())
        self.data = torch.Generator().manual_seed(1)
        self.monitor: Monitor = trainer_hooks.watch(self.model, self.optimizer, **watch)

    def backward(self, scale: float = 1.0) -> Tensor:
        x = torch.randn(32, 4, generator=self.data)
        loss = (self.model(x) - x.sum(1, keepdim=True)).square().mean() * scale
        loss.backward()
        return loss

    def parameters(self) -> dict[str, Tensor]:
        return {n: p.detach().clone() for n, p in self.model.named_parameters()}

    def journal(self) -> Journal:
        self.monitor.close()
        assert self.monitor.swallowed_errors == {}
        return Journal(self._shm)


@pytest.fixture
def make_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Loop]:
    """Return what makes a watched loop whose journal stays under the test's folder."""
    shm = tmp_path / "shm"
    shm.mkdir()
    monkeypatch.setenv("VITALS_SHM", str(shm))
    monkeypatch.setenv("VITALS_DIR", str(tmp_path / "runs"))
    monkeypatch.setenv("VITALS_AGENT", "off")
    return lambda **arguments: Loop(shm, **arguments)
