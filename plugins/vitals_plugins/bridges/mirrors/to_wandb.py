"""A run as a run of Weights & Biases, offline or online according to WANDB_MODE.

It has the run's id, so every start of the mirror, and a ``wandb sync`` of each of its directories,
continues the same run. W&B's own step must rise: it counts rows here, and ``vitals/step`` is the
x-axis. Discarded steps stay, because W&B cannot remove them: ``vitals/attempt`` distinguishes them.

W&B writes in a separate process, which does not report what is on disk. So its file is read: a
batch is written once its last row is in the file, and after a kill existing rows are not written
again.
"""

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainvitals.errors import StorageError
from trainvitals.views import RunState
from vitals_plugins.bridges.importers.wandb_file import logged_rows
from vitals_plugins.bridges.mirrors.follow import ATTEMPT, ActionNote, Entry, Fork, TrackerRow
from vitals_plugins.bridges.mirrors.worker import RunDescription, TrackerTarget

STEP = "vitals/step"
NOTE = "vitals/note"
_FLUSH_SECONDS = 0.5
_WAIT_SECONDS = 30.0
_LEVELS = {"info": "INFO", "warning": "WARN", "error": "ERROR"}
_MAX_TITLE = 63
_EXIT_CODES = {"finished": 0, "running": 0}

Key = tuple[int, int, tuple[str, ...]]
"""Attempt, step, and the names of the values of a row."""


class WandB:
    """Writes one run; see ``worker.Tracker``."""

    def __init__(
        self,
        target: TrackerTarget,
        about: RunDescription,
        saved_state: dict[str, Any],
        unclean: bool,
    ) -> None:
        import wandb

        self.kept: dict[str, Any] = {
            "num_rows": saved_state.get("num_rows", 0),
            "files": list(saved_state.get("files", [])),
        }
        self._written = self._unsaved_rows() if unclean else Counter()
        entity, _, project = target.where.rpartition("/")
        self._run: Any = wandb.init(
            entity=entity or None,
            project=project or about.project or "vitals",
            id=about.run_id,
            name=about.name,
            tags=about.tags,
            config={**about.config, **about.facts},
            resume="allow",
            settings=wandb.Settings(
                console="off",
                silent=True,
                disable_git=True,
                disable_code=True,
                disable_job_creation=True,
                x_disable_stats=True,
                x_disable_meta=True,
                x_save_requirements=False,
                x_transaction_log_flush_interval=_FLUSH_SECONDS,
            ),
        )
        self._file = Path(self._run.settings.sync_file)
        if str(self._file) not in self.kept["files"]:
            self.kept["files"].append(str(self._file))
        self._at = 0
        self._last = -1
        """The latest row that this process logged: earlier ones are in other files."""
        self._run.define_metric(STEP, hidden=True)
        self._run.define_metric("*", step_metric=STEP)

    def _unsaved_rows(self) -> Counter[Key]:
        """Return the rows after the saved position that are in W&B's file."""
        rows: list[tuple[int, dict[str, Any]]] = []
        for name in self.kept["files"][-1:]:
            rows = [row for row in logged_rows(Path(name), 0)[0] if row[0] >= self.kept["num_rows"]]
        self.kept["num_rows"] = max((n + 1 for n, _ in rows), default=self.kept["num_rows"])
        return Counter(_row_key(cells) for _, cells in rows)

    def write(self, entries: Sequence[Entry]) -> None:
        """Write the entries to W&B, and wait until they are in the run's file."""
        for entry in entries:
            cells: dict[str, Any] = {STEP: entry.step, ATTEMPT: float(entry.attempt)}
            if isinstance(entry, TrackerRow):
                cells |= entry.values
            else:
                cells[NOTE] = entry.text
            key = _row_key(cells)
            if self._written[key]:
                self._written[key] -= 1
                continue
            self._log(cells, entry.time_unix_ns)
            if isinstance(entry, ActionNote) and entry.level != "info":
                title = entry.title[:_MAX_TITLE]
                self._run.alert(title, entry.text, _LEVELS[entry.level], wait_duration=0)
            if isinstance(entry, ActionNote | Fork):
                self._run.summary["vitals/last_note"] = entry.text
        self._wait()

    def _log(self, cells: dict[str, Any], time_unix_ns: int) -> None:
        step = self.kept["num_rows"]
        self._run.log({**cells, "_timestamp": time_unix_ns / 1e9}, step=step, commit=True)
        self._last = step
        self.kept["num_rows"] = step + 1

    def _wait(self) -> None:
        """Wait until the last row is in W&B's file.

        Raises:
            StorageError: it does not come.
        """
        deadline = time.monotonic() + _WAIT_SECONDS
        while self._last >= 0:
            rows, self._at = logged_rows(self._file, self._at)
            if any(number >= self._last for number, _ in rows):
                return
            if time.monotonic() > deadline:
                raise StorageError(
                    f"wandb has not written row {self._last} to {self._file} for "
                    f"{_WAIT_SECONDS:g} s"
                )
            time.sleep(_FLUSH_SECONDS / 5)

    def close(self, state: RunState) -> None:
        """Finish the W&B run, with an exit code for the run's state."""
        self._run.finish(exit_code=_EXIT_CODES.get(state, 1))


def _row_key(cells: dict[str, Any]) -> Key:
    """Return the attempt, step and value names that identify a row in W&B's file."""
    reserved_keys = (STEP, NOTE)  # a text is not read back
    names = sorted(name for name in cells if not name.startswith("_") and name not in reserved_keys)
    return int(cells.get(ATTEMPT, 0)), int(cells.get(STEP, 0)), tuple(names)
