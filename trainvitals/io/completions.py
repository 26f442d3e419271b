"""Completions of the step where a post-training problem began; 0600, only in the run directory.

RUN_DIR/completions/step-STEP-ATTEMPT-FINDING.json

Vitals stores no other text of the training. No row, event or batch contains them, so no agent,
mirror or report sends them.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from trainvitals.errors import UNREADABLE, VitalsError
from trainvitals.io.private import FileOwner, ensure_private_dir, open_private, read_own
from trainvitals.io.sample_ids import delete_oldest_files

FOLDER = "completions"
MAX_FILES = 32
MAX_BYTES = 4 << 20
"""Bytes of all files."""
MAX_TEXT = 4_000
"""Characters of a text that are stored."""
_MAX_FILE = 1 << 18
"""More than the largest file: six texts, each character escaped."""


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """One completion of a post-training step with its prompt; long texts are cut."""

    prompt: str
    completion: str
    reward: float | None
    num_cut: int = 0
    """Characters that were cut off."""


class StoredCompletions(msgspec.Struct, frozen=True, kw_only=True):
    """Completions of one step, and the finding that they were stored for."""

    step: int
    attempt: int
    finding: str
    """Kind of the finding."""
    onset_step: int
    reported_step: int
    samples: tuple[Completion, ...]

    @property
    def name(self) -> str:
        """Path of the completions' file in the run directory."""
        return f"{FOLDER}/step-{self.step:08d}-{self.attempt}-{self.finding}.json"


def cut_completion(prompt: object, completion: object, reward: float) -> Completion:
    """Return a completion whose texts have at most ``MAX_TEXT`` characters."""
    texts = [str(prompt), str(completion)]
    # A lone surrogate, such as half of an emoji that was cut, has no form in UTF-8.
    shown = [text[:MAX_TEXT].encode("utf-8", "replace").decode() for text in texts]
    num_cut = sum(max(0, len(text) - MAX_TEXT) for text in texts)
    return Completion(prompt=shown[0], completion=shown[1], reward=reward, num_cut=num_cut)


def store_completions(run_dir: Path, stored: StoredCompletions) -> None:
    """Write a file of completions atomically, after deleting the oldest. One thread at a time.

    Raises:
        OSError: the disk is full.
        InsecurePathError: others can access the directory.
    """
    path = run_dir / stored.name
    ensure_private_dir(path.parent)
    raw = msgspec.json.encode(stored)
    unfinished = path.with_suffix(".tmp")
    try:
        with os.fdopen(open_private(unfinished, os.O_WRONLY | os.O_CREAT), "wb") as file:
            file.truncate()
            file.write(raw)
        delete_oldest_files(
            path.parent, "step-*.json", MAX_BYTES - len(raw), max_files=MAX_FILES - 1
        )
        unfinished.rename(path)
    finally:
        unfinished.unlink(missing_ok=True)


def completions_of(run_dirs: Sequence[Path], step: int) -> Iterator[StoredCompletions]:
    """Yield the stored completions of a step, or of a problem that started or was reported at it.

    The first directory with any is read; files that this user cannot read or must not trust are
    skipped.
    """
    for run_dir in run_dirs:
        try:
            paths = sorted((run_dir / FOLDER).glob("step-*.json"))
        except OSError:
            continue  # another user's directory
        for path in paths:
            try:
                owner = FileOwner.from_directory(path.parent)
                raw = read_own(path, owner=owner, max_bytes=_MAX_FILE)
                stored = msgspec.json.decode(raw, type=StoredCompletions)
            except (*UNREADABLE, VitalsError, OSError):
                continue  # damaged, just deleted, or written by another user
            if step in (stored.step, stored.onset_step, stored.reported_step):
                yield stored
        if paths:
            return
