"""Reads what a monitor without an agent left in its journal."""

from collections import defaultdict
from pathlib import Path
from typing import Any

from trainvitals.io.journal_reader import JournalReader
from trainvitals.records import NamesDefined, Note, decode_events


class Journal:
    """What one rank has written: rows as dictionaries, and events."""

    def __init__(self, shm: Path, rank: int = 0) -> None:
        self.rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self.events: list[Any] = []
        for folder in {path.parent for path in shm.rglob("*.seg")}:
            reader = JournalReader(folder)
            if reader.identity is None or reader.identity.rank != rank:
                continue
            for batch in reader.read(max_rows=100_000):
                schema = batch.header.stream_schema
                if schema.stream == "events":
                    self.events += [row.event for row in decode_events(schema, batch.rows)]
                    continue
                size = schema.row_size
                for at in range(0, len(batch.rows), size):
                    self.rows[schema.stream].append(schema.unpack(batch.rows[at : at + size]))

    def names(self, stream: str) -> dict[int, str]:
        """Return the names behind a stream's ids."""
        said = [e for e in self.events if isinstance(e, NamesDefined) and e.stream == stream]
        return {int(i): name for event in said for i, name in event.names.items()}

    def steps(self, column: str) -> dict[int, Any]:
        """Return a column of the steps by step, where it was measured."""
        return {row["step"]: row[column] for row in self.rows["steps"] if column in row}

    def layers(self, column: str) -> dict[tuple[int, str], Any]:
        """Return a column of the layers by step and layer, where it was measured."""
        names, rows = self.names("layers"), self.rows["layers"]
        return {(r["step"], names[r["layer"]]): r[column] for r in rows if column in r}

    def scalars(self) -> list[tuple[int, str, float]]:
        """Return step, name and value of every scalar."""
        names = self.names("scalars")
        return [(r["step"], names[r["name"]], r["value"]) for r in self.rows["scalars"]]

    def notes(self, code: str) -> list[str]:
        """Return the texts of the notes of one code."""
        return [e.text for e in self.events if isinstance(e, Note) and e.code == code]
