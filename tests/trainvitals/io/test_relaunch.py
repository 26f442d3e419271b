"""A restart of a launcher finds the run of its first start, and of no other launch."""

import os
import socket
import sys

import pytest

from trainvitals.identity import new_run_id
from trainvitals.io import relaunch
from trainvitals.io.relaunch import earlier_run, remember_run

RUN = new_run_id(1_763_000_000_000_000_000)
FIRST = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0"}
AGAIN = {**FIRST, "TORCHELASTIC_RESTART_COUNT": "1"}
JOB = {"SLURM_JOB_ID": "31", "SLURM_STEP_ID": "0"}
REQUEUED = {**JOB, "SLURM_RESTART_COUNT": "1"}


@pytest.fixture
def launched(tmp_path):
    remember_run(tmp_path, {**FIRST, **JOB}, RUN)
    return tmp_path


def test_a_restart_of_torchrun_goes_on_with_the_run(launched):
    assert RUN == earlier_run(launched, AGAIN)


def test_a_run_that_an_earlier_version_recorded_is_found(launched):
    (launched / f".launches-{os.geteuid()}").rename(launched / ".launches")
    assert RUN == earlier_run(launched, AGAIN)


def test_a_requeued_job_goes_on_with_the_run_although_torchrun_begins_anew(launched):
    assert RUN == earlier_run(launched, {**FIRST, **REQUEUED})


@pytest.mark.parametrize("environ", [FIRST, JOB, {}, {**AGAIN, "TORCHELASTIC_RUN_ID": "other"}])
def test_a_first_start_and_another_launch_begin_a_run_of_their_own(launched, environ):
    assert earlier_run(launched, environ) is None


def test_another_command_in_the_same_job_is_another_run(launched, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["evaluate.py"])
    assert earlier_run(launched, REQUEUED) is None


def test_a_second_launch_with_the_same_name_is_not_taken_for_a_restart(launched, monkeypatch):
    monkeypatch.setattr(relaunch, "_started", lambda pid: "another process of that id")
    assert earlier_run(launched, AGAIN) is None


def test_a_damaged_file_is_no_run(launched):
    for path in (launched / f".launches-{os.geteuid()}").iterdir():
        path.write_text("../elsewhere")
    assert earlier_run(launched, AGAIN) is None


def test_nothing_is_left_behind_without_a_launcher(tmp_path):
    remember_run(tmp_path, {}, RUN)
    assert [] == list(tmp_path.iterdir())


def test_each_run_of_a_script_that_trains_several_is_found_again(tmp_path):
    runs = ["0" * 25 + digit for digit in "123"]
    for nth, run_id in enumerate(runs):
        remember_run(tmp_path, FIRST, run_id, nth=nth)
    found = [earlier_run(tmp_path, AGAIN, nth=nth) for nth in range(4)]
    assert [*runs, None] == found


def test_a_restart_within_a_job_finds_the_run_although_rank_0_is_on_another_node(
    launched, monkeypatch
):
    monkeypatch.setattr(socket, "gethostname", lambda: "another node")
    assert RUN == earlier_run(launched, {**AGAIN, **JOB})


def test_tasks_that_train_each_for_itself_go_on_each_with_its_own_run(tmp_path):
    alone = {**JOB, "SLURM_STEP_NUM_TASKS": "2", "WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "1"}
    runs = ["0" * 25 + digit for digit in "12"]
    for task, run_id in enumerate(runs):
        remember_run(tmp_path, {**alone, "SLURM_PROCID": str(task)}, run_id)
    again = {**alone, "SLURM_RESTART_COUNT": "1"}
    found = [earlier_run(tmp_path, {**again, "SLURM_PROCID": str(task)}) for task in range(2)]
    assert runs == found


def test_a_training_over_all_tasks_is_found_by_whichever_holds_rank_0(tmp_path):
    over_all = {**JOB, "SLURM_STEP_NUM_TASKS": "4", "WORLD_SIZE": "32", "GROUP_WORLD_SIZE": "4"}
    remember_run(tmp_path, {**over_all, "SLURM_PROCID": "0"}, RUN)
    again = {**over_all, "SLURM_PROCID": "3", "SLURM_RESTART_COUNT": "1"}
    assert RUN == earlier_run(tmp_path, again)


def test_of_many_launches_the_oldest_are_forgotten(tmp_path, monkeypatch):
    monkeypatch.setattr(relaunch, "MAX_LAUNCHES", 6)
    for job in range(8):
        environ = {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": "0"}
        remember_run(tmp_path, environ, "0" * 25 + str(job))
        for age, path in enumerate((tmp_path / f".launches-{os.geteuid()}").iterdir()):
            if path.read_text().strip().endswith(str(job)):
                os.utime(path, (1_000_000 + job, 1_000_000 + job))
            assert age < 6
    found = [
        earlier_run(tmp_path, {**REQUEUED, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": "0"})
        for job in range(8)
    ]
    assert [None] * 4 + ["0" * 25 + digit for digit in "4567"] == found
