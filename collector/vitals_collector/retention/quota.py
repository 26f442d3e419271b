"""Keeps every run within its size: thins what is old, and sooner where a run is above its cap.

Run by one background thread, beside compaction: each piece of work is a short transaction, and
between two of them whoever ingests has its turn. What is kept for ever is never taken away: where
that alone is above the cap, it is said, and stays.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec
from sqlalchemy import func, select, update

from trainvitals.records import Note
from vitals_collector.retention import removal
from vitals_collector.retention.rollup import Batch, VolumeSettings, Window, plan_thinning
from vitals_collector.retention.rollup_candidates import (
    HOSTS,
    RunAt,
    in_window,
    look,
    next_batches,
    run_bytes,
)
from vitals_collector.retention.rollup_rows import (
    Reason,
    Removed,
    Why,
    cut_batch,
    free_removed,
    thin_batch,
    thin_window,
)
from vitals_collector.storage.schema import events, runs, sources
from vitals_collector.storage.store import Store

OVER_CAP = "over_cap"
"""Code of the note that what is kept for ever is above the cap."""
VOLUMES = "volumes"
"""The incarnation of notes that no rank wrote."""
_NEVER = 2**62
_CUTS = 24
"""Rows of ranks may stay for so small a part of ``keep_hours`` longer, or until a chunk is old."""
_LOOK_SECONDS = 600.0
"""How often a run without new rows is looked at: the watchers may have read on, or it got old."""
_LOG = logging.getLogger("vitals.collector.volumes")

IsEnough = Callable[[], bool]


class _Seen(NamedTuple):
    newest_unix_ns: int
    looked_unix_ns: int


class Volumes:
    """Thins the store's runs. One thread calls ``maintain``, as often as it likes."""

    def __init__(self, store: Store, settings: VolumeSettings | None = None) -> None:
        self.settings = settings or VolumeSettings()
        self.over_cap: dict[str, str] = {}
        """Runs that are above the cap though all was thinned that may be, each with the words."""
        self._store = store
        self._seen: dict[str, _Seen] = {}
        self._bytes: dict[str, int] = {}
        self._rest: Callable[[float], object] = lambda _: None

    def maintain(
        self, now_unix_ns: int, stop: threading.Event | None = None, *, pause: float = 0.0
    ) -> int:
        """Thin what is due in every run, until ``stop``; return the rows taken away.

        Args:
            now_unix_ns: what is old is told from this.
            stop: ends it after the piece of work it is at.
            pause: how long to rest after a piece, in times of what it took.

        Raises:
            StorageError: the store refused; nothing is half done, call again.
        """
        stop = stop or threading.Event()
        self._rest = lambda began: pause and stop.wait(pause * (time.monotonic() - began))
        removal.finish(self._store)
        num = 0
        for run_id, newest in self._due(now_unix_ns).items():
            if stop.is_set():
                break
            num += self._maintain_run(run_id, now_unix_ns, stop)
            values = {"num_bytes": self._bytes.pop(run_id)}
            with self._store.write() as connection:
                connection.execute(update(runs).where(runs.c.run_id == run_id).values(values))
            if not stop.is_set():
                self._seen[run_id] = _Seen(newest, now_unix_ns)
        if not stop.is_set():
            self._store.counters.over_cap = dict(self.over_cap)
        return num

    def _due(self, now_unix_ns: int) -> dict[str, int]:
        """Return the runs to look at, and when the newest of their rows was written."""
        query = select(
            runs.c.run_id,
            func.coalesce(func.max(sources.c.last_seen_unix_ns), 0),
        ).outerjoin(sources, sources.c.run_id == runs.c.run_id)
        with self._store.read() as connection:
            newest_rows = connection.execute(
                query.group_by(runs.c.run_id).order_by(runs.c.run_id)
            ).all()
        newest_by_run = {run_id: int(newest) for run_id, newest in newest_rows}
        for removed_id in self._seen.keys() - newest_by_run.keys():
            del self._seen[removed_id]
        self.over_cap = {
            run: cap_text for run, cap_text in self.over_cap.items() if run in newest_by_run
        }
        wait_ns = int(_LOOK_SECONDS * 1e9)
        return {
            run_id: newest
            for run_id, newest in newest_by_run.items()
            if (seen := self._seen.get(run_id)) is None
            or seen.newest_unix_ns != newest
            or now_unix_ns - seen.looked_unix_ns >= wait_ns
        }

    def _maintain_run(self, run_id: str, now_unix_ns: int, stop: threading.Event) -> int:
        with self._store.read() as connection:
            run = look(connection, run_id)
            self._bytes[run_id] = run_bytes(connection, run_id)
        while free_removed(self._store, run_id):
            pass
        age_ns = int(self.settings.keep_hours * 3_600e9)
        old = _Pass(self, run, now_unix_ns - age_ns, Why("age", now_unix_ns), stop.is_set)
        num = old.thin()
        if num:
            with self._store.read() as connection:
                self._bytes[run_id] = run_bytes(connection, run_id)
        cap = self.settings.max_run_bytes
        if not cap:
            return num

        def is_enough() -> bool:
            return stop.is_set() or self._bytes[run_id] <= cap

        num_now = -1
        while num_now and not is_enough():
            num_now = _Pass(self, run, _NEVER, Why("size", now_unix_ns), is_enough).thin()
            num += num_now
            with self._store.read() as connection:  # what is left of rows takes room as well
                self._bytes[run_id] = run_bytes(connection, run_id)
        if not stop.is_set():
            self._say_whether_over(run_id, now_unix_ns)
        return num

    def count(self, run_id: str, removed: Removed, reason: Reason, began: float) -> None:
        """Count what was taken away of a run, and let others have their turn."""
        self._rest(began)
        self._bytes[run_id] -= removed.num_bytes
        counters = self._store.counters
        with counters.lock:
            key = (removed.stream, reason)
            counters.thinned[key] = counters.thinned.get(key, 0) + removed.num_rows

    def _say_whether_over(self, run_id: str, now_unix_ns: int) -> None:
        cap = self.settings.max_run_bytes
        num_bytes = self._bytes[run_id]
        if num_bytes <= cap:
            self.over_cap.pop(run_id, None)
            return
        if run_id in self.over_cap:
            return
        text = (
            f"this run has {num_bytes / 1e9:.3g} GB, above its cap of {cap / 1e9:.3g} GB: all of "
            "it is pinned or not yet read by the detectors, so nothing more can be thinned"
        )
        self.over_cap[run_id] = text
        _LOG.warning("run_over_cap run=%s bytes=%d cap=%d", run_id, num_bytes, cap)
        own = (events.c.run_id == run_id, events.c.incarnation == VOLUMES)
        note = Note(code=OVER_CAP, text=text, severity="warning")
        with self._store.write() as connection:
            last = connection.execute(select(func.max(events.c.seq)).where(*own)).scalar()
            if last is not None:
                return  # said before a restart
            connection.execute(
                events.insert().values(
                    run_id=run_id,
                    incarnation=VOLUMES,
                    source="collector",
                    seq=0,
                    time_unix_ns=now_unix_ns,
                    kind="Note",
                    summary=f"{text} [{OVER_CAP}]",
                    body=msgspec.msgpack.encode(note),
                )
            )


