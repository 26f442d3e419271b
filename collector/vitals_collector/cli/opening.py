"""Opens the run that a command reads: in a directory, a store or a collector."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import typer

from trainvitals.cli.options import Collector, Dir, Run, TokenFile
from trainvitals.errors import StorageError, UsageError
from trainvitals.printable import printable
from trainvitals.views import RunsQuestion, RunSummary
from vitals_collector.queries.open import OpenedReader, find_run, open_reader


class RunChoice(msgspec.Struct, frozen=True):
    """Options that name a run."""

    run: Run = ""
    folder: Dir = None


class CollectorOptions(msgspec.Struct, frozen=True):
    """Options that name a collector."""

    collector: Collector = ""
    token_file: TokenFile = None

    @contextlib.contextmanager
    def open(self, choice: RunChoice) -> Iterator[tuple[OpenedReader, RunSummary]]:
        """Open the run that a command names; one in a directory is read without a server."""
        folder, run = as_folder(choice.run, choice.folder)
        with self.open_all(folder) as opened:
            yield opened, choose_run(opened, run)

    def open_all(self, folder: Path | None) -> contextlib.AbstractContextManager[OpenedReader]:
        """Open all runs of a command's directory, or of the collector without one."""
        return open_reader(folder, collector=self.collector, token_file=self.token_file)


def as_folder(run: str, folder: Path | None) -> tuple[Path | None, str]:
    """Return the directory and run of a command's arguments: a run may be a path.

    Text in the form of a path is a path, even if it does not exist: the error is then about the
    path.
    """
    if run and folder is None and (os.sep in run or os.path.isdir(run)):  # noqa: PTH112 - no error
        return Path(run), ""
    return folder, run


def warn_of_unreadable(unreadable: Mapping[str, str]) -> None:
    """Print on stderr which runs a command cannot read, and why."""
    for run_id, why in sorted(unreadable.items()):
        typer.echo(f"warning: run {run_id} cannot be read: {printable(why)}", err=True)


def choose_run(opened: OpenedReader, run: str) -> RunSummary:
    """Return the run that a command's argument names; "" is the latest one.

    Raises:
        UsageError: no run matches, or the start of an id matches several.
        StorageError: the run exists but cannot be read.
    """
    unreadable = opened.unreadable
    try:
        summary = find_run(opened.reader, run)
    except UsageError as error:
        meant = sorted(run_id for run_id in unreadable if run_id.startswith(run.upper()))
        if meant:
            run_id = meant[-1]
            raise StorageError(
                f"run {run_id} cannot be read: {unreadable[run_id]}",
                hint="check who may read it; if it is damaged, restore the folder from a backup",
            ) from error
        if opened.folder is None or opened.reader.ask(RunsQuestion()):
            raise
        raise UsageError(
            f"there are no metrics of any run in {opened.folder}",
            hint="a run's first metrics come within seconds of its first step; if none come, look "
            "into RUN/agents/NODE/agent.log",
        ) from error
    if not run:  # a later one may have been requested
        newer = {run_id: why for run_id, why in unreadable.items() if run_id > summary.run_id}
        warn_of_unreadable(newer)
    return summary
