"""Samples of each step, as lines of files in the run directory; 0600, one set per rank.

RUN_DIR/data/rank-N.<incarnation>.jsonl             being written
RUN_DIR/data/rank-N.<incarnation>.<number>.jsonl    full
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from trainvitals.errors import UNREADABLE
from trainvitals.io.private import FileOwner, ensure_private_dir, open_private, stream_own

FOLDER = "data"
_MAX_LINE = 8 << 20
"""Bytes of a line that are read at once: a forged file may be a single line."""
_NAME = re.compile(r"rank-(\d+)\.[^/]+\.jsonl\Z")
_PARTS = 4
"""Number of files for the allowed bytes: the oldest is deleted when they are full."""


class StepSamples(msgspec.Struct, frozen=True, kw_only=True):
    """Samples of one step on one rank."""

    step: int
    attempt: int
    epoch: int
    first_batch: int
    num_batches: int
    sample_ids: tuple[int | str, ...]
    rank: int = -1
    """From the file's name."""


class SampleFile:
    """Appends one rank's lines. Files of earlier starts count among the bytes that are allowed."""

    def __init__(self, run_dir: Path, *, rank: int, incarnation: str, max_bytes: int) -> None:
        self._folder = run_dir / FOLDER
        self._rank = rank
        self._name = f"rank-{rank}.{incarnation}"
        self._max_bytes = max_bytes
        self._fd = -1
        self._size = 0
        self._number = 0

    def append(self, line: StepSamples) -> None:
        """Append a step's samples to the rank's private file; the oldest files make room.

        Raises:
            OSError: the disk is full.
            InsecurePathError: others can access the directory.
        """
        if self._fd < 0:
            ensure_private_dir(self._folder)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            self._fd = open_private(self._folder / f"{self._name}.jsonl", flags)
            self._size = os.fstat(self._fd).st_size
        raw = msgspec.json.encode(line) + b"\n"
        if self._size and self._size + len(raw) > self._max_bytes // _PARTS:
            self._rotate_file()
            self.append(line)
            return
        delete_oldest_files(self._folder, f"rank-{self._rank}.*.jsonl", self._max_bytes - len(raw))
        while raw:
            written = os.write(self._fd, raw)
            raw, self._size = raw[written:], self._size + written

    def _rotate_file(self) -> None:
        """Close the full sample file, and rename it to the next number."""
        self.close()
        now = self._folder / f"{self._name}.jsonl"
        now.rename(self._folder / f"{self._name}.{self._number:06d}.jsonl")
        self._number += 1

    def close(self) -> None:
        """Close the rank's sample file; it stays in the run directory."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd, self._size = -1, 0


def delete_oldest_files(
    folder: Path, pattern: str, max_bytes: int, *, max_files: int | None = None
) -> None:
    """Delete the oldest files of ``pattern`` above ``max_bytes`` or ``max_files``."""
    files = [(path.stat(), path) for path in folder.glob(pattern)]
    files.sort(key=lambda pair: (pair[0].st_mtime_ns, pair[1].name))
    total = sum(status.st_size for status, _ in files)
    for left, (status, path) in zip(range(len(files), 0, -1), files, strict=True):
        if total <= max_bytes and (max_files is None or left <= max_files):
            return
        path.unlink(missing_ok=True)
        total -= status.st_size


def samples_of(run_dir: Path, step: int) -> Iterator[StepSamples]:
    """Read the samples of ``step`` from the run directory's files, on each rank and attempt.

    A torn or damaged line is skipped.
    """
    for path in sorted((run_dir / FOLDER).glob("rank-*.jsonl")):
        match = _NAME.match(path.name)
        if match is None:
            continue
        with stream_own(path, owner=FileOwner.from_directory(path.parent)) as file:
            while raw := file.readline(_MAX_LINE):
                if not raw.startswith(b'{"step":%d,' % step):
                    continue
                try:
                    line = msgspec.json.decode(raw, type=StepSamples)
                except UNREADABLE:
                    continue  # the line that a killed process was writing
                yield msgspec.structs.replace(line, rank=int(match[1]))
