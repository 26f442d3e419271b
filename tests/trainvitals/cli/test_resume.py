import pytest

from trainvitals.cli import main
from trainvitals.identity import new_run_id
from trainvitals.io.rundir import HaltMarker, RunDir
from trainvitals.records import RunInfo

REASON = "3 rollbacks for bad_data are spent"


def make_run(folder, *, name="my-run", halted=True, number=1):
    run = RunDir.create(folder, new_run_id(number * 1_000_000_000_000))
    run.write_info(RunInfo(name=name))
    if halted:
        run.write_halted(HaltMarker(reason=REASON, step=41, time_unix_ns=1_700_000_000 * 10**9))
    return run


def resume(capsys, *arguments):
    """Return exit code, stdout and stderr of the command."""
    try:
        code = main.main(["resume", *map(str, arguments)])
    except SystemExit as exit_:
        code = exit_.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize(
    "words",
    [
        lambda run: (run.path,),
        lambda run: (run.path.parent,),
        lambda run: (run.run_id, "--dir", run.path.parent),
        lambda run: (run.run_id[:8].lower(), "--dir", run.path.parent),
        lambda run: ("my-run", "--dir", run.path.parent),
    ],
    ids=["its folder", "the folder of runs", "its id", "the beginning of its id", "its name"],
)
def test_a_halted_run_may_go_on_once_a_person_was_told_why_it_stopped(tmp_path, capsys, words):
    run = make_run(tmp_path)
    code, out, err = resume(capsys, *words(run))
    assert (0, "") == (code, err)
    assert f"run {run.run_id} was stopped at step 41 on 2023-11-14 at 22:13:20 UTC: {REASON}" in out
    assert f"VITALS_RUN_ID={run.run_id}" in out
    assert run.halted() is None


def test_the_folder_of_runs_is_the_one_of_the_environment(tmp_path, capsys, monkeypatch):
    run = make_run(tmp_path)
    monkeypatch.setenv("VITALS_DIR", str(tmp_path))
    assert 0 == resume(capsys, "my-run")[0]
    assert run.halted() is None


def test_of_several_runs_of_one_name_the_halted_one_is_meant(tmp_path, capsys):
    make_run(tmp_path, halted=False, number=2)
    halted = make_run(tmp_path, number=1)
    assert 0 == resume(capsys, "my-run", "--dir", tmp_path)[0]
    assert halted.halted() is None


def test_a_run_with_a_damaged_marker_can_be_resumed(tmp_path, capsys):
    run = make_run(tmp_path)
    (run.path / "HALTED").write_text("{")
    code, out, _ = resume(capsys, run.path)
    assert 0 == code
    assert "damaged" in out
    assert run.halted() is None


@pytest.mark.parametrize(
    ("states", "words", "expected"),
    [
        ([False], ("my-run",), "is not halted"),
        ([], ("my-run",), "there is no run 'my-run' in"),
        ([True], ("another",), "there is no run 'another' in"),
        ([True], ("",), "there is no run '' in"),
        ([True, True], ("my-run",), "2 runs match and are halted"),
        ([False, False], ("my-run",), "none of the 2 matching runs"),
    ],
)
def test_what_cannot_be_resumed_is_said(tmp_path, capsys, states, words, expected):
    runs = [make_run(tmp_path, halted=h, number=i) for i, h in enumerate(states, start=1)]
    before = [run.halted() for run in runs]
    code, out, err = resume(capsys, *words, "--dir", tmp_path)
    assert (2, "") == (code, out)
    assert expected in err
    assert before == [run.halted() for run in runs]
