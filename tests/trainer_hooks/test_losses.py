"""One process: which loss a step has, of those that the loop gives."""

import gc
import weakref

import pytest
import torch

from tests.support.inside import facts_of, records_of, tokens_of
from tests.support.watched import Loop, own_place  # noqa: F401


@pytest.fixture
def guarded():
    """Return a guarded loop, and the losses of its steps as they are written."""
    loop = Loop(mode="guard")
    seen = records_of(loop.monitor, keep=lambda record: (record.loss, tokens_of(loop.monitor)))
    with loop.monitor:
        yield loop, seen


def test_a_loss_given_to_step_after_micro_is_one_more_micro_batch(guarded):
    loop, seen = guarded
    loop.forward()
    loop.monitor.micro(torch.tensor(1.0), 3)
    loop.monitor.step(torch.tensor(5.0), weight=1)
    loop.monitor.close()
    assert seen == [(2.0, 4)]


@pytest.mark.parametrize("last", [torch.tensor(5.0), 5.0])
def test_the_very_loss_that_micro_was_given_last_counts_once(guarded, last):
    loop, seen = guarded
    for _ in range(2):
        loop.forward()
        loop.monitor.micro(1.0, 3)
        loop.monitor.micro(last, 1)
        loop.monitor.step(last)
    loop.monitor.close()
    assert seen == [(2.0, 4), (2.0, 8)]


def test_a_loss_alone_counts_in_each_step_although_it_is_the_same_one(guarded):
    loop, seen = guarded
    loss = torch.tensor(5.0)
    for _ in range(2):
        loop.forward()
        loop.monitor.step(loss, weight=2)
    loop.monitor.close()
    assert seen == [(5.0, 2), (5.0, 4)]


def test_no_loss_is_kept_alive_for_it(guarded):
    loop, _ = guarded
    loss = loop.forward()
    loop.monitor.micro(loss)
    died = weakref.ref(loss)
    del loss
    gc.collect()
    assert died() is None


UNREADABLE = {
    "of each sample": torch.ones(32, 1),
    "no number": "loss",
    "all of them": {"loss": torch.ones(())},
}


@pytest.mark.parametrize("loss", UNREADABLE.values(), ids=UNREADABLE)
@pytest.mark.parametrize("how", ["step", "micro", "weight"])
@pytest.mark.parametrize("fused", [True, False])
def test_a_loss_that_is_no_number_does_not_take_the_guard_away(loss, how, fused):
    loop = Loop(fused=fused, mode="guard")
    with loop.monitor as monitor:
        for step in range(4):
            loop.forward(float("nan") if step == 3 else 1.0)
            if how == "micro":
                monitor.micro(loss)
                monitor.step()
            elif how == "step":
                monitor.step(loss)
            else:
                monitor.step(1.0, weight=loss)
    assert all(torch.isfinite(p).all() for p in loop.model.parameters())
    assert monitor.swallowed_errors == {"micro" if how == "micro" else "loss": 4}


def test_micro_losses_before_one_that_is_no_number_are_not_of_the_next_step(guarded):
    loop, seen = guarded
    loop.forward()
    loop.monitor.micro(9.0)
    loop.monitor.step(torch.ones(2))
    loop.forward()
    loop.monitor.step(3.0)
    loop.monitor.close()
    assert [loss for loss, _ in seen] == [None, 3.0]


@pytest.mark.parametrize("how", ["step", "micro"])
def test_a_weight_with_a_graph_behind_it_leaves_none_in_ours(guarded, how):
    loop, seen = guarded
    for _ in range(3):
        loop.forward()
        weight = torch.ones((), requires_grad=True) * 2
        if how == "micro":
            loop.monitor.micro(3.0, weight)
            loop.monitor.step()
        else:
            loop.monitor.step(3.0, weight=weight)
    loop.monitor.close()
    assert seen == [(3.0, 2), (3.0, 4), (3.0, 6)]
    assert not loop.monitor._device.packer.pack.requires_grad
    assert loop.monitor.swallowed_errors == {}


@pytest.mark.parametrize("weight", [0, torch.tensor(0)])
@pytest.mark.parametrize("how", ["step", "micro"])
def test_a_step_whose_tokens_are_all_masked_is_no_bad_step(guarded, weight, how):
    loop, seen = guarded
    loop.forward()
    if how == "micro":
        loop.monitor.micro(torch.tensor(3.0), weight)
        loop.monitor.step()
    else:
        loop.monitor.step(torch.tensor(3.0), weight=weight)
    loop.monitor.close()
    assert seen == [(None, 0)]
    assert facts_of(loop.monitor).num_skips == 0
