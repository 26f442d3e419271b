"""Drills each loop by the real command, and compares each row with its promise."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from trainvitals.errors import UsageError
from trainvitals.jsonable import from_json, to_json
from vitals_bench.drill.loop import ALL_FAULTS, LOOPS, DrilledLoop
from vitals_bench.drill.place import user_place
from vitals_bench.rows import Cell, Grid, Row, at_most, exactly

_RANKS = 2
_BUDGET_SECONDS = 3600.0
"""Of one drill; its own default is 300."""
_QUICK = ("imagenet", ("nan_gradient", "killed_agent"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the command."""

    loops: tuple[str, ...] = ()
    """Scripts; all if empty."""
    modes: tuple[str, ...] = ()
    results: Path | None = None


class FaultRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row that the drill printed; other fields of its JSON are ignored."""

    fault: str
    outcome: str
    is_named_right: bool | None = None
    seconds: float | None = None
    reason: str = ""
    hint: str = ""


class _Printed(msgspec.Struct, frozen=True, kw_only=True):
    """JSON of the drill."""

    mode: str
    world_size: int
    rows: tuple[FaultRow, ...]


class DrillOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one drill."""

    title: str
    """Loop and mode."""
    exit_code: int
    seconds: float
    mode: str = ""
    rows: tuple[FaultRow, ...] = ()
    changed: tuple[str, ...] = ()
    """Files of the user that differ afterwards."""
    leftovers: tuple[str, ...] = ()
    error: str = ""
    """Last lines of the command's errors, if it printed no result."""


