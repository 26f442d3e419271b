"""A guard that is not in force never looks like one."""

import logging

import pytest
import torch
from torch import nn

import trainer_hooks
from tests.support.inside import device_of, events_of
from tests.support.watched import Loop, own_place  # noqa: F401
from trainvitals.records import FindingRaised, Note

NAN = float("nan")


def findings(events, kind):
    return [e.finding for e in events if isinstance(e, FindingRaised) and e.finding.kind == kind]


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("how", ["watch", "attach"])
@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("form", ["fused", "foreach"])
def test_gradients_that_are_part_of_a_graph_are_guarded_and_train_as_others_do(how, clip, form):
    def train(create_graph):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 80), nn.Tanh(), nn.Linear(80, 64))  # both sums' sizes
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **{form: True})
        if how == "watch":
            monitor = trainer_hooks.watch(model, optimizer, mode="guard")
        else:
            monitor = trainer_hooks.attach(model, optimizer, mode="guard", max_norm=clip)
        with monitor:
            for step in range(12):
                loss = model(torch.randn(16, 8)).square().mean() * (NAN if step == 7 else 1.0)
                loss.backward(create_graph=create_graph)
                if how == "watch":
                    monitor.step(loss, max_norm=clip)
                else:
                    monitor.loss(loss)
                    optimizer.step()
                    optimizer.zero_grad()
        assert {} == monitor.swallowed_errors
        return [param.detach().clone() for param in model.parameters()]

    with_graph, without = train(True), train(False)
    assert all(map(torch.equal, without, with_graph))
    assert all(bool(param.isfinite().all()) for param in with_graph)


def test_ten_unmeasured_steps_are_a_page_a_health_and_a_sentence_at_the_end(caplog, monkeypatch):
    caplog.set_level(logging.INFO, logger="trainvitals")
    loop = Loop(mode="guard")
    events = events_of(loop.monitor)
    with loop.monitor as monitor:
        monkeypatch.setattr(device_of(monitor).norms, "squares_into", lambda *_: 1 / 0)
        for _ in range(12):
            monitor.step(loop.forward())
    (finding,) = findings(events, "unguarded")
    assert (9, 0) == (finding.step, finding.onset_step)
    assert "10 of 10 steps" in finding.reason and "ZeroDivisionError" in finding.reason
    assert [True] == ["ZeroDivisionError" in e.text for e in events if isinstance(e, Note)
                      and e.code == "unguarded"]  # fmt: skip
    said = [message for message in caplog.messages if "step 9: rank 0 could not" in message]
    assert 1 == len(said)
    assert any("NOT GUARDED: 12 of 12 steps" in message for message in caplog.messages)


def test_a_run_that_was_measured_throughout_says_nothing_of_it(caplog):
    caplog.set_level(logging.INFO, logger="trainvitals")
    loop = Loop(mode="guard")
    with loop.monitor as monitor:
        for _ in range(12):
            monitor.step(loop.forward())
    assert not any("GUARDED" in message for message in caplog.messages)


@pytest.mark.parametrize("how", ["dead units", "a constant loss", "cleared"])
def test_an_update_that_trains_nothing_is_found_within_five_steps(how):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    if how == "dead units":
        with torch.no_grad():
            model[0].bias.fill_(-100.0)
        model[2].bias.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = trainer_hooks.watch(model, optimizer, mode="guard")
    events = events_of(monitor)
    with monitor:
        for step in range(20):
            loss = model(torch.randn(16, 4)).square().mean() + 1.0
            (loss * 0.0 if how == "a constant loss" else loss).backward()
            if how == "cleared" and step > 2:
                optimizer.zero_grad()
            monitor.step(loss)
    (finding,) = findings(events, "zero_gradient")
    assert (7 if how == "cleared" else 4) == finding.step
    assert "exactly 0" in finding.reason


def test_what_begins_at_zero_and_trains_is_healthy():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 1, bias=False))
    model[0].requires_grad_(False)
    nn.init.zeros_(model[2].weight)  # as LoRA's B: its A has no gradient in the first step
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    monitor = trainer_hooks.watch(model, optimizer, mode="guard")
    events = events_of(monitor)
    with monitor:
        for _ in range(20):
            x = torch.randn(16, 4)
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            monitor.step(loss)
    assert [] == findings(events, "zero_gradient")


class Sharpness(torch.optim.Optimizer):
    """As SAM: two steps of its own, the second of which steps the optimizer within."""

    def __init__(self, params):
        params = list(params)
        super().__init__(params, {})
        self.base_optimizer = torch.optim.SGD(params, lr=0.1)

    def second_step(self):
        self.base_optimizer.step()
        self.zero_grad()


def test_losses_without_any_step_of_the_attached_optimizer_are_reported(caplog):
    model = nn.Linear(4, 1)
    optimizer = Sharpness(model.parameters())
    attached = trainer_hooks.attach(model, optimizer, mode="guard")
    events = events_of(attached)
    with attached:
        for _ in range(25):
            loss = model(torch.randn(8, 4)).square().mean()
            loss.backward()
            attached.loss(loss)
            optimizer.second_step()
    (finding,) = findings(events, "unguarded")
    assert "Sharpness.step() was never called" in finding.reason
    assert 1 == sum("NOT GUARDED" in message for message in caplog.messages)


@pytest.mark.parametrize("given", ["before", "after"])
def test_a_loop_that_accumulates_over_many_batches_is_not_accused(given):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attached = trainer_hooks.attach(model, optimizer, mode="guard")
    events = events_of(attached)
    with attached:
        for _ in range(3):
            for _ in range(40):
                loss = model(torch.randn(8, 4)).square().mean()
                if given == "before":
                    attached.loss(loss)
                loss.backward()
                if given == "after":
                    attached.loss(loss)
            optimizer.step()
            optimizer.zero_grad()
    assert [] == findings(events, "unguarded")


RUN = "01JD0000000000000000000000"


def test_a_second_start_that_counts_from_step_0_says_what_a_resume_needs(monkeypatch, caplog):
    monkeypatch.setenv("VITALS_RUN_ID", RUN)

    def start(loads):
        loop = Loop(mode="guard", total_steps=1000, schedule="constant")
        caplog.clear()
        with loop.monitor as monitor:
            if loads is not None:
                monitor.load_state_dict(loads)
            for _ in range(5):
                monitor.step(loop.forward())
            kept = monitor.state_dict()
        return kept, [text for text in caplog.messages if "was started before" in text]

    kept, said = start(None)
    assert [] == said
    _, said = start(None)
    assert 1 == len(said) and "monitor.load_state_dict(state)" in said[0]
    _, said = start(kept)
    assert [] == said
