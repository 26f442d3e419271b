"""What a drill does inside of a rank."""

import msgspec
import pytest

from tests.support.watched import Loop, own_place
from trainvitals.detect.outliers import OutlierConfig
from vitals_plugins.lab.drill.faults import (
    FAULT_STEP,
    VARIABLE,
    DrillPlan,
    DrillRecord,
    read_records,
)

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
