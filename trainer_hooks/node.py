"""Names of the nodes of a job: one for each group of ranks that one agent can serve.

A host name is not enough. Containers may all have the same name, or share one machine with separate
memory and process ids; two agents with one name would write to the same directory.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import msgspec


class Spot(msgspec.Struct, frozen=True):
    """Location of a rank, as far as it matters to an agent."""

    host: str
    memory: str
    """Identifies the directory of journals: boot, file system and inode. Empty without a
    directory."""
    processes: str
    """Names the process ids that can be seen."""


def locate_process(host: str, run_folder: Path | None) -> Spot:
    """Return the location of this process; ``run_folder`` is the run's, in the private base."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    if run_folder is None:
        return Spot(host, "", "")
    status = run_folder.parent.stat()
    memory = f"{_read_text(boot)}:{status.st_dev}:{status.st_ino}"
    return Spot(host, memory, _read_link(Path("/proc/self/ns/pid")))


def name_nodes(spots: Sequence[Spot]) -> list[str]:
    """Name each rank's node, for files in shared memory: host name, with a suffix if ambiguous.

    The suffix is the same in every start, as long as the node's shared memory lasts: files of an
    earlier start belong to the same node.
    """
    return [_unique_node_name(spot, spots) for spot in spots]


def _unique_node_name(spot: Spot, spots: Sequence[Spot]) -> str:
    """Return a rank's host name, with a hash if other shared memory has the same name."""
    others = {each for each in spots if each.host == spot.host and each.memory} - {spot}
    if not spot.memory or not others:
        return spot.host
    if not any(each.memory == spot.memory for each in others):
        return f"{spot.host}-{_short_hash(spot.memory)}"
    return f"{spot.host}-{_short_hash(spot.memory + spot.processes)}"


def _short_hash(text: str) -> str:
    """Return eight hexadecimal characters that make a node's name in file paths unique."""
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _read_text(path: Path) -> str:
    """Read a file of the system that identifies the node; "" if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _read_link(path: Path) -> str:
    """Read a link of the system that identifies the node; "" if it cannot be read."""
    try:
        return str(path.readlink())
    except OSError:
        return ""
