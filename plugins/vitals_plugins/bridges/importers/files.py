"""Opens a log's file, compressed or not, and translates I/O errors to ours."""

import contextlib
import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, TextIO

from trainvitals.errors import FormatError, StorageError

GZIP = b"\x1f\x8b"
MAX_BYTES = 1 << 30
"""Largest log that is read in full: a few kilobytes of gzip may expand to any size."""
MAX_RATIO, MIN_UNPACKED_BYTES = 200, 16 << 20
"""Bounds of a compressed log: no log compresses better."""
MAX_LINE = 1 << 20
_CHUNK = 1 << 20


@contextlib.contextmanager
def translate_read_errors(path: Path) -> Iterator[None]:
    """Translate all errors in a block that reads a log file to ours.

    Raises:
        StorageError: the file cannot be read.
        FormatError: its compression or its encoding is damaged.
    """
    try:
        yield
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise FormatError(
            f"{path}: the compressed file is damaged: {error}", hint="get the file again"
        ) from error
    except UnicodeDecodeError as error:
        raise FormatError(
            f"{path} is not UTF-8 text: byte {error.start} is 0x{error.object[error.start]:02x}",
            hint="a CSV file or a trainer_state.json is UTF-8 text",
        ) from error
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror or error}") from error


def read_head(path: Path, num_bytes: int = 4096) -> bytes:
    """Return the first bytes of a log file, decompressed if it is gzip."""
    with translate_read_errors(path), open_bytes(path) as file:
        return file.read(num_bytes)


def read_whole(path: Path) -> bytes:
    """Return all of a log file, decompressed.

    Raises:
        FormatError: it is larger than MAX_BYTES.
    """
    raw = bytearray()
    with open_bytes(path) as file:
        while part := file.read(_CHUNK):
            raw += part
            if len(raw) > MAX_BYTES:
                raise FormatError(
                    f"{path} is larger than {MAX_BYTES} bytes; such a log is read into memory",
                    hint="export the columns you need as CSV, which is read line by line",
                )
    return bytes(raw)


def lines_of(path: Path, file: TextIO) -> Iterator[str]:
    """Yield a log file's lines.

    Raises:
        FormatError: one is longer than MAX_LINE characters.
    """
    while line := file.readline(MAX_LINE):
        if len(line) == MAX_LINE:
            raise FormatError(f"{path} is not CSV: a line has more than {MAX_LINE} characters")
        yield line


class _BoundedGzipReader(io.RawIOBase):
    """The content of a gzip file, up to a bound.

    Raises:
        FormatError: there is more.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, gzip.GzipFile(path)
        self._num_left = max(MIN_UNPACKED_BYTES, MAX_RATIO * path.stat().st_size)

    def readable(self) -> bool:
        """Return True: the compressed log can be read."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Decompress a part of a log into ``buffer``; an error above the bound."""
        part = self._file.read(len(buffer))
        self._num_left -= len(part)
        if self._num_left < 0:
            raise FormatError(
                f"{self._path} unpacks to more than {MAX_RATIO} times its size; no log does",
                hint="unpack it yourself if you trust it: gunzip",
            )
        buffer[: len(part)] = part
        return len(part)

    def close(self) -> None:
        """Close the compressed log file."""
        self._file.close()
        super().close()


def open_bytes(path: Path) -> IO[bytes]:
    """Open a log file, through gzip if its first bytes are gzip's."""
    with path.open("rb") as file:
        is_gzip = file.read(2) == GZIP
    return io.BufferedReader(_BoundedGzipReader(path)) if is_gzip else path.open("rb")


def open_text(path: Path) -> TextIO:
    """Open a log file as UTF-8 text, without a byte order mark."""
    return io.TextIOWrapper(open_bytes(path), encoding="utf-8-sig", newline="")
