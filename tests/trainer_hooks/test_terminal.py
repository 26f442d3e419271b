"""What a person reads in the terminal of a training: exactly these lines, and only on rank 0."""

import logging
import os
import re
import sys
from typing import ClassVar

import pytest

from tests.support.forked import TRAINING
from tests.trainer_hooks.linear import trained
from trainer_hooks import terminal
from trainer_hooks.terminal import Terminal
from trainvitals.errors import TrainingHalted
from trainvitals.records import Decision, RunInfo

RUN = "01J00000000000000000000000"


@pytest.fixture
def quick(monkeypatch, tmp_path, caplog):
    """Let each action have its line, however fast the steps are; runs lie in the present folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VITALS_SHM", str(tmp_path))
    monkeypatch.setenv("VITALS_AGENT", "off")
    monkeypatch.setenv("VITALS_RUN_ID", RUN)
    monkeypatch.setattr(terminal, "SECONDS_BETWEEN_LINES", 0.0)
    caplog.set_level(logging.INFO, logger="trainvitals")


STARTED = (
    f"vitals: run tiny ({RUN}) started in guard mode; to follow it: vitals tail vitals_runs/{RUN} "
    "--follow"
)
DETAILS = f"vitals: details: vitals show vitals_runs/{RUN}"


def test_a_row_of_skips_is_its_first_line_and_how_many_more(quick, caplog):
    trained("guard", nan=(100, 101, 102, 120))
    assert [
        STARTED,
        "vitals: step 100: update skipped: loss is nan on rank 0",
        "vitals: and 2 more updates skipped, the last one at step 102",
        "vitals: step 120: update skipped: loss is nan on rank 0",
        f"vitals: run tiny ({RUN}) finished after 140 steps: 4 updates skipped, no rollbacks",
        DETAILS,
    ] == caplog.messages
    levels = [record.levelname for record in caplog.records]
    assert ["INFO", "WARNING", "WARNING", "WARNING", "INFO", "INFO"] == levels


def test_an_outlier_is_told_with_its_value_and_its_limit(quick, caplog):
    trained("guard", spikes=(120, 121, 122))
    line = next(text for text in caplog.messages if "skipped: " in text)
    assert line.startswith("vitals: step 120: update skipped: ")
    assert " is above its limit " in line


def test_a_healthy_run_is_three_lines(quick, caplog):
    trained("guard")
    assert [
        STARTED,
        f"vitals: run tiny ({RUN}) finished after 140 steps: no updates skipped, no rollbacks",
        DETAILS,
    ] == caplog.messages


def test_a_rollback_says_how_far_and_the_end_what_was_lost(quick, caplog):
    trained("heal", nan_parameters=(110,))
    lines = caplog.messages
    assert lines[0] == STARTED.replace("guard", "heal")
    assert "vitals: step 111: update skipped: loss is nan on rank 0" == lines[1]
    rolled_back = next(text for text in lines if "rolled back" in text)
    first, _, reason = rolled_back.partition(": parameters are non-finite on 1 rank (")
    assert re.fullmatch(r"[\w.]+(, [\w.]+)*( and \d+ more)?\); no batch caused it", reason)
    step, to = (
        int(part) for part in first.removeprefix("vitals: step ").split(": rolled back to step ")
    )
    assert 110 < step < 115
    # The step that was in flight is lost as well.
    assert f", 1 rollback ({step + 1 - to} steps lost)" in lines[-2]
    assert DETAILS == lines[-1]


def test_a_halt_names_the_command_that_explains_it(quick, caplog):
    with pytest.raises(TrainingHalted):
        trained("guard", nan_parameters=(110,))
    halt, ended, _ = caplog.messages[-3:]
    assert halt.startswith("vitals: step 11")
    step = halt.removeprefix("vitals: step ")[:3]
    assert ": run halted: parameters are non-finite on 1 rank" in halt
    assert halt.endswith(f"; next: vitals why vitals_runs/{RUN} {step}")
    assert f"vitals: run tiny ({RUN}) was stopped after {int(step) + 1} steps: " in ended


def test_observing_says_what_would_have_been_done(quick, caplog):
    trained("observe", spikes=(120, 121, 122), steps=125)
    assert all("would have" in text for text in caplog.messages[1:-2])
    assert " updates would have been skipped" in caplog.messages[-2]


@pytest.mark.parametrize("variables", [{"VITALS_QUIET": "1"}, {"VITALS_MODE": "off"}])
def test_quiet_and_off_say_nothing(quick, caplog, monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    trained("guard", nan=(100,))
    assert [] == caplog.messages


def test_the_level_of_the_logger_leaves_the_actions(quick, caplog):
    caplog.set_level(logging.WARNING, logger="trainvitals")
    trained("guard", nan=(100,))
    assert ["vitals: step 100: update skipped: loss is nan on rank 0"] == caplog.messages


def test_a_missing_package_of_the_agent_is_one_line_and_training_goes_on(
    quick, caplog, monkeypatch
):
    monkeypatch.delenv("VITALS_AGENT")
    monkeypatch.setattr("trainer_hooks._watch.missing_packages", lambda: ["psutil", "httpx"])
    trained("guard")
    assert (
        "vitals: psutil, httpx are not installed, so this run is guarded but its metrics are not "
        "stored; next time: pip install psutil httpx"
    ) == caplog.messages[1]
    assert "finished after 140 steps" in caplog.messages[2]


# ------------------------------------------------------------------------------ not too many


class Clock:
    """Stands still until it is told the second."""

    seconds = 0.0

    def monotonic_ns(self):
        return int(self.seconds * 1e9)

    def time_ns(self):
        return self.monotonic_ns()


def skip(step, **fields):
    given = {
        "ledger_seq": 1,
        "action": "skip_step",
        "step": step,
        "decided_at_step": step,
        "attempt": 1,
        "reason": "loss is nan",
        "rule": "nonfinite",
        "cause": "nonfinite_loss",
        "cost_steps": 1,
    }
    return Decision(**(given | fields))


def test_one_line_a_kind_and_second_and_no_skip_is_left_out_of_the_count(caplog, tmp_path):
    caplog.set_level(logging.INFO, logger="trainvitals")
    clock = Clock()
    info = RunInfo(name="tiny", run_dir=str(tmp_path / RUN))
    lines = Terminal.open(info, RUN, clock, {})
    for step in range(0, 1000, 2):  # every other step of a fast loop is bad
        clock.seconds = step / 1000
        lines.judged(skip(step))
        lines.judged(None)
    assert [
        "vitals: step 0: update skipped: loss is nan",
        "vitals: and 1 more update skipped, the last one at step 2",
    ] == caplog.messages
    clock.seconds = 2.0
    lines.judged(skip(2000))
    lines.judged(None)
    lines.ended("finished", 2001)
    assert [
        "vitals: step 2000: update skipped: loss is nan",
        "vitals: and 498 more updates skipped, the last one at step 2000",
        f"vitals: run tiny ({RUN}) finished after 2,001 steps: 501 updates skipped, no rollbacks",
        f"vitals: details: vitals show {tmp_path / RUN}",
    ] == caplog.messages[2:]


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"action": "accept_level", "reason": "4 in a row"}, "new level accepted: 4 in a row"),
        (
            {"action": "halt", "acted": False},
            "would have halted the run (guard mode): loss is nan",
        ),
        (
            {
                "action": "rollback",
                "acted": False,
                "reason": "nan; not carried out: the loop had ended",
            },
            "would have rolled back (guard mode): nan; not carried out: the loop had ended",
        ),
        (
            {
                "action": "rollback",
                "reason": "nan; rollback to step 3 (memory-3); skipping 50 batches from step 7",
                "checkpoint_id": "memory-3",
                "rollback_to_step": 3,
            },
            "rolled back to step 3: nan; skipping 50 batches from step 7",
        ),
    ],
)
def test_each_action_has_its_words(caplog, tmp_path, fields, line):
    lines = Terminal.open(RunInfo(run_dir=str(tmp_path / RUN)), RUN, Clock(), {})
    lines.judged(skip(7, **fields))
    assert [f"vitals: step 7: {line}"] == caplog.messages


def test_a_run_that_goes_on_says_from_where(caplog, tmp_path):
    caplog.set_level(logging.INFO, logger="trainvitals")
    info = RunInfo(mode="heal", run_dir=str(tmp_path / RUN))
    Terminal.open(info, RUN, Clock(), {}).started("resumed at step 300 from step-00000300-1")
    assert [
        f"vitals: run {RUN} resumed at step 300 from step-00000300-1 in heal mode; to follow it: "
        f"vitals tail {tmp_path / RUN} --follow"
    ] == caplog.messages


def test_a_folder_with_a_space_can_be_pasted(caplog, tmp_path):
    caplog.set_level(logging.INFO, logger="trainvitals")
    info = RunInfo(run_dir=str(tmp_path / "my runs" / RUN))
    Terminal.open(info, RUN, Clock(), {}).started("")
    assert [
        f"vitals: run {RUN} started in guard mode; to follow it: vitals tail "
        f"'{tmp_path}/my runs/{RUN}' --follow"
    ] == caplog.messages


# ---------------------------------------------------------------------------- real terminals


SCRIPT = """
import logging, sys
import trainer_hooks
assert not logging.getLogger("trainvitals").handlers
from tests.trainer_hooks.linear import trained
trained("guard", nan=(100,))
print("--- configured", file=sys.stderr)
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
trained("guard", nan=(100,))
print("--- configured first", file=sys.stderr)
logging.getLogger("trainvitals").handlers.clear()
trained("guard", nan=(100,))
"""


def test_the_lines_are_seen_without_any_logging_and_once_with_it(tmp_path):
    environ = {
        "VITALS_SHM": str(tmp_path),
        "VITALS_AGENT": "off",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = TRAINING.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, **environ},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert 0 == done.returncode, done.stderr
    plain, configured, first = done.stderr.split("--- configured")
    assert 4 == len(plain.splitlines())
    assert all(line.startswith("vitals: ") for line in plain.splitlines())
    prefixes = ["INFO vitals:", "WARNING vitals:", "INFO vitals:", "INFO vitals:"]
    for part in (configured, first):
        lines = part.splitlines()[1:]
        assert prefixes == [" ".join(line.split()[:2]) for line in lines]


class Bar:
    """What tqdm has of a bar class, as far as it concerns whoever writes beside a bar."""

    _instances = (object(),)
    written: ClassVar[list[str]] = []

    @classmethod
    def write(cls, text, file):
        assert file is sys.stderr
        cls.written.append(text)


def test_a_progress_bar_is_cleared_before_a_line_and_drawn_again(monkeypatch, capsys):
    module = type(sys)("tqdm")
    module.tqdm = Bar
    monkeypatch.setitem(sys.modules, "tqdm", module)
    monkeypatch.setattr(logging.root, "handlers", [])
    record = logging.LogRecord("trainvitals", logging.INFO, "", 0, "vitals: a line", (), None)
    monkeypatch.setattr(logging.getLogger("trainvitals"), "handlers", [])
    terminal.show_log()
    (handler,) = logging.getLogger("trainvitals").handlers
    handler.emit(record)
    assert ["vitals: a line"] == Bar.written
    monkeypatch.setattr(Bar, "_instances", ())
    handler.emit(record)
    assert "vitals: a line\n" == capsys.readouterr().err
