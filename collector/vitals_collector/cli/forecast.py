"""`vitals forecast`: when a run ends, at what loss, and how far it is behind another."""

from typing import Annotated

import typer

from trainvitals.cli.output import Format, write_json, write_rows
from trainvitals.views import ForecastQuestion
from vitals_collector.cli.opening import Collector, Dir, Run, TokenFile, choose_run, open_run


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("forecast", epilog="Example: vitals forecast my-run --total-steps 100000")(
        show_forecast
    )


def show_forecast(
    run: Run = "",
    folder: Dir = None,
    total_steps: Annotated[
        int,
        typer.Option(
            min=0,
            help="Planned steps [default: what watch(total_steps=...) said].",
            show_default=False,
        ),
    ] = 0,
    against: Annotated[
        str, typer.Option(help="Another run: how many steps earlier it reached the current loss.")
    ] = "",
    collector: Collector = "",
    token_file: TokenFile = None,
    form: Annotated[Format, typer.Option("--format", help="table, json or csv.")] = Format.TABLE,
) -> None:
    """Show when a run ends and at what loss, each with an interval, or why there is no forecast.

    Assumes evaluations and saves at their rate so far, and fewer restarts.
    The final loss is the median of the last 5 % of the steps; four in five runs end within the
    interval.
    """
    with open_run(run, folder, collector, token_file) as (opened, summary):
        other = choose_run(opened, against).run_id if against else ""
        view = opened.reader.ask(
            ForecastQuestion(run_id=summary.run_id, total_steps=total_steps, other=other)
        )
    if form is Format.JSON:
        write_json(view)
        return
    write_rows(("field", "value"), [("run", view.name or view.run_id), *view.facts()], form)
