"""Paths in settings: made absolute once, when the setting is read."""

import os
from collections.abc import Mapping
from pathlib import Path

_PATHS = ("VITALS_DIR", "VITALS_SHM", "VITALS_TOKEN_FILE", "VITALS_CONFIG", "XDG_DATA_HOME")


def collector_folder(named: str) -> Path | None:
    """Return the data directory on disk that a setting names, absolute; None for a URL.

    A directory has a ``/`` and no ``://``, or exists.
    """
    if not named or "://" in named:
        return None
    path = Path(os.path.expanduser(named))  # noqa: PTH111 - raises nothing for an unknown user
    return path.absolute() if os.sep in named or os.path.isdir(path) else None  # noqa: PTH112


def default_data_dir(environ: Mapping[str, str]) -> Path:
    """Return the directory for a collector's data files by default, in the user's home."""
    home = environ.get("XDG_DATA_HOME") or Path(environ.get("HOME") or Path.home()) / ".local/share"
    return Path(home) / "trainvitals"


def default_cache_dir(environ: Mapping[str, str]) -> Path:
    """Return the directory in the user's home for files that can be computed again."""
    home = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME") or Path.home()) / ".cache"
    return Path(home) / "trainvitals"


def collector_urls(named: str) -> list[str]:
    """Split a setting's comma-separated URLs: collectors to connect to, on one database."""
    return [url for url in (part.strip() for part in named.split(",")) if url] or [named]


def with_absolute_paths(environ: Mapping[str, str]) -> dict[str, str]:
    """Make relative paths of files in the environment absolute, for child processes.

    For child processes: their working directory may be different.
    """
    resolved = dict(environ)
    for name in _PATHS:
        if resolved.get(name):
            resolved[name] = str(Path(resolved[name]).absolute())
    folder = collector_folder(resolved.get("VITALS_COLLECTOR_URL", ""))
    if folder is not None:
        resolved["VITALS_COLLECTOR_URL"] = str(folder)
    return resolved
