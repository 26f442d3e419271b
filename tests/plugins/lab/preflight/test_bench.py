"""The bench of preflight: real nodes with a fault, and how the result is counted."""

import msgspec
import pytest

from tests.plugins.lab.preflight.ranks import change, healthy, racked, scale, slow_pairs
from trainvitals.errors import VitalsError
from vitals_bench.preflight.measure import (
    CLEAN,
    KINDS,
    NUM_NODES,
    PER_NODE,
    Options,
    Trial,
    measure_preflight,
    run_trial,
)
from vitals_plugins.lab.preflight.judge import PreflightFinding
from vitals_plugins.lab.preflight.report import ClockOffset, PreflightReport


def trial_of(fault: str, *nodes: str, kind: str = "", severity: str = "fail") -> Trial:
    """Return a preflight whose rank 3, on n1, has the fault, with a finding that names nodes."""
    named = PreflightFinding(kind=kind or KINDS[fault], severity=severity, nodes=nodes, text="")
    return Trial(
        fault=fault,
        number=0,
        rank=3,
        seconds=1.0,
        load=0.0,
        budget=60.0,
        findings=(named,) if kind or KINDS[fault] else (),
        reports=reports_of(fault),
    )


def reports_of(fault: str) -> tuple[PreflightReport, ...]:
    """Return the reports of a preflight whose node n1 has the fault."""
    reports = racked(healthy(NUM_NODES * PER_NODE, per_node=PER_NODE), "r0")
    if fault == "throttled rank":
        reports = scale(reports, 3, 0.3, "gemm_flops_per_second")
    if fault == "throttled link":
        reports = slow_pairs(reports, lambda a, b: len({a, b} & {2, 3}) == 1)
    for rank in (2, 3):
        if fault == "slow disk":
            reports = scale(reports, rank, 0.1, "disk_bytes_per_second")
        if fault == "skewed clock":
            reports = change(reports, rank, offset=ClockOffset(1.0, 0.001))
    return tuple(reports)


def test_a_fault_counts_if_only_its_node_is_named_and_as_what_it_is():
    for fault in KINDS.keys() - {CLEAN}:
        assert trial_of(fault, "n1").is_right
        assert not trial_of(fault, "n1").has_false
        assert not trial_of(fault).is_right
        assert not trial_of(fault, "n1", kind="missing_gpu").is_right
        assert not trial_of(fault, "n1", "n2").is_right
        assert trial_of(fault, "n1", "n2").has_false


def test_a_clean_preflight_counts_if_nothing_failed():
    assert trial_of(CLEAN).is_right
    assert trial_of(CLEAN, kind="link_groups", severity="note").is_right
    assert not trial_of(CLEAN, "n1", kind="slow_rank").is_right
    assert trial_of(CLEAN, "n1", kind="slow_rank").has_false


def test_stored_preflights_are_not_run_again_but_judged_again(tmp_path):
    trials = [trial_of(fault, "n2", kind="as_stored") for fault in KINDS]
    results = tmp_path / "results"
    results.write_bytes(b"".join(msgspec.json.encode(trial) + b"\n" for trial in trials))
    grid, named, failed = measure_preflight(quick=True, options=Options(results=results))
    assert [(fault, 1, 1, 0, 0, 1.0) for fault in KINDS] == list(grid.rows)
    assert (1.0, 0.0) == (named.ours, failed.ours)


@pytest.mark.nightly
@pytest.mark.dist
def test_a_real_node_with_a_skewed_clock_is_named():
    try:
        trial = run_trial("skewed clock", 0, budget=150.0)
    except VitalsError as error:
        pytest.skip(f"no name spaces, control groups or loop devices: {error}")
    assert trial.is_complete, trial.findings
    skewed = [each.nodes for each in trial.findings if each.kind == "clock_skew"]
    assert [(f"n{trial.rank // PER_NODE}",)] == skewed
