"""A skipped step leaves no trace in an average of the weights, and nobody waits to know it."""

import copy
import pickle

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import trainer_hooks
from tests.support.watched import INF, NAN, Loop, Reads, own_place  # noqa: F401
from tests.trainer_hooks.every_optimizer import MAKERS, backward, train_twin
from trainer_hooks.guard import averages

KINDS = {
    "swa": {},
    "ema": {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
    "ema with buffers": {"multi_avg_fn": get_ema_multi_avg_fn(0.9), "use_buffers": True},
    "one by one": {"avg_fn": lambda average, new, count: average + (new - average) / (count + 1)},
}


def averaged(model, kind):
    return AveragedModel(model, **KINDS[kind])


def bits(average):
    return {name: tensor.clone() for name, tensor in average.state_dict().items()}


def assert_equal(left, right):
    assert left.keys() == right.keys()
    assert [] == [name for name in left if not torch.equal(left[name], right[name])]


def twin_of(make, kind, faults, steps):
    """Average without us over the good steps alone."""
    model, optimizers = make()
    average = averaged(model, kind)
    for step in range(steps):
        if step not in faults:
            backward(model, step)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            average.update_parameters(model)
    return bits(average)


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("name", ["AdamW fused", "RMSprop foreach"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_skip_leaves_no_trace_in_an_average(monkeypatch, kind, name, far):
    """``far`` acts as if the counter lay on the host and the verdict on a GPU."""
    if far:
        monkeypatch.setattr(averages, "is_far_counter", lambda tensor, _: tensor.dim() == 0)
    model, optimizers = MAKERS[name]()
    average = averaged(model, kind)
    faults = {0: (NAN, "loss"), 1: (INF, "all"), 5: (NAN, "element"), 8: (INF, "loss")}
    with trainer_hooks.watch(model, optimizers, state={"ema": average}) as monitor:
        for step in range(9):
            before = bits(average)
            monitor.step(backward(model, step, faults.get(step)))
            average.update_parameters(model)
            if step in faults and not far:
                assert_equal(before, bits(average))
    assert_equal(twin_of(MAKERS[name], kind, faults, 9), bits(average))
    assert "update_parameters" not in vars(average)


def test_an_update_of_every_other_step_follows_the_last_verdict():
    model, optimizers = MAKERS["AdamW fused"]()
    average = averaged(model, "ema")
    with trainer_hooks.watch(model, optimizers, state={"ema": average}) as monitor:
        average.update_parameters(model)  # before any verdict: torch's own
        for step in range(1, 7):
            monitor.step(backward(model, step, (NAN, "all") if step == 4 else None))
            if step % 2 == 0:
                average.update_parameters(model)
    assert average.n_averaged.item() == 1 + 2


def test_an_average_that_the_optimizer_s_own_hook_updates_is_guarded_too():
    model, optimizers = MAKERS["AdamW fused"]()
    average = averaged(model, "ema")
    optimizers[0].register_step_post_hook(lambda *_: average.update_parameters(model))
    faults = {2: (NAN, "all"), 4: (INF, "loss")}
    with trainer_hooks.watch(model, optimizers, state={"ema": average}) as monitor:
        for step in range(6):
            monitor.step(backward(model, step, faults.get(step)))
    assert_equal(twin_of(MAKERS["AdamW fused"], "ema", faults, 6), bits(average))


def test_an_average_under_guard_reads_no_more_than_torch_does():
    seen = []
    for state in ({}, {"ema": None}):
        model, optimizers = MAKERS["AdamW fused"]()
        average = averaged(model, "ema")
        state = dict.fromkeys(state, average)
        with trainer_hooks.watch(model, optimizers, state=state) as monitor:
            monitor.step(backward(model, 0))
            with Reads() as reads:
                average.update_parameters(model)
            seen.append(reads.seen)
    assert seen[0] == seen[1]


@pytest.mark.parametrize("again", [copy.deepcopy, lambda a: pickle.loads(pickle.dumps(a))])
def test_a_copy_of_a_guarded_average_averages_by_itself(again):
    model, optimizers = MAKERS["AdamW fused"]()
    average = averaged(model, "ema")
    if again is not copy.deepcopy:
        average.multi_avg_fn = None  # torch's own is a closure, which does not pickle
    with trainer_hooks.watch(model, optimizers, state={"ema": average}) as monitor:
        monitor.step(backward(model, 0, (NAN, "all")))
        other = again(average)
        other.update_parameters(model)
    assert (other.n_averaged.item(), average.n_averaged.item()) == (1, 0)


def test_an_observed_run_averages_as_it_did():
    model, optimizers = MAKERS["AdamW fused"]()
    average = averaged(model, "ema")
    with trainer_hooks.watch(model, optimizers, mode="observe", state={"ema": average}) as monitor:
        for step in range(3):
            monitor.step(backward(model, step))
            average.update_parameters(model)
    assert average.n_averaged.item() == 3


@pytest.mark.parametrize("far", [False, True])
def test_a_rollback_brings_the_average_back_too(monkeypatch, far):
    if far:
        monkeypatch.setattr(averages, "is_far_counter", lambda tensor, _: tensor.dim() == 0)
    loop = Loop()
    average = averaged(loop.model, "ema")
    kept = {}
    with trainer_hooks.watch(
        loop.model, loop.optimizer, loop.scheduler, mode="heal", checkpoints=True,
        state={"ema": average},
    ) as monitor:  # fmt: skip
        for step in range(45):
            kept[monitor.step_index] = bits(average)
            if step == 40:
                with torch.no_grad():
                    loop.model[0].weight.fill_(NAN)
            outcome = monitor.step(loop.forward())
            back = outcome.rolled_back_to
            if back is not None:
                average.update_parameters(loop.model)  # as the loop does after every step
                monitor.step(loop.forward())
                assert_equal(kept[back], bits(average))
                break
            average.update_parameters(loop.model)
    assert back is not None


def test_training_itself_is_as_without_an_average():
    model, optimizers = MAKERS["AdamW fused"]()
    average = averaged(model, "ema")
    losses = []
    with trainer_hooks.watch(model, optimizers, state={"ema": average}) as monitor:
        for step in range(4):
            loss = backward(model, step)
            monitor.step(loss)
            average.update_parameters(model)
            losses.append(loss.item())
    assert train_twin(MAKERS["AdamW fused"], {}, 4)[0] == losses
