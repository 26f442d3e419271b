"""`vitals drill` on real ranks."""

import json
import shutil
import sys
from pathlib import Path

import jsonschema
import psutil
import pytest

from docs import json_schema
from tests.support.cli import vitals
from vitals_plugins.lab.drill.cli import DrillResult, OverheadFigures
from vitals_plugins.lab.drill.faults import FAULTS
from vitals_plugins.lab.drill.judge import DrillRow
from vitals_plugins.lab.drill.receiver import local_receiver
from vitals_plugins.lab.drill.sandbox import has_mount_namespace

TORCHRUN = (
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node",
    "2",
    "loop.py",
)


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with a training script, as the user has it."""
    folder = tmp_path / "project"
    folder.mkdir()
    shutil.copy(Path(__file__).with_name("loop.py"), folder)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return folder


def drill(capsys, *arguments):
    code = vitals("drill", "--budget", "1500", "--format", "json", *arguments)
    return code, capsys.readouterr()


@pytest.mark.dist
def test_a_fault_is_injected_into_a_copy_and_nothing_is_left(project, capsys):
    code, (output, errors) = drill(capsys, "--only", "nan_gradient", "--", *TORCHRUN)
    assert 0 == code, errors
    result = json.loads(output)
    schema = json_schema.schema()
    schema = {**schema["commands"]["vitals drill"], "$defs": schema["$defs"]}
    jsonschema.Draft202012Validator(schema).validate(result)
    (row,) = result["rows"]
    assert ("nan_gradient", "kept", True) == (row["fault"], row["outcome"], row["is_named_right"])
    assert ("guard", 2) == (result["mode"], result["world_size"])
    assert result["overhead"]["watched_step_seconds"] > 0
    assert ["loop.py"] == [path.name for path in project.iterdir()]
    assert not [each for each in psutil.Process().children(recursive=True) if _is_of_drill(each)]


def _is_of_drill(process: psutil.Process) -> bool:
    return any("vitals-drill-" in word or "loop.py" in word for word in process.cmdline())


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", ["guard", "heal"])
def test_all_faults_are_kept_or_named_as_not_protected(project, capsys, tmp_path, mode):
    file = tmp_path / "receivers.toml"
    with local_receiver() as user:
        text = f'[[receivers]]\nname = "own"\nkind = "webhook"\nurl = "{user.url}"'
        file.write_text(text)
        file.chmod(0o600)
        words = ("--receivers", file, "--", *TORCHRUN, "--mode", mode)
        code, (output, errors) = drill(capsys, *words)
        runs = {alert.run_id for alert in user.alerts()}
    result = json.loads(output)
    outcomes = {row["fault"]: row["outcome"] for row in result["rows"]}
    names = ("nan_parameters", "bit_flip", "killed_rank", "forgotten_lr")
    unprotected = names if mode == "guard" else ()
    faults = [name for name in FAULTS if name != "full_disk" or has_mount_namespace()]
    expected = {name: "not protected" if name in unprotected else "kept" for name in faults}
    reasons = [row["reason"] for row in result["rows"] if row["outcome"] == "broken"]
    assert (expected, []) == (outcomes, reasons), errors
    assert 0 == code
    alerts = {row["fault"]: row["accepted_by"] for row in result["rows"] if row["alert"]}
    assert {name: ["own"] for name in alerts} == alerts
    assert "stopped_rank" in alerts
    assert all(run.startswith("DRILL-") for run in runs)


def test_a_program_that_fails_by_itself_is_no_broken_promise(project, capsys):
    (project / "loop.py").write_text("raise SystemExit('no data set')")
    code, (output, errors) = drill(capsys, "--", "python", "loop.py")
    assert 2 == code
    assert "no data set" in errors
    assert not output


def test_a_program_without_vitals_is_refused(project, capsys):
    (project / "loop.py").write_text("print('trained')")
    code, (_, errors) = drill(capsys, "--", "python", "loop.py")
    assert 2 == code
    assert "not watched by Vitals" in errors


def test_usage(project, capsys):
    code, (_, errors) = drill(capsys, "--only", "fire", "--", *TORCHRUN)
    assert (2, True) == (code, "no fault is named 'fire'" in errors)
    code, (_, errors) = drill(capsys, "--", "no-such-program")
    assert (2, True) == (code, "command not found" in errors)


def row(outcome):
    return DrillRow(fault="spike", outcome=outcome)


@pytest.mark.parametrize(
    ("outcomes", "ratio", "limit", "code"),
    [
        (["kept", "not protected"], 0.5, None, 0),
        (["kept"], 0.04, 0.05, 0),
        (["kept"], 0.06, 0.05, 1),
        (["kept", "not tested"], 0.0, None, 3),
        (["broken", "not tested"], 0.0, None, 1),
        (["kept"], None, 0.05, 3),
        (["kept"], None, None, 0),
    ],
)
def test_the_exit_code(outcomes, ratio, limit, code):
    overhead = None
    if ratio is not None:
        overhead = OverheadFigures(
            watched_step_seconds=1 + ratio, unwatched_step_seconds=1, ratio=ratio
        )
    rows = tuple(row(outcome) for outcome in outcomes)
    result = DrillResult(
        mode="guard", world_size=2, rows=rows, overhead=overhead, max_overhead=limit
    )
    assert code == result.exit_code
