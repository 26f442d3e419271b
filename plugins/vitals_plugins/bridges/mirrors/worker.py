"""The process that mirrors one run to one tracker, and the file with its position.

A row is written, is durable in the tracker, and only then is the place behind it saved. Between the
last two a kill may come: so it is saved beforehand that something is being written, and who takes
the file up after a kill has the tracker's own files looked through for what came that far
(``Tracker``). There is no handling of a tracker's faults here: the process ends, and
``supervise`` starts the next.
"""

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from trainvitals.errors import UNREADABLE, FormatError, StorageError, UsageError
from trainvitals.io.private import ensure_own_dir, open_own, read_own, replace_file
from trainvitals.io.rundir import RunDir
from trainvitals.printable import printable
from trainvitals.redaction import redact
from trainvitals.units import humanize_count
from trainvitals.views import RunDetail, RunState, RunSummary
from vitals_collector.queries.open import OpenedReader
from vitals_plugins.bridges.mirrors.follow import Cursor, Entry, RunFollower

KINDS = ("tensorboard", "wandb", "mlflow", "trackio", "otlp")
FOLDER = "mirrors"
_VERSION = 1


class HeldError(StorageError):
    """Another process mirrors the run to this target already."""


@dataclass(frozen=True, slots=True)
class TrackerTarget:
    """Tracker and location of a mirror."""

    kind: str
    where: str

    @classmethod
    def parse(cls, text: str) -> "TrackerTarget":
        """Parse a mirror's target, written as ``KIND[:WHERE]``.

        Raises:
            UsageError: there is no such tracker, its location is missing, or it contains a secret.
        """
        kind, colon, where = text.partition(":")
        if kind not in KINDS or (colon and not where):
            raise UsageError(
                f"--to is {printable(text)!r}; it must be {_FORMS}",
                hint="for example --to tensorboard:tb --to wandb:my-project",
            )
        if not where and kind in ("tensorboard", "mlflow", "otlp"):
            raise UsageError(
                f"--to {kind} does not say where; it must be {_FORMS}",
                hint=f"for example --to {_EXAMPLES[kind]}",
            )
        if "://" in where and "@" in where.partition("://")[2].partition("/")[0]:
            raise UsageError(
                f"--to {kind}: the address holds a user or a password, and every user of this "
                "machine can read a command line",
                hint="give it as the tracker takes it from the environment, such as "
                "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or "
                "OTEL_EXPORTER_OTLP_HEADERS",
            )
        if kind == "tensorboard" or (kind == "mlflow" and "://" not in where):
            where = str(Path(where).expanduser().absolute())
        return cls(kind, where)

    def __str__(self) -> str:
        return f"{self.kind}:{self.where}" if self.where else self.kind


