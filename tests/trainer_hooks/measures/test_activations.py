"""Outputs of modules: their magnitude, their dead features, and which forward counts."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support.inside import device_of
from trainer_hooks import SignalSettings
from trainer_hooks.failopen import FaultCounter
from trainer_hooks.measures.activations import Activation, Activations

RELU = SignalSettings(every=2, activations=("1",))


def expected(output: torch.Tensor) -> tuple[float, float, float]:
    dead = (output == 0).all(dim=0).double().mean()
    return output.square().mean().sqrt().item(), output.abs().max().item(), dead.item()


def test_a_sampled_row_has_what_an_independent_computation_finds(make_loop):
    loop = make_loop(signals=RELU)
    with torch.no_grad():
        loop.model[0].bias[:4] = -100.0  # a quarter of the units never fires
    wanted = {}
    for step in range(5):
        before = loop.data.get_state()
        x = torch.randn(32, 4, generator=loop.data)
        loop.data.set_state(before)
        if step % 2 == 0:
            wanted[step] = expected(loop.model[:2](x).detach())
        loop.monitor.step(loop.backward())
    journal = loop.journal()
    columns = ("activation_rms", "activation_max", "activation_dead_ratio")
    for i, column in enumerate(columns):
        found = journal.layers(column)
        assert found == pytest.approx({(s, "1"): w[i] for s, w in wanted.items()}, rel=1e-5)
    assert min(journal.layers("activation_dead_ratio").values()) >= 0.25


def test_rows_of_modules_without_parameters_have_no_norm(make_loop):
    loop = make_loop(signals=RELU)
    for _ in range(3):
        loop.monitor.step(loop.backward())
    layers = {layer for _, layer in loop.journal().layers("grad_norm")}
    assert layers == {"0", "2"}


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.calls = 0
        self.inner = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5))
        self.head = nn.Linear(8, 1)
        self.inner[0].register_forward_hook(self.count)

    def count(self, *_arguments) -> None:
        self.calls += 1

    def forward(self, x):
        x = x.requires_grad_()
        return self.head(checkpoint(self.inner, x, use_reentrant=self.reentrant))


@pytest.mark.parametrize("reentrant", [True, False])
def test_the_recomputation_of_checkpointing_is_not_measured_again(make_loop, reentrant):
    model = Checkpointed(reentrant=reentrant)
    loop = make_loop(model=model, signals=SignalSettings(every=1, activations=("inner*",)))
    sampler = device_of(loop.monitor).sampler
    loss = loop.backward()
    assert model.calls == 2
    (numbers,) = sampler.own_numbers()
    kept = numbers.clone()
    assert sampler.measured_modules == ("inner", "inner.0", "inner.1")
    assert len(sampler.unpack([], kept.tolist()).activations) == 3
    loop.monitor.step(loss)
    assert loop.journal().layers("activation_rms")[0, "inner"] == kept[0].item()


def test_the_first_of_several_micro_batches_is_measured_and_an_evaluation_is_not(make_loop):
    loop = make_loop(signals=SignalSettings(every=1, activations=("0",)))
    loop.model.eval()
    loop.model(torch.full((2, 4), 1e6))
    loop.model.train()
    first = torch.randn(8, 4)
    for batch in (first, torch.full((8, 4), 1e6)):
        loop.model(batch).mean().backward()
    wanted = loop.model[0](first).detach().square().mean().sqrt().item()
    loop.monitor.step()
    assert loop.journal().layers("activation_rms") == pytest.approx({(0, "0"): wanted}, rel=1e-6)


def test_nan_in_an_output_is_shown(make_loop):
    loop = make_loop(signals=SignalSettings(every=1, activations=("0",)))
    loop.model(torch.full((2, 4), float("nan"))).mean().backward()
    loop.monitor.step()
    (rms,) = loop.journal().layers("activation_rms").values()
    assert rms != rms


def test_closing_takes_the_hooks_off(make_loop):
    loop = make_loop(signals=SignalSettings(activations=("*",)))
    assert all(m._forward_hooks for m in loop.model)
    loop.monitor.close()
    assert not any(m._forward_hooks for m in loop.model)


def figures_of(output) -> dict[str, Activation]:
    """Return what is measured of a module with this output; nothing where it has no tensor."""
    module, faults = nn.Identity(), FaultCounter()
    activations = Activations({"it": module}, torch.device("cpu"), faults)
    activations.reset(sampled=True)
    module(output)
    assert faults.counts == {}
    return activations.unpack(activations.numbers().tolist())


def test_features_of_images_are_their_channels():
    images = torch.ones(2, 3, 4, 4)
    images[:, 1] = 0.0
    images[0, 2] = 0.0
    figures = figures_of(images)["it"]
    assert figures.dead_ratio == pytest.approx(1 / 3)
    assert figures.max_abs == 1.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_half_precision_is_added_up_in_single(dtype):
    output = torch.full((64, 1024), 100.0, dtype=dtype)  # its square sum is no float16
    assert figures_of(output) == {"it": (100.0, 100.0, 0.0)}


def test_the_first_floating_tensor_of_an_output_counts():
    hidden = {"hidden": torch.full((2,), 3.0), "later": torch.full((2,), 4.0)}
    assert figures_of((torch.ones(2, dtype=torch.int64), hidden)) == {"it": (3.0, 3.0, 0.0)}
    assert figures_of([None, "text", torch.empty(0)]) == {}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo's own, after a graph break
def test_hooks_break_the_graph_and_measure_what_the_eager_model_gives(make_loop):
    loop = make_loop(signals=RELU)
    compiled = torch.compile(loop.model, backend="aot_eager")
    x = torch.randn(32, 4)
    wanted = expected(loop.model[:2](x).detach())
    for _ in range(2):
        loss = compiled(x).mean()
        loss.backward()
        loop.monitor.step(loss)
    assert loop.journal().layers("activation_rms") == pytest.approx({(0, "1"): wanted[0]}, rel=1e-6)
