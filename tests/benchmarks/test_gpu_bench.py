"""The GPU check: its parts, its pages, and that the documentation claims no more than a result."""

import json
import re
from pathlib import Path

import pytest

from trainvitals.cli.doctor import run_gpu_check
from trainvitals.cli.main import main as vitals
from trainvitals.errors import UsageError
from vitals_bench.cli import main
from vitals_bench.gpu import report
from vitals_bench.gpu.agent import Reading, compare_samples, parse_readings
from vitals_bench.gpu.parts import GROUP_SECONDS, MAX_SECONDS, load_parts
from vitals_bench.gpu.runner import has_failed
from vitals_bench.gpu.suites import parse_junit
from vitals_bench.gpu.wheels import describe_install, find_packages

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def make_result(*statuses, gpus=("NVIDIA H100 80GB HBM3",), group="check", date="2026-12-01"):
    """Return a result with a part in each status."""
    parts = {
        f"part_{index}": {"group": group, "status": status, "why": "reason", "seconds": 1.0}
        for index, status in enumerate(statuses)
    }
    machine = {"gpus": list(gpus), "torch": "2.11.0+cu130", "driver": "580.1"}
    return {"date": date, "commit": "0123456789ab", "machine": machine, "parts": parts}


def run_bench(*arguments):
    """Return the exit code of a command."""
    try:
        return main(["gpu", *arguments])
    except SystemExit as end:
        return end.code


def make_row(name, ours, theirs, limit):
    goal = {"of": "ratio", "sign": "<=", "limit": limit}
    row = {"name": name, "ours": ours, "unit": "ms", "peer": "bare", "theirs": theirs}
    return {**row, "goal": goal, "spread": 0.01, "note": ""}


class TestParts:
    def test_there_are_twelve_checks_on_one_gpu_and_seven_of_them_on_the_cpu(self):
        checks = [part for part in load_parts().values() if part.group == "check"]
        assert 12 == sum(part.num_gpus <= 1 for part in checks)
        assert 7 == sum(part.num_gpus == 0 for part in checks)

    def test_each_part_belongs_to_a_group_and_all_groups_fit_the_limit(self):
        assert {part.group for part in load_parts().values()} == set(GROUP_SECONDS)
        assert sum(GROUP_SECONDS.values()) <= MAX_SECONDS

    def test_the_page_lists_each_group_with_its_limit(self):
        page = (ROOT / "docs" / "RUN_ON_CUDA.md").read_text()
        table = dict(re.findall(r"^\| `(\w+)` \| (\d+) s \|", page, re.M))
        assert {name: str(seconds) for name, seconds in GROUP_SECONDS.items()} == table


class TestRun:
    def test_parts_that_need_a_gpu_are_skipped_and_named(self, tmp_path, capsys):
        torch = pytest.importorskip("torch")
        if torch.cuda.is_available():
            pytest.skip("this machine has a GPU")
        assert 0 == run_bench("check", "--out", str(tmp_path), "--only", "graphs_train")
        parts = json.loads((tmp_path / "gpu_check.json").read_text())["parts"]
        assert ("skipped", "needs a CUDA GPU") == (
            parts["graphs_train"]["status"],
            parts["graphs_train"]["why"],
        )
        assert "omitted" == parts["clips_are_exact"]["status"]
        assert "graphs_train  needs a CUDA GPU" in capsys.readouterr().out

    @pytest.mark.nightly
    def test_a_check_and_a_measurement_run_on_the_cpu_and_a_resumed_run_repeats_none(
        self, tmp_path, capsys
    ):
        names = ("clips_are_exact", "update_50m_float32")
        arguments = ["check", "speed", "--out", str(tmp_path), "--only", ",".join(names)]
        assert 0 == run_bench(*arguments)
        first = json.loads((tmp_path / "gpu_check.json").read_text())
        assert {"passed"} == {first["parts"][name]["status"] for name in names}
        (row,) = first["parts"]["update_50m_float32"]["facts"]["rows"]
        assert 0 < row["ours"] and 0 < row["theirs"]
        assert row["name"] in (tmp_path / "gpu_check.txt").read_text()
        capsys.readouterr()
        assert 0 == run_bench(*arguments, "--resume")
        assert first == json.loads((tmp_path / "gpu_check.json").read_text())

    def test_results_of_another_machine_are_not_resumed(self, tmp_path, capsys):
        (tmp_path / "gpu_check.json").write_text(json.dumps(make_result("passed")))
        arguments = ("--out", str(tmp_path), "--resume", "--commit", "0123456789ab")
        assert 2 == run_bench(*arguments)
        assert "has another machine" in capsys.readouterr().err

    @pytest.mark.parametrize("arguments", [["speeed"], ["--only", "clips"]])
    def test_an_unknown_name_is_an_error_that_lists_the_names(self, arguments, capsys):
        assert 2 == run_bench(*arguments)
        assert re.search("choose from .*(suite|clips_are_exact)", capsys.readouterr().err)

    @pytest.mark.parametrize("status", ["failed", "error", "timeout", "not run"])
    def test_a_part_without_a_right_result_fails_the_check(self, status):
        assert has_failed({"status": status})

    @pytest.mark.parametrize("status", ["passed", "skipped", "review", "omitted"])
    def test_a_part_that_could_not_fail_does_not(self, status):
        assert not has_failed({"status": status})


