"""Times, utilization and what rank 0's row derives: host arithmetic with known answers."""

import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from trainer_hooks import SignalSettings
from trainer_hooks.data.loader import Batches
from trainer_hooks.exchange.emit import Rank0Columns
from trainer_hooks.exchange.reduce_vector import VerdictFigures
from trainer_hooks.lifecycle.data_position import YieldedBatches
from trainer_hooks.measures import host
from trainer_hooks.measures.host import StepClock, Utilization
from trainer_hooks.measures.sampled import SampledSignals
from trainvitals.flops import transformer_flops_per_token
from trainvitals.records import StepRecord
from trainvitals.testing.clock import ManualClock


def one_step(clock: StepClock, now: ManualClock) -> host.StepTimes:
    clock.waited_for_data(3_000_000)
    now.advance(0.010)  # 3 of them for data
    clock.start_monitor_time()
    now.advance(0.001)
    clock.exchange(torch.device("cpu"), lambda: now.advance(0.004))
    for _ in range(2):
        with clock.optimizer_time():
            now.advance(0.005)
    return clock.finish()


def test_a_steps_parts_make_up_its_whole():
    now = ManualClock()
    clock = StepClock(now)
    first, second = one_step(clock, now), one_step(clock, now)
    assert (first.duration, first.forward_backward) == (None, None)
    assert second.checkpoint is None
    parts = [part for part in second[1:] if part is not None]
    assert parts == pytest.approx((0.003, 0.007, 0.010, 0.001))
    assert second.duration == pytest.approx(sum(parts) + 0.004)


def test_what_snapshots_and_saves_take_is_a_part_of_the_next_step_alone():
    now = ManualClock()
    clock = StepClock(now)
    one_step(clock, now)
    for seconds in (0.020, 0.002):  # a save begun while the step is judged, then a snapshot
        with clock.checkpoint():
            now.advance(seconds)
    after, later = one_step(clock, now), one_step(clock, now)
    assert after[:6] == pytest.approx((0.047, 0.003, 0.007, 0.022, 0.010, 0.001))
    assert after.duration == pytest.approx(sum(after[1:6]) + 0.004)
    assert (later.duration, later.forward_backward) == pytest.approx((0.025, 0.007))
    assert later.checkpoint is None


def test_an_evaluation_that_is_announced_is_measured_within_the_loop_s_part():
    now = ManualClock()
    clock = StepClock(now)
    one_step(clock, now)
    with clock.within("evaluate"):
        now.advance(0.5)
    with clock.within("other"):
        now.advance(0.1)
    after, later = one_step(clock, now), one_step(clock, now)
    assert after.evaluation == pytest.approx(0.5)
    assert after.forward_backward == pytest.approx(0.607)
    assert later.evaluation is None


def test_what_comes_before_its_metrics_is_the_evaluation():
    """As far as it was no wait for data, no save, and not announced: that counts once."""
    now = ManualClock()
    clock = StepClock(now)
    clock.evaluated()  # before any step nothing is known
    assert one_step(clock, now).evaluation is None
    with clock.checkpoint():
        now.advance(0.2)
    with clock.within("evaluate"):
        now.advance(0.3)
    now.advance(0.1)
    clock.evaluated()
    clock.evaluated()
    assert one_step(clock, now).evaluation == pytest.approx(0.4)


def test_where_the_wait_for_data_is_not_known_it_is_in_the_forward():
    now = ManualClock()
    clock = StepClock(now)
    for _ in range(2):
        now.advance(0.010)
        clock.start_monitor_time()
        times = clock.finish()
    assert times.data_wait is None
    assert times.forward_backward == 0.010


# ------------------------------------------------------------------------------ utilization


