"""A real file system with so little room that tests can fill it."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_file_system(folder: Path, size: str) -> Iterator[Path]:
    """Mount one of this size, such as 256k; skips, with the reason, where this user may not."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("no mount command on this machine")
    if mounted.returncode:
        pytest.skip(f"mounting is not permitted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        # Lazily: what a test killed may hold a file for a moment yet.
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> None:
    """Leave no room in the file system of the folder: neither for a byte nor, if it counts them,
    for a file.
    """
    with (folder / "fill").open("wb", buffering=0) as file:
        try:
            while file.write(b"\0" * 4096):
                pass
        except OSError:
            pass
    for number in range(64):
        try:
            (folder / f"fill-{number}").touch()
        except OSError:
            return


def empty(folder: Path) -> None:
    """Remove what ``fill`` wrote."""
    for path in folder.glob("fill*"):
        path.unlink()
