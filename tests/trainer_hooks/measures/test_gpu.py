"""On a GPU: nothing waits, and what only a GPU knows is there."""

import pytest
import torch
from torch import nn

from tests.support.inside import run_of
from trainer_hooks import SignalSettings

pytestmark = pytest.mark.gpu

ALL = SignalSettings(every=2, update_norm=True, activations=("*",))


def test_measuring_everything_never_synchronises(make_loop):
    model = nn.Sequential(nn.Linear(4, 256), nn.ReLU(), nn.Linear(256, 1)).cuda()
    loop = make_loop(model=model, signals=ALL)
    for step in range(8):
        loss = model(torch.randn(64, 4, device="cuda")).square().mean()
        loss.backward()
        if step >= 2:
            torch.cuda.set_sync_debug_mode("error")
        try:
            loop.monitor.step(loss, max_norm=1.0)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    journal = loop.journal()
    assert set(journal.steps("update_norm")) == {2, 4, 6}
    assert {name for _, name in journal.layers("activation_rms")} == {"0", "1", "2"}
    estimates, peaks = journal.steps("memory_estimate_bytes"), journal.steps("memory_peak_bytes")
    assert 0 < estimates[7] <= peaks[7]
    assert set(journal.steps("memory_ooms").values()) == {0}
    assert len(journal.steps("memory_alloc_retries")) == 8


def test_the_exchange_is_timed_on_the_devices_clock(make_loop):
    loop = make_loop(model=nn.Linear(4, 1).cuda())
    clock = run_of(loop.monitor).times
    big = torch.randn(4096, 4096, device="cuda")
    begin, end = clock.exchange(big.device, lambda: torch.mm(big, big, out=big.clone()))
    torch.cuda.synchronize()
    assert begin.elapsed_time(end) > 0
    loop.monitor.close()
