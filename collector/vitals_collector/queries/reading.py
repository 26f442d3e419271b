"""Opens what a person asks about: a running collector, or run directories without any server."""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from trainvitals.clock import SystemClock
from trainvitals.errors import UsageError
from trainvitals.io.client import CollectorClient, discover_collector, read_tokens
from trainvitals.views import (
    Branch,
    CheckpointView,
    DecisionView,
    EventView,
    FindingView,
    RunDetail,
    RunSummary,
    SeriesReply,
    StepView,
)

DEFAULT_DIR = "vitals_runs"


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

    def events(self, run_id: str) -> tuple[EventView, ...]:
        """Return all other events."""
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
        with _from_folder(folder) as opened:
            yield opened
        return
    client = _client(collector, token_file)
    if client is not None:
        with client:
            yield Opened(client, lambda: None)
        return
    default = Path(os.environ.get("VITALS_DIR") or DEFAULT_DIR)
    if not default.is_dir():
        raise UsageError(
            f"no collector answers, and there is no folder {default}",
            hint="start `vitals collector`, or give a folder with run directories",
        )
    with _from_folder(default) as opened:
        yield opened


def find_run(reader: Reader, wanted: str) -> RunSummary:
    """Return the run of that id, beginning of an id, or name; "" is the newest run.

    Raises:
        UsageError: there is none, or the beginning of an id fits several.
    """
    runs = reader.runs()
    if not runs:
        raise UsageError("there are no runs yet", hint="`vitals demo` makes one")
    if not wanted:
        return runs[0]
    by_name = [run for run in runs if wanted == run.name]
    by_id = [run for run in runs if run.run_id.startswith(wanted.upper())]
    if len(by_id) > 1:
        raise UsageError(
            f"{wanted!r} fits {len(by_id)} runs: {', '.join(run.run_id for run in by_id[:3])}",
            hint="give more of the id",
        )
    for found in (by_id, by_name):  # of several runs of one name, the newest
        if found:
            return found[0]
    from vitals_collector.storage.store import UNKNOWN

    raise UsageError(
        f"there is no run {wanted!r}", hint="`vitals runs` lists ids and names", code=UNKNOWN
    )


def _client(collector: str, token_file: Path | None) -> CollectorClient | None:
    if collector:
        file = token_file or os.environ.get("VITALS_TOKEN_FILE") or None
        return CollectorClient(collector, read_tokens(file).read if file else _own_token(collector))
    found = discover_collector(os.environ)
    if found is None:
        return None
    token = read_tokens(token_file).read if token_file else found.tokens.read
    client = CollectorClient(found.url, token)
    # What the environment names must answer or say why; a file may be left over from a crash.
    if os.environ.get("VITALS_COLLECTOR_URL") or client.healthy():
        return client
    client.close()
    return None


def _own_token(collector: str) -> str:
    """Return the token of this user's own collector, if that is the one that was named."""
    found = discover_collector(os.environ)
    return found.tokens.read if found is not None and found.url == collector.rstrip("/") else ""


@contextlib.contextmanager
def _from_folder(folder: Path) -> Iterator[Opened]:
    from vitals_collector.queries.query import Query
    from vitals_collector.receiving.folder import FolderIngest
    from vitals_collector.storage.store import open_store

    store = open_store("sqlite://")
    try:
        spools = FolderIngest(store, [folder])
        spools.poll()
        yield Opened(Query(store, clock=SystemClock()), spools.poll)
    finally:
        store.close()
