"""`vitals replay`: judges a stored run, or any log, with the code that judges live runs."""

import contextlib
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import typer
from msgspec.structs import replace

from trainvitals.cli.options import Dir, ReportFormat
from trainvitals.cli.output import Format, write_json, write_rows
from trainvitals.clock import SystemClock
from trainvitals.errors import UsageError
from trainvitals.io.lookup import DEFAULT_DIR
from trainvitals.io.rundir import holds_runs
from trainvitals.io.setting_paths import default_data_dir
from trainvitals.plugins import load_plugin
from trainvitals.printable import printable
from trainvitals.units import humanize_count
from vitals_collector.cli.writing import write_file

if TYPE_CHECKING:
    from trainvitals.judged_log import JudgedStep
    from trainvitals.policy import JudgeConfig
    from trainvitals.records import StateRead

_EPISODE_ROWS = 20
"""Findings of one kind within this number of rows are one line of the table."""

_FILE_ENDINGS = (".csv", ".tsv", ".txt", ".json", ".gz", ".wandb")


RunOrLog = Annotated[
    str,
    typer.Argument(
        help="A run: id, beginning of an id, name, or folder (if absent, the newest). Or a "
        "log: a CSV file, JSON Lines, a training's output, trainer_state.json or its checkpoint's "
        "folder, TensorBoard's or wandb's folder or file."
    ),
]
Data = Annotated[Path | None, typer.Option(help="A collector's data folder, instead of --dir.")]


class ReplayLogOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options for a log: settings and columns."""

    mode: Annotated[
        Literal["observe", "guard", "heal"] | None,
        typer.Option(help="Mode to replay a log in [default: heal]."),
    ] = None
    config: Annotated[
        Path | None,
        typer.Option(help="Settings to judge by, as VITALS_CONFIG [default: a run's own]."),
    ] = None
    loss_kind: Annotated[
        Literal["minimize", "rl", "adversarial"] | None,
        typer.Option(
            help="Meaning of the loss, as in watch(loss_kind=...); with rl and adversarial only "
            "the gradient norms are judged [default: minimize; audit --task sets it]."
        ),
    ] = None
    no_clip: Annotated[
        bool, typer.Option("--no-clip", help="The loop that wrote the log does not clip.")
    ] = False
    expect: Annotated[
        list[int] | None,
        typer.Option(
            metavar="STEP",
            help="A change was planned at this step, as with monitor.expect(). Repeatable.",
        ),
    ] = None
    step: Annotated[str | None, typer.Option(help="Column of the steps in the log.")] = None
    loss: Annotated[str | None, typer.Option(help="Column of the losses.")] = None
    grad_norm: Annotated[str | None, typer.Option(help="Column of the gradient norms.")] = None
    lr: Annotated[str | None, typer.Option(help="Column of the learning rates.")] = None
    loss_scale: Annotated[str | None, typer.Option(help="Column of the loss scales.")] = None
    step_seconds: Annotated[str | None, typer.Option(help="Column of the seconds per step.")] = None
    tokens_per_second: Annotated[
        str | None, typer.Option(help="Column of the tokens per second.")
    ] = None
    data_seconds: Annotated[
        str | None, typer.Option(help="Column of the seconds a step waited for data.")
    ] = None

    def columns(self) -> dict[str, str | None]:
        """Return the options of `vitals replay` that name a log's column."""
        names = list(self.__struct_fields__)
        return {name: getattr(self, name) for name in names[names.index("step") :]}

    def log_option_names(self) -> list[str]:
        """Return the given options of `vitals replay` that apply only to a log."""
        values = {name: getattr(self, name) for name in self.__struct_fields__}
        names = [name for name, value in values.items() if value not in (None, False)]
        return [f"--{name.replace('_', '-')}" for name in names if name != "config"]

    def read(
        self, log: Path, *, task: str | None = None, scalars: Mapping[str, str] | None = None
    ) -> tuple[Any, Any]:
        """Return the log that a command names, and its settings.

        Args:
            log: file or directory.
            task: kind of a post-training run, whose scalars are read too.
            scalars: column of each post-training scalar with another name than Vitals knows.
        """
        from trainvitals.detect.posttraining.names import loss_kind_of_task

        importers = load_plugin("importers")
        columns = importers.ColumnChoice(**self.columns(), task=task, scalars=scalars or {})
        history = importers.read_history(log, columns)
        assumed = importers.Assumed(
            mode=self.mode or "heal",
            config=replace(
                _load_judge_settings(self.config),
                loss_kind=self.loss_kind or loss_kind_of_task(task) or "minimize",
            ),
            clips=not self.no_clip,
            expected=tuple(self.expect or ()),
        )
        return history, assumed