def drill_loop(loop: DrilledLoop, faults: Sequence[str]) -> DrillOutcome:
    """Run the drill of one loop as a user does, and look at what it changed."""
    drill = [sys.executable, "-m", "trainvitals", "drill", "--format", "json"]
    drill += ["--budget", f"{_BUDGET_SECONDS:g}"]
    for fault in faults:
        drill += ["--only", fault]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launch += [f"--nproc-per-node={_RANKS}", f"{loop.script}.py", *loop.arguments]
    with user_place(loop.script) as place:
        before, start = place.fingerprint(), time.monotonic()
        process = subprocess.run(
            [*drill, "--", *launch],
            cwd=place.project,
            env=place.environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        seconds = time.monotonic() - start
        leftovers, after = place.leftovers(), place.fingerprint()
    printed = _Printed(mode="", world_size=0, rows=())
    if process.stdout.startswith("{"):
        printed = from_json(process.stdout.encode(), _Printed)
    return DrillOutcome(
        title=loop.title,
        exit_code=process.returncode,
        seconds=seconds,
        mode=printed.mode,
        rows=printed.rows,
        changed=tuple(
            path for path in sorted({*before, *after}) if before.get(path) != after.get(path)
        ),
        leftovers=tuple(leftovers),
        error="" if printed.rows else process.stderr[-2000:],
    )


def is_as_promised(loop: DrilledLoop, row: FaultRow) -> bool:
    """Return whether a row has the expected result, for the expected reason."""
    outcome, text = loop.expected(row.fault)
    return row.outcome == outcome and (text in row.reason or text in row.hint)


def measure_drills(*, quick: bool, options: Options | None = None) -> Iterator[Row | Grid]:
    """Drill each loop; minutes for each."""
    options = options or Options()
    unknown = set(options.loops) - {loop.script for loop in LOOPS}
    if unknown:
        raise UsageError(
            f"no loop is named {', '.join(sorted(unknown))}",
            hint=f"choose from {', '.join(dict.fromkeys(loop.script for loop in LOOPS))}",
        )
    path = options.results
    stored = [] if path is None or not path.exists() else path.read_bytes().splitlines()
    earlier = [from_json(line, DrillOutcome) for line in stored]
    outcomes, missing = list[tuple[DrilledLoop, DrillOutcome]](), list[str]()
    for loop in _chosen(options, quick=quick):
        of_loop = [outcome for outcome in earlier if outcome.title == loop.title]
        drilled = {row.fault for outcome in of_loop for row in outcome.rows}
        faults = [fault for fault in (_QUICK[1] if quick else loop.faults) if fault not in drilled]
        if faults and loop.requires and not importlib.util.find_spec(loop.requires):
            missing.append(f"{loop.name}: {loop.requires} is not installed")
        elif faults:
            sys.stderr.write(f"{loop.title}\n")
            of_loop.append(drill_loop(loop, faults))
            if path is not None:
                with path.open("ab") as file:
                    file.write(to_json(of_loop[-1]) + b"\n")
        for outcome in of_loop:
            _show(loop, outcome)
        outcomes += [(loop, outcome) for outcome in of_loop]
    yield from figures(outcomes, missing)


def _chosen(options: Options, *, quick: bool) -> list[DrilledLoop]:
    names = options.loops or ((_QUICK[0],) if quick else ())
    chosen = [
        loop
        for loop in LOOPS
        if (not names or loop.script in names) and (not options.modes or loop.mode in options.modes)
    ]
    return chosen[:1] if quick else chosen


def _show(loop: DrilledLoop, outcome: DrillOutcome) -> None:
    """Print what differs from the promise."""
    lines = [f"{loop.title}: exit {outcome.exit_code}, {outcome.seconds:.0f} s {outcome.error}"]
    lines += [
        f"  not as promised: {row.fault}: {row.outcome}: {row.reason} -> {row.hint}"
        for row in outcome.rows
        if not is_as_promised(loop, row)
    ]
    lines += [f"  changed: {name}" for name in outcome.changed]
    lines += [f"  left: {name}" for name in outcome.leftovers]
    sys.stderr.write("\n".join(lines) + "\n")


def figures(
    outcomes: Sequence[tuple[DrilledLoop, DrillOutcome]], missing: Sequence[str] = ()
) -> Iterator[Row | Grid]:
    """Yield the figures, and the table of all rows."""
    rows = [(loop, row) for loop, outcome in outcomes for row in outcome.rows]
    num_right = sum(is_as_promised(loop, row) for loop, row in rows)
    num_failed = sum(not outcome.rows for _, outcome in outcomes)
    named = [row.is_named_right for _, row in rows if row.is_named_right is not None]
    breaks = [
        is_as_promised(loop, row)
        for loop, outcome in outcomes
        for row in outcome.rows
        if row.fault in loop.broken
    ]
    yield _share("rows as promised", num_right, len(rows))
    yield _share("ranks named right", sum(named), len(named))
    yield _share("broken promises found", sum(breaks), len(breaks))
    num_codes = sum(
        outcome.exit_code == loop.exit_code(row.fault for row in outcome.rows)
        for loop, outcome in outcomes
    )
    yield _share("exit codes as promised", num_codes, len(outcomes))
    for name, num in (
        ("drills without a result", num_failed),
        ("changed files of the user", sum(len(outcome.changed) for _, outcome in outcomes)),
        ("processes and files left", sum(len(outcome.leftovers) for _, outcome in outcomes)),
    ):
        yield Row(name=name, ours=num, unit="", goal=exactly(0), note=f"{len(outcomes)} drills")
    whole = [each for _, each in outcomes if len(each.rows) == len(ALL_FAULTS)]
    longest = max((outcome.seconds for outcome in whole), default=None)
    yield Row(
        name="a drill with all faults, longest", ours=longest, unit="s", goal=at_most(300.0),
        note="; ".join(missing),
    )  # fmt: skip
    yield _table(outcomes)


def _share(name: str, num: int, of: int) -> Row:
    return Row(
        name=name, ours=num / of if of else None, unit="", goal=exactly(1.0), note=f"{num} of {of}"
    )


def _table(outcomes: Sequence[tuple[DrilledLoop, DrillOutcome]]) -> Grid:
    lines: list[tuple[Cell, ...]] = []
    for loop in dict.fromkeys(loop for loop, _ in outcomes):
        of_loop = [outcome for each, outcome in outcomes if each == loop]
        by_fault = {row.fault: row for outcome in of_loop for row in outcome.rows}
        cells = [_cell(loop, by_fault.get(fault)) for fault in ALL_FAULTS]
        code = max(outcome.exit_code for outcome in of_loop)
        seconds = sum(outcome.seconds for outcome in of_loop)
        lines.append((loop.title, *cells, code, f"{seconds:.0f} s"))
    return Grid(
        title="Results of the drill, by loop and mode",
        columns=("loop", *ALL_FAULTS, "exit code", "duration"),
        rows=tuple(lines),
        note="Two ranks on gloo, in a project with files of W&B, MLflow and TensorBoard. The loops "
        "have the structure of the named programs, with tiny models. *(!)*: not as promised.",
        detail={"drills": [msgspec.to_builtins(outcome) for _, outcome in outcomes]},
    )


def _cell(loop: DrilledLoop, row: FaultRow | None) -> str | None:
    if row is None:
        return None
    return row.outcome if is_as_promised(loop, row) else f"{row.outcome} (!)"
