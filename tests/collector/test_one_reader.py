"""A run directory and a collector that got the same rows state the same about a run."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path

import msgspec
import pytest

from tests.collector.rows import RUN, Writer
from tests.support.cli import leave, vitals
from tests.support.served import Served, served_in
from trainvitals.document.incident import incident_state
from trainvitals.question import Question
from trainvitals.records import (
    AttemptStarted,
    Decision,
    DecisionMade,
    Finding,
    FindingRaised,
    RunEnded,
    RunInfo,
    RunStarted,
)
from trainvitals.views import (
    FindingsQuestion,
    IncidentsQuestion,
    MoversQuestion,
    StepQuestion,
    TableQuestion,
    VerdictQuestion,
)
from vitals_collector.queries.open import OpenedReader, open_folder

SLOW, STALLED, NAN, LAST = 300, 380, 420, 439
"""Steps at which rank 1 gets slow, the loader stalls, and a loss is NaN; rank 0's last step."""


def rank_rows(rank: int) -> dict[str, list[float | None]]:
    """Return the columns of a rank; the one that is late waits less than the other."""
    num = LAST + 1 if rank == 0 else LAST - 5  # rank 1 ends earlier: its last rows are missing
    steps = range(num)
    late = [0.3 if step >= SLOW else 0.0 for step in steps]
    waits = [0.9 if STALLED <= step < STALLED + 3 else 0.001 for step in steps]
    base = [0.1 + 0.001 * (step % 7) for step in steps]
    return {
        "loss": [float("nan") if step == NAN else 2.0 + 0.01 * (step % 7) for step in steps],
        "rank_loss": [float("nan") if step == NAN else 2.0 for step in steps],
        "learning_rate": [1e-3 if step < 200 else 0.05 for step in steps],
        "data_wait_seconds": waits,
        "forward_seconds": [b + (s if rank else 0.0) for b, s in zip(base, late, strict=True)],
        "backward_seconds": list(base),
        "gradient_wait_seconds": [0.01 + (0.0 if rank else s) for s in late],
        "communication_seconds": [0.001] * num,
        "step_duration_seconds": [2 * b + s + w for b, s, w in zip(base, late, waits, strict=True)],
    }


@cache
def batches() -> list[bytes]:
    """Return the rows of a run of two ranks, as an agent ships them."""
    ranks = [Writer(f"rank:{rank}") for rank in range(2)]
    finding = Finding(
        kind="nonfinite", level="actionable", step=NAN, detector="nonfinite", reason="nan",
        cause="nonfinite_loss", rank=1,
    )  # fmt: skip
    skip = Decision(
        ledger_seq=1, action="skip_step", step=NAN, decided_at_step=NAN + 1, attempt=1,
        reason="the loss is nan", rule="nonfinite", cause="nonfinite_loss", rank=1,
    )  # fmt: skip
    started = RunStarted(info=RunInfo(name="tiny", world_size=2))
    raws = [
        ranks[0].events(started, AttemptStarted(id=1, parent=None, fork_step=0, reason="start"))
    ]
    columns = [rank_rows(rank) for rank in range(2)]
    # In turns: a collector goes on without a rank whose rows are late by 20 s.
    for first in range(0, LAST + 1, 50):
        for writer, of_rank in zip(ranks, columns, strict=True):
            parts = {name: values[first : first + 50] for name, values in of_rank.items()}
            num = len(parts["loss"])
            raws.append(writer.steps(range(first, first + num), **parts))
    told = (FindingRaised(finding=finding), DecisionMade(decision=skip))
    raws.append(ranks[0].events(*told, step=NAN + 1))
    raws.append(ranks[0].events(RunEnded(state="finished"), step=LAST))
    return raws


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("one_reader") / "runs"
    leave(where, *batches())
    return where


