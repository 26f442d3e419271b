"""What a spool remembers beside its batches: what is acknowledged, dropped, and of whom."""

import zlib
from pathlib import Path

import msgspec

from trainvitals.io.spool_files import Position

STATE_FILE = "state.json"


class State(msgspec.Struct, kw_only=True):
    """The content of ``state.json``; it may be stale, and then more is sent again."""

    acked: Position = Position()
    scanned: Position = Position()
    """Up to where ``last_seqs`` knows the batches; all of that is durable."""
    dropped_rows: int = 0
    last_seqs: list[tuple[str, str, str, int]] = []


class _Sealed(msgspec.Struct):
    """The state with its checksum: a flipped digit would have rows passed over in silence."""

    crc: int
    state: msgspec.Raw


def load_state(path: Path) -> State:
    """Return the state in the file; a new one where it is missing or damaged."""
    return read_state(path) or State()


def read_state(path: Path) -> State | None:
    """Return the state in the file, a new one where it is missing; None: it is damaged."""
    try:
        sealed = msgspec.json.decode(path.read_bytes(), type=_Sealed)
        if sealed.crc != zlib.crc32(sealed.state):
            return None
        return msgspec.json.decode(sealed.state, type=State)
    except FileNotFoundError:
        return State()
    except msgspec.DecodeError:
        return None


def sealed_state(state: State) -> bytes:
    """Return the file's bytes."""
    raw = msgspec.json.encode(state)
    return msgspec.json.encode(_Sealed(zlib.crc32(raw), msgspec.Raw(raw)))
