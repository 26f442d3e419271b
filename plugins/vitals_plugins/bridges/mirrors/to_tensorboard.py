"""A run as TensorBoard's event files.

The run's own directory has its curve without discarded steps: they are purged there in the way of a
TensorBoard restart (the start of a session purges everything at or after its step), and written to
a separate run next to it, ``NAME/rolled_back``. Values are stored with 64 bits, as they were
measured; TensorBoard draws 32.

Each process writes separate files, and saves their length. Data of a killed process after that is
truncated.
"""

import os
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trainvitals.io.private import sync_folder
from trainvitals.printable import escape_markdown
from trainvitals.views import RunState
from vitals_plugins.bridges.mirrors.follow import Entry, Fork, TrackerRow
from vitals_plugins.bridges.mirrors.worker import RunDescription, TrackerTarget

ROLLED_BACK = "rolled_back"
_NOTES = "vitals/decisions"
_UNSAFE = '/\\\0<>:"|?*'


def folder_name(name: str, run_id: str) -> str:
    """Return the directory of a run's TensorBoard mirror: its name, and its id's unique end."""
    safe = "".join("_" if c in _UNSAFE or not c.isprintable() else c for c in name)
    safe = safe.strip(" .")[:80]
    return run_id if not safe or safe == run_id else f"{safe}-{run_id[-6:].lower()}"


class TensorBoard:
    """Writes one run; see ``worker.Tracker``."""

    def __init__(
        self,
        target: TrackerTarget,
        about: RunDescription,
        saved_state: dict[str, Any],
        unclean: bool,
    ) -> None:
        self._library = _TensorBoardFormat()
        self._root = Path(target.where)
        self._folder = self._root / saved_state.get("folder", folder_name(about.name, about.run_id))
        self.kept: dict[str, Any] = {
            "folder": str(self._folder.relative_to(self._root)),
            "files": dict(saved_state.get("files", {})),
        }
        self._files: dict[bool, _EventFile] = {}
        for folder in (self._folder, self._folder / ROLLED_BACK):
            self._cut(folder)
        if not self.kept["files"]:
            self._write_run_info(about)

    def _cut(self, folder: Path) -> None:
        """Delete what the mirror's event files have after the saved position."""
        for path in sorted(folder.glob("*.vitals")):
            size = self.kept["files"].get(str(path.relative_to(self._root)), 0)
            if path.stat().st_size > size:
                with path.open("r+b") as file:
                    file.truncate(size)
                    os.fsync(file.fileno())
            if not size:
                path.unlink()

    def _write_run_info(self, about: RunDescription) -> None:
        """Write the run's description, and a first session start, which purges nothing."""
        file = self._get_or_open_file(discarded=False)
        when = about.started_unix_ns
        file.add(self._library.event(0, when, session_start=True))
        rows = [*about.facts.items(), *about.config.items()]
        lines = ["| name | value |", "|---|---|"]
        lines += [f"| {escape_markdown(str(k))} | {escape_markdown(str(v))} |" for k, v in rows]
        file.add(self._library.event(0, when, text=("vitals/config", "\n".join(lines))))

    def write(self, entries: Sequence[Entry]) -> None:
        """Write the entries to TensorBoard's event files, and sync them."""
        for entry in entries:
            if isinstance(entry, TrackerRow):
                event = self._library.event(entry.step, entry.time_unix_ns, values=entry.values)
                self._get_or_open_file(discarded=entry.discarded).add(event)
                continue
            if isinstance(entry, Fork):
                self._move_discarded(entry)
            text = escape_markdown(entry.text)
            note = self._library.event(entry.step, entry.time_unix_ns, text=(_NOTES, text))
            self._get_or_open_file(discarded=False).add(note)
        self._sync()

    def close(self, state: RunState) -> None:
        """Sync and close the mirror's event files."""
        self._sync()
        for file in self._files.values():
            file.close()

    def _move_discarded(self, fork: Fork) -> None:
        """Move steps at or after the fork to TensorBoard's run of discarded steps."""
        self._sync()
        behind = self._get_or_open_file(discarded=True)
        for raw in self._library.read(self._folder):
            event = self._library.decode(raw)
            is_data = event.step >= fork.step and any(v.tag != _NOTES for v in event.summary.value)
            if is_data and not self._was_purged(event):
                behind.add(raw)
        start = self._library.event(fork.step, fork.time_unix_ns, session_start=True)
        self._get_or_open_file(discarded=False).add(start)
        self.kept.setdefault("forks", []).append([fork.step, fork.attempt])

    def _was_purged(self, event: Any) -> bool:
        """Return whether an earlier fork discarded this row: its attempt is older than the fork's.

        Rows of scalars and of steps have their attempt with them.
        """
        attempt = next(
            (self._library.number(v) for v in event.summary.value if v.tag == "vitals/attempt"), 0.0
        )
        forks = self.kept.get("forks", [])
        return any(event.step >= step and attempt < forked for step, forked in forks)

    def _get_or_open_file(self, *, discarded: bool) -> "_EventFile":
        """Return the mirror's event file for current or discarded steps, opened if needed."""
        if discarded not in self._files:
            folder = self._folder / ROLLED_BACK if discarded else self._folder
            self._files[discarded] = _EventFile(folder, self._library)
        return self._files[discarded]

    def _sync(self) -> None:
        """Sync the mirror's event files, and note their lengths."""
        for file in self._files.values():
            self.kept["files"][str(file.path.relative_to(self._root))] = file.sync()


