"""`vitals mirror`: copies a run, while it runs, to TensorBoard, W&B, MLflow, trackio or OTLP."""

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainvitals.cli.groups import add_commands
from trainvitals.cli.options import Dir, Run
from trainvitals.errors import UsageError, VitalsError
from trainvitals.io.client import open_collector_client
from trainvitals.io.lookup import find_collector
from trainvitals.io.setting_paths import default_data_dir
from trainvitals.printable import printable
from trainvitals.redaction import redact_text
from vitals_collector.cli.follow import RunEndCondition, open_followed_run, run_dir_of, run_of
from vitals_collector.cli.opening import CollectorOptions, RunChoice, as_folder

if TYPE_CHECKING:
    from vitals_plugins.bridges.mirrors.worker import TrackerTarget

POLL_SECONDS, MAX_POLL_SECONDS = 2.0, 10.0
CPU_SHARE = 0.1
"""Share of a core; a poll that takes longer, as of a long run's directory, is followed by a
pause."""
MAX_ERROR_CHARACTERS = 2_000


def register(app: typer.Typer) -> None:
    """Add the `vitals mirror` command."""
    example = "vitals mirror my-run --to tensorboard:tb --to wandb:my-project"
    add_commands(app, {"mirror": (mirror, example)})


def mirror(
    *,
    run: Run = "",
    to: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TRACKER",
            help="tensorboard:DIR, wandb[:[ENTITY/]PROJECT], mlflow:URI, trackio[:PROJECT] or "
            "otlp:URL; repeatable.",
        ),
    ] = None,
    folder: Dir = None,
    server: CollectorOptions,
    worker: Annotated[int, typer.Option(hidden=True)] = -1,
) -> None:
    """Mirror a running or finished run to trackers: steps, scalars, decisions.

    Each tracker has its own process. One that fails is restarted and continues with the next row.
    None affects the training. Ends with the run, and exits 1 if a tracker could not be written.
    """
    from vitals_plugins.bridges.mirrors.worker import TrackerTarget

    if not to:
        raise UsageError(
            "--to is missing: to which tracker?",
            hint="for example --to tensorboard:tb; repeat it for several",
        )
    targets = list(dict.fromkeys(TrackerTarget.parse(text) for text in to))
    if worker >= 0:
        _run_mirror_process(RunChoice(run, folder), targets[0], server, worker)
        return
    from vitals_plugins.bridges.mirrors.supervise import supervise

    where = _build_run_arguments(run, folder, server)
    exit_codes = supervise(
        targets,
        lambda target, pipe: [
            *(sys.executable, "-m", "trainvitals", "mirror", *where),
            *("--to", str(target), "--worker", str(pipe)),
        ],
        say=_write_stderr,
    )
    if any(exit_codes.values()):
        raise typer.Exit(1)


def _build_run_arguments(
    run: str, folder: Path | None, server: CollectorOptions
) -> tuple[str, ...]:
    """Return a mirror's arguments that name the existing run, so that "latest" does not change."""
    folder, run = as_folder(run, folder)
    address = None if folder is not None else find_collector(server.collector, server.token_file)
    if address is None:
        return (str(run_dir_of(run, folder).path),)
    with open_collector_client(address) as client:
        run_id = run_of(client, address, run)
    tokens = () if server.token_file is None else ("--token-file", str(server.token_file))
    return (run_id, "--collector", server.collector or address.url, *tokens)


def _run_mirror_process(
    choice: RunChoice, target: "TrackerTarget", server: CollectorOptions, pipe: int
) -> None:
    """Run in the process that mirrors the run to one target."""
    from vitals_plugins.bridges.mirrors import supervise
    from vitals_plugins.bridges.mirrors.trackers import open_tracker
    from vitals_plugins.bridges.mirrors.worker import (
        HeldError,
        MirrorStateFile,
        Tracker,
        mirror_run,
        state_folder,
    )

    ending, pause = RunEndCondition(), Pause()

    def open_it(*what: Any) -> Tracker:
        tracker = open_tracker(*what)
        pause.start_poll()  # opening the tracker is not part of a poll
        return tracker

    os.set_blocking(pipe, False)
    os.set_inheritable(pipe, False)  # otherwise child processes of a tracker keep it open
    with open_followed_run(choice, server) as (opened, run_id):
        states = state_folder(opened.folder, default_data_dir(os.environ), run_id)
        try:
            mirror_run(
                opened,
                run_id,
                target,
                MirrorStateFile(states, run_id, target),
                open_it,
                is_over=lambda summary: ending.reached(summary, time.time_ns()),
                alive=lambda num_rows: _signal_alive(pipe, num_rows),
                sleep=pause.sleep,
                say=lambda text: _write_stderr(f"{target}: {text}"),
            )
        except HeldError as error:
            _write_stderr(f"{target}: {error.text}")
            raise typer.Exit(supervise.HELD) from None
        except VitalsError:
            raise
        except Exception as error:  # noqa: BLE001 - the message may hold a whole response
            traceback.print_tb(error.__traceback__)
            _write_stderr(f"{target}: {type(error).__name__}: {str(error)[:MAX_ERROR_CHARACTERS]}")
            raise typer.Exit(1) from None


def _signal_alive(pipe: int, num_rows: int) -> None:
    """Write a sign of life for the mirrors' supervisor; raises if it has ended."""
    with contextlib.suppress(BlockingIOError):  # the pipe is full of signs already
        os.write(pipe, b"+" if num_rows else b".")


class Pause:
    """Waits between two polls: longer after a long poll."""

    def __init__(
        self,
        *,
        sleep: Callable[[float], None] = time.sleep,
        cpu_seconds: Callable[[], float] = time.process_time,
    ) -> None:
        self._sleep, self._cpu_seconds = sleep, cpu_seconds
        self._began = cpu_seconds()

    def start_poll(self) -> None:
        """Start a mirror's poll of its run."""
        self._began = self._cpu_seconds()

    def sleep(self) -> None:
        """End a mirror's poll, wait, and start the next."""
        took = self._cpu_seconds() - self._began
        self._sleep(min(max(took / CPU_SHARE, POLL_SECONDS), MAX_POLL_SECONDS))
        self.start_poll()


def _write_stderr(text: str) -> None:
    """Write a message of a mirror to stderr, without secrets."""
    sys.stderr.write(f"mirror to {redact_text(printable(text))}\n")
    sys.stderr.flush()