_FORMS = "tensorboard:DIR, wandb[:[ENTITY/]PROJECT], mlflow:URI, trackio[:PROJECT] or otlp:URL"
_EXAMPLES = {
    "tensorboard": "tensorboard:tb",
    "mlflow": "mlflow:http://127.0.0.1:5000",
    "otlp": "otlp:http://127.0.0.1:4318",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDescription:
    """Description of a run for a tracker, sent once."""

    run_id: str
    name: str
    project: str
    tags: tuple[str, ...]
    config: dict[str, str | int | float | bool | None]
    facts: dict[str, str | int]
    started_unix_ns: int

    @classmethod
    def from_detail(cls, detail: RunDetail) -> "RunDescription":
        """Return a run's description for a tracker, without secrets."""
        info, summary = detail.info, detail.summary
        config = redact(info.config)
        assert isinstance(config, dict)
        return cls(
            run_id=summary.run_id,
            name=printable(summary.name or summary.run_id),
            project=printable(info.project),
            tags=tuple(printable(tag) for tag in info.tags),
            config=config,
            facts={
                "vitals.run_id": summary.run_id,
                "vitals.mode": info.mode,
                "vitals.world_size": info.world_size,
                "vitals.git_commit": printable(info.git_commit),
                "vitals.version": info.vitals_version,
            },
            started_unix_ns=summary.started_unix_ns,
        )


class Tracker(Protocol):
    """One run as a tracker has it, open for writing.

    A tracker is opened with the last saved ``kept``, and with whether the previous process was
    killed during a write: then some of the following entries may exist already, and are not written
    twice.
    """

    kept: dict[str, Any]
    """Saved together with the cursor; plain values."""

    def write(self, entries: Sequence[Entry]) -> None:
        """Write the entries to the tracker; they are durable when this returns."""
        ...

    def close(self, state: RunState) -> None:
        """End the run in the tracker; all was written."""
        ...


OpenTracker = Callable[[TrackerTarget, RunDescription, dict[str, Any], bool], Tracker]


class MirrorState(msgspec.Struct, kw_only=True):
    """The state file's content."""

    version: int = _VERSION
    target: str
    run_id: str
    cursor: Cursor
    kept: dict[str, Any] = {}
    is_writing: bool = False
    """Whether something may have reached the tracker that the cursor does not count."""
    num_rows: int = 0


class MirrorStateFile:
    """Position of one run's mirror to one target."""

    def __init__(self, folder: Path, run_id: str, target: TrackerTarget) -> None:
        name = hashlib.sha256(str(target).encode()).hexdigest()[:12]
        self.path = folder / f"{target.kind}-{name}.json"
        self._target, self._run_id = str(target), run_id

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Lock out every other mirror of the same run and target.

        Raises:
            HeldError: there is one.
        """
        lock = open_own(self.path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, mode=0o600)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise HeldError(
                    f"run {self._run_id} is mirrored to {self._target} by another process",
                    hint=f"stop that one first; {self.path} has its position",
                ) from error
            yield
        finally:
            os.close(lock)

    def load(self) -> MirrorState:
        """Return the mirror's saved state; a new one if there is none.

        Raises:
            FormatError: it is damaged.
        """
        try:
            raw = read_own(self.path)
        except FileNotFoundError:
            return MirrorState(target=self._target, run_id=self._run_id, cursor=Cursor())
        try:
            saved = msgspec.json.decode(raw, type=MirrorState)
        except UNREADABLE as error:
            raise FormatError(
                f"{self.path} cannot be read: {error}",
                hint="delete it and the run in the tracker: the mirror then starts over",
            ) from error
        if saved.version != _VERSION or saved.run_id != self._run_id:
            raise FormatError(
                f"{self.path} belongs to run {printable(saved.run_id)}, version {saved.version}; "
                f"expected {self._run_id}, version {_VERSION}",
                hint="it was written by another version of Vitals, or copied",
            )
        return saved

    def save(self, saved: MirrorState) -> None:
        """Replace the mirror's state file whole, durably."""
        replace_file(self.path, msgspec.json.encode(saved), mode=0o600)


def state_folder(folder: Path | None, data: Path, run_id: str) -> Path:
    """Return the directory of the mirrors' state files, created if it is missing.

    It is in the run directory if that belongs to this user, so that a requeued job continues it.

    Args:
        folder: source directory; None: a collector.
        data: this user's data directory.
        run_id: the run.
    """
    if folder is not None and folder.name == run_id:
        run_dir = RunDir(folder)
        if run_dir.is_ours and os.access(folder, os.W_OK):
            return ensure_own_dir(folder / FOLDER)
    (data / FOLDER).mkdir(parents=True, exist_ok=True)
    return ensure_own_dir(data / FOLDER / run_id)


def mirror_run(
    opened: OpenedReader,
    run_id: str,
    target: TrackerTarget,
    state: MirrorStateFile,
    open_tracker: OpenTracker,
    *,
    is_over: Callable[[RunSummary], bool],
    alive: Callable[[int], None],
    sleep: Callable[[], None],
    say: Callable[[str], None],
) -> None:
    """Mirror a run to a tracker until the run is over.

    ``alive`` is called once the tracker is open, and after each of its calls, with the rows that it
    wrote. ``sleep`` waits until the next poll.
    """
    with state.lock():
        saved = state.load()
        follower = RunFollower(opened.reader, run_id, saved.cursor)
        detail = follower.detail()
        # No message before it is open: some create a database, and a partly created one stays
        # broken.
        tracker = open_tracker(
            target, RunDescription.from_detail(detail), saved.kept, saved.is_writing
        )
        alive(0)
        verb = "resumes" if saved.num_rows else "begins"
        say(f"{verb}: {target} has {humanize_count(saved.num_rows, 'row')}")
        while True:
            over = is_over(detail.summary)
            num_before = saved.num_rows
            for batch in follower.read_batches(detail, whole=over):
                if not saved.is_writing:
                    saved.is_writing, saved.kept = True, tracker.kept
                    state.save(saved)
                tracker.write(batch.entries)
                saved.cursor, saved.kept, saved.is_writing = batch.cursor, tracker.kept, False
                saved.num_rows += len(batch.entries)
                state.save(saved)
                alive(len(batch.entries))
            if over and num_before == saved.num_rows:
                break
            if not over:
                sleep()
            opened.refresh()
            detail = follower.detail()
            alive(0)
        tracker.close(detail.summary.state)
        saved.kept = tracker.kept
        state.save(saved)
        say(f"done: {humanize_count(saved.num_rows, 'row')}, the run is {detail.summary.state}")
