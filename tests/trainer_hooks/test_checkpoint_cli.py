"""``vitals checkpoints``: what a person sees, proves, promotes and sets aside."""

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests.trainer_hooks.faulty_disk import relaunch, save, states
from tests.trainer_hooks.saving import Run, spoil
from trainvitals.cli import main
from trainvitals.identity import new_run_id
from trainvitals.io.rundir import RunDir
from trainvitals.records import RunInfo

ROOT = Path(__file__).parents[2]
OLD, NEW = "step-00000010-7", "step-00000020-7"
LATER = "a running job of this run picks it up at its next start"


@pytest.fixture
def path(tmp_path):
    """Return a folder with a healthy checkpoint and a newer one that is verified."""
    folder = relaunch(tmp_path / "checkpoints")
    save(folder, 10, state="healthy")
    save(folder, 20)
    return folder.path


def vitals(capsys, *arguments):
    """Return exit code, stdout and stderr of the command."""
    try:
        code = main.main(["checkpoints", *map(str, arguments)])
    except SystemExit as exit_:
        code = exit_.code
    captured = capsys.readouterr()
    return code or 0, captured.out, captured.err


def listed(capsys, *arguments):
    code, out, err = vitals(capsys, "list", *arguments, "--format", "json")
    assert (0, "") == (code, err)
    return {one["id"]: one for one in json.loads(out)}


# ----------------------------------------------------------------------------------------- list


def test_all_states_are_listed_with_their_reasons(path, capsys):
    folder = relaunch(path, keep=2)
    save(folder, 30)
    save(folder, 40)
    folder.quarantine_damaged("step-00000030-7", "the disk lied")
    folder.mark_best(NEW, "validation_loss", 1.25)
    save(folder, 50)
    folder.rotate()
    save(folder, 60)
    folder.rotate()
    folder.make_room("step-00000070-7", 10)
    found = listed(capsys, path)
    expected = {
        OLD: "healthy",
        NEW: "verified",
        "step-00000030-7": "bad",
        "step-00000040-7": "retired",
        "step-00000050-7": "retired",
        "step-00000060-7": "verified",
        "step-00000070-7": "candidate",
    }
    assert expected == {name: one["state"] for name, one in found.items()}
    assert "the disk lied" == found["step-00000030-7"]["reason"]
    assert "made room" == found["step-00000040-7"]["reason"]
    assert 128 == found["step-00000040-7"]["num_bytes"]
    assert {"metric": "validation_loss", "value": 1.25, "number": 1} == found[NEW]["best"]
    code, out, _ = vitals(capsys, "list", path)
    assert 0 == code
    assert "best validation_loss 1.25" in next(line for line in out.splitlines() if NEW in line)


def test_a_damaged_manifest_is_listed_with_what_is_wrong(path, capsys):
    (path / NEW / "manifest.json").write_text("{")
    assert "manifest.json cannot be read" in listed(capsys, path)[NEW]["reason"]


def test_csv_is_for_programs(path, capsys):
    _, out, _ = vitals(capsys, "list", path, "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [(OLD, "10", "healthy"), (NEW, "20", "verified")] == [
        (row["checkpoint"], row["step"], row["state"]) for row in rows
    ]


def test_looking_changes_nothing(path, capsys):
    before = sorted((p, p.stat().st_mtime_ns) for p in path.rglob("*"))
    (path / ".partial-run-step-00000030-7").mkdir()  # a job may be writing now
    vitals(capsys, "list", path)
    vitals(capsys, "verify", path)
    (path / ".partial-run-step-00000030-7").rmdir()
    assert before == sorted((p, p.stat().st_mtime_ns) for p in path.rglob("*"))


# ------------------------------------------------------------------------------ finding the run


