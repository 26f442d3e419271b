"""The hot path on a GPU: nothing waits for the present step. Skipped with a reason without one."""

import pytest
import torch
from torch import nn

import trainer_hooks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU in this machine"),
]

BAD_STEP = 40


@pytest.fixture(autouse=True)
def no_agent(monkeypatch, tmp_path):
    monkeypatch.setenv("VITALS_AGENT", "off")
    monkeypatch.setenv("VITALS_SHM", str(tmp_path))
    monkeypatch.setenv("VITALS_DIR", str(tmp_path / "runs"))


@pytest.fixture
def training():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Linear(64, 8)).cuda()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


@pytest.fixture
def nothing_may_wait():
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


def backward(model, factor=1.0):
    loss = model(torch.randn(32, 64, device="cuda")).square().mean() * factor
    loss.backward()
    return loss


def bits(model, optimizer):
    state = [t for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t)]
    return [t.detach().clone() for t in (*model.parameters(), *model.buffers(), *state)]


def test_a_watched_step_waits_for_nothing(training, nothing_may_wait):
    model, optimizer = training
    with trainer_hooks.watch(model, optimizer) as monitor:
        for step in range(BAD_STEP):
            if step == 3:  # the first steps send what stays on the device
                nothing_may_wait()
            monitor.step(backward(model), max_norm=0.1)
        before = bits(model, optimizer)
        monitor.step(backward(model, float("nan")), max_norm=0.1)
        after = bits(model, optimizer)
        torch.cuda.set_sync_debug_mode("default")
        assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
        assert {} == monitor.swallowed_errors


def test_an_attached_step_waits_for_nothing(training, nothing_may_wait):
    model, optimizer = training
    with trainer_hooks.attach(model, optimizer) as attached:
        for step in range(BAD_STEP):
            if step == 3:
                nothing_may_wait()
            attached.loss(backward(model))
            attached.grad_norm(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
            optimizer.step()
            optimizer.zero_grad()
        before = bits(model, optimizer)
        backward(model, float("nan"))
        optimizer.step()
        optimizer.zero_grad()
        after = bits(model, optimizer)
        torch.cuda.set_sync_debug_mode("default")
        assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
        assert {} == attached.swallowed_errors
