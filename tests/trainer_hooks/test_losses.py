"""One process: which loss a step has, of those that the loop gives."""

import gc
import weakref

import pytest
import torch

from tests.trainer_hooks.test_monitor import Loop, own_place  # noqa: F401


@pytest.fixture
def guarded():
    """Return a guarded loop, and the losses of its steps as they are written."""
    loop, seen = Loop(mode="guard"), []
    emitter = loop.monitor._host.emitter
    write = emitter.step
    emitter.step = lambda host, record, extra: (
        seen.append((record.loss, loop.monitor._host.tokens_seen)),
        write(host, record, extra),
    )
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
