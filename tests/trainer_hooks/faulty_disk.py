"""A disk that fails or kills at any one operation, and checkpoints that need no torch."""

import builtins
import errno
import io
import os
from contextlib import contextmanager
from pathlib import Path

import pytest

from trainer_hooks.recovery.checkpoints.folder import CheckpointFolder
from trainer_hooks.recovery.checkpoints.manifest import Manifest, checkpoint_id, measure

CHANGING = ("mkdir", "rename", "replace", "unlink", "rmdir", "fsync", "utime", "open")
READING = ("listdir", "scandir", "stat", "lstat", "fstat")
NEEDS_ROOM = ("mkdir", "fsync", "open", "create", "write", "replace")


class Killed(BaseException):
    """The process ended here; nothing after it runs, cleaning up included."""


class FaultyDisk:
    """Counts the operations of this process on a disk, and lets one of them go wrong.

    Args:
        at: number of the operation, from 0; -1 for none.
        fault: ``kill`` ends the process, and a write is torn in the middle; ``full`` is a disk that
            has no room from then on; ``once`` is an error of this one operation, of a reading one
            too.
    """

    def __init__(self, at=-1, fault="kill"):
        self.at, self.fault = at, fault
        self.done = []
        self.struck = False

    def happens(self, what):
        """Count the operation; return whether it goes wrong. A dead process does nothing more."""
        if self.struck and self.fault == "kill":
            raise Killed(what)
        full = self.struck and self.fault == "full" and what in NEEDS_ROOM
        now = len(self.done) == self.at
        self.done.append(what)
        self.struck |= now
        return full or (now and (self.fault != "full" or what in NEEDS_ROOM))

    def strike(self, what):
        if self.fault == "kill":
            raise Killed(what)
        code = errno.ENOSPC if self.fault == "full" else errno.EIO
        raise OSError(code, os.strerror(code), what)

    @contextmanager
    def under(self):
        """Let everything that this process does with files go through here."""
        with pytest.MonkeyPatch.context() as patch:
            counted = CHANGING + (READING if self.fault == "once" else ())
            for name in counted:
                patch.setattr(os, name, self._call(name, getattr(os, name)))
            opening = self._open(io.open)
            patch.setattr(io, "open", opening)
            patch.setattr(builtins, "open", opening)
            yield self

    def _call(self, name, real):
        def call(*args, **kwargs):
            if self.happens(name):
                self.strike(name)
            return None if name == "fsync" else real(*args, **kwargs)

        return call

    def _open(self, real):
        def opened(file, mode="r", *args, **kwargs):
            if isinstance(file, int) or not set(mode) & set("wxa"):
                return real(file, mode, *args, **kwargs)
            if self.happens("create"):
                self.strike("create")
            stream = real(file, mode, *args, **kwargs)
            write = stream.write

            def half(raw):
                if self.happens("write"):
                    write(raw[: len(raw) // 2])
                    stream.flush()
                    self.strike("write")
                return write(raw)

            stream.write = half
            return stream

        return opened


def save(folder, step, *, state="verified", attempt=7, run_id="run", size=64):
    """Write and publish a checkpoint as the store does, of bytes that need no torch."""
    name = checkpoint_id(step, attempt)
    folder.make_room(name, size)
    for file in (".metadata", "__0_0.distcp"):
        with (folder.partial(name) / file).open("xb") as stream:
            stream.write(f"{name} {file}".encode().ljust(size, b"."))
            os.fsync(stream.fileno())
    folder.publish(
        Manifest(
            id=name, run_id=run_id, step=step, attempt=attempt, state=state, world_size=1,
            torch_version="2", num_bytes=2 * size, files=measure(folder.partial(name)),
        )
    )  # fmt: skip
    return name


def relaunch(path, **options):
    """Return the folder as a new process of the run finds it, prepared."""
    folder = CheckpointFolder(Path(path), **{"run_id": "run", **options})
    folder.prepare()
    return folder


def states(folder):
    """Return the state of each checkpoint that is there, oldest first."""
    return {ref.id: ref.state for ref in folder.refs()}


def healthy(folder):
    """Return the healthy ids whose every byte matches, oldest first."""
    found = [ref.id for ref in folder.refs() if ref.state == "healthy"]
    return [name for name in found if folder.check(name).id == name]
