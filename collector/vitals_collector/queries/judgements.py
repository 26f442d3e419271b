"""Fleet detectors of a long run in a directory: their results are cached, or computed apart.

For a run of a million steps the detectors need more than a minute. Their state and findings are
stored in the user's cache, so that the next command continues after the last judged row. A server
that must respond soon starts another process for it, and returns what is known so far.
"""

import contextlib
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import delete, select

import trainvitals
from trainvitals.errors import UNREADABLE, VitalsError
from trainvitals.io.private import ensure_private_dir, read_own, replace_file
from trainvitals.io.setting_paths import default_cache_dir
from vitals_collector.live import live_monitor
from vitals_collector.live.live_monitor import COLLECTOR, watch_state_name
from vitals_collector.storage.schema import findings
from vitals_collector.storage.store import Store, load_state, save_states

MAX_NEW_ROWS = 70_000
"""Unprocessed rows up to which a run that was processed once is continued at once: rows that wait
for a late rank are among them."""
MAX_FILES = 64
"""Judgements that are kept, the latest ones."""
SAVE_SECONDS = 5.0
"""Interval at which the progress of a judgement is stored."""
_MAX_BYTES = 64 << 20
_MAX_ERROR = 300


class _Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """State of a run's fleet detectors, with the findings up to it."""

    program: str
    state: bytes
    findings: list[dict[str, Any]]


_decode = msgspec.msgpack.Decoder(_Judgement).decode


class JudgementCache:
    """Judgements of runs in a directory of this user, one file each.

    An error of the directory only costs time: the run is judged again.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._versions: dict[str, int] = {}
        """By run, the file that was read or written last, by its time."""
        self._states: dict[str, bytes] = {}
        """By run, the state in that file."""
        self._saved = 0.0

    def load(self, store: Store, run_id: str) -> bool:
        """Store a run's cached judgement if it is ahead of the store's; return whether it is."""
        path = self._path(run_id)
        with contextlib.suppress(VitalsError, OSError, *UNREADABLE):
            version = path.stat().st_mtime_ns
            if self._versions.get(run_id) == version:
                return False
            self._versions[run_id] = version
            judgement = _decode(read_own(path, max_bytes=_MAX_BYTES))
            if judgement.program != _program():
                return False
            with store.write() as connection:
                if not live_monitor.is_ahead(connection, run_id, judgement.state):
                    return False
                of_run = (findings.c.run_id == run_id, findings.c.incarnation == COLLECTOR)
                connection.execute(delete(findings).where(*of_run))
                if judgement.findings:
                    connection.execute(findings.insert(), judgement.findings)
                save_states(connection, {watch_state_name(run_id): judgement.state})
            self._states[run_id] = judgement.state
            return True
        return False

    def save(self, store: Store, run_id: str) -> None:
        """Write the store's judgement of a run to the cache."""
        self._saved = time.monotonic()
        with store.read_transaction() as connection:
            state = load_state(connection, watch_state_name(run_id))
            query = select(findings).where(
                findings.c.run_id == run_id, findings.c.incarnation == COLLECTOR
            )
            rows = [dict(row) for row in connection.execute(query).mappings()]
        if state is None or state == self._states.get(run_id):
            return
        raw = msgspec.msgpack.encode(_Judgement(program=_program(), state=state, findings=rows))
        path = self._path(run_id)
        with contextlib.suppress(VitalsError, OSError):
            self._folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            ensure_private_dir(self._folder)
            replace_file(path, raw, mode=0o600)
            self._versions[run_id], self._states[run_id] = path.stat().st_mtime_ns, state
            for old in sorted(self._folder.glob("*.judged"), key=_modified)[:-MAX_FILES]:
                old.unlink(missing_ok=True)

    def save_progress(self, store: Store, run_id: str) -> None:
        """Write the judgement of a run so far, unless one was written a moment ago."""
        if time.monotonic() - self._saved >= SAVE_SECONDS:
            self.save(store, run_id)

    def _path(self, run_id: str) -> Path:
        return self._folder / f"{run_id}.judged"


def open_judgement_cache() -> JudgementCache | None:
    """Return the cache of judgements in this user's home; None without a home."""
    try:
        return JudgementCache(default_cache_dir(os.environ).absolute() / "judgements")
    except RuntimeError:
        return None


def _modified(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime_ns
    return 0


@cache
def _program() -> str:
    """Return the version of the detectors: judgements of another one are not used."""
    digest = hashlib.sha256(trainvitals.__version__.encode())
    for path in _sources():
        status = path.stat()
        digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns}".encode())
    return digest.hexdigest()


def _sources() -> Iterator[Path]:
    """Yield the files of the fleet detectors, and of the code that runs them."""
    for folder in (
        Path(trainvitals.__file__).parent / "detect",
        Path(live_monitor.__file__).parent,
    ):
        yield from sorted(folder.rglob("*.py"))


class BackgroundJudge:
    """Judges long runs of a directory in another process, one at a time; it writes the cache."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._run_id = ""
        self._judged: set[str] = set()
        self.errors: dict[str, str] = {}
        """By run that could not be judged: the reason."""

    def is_needed(self, run_id: str, num_unjudged: int) -> bool:
        """Return whether to judge a run apart; the caller has found that it has many new rows."""
        self._reap()
        is_judged = run_id in self._judged and self._run_id != run_id
        return num_unjudged > MAX_NEW_ROWS or not is_judged

    def start(self, run_dir: Path, run_id: str) -> None:
        """Start to judge a run, unless another one is being judged, or this one failed before."""
        self._reap()
        if self._process is not None or run_id in self.errors:
            return
        command = [sys.executable, "-m", "trainvitals", "show", run_id, "--dir", str(run_dir)]
        self._run_id = run_id
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )

    def close(self) -> None:
        """End the process; what it judged is in the cache."""
        if self._process is not None:
            self._process.terminate()
            self._process.communicate()
            self._process = None

    def _reap(self) -> None:
        process = self._process
        if process is None or process.poll() is None:
            return
        _, errors = process.communicate()
        self._process = None
        if process.returncode == 0:
            self._judged.add(self._run_id)
        else:
            text = " ".join(errors[-_MAX_ERROR:].decode(errors="replace").split())
            self.errors[self._run_id] = text or f"the process ended with {process.returncode}"
        self._run_id = ""