@pytest.fixture(scope="module")
def collector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A collector that processed each batch as it arrived."""
    with served_in(tmp_path_factory.mktemp("one_reader") / "data") as served:
        engine = served.app.state.acting.engine
        with served.client("ingest") as client:
            for raw in batches():
                client.ingest(raw)
                engine.poll()
        yield served


QUESTIONS: list[Question[object]] = [
    FindingsQuestion(run_id=RUN),
    TableQuestion(table="findings", run_id=RUN),
    TableQuestion(table="findings"),
    *(StepQuestion(run_id=RUN, step=step) for step in (200, SLOW, STALLED + 2, NAN)),
    *(MoversQuestion(run_id=RUN, step=step) for step in (200, SLOW, NAN)),
    IncidentsQuestion(run_id=RUN),
    VerdictQuestion(run_id=RUN),
    VerdictQuestion(run_id=RUN, judgement=False),
]


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: type(question).__name__)
def test_the_first_query_is_answered_alike(
    question: Question[object], folder: Path, collector: Served
):
    with open_folder(folder) as opened, collector.client() as client:
        assert told(client.ask(question)) == told(opened.reader.ask(question))


def test_the_findings_are_those_of_the_ranks_and_of_the_fleet_detectors(folder: Path):
    with open_folder(folder) as opened:
        reply = opened.reader.ask(TableQuestion(table="findings", columns=("step", "cause")))
    assert [
        (200, "lr_jump"), (319, "straggler_forward"), (349, "throughput"), (NAN, "nonfinite_loss"),
    ] == list(zip(*reply.data, strict=True))  # fmt: skip


def test_what_lasts_to_the_end_of_the_run_is_unresolved(folder: Path):
    with open_folder(folder) as opened:
        incidents = opened.reader.ask(IncidentsQuestion(run_id=RUN))
        lines = opened.reader.ask(VerdictQuestion(run_id=RUN)).incidents
    expected = [
        (f"1-{NAN}-nonfinite_loss", "resolved"),
        (f"1-{SLOW}-straggler_forward", "unresolved"),
        ("1-200-lr_jump", "resolved"),
    ]
    for listed in (incidents, lines):
        assert expected == [(each.incident_id, incident_state(each)) for each in listed]


LEFT_OUT = {"alerts", "num_firing_alerts", "made_unix_ns"}


def told(answer: object) -> object:
    """Return an answer as plain data, without alerts: only a collector raises them unasked."""
    return without_alerts(msgspec.to_builtins(answer))


def without_alerts(plain: object) -> object:
    """Return plain data without alerts, and without the time of a report."""
    if isinstance(plain, dict):
        entries = ((name, value) for name, value in plain.items() if name not in LEFT_OUT)
        return {name: without_alerts(value) for name, value in entries}
    return [*map(without_alerts, plain)] if isinstance(plain, list | tuple) else plain


# ------------------------------------------------------------------------ commands and assistants

COMMANDS = [
    ("why", RUN, 200),
    ("why", RUN, SLOW),
    ("why", RUN, NAN),
    ("show", RUN),
    ("query", "findings", RUN, "--format", "json"),
    ("query", "findings", "--format", "csv"),
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(map(str, command)))
def test_a_command_prints_the_same(
    command: tuple[object, ...],
    folder: Path,
    collector: Served,
    capsys: pytest.CaptureFixture[str],
):
    tokens = collector.settings.data / "tokens.json"
    outputs = []
    for source in (
        ("--dir", folder),
        ("--collector", collector.url, "--token-file", tokens),
    ):
        assert 0 == vitals(*command, *source)
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]


def test_a_postmortem_states_the_same_incidents(
    folder: Path, collector: Served, capsys: pytest.CaptureFixture[str]
):
    tokens = collector.settings.data / "tokens.json"
    reports = []
    for source in (
        ("--dir", folder),
        ("--collector", collector.url, "--token-file", tokens),
    ):
        assert 0 == vitals("postmortem", RUN, "--format", "json", *source)
        reports.append(json.loads(capsys.readouterr().out))
    assert len(reports[0]["incidents"]) == 3
    assert told(reports[0]) == told(reports[1])


def test_an_assistant_is_given_the_same(folder: Path, collector: Served):
    pytest.importorskip("vitals_plugins", reason="plugins/ was removed")
    from vitals_plugins.bridges.assistants.sources import SharedSource
    from vitals_plugins.bridges.assistants.tools import RunTools

    tools = [
        RunTools(source=SharedSource(partial(open_folder, folder))),
        RunTools(source=SharedSource(partial(through_collector, collector))),
    ]
    of_folder, of_collector = (
        [
            told(json.loads(text))
            for text in (
                each.run_summary(RUN),
                each.incidents(RUN),
                each.incidents(RUN, f"1-{SLOW}-straggler_forward"),
                *(each.why(step, RUN) for step in (200, SLOW, NAN)),
            )
        ]
        for each in tools
    )
    assert of_folder == of_collector


@contextmanager
def through_collector(collector: Served) -> Iterator[OpenedReader]:
    with collector.client() as client:
        yield OpenedReader(client, lambda: None)
