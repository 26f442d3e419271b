"""`vitals replay` over logs of other people's runs; a stored run is in test_cli_control.py."""

import json
import math
import random
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests.support.control import run_cli
from trainvitals.io.rundir import RunDir

STORM = [2.0 + 1.0 / (n + 1) for n in range(150)] + ["nan"] * 34 + [2.0] * 60


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A log with a storm, in a folder with nothing else; no settings but the defaults."""
    for name in ("VITALS_CONFIG", "VITALS_DIR"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "train.csv"
    lines = [f"{step},{loss},1.0" for step, loss in enumerate(STORM)]
    path.write_text("\n".join(["step,loss,grad_norm", *lines]))
    return path


def document_of(said: str) -> dict[str, list[dict[str, object]]]:
    return json.loads(said)


def test_a_log_prints_findings_and_decisions_as_json_and_the_rest_on_stderr(log: Path, capsys):
    assert 0 == run_cli("replay", str(log), "--format", "json")
    said = capsys.readouterr()
    document = document_of(said.out)
    assert {"findings", "decisions", "questions"} == set(document)
    assert list(range(150, 184)) == [f["row"] for f in document["findings"]]
    assert {"row", "step", "kind", "level", "reason"} == set(document["findings"][0])
    assert [*[(row, "skip_step") for row in range(150, 181)], (181, "rollback")] == [
        (d["row"], d["action"]) for d in document["decisions"]
    ][:32]
    assert "train.csv: CSV, 244 records, steps 0 to 243" in said.err
    assert "a healthy checkpoint assumed every 100 steps" in said.err
    assert "34 decisions: 33 skip_step, 1 rollback" in said.err


def test_a_log_needs_nothing_but_the_base_installation(log: Path):
    heavy = ("sqlalchemy", "fastapi", "uvicorn", "tensorboard", "wandb", "torch")
    program = f"""
import sys
sys.modules.update(dict.fromkeys({heavy}))
from trainvitals.cli.main import main
main(["replay", {str(log)!r}])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert "decision rollback" in done.stdout, done.stderr


def test_what_a_loss_scaler_skipped_is_no_decision_where_the_log_shows_its_scale(
    tmp_path: Path, capsys
):
    path = tmp_path / "amp.csv"
    rows = [[n, 2.0, "inf" if n in (60, 80) else 1.0, 1024 if n < 61 else 512] for n in range(100)]
    lines = [",".join(map(str, row)) for row in rows]
    path.write_text("\n".join(["step,loss,grad_norm,loss_scale", *lines]))
    assert 0 == run_cli("replay", str(path), "--format", "json")
    document = document_of(capsys.readouterr().out)
    # At step 60 the scale fell; at step 80 it did not, and nobody but us would have skipped it.
    assert [(80, "skip_step")] == [(d["row"], d["action"]) for d in document["decisions"]]


def test_the_table_says_what_goes_on_in_one_line(log: Path, capsys):
    assert 0 == run_cli("replay", str(log))
    lines = capsys.readouterr().out.splitlines()
    assert ["ROW", "STEP", "WHAT", "PROBE", "REASON"] == lines[0].split()
    (finding,) = [line for line in lines if "finding nonfinite" in line]
    assert finding.endswith("loss is nan (34 up to step 183)")
    (rollback,) = [line for line in lines if "decision rollback" in line]
    assert "rollback to step 100 (assumed-000100)" in rollback


def test_a_log_where_nothing_is_found_prints_nothing_and_says_so(tmp_path: Path, capsys):
    path = tmp_path / "quiet.csv"
    path.write_text("step,loss\n" + "".join(f"{n},2.0\n" for n in range(50)))
    assert 0 == run_cli("replay", str(path))
    said = capsys.readouterr()
    assert "" == said.out
    assert "0 actionable findings, 0 advisory; 0 decisions" in said.err


@pytest.mark.parametrize(
    ("mode", "actions"),
    [
        ("guard", {"skip_step"}),
        ("heal", {"skip_step", "rollback"}),
        ("observe", {"skip_step", "rollback"}),
    ],
)
def test_the_mode_is_how_far_the_ladder_climbs(log: Path, capsys, mode, actions):
    assert 0 == run_cli("replay", str(log), "--mode", mode, "--format", "json")
    document = document_of(capsys.readouterr().out)
    assert actions == {d["action"] for d in document["decisions"]}
    assert {mode} == {d["mode"] for d in document["decisions"]}


