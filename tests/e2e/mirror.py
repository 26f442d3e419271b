"""A second, independent copy of what ranks write: hard links to their journals' segments."""

import contextlib
import threading
import time
from pathlib import Path

import msgspec

from tests.e2e.lab import RowKey, as_bytes, as_event
from trainvitals.io.journal import JournalReader
from trainvitals.records import decode_events
from trainvitals.rows import Schema


class Mirror:
    """Keeps every segment that it once saw: an agent frees a name in shared memory, not ours."""

    def __init__(self, shared: Path) -> None:
        self.rows: dict[RowKey, bytes] = {}
        """Rows and events, each with its values as ``lab.stored_rows`` gives them."""
        self.times: dict[int, dict[int, int]] = {}
        """Of each rank: when each step was recorded, in monotonic nanoseconds."""
        self.pids: dict[int, int] = {}
        self._shared = shared
        self._copy = shared / "mirror"
        self._copy.mkdir()
        self._readers: dict[Path, JournalReader] = {}
        threading.Thread(target=self._keep_linking, daemon=True).start()

    def _keep_linking(self) -> None:
        """Link each segment while it is written: the agent frees it once it was stored."""
        while self._copy.is_dir():
            with contextlib.suppress(FileNotFoundError):  # the test has ended
                self._link()
            time.sleep(0.05)

    def _link(self) -> None:
        for path in sorted(self._shared.glob("trainvitals-*/*/rank-*/*.seg")):
            folder = self._copy / path.parent.name
            folder.mkdir(exist_ok=True)
            with contextlib.suppress(FileExistsError, FileNotFoundError):
                (folder / path.name).hardlink_to(path)

    def look(self) -> None:
        """Link new segments and read what was written since."""
        self._link()
        for folder in self._copy.iterdir():
            reader = self._readers.setdefault(folder, JournalReader(folder))
            while batches := reader.read():
                for batch in batches:
                    self._take(reader, batch.header.stream_schema, batch.header.first_seq, batch)

    def num_steps(self, rank: int = 0) -> int:
        """Return how many steps the rank has recorded by now."""
        self.look()
        return len(self.times.get(rank, ()))

    @property
    def num_lost(self) -> int:
        """Rows that this copy missed; with any, it proves nothing."""
        return sum(reader.dropped for reader in self._readers.values())

    def _take(self, reader: JournalReader, schema: Schema, first_seq: int, batch) -> None:
        who = reader.identity
        assert who is not None
        self.pids[who.rank] = who.pid
        if schema.stream == "events":
            for event in decode_events(schema, batch.rows):
                body = msgspec.msgpack.encode(event.event)
                written = as_event(event.step, event.attempt, event.time_unix_ns, body)
                self._add((who.source, who.incarnation, "events", event.seq), written)
            return
        for i in range(batch.header.num_rows):
            values = schema.unpack(batch.rows[i * schema.row_size : (i + 1) * schema.row_size])
            self._add((who.source, who.incarnation, schema.stream, first_seq + i), as_bytes(values))
            if schema.stream == "steps":
                self.times.setdefault(who.rank, {})[values["step"]] = values.get("monotonic_ns", 0)

    def _add(self, key: RowKey, written: bytes) -> None:
        assert key not in self.rows
        self.rows[key] = written
