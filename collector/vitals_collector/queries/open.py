"""Opens the source of queries: a running collector, or run directories without a server."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from trainvitals.clock import SystemClock
from trainvitals.io.client import open_collector_client
from trainvitals.io.lookup import choose_run, default_runs_directory, find_collector
from trainvitals.question import Question
from trainvitals.views import RunsQuestion, RunSummary

A = TypeVar("A")


class Reader(Protocol):
    """Interface for queries; ``Query`` and ``CollectorClient`` return the same."""

    def ask(self, question: Question[A]) -> A:
        """Respond to a query about runs, from a collector or from a directory."""
        ...


class OpenedReader(msgspec.Struct, frozen=True):
    """A reader, and a function that makes new data visible to it."""

    reader: Reader
    refresh: Callable[[], object]
    folder: Path | None = None
    """Directory that is read; None: a collector is queried."""
    unreadable: Mapping[str, str] = {}
    """Runs of the directory that cannot be read completely, with the reasons."""
    unjudged: Mapping[str, str] = {}
    """Runs whose findings are not complete yet, with how far they are judged."""


@contextlib.contextmanager
def open_reader(
    folder: Path | None = None,
    *,
    collector: str = "",
    token_file: Path | None = None,
    waits: bool = True,
) -> Iterator[OpenedReader]:
    """Open the source of queries: ``folder``, otherwise ``collector``, otherwise the default.

    The default is the first of: the collector that the environment names, this user's collector if
    it responds, and the directory VITALS_DIR (or ./vitals_runs). ``waits`` is as in
    ``open_folder``.

    Raises:
        UsageError: there is nothing to read from.
    """
    if folder is not None:
        with open_folder(folder, waits=waits) as opened:
            yield opened
        return
    address = find_collector(collector, token_file)
    if address is not None:
        with open_collector_client(address) as client:
            yield OpenedReader(client, lambda: None)
        return
    with open_folder(default_runs_directory(), waits=waits) as opened:
        yield opened


def find_run(reader: Reader, id_or_name: str) -> RunSummary:
    """Query the run with that id, start of an id, or name; "" is the latest run.

    Raises:
        UsageError: no run matches, or the start of an id matches several.
    """
    return choose_run(reader.ask(RunsQuestion()), id_or_name)


@contextlib.contextmanager
def open_folder(folder: Path, *, waits: bool = True) -> Iterator[OpenedReader]:
    """Open a run directory, or one with run directories, for queries without a server.

    Args:
        folder: the directory.
        waits: whether a query for findings waits until the fleet detectors have processed a long
            run; otherwise another process runs them, and the response has the findings so far.

    Raises:
        UsageError: the directory does not exist.
        ConfigError: the price of a GPU-hour in the environment is invalid.
        StorageError: the directory cannot be read.
    """
    from vitals_collector.ingest.folder import FolderIngest
    from vitals_collector.queries.cost import price_of_environment
    from vitals_collector.queries.folder_query import FolderQuery
    from vitals_collector.storage.store import open_store

    store = open_store("sqlite://")
    try:
        spools = FolderIngest(store, [folder])
        spools.poll()
        price = price_of_environment()
        query = FolderQuery(
            store, clock=SystemClock(), gpu_hour_price=price, folder=folder, waits=waits
        )
        with contextlib.closing(query):
            yield OpenedReader(query, spools.poll, folder, spools.unreadable, query.unjudged)
    finally:
        store.close()
