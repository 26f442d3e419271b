"""The same batches over HTTP and through a shared folder: every answer must be the same."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import pytest

from tests.collector.rows import RUN
from tests.support.served import Served, served_in
from tests.support.story import Batches, _write, story, through_a_folder
from trainvitals.views import (
    CheckpointsQuestion,
    DecisionsQuestion,
    EventsQuestion,
    FindingsQuestion,
    RunQuestion,
    RunsQuestion,
    RunSummary,
    SeriesQuestion,
    StepQuestion,
)
from vitals_collector.queries.open import Reader


@contextmanager
def over_http(told: Batches, tmp_path: Path) -> Iterator[Reader]:
    """Two agents ship to one collector, one of them twice."""
    tmp_path.mkdir(exist_ok=True)
    with served_in(tmp_path / "http") as served:
        with served.client("ingest") as client:
            for node in ("node-a", "node-b", "node-a"):
                for raw in told[node]:
                    client.ingest(raw)
        with served.client() as client:
            yield client


@contextmanager
def through_a_collector_that_reads_the_folder(told: Batches, tmp_path: Path) -> Iterator[Reader]:
    """As the dashboard does for a folder: a collector follows it and answers over HTTP."""
    _write(told, tmp_path / "runs")
    with served_in(tmp_path / "cache", folders=(tmp_path / "runs",)) as served:
        _first_poll(served)
        with served.client() as client:
            yield client


def _first_poll(served: Served) -> None:
    from vitals_collector.ingest.folder import FolderIngest

    # The follower's first look may not have happened yet; looking as well is harmless.
    FolderIngest(served.store, served.settings.folders).poll()


WAYS = [over_http, through_a_folder, through_a_collector_that_reads_the_folder]


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Reader]]:
    """Give a reader for each way, to the same story; nothing is written once they are open."""
    told, folder = story(), tmp_path_factory.mktemp("ways")
    with ExitStack() as stack:
        yield [
            stack.enter_context(way(told, folder / str(number))) for number, way in enumerate(WAYS)
        ]


@pytest.fixture(params=range(len(WAYS)), ids=lambda number: WAYS[number].__name__)
def reader(request: pytest.FixtureRequest, readers: list[Reader]) -> Reader:
    return readers[request.param]


def test_the_run_is_told_as_it_was(reader: Reader):
    (run,) = reader.ask(RunsQuestion())
    assert ("tiny", "finished", 119, 0.01, 1, 1, 2) == (
        run.name,
        run.state,
        run.last_step,
        run.loss,
        run.num_skips,
        run.num_rollbacks,
        run.num_attempts,
    )


def test_the_curve_is_the_stitched_lineage(reader: Reader):
    found = reader.ask(SeriesQuestion(run_id=RUN, metric="steps.loss"))
    assert list(range(120)) == list(found.step)
    assert [1] * 60 + [2] * 60 == list(found.attempt)
    assert [(40, "nan")] == [(mark.step, mark.kind) for mark in found.nonfinite]
    discarded = reader.ask(
        SeriesQuestion(run_id=RUN, metric="steps.rank_loss", source="rank:1", branch="discarded")
    )
    assert list(range(60, 90)) == list(discarded.step)


def test_both_nodes_are_seen_and_lost_rows_are_counted(reader: Reader):
    detail = reader.ask(RunQuestion(run_id=RUN))
    assert [
        ("node:node-a", "node-a", 11, 0),
        ("node:node-b", "node-b", 11, 0),
        ("rank:0", "node-a", 162, 2),
        ("rank:1", "node-b", 153, 2),
    ] == [(s.source, s.node, s.num_rows, s.num_lost_rows) for s in detail.sources]
    assert {"steps.loss", "scalars.val_loss", "node.cpu_ratio", "process.alive"} < set(
        detail.metrics
    )


def test_a_step_shows_both_ranks_and_what_was_decided(reader: Reader):
    view = reader.ask(StepQuestion(run_id=RUN, step=40))
    assert ["rank:0", "rank:1"] == [row.source for row in view.rows]
    assert [1] == [one.decision.rank for one in view.decisions]


def test_all_ways_give_identical_answers(readers: list[Reader]):
    answers = [[ask(reader) for ask in QUESTIONS] for reader in readers]
    for question, http, *others in zip(range(len(QUESTIONS)), *answers, strict=True):
        for other in others:
            assert http == other, f"question {question}"


def _without_alerts(run: RunSummary) -> RunSummary:
    """Alerts are what a collector makes of decisions; a folder read once makes none."""
    return msgspec.structs.replace(run, num_firing_alerts=0)


def _detail(reader: Reader) -> bytes:
    """Everything but the bytes: a collector packs them, and counts them again, when it has time."""
    detail = reader.ask(RunQuestion(run_id=RUN))
    summary = _without_alerts(detail.summary)
    return msgspec.json.encode(msgspec.structs.replace(detail, summary=summary, volume=None))


QUESTIONS: list[Callable[[Reader], object]] = [
    lambda reader: msgspec.json.encode(
        [_without_alerts(run) for run in reader.ask(RunsQuestion())]
    ),
    _detail,
    lambda reader: msgspec.json.encode(reader.ask(DecisionsQuestion(run_id=RUN))),
    lambda reader: msgspec.json.encode(reader.ask(FindingsQuestion(run_id=RUN))),
    lambda reader: msgspec.json.encode(reader.ask(CheckpointsQuestion(run_id=RUN))),
    lambda reader: msgspec.json.encode(sorted(reader.ask(EventsQuestion(run_id=RUN)), key=str)),
    lambda reader: [
        msgspec.json.encode(reader.ask(StepQuestion(run_id=RUN, step=step)))
        for step in (0, 40, 75, 119)
    ],
    lambda reader: [
        msgspec.json.encode(
            reader.ask(
                SeriesQuestion(
                    run_id=RUN, metric=metric, source=source, branch=branch, points=points
                )
            )
        )
        for metric, source in (
            ("steps.loss", ""),
            ("steps.rank_loss", "rank:1"),
            ("scalars.val_loss", ""),
            ("node.cpu_ratio", "node:node-b"),
            ("process.alive", "rank:1"),
        )
        for branch in ("lineage", "discarded", "all")
        for points in (10, 1_000)
    ],
]
