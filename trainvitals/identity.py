"""Identity of a measurement: run, incarnation, source, attempt.

``run_id`` is a ULID made by global rank 0. ``incarnation`` is a random id of each start of a writer
(a rank, or one source of an agent): a requeued job may know nothing of its past, so nothing here
counts up from a stored value. ``attempt`` is a lineage: a rollback opens a new one with its parent
and the step it forked from. Names, users and tags are attributes, never keys.
"""

from __future__ import annotations

import re
import secrets
from typing import Literal

import msgspec

from trainvitals.errors import UsageError

CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_ULID = re.compile(r"[0-7][0-9A-HJKMNP-TV-Z]{25}\Z")
_INCARNATION = re.compile(r"[0-9a-f]{16}\Z")
_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}\Z")

SourceKind = Literal["rank", "gpu", "node"]


def new_run_id(time_unix_ns: int) -> str:
    """Return a ULID: 48 bits of milliseconds, 80 random bits, 26 characters that sort by time."""
    value = ((time_unix_ns // 1_000_000) & ((1 << 48) - 1)) << 80 | secrets.randbits(80)
    return "".join(CROCKFORD[(value >> shift) & 31] for shift in range(125, -1, -5))


def check_run_id(value: str) -> str:
    """Check the run id in a record's identity: return ``value`` if it is a ULID.

    Raises:
        UsageError: it is not; a run id is also a directory name, so nothing else is allowed.
    """
    if not _ULID.match(value):
        raise UsageError(
            f"run id is {value!r}; it must be a ULID of 26 characters",
            hint="`vitals runs` lists the ids of known runs; VITALS_RUN_ID continues one of "
            "them; to name a run, use watch(run='my-run')",
        )
    return value


def new_incarnation() -> str:
    """Return a random 64-bit id in hexadecimal, by which records name one start of a writer."""
    return secrets.token_hex(8)


def check_incarnation(value: str) -> str:
    """Return ``value`` if it is 16 hexadecimal characters.

    Raises:
        UsageError: it is not.
    """
    if not _INCARNATION.match(value):
        raise UsageError(f"incarnation is {value!r}; it must be 16 hexadecimal characters")
    return value


def new_attempt_id(time_unix_ns: int) -> int:
    """Return an attempt's id for records: it sorts by time, and is exact in a float64."""
    return (time_unix_ns // 1_000_000) * 1_000 + secrets.randbelow(1_000)


class Source(msgspec.Struct, frozen=True):
    """``rank:N``, ``gpu:UUID`` or ``node:ID``."""

    kind: SourceKind
    key: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.key}"

    @classmethod
    def parse(cls, text: str) -> Source:
        """Return the source of a record, which is written as ``kind:key``.

        Raises:
            UsageError: unknown kind, or a key with characters that are not ``[A-Za-z0-9._:-]``.
        """
        kind, _, key = text.partition(":")
        if kind not in ("rank", "gpu", "node") or not _KEY.match(key):
            raise UsageError(f"source is {text!r}; it must be rank:N, gpu:UUID or node:ID")
        if kind == "rank" and not key.isdigit():
            raise UsageError(f"source is {text!r}; a rank is a number")
        return cls(kind, key)  # type: ignore[arg-type]

    @property
    def rank(self) -> int | None:
        """Return the global rank, if the source of the records is one."""
        return int(self.key) if self.kind == "rank" else None


MAX_WORLD_SIZE = 1 << 20
"""Far above any job; a forged writer must not inflate the counts of others."""


class Identity(msgspec.Struct, frozen=True):
    """Identity of the writer, in every segment and batch."""

    run_id: str
    incarnation: str
    source: str
    node: str
    pid: int = 0
    rank: int = -1
    local_rank: int = -1
    world_size: int = 0
    started_unix_ns: int = 0
    started_monotonic_ns: int = 0
    boot_id: str = ""
    gpu_uuid: str = ""
    metrics_url: str = ""
    """URL to scrape the writer, for an agent's own source. Older collectors ignore it."""

    def check(self) -> Identity:
        """Check the identity in records: return self if each key and file name is well formed."""
        check_run_id(self.run_id)
        check_incarnation(self.incarnation)
        Source.parse(self.source)
        if not _KEY.match(self.node):
            raise UsageError(f"node is {self.node!r}; use letters, digits and ._:- (at most 128)")
        if self.world_size > MAX_WORLD_SIZE:
            raise UsageError(f"world_size is {self.world_size}; it must be <= {MAX_WORLD_SIZE}")
        return self


def safe_node_id(hostname: str) -> str:
    """Return ``hostname`` with ``-`` for every character outside ``[A-Za-z0-9._-]``."""
    return (re.sub(r"[^A-Za-z0-9._-]", "-", hostname).lstrip("-._") or "node")[:64]
