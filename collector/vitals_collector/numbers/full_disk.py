"""Knows in others' words that a disk is full, which passes by itself once somebody makes room."""

from trainvitals.errors import StorageError

FULL = "V302"
"""Error code: there is no room left."""


def is_full(text: str) -> bool:
    """Return whether a library's error says that there is no room."""
    low = text.lower()
    return any(word in low for word in ("disk is full", "no space left", "disk quota"))


def full_error(where: object, text: str) -> StorageError:
    """Return the error that says so."""
    return StorageError(
        f"{where} has no disk space left: {text}",
        hint="free space there; agents keep their spools and retry by themselves",
        code=FULL,
    )
