"""CPU time of `vitals` commands that read a run directory, from the start of the process on."""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from vitals_bench.assistants import COLUMNS
from vitals_bench.measure import halves
from vitals_bench.query.filling import Filling, Size
from vitals_bench.rows import Row, at_most

_SIZE = Size(num_steps=400, num_metrics=len(COLUMNS), num_ranks=1, num_last=0, rounds=1)
_LIMIT_SECONDS = 0.25
COMMANDS = {
    "vitals runs": ("runs", "{runs}"),
    "vitals show": ("show", "{run}"),
    "vitals why": ("why", "{run}", "300"),
}
"""Commands, and the arguments of the process."""


def measure_commands(*, quick: bool) -> Iterator[Row]:
    """Yield the CPU time of each command, and of Python with the packages that they all need."""
    rounds = 2 if quick else 9
    with TemporaryDirectory(prefix="vitals-bench-") as folder:
        filling = Filling(_SIZE, COLUMNS)
        runs = filling.fill_folder(Path(folder) / "runs")
        run = runs / filling.run_id
        environ = {**os.environ, "XDG_CACHE_HOME": folder, "PYTHONPYCACHEPREFIX": folder}
        environ.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package is compiled
        for name, words in COMMANDS.items():
            arguments = [word.format(runs=runs, run=run) for word in words]
            program = ("-m", "trainvitals.cli.entry", *arguments)
            seconds = [_cpu_seconds(program, environ) for _ in range(rounds + 1)][1:]
            yield Row(
                name=f"{name}, a directory with a run of {_SIZE.num_steps} steps",
                ours=statistics.median(seconds),
                unit="s",
                goal=at_most(_LIMIT_SECONDS),
                spread=halves(seconds),
                note="CPU of the whole process",
            )
        packages = ("-c", "import numpy, sqlalchemy, typer")
        seconds = [_cpu_seconds(packages, environ) for _ in range(rounds + 1)][1:]
        yield Row(
            name="Python, and the import of NumPy, SQLAlchemy and Typer",
            ours=statistics.median(seconds),
            unit="s",
            spread=halves(seconds),
            note="part of each command above",
        )


def _cpu_seconds(arguments: Sequence[str], environ: Mapping[str, str]) -> float:
    """Return the user and system time of one Python process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, env=dict(environ)
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
