"""`vitals bench ...`: measures, prints, and leaves judging to the reader."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainvitals.errors import StorageError

if TYPE_CHECKING:
    from vitals_bench.rows import Row


class Format(StrEnum):
    """How rows are printed."""

    TABLE = "table"
    JSON = "json"


Quick = Annotated[
    bool, typer.Option("--quick", help="Small models and few rounds: does it run at all.")
]
Output = Annotated[Format, typer.Option("--format", help="How rows are printed.")]
Page = Annotated[Path | None, typer.Option(help="Also write this page of docs/.")]


def register(app: typer.Typer) -> None:
    """Add `vitals bench` with its benches."""
    bench = typer.Typer(
        help="Measure what Vitals costs on this machine, beside what others cost.",
        epilog="Example: vitals bench --quick",
        invoke_without_command=True,
    )
    bench.callback()(bench_all)
    bench.command("guard", epilog="Example: vitals bench guard --format json")(bench_guard)
    bench.command("parts", epilog="Example: vitals bench parts")(bench_parts)
    app.add_typer(bench, name="bench")


def bench_all(
    context: typer.Context,
    quick: Quick = False,
    output: Output = Format.TABLE,
    page: Page = None,
) -> None:
    """Measure what Vitals costs on this machine, beside what others cost; alone, runs every bench.

    A goal that was missed is said and is no failure: the exit code is 1 only where a bench could
    not run.
    """
    if context.invoked_subcommand is None:
        _run(("guard", "parts"), quick=quick, output=output, page=page)


def bench_guard(quick: Quick = False, output: Output = Format.TABLE) -> None:
    """Measure the guard: norms, clip, exact skips, verdicts, and saying a step."""
    _run(("guard",), quick=quick, output=output, page=None)


def bench_parts(quick: Quick = False, output: Output = Format.TABLE) -> None:
    """Measure the parts of the way that a row takes: reader, wire, judge."""
    _run(("parts",), quick=quick, output=output, page=None)


def _benches() -> Mapping[str, Mapping[str, Callable[..., Iterator[Row]]]]:
    from vitals_bench import guard, parts

    return {"guard": guard.PARTS, "parts": {"parts": parts.measure_parts}}


def _run(names: tuple[str, ...], *, quick: bool, output: Format, page: Path | None) -> None:
    from rich.console import Console

    from vitals_bench import page as pages

    about = pages.facts()
    found: dict[str, list[Row]] = {}
    failed = False
    for name in names:
        found[name] = []
        for part, measure in _benches()[name].items():
            typer.echo(f"measuring {name}: {part}", err=True)
            try:
                with contextlib.redirect_stdout(sys.stderr):  # peers talk; stdout is for rows
                    found[name] += measure(quick=quick)
            except Exception as error:  # noqa: BLE001 - the other parts are measured all the same
                failed = True
                typer.echo(
                    f"{name}: {part} could not run: {type(error).__name__}: {error}", err=True
                )
    if output is Format.JSON:
        typer.echo(json.dumps([row.plain() for rows in found.values() for row in rows], indent=2))
    else:
        console = Console(width=None if sys.stdout.isatty() else 200)
        for name, rows in found.items():
            console.print(pages.table(f"vitals bench {name}", rows))
        console.print("\n".join(f"{what}: {text}" for what, text in about.items()))
    if page is not None:
        try:
            page.write_text(pages.markdown(about, found))
        except OSError as error:
            raise StorageError(
                f"{page} cannot be written: {error.strerror}", hint="choose another --page"
            ) from error
    if failed:
        raise typer.Exit(1)