@pytest.fixture
def gpu(monkeypatch):
    """A device whose peak is known."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100-SXM4-80GB")
    return torch.device("cuda", 0)


def test_utilization_is_of_six_flops_a_parameter_unless_told_or_counted(gpu):
    peak, tokens, seconds = 312e12, 8192, 0.5
    told = transformer_flops_per_token(10**8, num_layers=12, d_model=768, sequence_length=1024)
    assert Utilization(10**8, 2, gpu).ratio(tokens, seconds) == pytest.approx(
        6e8 * tokens / seconds / (2 * peak)
    )
    assert Utilization(10**8, 2, gpu, told).ratio(tokens, seconds) == pytest.approx(
        told * tokens / seconds / (2 * peak)
    )
    counted = Utilization(10**8, 2, gpu)
    counted.use_counted_flops(5e12, 4096)  # on each of two ranks
    assert counted.ratio(tokens, seconds) == pytest.approx(
        1e13 / 4096 * tokens / seconds / (2 * peak)
    )


def test_flops_counted_without_tokens_are_those_of_every_step(gpu):
    utilization = Utilization(10**8, 2, gpu)
    assert utilization.ratio(None, 0.5) is None
    utilization.use_counted_flops(5e12, None)
    assert utilization.ratio(None, 0.5) == pytest.approx(1e13 / 0.5 / (2 * 312e12))


def test_a_peak_that_was_told_counts_on_an_unknown_device_and_before_the_table(gpu):
    for device in (torch.device("cpu"), gpu):
        utilization = Utilization(10**8, 2, device, peak=1e15)
        assert utilization.ratio(8192, 0.5) == pytest.approx(6e8 * 8192 / 0.5 / 2e15)


def test_utilization_is_unknown_on_an_unknown_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA X1")
    for device in (torch.device("cpu"), torch.device("cuda", 0)):
        utilization = Utilization(10**8, 1, device)
        utilization.use_counted_flops(1e12, 100)
        assert utilization.ratio(100, 1.0) is None


# ------------------------------------------------------------------------- rank 0's columns


class Sampling:
    """Stands in for the sampler: its settings are all that the columns ask for."""

    def __init__(self, **settings) -> None:
        self.settings = SignalSettings(**settings)


class Host:
    """The part of a host step that the columns read."""

    times = host.StepTimes(0.5, None, None, None, 0.0, 0.0, None)
    flops = max_norm = auto_max_norm = weight_decay = None
    clip_unknown = False


def columns(*, scale=math.nan, loss=2.0, losses=(2.0,), tokens=None, overflow=False, on=None):
    on = on or Rank0Columns(Utilization(10, 1, torch.device("cpu")), Sampling(), 1)
    record = StepRecord(step=0, attempt=1, loss=loss, overflow=overflow)
    derived = VerdictFigures(0, 0.0, 0.0, scale)
    return on.of(Host(), record, derived, list(losses), SampledSignals(), tokens)


def test_perplexity_is_there_where_tokens_are_known_and_never_overflows():
    assert columns(tokens=10)["perplexity"] == pytest.approx(math.e**2)
    assert "perplexity" not in columns()
    assert "perplexity" not in columns(tokens=10, loss=None)
    assert math.isfinite(columns(tokens=10, loss=1e6)["perplexity"])
    assert math.isnan(columns(tokens=10, loss=math.nan)["perplexity"])


def test_the_spread_is_of_ranks_that_all_have_a_finite_loss():
    assert columns(losses=[1.0, 4.0, 2.5])["loss_spread"] == 3.0
    for losses in ([1.0], [1.0, None], [1.0, math.nan], [1.0, math.inf], []):
        assert columns(losses=losses)["loss_spread"] is None


def test_overflows_are_counted_and_are_a_share_of_the_last_hundred_steps():
    on = Rank0Columns(Utilization(10, 1, torch.device("cpu")), Sampling(), 1)
    for step in range(150):
        row = columns(scale=1024.0, overflow=step % 10 == 0, on=on)
    assert (row["overflow_steps"], row["overflow_ratio"], row["loss_scale"]) == (15, 0.1, 1024.0)
    assert "overflow_steps" not in columns()


# -------------------------------------------------------------------------------- samples


class Stream(IterableDataset):
    def __iter__(self):
        yield from torch.arange(20)


def handed_out(loader, epochs=1):
    out = YieldedBatches()
    batches = Batches(
        loader, epochs=epochs, clock=ManualClock(), waited=lambda _: None, handed_out=out.add
    )
    return [out.pop_batches()[1] for _ in batches]


def test_samples_are_those_of_the_batches_the_short_last_one_too():
    data = TensorDataset(torch.zeros(10))
    assert handed_out(DataLoader(data, batch_size=4), epochs=2) == [4, 4, 2] * 2
    assert handed_out(DataLoader(data, batch_size=4, drop_last=True)) == [4, 4]


def test_samples_of_a_sampler_s_own_batches_are_counted():
    loader = DataLoader(TensorDataset(torch.zeros(4)), batch_sampler=[[0, 1], [2]])
    assert [2, 1] == handed_out(loader)


@pytest.mark.parametrize(
    "loader",
    [
        [1, 2],
        DataLoader(Stream(), batch_size=4),
    ],
    ids=["list", "iterable"],
)
def test_samples_of_what_does_not_say_them_are_unknown(loader):
    assert set(handed_out(loader)) == {None}


# ---------------------------------------------------------------------- FLOPs that are counted


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False),
            nn.GELU(),
            nn.Linear(4 * width, width, bias=False),
        )

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        x = x + self.out((q @ k.transpose(-1, -2)).softmax(dim=-1) @ v)
        return x + self.mlp(x)


def test_counted_flops_are_six_a_parameter_and_the_attention():
    from torch.utils.flop_counter import FlopCounterMode

    layers, width, words, length, batch = 2, 32, 64, 16, 4
    torch.manual_seed(0)
    embed = nn.Embedding(words, width)
    blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
    head = nn.Linear(width, words, bias=False)
    tokens = torch.randint(words, (batch, length))
    with FlopCounterMode(display=False) as counter:
        logits = head(blocks(embed(tokens)))
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
    multiplied = sum(p.numel() for p in (*blocks.parameters(), *head.parameters()))
    per_token = transformer_flops_per_token(
        multiplied, num_layers=layers, d_model=width, sequence_length=length
    )
    assert counter.get_total_flops() == per_token * batch * length
