"""`vitals tail --follow`: what it says of a run that begins, trains, goes back, restarts, ends."""

import math
import os
import pty
import re
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.collector.rows import RUN, Writer
from tests.support.cli import vitals
from tests.support.follow import SKIP
from tests.support.forked import COMMANDS
from tests.support.served import Served
from trainvitals.io.rundir import RunDir
from trainvitals.io.spool import Spool
from trainvitals.records import (
    AttemptStarted,
    Decision,
    DecisionMade,
    RunEnded,
    RunInfo,
    RunStarted,
)
from vitals_collector.cli import follow as following
from vitals_collector.cli.follow import ProgressLines, RunEndCondition, _follow_run, follow
from vitals_collector.cli.opening import CollectorOptions, RunChoice
from vitals_collector.cli.progress import MAX_ACTIONS, ProgressReader
from vitals_collector.queries.open import open_folder

MAIN = "import sys; from trainvitals.cli.main import main; sys.exit(main())"


class Training:
    """Writes what an agent would, as of now."""

    def __init__(self, folder: Path) -> None:
        self.run_dir = RunDir.create(folder, RUN)
        self._spool = Spool(self.run_dir.agent_dir("a") / "spool", max_bytes=1 << 22, keep=True)
        self.rank = Writer(started=time.time_ns())
        self.ledger_seq = 0

    def write(self, *batches: bytes) -> None:
        for batch in batches:
            self._spool.append(batch)

    def begin(self, name: str = "tiny", *, attempt: AttemptStarted | None = None) -> None:
        first = AttemptStarted(id=1, parent=None, fork_step=0, reason="start")
        info = RunInfo(name=name, world_size=1)
        self.write(self.rank.events(RunStarted(info=info), attempt or first))

    def steps(self, first: int, last: int, **columns: object) -> None:
        known = {"loss": 2.5, "grad_norm": 0.5, "learning_rate": 3e-4, **columns}
        known["tokens_seen"] = [step * 1_000 for step in range(first, last)]
        self.write(self.rank.steps(range(first, last), **known))

    def decide(self, *decisions: Decision) -> None:
        for decision in decisions:
            self.ledger_seq += 1
            numbered = replace(decision, ledger_seq=self.ledger_seq)
            self.write(self.rank.events(DecisionMade(decision=numbered), step=decision.step))

    def end(self, state: str = "finished", reason: str = "") -> None:
        self.write(self.rank.events(RunEnded(state=state, reason=reason), at=time.time_ns()))


def played(training: Training, *scenes: Callable[[], object], every: int = 10) -> None:
    """Follow the run; before each further look one scene is played, and the last one ends it."""
    left = list(scenes)
    with open_folder(training.run_dir.path) as opened:
        reader = ProgressReader(opened.reader, RUN)
        _follow_run(
            reader, opened.refresh, ProgressLines(every), sleep=lambda seconds: left.pop(0)()
        )


@pytest.fixture
def training(tmp_path: Path) -> Training:
    training = Training(tmp_path)
    training.begin()
    return training


def test_a_line_every_so_many_steps_and_one_of_the_end(
    training: Training, capsys: pytest.CaptureFixture[str]
):
    training.steps(0, 5, mfu_ratio=0.413)
    played(
        training,
        lambda: training.steps(5, 14),
        lambda: training.steps(14, 16),
        lambda: training.steps(16, 30),
        training.end,
    )
    title, *lines = capsys.readouterr().out.splitlines()
    assert f"run tiny ({RUN}): guard mode, 1 rank, started " in title
    numbers = "loss 2.5  grad norm 0.5  lr 0.0003  1 steps/s  1,000 tokens/s"
    assert f"step 4  {numbers}  MFU 41.3 %  healthy" == lines[0]
    assert [f"step 15  {numbers}", f"step 29  {numbers}"] == [
        line.removesuffix("  healthy") for line in lines[1:3]
    ]
    assert ["finished after step 29 (0 updates skipped, 0 rollbacks)"] == lines[3:]