class _Pass:
    """One going through a run's rows, those of ranks before those of hosts and layers."""

    def __init__(
        self,
        volumes: Volumes,
        run: RunAt,
        before_unix_ns: int,
        why: Why,
        is_enough: IsEnough,
    ) -> None:
        self._volumes = volumes
        self._store = volumes._store
        self._settings = volumes.settings
        self._run = run
        self._before_unix_ns = before_unix_ns
        self._why = why
        self._is_enough = is_enough
        self._num = 0

    def thin(self) -> int:
        """Thin until nothing is due or it is enough; return the rows taken away."""
        while not self._is_enough() and self._thin_ranks():
            pass
        for stream in (*HOSTS, "layers"):
            while not self._is_enough() and self._thin_writers(stream):
                pass
        return self._num

    def _thin_ranks(self) -> bool:
        """Thin one window of steps, the oldest there is; return whether there may be more."""
        run, settings = self._run, self._settings
        if run.present is None or run.num_ranks <= settings.num_worst_ranks:
            return False
        with self._store.read() as connection:
            candidates = next_batches(connection, run, "steps", settings)
        due = [batch for batch in candidates if self._is_due(batch, "steps")]
        if self._cut([batch for batch in due if not batch.is_pure]):
            return True
        tried: set[tuple[int, int]] = set()
        for batch in sorted(due, key=lambda batch: (batch.attempt, batch.first_step)):
            key = (batch.attempt, batch.first_step // settings.window_steps)
            if key in tried:
                continue
            tried.add(key)
            with self._store.read() as connection:
                every = in_window(connection, run, batch, settings)
            if not all(
                run.is_done(window_batch.writer, "steps", window_batch.last_seq)
                for window_batch in every
            ):
                continue
            if mixed := [window_batch for window_batch in every if not window_batch.is_pure]:
                if self._cut(mixed):
                    return True
                continue  # a part of the window is too young
            for window in self._planned(every):
                return self._thin_window(window)
        return False

    def _planned(self, batches: list[Batch]) -> list[Window]:
        assert self._run.present is not None, "asked before"
        planned = plan_thinning(
            sorted(batches, key=lambda batch: (batch.attempt, batch.first_step)),
            present=self._run.present,
            before_unix_ns=self._before_unix_ns,
            near=self._run.near,
            settings=self._settings,
        )
        return list(planned)

    def _cut(self, mixed: list[Batch]) -> bool:
        before = self._before_unix_ns
        done = [cut_batch(self._store, self._run, batch, before, self._settings) for batch in mixed]
        return any(done)

    def _thin_window(self, window: Window) -> bool:
        began = time.monotonic()
        removed = thin_window(self._store, self._run, window, self._settings, self._why)
        if removed is None:
            return False
        while free_removed(self._store, self._run.run_id):
            pass
        self._note(removed, began)
        return True

    def _thin_writers(self, stream: str) -> bool:
        """Thin the next batch of each writer of layers or of a host's samples."""
        with self._store.read() as connection:
            candidates = next_batches(connection, self._run, stream, self._settings)
        any_done = False
        for batch in sorted(candidates, key=lambda batch: batch.newest_unix_ns):
            if self._is_enough():
                break
            if not self._is_due(batch, stream) or not self._is_past(batch, stream):
                continue
            began = time.monotonic()
            removed = thin_batch(self._store, self._run, stream, batch, self._settings, self._why)
            if removed is not None:
                self._note(removed, began)
                any_done = True
        return any_done

    def _is_due(self, batch: Batch, stream: str) -> bool:
        is_old = batch.newest_unix_ns < self._before_unix_ns
        if stream == "steps" and not batch.is_pure:
            # Chunks may hold days: their old windows are cut off, but not one by one.
            slack_ns = int(self._settings.keep_hours * 3_600e9 / _CUTS)
            is_old = is_old or batch.oldest_unix_ns < self._before_unix_ns - slack_ns
        return is_old and self._run.is_done(batch.writer, stream, batch.last_seq)

    def _is_past(self, batch: Batch, stream: str) -> bool:
        """Return whether nothing can be found any more that would have kept the rows."""
        if stream in HOSTS:
            margin_ns = int(self._settings.margin_seconds * 1e9)
            return batch.newest_unix_ns + margin_ns < self._why.now_unix_ns
        present = self._run.present
        if present is None or batch.attempt != present.attempt:
            return present is not None and batch.attempt < present.attempt
        return batch.last_step + self._settings.margin_steps <= present.step

    def _note(self, removed: Removed, began: float) -> None:
        self._num += removed.num_rows
        self._volumes.count(self._run.run_id, removed, self._why.reason, began)


__all__ = ["OVER_CAP", "VOLUMES", "Volumes"]
