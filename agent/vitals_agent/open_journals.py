"""Remembers which journals were being copied, where memory that is lost does not take it along."""

from pathlib import Path

import msgspec

from trainvitals.io.rundir import replace_file


class OpenJournal(msgspec.Struct, frozen=True):
    """A journal that is not wholly in the spool yet."""

    folder: str
    source: str
    incarnation: str


class OpenJournals:
    """The list in a file beside the spool: a later agent sees by it what did not survive.

    A list that cannot be read is an empty one: nothing is said then, and nothing else is lost.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._listed = _read(path)

    def add(self, journal: OpenJournal) -> None:
        """List a journal. May raise OSError."""
        if self._listed.get(journal.folder) != journal:
            self._listed[journal.folder] = journal
            self._write()

    def discard(self, folder: str) -> None:
        """Take a journal off the list: all of it is in the spool. May raise OSError."""
        if self._listed.pop(folder, None) is not None:
            self._write()

    def take_missing(self, memory: Path) -> list[OpenJournal]:
        """Take those off the list that are not in the node's memory any more; return them."""
        missing = [each for each in self._listed.values() if not (memory / each.folder).is_dir()]
        for each in missing:
            del self._listed[each.folder]
        if missing:
            self._write()
        return missing

    def _write(self) -> None:
        replace_file(self._path, msgspec.json.encode(list(self._listed.values())))


def _read(path: Path) -> dict[str, OpenJournal]:
    try:
        journals = msgspec.json.decode(path.read_bytes(), type=list[OpenJournal])
    except (OSError, msgspec.DecodeError):
        return {}
    return {each.folder: each for each in journals}