Plot = Annotated[
    Path | None, typer.Option(help="Also draw curves, findings and decisions: FILE.svg.")
]
Form = Annotated[ReportFormat, typer.Option("--format", help="table or json.")]


def replay(
    *,
    run: RunOrLog = "",
    folder: Dir = None,
    data: Data = None,
    settings: ReplayLogOptions,
    plot: Plot = None,
    form: Form = "table",
) -> None:
    """Replay a run or a log through the detectors: what they find, what Vitals does.

    Exits 1 if a decision differs from the one that the run recorded.
    """
    if plot is not None and plot.suffix != ".svg":
        raise UsageError(f"--plot is {plot}; the picture is SVG, so the name must end in .svg")
    is_path = bool(run) and folder is None and data is None and _is_path(Path(run))
    if is_path and not (Path(run).is_dir() and holds_runs(Path(run))):
        _replay_history(*settings.read(Path(run)), plot, form)
        return
    _reject_log_options(settings.log_option_names())
    if is_path:
        folder, run = Path(run), ""
    _replay_run(run, folder, data, settings.config, plot, form)


def _reject_log_options(named: Sequence[str]) -> None:
    """Refuse options of a log if `vitals replay` is given a run."""
    if named:
        raise UsageError(
            f"{', '.join(named)} apply only to a log; a run has these recorded",
            hint="give the log's file or folder as the first argument",
        )


def _is_path(path: Path) -> bool:
    """Return whether `vitals replay` is given a path, not a run's name.

    Raises:
        UsageError: it can only be a path, and does not exist.
    """
    if path.exists():
        return True
    if len(path.parts) > 1 or path.suffix in _FILE_ENDINGS:
        raise UsageError(f"there is no file or folder {path}", hint="`vitals runs` lists the runs")
    return False


def _load_judge_settings(config: Path | None) -> "JudgeConfig":
    """Return settings to replay with: a run's started here, ``config`` as its settings file."""
    from trainvitals.policy import load_judge_config

    environ = dict(os.environ)
    if config is not None:
        environ["VITALS_CONFIG"] = str(config)
    return load_judge_config(environ)


# ------------------------------------------------------------------------------- a stored run


def _replay_run(
    run: str,
    folder: Path | None,
    data: Path | None,
    config: Path | None,
    plot: Path | None,
    form: ReportFormat,
) -> None:
    """Replay the stored run that a command names, and print what the judge decides."""
    from vitals_collector.cli.opening import choose_run
    from vitals_collector.ingest.folder import FolderIngest
    from vitals_collector.queries.open import OpenedReader
    from vitals_collector.queries.query import Query
    from vitals_collector.report.replay import replay as judge_again
    from vitals_collector.storage.store import open_data_store, open_store

    settings = None if config is None else _load_judge_settings(config)
    if folder is None and data is None:
        folder = find_vitals_dir()
    where = data or default_data_dir(os.environ)
    store = open_data_store(where) if folder is None else open_store("sqlite://")
    with contextlib.closing(store):
        opened = OpenedReader(Query(store, clock=SystemClock()), refresh=lambda: None)
        if folder is not None:
            spools = FolderIngest(store, [folder])
            spools.poll()
            opened = replace(opened, folder=folder, unreadable=spools.unreadable)
        summary = choose_run(opened, run)
        done = judge_again(store, summary.run_id, config=settings)
    name = printable(summary.name or summary.run_id)
    judged_steps = done.judged()
    if plot is not None:
        _draw_plot(judged_steps, plot, name)
    _write_judged_steps(judged_steps, done.document(), form)
    differences = done.differences()
    for line in (*differences, *done.missing()):
        typer.echo(line, err=True)
    typer.echo(
        f"{name}: {humanize_count(len(done.records), 'step')}, "
        f"{humanize_count(len(done.decisions), 'decision')}: "
        + ("not as recorded" if differences else "all as recorded"),
        err=True,
    )
    if differences:
        raise typer.Exit(1)


def find_vitals_dir() -> Path | None:
    """Return the directory of runs for a command: VITALS_DIR's, or the working directory's one."""
    folder = Path(os.environ.get("VITALS_DIR") or DEFAULT_DIR)
    return folder if folder.is_dir() else None


# --------------------------------------------------------------------------------------- a log


