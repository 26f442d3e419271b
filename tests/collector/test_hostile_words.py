"""What a client calls itself steers no terminal and forges no line of a log."""

import json
import logging
import sys
from pathlib import Path

import pytest

from tests.collector.rows import RUN, Writer
from tests.support import forked
from tests.support.cli import vitals
from tests.support.served import Served
from trainvitals.io.rundir import RunDir
from trainvitals.io.spool import Spool
from trainvitals.printable import LineFormatter, printable
from trainvitals.records import (
    CheckpointChanged,
    Decision,
    DecisionMade,
    Finding,
    FindingRaised,
    NamesDefined,
    Note,
    RankStarted,
    RunEnded,
    RunInfo,
    RunStarted,
)

FORGED = "2026-01-01 ERROR root all is lost"
WORDS = f"evil\x1b]0;owned\x07\x1b[2J\x9b31m\x7f\u202e\r\n{FORGED}"
COMMANDS = {
    "runs": ("runs", "{}"),
    "show": ("show", "{}/" + RUN),
    "why": ("why", "{}/" + RUN, "1"),
    "tail": ("tail", "{}/" + RUN),
    **{
        f"query {table}": ("query", table, "{}/" + RUN)
        for table in ("events", "findings", "decisions")
    },
    "postmortem": ("postmortem", "{}/" + RUN),
}


def hostile_events() -> bytes:
    decision = Decision(
        ledger_seq=1, action="skip_step", step=1, decided_at_step=1, attempt=1, reason=WORDS,
        rule=WORDS, cause=WORDS,
    )  # fmt: skip
    finding = Finding(
        kind="nonfinite", level="actionable", step=1, detector=WORDS, reason=WORDS, cause=WORDS
    )
    info = RunInfo(
        name=WORDS, project=WORDS, user=WORDS, tags=(WORDS,), config={WORDS: WORDS},
        git_commit=WORDS, run_dir=WORDS, torch_version=WORDS, vitals_version=WORDS,
    )  # fmt: skip
    return Writer().events(
        RunStarted(info=info),
        RankStarted(rank=0, local_rank=0, world_size=1, pid=1, node=WORDS, gpu_uuid=WORDS),
        NamesDefined(stream="scalars", names={0: WORDS}),
        Note(code=WORDS, text=WORDS, severity="error"),
        FindingRaised(finding=finding),
        DecisionMade(decision=decision),
        CheckpointChanged(
            checkpoint_id=WORDS, checkpoint_step=1, state="bad", where="disk", detail=WORDS
        ),
        RunEnded(state="failed", reason=WORDS),
        step=1,
    )


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder with a run of which every word is hostile."""
    run_dir = RunDir.create(tmp_path, RUN)
    run_dir.write_info(RunInfo(name=WORDS))
    spool = Spool(run_dir.agent_dir("a") / "spool", max_bytes=1 << 20, keep=True)
    writer = Writer()
    for raw in (hostile_events(), writer.steps(range(3), loss=1.0), writer.scalars(0, {1: 2.0})):
        spool.append(raw)
    spool.close()
    return tmp_path


def odd_lines(text: str) -> list[str]:
    return [line for line in text.split("\n") if not line.isprintable() or line.startswith(FORGED)]


TEXTS = ("postmortem", "why")
"""Commands with one form."""


@pytest.mark.parametrize(
    ("command", "form"),
    [
        (command, form)
        for command in COMMANDS
        for form in (("table",) if command in TEXTS else ("table", "json", "csv"))
    ],
)
def test_no_command_writes_a_control_character(
    command: str, form: str, runs: Path, capsys: pytest.CaptureFixture[str]
):
    arguments = [word.format(runs) for word in COMMANDS[command]]
    if form != "table":
        arguments += ["--format", form]
    assert 0 == vitals(*arguments)
    shown = capsys.readouterr()
    assert ([], []) == (odd_lines(shown.out), odd_lines(shown.err))
    if form == "json" and command == "runs":
        assert WORDS == json.loads(shown.out)[0]["name"], "programs are given it as it is"


def test_an_error_that_quotes_a_stranger_writes_none(
    runs: Path, capsys: pytest.CaptureFixture[str]
):
    assert 2 == vitals("show", f"{WORDS}!", "--dir", runs)
    said = capsys.readouterr().err
    assert [] == odd_lines(said)
    assert "owned" in said


def test_an_answer_of_a_collector_writes_none(
    served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    with served.client("ingest") as client:
        client.ingest(hostile_events())
    monkeypatch.setenv("VITALS_COLLECTOR_URL", served.url)
    monkeypatch.setenv("VITALS_TOKEN_FILE", str(served.settings.data / "tokens.json"))
    for command in (("runs",), ("show", RUN), ("alerts", "list"), ("alerts", "list", "--all")):
        vitals(*command)
        shown = capsys.readouterr()
        assert ([], []) == (odd_lines(shown.out), odd_lines(shown.err)), command


LOGGING = """
import logging, sys
from {module} import log_to_stderr
log_to_stderr({arguments})
log = logging.getLogger("{logger}")
words = sys.argv[1]
log.warning("batch_refused run=%s", words)
try:
    raise ValueError(words)
except ValueError:
    log.exception("failed %s", words)
"""


@pytest.mark.parametrize(
    ("module", "arguments", "logger"),
    [
        ("vitals_collector.api.serve", "", "vitals.collector"),
        ("vitals_agent.daemon", "logging.INFO", "vitals_agent"),
    ],
)
def test_a_log_has_one_line_for_each_record(module: str, arguments: str, logger: str):
    script = LOGGING.format(module=module, arguments=arguments, logger=logger)
    words = f"{WORDS} https://me:hush@host.example"
    done = forked.COMMANDS.run(
        [sys.executable, "-c", script, words], capture_output=True, text=True, timeout=60
    )
    lines = done.stderr.removesuffix("\n").split("\n")
    assert [] == odd_lines(done.stderr)
    assert "hush" not in done.stderr
    assert 2 == sum(not line.startswith("    ") for line in lines), lines
    assert "ValueError" in lines[-1] or "ValueError" in lines[-2]


def test_the_lines_of_training_are_printable_too():
    record = logging.LogRecord("trainvitals", 30, "", 0, "halted: %s", (WORDS,), None)
    assert [] == odd_lines(LineFormatter().format(record))
    assert "naïve loss ≈ 2.0" == printable("naïve loss ≈ 2.0")
