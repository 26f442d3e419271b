"""Opens what a person asks about: a running collector, or run directories without any server."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from trainvitals.clock import SystemClock
from trainvitals.io.client import client_of
from trainvitals.io.lookup import choose_run, default_folder, find_collector
from trainvitals.question import Question
from trainvitals.views import RunsQuestion, RunSummary

A = TypeVar("A")


class Reader(Protocol):
    """Whatever is asked; ``Query`` and ``CollectorClient`` answer alike."""

    def ask(self, question: Question[A]) -> A:
        """Return the answer."""
        ...


@dataclass(frozen=True, slots=True)
class Opened:
    """A reader, and how to make it see what came since."""

    reader: Reader
    refresh: Callable[[], object]
    folder: Path | None = None
    """The folder that is read; None: a collector is asked."""
    unreadable: Mapping[str, str] = field(default_factory=dict)
    """Of each run of the folder that cannot be read, or not all of it: why."""


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
        with client_of(address) as client:
            yield Opened(client, lambda: None)
        return
    with open_folder(default_folder()) as opened:
        yield opened


def find_run(reader: Reader, id_or_name: str) -> RunSummary:
    """Return the run of that id, beginning of an id, or name; "" is the newest run.

    Raises:
        UsageError: there is none, or the beginning of an id fits several.
    """
    return choose_run(reader.ask(RunsQuestion()), id_or_name)


@contextlib.contextmanager
def open_folder(folder: Path) -> Iterator[Opened]:
    """Give a reader over a folder: one run's, or one with run directories.

    Raises:
        UsageError: there is no such folder.
        ConfigError: the price of a GPU-hour in the environment is no price.
        StorageError: it may not be read.
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
        query = FolderQuery(store, clock=SystemClock(), gpu_hour_price=price, folder=folder)
        yield Opened(query, spools.poll, folder, spools.unreadable)
    finally:
        store.close()
