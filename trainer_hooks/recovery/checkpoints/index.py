"""State of each checkpoint of a directory, history of deleted ones, and the choice of rotation.

The manifests and the marks next to them are the truth. ``index.json`` is the file that users and
programs read, and the only one with the history of deleted checkpoints. It is rebuilt at every
write, so a missing, torn or wrong one loses only that history.
"""

import logging
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from trainer_hooks.recovery.checkpoints import manifest as manifests
from trainer_hooks.recovery.checkpoints.manifest import Header, Manifest
from trainvitals.errors import FormatError
from trainvitals.policy.state import CheckpointRef, CheckpointState

OnBranch = Callable[[int, int], bool]
"""Returns whether (step, attempt) belongs to the current lineage, not to a discarded attempt."""

INDEX = "index.json"
INDEX_VERSION = 1
MAX_GONE = 1000
"""Maximum number of retired or bad entries kept: the latest."""

IN_WORK = re.compile(r"\.(partial|doomed)-(.*)-(step-\d{8,12}-\d{1,20})\Z")
"""Name of a directory that is being written or removed, with its run."""

_LOG = logging.getLogger("trainvitals")
_ASIDE = re.compile(r"bad-(step-\d{8,12}-\d{1,20})(?:\.\d+)?\Z")
_MAX_REASON = 500


class BestMark(msgspec.Struct, frozen=True, kw_only=True):
    """The metric by which a checkpoint is the best."""

    metric: str
    value: float
    number: int = 0
    """Number of the mark in the run: of two marks, which only a crash leaves, the higher counts."""


class BadMark(msgspec.Struct, frozen=True, kw_only=True):
    """Reason for the quarantine of a checkpoint."""

    reason: str = ""
    time_unix_ns: int = 0


class IndexEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint, existing or deleted."""

    id: str
    run_id: str = ""
    """Empty if the manifest cannot be read."""
    state: CheckpointState
    num_bytes: int = 0
    """Size of the tensors; 0 if unknown."""
    time_unix_ns: int = 0
    """Start of the current state."""
    reason: str = ""
    best: BestMark | None = None

    @property
    def is_gone(self) -> bool:
        """Whether the checkpoint was deleted or quarantined, so that nothing loads it."""
        return self.state in ("retired", "bad")


class CheckpointIndex(msgspec.Struct, frozen=True, kw_only=True):
    """Content of ``index.json``."""

    format_version: int = INDEX_VERSION
    entries: tuple[IndexEntry, ...] = ()
    """Oldest first: by step, then by attempt."""


def reconcile(
    old: CheckpointIndex, there: Sequence[IndexEntry], removed: Iterable[IndexEntry]
) -> CheckpointIndex:
    """Return the current index of checkpoints; the old one is only used for deleted checkpoints.

    Args:
        old: the index as read; its content is not trusted.
        there: entries of the directory with quarantined ones, from their manifests and marks.
        removed: entries that were retired or turned bad since the old one was written.
    """
    before = {
        entry.id: entry for entry in old.entries if entry.is_gone and manifests.is_id(entry.id)
    }
    by_id = before | {entry.id: entry for entry in removed}
    for entry in there:
        past = by_id.get(entry.id)
        if past is not None and past.state == entry.state:  # quarantined: its manifest is hidden
            entry = msgspec.structs.replace(
                entry,
                run_id=entry.run_id or past.run_id,
                num_bytes=entry.num_bytes or past.num_bytes,
                reason=entry.reason or past.reason,
            )
        by_id[entry.id] = entry
    short = [msgspec.structs.replace(e, reason=e.reason[:_MAX_REASON]) for e in by_id.values()]
    past_ones = sorted((e for e in short if e.is_gone), key=lambda e: e.time_unix_ns)
    retained = [e for e in short if not e.is_gone] + past_ones[-MAX_GONE:]
    return CheckpointIndex(entries=tuple(sorted(retained, key=lambda e: manifests.parse_id(e.id))))


def removable(
    refs: Sequence[CheckpointRef],
    *,
    keep: int,
    keep_every: int = 0,
    best: Iterable[str] = (),
    on_branch: OnBranch | None = None,
) -> list[str]:
    """Return the ids of the checkpoints that rotation removes, oldest first.

    It keeps the latest ``keep``, the first of each ``keep_every`` steps (a healthy one if there is
    one), and the best. An unproven checkpoint does not replace a healthy one, which the escalation
    policy may need for a rollback; one of the latest unproven checkpoints is kept in addition. A
    checkpoint of a discarded attempt replaces no other; it is removed, except for the latest
    healthy one of all and the best. ``on_branch`` returns whether a checkpoint is in the current
    lineage; None: all are.

    Later means created later: an attempt after a rollback is later than higher steps before it.
    """
    by_age = sorted(refs, key=lambda ref: (ref.attempt, ref.step))
    present = [r for r in by_age if on_branch is None or on_branch(r.step, r.attempt)]
    proven = [ref.id for ref in present if ref.state == "healthy"][-keep:]
    unproven = [ref.id for ref in present[-keep:] if ref.state != "healthy"]
    stays = {*proven, *unproven[-max(1, keep - len(proven)) :], *best}
    stays |= set([ref.id for ref in by_age if ref.state == "healthy"][-1:])
    if keep_every > 0:
        periods: dict[int, CheckpointRef] = {}
        for ref in present:
            first = periods.setdefault(ref.step // keep_every, ref)
            if first.state != "healthy" and ref.state == "healthy":
                periods[ref.step // keep_every] = ref
        stays |= {ref.id for ref in periods.values()}
    return [ref.id for ref in by_age if ref.id not in stays]


class CheckpointIndexFile:
    """``index.json`` of a directory; threads and processes may write it at the same time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.gone: deque[IndexEntry] = deque(maxlen=MAX_GONE)
        """Deleted checkpoints until they are written."""
        self._lock = threading.Lock()

    def current(self) -> CheckpointIndex:
        """Return the up-to-date index from disk contents, without writing it."""
        old = _decoded(self._folder / INDEX, CheckpointIndex) or CheckpointIndex()
        return reconcile(old, list(_scan(self._folder)), tuple(self.gone))

    def write(self) -> None:
        """Replace ``index.json``. An error is only logged: the next change writes it again."""
        with self._lock:
            num = len(self.gone)
            try:
                raw = msgspec.json.format(msgspec.json.encode(self.current()))
                manifests.write_durably(self._folder / INDEX, self._folder, raw)
            except OSError as error:
                _LOG.warning("vitals: %s is not written: %s", self._folder / INDEX, error)
                return
            for _ in range(num):
                self.gone.popleft()