def make_run(folder, number, *, saved=True):
    run = RunDir.create(folder, new_run_id(number * 1_000_000_000_000))
    run.write_info(RunInfo(name="my-run"))
    if saved:
        save(relaunch(run.path / "checkpoints", run_id=run.run_id), number * 10, run_id=run.run_id)
    return run


@pytest.mark.parametrize(
    "words",
    [
        lambda run: (run.path,),
        lambda run: (run.path / "checkpoints",),
        lambda run: (run.path.parent,),
        lambda run: (run.run_id, "--dir", run.path.parent),
        lambda run: (run.run_id[:8].lower(), "--dir", run.path.parent),
        lambda run: ("my-run", "--dir", run.path.parent),
    ],
    ids=[
        "its folder",
        "its checkpoints",
        "the folder of runs",
        "its id",
        "a beginning",
        "its name",
    ],
)
def test_a_run_is_found_as_resume_finds_it(tmp_path, capsys, words):
    run = make_run(tmp_path, 1)
    make_run(tmp_path, 2, saved=False)
    assert ["step-00000010-7"] == list(listed(capsys, *words(run)))


def test_what_is_not_clear_or_not_there_is_wrong_usage_with_a_way_out(tmp_path, capsys):
    first, second = make_run(tmp_path / "two", 1), make_run(tmp_path / "two", 2)
    code, _, err = vitals(capsys, "list", "my-run", "--dir", tmp_path / "two")
    assert 2 == code
    assert first.run_id in err and second.run_id in err
    make_run(tmp_path / "none", 1, saved=False)
    code, _, err = vitals(capsys, "list", "my-run", "--dir", tmp_path / "none")
    assert (2, True) == (code, "watch(..., checkpoints=FOLDER)" in err)
    assert 2 == vitals(capsys, "list", "no-such", "--dir", tmp_path / "two")[0]
    assert 2 == vitals(capsys, "promote", first.path, "../../etc")[0]
    code, _, err = vitals(capsys, "quarantine", first.path, "step-00000077-7")
    assert (2, True) == (code, "there are: step-00000010-7" in err)


def test_two_runs_in_one_folder_are_both_listed_and_each_acted_on(tmp_path, capsys):
    save(relaunch(tmp_path, run_id="one"), 1, run_id="one")
    save(relaunch(tmp_path, run_id="two"), 2, run_id="two")
    found = listed(capsys, tmp_path)
    assert ["one", "two"] == [one["run_id"] for one in found.values()]
    for name in found:
        assert 0 == vitals(capsys, "promote", tmp_path, name)[0]
    assert ["healthy"] * 2 == [one["state"] for one in listed(capsys, tmp_path).values()]


# --------------------------------------------------------------------------------------- verify


def verified(capsys, *arguments):
    code, out, err = vitals(capsys, "verify", *arguments, "--format", "json")
    assert "" == err
    return code, {one["checkpoint"]: one for one in json.loads(out)}


def test_sound_checkpoints_are_said_to_be(tmp_path, capsys):
    run = Run(tmp_path)
    names = [run.save(), run.save()]
    code, found = verified(capsys, tmp_path)
    assert 0 == code
    assert dict.fromkeys(names, ("ok", "ok")) == {
        name: (one["checksums"], one["finite"]) for name, one in found.items()
    }


def test_a_flipped_bit_fails_the_check_and_only_there(path, tmp_path, capsys):
    raw = bytearray((path / NEW / "__0_0.distcp").read_bytes())
    raw[5] ^= 1
    (path / NEW / "__0_0.distcp").write_bytes(raw)
    code, found = verified(capsys, path, NEW)
    assert (1, [NEW], "wrong") == (code, list(found), found[NEW]["checksums"])
    assert "the manifest says" in found[NEW]["note"]
    assert (path / NEW).is_dir(), "verify sets nothing aside"


