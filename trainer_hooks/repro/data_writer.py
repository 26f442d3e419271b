"""Writes sample ids and repro capsules to the run directory on a thread: the loop never waits."""

from __future__ import annotations

import os
import threading
from collections import deque
from pathlib import Path
from typing import NamedTuple

from trainer_hooks.failopen import FaultCounter
from trainer_hooks.repro.capsule import MAX_FILES, Content, write
from trainvitals.errors import StorageError
from trainvitals.io.private import ensure_private_dir, open_private
from trainvitals.io.sample_ids import SampleFile, StepSamples, delete_oldest_files

SAMPLE_BYTES = 64 << 20
BATCH_BYTES = 256 << 20
_MOST_LINES = 1024
_MOST_BATCHES = 4
"""Capsules in the queue; few, because each holds whole batches in host memory."""
_CLOSE_SECONDS = 2.0


class BadStep(NamedTuple):
    """Repro capsule of a bad step, and the name of its file."""

    file: str
    """Path relative to the run directory."""
    content: Content


class DataWriter:
    """Bounded queue, written by one thread that starts at the first item.

    Items that do not fit are dropped. Dropped items and failed writes are counted in ``faults``.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        rank: int,
        incarnation: str,
        faults: FaultCounter,
        sample_bytes: int = SAMPLE_BYTES,
        batch_bytes: int = BATCH_BYTES,
    ) -> None:
        self._run_dir = run_dir
        self._rank = rank
        self._faults = faults
        self._batch_bytes = batch_bytes
        self._samples = SampleFile(
            run_dir, rank=rank, incarnation=incarnation, max_bytes=sample_bytes
        )
        self._waiting: deque[StepSamples | BadStep] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    def enqueue(self, what: StepSamples | BadStep) -> bool:
        """Queue a repro capsule or sample ids; return False if the queue is full or closed."""
        most = _MOST_BATCHES if isinstance(what, BadStep) else _MOST_LINES
        if self._closing or os.getpid() != self._pid:  # a forked child has no such thread
            return False
        with self._changed:
            if sum(type(w) is type(what) for w in self._waiting) >= most:
                self._faults.count("data.full", StorageError(f"{most} wait to be written already"))
                return False
            self._waiting.append(what)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="vitals-data", daemon=True)
                self._thread.start()
            self._changed.notify()
        return True

    def close(self) -> None:
        """Accept no more capsules or ids; wait up to 2 seconds for queued ones to be written."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not None and os.getpid() == self._pid:
            self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        """Write queued sample ids and repro capsules until the writer closes."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    break
                what = self._waiting.popleft()
            with self._faults.fail_open("data.write"):
                if isinstance(what, BadStep):
                    self._write_capsule(what)
                else:
                    self._samples.append(what)
        self._samples.close()

    def _write_capsule(self, bad: BadStep) -> None:
        """Write a capsule atomically, and delete the oldest ones if they exceed the bound."""
        path = self._run_dir / bad.file
        ensure_private_dir(path.parent)
        unfinished = path.with_suffix(".tmp")
        try:
            with os.fdopen(open_private(unfinished, os.O_WRONLY | os.O_CREAT), "wb") as file:
                file.truncate()
                write(file, bad.content)
            size = unfinished.stat().st_size
            if size > self._batch_bytes:
                raise StorageError(
                    f"{bad.file} has {size} bytes; all of a rank's may have {self._batch_bytes}"
                )
            pattern = f"step-*-rank-{self._rank}.npz"
            delete_oldest_files(
                path.parent, pattern, self._batch_bytes - size, max_files=MAX_FILES - 1
            )
            unfinished.rename(path)
        finally:
            unfinished.unlink(missing_ok=True)