def best_mark(folder: Path) -> BestMark | None:
    """Return a checkpoint's mark as the best; None if it has none, or an unreadable one."""
    return _decoded(folder / manifests.BEST_MARK, BestMark)


def state_of(folder: Path, content: Manifest | Header) -> CheckpointState:
    """Return the state of a complete checkpoint, as proven when written, or as marked later."""
    marked = (folder / manifests.HEALTHY_MARK).is_file()
    return "healthy" if marked or content.state == "healthy" else "verified"


def _scan(folder: Path) -> Iterator[IndexEntry]:
    """Yield an entry for each checkpoint in the directory, of all runs."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        aside, in_work = _ASIDE.match(path.name), IN_WORK.match(path.name)
        if aside is not None:
            manifest, mark = manifests.peek(path), _decoded(path / manifests.BAD_MARK, BadMark)
            mark = mark or BadMark()
            yield IndexEntry(
                id=aside[1],
                run_id=manifest.run_id,
                state="bad",
                num_bytes=manifest.num_bytes,
                time_unix_ns=mark.time_unix_ns or _changed_at(path),
                reason=mark.reason,
            )
        elif in_work is not None and in_work[1] == "partial":
            yield IndexEntry(
                id=in_work[3],
                run_id=in_work[2],
                state="candidate",
                time_unix_ns=_changed_at(path),
            )
        elif manifests.is_id(path.name):
            yield _index_entry(path)


def _index_entry(path: Path) -> IndexEntry:
    """Return the entry of one checkpoint on disk; with the reason if it is unreadable."""
    content: Manifest | Header
    try:
        content, reason = manifests.read(path), ""
        state = state_of(path, content)
    except (FormatError, OSError) as error:
        content, reason, state = manifests.peek(path), str(error).partition(" [")[0], "verified"
    marks = (manifests.HEALTHY_MARK, manifests.MANIFEST)
    return IndexEntry(
        id=path.name,
        run_id=content.run_id,
        state=state,
        num_bytes=content.num_bytes,
        time_unix_ns=max(_changed_at(path / mark) for mark in marks),
        reason=reason,
        best=best_mark(path),
    )


def _changed_at(path: Path) -> int:
    """Return when a checkpoint's file changed, in Unix nanoseconds; 0 if unknown."""
    try:
        return path.lstat().st_mtime_ns
    except OSError:
        return 0


_Known = TypeVar("_Known", CheckpointIndex, BadMark, BestMark)


def _decoded(path: Path, kind: type[_Known]) -> _Known | None:
    """Return a checkpoint file's content; None if missing, damaged, a link or far too large."""
    try:
        return msgspec.json.decode(manifests.read_small(path), type=kind)
    except (OSError, ValueError, RecursionError):
        return None
