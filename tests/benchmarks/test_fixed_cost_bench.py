"""The fixed cost of a step and of a command is measured on real ones."""

import pytest

from vitals_bench.commands import COMMANDS, measure_commands
from vitals_bench.guard.fixed import measure_fixed

pytestmark = pytest.mark.nightly


def test_each_command_is_timed_on_a_run_that_it_can_read():
    *rows, packages = measure_commands(quick=True)
    assert [row.name.partition(",")[0] for row in rows] == list(COMMANDS)
    assert packages.ours is not None
    assert all(row.ours is not None and row.ours > packages.ours for row in rows)


def test_a_guarded_step_is_compared_with_the_bare_calls():
    rows = list(measure_fixed(quick=True))
    assert [row.unit for row in rows] == ["us"] * 8 + ["ms"] * 2
    assert all(row.ratio is not None and row.ratio > 0.5 for row in rows if row.peer)
