"""What is stored about nodes, and which of them fail repeatedly."""

import msgspec
import pytest
import yaml

from tests.plugins.lab.preflight.ranks import change, healthy, scale
from tests.support.served import served_in
from trainvitals.clock import SystemClock
from trainvitals.errors import UsageError
from trainvitals.views import FailingNodesQuestion
from vitals_collector.queries.query import Query, within
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


def check(number: int, *kinds: str, **fields) -> NodeCheck:
    figures = {"gemm_flops_per_second": float(number)}
    fields = {"node": "n1", "device": "Xeon", "num_ranks": 2, "settings": "local, 60 s", **fields}
    return NodeCheck(
        check_id=f"c{number}", time_unix_ns=number, figures=figures, kinds=kinds, **fields
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
    assert {"n1": stored} == history.read_all()
    assert [] == history.problems


def test_a_collector_returns_the_nodes_that_fail_in_its_folders(tmp_path):
    runs = tmp_path / "runs"
    for node, kinds in (("n1", ["slow_rank"]), ("n2", [])):
        for number in range(2):
            NodeHistory(runs).add(node, check(number, *kinds, node=node))
    with served_in(tmp_path / "data", folders=(runs,)) as served:
        with served.client() as client:
            (node,) = client.ask(FailingNodesQuestion())
        assert ("n1", 2, 2) == (node.node, node.num_failed, node.num_checks)
        assert ("slow_rank",) == node.kinds
        # These nodes belong to no run, so a token for some runs gets none.
        folders = (runs, tmp_path / "missing")
        query = Query(served.store, clock=SystemClock(), folders=folders)
        assert (node,) == query.ask(FailingNodesQuestion())
        assert () == within(query, frozenset({"r1"})).ask(FailingNodesQuestion())


def test_a_damaged_history_is_renamed_and_reported(tmp_path):
    history = NodeHistory(tmp_path)
    history.add("n1", check(1))
    path = tmp_path / "preflight" / "n1.json"
    path.write_bytes(b'[{"check_id": ')
    assert {} == history.read_all()
    assert path.exists()  # a list changes nothing
    assert [] == history.read("n1")
    (problem,) = history.problems
    assert str(path) in problem
    history.add("n1", check(2))
    assert [check(2)] == history.read("n1")
    assert b'[{"check_id": ' == path.with_suffix(".damaged").read_bytes()


def make_unreadable(path, how: str) -> None:
    """Replace a file with another user's that cannot be read, or with one with two owners."""
    if how == "directory":
        path.unlink()
        path.mkdir()
    elif how == "link":
        path.rename(path.with_suffix(".moved"))
        path.symlink_to(path.with_suffix(".moved"))
    else:
        path.chmod(0o666)


@pytest.mark.parametrize("how", ["directory", "link", "mode"])
def test_a_file_that_cannot_be_read_now_is_neither_renamed_nor_replaced(tmp_path, how):
    history = NodeHistory(tmp_path)
    history.add("n1", check(1))
    make_unreadable(tmp_path / "preflight" / "n1.json", how)
    before = sorted((tmp_path / "preflight").iterdir())
    assert {} == history.read_all()
    assert history.read("n1") is None
    history.add("n1", check(2))
    assert before == sorted((tmp_path / "preflight").iterdir())
    (problem,) = history.problems
    assert "n1.json" in problem


def test_a_list_needs_the_directory_but_not_a_check(tmp_path):
    with pytest.raises(UsageError):
        NodeHistory(tmp_path / "mistyped").read_all()
    assert {} == NodeHistory(tmp_path).read_all()
    (tmp_path / "preflight").write_text("")
    history = NodeHistory(tmp_path)
    assert {} == history.read_all()
    assert 1 == len(history.problems)


def test_a_directory_that_cannot_be_written_is_reported(tmp_path):
    (tmp_path / "preflight").write_text("")
    history = NodeHistory(tmp_path)
    history.add("n1", check(1))
    assert str(tmp_path / "preflight") in history.problems[-1]


def test_the_name_of_a_node_cannot_leave_the_directory(tmp_path):
    NodeHistory(tmp_path / "runs").add("../../x", check(1))
    assert ["runs"] == [path.name for path in tmp_path.iterdir()]


def test_nodes_with_similar_names_have_separate_files(tmp_path):
    history = NodeHistory(tmp_path)
    names = ["x" * 64, "x" * 64 + "1", "x" * 64 + "2", "a b", "a-b", "-a-b", "é", "ü"]
    for number, name in enumerate(names):
        history.add(name, check(number, node=name))
    expected = {name: [check(number, node=name)] for number, name in enumerate(names)}
    assert expected == history.read_all()


def test_only_checks_without_a_fault_and_with_equal_settings_are_a_reference():
    checks = [
        check(1),
        check(2, "slow_rank"),
        check(3),
        check(4, num_ranks=8),
        check(5, settings="local, 5 s"),
        check(6, device="H100"),
    ]
    stored = baseline(checks, check(7)).figures
    assert [1.0, 3.0] == [each["gemm_flops_per_second"] for each in stored]


def test_the_number_of_gpus_is_compared_with_the_latest_complete_local_check():
    gpus = [check(1, num_gpus=4), check(2, num_gpus=8), check(3, num_gpus=0)]
    assert 8 == baseline([*gpus, check(4, "missing_gpu", num_gpus=7)], check(5)).num_gpus
    job = [check(number, num_gpus=8, settings="job, 60 s") for number in range(4)]
    assert 0 == baseline(job, check(5)).num_gpus
    assert 0 == baseline(job, check(5, settings="job, 60 s")).num_gpus


def test_a_check_stores_what_must_be_equal():
    def stored(reports):
        checks = node_checks(reports, (), check_id="c", now_unix_ns=7, settings="local")
        return {(each.node, each.num_ranks, each.num_gpus, each.settings)
                for each in checks.values()}  # fmt: skip

    reports = healthy(4, per_node=2, gpu=True)
    assert {("n0", 2, 2, "local, torch 2.13.0"), ("n1", 2, 2, "local, torch 2.13.0")} == stored(
        reports
    )
    assert {("n0", 2, 0, "local, torch 2.13.0")} == stored(reports[:2])  # incomplete


def test_versions_and_limits_are_not_a_fault_of_the_node():
    versions = {"torch": "2.12.0", "kernel": "6.1"}
    reports = change(healthy(4), 3, versions=versions, limits={"open_files": 256})
    checks = node_checks(reports, judge(reports), check_id="c", now_unix_ns=7)
    assert [()] * 4 == [each.kinds for each in checks.values()]


def test_a_cause_that_all_nodes_share_excludes_none():
    for errors in ({"disk": "Disk quota exceeded"}, {"start": "timed out"}):
        reports = [msgspec.structs.replace(each, errors=errors) for each in healthy(8)]
        findings = judge(reports)
        checks = node_checks(reports, findings, check_id="c", now_unix_ns=7)
        assert () == failing_nodes({node: [each, each] for node, each in checks.items()})


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
    expected = [
        {"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in ("a", "b")
    ]
    assert [{"matchFields": expected}] == terms
    assert "" == node_affinity(())
