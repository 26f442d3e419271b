"""What every command that looks back is asked with: a run, and where it is to be read."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from trainvitals.views import RunSummary
from vitals_collector.queries.open import Opened, find_run, open_reader

Run = Annotated[
    str,
    typer.Argument(
        help="Id, beginning of an id, name, or folder; of a folder, or if absent, the newest run."
    ),
]
Dir = Annotated[Path | None, typer.Option("--dir", help="Folder with run directories.")]
Collector = Annotated[
    str, typer.Option("--collector", help="Address or data folder of a collector.")
]
TokenFile = Annotated[Path | None, typer.Option("--token-file", help="The collector's tokens.")]


@contextlib.contextmanager
def open_run(
    run: str, folder: Path | None, collector: str, token_file: Path | None
) -> Iterator[tuple[Opened, RunSummary]]:
    """Open what is asked about; a run given as a folder is read without any server."""
    folder, run = as_folder(run, folder)
    with open_reader(folder, collector=collector, token_file=token_file) as opened:
        yield opened, find_run(opened.reader, run)


def as_folder(run: str, folder: Path | None) -> tuple[Path | None, str]:
    """Return the folder to read, and the run in it; a run may be given as a folder itself."""
    if run and folder is None and Path(run).is_dir():
        return Path(run), ""
    return folder, run