def raised(log: Path, *, norm: float) -> Path:
    """Write a log whose loss and norm are high from step 150 on for six steps."""
    rows = [(n, 90.0, norm) if 150 <= n < 156 else (n, 2.0, 1.0) for n in range(200)]
    rows[:20] = [(n, 3.0, 1.0) for n in range(20)]
    log.write_text("step,loss,grad_norm\n" + "".join(f"{n},{x},{g}\n" for n, x, g in rows))
    return log


WITHHELD = (150, 151, 153, 154)
"""Two in a row, then one is applied."""


@pytest.mark.parametrize(
    ("arguments", "norm", "rows"),
    [
        ((), 1.0, WITHHELD),
        (("--no-clip",), 1.0, WITHHELD),
        (("--loss-kind", "rl"), 1.0, ()),
        (("--loss-kind", "adversarial"), 600.0, WITHHELD),
        (("--expect", "20", "--expect", "150"), 600.0, ()),
    ],
)
def test_what_a_log_does_not_tell_of_its_loop_is_told_by_its_owner(
    log: Path, capsys, arguments, norm, rows
):
    assert 0 == run_cli("replay", str(raised(log, norm=norm)), *arguments, "--format", "json")
    said = capsys.readouterr()
    assert list(rows) == [d["row"] for d in document_of(said.out)["decisions"]]
    assert f"assumed {'not ' if '--no-clip' in arguments else ''}to clip" in said.err


def test_the_kind_of_the_loss_and_announced_changes_are_said(log: Path, capsys):
    assert 0 == run_cli("replay", str(log), "--loss-kind", "rl", "--expect", "7", "--expect", "90")
    said = capsys.readouterr().err
    assert "its loss is reinforcement learning's, which may rise" in said
    assert "announced before steps 7, 90" in said


# ------------------------------------------------------------------- what a log has data for


LENGTH = 600


def written(path: Path, steps=range(LENGTH), **columns) -> Path:
    """Write a healthy log; ``columns`` are functions of the row that add to it, or replace."""
    noise = random.Random(1)
    made = {
        "loss": lambda row: 2.0 + 3.0 * math.exp(-steps[row] / 100) + noise.gauss(0, 0.02),
        "grad_norm": lambda row: 1.0 + noise.gauss(0, 0.1),
        **columns,
    }
    lines = [f"{step},{','.join(str(f(row)) for f in made.values())}" for row, step in
             enumerate(steps)]  # fmt: skip
    path.write_text("\n".join([f"step,{','.join(made)}", *lines]))
    return path


@pytest.mark.parametrize(
    ("columns", "told"),
    [
        ({}, []),
        ({"lr": lambda row: 3e-4 * (10 if row >= 300 else 1)}, [(300, "lr_jump")]),
        ({"loss_scale": lambda row: 65536 / 2 ** max(0, min(row - 299, 9))}, [(304, "loss_scale")]),
        ({"step_time": lambda row: 2.0 if row >= 300 else 1.0}, [(349, "throughput")]),
        ({"tokens_per_sec": lambda row: 5e4 if row >= 300 else 1e5}, [(339, "throughput")]),
        (
            {"step_time": lambda row: 1.0, "data_time": lambda row: 0.7 if row >= 300 else 0.01},
            [(349, "data_bound")],
        ),
        ({"grad_norm": lambda row: 900.0 if row in (300, 301) else 1.0 + row % 7 / 50},
         [(300, "spike"), (301, "grad_explosion"), (301, "spike")]),
    ],
)  # fmt: skip
def test_every_detector_that_a_log_has_data_for_sees_it(tmp_path: Path, capsys, columns, told):
    path = written(tmp_path / "log.csv", **columns)
    assert 0 == run_cli("replay", str(path), "--format", "json")
    findings = document_of(capsys.readouterr().out)["findings"]
    assert told == sorted((finding["step"], finding["kind"]) for finding in findings)


def infinite(*rows: int):
    return lambda row: "inf" if row in rows else 1.0 + row % 7 / 50


