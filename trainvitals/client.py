"""Read runs from Python: from a collector, or from run directories without a server.

    from trainvitals.client import Client

    with Client("vitals_runs") as client:
        loss = client.run().series("steps.loss")

The guide is ``docs/guides/python.md``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeVar

from msgspec.structs import replace

from trainvitals import arrays
from trainvitals.arrays import Cells, Series, Table
from trainvitals.errors import MissingDependencyError, UsageError
from trainvitals.io.client import CollectorAddress, CollectorClient
from trainvitals.io.lookup import choose_run, default_runs_directory, find_collector
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
"""Streams whose rows have no steps, so that they cannot be requested in parts."""


class Client:
    """Access to stored runs. Close it, or use it in a ``with``.

    Args:
        url: ``https://host:port`` of a collector, or a directory: a run's, or one with run
            directories. None: what the commands use, which is the collector of the environment,
            your own collector if it responds, otherwise the directory VITALS_DIR.
        token: token of a collector; by default from VITALS_TOKEN_FILE, otherwise from your own
            collector. ``annotate`` needs the scope ``control``.

    Raises:
        UsageError: ``url`` is neither a collector nor a directory with runs.
        MissingDependencyError: a package that reads directories is not installed.
    """

    def __init__(self, url: str | Path | None = None, token: str = "") -> None:
        self._stack = contextlib.ExitStack()
        self._control: CollectorClient | None = None
        self._is_closed = False
        is_url = isinstance(url, str) and url.startswith(("http://", "https://", UNPROVEN, UNIX))
        folder = Path(url) if url and not is_url else None
        collector = find_collector(str(url or "")) if folder is None else None
        if collector is not None:
            collector_tokens = collector.tokens
            self.where = collector.url
            self._reader = self._connect(collector, token or collector_tokens.read)
            self._control = self._connect(
                collector, token or collector_tokens.control or collector_tokens.read
            )
            self._refresh: Any = None
            return
        folder = folder or default_runs_directory()
        self.where = str(folder)
        opened = self._stack.enter_context(_folder_reader()(folder))
        # The reader of a directory has the same interface as the client of a collector.
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
        """Return the runs with all of these attributes, latest first; "" matches any.

        Args:
            name: name of the run.
            project: its project.
            user: its user.
            tag: one of its tags.
            state: ``running``, ``finished``, ``halted``, ``interrupted``, ``failed`` or ``lost``.
            health: ``healthy``, ``acting``, ``critical`` or ``unknown``.
        """
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
        """Return one run.

        Args:
            id_or_name: an id, the beginning of one, or a name; "" is the latest run.

        Raises:
            UsageError: no run matches, or several do.
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
        """Return rows that match conditions, as `vitals query` does.

        Args:
            table: ``runs``, ``steps``, ``ranks``, ``decisions``, ``findings``, ``alerts`` or
                ``events``.
            run_id: id of a run; required for steps and ranks.
            where: conditions that all must hold: ``loss > 3``, ``rank = 2``, ``name ~ gpt``.
            columns: columns in this order; none: all.
            branch: for steps and ranks. ``all`` has one row per attempt that trained a step, with
                the column ``attempt``; ``lineage`` leaves out discarded steps, ``discarded`` has
                only those.
            from_step: first step.
            to_step: last step, inclusive.
            newest_first: reverse order.
            limit: maximum number of rows; ``num_total`` of the result is the number of matches.
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
        """Read new data of a directory; a collector needs no refresh."""
        if self._refresh is not None:
            self._refresh()

    def close(self) -> None:
        """Close files and connections."""
        self._is_closed = True
        self._stack.close()

    def _ask(self, question: Question[Answer]) -> Answer:
        """Send a query to the collector or the directory; refuse if closed."""
        if self._is_closed:
            raise UsageError(
                f"this client of {self.where} is closed",
                hint="query within `with Client(...) as client:`, or open another client",
            )
        answer: Answer = self._reader.ask(question)
        return answer

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Client of {self.where}>"

    def _connect(self, collector: CollectorAddress, token: str) -> CollectorClient:
        """Open a collector client that is closed together with this one."""
        tls = collector.tokens.tls
        client = CollectorClient(collector.url, token, tls=tls, timeout=_TIMEOUT_SECONDS)
        return self._stack.enter_context(client)


class Run:
    """One run. ``summary`` is from the time of the query; every method queries again."""

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
        """The run's display name."""
        return self.summary.name

    def __repr__(self) -> str:
        summary = self.summary
        return f"<Run {summary.name!r} {summary.run_id}: {summary.state}, step {summary.last_step}>"

    def detail(self) -> RunDetail:
        """Return attempts, sources, settings, size and the list of series."""
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
            metric: such as ``steps.loss``, ``gpu.power_watts``, ``scalars.val_loss``,
                ``layers.NAME``.
            source: source of the rows; "" is rank 0, or the first GPU or node.
            branch: ``lineage`` is the curve of the current attempt and its ancestors, ``discarded``
                contains the discarded steps, ``all`` both.
            points: None: every point. A number (2 to 20,000): about this many, with the minimum and
                maximum of each bucket.
            from_step: first step; GPUs, nodes and processes have no steps.
            to_step: last step, inclusive.

        Raises:
            UsageError: the metric or source does not exist; the text suggests a similar name.
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
            return arrays.decode_series_reply(self._ask(question))
        curve = CurveQuestion(run_id=self.run_id, metric=metric, source=source, branch=branch)
        if metric.partition(".")[0] in _HOST_STREAMS:
            return arrays.join_curve_replies([self._ask(curve)])
        parts = [
            self._ask(replace(curve, from_step=first, to_step=last))
            for first, last in self._split_step_range(from_step, to_step)
        ]
        return arrays.join_curve_replies(parts)

    def _split_step_range(
        self, first: int | None, last: int | None
    ) -> list[tuple[int | None, int | None]]:
        """Return ranges of steps that are short enough for one response."""
        attempts = self.detail().attempts
        end = max((a.last_step for a in attempts), default=0) if last is None else last
        starts = range((first or 0) + _STEPS_AT_ONCE, end + 1, _STEPS_AT_ONCE)
        return list(zip([first, *starts], [*(start - 1 for start in starts), last], strict=True))

    def step(self, step: int) -> StepView:
        """Return one step: every rank's row, findings, decisions, and its samples."""
        return self._ask(StepQuestion(run_id=self.run_id, step=step))

    def decisions(self) -> tuple[DecisionView, ...]:
        """Return the decision log: action, reason, evidence and cost."""
        return self._ask(DecisionsQuestion(run_id=self.run_id))

    def findings(self) -> tuple[FindingView, ...]:
        """Return the findings of the detectors, by step."""
        return self._ask(FindingsQuestion(run_id=self.run_id))

    def incidents(self) -> tuple[IncidentView, ...]:
        """Return the incidents with story and cost, latest first."""
        return self._ask(IncidentsQuestion(run_id=self.run_id))

    def verdict(self) -> RunVerdict:
        """Return state, cause, action, cost, precedent and the next command, as sentences."""
        return self._ask(VerdictQuestion(run_id=self.run_id))

    def movers(self, step: int) -> tuple[MoverView, ...]:
        """Return the layers and ranks that changed most before a step, largest change first."""
        return self._ask(MoversQuestion(run_id=self.run_id, step=step))

    def checkpoints(self) -> tuple[CheckpointView, ...]:
        """Return the latest state of each checkpoint and snapshot, by step."""
        return self._ask(CheckpointsQuestion(run_id=self.run_id))

    def events(self) -> tuple[EventView, ...]:
        """Return all other events as lines of text, by time."""
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
        """Return a heat map: one metric of every rank, GPU, node or layer, over steps.

        Args:
            metric: such as ``steps.step_duration_seconds``, ``gpu.temperature_celsius``,
                ``layers.grad_norm``.
            points: approximate maximum number of columns.
            rows: maximum number of rows; the most unusual ones are returned.
            branch: ``all`` includes discarded steps, and a cell has the worst value of all
                attempts; ``lineage`` leaves them out.
            from_step: first step.
            to_step: last step, inclusive.
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
        return arrays.decode_cells_reply(self._ask(question))

    def table(self, table: TableName = "steps", **how: Any) -> Table:
        """Return rows of this run that match conditions; arguments as in ``Client.table``."""
        return self._client.table(table, run_id=self.run_id, **how)

    def annotations(self) -> tuple[AnnotationView, ...]:
        """Return the annotations, including changes announced with ``monitor.expect``."""
        return self._ask(AnnotationsQuestion(run_id=self.run_id))

    def annotate(self, step: int, text: str, *, by: str = "") -> AnnotationView:
        """Add a permanent annotation at a step; it is drawn on the curves.

        Args:
            step: the step.
            text: the annotation.
            by: author; default the login name.

        Raises:
            UsageError: the run is read from a directory.
            UnauthorizedError: the token lacks the scope ``control``.
        """
        control = self._client._control
        if control is None:
            raise UsageError(
                f"{self._client.where} is a directory, which is read-only; use a collector",
                hint="use the URL of a collector: Client('https://host:port')",
            )
        request = AnnotationRequest(step=step, text=text, by=by or os.environ.get("USER", ""))
        return control.annotate(self.run_id, request)


def _folder_reader() -> Any:
    """Return the function that opens a directory, from the entry point of the collector's code."""
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
