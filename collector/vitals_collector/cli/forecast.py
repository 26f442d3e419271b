"""`vitals forecast`: the end of a run, its final loss, and its lag behind another run."""

from typing import Annotated

import typer

from trainvitals.cli.options import FactsForm
from trainvitals.cli.output import Format, write_table
from trainvitals.views import ForecastQuestion
from vitals_collector.cli.opening import CollectorOptions, RunChoice, choose_run


def show_forecast(
    *,
    choice: RunChoice,
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
    server: CollectorOptions,
    form: FactsForm = Format.TABLE,
) -> None:
    """Show when a run ends and at what loss, each with an interval, or why there is no forecast.

    Assumes evaluations and saves at their rate so far, and fewer restarts.
    The final loss is the median of the last 5 % of the steps; four in five runs end within the
    interval.
    """
    with server.open(choice) as (opened, summary):
        other = choose_run(opened, against).run_id if against else ""
        view = opened.reader.ask(
            ForecastQuestion(run_id=summary.run_id, total_steps=total_steps, other=other)
        )
    rows = [("run", view.name or view.run_id), *view.facts()]
    write_table(("field", "value"), rows, form, body=view)
