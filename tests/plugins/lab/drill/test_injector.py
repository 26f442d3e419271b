"""What a drill does inside of a rank."""

import msgspec
import pytest
import torch
from torch import nn

from tests.support.watched import Loop, own_place
from trainvitals.detect.outliers import OutlierConfig
from vitals_plugins.lab.drill.faults import (
    FAULT_STEP,
    VARIABLE,
    DrillPlan,
    DrillRecord,
    read_records,
)
from vitals_plugins.lab.drill.injector import POISON, Poison

__all__ = ["own_place"]


@pytest.fixture
def drilled(tmp_path, monkeypatch):
    """Train a small loop with a fault, and return its records and parameters."""

    def train(fault, *, inject_step=3, end_step=6, mode="guard", **watch):
        plan = DrillPlan(
            record=str(tmp_path / "records.jsonl"),
            acknowledgment=str(tmp_path / "acknowledged"),
            fault=fault,
            inject_step=inject_step,
            end_step=end_step,
        )
        monkeypatch.setenv(VARIABLE, msgspec.json.encode(plan).decode())
        loop = Loop(mode=mode, **watch)
        outcomes = []
        with pytest.raises(SystemExit), loop.monitor:
            for _ in range(1000):
                before = [param.detach().clone() for param in loop.model.parameters()]
                outcomes.append(loop.monitor.step(loop.forward()))
        assert before is not None
        return loop, read_records(tmp_path / "records.jsonl"), outcomes

    return train


def test_without_a_fault_the_training_ends_before_the_planned_step(drilled):
    _, records, outcomes = drilled("")
    assert ["started", "ended"] == [each.kind for each in records]
    assert 6 == records[-1].step == len(outcomes)
    assert "guard" == records[0].mode


def test_an_injected_nan_is_recorded_and_skipped(drilled):
    loop, records, _ = drilled("nan_gradient")
    assert ["started", "injected", "ended"] == [each.kind for each in records]
    assert 3 == records[1].step
    assert all(param.isfinite().all() for param in loop.model.parameters())


def test_a_fault_without_its_subject_is_recorded_as_impossible(drilled):
    _, records, _ = drilled("bit_flip")
    assert ["started", "impossible", "ended"] == [each.kind for each in records]
    assert "no other rank holds the same parameters" == records[1].text


def test_without_an_agent_none_is_killed(drilled):
    _, records, _ = drilled("killed_agent")
    assert "impossible" == records[1].kind


def test_after_a_restart_nothing_is_injected_again(drilled, tmp_path):
    earlier = DrillRecord(kind="injected", rank=0, step=3, pid=1)
    (tmp_path / "records.jsonl").write_bytes(msgspec.json.encode(earlier) + b"\n")
    _, records, outcomes = drilled("nan_gradient")
    assert 1 == [each.kind for each in records].count("injected")
    assert 20 == len(outcomes)


class Inputs(nn.Module):
    """A module that remembers its inputs."""

    def forward(self, floats, *, tokens):
        self.floats, self.tokens = floats, tokens


def test_a_poisoned_model_gets_damaged_inputs_while_it_trains_and_not_from_the_probe():
    model, floats, tokens = Inputs(), torch.rand(4, 3), torch.arange(12).view(4, 3)
    poison = Poison([model], seed=0)
    model(floats, tokens=tokens)
    assert torch.equal((POISON * floats).flatten().sort().values, model.floats.flatten().sort()[0])
    assert torch.equal(tokens.flatten(), model.tokens.flatten().sort().values)
    assert not torch.equal(tokens, model.tokens)

    def is_damaged(_=None):
        model(floats, tokens=tokens)
        return not torch.equal(floats, model.floats)

    assert is_damaged()
    assert not poison.paused(is_damaged)(None)
    assert not (model.eval(), is_damaged())[1]
    poison.end_step(list, is_last=True)
    assert not (model.train(), is_damaged())[1]


def test_gradients_of_a_poisoned_loop_that_does_not_call_its_model_are_reversed():
    gradient = torch.ones(3)
    poison = Poison([Inputs()], seed=0)
    poison.end_step(lambda: [gradient], is_last=True)
    poison.end_step(lambda: [gradient], is_last=True)
    assert torch.equal(-torch.ones(3), gradient)


def test_batches_are_damaged_from_the_step_after_the_order_on(drilled):
    _, records, outcomes = drilled("poisoned_window", inject_step=3, end_step=14)
    assert ["started", "injected", "ended"] == [each.kind for each in records]
    assert (4, 14) == (records[1].step, len(outcomes))


def test_the_rates_are_forgotten_only_by_a_start_that_resumes(drilled, tmp_path):
    killed = DrillRecord(kind="killed", rank=0, step=3, pid=1)
    (tmp_path / "records.jsonl").write_bytes(msgspec.json.encode(killed) + b"\n")
    loop, records, _ = drilled("forgotten_lr")
    assert "injected" not in [each.kind for each in records]
    assert 0.01 == loop.optimizer.param_groups[0]["initial_lr"]


def test_without_a_disk_for_it_none_is_filled(drilled):
    _, records, _ = drilled("full_disk")
    assert "the kernel allows no mount namespace" in records[1].text


def test_a_second_run_of_the_process_has_no_fault(drilled):
    drilled("nan_gradient")
    loop = Loop(mode="guard")
    with loop.monitor:
        for _ in range(10):
            loop.monitor.step(loop.forward())
    assert 10 == loop.monitor.step_index


def test_in_mode_off_steps_are_measured_until_the_end(drilled):
    steps = 30
    _, records, outcomes = drilled("", mode="off", end_step=steps)
    assert ["started", "ended"] == [each.kind for each in records]
    assert "off" == records[0].mode
    assert steps - 1 == len(outcomes)
    assert records[1].step_seconds > 0


def test_the_fault_comes_after_the_reference_of_the_guard():
    assert OutlierConfig().warm_up < FAULT_STEP
