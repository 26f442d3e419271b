"""Names of the nodes of a job: one for each group of ranks that one agent can serve.

A host name is not enough. Containers may all be called alike, or share one machine with memory and
process ids of their own; two agents of one name would write the same folder.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import msgspec


class Spot(msgspec.Struct, frozen=True):
    """Where a rank runs, as far as an agent's reach goes."""

    host: str
    memory: str
    """Names the folder of journals: boot, file system and inode. Empty without a folder."""
    processes: str
    """Names the process ids that can be seen."""


def spot_of(host: str, run_folder: Path | None) -> Spot:
    """Return where this process runs; ``run_folder`` is the run's, in the private base."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    if run_folder is None:
        return Spot(host, "", "")
    status = run_folder.parent.stat()
    memory = f"{_text(boot)}:{status.st_dev}:{status.st_ino}"
    return Spot(host, memory, _link(Path("/proc/self/ns/pid")))


def name_nodes(spots: Sequence[Spot]) -> list[str]:
    """Return each rank's node: its host name, with as much behind it as makes it one place.

    What is added is the same in every start, as long as the node's shared memory lasts: what an
    earlier start left there belongs to the same node.
    """
    return [_name(spot, spots) for spot in spots]


def _name(spot: Spot, spots: Sequence[Spot]) -> str:
    others = {each for each in spots if each.host == spot.host and each.memory} - {spot}
    if not spot.memory or not others:
        return spot.host
    if not any(each.memory == spot.memory for each in others):
        return f"{spot.host}-{_short(spot.memory)}"
    return f"{spot.host}-{_short(spot.memory + spot.processes)}"


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _link(path: Path) -> str:
    try:
        return str(path.readlink())
    except OSError:
        return ""
