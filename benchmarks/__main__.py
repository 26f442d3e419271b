"""Prints the cost of a step's parts; exits 0. The numbers are this machine's and nobody else's."""

import argparse
import json
import sys

from rich.console import Console
from rich.table import Table

from benchmarks.measure import Cost
from benchmarks.parts import measure_parts
from benchmarks.training import measure_training


def main() -> int:
    """Measure everything and print it as a table or as JSON."""
    parser = argparse.ArgumentParser(prog="make bench ARGS=...", description=__doc__)
    parser.add_argument("--format", choices=("table", "json"), default="table")
    parser.add_argument("--quick", action="store_true", help="few repeats: does it run at all")
    arguments = parser.parse_args()
    costs = [*measure_parts(quick=arguments.quick), *measure_training(quick=arguments.quick)]
    if arguments.format == "json":
        sys.stdout.write(json.dumps([cost._asdict() for cost in costs], indent=2) + "\n")
    else:
        Console().print(render(costs))
    return 0


def render(costs: list[Cost]) -> Table:
    """Return the costs as a table."""
    table = Table(title="What Vitals costs here")
    table.add_column("what")
    table.add_column("median", justify="right")
    table.add_column("95 %", justify="right")
    for cost in costs:
        table.add_row(cost.what, f"{cost.median_us:,.1f} us", f"{cost.p95_us:,.1f} us")
    return table


if __name__ == "__main__":
    sys.exit(main())