def _replay_history(history: Any, assumed: Any, plot: Path | None, form: ReportFormat) -> None:
    """Replay a log that a command names, and print what the judge would decide."""
    from trainvitals.judged_log import export_judged_steps, judge_history

    importers = load_plugin("importers")
    assumptions = importers.assumptions(history, assumed)
    for line in (importers.about(history), *assumptions, *history.notes):
        typer.echo(printable(line), err=True)
    every = list(
        judge_history(
            history.steps,
            config=assumed.config,
            mode=assumed.mode,
            clips=assumed.clips,
            expected=assumed.expected,
        )
    )
    if plot is not None:
        _draw_plot(every, plot, Path(history.source).name)
    judged_steps = [
        judged
        for judged in every
        if judged.judgement.findings
        or judged.judgement.readings
        or judged.judgement.decision is not None
    ]
    _write_judged_steps(judged_steps, export_judged_steps(judged_steps), form)
    typer.echo(_counts_line(judged_steps), err=True)


def _counts_line(judged_steps: "Sequence[JudgedStep]") -> str:
    """Return the last line of ``vitals replay``: counts of findings and decisions."""
    findings = Counter(f.level for judged in judged_steps for f in judged.judgement.findings)
    counts = Counter(
        judged.judgement.decision.action
        for judged in judged_steps
        if judged.judgement.decision is not None
    )
    actions = ", ".join(f"{times} {action}" for action, times in counts.items())
    num = sum(len(judged.judgement.readings) for judged in judged_steps)
    probes = f"; the probe would run {humanize_count(num, 'time')}" if num else ""
    return (
        f"{humanize_count(findings['actionable'], 'actionable finding')}, "
        f"{findings['advisory']} advisory; {humanize_count(counts.total(), 'decision')}"
        f"{': ' if actions else ''}{actions}{probes}"
    )


# ------------------------------------------------------------------------------------- writing


def _write_judged_steps(
    judged_steps: "Sequence[JudgedStep]", body: dict[str, Any], form: ReportFormat
) -> None:
    """Print the findings and decisions of `vitals replay` as a table or JSON."""
    if form == "json":
        write_json(body)
        return
    rows = _replay_table_rows(judged_steps)
    if rows:
        write_rows(("row", "step", "what", "probe", "reason"), rows, Format.TABLE)


def _replay_table_rows(judged_steps: "Sequence[JudgedStep]") -> list[tuple[object, ...]]:
    """Return the lines of `vitals replay`: repeated entries are one line with their count."""
    from trainvitals.judged_log import is_prevented_by_healthy_probe

    open_at: dict[str, list[Any]] = {}
    lines: list[list[Any]] = []
    for judged in judged_steps:
        decision = judged.judgement.decision
        entries = [(f"finding {f.kind}", f.step, "", f.reason) for f in judged.judgement.findings]
        entries += [
            (f"question {read.trigger}", judged.record.step, *_reading_cells(read))
            for read in judged.judgement.readings
        ]
        if decision is not None:
            entries.append(
                (
                    f"decision {decision.action}",
                    decision.step,
                    "could rule it out"
                    if is_prevented_by_healthy_probe(decision)
                    else "not needed",
                    decision.reason,
                )
            )
        for what, step, probe, reason in entries:
            line = open_at.get(what)
            if line is not None and judged.row - line[5] <= _EPISODE_ROWS:
                line[5:] = [judged.row, step, line[7] + 1]
            else:
                line = [judged.row, step, what, probe, reason, judged.row, step, 1]
                lines.append(line)
                open_at[what] = line
    return [
        (row, step, what, probe, reason if times == 1 else f"{reason} ({times} up to step {last})")
        for row, step, what, probe, reason, _, last, times in lines
    ]


def _reading_cells(read: "StateRead") -> tuple[str, str]:
    """Return the table cells of a probe or evaluation in ``vitals replay``."""
    from trainvitals.judged_log import describe_query
    from trainvitals.policy.evidence import describe_reading

    is_answered = read.ratio is not None
    return (
        ("asked", describe_reading(read))
        if is_answered
        else ("would be asked", describe_query(read))
    )


def _draw_plot(judged_steps: "Sequence[JudgedStep]", plot: Path, title: str) -> None:
    """Write the SVG plot of `vitals replay`: the curves of judged steps, with marks."""
    from vitals_collector.report.curves import judged_curves, judged_marks
    from vitals_collector.report.svg_plot import curves_file

    drawn = curves_file(title, judged_curves(judged_steps), judged_marks(judged_steps))
    write_file(plot, drawn.encode(), force=True)
