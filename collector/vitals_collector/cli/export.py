"""`vitals export`: every row of one stream of a run, as CSV or Parquet.

Steps are queried and written in parts, so memory does not depend on the length of the run.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from trainvitals import views
from trainvitals.cli.output import Format, write_rows
from trainvitals.errors import StorageError, UsageError
from vitals_collector.cli.opening import CollectorOptions, RunChoice
from vitals_collector.cli.writing import parquet_file, replace_atomically, write_parquet
from vitals_collector.queries.open import Reader

_ROWS = 20_000
"""Approximate number of rows in memory."""
_NO_LAST = 2**63 - 1
_WHOLE = ("step", "attempt", "time_unix_ns", "monotonic_ns", "rank")
"""Columns written to Parquet as integers; other numbers are floats."""

Columns = dict[str, Sequence[object]]


ExportStream = Literal["steps", "ranks", "layers", "scalars"]


def export(
    *,
    choice: RunChoice,
    stream: Annotated[ExportStream, typer.Option(help="Which rows.")] = "steps",
    form: Annotated[
        Literal["csv", "parquet"], typer.Option("--format", help="How to write them.")
    ] = "csv",
    output: Annotated[
        Path | None, typer.Option(help="Write to this file [default: stdout, CSV only].")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
    server: CollectorOptions,
) -> None:
    """Write all rows of a run's steps or ranks, or all values of its layers or scalars.

    A step that was trained again after a rollback has a row of each attempt.
    """
    with server.open(choice) as (opened, summary):
        stretches = _iter_column_chunks(opened.reader, summary, stream)
        if form == "parquet":
            with replace_atomically(_check_output_path(parquet_file(output), force=force)) as part:
                write_parquet(stretches, part, _arrow_type)
        elif output is None:
            _write_csv(stretches, sys.stdout)
        else:
            with (
                replace_atomically(_check_output_path(output, force=force)) as part,
                part.open("w", newline="") as to,
            ):
                _write_csv(stretches, to)


def _iter_column_chunks(
    reader: Reader, summary: views.RunSummary, stream: ExportStream
) -> Iterator[Columns]:
    """Yield the columns of a stream of a run for ``vitals export``, in parts."""
    if stream == "steps" or stream == "ranks":
        yield from _iter_table_chunks(reader, summary, stream)
        return
    metrics = reader.ask(views.RunQuestion(run_id=summary.run_id)).metrics
    for metric in metrics:
        if metric.startswith(f"{stream}."):
            yield from _iter_series_chunks(reader, summary, metric)


def _iter_table_chunks(
    reader: Reader, summary: views.RunSummary, table: Literal["steps", "ranks"]
) -> Iterator[Columns]:
    """Yield the exported columns of a run's table, in parts of some steps."""
    names: tuple[str, ...] = ()

    def ask(first: int, last: int) -> Columns | None:
        nonlocal names
        question = views.TableQuestion(
            table=table,
            run_id=summary.run_id,
            columns=names,
            from_step=first,
            to_step=last,
            limit=2 * _ROWS,
        )
        reply = reader.ask(question)
        names = names or reply.columns
        columns: Columns = dict(zip(reply.columns, reply.data, strict=True))
        return columns if _num_rows(columns) == reply.num_total else None

    yield from _query_in_parts(ask, summary.last_step)


def _iter_series_chunks(
    reader: Reader, summary: views.RunSummary, metric: str
) -> Iterator[Columns]:
    """Yield the exported columns of one metric, in parts of some steps."""
    stream, _, name = metric.partition(".")

    def ask(first: int, last: int) -> Columns | None:
        reply = reader.ask(
            views.SeriesQuestion(
                run_id=summary.run_id,
                metric=metric,
                branch="all",
                points=views.MAX_POINTS,
                from_step=first,
                to_step=last,
            )
        )
        if len(reply.step) < reply.num_total:
            return None
        marks = {(mark.step, mark.attempt): mark.kind for mark in reply.nonfinite}
        points = zip(reply.step, reply.attempt, reply.value, strict=True)
        values = [marks.get((s, a), "nan") if value is None else value for s, a, value in points]
        return {
            "step": reply.step,
            "attempt": reply.attempt,
            "time_unix_ns": reply.time_unix_ns,
            "layer" if stream == "layers" else "name": [name] * len(values),
            "value": values,
        }

    yield from _query_in_parts(ask, summary.last_step)


def _query_in_parts(ask: Callable[[int, int], Columns | None], last_step: int) -> Iterator[Columns]:
    """Yield exported columns in parts, each with as many steps as a response holds in full."""
    first, num_steps = -1, _ROWS // 2  # values from before the first step have step -1
    while first == -1 or first <= last_step:
        last = first + num_steps - 1
        # A scalar may have a step without a row of any rank.
        columns = ask(first, last if last < last_step else _NO_LAST)
        if columns is not None:
            yield columns
            first = last + 1
        elif num_steps > 1:
            num_steps //= 2
        else:
            raise StorageError(
                f"step {first} has more rows than one answer can hold",
                hint="`vitals query` with --where writes a part of them",
            )


def _num_rows(columns: Columns) -> int:
    """Return the number of rows in exported columns."""
    return len(next(iter(columns.values()), ()))


def _write_csv(stretches: Iterator[Columns], to: Any) -> None:
    """Write exported columns as CSV, with one header."""
    is_first = True
    for columns in stretches:
        rows = zip(*columns.values(), strict=True)
        write_rows(tuple(columns), rows, Format.CSV, with_header=is_first, to=to)
        is_first = False


def _arrow_type(arrow: Any, name: str, values: Sequence[object]) -> Any:
    """Return the Arrow type of a column in ``vitals export``."""
    if name in _WHOLE:
        return arrow.int64()
    return arrow.string() if any(isinstance(v, str) for v in values) else arrow.float64()


def _check_output_path(path: Path, *, force: bool) -> Path:
    """Return the path to export to: it does not exist, or may be overwritten."""
    if path.exists() and not force:
        raise UsageError(
            f"{path} exists", hint="write to another file, or overwrite it with --force"
        )
    return path
