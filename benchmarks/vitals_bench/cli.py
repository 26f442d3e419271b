"""`python -m vitals_bench ...`: measures, prints, and leaves judging to the reader."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainvitals.cli.main import report
from trainvitals.errors import StorageError, UsageError, VitalsError

if TYPE_CHECKING:
    from vitals_bench.rows import Grid, Row


PROGRAM = "python -m vitals_bench"
Measure = Callable[..., "Iterator[Row | Grid]"]
Options = Mapping[str, Mapping[str, object]]
"""What the parts of a benchmark are called with besides ``quick``."""
APART = (
    *("hang", "straggler", "corruption", "repro", "judgement", "sizes", "attribution"),
    *("forecast", "explanation", "posttraining", "drill", "preflight", "gpu", "assistants"),
)
"""Benches that run only by their own name; their parts of the page stay when it is written."""


class Format(StrEnum):
    """How rows are printed."""

    TABLE = "table"
    JSON = "json"


class Trainings(StrEnum):
    """Which of the chosen trainings run."""

    ALL = "all"
    HEALTHY = "healthy"
    FAULTS = "faults"


Quick = Annotated[
    bool, typer.Option("--quick", help="Small models and few rounds: does it run at all.")
]
Output = Annotated[Format, typer.Option("--format", help="How rows are printed.")]
Page = Annotated[Path | None, typer.Option(help="Also write this page of docs/.")]
Part = Annotated[
    Path | None, typer.Option(help="Also write this bench's part of this page of docs/.")
]
Traces = Annotated[
    Path | None,
    typer.Option(help="Folder of logs: series/NAME.csv, and for detect labels.json."),
]
Split = Annotated[str, typer.Option(help="Which of these: the labels' split, or all.")]
Manual = Annotated[
    bool, typer.Option("--manual", help="Leave out those whose events were listed by a rule.")
]
MLflow = Annotated[str, typer.Option("--mlflow", help="MLflow's program [default: on PATH].")]
TensorBoard = Annotated[
    str, typer.Option("--tensorboard", help="TensorBoard's program [default: on PATH].")
]
Full = Annotated[
    bool, typer.Option("--full", help="Every policy and ten seeds of every world: many hours.")
]
Jobs = Annotated[
    int, typer.Option(help="Trainings at once, one thread each; 0 shows --results alone.", min=0)
]
RanksOf = Annotated[
    int, typer.Option(help="Processes of each training; 4 takes the worlds dealt out.", min=1)
]
Results = Annotated[
    Path | None,
    typer.Option(help="File of outcomes: those in it are not run again, new ones are added."),
]
Worlds = Annotated[
    str, typer.Option(help="Only worlds whose names hold one of these words, between commas.")
]
Policies = Annotated[
    str, typer.Option(help="Only these policies, between commas, such as guard,heal+probe.")
]
Kinds = Annotated[
    str, typer.Option(help="Only these kinds of training, between commas; all takes every kind.")
]
TrainingsPart = Annotated[Trainings, typer.Option(help="Healthy trainings, or with faults.")]
Seeds = Annotated[str, typer.Option(help="Only these seeds, between commas.")]
Minutes = Annotated[
    float, typer.Option(help="How long the simulated fleet of ingest trains.", min=0.5)
]


def build_app() -> typer.Typer:
    """Return the app with every benchmark on it."""
    app = typer.Typer(
        help="Measure what Vitals costs on this machine, beside what others cost.",
        epilog=f"Example: {PROGRAM} --quick",
        invoke_without_command=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        add_completion=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(bench_all)
    app.command("guard", epilog=f"Example: {PROGRAM} guard --format json")(bench_guard)
    app.command("parts", epilog=f"Example: {PROGRAM} parts")(bench_parts)
    app.command("checkpoint", epilog=f"Example: {PROGRAM} checkpoint --quick")(bench_checkpoint)
    app.command("detect", epilog=f"Example: {PROGRAM} detect --format json")(bench_detect)
    app.command("ingest", epilog=f"Example: {PROGRAM} ingest --quick")(bench_ingest)
    app.command("agent", epilog=f"Example: {PROGRAM} agent --quick")(bench_agent)
    app.command("query", epilog=f"Example: {PROGRAM} query --quick")(bench_query)
    app.command("cli", epilog=f"Example: {PROGRAM} cli --quick")(bench_cli)
    app.command("assistants", epilog=f"Example: {PROGRAM} assistants --quick")(bench_assistants)
    app.command("numbers", epilog=f"Example: {PROGRAM} numbers --quick")(bench_numbers)
    app.command("sizes", epilog=f"Example: {PROGRAM} sizes --quick")(bench_sizes)
    app.command("dashboard", epilog=f"Example: {PROGRAM} dashboard --quick")(bench_dashboard)
    app.command("hang", epilog=f"Example: {PROGRAM} hang --quick")(bench_hang)
    app.command("corruption", epilog=f"Example: {PROGRAM} corruption --quick")(bench_corruption)
    app.command("repro", epilog=f"Example: {PROGRAM} repro --quick")(bench_repro)
    app.command("straggler", epilog=f"Example: {PROGRAM} straggler --quick")(bench_straggler)
    app.command("judgement", epilog=f"Example: {PROGRAM} judgement --quick")(bench_judgement)
    app.command("attribution", epilog=f"Example: {PROGRAM} attribution --quick")(bench_attribution)
    app.command("explanation", epilog=f"Example: {PROGRAM} explanation --quick")(bench_explanation)
    app.command("posttraining", epilog=f"Example: {PROGRAM} posttraining --quick")(
        bench_posttraining
    )
    app.command("preflight", epilog=f"Example: {PROGRAM} preflight --quick")(bench_preflight)
    app.command("drill", epilog=f"Example: {PROGRAM} drill --quick")(bench_drill)
    app.command("forecast", epilog=f"Example: {PROGRAM} forecast --quick")(bench_forecast)
    app.command("gpu", epilog=f"Example: {PROGRAM} gpu check --resume")(bench_gpu)
    return app


def main(argv: Sequence[str] | None = None) -> int:
    """Run benchmarks; return the exit code where the command did not exit by itself."""
    try:
        build_app()(args=argv, prog_name=PROGRAM)
    except KeyboardInterrupt:
        return 130
    except VitalsError as error:
        return report(error)
    return 0


def bench_all(
    context: typer.Context,
    quick: Quick = False,
    output: Output = Format.TABLE,
    page: Page = None,
    traces: Traces = None,
    split: Split = "all",
    manual: Manual = False,
) -> None:
    """Measure the cost of Vitals on this machine, compared with peers; without a command, run all.

    Except judgement, whose trainings take hours, hang, straggler and corruption, whose ranks want
    the machine to themselves, repro, and sizes, which is docs/scale.md's.

    A missed goal is reported and is no failure: the exit code is 1 only if a benchmark could not
    run.
    """
    if context.invoked_subcommand is None:
        options = _detect_options(traces, split, manual)
        names = tuple(name for name in _benches() if name not in APART)
        _run(names, quick=quick, output=output, page=page, options=options)


def bench_guard(quick: Quick = False, output: Output = Format.TABLE, page: Part = None) -> None:
    """Measure the guard: norms, clip, exact skips, verdicts, and saying a step."""
    _run(("guard",), quick=quick, output=output, page=page)


def bench_parts(quick: Quick = False, output: Output = Format.TABLE) -> None:
    """Measure the parts of the way that a row takes: reader, wire, judge."""
    _run(("parts",), quick=quick, output=output, page=None)


def bench_checkpoint(
    quick: Quick = False,
    output: Output = Format.TABLE,
    page: Part = None,
) -> None:
    """Measure snapshots, restores, recoveries, and steps while a checkpoint is written."""
    _run(("checkpoint",), quick=quick, output=output, page=page)


def bench_detect(
    quick: Quick = False,
    output: Output = Format.TABLE,
    page: Part = None,
    traces: Traces = None,
    split: Split = "all",
    manual: Manual = False,
) -> None:
    """Compare the detectors with published rules: found and missed events, false alarms.

    On logs of known shapes, which it makes, and on labelled logs, where --traces names a folder.
    """
    options = _detect_options(traces, split, manual)
    _run(("detect",), quick=quick, output=output, page=page, options=options)


def bench_ingest(
    quick: Quick = False,
    output: Output = Format.TABLE,
    page: Part = None,
    mlflow: MLflow = "",
    minutes: Minutes = 3.0,
) -> None:
    """Measure the collector: CPU of a record, idle, with 4,096 ranks; rows and bytes it stores.

    Compared with VictoriaMetrics, Prometheus and MLflow, which are started if they are installed.
    """
    from vitals_bench.ingest import Asked

    options = {"ingest": {"asked": Asked(mlflow=mlflow, minutes=minutes)}}
    _run(("ingest",), quick=quick, output=output, page=page, options=options)


def bench_agent(quick: Quick = False, output: Output = Format.TABLE, page: Part = None) -> None:
    """Measure the agent with eight ranks and eight GPUs, and 50 agents of a sweep on one node."""
    _run(("agent",), quick=quick, output=output, page=page)


def bench_query(quick: Quick = False, output: Output = Format.TABLE, page: Part = None) -> None:
    """Measure how soon a run of a million steps, or of 4,096 ranks, is drawn and understood."""
    _run(("query",), quick=quick, output=output, page=page)


def bench_cli(quick: Quick = False, output: Output = Format.TABLE, page: Part = None) -> None:
    """Measure the CPU time of `vitals runs`, `show` and `why` on a run directory."""
    _run(("cli",), quick=quick, output=output, page=page)


def bench_assistants(
    quick: Quick = False, output: Output = Format.TABLE, page: Part = None
) -> None:
    """Measure each tool of `vitals mcp` on a run of a million steps."""
    _run(("assistants",), quick=quick, output=output, page=page)


def bench_numbers(quick: Quick = False, output: Output = Format.TABLE, page: Part = None) -> None:
    """Measure what it costs to store rows, in commits of several sizes, and while files merge."""
    _run(("numbers",), quick=quick, output=output, page=page)


def bench_sizes(quick: Quick = False, output: Output = Format.TABLE, page: Part = None) -> None:
    """Calculate what a fleet takes, 1 to 100,000 GPUs, from a few costs measured here."""
    _run(("sizes",), quick=quick, output=output, page=page)


def bench_dashboard(
    quick: Quick = False,
    output: Output = Format.TABLE,
    page: Part = None,
    mlflow: MLflow = "",
    tensorboard: TensorBoard = "",
) -> None:
    """Measure how soon the page of a million steps is painted, and what a refresh costs.

    In a headless Chromium, compared with a bare Streamlit page, TensorBoard and MLflow.
    """
    from vitals_bench.dashboard import Asked

    options = {"dashboard": {"asked": Asked(mlflow=mlflow, tensorboard=tensorboard)}}
    _run(("dashboard",), quick=quick, output=output, page=page, options=options)


def bench_hang(quick: Quick = False, output: Output = Format.TABLE, page: Part = None) -> None:
    """Let real jobs of 2 to 4 ranks hang, and show who is named, how soon, and with what.

    And how often somebody is paged for what is no hang. Waits of minutes are shortened, and the
    limits with them: the table says which.
    """
    _run(("hang",), quick=quick, output=output, page=page)


def bench_corruption(
    quick: Quick = False, output: Output = Format.TABLE, page: Part = None
) -> None:
    """Flip bits in real trainings of 2 to 4 ranks: seen, where, on which rank, and healed.

    And what a fingerprint misses, and what looking costs. Rounds of 50 steps are shortened to 5.
    """
    _run(("corruption",), quick=quick, output=output, page=page)


def bench_repro(quick: Quick = False, output: Output = Format.TABLE, page: Part = None) -> None:
    """Train with one fault each, play the bad step by `vitals repro`, and show what it names."""
    _run(("repro",), quick=quick, output=output, page=page)


def bench_straggler(quick: Quick = False, output: Output = Format.TABLE, page: Part = None) -> None:
    """Let a rank of a real training be late now and then, and show who is named, and by what.

    Also how often a rank is named if ranks are late in turns, or rarely. Half an hour.
    """
    _run(("straggler",), quick=quick, output=output, page=page)


def bench_judgement(
    quick: Quick = False,
    full: Full = False,
    output: Output = Format.TABLE,
    page: Part = None,
    jobs: Jobs = 1,
    results: Results = None,
    worlds: Worlds = "",
    policies: Policies = "",
    seeds: Seeds = "",
    ranks: RanksOf = 1,
    kinds: Kinds = "",
    part: TrainingsPart = Trainings.ALL,
) -> None:
    """Train small models, healthy and damaged, and show what the monitor did to each.

    Real trainings with the library in their loops, compared with the same ones without it.
    """
    from vitals_bench.judgement.jobs import Asked

    asked = Asked(
        jobs=jobs,
        full=full,
        results=results,
        worlds=_words(worlds),
        policies=_words(policies),
        seeds=tuple(int(seed) for seed in _words(seeds)),
        ranks=ranks,
        kinds=_words(kinds),
        part=part.value,
    )
    options = {"judgement": {"asked": asked}}
    _run(("judgement",), quick=quick, output=output, page=page, options=options)


def bench_attribution(
    quick: Quick = False, output: Output = Format.TABLE, page: Part = None
) -> None:
    """Damage small trainings on four ranks, and show which fault is named as what moved first.

    Real trainings with the library in their loops; half an hour or more.
    """
    _run(("attribution",), quick=quick, output=output, page=page)


def bench_explanation(
    quick: Quick = False,
    output: Output = Format.TABLE,
    page: Part = None,
    kinds: Annotated[
        str, typer.Option(help="Only these kinds of fault, comma-separated; healthy: none.")
    ] = "",
    seeds: Seeds = "",
    ranks: Annotated[
        str, typer.Option(help="Numbers of ranks, comma-separated; 1 trains in process.")
    ] = "1,2",
    placements: Annotated[
        str, typer.Option(help="Only these, comma-separated: alone, after, overlapping.")
    ] = "",
    results: Results = None,
    run: Annotated[bool, typer.Option(help="Train; otherwise only show --results.")] = True,
    quiet: Annotated[bool, typer.Option(help="Query healthy trainings too.")] = True,
    signals: Annotated[
        bool, typer.Option(help="Train all again with the optional signals at each step.")
    ] = False,
) -> None:
    """Damage small trainings, and score what `vitals postmortem` and `vitals why` state.

    Right, wrong or silent in step, rank, cause and first mover. All of it takes hours.
    """
    from vitals_bench.explanation.jobs import Options as Explained

    explained = Explained(
        kinds=_words(kinds),
        seeds=tuple(int(seed) for seed in _words(seeds)),
        ranks=(1,) if quick else tuple(int(num) for num in _words(ranks)),
        placements=_words(placements),
        results=results,
        is_run=run,
        has_quiet=quiet,
        has_signals=signals,
    )
    _run(
        ("explanation",), quick=quick, output=output, page=page,
        options={"explanation": {"options": explained}},
    )  # fmt: skip


def bench_posttraining(
    quick: Quick = False,
    output: Output = Format.TABLE,
    page: Part = None,
    kinds: Annotated[str, typer.Option(help="Only these trainings, comma-separated.")] = "",
    seeds: Seeds = "",
    results: Results = None,
) -> None:
    """Train GRPO, RLOO, PPO, DPO, SFT and reward models, healthy and with faults.

    A training takes a second or two; half of the seeds are held out. Count what is reported.
    """
    from vitals_bench.posttraining.measure import Options as Trained

    trained = Trained(
        kinds=_words(kinds),
        seeds=tuple(int(seed) for seed in _words(seeds)),
        results=results,
    )
    _run(
        ("posttraining",), quick=quick, output=output, page=page,
        options={"posttraining": {"options": trained}},
    )  # fmt: skip


def bench_preflight(
    quick: Quick = False,
    output: Output = Format.TABLE,
    page: Part = None,
    faults: Annotated[
        str, typer.Option(help="Only these, comma-separated, such as slow disk,clean.")
    ] = "",
    clean: Annotated[int, typer.Option(help="Preflights without a fault.", min=0)] = 50,
    budget: Annotated[float, typer.Option(help="Seconds for each preflight.", min=20.0)] = 60.0,
    results: Results = None,
) -> None:
    """Check three nodes of two ranks with and without a fault, and count which are named.

    Needs root: the nodes are network name spaces, and control groups limit ranks and disks.
    """
    from vitals_bench.preflight.measure import KINDS
    from vitals_bench.preflight.measure import Options as Checked

    if unknown := sorted({*_words(faults)} - KINDS.keys()):
        raise UsageError(f"there is no fault {', '.join(unknown)}", hint=", ".join(KINDS))
    checked = Checked(results=results, faults=_words(faults), clean=clean, budget=budget)
    _run(
        ("preflight",), quick=quick, output=output, page=page,
        options={"preflight": {"options": checked}},
    )  # fmt: skip


def bench_drill(
    quick: Quick = False,
    output: Output = Format.TABLE,
    page: Part = None,
    loops: Annotated[
        str, typer.Option(help="Only these scripts of drill/loops/, comma-separated.")
    ] = "",
    modes: Annotated[str, typer.Option(help="Only these modes, comma-separated.")] = "",
    results: Results = None,
) -> None:
    """Run `vitals drill` on well-known loops, and compare each row with what is promised.

    Three loops break a promise on purpose. Also counts files of the user that changed. 40 minutes.
    """
    from vitals_bench.drill.measure import Options as Drilled

    drilled = Drilled(loops=_words(loops), modes=_words(modes), results=results)
    options = {"drill": {"options": drilled}}
    _run(("drill",), quick=quick, output=output, page=page, options=options)


def bench_forecast(
    quick: Quick = False, output: Output = Format.TABLE, page: Part = None, traces: Traces = None
) -> None:
    """Hold where time went, ends, final losses, plans and noise scales against what is known.

    Simulated jobs know their time and end; losses are of small trainings and, where --traces names
    a folder, of logs; memory and noise are of small trainings on the CPU.
    """
    if traces is not None and not (traces / "series").is_dir():
        raise UsageError(f"{traces} has no folder series", hint="it holds the logs, NAME.csv")
    options = {"forecast": {"traces": traces}}
    _run(("forecast",), quick=quick, output=output, page=page, options=options)


def bench_gpu(
    groups: Annotated[
        list[str] | None,
        typer.Argument(help="check, tests, speed, agent or suite [default: all, in this order]."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Directory of the results.")] = Path("gpu-check"),
    only: Annotated[str, typer.Option(help="Only these parts, comma-separated.")] = "",
    resume: Annotated[
        bool, typer.Option("--resume", help="Leave out the parts that passed before in --out.")
    ] = False,
    jobs: Annotated[
        int, typer.Option(help="Parts at a time; 0: 5 with a GPU, otherwise 1.", min=0)
    ] = 0,
    limit: Annotated[float, typer.Option(help="Seconds for everything.", min=10.0)] = 560.0,
    commit: Annotated[
        str, typer.Option(help="Revision to store [default: that of the checkout].")
    ] = "",
) -> None:
    """Check the guard, the snapshots and the agent on GPUs, and measure their cost.

    Writes gpu_check.json and gpu_check.txt to --out after each part. Without a GPU, the parts that
    need one are skipped. Exits 1 if a part failed or did not run. In docs/figures.md, `make
    docs` shows the results in docs/gpu-results/.
    """
    from vitals_bench.gpu.parts import GROUP_SECONDS, load_parts
    from vitals_bench.gpu.runner import GpuCheck, Request

    for kind, names, known in (
        ("group", groups or (), GROUP_SECONDS),
        ("part", _words(only), load_parts()),
    ):
        if unknown := [name for name in names if name not in known]:
            raise UsageError(
                f"there is no {kind} {', '.join(unknown)}", hint=f"choose from {', '.join(known)}"
            )
    request = Request(
        out=out,
        groups=tuple(name for name in GROUP_SECONDS if not groups or name in groups),
        only=_words(only),
        is_resumed=resume,
        jobs=jobs,
        limit_seconds=limit,
        commit=commit,
    )
    if GpuCheck(request, typer.echo).run():
        raise typer.Exit(1)


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _detect_options(traces: Path | None, split: str, manual: bool) -> Options:
    """Return what the parts of detect are called with; a wrong folder is refused here, at once."""
    from vitals_bench.detect import Logs
    from vitals_bench.detect.logs import read_labels

    if traces is None:
        return {}
    logs = Logs(folder=traces, split=split, manual=manual)
    read_labels(logs)
    return {"detect": {"logs": logs}}


def _benches() -> Mapping[str, Mapping[str, Measure]]:
    from vitals_bench import (
        agent,
        assistants,
        attribution,
        checkpoint,
        commands,
        corruption,
        dashboard,
        detect,
        drill,
        explanation,
        forecast,
        guard,
        hang,
        ingest,
        judgement,
        numbers,
        parts,
        posttraining,
        preflight,
        query,
        sizes,
        straggler,
    )
    from vitals_bench.corruption import repro

    return {
        "guard": guard.PARTS,
        "parts": {"parts": parts.measure_parts},
        "detect": detect.PARTS,
        "checkpoint": checkpoint.PARTS,
        "ingest": ingest.PARTS,
        "query": query.PARTS,
        "cli": {"cli": commands.measure_commands},
        "assistants": {"assistants": assistants.measure_assistants},
        "agent": agent.PARTS,
        "numbers": numbers.PARTS,
        "sizes": sizes.PARTS,
        "dashboard": dashboard.PARTS,
        "hang": hang.PARTS,
        "corruption": corruption.PARTS,
        "repro": {"repro": repro.measure_repro},
        "straggler": straggler.PARTS,
        "judgement": judgement.PARTS,
        "attribution": attribution.PARTS,
        "forecast": forecast.PARTS,
        "explanation": explanation.PARTS,
        "posttraining": posttraining.PARTS,
        "preflight": preflight.PARTS,
        "drill": drill.PARTS,
    }


def _run(
    names: tuple[str, ...],
    *,
    quick: bool,
    output: Format,
    page: Path | None,
    options: Options | None = None,
) -> None:
    from vitals_bench import page as pages

    about = pages.facts()
    by_bench, failed = _measure(names, quick=quick, options=options or {})
    _print(by_bench, about, output)
    if page is not None:
        _write(page, by_bench, about)
    if failed:
        raise typer.Exit(1)


def _measure(
    names: tuple[str, ...], *, quick: bool, options: Options
) -> tuple[dict[str, list[Row | Grid]], bool]:
    """Return what each benchmark yielded, and whether a part of one could not run."""
    by_bench: dict[str, list[Row | Grid]] = {}
    failed = False
    for name in names:
        by_bench[name] = []
        for part, measure in _benches()[name].items():
            typer.echo(f"measuring {name}: {part}", err=True)
            try:
                with contextlib.redirect_stdout(sys.stderr):  # peers talk; stdout is for rows
                    by_bench[name] += measure(quick=quick, **options.get(name, {}))
            except VitalsError:
                raise  # a mistake in what was asked for, and its way out
            except Exception as error:  # noqa: BLE001 - the other parts are measured all the same
                failed = True
                typer.echo(
                    f"{name}: {part} could not run: {type(error).__name__}: {error}", err=True
                )
    return by_bench, failed


def _print(
    by_bench: Mapping[str, Sequence[Row | Grid]], about: Mapping[str, str], output: Format
) -> None:
    from rich.console import Console

    from vitals_bench import page as pages
    from vitals_bench.rows import Grid, Row

    if output is Format.JSON:
        typer.echo(
            json.dumps([entry.plain() for all_ in by_bench.values() for entry in all_], indent=2)
        )
        return
    console = Console(width=None if sys.stdout.isatty() else 200)
    for name, yielded in by_bench.items():
        rows = [entry for entry in yielded if isinstance(entry, Row)]
        console.print(pages.table(name, rows))
        for entry in yielded:
            if isinstance(entry, Grid):
                console.print(pages.grid_table(entry))
    console.print("\n".join(f"{what}: {text}" for what, text in about.items()))


def _write(
    page: Path, by_bench: Mapping[str, Sequence[Row | Grid]], about: Mapping[str, str]
) -> None:
    """Write the whole page, or one benchmark's part of a page that has others too.

    What other processors have on it stays.
    """
    from vitals_bench import page as pages

    try:
        before = page.read_text() if page.exists() else ""
        if len(by_bench) == 1 and before:
            ((name, yielded),) = by_bench.items()
            part = pages.section(name, yielded, about, before=before)
            page.write_text(pages.replaced(before, name, part))
        else:
            text = pages.markdown(about, by_bench, before=before)
            for name in APART:
                part = pages.section_of(before, name)
                text += f"\n{part}" if part and name not in by_bench else ""
            page.write_text(text)
    except OSError as error:
        raise StorageError(
            f"{page} cannot be written: {error.strerror}", hint="choose another --page"
        ) from error
