"""Starts the ranks of a preflight with the launcher of the training, and collects their reports."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import IO

import msgspec

from trainvitals.cli.supervise import stop_process
from trainvitals.errors import UNREADABLE, UsageError
from vitals_plugins.lab.preflight.report import DONE, MARK, PreflightReport

PROGRAM = "vitals_plugins.lab.preflight.program"
RANK_SHARE = 0.7
"""Part of the budget for a rank after its start; torchrun and Python need the rest to start."""
STOP_SECONDS = 5.0
MAX_TAIL_LINES = 20


class Launched(msgspec.Struct, frozen=True):
    """Reports of the ranks, and the launcher's result."""

    reports: tuple[PreflightReport, ...]
    exit_code: int | None
    """None if it was stopped at the end of the budget."""
    tail: tuple[str, ...]
    """Last lines of the launcher's other output."""


def launcher_command(words: Sequence[str], settings: str, program: str = PROGRAM) -> list[str]:
    """Return the launcher's command with our program instead of the training script.

    Words before ``torchrun`` stay, such as ``srun`` or a container. The script and its arguments
    are dropped: a preflight never starts the training.

    Raises:
        UsageError: no word is torchrun, or torchrun does not accept its options.
    """
    from torch.distributed.run import get_args_parser

    start = _after_torchrun(words)
    options = list(words[start:])
    parser = get_args_parser()
    parser.exit_on_error = False
    try:
        # With a script as the last word, the options parse even if the user named no script.
        parsed = parser.parse_args([*options, program])
    except SystemExit:  # argparse printed the reason
        raise UsageError(
            f"torchrun does not accept {' '.join(options)!r}", hint="see torchrun --help"
        ) from None
    except Exception as error:
        raise UsageError(
            f"torchrun does not accept {' '.join(options)!r}: {error}", hint="see torchrun --help"
        ) from error
    num_options = len(options) - len(parsed.training_script_args)
    options = options[: max(num_options, 0)]
    # Both would change how the program is started.
    options = [word for word in options if word not in ("--no-python", "--no_python")]
    if not parsed.module:
        options.append("-m")
    return [*words[:start], *options, program, settings]


def _after_torchrun(words: Sequence[str]) -> int:
    for index, word in enumerate(words):
        if PurePath(word).name == "torchrun" or word == "torch.distributed.run":
            return index + 1
    raise UsageError(
        f"no torchrun in {' '.join(words)!r}",
        hint="write the command that starts the training: vitals preflight -- torchrun "
        "--nproc-per-node 8 train.py",
    )


def local_words() -> list[str]:
    """Return the launcher for this node: a rank per GPU, or two on the CPU."""
    import torch

    num_ranks = torch.cuda.device_count() or 2
    return [sys.executable, "-m", "torch.distributed.run", "--standalone",
            f"--nproc-per-node={num_ranks}"]  # fmt: skip


def launch(command: Sequence[str], environ: Mapping[str, str], *, seconds: float) -> Launched:
    """Run the command for at most this long (and ``STOP_SECONDS``); return all reports.

    Raises:
        UsageError: the command cannot be run.
    """
    deadline = time.monotonic() + seconds
    try:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**environ, "OMP_NUM_THREADS": "1"},  # as torchrun does
        )
    except OSError as error:
        raise UsageError(
            f"{command[0]!r} cannot be run: {error.strerror}",
            hint="vitals preflight -- torchrun --nproc-per-node 8 train.py",
        ) from error
    assert process.stdout is not None
    reports: dict[int, PreflightReport] = {}
    tail: deque[str] = deque(maxlen=MAX_TAIL_LINES)
    reader = threading.Thread(target=_read_lines, args=(process.stdout, reports, tail), daemon=True)
    reader.start()
    exit_code: int | None = None
    try:
        exit_code = process.wait(max(deadline - time.monotonic(), 0.0))
    except subprocess.TimeoutExpired:
        pass  # a rank hangs; the reports show which one
    finally:
        stop_process(process, STOP_SECONDS)
    # A rank that survives its launcher keeps the pipe open.
    reader.join(1.0)
    return Launched(tuple(reports[rank] for rank in sorted(reports)), exit_code, tuple(tail))


def _read_lines(output: IO[bytes], reports: dict[int, PreflightReport], tail: deque[str]) -> None:
    with output:
        for line in output:
            report = parse_line(line)
            if report is None:
                tail.append(line.decode(errors="replace").rstrip())
            else:
                keep_latest(reports, report)


def parse_line(line: bytes) -> PreflightReport | None:
    """Return the report in a line, which the launcher may have prefixed; None for other output."""
    _, mark, raw = line.partition(MARK)
    if not mark:
        return None
    try:
        return msgspec.json.decode(raw, type=PreflightReport)
    except UNREADABLE:  # a line that was cut when its rank was killed
        return None


def keep_latest(reports: dict[int, PreflightReport], report: PreflightReport) -> None:
    """Store a report unless a later one of the same rank is stored already."""
    known = reports.get(report.rank)
    if known is None or (known.stage < DONE and report.stage >= known.stage):
        reports[report.rank] = report
