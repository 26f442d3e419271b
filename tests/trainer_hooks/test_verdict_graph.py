"""A verdict that a CUDA graph replays has the bits of the same kernels without a graph."""

import pytest
import torch
from torch import nn

import trainer_hooks
from tests.trainer_hooks.packs import summed
from trainer_hooks.exchange.reduce_vector import Rank0Values, ReduceVector, Verdict
from trainer_hooks.exchange.verdict_graph import VerdictGraphs, judge_and_clip
from trainer_hooks.failopen import FaultCounter
from trainvitals.printable import name_type

NAN, INF = float("nan"), float("inf")
ROOT = Rank0Values(loss_limit=4.0, grad_norm_limit=10.0, max_row=2)
STEPS = (
    {},
    {"loss": 9.0},
    {"loss": 9.0},
    {"loss": 9.0},  # the third in a row is applied
    {},
    {"squares": (200.0, 0.0)},
    {"loss": NAN},
    {"squares": (INF, 1.0)},
    {"failed": True},
    {"overflow": torch.ones(())},
    {"squares": (1e40, 0.0)},
    {"loss": 3.0, "weight": 5.0},
)


def numbers(verdict: Verdict, divisor):
    fields = [field for field in (*verdict, divisor) if isinstance(field, torch.Tensor)]
    return [number.hex() for field in fields for number in field.reshape(-1).tolist()]


def judge_all(device, max_norm, num_rounds):
    """Return each verdict of a vector's steps, directly and by ``VerdictGraphs``."""
    faults = FaultCounter()
    packs = [summed(step, root=ROOT) for step in STEPS * num_rounds]
    packer = ReduceVector(packs[0][0], torch.device(device))
    graphs = VerdictGraphs(packer, faults)
    row = other = torch.zeros((), dtype=torch.float64, device=device)
    direct, judged = [], []
    for _, pack in packs:
        packer.pack.copy_(pack)
        verdict, divisor = judge_and_clip(packer, row, max_norm)
        row = verdict.row.clone()
        direct.append(numbers(verdict, divisor))
        verdict, divisor = graphs.judge(other, 1, max_norm)
        other = verdict.row
        judged.append(numbers(verdict, divisor))
    assert {} == faults.counts
    return direct, judged, graphs.num_captured


def test_without_a_gpu_the_kernels_run_directly():
    direct, judged, num_captured = judge_all("cpu", 0.5, 1)
    assert direct == judged and 0 == num_captured
    assert len({tuple(each) for each in judged}) >= 8  # the steps differ


@pytest.mark.gpu
@pytest.mark.parametrize("max_norm", [None, 0.5, "auto"], ids=name_type)
def test_a_replayed_verdict_has_the_bits_of_a_direct_one(max_norm):
    direct, judged, num_captured = judge_all("cuda", max_norm, 3)
    assert direct == judged and 1 == num_captured


@pytest.mark.gpu
def test_a_limit_that_changes_clips_as_torch_does(tmp_path, monkeypatch):
    for name, value in {"VITALS_AGENT": "off", "VITALS_DIR": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    model = nn.Linear(4, 4).cuda()
    other = nn.Linear(4, 4).cuda()
    other.load_state_dict(model.state_dict())
    optimizers = [torch.optim.AdamW(m.parameters(), fused=True) for m in (model, other)]
    batches = torch.randn(30, 8, 4, device="cuda")
    with trainer_hooks.watch(model, optimizers[0]) as monitor:
        for step, batch in enumerate(batches):
            limit = 0.01 * (1 + step % 3)
            loss = model(batch).square().mean()
            loss.backward()
            monitor.step(loss, max_norm=limit)
            other(batch).square().mean().backward()
            nn.utils.clip_grad_norm_(other.parameters(), limit)
            optimizers[1].step()
            optimizers[1].zero_grad()
        assert {} == monitor.swallowed_errors
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
