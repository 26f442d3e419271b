"""Reads the file that wandb writes for a run, ``run-ID.wandb``; wandb itself is not needed.

Its Python package no longer reads it (DataStore went when the writer moved to Go), so both formats
are read here: LevelDB's log (github.com/google/leveldb, doc/log_format.md) behind a head of 7
bytes, with a plain CRC-32, and in it the messages of wandb's ``wandb_internal.proto``, of which
only the history matters. The numbers of a published message's fields never change.
"""

import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

from trainvitals.errors import FormatError
from vitals_plugins.bridges.importers.columns import (
    KNOWN,
    ColumnChoice,
    ImportedLog,
    ImportedRows,
    choose_columns,
    find_scalars,
    normalize_column_name,
)
from vitals_plugins.bridges.importers.files import read_whole, translate_read_errors
from vitals_plugins.bridges.protobuf import (
    decode_double,
    decode_int64,
    decode_sint64,
    read_fields,
)

HEAD = b":W&B" + struct.pack("<HB", 0xBEE1, 0)
BLOCK = 32_768
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4
_BLOCKS_AGAIN = 8
"""Blocks that are read again: a record that started in one of them may be incomplete."""
FRAME = struct.Struct("<IHB")
"""Before each piece of a record: checksum, length, which piece it is."""

_RECORD_HISTORY, _HISTORY_ITEM, _HISTORY_STEP = 2, 1, 2
_KEY, _NESTED_KEY, _INTEGER, _NUMBER, _TEXT, _VALUE_JSON = 1, 2, 5, 6, 7, 16
_OWN_STEP = "_step"
"""wandb's own count of ``log`` calls: the step if nothing better was logged."""

Cells = dict[str, object]


def read_wandb(path: Path, column_options: ColumnChoice) -> ImportedLog:
    """Read the log in a wandb file; its rows are the calls of ``wandb.log``, merged as by wandb.

    Raises:
        FormatError: it is not a file of wandb's.
        UsageError: nothing that was logged is a loss or a gradient norm.
    """
    with translate_read_errors(path):
        raw = memoryview(read_whole(path))
    if bytes(raw[: len(HEAD)]) != HEAD:
        raise FormatError(
            f"{path} begins with {bytes(raw[: len(HEAD)])!r}; a file of wandb's with {HEAD!r}"
        )
    notes: list[str] = []
    names: dict[str, None] = {}
    calls: list[Cells] = []
    for record in _read_leveldb_records(raw, notes):
        for cells in _read_log_calls(record):
            names.update(dict.fromkeys(cells))
            calls.append({name: cells[name] for name in cells if column_options.may_match(name)})
    better = [name for name in names if name != _OWN_STEP]
    has_better = any(normalize_column_name(name) in KNOWN["step"] for name in better)
    own_is_meant = column_options.step == _OWN_STEP or not has_better
    columns = choose_columns([*names] if own_is_meant else better, column_options, str(path))
    rows = ImportedRows(path, "call", columns, find_scalars(names, column_options, str(path)))
    for row, cells in enumerate(calls):
        rows.add_named(row, cells)
    return rows.to_log("wandb", notes)


def logged_rows(path: Path, at: int) -> tuple[list[tuple[int, Cells]], int]:
    """Return the calls in a wandb file that still grows, each with its ``_step``.

    Args:
        path: the file; nothing is read of one that is not there yet.
        at: 0, or the value returned by the previous call; its last rows may be returned again.

    Returns:
        The calls, and the position to continue from.
    """
    if not path.exists():
        return [], 0
    with translate_read_errors(path), path.open("rb") as file:
        file.seek(at)
        raw = memoryview(file.read())
    rows = [
        (int(str(cells.get(_OWN_STEP, 0))), cells)
        for record in _read_leveldb_records(raw, [], at=0 if at else len(HEAD))
        for cells in _read_log_calls(record)
    ]
    return rows, max(0, (at + len(raw)) // BLOCK - _BLOCKS_AGAIN) * BLOCK


# ---------------------------------------------------------------------------- LevelDB's log


def _read_leveldb_records(
    raw: memoryview, notes: list[str], at: int = len(HEAD)
) -> Iterator[memoryview]:
    """Yield a wandb file's complete records; torn or damaged ones are skipped and noted.

    At the start of a block, position 0, the rest of a record from the previous block is not a
    record.
    """
    pieces, damaged = bytearray(), 0
    whole = at > 0
    while at + FRAME.size <= len(raw):
        block_remainder = BLOCK - at % BLOCK
        if block_remainder < FRAME.size:
            at += block_remainder
            continue
        checksum, length, kind = FRAME.unpack_from(raw, at)
        body = raw[at + FRAME.size : at + FRAME.size + length]
        is_sound = len(body) == length and zlib.crc32(body, zlib.crc32(bytes([kind]))) == checksum
        if not is_sound:  # continue with the next block, as LevelDB does
            damaged, whole = damaged + 1, False
            at += block_remainder
            continue
        at += FRAME.size + length
        if kind == FULL:
            yield body
        elif kind == FIRST:
            pieces, whole = bytearray(body), True
        elif whole:
            pieces += body
            if kind == LAST:
                yield memoryview(bytes(pieces))
    if damaged:
        notes.append(f"{damaged} damaged sections of the file were skipped; rows are missing")


# --------------------------------------------------------------------------- wandb's messages


def _read_log_calls(record: memoryview) -> Iterator[Cells]:
    """Yield the values of one call of ``wandb.log``, if the file's record is one."""
    for name, history in read_fields(record):
        if name != _RECORD_HISTORY or isinstance(history, int):
            continue
        cells: Cells = {}
        for part, value in read_fields(history):
            if isinstance(value, int):
                continue
            if part == _HISTORY_ITEM:
                _read_item(value, cells)
            elif part == _HISTORY_STEP:
                steps = (
                    n
                    for field_number, n in read_fields(value)
                    if field_number == 1 and isinstance(n, int)
                )
                cells.setdefault(_OWN_STEP, decode_int64(next(steps, 0)))
        yield cells


def _read_item(item: memoryview, cells: Cells) -> None:
    """Add one value of a wandb file by its name, nested names joined by dots; only numbers."""
    names: list[str] = []
    value: object = None
    for part, content in read_fields(item):
        if part in (_KEY, _NESTED_KEY) and not isinstance(content, int):
            names.append(bytes(content).decode(errors="replace"))
        elif part == _INTEGER and isinstance(content, int):
            value = decode_sint64(content)
        elif part == _NUMBER and isinstance(content, int):
            value = decode_double(content)
        elif part in (_TEXT, _VALUE_JSON) and not isinstance(content, int):
            value = _from_json(bytes(content), is_json=part == _VALUE_JSON)
    if names and isinstance(value, int | float) and not isinstance(value, bool):
        cells[".".join(names)] = value


def _from_json(raw: bytes, *, is_json: bool) -> object:
    """Return a logged value; wandb writes non-finite values as a word, in quotes or not."""
    try:
        value = json.loads(raw) if is_json else raw.decode()
    except (ValueError, RecursionError):  # no value that could be a number
        return None
    if isinstance(value, str) and value in ("NaN", "Infinity", "-Infinity"):
        return float(value)
    return value
