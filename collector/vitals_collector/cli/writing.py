"""Writes tables and reports to stdout or a file; replaces other content only with `--force`."""

import contextlib
import importlib
import io
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, TextIO

import msgspec
import typer

from trainvitals.cli.options import Force
from trainvitals.cli.output import Format, write_json, write_rows
from trainvitals.errors import MissingDependencyError, StorageError, UsageError

_NONFINITE = {"nan": float("nan"), "inf": float("inf"), "+inf": float("inf"), "-inf": -float("inf")}


class TableFormat(StrEnum):
    """Format of a table."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"
    PARQUET = "parquet"


TableForm = Annotated[TableFormat, typer.Option("--format", help="How to write the data.")]
Output = Annotated[
    Path | None, typer.Option("--output", help="Write to this file [default: stdout].")
]


class TableOutput(msgspec.Struct, frozen=True):
    """Options for the format and the file of a table."""

    form: TableForm = TableFormat.TABLE
    output: Output = None
    force: Force = False

    def write(self, columns: Mapping[str, Sequence[object]], body: object = None) -> None:
        """Write a command's columns, which have equal length, in the chosen format.

        Args:
            columns: by name; may contain ``nan``, ``inf`` and ``-inf`` for numbers.
            body: JSON to write instead of one object per row.
        """
        if self.form is TableFormat.PARQUET:
            buffer = io.BytesIO()
            path = parquet_file(self.output)
            write_parquet([columns], buffer)
            write_file(path, buffer.getvalue(), force=self.force)
            return
        with self.open() as to:
            rows = zip(*columns.values(), strict=True)
            if self.form is TableFormat.JSON:
                records = [dict(zip(columns, row, strict=True)) for row in rows]
                write_json(records if body is None else body, to=to)
            else:
                write_rows(tuple(columns), rows, Format(self.form.value), to=to)

    @contextlib.contextmanager
    def open(self) -> Iterator[TextIO]:
        """Yield stdout, or a buffer that is written to the command's file at the end."""
        if self.output is None:
            yield sys.stdout
            return
        text = io.StringIO()
        yield text
        write_file(self.output, text.getvalue().encode(), force=self.force)


def write_file(path: Path, content: bytes, *, force: bool = False) -> None:
    """Write a command's file completely; without ``force``, never replace other content.

    Raises:
        UsageError: a file with other content exists.
        StorageError: it cannot be written; the previous file is unchanged.
    """
    with _translate_os_errors(path):
        if path.exists() and not path.is_file():  # such as /dev/stdout; a directory is an OSError
            path.write_bytes(content)
            return
        if path.exists() and not force and path.read_bytes() != content:
            raise UsageError(
                f"{path} exists and its content differs",
                hint="write to another file, or overwrite it with --force",
            )
    with replace_atomically(path.resolve()) as part, part.open("xb") as to:
        to.write(content)


@contextlib.contextmanager
def replace_atomically(path: Path) -> Iterator[Path]:
    """Provide a file of a command that replaces ``path`` atomically once it is complete.

    Raises:
        StorageError: it cannot be written; the previous file is unchanged.
    """
    part = path.with_name(f".{path.name[:40]}-{os.getpid()}")
    with _translate_os_errors(path):
        try:
            yield part
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)


@contextlib.contextmanager
def _translate_os_errors(path: Path) -> Iterator[None]:
    """Translate an error of a command's output file to ours."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written: {error.strerror or error}",
            hint="choose a file in an existing folder that you may write to",
        ) from error


def parquet_file(output: Path | None) -> Path:
    """Return the Parquet file that a command writes; a terminal cannot show it."""
    if output is None:
        raise UsageError(
            "--format parquet is binary, so it cannot be written to stdout",
            hint="add --output FILE.parquet",
        )
    return output


def write_parquet(
    stretches: Iterable[Mapping[str, Sequence[object]]],
    to: Path | io.BytesIO,
    type_of: Callable[[Any, str, Sequence[object]], Any] | None = None,
) -> None:
    """Export columns in parts, as one Parquet table.

    Args:
        stretches: parts with the same columns.
        to: destination.
        type_of: Arrow type of a column by its name and first values, which all parts must have;
            None: the type of the values.
    """
    try:
        arrow: Any = importlib.import_module("pyarrow")
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"--format parquet needs the package {error.name}, which is not installed",
            hint="pip install 'trainvitals[collector]', or --format csv",
        ) from None
    with contextlib.ExitStack() as stack:
        writer = schema = None
        for columns in stretches:
            arrays = {name: unify_value_types(values) for name, values in columns.items()}
            if schema is None and type_of is not None:
                schema = arrow.schema([(n, type_of(arrow, n, v)) for n, v in arrays.items()])
            table = arrow.table(arrays, schema=schema)
            if writer is None:
                writer = stack.enter_context(parquet.ParquetWriter(to, table.schema))
            writer.write_table(table)
        if writer is None:
            parquet.write_table(arrow.table({"step": arrow.array([], arrow.int64())}), to)


def unify_value_types(values: Sequence[object]) -> list[object]:
    """Return exported values as one type: numbers if all are numbers, text if types are mixed."""
    non_null = [value for value in values if value is not None]
    numbers = [v for v in non_null if isinstance(v, int | float) and not isinstance(v, bool)]
    texts = [v for v in non_null if isinstance(v, str)]
    if len(numbers) + len(texts) == len(non_null) and all(text in _NONFINITE for text in texts):
        return [_NONFINITE[v] if isinstance(v, str) else v for v in values]
    if len({type(value) for value in non_null}) > 1:
        return [None if value is None else str(value) for value in values]
    return list(values)
