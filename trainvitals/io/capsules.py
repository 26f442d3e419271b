"""Capsules of bad steps in a run directory, and their verdicts; mode 0600, never blocking training.

RUN_DIR/capsules/step-STEP-ATTEMPT-rank-N.npz             data to replay the step
RUN_DIR/capsules/step-STEP-ATTEMPT-rank-N.verdict.json    result of `vitals repro`
"""

import re
from pathlib import Path
from typing import NamedTuple

import msgspec

from trainvitals.errors import UNREADABLE
from trainvitals.io.private import FileOwner, read_own

FOLDER = "capsules"
VERDICT = ".verdict.json"
_NAME = re.compile(r"step-(\d+)-(\d+)-rank-(\d+)\.npz\Z")
_MAX_VERDICT_BYTES = 1 << 20


class CapsuleFile(NamedTuple):
    """A capsule by its name."""

    step: int
    attempt: int
    rank: int
    path: Path


class _Verdict(msgspec.Struct):
    sentence: str


def find_capsules(run_dir: Path) -> list[CapsuleFile]:
    """Return the run's capsules, sorted by step, attempt and rank."""
    folder = run_dir / FOLDER
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    matches = [match for name in names if (match := _NAME.match(name))]
    return sorted(CapsuleFile(int(m[1]), int(m[2]), int(m[3]), folder / m[0]) for m in matches)


def is_capsule(file: str) -> bool:
    """Return whether a file of the run directory, as the run's events name it, is a capsule."""
    folder, _, name = file.partition("/")
    return folder == FOLDER and _NAME.match(name) is not None


def read_capsule_verdict(run_dir: Path, file: str) -> str:
    """Read the verdict file next to a capsule: its sentence; empty without one.

    Args:
        run_dir: the run's.
        file: name of the capsule in the run's events; an invalid name matches nothing.
    """
    if not is_capsule(file):
        return ""
    path = (run_dir / file).with_suffix(VERDICT)
    try:
        raw = read_own(
            path, owner=FileOwner.from_directory(path.parent), max_bytes=_MAX_VERDICT_BYTES
        )
        return msgspec.json.decode(raw, type=_Verdict).sentence
    except (OSError, *UNREADABLE):
        return ""