class TestText:
    def test_failures_and_skips_are_listed_with_their_reasons(self):
        text = report.make_text(make_result("passed", "failed", "skipped"))
        assert "check: 1 passed, 1 failed, 1 skipped of 3" in text
        assert re.search(r"^failed +1\.0 s  part_1  reason$", text, re.M)

    def test_a_row_has_its_ratio(self):
        result = make_result("passed", group="speed")
        result["parts"]["part_0"]["facts"] = {"rows": [make_row("a step", 3.0, 2.0, 1.0)]}
        assert "a step: 3 ms, bare 2 ms, ratio 1.5000" in report.make_text(result)


class TestDocumentation:
    def test_the_readme_agrees_with_the_results(self):
        assert README == report.fill_readme(README, report.load_results())

    def test_without_a_result_the_readme_states_that_gpus_were_not_run(self):
        text = report.fill_readme(report.fill_readme(README, [make_result("passed")]), [])
        assert "not yet run on GPUs.** Everything here" in " ".join(text.replace("> ", "").split())
        assert "on a real GPU were [not run](docs/RUN_ON_CUDA.md)." in text
        assert "- You need proof on GPUs today.\n" in text

    def test_a_result_is_stated_with_date_gpu_torch_and_the_passed_part(self):
        text = report.fill_readme(README, [make_result("passed", "passed", "failed")])
        status = " ".join(text.replace("\n> ", "\n").split())
        gpu = "2026-12-01, H100 80GB HBM3, torch 2.11.0+cu130"
        assert f"{gpu}: 2 of 3 passed, 1 failed.**" in status
        assert "not yet run" not in status
        assert len(text.split()) <= 900
        assert text == report.fill_readme(text, [make_result("passed", "passed", "failed")])

    @pytest.mark.parametrize(
        ("status", "named"), [("passed", ": NVLink, Xid"), ("failed", ": several GPUs, NVLink")]
    )
    def test_several_gpus_count_only_if_their_part_passed(self, status, named):
        result = make_result(gpus=["NVIDIA H100 80GB HBM3"] * 8)
        result["parts"]["nccl_ranks_agree"] = {"group": "check", "status": status, "why": ""}
        text = report.fill_readme(README, [result])
        assert f"[Not run](docs/RUN_ON_CUDA.md#limits){named}" in text
        assert "2026-12-01, 8 x H100 80GB HBM3, torch" in " ".join(text.split())

    def test_a_measurement_is_no_claim(self):
        assert (0, 0) == report.count_claims(make_result("passed", group="speed"))

    def test_a_result_without_a_gpu_changes_nothing(self, tmp_path):
        (tmp_path / "cpu.json").write_text(json.dumps(make_result("passed", gpus=())))
        assert [] == report.load_results(tmp_path)

    def test_the_latest_result_comes_first(self, tmp_path):
        for name, date in (("a", "2026-11-02"), ("b", "2026-12-03"), ("c", "2026-12-01")):
            (tmp_path / f"{name}.json").write_text(json.dumps(make_result(date=date)))
        dates = [result["date"] for result in report.load_results(tmp_path)]
        assert ["2026-12-03", "2026-12-01", "2026-11-02"] == dates

    def test_a_changed_sentence_in_the_readme_is_an_error(self):
        with pytest.raises(ValueError, match="expected 1"):
            report.fill_readme(README.replace("You need proof", "You want proof"), [])

    def test_the_table_names_what_did_not_pass(self):
        table = report.make_results([make_result("passed", "skipped", "timeout")])
        assert "| 1 of 3 | part_1 (skipped), part_2 (timeout) |" in table

    def test_missed_goals_are_named_and_failed_parts_have_no_figures(self):
        result = make_result("passed", "failed", group="speed")
        for name, part in result["parts"].items():
            part["facts"] = {"rows": [make_row(f"row of {name}", 3.0, 2.0, 1.003)]}
        text = report.make_figures([result])
        assert "Missed: row of part_0." in text
        assert "row of part_1" not in text

    def test_a_section_is_replaced_and_the_others_stay(self):
        page = "# Page\n\n## gpu\n\nold\n\n## other\n\ntext\n"
        assert page.replace("old", "new") == report.fill_section(page, "gpu", "new")
        assert "# Page\n\n## gpu\n\nnew\n" == report.fill_section("# Page\n", "gpu", "new")


