"""What each of two real ranks does in ``test_ranks_added_groups``; results go to a file by rank."""

import json
import logging
import os
from pathlib import Path

import torch
import torch.distributed as dist

import trainer_hooks
from tests.support.inside import refs_of
from tests.trainer_hooks.ranks_under_attack import same_on_all
from tests.trainer_hooks.thawing import STEPS, THAW, Thawing, alike
from trainvitals.errors import UsageError


def skips(optimizer, wrapper, bad_rank):
    """Compare with the same program with the bad updates left out."""
    expected = Thawing(optimizer, wrapper=wrapper).run_bare()
    training = Thawing(optimizer, wrapper=wrapper)
    with trainer_hooks.watch(training.model, training.optimizer) as monitor:
        state, _ = training.run(monitor, bad_rank=bad_rank)
    return {"exact": alike(expected, state), "faults": monitor.swallowed_errors}


def attached_skips(optimizer, wrapper, bad_rank):
    """Compare an attached loop with the same program with the bad updates left out."""
    expected = Thawing(optimizer, wrapper=wrapper).run_bare()
    training = Thawing(optimizer, wrapper=wrapper)
    with trainer_hooks.attach(training.model, training.optimizer) as attached:
        state, _ = training.run_attached(attached, bad_rank=bad_rank)
    return {"exact": alike(expected, state), "faults": attached.swallowed_errors}


def heals(folder, optimizer, wrapper):
    """Spoil a weight on rank 1 after the thaw; compare with the undisturbed program."""
    expected = Thawing(optimizer, wrapper=wrapper).run_bare(without=())
    training = Thawing(optimizer, wrapper=wrapper)
    where = trainer_hooks.CheckpointSettings(
        directory=Path(folder) / f"{optimizer}-{wrapper}", healthy_after=2, snapshot_every=2
    )
    done = []

    def spoil(step):
        if step == 11 and training.rank == 1 and not done:
            done.append(step)
            weight = training.inner[3].weight.data
            getattr(weight, "to_local", lambda: weight)().view(-1)[0] = float("nan")

    with trainer_hooks.watch(
        training.model, training.optimizer, mode="heal", checkpoints=where
    ) as monitor:
        state, back = training.run(monitor, bad=(), before=spoil)
        oldest = min(ref.step for ref in refs_of(monitor))
    return {
        "exact": alike(expected, state),
        "back": back,
        "oldest": oldest,
        "faults": monitor.swallowed_errors,
    }


def disagrees(optimizer, change, *, wrapper="", is_attached=False):
    """Return the error of ranks of which each makes its own change of the groups."""
    training = Thawing(optimizer, wrapper=wrapper)
    guard = trainer_hooks.attach if is_attached else trainer_hooks.watch
    run = training.run_attached if is_attached else training.run
    before = []

    def thaw(step):
        if step == THAW:
            change(training)
            before.append(training.bits())

    with guard(training.model, training.optimizer) as monitor:
        try:
            run(monitor, bad=(), thaw=-1, before=thaw)
        except UsageError as error:
            kept = {k: v for k, v in training.bits().items() if "running" not in k}
            same = all(torch.equal(v, before[0][k]) for k, v in kept.items() if k in before[0])
            return {"text": error.text, "at": monitor.step_index, "same": same}
    return {"text": "", "at": monitor.step_index, "same": None}


def only_rank(rank):
    def change(training):
        if training.rank == rank:
            training.thaw()

    return change


def another_layer_on_each(training):
    layer = torch.nn.Linear(2, 2)
    training.inner[4].register_module(f"extra{training.rank}", layer)
    training.optimizer.add_param_group({"params": [*layer.parameters()]})


def apart():
    """Thaw a layer that was frozen before DDP, which therefore does not average its gradient."""
    training = Thawing(wrapper="ddp", frozen_first=True)
    with trainer_hooks.watch(training.model, training.optimizer) as monitor:
        try:
            training.run(monitor, bad=())
        except UsageError as error:
            return error.text
    return ""


def messages():
    """Return the warnings that this rank logs about added groups."""
    heard = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    logging.getLogger("trainvitals").addHandler(handler)
    training = Thawing(wrapper="ddp")
    with trainer_hooks.watch(training.model, training.optimizer) as monitor:
        training.run(monitor, bad=())
    logging.getLogger("trainvitals").removeHandler(handler)
    return {
        "added": [text for text in heard if "parameters changed" in text],
        "same": same_on_all(training.model),
        "steps": monitor.step_index == STEPS,
    }


def two(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    torch.set_num_threads(1)
    os.environ |= {
        "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2", "VITALS_LADDER_MARGIN": "2",
    }  # fmt: skip
    found = {
        "skips": {
            f"{optimizer} {wrapper}": skips(optimizer, wrapper, bad_rank)
            for optimizer, wrapper, bad_rank in (
                ("adamw-fused", "ddp", 0),
                ("sgd-momentum", "ddp", 1),
                ("adamw-fused", "fsdp2", 1),
                ("adamw", "fsdp2", 0),
            )
        },
        "attached": {
            f"{optimizer} {wrapper}": attached_skips(optimizer, wrapper, bad_rank)
            for optimizer, wrapper, bad_rank in (
                ("adamw-fused", "ddp", 1),
                ("adamw", "ddp", 0),
                ("adamw-fused", "fsdp2", 0),
            )
        },
        "heals": {
            f"{optimizer} {wrapper}": heals(folder, optimizer, wrapper)
            for optimizer, wrapper in (
                ("adamw-fused", "ddp"),
                ("adamw", "ddp"),
                ("adamw-fused", "fsdp2"),
            )
        },
        "disagrees": {
            "rank 1, lag 1": disagrees("adamw-fused", only_rank(1), wrapper="ddp"),
            "rank 0, lag 1": disagrees("adamw-fused", only_rank(0), wrapper="ddp"),
            "rank 1, lag 0": disagrees("adamw", only_rank(1), wrapper="ddp"),
            "different": disagrees("adamw-fused", another_layer_on_each, wrapper="ddp"),
            "attached, lag 1": disagrees(
                "adamw-fused", only_rank(1), wrapper="ddp", is_attached=True
            ),
            "attached, lag 0": disagrees("adamw", only_rank(0), wrapper="ddp", is_attached=True),
        },
        "apart": apart(),
        "messages": messages(),
    }
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