def test_nan_is_shown_as_nan_and_the_skip_is_told(
    training: Training, capsys: pytest.CaptureFixture[str]
):
    training.steps(0, 7)

    def turn_bad() -> None:
        training.steps(7, 8, loss=math.nan, grad_norm=math.inf)
        training.decide(SKIP)

    played(training, turn_bad, training.end, every=1)
    said = capsys.readouterr().out
    assert "step 7: update skipped: loss is nan on rank 1\n" in said
    assert "step 7  loss NaN  grad norm inf  lr 0.0003" in said


def test_a_rollback_is_told_once_and_the_steps_go_back(
    training: Training, capsys: pytest.CaptureFixture[str]
):
    training.steps(0, 40)
    back = replace(
        SKIP, action="rollback", step=38, rollback_to_step=20, new_attempt=2, reason="NaN weights"
    )

    def roll_back() -> None:
        training.decide(back)
        fork = AttemptStarted(id=2, parent=1, fork_step=20, reason="NaN weights")
        training.write(training.rank.events(fork, attempt=2))
        training.steps(20, 23, attempt=2)

    played(training, roll_back, training.end)
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [
        "step 39  loss",
        "step 38: rolled back to step 20: NaN weights",
        "step 22  loss",
        "finished after step 22 (0 updates skipped, 1 rollback)",
    ] == [re.sub(r"  loss .*", "  loss", line) for line in lines]


def test_a_restart_is_waited_for_and_told(training: Training, capsys: pytest.CaptureFixture[str]):
    training.steps(0, 12)

    def restart() -> None:
        training.rank = Writer(started=time.time_ns() + 1)
        resumed = AttemptStarted(id=2, parent=1, fork_step=10, reason="resumed from c10")
        training.begin(attempt=resumed)
        training.steps(10, 14, attempt=2)

    played(training, lambda: training.end("failed", "CUDA error"), restart, training.end)
    lines = capsys.readouterr().out.splitlines()[2:]
    assert "failed after step 11: waiting 30 s for a restart" == lines[0]
    assert "restarted at step 10 (attempt 2): resumed from c10" == lines[1]
    assert lines[2].startswith("step 13  loss 2.5")
    assert "finished after step 13 (0 updates skipped, 0 rollbacks)" == lines[3]


def test_a_run_that_failed_long_ago_ends_at_once_with_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    training = Training(tmp_path)
    training.rank = Writer()
    training.begin()
    training.steps(0, 3)
    ended = RunEnded(state="failed", reason="RuntimeError: CUDA out of memory")
    training.write(training.rank.events(ended, step=2))
    assert 0 == vitals("tail", tmp_path, "--follow")
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("failed after step 2: RuntimeError: CUDA out of memory (0 updates")


def test_the_end_of_a_failed_run_is_believed_after_half_a_minute(training: Training):
    training.steps(0, 1)
    with open_folder(training.run_dir.path) as opened:
        summary = ProgressReader(opened.reader, RUN).poll().summary
    second = 1_000_000_000
    down = replace(summary, state="failed", last_seen_unix_ns=100 * second)
    ending = RunEndCondition()
    assert (False, True) == (ending.reached(down, 101 * second), ending.is_new)
    assert (False, False) == (ending.reached(down, 129 * second), ending.is_new)
    assert ending.reached(down, 130 * second)
    assert not ending.reached(replace(down, state="running"), 131 * second)
    assert RunEndCondition().reached(replace(down, state="halted"), 101 * second)


def test_of_a_storm_a_few_actions_and_a_number_are_told(
    training: Training, capsys: pytest.CaptureFixture[str]
):
    training.steps(0, 3)
    storm = [replace(SKIP, step=step) for step in range(10, 40)]
    played(training, lambda: training.decide(*storm), training.end)
    lines = [line for line in capsys.readouterr().out.splitlines() if "skipped:" in line]
    assert MAX_ACTIONS == len(lines)
    assert [f"step {step}: update" for step in (10, 11, 12, 13, 39)] == [
        line.split(" skipped")[0] for line in lines
    ]


def test_what_happened_before_the_first_look_is_not_told_again(
    training: Training, capsys: pytest.CaptureFixture[str]
):
    training.steps(0, 9)
    training.decide(SKIP)
    played(training, training.end)
    assert "update skipped:" not in capsys.readouterr().out


