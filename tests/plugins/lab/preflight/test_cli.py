"""`vitals preflight` with a launcher that prints stored reports."""

import json

import jsonschema
import msgspec
import pytest

from docs import json_schema
from tests.plugins.lab.preflight.ranks import healthy, scale
from tests.support.cli import vitals
from vitals_plugins.lab.preflight.report import MARK


@pytest.fixture(autouse=True)
def _no_runs_here(monkeypatch, tmp_path):
    (tmp_path / "shm").mkdir()
    monkeypatch.setenv("VITALS_SHM", str(tmp_path / "shm"))


@pytest.fixture
def preflight(tmp_path, capsys):
    """Return a function that runs the command, and returns its exit code and output."""
    folder = tmp_path / "bin"
    folder.mkdir()
    torchrun = folder / "torchrun"

    def run(reports, *options: str):
        lines = b"".join(MARK + msgspec.json.encode(each) + b"\n" for each in reports)
        (folder / "reports").write_bytes(lines)
        torchrun.write_text(f"#!/bin/sh\ncat {folder}/reports\n")
        torchrun.chmod(0o755)
        directory = ("--dir", tmp_path / "runs")
        code = vitals("preflight", *directory, *options, "--", torchrun, "--nproc-per-node", "2",
                      "train.py")  # fmt: skip
        return code, capsys.readouterr().out

    return run


@pytest.fixture
def failed_nodes(tmp_path, capsys):
    def run(form: str, code: int = 0):
        options = ("--failed-nodes", "--dir", tmp_path / "runs", "--format", form)
        assert code == vitals("preflight", *options)
        return capsys.readouterr().out

    (tmp_path / "runs").mkdir()
    return run


def test_healthy_ranks_exit_with_zero(preflight, failed_nodes):
    code, output = preflight(healthy(4))
    assert 0 == code
    assert "ok  4 ranks, no fault found" in output
    assert "\n" == failed_nodes("exclude")


def test_a_slow_rank_exits_with_one_and_its_node_is_excluded_after_the_second_time(
    preflight, failed_nodes
):
    for number in range(2):
        assert "\n" == failed_nodes("exclude")
        reports = scale(healthy(4, seed=number), 2, 0.3, "gemm_flops_per_second")
        reports = [msgspec.structs.replace(each, check_id=f"c{number}") for each in reports]
        code, output = preflight(reports)
        assert 1 == code
        assert "fail  rank 2 on n2 is slow: matrix product" in output
        assert "Do not train on: n2" in output
    assert "n2\n" == failed_nodes("exclude")
    assert 'values: ["n2"]' in failed_nodes("selector")
    assert "2 of 2" in failed_nodes("table")
    check("vitals preflight --failed-nodes", failed_nodes("json"))


def check(command: str, output: str) -> None:
    schema = json_schema.schema()
    schema = {**schema["commands"][command], "$defs": schema["$defs"]}
    jsonschema.Draft202012Validator(schema).validate(json.loads(output))


def test_json_is_what_the_schema_says(preflight):
    code, output = preflight(scale(healthy(4), 1, 0.3), "--format", "json")
    assert 1 == code
    check("vitals preflight", output)
    assert ["n1"] == json.loads(output)["findings"][0]["nodes"]


def test_without_a_measurement_no_node_is_at_fault(preflight):
    hung = [msgspec.structs.replace(each, stage=0) for each in healthy(4)]
    full = [msgspec.structs.replace(each, errors={"disk": "Disk quota"}) for each in healthy(4)]
    for reports in ([], healthy(4)[:3], hung, full):
        code, output = preflight(reports)
        assert 3 == code
        assert "Do not train on" not in output


def test_no_report_names_the_possible_cause(preflight):
    _, output = preflight([])
    assert "no rank reported anything" in output
    assert "Vitals must be installed where torchrun runs" in output


def test_a_node_with_fewer_gpus_than_given_exits_with_one(preflight):
    assert 0 == preflight(healthy(4, per_node=4, gpu=True, noise=0.02), "--gpus", "4")[0]
    code, output = preflight(healthy(3, per_node=3, gpu=True, noise=0.02), "--gpus", "4")
    assert 1 == code
    assert "n0 has 3 of 4 GPUs" in output


def test_a_list_with_an_unreadable_history_or_without_its_directory_exits_with_two(
    preflight, failed_nodes, tmp_path
):
    for _ in range(2):
        preflight(scale(healthy(4), 2, 0.3))
    (tmp_path / "runs" / "preflight" / "n1.json").write_text("{")
    before = (tmp_path / "runs" / "preflight" / "n2.json").read_bytes()
    assert "\n" == failed_nodes("exclude", 2)  # one check: both had the same id
    assert before == (tmp_path / "runs" / "preflight" / "n2.json").read_bytes()
    assert "{" == (tmp_path / "runs" / "preflight" / "n1.json").read_text()
    (tmp_path / "runs").rename(tmp_path / "moved")
    assert "" == failed_nodes("exclude", 2)


def test_a_damaged_history_is_a_note(preflight, tmp_path):
    (tmp_path / "runs" / "preflight").mkdir(parents=True)
    (tmp_path / "runs" / "preflight" / "n1.json").write_text("{")
    code, output = preflight(healthy(4))
    assert 0 == code
    assert "note  history: " in output


def test_a_list_of_nodes_is_another_form_of_output(preflight, capsys):
    code, _ = preflight(healthy(4), "--format", "exclude")
    assert 2 == code
