"""Opens what a person asks about: a running collector, or run directories without any server."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from trainvitals.clock import SystemClock
from trainvitals.io.client import CollectorClient
from trainvitals.io.lookup import choose_run, default_folder, find_collector
from trainvitals.views import (
    AlertView,
    AnnotationView,
    Branch,
    CellsReply,
    CheckpointView,
    CurveReply,
    DecisionView,
    EventView,
    FindingView,
    IncidentView,
    MoverView,
    RunDetail,
    RunSummary,
    SeriesReply,
    StepView,
    TableReply,
    TableRequest,
)


class Reader(Protocol):
    """The questions; ``query.Query`` and ``CollectorClient`` answer them alike."""

    def runs(self) -> tuple[RunSummary, ...]:
        """Return every run."""
        ...

    def run(self, run_id: str) -> RunDetail:
        """Return one run."""
        ...

    def series(
        self,
        run_id: str,
        metric: str,
        *,
        source: str = "",
        branch: Branch = "lineage",
        points: int = 1_000,
        from_step: int | None = None,
        to_step: int | None = None,
    ) -> SeriesReply:
        """Return one curve."""
        ...

    def curve(
        self,
        run_id: str,
        metric: str,
        *,
        source: str = "",
        branch: Branch = "lineage",
        from_step: int | None = None,
        to_step: int | None = None,
    ) -> CurveReply:
        """Return every point of one curve."""
        ...

    def step(self, run_id: str, step: int) -> StepView:
        """Return one step."""
        ...

    def decisions(self, run_id: str) -> tuple[DecisionView, ...]:
        """Return the ledger."""
        ...

    def findings(self, run_id: str) -> tuple[FindingView, ...]:
        """Return the findings."""
        ...

    def checkpoints(self, run_id: str) -> tuple[CheckpointView, ...]:
        """Return the checkpoints."""
        ...

    def events(self, run_id: str, kind: str = "") -> tuple[EventView, ...]:
        """Return all other events, or those of one kind."""
        ...

    def alerts(self, *, run_id: str = "", state: str = "") -> tuple[AlertView, ...]:
        """Return the alerts; of a folder those that its runs would have raised."""
        ...

    def cells(
        self,
        run_id: str,
        metric: str,
        *,
        points: int = 200,
        rows: int = 64,
        branch: Branch = "all",
        from_step: int | None = None,
        to_step: int | None = None,
    ) -> CellsReply:
        """Return a heat map."""
        ...

    def movers(self, run_id: str, step: int) -> tuple[MoverView, ...]:
        """Return which layers and ranks moved most up to a step."""
        ...

    def incidents(self, run_id: str) -> tuple[IncidentView, ...]:
        """Return what went wrong, each whole."""
        ...

    def annotations(self, run_id: str) -> tuple[AnnotationView, ...]:
        """Return what people wrote and the training announced."""
        ...

    def table(self, request: TableRequest) -> TableReply:
        """Return the rows that meet the request's conditions."""
        ...


@dataclass(frozen=True, slots=True)
class Opened:
    """A reader, and how to make it see what came since."""

    reader: Reader
    refresh: Callable[[], object]


@contextlib.contextmanager
def open_reader(
    folder: Path | None = None, *, collector: str = "", token_file: Path | None = None
) -> Iterator[Opened]:
    """Give a reader over ``folder``, else ``collector``, else what is found.

    Found are, in this order: the collector that the environment names, this user's own where it
    answers, and the folder VITALS_DIR (or ./vitals_runs).

    Raises:
        UsageError: there is nothing to read from.
    """
    if folder is not None:
        with open_folder(folder) as opened:
            yield opened
        return
    address = find_collector(collector, token_file)
    if address is not None:
        with CollectorClient(address.url, address.tokens.read) as client:
            yield Opened(client, lambda: None)
        return
    with open_folder(default_folder()) as opened:
        yield opened


def find_run(reader: Reader, id_or_name: str) -> RunSummary:
    """Return the run of that id, beginning of an id, or name; "" is the newest run.

    Raises:
        UsageError: there is none, or the beginning of an id fits several.
    """
    return choose_run(reader.runs(), id_or_name)


@contextlib.contextmanager
def open_folder(folder: Path) -> Iterator[Opened]:
    """Give a reader over a folder: one run's, or one with run directories."""
    from vitals_collector.ingest.folder import FolderIngest
    from vitals_collector.queries.folder_query import FolderQuery
    from vitals_collector.storage.store import open_store

    store = open_store("sqlite://")
    try:
        spools = FolderIngest(store, [folder])
        spools.poll()
        yield Opened(FolderQuery(store, clock=SystemClock()), spools.poll)
    finally:
        store.close()
