"""`vitals tail --follow`: progress of an active run, as a panel in a terminal, lines in a pipe."""

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec
import typer

from trainvitals.cli.output import format_time
from trainvitals.errors import VitalsError
from trainvitals.io.client import CollectorAddress, CollectorClient, open_collector_client
from trainvitals.io.lookup import DEFAULT_DIR, choose_run, find_collector
from trainvitals.io.rundir import RunDir, check_folder, is_run_id
from trainvitals.printable import printable
from trainvitals.units import humanize, humanize_count
from trainvitals.views import RunsQuestion, RunSummary
from vitals_collector.cli.opening import CollectorOptions, RunChoice, as_folder
from vitals_collector.cli.progress import ProgressReader, RunProgress
from vitals_collector.queries.open import OpenedReader, open_folder

if TYPE_CHECKING:
    from rich.console import Console

POLL_SECONDS, MAX_POLL_SECONDS = 1.0, 5.0
CPU_SHARE = 0.025
"""Maximum share of a core: a long poll, as of a run of a million steps, is followed by a pause."""
RESTART_SECONDS = 30.0
"""Maximum time for a failed or interrupted run to restart before it counts as ended."""

T = TypeVar("T")


def follow(choice: RunChoice, server: CollectorOptions, *, every: int) -> None:
    """Run ``vitals tail --follow`` until the run ends, or until Ctrl-C.

    If stdout is not a terminal, ``every`` is the number of steps between two lines.
    """
    display = _build_display(every)
    with (
        contextlib.suppress(KeyboardInterrupt),
        open_followed_run(choice, server) as (opened, run_id),
    ):
        _follow_run(ProgressReader(opened.reader, run_id), opened.refresh, display)


def _follow_run(
    reader: ProgressReader,
    refresh: Callable[[], object],
    display: "ProgressLines | LivePanel",
    *,
    sleep: Callable[[float], None] = time.sleep,
    time_ns: Callable[[], int] = time.time_ns,
    cpu_seconds: Callable[[], float] = time.process_time,
) -> None:
    """Poll a run for ``vitals tail --follow``; show its progress until it ended permanently."""
    ending, is_titled = RunEndCondition(), False
    while True:
        began = cpu_seconds()
        refresh()
        progress = reader.poll()
        summary = progress.summary
        if not is_titled:
            display.say(_panel_title(summary))
            is_titled = True
        for line in progress.happened:
            display.say(line)
        display.show(progress)
        if ending.reached(summary, time_ns()):
            break
        if ending.is_new:
            display.say(
                f"{summary.state} after step {progress.step:,}: waiting "
                f"{RESTART_SECONDS:.0f} s for a restart"
            )
        pause = (cpu_seconds() - began) / CPU_SHARE
        sleep(min(max(pause, POLL_SECONDS), MAX_POLL_SECONDS))
    display.say(_ending_line(progress, reader.how_it_ended()))


class RunEndCondition(msgspec.Struct):
    """Decides whether a run has ended permanently. Reads no clock."""

    down_since_ns: int | None = None
    is_new: bool = False
    """Whether the run was first found down at the previous poll."""

    def reached(self, summary: RunSummary, now_ns: int) -> bool:
        """Return whether a followed run has ended. torchrun and schedulers restart failed runs."""
        self.is_new = False
        if summary.state == "running":
            self.down_since_ns = None
            return False
        if summary.state in ("finished", "halted"):
            return True
        if self.down_since_ns is None:
            self.down_since_ns, self.is_new = now_ns, True
        down_since_ns = min(self.down_since_ns, summary.last_seen_unix_ns)
        return now_ns - down_since_ns >= RESTART_SECONDS * 1e9


