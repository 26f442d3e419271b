"""One process: which loss a step has, of those that the loop gives."""

import gc
import weakref

import pytest
import torch

from tests.support.inside import device_of, facts_of, records_of, tokens_of
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
    assert not device_of(loop.monitor).packer.pack.requires_grad
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


NAN = float("nan")
BEFORE, AFTER = "before its backward", "after it"
DROPPED_BY = {
    "zero_grad": lambda loop: loop.optimizer.zero_grad(),
    "zero_grad in place": lambda loop: loop.optimizer.zero_grad(set_to_none=False),
    "the model's": lambda loop: loop.model.zero_grad(),
    "by hand": lambda loop: [setattr(param, "grad", None) for param in loop.model.parameters()],
}


def give(loop, loss, when):
    """Run one micro-batch's backward, and give its loss."""
    if when == BEFORE:
        loop.monitor.micro(loss)
    loss.backward()
    if when == AFTER:
        loop.monitor.micro(loss)


def batch_loss(loop, value):
    """Return a loss of this value that trains the model."""
    loss = loop.model(torch.randn(8, 4)).square().mean()
    return loss - loss.detach() + value


@pytest.mark.parametrize("when", [BEFORE, AFTER])
@pytest.mark.parametrize("drop", DROPPED_BY)
def test_losses_of_micro_batches_that_the_loop_dropped_are_dropped_too(guarded, drop, when):
    loop, seen = guarded
    for values, kept in (((1.0, 3.0), True), ((5.0, NAN), False), ((2.0, 4.0), True)):
        for value in values:
            give(loop, batch_loss(loop, value), when)
        if not kept:
            DROPPED_BY[drop](loop)
            continue
        loop.monitor.step()
    loop.monitor.close()
    assert [2.0, 3.0] == [pytest.approx(loss) for loss, _ in seen]


def test_a_loss_that_the_loop_gave_up_before_its_backward_is_dropped(guarded):
    loop, seen = guarded
    for value in (1.0, NAN, 3.0):
        loss = batch_loss(loop, value)
        loop.monitor.micro(loss)
        if value == value:
            loss.backward()
    loop.monitor.step()
    loop.monitor.close()
    assert [2.0] == [pytest.approx(loss) for loss, _ in seen]


@pytest.mark.parametrize("how", ["zeroed between", "backwards afterwards", "one backward"])
def test_all_losses_of_a_step_count_in_whatever_order_they_are_given(guarded, how):
    loop, seen = guarded
    for _ in range(3):
        losses = [batch_loss(loop, value) for value in (1.0, 3.0)]
        if how == "zeroed between":
            loop.monitor.micro(losses[0])
            loop.optimizer.zero_grad()
            losses[0].backward()
            give(loop, losses[1], BEFORE)
        else:
            for loss in losses:
                loop.monitor.micro(loss)
            for loss in [sum(losses)] if how == "one backward" else losses:
                loss.backward()
        loop.monitor.step()
    loop.monitor.close()
    assert [2.0, 2.0, 2.0] == [pytest.approx(loss) for loss, _ in seen]


def test_the_optimizer_is_as_it_was_once_the_monitor_is_closed(guarded):
    loop, _ = guarded
    give(loop, batch_loss(loop, 1.0), AFTER)
    loop.monitor.step()
    loop.monitor.close()
    assert "zero_grad" not in vars(loop.optimizer)
