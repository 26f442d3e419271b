"""Notebooks: a cell that was interrupted is run again, and a kernel that is gone reads as ended.

``TestCells`` emulates a kernel in a process of its own: cells are compiled one by one into one
namespace, after an error ``sys.last_value`` stays, and ``sys.ps1`` tells that a person types. The
last test starts a real ipykernel, where jupyter_client is installed.
"""

import json
import os
import signal
import sys
import time

import pytest

from tests.house.pages import ROOT, VITALS
from tests.support.forked import COMMANDS, TRAINING

SETUP = """
import os, sys, torch, trainvitals

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


def train(monitor, steps, interrupted_at=None):
    for step in range(steps):
        if step == interrupted_at:
            raise KeyboardInterrupt
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        monitor.step(loss)
"""
KERNEL = """
import json, sys

sys.ps1 = "In : "
names = {"__name__": "__main__"}
for source in json.loads(sys.stdin.read()):
    try:
        exec(compile(source, "<cell>", "exec"), names)
    except BaseException as error:
        sys.last_value = error
        print("cell:", type(error).__name__, error)
"""


def environment(folder, agent="off"):
    (folder / "shm").mkdir(exist_ok=True)
    own = {"VITALS_SHM": str(folder / "shm"), "VITALS_DIR": str(folder / "runs")}
    return os.environ | own | {"VITALS_AGENT": agent, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


def states(folder):
    """Return the state of each run, by its name."""
    command = [*VITALS, "runs", str(folder / "runs"), "--format", "csv"]
    done = COMMANDS.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    head, *rows = (line.split(",") for line in done.stdout.splitlines())
    name, state = head.index("name"), head.index("state")
    return {row[name]: row[state] for row in rows}


CELLS = [
    "with trainvitals.watch(model, optimizer, run='with') as m: train(m, 5, 3)",
    "with trainvitals.watch(model, optimizer, run='with again') as m: train(m, 5)",
    "m = trainvitals.watch(model, optimizer, run='bare'); train(m, 5, 3)",
    "m = trainvitals.watch(model, optimizer, run='bare again'); train(m, 5); m.close()",
    "a = trainvitals.attach(model, optimizer, run='attached')",
    "a = trainvitals.attach(model, optimizer, run='attached again')",
    "a.close()",
    """
import asyncio

async def main():
    with trainvitals.watch(model, optimizer, run='in a loop') as m:
        train(m, 5)
    print('event loop', m.swallowed_errors)

asyncio.run(main())
""",
    "m = trainvitals.watch(model, optimizer, run='before reload'); train(m, 3)",
    """
import importlib

for name in sorted(sys.modules):
    if name.partition('.')[0] in ('trainer_hooks', 'trainvitals'):
        importlib.reload(sys.modules[name])
""",
    "train(m, 3); print('reloaded', m.step_index, m.swallowed_errors); m.close()",
    "m = trainvitals.watch(model, optimizer, run='after reload'); train(m, 2)",
    """
pid = os.fork()
if not pid:
    train(m, 2)
    m.close()
    os._exit(0)
os.waitpid(pid, 0)
train(m, 2)
print('forked', m.step_index, m.swallowed_errors)
m.close()
""",
    "unknown",
    "m = trainvitals.watch(model, optimizer, run='left open'); train(m, 5)",
]


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    """Run all cells in one process; return what it printed, and the state of each run."""
    folder = tmp_path_factory.mktemp("notebook")
    done = TRAINING.run(
        [sys.executable, "-c", KERNEL],
        input=json.dumps([SETUP, *CELLS]),
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    command = [*VITALS, "agent", "--dir", str(folder / "runs"), "--once"]
    COMMANDS.run(command, env=environment(folder), cwd=ROOT, check=True, capture_output=True)
    return done.stdout + done.stderr, states(folder)


class TestCells:
    def test_an_interrupted_cell_is_run_again(self, session):
        printed, by_name = session
        assert 2 == printed.count("cell: KeyboardInterrupt")
        for name in ("with", "bare"):
            assert ("interrupted", "finished") == (by_name[name], by_name[f"{name} again"])

    def test_a_monitor_of_an_earlier_cell_gives_way_and_it_is_said(self, session):
        printed, by_name = session
        assert 2 == printed.count("closed the earlier monitor of this optimizer")
        assert "interrupted" == by_name["attached"]
        assert "finished" == by_name["attached again"]

    def test_an_error_of_an_earlier_cell_is_not_how_the_run_ended(self, session):
        printed, by_name = session
        assert "cell: NameError" in printed
        assert "finished" == by_name["left open"]

    def test_a_running_event_loop_modules_loaded_anew_and_a_fork_change_nothing(self, session):
        printed, by_name = session
        assert "event loop {}" in printed
        assert "reloaded 6 {}" in printed
        assert "forked 4 {}" in printed
        for name in ("in a loop", "before reload", "after reload"):
            assert "finished" == by_name[name]


def test_a_program_that_watches_twice_is_refused_all_the_same(tmp_path):
    twice = "a = trainvitals.watch(model, optimizer); b = trainvitals.watch(model, optimizer)"
    done = TRAINING.run(
        [sys.executable, "-c", f"{SETUP}\n{twice}"],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert "the optimizer is already guarded" in done.stderr


def test_a_real_kernel_is_interrupted_runs_the_cell_again_and_reads_as_lost_once_killed(
    tmp_path, monkeypatch
):
    pytest.importorskip("ipykernel")
    jupyter_client = pytest.importorskip("jupyter_client")
    for name, value in environment(tmp_path, agent="auto").items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(ROOT)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    manager = jupyter_client.KernelManager()
    manager.kernel_spec.argv = command
    manager.start_kernel()
    client = manager.client()
    try:
        client.start_channels()
        client.wait_for_ready(timeout=60)
        client.execute_interactive(SETUP, timeout=60, output_hook=lambda _: None)
        cell = "m = trainvitals.watch(model, optimizer, run='{}')\ntrain(m, {})\nprint('trained')"
        client.execute(cell.format("first", 10**9))
        wait_for(lambda: states(tmp_path) if (tmp_path / "runs").exists() else {}, {"first"})
        manager.interrupt_kernel()
        # What was sent before the interrupted cell ended is aborted.
        again = cell.format("second", 5)
        wait_for(lambda: client.execute(again, reply=True, timeout=60)["content"]["status"], "ok")
        wait_for(lambda: states(tmp_path).get("first"), "interrupted")
        os.killpg(os.getpgid(manager.provisioner.pid), signal.SIGKILL)
        wait_for(lambda: states(tmp_path).get("second"), "lost")
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def wait_for(read, expected):
    """Wait until ``read`` gives what is expected; of a set, until it is among the keys."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        value = read()
        if value == expected or (isinstance(expected, set) and value and expected <= value.keys()):
            return
        time.sleep(0.3)
    raise AssertionError(f"{value!r} is not {expected!r}")
