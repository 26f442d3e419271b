"""What is stored about nodes, and which of them fail repeatedly."""

import yaml

from tests.plugins.lab.preflight.ranks import change, healthy, scale
from vitals_plugins.lab.preflight.history import (
    MAX_CHECKS,
    NodeCheck,
    NodeHistory,
    baseline,
    exclude_list,
    failing_nodes,
    node_affinity,
    node_checks,
)
from vitals_plugins.lab.preflight.judge import judge


def check(number: int, *kinds: str) -> NodeCheck:
    figures = {"gemm_flops_per_second": float(number)}
    return NodeCheck(
        check_id=f"c{number}", time_unix_ns=number, device="Xeon", figures=figures, kinds=kinds
    )


def failing(*failed: bool):
    checks = [check(number, *["slow_rank"] * is_bad) for number, is_bad in enumerate(failed)]
    return failing_nodes({"n1": checks})


def test_a_node_fails_repeatedly_with_two_faults_in_five_checks():
    assert () == failing(True)
    assert () == failing(True, False, False)
    assert ["n1"] == [each.node for each in failing(True, True)]
    assert ["n1"] == [each.node for each in failing(True, False, False, False, True)]
    assert () == failing(True, True, False, False, False, False)


def test_a_check_is_stored_once_and_the_oldest_are_dropped(tmp_path):
    history = NodeHistory(tmp_path / "runs")
    for number in range(MAX_CHECKS + 2):
        history.add("n1", check(number))
        history.add("n1", check(number))
    stored = history.read("n1")
    assert [*range(2, MAX_CHECKS + 2)] == [each.time_unix_ns for each in stored]
    assert ["n1"] == history.nodes()
    assert [] == history.problems


def test_a_damaged_history_is_renamed_and_reported(tmp_path):
    history = NodeHistory(tmp_path)
    history.add("n1", check(1))
    (tmp_path / "preflight" / "n1.json").write_bytes(b'[{"check_id": ')
    assert [] == history.read("n1")
    (problem,) = history.problems
    assert "n1.damaged" in problem
    history.add("n1", check(2))
    assert [check(2)] == history.read("n1")


def test_a_directory_that_cannot_be_written_is_reported(tmp_path):
    (tmp_path / "preflight").write_text("")
    history = NodeHistory(tmp_path)
    history.add("n1", check(1))
    assert history.problems[-1].startswith(f"{tmp_path}/preflight/n1.json: ")


def test_the_name_of_a_node_cannot_leave_the_directory(tmp_path):
    NodeHistory(tmp_path / "runs").add("../../x", check(1))
    assert ["runs"] == [path.name for path in tmp_path.iterdir()]


def test_checks_with_a_fault_are_no_reference():
    checks = [check(1), check(2, "slow_rank"), check(3)]
    assert [1.0, 3.0] == [
        each["gemm_flops_per_second"] for each in baseline(checks, "Xeon").figures
    ]
    assert () == baseline(checks, "another").figures


def test_only_nodes_at_fault_fail_and_notes_do_not_count():
    reports = scale(healthy(4), 1, 0.3)
    reports = change(reports, 2, versions={"torch": "2.13.0", "kernel": "5.0"})
    checks = node_checks(reports, judge(reports), check_id="c", now_unix_ns=7)
    assert {"n0": (), "n1": ("slow_rank",), "n2": (), "n3": ()} == {
        node: each.kinds for node, each in checks.items()
    }


def test_nodes_as_slurm_and_kubernetes_take_them():
    nodes = failing_nodes({name: [check(1, "slow_rank")] * 2 for name in ("b", "a")})
    assert "a,b" == exclude_list(nodes)
    assert "" == exclude_list(())
    terms = yaml.safe_load(node_affinity(nodes))["nodeAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]["nodeSelectorTerms"]
    expected = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["a", "b"]}
    assert [{"matchExpressions": [expected]}] == terms
    assert "" == node_affinity(())
