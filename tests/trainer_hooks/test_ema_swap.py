"""An average put into the model and out again, into another model, and through its state."""

import copy
import io
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import trainer_hooks
from tests.support.examples import examples
from tests.support.watched import (
    NAN,
    own_place,  # noqa: F401
)
from tests.trainer_hooks.averages import assert_same_bits, batch, bits, moved, small
from tests.trainer_hooks.every_optimizer import one_thread  # noqa: F401
from trainer_hooks import EMA
from trainvitals.errors import CheckpointError, UsageError


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("raises", [False, True])
def test_swapping_puts_the_averages_in_and_the_weights_back_bit_for_bit(dtype, raises):
    model = small(dtype)
    ema = EMA(model)
    moved(model, 1)
    with torch.no_grad():
        model[0].weight[0, 0], model[0].weight[0, 1] = NAN, -0.0
    before, average = copy.deepcopy(model.state_dict()), bits(ema)

    def evaluate():
        with ema.swap():
            for name, param in model.named_parameters():
                assert torch.equal(param, average[name].to(dtype))
            if raises:
                raise KeyboardInterrupt

    if raises:
        with pytest.raises(KeyboardInterrupt):
            evaluate()
    else:
        evaluate()
    assert_same_bits(before, model.state_dict())
    assert_same_bits(average, bits(ema))


def test_within_a_swap_nothing_trains_updates_or_swaps():
    model = small()
    ema = EMA(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    with trainer_hooks.watch(model, optimizer, state={"ema": ema}) as monitor:
        before = copy.deepcopy(model.state_dict())
        loss = model(batch(0)).square().mean()
        loss.backward()
        with ema.swap():
            for call in (lambda: monitor.step(loss), lambda: ema.swap().__enter__()):
                with pytest.raises(UsageError, match="holds its averages"):
                    call()
        assert torch.equal(before["0.weight"], model[0].weight)
        monitor.step(loss)
        assert not torch.equal(before["0.weight"], model[0].weight)
    with ema.swap():
        with pytest.raises(UsageError, match="holds its averages"):
            ema.update()
        with pytest.raises(UsageError, match="holds its averages"):
            trainer_hooks.watch(model, optimizer, state={"ema": ema})
    with trainer_hooks.attach(model, optimizer, state={"ema": ema}):
        model(batch(0)).square().mean().backward()
        with ema.swap(), pytest.raises(UsageError, match="holds its averages"):
            optimizer.step()


def test_another_model_takes_averages_and_buffers_or_is_refused_untouched():
    model, other = small(), small()
    ema = EMA(model)
    model(batch(0))
    moved(other, 1)
    ema.copy_to(other)
    assert_same_bits(model.state_dict(), other.state_dict())
    wide, deep = nn.Sequential(nn.Linear(3, 5)), nn.Sequential(*small(), nn.Linear(2, 2))
    for wrong, named in ((wide, "in one of them alone"), (deep, "3.")):
        before = copy.deepcopy(wrong.state_dict())
        with pytest.raises(UsageError, match=named):
            ema.copy_to(wrong)
        assert_same_bits(before, wrong.state_dict())
    reshaped = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    with pytest.raises(UsageError, match=r"2\.weight has shape \(2, 4\)"):
        ema.copy_to(reshaped)


# -------------------------------------------------------------------------------------- its state


@pytest.mark.parametrize("every", [1, 3])
@settings(max_examples=examples(20), deadline=None)
@given(
    before=st.lists(st.floats(-1e6, 1e6, width=32), max_size=8),
    after=st.lists(st.floats(-1e6, 1e6, width=32), max_size=8),
)
def test_restoring_state_changes_nothing(every, before, after):
    kept_model, restored_model = (nn.Linear(1, 1, bias=False) for _ in range(2))
    kept, restored = (EMA(m, 0.9, every=every) for m in (kept_model, restored_model))

    def feed(value, *pairs):
        for ema, model in pairs:
            with torch.no_grad():
                model.weight.fill_(value)
            ema.update()

    for value in before:
        feed(value, (kept, kept_model))
    file = io.BytesIO()
    torch.save(kept.state_dict(), file)
    file.seek(0)
    restored.load_state_dict(torch.load(file, weights_only=True))
    for value in after:
        feed(value, (kept, kept_model), (restored, restored_model))
    assert_same_bits(bits(kept), bits(restored))


@pytest.mark.parametrize("damage", ["missing", "unexpected", "shape", "no tensor"])
def test_a_state_of_another_model_is_refused_and_nothing_changes(damage):
    ema = EMA(small())
    state = {name: tensor + 1 for name, tensor in ema.state_dict().items()}
    if damage == "missing":
        del state["num_steps"]
    elif damage == "unexpected":
        state["9.weight"] = torch.ones(1)
    else:
        state["2.bias"] = torch.ones(3) if damage == "shape" else "text"
    before = bits(ema)
    with pytest.raises(CheckpointError, match="does not belong to this average"):
        ema.load_state_dict(state)
    assert_same_bits(before, bits(ema))


def test_within_another_module_it_is_saved_and_loaded_with_it():
    holder, other = nn.Module(), nn.Module()
    for one in (holder, other):
        one.net = small()
        one.ema = EMA(one.net)
    moved(holder.net, 1)
    holder.ema.update()
    assert len([*holder.parameters()]) == len([*holder.net.parameters()])
    state = holder.state_dict()
    other.load_state_dict(state)
    assert_same_bits(bits(holder.ema), bits(other.ema))
    del state["ema.0.weight"]
    with pytest.raises(RuntimeError, match="does not belong to this average"):
        other.load_state_dict(state)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda a: pickle.loads(pickle.dumps(a))])
def test_a_copy_of_a_watched_one_averages_by_itself(again):
    model = small()
    ema = EMA(model, 0.9)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    with trainer_hooks.watch(model, optimizer, state={"ema": ema}):
        other = again(ema)
        other.update()
    assert (bits(other)["num_steps"].item(), bits(ema)["num_steps"].item()) == (1, 0)