def test_weights_that_are_not_finite_fail_the_check_though_their_checksums_hold(tmp_path, capsys):
    run = Run(tmp_path)
    name = run.save()
    spoil(tmp_path / name)
    code, found = verified(capsys, tmp_path)
    assert (1, "ok", "wrong") == (code, found[name]["checksums"], found[name]["finite"])
    assert "not finite: model." in found[name]["note"]


def test_one_of_a_newer_vitals_is_not_called_damaged(path, capsys):
    file = path / NEW / "manifest.json"
    content = msgspec.json.decode(file.read_bytes())
    file.write_bytes(msgspec.json.encode(content | {"format_version": 99, "step": {"new": 1}}))
    code, found = verified(capsys, path, NEW)
    assert (1, "unknown") == (code, found[NEW]["checksums"])
    assert "pip install -U trainvitals" in found[NEW]["note"]


def test_one_that_others_may_change_is_proven_but_refused(tmp_path, capsys):
    name = Run(tmp_path).save(healthy=False)
    (tmp_path / name).chmod(0o777)
    code, found = verified(capsys, tmp_path)
    assert (0, "ok", "ok") == (code, found[name]["checksums"], found[name]["finite"])
    assert "other users can write there" in found[name]["note"]
    code, _, err = vitals(capsys, "promote", tmp_path, name)
    assert (1, True) == (code, f"chmod -R go-w {tmp_path / name}" in err)


# -------------------------------------------------------------------------- promote, quarantine


def test_a_verified_one_becomes_healthy_on_a_persons_word(path, capsys):
    code, out, _ = vitals(capsys, "promote", path, NEW)
    assert (0, f"{NEW} is now marked healthy; {LATER}\n") == (code, out)
    assert {OLD: "healthy", NEW: "healthy"} == states(relaunch(path))
    assert (0, f"{NEW} is already marked healthy\n") == vitals(capsys, "promote", path, NEW)[:2]


def test_a_damaged_one_cannot_be_promoted(path, capsys):
    os.truncate(path / NEW / "__0_0.distcp", 9)
    code, _, err = vitals(capsys, "promote", path, NEW)
    assert (1, True) == (code, "V220" in err)
    assert "verified" == states(relaunch(path))[NEW]


def test_a_person_sets_one_aside_and_is_told_what_is_left(path, capsys):
    code, out, _ = vitals(capsys, "quarantine", path, NEW, "--reason", "bad data")
    assert 0 == code
    assert f"the newest healthy one is {OLD}" in out
    assert LATER in out
    assert [OLD] == [ref.id for ref in relaunch(path).loadable_refs()]
    assert ("bad", "bad data") == (
        listed(capsys, path)[NEW]["state"],
        listed(capsys, path)[NEW]["reason"],
    )
    assert "no healthy one is left" in vitals(capsys, "quarantine", path, OLD)[1]
    assert 2 == vitals(capsys, "quarantine", path, OLD)[0]


# -------------------------------------------------------------------------------- without torch


BLOCKED = """
import json, sys
sys.modules["torch"] = None
from trainvitals.cli.main import main
for command in json.loads(sys.argv[1]):
    try:
        code = main(["checkpoints", *command])
    except SystemExit as exit_:
        code = exit_.code
    print("exit code", code or 0)
assert not [name for name in sys.modules if name.startswith("torch.")]
"""


def test_without_torch_all_works_and_verify_says_what_it_could_not_look_at(path):
    commands = [
        ["list", path],
        ["promote", path, NEW],
        ["quarantine", path, OLD],
        ["verify", path, "--format", "json"],
    ]
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, json.dumps(commands, default=str)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (0, "") == (done.returncode, done.stderr)
    shown, promoted, aside, verified, _ = done.stdout.split("exit code 0\n")
    assert NEW in shown
    assert f"{NEW} is now marked healthy; {LATER}\n" == promoted
    assert f"{OLD} is quarantined" in aside
    (result,) = json.loads(verified)
    assert ("ok", "unknown") == (result["checksums"], result["finite"])
    assert "torch is not installed" in result["note"]
