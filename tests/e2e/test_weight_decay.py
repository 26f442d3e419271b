"""A real training whose weight decay jumps: its rows, and the commands that read them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cli import vitals
from tests.trainer_hooks.torchrun import wait_for_agents
from trainvitals.detect.fleet.optimizer import WeightDecayWatcher
from trainvitals.records import CHANGE_EXPECTED
from trainvitals.views import FindingsQuestion, StepQuestion
from vitals_collector.queries.open import open_folder

pytestmark = pytest.mark.dist

ANNOUNCED, ADDED, JUMP, STEPS = 30, 60, 100, 130
PROGRAM = f"""
import torch
import trainvitals

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model[2].parameters(), lr=1e-3, weight_decay=0.01, fused=True)
with trainvitals.watch(model, optimizer) as monitor:
    for step in range({STEPS}):
        if step == {ANNOUNCED}:
            monitor.expect("stronger decay", steps=5)
            optimizer.param_groups[0]["weight_decay"] = 0.1
        if step == {ADDED}:
            optimizer.add_param_group(dict(params=model[0].parameters(), weight_decay=1.0))
        if step == {JUMP}:
            optimizer.param_groups[0]["weight_decay"] = 30.0
        x = torch.randn(32, 4)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        monitor.step(loss, max_norm=1.0)
    assert monitor.swallowed_errors == {{}}, monitor.swallowed_errors
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the run directory of the training."""
    folder = tmp_path_factory.mktemp("decay")
    (folder / "shm").mkdir()
    clean = {key: value for key, value in os.environ.items() if not key.startswith("VITALS_")}
    places = {"VITALS_DIR": str(folder / "runs"), "VITALS_SHM": str(folder / "shm")}
    command = [sys.executable, "-c", PROGRAM]
    environ = clean | places | {"OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240)
    assert 0 == ran.returncode, ran.stderr
    wait_for_agents(folder / "runs")
    (run,) = (path for path in (folder / "runs").iterdir() if (path / "run.json").exists())
    return run


def test_rows_of_announced_changes_and_of_added_groups_are_marked(run: Path) -> None:
    marked = {}
    with open_folder(run) as opened:
        for step in (ANNOUNCED - 1, ANNOUNCED, ANNOUNCED + 5, ANNOUNCED + 6, ADDED, ADDED + 1):
            view = opened.reader.ask(StepQuestion(run_id=run.name, step=step))
            values = view.rows[0].values
            is_marked = bool(int(values["verdict"] or 0) & CHANGE_EXPECTED)
            marked[step] = (values["weight_decay"], is_marked)
    assert {
        ANNOUNCED - 1: (0.01, False),
        ANNOUNCED: (0.1, True),
        ANNOUNCED + 5: (0.1, True),
        ANNOUNCED + 6: (0.1, False),
        ADDED: (1.0, True),
        ADDED + 1: (1.0, False),
    } == marked


def test_only_the_unannounced_jump_is_one_finding(run: Path) -> None:
    with open_folder(run) as opened:
        page = opened.reader.ask(FindingsQuestion(run_id=run.name))
    found = [each.finding for each in page if each.finding.detector == WeightDecayWatcher.name]
    assert [(JUMP, "weight_decay", 30.0)] == [(f.step, f.cause, f.value) for f in found]


@pytest.mark.parametrize("command", [("why", JUMP), ("show",)])
def test_a_command_names_both_values(
    run: Path, command: tuple[object, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    name, *step = command
    assert 0 == vitals(name, run.name, *step, "--dir", run.parent)
    text = " ".join(capsys.readouterr().out.split())
    assert "weight decay jumped from 1 to 30 in one step: 30x its highest value so far, 1" in text
