"""`vitals query`: rows of runs, steps, ranks, decisions and so on, by conditions."""

import sys
from collections.abc import Iterator
from typing import Annotated, cast, get_args

import typer
from msgspec.structs import replace

from trainvitals.cli.options import Dir
from trainvitals.errors import UsageError
from trainvitals.views import Branch, TableName, TableQuestion, TableReply
from vitals_collector.cli.opening import CollectorOptions, as_folder, choose_run, warn_of_unreadable
from vitals_collector.cli.writing import TableOutput

_OF_ONE_RUN = ("steps", "ranks")
_NAMES = ", ".join(get_args(TableName))

Table = Annotated[str, typer.Argument(help=f"One of {_NAMES}.")]
Run = Annotated[
    str,
    typer.Argument(
        help="Id, beginning of an id, name, or folder; if absent, all runs, and of steps and "
        "ranks the latest run."
    ),
]
Where = Annotated[
    list[str] | None,
    typer.Option("--where", help='A condition, such as "loss > 3" or "name ~ gpt"; repeatable.'),
]
Columns = Annotated[str, typer.Option(help="Columns to write, separated by commas [default: all].")]
OfBranch = Annotated[
    Branch,
    typer.Option(
        "--branch",
        help="For steps and ranks: all, lineage (without discarded steps), or discarded (only "
        "those).",
    ),
]
FromStep = Annotated[int | None, typer.Option(help="First step.")]
ToStep = Annotated[int | None, typer.Option(help="Last step, inclusive.")]
NewestFirst = Annotated[bool, typer.Option("--newest-first", help="Newest rows first.")]
Limit = Annotated[int, typer.Option(help="Maximum number of rows.", min=1)]


def query(
    *,
    table: Table,
    run: Run = "",
    folder: Dir = None,
    where: Where = None,
    columns: Columns = "",
    branch: OfBranch = "all",
    from_step: FromStep = None,
    to_step: ToStep = None,
    newest_first: NewestFirst = False,
    limit: Limit = 1_000,
    server: CollectorOptions,
    out: TableOutput,
) -> None:
    """Filter stored rows and write them as a table. All conditions must hold."""
    table_names = get_args(TableName)
    if table not in table_names:
        raise UsageError(
            f"the table is {table!r}; it must be one of {_NAMES}",
            hint="the table comes before the run: vitals query steps my-run",
        )
    request = TableQuestion(
        table=cast(TableName, table),
        where=tuple(where or ()),
        columns=tuple(name.strip() for name in columns.split(",") if name.strip()),
        branch=branch,
        from_step=from_step,
        to_step=to_step,
        newest_first=newest_first,
        limit=limit,
    )
    folder, run = as_folder(run, folder)
    with server.open_all(folder) as opened:
        if run or table in _OF_ONE_RUN:
            request = replace(request, run_id=choose_run(opened, run).run_id)
        else:
            warn_of_unreadable(opened.unreadable)
        reply = opened.reader.ask(request)
    out.write(dict(zip(reply.columns, reply.data, strict=True)))
    for line in _table_notes(reply, table):
        sys.stderr.write(f"{line}\n")


def _table_notes(reply: TableReply, table: str) -> Iterator[str]:
    """Yield notes of `vitals query` on its rows: those left out, and those that look the same."""
    num = len(reply.data[0]) if reply.data else 0
    if num < reply.num_total:
        yield f"{num} of {reply.num_total} rows; --limit {reply.num_total} has all"
    if reply.num_discarded:
        yield (
            f"rows of rolled-back steps that were not looked at: {reply.num_discarded}; "
            "--branch all looks at them too"
        )
    keys = ("step", "rank") if table == "ranks" else ("step",)
    columns = dict(zip(reply.columns, reply.data, strict=True))
    is_told_apart = (
        table not in _OF_ONE_RUN or "attempt" in columns or not {*keys} <= columns.keys()
    )
    if not is_told_apart and len(set(zip(*(columns[key] for key in keys), strict=True))) < num:
        yield "some steps were trained more than once; the column attempt tells them apart"