@pytest.mark.parametrize(
    ("columns", "skipped"),
    [
        ({"grad_norm": infinite(0, 1, 2, 200)}, []),
        ({"grad_norm": infinite(200),
          "loss_scale": lambda row: 1024 if row > 200 else 2048}, []),
        ({"grad_norm": infinite(200), "loss_scale": lambda row: 2048}, [200]),
        ({"grad_norm": infinite(*range(200, 208))}, [*range(200, 208)]),
        ({"grad_norm": infinite(200),
          "loss": lambda row: "nan" if row == 200 else 2.0}, [200]),
    ],
)  # fmt: skip
def test_overflows_of_a_scaler_are_told_from_a_faults_infinities(
    tmp_path: Path, capsys, columns, skipped
):
    path = written(tmp_path / "log.csv", **columns)
    assert 0 == run_cli("replay", str(path), "--format", "json")
    said = capsys.readouterr()
    assert skipped == [decision["step"] for decision in document_of(said.out)["decisions"]]
    assert ("treated as overflows of a loss scaler" in said.err) == (not skipped)


def test_steps_that_start_again_are_a_restart_and_its_forgotten_schedule_is_told(
    tmp_path: Path, capsys
):
    steps = [*range(400), *range(350, LENGTH)]
    rates = {"lr": lambda row: 3e-4 * (1.0 - (row if row < 400 else row - 400) / 600)}
    assert 0 == run_cli("replay", str(written(tmp_path / "log.csv", steps=steps)))
    said = capsys.readouterr()
    assert "the steps go back once: each is treated as a resumed run" in said.err
    assert "" == said.out
    forgotten = written(tmp_path / "forgotten.csv", steps=steps, **rates)
    assert 0 == run_cli("replay", str(forgotten), "--format", "json")
    (finding,) = document_of(capsys.readouterr().out)["findings"]
    assert (400, 350, "learning_rate") == (finding["row"], finding["step"], finding["kind"])


def test_of_each_action_it_is_said_whether_a_probe_could_have_kept_it_from_being_taken(
    tmp_path: Path, capsys
):
    lost = {"loss": lambda row: "nan" if 300 <= row < 340 else 2.0 + row % 7 / 50}
    path = written(tmp_path / "log.csv", **lost)
    assert 0 == run_cli("replay", str(path), "--format", "json")
    made = document_of(capsys.readouterr().out)["decisions"]
    assert {("skip_step", False), ("rollback", True)} == {
        (decision["action"], decision["could_be_ruled_out_by_probe"]) for decision in made
    }
    assert 0 == run_cli("replay", str(path))
    lines = capsys.readouterr().out.splitlines()
    words = {"decision skip_step": "not needed", "decision rollback": "could rule it out",
             "question nonfinite": "would be asked"}  # fmt: skip
    for what, probe in words.items():
        assert all(probe in line for line in lines if what in line), what
        assert any(what in line for line in lines), what


def test_settings_come_from_the_file_that_is_named(log: Path, tmp_path: Path, capsys):
    (tmp_path / "strict.toml").write_text("[ladder]\nnonfinite_in_a_row = 2\n")
    config = ("--config", str(tmp_path / "strict.toml"), "--format", "json")
    assert 0 == run_cli("replay", str(log), *config)
    document = document_of(capsys.readouterr().out)
    assert (151, "rollback") == (
        document["decisions"][1]["row"], document["decisions"][1]["action"],
    )  # fmt: skip
    (tmp_path / "strict.toml").write_text("[ladder]\nnonfinite_in_a_rox = 2\n")
    assert 2 == run_cli("replay", str(log), *config)
    assert "did you mean 'nonfinite_in_a_row'?" in capsys.readouterr().err


def test_the_plot_is_a_picture_with_a_mark_for_each_thing_said(log: Path, tmp_path: Path, capsys):
    picture = tmp_path / "seen.svg"
    assert 0 == run_cli("replay", str(log), "--plot", str(picture), "--format", "json")
    titles = [e.text for e in ElementTree.parse(picture).iter() if e.tag.endswith("title")]
    assert any(words and "rollback" in words for words in titles)
    assert any(words and words == "1 not finite" for words in titles)
    assert document_of(capsys.readouterr().out)["decisions"]