def test_looks_that_take_long_are_followed_by_a_pause(training: Training):
    training.steps(0, 3)
    pauses: list[float] = []
    costs = iter((0.0, 0.001, 0.0, 0.05, 0.0, 9.0, 0.0))

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            training.end()

    with open_folder(training.run_dir.path) as opened:
        reader = ProgressReader(opened.reader, RUN)
        _follow_run(
            reader, opened.refresh, ProgressLines(10), sleep=sleep, cpu_seconds=lambda: next(costs)
        )
    assert [1.0, 2.0, 5.0] == pauses


def test_a_run_that_is_not_there_yet_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    folder = tmp_path / "runs"
    trainings: list[Training] = []

    def rows() -> None:
        trainings[0].begin()
        trainings[0].steps(0, 2)
        trainings[0].end()

    scenes = [folder.mkdir, lambda: trainings.append(Training(folder)), rows]
    monkeypatch.setattr(following.time, "sleep", lambda seconds: scenes.pop(0)())
    follow(RunChoice("", folder), CollectorOptions(), every=10)
    shown = capsys.readouterr()
    assert [
        f"waiting for a run in {folder}",
        f"waiting for the first rows of run {RUN}",
    ] == shown.err.splitlines()
    assert "finished after step 1 " in shown.out


def test_a_name_that_none_of_the_runs_has_is_an_error_and_not_waited_for(
    training: Training, capsys: pytest.CaptureFixture[str]
):
    assert 2 == vitals("tail", "nope", "--dir", training.run_dir.path.parent, "--follow")
    assert "there is no run 'nope'" in capsys.readouterr().err
    file = training.run_dir.path.parent / "log"
    file.write_text("")
    assert 2 == vitals("tail", file, "--follow")
    assert "is a file, not a folder" in capsys.readouterr().err


def test_a_run_of_a_collector_is_followed_alike(served: Served, capsys: pytest.CaptureFixture[str]):
    rank = Writer(started=time.time_ns())
    with served.client("ingest") as client:
        client.ingest(rank.events(RunStarted(info=RunInfo(name="tiny", world_size=1))))
        client.ingest(rank.steps(range(3), loss=1.0))
        client.ingest(rank.events(RunEnded(state="finished")))
    tokens = served.settings.data / "tokens.json"
    where = ("--collector", served.url, "--token-file", tokens)
    assert 0 == vitals("tail", "tiny", "--follow", *where)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("step 2  loss 1")
    assert lines[-1].startswith("finished after step 2")


def test_rows_for_programs_are_still_every_step(
    training: Training, capsys: pytest.CaptureFixture[str]
):
    training.steps(0, 5)
    training.end()
    folder = training.run_dir.path.parent
    assert 0 == vitals("tail", folder, "--follow", "--format", "csv")
    assert 6 == len(capsys.readouterr().out.splitlines())


def test_the_files_of_the_run_stay_as_they_are(training: Training):
    training.steps(0, 30)
    training.end()
    before = {path: path.stat().st_mtime_ns for path in training.run_dir.path.rglob("*")}
    assert 0 == vitals("tail", training.run_dir.path, "--follow")
    after = {path: path.stat().st_mtime_ns for path in training.run_dir.path.rglob("*")}
    assert before == after


# ------------------------------------------------------------------------------- in a terminal


class Terminal:
    """A command on a terminal of some width."""

    def __init__(self, *arguments: object, columns: int = 80, **environ: str) -> None:
        self._fd, child = pty.openpty()
        size = {"COLUMNS": str(columns), "LINES": "40", "TERM": "xterm-256color"}
        self.process = COMMANDS.Popen(
            [sys.executable, "-c", MAIN, *map(str, arguments)],
            stdin=child,
            stdout=child,
            stderr=child,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **size, **environ},
        )
        os.close(child)
        self.output = ""

    def read_until(self, text: str, seconds: float = 60.0) -> str:
        until = time.monotonic() + seconds
        while text not in self.output:
            assert time.monotonic() < until, self.output
            self._read(0.2)
        return self.output

    def ended(self) -> int:
        code = self.process.wait(60.0)
        while self._read(0.2):
            pass
        return code

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._fd)

    def _read(self, seconds: float) -> bool:
        if not select.select([self._fd], [], [], seconds)[0]:
            return False
        try:
            raw = os.read(self._fd, 65536)
        except OSError:  # the other side is closed
            return False
        self.output += raw.decode()
        return bool(raw)


