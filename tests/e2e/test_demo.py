"""`vitals demo` is the promise of the README: its exit code says whether it was kept."""

import subprocess
import sys

import pytest

from trainvitals.cli.demo import Expected, expected, match, plan, unexpected
from trainvitals.records import Decision


@pytest.mark.slow
@pytest.mark.dist
def test_the_demo_finds_every_fault_and_nothing_else(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "trainvitals", "demo", "--headless", "--dir", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert 0 == done.returncode, done.stdout + done.stderr
    for want in expected():
        assert want.rule in done.stdout
    assert "missing" not in done.stdout


def decision(**fields):
    given = {"ledger_seq": 1, "decided_at_step": 0, "attempt": 1, "reason": "", "cause": ""}
    return Decision(**(given | fields))


def test_a_decision_of_another_rank_or_step_answers_nothing():
    want = Expected("NaN gradient", "skip_step", "nonfinite", 1, 150)
    right = decision(action="skip_step", rule="nonfinite", rank=1, step=150)
    other_rank = decision(action="skip_step", rule="nonfinite", rank=0, step=150)
    other_step = decision(action="skip_step", rule="nonfinite", rank=1, step=151)
    assert [right] == [m.decision for m in match([want], [other_rank, other_step, right])]
    assert [None] == [m.decision for m in match([want], [other_rank, other_step])]
    matched = match([want], [right, other_step])
    assert [other_step] == unexpected(matched, [right, other_step])


def test_one_decision_answers_one_fault_only():
    want = Expected("NaN gradient", "skip_step", "nonfinite", 1, 150)
    right = decision(action="skip_step", rule="nonfinite", rank=1, step=150)
    assert [right, None] == [m.decision for m in match([want, want], [right])]


def test_the_plan_injects_what_is_expected():
    kinds = {fault.kind for fault in plan().faults}
    assert {"nan_gradient", "poison_batches", "nan_parameters"} == kinds
    assert 3 == len({want.fault for want in expected()})
