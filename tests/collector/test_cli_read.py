import csv
import io
import json
from pathlib import Path

import msgspec
import pytest

from tests.collector.rows import OTHER_RUN, RUN, Writer
from tests.support.cli import leave, vitals
from tests.support.served import Served
from tests.support.story import story, through_a_folder
from trainvitals.cli.output import Format
from trainvitals.errors import UsageError
from trainvitals.io.client import COLLECTOR_FILE, CollectorFile
from trainvitals.io.rundir import RunDir
from trainvitals.io.sample_ids import SampleFile, StepSamples
from trainvitals.io.spool import Spool
from trainvitals.records import (
    BAD_GRADIENTS,
    BAD_LOSS,
    AttemptStarted,
    BatchNoted,
    RunEnded,
    RunInfo,
    RunStarted,
)
from trainvitals.views import RunsQuestion, StepQuestion
from vitals_collector.cli.tail import StepTail
from vitals_collector.queries.open import find_run, open_reader
from vitals_collector.queries.why import explain_step

COMMANDS = ("collector", "runs", "show", "why", "tail")


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder with the run of the story."""
    with through_a_folder(story(), tmp_path):
        return tmp_path / "runs"


def test_a_folder_lists_its_runs(runs: Path, capsys: pytest.CaptureFixture[str]):
    assert 0 == vitals("runs", runs)
    header, line = capsys.readouterr().out.splitlines()
    assert ["RUN", "NAME", "STATE"] == header.split()[:3]
    assert [RUN, "tiny", "finished"] == line.split()[:3]


def test_the_same_answer_comes_from_a_collector(served: Served, capsys: pytest.CaptureFixture[str]):
    with served.client("ingest") as client:
        client.ingest(Writer().events(RunStarted(info=RunInfo(name="tiny"))))
    tokens = served.settings.data / "tokens.json"
    where = ("--collector", served.url, "--token-file", tokens)
    assert 0 == vitals("runs", *where, "--format", "json")
    assert [RUN] == [run["run_id"] for run in json.loads(capsys.readouterr().out)]
    assert 0 == vitals("show", "tiny", *where)
    assert RUN in capsys.readouterr().out


def test_a_collector_is_named_by_its_data_folder_as_well(
    served: Served, capsys: pytest.CaptureFixture[str]
):
    data = served.settings.data
    with served.client("ingest") as client:
        client.ingest(Writer().events(RunStarted(info=RunInfo(name="tiny"))))
    assert 2 == vitals("runs", "--collector", data)
    assert "no collector runs on that folder" in capsys.readouterr().err
    body = msgspec.json.encode(CollectorFile(url=served.url, pid=1))
    (data / COLLECTOR_FILE).touch(0o600)
    (data / COLLECTOR_FILE).write_bytes(body)
    assert 0 == vitals("show", "tiny", "--collector", data)
    assert RUN in capsys.readouterr().out
    command = ("command", RUN, "halt", "--reason", "enough", "--collector", data)
    assert 0 == vitals(*command), capsys.readouterr().err


def test_a_long_name_pushes_nothing_out_of_sight(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    leave(tmp_path, Writer().events(RunStarted(info=RunInfo(name="x" * 300))))
    assert 0 == vitals("runs", tmp_path)
    assert max(map(len, capsys.readouterr().out.splitlines())) < 200
    assert 0 == vitals("runs", tmp_path, "--format", "csv")
    assert "x" * 300 in capsys.readouterr().out


def test_it_is_shown_how_a_run_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    ended = RunEnded(state="failed", reason="RuntimeError: CUDA out of memory")
    leave(tmp_path, Writer().events(RunStarted(info=RunInfo(name="tiny")), ended))
    assert 0 == vitals("show", tmp_path)
    assert "failed: RuntimeError: CUDA out of memory" in capsys.readouterr().out


def test_names_of_series_are_listed_where_they_are_asked_for(
    runs: Path, capsys: pytest.CaptureFixture[str]
):
    assert 0 == vitals("show", runs)
    assert "; --series lists them" in capsys.readouterr().out
    assert 0 == vitals("show", runs, "--series")
    shown = capsys.readouterr().out
    assert "steps.loss, " in shown
    assert "lists them" not in shown


@pytest.mark.parametrize("run", ["", "tiny", RUN, RUN[:12].lower()])
def test_a_run_is_found_by_id_beginning_or_name(
    runs: Path, run: str, capsys: pytest.CaptureFixture[str]
):
    arguments = (run,) if run else ()
    assert 0 == vitals("show", *arguments, "--dir", runs)
    said = capsys.readouterr().out
    assert "skip_step" in said
    assert "c60" in said


def test_a_run_directory_can_be_given_itself(runs: Path, capsys: pytest.CaptureFixture[str]):
    assert 0 == vitals("show", runs / RUN, "--format", "json")
    shown = json.loads(capsys.readouterr().out)
    assert {"run", "verdict", "incidents", "decisions", "checkpoints", "events"} == set(shown)
    assert ["skip_step", "rollback"] == [d["decision"]["action"] for d in shown["decisions"]]


def test_a_curve_goes_out_as_csv(runs: Path, capsys: pytest.CaptureFixture[str]):
    assert 0 == vitals("show", runs, "--metric", "steps.loss", "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert 120 == len(rows)
    assert ("nan", "0.01") == (rows[40]["steps.loss"], rows[119]["steps.loss"])


def test_why_tells_numbers_limits_findings_and_the_decision(
    runs: Path, capsys: pytest.CaptureFixture[str]
):
    assert 0 == vitals("why", runs, 40)
    said = " ".join(capsys.readouterr().out.split())
    for words in (
        f"Step 40 of tiny ({RUN}).",
        "Loss NaN (no limit yet)",
        "The local loss was not finite on 2 of 2 ranks: ranks 0, 1.",
        "Action: update skipped (rule: nonfinite): the loss of step 40 is nan.",
    ):
        assert words in said, words


def test_why_is_a_text_or_data_and_no_table(runs: Path, capsys: pytest.CaptureFixture[str]):
    assert 0 == vitals("why", runs, 40)
    text = capsys.readouterr().out
    assert 0 == vitals("why", runs, 40, "--format", "text")
    assert text == capsys.readouterr().out
    assert 2 == vitals("why", runs, 40, "--format", "table")
    assert "is not one of 'text', 'json', 'csv'" in " ".join(capsys.readouterr().err.split())


def test_why_knows_a_step_that_a_rollback_took_back(runs: Path, capsys: pytest.CaptureFixture[str]):
    assert 0 == vitals("why", runs, 75)
    said = " ".join(capsys.readouterr().out.split())
    assert "First attempt (discarded): loss" in said
    assert "This step was discarded: the rollback for step 90 went back to step 60." in said
    assert "No findings at this step." in said
    assert "No action; the nearest is rollback at step 90, 15 steps later." in said
    assert "Loss over the next 8 steps: 0.01." in said


def test_why_names_the_culprit_its_limit_and_its_batch(tmp_path: Path):
    from tests.support.queries import query
    from vitals_collector.ingest.ingest import ingest
    from vitals_collector.storage.store import open_store

    store = open_store("sqlite://")
    known = {"loss": 9.0, "loss_limit": 3.0, "verdict": 4, "skipped": 1, "culprit_rank": 1}
    ingest(store, Writer().steps([5], **known))
    ingest(store, Writer("rank:1").steps([5], rank_loss=17.5, batch_index=77, epoch=2))
    asked = query(store)
    said = " ".join(
        explain_step(
            asked.ask(RunsQuestion())[0], asked.ask(StepQuestion(run_id=RUN, step=5)), ()
        ).split()
    )
    store.close()
    assert "Loss 9 (limit 3)" in said
    assert "the update was skipped" in said
    assert "Caused by rank 1 (its local loss was 17.5, from batch 77 of epoch 2)" in said


@pytest.mark.parametrize(
    ("bits", "is_said"), [(BAD_GRADIENTS, True), (BAD_GRADIENTS | BAD_LOSS, False)]
)
def test_why_says_that_the_rank_of_averaged_gradients_is_unknown(bits: int, is_said: bool):
    from tests.support.queries import query
    from vitals_collector.ingest.ingest import ingest
    from vitals_collector.storage.store import open_store

    store = open_store("sqlite://")
    ingest(store, Writer().steps([5], loss=1.0, verdict=bits, skipped=1, culprit_rank=-1))
    ingest(store, Writer("rank:1").steps([5], rank_loss=1.0))
    asked = query(store)
    run, step = asked.ask(RunsQuestion())[0], asked.ask(StepQuestion(run_id=RUN, step=5))
    said = " ".join(explain_step(run, step, ()).split())
    store.close()
    assert is_said == ("The rank is unknown: gradients are checked after" in said)


def test_why_of_a_step_that_is_not_there_names_the_last(
    runs: Path, capsys: pytest.CaptureFixture[str]
):
    assert 2 == vitals("why", runs, 999)
    assert "the last step of" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["table", "json", "csv"])
def test_tail_shows_the_newest_steps(runs: Path, form: str, capsys: pytest.CaptureFixture[str]):
    assert 0 == vitals("tail", runs, "-n", 3, "--format", form)
    lines = capsys.readouterr().out.splitlines()[0 if form == "json" else 1 :]
    said = (
        [json.loads(line)["step"] for line in lines]
        if form == "json"
        else [int(line.replace(",", " ").split()[0]) for line in lines]
    )
    assert [117, 118, 119] == said


def test_tail_goes_on_and_after_a_rollback_from_the_fork(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    spool = Spool(
        RunDir.create(tmp_path, RUN).agent_dir("a") / "spool", max_bytes=1 << 22, keep=True
    )
    writer = Writer()
    spool.append(writer.steps(range(5), loss=1.0))
    with open_reader(tmp_path) as opened:
        shown = StepTail(opened.reader, RUN, Format.CSV)
        shown.write_header(3)
        spool.append(writer.steps(range(5, 8), loss=1.0))
        opened.refresh()
        shown.write_new_steps()
        spool.append(writer.events(AttemptStarted(id=2, parent=1, fork_step=6, reason="back")))
        spool.append(writer.steps(range(6, 9), attempt=2, loss=2.0))
        spool.append(writer.events(RunEnded(state="finished")))
        opened.refresh()
        assert "finished" == shown.write_new_steps().state
    spool.close()
    lines = capsys.readouterr().out.splitlines()[1:]
    steps = [int(line.partition(",")[0]) for line in lines]
    assert [3, 4, 5, 6, 7, 6, 7, 8] == steps


def test_nothing_to_read_from_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    assert 2 == vitals("runs")
    said = capsys.readouterr().err
    assert "no collector answers" in said
    assert "Traceback" not in said


def test_a_folder_that_is_not_there_is_explained(capsys: pytest.CaptureFixture[str]):
    assert 2 == vitals("runs", "/no/such/folder")
    assert "there is no folder /no/such/folder" in capsys.readouterr().err


def test_a_collector_that_does_not_answer_is_explained(capsys: pytest.CaptureFixture[str]):
    assert 1 == vitals("runs", "--collector", "https://127.0.0.1:9")
    assert "cannot be reached" in capsys.readouterr().err


def test_the_folder_of_the_environment_is_the_default(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("VITALS_DIR", str(runs))
    assert 0 == vitals("runs", "--format", "csv")
    assert RUN in capsys.readouterr().out


def test_a_beginning_that_fits_two_runs_asks_for_more(tmp_path: Path):
    for run in (RUN, OTHER_RUN):
        where = RunDir.create(tmp_path, run).agent_dir("a") / "spool"
        spool = Spool(where, max_bytes=1 << 20, keep=True)
        spool.append(Writer(run=run).steps([0]))
        spool.close()
    with open_reader(tmp_path) as opened:
        assert RUN == find_run(opened.reader, RUN).run_id
        with pytest.raises(UsageError, match="matches 2 runs"):
            find_run(opened.reader, RUN[:10])
        with pytest.raises(UsageError, match="there is no run 'nope'"):
            find_run(opened.reader, "nope")


def test_why_names_the_samples_that_fed_a_step_on_each_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run_dir = RunDir.create(tmp_path, RUN)
    spool = Spool(run_dir.agent_dir("a") / "spool", max_bytes=1 << 20, keep=True)
    writer = Writer("rank:1")
    spool.append(writer.steps([0, 1]))
    known = {"epoch": 2, "first_batch": 7, "num_batches": 2, "file": "batches/step-1.pt"}
    noted = BatchNoted(sample_ids=(5, 9, "x\x1b"), num_samples=3, **known)
    spool.append(writer.events(noted, step=1))
    spool.close()
    assert 0 == vitals("why", run_dir.path, 1)
    said = " ".join(capsys.readouterr().out.split())
    assert "Rank 1 trained on 2 batches from 7 of epoch 2: samples 5, 9, x" in said
    assert "saved in batches/step-1.pt." in said
    assert "\x1b" not in said
    kept = SampleFile(run_dir.path, rank=3, incarnation="i", max_bytes=10_000)
    many = tuple(range(100, 200))
    kept.append(
        StepSamples(step=0, attempt=1, epoch=0, first_batch=4, num_batches=1, sample_ids=many)
    )
    kept.close()
    assert 0 == vitals("why", run_dir.path, 0)
    said = " ".join(capsys.readouterr().out.split())
    assert "Rank 3 trained on batch 4 of epoch 0: samples 100, 101," in said
    assert "163 and 36 more." in said


def test_a_hostile_run_name_cannot_steer_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    where = RunDir.create(tmp_path, RUN).agent_dir("a") / "spool"
    spool = Spool(where, max_bytes=1 << 20, keep=True)
    spool.append(Writer().events(RunStarted(info=RunInfo(name="\x1b[2Jevil\nname"))))
    spool.close()
    assert 0 == vitals("runs", tmp_path)
    said = capsys.readouterr().out
    assert "\x1b" not in said
    assert 2 == len(said.splitlines())


@pytest.mark.parametrize("command", COMMANDS)
def test_every_help_ends_with_an_example(command: str, capsys: pytest.CaptureFixture[str]):
    assert 0 == vitals(command, "--help")
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert last.strip().startswith(f"Example: vitals {command}")
