"""A disk that can fail, or lose its power, at any call: real files in one folder.

Only what goes through ``os`` is seen: that is all that a spool writes with. After a loss of power,
what was not fsynced may be gone, cut or torn, and so may be, each for itself, the names that were
made, changed or removed since their folder was fsynced.
"""

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CALLS = ("open", "pwrite", "fsync", "ftruncate", "truncate", "rename", "unlink")


class Crash(BaseException):
    """The process is gone: no handler of an Exception hears of it."""


class FaultyDisk:
    """Fails or dies at the calls that it is told to; a call is one that changes something.

    Names stand for files by a number of ours, as the system gives a free inode's number again.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.num_calls = 0
        self._errors: dict[int, int] = {}
        self._crash_at = 0
        self._open: dict[int, str] = {}
        self._num_files = 0
        self._names: dict[str, int] = {}
        self._durable_names: dict[str, int] = {}
        self._durable: dict[int, bytes] = {}
        self._nameless: dict[int, bytes] = {}
        self._forgotten: dict[int, tuple[int, int]] = {}

    @contextmanager
    def mounted(self) -> Iterator[None]:
        """Stand between ``os`` and the folder."""
        with pytest.MonkeyPatch.context() as patch:
            for name in (*CALLS, "close"):
                patch.setattr(os, name, self._wrapped(name, getattr(os, name)))
            yield

    def fail(self, code: int, after: int) -> None:
        """Let the ``after``-th call from now on raise this error; half of a write is done."""
        self._errors[self.num_calls + after] = code

    def crash(self, after: int) -> None:
        """Let the process die in the ``after``-th call from now on; half of a write is done."""
        self._crash_at = self.num_calls + after

    def revive(self) -> None:
        """Let all calls work again, for another process."""
        self._errors.clear()
        self._crash_at = 0
        for fd in list(self._open):
            os.close(fd)

    def lose_power(self, rng: random.Random) -> None:
        """Leave what the disk has for certain, and of the rest what chance leaves."""
        now, durable = dict(self._names), self._durable_names
        contents = {now[path.name]: path.read_bytes() for path in self.root.iterdir()}
        contents = {**self._nameless, **contents}
        for path in list(self.root.iterdir()):
            path.unlink()
        names: dict[str, int] = {}
        for name in sorted({*now, *durable}):
            file = rng.choice([now.get(name), durable.get(name)])
            if file is not None:
                names[name] = file
        self._durable = {
            file: _torn(self._durable.get(file, b""), contents[file], rng)
            for file in names.values()
        }
        for name, file in names.items():
            (self.root / name).write_bytes(self._durable[file])
        self._names, self._durable_names = names, dict(names)
        self._forgotten.clear()

    def _wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **how: Any) -> Any:
            where = self._where(name, args, how)
            if where is None:
                return real(*args, **how)
            if name == "close":
                self._open.pop(args[0], None)
                return real(*args)
            if name != "open" or args[1] & (os.O_WRONLY | os.O_RDWR):
                self._meet_fault(name, where, args, real)
            if name in ("rename", "unlink"):
                self._lose_name(where if name == "unlink" else Path(args[1]).name)
            result = real(*args, **how)
            self._take_note(name, where, args, result)
            return result

        return call

    def _where(self, name: str, args: tuple[Any, ...], how: dict[str, Any]) -> str | None:
        """The name of the file that a call is about, "" for the folder; None: none of ours."""
        if name in ("close", "pwrite", "fsync", "ftruncate"):
            return self._open.get(args[0])
        path = Path(os.fspath(args[0]))
        if self._open.get(how.get("dir_fd", how.get("src_dir_fd", -1))) == "":
            path = self.root / path
        if path == self.root:
            return ""
        return path.name if path.parent == self.root else None

    def _meet_fault(
        self, name: str, where: str, args: tuple[Any, ...], real: Callable[..., Any]
    ) -> None:
        self.num_calls += 1
        dies = 0 < self._crash_at <= self.num_calls
        # That a folder cannot be fsynced is no error to anyone: some file systems refuse to.
        code = self._errors.pop(self.num_calls, 0) if where else 0
        if name == "pwrite" and (code or self._crash_at == self.num_calls):
            real(args[0], bytes(args[1])[: len(args[1]) // 2], args[2])
        if dies:
            raise Crash
        if name == "fsync" and code:  # the kernel forgets what it could not write
            file = self._names[where]
            size = (self.root / where).stat().st_size
            self._forgotten[file] = (len(self._durable.get(file, b"")), size)
        if code:
            raise OSError(code, os.strerror(code))

    def _lose_name(self, name: str) -> None:
        if (self.root / name).exists():
            self._nameless[self._names[name]] = (self.root / name).read_bytes()

    def _take_note(self, name: str, where: str, args: tuple[Any, ...], result: Any) -> None:
        if name == "open" and where and not args[1] & (os.O_WRONLY | os.O_RDWR):
            return  # who reads closes it unseen
        if name == "open":
            self._open[result] = where
            if where and where not in self._names:
                self._num_files += 1
                self._names[where] = self._num_files
        elif name == "rename":
            self._names[Path(args[1]).name] = self._names.pop(where)
        elif name == "unlink":
            del self._names[where]
        elif name == "pwrite":
            begin, end = self._forgotten.get(self._names[where], (0, 0))
            if args[2] <= begin < end <= args[2] + result:
                del self._forgotten[self._names[where]]  # the kernel has to write it again
        elif name == "fsync" and not where:
            self._durable_names = dict(self._names)
        elif name == "fsync" and where in self._names:
            file, raw = self._names[where], (self.root / where).read_bytes()
            begin, end = self._forgotten.get(file, (0, 0))
            self._durable[file] = raw[:begin] + bytes(len(raw[begin:end])) + raw[end:]


def _torn(kept: bytes, now: bytes, rng: random.Random) -> bytes:
    """What may lie on a disk that has ``kept`` for certain, and was to hold ``now``."""
    if len(now) <= len(kept):
        return rng.choice([kept, now])
    rest = now[len(kept) : rng.randint(len(kept), len(now))]
    if rest and rng.random() < 0.3:  # a later page came first
        begin = rng.randrange(len(rest))
        hole = rest[begin : rng.randint(begin, len(rest))]
        rest = rest[:begin] + bytes(len(hole)) + rest[begin + len(hole) :]
    return kept + rest
