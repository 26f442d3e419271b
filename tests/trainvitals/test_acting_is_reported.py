"""An update is never withheld in silence: whatever the acting rule stops, a finding reports."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainvitals.alerting import alerts_for_decision, alerts_for_finding
from trainvitals.judged_log import LoggedStep, judge_history

outliers = st.lists(
    st.tuples(st.integers(1, 99), st.floats(0.1, 1e9), st.floats(0.1, 1e9)),
    min_size=1,
    max_size=12,
)


def a_log(seed, fall, noise, factors):
    """Return a falling loss with noise, and factors on the loss and the norm of some steps."""
    rng = random.Random(seed)
    by_step = {step: (loss, norm) for step, loss, norm in factors}
    log = []
    for step in range(100):
        on_loss, on_norm = by_step.get(step, (1.0, 1.0))
        loss = 4.0 * (1.0 - fall * min(1.0, step / 60)) * rng.lognormvariate(0.0, noise)
        norm = rng.lognormvariate(0.0, 0.3)
        log.append(LoggedStep(step, step, loss * on_loss, norm * on_norm, 1e-3))
    return log


@pytest.mark.parametrize("mode", ["observe", "guard", "heal"])
@given(
    seed=st.integers(0, 2**16), fall=st.floats(0.0, 0.99), noise=st.floats(0.0, 0.5),
    factors=outliers, clips=st.booleans(),
)  # fmt: skip
@settings(deadline=None, max_examples=8)
def test_every_withheld_update_has_a_finding_of_its_step(mode, seed, fall, noise, factors, clips):
    log = a_log(seed, fall, noise, factors)
    for row, record, judged in judge_history(log, mode=mode, clips=clips):
        if record.withheld:
            assert judged.findings, (row, record)
            assert {record.step} == {finding.step for finding in judged.findings}


def test_an_update_that_is_withheld_is_in_the_decision_log_too():
    log = a_log(0, 0.9, 0.05, [(90, 1e6, 1e6)])
    (judged,) = [j for _, record, j in judge_history(log, mode="guard") if record.withheld]
    assert "skip_step" == judged.decision.action
    raised = [a.name for f in judged.findings for a in alerts_for_finding(f, run_id="r")]
    raised += [a.name for a in alerts_for_decision(judged.decision, run_id="r")]
    assert {"SpikeSeen", "StepSkipped"} & set(raised)