class TestAgent:
    READING = Reading("GPU-1", 80 * 2**30, 400.0, 1.5e9, 2.6e9)

    def row(self, **changes):
        return {**self.READING._asdict(), **changes}

    def test_the_csv_of_nvidia_smi_is_read_in_base_units(self):
        (reading,) = parse_readings("GPU-1, 81920, 400.00, 1500, 2600\n")
        assert self.READING == reading

    def test_values_that_nvidia_smi_does_not_have_are_not_compared(self):
        readings = list(parse_readings("GPU-1, 81920, [N/A], 1500, 2600\n"))
        assert [] == list(compare_samples({"GPU-1": [self.row(power_watts=None)]}, readings))

    def test_power_may_differ_by_a_quarter_and_the_memory_by_nothing(self):
        rows = {"GPU-1": [self.row(power_watts=480.0)]}
        assert [] == list(compare_samples(rows, [self.READING]))
        rows = {"GPU-1": [self.row(power_watts=520.0, memory_total_bytes=79 * 2**30)]}
        differences = list(compare_samples(rows, [self.READING]))
        assert ["memory_total_bytes", "power_watts"] == [d.partition(":")[0] for d in differences]

    def test_a_gpu_that_only_one_of_them_lists_is_a_difference(self):
        differences = list(compare_samples({"GPU-2": [self.row()]}, [self.READING]))
        assert 2 == len(differences)


def test_a_junit_report_is_counted():
    text = """<testsuites><testsuite>
    <testcase classname="a" name="one"/>
    <testcase classname="a" name="two"><skipped message="no GPU"/></testcase>
    <testcase classname="b" name="three"><failure message="line 1&#10;line 2"/></testcase>
    </testsuite></testsuites>"""
    counts = parse_junit(text)
    assert (1, 1, ("b::three: line 1",)) == counts


class TestWheels:
    def test_everything_but_torch_and_numpy_is_collected(self):
        packages = find_packages(["alembic", "cryptography", "torch"], "3.12")
        assert {"alembic", "sqlalchemy", "mako", "markupsafe", "cryptography", "cffi"} <= set(
            packages
        )
        assert not {"torch", "numpy"} & set(packages)

    def test_the_lines_that_install_them_are_in_the_guide(self):
        page = (ROOT / "docs" / "RUN_ON_CUDA.md").read_text()
        lines = describe_install("build/gpu-wheels", "build/gpu-site").replace("\\\n    ", "")
        for line in lines.splitlines():
            assert f"$ {line}\n" in page

    def test_the_torch_that_was_seen_is_between_those_that_are_tested(self):
        latest = re.search(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), re.M)
        oldest = re.search(r"^OLDEST_TORCH := (.*)$", (ROOT / "Makefile").read_text(), re.M)
        assert latest is not None and oldest is not None
        versions = [
            [int(n) for n in text.split(".")[:2]] for text in (oldest[1], "2.11", latest[1])
        ]
        assert sorted(versions) == versions


class TestDoctor:
    def test_without_the_benchmarks_it_names_the_way(self):
        with pytest.raises(UsageError) as caught:
            run_gpu_check(lambda module: module != "vitals_bench")
        assert "make gpu-check" in str(caught.value.hint)

    def test_without_torch_it_names_the_extra(self):
        with pytest.raises(UsageError) as caught:
            run_gpu_check(lambda module: module != "torch")
        assert "trainvitals[torch]" in str(caught.value.hint)

    def test_the_help_names_the_file(self, capsys):
        with pytest.raises(SystemExit):
            vitals(["doctor", "--help"])
        assert "--gpu-check" in capsys.readouterr().out
