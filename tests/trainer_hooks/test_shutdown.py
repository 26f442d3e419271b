"""Real child processes: whichever way a loop ends, its last event says so, and nothing hangs."""

import os
import signal
import sys

import pytest

from tests.support.examples import one_in
from tests.support.forked import TRAINING
from trainvitals.io.journal import JournalReader, find_journals
from trainvitals.io.private import private_base
from trainvitals.records import RunEnded, decode_events

START = """
import os, signal, sys
from tests.support.watched import Loop

loop = Loop(mode="guard")
monitor = loop.monitor
def train(steps):
    for _ in range(steps):
        monitor.step(loop.forward())
train(5)
"""


def run(tmp_path, script, **keywords):
    """Run the script and return (exit code, how the run ended, stderr)."""
    (tmp_path / "shm").mkdir(exist_ok=True)
    environ = {
        **os.environ,
        "VITALS_SHM": str(tmp_path / "shm"),
        "VITALS_DIR": str(tmp_path / "runs"),
        "VITALS_AGENT": "off",
        "OMP_NUM_THREADS": "1",
    }
    done = TRAINING.run(
        [sys.executable, "-c", START + script],
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
        **keywords,
    )
    ended = []
    for ref in find_journals(private_base(environ)):
        reader = JournalReader(ref.directory)
        for batch in reader.read(max_rows=100_000):
            schema = batch.header.stream_schema
            if schema.stream == "events":
                rows = decode_events(schema, batch.rows)
                ended += [row.event for row in rows if isinstance(row.event, RunEnded)]
    return done.returncode, [(e.state, e.reason) for e in ended], done.stderr


