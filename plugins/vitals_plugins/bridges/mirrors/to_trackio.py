"""A run as a run of trackio, in its local store; `trackio sync` copies it to a Space.

Each row has an id that trackio's store knows, so existing rows are ignored. Rows are written
through the store and not through ``trackio.log``, which holds rows in memory and loses them if its
process dies. Discarded steps stay: ``vitals/attempt`` distinguishes them.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from trainvitals.views import RunState
from vitals_plugins.bridges.mirrors.follow import Entry, TrackerRow
from vitals_plugins.bridges.mirrors.worker import RunDescription, TrackerTarget

_LEVELS = {"info": "info", "warning": "warn", "error": "error"}


class Trackio:
    """Writes one run; see ``worker.Tracker``."""

    def __init__(
        self,
        target: TrackerTarget,
        about: RunDescription,
        saved_state: dict[str, Any],
        unclean: bool,
    ) -> None:
        from trackio.sqlite_storage import SQLiteStorage

        self._store: Any = SQLiteStorage
        self._about = about
        self._project = saved_state.get("project") or target.where or about.project or "vitals"
        self.kept: dict[str, Any] = {"project": self._project}

    def write(self, entries: Sequence[Entry]) -> None:
        """Write the entries to trackio in two transactions: values, and actions."""
        about = self._about
        rows = [entry for entry in entries if isinstance(entry, TrackerRow)]
        notes = [entry for entry in entries if not isinstance(entry, TrackerRow)]
        self._store.bulk_log(
            self._project,
            about.name,
            [row.values for row in rows],
            steps=[row.step for row in rows],
            timestamps=[_format_time(row.time_unix_ns) for row in rows],
            config={
                **{name.lstrip("_"): value for name, value in about.config.items()},
                **about.facts,
                "_Username": None,
                "_Created": _format_time(about.started_unix_ns),
                "_Group": None,
            },
            log_ids=[self._row_id(row) for row in rows],
            run_id=about.run_id,
        )
        self._store.bulk_alert(
            self._project,
            about.name,
            [getattr(note, "title", f"Vitals: attempt {note.attempt}") for note in notes],
            [note.text for note in notes],
            [_LEVELS[getattr(note, "level", "info")] for note in notes],
            [note.step for note in notes],
            timestamps=[_format_time(note.time_unix_ns) for note in notes],
            alert_ids=[
                f"{about.run_id}-{getattr(note, 'key', f'attempt-{note.attempt}')}"
                for note in notes
            ],
            run_id=about.run_id,
        )

    def _row_id(self, row: TrackerRow) -> str:
        """Return an id of a row that is the same after a restart of the mirror."""
        names = "" if "train/loss" in row.values else ",".join(sorted(row.values))
        return f"{self._about.run_id}-{row.attempt}-{row.step}-{names}"

    def close(self, state: RunState) -> None:
        """Do nothing: trackio's runs have no end."""


def _format_time(unix_ns: int) -> str:
    """Return the time in ISO format, in UTC, for trackio's store."""
    return datetime.fromtimestamp(unix_ns / 1e9, UTC).isoformat()