@contextlib.contextmanager
def open_followed_run(
    choice: RunChoice, server: CollectorOptions
) -> Iterator[tuple[OpenedReader, str]]:
    """Provide the reader of the run that a command follows, once it has data."""
    folder, run = as_folder(choice.run, choice.folder)
    address = find_collector(server.collector, server.token_file) if folder is None else None
    if address is not None:
        with open_collector_client(address) as client:
            yield OpenedReader(client, lambda: None), run_of(client, address, run)
        return
    run_dir = run_dir_of(run, folder)
    # Only this run: data of others in the directory are not read.
    with open_folder(run_dir.path) as opened:

        def has_rows() -> bool:
            opened.refresh()
            return bool(opened.reader.ask(RunsQuestion()))

        _wait_for(has_rows, f"waiting for the first rows of run {run_dir.run_id}")
        yield opened, run_dir.run_id


def run_of(client: CollectorClient, address: CollectorAddress, run: str) -> str:
    """Return the id of the run that a command follows, once the collector has one."""
    waits = f"waiting for a run: the collector at {address.url} has none yet"
    return choose_run(_wait_for(lambda: client.ask(RunsQuestion()), waits), run).run_id


def run_dir_of(run: str, folder: Path | None) -> RunDir:
    """Return the directory of the run that a command follows, once it exists."""
    where = folder or Path(os.environ.get("VITALS_DIR") or DEFAULT_DIR)

    def find() -> RunDir | None:
        became_folder, named = as_folder(run, folder)
        return _run_dir(became_folder or where, named)

    return _wait_for(find, f"waiting for {f'{run}, or ' if run else ''}a run in {where}")


def _run_dir(folder: Path, run: str) -> RunDir | None:
    """Return the directory of the run that a command names; None while there is none.

    Raises:
        UsageError: it is a file, or none of its runs matches.
    """
    if not os.path.lexists(folder):
        return None
    check_folder(folder)
    if is_run_id(folder.absolute().name):
        return RunDir(folder.absolute())
    runs = [_NamedRunDir(run_dir) for run_dir in reversed(RunDir.find_all(folder))]
    return choose_run(runs, run).run_dir if runs else None


class _NamedRunDir:
    """A run directory in the form that ``choose_run`` takes."""

    def __init__(self, run_dir: RunDir) -> None:
        self.run_dir = run_dir
        self.run_id = run_dir.run_id

    @property
    def name(self) -> str:
        """Return the name of the run in this directory; "" without one."""
        try:
            info = self.run_dir.info()
        except (VitalsError, OSError):
            return ""
        return "" if info is None else info.name


def _wait_for(find: Callable[[], T | None], text: str) -> T:
    """Wait for a run or its rows; print once what ``vitals tail`` waits for."""
    result = find()
    if not result:
        typer.echo(text, err=True)
    while not result:
        time.sleep(POLL_SECONDS)
        result = find()
    return result


def _build_display(every: int) -> "ProgressLines | LivePanel":
    """Return the display of ``vitals tail --follow``: a panel in a terminal, lines in a pipe."""
    if not sys.stdout.isatty():
        return ProgressLines(every)
    from rich.console import Console

    console = Console(highlight=False)
    return ProgressLines(every) if console.is_dumb_terminal else LivePanel(console)


class ProgressLines:
    """One line every ``every`` steps."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._shown = 0, -1

    def show(self, progress: RunProgress) -> None:
        """Print ``vitals tail``'s line after enough steps, a rollback, or a new attempt's start."""
        attempt, last = self._shown
        is_soon = attempt == progress.attempt and progress.step < last + self._every
        if progress.step < 0 or is_soon:
            return
        self._shown = progress.attempt, progress.step
        self.say("  ".join(_status_texts(progress)))

    def say(self, line: str) -> None:
        """Write the line to stdout, for ``vitals tail --follow``."""
        sys.stdout.write(printable(line) + "\n")
        sys.stdout.flush()


def _status_texts(progress: RunProgress) -> list[str]:
    """Return the latest step's values and the run's health, for a line of ``vitals tail``."""
    values = _value_texts(progress)
    speed = values.pop("speed", "")
    named = [f"{name} {text}" for name, text in values.items()]
    return [*named, *([speed] if speed else []), progress.summary.health]


def _value_texts(progress: RunProgress) -> dict[str, str]:
    """Return the latest step's measured values as text, for ``vitals tail --follow``."""
    values = progress.values
    texts = {"step": f"{progress.step:,}"}
    for name, column in (("loss", "loss"), ("grad norm", "grad_norm"), ("lr", "learning_rate")):
        if column in values:
            texts[name] = _format_number(values[column])
    speeds = []
    if progress.steps_per_second is not None:
        speeds.append(f"{progress.steps_per_second:,.3g} steps/s")
    if progress.tokens_per_second is not None:
        speeds.append(f"{progress.tokens_per_second:,.0f} tokens/s")
    if "mfu_ratio" in values:
        speeds.append(f"MFU {humanize(values['mfu_ratio'], 'ratio')}")
    if speeds:
        texts["speed"] = "  ".join(speeds)
    return texts


