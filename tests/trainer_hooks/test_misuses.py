"""Thirty ways to misuse Vitals, each with what a person is told; their healthy neighbours are not.

A row is a small loop. What it does wrong is refused by an error, or said once in the log.
"""

import gc
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

import trainer_hooks
from tests.support.watched import own_place  # noqa: F401
from trainvitals.errors import UsageError

STEPS = 12
PAGE = Path(__file__).parents[2] / "docs" / "guides" / "misuses.md"


def plain(text):
    """Return the text in one line and lower case, without the backticks of Markdown."""
    return " ".join(text.lower().replace("`", "").split())


@pytest.fixture(autouse=True)
def no_scalers_of_other_tests():
    """An object that nobody holds is there until it is collected."""
    gc.collect()


@dataclass
class Parts:
    """What a training script has before it calls watch."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any
    loader: DataLoader
    scaler: torch.amp.GradScaler

    def loss(self, batch):
        return (self.model(batch) - 1).square().mean()

    def backward(self, batch=None):
        loss = self.loss(torch.ones(2, 4) if batch is None else batch)
        loss.backward()
        return loss

    def watch(self, *arguments, **keywords):
        return trainer_hooks.watch(self.model, self.optimizer, *arguments, **keywords)


def parts(make=torch.optim.AdamW):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = make(model.parameters(), lr=0.01)
    return Parts(
        model=model,
        optimizer=optimizer,
        scheduler=lr_scheduler.StepLR(optimizer, 100),
        loader=DataLoader(torch.randn(2 * STEPS, 4), batch_size=2),
        scaler=torch.amp.GradScaler("cpu"),
    )


def train(p, *arguments, each=lambda monitor, loss: monitor.step(loss), epochs=1, **keywords):
    with p.watch(*arguments, **keywords) as monitor:
        for batch in monitor.batches(p.loader, epochs=epochs):
            each(monitor, p.backward(batch))
    return monitor


# ------------------------------------------------------------------------------- the misuses


def model_and_optimizer_swapped(p):
    trainer_hooks.watch(p.optimizer, p.model)


def attach_with_model_and_optimizer_swapped(p):
    trainer_hooks.attach(p.optimizer, p.model)


def a_scheduler_in_the_optimizers_place(p):
    trainer_hooks.watch(p.model, p.scheduler)


def parameters_in_the_optimizers_place(p):
    trainer_hooks.watch(p.model, p.model.parameters())


def a_scaler_in_the_schedulers_place(p):
    trainer_hooks.watch(p.model, p.optimizer, p.scaler)


def a_second_optimizer_in_the_schedulers_place(p):
    trainer_hooks.watch(p.model, p.optimizer, torch.optim.SGD(p.model.parameters(), lr=0.1))


def a_loader_in_the_schedulers_place(p):
    trainer_hooks.watch(p.model, p.optimizer, p.loader)


def a_class_in_the_models_place(p):
    trainer_hooks.watch(nn.Linear, p.optimizer)


def several_models_for_attach(p):
    other = parts()
    trainer_hooks.attach([p.model, other.model], [p.optimizer, other.optimizer])


def a_model_and_an_optimizer_in_one_list(p):
    trainer_hooks.watch([p.model, p.optimizer], p.optimizer)


def a_step_of_an_optimizer_that_is_not_watched(p):
    other = parts()
    with p.watch() as monitor:
        p.backward()
        monitor.step(optimizer=other.optimizer)


def all_backwards_before_the_steps_of_each_optimizer(p):
    other = parts()
    both = [p.optimizer, other.optimizer]
    with trainer_hooks.watch([p.model, other.model], both) as monitor:
        p.backward()
        other.backward()
        for optimizer in both:
            monitor.step(optimizer=optimizer)


def no_optimizer(p):
    trainer_hooks.watch(p.model, [])


def no_optimizer_at_all(p):
    trainer_hooks.watch(p.model)


def an_optimizer_that_is_not_made(p):
    trainer_hooks.watch(p.model, torch.optim.AdamW)


def named_parameters_in_the_optimizers_place(p):
    trainer_hooks.attach(p.model, [*p.model.named_parameters()])


def a_scheduler_that_is_not_made(p):
    p.watch(lr_scheduler.StepLR)


def a_run_that_is_no_name(p):
    p.watch(run=7)


def a_number_as_the_folder(p):
    p.watch(dir=1)


def a_number_as_the_checkpoints(p):
    p.watch(mode="heal", checkpoints=100)


def heal_with_two_optimizers_that_the_loop_steps(p):
    second = torch.optim.SGD(p.model.parameters(), lr=0.1)
    trainer_hooks.attach(p.model, [p.optimizer, second], mode="heal")


def epochs_that_are_no_whole_number(p):
    train(p, epochs=1.5)


def a_number_as_the_probe(p):
    with p.watch() as monitor:
        next(monitor.batches(p.loader, probe=1))


def a_number_as_the_scaler(p):
    p.watch(scaler=65536.0)


def an_unknown_mode(p):
    p.watch(mode="gaurd")


def heal_without_checkpoints(p):
    p.watch(mode="heal")


def an_unknown_scheduler_every(p):
    p.watch(p.scheduler, scheduler_every="batch")


def an_unknown_on_hang(p):
    p.watch(on_hang="kill")


def an_unknown_task(p):
    p.watch(task="gpro")


def an_unknown_on_collapse(p):
    p.watch(task="grpo", on_collapse="halt")


def a_halt_of_a_task_that_cannot_collapse(p):
    p.watch(task="dpo", on_collapse="stop", checkpoints=True)


def a_halt_without_checkpoints(p):
    p.watch(task="grpo", on_collapse="stop")


def a_scheduler_that_needs_a_metric(p):
    p.watch(lr_scheduler.ReduceLROnPlateau(p.optimizer))


def a_scheduler_and_the_one_it_is_a_part_of(p):
    whole = lr_scheduler.SequentialLR(p.optimizer, [p.scheduler, p.scheduler], [5])
    p.watch([p.scheduler, whole])


def a_parameter_in_two_optimizers(p):
    trainer_hooks.watch(p.model, [p.optimizer, torch.optim.SGD(p.model.parameters(), lr=0.1)])


def an_optimizer_that_needs_a_closure(p):
    trainer_hooks.watch(p.model, torch.optim.LBFGS(p.model.parameters()))


def watched_twice(p):
    with p.watch():
        p.watch()


def early_stopping_by_its_name(p):
    p.watch(early_stopping="loss")


def a_scheduler_stepped_by_the_loop_too(p):
    def each(monitor, loss):
        monitor.step(loss)
        p.scheduler.step()

    train(p, p.scheduler, each=each)


def an_optimizer_stepped_by_the_loop_too(p):
    def each(monitor, loss):
        p.optimizer.step()
        monitor.step(loss)

    train(p, each=each)


def a_scaler_stepped_by_the_loop_too(p):
    with p.watch() as monitor:
        loss = p.loss(torch.ones(2, 4))
        p.scaler.scale(loss).backward()
        p.scaler.step(p.optimizer)
        monitor.step(loss)


def gradients_zeroed_before_the_step(p):
    def each(monitor, loss):
        p.optimizer.zero_grad()
        monitor.step(loss)

    train(p, each=each)


def a_closure_as_the_loss(p):
    with p.watch() as monitor:
        monitor.step(p.backward)


def a_norm_of_zero(p):
    train(p, each=lambda monitor, loss: monitor.step(loss, max_norm=0))


def a_step_after_the_end(p):
    train(p).step(p.backward())


def an_iterator_for_several_epochs(p):
    p.loader = iter(p.loader)
    train(p, epochs=3)


def a_number_as_the_loader(p):
    p.loader = 100
    train(p)


def an_epoch_ended_by_hand_with_a_schedule_of_updates(p):
    train(p, p.scheduler).end_epoch()


def an_alert_with_an_invalid_level(p):
    with p.watch() as monitor:
        monitor.alert("reward hacked", when=True, level="critical")


def an_alert_without_a_name(p):
    with p.watch() as monitor:
        monitor.alert("", when=True)


def a_condition_of_many_numbers(p):
    with p.watch() as monitor:
        monitor.alert("reward hacked", when=torch.zeros(3) > 1)


ORDER = r"the argument order is watch\(model, optimizer, scheduler, scaler=scaler\)"
REFUSED = {
    model_and_optimizer_swapped: (
        "the model is an AdamW, and the optimizer is a Sequential: they are swapped",
        ORDER,
    ),
    attach_with_model_and_optimizer_swapped: ("they are swapped", r"attach\(model, optimizer"),
    a_scheduler_in_the_optimizers_place: ("optimizers holds a StepLR; each must be", ORDER),
    parameters_in_the_optimizers_place: ("optimizers holds a Parameter; each must be", ORDER),
    a_scaler_in_the_schedulers_place: ("schedulers holds a GradScaler, which is no", ORDER),
    a_second_optimizer_in_the_schedulers_place: (
        "schedulers holds an SGD, which is not a learning-rate scheduler",
        r"watch\(model, \[opt_a, opt_b\]\)",
    ),
    a_loader_in_the_schedulers_place: (
        r"schedulers holds a DataLoader, which has no step\(\)",
        r"watch\(model, optimizer, scheduler\)",
    ),
    a_class_in_the_models_place: ("the model is a type; it must be an nn.Module", ORDER),
    several_models_for_attach: (
        "the model is a list of 2; it must be one module",
        r"watch\(\[a, b\], \[opt_a, opt_b\]\) takes several",
    ),
    a_model_and_an_optimizer_in_one_list: (
        r"models\['adamw'\] is an AdamW; each must be an nn.Module",
        "argument order",
    ),
    a_step_of_an_optimizer_that_is_not_watched: (
        r"was given AdamW, which is not one of the 1 optimizers given to watch",
        r"pass all optimizers of the loop",
    ),
    all_backwards_before_the_steps_of_each_optimizer: (
        "no parameter of the optimizer 'model1' has a gradient at its first step",
        "right after that loss's backward",
    ),
    no_optimizer: ("no optimizer was given; at least one is needed", ORDER),
    no_optimizer_at_all: ("no optimizer was given", r"torch.optim.SGD\(model.parameters"),
    an_optimizer_that_is_not_made: ("holds the class AdamW; each", r"AdamW\(model.parameters"),
    named_parameters_in_the_optimizers_place: ("optimizers holds a tuple; each must be", ORDER),
    a_scheduler_that_is_not_made: ("schedulers holds the class StepLR", "a list of schedulers"),
    a_run_that_is_no_name: ("run is an int; it must be a name", "run='my-experiment'"),
    a_number_as_the_folder: ("dir is an int; it must be a directory", "VITALS_DIR"),
    a_number_as_the_checkpoints: ("an int; it must be True, a directory or", "=True"),
    heal_with_two_optimizers_that_the_loop_steps: (
        r"attach\(\) with 2 optimizers cannot roll back",
        r"trainvitals.watch\(",
    ),
    epochs_that_are_no_whole_number: ("epochs is 1.5; it must be a whole number", "epochs=3"),
    a_number_as_the_probe: ("probe is an int; it must be a function", "probe=loss_of"),
    a_number_as_the_scaler: ("scaler is a float; it must be a torch.amp.GradScaler", ORDER),
    an_unknown_mode: (
        "mode is 'gaurd'; it must be one of off, observe, guard, heal",
        "observe only records",
    ),
    heal_without_checkpoints: ("mode 'heal' rolls back, so it needs", "checkpoints=True"),
    an_unknown_on_hang: (
        "on_hang is 'kill'; it must be 'alert' or 'restart'",
        "'restart' ends a job that hangs, so that torchrun --max-restarts starts it again",
    ),
    an_unknown_task: ("task is 'gpro'; it must be one of sft, dpo", "leave it out for any other"),
    an_unknown_on_collapse: ("on_collapse is 'halt'; it must be 'report' or", "with a checkpoint"),
    a_halt_of_a_task_that_cannot_collapse: ("task is 'dpo'", "task='grpo'; others are rloo, ppo"),
    a_halt_without_checkpoints: ("saves a checkpoint before it halts", "checkpoints=True"),
    an_unknown_scheduler_every: (
        "scheduler_every is 'batch'; it must be 'step' or 'epoch'",
        "'epoch' for those that count epochs",
    ),
    a_scheduler_that_needs_a_metric: ("ReduceLROnPlateau needs a metric", "step it yourself"),
    a_scheduler_and_the_one_it_is_a_part_of: (
        "schedulers holds a StepLR twice, itself or as a part of another",
        "pass only the outermost scheduler",
    ),
    a_parameter_in_two_optimizers: ("parameter '0.weight' is in two optimizers", "to one"),
    an_optimizer_that_needs_a_closure: (r"LBFGS.step\(\) needs closure", "takes no closure"),
    watched_twice: ("the optimizer is already guarded", r"close\(\) the earlier monitor first"),
    early_stopping_by_its_name: ("early_stopping is a str", "EarlyStopping"),
    a_scheduler_stepped_by_the_loop_too: (
        r"StepLR.step\(\) was called by the loop before step 1, as well as by monitor.step\(\)",
        r"remove scheduler.step\(\) from the loop",
    ),
    an_optimizer_stepped_by_the_loop_too: (
        r"AdamW.step\(\) was called outside monitor.step\(\), so that update was not guarded",
        r"monitor.step\(\) replaces optimizer.step\(\), and",
    ),
    a_scaler_stepped_by_the_loop_too: (
        r"AdamW.step\(\) was called outside monitor.step\(\), so that update was not guarded",
        r"with watch\(..., scaler=scaler\) also scaler.step\(\)",
    ),
    gradients_zeroed_before_the_step: (
        "no parameter of the optimizers has a gradient at the first step",
        r"before zero_grad\(\)",
    ),
    a_closure_as_the_loss: ("it takes no closure", r"loss.backward\(\); monitor.step\(loss\)"),
    a_norm_of_zero: (
        'max_norm is 0; it must be a number above 0, or "auto"',
        "leave it out",
    ),
    a_step_after_the_end: ("this monitor is closed", "keep the loop inside"),
    an_iterator_for_several_epochs: ("an iterator .* for 3 epochs", "pass the loader itself"),
    a_number_as_the_loader: ("given 100, which is not an iterable of batches", "monitor.batches"),
    an_epoch_ended_by_hand_with_a_schedule_of_updates: (
        r"monitor.end_epoch\(\) was called, but the schedulers are stepped at every update",
        "scheduler_every='epoch'",
    ),
    an_alert_with_an_invalid_level: ("level is 'critical'; it must be page, notify", "act now"),
    an_alert_without_a_name: ("the name is ''; it must be text of 1 to 80", "a few words"),
    a_condition_of_many_numbers: ("it must be one number", r"mean\(\)"),
}


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("misuse", REFUSED, ids=lambda misuse: misuse.__name__)
def test_a_misuse_is_refused_with_the_way_out(misuse):
    text, hint = REFUSED[misuse]
    with pytest.raises(UsageError, match=text) as caught:
        misuse(parts())
    assert re.search(hint, caught.value.hint)
    page = plain(PAGE.read_text())
    assert plain(caught.value.text) in page
    assert [] == [part for part in plain(caught.value.hint).split("; ") if part not in page]


# ------------------------------------------------------------------- what is likely, and is said


def a_scaler_that_was_not_given(p):
    def each(monitor, _loss):
        p.optimizer.zero_grad()
        loss = p.loss(torch.ones(2, 4))
        p.scaler.scale(loss).backward()
        monitor.step(loss)

    train(p, each=each)


def micro_batches_of_which_one_is_given(p):
    with p.watch() as monitor:
        for _ in range(4):
            for _ in range(3):
                (p.loss(torch.randn(2, 4)) / 3).backward()
            loss = p.backward()
            monitor.step(loss)


def a_schedule_of_epochs_stepped_each_update(p):
    train(p, lr_scheduler.CosineAnnealingLR(p.optimizer, 5))


def a_schedule_stepped_by_the_loop_each_epoch(p):
    with p.watch(p.scheduler) as monitor:
        for _ in range(3):
            for batch in monitor.batches(p.loader):
                monitor.step(p.backward(batch))
            p.scheduler.step()


def an_optimizer_of_another_model(p):
    with pytest.raises(UsageError, match="no parameter of the optimizers has a gradient"):
        trainer_hooks.watch(parts().model, p.optimizer).step(parts().backward())


def parameters_that_no_optimizer_has(p):
    p.model.register_parameter("scale", nn.Parameter(torch.ones(1)))
    p.model.append(nn.Linear(1, 1))
    train(p)


def a_scheduler_of_another_optimizer(p):
    other = lr_scheduler.StepLR(parts(torch.optim.SGD).optimizer, 100)
    p.watch(other).close()


def losses_by_name_as_the_loss(p):
    train(p, each=lambda monitor, loss: monitor.step({"box": loss, "label": loss}))


def scalars_that_are_no_numbers(p):
    def each(monitor, loss):
        monitor.observe(accuracy=[0.5, 0.25], rate=0.1)
        monitor.evaluate(f1=None)
        monitor.step(loss)

    monitor = train(p, each=each)
    assert monitor.swallowed_errors == {"scalars": 2 * STEPS}


def an_alert_whose_name_changes_at_every_step(p):
    def each(monitor, loss):
        for _ in range(20):
            name = f"reward {len(names)}"
            names.append(name)
            monitor.alert(name, when=True)
        monitor.step(loss)

    names = []
    monitor = train(p, each=each)
    assert monitor.swallowed_errors == {"alert": 20 * STEPS - 100}


TOLD = {
    a_scaler_that_was_not_given: "a GradScaler (scale 65536) scales losses here that was not given",
    micro_batches_of_which_one_is_given: "step 0 is the sum of 4 backward passes, but",
    a_schedule_of_epochs_stepped_each_update: "CosineAnnealingLR(T_max=5) is at its end after 5 "
    "updates, within the first epoch of 12",
    a_schedule_stepped_by_the_loop_each_epoch: "StepLR.step() was called by the loop before step "
    "12, as well as by monitor.step()",
    an_optimizer_of_another_model: "AdamW holds none of the model's parameters",
    parameters_that_no_optimizer_has: "parameter 'scale' and 2 more are in no optimizer",
    a_scheduler_of_another_optimizer: "StepLR sets the rates of another SGD than the one given to",
    losses_by_name_as_the_loss: "the loss is a dict; it must be one number",
    scalars_that_are_no_numbers: "accuracy is a list; a scalar must be one number",
    an_alert_whose_name_changes_at_every_step: "a run can have at most 100 alert names",
}


@pytest.mark.parametrize("misuse", TOLD, ids=lambda misuse: misuse.__name__)
def test_what_is_likely_a_misuse_is_said_in_the_log(misuse, caplog):
    caplog.set_level(logging.WARNING, logger="trainvitals")
    misuse(parts())
    assert TOLD[misuse] in caplog.text
    first = caplog.records[0].getMessage().removeprefix("vitals: ")
    assert plain(first) in plain(PAGE.read_text())


# ----------------------------------------------------------------------- healthy neighbours


def bare(p, step):
    for batch in p.loader:
        step(p, batch)
        p.optimizer.step()
        p.scheduler.step()
        p.optimizer.zero_grad()


def guarded(p, step, **watch):
    with p.watch(p.scheduler, **watch) as monitor:
        for batch in monitor.batches(p.loader):
            monitor.step(step(p, batch))
    return monitor


def one_backward(p, batch):
    return p.backward(batch)


def two_losses_with_a_backward_each(p, batch):
    one, other = p.loss(batch), p.loss(batch * 2)
    one.backward()
    other.backward()
    return one + other


def a_mean_without_its_graph(p, batch):
    losses = [p.loss(batch * scale) / 2 for scale in (1, 2)]
    for loss in losses:
        loss.backward()
    return sum(loss.detach() for loss in losses)


def a_large_gradient(p, batch):
    loss = p.loss(batch) * 1e5
    loss.backward()
    return loss


def a_frozen_layer(p, batch):
    p.model[0].requires_grad_(False)
    return p.backward(batch)


def gradients_that_another_backward_left_and_were_zeroed(p, batch):
    p.backward(batch * 3)
    p.optimizer.zero_grad()
    return p.backward(batch)


NEIGHBOURS = [
    one_backward,
    two_losses_with_a_backward_each,
    a_mean_without_its_graph,
    a_large_gradient,
    a_frozen_layer,
    gradients_that_another_backward_left_and_were_zeroed,
]


def assert_unchanged(step, make, caplog):
    caplog.set_level(logging.WARNING, logger="trainvitals")
    plain, ours = parts(make), parts(make)
    bare(plain, step)
    assert guarded(ours, step).swallowed_errors == {}
    assert not caplog.text
    assert plain.scheduler.state_dict() == ours.scheduler.state_dict()
    for left, right in zip(plain.model.parameters(), ours.model.parameters(), strict=True):
        assert torch.equal(left, right)
    assert not any(p._post_accumulate_grad_hooks for p in ours.model.parameters())


@pytest.mark.parametrize("step", NEIGHBOURS, ids=lambda step: step.__name__)
def test_a_healthy_neighbour_stays_silent_and_bit_for_bit(step, caplog):
    assert_unchanged(step, torch.optim.AdamW, caplog)


def test_one_group_may_hold_parameters_of_several_types(caplog):
    def make(params, lr):
        extra = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        return torch.optim.AdamW([*params, extra], lr=lr)

    assert_unchanged(one_backward, make, caplog)


@pytest.mark.parametrize(("is_scaled", "times"), [(True, 1), (False, 0)])
def test_a_loss_scaled_by_the_scale_alone_is_reported(caplog, is_scaled, times):
    scaler = torch.amp.GradScaler("cpu")
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    with trainer_hooks.watch(model, optimizer) as monitor:
        for _ in range(3):
            loss = model(torch.ones(4, 2) * 9).square().mean() + 1.0
            (loss * (scaler.get_scale() if is_scaled else 1.0)).backward()
            monitor.step(loss)
    said = [text for text in caplog.messages if "that was not given to watch()" in text]
    assert times == len(said)


def test_a_scaler_of_another_training_is_not_taken_for_this_ones(caplog):
    other = parts()
    other.scaler.scale(other.loss(torch.ones(2, 4))).backward()
    with other.watch(scaler=other.scaler) as monitor:
        monitor.step()
        assert_unchanged(a_large_gradient, torch.optim.AdamW, caplog)


def test_two_monitors_take_turns_in_one_process(caplog):
    def play(watch):
        critic, actor = parts(), parts()
        for p in (critic, actor):
            p.monitor = p.watch() if watch else None
        for _ in range(STEPS):
            for p in (critic, actor):
                p.optimizer.zero_grad()
                loss = p.loss(critic.model(torch.ones(2, 4)).expand(2, 4))
                loss.backward()
                p.monitor.step(loss) if watch else p.optimizer.step()
        for p in (critic, actor):
            if watch:
                p.monitor.close()
        return [p for player in (critic, actor) for p in player.model.parameters()]

    for left, right in zip(play(watch=False), play(watch=True), strict=True):
        assert torch.equal(left, right)
    assert not caplog.text


def test_the_table_has_thirty_misuses():
    assert len(REFUSED) + len(TOLD) >= 30