@pytest.mark.parametrize(
    ("script", "code", "ended"),
    [
        ("", 0, ("finished", "")),
        pytest.param("del monitor, loop", 0, ("finished", ""), marks=pytest.mark.slow),
        pytest.param(
            "raise RuntimeError('boom')",
            1,
            ("failed", "RuntimeError: boom"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "with monitor: raise KeyError('a')",
            1,
            ("failed", "KeyError: 'a'"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "with monitor: raise KeyboardInterrupt",
            None,
            ("interrupted", "KeyboardInterrupt: "),
            marks=pytest.mark.slow,
        ),
        pytest.param("with monitor: sys.exit(0)", 0, ("finished", ""), marks=pytest.mark.slow),
    ],
)
def test_every_way_out_is_said_once(tmp_path, script, code, ended):
    found, said, errors = run(tmp_path, script)
    assert [ended] == said, errors
    assert code is None or code == found


def test_sigterm_ends_the_process_as_before_and_is_said(tmp_path):
    code, said, errors = run(tmp_path, "os.kill(os.getpid(), signal.SIGTERM)\ntrain(1000)")
    assert (-signal.SIGTERM, [("interrupted", "SIGTERM")]) == (code, said), errors


def test_sigterm_in_the_middle_of_a_write_waits_for_its_end(tmp_path):
    script = """
from trainvitals.io.journal import StreamWriter
whole = StreamWriter._append_rows
def cut(self, *args):
    os.kill(os.getpid(), signal.SIGTERM)  # the journal's lock is held here
    return whole(self, *args)
StreamWriter._append_rows = cut
train(1000)
"""
    code, said, errors = run(tmp_path, script)
    assert (-signal.SIGTERM, [("interrupted", "SIGTERM")]) == (code, said), errors


def test_a_handler_of_the_loop_s_own_is_called_and_the_loop_may_go_on(tmp_path):
    script = """
monitor.close()
seen = []
signal.signal(signal.SIGTERM, lambda *_: seen.append(1))
with Loop(mode="guard").monitor as monitor:
    os.kill(os.getpid(), signal.SIGTERM)
    train(3)
assert seen == [1]
os.kill(os.getpid(), signal.SIGTERM)
assert seen == [1, 1]
"""
    code, said, errors = run(tmp_path, script.replace("train(3)", "pass"))
    assert code == 0, errors
    assert sorted(said) == [("finished", ""), ("interrupted", "SIGTERM")]


INTERRUPTED = """
monitor.close()
from pathlib import Path
from tests.support.inside import store_of
from trainer_hooks import CheckpointSettings
settings = CheckpointSettings(
    directory=Path(os.environ["VITALS_DIR"]) / "checkpoints", healthy_after=20, save_every=40
)
loop = Loop(mode="heal", checkpoints=settings)
monitor = loop.monitor
def interrupt(in_block):
    if not in_block:
        raise KeyboardInterrupt
    with monitor:
        raise KeyboardInterrupt
"""


@pytest.mark.parametrize("in_block", one_in(2, [True, False]))
def test_ctrl_c_says_what_is_on_disk_and_how_to_continue_from_it(tmp_path, in_block):
    script = f"""{INTERRUPTED}
for _ in range(110):
    monitor.step(loop.forward())
    store_of(monitor).wait()
interrupt({in_block})
"""
    _, said, printed = run(tmp_path, script)
    (line,) = [line for line in printed.splitlines() if "to continue" in line]
    names = [path.name for path in (tmp_path / "runs").iterdir()]
    assert any(line.endswith(f"VITALS_RUN_ID={name}") for name in names)
    checkpoints = sorted((tmp_path / "runs" / "checkpoints").glob("**/step-*"))
    newest = max(int(path.name.split("-")[1]) for path in checkpoints)
    assert f"continues at step {newest}; to continue: start again with VITALS_RUN_ID=" in line
    assert ("interrupted", "KeyboardInterrupt: ") in said


def test_ctrl_c_before_the_first_checkpoint_says_that_there_is_none(tmp_path):
    _, _, printed = run(tmp_path, f"{INTERRUPTED}\nmonitor.step(loop.forward())\ninterrupt(True)")
    assert 1 == printed.count("no checkpoint was saved yet, so a new start begins at step 0")


SAVING = """
monitor.close()
from trainer_hooks import CheckpointSettings
from pathlib import Path
folder = Path(os.environ["VITALS_DIR"]) / "checkpoints"
def parts():
    return [p.name for p in folder.glob(".alone-*/*/rank-*")]
def saving(**settings):
    global loop, monitor
    settings = CheckpointSettings(directory=folder, **settings)
    loop = Loop(mode="guard", checkpoints=settings)
    monitor = loop.monitor
    train(5)
    return monitor
"""


@pytest.mark.parametrize("taken_first", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_loop_with_a_handler_of_its_own_is_saved_beside_it_and_never_cut_short(
    tmp_path, taken_first
):
    own = "signal.signal(signal.SIGTERM, lambda *_: None)"
    script = f"""
{own if taken_first else ""}
with saving(grace_seconds=0.003):
    {own if not taken_first else ""}
    os.kill(os.getpid(), signal.SIGTERM)
    while not parts():
        pass
    (watching,) = [t for t in threading.enumerate() if t.name == "vitals-grace"]
print("the loop's own save is done", parts(), file=sys.stderr)
watching.join()
"""
    code, said, errors = run(tmp_path, "import threading\n" + SAVING + script)
    ended = ("interrupted", "SIGTERM") if taken_first else ("finished", "")
    assert (0, [("finished", ""), ended]) == (code, sorted(said)), errors
    assert "save is done ['rank-0-of-1']" in errors


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ("", "SIGTERM"),
        pytest.param(
            "raise RuntimeError('worker')", "SIGTERM; RuntimeError: worker", marks=pytest.mark.slow
        ),
    ],
)
def test_sigterm_after_the_last_step_saves_and_ends_the_process(tmp_path, more, reason):
    script = f"""
with saving():
    os.kill(os.getpid(), signal.SIGTERM)
    {more}
print("not reached", file=sys.stderr)
"""
    code, said, errors = run(tmp_path, SAVING + script)
    assert -signal.SIGTERM == code, errors
    assert [("finished", ""), ("interrupted", reason)] == sorted(said)
    assert "not reached" not in errors
    assert 1 == len(list((tmp_path / "runs" / "checkpoints").glob(".alone-*/*/rank-0-of-1")))


def test_a_forked_child_says_nothing_and_its_sigterm_is_its_own(tmp_path):
    script = """
pid = os.fork()
if not pid:
    sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0
pid = os.fork()
if not pid:
    os.kill(os.getpid(), signal.SIGTERM)
    os._exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
"""
    code, said, errors = run(tmp_path, script)
    assert (0, [("finished", "")]) == (code, said), errors


@pytest.mark.slow
def test_data_workers_that_are_forked_meanwhile_leave_the_monitor_alone(tmp_path):
    script = """
import torch
from torch.utils.data import DataLoader
for x in monitor.batches(DataLoader(torch.arange(8.0), 2, num_workers=2), epochs=2):
    monitor.step(loop.forward())
assert monitor.step_index == 13
assert monitor.swallowed_errors == {}
"""
    code, said, errors = run(tmp_path, script)
    assert (0, [("finished", "")]) == (code, said), errors