@pytest.fixture
def on_terminal() -> Iterator[Callable[..., Terminal]]:
    started: list[Terminal] = []

    def start(*arguments: object, **how: object) -> Terminal:
        started.append(Terminal(*arguments, **how))
        return started[-1]

    yield start
    for terminal in started:
        terminal.close()


def screen(output: str) -> list[str]:
    """Return what a terminal shows in the end: lines, and the erasing that we use."""
    lines = [""]
    text = re.sub(r"\x1b\[[\d;]*m", "", output).replace("\r\n", "\n").replace("\r", "")
    for part in re.split(r"(\x1b\[\d+A|\x1b\[J|\n)", text):
        if part == "\n":
            lines.append("")
        elif part.endswith("A") and part.startswith("\x1b"):
            del lines[len(lines) - int(part[2:-1]) :]
            lines[-1] = ""
        elif part != "\x1b[J":
            lines[-1] += part
    return lines


def test_on_a_terminal_a_panel_is_drawn_again_in_place(
    training: Training, on_terminal: Callable[..., Terminal]
):
    training.steps(0, 12, loss=math.nan)
    training.decide(SKIP)
    terminal = on_terminal("tail", training.run_dir.path, "-f", columns=60)
    terminal.read_until("NaN")
    training.steps(12, 20)
    terminal.read_until("19")
    training.end()
    assert 0 == terminal.ended()
    shown = screen(terminal.output)
    text = "\n".join(shown)
    assert (1, 1) == (text.count("grad norm"), text.count("state"))
    assert "step 7: update skipped" in text
    assert any(line.startswith("finished after step 19") for line in shown)
    assert max(map(len, shown[1:])) <= 60
    assert "\x1b[?25l" not in terminal.output  # the cursor is never hidden


def test_a_narrow_terminal_without_colors_still_shows_the_step(
    training: Training, on_terminal: Callable[..., Terminal]
):
    training.steps(0, 3)
    training.end()
    terminal = on_terminal("tail", training.run_dir.path, "-f", columns=24, NO_COLOR="1")
    assert 0 == terminal.ended()
    panel = [
        line
        for line in screen(terminal.output)
        if line.startswith("\N{BOX DRAWINGS LIGHT VERTICAL}")
    ]
    assert any("step" in line and "2" in line for line in panel)
    assert max(map(len, panel)) <= 24
    assert not re.search(r"\x1b\[[\d;]*3[1-7]", terminal.output)


@pytest.mark.parametrize("is_there", [True, False], ids=["followed", "waited for"])
def test_ctrl_c_ends_it_in_good_order(
    training: Training, on_terminal: Callable[..., Terminal], is_there: bool
):
    training.steps(0, 3)
    folder = training.run_dir.path if is_there else training.run_dir.path.parent / "later"
    terminal = on_terminal("tail", folder, "--follow")
    terminal.read_until("alert" if is_there else "waiting for")
    terminal.process.send_signal(signal.SIGINT)
    assert 0 == terminal.ended()
    assert "Traceback" not in terminal.output


def test_a_terminal_that_cannot_redraw_gets_lines(
    training: Training, on_terminal: Callable[..., Terminal]
):
    training.steps(0, 3)
    training.end()
    terminal = on_terminal("tail", training.run_dir.path, "-f", TERM="dumb")
    assert 0 == terminal.ended()
    assert "\x1b" not in terminal.output
    assert "step 2  loss 2.5" in terminal.output


def test_following_waits_between_its_polls(
    training: Training, on_terminal: Callable[..., Terminal]
):
    training.steps(0, 1_000)
    terminal = on_terminal("tail", training.run_dir.path, "--follow")
    terminal.read_until("alert")
    stop = threading.Event()

    def train() -> None:
        for step in range(1_000, 1_000_000, 10):
            training.steps(step, step + 10)
            if stop.wait(0.5):
                return

    writer = threading.Thread(target=train)
    writer.start()
    used, seconds = _cpu_seconds(terminal.process.pid), 3.0
    time.sleep(seconds)
    used = _cpu_seconds(terminal.process.pid) - used
    stop.set()
    writer.join()
    assert used / seconds < 0.5, "3 % of a core; a loop without waits takes all of it"


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
