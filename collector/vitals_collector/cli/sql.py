"""`vitals sql`: an SQL query on recorded data, next to a running collector.

The lake is attached read-only in this process, so that no query can block the collector.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from trainvitals.cli.main import report
from trainvitals.cli.options import Form
from trainvitals.cli.output import Format, write_table
from trainvitals.errors import StorageError, UsageError
from vitals_collector.cli.store import StoreChoice, data_dir

_GRACE_SECONDS = 2.0
"""Grace period: row operations can be interrupted, a single function on one long text cannot."""

Sql = Annotated[str, typer.Argument(help="One SELECT, or EXPLAIN of one; - reads it from stdin.")]
Memory = Annotated[int, typer.Option(help="Memory limit of the query, in MB.", min=32)]
Seconds = Annotated[float, typer.Option(help="Time limit of the query.", min=0.1)]
Limit = Annotated[int, typer.Option(help="Maximum number of rows.", min=1)]


def sql(
    *,
    question: Sql,
    choice: StoreChoice,
    form: Form = Format.TABLE,
    memory: Memory = 512,
    seconds: Seconds = 60.0,
    limit: Limit = 100_000,
) -> None:
    """Query the collector's data in DuckDB SQL, read-only, while it runs.

    Tables: runs, steps (rank 0), ranks, levels, layers, scalars, nodes, gpus, processes, decisions,
    findings, alerts, checkpoints, events, annotations. The guide "Query with SQL" has examples.
    """
    from vitals_collector.numbers.lake_sql import LakeReader, query_timeout_error
    from vitals_collector.storage.store import DATABASE_FILE, libpq_conninfo

    folder = data_dir(choice.data)
    lake, bucket = _lake_and_bucket(folder, choice.database)
    file = folder / DATABASE_FILE
    sql_text = sys.stdin.read() if question == "-" else question
    if not sql_text.strip():
        raise UsageError("the question is empty", hint="SELECT run_id, name FROM runs")
    with (
        LakeReader(
            lake,
            libpq_conninfo(choice.database) if choice.database else "",
            bucket=bucket,
            database=None if choice.database or not file.is_file() else file,
            memory_limit=f"{memory}MB",
            max_seconds=seconds,
        ) as reader,
        _exit_after(seconds + _GRACE_SECONDS, query_timeout_error(seconds)),
    ):
        answer = reader.ask(sql_text, max_rows=limit)
    write_table(answer.names, answer.rows, form)
    if answer.is_cut:
        typer.echo(f"only the first {limit} rows are written; --limit gives more", err=True)


def _lake_and_bucket(folder: Path, database: str) -> tuple[Path, str]:
    """Return the lake's directory for `vitals sql`, and the bucket of its files, if any."""
    from vitals_collector.numbers.lake_engine import S3, known_bucket
    from vitals_collector.storage.store import LAKE_FOLDER, known_lake

    lake = folder / LAKE_FOLDER
    if database:
        lake_place = known_lake(database)
        bucket = lake_place if lake_place.startswith(S3) else ""
        lake = lake if bucket or not lake_place else Path(lake_place)
        is_there = bool(lake_place)
    else:
        bucket = known_bucket(lake / "catalogue.sqlite")
        is_there = (lake / "catalogue.sqlite").exists()
    if not is_there:
        raise StorageError(
            f"there is no lake of numbers in {lake}",
            hint="name the data folder of a collector with --data, and its PostgreSQL, if it has "
            "one, with --database",
        )
    return lake, bucket


@contextlib.contextmanager
def _exit_after(seconds: float, error: StorageError) -> Iterator[None]:
    """End `vitals sql`, which does nothing else, if the engine cannot be interrupted."""

    def end() -> None:
        os._exit(report(error))

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
