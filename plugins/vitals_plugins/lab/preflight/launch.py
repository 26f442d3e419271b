"""Starts the ranks of a preflight with the launcher of the training, and collects their reports."""

from __future__ import annotations

import argparse
import re
import shutil
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
from vitals_plugins.lab.preflight.report import MARK, PreflightReport, merge_reports

PROGRAM = "vitals_plugins.lab.preflight.program"
RANK_SHARE = 0.7
"""Part of the budget for a rank after its start; torchrun and Python need the rest to start."""
STOP_SECONDS = 5.0
MAX_TAIL_LINES = 20
STARTERS = (
    *("srun", "mpirun", "mpiexec", "docker", "podman", "singularity", "apptainer"),
    *("env", "nice", "numactl", "taskset", "timeout", "uv", "poetry", "conda", "pixi"),
)
"""Programs that only start their arguments."""
_SHELLS = frozenset({"bash", "sh", "zsh", "dash", "make", "sbatch"})
_PYTHON_FLAGS = re.compile(r"-[bBdEiIOPqRsSuvx]+")
_FLAGS = ("--module", "--no-python", "--no_python", "--run-path", "--run_path")
"""Flags that change how torchrun starts its script."""
_OUTPUT = {"redirects": "0", "tee": "0", "local_ranks_filter": ""}
"""Options with which the reports would not reach the output."""
_HINT = (
    "write the command that starts the training: vitals preflight -- torchrun --nproc-per-node 8 "
    "train.py"
)


class Launched(msgspec.Struct, frozen=True):
    """Reports of the ranks, and the launcher's result."""

    reports: tuple[PreflightReport, ...]
    exit_code: int | None
    """None if it was stopped at the end of the budget."""
    tail: tuple[str, ...]
    """Last lines of the launcher's other output."""


def launcher_command(words: Sequence[str], settings: str, program: str = PROGRAM) -> list[str]:
    """Return the launcher's command with the preflight instead of the training script.

    Starters before torchrun stay, such as ``srun`` or a container. The script and its arguments
    are dropped: a preflight never starts the training.

    Raises:
        UsageError: another program starts torchrun, or torchrun does not accept its options.
    """
    start = _after_torchrun(words)
    options = list(words[start:])
    # With a script as the last word, the options parse even if the user named no script.
    parsed = _parse([*options, program])
    options = options[: max(len(options) - len(parsed.training_script_args), 0)]
    # argparse accepts an unambiguous beginning of an option.
    options = [
        word
        for word in options
        if word != "-m" and not (word.startswith("--") and any(f.startswith(word) for f in _FLAGS))
    ]
    for name, value in _OUTPUT.items():
        if getattr(parsed, name, value) != value:
            options.append(f"--{name.replace('_', '-')}={value}")
    arguments = [*options, "-m", program, settings]
    started = _parse(arguments)
    if [program, settings] != [started.training_script, *started.training_script_args]:
        raise UsageError(
            f"{' '.join(words[start:])!r} has options that a preflight cannot change",
            hint="write each option of torchrun as a separate word with --",
        )
    return [*words[:start], *arguments]


def _parse(words: list[str]) -> argparse.Namespace:
    """Parse the torchrun options for a preflight; an error if torchrun would not accept them."""
    from torch.distributed.run import get_args_parser

    try:
        parser = get_args_parser()
        parser.exit_on_error = False
        return parser.parse_args(words)
    except SystemExit:  # argparse printed the reason
        reason = "see the message above"
    except (argparse.ArgumentError, ValueError) as error:
        reason = str(error)
    raise UsageError(
        f"torchrun does not accept {' '.join(words[:-1])!r}: {reason}", hint="see torchrun --help"
    )


def _after_torchrun(words: Sequence[str]) -> int:
    """Return the index after torchrun, if the preflight is certain that the words start it.

    A word "torchrun" can also be an argument of a training script, which would be started.
    """
    indices = [index for index, word in enumerate(words) if _is_torchrun(word)]
    if not indices:
        is_quoted = "torchrun" in " ".join(words)
        raise UsageError(
            f"no torchrun in {' '.join(words)!r}",
            hint="write the words of torchrun without bash -c and quotes" if is_quoted else _HINT,
        )
    # In ``srun -J torchrun torchrun --nnodes=2 ...`` the first is a value.
    last = next(index for index in indices if index + 1 not in indices)
    first = last
    if first and words[first - 1] == "-m":
        first -= 1
    while first and _PYTHON_FLAGS.fullmatch(words[first - 1]):
        first -= 1
    if first and _is_python(words[first - 1]):
        first -= 1
    else:
        first = last  # options of another program
    before = words[:first]
    if (
        before
        and (
            PurePath(before[0]).name not in STARTERS
            or any(_is_other_program(word) for word in before[1:])
            # The value of an option, such as ``--launcher torchrun``.
            or (before[-1].startswith(("-", "+")) and "=" not in before[-1] and before[-1] != "--")
            or not words[last + 1 : last + 2]
            or not words[last + 1].startswith("-")
        )
    ):
        raise UsageError(
            f"{' '.join(before)!r} before torchrun may start the training itself",
            hint=f"before torchrun, write only {', '.join(STARTERS)} and their options with =, as "
            "--nodes=2; after it, an option of torchrun",
        )
    return last + 1


def _is_torchrun(word: str) -> bool:
    """Return whether a word of the preflight's command starts torchrun."""
    if word.startswith("-") or "=" in word:  # the value of an option
        return False
    return PurePath(word).name == "torchrun" or word == "torch.distributed.run"


def _is_python(word: str) -> bool:
    """Return whether a word of the preflight's command is a Python interpreter."""
    return re.fullmatch(r"python[\d.]*", PurePath(word).name) is not None


def _is_other_program(word: str) -> bool:
    """Return whether a word of the preflight's command starts a program before torchrun."""
    name = PurePath(word).name
    if name in STARTERS or word.startswith("-"):
        return False
    return (
        _is_python(word)
        or name in _SHELLS
        or name.endswith((".py", ".sh"))
        # Images of containers can be executable.
        or (not name.endswith((".sif", ".sqsh")) and shutil.which(word) is not None)
    )


def local_words() -> list[str]:
    """Return the launcher for a preflight on this node: a rank per GPU, or two on the CPU."""
    import torch

    num_ranks = torch.cuda.device_count() or 2
    return [sys.executable, "-m", "torch.distributed.run", "--standalone",
            f"--nproc-per-node={num_ranks}"]  # fmt: skip


def launch(command: Sequence[str], environ: Mapping[str, str], *, seconds: float) -> Launched:
    """Run the preflight for at most this long (and ``STOP_SECONDS``); return all reports.

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
            env=_environ(environ),
        )
    except OSError as error:
        raise UsageError(
            f"{command[0]!r} cannot be run: {error.strerror}",
            hint=_HINT,
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


def _environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a preflight's launcher: without options that change its output."""
    # torchrun reads its options from variables too.
    names = {f"PET_{name.upper()}" for name in ("module", "no_python", "run_path", *_OUTPUT)}
    others = {name: value for name, value in environ.items() if name not in names}
    return {**others, "OMP_NUM_THREADS": "1"}  # as torchrun does


def _read_lines(output: IO[bytes], reports: dict[int, PreflightReport], tail: deque[str]) -> None:
    """Collect the ranks' reports from the launcher's output, and its last other lines."""
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
    """Store a rank's preflight report unless a later one is stored already."""
    earlier = reports.get(report.rank)
    reports[report.rank] = merge_reports(earlier, report) if earlier else report
