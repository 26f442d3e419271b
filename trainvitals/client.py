"""Runs from Python: ``Client`` asks a collector, or reads run directories without any server.

    from trainvitals.client import Client

    with Client("vitals_runs") as client:
        loss = client.run().series("steps.loss")

The guide ``docs/guides/python.md`` goes through all of it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from msgspec.structs import replace

from trainvitals import arrays
from trainvitals.arrays import Cells, Series, Table
from trainvitals.errors import MissingDependencyError, UsageError
from trainvitals.io.client import CollectorAddress, CollectorClient
from trainvitals.io.lookup import choose_run, default_folder, find_collector
from trainvitals.io.server_identity import UNIX, UNPROVEN
from trainvitals.question import Question
from trainvitals.views import (
    AnnotationRequest,
    AnnotationsQuestion,
    AnnotationView,
    Branch,
    CellsQuestion,
    CheckpointsQuestion,
    CheckpointView,
    CurveQuestion,
    DecisionsQuestion,
    DecisionView,
    EventsQuestion,
    EventView,
    FindingsQuestion,
    FindingView,
    IncidentsQuestion,
    IncidentView,
    MoversQuestion,
    MoverView,
    RunDetail,
    RunQuestion,
    RunsQuestion,
    RunSummary,
    RunVerdict,
    SeriesQuestion,
    StepQuestion,
    StepView,
    TableName,
    TableQuestion,
    VerdictQuestion,
)

Answer = TypeVar("Answer")
READERS = "trainvitals.readers"
"""Entry point group: ``folder`` opens run directories. The core imports no program by name."""

_STEPS_AT_ONCE = 1_000_000
_TIMEOUT_SECONDS = 60.0
_HOST_STREAMS = ("gpu", "node", "process")
"""Their rows have no steps by which they could be asked for in parts."""


class Client:
    """Everything that is stored of some runs. Close it, or use it in a ``with``.

    Args:
        url: ``https://host:port`` of a collector, or a folder: one run's, or one with run
            directories. Nothing is what the commands find: the collector that the environment
            names, your own where it answers, and else the folder VITALS_DIR.
        token: of a collector; by default what VITALS_TOKEN_FILE, else the file of your own
            collector has. ``annotate`` needs one that may control.

    Raises:
        UsageError: there is nothing of that name to read from.
        MissingDependencyError: a folder is read by the collector's code, which is not installed.
    """

    def __init__(self, url: str | Path | None = None, token: str = "") -> None:
        self._stack = contextlib.ExitStack()
        self._control: CollectorClient | None = None
        self._is_closed = False
        is_url = isinstance(url, str) and url.startswith(("http://", "https://", UNPROVEN, UNIX))
        folder = Path(url) if url and not is_url else None
        collector = find_collector(str(url or "")) if folder is None else None
        if collector is not None:
            own = collector.tokens
            self.where = collector.url
            self._reader = self._connect(collector, token or own.read)
            self._control = self._connect(collector, token or own.control or own.read)
            self._refresh: Any = None
            return
        folder = folder or default_folder()
        self.where = str(folder)
        opened = self._stack.enter_context(_folder_reader()(folder))
        # What reads a folder answers every question as a collector's client would.
        self._reader, self._refresh = opened.reader, opened.refresh

    def runs(
        self,
        *,
        name: str = "",
        project: str = "",
        user: str = "",
        tag: str = "",
        state: str = "",
        health: str = "",
    ) -> list[Run]:
        """Return the runs with all of these attributes, the newest first; "" is any."""
        attributes = {
            "name": name,
            "project": project,
            "user": user,
            "state": state,
            "health": health,
        }
        return [
            Run(self, summary)
            for summary in self._ask(RunsQuestion())
            if all(getattr(summary, key) == value for key, value in attributes.items() if value)
            and (not tag or tag in summary.tags)
        ]

    def run(self, id_or_name: str = "") -> Run:
        """Return the run of that id, beginning of an id, or name; "" is the newest run.

        Raises:
            UsageError: there is none, or the beginning of an id fits several.
        """
        return Run(self, choose_run(self._ask(RunsQuestion()), id_or_name))

    def table(
        self,
        table: TableName,
        *,
        run_id: str = "",
        where: Sequence[str] = (),
        columns: Sequence[str] = (),
        branch: Branch = "all",
        from_step: int | None = None,
        to_step: int | None = None,
        newest_first: bool = False,
        limit: int = 1_000,
    ) -> Table:
        """Return rows that meet conditions, as `vitals query` writes them.

        Args:
            table: ``runs``, ``steps``, ``ranks``, ``decisions``, ``findings``, ``alerts``,
                ``events``.
            run_id: of this run; steps and ranks are asked of one.
            where: conditions that all hold: ``loss > 3``, ``rank = 2``, ``name ~ gpt``.
            columns: which ones, in this order; none is all of them.
            branch: of steps and ranks. ``all`` has a row of each attempt that trained a step, told
                apart by the column ``attempt``; ``lineage`` is without what rollbacks left
                behind, ``discarded`` is that alone.
            from_step: first step wanted.
            to_step: last step wanted, inclusive.
            newest_first: the other way around.
            limit: at most this many rows; ``num_total`` of the answer says how many there are.
        """
        question = TableQuestion(
            table=table,
            run_id=run_id,
            where=tuple(where),
            columns=tuple(columns),
            branch=branch,
            from_step=from_step,
            to_step=to_step,
            newest_first=newest_first,
            limit=limit,
        )
        return Table(self._ask(question))

    def refresh(self) -> None:
        """See what came into a folder since it was opened; a collector sees it by itself."""
        if self._refresh is not None:
            self._refresh()

    def close(self) -> None:
        """Close what was opened."""
        self._is_closed = True
        self._stack.close()

    def _ask(self, question: Question[Answer]) -> Answer:
        if self._is_closed:
            raise UsageError(
                f"this client of {self.where} is closed",
                hint="query within `with Client(...) as client:`, or open another client",
            )
        answer: Answer = self._reader.ask(question)
        return answer

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Client of {self.where}>"

    def _connect(self, collector: CollectorAddress, token: str) -> CollectorClient:
        tls = collector.tokens.tls
        client = CollectorClient(collector.url, token, tls=tls, timeout=_TIMEOUT_SECONDS)
        return self._stack.enter_context(client)


class Run:
    """One run. ``summary`` is as of when it was asked for; every method asks anew."""

    def __init__(self, client: Client, summary: RunSummary) -> None:
        self._client = client
        self._ask = client._ask
        self.summary = summary

    @property
    def run_id(self) -> str:
        """The run's id: a ULID."""
        return self.summary.run_id

    @property
    def name(self) -> str:
        """What people call it."""
        return self.summary.name

    def __repr__(self) -> str:
        summary = self.summary
        return f"<Run {summary.name!r} {summary.run_id}: {summary.state}, step {summary.last_step}>"

    def detail(self) -> RunDetail:
        """Return everything that is not a curve: attempts, sources, settings, size."""
        return self._ask(RunQuestion(run_id=self.run_id))

    def metrics(self) -> tuple[str, ...]:
        """Return the names of all series: ``stream.column``, ``scalars.NAME``, ``layers.NAME``."""
        return self.detail().metrics

    def series(
        self,
        metric: str,
        *,
        source: str = "",
        branch: Branch = "lineage",
        points: int | None = None,
        from_step: int | None = None,
        to_step: int | None = None,
    ) -> Series:
        """Return one curve.

        Args:
            metric: ``steps.loss``, ``gpu.power_watts``, ``scalars.val_loss``, ``layers.NAME``...
            source: whose rows; "" is rank 0, or the first GPU or node there is.
            branch: ``lineage`` is the curve of the present attempt and its ancestors,
                ``discarded`` what rollbacks left behind, ``all`` both.
            points: None is every point; a number is about so many (2 to 20,000), of which each
                bucket keeps its minimum and maximum.
            from_step: first step wanted; GPUs, nodes and processes have none.
            to_step: last step wanted, inclusive.

        Raises:
            UsageError: no such metric or source; where a name is close to a known one, it is said.
        """
        if points is not None:
            question = SeriesQuestion(
                run_id=self.run_id,
                metric=metric,
                source=source,
                branch=branch,
                points=points,
                from_step=from_step,
                to_step=to_step,
            )
            return arrays.drawn(self._ask(question))
        curve = CurveQuestion(run_id=self.run_id, metric=metric, source=source, branch=branch)
        if metric.partition(".")[0] in _HOST_STREAMS:
            return arrays.whole([self._ask(curve)])
        parts = [
            self._ask(replace(curve, from_step=first, to_step=last))
            for first, last in self._parts(from_step, to_step)
        ]
        return arrays.whole(parts)

    def _parts(self, first: int | None, last: int | None) -> list[tuple[int | None, int | None]]:
        """Return stretches of steps that are short enough for one answer; the ends stay open."""
        attempts = self.detail().attempts
        end = max((a.last_step for a in attempts), default=0) if last is None else last
        starts = range((first or 0) + _STEPS_AT_ONCE, end + 1, _STEPS_AT_ONCE)
        return list(zip([first, *starts], [*(start - 1 for start in starts), last], strict=True))

    def step(self, step: int) -> StepView:
        """Return what is known of one step: every rank's row, findings, decisions, its samples."""
        return self._ask(StepQuestion(run_id=self.run_id, step=step))

    def decisions(self) -> tuple[DecisionView, ...]:
        """Return the ledger: what was done about what, why, and what it cost."""
        return self._ask(DecisionsQuestion(run_id=self.run_id))

    def findings(self) -> tuple[FindingView, ...]:
        """Return what the detectors said, by step."""
        return self._ask(FindingsQuestion(run_id=self.run_id))

    def incidents(self) -> tuple[IncidentView, ...]:
        """Return what went wrong, each whole with its story and its cost, the newest first."""
        return self._ask(IncidentsQuestion(run_id=self.run_id))

    def verdict(self) -> RunVerdict:
        """Return state, cause, action, cost, precedent and the next command, as sentences."""
        return self._ask(VerdictQuestion(run_id=self.run_id))

    def movers(self, step: int) -> tuple[MoverView, ...]:
        """Return which layers and ranks moved most before a step, the first one most."""
        return self._ask(MoversQuestion(run_id=self.run_id, step=step))

    def checkpoints(self) -> tuple[CheckpointView, ...]:
        """Return the latest state of each checkpoint and snapshot, by step."""
        return self._ask(CheckpointsQuestion(run_id=self.run_id))

    def events(self) -> tuple[EventView, ...]:
        """Return all other events as lines for people, by time."""
        return self._ask(EventsQuestion(run_id=self.run_id))

    def cells(
        self,
        metric: str,
        *,
        points: int = 300,
        rows: int = 64,
        branch: Branch = "all",
        from_step: int | None = None,
        to_step: int | None = None,
    ) -> Cells:
        """Return a heat map: one metric of every rank, GPU, node, or layer, over steps.

        Args:
            metric: such as ``steps.step_duration_seconds``, ``gpu.temperature_celsius``,
                ``layers.grad_norm``.
            points: at most about so many columns.
            rows: at most so many rows, the most deviating ones.
            branch: ``all`` has rolled-back steps too, and a cell the worst of all attempts;
                ``lineage`` what came of it in the end.
            from_step: first step wanted.
            to_step: last step wanted, inclusive.
        """
        question = CellsQuestion(
            run_id=self.run_id,
            metric=metric,
            points=points,
            rows=rows,
            branch=branch,
            from_step=from_step,
            to_step=to_step,
        )
        return arrays.cells(self._ask(question))

    def table(self, table: TableName = "steps", **how: Any) -> Table:
        """Return rows of this run that meet conditions; the arguments of ``Client.table``."""
        return self._client.table(table, run_id=self.run_id, **how)

    def annotations(self) -> tuple[AnnotationView, ...]:
        """Return what people wrote and the training announced, by step."""
        return self._ask(AnnotationsQuestion(run_id=self.run_id))

    def annotate(self, step: int, text: str, *, by: str = "") -> AnnotationView:
        """Write a line at a step; it is drawn on the curves and kept for ever.

        Raises:
            UsageError: the run is read from a folder.
            UnauthorizedError: the token may not control.
        """
        control = self._client._control
        if control is None:
            raise UsageError(
                f"{self._client.where} is a folder and only read; an annotation is not kept there",
                hint="give the address of a collector: Client('https://host:port')",
            )
        request = AnnotationRequest(step=step, text=text, by=by or os.environ.get("USER", ""))
        return control.annotate(self.run_id, request)


def _folder_reader() -> Any:
    """Return what opens a folder: the entry point that the collector's code announces."""
    try:
        for point in entry_points(group=READERS, name="folder"):
            return point.load()
    except ModuleNotFoundError as error:
        missing = error.name or str(error)
    else:
        missing = "vitals_collector"
    raise MissingDependencyError(
        f"run directories are read by the collector's code, which lacks the package {missing}",
        hint="pip install trainvitals",
    )