def test_a_stored_run_is_drawn_too(run_dir: RunDir, tmp_path: Path, capsys):
    picture = tmp_path / "run.svg"
    assert 0 == run_cli("replay", str(run_dir.path), "--plot", str(picture))
    assert "nonfinite" in picture.read_text()
    assert "all as recorded" in capsys.readouterr().err


def test_other_settings_over_a_stored_run_say_what_would_differ(run_dir: RunDir, tmp_path, capsys):
    (tmp_path / "other.toml").write_text("[outlier]\nwindow = 60\n")
    given = ("replay", str(run_dir.path), "--config", str(tmp_path / "other.toml"))
    assert 1 == run_cli(*given)
    assert "not as recorded" in capsys.readouterr().err


def test_a_name_still_means_a_stored_run_and_a_folder_of_runs_too(run_dir: RunDir, capsys):
    runs = run_dir.path.parent
    for given in ((str(runs),), ("--dir", str(runs)), (run_dir.path.name[:8], "--dir", str(runs))):
        assert 0 == run_cli("replay", *given), given
        assert "all as recorded" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("absent.csv",), "there is no file or folder absent.csv"),
        (("some/where",), "there is no file or folder some/where"),
        (("train.csv", "--plot", "x.png"), "the name must end in .svg"),
        (("train.csv", "--format", "csv"), "'csv' is not one of 'table', 'json'"),
        (("train.csv", "--loss", "objective"), "there is no such column"),
        (("train.csv", "--mode", "hope"), "'hope' is not one of"),
        (("--mode", "guard"), "--mode apply only to a log"),
        (("--loss-kind", "rl", "--no-clip"), "--loss-kind, --no-clip apply only to a log"),
        (("--expect", "5"), "--expect apply only to a log"),
        (("train.csv", "--loss-kind", "hope"), "'hope' is not one of"),
        (("--loss", "x", "--grad-norm", "y"), "--loss, --grad-norm apply only to a log"),
        (("void",), "void holds no log; looked for run directories of Vitals"),
        (("train.csv", "--config", "absent.toml"), "settings file absent.toml"),
    ],
)
def test_wrong_usage_says_what_and_exits_with_2(
    log: Path, monkeypatch: pytest.MonkeyPatch, capsys, arguments, words
):
    monkeypatch.chdir(log.parent)
    (log.parent / "void").mkdir()
    assert 2 == run_cli("replay", *arguments)
    assert words in " ".join(capsys.readouterr().err.split())


def test_a_picture_that_cannot_be_written_is_an_error(log: Path, tmp_path: Path, capsys):
    assert 1 == run_cli("replay", str(log), "--plot", str(tmp_path / "void" / "x.svg"))
    assert "cannot be written" in capsys.readouterr().err


def test_two_logs_in_one_folder_are_named(tmp_path: Path, capsys):
    for name in ("trainer_state.json", "run-a.wandb"):
        (tmp_path / name).write_text("{}")
    assert 2 == run_cli("replay", str(tmp_path))
    said = capsys.readouterr().err
    assert "holds 2 logs" in said
    assert "trainer_state.json" in said
    assert "run-a.wandb" in said


def test_what_a_log_has_of_odd_things_is_said(tmp_path: Path, capsys):
    path = tmp_path / "odd.csv"
    steps = [*range(0, 500, 10), *range(300, 600, 10), 590]
    path.write_text("step,loss\n" + "".join(f"{step},2.0\n" for step in steps))
    assert 0 == run_cli("replay", str(path))
    said = capsys.readouterr().err
    assert (
        "logged every 10 steps: windows, budgets and step counts in reasons count records" in said
    )
    assert "the steps go back once: each is treated as a resumed run" in said
    assert "1 record of the step before: judged too" in said


def test_a_log_with_the_newest_record_first_is_read_from_its_end(tmp_path: Path, capsys):
    path = tmp_path / "reversed.csv"
    path.write_text("step,loss\n" + "".join(f"{step},2.0\n" for step in range(300, 0, -1)))
    assert 0 == run_cli("replay", str(path))
    said = capsys.readouterr().err
    assert "steps 1 to 300" in said
    assert "Its newest record comes first: it was read from the end." in said
