"""A bad step that can be played again: the command to copy, and what was found as it was played."""

import json
from pathlib import Path

import pytest

from tests.collector.lookback import BAD, decision, finding
from tests.collector.rows import RUN, Writer
from tests.support.cli import leave, vitals
from tests.support.queries import query
from trainvitals.io.capsules import find_capsules, is_capsule, read_capsule_verdict
from trainvitals.records import AttemptStarted, BatchNoted, RunInfo, RunStarted
from trainvitals.views import IncidentsQuestion
from vitals_collector.ingest.ingest import ingest
from vitals_collector.queries.open import open_folder
from vitals_collector.storage.store import Store

FILE = f"capsules/step-{BAD:08d}-1-rank-1.npz"
COMMAND = f"vitals repro {RUN} {BAD} --entry train.py:build"
SENTENCE = "Data: sample 3 of 16 makes the batch bad; without it the batch is fine."


def parts(file: str = FILE, attempt: int = 1) -> list[bytes]:
    writer = Writer("rank:1")
    found = finding(rank=1, onset_step=BAD, cause="nonfinite_loss")
    noted = BatchNoted(epoch=0, first_batch=77, num_batches=1, file=file)
    at = {"step": BAD, "attempt": attempt, "at": writer.time_of(BAD)}
    return [
        writer.events(RunStarted(info=RunInfo(name="tiny", world_size=2))),
        writer.events(found, decision(rank=1), noted, **at),
    ]


def played(folder: Path, text: str = SENTENCE) -> None:
    path = folder / RUN / FILE
    path.parent.mkdir(mode=0o700)
    path.with_suffix(".verdict.json").write_text(json.dumps({"sentence": text}))


def told(folder: Path) -> list[tuple[str, tuple[str, ...]]]:
    with open_folder(folder) as opened:
        incidents = opened.reader.ask(IncidentsQuestion(run_id=RUN))
    return [(each.verdict.played, each.verdict.commands) for each in incidents]


def test_an_incident_shows_the_command_to_play_its_step(tmp_path: Path):
    leave(tmp_path, *parts())
    ((nothing, commands),) = told(tmp_path)
    assert ("", COMMAND) == (nothing, commands[-1])


def test_a_verdict_beside_the_capsule_is_told_everywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    leave(tmp_path, *parts())
    played(tmp_path)
    assert [SENTENCE] == [sentence for sentence, _ in told(tmp_path)]
    assert [SENTENCE] == [sentence for sentence, _ in told(tmp_path / RUN)]
    for command, name in (("show", "repro"), ("postmortem", "- **Repro**:")):
        assert 0 == vitals(command, tmp_path)
        shown = " ".join(capsys.readouterr().out.split())
        assert f"{name} {SENTENCE}" in shown, shown
        assert "vitals repro" in shown


def test_a_report_counts_the_attempts_of_batches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    started = AttemptStarted(id=7, parent=None, fork_step=0, reason="start")
    leave(tmp_path, *parts(attempt=7), Writer("rank:0").events(started, attempt=7))
    assert 0 == vitals("postmortem", tmp_path)
    assert "| rank:1 | 1 | 0 | 77 |" in capsys.readouterr().out


def test_a_collector_shows_the_command_and_reads_no_folder_that_a_run_names(
    store: Store, tmp_path: Path
):
    for part in parts():
        ingest(store, part)
    played(_made(tmp_path))
    (incident,) = query(store).ask(IncidentsQuestion(run_id=RUN))
    assert ("", COMMAND) == (incident.verdict.played, incident.verdict.commands[-1])


def _made(folder: Path) -> Path:
    (folder / RUN).mkdir()
    return folder


@pytest.mark.parametrize(
    "file", ["", "batches/step-1.pt", f"../{FILE}", "capsules/../run.json", f"{FILE}.verdict.json"]
)
def test_what_is_no_capsule_s_name_shows_no_command_and_reads_nothing(tmp_path: Path, file: str):
    leave(tmp_path, *parts(file))
    played(tmp_path)
    assert not is_capsule(file)
    assert "" == read_capsule_verdict(tmp_path / RUN, file)
    assert [("", False)] == [(s, COMMAND in commands) for s, commands in told(tmp_path)]


@pytest.mark.parametrize("raw", ["", "{", '{"sentence": 3}', "[]"])
def test_a_damaged_verdict_is_none(tmp_path: Path, raw: str):
    path = _made(tmp_path) / RUN / FILE
    path.parent.mkdir()
    path.with_suffix(".verdict.json").write_text(raw)
    assert "" == read_capsule_verdict(tmp_path / RUN, FILE)


def test_words_of_a_verdict_cannot_steer_a_terminal(tmp_path: Path):
    leave(tmp_path, *parts())
    played(tmp_path, "Data: \x1b[2J gone")
    ((sentence, _),) = told(tmp_path)
    assert "\x1b" not in sentence


def test_capsules_are_found_by_their_names_alone(tmp_path: Path):
    folder = tmp_path / "capsules"
    folder.mkdir()
    for name in ("step-00000007-2-rank-1.npz", "step-7.npz", "x.tmp", "step-00000003-1-rank-0.npz"):
        (folder / name).touch()
    assert [(3, 1, 0), (7, 2, 1)] == [tuple(file[:3]) for file in find_capsules(tmp_path)]
    assert [] == find_capsules(tmp_path / "nowhere")
