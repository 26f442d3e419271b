"""A slice of the bench of bad steps: a real training, a real fault, the real command."""

import pytest

from vitals_bench.corruption.faulty import FAULTS, TRANSIENT
from vitals_bench.corruption.repro import play

pytestmark = pytest.mark.nightly


def test_there_are_24_faults_beside_those_of_the_moment():
    assert 24 == sum(fault.kind != TRANSIENT for fault in FAULTS.values())


def test_the_command_names_module_and_cause_of_a_fault():
    outcome = play("root of a distance of 0")
    assert outcome.is_module_right and outcome.is_verdict_right, outcome.sentence
    assert ("Sqrt (backward)", True) == (outcome.operator, outcome.share <= 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(FAULTS.keys() - {"root of a distance of 0"}))
def test_every_other_fault_of_the_bench_is_named(name: str):
    outcome = play(name)
    assert outcome.is_module_right and outcome.is_verdict_right, outcome.sentence
