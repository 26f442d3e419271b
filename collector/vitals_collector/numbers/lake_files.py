"""Checksums of the lake's files: written in the commit that names them, held before first use.

A file whose bytes are not what was written is told and not read. What this process has written
itself is believed until it ends; the rest is checked when a question first needs it.
"""

import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple

from trainvitals.errors import StorageError
from vitals_collector.numbers.lake_place import META, Ask, Place

CHECKSUMS = "checksums"
DAMAGED = "V305"
"""Error code: bytes that are not those that were written."""
CHECKSUM_COLUMNS = "path VARCHAR, crc BIGINT"
_LIVE = f"""
SELECT t.table_name || '/' || d.path AS path, d.end_snapshot IS NULL AS is_live,
  d.file_size_bytes AS num_bytes,
  CAST(s.min_value AS BIGINT) AS min_run, CAST(s.max_value AS BIGINT) AS max_run
FROM {META}_data_file d JOIN {META}_table t ON d.table_id = t.table_id
LEFT JOIN {META}_column c ON c.table_id = t.table_id AND c.column_name = 'run'
LEFT JOIN {META}_file_column_stats s
  ON s.data_file_id = d.data_file_id AND s.column_id = c.column_id
WHERE t.table_name = '{{table}}'
UNION ALL
SELECT t.table_name || '/' || d.path, d.end_snapshot IS NULL, d.file_size_bytes, NULL, NULL
FROM {META}_delete_file d JOIN {META}_table t ON d.table_id = t.table_id
WHERE t.table_name = '{{table}}'
"""
_LEAST, _GREATEST = -(2**63), 2**63 - 1


class _Unchecked(NamedTuple):
    num_bytes: int
    min_run: int
    max_run: int


class Files:
    """What is known of the files in the tables' folders. For any thread."""

    def __init__(self, place: Place, ask: Ask) -> None:
        """Know nothing yet.

        Args:
            place: where they lie, and checksums that the lake does not have yet.
            ask: puts a question to the lake.
        """
        self._place, self._ask = place, ask
        self._lock = threading.Lock()
        self._whole: set[str] = set()
        self._damaged: dict[str, _Unchecked] = {}
        self._unchecked: dict[str, _Unchecked] = {}
        self._dead: set[str] = set()
        """Merged away, and still there for who reads them."""
        self._seen_at: dict[str, int] = {}
        """By table, the state of its place when it was looked at."""

    def written(self, path: str) -> tuple[str, int]:
        """Return a new file's path and checksum; it is believed from now on."""
        checksum = self._place.crc(path)
        with self._lock:
            self._whole.add(path)
        return path, -1 if checksum is None else checksum

    def need(self, table: str, *runs: int) -> None:
        """Check the files of a table that may hold rows of the runs, each once.

        Raises:
            StorageError: one is damaged.
        """
        self._need(
            table, lambda _, bounds: any(bounds.min_run <= run <= bounds.max_run for run in runs)
        )

    def need_small(self, table: str, num_bytes: int) -> None:
        """Check the files of a table that are no larger.

        Raises:
            StorageError: one is damaged.
        """
        self._need(table, lambda _, bounds: bounds.num_bytes <= num_bytes)

    def _need(self, table: str, is_needed: Callable[[str, _Unchecked], bool]) -> None:
        def needed(files: dict[str, _Unchecked]) -> list[str]:
            mine = ((path, of) for path, of in files.items() if path.startswith(f"{table}/"))
            return [path for path, bounds in mine if is_needed(path, bounds)]

        with self._lock:
            self._look(table)
            self._check(needed(self._unchecked))
            damaged = needed(self._damaged)
            if damaged:  # another collector may have taken them out
                live = {path for path, is_live, _ in self._listed(table) if is_live}
                for path in set(damaged) - live:
                    del self._damaged[path]
                    self._dead.add(path)
                damaged = [path for path in damaged if path in live]
        if damaged:
            raise StorageError(
                f"{damaged[0]} is damaged: its bytes are not those that were written",
                hint="Lake.check says what it held; after Lake.forget_damaged that is taken when"
                " it is sent again",
                code=DAMAGED,
            )

    def check(self, tables: Iterable[str]) -> list[str]:
        """Read every live file again; return those that are damaged."""
        with self._lock:
            live: dict[str, _Unchecked] = {}
            for table in tables:
                listed = self._listed(table)
                live |= {path: bounds for path, is_live, bounds in listed if is_live}
            self._whole -= live.keys()
            self._unchecked |= live
            self._check(list(live))
            return sorted(self._damaged.keys() & live.keys())

    def forget(self, paths: Iterable[str]) -> None:
        """Take files as gone."""
        with self._lock:
            for path in paths:
                self._damaged.pop(path, None)
                self._dead.add(path)

    def _look(self, table: str) -> None:
        """Learn of files that came since the last look."""
        state = self._place.state(table)
        if state is None or state == self._seen_at.get(table):
            return
        there = self._place.paths(table)
        known = self._whole | self._damaged.keys() | self._unchecked.keys() | self._dead
        new = there - known
        if new:
            for path, is_live, bounds in self._listed(table):
                if path in new:
                    new.discard(path)
                    if is_live:
                        self._unchecked[path] = bounds
                    else:
                        self._dead.add(path)
        for kept in (self._whole, self._dead):
            kept -= {path for path in kept if path.startswith(f"{table}/")} - there
        if not new:  # else another collector is about to commit one
            self._seen_at[table] = state

    def _listed(self, table: str) -> list[tuple[str, bool, _Unchecked]]:
        rows = self._ask(_LIVE.format(table=table)).to_pylist()
        return [
            (
                row["path"],
                row["is_live"],
                _Unchecked(
                    row["num_bytes"],
                    _LEAST if row["min_run"] is None else row["min_run"],
                    _GREATEST if row["max_run"] is None else row["max_run"],
                ),
            )
            for row in rows
        ]

    def _check(self, paths: list[str]) -> None:
        if not paths:
            return
        listed = ", ".join(f"'{path}'" for path in paths)
        stored: dict[str, set[int]] = {}
        rows = self._ask(f"SELECT path, crc FROM {CHECKSUMS} WHERE path IN ({listed})").to_pylist()
        for row in rows:  # of another collector's file one may have been taken too soon
            stored.setdefault(row["path"], set()).add(row["crc"])
        for path, crc in self._place.aside():
            stored.setdefault(path, set()).add(crc)
        others: dict[str, _Unchecked] = {}
        for path in paths:
            bounds = self._unchecked.pop(path)
            if self._place.crc(path) in stored.get(path, ()):
                self._whole.add(path)
                self._damaged.pop(path, None)
            else:
                others[path] = bounds
        for table in {path.partition("/")[0] for path in others}:
            for path, is_live, _ in self._listed(table):
                if path in others and is_live:
                    self._damaged[path] = others.pop(path)
        self._dead |= others.keys()  # another collector has merged them away since they were seen