class _EventFile:
    """One event file of this process's."""

    def __init__(self, folder: Path, library: "_TensorBoardFormat") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        stamp = f"{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}"
        # Files are read in the order of their names: a later one must not come first.
        number = len(list(folder.glob("*.vitals")))
        self.path = folder / f"events.out.tfevents.{stamp}.{number}.vitals"
        self._file = self.path.open("xb")
        self._writer = library.record_writer(self._file)
        self._writer.write(library.first_event())
        sync_folder(folder)

    def add(self, event: bytes) -> None:
        """Append an event to TensorBoard's file."""
        self._writer.write(event)

    def sync(self) -> int:
        """Make all of the event file durable; return how long it is."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        """Close TensorBoard's event file."""
        self._file.close()


class _TensorBoardFormat:
    """Used parts of TensorBoard: its messages, and their file format."""

    def __init__(self) -> None:
        from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
        from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, types_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter
        from tensorboard.util.tensor_util import make_ndarray

        self.record_writer: Any = RecordWriter
        self._loader: Any = RawEventFileLoader
        self._events: Any = event_pb2
        self._summaries: Any = summary_pb2
        self._tensors: Any = tensor_pb2
        self._types: Any = types_pb2
        self._array_of: Any = make_ndarray

    def first_event(self) -> bytes:
        """Return the first event of every event file of the mirror."""
        return bytes(
            self._events.Event(
                wall_time=time.time(),
                file_version="brain.Event:2",
                source_metadata=self._events.SourceMetadata(writer="vitals"),
            ).SerializeToString()
        )

    def event(
        self,
        step: int,
        time_unix_ns: int,
        *,
        values: dict[str, float] | None = None,
        text: tuple[str, str] | None = None,
        session_start: bool = False,
    ) -> bytes:
        """Return one event: the values of a step, or a line, or a session's start."""
        event = self._events.Event(wall_time=time_unix_ns / 1e9, step=step)
        if session_start:
            event.session_log.status = self._events.SessionLog.START
        for tag, number in (values or {}).items():
            tensor = self._tensors.TensorProto(
                dtype=self._types.DT_DOUBLE, double_val=[number], tensor_shape={}
            )
            self._add_value(event, tag, "scalars", tensor, self._summaries.DATA_CLASS_SCALAR)
        if text is not None:
            tag, content = text
            tensor = self._tensors.TensorProto(
                dtype=self._types.DT_STRING, string_val=[content.encode()], tensor_shape={}
            )
            self._add_value(event, tag, "text", tensor, self._summaries.DATA_CLASS_TENSOR)
        return bytes(event.SerializeToString())

    def _add_value(self, event: Any, tag: str, plugin: str, tensor: Any, data_class: Any) -> None:
        """Add a value to a TensorBoard event, with the plugin that shows it."""
        value = event.summary.value.add(tag=tag, tensor=tensor)
        value.metadata.plugin_data.plugin_name = plugin
        value.metadata.data_class = data_class

    def decode(self, raw: bytes) -> Any:
        """Return an event that was read from TensorBoard's file."""
        return self._events.Event.FromString(raw)

    def number(self, value: Any) -> float:
        """Return the number that a value of TensorBoard's summary holds."""
        return float(self._array_of(value.tensor).item())

    def read(self, folder: Path) -> Iterator[bytes]:
        """Yield all events of the mirror's files directly in a directory, in the files' order."""
        for path in sorted(folder.glob("*.vitals")):
            yield from self._loader(str(path)).Load()