def _format_number(value: float) -> str:
    """Return a value of ``vitals tail --follow`` as text, also NaN and infinities."""
    if math.isfinite(value):
        return f"{value:.4g}"
    return "NaN" if math.isnan(value) else ("inf" if value > 0 else "-inf")


class LivePanel:
    """A small panel at the end of the terminal, redrawn in place; lines are written above.

    The cursor stays visible, so that the terminal is usable however this process ends.
    """

    def __init__(self, console: "Console") -> None:
        self._console = console
        self._height = 0
        self._drawn = ""

    def show(self, progress: RunProgress) -> None:
        """Replace the previous panel of ``vitals tail --follow``."""
        from rich.panel import Panel
        from rich.table import Table
        from rich.text import Text

        summary = progress.summary
        grid = Table.grid(padding=(0, 2))
        grid.add_column(no_wrap=True, style="dim", min_width=len("grad norm"))
        grid.add_column(no_wrap=True, overflow="ellipsis")
        attempt = f" (attempt {progress.attempt})" if progress.attempt > 1 else ""
        rows = {"state": summary.state, "health": summary.health, **_value_texts(progress)}
        rows["step"] += attempt
        rows |= {"action": progress.last_action or "none", "alert": progress.last_alert or "none"}
        for name, text in rows.items():
            style = _STYLES.get(text, "red" if "NaN" in text and name != "action" else "")
            grid.add_row(name, Text(printable(text), style=style))
        title = Text(printable(summary.name or summary.run_id), overflow="ellipsis", no_wrap=True)
        with self._console.capture() as capture:
            self._console.print(Panel(grid, title=title, title_align="left", expand=False))
        self._drawn = capture.get()
        self._redraw_panel("")

    def say(self, line: str) -> None:
        """Write the line above the panel of ``vitals tail --follow``."""
        self._redraw_panel(printable(line) + "\n")

    def _redraw_panel(self, above: str) -> None:
        """Erase the panel in the terminal, write the lines above, and draw it again."""
        erase = f"\x1b[{self._height}A\r\x1b[J" if self._height else ""
        sys.stdout.write(f"{erase}{above}{self._drawn}")
        sys.stdout.flush()
        self._height = self._drawn.count("\n")


_STYLES = {"healthy": "green", "critical": "red", "unguarded": "red", "acting": "yellow"}


def _panel_title(summary: RunSummary) -> str:
    """Return the title of ``vitals tail --follow``: the run, its mode, ranks and start."""
    ranks = humanize_count(summary.world_size, "rank")
    named = f"{summary.name} ({summary.run_id})" if summary.name else summary.run_id
    return (
        f"run {named}: {summary.mode} mode, {ranks}, started {format_time(summary.started_unix_ns)}"
    )


def _ending_line(progress: RunProgress, said: str) -> str:
    """Return the last line of ``vitals tail --follow``: how the run ended."""
    summary = progress.summary
    steps = f"after step {progress.step:,}" if progress.step >= 0 else "before its first step"
    skips = f"{humanize_count(summary.num_skips, 'update')} skipped"
    rollbacks = humanize_count(summary.num_rollbacks, "rollback")
    _, _, reason = said.partition(": ")
    why = f": {reason}" if reason and summary.state != "finished" else ""
    if summary.state == "lost":
        why = ": its ranks and their agent stopped reporting"
    return f"{summary.state} {steps}{why} ({skips}, {rollbacks})"
