"""Writes generated files, never over a file that somebody changed."""

from collections.abc import Mapping
from pathlib import Path

from trainvitals.errors import StorageError, UsageError


def write_files(directory: Path, files: Mapping[str, str], *, force: bool = False) -> list[Path]:
    """Write the files below the directory; return their paths.

    Raises:
        UsageError: a file is there with another content and `force` is false; nothing was written.
        StorageError: the directory or a file cannot be written.
    """
    texts = {directory / name: text for name, text in files.items()}
    try:
        changed = [p for p, text in texts.items() if p.exists() and p.read_text() != text]
        if changed and not force:
            raise UsageError(
                f"{changed[0]} exists with another content",
                hint="write to another --output, or overwrite it with --force",
            )
        for path, text in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(
            f"cannot write to {directory}: {error}", hint="choose another directory with --output"
        ) from error
    return list(texts)
