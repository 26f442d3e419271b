"""Detects the format of a log by its content, and reads it."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from trainvitals.errors import FormatError, UsageError
from vitals_plugins.bridges.importers.columns import ColumnChoice, ImportedLog
from vitals_plugins.bridges.importers.csv_file import may_be_table, read_csv
from vitals_plugins.bridges.importers.files import read_head
from vitals_plugins.bridges.importers.json_lines import has_metrics, is_json_lines, read_json_lines
from vitals_plugins.bridges.importers.tensorboard_dir import FIRST_EVENT, read_tensorboard
from vitals_plugins.bridges.importers.text_log import identify_format, read_text_log, unknown_text
from vitals_plugins.bridges.importers.trainer_state import read_trainer_state
from vitals_plugins.bridges.importers.wandb_file import HEAD, read_wandb

LOOKED_FOR = (
    "a CSV file with a header, Trainer's trainer_state.json, JSON Lines, the output of a training, "
    "TensorBoard's event files, or wandb's run-ID.wandb"
)
_HEAD_BYTES = 1 << 18
"""Bytes of a text log: the settings that are printed first may be long."""
TRAINER_STATE = "trainer_state.json"
_DEPTH = 2
"""Levels of subdirectories that are searched: ``wandb/offline-run-*/`` is the deepest."""

ReadLog = Callable[[ColumnChoice], ImportedLog]


def read_history(path: Path, column_options: ColumnChoice) -> ImportedLog:
    """Read the log of another tool at the path: a file, or the only log in a directory.

    Raises:
        UsageError: there is none, there are several, or no column is the step or a loss.
        FormatError: the file is damaged, or its format is unknown.
    """
    read = _find_directory_log(path) if path.is_dir() else _identify_file(path)
    history = read(column_options)
    if not history.steps:
        raise UsageError(
            f"{path}: no record has a step and a loss or a gradient norm, so there is nothing to "
            "replay"
        )
    return history


def _identify_file(path: Path) -> ReadLog:
    """Recognize the format of a log file by its content, and return its reader."""
    if path.exists() and not path.is_file():
        raise UsageError(
            f"{path} is neither a file nor a folder; it is read twice, so a pipe does not work",
            hint="write it into a file first",
        )
    begin = read_head(path)
    if begin.startswith(HEAD[:4]):
        return partial(read_wandb, path)
    if FIRST_EVENT in begin[:64]:
        return partial(read_tensorboard, path, [path])
    text = begin.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text.startswith(b"{") and is_json_lines(text if b"\n" in text else _read_long_head(path)):
        return partial(read_json_lines, path)
    if (
        _is_text(begin)
        and (form := identify_format(_read_long_head(path).decode(errors="replace"))) is not None
    ):
        return partial(read_text_log, path, form)
    if text.startswith((b"{", b"[")) and not _TIMESTAMP.match(text):
        return partial(read_trainer_state, path)
    if not begin:
        raise FormatError(f"{path} is empty; looked for {LOOKED_FOR}")
    if _is_text(begin):
        lines = text.decode(errors="replace").strip().splitlines()
        if lines and not may_be_table(lines):
            raise unknown_text(path, _read_long_head(path).decode(errors="replace"))
        return partial(read_csv, path)
    raise FormatError(f"{path} begins with {begin[:8]!r}; looked for {LOOKED_FOR}")


_TIMESTAMP = re.compile(rb"\[\d{4}-|\[[A-Za-z]")
"""Start of a log's line that is not JSON."""


def _read_long_head(path: Path) -> bytes:
    """Return enough first bytes of a log file to recognize its format."""
    return read_head(path, _HEAD_BYTES)


def _is_text(begin: bytes) -> bool:
    """Return whether these may be the first bytes of UTF-8 text; the last character may be cut."""
    try:
        begin.decode()
    except UnicodeDecodeError as error:
        return error.start >= len(begin) - 4 > 0
    return b"\0" not in begin.partition(b"\n")[0]


# ------------------------------------------------------------------------------------ folders


def _find_directory_log(folder: Path) -> ReadLog:
    """Find the log file at the smallest depth; two logs at one depth are an error."""
    level = [folder]
    for _ in range(_DEPTH + 1):
        logs = [log for directory in level for log in _logs(directory)]
        if len(logs) > 1:
            logs = _newest_checkpoint(logs)
        if len(logs) == 1:
            return logs[0][1]
        if logs:
            names = ", ".join(str(path) for path, _ in logs[:4])
            more = f" and {len(logs) - 4} more" if len(logs) > 4 else ""
            raise UsageError(
                f"{folder} holds {len(logs)} logs: {names}{more}", hint="name one of them"
            )
        level = [
            path
            for directory in level
            for path in sorted(directory.iterdir())
            # A link such as wandb's ``latest-run`` is not a second log.
            if path.is_dir() and not path.is_symlink()
        ]
    raise UsageError(
        f"{folder} holds no log; looked for run directories of Vitals, {TRAINER_STATE}, "
        "*tfevents*, *.wandb, *.jsonl with a loss",
        hint="give the file itself; a CSV file is read only by its name",
    )


def _logs(folder: Path) -> Iterator[tuple[Path, ReadLog]]:
    """Yield the logs of other tools directly in a directory; its event files are one log."""
    names = sorted(path for path in folder.iterdir() if path.is_file())
    logs: list[tuple[Path, ReadLog]] = []
    for path in names:
        if path.name == TRAINER_STATE:
            logs.append((path, partial(read_trainer_state, path)))
        elif path.suffix == ".wandb":
            logs.append((path, partial(read_wandb, path)))
    events = [path for path in names if "tfevents" in path.name]
    if events:
        logs.append((folder, partial(read_tensorboard, folder, events)))
    if not logs:  # of several logs of one run, those at a smaller depth have more of it
        metrics = (
            path for path in names if path.suffix == ".jsonl" and has_metrics(_read_long_head(path))
        )
        logs += [(path, partial(read_json_lines, path)) for path in metrics]
    yield from logs


def _newest_checkpoint(logs: list[tuple[Path, ReadLog]]) -> list[tuple[Path, ReadLog]]:
    """Return only the log of Trainer's last checkpoint, if all logs found are its own."""
    steps = [_checkpoint_step(path) for path, _ in logs]
    if any(step is None for step in steps):
        return logs
    return [max(logs, key=lambda log: _checkpoint_step(log[0]) or 0)]


def _checkpoint_step(path: Path) -> int | None:
    """Return the step of the Trainer checkpoint directory that has this log."""
    name, _, step = path.parent.name.rpartition("-")
    is_one = path.name == TRAINER_STATE and name == "checkpoint" and step.isdecimal()
    return int(step) if is_one else None
