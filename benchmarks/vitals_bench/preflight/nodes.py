"""Nodes on one machine: name spaces behind a switch, each with its disk. Needs root on Linux.

The network is a bridge whose ports have the speed of Gigabit Ethernet (token buckets); a disk is a
loop device in memory, with a limit of a control group. So a limit of one node is what a worse
cable or disk would be: the kernel delays its packets and writes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainvitals.errors import VitalsError

LINK_MBITS = 1000
SLOW_LINK_MBITS = 100
"""The speed to which a port falls back if one pair of the cable is broken."""
DISK_BYTES = 100 << 20
"""Bytes per second that a disk writes."""
SLOW_DISK_BYTES = 10 << 20
_DISK_SIZE = 512 << 20
_GROUPS = Path("/sys/fs/cgroup")
_BURST_BYTES = 256 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node: its name space, its directory, and the control group of its disk."""

    name: str
    space: str
    address: str
    directory: Path
    group: Path

    def command(self, words: Sequence[str]) -> list[str]:
        """Return a command that runs on this node."""
        script = 'echo $$ > "$0" && exec "$@"'
        network = f"--net=/run/netns/{self.space}"
        return ["sh", "-c", script, str(self.group), "nsenter", network, *words]


@contextlib.contextmanager
def nodes(num: int, *, slow_link: int = -1, slow_disk: int = -1) -> Iterator[list[Node]]:
    """Start that many nodes, of which one may have a slow link or disk, and remove them at the end.

    Raises:
        VitalsError: this user may not, or the kernel cannot.
    """
    with contextlib.ExitStack() as stack:
        # As Ctrl-C: otherwise SIGTERM would leave the name spaces, disks and groups.
        previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        stack.callback(signal.signal, signal.SIGTERM, previous)
        temporary = tempfile.TemporaryDirectory(suffix="-preflight", dir="/dev/shm")
        folder = Path(stack.enter_context(temporary))
        switch = f"vitals-{os.getpid()}-switch"
        _add_space(stack, switch)
        _run("ip", "-n", switch, "link", "add", "switch", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "switch", "up")
        members = []
        for index in range(num):
            mbits = SLOW_LINK_MBITS if index == slow_link else LINK_MBITS
            num_bytes = SLOW_DISK_BYTES if index == slow_disk else DISK_BYTES
            name, address = f"n{index}", f"10.77.0.{index + 1}"
            members.append(
                Node(
                    name=name,
                    space=_add_port(stack, switch, index, address, mbits),
                    address=address,
                    directory=folder / name,
                    group=_add_disk(stack, folder / name, num_bytes),
                )
            )
        yield members


def _add_space(stack: contextlib.ExitStack, name: str) -> None:
    _run("ip", "netns", "add", name)
    stack.callback(_run, "ip", "netns", "delete", name)
    _run("ip", "-n", name, "link", "set", "lo", "up")


def _add_port(
    stack: contextlib.ExitStack, switch: str, index: int, address: str, mbits: int
) -> str:
    """Add a node to the switch, with a cable of this speed; return the name of its space."""
    space = f"vitals-{os.getpid()}-{index}"
    _add_space(stack, space)
    port = f"port{index}"
    _run("ip", "-n", switch, "link", "add", port, "type", "veth", "peer", "eth0", "netns", space)
    _run("ip", "-n", switch, "link", "set", port, "master", "switch", "up")
    _run("ip", "-n", space, "address", "add", f"{address}/24", "dev", "eth0")
    _run("ip", "-n", space, "link", "set", "eth0", "up")
    for of, device in ((switch, port), (space, "eth0")):
        _run("tc", "-n", of, "qdisc", "add", "dev", device, "root", "tbf", "rate",
             f"{mbits}mbit", "burst", str(_BURST_BYTES), "latency", "50ms")  # fmt: skip
    return space


def _add_disk(stack: contextlib.ExitStack, directory: Path, num_bytes: int) -> Path:
    """Mount a disk that writes this many bytes per second; return ``cgroup.procs`` of its group."""
    image = directory.with_suffix(".disk")
    with image.open("wb") as file:
        file.truncate(_DISK_SIZE)
    directory.mkdir()
    device = _run("losetup", "--find", "--show", str(image)).strip()
    stack.callback(_run, "losetup", "--detach", device)
    _run("mkfs.ext4", "-q", "-O", "^has_journal", device)
    _run("mount", device, str(directory))
    stack.callback(_run, "umount", "--lazy", str(directory))
    number = Path(device).stat().st_rdev
    limit = f"{os.major(number)}:{os.minor(number)}"
    return _add_group(
        stack,
        directory.name,
        ("blkio", "blkio.throttle.write_bps_device", f"{limit} {num_bytes}"),
        ("io", "io.max", f"{limit} wbps={num_bytes}"),
    )


def add_cpu_group(stack: contextlib.ExitStack, share: float) -> Path:
    """Return the file of a control group whose processes have this part of a core."""
    quota = int(100_000 * share)
    return _add_group(
        stack, "cpu", ("cpu", "cpu.cfs_quota_us", f"{quota}"), ("cpu", "cpu.max", f"{quota} 100000")
    )


def _add_group(
    stack: contextlib.ExitStack,
    name: str,
    first: tuple[str, str, str],
    second: tuple[str, str, str],
) -> Path:
    """Return ``cgroup.procs`` of a control group with a limit: controller, file and value.

    Args:
        stack: removes it.
        name: of the group.
        first: the limit in version 1 of control groups.
        second: in version 2, where no test has run yet.
    """
    controller, file, value = first
    parent = _GROUPS / controller
    try:
        if not parent.is_dir():
            controller, file, value = second
            parent = _GROUPS
            (parent / "cgroup.subtree_control").write_text(f"+{controller}")
        group = parent / f"vitals-{os.getpid()}-{name}"
        group.mkdir()
        stack.callback(_remove_group, group)
        (group / file).write_text(value)
    except OSError as error:
        raise VitalsError(f"cannot limit {controller} by a control group: {error}") from error
    return group / "cgroup.procs"


def _remove_group(group: Path) -> None:
    """Remove a control group; processes that still end are moved out of it."""
    for pid in (group / "cgroup.procs").read_text().split():
        with contextlib.suppress(OSError):  # it has ended
            (group.parent / "cgroup.procs").write_text(pid)
    group.rmdir()


def _run(*words: str) -> str:
    """Run a program of the system; return its output."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60)
    except subprocess.CalledProcessError as error:
        raise VitalsError(f"{' '.join(words)}: {error.stderr.strip()}") from error
    except OSError as error:
        raise VitalsError(f"{words[0]} cannot be run: {error}") from error
    return done.stdout
